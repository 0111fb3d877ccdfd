"""Grants just in time: never too late for the learner, as far as can be estimated."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo.core.buffer import StalenessBuffer
from echo.core.rollout import PolicyVersion
from echo.fleet.overlap import OPEN_SHARE
from echo.leases.grants.dispatch import FULL_SLOWDOWN, Load, by_finish
from echo.leases.grants.just_in_time import SPARE_STEPS, WAIT_SHARE, JustInTime
from tests.leases.test_scheduler import (
    LINEAGES,
    granted,
    make_granting,
    with_places,
)

SIZE = 4
STEP_S = 10.0
DELAY_S = 1.0
GROUP_S = 2.0


def make_pace(max_staleness: int = 100) -> JustInTime:
    return JustInTime(groups_per_step=SIZE, max_staleness=max_staleness)


def at_step(
    step: int, *, waited_s: float = 0.0, delay_s: float = DELAY_S, max_staleness: int = 100
) -> JustInTime:
    """Return what is known when step `step` begins, at `step` times STEP_S, in a steady run."""
    pace = make_pace(max_staleness)
    pace.installed("w", 0, now=0.0)
    for number in range(step):
        pace.begin_step(waited_s=waited_s, now=number * STEP_S)
        pace.end_step(number + 1, now=(number + 1) * STEP_S)
        if number + 1 < step:
            pace.installed("w", number + 1, now=(number + 1) * STEP_S + delay_s)
    pace.begin_step(waited_s=waited_s, now=step * STEP_S)
    return pace


def worker(num_places: int = 2, *, now: float, most_promised: int = 10_000) -> Load:
    """Return an idle worker; a group takes it GROUP_S beside as many others as there are places."""
    # The last of its places is the slowest: twice as long as in the empty engine.
    group_s = GROUP_S / 2
    return Load("w", 100, 0, most_promised, most_promised, group_s, group_s, [now] * num_places)


def num_due(
    pace: JustInTime,
    load: Load,
    *,
    version: int,
    step: int,
    num_accepted: int,
    now: float,
    running: tuple[float, ...] = (),
) -> int | None:
    return pace.num_due(
        [load],
        [version],
        running=running,
        num_accepted=num_accepted,
        num_promised=step * SIZE + num_accepted + len(running),
        now=now,
    )


class TestWithoutMeasurements:
    def test_two_batches_are_due_before_a_step_is_timed(self) -> None:
        pace = make_pace()
        load = worker(now=0.0)
        assert num_due(pace, load, version=0, step=0, num_accepted=0, now=0.0) == 2 * SIZE
        assert num_due(pace, load, version=0, step=0, num_accepted=3, now=0.0) == 2 * SIZE - 3

    def test_every_free_place_gets_a_group(self) -> None:
        pace = make_pace()
        load = worker(20, now=0.0)
        assert num_due(pace, load, version=0, step=0, num_accepted=0, now=0.0) == 20

    def test_no_more_than_admission_allows(self) -> None:
        pace = make_pace()
        load = worker(20, now=0.0, most_promised=SIZE)
        assert num_due(pace, load, version=0, step=0, num_accepted=1, now=0.0) == SIZE - 1


class TestHolding:
    def test_groups_wait_for_a_version_that_comes_in_time(self) -> None:
        # Version 3 is installed at 31; four groups on two places take 4 s; step 4 begins at 40.
        pace = at_step(3)
        load = worker(now=30.0)
        assert num_due(pace, load, version=2, step=3, num_accepted=SIZE, now=30.0) == 0

    def test_groups_are_due_once_it_is_there(self) -> None:
        # The version after it is installed at 41, when the learner has begun already.
        pace = at_step(3)
        pace.installed("w", 3, now=31.0)
        load = worker(now=31.0)
        assert num_due(pace, load, version=3, step=3, num_accepted=SIZE, now=31.0) == SIZE

    def test_only_what_would_be_late_does_not_wait(self) -> None:
        # Batch 4 needs four groups by 39.2. From 34.5 on, a group takes 1.1 s, and then 1.3 s.
        pace = at_step(3, delay_s=4.5)
        load = worker(1, now=30.0)
        load.group_s = load.trial_s = 0.55
        assert num_due(pace, load, version=2, step=3, num_accepted=SIZE, now=30.0) == 0
        load.group_s = load.trial_s = 0.65
        assert num_due(pace, load, version=2, step=3, num_accepted=SIZE, now=30.0) == 1

    def test_a_late_version_is_awaited_until_groups_are_due(self) -> None:
        pace = at_step(3)
        early = num_due(pace, worker(now=33.0), version=2, step=3, num_accepted=SIZE, now=33.0)
        late = num_due(pace, worker(now=37.0), version=2, step=3, num_accepted=SIZE, now=37.0)
        assert (early, late) == (0, 2)

    def test_accepted_and_running_groups_count(self) -> None:
        pace = at_step(3)
        pace.installed("w", 3, now=31.0)
        load = worker(now=31.0)
        due = num_due(
            pace, load, version=3, step=3, num_accepted=SIZE + 1, running=(33.0, 39.9), now=31.0
        )
        # The second running group comes within the margin: another is begun in its place.
        assert due == SIZE - 2

    def test_a_slow_group_is_replaced_by_one_of_the_next_version(self) -> None:
        # Admission allows one more group. The running one is late for its batch, the last one that
        # is allowed; groups that the next version makes room for are in time for this batch.
        pace = at_step(3, max_staleness=3)
        load = worker(now=30.0, most_promised=6 * SIZE)
        due = num_due(
            pace, load, version=2, step=3, num_accepted=3 * SIZE - 2, running=(1000.0,), now=30.0
        )
        assert due == 0

    def test_broadcasts_that_skip_versions_tell_the_period_all_the_same(self) -> None:
        # Versions 1 and 2 arrive, 3 is skipped for 4. Version 5 is installed at some 63 s, so the
        # groups of batch 7, which are needed at 70 s, wait for it. Version 6 would be too late.
        pace = make_pace()
        pace.installed("w", 0, now=0.0)
        for step in range(5):
            pace.begin_step(waited_s=0.0, now=step * STEP_S)
            pace.end_step(step + 1, now=(step + 1) * STEP_S)
        for version, at in ((1, 22.5), (2, 35.0), (4, 52.5)):
            pace.installed("w", version, now=at)
        pace.begin_step(waited_s=0.0, now=50.0)
        load = worker(now=52.5)
        assert num_due(pace, load, version=4, step=5, num_accepted=2 * SIZE, now=52.5) == 0

    def test_groups_count_by_the_share_that_is_useful(self) -> None:
        pace = at_step(3)
        pace.installed("w", 3, now=31.0)
        for number in range(63):
            pace.stored(is_useful=number % 2 == 0)
        load = worker(6, now=31.0)
        # Half of the groups will be useful: eight are made for four, and two for the last one.
        assert num_due(pace, load, version=3, step=3, num_accepted=SIZE, now=31.0) == 2 * SIZE
        late = num_due(
            pace, load, version=3, step=3, num_accepted=SIZE + 2, running=(33.0, 33.0), now=31.0
        )
        assert late == 2
        # Groups that are held for the last batch that the bound allows count in the same way.
        pace.installed("w", 4, now=32.0)
        held = num_due(
            pace,
            worker(6, now=32.0, most_promised=8 * SIZE),
            version=3,
            step=3,
            num_accepted=SIZE,
            running=(34.0,) * 2 * SIZE,
            now=32.0,
        )
        assert held == 0

    def test_a_learner_that_waits_is_given_everything_for_its_batch(self) -> None:
        pace = at_step(3)
        pace.end_step(4, now=40.0)
        load = worker(now=40.5)
        assert num_due(pace, load, version=3, step=4, num_accepted=1, now=40.5) == SIZE - 1

    @pytest.mark.parametrize(("group_s", "due"), [(0.6, 0), (0.7, None), (20.0, None)])
    def test_a_fleet_that_needs_each_worker_is_never_held_back(
        self, group_s: float, due: int | None
    ) -> None:
        # Without .45 of its speed, it has 10 s for four groups if one takes 1.375 s in full engine.
        pace = at_step(3)
        load = worker(1, now=30.0, most_promised=7 * SIZE)
        load.group_s = load.trial_s = group_s
        assert num_due(pace, load, version=2, step=3, num_accepted=SIZE, now=30.0) == due

    @pytest.mark.parametrize(("max_staleness", "due"), [(1, 3 * SIZE), (2, 0)])
    def test_groups_that_would_be_as_old_as_the_bound_allows_do_not_wait(
        self, max_staleness: int, due: int
    ) -> None:
        # Made from the next version, a group is one version old. A late one would be stale at 1.
        pace = at_step(3, max_staleness=max_staleness)
        load = worker(now=30.0, most_promised=7 * SIZE)
        assert num_due(pace, load, version=2, step=3, num_accepted=SIZE, now=30.0) == due

    @given(
        at=st.floats(0, STEP_S),
        num_places=st.integers(1, 6),
        group_s=st.floats(0.1, 40.0),
        num_accepted=st.integers(0, 3 * SIZE),
        most=st.integers(0, 12),
    )
    def test_held_groups_are_in_time_by_the_estimates(
        self, at: float, num_places: int, group_s: float, num_accepted: int, most: int
    ) -> None:
        pace = at_step(3)
        now = 30.0 + at
        load = worker(num_places, now=now, most_promised=(3 + most) * SIZE)
        load.group_s = load.trial_s = group_s
        due = num_due(pace, load, version=2, step=3, num_accepted=num_accepted, now=now)
        num_allowed = max(0, most * SIZE - num_accepted)
        due = num_allowed if due is None else due
        assert 0 <= due <= num_allowed
        arrival = max(now, 30.0 + DELAY_S)
        load.free_at = [max(arrival, now)] * num_places
        done = []
        for _ in range(num_allowed - due):
            done.append(load.finish_at)
            load.add()
        for batch in range(4, 3 + most):
            ready_at = 40.0 + (batch - 4) * STEP_S
            in_time = sum(each <= ready_at - pace.margin_s for each in done)
            is_all = due == num_allowed
            assert is_all or num_accepted + due + in_time >= (batch - 2) * SIZE


class TestMargin:
    def test_a_wait_for_held_groups_raises_it_by_the_wait(self) -> None:
        pace = at_step(3)
        before = pace.margin_s
        num_due(pace, worker(now=32.0), version=2, step=3, num_accepted=SIZE, now=32.0)
        num_due(pace, worker(now=37.0), version=2, step=3, num_accepted=SIZE, now=37.0)
        pace.end_step(4, now=40.0)
        pace.begin_step(waited_s=0.1, now=40.1)
        assert pace.margin_s == before + 0.1

    def test_no_more_than_groups_were_held(self) -> None:
        pace = at_step(3)
        before = pace.margin_s
        num_due(pace, worker(now=35.0), version=2, step=3, num_accepted=SIZE, now=35.0)
        num_due(pace, worker(now=37.0), version=2, step=3, num_accepted=SIZE, now=37.0)
        pace.end_step(4, now=40.0)
        pace.begin_step(waited_s=5.0, now=45.0)
        assert pace.margin_s == before + 2.0

    def test_another_wait_does_not_raise_it(self) -> None:
        pace = at_step(3)
        before = pace.margin_s
        pace.end_step(4, now=40.0)
        pace.begin_step(waited_s=5.0, now=45.0)
        assert pace.margin_s == before - WAIT_SHARE * STEP_S

    def test_batches_that_are_early_lower_it_faster(self) -> None:
        pace = at_step(3)
        num_due(pace, worker(now=35.0), version=2, step=3, num_accepted=SIZE, now=35.0)
        num_due(pace, worker(now=37.0), version=2, step=3, num_accepted=SIZE, now=37.0)
        pace.end_step(4, now=40.0)
        pace.begin_step(waited_s=5.0, now=45.0)
        before = pace.margin_s
        for step in range(5, 5 + SPARE_STEPS):
            begun_at = step * STEP_S
            load = worker(now=begun_at + 4)
            num_due(pace, load, version=step, step=step, num_accepted=2 * SIZE, now=begun_at + 4)
            pace.end_step(step + 1, now=begun_at + STEP_S)
            pace.begin_step(waited_s=0.0, now=begun_at + STEP_S)
        assert pace.margin_s < before - SPARE_STEPS * WAIT_SHARE * STEP_S

    def test_a_learner_that_waits_much_holds_nothing_back(self) -> None:
        pace = at_step(3, waited_s=2 * OPEN_SHARE * STEP_S)
        load = worker(now=30.0, most_promised=9 * SIZE)
        assert num_due(pace, load, version=2, step=3, num_accepted=SIZE, now=30.0) is None


class Play:
    """A learner and workers with one place each, in virtual time, with random delays."""

    def __init__(
        self,
        *,
        seed: int,
        bound: int,
        rate: float,
        num_workers: int,
        broadcast: float,
        spread: float,
        is_eager: bool = False,
    ) -> None:
        """Set rate and broadcast in units of what a step needs and takes."""
        self.chance, self.bound, self.spread = random.Random(seed), bound, spread
        self.group_s = num_workers * STEP_S / (SIZE * rate)
        self.broadcast_s = broadcast * STEP_S
        self.pace = None if is_eager else make_pace(bound)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.now, self.step, self.is_training = 0.0, 0, False
        self.names = [f"w{number}" for number in range(num_workers)]
        self.version = dict.fromkeys(self.names, 0)
        self.running: dict[str, tuple[int, float]] = {}
        """Worker -> version and expected end of its group."""
        self.accepted: list[int] = []
        self.lags: list[int] = []
        self.num_stale = 0
        self.waits_from = self.waited_s = 0.0
        for name in self.names:
            self._note_installed(name)

    def make_steps(self, num_steps: int) -> None:
        """Go on until the learner has made these steps, the first fifth of which is the run-in."""
        while self.step < num_steps:
            self._begin_step()
            self._grant()
            due_at = self.pace.deadline if self.pace is not None else None
            at, _, event = heapq.heappop(self.events)
            if due_at is not None and due_at < at:
                heapq.heappush(self.events, (at, len(self.events), event))
                self.now = due_at
                continue
            self.now = at
            event()
            if self.step == num_steps // 5 and not self.is_training:
                self.waited_s, self.lags = 0.0, []

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, self.chance.getrandbits(60), event))

    def _begin_step(self) -> None:
        fresh = [version for version in self.accepted if version >= self.step - self.bound]
        self.num_stale += 0 if self.is_training else len(self.accepted) - len(fresh)
        if self.is_training or len(fresh) < SIZE:
            return
        fresh.sort()
        self.lags += [self.step - version for version in fresh[:SIZE]]
        self.accepted, waited_s = fresh[SIZE:], self.now - self.waits_from
        self.waited_s += waited_s
        self.is_training = True
        if self.pace is not None:
            self.pace.begin_step(waited_s=waited_s, now=self.now)
        self._after(STEP_S * self.chance.uniform(0.95, 1.05), self._end_step)

    def _end_step(self) -> None:
        self.step += 1
        self.is_training, self.waits_from = False, self.now
        if self.pace is not None:
            self.pace.end_step(self.step, now=self.now)
        for name in self.names:
            late_s = self.broadcast_s * self.chance.uniform(0.9, 1.1)
            self._after(late_s, partial(self._install, name, self.step))

    def _install(self, name: str, version: int) -> None:
        self.version[name] = max(version, self.version[name])
        self._note_installed(name)

    def _note_installed(self, name: str) -> None:
        if self.pace is not None:
            self.pace.installed(name, self.version[name], now=self.now)

    def _end_group(self, name: str) -> None:
        self.accepted.append(self.running.pop(name)[0])

    def _grant(self) -> None:
        num_unspent = len(self.accepted) + SIZE * self.is_training
        num_promised = self.step * SIZE + num_unspent + len(self.running)
        loads = [self._load(name) for name in self.names]
        num_due = None
        if self.pace is not None and not self.pace.is_resting(now=self.now):
            num_due = self.pace.num_due(
                loads,
                list(self.version.values()),
                running=[self._expected(name) for name in self.running],
                num_accepted=num_unspent,
                num_promised=num_promised,
                now=self.now,
            )
        elif self.pace is not None:
            return
        for name in islice(by_finish(loads, num_promised=num_promised), num_due):
            group_s = self.group_s * self.chance.lognormvariate(-(self.spread**2) / 2, self.spread)
            self.running[name] = self.version[name], self.now + self.group_s
            self._after(group_s, partial(self._end_group, name))

    def _expected(self, name: str) -> float:
        # The longer it takes, the longer it is expected to go on.
        return max(self.running[name][1], self.now + self.spread * self.group_s)

    def _load(self, name: str) -> Load:
        most = (self.bound + self.version[name] + 1) * SIZE
        free_at = self._expected(name) if name in self.running else self.now
        group_s = self.group_s / FULL_SLOWDOWN
        soon = (self.bound + max(self.version.values()) + 1) * SIZE
        return Load(name, 1, name in self.running, most, soon, group_s, group_s, [free_at])


class TestUnderRandomDelays:
    @settings(max_examples=10)
    @given(
        seed=st.integers(0, 2**16),
        bound=st.sampled_from([0, 1, 2, 6, 11]),
        rate=st.sampled_from([0.5, 0.8, 1.0, 1.2, 2.0, 4.0]),
        num_workers=st.integers(1, 8),
        broadcast=st.floats(0.0, 3.0),
        spread=st.floats(0.0, 1.0),
    )
    def test_the_learner_makes_its_steps_within_the_bound(self, **numbers: Any) -> None:
        late, eager = Play(**numbers), Play(**numbers, is_eager=True)
        late.make_steps(20)
        eager.make_steps(20)
        assert max(late.lags) <= numbers["bound"]
        # The margin learns from a few waits of about a group.
        assert late.waited_s <= 1.2 * eager.waited_s + 8 * late.group_s + STEP_S

    @pytest.mark.parametrize("bound", [2, 6])
    @pytest.mark.parametrize(
        ("rate", "broadcast", "least"), [(2.0, 0.1, 1.0), (4.0, 0.5, 1.0), (4.0, 1.5, 2.0)]
    )
    def test_groups_are_about_as_fresh_as_they_can_be(
        self, bound: int, rate: float, broadcast: float, least: float
    ) -> None:
        # least: the mean of ceil(broadcast + u) over the last 1 / rate steps before the learner
        # begins. Versions are not delayed by each other here.
        lags, waited_s, eager_lags, eager_waited_s = [], 0.0, [], 0.0
        for seed in range(2):
            numbers: dict[str, Any] = {"seed": seed, "bound": bound, "rate": rate}
            numbers |= {"num_workers": 4, "broadcast": broadcast, "spread": 0.2}
            late, eager = Play(**numbers), Play(**numbers, is_eager=True)
            late.make_steps(60)
            eager.make_steps(60)
            lags += late.lags
            eager_lags += eager.lags
            waited_s += late.waited_s
            eager_waited_s += eager.waited_s
        assert fmean(eager_lags) > bound - 0.5
        assert fmean(lags) <= least + 0.3
        assert waited_s - eager_waited_s <= 0.01 * 2 * 48 * STEP_S


class TestScheduler:
    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({}, [13]),
            # The groups of seven steps are granted: fast has places for four, and four wait there.
            ({"is_eager": True}, list(range(13, 21))),
            ({"prompts_are_free": True}, list(range(13, 21))),
        ],
    )
    def test_a_waiting_learner_gets_a_held_group_and_no_copy(
        self, change: dict[str, bool], expected: list[int]
    ) -> None:
        granting = make_granting(
            of={"max_staleness": 6, "hedge_factor": 2.0} | change,
            buffer=StalenessBuffer(max_staleness=6, lineages=LINEAGES),
        )
        workers = [with_places("slow", (2, 3), 2), with_places("fast", (2, 3), 4)]
        for step in (3, 4, 5):
            for worker in workers:
                worker.installed = PolicyVersion(2, step)
                granting.just_in_time.installed(worker.node_id, step, now=10.0 * step + 1)
            granting.begin_step(waited_s=0.0, now=10.0 * step)
            granting.end_step(step + 1, now=10.0 * step + 10)
        now = 61.0
        granting.finish_times.made("slow", num_tokens=10, seconds=100.0, now=now)
        granting.finish_times.made("fast", num_tokens=10, seconds=1.0, now=now)
        granting.leases.grant(12, "slow", now=now - 50)
        granting.groups.next_group_id = 13
        granting.buffer.num_unspent = lambda *, step: 3  # type: ignore[method-assign]
        assert granted(granting, *workers, now=now)["fast"] == expected
        assert granting.counters["hedges/issued"] == 0
