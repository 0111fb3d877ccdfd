"""Set up a worker from its own configuration and the learner's settings."""

from __future__ import annotations

import asyncio
import bisect
import datetime
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from echo.config.load import apply_inherited, check_inherited, has_own_model
from echo.config.schema import Config, VllmSection
from echo.core.errors import ConfigError, EngineError, StorageError
from echo.core.rollout import MAX_UNACKED_GROUPS
from echo.engine.engine import Demand, Engine, Sampling
from echo.engine.hf.engine import TransformersEngine
from echo.engine.lora import Lora, find_base, make_lora
from echo.engine.model import (
    build_shapes,
    check_weight_files,
    context_window,
    load_directory,
    make_sampling,
    model_digests,
    pick_device,
    resolve_model,
    vocab_size,
    with_cpu_dtype,
    write_model_files,
)
from echo.engine.vllm.arguments import Process
from echo.engine.weights import publish_image
from echo.leases.partials import PartialRules
from echo.leases.worker.outbox import Outbox
from echo.net.transport import Transport
from echo.roles.joining import EXPECTED, LIKELY_IDS, MAX_TREE_TOKENS
from echo.roles.worker.worker import Worker
from echo.runtime import node as wiring
from echo.runtime.agents.agents import AgentParts
from echo.runtime.agents.dialogue import Dialogue
from echo.runtime.disk_store import open_store
from echo.runtime.episodes import check_inherited_code, make_local_host, make_runner, turns_of
from echo.runtime.identity import JoinSource
from echo.runtime.threads import Threads
from echo.runtime.worker.node import WorkerNode, WorkerParts
from echo.runtime.worker.release import terms_of
from echo.tasks import tokenization
from echo.tasks.rewards import LaterHost, TaskHost
from echo.tasks.task import Example, load_task, task_digests
from echo.weights.manifest import hash_image


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """The parts of a task that a worker needs."""

    host: TaskHost
    turns: Callable[[Example], int] | None
    """Function: an example -> the largest number of turns in its episodes; None if the task has no
    episodes."""
    digests: dict[str, str]
    """Hashes of the task's code and data on this node, by name."""


def make_worker_task(config: Config) -> WorkerTask:
    """Return the host, the limit on turns and the hashes of a worker's task.

    Raises:
        ConfigError: if the task cannot be loaded.
    """
    if config.reward.where == "learner":
        return WorkerTask(LaterHost(), None, {})
    task = load_task(config.task.kind, config.task.options)
    host, turns = make_local_host(config.task, config.reward, task), turns_of(config.task, task)
    return WorkerTask(host, turns, task_digests(task))


DEFAULT_MAX_CONCURRENT_ROLLOUTS = 256
"""Default for the largest number of rollouts that are sampled at the same time.

More rollouts would hardly increase the speed, even if they fit into memory.
"""


def join_source(config: Config) -> JoinSource:
    """Return the settings from which a worker finds the learner's address and keys."""
    return JoinSource("worker", config.worker.connect, config.security, config.run_dir)


async def build_worker(config: Config, *, log: logging.Logger) -> WorkerNode:
    """Return a worker that is ready to run. The worker listens if worker.listen is set.

    Raises:
        EchoError: if the worker cannot start. The message is for the user.
    """
    join = join_source(config)
    keys = join.keys()
    import_engine(config, log=log)  # before strangers' connections can use up file descriptors
    transport = await wiring.start_transport(
        config.network, config.worker.listen, keys, listens_later=True
    )
    listen, profile = config.worker.listen, config.profile
    wiring.warn_of_kernel(listen, *join.addresses(), profile=profile, log=log)
    try:
        worker = assemble_worker(config, transport, log=log)
        # Only after its files are open: strangers' connections could use up the file descriptors.
        transport.listen()
    except BaseException:
        await transport.close()
        raise
    return worker


