"""Active partial rollouts in a worker: stopped early, continued later, handed over, recovered."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from echo.runtime.worker.sampling import EngineCall, PartialRules, RolloutLoop

from echo.core.rollout import Lineage, PartialRollout, PolicyVersion
from echo.engine.engine import Completion, Request, Sampling, VersionError
from echo.leases.partials import PartialGroup, PartialGroups, decode_groups
from echo.runtime.threads import ThreadPools
from echo.wire.messages import Lease
from tests.e2e.audit import audit
from tests.runtime.harness import Play, Run, ends, running

SAMPLING = Sampling(1.0, 1.0, 0, 64, ())


def lease(group_id: int) -> Lease:
    return Lease(group_id=group_id, attempt=0, seed=group_id, prompt_ids=(1,), example={})


class ScriptedEngine:
    """Samples one token per turn for all; member m of group g ends after `lengths[g][m]`."""

    def __init__(self, lengths: dict[int, tuple[int, ...]], *, is_continuous: bool = False) -> None:
        self.lengths = lengths
        self.is_continuous = is_continuous
        self.calls: list[list[tuple[str, int, int]]] = []
        """(request, tokens before, seed) of each call."""
        self.turn_s = 0.002
        self.installed = PolicyVersion(1, 0)
        self.num_turns = 0

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        should_stop: Callable[[], bool],
        on_tokens: Callable[[int], None],
        on_completion: Callable[[Completion], None],
        exact_version: PolicyVersion | None = None,
    ) -> list[Completion]:
        if exact_version not in (None, self.installed):
            raise VersionError(f"exactly {exact_version} is wanted, {self.installed} is installed")
        self.calls.append([(r.request_id, len(r.prefix_ids), r.seed) for r in requests])
        done = [0] * len(requests)
        is_ended = [False] * len(requests)
        while not all(is_ended) and not should_stop():
            time.sleep(self.turn_s)
            for index, request in enumerate(requests):
                if is_ended[index]:
                    continue
                done[index] += 1
                group_id, _, member = map(int, request.request_id.split("."))
                total = len(request.prefix_ids) + done[index]
                if total >= self.lengths[group_id][member]:
                    is_ended[index] = True
                    on_completion(self._completion(request, done[index], "stop"))
            self.num_turns += 1
            on_tokens(len(requests) - sum(is_ended))
        return [
            self._completion(request, done[index], "stop" if is_ended[index] else "abort")
            for index, request in enumerate(requests)
        ]

    def _completion(self, request: Request, count: int, reason: Any) -> Completion:
        start = len(request.prefix_ids)
        return Completion(
            request.request_id,
            np.arange(start, start + count, dtype=np.int32),
            np.full(count, -1, np.float32),
            reason,
            np.full((count, 2), (1, 0), np.int32),
        )


class FakeSession:
    """The part of a worker's session that sampling touches."""

    def __init__(self, group_ids: Sequence[int]) -> None:
        self.partials = PartialGroups()
        for group_id in group_ids:
            self.partials.add(lease(group_id))
        self.installed_version: PolicyVersion | None = PolicyVersion(1, 0)
        self.learner_step = 0
        self.lineages = (Lineage(1, 0),)
        self.partial_counts: Counter[str] = Counter()
        self.tokens_sampled = 0
        self.shipped: list[tuple[int, ...]] = []

        class Broadcast:
            run_id = "run"

        self.broadcast = Broadcast()

    def take(
        self, max_groups: int, *, group_size: int, max_rollouts: int, now: float
    ) -> list[PartialGroup]:
        return self.partials.take(
            max_groups,
            group_size=group_size,
            max_rollouts=max_rollouts,
            installed=self.installed_version,
        )

    def park(self, partial: PartialGroup) -> None:
        self.partials.park(partial)

    def ship(self, *, interval_s: float, now: float) -> list[Any]:
        due = self.partials.take_due(interval_s=interval_s, now=now)
        if due:
            self.shipped.append(tuple(partial.num_tokens for partial in due))
        return []


