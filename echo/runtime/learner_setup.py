"""From the configuration to a learner, at the start of a run or after a crash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from echo.buffer import StalenessBuffer
from echo.config.inherit import inherited_settings
from echo.config.load import save_resolved
from echo.config.losses import advantage_options, loss_options
from echo.config.schema import Config
from echo.engine.custom_loss import load_loss
from echo.engine.device import pick_device, set_num_threads
from echo.engine.trainer import OptimizerSettings, Trainer
from echo.engine.trainer_batch import AdvantageSettings
from echo.engine.transformers_engine import TransformersEngine
from echo.engine.weights import (
    Weights,
    load_directory,
    save_hf,
    tensors_from_image,
    torch_dtype,
)
from echo.errors import DataError
from echo.metrics import Snapshot
from echo.protocol.learner_session import LearnerSession, LearnerSettings
from echo.protocol.leases import LeaseBook
from echo.protocol.manifest import Manifest
from echo.protocol.messages import LEARNER_ID
from echo.runtime import wiring
from echo.runtime.checkpoint import Checkpoints
from echo.runtime.data_plane import Data, load_data
from echo.runtime.evaluation import Evaluations, Evaluator
from echo.runtime.faults import Faults
from echo.runtime.identity import Identity, load_or_create_identity
from echo.runtime.learner import LearnerNode, LearnerPlan
from echo.runtime.ledger import Ledger
from echo.runtime.progress import Progress
from echo.runtime.publication import PublishPace, make_publication
from echo.runtime.recovery import StartingPoint, begin, enter, recover
from echo.runtime.transport import Transport
from echo.runtime.worker_setup import (
    context_window,
    make_sampling,
)
from echo.tasks import tokenization

LOST_WORKER = "(before the restart)"
"""Holder of leases that were out when the learner died, until their worker claims them."""


async def build_learner(
    config: Config,
    *,
    resume: bool,
    write_metrics: Callable[[int, Mapping[str, float | Mapping[str, float]]], None],
    show: Callable[[Snapshot], None],
    log: logging.Logger,
) -> LearnerNode:
    """Return a learner that is ready to run, listening already.

    Args:
        config: the whole configuration.
        resume: continue the run in the run directory, in a new lineage.
        write_metrics: appends one row of metrics.
        show: draws a snapshot.
        log: where to tell what happens.

    Raises:
        EchoError: if something is missing or does not fit; the message is for the user.
    """
    data = load_data(config)
    # Bound before anything is written: a port that is taken must not open a lineage.
    transport = await wiring.start_transport(config.network, config.learner.listen)
    try:
        return assemble_learner(
            config,
            data,
            transport,
            resume=resume,
            write_metrics=write_metrics,
            show=show,
            log=log,
        )
    except BaseException:
        await transport.close()
        raise


def assemble_learner(
    config: Config,
    data: Data,
    transport: Transport,
    *,
    resume: bool,
    write_metrics: Callable[[int, Mapping[str, float | Mapping[str, float]]], None],
    show: Callable[[Snapshot], None],
    log: logging.Logger,
) -> LearnerNode:
    """Join a learner on a transport that has been started; otherwise as `build_learner`."""
    faults = Faults(config.faults.kill_at, role="learner")
    evaluations = build_evaluations(config, data, log=log)
    run_dir = config.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    identity = load_or_create_identity(run_dir, run_name=config.run.name)
    now = asyncio.get_running_loop().time()
    with ExitStack() as on_failure:
        ledger = Ledger(run_dir, spool_bytes=config.limits.spool_bytes)
        on_failure.callback(ledger.close)
        start = find_start(config, ledger, identity, resume=resume, log=log)
        trainer = build_trainer(config, data.model_dir, start)
        buffer = StalenessBuffer(max_staleness=config.sync.max_staleness, lineages=start.lineages)
        for group in start.buffered:
            buffer.put(group)
        advertise = wiring.advertised(transport.listen_address, config.learner.advertise) or ""
        if not advertise:
            log.warning(
                "learner.listen is a wildcard and learner.advertise is not set: workers that reach "
                "this learner through a relay cannot find it when the relay dies"
            )
        session = build_session(config, identity, data, start, buffer, advertise)
        save_resolved(config, run_dir / "config.json")
        enter(ledger, start)
        on_failure.pop_all()
    return LearnerNode(
        session,
        transport,
        plan=_make_plan(config),
        buffer=buffer,
        trainer=trainer,
        ledger=ledger,
        checkpoints=Checkpoints(
            run_dir / "checkpoints",
            run_id=identity.run_id,
            interval_steps=config.checkpoint.interval_steps,
            interval_s=config.checkpoint.interval_s,
            keep_last=config.checkpoint.keep_last,
            min_free_bytes=config.limits.min_free_disk_bytes,
            saved_step=None if start.checkpoint is None else start.step,
            now=now,
        ),
        pace=PublishPace(
            period=config.sync.initial_publish_period,
            is_auto=config.sync.publish_period == "auto",
            max_staleness=config.sync.max_staleness,
        ),
        progress=Progress(staleness_tokens=start.staleness_tokens, now=now),
        evaluations=evaluations,
        publish=partial(
            make_publication,
            run_id=identity.run_id,
            model_digest=data.digests["model"],
            dtype=config.model.dtype,
            chunk_bytes=config.network.chunk_bytes,
            key=identity.key,
        ),
        tensors_of=_tensors_of,
        export=partial(_export, data.model_dir, config.model.dtype),
        write_metrics=write_metrics,
        show=show,
        faults=faults,
        log=log,
    )


def find_start(
    config: Config, ledger: Ledger, identity: Identity, *, resume: bool, log: logging.Logger
) -> StartingPoint:
    """Return where the learner starts: a new run, or where a killed one can go on."""
    if not resume:
        return begin(ledger)
    start = recover(ledger, run_id=identity.run_id, max_staleness=config.sync.max_staleness)
    log.info(
        "resuming at step %d in lineage %d: %d groups buffered, %d leased, %d discarded",
        start.step, start.lineage, len(start.buffered), len(start.open_attempts), len(start.ends),
    )  # fmt: skip
    for loss in start.losses:
        log.warning("lost: %s", loss)
    return start


def build_trainer(config: Config, model_dir: Path, start: StartingPoint) -> Trainer:
    """Return the trainer at the starting point."""
    learner, optimizer, loss = config.learner, config.optimizer, config.loss
    max_tokens = config.sampling.max_completion_tokens
    set_num_threads(learner.num_threads)
    tensors = None
    if learner.init_from is not None and start.checkpoint is None:
        tensors = load_directory(Path(learner.init_from).expanduser(), "float32")
    trainer = Trainer(
        model_dir,
        loss=load_loss(
            loss.kind, loss_options(loss.model_dump(), max_completion_tokens=max_tokens)
        ),
        optimizer=OptimizerSettings(
            learning_rate=optimizer.learning_rate,
            warmup_steps=optimizer.warmup_steps,
            weight_decay=optimizer.weight_decay,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            max_grad_norm=optimizer.max_grad_norm,
        ),
        temperature=config.sampling.temperature,
        advantages=AdvantageSettings(
            **advantage_options(loss.model_dump(), max_completion_tokens=max_tokens)
        ),
        device=pick_device(learner.device),
        init_tensors=tensors,
        micro_batch_tokens=learner.micro_batch_tokens,
        vocab_chunk=learner.vocab_chunk,
        gradient_checkpointing=learner.gradient_checkpointing,
        attn_implementation=config.model.attn_implementation,
        seed=config.run.seed,
    )
    if start.checkpoint is not None:
        trainer.load_state(start.checkpoint)
    return trainer


def build_session(
    config: Config,
    identity: Identity,
    data: Data,
    start: StartingPoint,
    buffer: StalenessBuffer,
    advertise: str,
) -> LearnerSession:
    """Return the learner's session with its leases as they were."""
    network, sync = config.network, config.sync
    leases = LeaseBook(timeout_s=network.lease_timeout_s)
    now = asyncio.get_running_loop().time()
    for group_id, num_attempts in sorted(start.open_attempts.items()):
        leases.adopt(group_id, num_attempts - 1, LOST_WORKER, now=now)
    return LearnerSession(
        LearnerSettings(
            run_id=identity.run_id,
            public_key=identity.public_key,
            advertise=advertise,
            max_staleness=sync.max_staleness,
            groups_per_step=config.batch.groups_per_step,
            group_size=config.batch.group_size,
            max_completion_tokens=config.sampling.max_completion_tokens,
            vocab_size=data.vocab_size,
            heartbeat_s=network.heartbeat_s,
            dead_after_s=network.dead_after_s,
            settings=inherited_settings(config),
            assets=data.read_assets(),
            digests=data.digests,
        ),
        broadcast=wiring.make_broadcast(LEARNER_ID, network),
        buffer=buffer,
        leases=leases,
        make_lease=data.prompts.lease,
        lineages=start.lineages,
        step=start.step,
        next_group_id=start.next_group_id,
        settled=start.settled,
    )


