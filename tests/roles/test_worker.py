"""Decisions of a worker's role, on plain time: an engine on paper samples for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from echo.core.errors import EngineError
from echo.core.rollout import Lineage, PartialRollout, PolicyVersion
from echo.leases.partials import PartialRules, decode_groups, encode_groups
from echo.leases.worker import keeper
from echo.leases.worker.held import BUSY, GroupState, PartialGroup
from echo.leases.worker.keeper import PartialsFound, PartialsSaved, Save
from echo.leases.worker.outbox import Outbox
from echo.roles import node
from echo.roles.joining import Built
from echo.roles.worker import departure, installing, outcomes, sampling, worker
from echo.roles.worker.departure import (
    DRAIN_S,
    Drained,
    DrainRequested,
    MachineReleased,
    Release,
    ReleaseTerms,
)
from echo.roles.worker.engine_facts import EngineFacts
from echo.roles.worker.installing import (
    INSTALL_AGAIN_S,
    EngineDamaged,
    Install,
    InstallFailed,
    VersionInstalled,
)
from echo.roles.worker.outcomes import GroupScored
from echo.roles.worker.sampling import (
    CallRaised,
    CallRefused,
    CallReturned,
    CancelEpisodes,
    EngineCall,
    MembersGrown,
    NonfiniteFound,
    NoResult,
    OfferEpisodes,
    Recall,
    Sample,
    Score,
    Withdraw,
)
from echo.roles.worker.worker import EngineBuilt, LeaseDropped, LeasesAlive, LeasesDemanded, Worker
from echo.weights.broadcast import Broadcast
from echo.wire.actions import Action, Note, Stop
from echo.wire.codec import Frame, decode_group
from echo.wire.messages import Ack, Deliver, Failed, Heartbeat, Lease, Message, Partial, Reclaim
from tests.core.groups import make_partial
from tests.roles.harness import make_lease, make_node_settings

V0, V1, V2 = (PolicyVersion(1, step) for step in range(3))
LENGTHS = {0: (2, 50), 1: (2, 3), 2: (60, 2), 3: (3, 3), 4: (2, 2), 5: (4, 4)}
"""Tokens of each member of each group."""


class Weights(Broadcast):
    """A weights plane to which versions come when a test says so."""

    newest: PolicyVersion | None = None

    @property
    def newest_complete(self) -> PolicyVersion | None:
        return self.newest


class Role(Worker):
    """A worker that the learner has admitted."""

    is_admitted = True
    lineages: tuple[Lineage, ...] = (Lineage(1, 0),)
    broadcast: Weights

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.sent: list[tuple[Message, tuple[Frame, ...]]] = []
        """What the learner was sent, oldest first."""

    def to_learner(self, message: Message, *payload: Frame) -> list[Action]:
        self.sent.append((message, payload))
        return []

    def results(self) -> dict[int, tuple[Deliver | Failed, tuple[Frame, ...]]]:
        """Return the result of each group that the learner was sent, or why there is none."""
        return {
            message.group_id: (message, payload)
            for message, payload in self.sent
            if isinstance(message, Deliver | Failed)
        }


def make_role(terms: ReleaseTerms | None = None) -> Role:
    settings = make_node_settings(heartbeat_s=1e9, dead_after_s=1e9)
    weights = Weights(node_id="w1", window_bytes=4096, stall_s=0.5)
    return Role(settings, weights, Outbox(max_deliveries=8, retry_s=1e9), terms=terms, now=0.0)


class Paper:
    """A role, and an engine that samples one token a second for everything in it."""

    def __init__(
        self,
        lengths: Mapping[int, tuple[int, ...]] | None = None,
        *,
        groups_per_batch: int = 4,
        is_continuous: bool = False,
        num_versions: int = 1,
        sampler: Any = "engine",
        version: PolicyVersion | None = V0,
        terms: ReleaseTerms | None = None,
        **rules: Any,
    ) -> None:
        self.lengths = lengths or {}
        self.now = 0.0
        self.role = make_role(terms)
        self.sampled: list[list[str]] = []
        """Names of the members that each call was asked for."""
        self.num_before: dict[str, list[int]] = {}
        self.seeds: dict[str, set[int]] = {}
        self.engine: dict[EngineCall, dict[str, int]] = {}
        """The tokens so far of what each call samples."""
        self.others: list[Action] = []
        """What is not the engine's affair, and not yet looked at."""
        facts = EngineFacts(
            group_size=2, groups_per_batch=groups_per_batch, is_continuous=is_continuous,
            num_versions=num_versions, sampler=sampler,
            max_prompt_tokens=5, max_completion_tokens=64,
            rules=PartialRules(**({"ship_s": None} | rules)),
        )  # fmt: skip
        self.report(EngineBuilt(facts, {}))
        if version is not None:
            self.report(VersionInstalled(version))

    def grant(self, *leases: Lease, members: Sequence[PartialRollout] = ()) -> None:
        for each in leases or [make_lease(group_id) for group_id in sorted(self.lengths)]:
            self.role.held.add(each, members)
        self.do(self.role.on_version(now=self.now))

    def report(self, event: Any) -> None:
        self.do(self.role.handle(event, now=self.now))

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Sample(call):
                    self._begin(call)
                case Recall(call):
                    self.give_back(call)
                case Score(group) if len(self.lengths):
                    self.report(GroupScored(group, [0.0, 1.0]))
                case _:
                    self.others.append(action)

    def take(self, kind: type[Any]) -> list[Any]:
        """Return what was asked for of this kind since it was last taken."""
        found = [action for action in self.others if isinstance(action, kind)]
        self.others = [action for action in self.others if not isinstance(action, kind)]
        return found

    def _begin(self, call: EngineCall) -> None:
        names = self.engine[call] = {}
        for group in call.groups:
            for index, member in enumerate(group.members):
                if not member.is_finished:
                    name = f"{group.lease.group_id}.{index}"
                    names[name] = 0
                    self.num_before.setdefault(name, []).append(member.num_tokens)
                    self.seeds.setdefault(name, set()).add(group.seed_of(index))
        self.sampled.append(list(names))

    def turn(self, seconds: float = 1.0) -> None:
        """Sample one token of everything."""
        self.now += seconds
        for call in list(self.engine):
            for group in call.groups:
                for index, member in enumerate(group.members):
                    if not member.is_finished:
                        self.engine[call][f"{group.lease.group_id}.{index}"] += 1
                        call.on_tokens(1)
            call.credit()
            for group in call.groups:
                self._extend(call, group, is_over=False)
            if call in self.engine and all(group.is_whole for group in call.groups):
                self.give_back(call)

    def _extend(self, call: EngineCall, group: PartialGroup, *, is_over: bool) -> None:
        members, has_news = list(group.members), False
        for index, member in enumerate(group.members):
            name = f"{group.lease.group_id}.{index}"
            count = self.engine.get(call, {}).get(name, 0)
            length = self.lengths[group.lease.group_id][index]
            is_ended = member.num_tokens + count >= length
            if not member.is_finished and count and (is_ended or is_over):
                start, version = member.num_tokens, call.version or self.version
                members[index] = member.extended(
                    np.arange(start, start + count, dtype=np.int32),
                    np.full(count, -1, np.float32),
                    np.full((count, 2), (version.lineage, version.step), np.int32),
                    finish_reason="stop" if is_ended else "abort",
                )
                has_news = True
        if has_news:
            self.report(MembersGrown(call, group, members))

    @property
    def version(self) -> PolicyVersion:
        assert self.role.installed_version is not None
        return self.role.installed_version

    def give_back(self, call: EngineCall) -> None:
        for group in call.groups:
            self._extend(call, group, is_over=True)
        num_tokens = sum(self.engine.pop(call).values())
        self.report(CallReturned(call, num_tokens))

    def run(self, *, until: Callable[[], bool] | None = None) -> list[int]:
        """Sample until all groups are delivered; return them in that order."""
        is_done = until or (lambda: len(self.delivered()) == len(self.lengths))
        for _ in range(500):
            if is_done():
                return self.delivered()
            self.turn()
            if self.now >= (self.role.deadline or np.inf):
                self.do(self.role.expire(now=self.now))
        raise AssertionError(f"not done after {self.now:g} s: {self.role.activity}")

    def delivered(self) -> list[int]:
        return [group_id for group_id, _ in self.role.outbox.keys]

    def acknowledge(self, group_id: int) -> None:
        ack = Ack(group_id=group_id, attempt=0, outcome="accepted")
        self.do(self.role.on_work(ack, [], self.now))

    def arrive(self, version: PolicyVersion) -> list[PolicyVersion]:
        """Let a version come; return those that are installed now."""
        self.role.broadcast.newest = version
        self.do(self.role.on_version(now=self.now))
        return [action.version for action in self.take(Install)]