class Loop:
    """A RolloutLoop on a scripted engine, run until nothing is left to do."""

    def __init__(
        self,
        tmp_path: Path,
        lengths: dict[int, tuple[int, ...]],
        *,
        groups_per_batch: int,
        is_continuous: bool = False,
        **rules: Any,
    ) -> None:
        self.engine = ScriptedEngine(lengths, is_continuous=is_continuous)
        self.session = FakeSession(sorted(lengths))
        self.delivered: list[PartialGroup] = []
        self.refused: list[tuple[int, str]] = []
        self.wake = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.path = tmp_path / "partials.bin"
        self.threads = ThreadPools()
        clock = asyncio.get_running_loop().time
        self.rollouts = RolloutLoop(
            self.session, self.engine, SAMPLING,  # type: ignore[arg-type]
            rules=PartialRules(**rules), group_size=2, groups_per_batch=groups_per_batch,
            path=self.path, admit=lambda partial: True, refuse=self._refuse, deliver=self._deliver,
            wake=self.wake.set,
            perform=lambda actions: None, spawn=self._spawn, threads=self.threads, clock=clock,
            has_ended=lambda: False, log=logging.getLogger("test"),
        )  # fmt: skip

    def _spawn(self, work: Any, *, name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    def _refuse(self, leases: Sequence[Lease], why: str) -> None:
        for given_back in leases:
            self.session.partials.end((given_back.group_id, given_back.attempt))
            self.refused.append((given_back.group_id, why))

    def _deliver(self, partial: PartialGroup) -> None:
        self.delivered.append(partial)
        self.session.partials.end(partial.key)
        self.wake.set()

    async def run(self, *, until: Callable[[], bool] | None = None) -> None:
        is_done = until or (lambda: len(self.delivered) == len(self.engine.lengths))
        async with asyncio.timeout(60):
            while not is_done():
                self.wake.clear()
                self.rollouts.sample_more()
                if not is_done():
                    await self.wake.wait()

    async def turns(self, number: int) -> None:
        """Begin, and wait until the engine has taken so many turns."""
        self.rollouts.sample_more()
        async with asyncio.timeout(60):
            while self.engine.num_turns < number:  # noqa: ASYNC110, in another thread
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        await asyncio.gather(*self.tasks)
        self.threads.close()


LENGTHS = {0: (2, 50), 1: (2, 3), 2: (60, 2), 3: (3, 3), 4: (2, 2), 5: (4, 4)}


def test_a_batch_is_stopped_at_its_target_and_the_rest_goes_on_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop = Loop(tmp_path, LENGTHS, groups_per_batch=4, over_submission=2.0)
        await loop.run()
        await loop.close()
        first, second, *_ = loop.engine.calls
        assert [name for name, *_ in first] == [f"{g}.0.{m}" for g in range(4) for m in range(2)]
        # Groups 1 and 3 are whole; of the others only what is unfinished goes on, before 4 and 5.
        assert [name for name, *_ in second][:2] == ["0.0.1", "2.0.0"]
        assert [name for name, *_ in second][2:] == ["4.0.0", "4.0.1", "5.0.0", "5.0.1"]
        assert {before for _, before, _ in second[:2]} == {3}
        seeds = {seed for name, _, seed in first + second if name == "0.0.1"}
        assert len(seeds) == 2
        for partial in loop.delivered:
            for index, member in enumerate(partial.members):
                length = LENGTHS[partial.lease.group_id][index]
                assert member.token_ids.tolist() == list(range(length)), "each token once"
        counts = loop.session.partial_counts
        assert counts["resumed"] >= 2
        assert counts["wasted_tokens"] == 0

    asyncio.run(scenario())


def test_without_over_submission_a_batch_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop = Loop(tmp_path, LENGTHS, groups_per_batch=4)
        await loop.run()
        await loop.close()
        assert len(loop.engine.calls) == 2
        # Whole groups do not wait for the others of their batch.
        assert [d.lease.group_id for d in loop.delivered[:2]] == [1, 3]
        assert loop.session.partial_counts["interrupted"] == 0

    asyncio.run(scenario())


def test_a_batch_is_not_stopped_for_nothing(tmp_path: Path) -> None:
    """The target is reached, but no other group waits for the room."""

    async def scenario() -> None:
        lengths = {group_id: LENGTHS[group_id] for group_id in range(4)}
        loop = Loop(tmp_path, lengths, groups_per_batch=4, over_submission=2.0)
        await loop.run()
        await loop.close()
        assert len(loop.engine.calls) == 1

    asyncio.run(scenario())


def test_an_engine_that_takes_requests_at_any_time_gets_more_than_it_holds(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop = Loop(tmp_path, LENGTHS, groups_per_batch=2, is_continuous=True, over_submission=1.5)
        assert (loop.rollouts.num_places, loop.rollouts.max_groups) == (3, 5), "and two that wait"
        for _ in range(2):
            loop.rollouts.sample_more()
            assert len(loop.session.partials.running) == 3
        await loop.run()
        await loop.close()
        assert len(loop.engine.calls) == len(LENGTHS), "one call for each, none stopped"

    asyncio.run(scenario())


def test_a_stopped_batch_is_filled_up_by_what_its_groups_have_left_to_do(tmp_path: Path) -> None:
    async def scenario() -> None:
        lengths = {0: (2, 50), 1: (50, 2), 2: (3, 3), 3: (2, 2), 4: (2, 2), 5: (2, 2)}
        loop = Loop(tmp_path, lengths, groups_per_batch=3, over_submission=3.0)
        await loop.run()
        await loop.close()
        second = [name for name, *_ in loop.engine.calls[1]]
        assert second == ["0.0.1", "1.0.0", "3.0.0", "3.0.1", "4.0.0", "4.0.1"], "six rows"

    asyncio.run(scenario())


def test_a_call_ends_after_a_while_and_what_it_has_is_shipped_and_saved(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop = Loop(tmp_path, {0: (1 << 30, 1 << 30)}, groups_per_batch=1, ship_s=0.1)
        await loop.run(until=lambda: len(loop.session.shipped) >= 2)
        await loop.rollouts.leave()
        await loop.close()
        assert len(loop.engine.calls) >= 2
        assert loop.session.shipped == sorted(loop.session.shipped)
        assert len(loop.session.shipped) >= 2
        [partial] = decode_groups(loop.path.read_bytes(), run_id="run")
        assert partial.num_tokens > 0
        assert partial.members[0].token_ids.tolist() == list(range(partial.num_tokens // 2))

    asyncio.run(scenario())


def test_what_is_held_is_interrupted_and_goes_on_when_it_is_released(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop = Loop(tmp_path, {0: (1 << 30, 3)}, groups_per_batch=1)
        await loop.turns(4)
        await loop.rollouts.hold()
        [partial] = loop.session.partials.interrupted.values()
        assert partial.members[1].is_finished
        loop.engine.lengths[0] = (partial.num_tokens + 5, 3)
        loop.rollouts.sample_more()
        assert not loop.rollouts.is_busy
        loop.rollouts.release()
        await loop.run()
        await loop.close()
        assert [name for name, *_ in loop.engine.calls[1]] == ["0.0.0"]

    asyncio.run(scenario())


def test_a_damaged_file_is_dropped_and_a_full_disk_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        loop = Loop(tmp_path / "gone", {0: (1 << 30, 3)}, groups_per_batch=1)
        loop.session.counters = type("C", (), {"add": lambda self, name: None})()  # type: ignore[attr-defined]
        await loop.turns(4)
        await loop.rollouts.leave()
        loop.path.parent.mkdir()
        loop.path.write_bytes(b"not a file of partial groups")
        await loop.rollouts.recover()
        await loop.close()

    asyncio.run(scenario())
    assert "cannot keep unfinished rollouts in" in caplog.text
    assert "dropped" in caplog.text


# --- whole runs ----------------------------------------------------------------------------------

LONG: dict[str, Any] = {
    "sampling": {"max_completion_tokens": 60},
    "sync": {"max_staleness": 3},
    "batch": {"groups_per_step": 2},
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have the engine pause at turn 30 of a call, until the event is set or it is stopped.

    Calls that follow pause at their first turn: what is unfinished then stays so for a while.
    """
    is_over, has_paused, on_tokens = threading.Event(), threading.Event(), EngineCall.on_tokens
    num_turns: Counter[EngineCall] = Counter()

    def wait_first(call: EngineCall, number: int) -> None:
        on_tokens(call, number)
        num_turns[call] += 1
        if num_turns[call] >= 30:
            has_paused.set()
        while has_paused.is_set() and not (is_over.is_set() or call.should_stop()):
            is_over.wait(0.01)

    monkeypatch.setattr(EngineCall, "on_tokens", wait_first)
    return is_over


def check(run: Run, *, max_staleness: int = 3) -> None:
    result = audit(run.ledger(), max_staleness=max_staleness, groups_per_step=2, is_finished=True)
    assert result.problems == []
    assert all(len(end) == 1 for end in ends(run.ledger()).values())


@pytest.mark.slow
def test_a_run_with_over_submission_keeps_its_promises(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 12}, rollout={"over_submission": 2.0}, **LONG)
        worker = await run.worker("w1", worker={"max_concurrent_rollouts": 8})
        async with running(learner, worker) as (learning, _):
            assert await learning == "finished"
        counts = worker.session.partial_counts
        assert counts["interrupted"] > 0
        assert counts["resumed"] > 0
        assert any(len(record["versions"]) > 1 for record in run.ledger("accepted"))
        check(run)

    play(scenario)


@pytest.mark.slow
def test_with_drop_no_rollout_goes_on_under_other_weights(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run={"max_steps": 8},
            rollout={"over_submission": 2.0, "stale_tokens": "drop"},
            loss={"kind": "gepo"},
            **LONG,
        )
        worker = await run.worker("w1", worker={"max_concurrent_rollouts": 8})
        async with running(learner, worker) as (learning, _):
            assert await learning == "finished"
        check(run)

    play(scenario)


@pytest.mark.slow
def test_a_worker_told_to_stop_hands_over_what_another_then_finishes(
    play: Play, slow: threading.Event
) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 6}, **LONG)
        first = await run.worker("w1", worker={"max_concurrent_rollouts": 8})
        async with running(learner, first) as (learning, leaving):
            tokens = first.session.partials
            assert await learner.wait_until(
                lambda: sum(d.num_progress for d in tokens.running.values()) > 40, within_s=60
            )
            first.interrupt()
            assert await leaving == "interrupted"
            shipped = learner.session._scheduler.shipped
            assert len(shipped)
            slow.set()
            second = await run.worker("w2")
            async with running(second):
                assert await learning == "finished"
            assert second.session.partial_counts["resumed"] > 0
            assert learner.session.counters["partials/handed_over"] > 0
        check(run)

    play(scenario)


@pytest.mark.slow
def test_a_killed_worker_goes_on_where_its_file_says(play: Play, slow: threading.Event) -> None:
    async def scenario(run: Run) -> None:
        long = {**LONG, "sampling": {"max_completion_tokens": 110}}
        learner = await run.learner(run={"max_steps": 6}, rollout={"partial_ship_s": 1}, **long)
        path = run.run_dir / "workers" / "w1" / "partials.bin"
        async with running(learner) as (learning,):
            first = await run.worker("w1")
            async with running(first):
                assert await learner.wait_until(path.exists, within_s=60)
            slow.set()
            again = await run.worker("w1")
            async with running(again):
                assert await learning == "finished"
            assert again.session.partial_counts["resumed_tokens"] > 0
        check(run)

    play(scenario)


def want_exactly(loop: Loop, version: PolicyVersion) -> None:
    queue = loop.session.partials.queue
    for key, each in queue.items():
        queue[key] = msgspec.structs.replace(each, exact_version=version)


@pytest.mark.parametrize("is_continuous", [False, True])
def test_groups_of_an_exact_version_are_sampled_to_their_end(
    tmp_path: Path, is_continuous: bool
) -> None:
    """Between two parts of one newer weights would get in."""

    async def scenario() -> None:
        for version, num_calls in ((None, 4), (PolicyVersion(1, 0), 2)):
            lengths = {0: (1, 30), 1: (1, 30)}
            loop = Loop(
                tmp_path, lengths, groups_per_batch=1, is_continuous=is_continuous, ship_s=0.02
            )
            if version is not None:
                want_exactly(loop, version)
            await loop.run()
            await loop.close()
            found = len(loop.engine.calls)
            assert found == num_calls if version else found >= num_calls

    asyncio.run(scenario())


@pytest.mark.parametrize("is_continuous", [False, True])
def test_an_engine_with_newer_weights_refuses_an_exact_version(
    tmp_path: Path, is_continuous: bool
) -> None:
    """The session may not know of them yet."""

    async def scenario() -> None:
        loop = Loop(tmp_path, LENGTHS, groups_per_batch=3, is_continuous=is_continuous)
        want_exactly(loop, PolicyVersion(1, 0))
        loop.engine.installed = PolicyVersion(1, 1)
        await loop.run(until=lambda: len(loop.refused) == len(LENGTHS))
        assert not loop.rollouts.is_busy
        assert not loop.engine.calls
        await loop.close()
        assert {group_id for group_id, _ in loop.refused} == set(LENGTHS)
        assert {why for _, why in loop.refused} == {"exactly v0 is wanted, v1 is installed"}

    asyncio.run(scenario())


def test_what_others_have_sampled_under_another_version_begins_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop = Loop(tmp_path, {0: (9, 9)}, groups_per_batch=1)
        partials = loop.session.partials
        newer = PolicyVersion(1, 1)
        begun = [
            PartialRollout().extended(
                np.arange(3, dtype=np.int32), np.zeros(3, np.float32),
                np.array([(1, step)] * 3, np.int32), finish_reason="abort",
            )
            for step in (0, 1)
        ]  # fmt: skip
        partials.queue.clear()
        partials.add(msgspec.structs.replace(lease(0), exact_version=newer), begun)
        loop.session.installed_version = loop.engine.installed = newer
        await loop.run()
        await loop.close()
        [call] = loop.engine.calls
        assert [(name, num_before) for name, num_before, _ in call] == [("0.0.0", 0), ("0.0.1", 3)]
        assert loop.session.partial_counts["wasted_tokens"] == 3

    asyncio.run(scenario())
