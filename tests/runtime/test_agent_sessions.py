"""Episodes of leases: who gets which, what a session's calls become, and what is given up."""

from __future__ import annotations

import numpy as np
import pytest

from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion
from echo.runtime.agents.sessions import (
    MAX_EPISODE_ATTEMPTS,
    Episodes,
    Session,
    SessionError,
    SessionOutcome,
    Turn,
    group_of,
)
from echo.wire.messages import Lease


def lease_of(group_id: int, attempt: int = 0) -> Lease:
    return Lease(group_id=group_id, attempt=attempt, prompt_ids=(1, 5), seed=7, example={})


def turn_of(context: list[int], sampled: list[int], *, parent: Turn | None = None, step: int = 0):
    completion = Completion(
        "r",
        np.array(sampled, np.int32),
        -np.arange(1, len(sampled) + 1, dtype=np.float32),
        "stop",
        np.tile(np.array([[1, step]], np.int32), (len(sampled), 1)),
    )
    return Turn(np.array(context, np.int32), completion, "", parent)


@pytest.fixture
def episodes() -> Episodes:
    return Episodes(group_size=2, timeout_s=10.0)


def begin(episodes: Episodes, now: float = 0.0) -> Session:
    session = episodes.begin(now=now)
    assert session is not None
    return session


def test_each_member_is_given_out_once_oldest_lease_first(episodes: Episodes) -> None:
    assert episodes.begin(now=0) is None
    for group_id in (3, 4):
        episodes.add(lease_of(group_id), now=0)
    assert episodes.num_free == 4
    sessions = [begin(episodes) for _ in range(4)]
    assert [(s.lease.group_id, s.member) for s in sessions] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert len({s.session_id for s in sessions}) == 4
    assert episodes.begin(now=0) is None


def test_the_last_reward_completes_the_group_in_order(episodes: Episodes) -> None:
    episodes.add(lease_of(3), now=0)
    first, second = begin(episodes), begin(episodes)
    first.turns.append(turn_of([1, 5], [8]))
    second.turns.append(turn_of([1, 5], [9]))
    assert episodes.finish(second, 1.0) is None
    outcomes = episodes.finish(first, 0.5)
    assert outcomes is not None
    assert [outcome.reward for outcome in outcomes] == [0.5, 1.0]
    assert not episodes.leases
    with pytest.raises(SessionError, match=r"no open session.*begin another"):
        episodes.find(first.session_id, now=0)


def test_a_session_without_calls_or_with_one_running_is_not_rewarded(episodes: Episodes) -> None:
    episodes.add(lease_of(3), now=0)
    session = begin(episodes)
    with pytest.raises(SessionError, match="has no call to be rewarded: send its id"):
        episodes.finish(session, 1.0)
    session.turns.append(turn_of([1], [8]))
    session.num_running = 1
    with pytest.raises(SessionError, match="still being answered"):
        episodes.finish(session, 1.0)


def test_an_abandoned_episode_is_given_out_again_but_not_for_ever(episodes: Episodes) -> None:
    episodes.add(lease_of(3), now=0)
    other = begin(episodes)
    for attempt in range(MAX_EPISODE_ATTEMPTS):
        session = begin(episodes)
        assert session.member == 1
        is_free_again = episodes.abandon(session)
        assert is_free_again == (attempt < MAX_EPISODE_ATTEMPTS - 1)
    assert not episodes.leases
    with pytest.raises(SessionError):
        episodes.find(other.session_id, now=0)


def test_silence_frees_episodes_and_then_gives_the_lease_up(episodes: Episodes) -> None:
    episodes.add(lease_of(3), now=0)
    busy, silent = begin(episodes), begin(episodes)
    busy.num_running = 1
    assert episodes.expire(now=9) == []
    assert episodes.expire(now=11) == []
    assert episodes.num_free == 1, "the silent one's"
    with pytest.raises(SessionError):
        episodes.find(silent.session_id, now=11)
    busy.num_running = 0
    episodes.find(busy.session_id, now=11)
    assert episodes.expire(now=22) == []
    assert episodes.expire(now=30) == []
    [(lease, why)] = episodes.expire(now=32)
    assert lease.group_id == 3
    assert why == "no agent came within 20 s"
    assert not episodes.leases


def test_the_chain_with_the_most_sampled_tokens_becomes_the_rollout() -> None:
    first = turn_of([1, 5], [8, 9])
    second = turn_of([1, 5, 8, 9, 6], [7], parent=first, step=2)
    session = Session("s", lease_of(3), 0, 0.0, turns=[first, turn_of([1, 4], [3, 3]), second])
    assert session.best is second
    session.turns.append(turn_of([1, 5], [2, 2, 2]))
    assert session.best is session.turns[-1], "of equals the last"

    other = turn_of([1, 5, 4], [2])
    group = group_of(lease_of(3), "w1", [SessionOutcome(second, 1.0), SessionOutcome(other, 0.0)])
    assert group.prompt_ids.tolist() == [1, 5]
    long, short = group.rollouts
    assert long.token_ids.tolist() == [8, 9, 6, 7]
    assert long.completion_mask.tolist() == [True, True, False, True]
    assert long.sampler_logprobs.tolist() == [-1, -2, 0, -1]
    assert long.versions == [PolicyVersion(1, 0), PolicyVersion(1, 2)]
    assert short.token_ids.tolist() == [4, 2]
    assert short.completion_mask.tolist() == [False, True]
    assert group.rewards == [1.0, 0.0]


def test_contexts_that_share_nothing_make_no_group() -> None:
    outcomes = [SessionOutcome(turn_of([1], [8]), 1.0), SessionOutcome(turn_of([2], [8]), 0.0)]
    with pytest.raises(SessionError, match="do not begin with the same token"):
        group_of(lease_of(3), "w1", outcomes)


def test_one_context_may_be_the_beginning_of_another() -> None:
    outcomes = [
        SessionOutcome(turn_of([1, 2], [8]), 1.0),
        SessionOutcome(turn_of([1, 2, 3], [8]), 0.0),
    ]
    group = group_of(lease_of(3), "w1", outcomes)
    assert group.prompt_ids.tolist() == [1, 2]
    assert [r.completion_mask.tolist() for r in group.rollouts] == [[True], [False, True]]
