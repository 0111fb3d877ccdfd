"""Checks rules that compare the values of several keys. Each rule states its reason.

A value that is invalid on its own is replaced by its default before the rules read it. So load.py
drops the problems of all rules that read such a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from echo.config.fields import Role, has_secret
from echo.config.layers import Problem
from echo.config.losses import MAX_LIKELY_IDS, ClippedSection
from echo.config.schema import Config, EvalSection, kinds_of, leaves, show
from echo.core.units import format_bytes
from echo.wire.codec import BYTES_PER_BRANCH, BYTES_PER_TOKEN, MAX_ARRAY_BYTES
from echo.wire.token_sets import MAX_IDS

MAX_CURVE_CHUNK_BYTES = 1 << 20
"""Largest chunk of weights that is allowed on an encrypted link, in bytes."""
BYTES_PER_LIKELY_ID = 5
"""Largest number of bytes that a likely id and its log-probability take, in vocabularies of up to 2
million ids."""


def check_config(config: Config, role: Role | None) -> list[Problem]:
    """Return one problem for each rule that the configuration breaks."""
    return [
        *_check_most(config),
        *_check_sync(config),
        *_check_exact_version(config),
        *_check_network(config),
        *_check_security(config),
        *check_likely_ids(config, likely_ids_of(config), "loss.score_centering"),
        *_check_dual_clip(config),
        *_check_agent(config),
        *_check_without_effect(config),
        *_check_role(config, role),
    ]


def _problem(text: str, *keys: str, is_idle: bool = False) -> Problem:
    return Problem(tuple(tuple(key.split(".")) for key in keys), text, is_idle=is_idle)


def _check_most(config: Config) -> Iterator[Problem]:
    for key, bound, why in (
        ("sync.min_staleness", "sync.max_staleness", ""),
        ("batch.minibatches_per_step", "batch.groups_per_step", ": groups stay whole"),
        ("loss.overlong_buffer_tokens", "sampling.max_completion_tokens", ""),
        ("sampling.min_tokens", "sampling.max_completion_tokens", ""),
        ("sampling.min_tokens", "eval.max_completion_tokens", ""),
    ):
        most = _value(config, bound)
        if most is not None and _value(config, key) > most:
            yield _problem(f"must be at most {bound} = {most}{why}", key, bound)


def _check_sync(config: Config) -> Iterator[Problem]:
    bound, period = config.sync.max_staleness, config.sync.publish_period
    if config.sync.mode == "pull":
        text = 'with sync.mode = "pull" workers get new weights before every request'
        if bound:
            yield _problem(
                f"must be 0: {text}; remove it, or use push_pull",
                "sync.max_staleness",
                "sync.mode",
                is_idle=True,
            )
        if period not in (1, "auto"):
            yield _problem(
                f"must be 1: {text}; remove it, or use push_pull",
                "sync.publish_period",
                "sync.mode",
                is_idle=True,
            )
        return
    if isinstance(period, int) and period > bound + 1:
        yield _problem(
            f"must be at most sync.max_staleness + 1 = {bound + 1}, or the run would deadlock: "
            f"{bound + 1} optimizer steps after a publication its rollouts are too old to train "
            "on, and the next version would not be out yet. Publish more often, raise "
            'sync.max_staleness, or write "auto"',
            "sync.publish_period",
            "sync.max_staleness",
        )


def _check_exact_version(config: Config) -> Iterator[Problem]:
    rollout, key = config.rollout, "rollout.exact_version"
    if not rollout.exact_version:
        return
    if rollout.over_submission > 1:
        text = f"must be 1 with {key}: what a stop leaves unfinished would begin again each time"
        yield _problem(text, "rollout.over_submission", key)
    if config.agent.listen is not None:
        text = "cannot be with agent.listen: newer weights would wait for as long as agents like"
        yield _problem(text, key, "agent.listen")
    if rollout.stale_tokens != "keep":
        text = f"has no use with {key}, where no group has tokens of several versions"
        yield _problem(text, "rollout.stale_tokens", key, is_idle=True)


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


def _check_security(config: Config) -> Iterator[Problem]:
    network, security = config.network, config.security
    if security.curve and network.chunk_bytes > MAX_CURVE_CHUNK_BYTES:
        yield _problem(
            f"is too much with security.curve = true: encryption passes over a chunk three times, "
            f"and above {format_bytes(MAX_CURVE_CHUNK_BYTES)}, which a core's cache holds, it "
            "takes clearly more CPU; lower it to 1MiB, or switch encryption off on a "
            "network that you trust",
            "network.chunk_bytes",
            "security.curve",
        )
    connect = (*config.worker.connect, *config.relay.connect)
    if not security.curve and any(map(has_secret, connect)):
        yield _problem(
            "does not encrypt, but an address to connect to is a join string; remove one of the "
            "two",
            "security.curve",
        )


def _check_dual_clip(config: Config) -> Iterator[Problem]:
    loss = config.loss
    dual_clip = getattr(loss, "dual_clip", False)
    if not isinstance(loss, ClippedSection) or dual_clip is False:
        return
    high = math.inf if loss.clip_high is False else 1 + loss.clip_high
    if dual_clip <= high:
        yield _problem(
            f"must be above 1 + loss.clip_high = {high:g}; false switches it off",
            "loss.dual_clip",
            "loss.clip_high",
        )


def likely_ids_of(config: Config) -> int:
    """Return the number of likely ids per token that the configured loss needs.

    The needs of a custom loss are known only to the learner, which loads its code.
    """
    number: int = getattr(config.loss, "score_centering", 0)
    return number


def check_likely_ids(config: Config, likely: int, cause: str) -> Iterator[Problem]:
    """Check whether workers can send `likely` ids with each token, as the loss needs; 0 for none.

    `cause` is the key that determines the number.
    """
    if likely:
        yield from _check_whole_distributions(config, cause)
    if likely > MAX_LIKELY_IDS:
        yield _problem(
            f"needs {likely} likely ids of each token, and workers send at most {MAX_LIKELY_IDS}: "
            "lower LossNeeds.likely_ids",
            cause,
        )
    yield from _check_group_bytes(config, likely, cause)


def _check_whole_distributions(config: Config, cause: str) -> Iterator[Problem]:
    """Refuse truncated sampling, for a loss that needs likely ids.

    The loss compares the learner's and the sampler's log-probabilities of the likely ids. The
    learner normalises over the whole vocabulary. A truncated sampler normalises only over a part of
    the vocabulary.
    """
    for name, off in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("min_tokens", 0)):
        if getattr(config.sampling, name) != off:
            yield _problem(
                f"truncates what workers sample, and with {cause} = {show(_value(config, cause))} "
                "the loss compares the whole distributions of learner and sampler, by their likely "
                f"ids: write sampling.{name} = {off}, or change {cause}",
                f"sampling.{name}",
                cause,
            )


def _check_group_bytes(config: Config, likely: int, cause: str) -> Iterator[Problem]:
    """Refuse settings whose largest group does not fit into the largest message."""
    tokens, key = config.max_chain_tokens, "sampling.max_completion_tokens"
    if tokens > config.sampling.max_completion_tokens:
        key = "agent.max_session_tokens"
    size = config.batch.group_size
    bytes_per_token = BYTES_PER_TOKEN + BYTES_PER_LIKELY_ID * likely
    num_bytes = size * tokens * bytes_per_token
    if num_bytes > MAX_ARRAY_BYTES:
        beside = f" and {likely} likely ids of each token ({cause})" if likely else ""
        yield _problem(
            f"makes groups of up to {format_bytes(num_bytes)} with batch.group_size = {size}"
            f"{beside}; a group travels in one message of at most {format_bytes(MAX_ARRAY_BYTES)}: "
            f"at most {MAX_ARRAY_BYTES // (size * bytes_per_token)} tokens",
            key,
            "batch.group_size",
        )
    if likely * tokens > MAX_IDS:
        yield _problem(
            f"makes rollouts of up to {likely * tokens} likely ids, {likely} of each token "
            f"({cause}); a rollout has at most {MAX_IDS}: at most {MAX_IDS // likely} tokens",
            key,
            cause,
        )


def max_tree_tokens(config: Config, likely: int) -> int | None:
    """Return the largest number of tokens that all chains of an agent's rollout may have together.

    A rollout must fit into one micro-batch, and its group into one message. If likely ids are sent
    with each token, `likely` in number, a rollout may have at most MAX_IDS of them. A conversation
    with `agent.max_session_tokens` is allowed in any case. Without agents, the result is None.
    """
    if config.agent.listen is None:
        return None
    bytes_per_token = BYTES_PER_TOKEN + BYTES_PER_LIKELY_ID * likely
    most = MAX_ARRAY_BYTES // (config.batch.group_size * (bytes_per_token + BYTES_PER_BRANCH))
    most = min(most, MAX_IDS // likely) if likely else most
    return max(config.agent.max_session_tokens, min(config.learner.micro_batch_tokens, most))


def _check_agent(config: Config) -> Iterator[Problem]:
    if config.agent.listen is not None and config.loss.overlong_buffer_tokens:
        yield _problem(
            "has no meaning for conversations of agents, where the limit on one answer is not the "
            "limit on a rollout; remove it",
            "loss.overlong_buffer_tokens",
            "agent.listen",
        )
    if config.agent.listen is not None and config.reward.where == "learner":
        yield _problem(
            "cannot be with agent.listen: agents are rewarded where they are served; remove one of "
            "the two",
            "reward.where",
            "agent.listen",
        )


def _dependent_keys(config: Config) -> tuple[tuple[str, bool, str, str], ...]:
    """Return the keys that have an effect only with certain values of another key.

    Each tuple has the key, whether the key has no effect in `config`, the reason, and the other
    key.
    """
    is_directory = config.model.name is not None and config.model.name.startswith(("/", ".", "~"))
    no_pull = (config.reference.kl_coef == 0, "reference.kl_coef = 0", "reference.kl_coef")
    no_agent = (config.agent.listen is None, "agent.listen is not set", "agent.listen")
    no_lora = (config.lora.rank == 0, "lora.rank = 0", "lora.rank")
    is_free = config.activation.mode == "off"
    no_eval = (
        config.eval.interval_steps == 0,
        "eval.interval_steps = 0 switches the evaluation off",
        "eval.interval_steps",
    )
    no_choice = (is_free, 'activation.mode = "off"', "activation.mode")
    return (
        (
            "rollout.over_submission",
            config.sync.max_staleness == 0,
            "with sync.max_staleness = 0 what the stop leaves unfinished is too old for a step",
            "sync.max_staleness",
        ),
        ("sync.min_staleness", not config.sync.adaptive, "sync.adaptive is false", "sync.adaptive"),
        ("agent.max_session_tokens", *no_agent),
        ("lora.alpha", *no_lora),
        ("lora.target_modules", *no_lora),
        ("activation.margin", *no_choice),
        ("activation.budget_per_h", *no_choice),
        (
            "activation.budget_per_h",
            not is_free and config.sync.mode == "pull",
            'with sync.mode = "pull" the learner waits for the batch of every worker',
            "sync.mode",
        ),
        ("reference.name", *no_pull),
        ("reference.kl_estimator", *no_pull),
        ("model.revision", is_directory, "model.name is a directory, not a hub id", "model.name"),
        (
            "worker.advertise",
            config.worker.listen is None,
            "worker.listen is not set, so no node can dial this worker",
            "worker.listen",
        ),
        (
            "worker.losses_per_h",
            config.worker.price_per_h is None,
            "worker.price_per_h is not set",
            "worker.price_per_h",
        ),
        *((f"eval.{n}", *no_eval) for n in EvalSection.model_fields if n != "interval_steps"),
        (
            "alerts.max_rollbacks",
            config.alerts.on_divergence != "rollback",
            f"alerts.on_divergence = {show(config.alerts.on_divergence)}",
            "alerts.on_divergence",
        ),
        (
            "metrics.project",
            not {"trackio", "wandb"} & set(config.metrics.sinks),
            'metrics.sinks has neither "wandb" nor "trackio"',
            "metrics.sinks",
        ),
    )


def _check_without_effect(config: Config) -> Iterator[Problem]:
    """Report settings that were changed from the default but have no effect."""
    known = leaves(kinds_of(config))
    for key, is_idle, why, cause in _dependent_keys(config):
        default = known[tuple(key.split("."))].defaults[config.profile]
        if is_idle and _value(config, key) != default:
            text = f"has no effect: {why}; remove one of the two"
            yield _problem(text, key, cause, is_idle=True)


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _check_role(config: Config, role: Role | None) -> Iterator[Problem]:
    if role == "learner" and config.model.name is None:
        yield _problem(
            "the learner needs it: a model directory or a hub id such as "
            '"Qwen/Qwen3-0.6B" (--set model.name=...)',
            "model.name",
        )
    if role == "learner" and config.batch.group_size < 2:
        # A worker is given groups of one rollout by an evaluation.
        yield _problem("must be at least 2: the advantage compares rollouts", "batch.group_size")
    if role not in ("worker", "relay"):
        return
    node = config.worker if role == "worker" else config.relay
    security = config.security
    has_join = security.curve and security.join is not None
    if not node.connect and not has_join:
        yield _problem(
            f"the {role} needs at least one address of the learner or a relay, tried in order, "
            f"such as {show(['tcp://10.0.0.5:7700'])} (--set {role}.connect=tcp://10.0.0.5:7700), "
            "or the join string of the run in the environment's ECHO_JOIN; beside the learner, in "
            "its directory, neither is needed once it has started",
            f"{role}.connect",
        )
    for own in (node.listen, node.advertise):
        if own is not None and own in [address.partition("#")[0] for address in node.connect]:
            yield _problem(
                f"{own} is this {role}'s own address; it would connect to itself",
                f"{role}.connect",
            )
