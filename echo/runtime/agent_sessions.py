"""What outside agents sample for a lease: sessions of calls, and the groups made of them.

A lease of group size G becomes G episodes; whoever asks is given one, as a session. A session
records each call's tokens. A call whose context begins with all that an earlier call saw and
sampled goes on from it, token by token; any other begins anew, such as after an agent has rewritten
its history. When the reward comes, the chain of calls with the most sampled tokens becomes the
rollout: what was sampled is trained on, what stands between is masked.

The prompts of a group's sessions may differ (names, times, tools). What all begin with is the
group's prompt, and the rest of each is the masked beginning of its rollout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from echo.core.errors import EchoError
from echo.core.rollout import Group, Rollout
from echo.engine.engine import Completion
from echo.wire.messages import Lease

MAX_ATTEMPTS = 3
"""How often one episode is handed out before its group is given up."""

Ids = npt.NDArray[np.int32]


class SessionError(EchoError):
    """An agent asked for something that its session does not allow."""


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
        return [*(self.parent.chain if self.parent is not None else []), self]

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
    def best(self) -> Turn | None:
        """The end of the chain that becomes the rollout: the longest, of equals the last."""
        return max(reversed(self.turns), key=lambda turn: turn.num_sampled, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A finished episode."""

    leaf: Turn
    reward: float


@dataclass(slots=True, eq=False)
class _Hand:
    """A lease that is being worked on."""

    lease: Lease
    waiting: deque[int]
    """Members that nobody has, in order."""
    touched_at: float
    num_attempts: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
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
        self._hands: dict[tuple[int, int], _Hand] = {}
        self._sessions: dict[str, Session] = {}

    @property
    def leases(self) -> list[Lease]:
        """What is in hand."""
        return [hand.lease for hand in self._hands.values()]

    @property
    def num_free(self) -> int:
        """Episodes that nobody has."""
        return sum(len(hand.waiting) for hand in self._hands.values())

    def has_sessions(self, lease: Lease) -> bool:
        """Return whether an agent works on a lease in hand."""
        return bool(self._hands[_key(lease)].sessions)

    def add(self, lease: Lease, *, now: float) -> None:
        """Take a lease in hand."""
        key = (lease.group_id, lease.attempt)
        self._hands[key] = _Hand(lease, deque(range(self._group_size)), now)

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
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionError(
                f"there is no open session {session_id!r}: it was rewarded, given up, or timed "
                "out; begin another with POST /v1/echo/sessions"
            )
        self._touch(session, now)
        return session

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

    def finish(self, session: Session, reward: float) -> list[Outcome] | None:
        """End a session with its reward; return the group's outcomes if it was the last.

        Raises:
            SessionError: as `leaf_of`.
        """
        leaf = self.leaf_of(session)
        hand = self._close(session)
        hand.outcomes[session.member] = Outcome(leaf, reward)
        if len(hand.outcomes) < self._group_size:
            return None
        del self._hands[_key(session.lease)]
        return [hand.outcomes[member] for member in range(self._group_size)]

    def abandon(self, session: Session) -> bool:
        """Free an episode; return False if it was tried too often, and its lease is given up."""
        hand = self._close(session)
        if hand.num_attempts[session.member] >= MAX_ATTEMPTS:
            self._drop(hand)
            return False
        hand.waiting.append(session.member)
        return True

    def expire(self, *, now: float) -> list[tuple[Lease, str]]:
        """Free the episodes of agents that are gone; return leases that are given up, and why."""
        given_up = []
        for session in list(self._sessions.values()):
            is_late = now - session.touched_at > self._timeout_s and not session.num_running
            if is_late and not self.abandon(session):
                text = f"{MAX_ATTEMPTS} agents did not finish episode {session.member}"
                given_up.append((session.lease, text))
        for hand in list(self._hands.values()):
            if not hand.sessions and now - hand.touched_at > 2 * self._timeout_s:
                self._drop(hand)
                given_up.append((hand.lease, f"no agent came within {2 * self._timeout_s:g} s"))
        return given_up

    def _touch(self, session: Session, now: float) -> None:
        session.touched_at = self._hands[_key(session.lease)].touched_at = now

    def _close(self, session: Session) -> _Hand:
        del self._sessions[session.session_id]
        hand = self._hands[_key(session.lease)]
        hand.sessions.discard(session.session_id)
        return hand

    def _drop(self, hand: _Hand) -> None:
        del self._hands[_key(hand.lease)]
        for name in hand.sessions:
            del self._sessions[name]


def make_group(lease: Lease, worker_id: str, outcomes: Sequence[Outcome]) -> Group:
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


def _make_rollout(outcome: Outcome, start: int) -> Rollout:
    ids = outcome.leaf.ids.astype(np.int32)
    chain = outcome.leaf.chain
    logprobs = np.zeros(len(ids), np.float32)
    mask = np.zeros(len(ids), np.bool_)
    # Nobody sampled what is masked; the codec wants a version there, and none that is newer.
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


def _key(lease: Lease) -> tuple[int, int]:
    return (lease.group_id, lease.attempt)