def assemble_worker(
    config: Config,
    transport: Transport,
    *,
    threads: Threads | None = None,
    log: logging.Logger,
) -> WorkerNode:
    """Return a worker on a started transport. The port is not opened."""
    network = config.network
    if config.model.name is not None and not has_own_model(config):
        log.info(
            "model.name = %r is the learner's, from whom this worker takes configuration, "
            "tokenizer and weights; --set model.name=... names a copy of its own",
            config.model.name,
        )
    listen, join = transport.listen_address, join_source(config)
    settings = wiring.node_settings(config.worker, network, join, listen, log=log)
    version_store = open_store(network.store_dir, network.store_bytes)
    now = asyncio.get_running_loop().time()
    retry_s = max(2.0, 2 * network.heartbeat_s)
    role = Worker(
        settings,
        wiring.make_broadcast(settings.node_id, network, version_store),
        Outbox(max_deliveries=MAX_UNACKED_GROUPS, retry_s=retry_s),
        terms=terms_of(config.worker, network),
        now=now,
    )
    node_dir = wiring.worker_dir(config.run_dir, settings.node_id)
    try:
        node_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {node_dir}: {error}; set run.dir elsewhere") from error
    return WorkerNode(
        role,
        transport,
        build=partial(build_parts, config, node_dir),
        on_release=config.worker.on_release,
        version_store=version_store,
        threads=threads,
        log=log,
    )


def build_parts(
    config: Config,
    node_dir: Path,
    settings: Mapping[str, Any],
    assets: Mapping[str, bytes],
) -> WorkerParts:
    """Build a worker's parts from its configuration and the inherited settings.

    The inherited files `assets` are written into `node_dir`.

    Raises:
        ConfigError: if the worker's own settings contradict the learner's.
    """
    config = inherit(config, settings, node_dir)
    model_dir = own_model(config) or write_model_files(node_dir / "model", assets)
    template: str | None = settings.get("model.chat_template")
    tokenizer = tokenization.load_tokenizer(model_dir, chat_template=template)
    stop_ids = tokenization.stop_ids(tokenizer, model_dir)
    text = tokenization.TextCodec(
        tokenizer, stop_ids, config.model.chat_template_kwargs, vocab_size(model_dir),
        datetime.datetime.now().astimezone(),
    )  # fmt: skip
    task = make_worker_task(config)
    lora = worker_lora(config, settings)
    section, note = with_cpu_dtype(config.worker, model_dir if lora is None else lora.base_dir)
    config = config.model_copy(update={"worker": section})
    demand = make_demand(config, settings.get(EXPECTED, {}))
    engine = make_engine(config, model_dir, lora, demand)
    window = min(context_window(model_dir), engine.window or sys.maxsize)
    capacity = make_capacity(config, engine, demand, window=window)
    sampling = make_sampling(config.sampling, text, likely_ids=settings.get(LIKELY_IDS, 0))
    return WorkerParts(
        engine=engine,
        host=task.host,
        runner=make_runner(task.turns, task.host, engine, text),
        decode=text.decode,
        sampling=sampling,
        group_size=config.batch.group_size,
        max_prompt_tokens=capacity.max_prompt_tokens,
        prompt_bound=capacity.prompt_bound,
        groups_per_batch=capacity.groups_per_batch,
        num_fit=capacity.num_fit,
        note=note,
        rules=make_rules(config),
        partials_path=node_dir / "partials.bin",
        installed_path=node_dir / "installed.jsonl",
        read_local_image=lambda: read_local_image(config),
        agents=_agent_parts(
            config, settings, text, task, node_dir, sampling=sampling, window=window
        ),
        digests=model_digests(config.model, model_dir, template) | task.digests,
        engine_name=f"{config.engine.kind} {engine_dtype(config)}",
    )


def own_model(config: Config) -> Path | None:
    """Return the directory of the worker's own model; None if the worker has none.

    Raises:
        DataError: if the configured directory cannot be found.
    """
    name = config.model.name
    if name is None or not has_own_model(config):
        return None
    return resolve_model(name, config.model.revision)


def worker_lora(config: Config, settings: Mapping[str, Any]) -> Lora | None:
    """Return the shape and the base model of a worker's adapter; None if it has no adapter.

    Raises:
        ConfigError: if no base model on this machine has the learner's hash.
    """
    if not config.lora.rank:
        return None
    base_dir = find_base(config.model, settings)
    return make_lora(config.lora, base_dir, num_versions=config.sync.max_staleness + 1)


