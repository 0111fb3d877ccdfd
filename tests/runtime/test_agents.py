"""Calls of outside agents, their sessions, and the JSON in which both go over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from echo.core.chains import Tree, predecessors
from echo.core.errors import EngineError
from echo.core.monitoring.metrics import Counters
from echo.core.rollout import Group, PolicyVersion
from echo.core.token_sets import NOT_RECORDED
from echo.engine.engine import UNWATCHED, Completion, Request, Sampling
from echo.roles.worker.outcomes import GroupFinished
from echo.roles.worker.sampling import NoResult
from echo.roles.worker.worker import LeaseDropped, LeasesDemanded
from echo.runtime.agents.agents import Agents, CallOptions, StoppingError
from echo.runtime.agents.call_sampler import CallSampler
from echo.runtime.agents.dialogue import Dialogue
from echo.runtime.agents.openai_json import (
    Body,
    BodyError,
    ChatAnswer,
    ChatBody,
    TextBody,
    options_of,
    read_body,
)
from echo.runtime.agents.sessions import (
    MAX_EPISODE_ATTEMPTS,
    MAX_SESSION_CALLS,
    Episodes,
    Session,
    SessionError,
    SessionOutcome,
    group_of,
)
from echo.runtime.agents.turns import Turn, num_sampled_of, tree_of
from echo.runtime.threads import MAX_BLOCKING, ThreadPools
from echo.tasks.tokenization import TextCodec
from echo.wire.messages import Lease
from tests.wire.sets import is_same_sets, make_sets

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def completion_of(ids: Sequence[int], *, step: int = 0, reason: str = "stop") -> Completion:
    """Return tokens of one version, each less likely than the one before."""
    return Completion(
        "r",
        np.array(ids, np.int32),
        -np.arange(1, len(ids) + 1, dtype=np.float32),
        reason,  # type: ignore[arg-type]
        np.tile(np.array([[1, step]], np.int32), (len(ids), 1)),
        make_sets(*([token] for token in ids)),
    )


def make_agents(run: Callable[..., Awaitable[object]]) -> Agents:
    """Return the agents of a worker on v1, which samples nothing; `run` stands for its threads."""
    counters = Counters()
    count = counters.add
    role = Mock(outbox=[], installed_version=V1, counters=counters, count=count, tokens_sampled=0)
    parts = Mock(group_size=1, session_timeout_s=60.0, max_rollout_tokens=100, max_abs_reward=1.0)
    threads = Mock(pool=Mock(return_value=Mock(run=run)))
    return Agents(parts, role, Mock(), node=Mock(now=0.0), threads=threads)


def begin_with(agents: Agents, lease: Lease) -> Session:
    """Return a session on the only lease of a worker's agents."""
    agents.take([lease])
    session = asyncio.run(agents.begin(wait_s=0.0))
    assert session is not None
    return session


HOW = Sampling(1.0, 1.0, 0, 4, ())
PROMPT = np.array([5], np.int32)


def sample_all(engine: Any, calls: dict[str, Sampling], *, gone: str = "") -> dict[str, Any]:
    """Return what calls are answered that are there before the first batch; of one nobody waits."""

    async def main() -> dict[str, Any]:
        threads = ThreadPools()
        sampler = CallSampler(engine, UNWATCHED, threads=threads)
        answers = {
            name: asyncio.create_task(sampler.sample(Request(name, PROMPT, 0), how))
            for name, how in calls.items()
        }
        await asyncio.sleep(0)
        if gone:
            answers.pop(gone).cancel()
            await asyncio.sleep(0)
        running = asyncio.create_task(sampler.run())
        async with asyncio.timeout(60):
            found = await asyncio.gather(*answers.values(), return_exceptions=True)
        running.cancel()
        threads.close()
        return dict(zip(answers, found, strict=True))

    return asyncio.run(main())


