"""Sessions of outside agents: episodes, sampled calls, rewards.

Leases are asked for when an agent waits for an episode, and not before: nothing grows old in a
queue. Calls of a session are sampled as the run samples, or the learner would compute other
probabilities; calls without a session are as the caller wishes, and are not recorded.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from echo.core.errors import DataError, EchoError, EngineError
from echo.core.rollout import NO_OPINION, Group, Rollout
from echo.engine.engine import (
    Completion,
    Engine,
    Request,
    Sampling,
    Watcher,
    describe_error,
    describe_nonfinite,
)
from echo.leases.held import LeaseKey, key_of
from echo.roles.worker import Worker
from echo.runtime.node import Node
from echo.runtime.threads import Pool, Threads
from echo.tasks.task import Example
from echo.tasks.tokenization import MARK, UNUSABLE, TextCodec, decode, unmarked
from echo.wire.messages import Lease

# --- The engine as one caller after the other sees it: one request in, one completion out ---
#
# An engine that takes requests at any time gets each in a call of its own; any other gets all that
# wait and are sampled alike in one call, and then the next.


MAX_CALLS = 64
"""Threads that wait for an engine that takes requests at any time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    request: Request
    sampling: Sampling
    answer: asyncio.Future[Completion]


class CallSampler:
    """Samples single requests."""

    def __init__(self, engine: Engine, watcher: Watcher, *, threads: Threads) -> None:
        """Start without requests; `run` has to run beside the callers."""
        self._engine = engine
        self._watcher = watcher
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        num_threads = MAX_CALLS if engine.is_continuous else 1
        self._pool = threads.pool("agent-call", num_threads)

    async def sample(self, request: Request, sampling: Sampling) -> Completion:
        """Return what is sampled for a request.

        Raises:
            EchoError: if the engine fails, or cannot sample such a request.
        """
        if self._engine.is_continuous:
            [completion] = await self._generate([request], sampling)
        else:
            answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            self._queue.put_nowait(_Waiting(request, sampling, answer))
            completion = await answer
        if completion.finish_reason == "nonfinite":
            raise EngineError(describe_nonfinite(completion))
        return completion

    async def run(self) -> None:
        """Answer what waits, all that are sampled alike at once, the oldest first."""
        waiting: list[_Waiting] = []
        while True:
            if not waiting:
                waiting.append(await self._queue.get())
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            waiting = [one for one in waiting if not one.answer.done()]  # its caller has hung up
            if not waiting:
                continue
            how = waiting[0].sampling
            batch = [one for one in waiting if one.sampling == how]
            waiting = [one for one in waiting if one.sampling != how]
            await self._answer(batch, how)

    async def _answer(self, batch: Sequence[_Waiting], sampling: Sampling) -> None:
        try:
            completions = await self._generate([one.request for one in batch], sampling)
        except EchoError as error:
            if len(batch) > 1:
                # It may be the fault of one of them.
                for one in batch:
                    await self._answer([one], sampling)
                return
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        for one, completion in zip(batch, completions, strict=True):
            if not one.answer.done():  # it is where its caller has hung up
                one.answer.set_result(completion)

    async def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        generated = self._pool.run(lambda: self._engine.generate(requests, sampling, self._watcher))
        try:
            return await generated
        except EchoError:
            raise
        except Exception as error:
            # A fault of one request, or of an engine that cannot serve any other.
            if not await self._pool.run(self._engine.can_sample):
                raise
            raise EngineError(f"the engine has raised {describe_error(error)}") from error


# --- Sessions of calls of outside agents, and the groups made of them ---
#
# A lease of group size G becomes G episodes; each agent that asks gets one, as a session. A session
# records each call's tokens. A call whose context begins with all that an earlier call saw and
# sampled goes on from it, token by token; any other starts a new chain, such as after an agent has
# rewritten its history. When the reward comes, the chain of calls with the most sampled tokens
# becomes the rollout: what was sampled is trained on, what stands between is masked.
#
# The prompts of a group's sessions may differ (names, times, tools). Their common beginning is the
# group's prompt, and the rest of each is the masked beginning of its rollout.