def make_demand(config: Config, expected: Mapping[str, int]) -> Demand:
    """Return the number and length of rollouts that a worker's memory must hold.

    Args:
        config: the worker's configuration, with the inherited settings.
        expected: the learner's settings under `EXPECTED`: "prompt_tokens" is the length of the
            longest prompt, and "rollouts" is the number of rollouts.
    """
    # Twice the longest prompt that the learner has tokenized so far: later prompts may be longer.
    prompt_tokens = 2 * expected["prompt_tokens"] if expected else 1024
    num_tokens = prompt_tokens + config.sampling.max_completion_tokens
    if config.agent.listen is not None:
        num_tokens = max(num_tokens, config.agent.max_session_tokens)
    most = config.worker.max_concurrent_rollouts or DEFAULT_MAX_CONCURRENT_ROLLOUTS
    return Demand(
        num_rollouts=min(most, expected.get("rollouts", most)),
        prompt_tokens=prompt_tokens,
        rollout_tokens=num_tokens,
    )


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of a worker: its longest prompt, and its number of concurrent groups."""

    max_prompt_tokens: int
    prompt_bound: str
    groups_per_batch: int
    num_fit: int
    """Number of groups that fit into memory at the same time."""


def make_capacity(config: Config, engine: Engine, demand: Demand, *, window: int) -> Capacity:
    """Return the capacity of a worker's engine. `window` is the model's window in tokens."""
    max_new, group_size = config.sampling.max_completion_tokens, config.batch.group_size
    in_window = max(1, window - max_new)
    in_memory = longest_prompt(engine, in_window, max_new)
    prompt_tokens = min(in_window, demand.prompt_tokens)
    num_rollouts = min(
        engine.max_concurrent_rollouts(prompt_tokens, max_new),
        config.worker.max_concurrent_rollouts or DEFAULT_MAX_CONCURRENT_ROLLOUTS,
    )
    return Capacity(
        max_prompt_tokens=in_memory,
        prompt_bound="the model's window" if in_memory == in_window else "this worker's memory",
        groups_per_batch=max(1, num_rollouts // group_size),
        num_fit=engine.rollouts_in_memory(prompt_tokens, max_new) // group_size,
    )


def longest_prompt(engine: Engine, most: int, max_completion_tokens: int) -> int:
    """Return the length of the longest prompt, at most `most`, whose rollout fits into memory."""

    def is_too_long(num_tokens: int) -> bool:
        try:
            engine.max_concurrent_rollouts(num_tokens, max_completion_tokens)
        except EngineError:
            return True
        return False

    return bisect.bisect_left(range(1, most + 1), True, key=is_too_long)


def inherit(config: Config, settings: Mapping[str, Any], node_dir: Path) -> Config:
    """Return a worker's configuration with the learner's settings applied.

    Raises:
        ConfigError: if the worker's own settings contradict the learner's.
    """
    contradictions = check_inherited(config, settings)
    if contradictions:
        raise ConfigError("\n  ".join(["the learner's settings differ:", *contradictions]))
    config = apply_inherited(config, settings)
    # Check before a file is written or a module is imported.
    check_inherited_code(config.task, config.reward, settings, inherited_dir=node_dir)
    return config


def _agent_parts(
    config: Config,
    settings: Mapping[str, Any],
    text: tokenization.TextCodec,
    task: WorkerTask,
    node_dir: Path,
    *,
    sampling: Sampling,
    window: int,
) -> AgentParts | None:
    """Return the parts for serving outside agents; None if the run has no agents."""
    listen = config.agent.listen
    if listen is None:
        return None
    return AgentParts(
        dialogue=Dialogue(text),
        sampling=sampling,
        group_size=config.batch.group_size,
        window=window,
        max_session_tokens=config.agent.max_session_tokens,
        max_rollout_tokens=settings[MAX_TREE_TOKENS],
        session_timeout_s=config.agent.session_timeout_s,
        model_name=config.run.name,
        listen=listen,
        endpoint_path=node_dir / "endpoint.json",
        reward=task.host.score,
        max_abs_reward=config.task.max_reward,
    )


def make_rules(config: Config) -> PartialRules:
    """Return the configured rules for unfinished rollouts."""
    rollout = config.rollout
    return PartialRules(
        over_submission=rollout.over_submission,
        stale_tokens=rollout.stale_tokens,
        one_version=rollout.exact_version,
        max_age=config.sync.max_staleness,
        ship_s=rollout.partial_ship_s,
    )


def import_engine(config: Config, *, log: logging.Logger) -> None:
    """Import the code of the engine and of the worker's own model.

    Importing vLLM is slow. The code of an inherited model is imported later, when the model is
    known.
    """
    model_dir = own_model(config)
    if model_dir is not None:
        check_own_model(config, model_dir)
        if not has_weight_files(model_dir):
            log.info("%s holds no safetensors: the learner sends all weights", model_dir)
    if isinstance(config.engine, VllmSection):
        from echo.engine.vllm.arguments import import_vllm

        section = config.worker
        if "vllm" not in sys.modules:
            log.info("importing vLLM, which takes 10 to 40 s")
        import_vllm(
            is_cpu=pick_device(section.device) == "cpu",
            passed=config.engine.options,
            num_threads=section.num_threads,
        )


def engine_dtype(config: Config) -> str:
    """Return the name of the data type in which a worker's engine computes."""
    section = config.worker
    if section.dtype != "auto":
        return section.dtype
    return "bfloat16" if pick_device(section.device).startswith("cuda") else "float32"


