"""What a worker does for outside agents: hand out episodes, sample calls, take rewards.

Leases are asked for when an agent waits for an episode, and not before: nothing grows old in a
queue. Calls of a session are sampled as the run samples, or the learner would compute other
probabilities; calls without a session are as the caller wishes, and are not recorded.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from echo.core.errors import DataError
from echo.engine.engine import Completion, Request, Sampling, VersionError
from echo.protocol.worker_session import WorkerSession
from echo.runtime.agent_sampling import ANY_VERSION, Bounds, CallSampler
from echo.runtime.agent_sessions import Episodes, Session, SessionError, Turn, make_group
from echo.runtime.threads import Pool
from echo.tasks.dialogue import Dialogue
from echo.tasks.task import Example
from echo.wire.actions import Action
from echo.wire.messages import Lease

SEGMENT_TOKENS = 16
"""Tokens between two pieces of a streamed answer."""

UNUSABLE = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
"""What tokenizers and chat templates raise on messages that they were not made for."""

VERSION_POLL_S = 0.05
"""Seconds between two looks at which version is installed."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids or messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParts:
    """What agents get to work with."""

    dialogue: Dialogue
    sampling: Sampling
    """Of the run."""
    group_size: int
    window: int
    """Tokens that the model takes."""
    vocab_size: int
    """Token ids lie below it."""
    max_session_tokens: int
    session_timeout_s: float
    model_name: str
    listen: str
    """tcp://host:port of the endpoint."""
    endpoint_path: Path
    """File that tells agents the address and the token."""
    reward: Callable[[Example, str], float]
    """The task's, for agents that report none; blocks."""
    max_abs_reward: float
    """Largest reward, either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What a call asks for; a session's calls are limited in tokens only."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    """For the chat template."""
    bounds: Bounds = ANY_VERSION
    """Which versions may sample."""
    version_wait_s: float = 0.0
    """How long to wait for a version that is not installed yet."""


class RoomError(SessionError):
    """A context leaves no room for an answer."""


class StoppingError(SessionError):
    """The worker stops, or has no weights yet."""


class Agents:
    """The worker's side of all outside agents."""

    def __init__(
        self,
        parts: AgentParts,
        session: WorkerSession,
        sampler: CallSampler,
        *,
        reward_pool: Pool,
        perform: Callable[[Iterable[Action]], None],
        clock: Callable[[], float],
    ) -> None:
        """Join the parts; `watch` has to run beside.

        Args:
            parts: what agents get.
            session: the worker's.
            sampler: of single requests.
            reward_pool: where the task judges.
            perform: carries out what the session decides.
            clock: the loop's, seconds.
        """
        self.parts = parts
        self.session = session
        self._sampler = sampler
        self._reward_pool = reward_pool
        self._perform = perform
        self._clock = clock
        self._episodes = Episodes(group_size=parts.group_size, timeout_s=parts.session_timeout_s)
        self._num_waiting = 0
        self._num_plain = 0
        self._has_news = asyncio.Event()
        self._is_over = False
        session.max_groups = 0

    # --- leases ----------------------------------------------------------------------------------

    def take(self, leases: Iterable[Lease]) -> None:
        """Offer the episodes of leases."""
        for lease in leases:
            self._episodes.add(lease, now=self._clock())
        self._has_news.set()

    async def watch(self) -> None:
        """Keep leases alive while agents work on them, and give up those that nobody works on."""
        num_ticks = 0
        while True:
            await asyncio.sleep(self.session.heartbeat_s / 2)
            num_ticks += 1
            for lease, why in self._episodes.expire(now=self._clock()):
                self._give_up(lease, "agent_timeout", why)
            for lease in self._episodes.leases:
                self.session.progress(lease, num_ticks)
            self._demand()

    def close(self) -> None:
        """Hand out nothing more; what nobody works on is given back to the learner."""
        self._is_over = True
        for lease in self._episodes.leases:
            if not self._episodes.has_sessions(lease):
                self.session.drafts.end((lease.group_id, lease.attempt))
        self._has_news.set()

    def _demand(self) -> None:
        """Ask for as many leases as waiting agents need."""
        missing = max(0, self._num_waiting - self._episodes.num_free)
        held = len(self._episodes.leases) + len(self.session.outbox)
        wanted = 0 if self._is_over else held + math.ceil(missing / self.parts.group_size)
        if wanted != self.session.max_groups:
            self.session.max_groups = wanted
            if self.session.is_admitted:
                self._perform(self.session.heartbeat(now=self._clock()))

    def _give_up(self, lease: Lease, reason: str, why: str) -> None:
        self._perform(self.session.failed(lease, reason, why, now=self._clock()))

    # --- sessions --------------------------------------------------------------------------------

    async def begin(self, *, wait_s: float) -> Session | None:
        """Return a new session, or None if there is no episode within so many seconds.

        Raises:
            StoppingError: if there will never be one.
        """
        give_up_at = self._clock() + wait_s
        self._num_waiting += 1
        try:
            while not self._is_over:
                session = self._episodes.begin(now=self._clock())
                left = give_up_at - self._clock()
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

    async def reward(self, session_id: str, reward: float | None) -> float:
        """End a session; None lets the task judge its last answer. Return the reward.

        Raises:
            SessionError: if the session cannot be rewarded, or not so.
            RewardError: if the task fails.
        """
        session = self._episodes.find(session_id, now=self._clock())
        leaf = self._episodes.leaf_of(session)
        if reward is None:
            text = self.parts.dialogue.answer_of(leaf.completion.token_ids)
            example = Example(**session.lease.example)
            reward = await self._reward_pool.run(self.parts.reward, example, text)
        if not math.isfinite(reward):
            raise SessionError(f"a reward of {reward} is no finite number")
        bound = self.parts.max_abs_reward
        if abs(reward) > bound:
            raise SessionError(f"a reward of {reward:g} lies beyond task.max_reward = {bound:g}")
        session = self._episodes.find(session_id, now=self._clock())  # it may be over by now
        outcomes = self._episodes.finish(session, reward)
        if outcomes is not None:
            lease, now = session.lease, self._clock()
            try:
                group = make_group(lease, self.session.settings.node_id, outcomes)
            except SessionError as error:
                self._give_up(lease, "agent_error", str(error))
            else:
                self._perform(self.session.finished(group, now=now))
        self._demand()
        return reward

    def abandon(self, session_id: str) -> None:
        """Free the episode of a session for another try.

        Raises:
            SessionError: if there is no such session.
        """
        session = self._episodes.find(session_id, now=self._clock())
        if not self._episodes.abandon(session):
            self._give_up(session.lease, "agent_failed", "its agents gave an episode up each time")
        self._has_news.set()

    # --- calls -----------------------------------------------------------------------------------

    async def call(
        self,
        session_id: str | None,
        prompt: Prompt,
        options: CallOptions,
        on_progress: Callable[[npt.NDArray[np.int32]], Awaitable[None]] | None = None,
    ) -> Turn:
        """Sample one answer, recorded where it belongs to a session.

        Args:
            session_id: None for a call that is not trained on.
            prompt: the whole context.
            options: see there.
            on_progress: told, every few tokens, all that were sampled so far.

        Raises:
            SessionError: if the session is over, there is no room, or nothing can be sampled now.
            VersionError: if another version is installed than is asked for.
            EchoError: if the prompt or the engine fails.
        """
        if self._is_over or self.session.installed_version is None:
            raise StoppingError("no weights to sample from: this worker starts or stops; try again")
        if options.bounds != ANY_VERSION:
            await self._await_version(options.bounds, options.version_wait_s)
        session = None
        if session_id is not None:
            session = self._episodes.find(session_id, now=self._clock())
        try:
            ids, parent, text = self._tokens(
                prompt, options.tools, [] if session is None else session.turns
            )
        except UNUSABLE as error:
            raise DataError(f"the prompt cannot be turned into tokens: {error}") from error
        sampling = self._sampling(options, len(ids), is_recorded=session is not None)
        seed = self._seed(options, session)
        if session is not None:
            session.num_running += 1
            session.num_calls += 1
        try:
            completion = await self._sample(ids, sampling, seed, options.bounds, on_progress)
        except VersionError:
            self.session.counters.add("engine/version_refused")
            raise
        finally:
            if session is not None:
                session.num_running -= 1
                session.touched_at = self._clock()
        if completion.finish_reason == "abort":
            raise StoppingError("the worker stops; this answer was cut short")
        self.session.tokens_sampled += len(completion.token_ids)
        text += self.parts.dialogue.text_of(completion.token_ids)
        turn = Turn(ids, completion, text, parent)
        if session is not None:
            session.turns.append(turn)
        return turn

    async def _await_version(self, bounds: Bounds, wait_s: float) -> None:
        """Return once a version within the bounds may be installed.

        Raises:
            VersionError: if there is none in time, or it has been replaced.
        """
        wanted, give_up_at = bounds.exact_version or bounds.min_version, self._clock() + wait_s
        assert wanted is not None
        while (installed := self.session.installed_version) is None or installed < wanted:
            if self._clock() >= give_up_at or self._is_over:
                self.session.counters.add("engine/version_refused")
                raise VersionError(
                    f"{wanted} is wanted, {installed} is installed, and no newer one has come "
                    f"within version_wait_s = {wait_s:g} s"
                )
            await asyncio.sleep(VERSION_POLL_S)

    def _tokens(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], known: Sequence[Turn]
    ) -> tuple[npt.NDArray[np.int32], Turn | None, str]:
        """Return a context's tokens, the call that it goes on from, and its text."""
        dialogue = self.parts.dialogue
        if isinstance(prompt, str):
            return *dialogue.continue_text(prompt, known, is_rendered=False), prompt
        if prompt and isinstance(prompt[0], int):
            ids = [token for token in prompt if isinstance(token, int)]
            if max(ids) >= self.parts.vocab_size:
                raise DataError(
                    f"token id {max(ids)} is none of the model's {self.parts.vocab_size}"
                )
            return *dialogue.continue_ids(ids, known), dialogue.text_of(ids)
        messages = [message for message in prompt if isinstance(message, Mapping)]
        text = dialogue.render(messages, tools)
        return *dialogue.continue_text(text, known, is_rendered=True), text

    def _sampling(self, options: CallOptions, num_context: int, *, is_recorded: bool) -> Sampling:
        own = self.parts.sampling
        room = self.parts.window - num_context
        limit = options.max_tokens or own.max_completion_tokens
        if is_recorded:
            room = min(room, self.parts.max_session_tokens - num_context)
            limit = min(limit, own.max_completion_tokens)
        if room < 1:
            raise RoomError(
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

    async def _sample(
        self,
        ids: npt.NDArray[np.int32],
        sampling: Sampling,
        seed: str,
        bounds: Bounds,
        on_progress: Callable[[npt.NDArray[np.int32]], Awaitable[None]] | None,
    ) -> Completion:
        """Sample in one go, or piece by piece where somebody watches."""
        limit = sampling.max_completion_tokens
        # Between two pieces another version could take over.
        is_whole = on_progress is None or bounds.exact_version is not None
        step = limit if is_whole else SEGMENT_TOKENS
        whole: Completion | None = None
        while True:
            prefix = np.empty(0, np.int32) if whole is None else whole.token_ids
            name = f"{seed} {len(prefix)}"
            request = Request(
                name, ids, int.from_bytes(blake3(name.encode()).digest(8)), prefix_ids=prefix
            )
            until = min(limit, len(prefix) + step)
            piece = await self._sampler.sample(
                request, replace(sampling, max_completion_tokens=until), bounds
            )
            whole = piece if whole is None else _join(whole, piece)
            if on_progress is not None:
                await on_progress(whole.token_ids)
            if whole.finish_reason != "length" or len(whole.token_ids) >= limit:
                return whole


def _join(first: Completion, second: Completion) -> Completion:
    return Completion(
        second.request_id,
        np.concatenate([first.token_ids, second.token_ids]),
        np.concatenate([first.logprobs, second.logprobs]),
        second.finish_reason,
        np.concatenate([first.policy_versions, second.policy_versions]),
    )