def test_every_event_of_a_worker_has_its_handler() -> None:
    modules = (keeper, departure, installing, node, outcomes, sampling, worker)
    found = {
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type)
        and each.__module__ == module.__name__  # a group's events are those of held.py
        and (each.__doc__ or "").startswith("Event")
    }
    assert found == set(Worker.HANDLERS) - {Built}


# --- which groups go into the engine, and when it is stopped --------------------------------------


def test_a_batch_is_recalled_at_its_target_and_the_rest_goes_on_first() -> None:
    paper = Paper(LENGTHS, over_submission=2.0)
    paper.grant()
    paper.run()
    first, second, *_ = paper.sampled
    assert first == [f"{group}.{member}" for group in range(4) for member in range(2)]
    # Groups 1 and 3 are whole; of the others only what is unfinished goes on, before 4 and 5.
    assert second == ["0.1", "2.0", "4.0", "4.1", "5.0", "5.1"]
    assert paper.num_before["0.1"][:2] == [0, 3]
    assert len(paper.seeds["0.1"]) > 1, "the old seed would repeat its choices"
    assert sum(len(members) for members in paper.num_before.values()) == sum(
        map(len, paper.sampled)
    )
    counts = paper.role.partial_counts
    assert counts["resumed"] >= 2
    assert counts["wasted_tokens"] == 0
    assert paper.role.tokens_sampled == sum(map(sum, LENGTHS.values())), "each token once"