MAX_EPISODE_ATTEMPTS = 3
"""How often one episode is handed out before its group is given up."""
MAX_SESSION_CALLS = 1024
"""Calls that a session keeps, each with its whole context: an agent in a loop ends here."""

Ids = npt.NDArray[np.int32]


class SessionError(EchoError):
    """An agent asked for something that its session does not allow."""


class UnknownSessionError(SessionError):
    """There is no such session, or no more."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One call."""

    context_ids: Ids
    """[C] all that the model saw."""
    completion: Completion
    text: str
    """Context and completion as text, special tokens included."""
    parent: Turn | None
    """The call that it goes on from."""

    @property
    def ids(self) -> Ids:
        """[C + T] context and completion."""
        return np.concatenate([self.context_ids, self.completion.token_ids])

    @property
    def chain(self) -> list[Turn]:
        """The calls that led here, oldest first, this one included."""
        turns, turn = [self], self.parent
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def num_sampled(self) -> int:
        """Tokens sampled along the chain."""
        return sum(len(turn.completion.token_ids) for turn in self.chain)


@dataclass(slots=True, eq=False)
class Session:
    """One episode in an agent's hands."""

    session_id: str
    lease: Lease
    member: int
    touched_at: float
    """When its agent was last heard of, seconds."""
    num_running: int = 0
    """Calls that are being sampled."""
    num_calls: int = 0
    turns: list[Turn] = field(default_factory=list)

    @property
    def opening(self) -> dict[str, Any]:
        """An agent's view of its episode."""
        example = self.lease.example
        prompt = example["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"session": self.session_id, "messages": messages, **example}

    @property
    def best(self) -> Turn | None:
        """The end of the chain that becomes the rollout: the longest, of equals the last."""
        return max(reversed(self.turns), key=lambda turn: turn.num_sampled, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class SessionOutcome:
    """A finished episode."""

    leaf: Turn
    reward: float
    num_sampled: int
    """Tokens of all its calls."""


@dataclass(slots=True, eq=False)
class _Hand:
    """A lease that is being worked on."""

    lease: Lease
    waiting: deque[int]
    """Members without a session, in order."""
    touched_at: float
    num_attempts: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, SessionOutcome] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)


