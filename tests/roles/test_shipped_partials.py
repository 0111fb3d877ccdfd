"""What the learner keeps of unfinished groups, and who gets it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from echo.core.metrics import Counters
from echo.core.rollout import PartialRollout
from echo.leases.partials import ShippedPartials, decode_members, encode_members
from echo.wire import codec
from echo.wire.messages import Grant, Heartbeat, NodeStats, Partial
from tests.leases.test_scheduler import make_worker
from tests.roles.harness import Process, Run, make_lease, message_of


def partial(num_tokens: int, *, step: int = 0, reason: str = "") -> PartialRollout:
    return PartialRollout().extended(
        np.arange(num_tokens, dtype=np.int32),
        np.full(num_tokens, -0.5, np.float32),
        np.full((num_tokens, 2), (1, step), np.int32),
        finish_reason=reason or "abort",
    )


def begin(process: Process, *members: PartialRollout, key: tuple[int, int] = (0, 0)) -> None:
    """Have a worker's engine, which hangs, give up a group after so many tokens."""
    partials = process.session.partials
    partial_group = partials.running.get(key)
    if partial_group is None:
        installed = process.session.installed_version
        taken = partials.take(9, group_size=2, installed=installed)
        partials.running.update((d.key, d) for d in taken)
        partial_group = partials.running[key]
    partial_group.members = list(members)
    partials.park(partial_group)


def ship(run: Run, process: Process) -> None:
    now = run.world.now
    run.world.perform(process, process.session.ship(interval_s=0, now=now))
    run.world.run(now + 0.1)


def grants_to(run: Run, name: str) -> list[tuple[Grant, list[bytes]]]:
    sent = [(message_of(frames), frames[1:]) for _, to, frames in run.world.frames_sent
            if to == name]  # fmt: skip
    return [(message, payload) for message, payload in sent if isinstance(message, Grant)]


@pytest.fixture
def run(hanging_run: Run) -> Run:
    """Return a run whose worker w1 holds the groups 0, 1, 2 in an engine that hangs."""
    return hanging_run


def test_the_bound_holds_and_the_newest_statement_of_the_newest_attempt_wins() -> None:
    counters = Counters()
    shipped = ShippedPartials(counters, max_bytes=10)
    shipped.put(1, 0, b"12345", num_tokens=5)
    shipped.put(1, 0, b"123", num_tokens=3)
    assert shipped.num_bytes == 3, "a worker's newer statement replaces its older one"
    shipped.put(1, 1, b"1234", num_tokens=4)
    shipped.put(1, 0, b"12", num_tokens=4)
    assert shipped.grants([make_lease(1, 2)])[0][1] == (b"1234",)
    shipped.put(2, 0, b"1234567", num_tokens=7)
    assert 2 not in shipped
    assert counters["dropped/partials_full"] == 1
    shipped.discard(1)
    assert (shipped.num_bytes, len(shipped)) == (0, 0)


def test_what_workers_count_is_added_once() -> None:
    counters = Counters()
    shipped, member = ShippedPartials(counters), make_worker("w1", None)
    for counts in (
        {"interrupted": 2},
        {"interrupted": 2},
        {"interrupted": 5, "shipped": 1, "unknown": 7},
    ):
        stats = NodeStats(partials=counts)
        shipped.count(member, Heartbeat(installed=None, capacity=0, leases=(), stats=stats))
    assert counters.as_dict() == {"partials/interrupted": 5, "partials/shipped": 1}


def test_what_a_dead_worker_has_shipped_is_continued_by_another(run: Run) -> None:
    w1 = run.world.process("w1")
    begin(w1, partial(3, reason="stop"), partial(5))
    ship(run, w1)
    assert 0 in run.learner._scheduler.shipped
    run.world.kill(w1)
    run.world.run(9.0)
    w2 = run.start_worker("w2")
    w2.on_action.__self__.is_hung = True
    run.world.run(12.0)
    [(grant, payload)] = [each for each in grants_to(run, "w2") if each[1]]
    assert [(lease.group_id, lease.attempt) for lease in grant.leases] == [(0, 1)]
    assert [member.num_tokens for member in decode_members(payload[0])] == [3, 5]
    partial_group = (w2.session.partials.interrupted | w2.session.partials.running)[0, 1]
    assert [member.finish_reason for member in partial_group.members] == ["stop", ""]
    assert run.learner.counters["partials/handed_over"] == 1


def test_a_worker_that_says_goodbye_hands_over_at_once(run: Run) -> None:
    w1 = run.world.process("w1")
    w2 = run.start_worker("w2")
    run.world.run(4.0)
    begin(w1, partial(3), partial(5))
    now = run.world.now
    run.world.perform(w1, w1.session.ship(interval_s=0, now=now))
    run.world.perform(w1, w1.session.leave("stopped by its operator"))
    run.world.kill(w1)
    run.world.run(now + 0.5)
    assert [p for _, p in grants_to(run, "w2") if p], "not before the silence is noticed"
    run.world.run(20.0)
    assert w2.is_alive
    assert run.trained()
    run.audit()