def test_without_over_submission_a_batch_is_waited_for() -> None:
    paper = Paper(LENGTHS)
    paper.grant()
    # Whole groups do not wait for the others of their batch.
    assert paper.run()[:2] == [1, 3]
    assert len(paper.sampled) == 2
    assert paper.role.partial_counts["interrupted"] == 0


@pytest.mark.parametrize("latecomer", [None, 5])
def test_a_batch_is_not_recalled_for_nothing(latecomer: int | None) -> None:
    """The target is reached, but no other group waits for the room: until one comes."""
    paper = Paper(LENGTHS, over_submission=2.0)
    paper.grant(*map(make_lease, range(4)))
    paper.run(until=lambda: len(paper.delivered()) == 2)
    if latecomer is not None:
        paper.grant(make_lease(latecomer))
    paper.run(until=lambda: not paper.engine or len(paper.sampled) > 1)
    assert len(paper.sampled) == (1 if latecomer is None else 2)


@pytest.mark.parametrize("is_continuous", [False, True])
def test_greedy_groups_have_calls_of_their_own(is_continuous: bool) -> None:
    paper = Paper(dict.fromkeys(range(3), (2, 2)), is_continuous=is_continuous)
    paper.grant(make_lease(0), make_lease(1, is_greedy=True), make_lease(2))
    kinds = {(each.lease.group_id, call.is_greedy) for call in paper.engine for each in call.groups}
    assert kinds == {(0, False), (1, True), (2, False)}
    assert len(paper.engine) == (3 if is_continuous else 2)
    paper.run()


def test_an_engine_that_takes_requests_at_any_time_gets_more_than_it_holds() -> None:
    paper = Paper(LENGTHS, groups_per_batch=2, is_continuous=True, over_submission=1.5)
    assert (paper.role.stats().num_places, paper.role.max_groups) == (3, 5), "and two that wait"
    paper.grant()
    assert len(paper.engine) == 3
    paper.run()
    assert len(paper.sampled) == len(LENGTHS), "one call for each, none stopped"


def test_a_recalled_batch_is_filled_up_by_what_its_groups_have_left_to_do() -> None:
    lengths = {0: (2, 50), 1: (50, 2), 2: (3, 3), 3: (2, 2), 4: (2, 2), 5: (2, 2)}
    paper = Paper(lengths, groups_per_batch=3, over_submission=3.0)
    paper.grant()
    paper.run()
    assert paper.sampled[1] == ["0.1", "1.0", "3.0", "3.1", "4.0", "4.1"], "six rows"