@pytest.mark.parametrize("is_continuous", [False, True])
def test_a_call_for_which_the_model_gives_no_probabilities_fails_alone(is_continuous: bool) -> None:
    nan = np.array([np.nan], np.float32)
    spoilt = replace(completion_of([0], reason="nonfinite", step=1), logprobs=nan)

    def generate(requests: list[Request], *_: object, **__: object) -> list[Completion]:
        return [spoilt if each.request_id == "bad" else completion_of([0]) for each in requests]

    engine = SimpleNamespace(is_continuous=is_continuous, generate=generate)
    found = sample_all(engine, dict.fromkeys(("good", "bad"), HOW))
    assert isinstance(found["good"], Completion)
    assert isinstance(found["bad"], EngineError)
    assert "log-probability of nan at token 0 of request r under v1" in str(found["bad"])


def test_a_context_becomes_tokens_in_a_thread_and_its_session_may_end_meanwhile() -> None:
    async def run(_: object, prompt: str, *__: object) -> tuple[np.ndarray, None, str]:
        assert prompt == "1+1="
        agents.abandon(session.session_id)
        return np.array([5], np.int32), None, ""

    agents = make_agents(run)
    session = begin_with(agents, lease_of(3))
    with pytest.raises(SessionError, match="no open session"):
        asyncio.run(agents.call(session.session_id, "1+1=", CallOptions()))


def test_a_call_does_not_wait_for_the_rewards_of_other_sessions() -> None:
    gate = threading.Event()

    async def main() -> None:
        agents, threads = make_agents(run_question), ThreadPools()
        agents = Agents(agents.parts, agents.role, Mock(), node=agents._node, threads=threads)
        agents.parts.reward = lambda *_: gate.wait(60)  # type: ignore[misc]
        agents.parts.dialogue.continue_text.return_value = PROMPT, None  # type: ignore[attr-defined]
        sample_at(agents, completion_of([0]))
        example = {"index": 0, "split": "train", "prompt": "?"}
        rewards = []
        for group_id in range(MAX_BLOCKING):
            agents.take([msgspec.structs.replace(lease_of(group_id), example=example)])
            session = await agents.begin(wait_s=0.0)
            assert session is not None
            session.turns.append(turn_of([1], [2]))
            rewards.append(asyncio.create_task(agents.reward(session.session_id, None)))
        await asyncio.sleep(0)  # the rewards take the threads
        try:
            async with asyncio.timeout(10):
                await agents.call(None, "Q: ", CallOptions())
        finally:
            gate.set()
        await asyncio.gather(*rewards)
        threads.close()

    asyncio.run(main())


def sample_at(agents: Agents, *completions: Completion) -> None:
    """Let an engine answer calls, of which the texts are "yes" and a token of two line ends."""
    agents.parts.sampling, agents.parts.window = HOW, 100  # type: ignore[misc]
    agents.parts.max_session_tokens = 50  # type: ignore[misc]
    agents.parts.dialogue.text_of = lambda ids: "".join(("yes", "\n\n")[at] for at in ids)  # type: ignore[method-assign]
    agents._sampler.sample = AsyncMock(side_effect=completions)  # type: ignore[method-assign]


async def run_question(*_: object) -> tuple[np.ndarray, None, str]:
    return PROMPT, None, "Q: "


def test_an_agent_sees_no_part_of_the_stop_string_that_a_token_completes_twice() -> None:
    agents = make_agents(run_question)
    sample_at(agents, completion_of([0, 1]))
    turn = asyncio.run(agents.call(None, "Q: ", CallOptions(stop=["\n"])))
    assert (turn.text, turn.shown_text) == ("Q: yes\n\n", "Q: yes")


def test_a_leaving_worker_answers_the_sessions_that_are_open() -> None:
    agents = make_agents(run_question)
    session = begin_with(agents, lease_of(3))
    agents.close()
    sample_at(agents, completion_of([0]))
    turn = asyncio.run(agents.call(session.session_id, "Q: ", CallOptions()))
    assert session.turns == [turn]
    with pytest.raises(StoppingError, match="starts or stops"):
        asyncio.run(agents.call(None, "Q: ", CallOptions()))


