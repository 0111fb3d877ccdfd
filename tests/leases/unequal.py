"""Workers of unequal speed and groups of unequal length, on the real sessions and virtual time.

An engine samples `num_places` groups at one time, each at `speed` tokens per second if it is full.
Where `alone` is above 1, a group on its own is that much faster, as in engines that read all
weights for each token of however many groups; otherwise what runs beside it makes no difference.
How long a group becomes depends on the seed of its lease alone, log-normal with a heavy tail, so
that a copy with the same seed is as long as its original.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo.core.rollout import PolicyVersion
from echo.leases.outbox import Outbox
from echo.leases.partials import LeaseKey, PartialRules
from echo.leases.scheduler import RecordCancel, RecordGrant
from echo.roles.joining import Configure
from echo.roles.worker import EngineCall, EngineFacts, Install, Recall, Sample, Score, Worker
from echo.weights.receiver import VersionArrived
from echo.wire.actions import Action
from echo.wire.messages import Lease
from tests.roles.harness import (
    LEARNER_ADDRESS,
    Process,
    Run,
    make_broadcast,
    make_member,
    sample,
)

MEDIAN_TOKENS, MAX_TOKENS = 60, 1200
PROGRESS_S = 0.5


@dataclass(slots=True)
class Sampling:
    """A group in an engine."""

    call: EngineCall
    version: PolicyVersion
    num_tokens: int
    slowdown: float
    num_sampled: float = 0.0


class RatedEngine:
    """A worker's own work, at its speed."""

    def __init__(
        self, run: Unequal, process: Process, session: Worker, *, speed: float, places: int
    ) -> None:
        self.run, self.process, self.session = run, process, session
        self.speed, self.num_places = speed, places
        self.sampling: dict[LeaseKey, Sampling] = {}
        self.tokens_cancelled = 0.0
        self._at = 0.0
        self._turn = 0

    def on_action(self, action: Action) -> None:
        world, session = self.run.world, self.session
        match action:
            case Configure():
                world.later(0.1, self._built)
            case Install():
                delay_s = self.run.apart_s * list(self.run.engines).index(self.process.name)
                world.later(delay_s, lambda: self._installed(action.version))
            case Sample():
                self._begin(action.call)
            case Recall():
                self._stop(action.call)
            case Score():
                rewards = [float(member) for member in range(len(action.group.members))]
                world.perform(self.process, session.scored(action.group, rewards, now=world.now))
            case VersionArrived():
                pass
            case _:
                raise AssertionError(action)

    def _installed(self, version: PolicyVersion) -> None:
        world = self.run.world
        world.perform(self.process, self.session.installed(version, now=world.now))

    def _built(self) -> None:
        if self.process.is_alive:
            facts = EngineFacts(
                group_size=self.run.numbers.group_size,
                groups_per_batch=self.num_places,
                is_continuous=True,
                rules=PartialRules(ship_s=None),
            )
            world = self.run.world
            world.perform(self.process, self.session.built(facts, {}, now=world.now))
            self._report()

    def _begin(self, call: EngineCall) -> None:
        self._advance()
        version, [group] = self.session.installed_version, call.groups
        assert version is not None
        num_tokens = self.run.length(group.lease)
        slowdown = self.run.slowdown(self.process.name, group.lease)
        self.sampling[group.key] = Sampling(call, version, num_tokens, slowdown)
        self._await_next()

    def _rate(self, sampling: Sampling) -> float:
        """Return the tokens per second of a group among those that are here now."""
        alone, share = self.run.alone, len(self.sampling) / self.num_places
        return self.speed * alone / (1 + (alone - 1) * share) / sampling.slowdown

    def _advance(self) -> None:
        """Sample up to now."""
        elapsed_s, self._at = self.run.world.now - self._at, self.run.world.now
        for sampling in self.sampling.values():
            sampling.num_sampled += self._rate(sampling) * elapsed_s

    def _await_next(self) -> None:
        """Look again when the next group is complete."""
        self._turn += 1
        rests = [(s.num_tokens - s.num_sampled) / self._rate(s) for s in self.sampling.values()]
        if rests:
            self.run.world.later(max(0.0, min(rests)), lambda turn=self._turn: self._look(turn))

    def _end(self, key: LeaseKey) -> Sampling | None:
        self._advance()
        return self.sampling.pop(key, None)

    def _stop(self, call: EngineCall) -> None:
        sampling = self._end(call.groups[0].key)
        assert sampling is not None
        self.tokens_cancelled += sampling.num_sampled
        self._return(call, 0)

    def _return(self, call: EngineCall, num_tokens: int) -> None:
        world = self.run.world
        actions = self.session.returned(call, num_tokens=num_tokens, now=world.now)
        world.perform(self.process, actions)
        self._await_next()

    def _look(self, turn: int) -> None:
        """Deliver what is complete."""
        if turn != self._turn or not self.process.is_alive:
            return
        self._advance()
        for key, sampling in list(self.sampling.items()):
            if sampling.num_sampled > sampling.num_tokens - 1e-6:
                self._sampled(key)
        self._await_next()

    def _sampled(self, key: LeaseKey) -> None:
        sampling = self._end(key)
        assert sampling is not None
        call, num_tokens = sampling.call, sampling.num_tokens
        sample(self.run.world, self.process, call, make_member([sampling.version] * num_tokens))
        self._return(call, num_tokens * self.run.numbers.group_size)

    def _report(self) -> None:
        if self.process.is_alive:
            self._advance()
            for sampling in self.sampling.values():
                num_tokens = int(sampling.num_sampled) * self.run.numbers.group_size
                sampling.call.groups[0].num_progress = num_tokens
            self.run.world.later(PROGRESS_S, self._report)