def test_a_call_ends_after_a_while_and_what_it_has_is_shipped_and_saved() -> None:
    paper = Paper({0: (999, 999)}, groups_per_batch=1, ship_s=10.0)
    paper.grant()
    call = next(iter(paper.engine))
    paper.now = 10.0
    paper.do(paper.role.expire(now=10.0))
    assert not call.is_recalled, "a slow start would be repeated for ever"
    paper.run(until=lambda: paper.role.partial_counts["shipped"] == 2)
    assert paper.now == pytest.approx(30.0, abs=1.0)
    assert paper.sampled == [["0.0", "0.1"]] * 3
    [partial] = decode_groups(paper.take(Save)[-1].data, run_id="")
    assert partial.members[0].token_ids.tolist() == list(range(partial.num_tokens // 2))


@pytest.mark.parametrize("is_continuous", [False, True])
def test_where_one_version_samples_each_group_newer_weights_wait_for_the_running_ones(
    is_continuous: bool,
) -> None:
    paper = Paper(
        {0: (1, 30), 1: (9, 9), 2: (2, 2)}, groups_per_batch=2, is_continuous=is_continuous,
        ship_s=8.0, one_version=True,
    )  # fmt: skip
    paper.grant(*map(make_lease, range(3)))
    paper.turn()
    assert paper.arrive(V1) == []
    assert paper.run(until=lambda: len(paper.delivered()) == 2) == [1, 0], "each in one piece"
    assert [action.version for action in paper.take(Install)] == [V1]
    assert "2.0" not in paper.num_before, "nothing begins meanwhile"
    assert len(paper.sampled) == (2 if is_continuous else 1)
    paper.report(VersionInstalled(V1))
    assert paper.run() == [1, 0, 2]
    versions = [decode_group(*frames).versions for _, frames in paper.role.results().values()]
    assert versions == [(V0,), (V0,), (V1,)]


def members(*steps: int, reason: str = "abort") -> list[PartialRollout]:
    return [make_partial([(1, step)] * 3, reason) for step in steps]


def test_what_others_have_sampled_under_another_version_begins_anew() -> None:
    paper = Paper({0: (9, 9)}, version=V1, one_version=True)
    paper.grant(make_lease(0), members=members(0, 1))
    assert paper.num_before == {"0.0": [0], "0.1": [3]}
    assert paper.role.partial_counts["wasted_tokens"] == 3


def test_what_came_whole_is_scored_and_a_prompt_beyond_the_window_fails() -> None:
    paper = Paper({0: (3, 3), 1: (3, 3)})
    paper.grant(make_lease(0), members=members(0, 0, reason="stop"))
    paper.grant(make_lease(1, prompt_ids=(1,) * 6))
    assert not paper.sampled
    assert paper.delivered() == [0, 1]
    failed, _ = paper.role.results()[1]
    assert isinstance(failed, Failed)
    assert failed.reason == "prompt_too_long"
    assert failed.detail == (
        "the prompt has 6 tokens, the model's window leaves 5 beside 64 sampled ones"
    )


def test_a_group_that_cannot_be_sampled_ends_once_and_the_others_of_its_call_go_on() -> None:
    paper = Paper({0: (9, 9), 1: (9, 9)})
    paper.grant()
    paper.turn()
    [call] = paper.engine
    spoilt, _ = call.groups
    for _ in spoilt.members:
        paper.report(NonfiniteFound(spoilt, "NaN under v0"))
    failed, _ = paper.role.results()[0]
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.detail, failed.is_elsewhere) == (
        "bad_logprobs",
        "NaN under v0",
        False,
    )
    assert paper.role.counters["failed/bad_logprobs"] == 1
    assert not call.is_recalled
    assert paper.run() == [0, 1]
    assert not paper.role.held.of(*BUSY)
    # Where each group has a call of its own, only that one is of no use any more.
    paper = Paper({0: (9, 9), 1: (9, 9)}, is_continuous=True)
    paper.grant()
    first, second = paper.engine
    paper.report(NonfiniteFound(first.groups[0], "NaN under v0"))
    assert (first.is_recalled, second.is_recalled) == (True, False)


def test_what_a_tasks_code_says_takes_one_short_line() -> None:
    paper = Paper({0: (3, 3)})
    paper.grant(make_lease(0), members=members(0, 0, reason="stop"))
    text = "it raised ValueError: \x1b[2J\n" + "x" * 100_000
    paper.report(NoResult(make_lease(0), "reward_error", text))
    [note] = paper.take(Note)
    assert note.text.startswith("group 0: reward_error: it raised ValueError: \\x1b[2J\\nxx")
    assert len(note.text) < 600


def test_nothing_is_sampled_while_the_outbox_is_full_or_there_are_no_weights() -> None:
    paper = Paper({0: (1, 1), 1: (1, 1)}, groups_per_batch=1, version=None)
    paper.grant()
    assert paper.role.activity == "waiting for weights"
    paper.role.outbox.max_deliveries = 1
    paper.report(VersionInstalled(V0))
    paper.run(until=lambda: paper.delivered() == [0])
    assert len(paper.sampled) == 1
    assert paper.role.activity == "waiting for acks"
    paper.acknowledge(0)
    assert paper.role.activity == "sampling"


def test_a_worker_says_what_it_does_or_waits_for() -> None:
    assert make_role().activity == "starting"
    paper = Paper({0: (1, 1)})
    assert paper.role.activity == "waiting for leases"
    paper.grant()
    assert paper.role.activity == "sampling"
    with mock.patch.object(paper, "do", paper.others.extend):
        paper.turn()
    [score] = paper.take(Score)
    assert paper.role.activity == "scoring"
    paper.report(GroupScored(score.group, [0.0, 1.0]))
    assert paper.role.activity == "waiting for acks"
    paper.acknowledge(0)
    assert paper.role.activity == "waiting for leases"
    paper.grant(make_lease(0, min_version=V1))
    assert paper.role.activity == "waiting for newer weights"
    assert paper.arrive(V1) == [V1]
    assert paper.role.activity == "installing v1"
    paper.role.departure.stand_by(is_standby=True, now=0.0)
    paper.report(InstallFailed(V1, EngineError("no")))
    assert paper.role.activity == "standing by"


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_group_that_another_has_finished_is_recalled_and_not_delivered(is_whole: bool) -> None:
    paper = Paper({0: (1, 1) if is_whole else (9, 9), 1: (9, 9)}, is_continuous=True)
    paper.grant()
    [first, _] = paper.engine
    if is_whole:
        with mock.patch.object(paper, "do", paper.others.extend):
            paper.turn()
        [score] = paper.take(Score)
    paper.acknowledge(0)
    paper.acknowledge(0)
    assert first.is_recalled != is_whole
    assert paper.role.counters["cancelled"] == 1
    if is_whole:
        assert score.group.state is GroupState.UNWANTED, "its rewards may stop"
        paper.report(GroupScored(score.group, [1.0]))
    assert (0, 0) not in paper.role.held
    assert not paper.delivered()


@pytest.mark.parametrize("is_usable", [True, False])
def test_whose_fault_it_is_that_a_call_raised_is_found_by_halves(is_usable: bool) -> None:
    paper = Paper(dict.fromkeys(range(4), (2, 2)))
    paper.grant()
    while paper.engine:
        [call] = paper.engine
        if is_faulty := any(group.key == (1, 0) for group in call.groups):
            del paper.engine[call]
            paper.report(CallRaised(call, "it raised", "", is_usable))
        if is_faulty and not is_usable:
            break
        paper.turn()
    sizes = [len(members) // 2 for members in paper.sampled]
    ends = {group_id: message for group_id, (message, _) in paper.role.results().items()}
    assert set(ends) == set(range(4))
    failed = {i: m for i, m in ends.items() if isinstance(m, Failed)}
    assert {m.reason for m in failed.values()} == {"engine_error"}
    assert {m.is_elsewhere for m in failed.values()} == {not is_usable}
    if is_usable:
        assert sizes == [4, 2, 1, 2, 1, 1, 1]
        assert list(failed) == [1]
    else:
        assert sizes == [4]
        assert len(failed) == 4


def test_all_that_a_dead_engine_had_is_given_back_whichever_call_tells_of_it_first() -> None:
    paper = Paper(dict.fromkeys(range(3), (2, 2)), is_continuous=True)
    paper.grant()
    first, *_ = paper.engine
    paper.report(CallRaised(first, "it died", "", is_usable=False))
    reports = [message for message, _ in paper.role.results().values()]
    assert [each.is_elsewhere for each in reports if isinstance(each, Failed)] == [True] * 3


def test_nothing_enters_an_engine_that_no_longer_samples() -> None:
    paper = Paper(dict.fromkeys(range(3), (2, 2)), is_continuous=True, groups_per_batch=2)
    paper.grant(*map(make_lease, range(2)))
    for call in list(paper.engine):
        paper.report(CallRaised(call, "it died", "", is_usable=False))
    paper.engine.clear()
    paper.grant(make_lease(2))
    assert not paper.engine
    assert paper.arrive(V1) == []
    assert sorted(paper.role.results()) == [0, 1], "each is reported once"
    assert paper.role.counters["engine/calls_failed"] == 2


def test_weights_may_be_found_damaged_before_there_is_an_engine() -> None:
    role = make_role()
    assert role.handle(EngineDamaged(), now=0.0) == []
    assert role.version_in_use() is None


def test_a_group_that_is_scored_is_alive_at_every_heartbeat() -> None:
    paper = Paper()
    paper.lengths = {}
    paper.grant(make_lease(0), members=members(0, 0, reason="stop"))
    [score] = paper.take(Score)
    for _ in range(3):
        paper.role.heartbeat(now=0.0)
    assert [state.num_tokens for state in paper.role.lease_states()] == [3]
    paper.report(NoResult(score.group.lease, "reward_error", "it raised"))
    assert paper.role.counters["failed/reward_error"] == 1


# --- weights --------------------------------------------------------------------------------------


def test_the_newest_of_several_versions_is_installed_while_groups_go_on() -> None:
    paper = Paper({0: (9, 9)})
    paper.grant()
    assert paper.arrive(V1) == [V1]
    assert paper.arrive(V2) == [], "one after the other"
    paper.turn()
    paper.report(VersionInstalled(V1))
    assert [action.version for action in paper.take(Install)] == [V2]
    assert len(paper.sampled) == 1, "in flight"
    paper.report(VersionInstalled(V2))
    assert paper.arrive(V1) == []


def test_with_drop_the_engine_is_empty_before_newer_weights_are_installed() -> None:
    paper = Paper({0: (9, 9)}, stale_tokens="drop")
    paper.grant()
    [call] = paper.engine
    paper.turn()
    give_back, paper.give_back = paper.give_back, lambda call: None  # type: ignore[method-assign]
    assert paper.arrive(V1) == []
    assert call.is_recalled
    give_back(call)
    paper.give_back = give_back  # type: ignore[method-assign]
    assert [action.version for action in paper.take(Install)] == [V1]
    assert len(paper.sampled) == 1, "nothing begins meanwhile"
    paper.report(VersionInstalled(V1))
    assert paper.num_before["0.0"] == [0, 0]
    assert paper.role.partial_counts["wasted_tokens"] == 2


# --- several versions side by side ----------------------------------------------------------------


def several(lengths: dict[int, tuple[int, ...]], **rules: Any) -> Paper:
    """An engine that holds two versions, or three if `max_age` says that they are good for it."""
    num_versions = 1 + rules.setdefault("max_age", 1)
    return Paper(lengths, is_continuous=True, num_versions=num_versions, **rules)


def install(paper: Paper, version: PolicyVersion) -> None:
    assert paper.arrive(version) == [version]
    paper.report(VersionInstalled(version))


def wanted(paper: Paper) -> dict[int, PolicyVersion | None]:
    """The version of every group that is in the engine, which has a call of its own."""
    return {call.groups[0].lease.group_id: call.version for call in paper.engine}


@pytest.mark.parametrize("stale_tokens", ["keep", "mask", "drop"])
def test_a_group_is_sampled_to_its_end_by_the_version_that_began_it(stale_tokens: str) -> None:
    """In parts, too; and the newest is installed while it is."""
    paper = several({0: (30, 2), 1: (3, 3)}, ship_s=5.0, stale_tokens=stale_tokens)
    paper.grant(make_lease(0))
    paper.turn()
    install(paper, V1)
    paper.grant(make_lease(1))
    assert wanted(paper) == {0: V0, 1: V1}
    assert paper.run() == [1, 0]
    assert len(paper.num_before["0.0"]) > 2
    assert paper.num_before["0.1"] == [0]
    assert paper.num_before["0.0"] == sorted(paper.num_before["0.0"])
    for _, frames in paper.role.results().values():
        group = decode_group(*frames)
        assert len(group.versions) == 1
        assert all(rollout.completion_mask.all() for rollout in group.rollouts)
    assert paper.role.partial_counts["wasted_tokens"] == 0


def test_what_is_too_old_to_be_trained_on_begins_anew_as_a_whole() -> None:
    paper = several({0: (30, 2)})
    paper.grant()
    paper.turn()
    paper.turn()
    install(paper, V1)
    assert wanted(paper) == {0: V0}
    install(paper, V2)
    assert wanted(paper) == {0: V2}
    # The finished member, too, or the group would be of two versions.
    assert paper.num_before == {"0.0": [0, 0], "0.1": [0, 0]}
    assert paper.role.partial_counts["wasted_tokens"] == 4
    paper.role.learner_step = 9
    paper.do(paper.role.on_version(now=paper.now))
    assert len(paper.sampled) == 2, "there is nothing newer to begin it with"


def test_a_version_of_a_lineage_that_was_left_goes_on_with_nothing() -> None:
    paper = several({0: (30, 30), 1: (30, 30)}, max_age=2)
    paper.grant(make_lease(0))
    install(paper, V1)
    paper.grant(make_lease(1))
    assert wanted(paper) == {0: V0, 1: V1}
    paper.role.lineages = (Lineage(1, 0), Lineage(2, 0))
    install(paper, PolicyVersion(2, 0))
    assert wanted(paper) == {0: V0, 1: PolicyVersion(2, 0)}


def test_what_must_be_of_a_newer_version_is_not_continued_by_the_one_that_began_it() -> None:
    paper = several({0: (9, 9), 1: (9, 9)})
    install(paper, V1)
    paper.grant(make_lease(0, min_version=V1), members=members(0, 0))
    paper.grant(make_lease(1), members=members(0, 0))
    assert wanted(paper) == {0: V1, 1: V0}
    assert paper.num_before == {"0.0": [0], "0.1": [0], "1.0": [3], "1.1": [3]}


def test_what_the_engine_has_lost_begins_anew() -> None:
    paper = several({0: (9, 9), 1: (9, 9)})
    install(paper, V1)
    paper.grant(make_lease(0), members=members(0, 0))
    [call] = paper.engine
    paper.engine.clear()
    paper.report(CallRefused(call, "v0 is wanted, v1 is installed"))
    assert wanted(paper) == {0: V1}
    assert paper.num_before["0.0"] == [3, 0]
    # Of the newest there is nothing to begin it with again.
    [call] = paper.engine
    paper.engine.clear()
    paper.report(CallRefused(call, "v1 is wanted, v0 is installed"))
    assert not paper.engine
    assert paper.role.counters["engine/version_refused"] == 1


def test_what_came_whole_needs_no_version() -> None:
    paper = several({0: (3, 3)})
    install(paper, V1)
    install(paper, V2)
    paper.grant(make_lease(1), members=members(1, 1))
    [call] = paper.engine
    assert call.version == V1
    paper.engine.clear()
    paper.report(CallRefused(call, "v1 has left the engine"))
    assert wanted(paper) == {1: V2}
    paper.grant(make_lease(0), members=members(1, 1, reason="stop"))
    assert len(paper.sampled) == 2
    assert paper.delivered() == [0]


def test_a_version_that_the_engine_refuses_is_tried_again_or_replaced() -> None:
    paper = Paper()
    assert paper.arrive(V1) == [V1]
    paper.report(InstallFailed(V1, EngineError("no memory just now")))
    assert paper.take(Note)[-1].text == "cannot install v1, keeping v0: no memory just now"
    assert paper.role.counters["engine/installs_failed"] == 1
    assert paper.arrive(V1) == []
    assert paper.role.deadline == INSTALL_AGAIN_S
    paper.do(paper.role.expire(now=INSTALL_AGAIN_S))
    assert [action.version for action in paper.take(Install)] == [V1]
    paper.report(InstallFailed(V1, EngineError("no")))
    assert paper.arrive(V2) == [V2]


def test_a_worker_that_has_no_version_at_all_ends_with_the_engines_words() -> None:
    paper = Paper(version=None)
    assert paper.arrive(V1) == [V1]
    error = EngineError("it does not fit")
    paper.report(InstallFailed(V1, error))
    assert paper.take(Note)[-1].text == "cannot install v1: it does not fit"
    assert paper.take(Stop) == [Stop("failed", error)]


# --- episodes and agents --------------------------------------------------------------------------


@pytest.mark.parametrize("is_continuous", [False, True])
def test_episodes_are_played_to_their_end(is_continuous: bool) -> None:
    paper = Paper(
        LENGTHS, groups_per_batch=2, is_continuous=is_continuous, sampler="episodes",
        ship_s=1.0, stale_tokens="drop",
    )  # fmt: skip
    paper.grant()
    assert sum(len(call.groups) for call in paper.engine) == 2
    assert len(paper.engine) == (2 if is_continuous else 1)
    assert paper.arrive(V1) == [V1], "they may go on under newer weights"
    paper.report(VersionInstalled(V1))
    paper.run()
    assert paper.role.partial_counts["interrupted"] == 0
    assert len(paper.sampled) == (6 if is_continuous else 3)


def test_agents_are_offered_all_leases_at_once_and_ask_for_theirs() -> None:
    paper = Paper(groups_per_batch=1, sampler="agents")
    assert paper.role.max_groups == 0
    paper.report(LeasesDemanded(3))
    assert paper.role.capacity() == 3
    # With free places beside these, the worker would be granted copies of other workers' groups.
    assert paper.role.stats().num_places == 0
    paper.grant(*map(make_lease, range(3)))
    [offer] = paper.take(OfferEpisodes)
    assert [each.group_id for each in offer.leases] == [0, 1, 2]
    assert paper.role.activity == "serving agents"
    paper.report(DrainRequested())
    assert paper.take(Withdraw)
    for each in offer.leases:
        assert not paper.take(Drained)
        paper.report(LeaseDropped(each))
    assert paper.take(Drained)


def test_signs_of_life_of_a_lease_are_counted_from_its_grant() -> None:
    """Else a lease of a worker that was up for long would seem to have thousands of tokens."""
    paper = Paper(groups_per_batch=1, sampler="agents")
    leases = [make_lease(0), make_lease(1)]
    for number in (1, 2):
        paper.grant(leases[number - 1])
        paper.report(LeasesAlive(leases[:number]))
    assert [state.num_tokens for state in paper.role.lease_states()] == [2, 1]


def test_agents_are_offered_no_more_of_a_group_that_others_have_finished() -> None:
    paper = Paper(groups_per_batch=1, sampler="agents")
    paper.grant(make_lease(0))
    paper.acknowledge(0)
    [cancelled] = paper.take(CancelEpisodes)
    assert cancelled.lease.group_id == 0
    assert len(paper.role.held) == 1
    paper.report(LeaseDropped(cancelled.lease))
    assert not paper.role.held


# --- leaving --------------------------------------------------------------------------------------


def test_a_worker_that_leaves_hands_over_what_is_unfinished_and_waits_for_the_rest() -> None:
    paper = Paper({0: (1, 1), 1: (9, 9)})
    paper.grant()
    paper.turn()
    paper.turn()
    assert paper.delivered() == [0]
    paper.report(DrainRequested())
    assert not paper.engine
    assert paper.role.partial_counts["shipped"] == 1
    [save] = paper.take(Save)
    paper.grant(make_lease(2))
    assert len(paper.sampled) == 1, "nothing begins any more"
    assert paper.arrive(V1) == []
    paper.acknowledge(0)
    assert not paper.take(Drained), "the file is not written yet"
    paper.report(PartialsSaved(""))
    assert paper.take(Drained)
    again = make_role()
    [note] = again.handle(PartialsFound(save.data), now=0.0)
    assert isinstance(note, Note)
    assert note.text == "found 1 unfinished group of 4 tokens"
    assert (1, 0) in again.held


def test_a_worker_whose_engine_hangs_leaves_without_it() -> None:
    paper = Paper({0: (1, 9), 1: (9, 9)})
    paper.grant()
    paper.turn()
    paper.give_back = lambda call: None  # type: ignore[method-assign]
    paper.report(DrainRequested())
    assert paper.role.deadline == 1.0 + DRAIN_S
    paper.do(paper.role.expire(now=DRAIN_S))
    assert not paper.take(Save)
    paper.do(paper.role.expire(now=1.0 + DRAIN_S))
    assert "has not stopped within 30 s" in paper.take(Note)[-1].text
    [save] = paper.take(Save)
    paper.report(PartialsSaved(""))
    assert not paper.take(Drained)
    paper.do(paper.role.expire(now=1.0 + 2 * DRAIN_S))
    assert paper.take(Drained)
    [note] = make_role().handle(PartialsFound(save.data), now=0.0)
    assert isinstance(note, Note)
    assert note.text == "found 1 unfinished group of 1 token"


def test_a_damaged_file_is_dropped_and_a_full_disk_survived() -> None:
    paper = Paper()
    [note] = paper.role.handle(PartialsFound(b"not a file of partial groups"), now=0.0)
    assert isinstance(note, Note)
    assert "dropped the unfinished groups" in note.text
    [note] = paper.role.handle(PartialsSaved("/run/partials.bin: no space left"), now=0.0)
    assert isinstance(note, Note)
    assert "cannot keep unfinished rollouts: /run/partials.bin: no space left" in note.text
    assert paper.role.counters["partials_unsaved"] == 1


def test_what_was_left_here_and_is_longer_than_allowed_by_now_begins_anew() -> None:
    """An engine refuses to continue it, and the learner to take it."""
    lengths = [(9, "abort"), (8, "abort"), (9, "stop"), (8, "length"), (7, "abort")]
    members = [make_partial([(1, 0)] * number, reason) for number, reason in lengths]
    role = make_role()
    left = encode_groups("", [PartialGroup(make_lease(0), members)])
    role.handle(PartialsFound(left), now=0.0)
    facts = EngineFacts(group_size=5, groups_per_batch=1, max_completion_tokens=8)
    role.handle(EngineBuilt(facts, {}), now=0.0)
    [group] = role.held.of(GroupState.INTERRUPTED)
    assert [member.num_tokens for member in group.members] == [0, 0, 0, 8, 7]
    assert role.partial_counts["wasted_tokens"] == 9 + 8 + 9


@pytest.mark.parametrize("why", ["on standby for", "without the learner for"])
def test_a_machine_is_given_back_after_so_long_for_nothing(why: str) -> None:
    terms = ReleaseTerms(standby_s=60.0, learner_gone_s=90.0)
    paper = Paper({0: (9, 9)}, terms=terms)
    role, is_standby = paper.role, why.startswith("on")
    if is_standby:
        role.departure.stand_by(is_standby=True, now=10.0)
    due_at = 70.0 if is_standby else 90.0
    paper.grant()
    paper.do(role.expire(now=due_at - 0.1))
    assert not role.is_leaving
    assert role.deadline == due_at
    paper.do(role.expire(now=due_at))
    assert why in paper.take(Note)[-1].text
    assert not paper.engine
    [release] = paper.take(Release)
    assert why in release.reason
    assert role.activity == "releasing"
    role.is_admitted = False
    assert not any(isinstance(action, Stop) for action in role.expire(now=1e6)), "meanwhile"
    assert [
        type(action) for action in role.handle(MachineReleased(is_confirmed=True), now=due_at)
    ] == [Stop]


# --- leases that others wait for ------------------------------------------------------------------


def reclaim(paper: Paper, *group_ids: int, is_begun_too: bool = False) -> list[Message]:
    """Ask a worker for leases; return what it says until its engine has stopped."""
    paper.role.sent.clear()
    message = Reclaim(leases=tuple((g, 0) for g in group_ids), is_begun_too=is_begun_too)
    paper.do(paper.role.on_work(message, [], paper.now))
    return [message for message, _ in paper.role.sent]


def listed(messages: Sequence[Message]) -> list[int]:
    """Return the groups that the last heartbeat lists."""
    beats = [message for message in messages if isinstance(message, Heartbeat)]
    return sorted(state.group_id for state in beats[-1].leases)


def test_what_was_not_begun_is_given_up_for_another_worker() -> None:
    paper = Paper(LENGTHS, groups_per_batch=2)
    paper.grant()
    assert paper.sampled == [["0.0", "0.1", "1.0", "1.1"]]
    assert listed(reclaim(paper, 1, 3, 5)) == [0, 1, 2, 4], "what the engine has it keeps"
    assert reclaim(paper, 1, 3, 5) == [], "nothing has changed: the next heartbeat will do"
    paper.lengths = {group_id: LENGTHS[group_id] for group_id in (0, 1, 2, 4)}
    assert sorted(paper.run()) == [0, 1, 2, 4]


@pytest.mark.parametrize("is_continuous", [False, True])
def test_what_was_begun_is_given_up_with_its_tokens_where_that_is_asked_for(
    is_continuous: bool,
) -> None:
    paper = Paper(LENGTHS, groups_per_batch=6, is_continuous=is_continuous)
    paper.grant()
    for _ in range(3):
        paper.turn()  # groups 1, 3 and 4 are whole
    messages = reclaim(paper, 1, 2, 5, is_begun_too=True)
    shipped = {m.group_id for m in messages if isinstance(m, Partial)}
    assert {2, 5} <= shipped
    assert isinstance(messages[-1], Heartbeat), "what was sampled comes before the confirmation"
    assert listed(messages) == [0, 1, 3, 4]
    paper.lengths = {group_id: LENGTHS[group_id] for group_id in (0, 1, 3, 4)}
    assert sorted(paper.run()) == [0, 1, 3, 4]
    assert max(paper.num_before["0.1"]) <= 3, "what it keeps goes on where it was"


def test_a_worker_without_its_learner_gives_nothing_up() -> None:
    paper = Paper(LENGTHS, groups_per_batch=6)
    paper.grant()
    paper.turn()
    paper.role.is_admitted = False
    assert reclaim(paper, 0, 2, is_begun_too=True) == []
    assert sorted(paper.run()) == [0, 1, 2, 3, 4, 5]


def test_episodes_that_were_begun_stay() -> None:
    paper = Paper(LENGTHS, groups_per_batch=2, sampler="episodes")
    paper.grant()
    assert listed(reclaim(paper, 0, 5, is_begun_too=True)) == [0, 1, 2, 3, 4]
