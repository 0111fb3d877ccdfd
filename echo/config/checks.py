"""Rules that join several keys, each with the reason it exists.

A rule yields at most a few problems and reads only values that are valid on their own: load.py
drops the problems of a rule that read a value already reported.
"""

from __future__ import annotations

from collections.abc import Iterator

from echo.config.layers import Problem
from echo.config.leaves import leaves, show
from echo.config.losses import refusal_of
from echo.config.schema import Config, Role
from echo.units import format_bytes

BYTES_PER_TOKEN = 17
"""Id, log-probability, version and mask of one sampled token on the wire."""
MAX_GROUP_BYTES = 60 << 20
"""A little below the largest message of the transport (runtime/wiring.py)."""


def check_config(config: Config, role: Role | None) -> list[Problem]:
    """Return every broken rule.

    Args:
        config: valid key by key.
        role: whose required keys must be there; None asks for those of no role.
    """
    return [
        *_check_sync(config),
        *_check_network(config),
        *_check_group_bytes(config),
        *_check_loss(config),
        *_check_without_effect(config),
        *_check_role(config, role),
    ]


def _problem(text: str, *keys: str) -> Problem:
    return Problem(tuple(tuple(key.split(".")) for key in keys), text)


def _check_sync(config: Config) -> Iterator[Problem]:
    bound, period = config.sync.max_staleness, config.sync.publish_period
    if isinstance(period, int) and period > bound + 1:
        yield _problem(
            f"must be at most sync.max_staleness + 1 = {bound + 1}, or the run would deadlock: "
            f"{bound + 1} optimizer steps after a publication its rollouts are too old to train "
            "on, and the next version would not be out yet. Publish more often, raise "
            'sync.max_staleness, or write "auto"',
            "sync.publish_period",
            "sync.max_staleness",
        )


def _check_network(config: Config) -> Iterator[Problem]:
    network = config.network
    for key in ("dead_after_s", "lease_timeout_s"):
        if getattr(network, key) < 2 * network.heartbeat_s:
            yield _problem(
                "must be at least twice network.heartbeat_s "
                f"({network.heartbeat_s:g} s), or one late heartbeat would count as a failure",
                f"network.{key}",
                "network.heartbeat_s",
            )
    if network.window_bytes < 2 * network.chunk_bytes:
        yield _problem(
            f"must be at least twice network.chunk_bytes ({network.chunk_bytes} bytes), so that "
            "one chunk travels while another is verified",
            "network.window_bytes",
            "network.chunk_bytes",
        )


def _check_loss(config: Config) -> Iterator[Problem]:
    """Report options of [loss] that its kind would not read, and a buffer without room."""
    loss = config.loss
    for (section, name), leaf in ((path, leaf) for path, leaf in leaves().items() if path[1:]):
        if section != "loss" or getattr(loss, name) == leaf.defaults[config.profile]:
            continue
        reason = refusal_of(loss.kind, name)
        if reason is not None:
            key = f"options.{next(iter(loss.options))}" if name == "options" else name
            yield _problem(
                f"has no effect with loss.kind = {show(loss.kind)}: {reason}",
                f"loss.{key}",
                "loss.kind",
            )
    if loss.importance_floor and (loss.importance_weight or "token_tis").endswith("tis"):
        yield _problem(
            "has no effect: a truncated weight has no lower bound; use loss.importance_weight = "
            '"token_mis" or "sequence_mis"',
            "loss.importance_floor",
            "loss.importance_weight",
        )
    if loss.overlong_buffer_tokens > config.sampling.max_completion_tokens:
        yield _problem(
            "must be at most sampling.max_completion_tokens = "
            f"{config.sampling.max_completion_tokens}",
            "loss.overlong_buffer_tokens",
            "sampling.max_completion_tokens",
        )


def _check_group_bytes(config: Config) -> Iterator[Problem]:
    """Refuse groups that no message could carry, before a worker has sampled one."""
    size, tokens = config.batch.group_size, config.sampling.max_completion_tokens
    num_bytes = size * tokens * BYTES_PER_TOKEN
    if num_bytes > MAX_GROUP_BYTES:
        yield _problem(
            f"makes groups of up to {format_bytes(num_bytes)} with batch.group_size = {size}; a "
            f"group travels in one message of at most {format_bytes(MAX_GROUP_BYTES)}: at most "
            f"{MAX_GROUP_BYTES // (size * BYTES_PER_TOKEN)} tokens",
            "sampling.max_completion_tokens",
            "batch.group_size",
        )


def _check_without_effect(config: Config) -> Iterator[Problem]:
    """Report settings that nothing would read; the default is always silent."""
    is_directory = config.model.name is not None and config.model.name.startswith(("/", ".", "~"))
    no_hub = "model.name is a directory, not a hub id"
    idle = {
        "model.revision": (is_directory, no_hub, "model.name"),
        "model.cache_dir": (is_directory, no_hub, "model.name"),
        "worker.advertise": (
            config.worker.listen is None,
            "worker.listen is not set, so nobody can dial this worker",
            "worker.listen",
        ),
        "eval.num_prompts": (
            config.eval.interval_steps == 0,
            "eval.interval_steps = 0 switches the evaluation off",
            "eval.interval_steps",
        ),
        "metrics.wandb_project": (
            not config.metrics.wandb,
            "metrics.wandb is false",
            "metrics.wandb",
        ),
        "ui.refresh_per_s": (config.ui.live == "off", 'ui.live is "off"', "ui.live"),
    }
    for key, (is_idle, why, cause) in idle.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if is_idle and value != leaves()[section, name].defaults[config.profile]:
            yield _problem(f"has no effect: {why}; remove one of the two", key, cause)


def _check_role(config: Config, role: Role | None) -> Iterator[Problem]:
    if role == "learner" and config.model.name is None:
        yield _problem(
            "the learner needs it: a model directory or a hub id such as "
            '"Qwen/Qwen3-0.6B" (--set model.name=...)',
            "model.name",
        )
    if role not in ("worker", "relay"):
        return
    node = config.worker if role == "worker" else config.relay
    if not node.connect:
        yield _problem(
            f"the {role} needs at least one address of the learner or a relay, tried in order, "
            f"such as {show(['tcp://10.0.0.5:7700'])} (--set {role}.connect=tcp://10.0.0.5:7700)",
            f"{role}.connect",
        )
    for own in (node.listen, node.advertise):
        if own is not None and own in node.connect:
            yield _problem(
                f"{own} is this {role}'s own address; it would connect to itself",
                f"{role}.connect",
            )