def test_a_task_judges_the_last_answer_and_all_tokens_are_trained() -> None:
    async def run(_: object, __: object, text: str) -> float:
        late = agents._node.now + 2 * agents.parts.session_timeout_s
        assert agents._episodes.expire(now=late) == []
        return {"[5]": 1.0}.get(text, 0.0)

    agents = make_agents(run)
    agents.parts.dialogue.answer_of = lambda ids: str([*map(int, ids)])  # type: ignore[method-assign]
    example = {"index": 0, "split": "train", "prompt": "?"}
    session = begin_with(agents, msgspec.structs.replace(lease_of(3), example=example))
    session.turns += [turn_of([1], [2, 3, 4]), turn_of([1, 9], [5])]

    assert asyncio.run(agents.reward(session.session_id, None)) == 1.0
    counts = agents.role.counters.as_dict()
    assert counts == {
        "agents/tokens_sampled": 4,
        "agents/tokens_trained": 4,
        "agents/num_episodes": 1,
        "agents/num_chains": 2,
        "agents/num_turns": 2,
    }


def test_a_delivered_group_asks_for_no_lease_after_it() -> None:
    agents = make_agents(run_question)
    session = begin_with(agents, lease_of(3))
    session.turns.append(turn_of([1], [2]))
    reported: Mock = agents._node.report  # type: ignore[assignment]
    # The learner has the group from now on, but has not stored it.
    outbox: Any = agents.role.outbox
    reported.side_effect = lambda event: (
        outbox.append(event) if isinstance(event, GroupFinished) else None
    )
    asyncio.run(agents.reward(session.session_id, 1.0))
    assert outbox
    assert reported.call_args.args == (LeasesDemanded(0),)


def test_a_lease_that_is_not_wanted_is_dropped_and_its_session_goes_on_to_its_end() -> None:
    agents = make_agents(run_question)
    session = begin_with(agents, lease_of(3))
    agents.cancel(session.lease)
    reported: Mock = agents._node.report  # type: ignore[assignment]
    events = [call.args[0] for call in reported.call_args_list]
    assert events[-2:] == [LeaseDropped(session.lease), LeasesDemanded(0)]
    sample_at(agents, completion_of([0, 1]))
    asyncio.run(agents.call(session.session_id, "Q: ", CallOptions()))
    assert asyncio.run(agents.reward(session.session_id, 1.0)) == 1.0
    assert not any(isinstance(call.args[0], GroupFinished) for call in reported.call_args_list)


# --- sampling for agents --------------------------------------------------------------------------


@pytest.mark.parametrize("error", [EngineError("its prompt has unknown tokens"), IndexError("99")])
def test_a_call_is_sampled_whatever_others_ask_for_and_not_once_its_caller_has_gone(
    error: Exception,
) -> None:
    asked: list[tuple[list[str], Sampling]] = []

    def generate(requests: list[Request], how: Sampling, *_: object) -> list[Completion]:
        names = [request.request_id for request in requests]
        asked.append((names, how))
        if "bad" in names:
            raise error
        return [replace(completion_of([]), request_id=name) for name in names]

    engine = SimpleNamespace(is_continuous=False, generate=generate, can_sample=lambda: True)
    calls = dict.fromkeys(("good", "longer", "bad", "gone", "hotter", "fine"), HOW)
    calls["longer"] = replace(HOW, max_completion_tokens=9)
    calls["hotter"] = replace(HOW, temperature=2.0)
    found = sample_all(engine, calls, gone="gone")
    alike, *others = asked
    assert alike == (["good", "bad", "fine"], HOW)
    assert others == [([name], calls[name]) for name in ("good", "bad", "fine", "longer", "hotter")]
    assert isinstance(found.pop("bad"), EngineError)
    assert [answer.request_id for answer in found.values()] == ["good", "longer", "hotter", "fine"]