def check_own_model(config: Config, model_dir: Path) -> None:
    """Check that a worker can use its own copy of the model.

    The check imports the model's code, and reads the copy's config.json, tokenizer, and headers of
    weight files. A directory without weight files is valid, because the learner sends the weights.

    Raises:
        EchoError: if the worker cannot use the copy.
    """
    is_vllm = isinstance(config.engine, VllmSection)
    model = build_shapes(model_dir, "auto" if is_vllm else config.model.attn_implementation)
    tokenization.load_tokenizer(model_dir)
    if has_weight_files(model_dir):
        check_weight_files(model_dir, model)


def has_weight_files(model_dir: Path) -> bool:
    """Return whether a directory contains safetensors files or an index of them."""
    return any(model_dir.glob("*.safetensors*"))


def make_engine(
    config: Config, model_dir: Path, lora: Lora | None = None, demand: Demand | None = None
) -> Engine:
    """Return a worker's engine. The engine loads adapters if `lora` is given, else all weights.

    `demand` is the number and length of rollouts for which the engine plans its memory.
    """
    section, how = config.worker, config.engine
    device = pick_device(section.device)
    is_gpu = device.startswith("cuda")
    dtype = engine_dtype(config)
    if isinstance(how, VllmSection):
        # Imported here because vLLM may not be installed.
        from echo.engine.vllm.engine import VllmEngine

        by_device: Process = "engine" if is_gpu else "inline"
        return VllmEngine(
            model_dir,
            device=device,
            dtype=dtype,
            process=by_device if how.process == "auto" else how.process,
            kv_cache=how.kv_cache,
            arguments=how.options,
            num_threads=section.num_threads,
            lora=lora,
            demand=demand,
        )
    return TransformersEngine(
        model_dir,
        device=device,
        dtype=dtype,
        attn_implementation=config.model.attn_implementation,
        num_threads=section.num_threads,
        kv_cache=how.kv_cache,
        lora=lora,
    )


def read_local_image(config: Config) -> tuple[bytearray, bytes] | None:
    """Return the worker's own model as a version's image, and the hash of the image.

    If the first announced version has this hash, the worker need not fetch the version. The result
    is None if the worker has no weights, or if the learner publishes an adapter.
    """
    model_dir = None if config.lora.rank else own_model(config)
    if model_dir is None:
        return None
    if not has_weight_files(model_dir):
        return None
    _, image = publish_image(load_directory(model_dir, config.model.dtype), config.model.dtype)
    return image, hash_image(image, config.network.chunk_bytes)