class Unequal(Run):
    """A run with such workers."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        tail: float,
        seed: int = 0,
        hiccups: float = 0.0,
        alone: float = 1.0,
        apart_s: float = 0.0,
        **numbers: Any,
    ) -> None:
        """Prepare a run.

        Args:
            tmp_path: where its journal goes.
            tail: standard deviation of the logarithm of the lengths.
            seed: of lengths and network.
            hiccups: share of the leases that their workers sample 20 times slower than usual.
            alone: how much faster a group is in an empty engine than in a full one.
            apart_s: how much later each worker installs a version than the one before it.
            numbers: as of `Run`.
        """
        super().__init__(tmp_path, seed=seed, **({"num_chunks": 2} | numbers))
        self.hiccups = hiccups
        self.alone = alone
        self.apart_s = apart_s
        self.tail, self.seed = tail, seed
        self.engines: dict[str, RatedEngine] = {}
        self.copies: set[tuple[int, int]] = set()
        self.num_cancelled = 0

    def length(self, lease: Lease) -> int:
        """Return how many tokens a lease makes."""
        drawn = random.Random(f"{self.seed}/{lease.seed}").lognormvariate(0.0, self.tail)
        return min(MAX_TOKENS, max(1, round(MEDIAN_TOKENS * drawn)))

    def slowdown(self, worker: str, lease: Lease) -> float:
        """Return how many times slower than usual a worker is with a lease."""
        drawn = random.Random(f"{self.seed}/{worker}/{lease.group_id}/{lease.attempt}").random()
        return 20.0 if drawn < self.hiccups else 1.0

    def journal(self, kind: str, **fields: Any) -> None:
        super().journal(kind, **fields, at=self.world.now)

    def start(self, speeds: dict[str, float], *, places: int = 4, **settings: Any) -> None:
        """Start the learner and its workers."""
        learner = self.start_learner(
            max_completion_tokens=MAX_TOKENS, vocab_size=MAX_TOKENS + 3, **settings
        )
        on_action = learner.on_action

        def watch(action: Action) -> None:
            if isinstance(action, RecordGrant) and action.copy_of is not None:
                self.copies.add((action.lease.group_id, action.lease.attempt))
            self.num_cancelled += isinstance(action, RecordCancel)
            on_action(action)

        learner.on_action = watch
        for name, speed in speeds.items():
            self._start_rated(name, speed, places)

    def _start_rated(self, name: str, speed: float, places: int) -> None:
        settings = self.node_settings(name, "worker", (LEARNER_ADDRESS,))
        outbox = Outbox(max_deliveries=64, retry_s=1.0)
        session = Worker(settings, make_broadcast(name), outbox, now=self.world.now)
        process = self.world.add(Process(name, session, None))
        engine = RatedEngine(self, process, session, speed=speed, places=places)
        self.engines[name] = engine
        process.on_action = engine.on_action
        self.world.perform(process, session.start(now=self.world.now))

    def play(self, num_steps: int, *, within_s: float) -> None:
        """Train so many steps, and check the journal."""
        self.world.run_until(
            lambda: len(self.step_times()) >= num_steps or self.world.now > within_s,
            within_s=within_s + 1,
        )
        self.audit()

    def step_times(self) -> list[float]:
        """Return how long each step took, seconds."""
        instants = [0.0, *(r["at"] for r in self.records if r["kind"] == "trained")]
        return [stop - start for start, stop in itertools.pairwise(instants)]

    def figures(self, *, warm_up: int = 5) -> dict[str, float]:
        """Return what the dispatch has made of it."""
        times = self.step_times()[warm_up:]
        sampled = sum(g.num_tokens for g in self.groups.values()) / self.numbers.group_size
        wasted = sum(engine.tokens_cancelled for engine in self.engines.values())
        return {
            "steps": float(len(times)),
            "step_mean_s": statistics.fmean(times) if times else math.inf,
            "wasted_share": wasted / max(1.0, sampled + wasted),
        }
