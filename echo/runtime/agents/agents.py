"""Serve outside agents: hand out episodes, sample calls, take rewards.

An outside agent is a program of the user that sends calls to the worker's endpoint. The worker
requests a lease only when an agent waits for an episode, so leases do not become stale in a queue.

An agent gets a session when it begins an episode, and names this session in each call of the
episode. The calls of a session are sampled with the run's settings, which the learner also uses to
compute probabilities. Calls without a session use the caller's settings and are not recorded.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from echo.core.errors import DataError
from echo.core.reward_parts import parts_of
from echo.core.rollout import NO_OPINION
from echo.engine.engine import Completion, Request, Sampling
from echo.engine.stop_strings import StopStrings
from echo.roles.worker.outcomes import GroupFinished
from echo.roles.worker.sampling import NoResult
from echo.roles.worker.worker import (
    LeaseDropped,
    LeasesAlive,
    LeasesDemanded,
    Worker,
)
from echo.runtime.agents.call_sampler import CallSampler
from echo.runtime.agents.dialogue import Dialogue
from echo.runtime.agents.sessions import (
    Episodes,
    Session,
    SessionError,
    SessionOutcome,
    group_of,
)
from echo.runtime.agents.turns import Turn, num_sampled_of
from echo.runtime.node import DialingNode
from echo.runtime.threads import MAX_BLOCKING, Threads
from echo.tasks.task import Example
from echo.tasks.tokenization import UNUSABLE, unmarked
from echo.wire.messages import Lease

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""The context of a call: text, token ids or chat messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParts:
    """The settings and functions for serving outside agents."""

    dialogue: Dialogue
    sampling: Sampling
    """The sampling settings of the run."""
    group_size: int
    window: int
    """Number of tokens of the longest sequence that the model takes."""
    max_session_tokens: int
    max_rollout_tokens: int
    """Largest number of tokens in a rollout, which contains all chains of a session."""
    session_timeout_s: float
    model_name: str
    listen: str
    """Address of the endpoint, tcp://host:port."""
    endpoint_path: Path
    """File to which the endpoint's address and the token for agents are written."""
    reward: Callable[[Example, str], float | None]
    """The task's reward function, used if an agent reports no reward. The function blocks."""
    max_abs_reward: float
    """Largest absolute value of a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The options of a call. Calls of a session use only `max_tokens`, `stop` and `tools`."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    """Texts that end the answer, in addition to the run's stop strings."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the chat template describes to the model."""


class StoppingError(SessionError):
    """The worker is stopping, or has no weights yet."""


