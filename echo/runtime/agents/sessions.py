"""Sessions of outside agents, and the groups of rollouts that are made from the sessions' calls.

A lease with group size G becomes G episodes. An agent that begins an episode gets a session. The
session records the tokens of each call. When the session gets its reward, all its calls become one
rollout. The rollout's tokens form a tree of chains (turns.py). Sampled tokens are trained on, and
all other tokens are masked.

The first contexts of a group's sessions may differ (names, times, tools). Their common beginning
becomes the group's prompt. The rest of each context is masked in its rollout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echo.core.errors import EchoError
from echo.core.rollout import Group
from echo.leases.worker.held import LeaseKey, key_of
from echo.roles.worker.sampling import NoResult
from echo.runtime.agents.turns import Ids, Turn, num_sampled_of, tree_of
from echo.wire.messages import Lease

MAX_EPISODE_ATTEMPTS = 3
"""A group is given up if one of its episodes has had this many attempts."""
MAX_SESSION_CALLS = 1024
"""Largest number of calls of a session. Without this limit, an agent in an endless loop would fill
the memory.
"""


class SessionError(EchoError):
    """The agent's session does not allow the request."""


class UnknownSessionError(SessionError):
    """The session does not exist, or has ended."""


@dataclass(slots=True, eq=False)
class Session:
    """An agent's attempt at an episode."""

    session_id: str
    lease: Lease
    member: int
    touched_at: float
    """Time of the agent's last request."""
    num_running: int = 0
    """Number of calls that are being sampled."""
    num_calls: int = 0
    is_scored: bool = False
    """Whether the task is computing the reward."""
    turns: list[Turn] = field(default_factory=list)

    @property
    def opening(self) -> dict[str, Any]:
        """The JSON that the agent receives when it begins its episode."""
        example = self.lease.example
        prompt = example["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"session": self.session_id, "messages": messages, **example}


@dataclass(frozen=True, slots=True, eq=False)
class SessionOutcome:
    """The result of a finished episode: its calls, oldest first, and its reward."""

    turns: Sequence[Turn]
    reward: float


@dataclass(slots=True, eq=False)
class _OpenLease:
    """A lease and the state of its episodes."""

    lease: Lease
    waiting: deque[int]
    """Numbers of the episodes that an agent may begin, next episode first."""
    touched_at: float
    num_attempts: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, SessionOutcome] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    is_wanted: bool = True
    """Whether the learner still wants a result of the lease."""


