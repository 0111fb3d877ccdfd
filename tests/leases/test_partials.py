"""Continued rollouts: what is kept, masked, dropped; and a life of partial groups at random."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import RemoteProtocolError
from echo.core.rollout import (
    Group,
    Lineage,
    PartialRollout,
    PolicyVersion,
    StaleTokens,
    find_fault,
    trim_stale,
)
from echo.leases.partials import (
    FreshPartials,
    apply_staleness_policy,
    decode_groups,
    decode_members,
    encode_groups,
    encode_members,
)
from echo.leases.worker.held import (
    Closed,
    GroupState,
    HeldLeases,
    PartialGroup,
    Reported,
    Stopped,
    Whole,
)
from echo.leases.worker.outbox import Outbox
from echo.wire.messages import Deliver, Failed
from tests.core.groups import make_partial
from tests.roles.harness import make_lease
from tests.wire.sets import is_same_sets, make_sets

FIRST = (Lineage(1, 0),)


def make_partials() -> HeldLeases:
    return HeldLeases(Outbox(max_deliveries=8, retry_s=5.0))


def partial(*versions: tuple[int, int], reason: str = "abort") -> PartialRollout:
    return make_partial(versions, reason)


def fresh(
    *members: PartialRollout,
    step: int,
    stale_tokens: StaleTokens = "keep",
    max_age: int = 2,
    installed: PolicyVersion | None = None,
    lineages: tuple[Lineage, ...] = FIRST,
) -> FreshPartials:
    return apply_staleness_policy(
        members,
        stale_tokens=stale_tokens,
        max_age=max_age,
        step=step,
        installed=installed or PolicyVersion(lineages[-1].lineage, step),
        lineages=lineages,
    )


def masks(result: FreshPartials) -> list[list[bool]]:
    return [member.completion_mask.tolist() for member in result.members]


# --- old tokens ----------------------------------------------------------------------------------


def test_tokens_within_the_age_go_on_and_older_ones_are_masked_for_good() -> None:
    result = fresh(partial((1, 2), (1, 3), (1, 5)), step=5)
    assert masks(result) == [[False, True, True]]
    assert (result.num_masked, result.num_dropped) == (1, 0)
    again = fresh(*result.members, step=5)
    assert masks(again) == [[False, True, True]]
    assert again.num_masked == 0


def test_a_prefix_without_one_token_to_train_on_is_still_continued() -> None:
    assert masks(fresh(partial((1, 0), (1, 0)), step=5)) == [[False, False]]


def test_a_finished_member_without_one_token_to_train_on_begins_anew() -> None:
    result = fresh(partial((1, 0), reason="stop"), partial((1, 5), reason="stop"), step=5)
    assert [member.num_tokens for member in result.members] == [0, 1]
    assert not result.members[0].is_finished
    assert (result.num_masked, result.num_dropped) == (0, 1)


def test_drop_begins_unfinished_members_anew_under_new_weights_and_keeps_finished_ones() -> None:
    members = partial((1, 4), (1, 5)), partial((1, 4), reason="stop"), partial((1, 5))
    result = fresh(*members, step=5, stale_tokens="drop")
    assert [member.num_tokens for member in result.members] == [0, 1, 1]
    assert result.num_dropped == 2
    same = fresh(*members, step=5, stale_tokens="drop", installed=PolicyVersion(1, 4))
    assert [member.num_tokens for member in same.members] == [2, 1, 1]
    too_old = fresh(partial((1, 2), reason="stop"), step=5, stale_tokens="drop")
    assert too_old.members[0].num_tokens == 0


def test_tokens_of_a_lineage_that_was_left_are_of_no_use() -> None:
    lineages = (Lineage(1, 0), Lineage(2, 4))
    result = fresh(partial((1, 4), (1, 5)), partial((1, 4), (2, 5)), step=5, lineages=lineages)
    assert [member.num_tokens for member in result.members] == [0, 2]


def test_each_segment_has_a_seed_of_its_own() -> None:
    partial_group = PartialGroup(make_lease(3), [PartialRollout(), PartialRollout()])
    assert [partial_group.seed_of(0), partial_group.seed_of(1)] == [3000, 3001]
    partial_group.members[0] = partial((1, 0))
    second = partial_group.seed_of(0)
    partial_group.members[0] = partial_group.members[0].extended(
        np.array([1], np.int32), np.array([0], np.float32), np.array([[1, 1]], np.int32),
        finish_reason="abort",
    )  # fmt: skip
    third = partial_group.seed_of(0)
    partial_group.members[0] = partial_group.members[0].reset()
    assert len({3000, 3001, second, third}) == 4
    assert partial_group.seed_of(0) == third, "what begins anew must not repeat the first segment"


# --- as bytes ------------------------------------------------------------------------------------

MEMBERS = [
    PartialRollout(),
    partial((1, 2), (1, 2), (1, 3), (2, 4)),
    partial((1, 2), reason="stop"),
    fresh(partial((1, 2), (1, 5)), step=5).members[0],
    partial((1, 2)).extended(
        np.array([7], np.int32), np.array([-1], np.float32), np.array([[1, 3]], np.int32),
        finish_reason="abort", support=make_sets([3, 7]),
        likely=make_sets([1, 7], logprobs=[-0.5, -1.0]),
    ),
]  # fmt: skip


def assert_equal(found: PartialRollout, expected: PartialRollout) -> None:
    for name in ("token_ids", "sampler_logprobs", "policy_versions", "completion_mask"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert getattr(found, name).dtype == getattr(expected, name).dtype
    assert is_same_sets(found.support, expected.support)
    assert is_same_sets(found.likely, expected.likely)
    assert (found.finish_reason, found.num_segments) == (
        expected.finish_reason, expected.num_segments,
    )  # fmt: skip


@pytest.mark.parametrize("cut", [0, 3, 5, -1])
def test_damaged_bytes_are_refused(cut: int) -> None:
    frame = encode_members(MEMBERS)
    with pytest.raises(RemoteProtocolError):
        decode_members(frame[:cut])


@given(st.binary(max_size=60))
def test_no_bytes_do_harm(data: bytes) -> None:
    frame = encode_members(MEMBERS)
    for bad in (data, frame[:4] + data + frame[4 + len(data) :]):
        with suppress(RemoteProtocolError):
            decode_members(bad)


def test_a_file_of_partials_belongs_to_its_run() -> None:
    partials = [
        PartialGroup(make_lease(3), MEMBERS),
        PartialGroup(make_lease(5, 2), [PartialRollout()]),
    ]
    data = encode_groups("run", partials)
    found = decode_groups(data, run_id="run")
    assert [partial_group.key for partial_group in found] == [(3, 0), (5, 2)]
    assert found[0].lease == make_lease(3)
    assert_equal(found[0].members[1], MEMBERS[1])
    assert decode_groups(data, run_id="another") == []
    with pytest.raises(RemoteProtocolError):
        decode_groups(data[:-5], run_id="run")


# --- a life of partial groups ---------------------------------------------------------------------


def test_begun_groups_go_first_oldest_first() -> None:
    partials = make_partials()
    for group_id in (4, 2, 9):
        partials.add(make_lease(group_id))
    taken = partials.take(2, group_size=2)
    assert [partial_group.lease.group_id for partial_group in taken] == [2, 4]
    for partial_group in reversed(taken):
        partials.handle(partial_group, Stopped())
    partials.add(make_lease(1))
    assert [d.lease.group_id for d in partials.take(3, group_size=2)] == [2, 4, 1]
    assert len(partials) == 4


def test_room_is_counted_in_rollouts_that_are_to_be_sampled_and_none_is_passed_over() -> None:
    partials = make_partials()
    over, left = partial((1, 0), reason="stop"), partial((1, 0))
    partials.add(make_lease(1), [over, left, left])
    partials.add(make_lease(2), [over, over, over])
    partials.add(make_lease(4), [over, over, left])
    partials.add(make_lease(3))

    def taken(room: int, *, size: int = 3) -> list[int]:
        found = partials.take(9, group_size=size, max_rollouts=room)
        return [partial_group.lease.group_id for partial_group in found]

    assert taken(1) == [], "the first needs two, and the third does not go before it"
    assert taken(2) == [1, 2], "what is whole needs no space"
    assert taken(3) == [4], "which leaves two places, and the fresh one needs three"
    assert taken(3) == [3]
    partials.add(make_lease(5), [over, left])
    assert taken(2) == [], "of another size: it begins anew, all of it"
    assert taken(3) == [5]


def test_a_lease_is_listed_until_the_learner_knows_what_has_become_of_it() -> None:
    partials = make_partials()
    for group_id in range(4):
        partials.add(make_lease(group_id))
    _, interrupted, over = partials.take(3, group_size=1)
    partials.handle(interrupted, Stopped())
    partials.handle(over, Reported(Deliver(group_id=2, attempt=0)))

    def listed() -> list[tuple[int, bool, int]]:
        return [(s.group_id, s.is_waiting, s.num_tokens) for s in partials.states()]

    assert listed() == [(3, True, 0), (1, True, 0), (0, False, 0), (2, False, -1)]
    for group_id in (3, 1):  # that were not begun, or not to their end
        failed = Failed(group_id=group_id, attempt=0, reason="version_not_installed", detail="")
        group = partials.get((group_id, 0))
        assert group is not None
        partials.handle(group, Reported(failed))
    assert listed() == [(0, False, 0), (2, False, -1), (3, False, -1), (1, False, -1)]
    assert all((group_id, 0) in partials for group_id in range(4))
    partials.handle(over, Closed())
    assert not partials.outbox.acknowledge(over.key)
    assert over.key not in partials
    assert len(partials) == 3


def test_only_news_is_shipped() -> None:
    partials = make_partials()
    partials.add(make_lease(0), [partial((1, 0))])
    assert [d.key for d in partials.take_due(interval_s=30, now=5.0)] == [(0, 0)]
    assert partials.take_due(interval_s=0, now=6.0) == []
    partials.of(GroupState.INTERRUPTED)[0].members = [partial((1, 0), (1, 0))]
    assert partials.take_due(interval_s=30, now=34.0) == []
    assert len(partials.take_due(interval_s=30, now=35.0)) == 1
    partials.forget_shipments()
    assert len(partials.take_due(interval_s=0, now=36.0)) == 1


class Life:
    """Admission, a worker's partial groups and an engine, one random event after the other."""

    def __init__(self, seed: int, stale_tokens: StaleTokens) -> None:
        self.random = random.Random(seed)
        self.stale_tokens: StaleTokens = stale_tokens
        self.max_staleness = self.random.randrange(4)
        self.step = self.next_id = 0
        self.installed = PolicyVersion(1, 0)
        self.partials = make_partials()
        self.engine: list[PartialGroup] = []
        self.open: set[int] = set()
        self.delivered: list[Group] = []
        self.sampled: dict[tuple[int, int], list[int]] = {}
        self.serial = 0

    def grant(self) -> None:
        if len(self.open) < 6:
            self.partials.add(make_lease(self.next_id))
            self.open.add(self.next_id)
            self.next_id += 1

    def take(self) -> None:
        waiting = sorted(group.key for group in self.partials.of(GroupState.INTERRUPTED))
        taken = self.partials.take(self.random.randrange(1, 4), group_size=2)
        assert [partial_group.key for partial_group in taken][: len(waiting)] == waiting[
            : len(taken)
        ]
        for partial_group in taken:
            partial_group.members = apply_staleness_policy(
                partial_group.members,
                stale_tokens=self.stale_tokens,
                max_age=self.max_staleness,
                step=self.step,
                installed=self.installed,
                lineages=FIRST,
            ).members
            self.check(partial_group)
        self.engine += taken

    def check(self, partial_group: PartialGroup) -> None:
        """Whatever goes into the engine can be trained on now, and is what was sampled."""
        for index, member in enumerate(partial_group.members):
            old = member.policy_versions[member.completion_mask, 1] < self.step - self.max_staleness
            assert not old.any()
            history = self.sampled.get((partial_group.lease.group_id, index), [])
            ids = member.token_ids.tolist()
            assert ids == history[len(history) - len(ids) :], "a token was lost or repeated"

    def sample(self) -> None:
        for partial_group in self.engine:
            index = self.random.randrange(2)
            if partial_group.members[index].is_finished:
                continue
            self.serial += 1
            history = self.sampled.setdefault((partial_group.lease.group_id, index), [])
            if not partial_group.members[index].num_tokens:
                history.clear()
            history.append(self.serial)
            partial_group.members[index] = partial_group.members[index].extended(
                np.array([self.serial], np.int32),
                np.array([-1], np.float32),
                np.array([[1, self.installed.step]], np.int32),
                finish_reason=self.random.choice(["abort", "abort", "stop"]),
            )

    def stop(self) -> None:
        """End the call: whole groups are delivered, others parked."""
        for partial_group in self.engine:
            if partial_group.is_whole:
                self.deliver(partial_group)
            else:
                self.partials.handle(partial_group, Stopped())
        self.engine = []

    def deliver(self, partial_group: PartialGroup) -> None:
        message = Deliver(group_id=partial_group.key[0], attempt=0)
        for event in (Whole(), Reported(message), Closed()):
            self.partials.handle(partial_group, event)
        rollouts = [m.rollout(1.0, stale_tokens=self.stale_tokens) for m in partial_group.members]
        group = Group(
            group_id=partial_group.lease.group_id, attempt=0, worker_id="w",
            prompt_ids=np.array([1, 2], np.int32), rollouts=tuple(rollouts),
        )  # fmt: skip
        bound = {"step": self.step, "max_staleness": self.max_staleness}
        group = trim_stale(group, **bound) or group
        if find_fault(group, lineages=FIRST, **bound) is None:
            self.open.remove(group.group_id)
            self.delivered.append(group)
        else:
            self.partials.add(make_lease(group.group_id))  # refused, and granted again

    def crash(self) -> None:
        """Lose the process: what was saved comes back, the rest is granted again."""
        saved = encode_groups("run", self.partials.begun())
        self.partials, self.engine = make_partials(), []
        self.partials.restore(decode_groups(saved, run_id="run"))
        for group_id in self.open:
            if (group_id, 0) not in self.partials:
                self.partials.add(make_lease(group_id))

    def train(self) -> None:
        self.step += 1

    def install(self) -> None:
        self.installed = PolicyVersion(1, self.step)

    def run(self, num_events: int) -> None:
        events = [self.grant, self.take, self.sample, self.sample, self.sample, self.stop,
                  self.train, self.install, self.crash]  # fmt: skip
        for _ in range(num_events):
            self.random.choice(events)()
            held = {group_id for group_id, _ in self.keys()}
            assert held == self.open, "a lease was lost, or is counted and not held"
            self.partials.validate()
            states = self.partials.states()
            assert {(s.group_id, s.attempt) for s in states} == set(self.keys())
            assert len(states) == len(self.partials) == len(self.open)

    def keys(self) -> list[tuple[int, int]]:
        return [group.key for group in self.partials.of(*GroupState)]


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), stale_tokens=st.sampled_from(["keep", "mask", "drop"]))
def test_nothing_is_lost_nothing_too_old_is_trained_and_every_lease_is_counted(
    seed: int, stale_tokens: StaleTokens
) -> None:
    life = Life(seed, stale_tokens)
    life.run(200)
    ids = [group.group_id for group in life.delivered]
    assert len(set(ids)) == len(ids)
    assert set(ids) | life.open == set(range(life.next_id))


@pytest.mark.slow
def test_a_life_comes_to_something() -> None:
    lives = [Life(seed, "keep") for seed in range(8)]
    for life in lives:
        life.run(300)
    groups = [group for life in lives for group in life.delivered]
    assert sum(len(group.versions) > 1 for group in groups) > 5, "nothing was continued"
    assert any(not r.completion_mask.all() for group in groups for r in group.rollouts)