@pytest.mark.parametrize("is_continuous", [False, True])
@pytest.mark.parametrize("error", [EngineError("vLLM died 4 times"), ZeroDivisionError("4 times")])
def test_an_engine_that_samples_nothing_any_more_ends_whoever_lends_it(
    error: Exception, is_continuous: bool
) -> None:
    engine: Any = SimpleNamespace(is_continuous=is_continuous, can_sample=lambda: False)
    engine.generate = Mock(side_effect=error)

    async def main() -> None:
        sampler = CallSampler(engine, UNWATCHED, threads=ThreadPools())
        calls = [sampler.sample(Request(name, PROMPT, 0), HOW) for name in ("r", "s")]
        async with asyncio.timeout(60):
            found = asyncio.gather(*calls, return_exceptions=True)
            with pytest.raises(EngineError, match="4 times"):
                await sampler.run()
            assert {type(each) for each in await found} == {EngineError}, "they are answered"

    asyncio.run(main())


# --- sessions -------------------------------------------------------------------------------------


def lease_of(group_id: int, attempt: int = 0) -> Lease:
    return Lease(group_id=group_id, attempt=attempt, prompt_ids=(1, 5), seed=7, example={})


def turn_of(
    context: list[int], sampled: list[int], *, parent: Turn | None = None, step: int = 0
) -> Turn:
    return Turn(np.array(context, np.int32), completion_of(sampled, step=step), "", parent)


@pytest.fixture
def episodes() -> Episodes:
    return Episodes(group_size=2, timeout_s=10.0)


def begin(episodes: Episodes, now: float = 0.0) -> Session:
    session = episodes.begin(now=now)
    assert session is not None
    return session


def test_members_are_given_out_once_oldest_lease_first_and_the_last_reward_makes_the_group(
    episodes: Episodes,
) -> None:
    assert episodes.begin(now=0) is None
    for group_id in (3, 4):
        episodes.add(lease_of(group_id), now=0)
    assert episodes.num_free == 4
    sessions = [begin(episodes) for _ in range(4)]
    assert [(s.lease.group_id, s.member) for s in sessions] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert episodes.begin(now=0) is None
    first, second, *_ = sessions
    second.turns.append(turn_of([1, 5], [9]))
    assert episodes.finish(second, 1.0) is None
    # Made as many calls as one may, it is rewarded all the same; but not while one is running.
    first.turns = [turn_of([1, 5], [8])] * MAX_SESSION_CALLS
    first.num_running = 1
    with pytest.raises(SessionError, match="still being answered"):
        episodes.finish(first, 0.5)
    first.num_running = 0
    outcomes = episodes.finish(episodes.find(first.session_id, now=1.0), 0.5)
    assert outcomes is not None
    assert [outcome.reward for outcome in outcomes] == [0.5, 1.0]
    assert [num_sampled_of(outcome.turns) for outcome in outcomes] == [MAX_SESSION_CALLS, 1]
    assert [lease.group_id for lease in episodes.leases] == [4]
    with pytest.raises(SessionError, match=r"no open session.*begin another"):
        episodes.find(first.session_id, now=0)


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
    [given_up] = episodes.expire(now=32)
    assert given_up.lease.group_id == 3
    assert given_up.detail == "no agent came within 20 s"
    assert given_up.is_elsewhere, "agents of another worker may play it, or play it already"
    assert not episodes.leases


def test_tokens_of_sessions_that_are_given_up_are_counted(episodes: Episodes) -> None:
    episodes.add(lease_of(3), now=0)
    rewarded, given_up = begin(episodes), begin(episodes)
    rewarded.turns.append(turn_of([1], [8, 8]))
    episodes.finish(rewarded, 1.0)
    for attempt in range(MAX_EPISODE_ATTEMPTS):
        given_up.turns.append(turn_of([1], [8]))
        was_freed = episodes.abandon(given_up)
        is_last = attempt == MAX_EPISODE_ATTEMPTS - 1
        assert was_freed is not is_last
        # With the lease all is lost, also the rewarded episode.
        assert episodes.take_abandoned() == (3 if is_last else 1)
        if was_freed:
            given_up = begin(episodes)
    assert episodes.take_abandoned() == 0


