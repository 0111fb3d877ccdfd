"""What a learner knows when it begins: its journal, its trainer, and its session.

All of it is opened before anything is written: a run that cannot begin leaves no trace.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import dataclass

from echo.config.load import inherited_settings, save_resolved
from echo.config.schema import Config
from echo.core.buffer import StalenessBuffer
from echo.engine.lora import base_settings
from echo.leases.book import LeaseBook
from echo.leases.scheduler import LeaseSettings
from echo.protocol.learner_session import LearnerSession, LearnerSettings
from echo.protocol.reception import AdmissionSettings
from echo.records.ledger import Ledger
from echo.runtime import wiring
from echo.runtime.activation import resumed_spending
from echo.runtime.data_plane import Data
from echo.runtime.identity import Identity
from echo.runtime.recovery import StartingPoint, begin, enter, recover
from echo.runtime.task_setup import code_settings
from echo.runtime.trainer_setup import build_trainer
from echo.train.attribution import Attribution, make_attribution
from echo.train.trainer import Trainer
from echo.weights.topology.sites import Site
from echo.wire.messages import LEARNER_ID

LOST_WORKER = "(before the restart)"
"""Holder of leases that were out when the learner died, until their worker claims them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that has begun, or goes on."""

    ledger: Ledger
    start: StartingPoint
    spent: float
    """$ before now."""
    trainer: Trainer
    attribution: Attribution | None
    buffer: StalenessBuffer
    session: LearnerSession


def open_run(
    config: Config,
    data: Data,
    identity: Identity,
    advertise: str,
    *,
    resume: bool,
    log: logging.Logger,
) -> OpenedRun:
    """Open the journal, build trainer and session, and enter the new lineage.

    Args:
        config: the whole configuration.
        data: model, tokenizer, task.
        identity: the run's.
        advertise: address that other nodes may dial; empty for none.
        resume: continue the run in the run directory.
        log: where to tell what happens.

    Raises:
        EchoError: if something is missing or does not fit; the message is for the user.
    """
    with ExitStack() as on_failure:
        ledger = Ledger(config.run_dir, spool_bytes=config.limits.spool_bytes)
        on_failure.callback(ledger.close)
        start = find_start(config, ledger, identity, resume=resume, log=log)
        spent = resumed_spending(ledger, resume=resume)
        trainer = build_trainer(config, data.model_dir, start, data.lora)
        attribution = make_attribution(config, data.model_dir, trainer, data.lora)
        buffer = StalenessBuffer(
            max_staleness=config.sync.max_staleness,
            lineages=start.lineages,
            trims_stale=trims_stale(config),
        )
        for group in start.buffered:
            reason = trainer.refusal(group)
            if reason is None:
                buffer.put(group)
            else:
                # It was taken in for the loss of another configuration.
                start.ends[group.group_id] = reason
        session = build_session(config, identity, data, start, buffer, advertise)
        for reason in start.ends.values():
            session.counters.add(f"discarded/{reason}")
        save_resolved(config, config.run_dir / "config.json")
        enter(ledger, start)
        on_failure.pop_all()
    return OpenedRun(
        ledger=ledger,
        start=start,
        spent=spent,
        trainer=trainer,
        attribution=attribution,
        buffer=buffer,
        session=session,
    )


def find_start(
    config: Config, ledger: Ledger, identity: Identity, *, resume: bool, log: logging.Logger
) -> StartingPoint:
    """Return where the learner starts: a new run, or where a killed one can go on."""
    if not resume:
        return begin(ledger)
    start = recover(
        ledger,
        run_id=identity.run_id,
        max_staleness=config.sync.max_staleness,
        trims_stale=trims_stale(config),
    )
    log.info(
        "resuming at step %d in lineage %d: %d groups buffered, %d leased, %d discarded",
        start.step, start.lineage, len(start.buffered), len(start.open_attempts), len(start.ends),
    )  # fmt: skip
    for damage in start.damage:
        log.error("%s", damage)
    if start.damage:
        log.error(
            "continuing from %s instead: the steps after %d are void and will be made again",
            start.checkpoint, start.step,
        )  # fmt: skip
    for loss in start.losses:
        log.warning("lost: %s", loss)
    return start


def trims_stale(config: Config) -> bool:
    """Return whether a group with some tokens beyond the bound keeps the others.

    On policy, and where old tokens are to be dropped, such a group is of no use.
    """
    return config.sync.max_staleness > 0 and config.rollout.stale_tokens != "drop"


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
            admission=AdmissionSettings(
                run_id=identity.run_id,
                key=identity.key,
                settings=inherited_settings(config)
                | base_settings(config, data.lora, is_resumed=len(start.lineages) > 1)
                | code_settings(config),
                assets=data.read_assets(),
                digests=data.digests,
                heartbeat_s=network.heartbeat_s,
                dead_after_s=network.dead_after_s,
            ),
            leases=LeaseSettings(
                max_staleness=sync.max_staleness,
                groups_per_step=config.batch.groups_per_step,
                group_size=config.batch.group_size,
                max_completion_tokens=_max_rollout_tokens(config),
                vocab_size=data.vocab_size,
                heartbeat_s=network.heartbeat_s,
                prompts_are_free=config.agent.listen is not None,
                trims_stale=trims_stale(config),
                hedge_factor=config.leases.hedge_factor or None,
                exact_version=config.rollout.exact_version,
            ),
            site=Site(
                LEARNER_ID,
                "learner",
                advertise,
                region=network.region,
                price_per_gb=network.price_per_gb,
            ),
            chunk_bytes=network.chunk_bytes,
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


def _max_rollout_tokens(config: Config) -> int:
    """Return the tokens of the longest rollout: an agent's counts its whole conversation."""
    longest, agent = config.sampling.max_completion_tokens, config.agent
    return longest if agent.listen is None else max(longest, agent.max_session_tokens)
