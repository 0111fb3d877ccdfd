from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.bounds import MAX_TRACEBACK_LENGTH
from echo.core.buffer import StalenessBuffer
from echo.core.errors import DataError
from echo.core.monitoring.metrics import Counters
from echo.core.records import Cancelled, Discarded, Granted
from echo.core.rollout import Lineage, PolicyVersion
from echo.leases.book import LeaseBook, LeasedWorker
from echo.leases.groups import MAX_ATTEMPTS
from echo.leases.open_groups import AppendRecord, FinishedGroups
from echo.leases.results import StoreGroup
from echo.leases.run import LeaseSettings, RunState
from echo.leases.scheduler import Scheduler
from echo.wire.actions import Note, PeerFaults, Routes, Send
from echo.wire.codec import encode_group
from echo.wire.messages import (
    Ack,
    Deliver,
    Failed,
    Grant,
    Heartbeat,
    Lease,
    LeaseState,
    NodeStats,
    Reclaim,
)
from tests.roles.harness import Prompts, make_group, message_of

LINEAGES = (Lineage(1, 0), Lineage(2, 3))


def make_settings(**changes: Any) -> LeaseSettings:
    settings: dict[str, Any] = {
        "max_staleness": 1,
        "groups_per_step": 4,
        "group_size": 2,
        "max_completion_tokens": 100,
        "vocab_size": 10,
        "heartbeat_s": 1.0,
        "max_zero_signal_groups": 80,
    }
    return LeaseSettings(**(settings | changes))