@pytest.mark.parametrize("is_rewarded", [True, False])
def test_a_lease_that_is_not_wanted_has_no_more_episodes(
    episodes: Episodes, is_rewarded: bool
) -> None:
    for group_id in (3, 4):
        episodes.add(lease_of(group_id), now=0)
    first, second = begin(episodes), begin(episodes)
    first.turns.append(turn_of([1], [8, 8]))
    episodes.finish(first, 1.0)
    episodes.abandon(second)
    second = begin(episodes)
    assert second.lease.group_id == 3
    episodes.cancel(second.lease)
    assert [lease.group_id for lease in episodes.leases] == [4]
    assert episodes.num_free == 2
    assert episodes.take_abandoned() == 2
    # Its agent works on, to no purpose; another one does not begin with it.
    second.turns.append(turn_of([1], [8]))
    if is_rewarded:
        assert episodes.finish(episodes.find(second.session_id, now=1.0), 1.0) is None
    else:
        assert episodes.expire(now=11) == []
    assert episodes.take_abandoned() == 1
    assert [begin(episodes).lease.group_id for _ in range(2)] == [4, 4]
    assert episodes.begin(now=1.0) is None
    with pytest.raises(SessionError, match="no open session"):
        episodes.find(second.session_id, now=1.0)


def test_episodes_that_fall_silent_together_give_their_lease_up_once(episodes: Episodes) -> None:
    episodes.add(lease_of(3), now=0)
    now, sessions = 0.0, list[Session]()
    given_up: list[NoResult] = []
    for _ in range(MAX_EPISODE_ATTEMPTS):
        assert given_up == []
        sessions = [begin(episodes, now), begin(episodes, now)]
        now += 11
        given_up = episodes.expire(now=now)
    [ended] = given_up
    assert ended.lease.group_id == 3
    assert ended.detail == f"{MAX_EPISODE_ATTEMPTS} agents did not finish episode 0"
    assert not ended.is_elsewhere, "agents fail with it"
    assert not episodes.leases
    for session in sessions:
        with pytest.raises(SessionError):
            episodes.find(session.session_id, now=now)


def test_a_session_makes_so_many_calls_and_is_not_kept_alive_by_more(episodes: Episodes) -> None:
    episodes.add(lease_of(3), now=0.0)
    session = begin(episodes)
    turn = turn_of([1, 5], [8])
    session.turns = [turn] * (MAX_SESSION_CALLS - 1)
    assert episodes.find_for_call(session.session_id) is session
    episodes.begin_call(session, now=5.0)
    for now in (6.0, 14.0, 15.1):
        with pytest.raises(SessionError, match=r"3-0-0-1 has made 1024 calls, .*sessions/3-0-0-1/"):
            episodes.find_for_call(session.session_id)
        assert episodes.expire(now=now) == []
        if now == 6.0:
            session.num_running, session.turns = 0, [*session.turns, turn]
    with pytest.raises(SessionError, match="no open session '3-0-0-1'"):
        episodes.find(session.session_id, now=16.0)


def group_with(*sessions: list[Turn], max_tokens: int = 1000) -> Group:
    outcomes = [SessionOutcome(turns, 1.0) for turns in sessions]
    return group_of(lease_of(3), "w1", outcomes, max_tokens=max_tokens)[0]