class Agents:
    """Serves outside agents: hands out episodes, samples calls, and takes rewards."""

    def __init__(
        self,
        parts: AgentParts,
        role: Worker,
        sampler: CallSampler,
        *,
        node: DialingNode,
        threads: Threads,
    ) -> None:
        """Start without leases. The caller must run `watch`."""
        self.parts = parts
        self.role = role
        self._sampler = sampler
        self._node = node
        # Calls must not wait for slow rewards, so the two have threads of their own.
        self._text_pool = threads.pool("agent-text", MAX_BLOCKING)
        self._reward_pool = threads.pool("agent-reward", MAX_BLOCKING)
        self._episodes = Episodes(group_size=parts.group_size, timeout_s=parts.session_timeout_s)
        self._num_waiting = 0
        self._num_plain = 0
        self._has_news = asyncio.Event()
        self._is_over = False

    # --- leases ----------------------------------------------------------------------------------

    def take(self, leases: Iterable[Lease]) -> None:
        """Add leases, and wake the agents that wait for an episode."""
        for lease in leases:
            self._episodes.add(lease, now=self._node.now)
        self._has_news.set()

    def cancel(self, lease: Lease) -> None:
        """Begin no more episodes of a lease, because the learner wants no result."""
        self._episodes.cancel(lease)
        self._count_abandoned()
        self._node.report(LeaseDropped(lease))
        self._demand()

    async def watch(self) -> None:
        """Renew open leases and give up leases that take too long, until cancelled."""
        while True:
            await asyncio.sleep(self.role.joining.heartbeat_s / 2)
            for given_up in self._episodes.expire(now=self._node.now):
                self._node.report(given_up)
            self._count_abandoned()
            self._node.report(LeasesAlive(self._episodes.leases))
            self._demand()

    def close(self) -> None:
        """Stop beginning episodes, and drop the leases that have no session.

        Calls of open sessions are still answered.
        """
        self._is_over = True
        for lease in self._episodes.leases:
            if not self._episodes.has_sessions(lease):
                self._node.report(LeaseDropped(lease))
        self._has_news.set()

    def _demand(self) -> None:
        missing = max(0, self._num_waiting - self._episodes.num_free)
        # A delivered group is not counted: once it is stored, its place would get another lease.
        held = len(self._episodes.leases)
        wanted = 0 if self._is_over else held + math.ceil(missing / self.parts.group_size)
        self._node.report(LeasesDemanded(wanted))

    def _give_up(self, lease: Lease, reason: str, why: str) -> None:
        self._node.report(NoResult(lease, reason, why))

    # --- sessions --------------------------------------------------------------------------------

    async def begin(self, *, wait_s: float) -> Session | None:
        """Return a new session, or None if no episode is available within `wait_s` seconds.

        Raises:
            StoppingError: if the worker begins no more episodes.
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
        """End a session with a reward.

        If `reward` is None, the task computes the reward from the last answer.

        Returns:
            The reward; None if the task's reward function returns None.

        Raises:
            SessionError: if the session cannot be rewarded, or the reward is out of range.
            RewardError: if the task's reward function fails.
        """
        session = self._episodes.find(session_id, now=self._node.now)
        self._episodes.check_rewardable(session)
        if reward is None:
            text = self.parts.dialogue.answer_of(session.turns[-1].completion.token_ids)
            example = Example(**session.lease.example)
            session.is_scored = True  # so that it does not time out
            try:
                reward = await self._reward_pool.run(self.parts.reward, example, text)
            finally:
                session.is_scored = False
                session.touched_at = self._node.now
        judged = NO_OPINION if reward is None else reward
        bound = self.parts.max_abs_reward
        for number in () if reward is None else (reward, *parts_of(reward).values()):
            if not math.isfinite(number):
                raise SessionError(f"a reward of {number} is no finite number")
            if abs(number) > bound:
                text = f"a reward of {number:g} lies beyond task.max_reward = {bound:g}"
                raise SessionError(text)
        session = self._episodes.find(session_id, now=self._node.now)  # the session may have ended
        outcomes = self._episodes.finish(session, judged)
        if outcomes is not None:
            self._finish(session.lease, outcomes)
        self._demand()
        return reward

    def _finish(self, lease: Lease, outcomes: Sequence[SessionOutcome]) -> None:
        count = self.role.counters.add
        num_sampled = sum(num_sampled_of(outcome.turns) for outcome in outcomes)
        count("agents/tokens_sampled", num_sampled)
        try:
            group, num_chains = group_of(
                lease,
                self.role.settings.node_id,
                outcomes,
                max_tokens=self.parts.max_rollout_tokens,
            )
        except SessionError as error:
            count("agents/tokens_abandoned", num_sampled)
            self._give_up(lease, "agent_error", str(error))
            return
        count("agents/tokens_trained", group.num_trained)
        count("agents/num_episodes", len(outcomes))
        count("agents/num_chains", num_chains)
        count("agents/num_turns", sum(len(outcome.turns) for outcome in outcomes))
        self._node.report(GroupFinished(group))

    def _count_abandoned(self) -> None:
        number = self._episodes.take_abandoned()
        if number:
            self.role.counters.add("agents/tokens_sampled", number)
            self.role.counters.add("agents/tokens_abandoned", number)

    def abandon(self, session_id: str) -> None:
        """End a session without a reward, so that another agent may try its episode.

        Raises:
            SessionError: if there is no such session.
        """
        session = self._episodes.find(session_id, now=self._node.now)
        if not self._episodes.abandon(session):
            self._give_up(session.lease, "agent_failed", "its agents gave an episode up each time")
        self._count_abandoned()
        self._has_news.set()

    # --- calls -----------------------------------------------------------------------------------

    async def call(
        self,
        session_id: str | None,
        prompt: Prompt,
        options: CallOptions,
    ) -> Turn:
        """Sample the answer to a call, and record it in the call's session.

        Args:
            session_id: None for a call that is not trained on.
            prompt: the whole context of the call.
            options: the options of the call.

        Raises:
            SessionError: if the session has ended or has made MAX_SESSION_CALLS calls, if the
                context leaves no space for an answer, or if the worker cannot sample now.
            EchoError: if the prompt or the engine fails.
        """
        is_closed = self._is_over and session_id is None  # open sessions go on to their ends
        if is_closed or self.role.installed_version is None:
            raise StoppingError("no weights to sample from: this worker starts or stops; try again")
        session = self._session_of(session_id)
        known = [] if session is None else list(session.turns)
        try:
            # In a thread, so that other calls are answered while a long context is tokenized.
            ids, parent, text = await self._text_pool.run(
                self._tokens, prompt, options.tools, known
            )
        except UNUSABLE as error:
            raise DataError(f"the prompt cannot be turned into tokens: {error}") from error
        session = self._session_of(session_id)  # it may have ended by now
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
        answer = self.parts.dialogue.text_of(completion.token_ids)
        num_hidden = _num_hidden(answer, completion, sampling)
        turn = Turn(ids, completion, text + answer, parent, num_hidden)
        if session is not None:
            session.turns.append(turn)
        return turn

    def _session_of(self, session_id: str | None) -> Session | None:
        return None if session_id is None else self._episodes.find_for_call(session_id)

    def _tokens(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], known: Sequence[Turn]
    ) -> tuple[npt.NDArray[np.int32], Turn | None, str]:
        """Return three facts about a context: its tokens, its turn, and its text.

        The turn is the earlier call of the model that the context continues; None if it continues
        no call. Runs in a thread.
        """
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
        space = self.parts.window - num_context
        limit = options.max_tokens or own.max_completion_tokens
        if is_recorded:
            space = min(space, self.parts.max_session_tokens - num_context)
            limit = min(limit, own.max_completion_tokens)
        if space < 1:
            raise SessionError(
                f"the context has {num_context} tokens; the model takes {self.parts.window}, and "
                f"a session agent.max_session_tokens = {self.parts.max_session_tokens}: nothing is "
                "left for an answer"
            )
        sampling = replace(
            own, max_completion_tokens=min(limit, space), stop=self._stop(options.stop)
        )
        if is_recorded:
            return sampling
        temperature = own.temperature if options.temperature is None else options.temperature
        return replace(
            sampling,
            greedy=temperature == 0,
            temperature=temperature or 1.0,
            top_p=own.top_p if options.top_p is None else options.top_p,
            top_k=own.top_k if options.top_k is None else max(0, options.top_k),
            min_p=own.min_p if options.min_p is None else options.min_p,
            min_tokens=own.min_tokens if options.min_tokens is None else options.min_tokens,
        )

    def _stop(self, texts: Sequence[str]) -> StopStrings | None:
        own = self.parts.sampling.stop
        if not texts:
            return own
        known = () if own is None else own.texts
        return StopStrings(tuple(dict.fromkeys([*known, *texts])), self.parts.dialogue.text_of)

    def _seed(self, options: CallOptions, session: Session | None) -> str:
        if session is not None:
            return f"{session.lease.seed} {session.session_id} {session.num_calls}"
        self._num_plain += 1
        return str(self._num_plain if options.seed is None else options.seed)


def _num_hidden(answer: str, completion: Completion, sampling: Sampling) -> int:
    """Return how many characters of an answer the agent does not see.

    The hidden characters are the stop string that ended the answer, and the text after the stop
    string.
    """
    if sampling.stop is None or completion.finish_reason != "stop":
        return 0
    if int(completion.token_ids[-1]) in sampling.stop_ids:
        return 0
    begin = sampling.stop.begin(completion.token_ids.tolist())
    return 0 if begin is None else len(answer) - begin