def test_a_lost_grant_is_sent_again_with_what_there_is(run: Run) -> None:
    w1 = run.world.process("w1")
    begin(w1, partial(3), partial(5))
    ship(run, w1)
    w1.session.partials.interrupted.clear()
    run.world.run(8.0)
    assert [len(p) for grant, p in grants_to(run, "w1") if grant.leases[0].group_id == 0][-1] == 1


@pytest.mark.slow
def test_a_machine_that_returns_with_its_partials_goes_on_with_those_still_wanted(run: Run) -> None:
    w1 = run.world.process("w1")
    begin(w1, partial(3), partial(5), key=(1, 0))
    left = list(w1.session.partials.interrupted.values())
    run.world.kill(w1, is_silent=True)
    run.start_worker("w2")
    run.world.run(200.0)
    assert run.learner.next_group_id > 20, "nobody waits for it"
    back = run.start_worker("w1", address="tcp://elsewhere:1")
    back.session.partials.restore(left)
    run.world.run(230.0)
    assert back.session.is_admitted
    assert (1, 0) not in back.session.partials, "its group was made by another long ago"
    assert back.session.partial_counts["wasted_tokens"] == 8
    assert run.learner.roster.nodes["w1"].node.advertise == "tcp://elsewhere:1"
    assert any(r["worker"] == "w1" for r in run.records[-80:] if r["kind"] == "accepted")
    run.audit()


def test_a_worker_that_restarts_at_once_keeps_its_own_leases(run: Run) -> None:
    w1 = run.world.process("w1")
    begin(w1, partial(3), partial(5))
    left = list(w1.session.partials.interrupted.values())
    run.world.kill(w1)
    back = run.start_worker("w1")
    back.session.partials.restore(left)
    back.on_action.__self__.is_hung = True
    run.world.run(10.0)
    leases = run.learner.leases
    assert leases.workers_of(0) == ["w1"]
    assert leases.num_attempts(0) == 1, "the same lease as before"
    assert (0, 0) in back.session.partials
    assert leases.num_running == 3 + len(run.learner._scheduler.leases._returned)


def test_an_interrupted_partial_is_given_up_where_another_worker_has_the_group_by_now(
    run: Run,
) -> None:
    w1 = run.world.process("w1")
    begin(w1, partial(3), partial(5))
    left = list(w1.session.partials.interrupted.values())
    run.world.kill(w1)
    run.world.run(9.0)
    w2 = run.start_worker("w2")
    w2.on_action.__self__.is_hung = True
    run.world.run(12.0)
    assert run.learner.leases.workers_of(0) == ["w2"]
    back = run.start_worker("w1")
    back.session.partials.restore(left)
    run.world.run(15.0)
    assert run.learner.leases.workers_of(0) == ["w2"]
    assert (0, 0) not in back.session.partials


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ([partial(3)], "1 members"),
        ([partial(17), partial(1)], "17 tokens"),
        ([partial(16), partial(1)], "nothing is left"),
        ([partial(3), partial(3, step=7)], "version_from_the_future"),
        ([partial(3), dataclasses.replace(partial(1), token_ids=np.array([100], np.int32))],
         "bad_token_ids"),
        ([partial(3), dataclasses.replace(partial(1), sampler_logprobs=np.array([np.nan], "f4"))],
         "bad_logprobs"),
    ],
)  # fmt: skip
def test_what_cannot_have_been_sampled_is_refused(
    run: Run, members: list[PartialRollout], complaint: str
) -> None:
    receive(run, members)
    notes = run.learner.receive("in0", frames_of(members), now=64.0)  # said once a minute
    assert complaint in notes[0].text
    assert run.learner.counters["protocol_errors"] == 2
    assert 0 not in run.learner._scheduler.shipped


def test_partials_of_others_groups_are_not_believed(run: Run) -> None:
    receive(run, [partial(3), partial(3)], group_id=77)
    assert run.learner.counters["partials/late"] == 1
    run.learner.receive("in0", frames_of([])[:1], now=3.0)
    assert run.learner.counters["protocol_errors"] == 1


def frames_of(members: list[PartialRollout], **fields: Any) -> list[Any]:
    message = Partial(**({"group_id": 0, "attempt": 0} | fields))
    return codec.encode(message, [encode_members(members)], source="w1", target="learner")


def receive(run: Run, members: list[PartialRollout], **fields: Any) -> None:
    run.learner.receive("in0", frames_of(members, **fields), now=3.0)