def test_all_chains_of_a_session_become_one_rollout() -> None:
    first = turn_of([1, 5], [8, 9])
    rewritten = turn_of([1, 5, 8, 6], [7, 7], step=1)
    second = turn_of([1, 5, 8, 9, 6], [7], parent=first, step=2)
    again = turn_of([1, 5], [8, 9], step=2)  # another answer, which happens to be the same
    other = turn_of([1, 4], [3])
    session = SessionOutcome([first, rewritten, second, again, other], 1.0)
    short = SessionOutcome([turn_of([1, 5, 4], [2], step=1)], 0.0)
    group, num_chains = group_of(lease_of(3), "w1", [session, short], max_tokens=100)
    assert num_chains == 4 + 1
    assert group.prompt_ids.tolist() == [1, 5]
    rollout, alone = group.rollouts
    assert rollout.token_ids.tolist() == [8, 9, 6, 7, 7, 6, 7, 8, 9, 4, 3]
    assert rollout.branches.tolist() == [[2, 0], [5, 1], [7, -1], [9, -2]]
    masked = (~rollout.completion_mask).nonzero()[0].tolist()
    assert masked == [2, 5, 9]
    assert rollout.sampler_logprobs.tolist() == [-1, -2, 0, -1, -2, 0, -1, -1, -2, 0, -1]
    assert rollout.policy_versions[:, 1].tolist() == [0, 0, 0, 1, 1, 0, 2, 2, 2, 0, 0]
    no = NOT_RECORDED
    sets = make_sets([8], [9], no, [7], [7], no, [7], [8], [9], no, [3])
    assert is_same_sets(rollout.support, sets)
    assert (alone.token_ids.tolist(), alone.branches.tolist()) == ([4, 2], [])
    assert alone.policy_versions.tolist() == [[1, 1], [1, 1]]
    assert is_same_sets(alone.support, make_sets(no, [2]))
    assert group.rewards == [1.0, 0.0]


def test_the_prompt_of_a_group_is_what_its_first_contexts_share() -> None:
    group = group_with([turn_of([1, 2], [8])], [turn_of([1, 2, 3], [8]), turn_of([9], [8])])
    assert group.prompt_ids.tolist() == [1, 2]
    masks = [rollout.completion_mask.tolist() for rollout in group.rollouts]
    assert masks == [[True], [False, True, False, True]]
    assert group.rollouts[1].branches.tolist() == [[2, -3]], "it begins with nothing"
    with pytest.raises(SessionError, match="do not begin with the same token"):
        group_with([turn_of([1], [8])], [turn_of([2], [8])])
    # A chain may be longer than a stack of calls.
    last = None
    turns: list[Turn] = []
    for number in range(2 * sys.getrecursionlimit()):
        last = turn_of([1, *[8] * number], [8], parent=last)
        turns.append(last)
    assert turns[-1].num_sampled == 2 * sys.getrecursionlimit()
    assert not len(group_with(turns, turns).rollouts[0].branches)


def test_chains_beyond_the_most_tokens_are_left_out_those_with_the_fewest_sampled_first() -> None:
    long = turn_of([1, 2], [5, 5, 5])
    turns = [turn_of([1, 2], [3]), long, turn_of([1, 2], [4, 4])]
    turns.append(turn_of([1, 2, 5, 5, 5, 6], [7], parent=long, step=1))
    for most, expected in (
        (10, [3, 5, 5, 5, 4, 4, 6, 7]),
        (9, [5, 5, 5, 4, 4, 6, 7]),
        (8, [5, 5, 5, 6, 7]),
        (1, [5, 5, 5, 6, 7]),
    ):
        group = group_with(turns, turns, max_tokens=most)
        assert group.rollouts[0].token_ids.tolist() == expected


@st.composite
def sessions(draw: st.DrawFn) -> list[Turn]:
    """Calls whose contexts go on from an earlier call, or from part of one, or begin anew."""
    few = st.lists(st.integers(1, 3), max_size=3)
    turns: list[Turn] = []
    for step in range(draw(st.integers(1, 6))):
        parent = draw(st.sampled_from([None, *turns]))
        begun = [] if parent is None else parent.ids.tolist()
        if draw(st.booleans()):
            parent, begun = None, begun[: draw(st.integers(0, 4))]
        context = begun + draw(few)
        turns.append(turn_of(context or [1], draw(few), parent=parent, step=step))
    return turns