def build_evaluations(config: Config, data: Data, *, log: logging.Logger) -> Evaluations | None:
    """Return the held-out evaluation, or None if it is off.

    Raises:
        DataError: if there is no held-out prompt that the model can take.
    """
    section = config.eval
    if not section.interval_steps:
        return None
    found = data.prompts.heldout(section.num_prompts)
    max_tokens = context_window(data.model_dir) - config.sampling.max_completion_tokens
    prompts = [(example, ids) for example, ids in found if len(ids) <= max_tokens]
    if len(prompts) < len(found):
        log.warning(
            "%d of %d held-out prompts have more than %d tokens and are left out",
            len(found) - len(prompts), len(found), max_tokens,
        )  # fmt: skip
    if not prompts:
        raise DataError(
            f"the task {config.task.kind} has no held-out prompt of at most {max_tokens} tokens to "
            "evaluate on; give it some, or set eval.interval_steps=0"
        )
    engine = TransformersEngine(
        data.model_dir,
        device=pick_device(config.learner.device),
        attn_implementation=config.model.attn_implementation,
    )
    evaluator = Evaluator(
        engine,
        data.task,
        prompts=prompts,
        decode=data.decode,
        sampling=make_sampling(config, data.stop_ids),
        reward_timeout_s=config.task.reward_timeout_s,
        seed=section.seed,
    )
    return Evaluations(
        evaluator, interval_steps=section.interval_steps, max_steps=config.run.max_steps
    )


def _make_plan(config: Config) -> LearnerPlan:
    return LearnerPlan(
        run_name=config.run.name,
        run_dir=config.run_dir,
        task_name=config.task.kind.rpartition(":")[2],
        max_steps=config.run.max_steps,
        groups_per_step=config.batch.groups_per_step,
        refresh_s=1 / config.ui.refresh_per_s,
    )


def _tensors_of(manifest: Manifest, image: bytearray) -> Weights:
    return tensors_from_image(manifest.tensors, memoryview(image).toreadonly())


def _export(model_dir: Path, dtype: str, directory: Path, tensors: Weights) -> None:
    """Write the weights as they are published, as a Hugging Face directory."""
    rounded = {
        name: tensor.to(torch_dtype(dtype)) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    save_hf(directory, tokenization.asset_files(model_dir), rounded)