class Episodes:
    """The leases of this worker, their episodes and sessions."""

    def __init__(self, *, group_size: int, timeout_s: float) -> None:
        """Start without leases.

        Args:
            group_size: number of episodes per lease.
            timeout_s: an episode is freed if its agent makes no request for this number of seconds.
                A lease without a session is given up after twice this time.
        """
        self._group_size = group_size
        self._timeout_s = timeout_s
        self._open_leases: dict[LeaseKey, _OpenLease] = {}
        self._sessions: dict[str, Session] = {}
        self._num_abandoned_tokens = 0

    @property
    def leases(self) -> list[Lease]:
        """The leases of which the learner wants a result."""
        return [entry.lease for entry in self._open_leases.values() if entry.is_wanted]

    @property
    def num_free(self) -> int:
        """Number of episodes that an agent may begin."""
        return sum(len(entry.waiting) for entry in self._open_leases.values())

    def has_sessions(self, lease: Lease) -> bool:
        """Return whether a lease has an open session."""
        return bool(self._open_leases[key_of(lease)].sessions)

    def add(self, lease: Lease, *, now: float) -> None:
        self._open_leases[key_of(lease)] = _OpenLease(lease, deque(range(self._group_size)), now)

    def cancel(self, lease: Lease) -> None:
        """Begin no more episodes of a lease, because its result is not wanted.

        The lease's open sessions continue, so that no agent fails in the middle of its work.
        """
        entry = self._open_leases[key_of(lease)]
        entry.is_wanted = False
        entry.waiting.clear()
        for outcome in entry.outcomes.values():
            self._num_abandoned_tokens += num_sampled_of(outcome.turns)
        self._forget_unwanted(entry)

    def begin(self, *, now: float) -> Session | None:
        """Return a session for the oldest free episode, or None if no episode is free."""
        entry = next((entry for entry in self._open_leases.values() if entry.waiting), None)
        if entry is None:
            return None
        member = entry.waiting.popleft()
        attempt = entry.num_attempts[member] = entry.num_attempts.get(member, 0) + 1
        lease = entry.lease
        name = f"{lease.group_id}-{lease.attempt}-{member}-{attempt}"
        session = self._sessions[name] = Session(name, lease, member, now)
        entry.sessions.add(name)
        entry.touched_at = now
        return session

    def find(self, session_id: str, *, now: float) -> Session:
        """Return an open session, and record the time of its agent's request.

        Raises:
            UnknownSessionError: if there is no such session.
        """
        session = self._open(session_id)
        self._touch(session, now)
        return session

    def find_for_call(self, session_id: str) -> Session:
        """Return an open session that may make another call.

        Raises:
            SessionError: if there is no such session, or it has made MAX_SESSION_CALLS calls.
        """
        session = self._open(session_id)
        if len(session.turns) + session.num_running >= MAX_SESSION_CALLS:
            raise SessionError(
                f"session {session_id} has made {MAX_SESSION_CALLS} calls, the most of a session: "
                f"end it with POST /v1/echo/sessions/{session_id}/reward, or give it up with DELETE"
            )
        return session

    def begin_call(self, session: Session, *, now: float) -> None:
        """Record a call that is about to be sampled, and the time of the call.

        A refused call is not recorded, so it does not delay the session's timeout.
        """
        self._touch(session, now)
        session.num_running += 1
        session.num_calls += 1

    def check_rewardable(self, session: Session) -> None:
        """Raise a SessionError if a session has no completed call, or has a running call."""
        if session.num_running:
            raise SessionError(f"session {session.session_id}: a call is still being answered")
        if not session.turns:
            raise SessionError(
                f"session {session.session_id} has no call to be rewarded: send its id with each "
                "call, as the header X-Echo-Session or in the address /sessions/ID/v1"
            )

    def finish(self, session: Session, reward: float) -> list[SessionOutcome] | None:
        """End a session with its reward.

        Returns:
            The outcomes of the group; None while an episode of the group is unfinished, and if the
            group is not wanted.

        Raises:
            SessionError: if the session has no completed call, or has a running call.
        """
        self.check_rewardable(session)
        entry = self._close(session)
        if not entry.is_wanted:
            self._num_abandoned_tokens += num_sampled_of(session.turns)
            return None
        entry.outcomes[session.member] = SessionOutcome(session.turns, reward)
        if len(entry.outcomes) < self._group_size:
            return None
        del self._open_leases[key_of(session.lease)]
        return [entry.outcomes[member] for member in range(self._group_size)]

    def abandon(self, session: Session) -> bool:
        """End a session, and free its episode for another attempt.

        If the episode has had MAX_EPISODE_ATTEMPTS attempts, give up the whole lease and return
        False. Otherwise return True.
        """
        entry = self._close(session)
        self._num_abandoned_tokens += num_sampled_of(session.turns)
        if not entry.is_wanted:
            return True
        if entry.num_attempts[session.member] >= MAX_EPISODE_ATTEMPTS:
            self._drop(entry)
            return False
        entry.waiting.append(session.member)
        return True

    def take_abandoned(self) -> int:
        """Return the number of tokens abandoned since the last call of this method.

        Abandoned tokens are those of sessions that were given up, and of rewarded sessions whose
        lease was given up or is not wanted.
        """
        number, self._num_abandoned_tokens = self._num_abandoned_tokens, 0
        return number

    def expire(self, *, now: float) -> list[NoResult]:
        """Free the episodes of silent agents. Return the leases that were given up."""
        given_up = []
        late = [
            session
            for session in self._sessions.values()
            if now - session.touched_at > self._timeout_s
            and not (session.num_running or session.is_scored)
        ]
        for session in late:
            # Giving up a lease ends its other sessions, which may be in this list too.
            if session.session_id in self._sessions and not self.abandon(session):
                text = f"{MAX_EPISODE_ATTEMPTS} agents did not finish episode {session.member}"
                given_up.append(NoResult(session.lease, "agent_timeout", text))
        for entry in list(self._open_leases.values()):
            if not entry.sessions and now - entry.touched_at > 2 * self._timeout_s:
                self._drop(entry)
                text = f"no agent came within {2 * self._timeout_s:g} s"
                # Agents of other workers may come, or may be playing a copy of the group already.
                given_up.append(NoResult(entry.lease, "agent_timeout", text, is_elsewhere=True))
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
        session.touched_at = self._open_leases[key_of(session.lease)].touched_at = now

    def _close(self, session: Session) -> _OpenLease:
        del self._sessions[session.session_id]
        entry = self._open_leases[key_of(session.lease)]
        entry.sessions.discard(session.session_id)
        self._forget_unwanted(entry)
        return entry

    def _forget_unwanted(self, entry: _OpenLease) -> None:
        if not entry.is_wanted and not entry.sessions:
            del self._open_leases[key_of(entry.lease)]

    def _drop(self, entry: _OpenLease) -> None:
        del self._open_leases[key_of(entry.lease)]
        for name in entry.sessions:
            self._num_abandoned_tokens += num_sampled_of(self._sessions.pop(name).turns)
        for outcome in entry.outcomes.values():
            self._num_abandoned_tokens += num_sampled_of(outcome.turns)


def group_of(
    lease: Lease, worker_id: str, outcomes: Sequence[SessionOutcome], *, max_tokens: int
) -> tuple[Group, int]:
    """Make a group from a lease's finished episodes.

    Args:
        lease: the lease.
        worker_id: the worker's id.
        outcomes: the results of all episodes.
        max_tokens: largest number of tokens in a rollout, summed over its chains, prompt included.
            If the chains have more tokens, the chains with the fewest sampled tokens are left out.
            At least one chain is kept.

    Returns:
        The group, and its number of chains.

    Raises:
        SessionError: if the first contexts of the episodes do not begin with the same token.
    """
    trees = [tree_of(outcome.turns, max_tokens=max_tokens) for outcome in outcomes]
    num_shared = _num_shared([tree.first_context for tree in trees])
    if not num_shared:
        raise SessionError(
            "the first calls of the group's sessions do not begin with the same token; give all of "
            "them the same beginning, such as a system message"
        )
    rollouts = [
        tree.rollout(
            num_shared,
            reward=outcome.reward,
            finish_reason=outcome.turns[-1].completion.finish_reason,
        )
        for tree, outcome in zip(trees, outcomes, strict=True)
    ]
    group = Group(
        group_id=lease.group_id,
        attempt=lease.attempt,
        worker_id=worker_id,
        prompt_ids=trees[0].first_context[:num_shared].astype(np.int32),
        rollouts=tuple(rollouts),
    )
    return group, sum(tree.num_chains for tree in trees)


def _num_shared(contexts: Sequence[Ids]) -> int:
    length = min(map(len, contexts))
    table = np.stack([context[:length] for context in contexts])
    differs = np.flatnonzero((table != table[0]).any(axis=0))
    return int(differs[0]) if len(differs) else length