class Granting(Scheduler):
    """A scheduler, with the messages that it sends to workers."""

    def __init__(self, settings: LeaseSettings, run: RunState, **others: Any) -> None:
        self.counters, self.prompts = Counters(), others["prompts"]
        self.routes = Routes(self.counters)
        super().__init__(
            settings,
            run,
            counters=self.counters,
            routes=self.routes,
            peer_faults=PeerFaults(),
            **others,
        )

    @property
    def leases(self) -> LeaseBook:
        return self.groups.leases

    def make_round(
        self, workers: Sequence[LeasedWorker], *, now: float
    ) -> tuple[list[Any], dict[str, list[Lease]]]:
        """Make a round of grants; return its records, and the new leases of each worker."""
        for worker in workers:
            self.routes.learn(worker.node_id, worker.node_id)
        actions = self.grant(workers, now=now)
        granted: dict[str, list[Lease]] = {}
        for name, message in sent(actions):
            if isinstance(message, Grant):
                granted.setdefault(name, []).extend(message.leases)
        return [action for action in actions if not isinstance(action, Send)], granted

    def compare(
        self, worker: LeasedWorker, message: Heartbeat, *, has_progress: bool, now: float
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the groups that a heartbeat has sent again, and the leases to be forgotten."""
        self.routes.learn(worker.node_id, worker.node_id)
        actions = self.on_heartbeat(worker, message, has_progress=has_progress, now=now)
        messages = [message for _, message in sent(actions)]
        lost = [lease for each in messages if isinstance(each, Grant) for lease in each.leases]
        acks = [each for each in messages if isinstance(each, Ack)]
        return [lease.group_id for lease in lost], [(a.group_id, a.attempt) for a in acks]


def sent(actions: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the messages among the actions, with the link that each takes."""
    return [(each.peer, message_of(each.frames)) for each in actions if isinstance(each, Send)]


def make_granting(*, of: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> Granting:
    state: dict[str, Any] = {"step": 3, "next_group_id": 12}
    state |= {name: changes.pop(name) for name in state if name in changes}
    run = RunState(leases=LeaseBook(timeout_s=10.0), lineages=LINEAGES, finished=range(12), **state)
    others: dict[str, Any] = {
        "buffer": StalenessBuffer(max_staleness=1, lineages=LINEAGES),
        "prompts": Prompts({}),
    }
    return Granting(make_settings(**of), run, **(others | changes))


def make_worker(name: str, installed: tuple[int, int] | None, capacity: int = 8) -> LeasedWorker:
    version = None if installed is None else PolicyVersion(*installed)
    return LeasedWorker(name, version, capacity)


def listing(*leases: tuple[int, int, int]) -> Heartbeat:
    return Heartbeat(
        installed=None,
        capacity=0,
        leases=tuple(LeaseState(group_id=g, attempt=a, num_tokens=n) for g, a, n in leases),
        stats=NodeStats(),
    )


def recorded(actions: list[Any], kind: type[Any]) -> list[Any]:
    records = [action.record for action in actions if isinstance(action, AppendRecord)]
    return [record for record in records if isinstance(record, kind)]


def ended(group_id: int, reason: str) -> AppendRecord:
    return AppendRecord(Discarded(group=group_id, reason=reason, step=3))


def granted(granting: Granting, *workers: LeasedWorker, now: float = 0.0) -> dict[str, list[int]]:
    records, leases = granting.make_round(workers, now=now)
    grants = recorded(records, Granted)
    assert sorted((r.worker, r.group) for r in grants) == sorted(
        (name, lease.group_id) for name, given in leases.items() for lease in given
    )
    return {name: [lease.group_id for lease in given] for name, given in leases.items()}


def test_a_closed_admission_is_told_without_looking_at_anybody() -> None:
    granting = make_granting()
    granting.buffer.num_unspent = lambda *, step: 4  # type: ignore[method-assign]
    newest = PolicyVersion(2, 3)
    assert not granting.quota.is_closed(newest)
    assert granting.quota.is_closed(PolicyVersion(2, 1))  # (1 + 1 + 1) * 4 = 12: all are consumed
    assert len(granted(granting, make_worker("w1", (2, 3), 100))["w1"]) == 4
    assert granting.quota.is_closed(newest)
    assert granting.quota.is_closed(None)
    # A group that ends otherwise makes room for another.
    granting.groups.end(12, "failed")
    assert not granting.quota.is_closed(newest)
    assert granted(granting, make_worker("w1", (2, 3), 100)) == {"w1": [16]}
    assert granting.quota.is_closed(newest)


def test_a_closed_admission_keeps_from_neither_moves_nor_copies_while_a_batch_waits() -> None:
    granting = make_granting()
    granted(granting, make_worker("w1", (2, 3), 100))
    assert not granting.quota.is_closed(PolicyVersion(2, 3))


def test_prompts_that_cannot_be_had_are_left_out_and_counted() -> None:
    fault = DataError("example 12: no chat template")
    granting = make_granting(prompts=Prompts({12: fault, 14: fault}))
    records, leases = granting.make_round([make_worker("w1", (2, 3), 3)], now=0.0)
    assert [lease.group_id for lease in leases["w1"]] == [13, 15, 16]
    ended = [(r.group, r.reason) for r in recorded(records, Discarded)]
    assert ended == [(12, "prompt_error"), (14, "prompt_error")]
    texts = [r.text for r in records if isinstance(r, Note)]
    assert texts[0] == "group 12 is left out: example 12: no chat template"
    assert granting.counters["discarded/prompt_error"] == 2


def test_a_round_of_grants_that_fails_changes_nothing() -> None:
    faults: dict[int, Exception] = {12: DataError("no chat template"), 14: ZeroDivisionError()}
    granting, worker = make_granting(prompts=Prompts(faults)), make_worker("w1", (2, 3), 3)
    with pytest.raises(ZeroDivisionError):
        granting.make_round([worker], now=0.0)
    granting.groups.validate()
    assert granting.groups.next_group_id == 12
    assert granting.leases.num_running == 0
    assert not granting.counters["discarded/prompt_error"]
    del faults[14]
    for ended in ([12], []):
        records, _ = granting.make_round([worker], now=0.0)
        assert [each.group for each in recorded(records, Discarded)] == ended
    assert 13 in {record.group_id for record in granting.leases.worker_leases("w1")}


def test_a_round_that_fails_after_its_moves_are_chosen_asks_no_holder_for_a_lease() -> None:
    faults: dict[int, Exception] = {}
    granting, first, second = shared(prompts=Prompts(faults), hedge_factor=None)
    granting.grant([first, second], now=1.0)  # "first" is asked for 16 to 19, and keeps them
    beat(granting, first, *begun(*range(12, 20)), now=5.1)
    faults |= dict.fromkeys(range(16, 20), ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        granting.grant([first, second], now=5.1)
    faults.clear()
    assert reclaims(granting.grant([first], now=5.2)) == [], "there is no worker to move to"
    [asked] = reclaims(granting.grant([first, second], now=5.2))
    assert {group_id for group_id, _ in asked.leases} <= {12, 13, 14, 15}


def test_prompts_none_of_which_can_be_had_end_the_run() -> None:
    """With the groups that were granted before, and an end of every one that cannot be."""
    prompts = Prompts(dict.fromkeys(range(13, 2000), DataError("no chat template")))
    granting = make_granting(prompts=prompts)
    records, leases = granting.make_round([make_worker("w1", (2, 3), 3)], now=0.0)
    assert "1000 prompts in a row cannot be used, the last because: no" in str(
        granting.prompt_fault
    )
    assert [lease.group_id for lease in leases["w1"]] == [12]
    assert [each.group for each in recorded(records, Discarded)] == list(range(13, 1013))


def test_a_prompt_that_is_gone_when_its_group_comes_back_costs_that_group_only() -> None:
    """Such as after a restart of the learner, which has kept no prompts."""
    faults: dict[int, Exception] = {}
    granting, worker = make_granting(prompts=Prompts(faults)), make_worker("w1", (2, 3), 3)
    assert granted(granting, worker) == {"w1": [12, 13, 14]}
    faults |= dict.fromkeys((12, 13), DataError("the row is gone"))
    group = make_group(12, PolicyVersion(2, 3))
    message = Deliver(group_id=12, attempt=0)
    actions = granting.results.on_deliver("w1", message, list(encode_group(group)), now=0.1)
    assert ended(12, "prompt_error") in actions
    assert any(
        a.text == "group 12 is left out: the row is gone" for a in actions if isinstance(a, Note)
    )
    lost, _ = granting.compare(worker, listing(), has_progress=False, now=2.1)
    assert lost == [14], "13 expires, and is left out then"
    granting.leases.expire(now=20.0)
    records, leases = granting.make_round([worker], now=20.0)
    assert ended(13, "prompt_error") in records
    assert 14 in [lease.group_id for lease in leases["w1"]]


def with_places(name: str, installed: tuple[int, int], num_places: int) -> LeasedWorker:
    """Return a worker that holds eight groups and samples so many of them at one time."""
    worker = make_worker(name, installed)
    worker.num_places = num_places
    return worker


def test_nothing_waits_at_a_worker_before_it_has_shown_its_speed() -> None:
    granting, worker = make_granting(), with_places("w1", (2, 3), 2)
    assert granted(granting, worker) == {"w1": [12, 13]}
    assert granted(granting, worker) == {}
    granting.finish_times.made("w1", num_tokens=10, seconds=1.0, now=0.0)
    assert granted(granting, worker) == {"w1": list(range(14, 20))}


@pytest.mark.parametrize(
    ("lag_s", "expected"),
    [
        # Four more than now may be promised once "old" has v3, too: two of them are left to it.
        (0.0, {"new": [12, 14, 16, 17], "old": [13, 15]}),
        # The other is done with all before that.
        (10.0, {"new": list(range(12, 20))}),
        # It should have it by now, so it is not reckoned with.
        (None, {"new": [12, 14, 16, 17, 18, 19], "old": [13, 15]}),
    ],
)
def test_what_a_worker_can_do_once_it_has_newer_weights_is_left_to_it_if_that_is_soon(
    lag_s: float | None, expected: dict[str, list[int]]
) -> None:
    granting = make_granting()
    new, old = with_places("new", (2, 3), 1), with_places("old", (1, 2), 1)
    now = 100.0
    for name in ("new", "old"):
        granting.finish_times.made(name, num_tokens=10, seconds=1.0, now=now)
    granting.finish_times.installed("new", PolicyVersion(1, 2), now=50.0)
    granting.finish_times.installed("old", PolicyVersion(1, 2), now=50.0 + 2 * (lag_s or 0.0))
    newest_at = now if lag_s is not None else now - 20.0
    granting.finish_times.installed("new", PolicyVersion(2, 3), now=newest_at)
    assert granted(granting, new, old, now=now) == expected


def test_returned_groups_are_granted_before_new_ones_and_settled_ones_never() -> None:
    granting = make_granting()
    for group_id in (12, 13, 14):
        granting.leases.revoke(granting.leases.grant(group_id, "w0", now=0.0))
    granting.groups.next_group_id = 15
    granting.groups.close(13)
    assert granted(granting, make_worker("w1", (2, 3), 3)) == {"w1": [12, 14, 15]}


def test_a_group_that_came_back_too_often_ends_and_the_next_is_granted() -> None:
    granting, worker = make_granting(), make_worker("w1", (2, 3), 1)
    for _ in range(MAX_ATTEMPTS):
        assert granted(granting, worker) == {"w1": [12]}
        [record] = granting.leases.worker_leases("w1")
        granting.leases.revoke(record)
    records, leases = granting.make_round([worker], now=0.0)
    assert ended(12, "attempts_exhausted") in records
    assert [lease.group_id for lease in leases["w1"]] == [13]
    assert granting.counters["discarded/attempts_exhausted"] == 1


def test_what_the_worker_lacks_is_sent_again_and_what_the_book_lacks_is_entered() -> None:
    granting, worker = make_granting(), make_worker("w1", (2, 3), 2)
    assert granted(granting, worker) == {"w1": [12, 13]}
    granting.groups.next_group_id = 30
    granting.leases.restore(25, {0: "w2", 3: "w1"}, now=0.0)

    def reconcile(now: float, *leases: tuple[int, int, int]) -> tuple[list[int], Any]:
        return granting.compare(worker, listing(*leases), has_progress=False, now=now)

    assert reconcile(1.0, (12, 0, 0)) == ([], [])  # 13 may still be on its way
    assert reconcile(2.5, (12, 0, 0)) == ([13], [])
    assert reconcile(3.0, (12, 0, 0), (13, 0, 0)) == ([], [])
    assert reconcile(4.0, (12, 0, 0)) == ([13], [])  # it had it, and lost it
    assert reconcile(4.1, (12, 0, 0), (13, 0, 0), (25, 3, 9)) == ([], [])
    assert granting.leases.group(25).workers[-1] == "w1"
    assert reconcile(4.2, (12, 0, 0), (13, 0, 0), (25, 3, 9), (4, 0, 0)) == ([], [(4, 0)])
    assert (worker.num_unknown, worker.is_stuck) == (1, False)  # 25 made progress
    assert reconcile(4.3, (12, 0, 0), (13, 0, 0), (25, 3, 9), (4, 0, 0)) == ([], [(4, 0)])
    assert (worker.num_unknown, worker.is_stuck) == (1, True)


def test_an_expired_lease_is_not_entered_again_and_binds_its_worker_until_it_is_gone() -> None:
    granting, worker = make_granting(), make_worker("w1", (2, 3), 2)
    granted(granting, worker)
    assert len(granting.leases.expire(now=10.0)) == 2
    beat = listing((12, 0, 0), (13, 0, -1))
    granting.compare(worker, beat, has_progress=False, now=10.1)
    assert granting.leases.waiting == [12, 13]
    # 13 lies finished in its outbox; 12 still occupies its engine.
    assert (worker.num_unknown, worker.is_stuck) == (1, True)
    assert granted(granting, worker) == {}
    granting.compare(worker, beat, has_progress=True, now=10.2)
    assert granted(granting, worker) == {"w1": [12]}


def test_nobody_but_its_holder_has_a_say_in_a_lease() -> None:
    granting, worker = make_granting(), make_worker("w1", (2, 3), 2)
    assert granted(granting, worker) == {"w1": [12, 13]}
    rival = make_worker("w2", (2, 3), 2)

    def say(name: str, group_id: int, reason: str) -> list[Any]:
        if reason:
            failed = Failed(group_id=group_id, attempt=0, reason=reason, detail="")
            return granting.results.on_failed(name, failed, now=0.1)
        group = make_group(group_id, PolicyVersion(2, 3), worker=name)
        message = Deliver(group_id=group_id, attempt=0)
        return granting.results.on_deliver(name, message, list(encode_group(group)), now=0.1)

    for reason in ("", "reward_error"):
        assert all(isinstance(each, Note) for each in say("w2", 12, reason))
    assert granting.counters["refused/not_leased"] == 2
    unwanted = granting.compare(rival, listing((12, 0, 5)), has_progress=True, now=0.1)[1]
    assert unwanted == [(12, 0)]
    assert granting.leases.num_leases("w1") == 2
    assert granting.leases.num_leases("w2") == 0
    # The holder itself is heard, also when it was taken for dead.
    granting.leases.drop_worker("w1")
    assert [type(each) for each in say("w1", 12, "")] == [StoreGroup]
    assert recorded(say("w1", 13, "reward_error"), Discarded)


@pytest.mark.parametrize("is_listed", [True, False], ids=["listed first", "delivered first"])
def test_a_lease_from_before_a_restart_is_no_rival_of_whoever_claims_it(is_listed: bool) -> None:
    granting, worker = make_granting(next_group_id=14), make_worker("w1", (2, 3), 2)
    for group_id in (12, 13):
        granting.leases.restore(group_id, {0: "w2", 1: "w1"}, now=0.0)
    if is_listed:
        beat = listing((12, 1, 5), (13, 1, 5))
        granting.compare(worker, beat, has_progress=True, now=0.1)
    group = make_group(12, PolicyVersion(2, 3), attempt=1)
    message = Deliver(group_id=12, attempt=1)
    [store] = granting.results.on_deliver("w1", message, list(encode_group(group)), now=0.2)
    assert isinstance(store, StoreGroup)
    failed = Failed(group_id=13, attempt=1, reason="reward_error", detail="")
    actions = granting.results.stored(12, is_useful=True, now=0.2)
    actions += granting.results.on_failed("w1", failed, now=0.2)
    assert not recorded(actions, Cancelled)
    assert granting.counters["leases_cancelled"] == granting.counters["hedges/lost"] == 0


def test_the_cause_of_a_failure_has_the_reason_and_the_end_of_the_traceback() -> None:
    granting = make_granting()
    granted(granting, make_worker("w1", (2, 3), 1))
    trace = f"{'a frame ' * 9999}KeyError"
    failed = Failed(
        group_id=12, attempt=0, reason="reward_error", detail="no \x1b answer", traceback=trace
    )
    [cause] = [
        action.cause
        for action in granting.results.on_failed("w1", failed, now=0.1)
        if isinstance(action, AppendRecord)
    ]
    assert cause.startswith("no ? answer\n")
    assert cause.endswith("a frame KeyError")
    assert len(cause) == len("no ? answer\n") + MAX_TRACEBACK_LENGTH


def test_a_group_of_which_nothing_can_be_learned_counts_against_its_worker() -> None:
    granting = make_granting(of={"max_zero_signal_groups": 3})
    granted(granting, make_worker("w1", (2, 3), 3))
    failed = Failed(group_id=12, attempt=0, reason="reward_error", detail="")
    granting.results.on_failed("w1", failed, now=0.1)
    for group_id in (13, 14):
        group = make_group(group_id, PolicyVersion(2, 3))
        message = Deliver(group_id=group_id, attempt=0)
        granting.results.on_deliver("w1", message, list(encode_group(group)), now=0.1)
        assert not granting.usefulness.is_set_aside("w1")
        granting.results.stored(group_id, is_useful=False, now=0.2)
        granting.usefulness.review({"w1": True, "w2": True}, now=0.3)
    assert granting.usefulness.is_set_aside("w1")


def test_progress_on_one_group_renews_those_that_wait_behind_it() -> None:
    granting, worker = make_granting(), make_worker("w1", (2, 3), 2)
    granted(granting, worker)

    def beat(now: float, num_tokens: int) -> None:
        granting.compare(
            worker,
            listing((12, 0, num_tokens), (13, 0, 0)),
            has_progress=False,
            now=now,
        )

    beat(8.0, 5)
    assert granting.leases.expire(now=12.0) == []
    beat(16.0, 5)
    assert len(granting.leases.expire(now=18.0)) == 2


@given(st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_settled_groups_are_a_set(first: list[int], second: list[int]) -> None:
    finished, expected = FinishedGroups(first), set(first)
    for group_id in second:
        finished.add(group_id)
        expected.add(group_id)
    assert {group_id for group_id in range(-3, 50) if group_id in finished} == expected


# --- leases that move -----------------------------------------------------------------------------


def beat(
    granting: Granting, worker: LeasedWorker, *states: LeaseState, now: float
) -> list[Reclaim]:
    """Let a worker list its leases; return what it is asked for again."""
    message = Heartbeat(installed=None, capacity=0, leases=states, stats=NodeStats())
    return reclaims(granting.on_heartbeat(worker, message, has_progress=True, now=now))


def reclaims(actions: Sequence[Any]) -> list[Reclaim]:
    return [message for _, message in sent(actions) if isinstance(message, Reclaim)]


def begun(*group_ids: int, running_s: float = 1.0) -> list[LeaseState]:
    return [
        LeaseState(group_id=g, attempt=0, num_tokens=3 if running_s else 0, running_s=running_s)
        for g in group_ids
    ]


def shared(*, num_begun: int = 8, **changes: Any) -> tuple[Granting, LeasedWorker, LeasedWorker]:
    """Return a worker that was given all groups and has begun some, and one that joins then."""
    prompts = {"prompts": changes.pop("prompts")} if "prompts" in changes else {}
    granting = make_granting(of=changes, **prompts)
    first, second = make_worker("first", (2, 3)), make_worker("second", (2, 3))
    for worker in (first, second):
        granting.routes.learn(worker.node_id, worker.node_id)
    granting.grant([first], now=0.0)
    ids = range(12, 20)
    waiting = begun(*ids[num_begun:], running_s=0.0)
    beat(granting, first, *begun(*ids[:num_begun]), *waiting, now=1.0)
    return granting, first, second


def test_a_newcomer_is_given_half_of_the_first_groups_once_their_holder_has_given_them_up() -> None:
    granting, first, second = shared()
    workers = [first, second]
    [asked] = reclaims(granting.grant(workers, now=1.0))
    moving = (16, 17, 18, 19)
    assert asked == Reclaim(leases=tuple((g, 0) for g in moving), is_begun_too=True)
    assert reclaims(granting.grant(workers, now=1.1)) == [], "it is asked once"
    assert granted(granting, *workers, now=1.2) == {}, "until then they are the first one's"
    # The request may be lost: what is still listed is asked for again.
    assert beat(granting, first, *begun(*range(12, 20)), now=2.1) == [asked]
    assert beat(granting, first, *begun(*range(12, 16)), now=2.2) == []
    assert granted(granting, *workers, now=2.2) == {"second": [16, 17, 18, 19]}
    assert granting.counters["leases_moved"] == 4
    assert granting.leases.num_running == 8
    beat(granting, second, *(msgspec.structs.replace(s, attempt=1) for s in begun(16)), now=2.5)
    assert reclaims(granting.grant(workers, now=2.5)) == []


def test_what_a_holder_keeps_is_copied_and_counts_once() -> None:
    granting, first, second = shared(hedge_factor=None)
    workers, states = [first, second], begun(*range(12, 20))
    granting.grant(workers, now=1.0)
    beat(granting, first, *states, now=4.9)
    assert granted(granting, *workers, now=5.0) == {}
    assert beat(granting, first, *states, now=5.1) == [], "it was asked often enough"
    assert granted(granting, *workers, now=5.1) == {"second": [16, 17, 18, 19]}
    assert granting.leases.num_running == 8
    assert granting.counters["hedges/issued"] == 4
    assert granted(granting, *workers, now=6.0) == {}


def test_only_what_was_not_begun_moves_once_a_group_was_made() -> None:
    granting, first, second = shared(num_begun=4)
    first.num_places = 4
    granting.finish_times.made("first", num_tokens=10, seconds=20.0, now=1.0)
    [asked] = reclaims(granting.grant([first, second], now=1.0))
    assert not asked.is_begun_too
    assert {group_id for group_id, _ in asked.leases} <= {16, 17, 18, 19}
    third = make_worker("third", (2, 3))
    granting.routes.learn("third", "third")
    again = reclaims(granting.grant([first, third], now=1.1))
    assert not {*asked.leases} & {each for message in again for each in message.leases}
    granting, first, second = shared(num_begun=8)
    granting.finish_times.made("first", num_tokens=10, seconds=20.0, now=1.0)
    assert reclaims(granting.grant([first, second], now=1.0)) == []


def test_episodes_of_agents_are_not_asked_for_once_begun() -> None:
    granting, first, second = shared(prompts_are_free=True)
    [asked] = reclaims(granting.grant([first, second], now=1.0))
    assert not asked.is_begun_too


@pytest.mark.parametrize("change", ["batch", "stale", "full", "unconfirmed", "room for new ones"])
def test_nothing_moves_without_need(change: str) -> None:
    granting, first, second = shared(max_staleness=2 if change == "room for new ones" else 1)
    if change == "batch":
        granting.buffer.num_unspent = lambda *, step: 4  # type: ignore[method-assign]
    elif change == "stale":
        second.installed = PolicyVersion(1, 2)
    elif change == "full":
        second.capacity = 0
    elif change == "room for new ones":
        granting.buffer.admission_staleness, second.num_places = 2, 1
    else:
        granting.leases.worker_leases("first")[0].is_confirmed = False
    assert reclaims(granting.grant([first, second], now=1.0)) == []
