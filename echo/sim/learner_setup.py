"""From a scenario to what its learner is made of: settings, leases, buffer and times."""

from __future__ import annotations

from statistics import fmean

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.buffer import StalenessBuffer
from echo.leases.book import LeaseBook
from echo.leases.scheduler import LeaseSettings, RunState
from echo.roles.joining import AdmissionSettings
from echo.roles.learner import Learner, LearnerSettings
from echo.sim.journal import Start
from echo.sim.learner import LearnerTimes
from echo.sim.scenario import LEARNER_REGION, Scenario
from echo.sim.versions import CHUNK_BYTES, Versions
from echo.weights.broadcast import Broadcast
from echo.weights.topology.sites import ASSUMED_BYTES_PER_S, Site
from echo.wire.messages import LEARNER_ID, Lease

RUN_ID = "simulation"
LEARNER_ADDRESS = "tcp://learner:7700"
LOST_WORKER = "(before the restart)"
"""Holder of leases that were out when the learner died, until their worker claims them."""
UNBOUNDED = 1 << 30
"""A bound on staleness that never holds a lease back."""


def make_buffer(scenario: Scenario, start: Start) -> StalenessBuffer:
    """Return the buffer with what waited on the disk."""
    job = scenario.job
    buffer = StalenessBuffer(max_staleness=job.max_staleness, lineages=start.lineages)
    if not scenario.settings.is_paced:
        # Without pacing the session knows no bound; the buffer keeps the real one all the same.
        buffer.admission_staleness = UNBOUNDED
    for group in start.buffered:
        buffer.put(group)
    return buffer


def make_session(
    scenario: Scenario,
    start: Start,
    *,
    key: Ed25519PrivateKey,
    versions: Versions,
    broadcast: Broadcast,
    buffer: StalenessBuffer,
    now: float,
) -> Learner:
    """Return the learner's session with its leases as they were."""
    leases = LeaseBook(timeout_s=scenario.settings.lease_timeout_s)
    for group_id, num_attempts in sorted(start.open_attempts.items()):
        leases.adopt(group_id, num_attempts - 1, LOST_WORKER, now=now)
    return Learner(
        _settings(scenario, key=key, scale=versions.scale),
        RunState(
            leases=leases,
            lineages=start.lineages,
            step=start.step,
            next_group_id=start.next_group_id,
            finished=start.finished,
        ),
        broadcast=broadcast,
        buffer=buffer,
        prompts=BlankPrompts(),
    )


def _settings(scenario: Scenario, *, key: Ed25519PrivateKey, scale: float) -> LearnerSettings:
    job, settings = scenario.job, scenario.settings
    return LearnerSettings(
        admission=AdmissionSettings(
            run_id=RUN_ID,
            key=key,
            settings={},
            assets={},
            digests={},
            heartbeat_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
        ),
        leases=LeaseSettings(
            max_staleness=job.max_staleness if settings.is_paced else UNBOUNDED,
            groups_per_step=job.groups_per_step,
            group_size=job.group_size,
            max_completion_tokens=max(1, round(job.max_completion_tokens)),
            vocab_size=1,
            heartbeat_s=settings.heartbeat_s,
        ),
        site=Site(
            LEARNER_ID,
            "learner",
            LEARNER_ADDRESS,
            uplink_bytes_per_s=ASSUMED_BYTES_PER_S / scale,
            region=LEARNER_REGION,
            price_per_gb=_egress_per_gb(scenario) * scale,
        ),
        chunk_bytes=CHUNK_BYTES,
    )


def _egress_per_gb(scenario: Scenario) -> float:
    """Return $ per GB that leaves the learner: the mean over the regions where nodes stand."""
    fleet = scenario.fleet
    regions = {o.region for o, count in zip(fleet.offers, scenario.counts, strict=True) if count}
    prices = [fleet.regions[name].price_per_gb for name in sorted(regions)]
    return fmean(prices) if prices else 0.0


def make_times(scenario: Scenario) -> LearnerTimes:
    """Return how long the learner takes for what is not simulated."""
    settings = scenario.settings
    return LearnerTimes(
        train_s=scenario.job.train_s,
        train_spread=settings.train_spread,
        recorded=scenario.train_times,
        publish_s=settings.publish_s,
        journal_s=settings.journal_s,
        seed=settings.seed,
        give_up_after_s=settings.give_up_after_s,
    )


class BlankPrompts:
    """Prompts that say nothing."""

    def lease(self, group_id: int, attempt: int) -> Lease:
        """Return the lease of a group."""
        return Lease(group_id=group_id, attempt=attempt, seed=group_id, prompt_ids=(0,), example={})
