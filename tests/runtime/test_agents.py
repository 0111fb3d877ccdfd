"""Calls that wait for a version."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from echo.core.errors import EngineError
from echo.core.metrics import Counters
from echo.core.rollout import PolicyVersion
from echo.engine.engine import NOBODY, Completion, Request, Sampling, VersionError
from echo.engine.hf.engine import TransformersEngine
from echo.engine.model import load_directory
from echo.runtime.agents.endpoint import (
    Body,
    BodyError,
    ChatAnswer,
    ChatBody,
    TextBody,
    options_of,
    read_body,
)
from echo.runtime.agents.sessions import (
    ANY_VERSION,
    MAX_EPISODE_ATTEMPTS,
    MAX_SESSION_CALLS,
    SEGMENT_TOKENS,
    Agents,
    CallBounds,
    CallOptions,
    CallSampler,
    Dialogue,
    Episodes,
    Session,
    SessionError,
    SessionOutcome,
    Turn,
    group_of,
)
from echo.runtime.threads import ThreadPools
from echo.wire.messages import Lease

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def make_agents() -> Agents:
    """Return the agents of a worker on v1, which samples nothing."""
    counters = Counters()
    role = SimpleNamespace(
        max_groups=0, installed_version=V1, counters=counters, count=counters.add
    )
    parts: Any = SimpleNamespace(group_size=1, session_timeout_s=60.0)
    sampler: Any = None
    node: Any = SimpleNamespace(now=0.0, perform=lambda actions: None)
    pool = ThreadPools().pool("reward")
    return Agents(parts, role, sampler, node=node, pool=pool)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_held", [0, 1, 2])
def test_the_pieces_of_an_answer_are_of_one_version_while_the_engine_holds_it(
    num_held: int,
) -> None:
    """A newer version comes between any two pieces of three."""
    agents = make_agents()
    loaded = [V1]

    async def sample(request: Request, how: Sampling, bounds: CallBounds) -> Completion:
        if bounds.exact_version not in (None, *loaded):
            raise VersionError("gone")
        version = bounds.exact_version or loaded[-1]
        number = how.max_completion_tokens - len(request.prefix_ids)
        loaded.append(PolicyVersion(1, loaded[-1].step + 1))
        del loaded[: max(0, len(loaded) - 1 - num_held)]
        return Completion(
            request.request_id,
            np.zeros(number, np.int32),
            np.zeros(number, np.float32),
            "length",
            np.tile(np.array([version.lineage, version.step], np.int32), (number, 1)),
        )

    async def read(_: object) -> None: ...

    sampler: Any = SimpleNamespace(sample=sample, has_several_versions=num_held > 0)
    agents._sampler = sampler
    reader: Any = SimpleNamespace(read=read)
    how = Sampling(1.0, 1.0, 0, 3 * SEGMENT_TOKENS, ())
    ids = np.array([5], np.int32)
    whole = asyncio.run(agents._sample(ids, how, "", ANY_VERSION, reader))
    steps = [int(step) for step in whole.policy_versions[::SEGMENT_TOKENS, 1]]
    assert steps == {0: [1, 2, 3], 1: [1, 1, 3], 2: [1, 1, 1]}[num_held]


@pytest.mark.parametrize("is_continuous", [False, True])
def test_a_call_for_which_the_model_gives_no_probabilities_fails_alone(is_continuous: bool) -> None:
    def generate(requests: list[Request], *_: object, **__: object) -> list[Completion]:
        versions = np.array([[1, 1]], np.int32)
        return [
            Completion(
                request.request_id,
                np.zeros(1, np.int32),
                np.array([np.nan if request.seed else -1.0], np.float32),
                "nonfinite" if request.seed else "stop",
                versions,
            )
            for request in requests
        ]

    async def main() -> None:
        engine: Any = SimpleNamespace(
            is_continuous=is_continuous, num_versions=1, generate=generate
        )
        sampler = CallSampler(engine, NOBODY, threads=ThreadPools())
        running = asyncio.create_task(sampler.run())
        how = Sampling(1.0, 1.0, 0, 4, ())
        calls = [
            sampler.sample(Request(str(seed), np.array([5], np.int32), seed), how, ANY_VERSION)
            for seed in range(2)
        ]
        good, bad = await asyncio.gather(*calls, return_exceptions=True)
        running.cancel()
        assert isinstance(good, Completion)
        assert isinstance(bad, EngineError)
        assert "a log-probability of nan at token 0 of request 1 under v1" in str(bad)

    asyncio.run(main())


@pytest.mark.parametrize("bounds", [CallBounds(min_version=V2), CallBounds(exact_version=V2)])
def test_a_call_that_waits_for_a_version_is_refused_once_the_worker_stops(
    bounds: CallBounds,
) -> None:
    async def main() -> None:
        agents = make_agents()  # its patience never ends
        options = CallOptions(bounds=bounds, version_wait_s=60.0)
        call = asyncio.create_task(agents.call(None, "1+1=", options))
        await asyncio.sleep(0.01)
        assert not call.done()
        agents.close()
        async with asyncio.timeout(60):
            with pytest.raises(VersionError, match="v2 is wanted, v1 is installed"):
                await call
        assert agents.role.counters["engine/version_refused"] == 1

    asyncio.run(main())


def test_a_context_becomes_tokens_beside_the_loop_and_its_session_may_end_meanwhile() -> None:
    agents = make_agents()
    agents._episodes.add(lease_of(3), now=0.0)
    session = begin(agents._episodes)
    threads: list[str] = []

    async def main() -> None:
        loop, begun, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def encode(*_: object, **__: object) -> tuple[np.ndarray, None]:
            threads.append(threading.current_thread().name)
            loop.call_soon_threadsafe(begun.set)
            assert may_end.wait(60)
            return np.array([5], np.int32), None

        parts: Any = SimpleNamespace(dialogue=SimpleNamespace(continue_text=encode))
        agents.parts = parts
        call = asyncio.create_task(agents.call(session.session_id, "1+1=", CallOptions()))
        async with asyncio.timeout(60):
            await begun.wait()
            agents.abandon(session.session_id)
            may_end.set()
            with pytest.raises(SessionError, match="no open session"):
                await call

    asyncio.run(main())
    [name] = threads
    assert name.startswith("reward")


# --- sampling for agents --------------------------------------------------------------------------


V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
HOW = Sampling(1.0, 1.0, 0, 4, ())


def test_each_request_is_sampled_within_its_own_bounds(tiny_model_dir: Path) -> None:
    engine = TransformersEngine(tiny_model_dir, num_threads=1)
    engine.load(load_directory(tiny_model_dir, "float32"), V1)
    wanted = [
        ANY_VERSION,
        CallBounds(exact_version=V1),
        CallBounds(min_version=V2),
        CallBounds(V1, V2),
    ]

    async def main() -> list[Completion | BaseException]:
        threads = ThreadPools()
        sampler = CallSampler(engine, NOBODY, threads=threads)
        requests = [Request(f"r{n}", np.array([1, 5], np.int32), n) for n in range(len(wanted))]
        # All are there before the first batch is made.
        calls = [sampler.sample(r, HOW, b) for r, b in zip(requests, wanted, strict=True)]
        answers = asyncio.gather(*calls, return_exceptions=True)
        running = asyncio.create_task(sampler.run())
        async with asyncio.timeout(60):
            found = await answers
        running.cancel()
        threads.close()
        return found

    first, second, third, fourth = asyncio.run(main())
    assert [isinstance(one, Completion) for one in (first, second)] == [True, True]
    assert isinstance(third, VersionError)
    assert "at least v2 is wanted" in str(third)
    assert isinstance(fourth, VersionError)
    assert "exactly v2 is wanted" in str(fourth)
    engine.close()


@pytest.mark.parametrize("error", [EngineError("its prompt has unknown tokens"), IndexError("99")])
def test_a_call_is_sampled_whatever_others_ask_for_and_not_once_its_caller_has_gone(
    error: Exception,
) -> None:
    asked: list[list[str]] = []

    def generate(requests: list[Request], *_: object, **__: object) -> list[Completion]:
        asked.append([request.request_id for request in requests])
        if "bad" in asked[-1]:
            raise error
        none = np.empty(0, np.int32)
        return [Completion(name, none, none, "stop", none) for name in asked[-1]]

    engine: Any = SimpleNamespace(
        is_continuous=False, num_versions=1, generate=generate, can_sample=lambda: True
    )

    async def main() -> list[Completion | BaseException]:
        threads = ThreadPools()
        sampler = CallSampler(engine, NOBODY, threads=threads)
        calls = [
            asyncio.create_task(sampler.sample(Request(name, np.array([1]), 0), HOW, ANY_VERSION))
            for name in ("good", "bad", "gone", "fine")
        ]
        await asyncio.sleep(0)
        calls.pop(2).cancel()
        await asyncio.sleep(0)
        running = asyncio.create_task(sampler.run())
        async with asyncio.timeout(60):
            found = await asyncio.gather(*calls, return_exceptions=True)
        running.cancel()
        threads.close()
        return found

    good, bad, fine = asyncio.run(main())
    assert asked == [["good", "bad", "fine"], ["good"], ["bad"], ["fine"]]
    assert isinstance(bad, EngineError)
    assert [one.request_id for one in (good, fine) if isinstance(one, Completion)] == [
        "good",
        "fine",
    ]


def test_an_engine_that_samples_nothing_any_more_ends_whoever_lends_it() -> None:
    engine: Any = SimpleNamespace(
        is_continuous=False,
        num_versions=1,
        generate=lambda *_, **__: 1 / 0,
        can_sample=lambda: False,
    )

    async def main() -> None:
        sampler = CallSampler(engine, NOBODY, threads=ThreadPools())
        request = Request("r", np.array([1]), 0)
        call = asyncio.create_task(sampler.sample(request, HOW, ANY_VERSION))
        with pytest.raises(ZeroDivisionError):
            await sampler.run()
        call.cancel()

    asyncio.run(main())


# --- sessions -------------------------------------------------------------------------------------


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


def test_episodes_that_fall_silent_together_give_their_lease_up_once(episodes: Episodes) -> None:
    episodes.add(lease_of(3), now=0)
    now = 0.0
    for _ in range(MAX_EPISODE_ATTEMPTS):
        begin(episodes, now), begin(episodes, now)
        now += 11
        given_up = episodes.expire(now=now)
    [(lease, why)] = given_up
    assert lease.group_id == 3
    assert why == f"{MAX_EPISODE_ATTEMPTS} agents did not finish episode 0"
    assert not episodes.leases


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


def test_a_session_that_has_made_its_calls_is_rewarded(episodes: Episodes) -> None:
    episodes.add(lease_of(3), now=0.0)
    session = begin(episodes)
    session.turns = [turn_of([1, 5], [8])] * MAX_SESSION_CALLS
    assert episodes.finish(episodes.find(session.session_id, now=1.0), 1.0) is None


def test_a_chain_may_be_longer_than_a_stack_of_calls() -> None:
    last = None
    for _ in range(2 * sys.getrecursionlimit()):
        last = turn_of([1], [8], parent=last)
    assert last is not None
    assert last.num_sampled == 2 * sys.getrecursionlimit()


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


# --- what goes over HTTP --------------------------------------------------------------------------


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}]


class Letters:
    """A tokenizer with one token per character."""

    chat_template = "{{ tools }}"

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))


def turn_of_wire(text: str) -> Turn:
    ids = np.array([ord(letter) for letter in text], np.int32)
    versions = np.tile(np.array([[1, 3]], np.int32), (len(ids), 1))
    completion = Completion("r", ids, np.zeros(len(ids), np.float32), "stop", versions)
    return Turn(np.array([1], np.int32), completion, "", None)


def answer_of(**fields: object) -> ChatAnswer:
    body = read({"messages": [{"role": "user", "content": "?"}], **fields})
    dialogue = Dialogue(Letters(), stop_ids=[], chat_template_kwargs={})
    return ChatAnswer(body, dialogue, model="m", call_id="1")


def read(fields: dict[str, object], kind: type[ChatBody] | type[TextBody] = ChatBody) -> Body:
    return read_body(json.dumps(fields).encode(), kind)


def test_calls_of_tools_come_back_as_openai_writes_them() -> None:
    [choice] = answer_of(tools=TOOLS).whole(turn_of_wire(f"So: {CALL}"))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So:"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    [last] = answer_of(tools=TOOLS).last(turn_of_wire(CALL))
    assert last["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "add"
    assert last["system_fingerprint"] == "v3"


def test_a_call_that_cannot_be_read_leaves_all_of_it_text() -> None:
    text = f"{CALL}<tool_call>{{oops</tool_call>"
    [choice] = answer_of(tools=TOOLS).whole(turn_of_wire(text))["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_the_same_is_text(fields: dict[str, object]) -> None:
    [choice] = answer_of(**fields).whole(turn_of_wire(CALL))["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]


def test_logprobs_of_text_have_offsets() -> None:
    body = read({"prompt": "1", "logprobs": 0}, TextBody)
    dialogue = Dialogue(Letters(), stop_ids=[], chat_template_kwargs={})
    [choice] = ChatAnswer(body, dialogue, model="m", call_id="1").whole(turn_of_wire("abc"))[
        "choices"
    ]
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "1", "max_tokens": 0}, "max_tokens = 0: at least 1"),
        ({"prompt": "1", "top_p": 0}, "top_p above 0"),
        ({"prompt": "1", "logit_bias": {"3": 1}}, "logit_bias is not supported: remove it"),
        ({"prompt": 3}, "cannot be read: Expected"),
    ],
)
def test_bad_bodies(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(BodyError, match=complaint):
        read(fields, TextBody)


def test_versions_are_read_as_they_are_told() -> None:
    asked = {"prompt": "1", "min_version": "v12", "exact_version": "v7/L2", "version_wait_s": 3}
    options = options_of(read(asked, TextBody))
    assert options.bounds.min_version == PolicyVersion(1, 12)
    assert options.bounds.exact_version == PolicyVersion(2, 7)
    assert str(options.bounds.exact_version) == "v7/L2"
    assert options.version_wait_s == 3


@pytest.mark.parametrize("text", ["12", "v", "v1.5", "v12 ", "v1/L", "v1/2", "v99999999999"])
def test_other_texts_are_no_versions(text: str) -> None:
    with pytest.raises(BodyError, match=r"exact_version = .* is no version; write it as"):
        options_of(read({"prompt": "1", "exact_version": text}, TextBody))


@pytest.mark.parametrize("wait_s", [-0.1, 60.1])
def test_nobody_waits_for_a_version_for_ever(wait_s: float) -> None:
    with pytest.raises(BodyError, match=r"version_wait_s = .*: 0 to 60"):
        read({"prompt": "1", "version_wait_s": wait_s}, TextBody)
