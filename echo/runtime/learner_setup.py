"""From the configuration to a learner, at the start of a run or after a crash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from echo.config.schema import Config
from echo.core.errors import DataError
from echo.core.metrics import LearningCurve, Snapshot
from echo.core.rollout import PolicyVersion
from echo.engine.hf.engine import TransformersEngine
from echo.engine.lora import base_name, export_adapter
from echo.engine.model import context_window, import_architecture, make_sampling, pick_device
from echo.engine.weights import (
    Weights,
    save_hf,
    tensors_from_image,
    torch_dtype,
)
from echo.net.curve import CurveKeys
from echo.net.transport import Transport
from echo.runtime import wiring
from echo.runtime.activation import make_activating
from echo.runtime.adaptation import make_adaptation
from echo.runtime.checkpoint import Checkpoints
from echo.runtime.curve import load_or_create_keys, write_join
from echo.runtime.data_plane import Data, load_data
from echo.runtime.evaluation import Evaluations, Evaluator
from echo.runtime.identity import load_or_create_identity
from echo.runtime.join import join_address
from echo.runtime.late_rewards import LateRewards
from echo.runtime.learner import LearnerNode
from echo.runtime.learner_plan import LearnerPlan
from echo.runtime.learner_state import open_run
from echo.runtime.parcels import Coder
from echo.runtime.progress import Progress
from echo.runtime.publication import Publication, make_images, make_publication
from echo.runtime.task_setup import make_player, turns_of
from echo.runtime.threads import Threads
from echo.runtime.waiting import Waiting
from echo.tasks import tokenization
from echo.train.attribution import Attribution
from echo.train.policy import float32_attention
from echo.weights.manifest import Manifest
from echo.weights.schedule import PublishPace

EVALUATION_SEED = 1
"""The same prompts and samples whatever run.seed is, so that runs compare."""


async def build_learner(
    config: Config,
    *,
    resume: bool,
    write_metrics: Callable[[int, Mapping[str, float | Mapping[str, float]]], None],
    show: Callable[[Snapshot], None],
    log: logging.Logger,
    earlier: LearningCurve | None = None,
) -> LearnerNode:
    """Return a learner that is ready to run, listening already.

    Args:
        config: the whole configuration.
        resume: continue the run in the run directory, in a new lineage.
        write_metrics: appends one row of metrics.
        show: draws a snapshot.
        log: where to tell what happens.
        earlier: what the run had learned before it was resumed, for the display.

    Raises:
        EchoError: if something is missing or does not fit; the message is for the user.
    """
    data = load_data(config)
    # Before strangers can take the descriptors that it needs.
    import_architecture(data.model_dir if data.lora is None else data.lora.base_dir)
    keys, secret = load_or_create_keys(config.run_dir) if config.security.curve else (None, b"")
    # Bound before more is written: a port that is taken must not open a lineage.
    transport = await wiring.start_transport(
        config.network, config.learner.listen, keys, listens_later=True
    )
    wiring.warn_of_kernel(config.learner.listen)
    try:
        if keys is not None:
            invite(config, keys, secret, transport, log=log)
        node = assemble_learner(
            config,
            data,
            transport,
            resume=resume,
            write_metrics=write_metrics,
            show=show,
            log=log,
            earlier=earlier,
        )
        # Not before its files are open, for which strangers could leave no descriptor.
        transport.listen()
    except BaseException:
        await transport.close()
        raise
    return node


def invite(
    config: Config, keys: CurveKeys, secret: bytes, transport: Transport, *, log: logging.Logger
) -> None:
    """Write the run's join string and tell where it is; the log, which others may read, has not it.

    Raises:
        StorageError: if it cannot be written.
    """
    address = join_address(str(transport.listen_address), config.learner.advertise)
    write_join(config.run_dir, address, keys, secret)
    log.info(
        "others join with the line in %s: ECHO_JOIN=THAT_LINE bin/echo-node --role worker",
        config.run_dir / "keys" / "join",
    )


def assemble_learner(
    config: Config,
    data: Data,
    transport: Transport,
    *,
    resume: bool,
    write_metrics: Callable[[int, Mapping[str, float | Mapping[str, float]]], None],
    show: Callable[[Snapshot], None],
    log: logging.Logger,
    earlier: LearningCurve | None = None,
    threads: Threads | None = None,
) -> LearnerNode:
    """Join a learner on a transport that has been started; otherwise as `build_learner`."""
    evaluations = build_evaluations(config, data, log=log)
    run_dir = config.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    identity = load_or_create_identity(run_dir, run_name=config.run.name)
    now = asyncio.get_running_loop().time()
    advertise = wiring.advertised(transport.listen_address, config.learner.advertise) or ""
    if not advertise:
        log.warning(
            "learner.listen is a wildcard and learner.advertise is not set: workers that reach "
            "this learner through a relay cannot find it when the relay dies"
        )
    opened = open_run(config, data, identity, advertise, resume=resume, log=log)
    session, start, ledger = opened.session, opened.start, opened.ledger
    trainer, buffer, attribution = opened.trainer, opened.buffer, opened.attribution
    pace = PublishPace(
        period=config.sync.initial_publish_period,
        is_auto=config.sync.publish_period == "auto",
        max_staleness=config.sync.max_staleness,
    )
    progress = Progress(
        staleness_tokens=start.staleness_tokens, now=now, step=start.step, earlier=earlier
    )
    publish: Callable[[Weights, PolicyVersion], Publication] = partial(
        make_publication,
        run_id=identity.run_id,
        model_digest=data.digests["model"],
        images=make_images(config),
        chunk_bytes=config.network.chunk_bytes,
        key=identity.key,
    )
    if attribution is not None:
        publish = partial(_publish_and_keep, publish, attribution)
    node = LearnerNode(
        session,
        transport,
        plan=_make_plan(config),
        buffer=buffer,
        trainer=trainer,
        train=trainer.step if attribution is None else attribution.step,
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
        pace=pace,
        adaptation=make_adaptation(config, buffer=buffer, pace=pace, ledger=ledger, log=log),
        activating=make_activating(
            config,
            session,
            pace=pace,
            progress=progress,
            ledger=ledger,
            spent=opened.spent,
            now=now,
            log=log,
        ),
        waiting=Waiting(
            session,
            address=advertise or str(transport.listen_address),
            reconnect_for_s=config.network.reconnect_for_s,
            log=log,
        ),
        progress=progress,
        evaluations=evaluations,
        publish=publish,
        coder=Coder(identity.key),
        tensors_of=_tensors_of,
        export=partial(_export, config, data),
        write_metrics=write_metrics,
        show=show,
        threads=threads,
        log=log,
    )
    node.at_release.append(data.host.close)
    if config.reward.where == "learner":
        node.arrivals.late_rewards = LateRewards(
            data.host,
            example_of=data.prompts.example,
            decode=data.decode,
            spawn=node.spawn,
            threads=node.threads,
        )
    return node


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
        attn_implementation=float32_attention(config.model.attn_implementation),
        lora=data.lora,
    )
    evaluator = Evaluator(
        engine,
        data.host,
        prompts=prompts,
        decode=data.decode,
        sampling=make_sampling(config, data.stop_ids),
        seed=EVALUATION_SEED,
        player=make_player(
            config,
            turns_of(config, data.task),
            data.host,
            engine,
            data.tokenizer,
            data.stop_ids,
        ),
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
        max_barren_groups=config.batch.groups_per_step * config.batch.max_zero_signal_batches,
        codec=config.network.codec,
    )


def _tensors_of(manifest: Manifest, image: bytearray) -> Weights:
    return tensors_from_image(manifest.tensors, memoryview(image).toreadonly())


def _export(config: Config, data: Data, directory: Path, tensors: Weights) -> None:
    """Write the weights as they are published, as a directory for transformers or peft."""
    dtype = torch_dtype(config.model.dtype)
    rounded = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    assets = tokenization.asset_files(data.model_dir)
    if data.lora is None:
        save_hf(directory, assets, rounded)
    else:
        name = base_name(config, data.lora)
        export_adapter(directory, assets, rounded, data.lora, base_name=name)


def _publish_and_keep(
    publish: Callable[[Weights, PolicyVersion], Publication],
    attribution: Attribution,
    weights: Weights,
    version: PolicyVersion,
) -> Publication:
    publication = publish(weights, version)
    attribution.keep(publication.manifest, publication.image)
    return publication
