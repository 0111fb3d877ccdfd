"""From the configuration, and what the learner adds to it, to a worker."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3

from echo.config.inherit import apply_inherited, check_inherited
from echo.config.load import keys_set_by_user
from echo.config.machine import read_machine
from echo.config.schema import Config
from echo.engine.device import pick_device
from echo.engine.engine import Engine, Sampling
from echo.engine.transformers_engine import TransformersEngine
from echo.engine.weights import load_directory, publish_image, resolve_model
from echo.errors import ConfigError, StorageError
from echo.protocol.delivery import Outbox
from echo.protocol.worker_session import WorkerSession
from echo.rollout import PolicyVersion
from echo.runtime import wiring
from echo.runtime.faults import Faults
from echo.runtime.transport import Transport
from echo.runtime.worker import WorkerNode, WorkerParts
from echo.tasks import tokenization
from echo.tasks.loading import load_task, task_digests

DEFAULT_MAX_CONCURRENT_ROLLOUTS = 256
"""Rollouts sampled at once where memory would hold more: beyond, a CPU or GPU gains little."""


async def build_worker(config: Config, *, log: logging.Logger) -> WorkerNode:
    """Return a worker that is ready to run, listening already if it listens at all.

    Raises:
        EchoError: if something does not fit; the message is for the user.
    """
    transport = await wiring.start_transport(config.network, config.worker.listen)
    try:
        return assemble_worker(config, transport, log=log)
    except BaseException:
        await transport.close()
        raise


def assemble_worker(config: Config, transport: Transport, *, log: logging.Logger) -> WorkerNode:
    """Join a worker on a transport that has been started; otherwise as `build_worker`."""
    Faults(config.faults.kill_at, role="worker")
    section, network = config.worker, config.network
    node_id = wiring.node_name("worker", section.name)
    settings = wiring.node_settings(
        config,
        "worker",
        node_id=node_id,
        advertise=wiring.advertised(transport.listen_address, section.advertise),
        max_image_bytes=int(wiring.MAX_IMAGE_SHARE * read_machine().host_bytes),
    )
    session = WorkerSession(
        settings,
        wiring.make_broadcast(node_id, network),
        Outbox(max_parcels=network.max_unacked_groups, retry_s=max(2.0, 2 * network.heartbeat_s)),
        now=asyncio.get_running_loop().time(),
    )
    node_dir = config.run_dir / "workers" / node_id
    try:
        node_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {node_dir}: {error}; set run.dir elsewhere") from error
    return WorkerNode(
        session,
        transport,
        build=partial(build_parts, config, node_dir / "model"),
        on_installed=partial(record_installed, node_dir / "installed.jsonl"),
        log=log,
    )


def build_parts(
    config: Config, asset_dir: Path, settings: Mapping[str, Any], assets: Mapping[str, bytes]
) -> WorkerParts:
    """Build task and engine from the worker's own configuration and the learner's settings.

    Args:
        config: the worker's configuration.
        asset_dir: where inherited files are put, if the worker names no model of its own.
        settings: what the learner decides for all workers.
        assets: files of the model that are not weights.

    Raises:
        ConfigError: if the worker's own settings contradict the learner's.
    """
    contradictions = check_inherited(config, keys_set_by_user(config), settings)
    if contradictions:
        raise ConfigError("\n  ".join(["the learner's settings differ:", *contradictions]))
    config = apply_inherited(config, settings)
    model_dir = _model_directory(config, asset_dir, assets)
    template: str | None = settings.get("model.chat_template")
    tokenizer = tokenization.load_tokenizer(model_dir, chat_template=template)
    stop_ids = tokenization.stop_ids(tokenizer, model_dir)
    task = load_task(config.task.kind, config.task.options)
    engine = make_engine(config, model_dir)
    max_new = config.sampling.max_completion_tokens
    window = context_window(model_dir)
    prompt_tokens = min(max(1, window - max_new), 1024)
    num_rollouts = min(
        engine.max_concurrent_rollouts(prompt_tokens, max_new),
        config.worker.max_concurrent_rollouts or DEFAULT_MAX_CONCURRENT_ROLLOUTS,
    )
    return WorkerParts(
        engine=engine,
        task=task,
        decode=lambda ids: tokenization.decode(tokenizer, ids, stop_ids),
        sampling=make_sampling(config, stop_ids),
        group_size=config.batch.group_size,
        reward_timeout_s=config.task.reward_timeout_s,
        max_prompt_tokens=max(1, window - max_new),
        groups_per_batch=max(1, num_rollouts // config.batch.group_size),
        read_local_image=lambda: read_local_image(config),
        digests=model_digests(config, model_dir, template) | task_digests(task),
    )


def make_engine(config: Config, model_dir: Path) -> Engine:
    """Return the rollout engine of a worker."""
    section = config.worker
    device = pick_device(section.device)
    is_gpu = device.startswith("cuda")
    dtype = ("bfloat16" if is_gpu else "float32") if section.dtype == "auto" else section.dtype
    return TransformersEngine(
        model_dir,
        device=device,
        dtype=dtype,
        memory_budget_bytes=section.memory_budget_bytes,
        attn_implementation=config.model.attn_implementation,
        num_threads=section.num_threads,
    )


def make_sampling(config: Config, stop_ids: list[int]) -> Sampling:
    """Return how rollouts are sampled."""
    sampling = config.sampling
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_completion_tokens=sampling.max_completion_tokens,
        stop_ids=tuple(stop_ids),
    )


def model_digests(config: Config, model_dir: Path, chat_template: str | None) -> dict[str, str]:
    """Return the hashes that must be equal on learner and worker."""
    kwargs = config.model.chat_template_kwargs
    digests = tokenization.tokenizer_digests(model_dir, kwargs, chat_template=chat_template)
    return {"model": model_digest(model_dir), **digests}


def model_digest(model_dir: Path) -> str:
    """Hash the model's configuration by content, without what only tells where it came from."""
    fields = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        fields.pop(name, None)
    return blake3(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def context_window(model_dir: Path) -> int:
    """Return the longest sequence that the model takes, in tokens."""
    fields = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    fields = {**fields, **fields.get("text_config", {})}
    return int(fields.get("max_position_embeddings", 1 << 20))


def record_installed(path: Path, version: PolicyVersion, image_hash: str) -> None:
    """Append which bytes are installed, so that anyone can compare them with the published ones."""
    record = {"version": [version.lineage, version.step], "image_hash": image_hash}
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}; free some disk space") from error


def read_local_image(config: Config) -> bytearray | None:
    """Return the weights of the worker's own model as the learner would publish them.

    They are used if they are, by hash, the first version that is announced; None if the worker
    names no model or has only its configuration.
    """
    if config.model.name is None:
        return None
    model_dir = resolve_model(config.model.name, config.model.revision, config.model.cache_dir)
    if not any(model_dir.glob("*.safetensors")):
        return None
    return publish_image(load_directory(model_dir, config.model.dtype), config.model.dtype)[1]


def _model_directory(config: Config, asset_dir: Path, assets: Mapping[str, bytes]) -> Path:
    """Return the worker's own model directory, or one made of the inherited files."""
    if config.model.name is not None:
        return resolve_model(config.model.name, config.model.revision, config.model.cache_dir)
    asset_dir.mkdir(parents=True, exist_ok=True)
    for name, data in assets.items():
        (asset_dir / name).write_bytes(data)
    return asset_dir