class Episodes:
    """The leases in hand and the sessions on them."""

    def __init__(self, *, group_size: int, timeout_s: float) -> None:
        """Start with nothing in hand.

        Args:
            group_size: episodes of a lease.
            timeout_s: seconds without a sign of its agent after which an episode is free again,
                and without a sign of any agent after which a lease is given up.
        """
        self._group_size = group_size
        self._timeout_s = timeout_s
        self._hands: dict[LeaseKey, _Hand] = {}
        self._sessions: dict[str, Session] = {}

    @property
    def leases(self) -> list[Lease]:
        return [hand.lease for hand in self._hands.values()]

    @property
    def num_free(self) -> int:
        """Episodes without a session."""
        return sum(len(hand.waiting) for hand in self._hands.values())

    def has_sessions(self, lease: Lease) -> bool:
        """Return whether an agent works on a lease in hand."""
        return bool(self._hands[key_of(lease)].sessions)

    def add(self, lease: Lease, *, now: float) -> None:
        self._hands[key_of(lease)] = _Hand(lease, deque(range(self._group_size)), now)

    def begin(self, *, now: float) -> Session | None:
        """Give out the oldest free episode, if there is one."""
        hand = next((hand for hand in self._hands.values() if hand.waiting), None)
        if hand is None:
            return None
        member = hand.waiting.popleft()
        attempt = hand.num_attempts[member] = hand.num_attempts.get(member, 0) + 1
        lease = hand.lease
        name = f"{lease.group_id}-{lease.attempt}-{member}-{attempt}"
        session = self._sessions[name] = Session(name, lease, member, now)
        hand.sessions.add(name)
        hand.touched_at = now
        return session

    def find(self, session_id: str, *, now: float) -> Session:
        """Return an open session, and note that its agent lives.

        Raises:
            SessionError: if there is none of that name.
        """
        session = self._open(session_id)
        self._touch(session, now)
        return session

    def find_for_call(self, session_id: str) -> Session:
        """Return an open session that may make one more call.

        Raises:
            SessionError: if there is none of that name, or it has made as many as one may.
        """
        session = self._open(session_id)
        if len(session.turns) + session.num_running >= MAX_SESSION_CALLS:
            raise SessionError(
                f"session {session_id} has made {MAX_SESSION_CALLS} calls, as many as one may: "
                f"end it with POST /v1/echo/sessions/{session_id}/reward, or give it up with DELETE"
            )
        return session

    def begin_call(self, session: Session, *, now: float) -> None:
        """Note that a call is being sampled, and its agent lives.

        A refused call is no such sign: an agent that repeats it forever times out.
        """
        self._touch(session, now)
        session.num_running += 1
        session.num_calls += 1

    def leaf_of(self, session: Session) -> Turn:
        """Return the end of the chain of calls that becomes a session's rollout.

        Raises:
            SessionError: if nothing was sampled in it, or a call still runs.
        """
        if session.num_running:
            raise SessionError(f"session {session.session_id}: a call is still being answered")
        leaf = session.best
        if leaf is None:
            raise SessionError(
                f"session {session.session_id} has no call to be rewarded: send its id with each "
                "call, as the header X-Echo-Session or in the address /sessions/ID/v1"
            )
        return leaf

    def finish(self, session: Session, reward: float) -> list[SessionOutcome] | None:
        """End a session with its reward; return the group's outcomes if it was the last.

        Raises:
            SessionError: as `leaf_of`.
        """
        leaf = self.leaf_of(session)
        hand = self._close(session)
        num_sampled = sum(len(turn.completion.token_ids) for turn in session.turns)
        hand.outcomes[session.member] = SessionOutcome(leaf, reward, num_sampled)
        if len(hand.outcomes) < self._group_size:
            return None
        del self._hands[key_of(session.lease)]
        return [hand.outcomes[member] for member in range(self._group_size)]

    def abandon(self, session: Session) -> bool:
        """Free an episode; return False if it was tried too often, and its lease is given up."""
        hand = self._close(session)
        if hand.num_attempts[session.member] >= MAX_EPISODE_ATTEMPTS:
            self._drop(hand)
            return False
        hand.waiting.append(session.member)
        return True

    def expire(self, *, now: float) -> list[tuple[Lease, str]]:
        """Free the episodes of agents that are gone; return leases that are given up, and why."""
        given_up = []
        late = [
            session
            for session in self._sessions.values()
            if now - session.touched_at > self._timeout_s and not session.num_running
        ]
        for session in late:
            # Giving a lease up ends its other sessions, which may be late as well.
            if session.session_id in self._sessions and not self.abandon(session):
                text = f"{MAX_EPISODE_ATTEMPTS} agents did not finish episode {session.member}"
                given_up.append((session.lease, text))
        for hand in list(self._hands.values()):
            if not hand.sessions and now - hand.touched_at > 2 * self._timeout_s:
                self._drop(hand)
                given_up.append((hand.lease, f"no agent came within {2 * self._timeout_s:g} s"))
        return given_up

    def _open(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(
                f"there is no open session {session_id!r}: it was rewarded, given up, or timed "
                "out; begin another with POST /v1/echo/sessions"
            )
        return session

    def _touch(self, session: Session, now: float) -> None:
        session.touched_at = self._hands[key_of(session.lease)].touched_at = now

    def _close(self, session: Session) -> _Hand:
        del self._sessions[session.session_id]
        hand = self._hands[key_of(session.lease)]
        hand.sessions.discard(session.session_id)
        return hand

    def _drop(self, hand: _Hand) -> None:
        del self._hands[key_of(hand.lease)]
        for name in hand.sessions:
            del self._sessions[name]


def group_of(lease: Lease, worker_id: str, outcomes: Sequence[SessionOutcome]) -> Group:
    """Return the group of a lease's finished episodes.

    Raises:
        SessionError: if their contexts do not begin alike.
    """
    num_shared = _num_shared([outcome.leaf.chain[0].context_ids for outcome in outcomes])
    if not num_shared:
        raise SessionError(
            "the first calls of the group's sessions do not begin with the same token; give all of "
            "them the same beginning, such as a system message"
        )
    return Group(
        group_id=lease.group_id,
        attempt=lease.attempt,
        worker_id=worker_id,
        prompt_ids=outcomes[0].leaf.context_ids[:num_shared].astype(np.int32),
        rollouts=tuple(_make_rollout(outcome, num_shared) for outcome in outcomes),
    )


def _make_rollout(outcome: SessionOutcome, start: int) -> Rollout:
    ids = outcome.leaf.ids.astype(np.int32)
    chain = outcome.leaf.chain
    logprobs = np.zeros(len(ids), np.float32)
    mask = np.zeros(len(ids), np.bool_)
    # Masked tokens were not sampled; the codec wants a version there, and none that is newer.
    versions = np.tile(chain[0].completion.policy_versions[:1], (len(ids), 1))
    for turn in chain:
        first = len(turn.context_ids)
        sampled = slice(first, first + len(turn.completion.token_ids))
        logprobs[sampled] = turn.completion.logprobs
        versions[sampled] = turn.completion.policy_versions
        mask[sampled] = True
    return Rollout(
        token_ids=ids[start:],
        sampler_logprobs=logprobs[start:],
        policy_versions=versions[start:].astype(np.int32),
        completion_mask=mask[start:],
        reward=outcome.reward,
        finish_reason=outcome.leaf.completion.finish_reason,
    )


def _num_shared(contexts: Sequence[Ids]) -> int:
    """Return how many tokens all of these begin with."""
    length = min(map(len, contexts))
    table = np.stack([context[:length] for context in contexts])
    differs = np.flatnonzero((table != table[0]).any(axis=0))
    return int(differs[0]) if len(differs) else length


# --- Calls of outside agents as tokens: sampled ones go in again as they were sampled ---
#
# An agent sends text. Tokenising that again could give other tokens than were sampled ("12" sampled
# as "1", "2"), so the learner would train on a context that the sampler never saw. Where the text
# of a call begins with what an earlier one saw and sampled, its tokens are taken, and only the rest
# is encoded.


class Dialogue:
    """Text of calls to tokens and back, for one model."""

    def __init__(self, codec: TextCodec) -> None:
        """Take what does so for prompts and completions."""
        self._codec = codec
        self._tokenizer: Any = codec.tokenizer

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return messages as text up to where the model goes on; see `TextCodec.render`.

        Raises:
            DataError: if there is no chat template, it knows no tools, or it fails.
        """
        if tools and "tools" not in str(self._tokenizer.chat_template):
            raise DataError(
                "the model's chat template knows no tools; describe them in a message, or set "
                "model.chat_template to one that does"
            )
        return self._codec.render(messages, tools)

    def other_arguments(self, arguments: Mapping[str, Any]) -> str:
        """Return an argument of the chat template that is not the run's; empty for none."""
        own = self._codec.chat_template_kwargs
        return next((name for name, value in arguments.items() if own.get(name) != value), "")

    def continue_text(
        self, text: str, known: Sequence[Turn], *, is_rendered: bool
    ) -> tuple[Ids, Turn | None]:
        """Return the tokens of a text, and the earlier call that it goes on from.

        Args:
            text: the whole context.
            known: earlier calls.
            is_rendered: whether a template wrote it, special tokens included.

        Raises:
            DataError: if it has no tokens, or some that the model does not know.
        """
        whole = unmarked(text)
        begun = [call for call in known if whole.startswith(call.text)]
        if not begun:
            encode = self._codec.encode_rendered if is_rendered else self._codec.encode_raw
            ids = encode(text)
            if not ids:
                raise DataError("the prompt has no tokens; a prompt needs at least one")
            return np.array(ids, np.int32), None
        call = max(begun, key=lambda call: len(call.text))
        more = self._codec.encode_rendered(_behind(text, len(call.text)))
        return np.concatenate([call.ids, np.array(more, np.int32)]), call

    def continue_ids(self, ids: Sequence[int], known: Sequence[Turn]) -> tuple[Ids, Turn | None]:
        """Return tokens as they are, and the earlier call that they go on from.

        Raises:
            DataError: if the model does not know some of them.
        """
        context = np.array(self._codec.known(ids), np.int32)
        begun = [
            call
            for call in known
            if len(call.ids) <= len(context) and (call.ids == context[: len(call.ids)]).all()
        ]
        return context, max(begun, key=lambda call: len(call.ids), default=None)

    def text_of(self, ids: Iterable[int]) -> str:
        """Return tokens as text, special tokens included."""
        return decode(self._tokenizer, ids, ())

    def answer_of(self, ids: Iterable[int]) -> str:
        """Return a completion as text, without the token that ended it."""
        return self._codec.decode(ids)


def _behind(text: str, length: int) -> str:
    """Return the rest of rendered text behind a number of characters, not counting `MARK`s."""
    end = length
    while (num_marks := text.count(MARK, 0, end)) != end - length:
        end = length + num_marks
    return text[end:]


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids or messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParts:
    """The parts that agents work with."""

    dialogue: Dialogue
    sampling: Sampling
    """Of the run."""
    group_size: int
    window: int
    """Tokens that the model takes."""
    max_session_tokens: int
    session_timeout_s: float
    model_name: str
    listen: str
    """tcp://host:port of the endpoint."""
    endpoint_path: Path
    """File that tells agents the address and the token."""
    reward: Callable[[Example, str], float | None]
    """The task's, for agents that report none; blocks."""
    max_abs_reward: float
    """Largest reward, either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The request of a call; a session's calls are limited in tokens only."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    """For the chat template."""


class StoppingError(SessionError):
    """The worker stops, or has no weights yet."""


class Agents:
    """The worker's side of all outside agents."""

    def __init__(
        self,
        parts: AgentParts,
        role: Worker,
        sampler: CallSampler,
        *,
        node: Node,
        pool: Pool,
    ) -> None:
        """Join the parts; `watch` has to run beside."""
        self.parts = parts
        self.role = role
        self._sampler = sampler
        self._node = node
        self._pool = pool
        """For tokens and rewards."""
        self._episodes = Episodes(group_size=parts.group_size, timeout_s=parts.session_timeout_s)
        self._num_waiting = 0
        self._num_plain = 0
        self._has_news = asyncio.Event()
        self._is_over = False

    # --- leases ----------------------------------------------------------------------------------

    def take(self, leases: Iterable[Lease]) -> None:
        """Offer the episodes of leases."""
        for lease in leases:
            self._episodes.add(lease, now=self._node.now)
        self._has_news.set()

    async def watch(self) -> None:
        """Keep leases alive while agents work on them, and give up the others."""
        num_ticks = 0
        while True:
            await asyncio.sleep(self.role.heartbeat_s / 2)
            num_ticks += 1
            for lease, why in self._episodes.expire(now=self._node.now):
                self._give_up(lease, "agent_timeout", why)
            for lease in self._episodes.leases:
                self.role.progress(lease, num_ticks)
            self._demand()

    def close(self) -> None:
        """Hand out nothing more; a lease without an agent is given back to the learner."""
        self._is_over = True
        for lease in self._episodes.leases:
            if not self._episodes.has_sessions(lease):
                self._node.perform(self.role.dropped(lease, now=self._node.now))
        self._has_news.set()

    def _demand(self) -> None:
        """Ask for the leases that waiting agents need."""
        missing = max(0, self._num_waiting - self._episodes.num_free)
        held = len(self._episodes.leases) + len(self.role.outbox)
        wanted = 0 if self._is_over else held + math.ceil(missing / self.parts.group_size)
        self._node.perform(self.role.demand(wanted, now=self._node.now))

    def _give_up(self, lease: Lease, reason: str, why: str) -> None:
        self._node.perform(self.role.failed(lease, reason, why, now=self._node.now))

    # --- sessions --------------------------------------------------------------------------------

    async def begin(self, *, wait_s: float) -> Session | None:
        """Return a new session, or None if there is no episode within the time.

        Raises:
            StoppingError: if there will never be one.
        """
        give_up_at = self._node.now + wait_s
        self._num_waiting += 1
        try:
            while not self._is_over:
                session = self._episodes.begin(now=self._node.now)
                left = give_up_at - self._node.now
                if session is not None or left <= 0:
                    return session
                self._demand()
                self._has_news.clear()
                try:
                    await asyncio.wait_for(self._has_news.wait(), left)
                except TimeoutError:
                    continue
            raise StoppingError("this worker stops, or the run is finished: there are no episodes")
        finally:
            self._num_waiting -= 1
            self._demand()

    async def reward(self, session_id: str, reward: float | None) -> float | None:
        """End a session; None lets the task judge its last answer.

        Returns:
            The reward; None if the task has no opinion.

        Raises:
            SessionError: if the session cannot be rewarded, or not so.
            RewardError: if the task fails.
        """
        session = self._episodes.find(session_id, now=self._node.now)
        self._episodes.leaf_of(session)  # or there is nothing to reward
        if reward is None:
            # Of a rewritten history another chain may be the longest, and is trained on.
            text = self.parts.dialogue.answer_of(session.turns[-1].completion.token_ids)
            example = Example(**session.lease.example)
            reward = await self._pool.run(self.parts.reward, example, text)
        judged = NO_OPINION if reward is None else reward
        if reward is not None and not math.isfinite(reward):
            raise SessionError(f"a reward of {reward} is no finite number")
        bound = self.parts.max_abs_reward
        if reward is not None and abs(reward) > bound:
            raise SessionError(f"a reward of {reward:g} lies beyond task.max_reward = {bound:g}")
        session = self._episodes.find(session_id, now=self._node.now)  # it may be over by now
        outcomes = self._episodes.finish(session, judged)
        if outcomes is not None:
            lease, now = session.lease, self._node.now
            for outcome in outcomes:
                self.role.count("agents/tokens_sampled", outcome.num_sampled)
                self.role.count("agents/tokens_trained", outcome.leaf.num_sampled)
            try:
                group = group_of(lease, self.role.settings.node_id, outcomes)
            except SessionError as error:
                self._give_up(lease, "agent_error", str(error))
            else:
                self._node.perform(self.role.finished(group, now=now))
        self._demand()
        return reward

    def abandon(self, session_id: str) -> None:
        """Free the episode of a session for another try.

        Raises:
            SessionError: if there is no such session.
        """
        session = self._episodes.find(session_id, now=self._node.now)
        if not self._episodes.abandon(session):
            self._give_up(session.lease, "agent_failed", "its agents gave an episode up each time")
        self._has_news.set()

    # --- calls -----------------------------------------------------------------------------------

    async def call(
        self,
        session_id: str | None,
        prompt: Prompt,
        options: CallOptions,
    ) -> Turn:
        """Sample one answer, recorded where it belongs to a session.

        Args:
            session_id: None for a call that is not trained on.
            prompt: the whole context.
            options: see there.

        Raises:
            SessionError: if the session is over or has made its calls, there is no space, or
                nothing can be sampled now.
            EchoError: if the prompt or the engine fails.
        """
        if self._is_over or self.role.installed_version is None:
            raise StoppingError("no weights to sample from: this worker starts or stops; try again")
        session = self._session_of(session_id)
        known = [] if session is None else list(session.turns)
        try:
            # A long context takes a moment, in which others are to be answered.
            ids, parent, text = await self._pool.run(self._tokens, prompt, options.tools, known)
        except UNUSABLE as error:
            raise DataError(f"the prompt cannot be turned into tokens: {error}") from error
        session = self._session_of(session_id)  # it may be over by now
        sampling = self._sampling(options, len(ids), is_recorded=session is not None)
        seed = self._seed(options, session)
        if session is not None:
            self._episodes.begin_call(session, now=self._node.now)
        try:
            number = int.from_bytes(blake3(seed.encode()).digest(8))
            completion = await self._sampler.sample(Request(seed, ids, number), sampling)
        finally:
            if session is not None:
                session.num_running -= 1
                session.touched_at = self._node.now
        if completion.finish_reason == "abort":
            raise StoppingError("the worker stops; this answer was cut short")
        self.role.tokens_sampled += len(completion.token_ids)
        text += self.parts.dialogue.text_of(completion.token_ids)
        turn = Turn(ids, completion, text, parent)
        if session is not None:
            session.turns.append(turn)
        return turn

    def _session_of(self, session_id: str | None) -> Session | None:
        """Return the session that a call belongs to, if it belongs to one.

        Raises:
            SessionError: if there is no such session, or it has made its calls.
        """
        return None if session_id is None else self._episodes.find_for_call(session_id)

    def _tokens(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], known: Sequence[Turn]
    ) -> tuple[npt.NDArray[np.int32], Turn | None, str]:
        """Return a context's tokens, the call that it goes on from, and its text; in a thread."""
        dialogue = self.parts.dialogue
        if isinstance(prompt, str):
            return *dialogue.continue_text(prompt, known, is_rendered=False), prompt
        if prompt and isinstance(prompt[0], int):
            ids = [token for token in prompt if isinstance(token, int)]
            return *dialogue.continue_ids(ids, known), dialogue.text_of(ids)
        messages = [message for message in prompt if isinstance(message, Mapping)]
        text = dialogue.render(messages, tools)
        return *dialogue.continue_text(text, known, is_rendered=True), unmarked(text)

    def _sampling(self, options: CallOptions, num_context: int, *, is_recorded: bool) -> Sampling:
        own = self.parts.sampling
        room = self.parts.window - num_context
        limit = options.max_tokens or own.max_completion_tokens
        if is_recorded:
            room = min(room, self.parts.max_session_tokens - num_context)
            limit = min(limit, own.max_completion_tokens)
        if room < 1:
            raise SessionError(
                f"the context has {num_context} tokens; the model takes {self.parts.window}, and "
                f"a session agent.max_session_tokens = {self.parts.max_session_tokens}: nothing is "
                "left for an answer"
            )
        sampling = replace(own, max_completion_tokens=min(limit, room))
        if is_recorded:
            return sampling
        temperature = own.temperature if options.temperature is None else options.temperature
        return replace(
            sampling,
            greedy=temperature == 0,
            temperature=temperature or 1.0,
            top_p=own.top_p if options.top_p is None else options.top_p,
            top_k=own.top_k if options.top_k is None else max(0, options.top_k),
        )

    def _seed(self, options: CallOptions, session: Session | None) -> str:
        if session is not None:
            return f"{session.lease.seed} {session.session_id} {session.num_calls}"
        self._num_plain += 1
        return str(self._num_plain if options.seed is None else options.seed)
