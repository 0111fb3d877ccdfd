"""The learner's unfinished groups, and who gets them."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest

from echo.core.monitoring.metrics import Counters
from echo.core.rollout import PartialRollout
from echo.fleet.explain import describe_wait
from echo.leases import results
from echo.leases.partials import (
    ShippedPartials,
    encode_continuations,
    encode_members,
)
from echo.leases.worker.held import GroupState, HandedOver, PartialGroup, Stopped
from echo.roles import learner, members, plans, review
from echo.roles.members import Member, Presence
from echo.wire import codec
from echo.wire.messages import Heartbeat, NodeStats, Partial
from tests.core.groups import make_partial
from tests.leases.test_scheduler import make_worker
from tests.promises.conftest import MakeWorld
from tests.promises.world import Rated, World
from tests.roles.harness import make_hello, make_lease
from tests.wire.sets import make_sets


def partial(num_tokens: int, *, step: int = 0, reason: str = "abort") -> PartialRollout:
    return make_partial([(1, step)] * num_tokens, reason)


def begin(world: World, *members: PartialRollout) -> list[PartialGroup]:
    """Have the engine of w1, which hangs, give up its first group, and ship what there is of it."""
    role = world.node("w1").role
    group = role.held.get((0, 0))
    group.members = list(members)
    role.held.handle(group, Stopped())
    world.perform("w1", role.ship(interval_s=0, now=world.now))
    world.run(0.1)
    interrupted: list[PartialGroup] = role.held.of(GroupState.INTERRUPTED)
    return interrupted


def tokens_of(world: World, worker: str, group: int) -> list[int]:
    """Return how many tokens a worker holds of each unfinished rollout of a group."""
    return [len(tokens) for tokens in world.partial_tokens(worker, group)]


def test_the_bound_holds_and_the_newest_statement_of_the_newest_attempt_wins() -> None:
    counters = Counters()
    shipped = ShippedPartials(counters, max_bytes=10)
    shipped.put(1, 0, b"12345", num_tokens=5)
    shipped.put(1, 0, b"123", num_tokens=3)
    assert shipped.num_bytes == 3, "a worker's newer statement replaces its older one"
    shipped.put(1, 1, b"1234", num_tokens=4)
    shipped.put(1, 0, b"12", num_tokens=4)
    [(_, payload)] = shipped.grants([make_lease(1, 2)])
    assert payload == (encode_continuations([b"1234"]),)
    shipped.put(2, 0, b"1234567", num_tokens=7)
    assert 2 not in shipped
    assert counters["dropped/partials_full"] == 1
    shipped.put(1, 2, b"12345678901", num_tokens=11)
    assert counters["dropped/partials_full"] == 2
    [(_, payload)] = shipped.grants([make_lease(1, 3)])
    assert payload == (encode_continuations([b"1234"]),), "better an older copy than none"
    shipped.put(1, 2, b"1234567890", num_tokens=10)
    assert shipped.num_bytes == 10, "the copy that it replaces takes no space"
    shipped.discard(1)
    assert (shipped.num_bytes, len(shipped)) == (0, 0)


def test_what_workers_count_is_added_once() -> None:
    counters = Counters()
    shipped = ShippedPartials(counters)
    first, second = make_worker("w1", None), make_worker("w1", None)
    for counts, member in (
        ({"interrupted": 2}, first),  # which the learner before a resume may have added
        ({"interrupted": 2}, first),
        ({"interrupted": 4, "shipped": 1, "unknown": 7}, first),
        # It was cut off for so long that it had to join again.
        ({"interrupted": 5, "shipped": 1}, second),
        # Its process was started anew, and counts from 0.
        ({"interrupted": 1}, second),
        ({"interrupted": 3}, second),
    ):
        stats = NodeStats(partials=counts)
        shipped.count(member, Heartbeat(installed=None, capacity=0, leases=(), stats=stats))
    assert counters.as_dict() == {"partials/interrupted": 5, "partials/shipped": 1}


def test_what_a_dead_worker_has_shipped_is_continued_by_another(hung_world: World) -> None:
    world = hung_world
    begin(world, partial(3, reason="stop"), partial(5))
    shipped = world.node("learner").role.scheduler.groups.shipped
    assert 0 in shipped
    world.kill("w1")
    world.run_until(lambda: not world.leased("w1"))
    world.worker("w2", sample_s=math.inf)
    world.run_until(lambda: 0 in world.leased("w2"))
    world.run(1.0)
    assert tokens_of(world, "w2", 0) == [3, 5]
    group = world.node("w2").role.held.get((0, 1))
    assert [member.finish_reason for member in group.members] == ["stop", ""]
    assert world.count("learner", "partials/handed_over") == 1


def test_what_the_learner_before_was_sent_is_shipped_to_the_one_that_follows(
    hung_world: World,
) -> None:
    world = hung_world
    begin(world, partial(3), partial(5))
    world.kill("learner")
    world.learner()
    world.run_until(lambda: 0 in world.leased("w1"))
    shipped = world.node("learner").role.scheduler.groups.shipped
    assert 0 not in shipped
    # As where it pauses or leaves; it has sampled nothing more.
    world.perform("w1", world.node("w1").role.ship(interval_s=0, now=world.now))
    world.run(0.1)
    assert 0 in shipped


def test_a_lost_grant_is_sent_again_with_what_there_is(hung_world: World) -> None:
    begin(hung_world, partial(3), partial(5))
    held = hung_world.node("w1").role.held
    for group in held.of(GroupState.INTERRUPTED):
        held.handle(group, HandedOver())
    hung_world.run_until(lambda: (0, 0) in held, within_s=5.0)
    assert tokens_of(hung_world, "w1", 0) == [3, 5]


@pytest.mark.slow
def test_a_machine_that_returns_with_its_partials_goes_on_with_those_still_wanted(
    hung_world: World,
) -> None:
    world = hung_world
    left = begin(world, partial(3), partial(5))
    world.kill("w1", silently=True)
    world.run_until(lambda: not world.leased("w1"))
    world.worker("w2")
    world.run_until(lambda: 0 in world.trained())
    world.worker("w1", serves=True)
    back = world.node("w1").role
    back.held.restore(left)
    world.run_until(lambda: world.is_admitted("w1") and (0, 0) not in back.held)
    assert back.partial_counts["wasted_tokens"] == 8, "its group was made by another long ago"
    node = world.node("learner").role.roster.nodes["w1"].node
    assert node.advertise == "tcp://w1:7700"
    num_before = len(world.records("accepted"))
    world.run_until(
        lambda: any(r["worker"] == "w1" for r in world.records("accepted")[num_before:])
    )
    world.audit()


@pytest.mark.parametrize("holder", ["w1", "w2"])
def test_a_worker_that_returns_keeps_its_leases_if_no_other_has_its_groups_by_now(
    hung_world: World, holder: str
) -> None:
    world = hung_world
    left = begin(world, partial(3), partial(5))
    world.kill("w1")
    if holder == "w2":
        world.run_until(lambda: not world.leased("w1"))
        world.worker("w2", sample_s=math.inf)
        world.run_until(lambda: 0 in world.leased("w2"))
    world.worker("w1", sample_s=math.inf)
    back = world.node("w1").role
    back.held.restore(left)
    world.run_until(lambda: world.is_admitted("w1"))
    world.run(6.0)
    leases = world.node("learner").role.leases
    assert leases.group(0).workers == [holder]
    assert leases.group(0).num_attempts == (1 if holder == "w1" else 2), "the same lease as before"
    assert ((0, 0) in back.held) == (holder == "w1")
    # Two groups of each worker that works, none of them counted twice.
    assert leases.num_running == (2 if holder == "w1" else 4)


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
        ([partial(3), dataclasses.replace(partial(1), support=make_sets([1, 2]))],
         "bad_support"),
    ],
)  # fmt: skip
def test_what_cannot_have_been_sampled_is_refused(
    hung_world: World, members: list[PartialRollout], complaint: str
) -> None:
    learner = hung_world.node("learner").role
    for now in (3.0, 64.0):  # said once a minute
        notes = learner.receive(hung_world.peer_of("w1"), frames_of(hung_world, members), now=now)
        assert complaint in notes[0].text
    assert learner.counters["protocol_errors"] == 2
    assert 0 not in learner.scheduler.groups.shipped


@pytest.mark.parametrize(("lineage", "is_possible"), [(1, True), (2, False), (3, False)])
def test_tokens_of_an_abandoned_version_are_no_fault_of_their_worker(
    hung_world: World, lineage: int, is_possible: bool
) -> None:
    """The learner is resumed from before the version that sampled them, so the next worker resets
    their members."""
    world = hung_world
    world.kill("learner")
    world.learner()
    world.run_until(lambda: 0 in world.leased("w1"))
    begin(world, make_partial([(lineage, 7)] * 3, "abort"), partial(5))
    role = world.node("learner").role
    assert [each.lineage for each in role.scheduler.groups.lineages] == [1, 2]
    assert (0 in role.scheduler.groups.shipped) == is_possible
    assert role.counters["protocol_errors"] == (not is_possible)


def test_partials_of_others_groups_are_not_believed(hung_world: World) -> None:
    learner = hung_world.node("learner").role
    learner.receive(
        hung_world.peer_of("w1"),
        frames_of(hung_world, [partial(3), partial(3)], group_id=77),
        now=3.0,
    )
    assert learner.counters["partials/late"] == 1
    learner.receive(hung_world.peer_of("w1"), frames_of(hung_world), now=3.0)
    assert learner.counters["protocol_errors"] == 1


def frames_of(
    world: World, members: list[PartialRollout] | None = None, **fields: Any
) -> list[Any]:
    """Return a Partial of w1, without its frame where there are no members."""
    message = Partial(**({"group_id": 0, "attempt": 0} | fields))
    payload = [] if members is None else [encode_members(members)]
    channel = world.channel_of("w1")
    return codec.encode(message, payload, source="w1", target="learner", channel=channel)


def test_what_the_learner_waits_for_is_one_line_however_many_workers_there_are(
    hung_world: World,
) -> None:
    role = hung_world.node("learner").role
    for number in range(1000):
        member = Member.of(make_hello(f"v{number}"), now=hung_world.now)
        role.roster.move(member, Presence.ADMITTED)
    observed = role.fleet.observe()
    assert observed.newest == str(role.broadcast.newest_complete)
    text = describe_wait(observed)
    assert text.startswith("2 of 2 groups; w1 has 2 (")
    assert "); v0 has 0 (idle); v1 has 0 (idle); " in text
    assert text.endswith("v6 has 0 (idle); 993 others have 0")
    assert len(text) < 500


def test_a_wait_is_explained_with_the_bound_and_the_workers_of_the_operator(
    hung_world: World,
) -> None:
    role = hung_world.node("learner").role
    before = role.fleet.observe()
    assert (before.num_standby, before.num_held) == (0, 0)
    role.buffer.admission_staleness = before.max_staleness - 1
    role.roster.hold("w1", "standby")
    after = role.fleet.observe()
    assert after.max_staleness == before.max_staleness - 1
    assert (after.num_standby, after.num_held) == (0, 1)


def test_every_event_of_a_learner_has_its_handler() -> None:
    modules = (learner, members, plans, results, review)
    found = {
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and (each.__doc__ or "").startswith("Event")
    }
    assert found == set(learner.Learner.HANDLERS)
    drawn = re.findall(r"^    ([A-Z][A-Za-z]+)  ", learner.__doc__ or "", re.M)
    assert drawn == [each.__name__ for each in learner.Learner.HANDLERS]


def test_a_group_goes_on_from_the_tokens_that_a_recalled_engine_has_sampled(
    make_world: MakeWorld,
) -> None:
    world = make_world(
        sampling={"max_completion_tokens": 100},
        batch={"groups_per_step": 1},
        leases={"hedge_factor": False},
    )
    world.learner()
    world.worker("w1", rated=Rated(tokens_per_s=10.0))
    world.run_until(lambda: 0 in world.sampling("w1"))
    world.run(6.0)
    world.interrupt("w1")
    world.worker("w2", rated=Rated(tokens_per_s=10.0))
    world.run_until(lambda: 0 in world.sampling("w2"))
    began = world.now
    world.run_until(lambda: 0 in world.stored())
    assert 3.5 < world.now - began < 5.0, "of the 100 tokens about 60 were sampled before"
    assert world.count("learner", "partials/handed_over") >= 1