@given(sessions(), st.integers(1, 30))
def test_each_sampled_token_is_there_once_after_the_context_it_was_sampled_in(
    turns: list[Turn], most: int
) -> None:
    assume(num_sampled_of(turns))
    tree = tree_of(turns, max_tokens=100)
    num_prompt = len(tree.first_context) - (not len(turns[0].completion.token_ids))
    assume(num_prompt)
    rollout = tree.rollout(num_prompt, reward=1.0, finish_reason="stop")
    prompt = tree.first_context[:num_prompt].tolist()
    ids = [*prompt, *rollout.token_ids.tolist()]
    before = predecessors(rollout.branches, num_tokens=rollout.num_tokens)
    found = []
    for place in rollout.completion_mask.nonzero()[0].tolist():
        own, at = [], int(before[place])
        while at >= -num_prompt:
            own.append(ids[at + num_prompt])
            at = int(before[at]) if at >= 0 else at - 1
        version, logprob = rollout.policy_versions[place, 1], rollout.sampler_logprobs[place]
        found.append((int(version), ids[place + num_prompt], float(logprob), own[::-1]))
    expected = [
        (step, token, -1.0 - number, [*turn.context_ids, *turn.completion.token_ids[:number]])
        for step, turn in enumerate(turns)
        for number, token in enumerate(turn.completion.token_ids.tolist())
    ]
    assert sorted(found) == sorted(expected)
    shape = Tree(rollout.branches, num_tokens=rollout.num_tokens, num_prompt=num_prompt)
    assert tree.num_chains == len(shape.chains)
    smaller = tree_of(turns, max_tokens=most)
    assert smaller.num_tokens <= most or smaller.num_chains == 1


# --- what goes over HTTP --------------------------------------------------------------------------


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}]


class Letters:
    """A tokenizer with one token per character."""

    chat_template = "{{ tools }}"

    def __len__(self) -> int:
        return 1 << 21

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))


def read(fields: dict[str, object], kind: type[ChatBody] | type[TextBody] = TextBody) -> Body:
    return read_body(json.dumps(fields).encode(), kind)


def answer_of(body: Body, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the choice that a call is answered with, and its first event, of a text."""
    letters: Any = Letters()
    answer = ChatAnswer(body, Dialogue(TextCodec(letters, [], {})), model="m", call_id="1")
    turn = turn_of([1], [*map(ord, text)], step=3)
    [choice], [first, _] = answer.whole(turn)["choices"], answer.events(turn)
    return choice, first


def test_stop_strings_are_one_or_many_and_empty_ones_are_none() -> None:
    def stops(value: object) -> list[str]:
        return [*options_of(read({"prompt": "1", "stop": value})).stop]

    assert [stops(value) for value in (None, "", "a", ["a", "", "b"])] == [
        [],
        [],
        ["a"],
        ["a", "b"],
    ]
    for bad in (["a"] * 17, "a" * 257, [1]):
        with pytest.raises(BodyError, match=r"stop"):
            stops(bad)


@pytest.mark.parametrize(
    ("fields", "text", "content", "num_calls"),
    [
        ({"tools": TOOLS}, f"So: {CALL}", "So:", 1),
        # One call that cannot be read leaves all of it text.
        ({"tools": TOOLS}, f"{CALL}<tool_call>{{oops</tool_call>", None, 0),
        ({}, CALL, None, 0),
        ({"tools": TOOLS, "tool_choice": "none"}, CALL, None, 0),
    ],
)
def test_calls_of_tools_come_back_as_openai_writes_them_and_all_else_is_text(
    fields: dict[str, object], text: str, content: str | None, num_calls: int
) -> None:
    messages = [{"role": "user", "content": "?"}]
    choice, first = answer_of(read({"messages": messages, **fields}, ChatBody), text)
    message = choice["message"]
    assert choice["finish_reason"] == ("tool_calls" if num_calls else "stop")
    assert message["content"] == (text if content is None else content)
    assert len(message.get("tool_calls", [])) == num_calls
    for call in message.get("tool_calls", []):
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert call in first["choices"][0]["delta"]["tool_calls"]
    assert first["system_fingerprint"] == "v3"


def test_logprobs_of_text_have_offsets() -> None:
    choice, _ = answer_of(read({"prompt": "1", "logprobs": 0}), "abc")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_the_offsets_of_a_long_answer_do_not_hold_up_the_loop() -> None:
    num_calls = 0

    class Token(str):
        def __len__(self) -> int:
            nonlocal num_calls
            num_calls += 1
            return super().__len__()

    dialogue: Any = Mock(text_of=lambda ids: Token("ab"), answer_of=lambda ids: "")
    answer = ChatAnswer(read({"prompt": "1", "logprobs": 0}), dialogue, model="m", call_id="1")
    [choice] = answer.whole(turn_of([1], [2] * 100, step=3))["choices"]
    assert choice["logprobs"]["text_offset"] == list(range(0, 200, 2))
    assert num_calls == 100, "the time of a sum over all earlier tokens grows with the square"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"max_tokens": 0}, "max_tokens = 0: at least 1"),
        ({"top_p": 0}, "top_p above 0"),
        ({"logit_bias": {"3": 1}}, "logit_bias is not supported: remove it"),
        ({"n": 2}, "n is not supported: ask as often"),
        ({"tool_choice": "required"}, "tool_choice is not supported: the model decides"),
        ({"functions": [{"name": "f"}]}, "functions is not supported: send them as `tools`"),
        ({"best_of": 4}, "best_of is not supported: ask as often"),
        ({"min_p": 1.1}, "the body cannot be read: Expected `float` <= 1.0"),
        ({"stop_token_ids": [3]}, "stop_token_ids is not supported: answers end with the model's"),
        ({"echo": True}, "echo is not supported: put prompt and answer together"),
        ({"return_tokens_as_token_ids": True}, "take return_token_ids"),
        ({"structured_outputs": {"json": {}}}, "the model decides"),
        ({"response_format": {"type": "json_object"}}, "ask for the format in a message"),
        ({"reasoning_effort": "high"}, r"the run's: set model\.chat_template_kwargs"),
        ({"add_generation_prompt": False}, "an answer needs a turn"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"temperature": 1e-300}, "temperature = 1e-300: 0 for the likeliest"),
        ({"temperature": 1e300}, "temperature = "),
        ({"top_k": 99999999999}, "cannot be read: "),
        ({"max_tokens": 1e30}, "cannot be read: "),
        ({"prompt": [-1]}, "cannot be read: "),
        ({"prompt": [1 << 32]}, "cannot be read: "),
        ({"prompt": 3}, "cannot be read: Expected"),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_by_its_field(
    fields: dict[str, object], complaint: str
) -> None:
    with pytest.raises(BodyError, match=complaint):
        options_of(read({"prompt": "1", **fields}))


def test_a_body_that_asks_for_nothing_unusual_is_served() -> None:
    neutral: dict[str, Any] = {
        "n": 1,
        "stop": [],
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
    }
    neutral |= {"response_format": {"type": "text"}, "functions": [], "suffix": None, "echo": False}
    begun = {"add_generation_prompt": False, "continue_final_message": True}
    assert options_of(read({"prompt": "1", "cache_salt": "x", **neutral, **begun})).tools == []


@pytest.mark.parametrize(
    "data", [b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 100_000, b'{"messages": []}']
)
def test_bytes_that_are_no_call_are_refused(data: bytes) -> None:
    for kind in (TextBody, ChatBody):
        with pytest.raises(BodyError):
            read_body(data, kind)
