"""The parent's half of the weights plane: announce versions, send the chunks that children ask for.

A child is served ascending, as far as its credit reaches and as soon as a chunk is held. It pins
the version that it fetches while it takes chunks, so the store is bounded by the number of
children. A child that never reacted to an announcement is forgotten after a while (the end of an
inbound link may go unnoticed); if it lives, the learner's Pulse makes it subscribe again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from echo.errors import RemoteProtocolError
from echo.protocol.actions import Action, Send
from echo.protocol.codec import Frame, encode
from echo.protocol.manifest import encode_signed
from echo.protocol.messages import Announce, Chunk, Credit, Fetch, Gone, Message, Subscribe, Waiting
from echo.protocol.transfer import Transfer
from echo.rollout import PolicyVersion

PIN_STALLS = 10
"""Silences (of stall_s) after which a child no longer pins the version that it was fetching."""
FORGET_STALLS = 60
"""Silences after an announcement, after which a child that did not react is forgotten."""


@dataclass(slots=True)
class Child:
    """What a parent remembers of one child."""

    is_subscribed: bool = False
    announced: PolicyVersion | None = None
    fetching: PolicyVersion | None = None
    wanted: deque[int] = field(default_factory=deque)
    credit_bytes: int = 0
    heard_at: float = 0.0
    unanswered_since: float | None = None
    """When it was told of a version, if nothing was heard of it since."""


class Serving:
    """One node's children, served from its store."""

    def __init__(
        self, store: dict[PolicyVersion, Transfer], *, node_id: str, stall_s: float
    ) -> None:
        """Start without children; `store` is shared with the child's half."""
        self.store = store
        self.node_id = node_id
        self.stall_s = stall_s
        self.children: dict[str, Child] = {}
        self.bytes_sent = 0

    @property
    def newest_known(self) -> PolicyVersion | None:
        """Newest version whose manifest is known."""
        return max(self.store, default=None)

    def receive(self, peer: str, message: Subscribe | Fetch | Credit, now: float) -> list[Action]:
        """Handle one message of a child.

        Raises:
            RemoteProtocolError: if it broke a rule.
        """
        child = self.children.get(peer)
        if isinstance(message, Credit):
            return self._on_credit(peer, child, message, now)
        child = self.children.setdefault(peer, Child()) if child is None else child
        child.heard_at, child.unanswered_since = now, None
        if isinstance(message, Fetch):
            return self._on_fetch(peer, child, message, now)
        child.is_subscribed, child.announced = True, message.newest
        waiting = self._send(peer, Waiting(version=None))
        return self.announce(peer, now=now) or [waiting]

    def announce(self, *peers: str, now: float) -> list[Action]:
        """Tell the newest version to these children, or to all, unless they know it."""
        newest = self.newest_known
        if newest is None:
            return []
        frame = encode_signed(self.store[newest].signed)
        actions: list[Action] = []
        for peer in peers or tuple(self.children):
            child = self.children[peer]
            if child.is_subscribed and (child.announced is None or child.announced < newest):
                child.announced = newest
                if child.unanswered_since is None:
                    child.unanswered_since = now
                actions.append(self._send(peer, Announce(version=newest), frame))
        return actions

    def _on_fetch(self, peer: str, child: Child, message: Fetch, now: float) -> list[Action]:
        child.fetching = None
        child.wanted.clear()
        item, newest = self.store.get(message.version), self.newest_known
        if item is None and (newest is None or newest < message.version):
            # Not known here yet, as after a restart: the child keeps what it has and asks again.
            return [self._send(peer, Waiting(version=message.version))]
        if item is None:
            # The newest version is announced anew, so that the child is not left with nothing.
            child.announced = None
            gone = self._send(peer, Gone(version=message.version))
            return [gone, *self.announce(peer, now=now)]
        previous = 0
        for start, stop in message.ranges:
            if not previous <= start < stop <= item.manifest.num_chunks:
                child.wanted.clear()
                raise RemoteProtocolError(
                    f"a Fetch of {message.version} with bad ranges {message.ranges!r:.80}"
                )
            child.wanted.extend(range(start, stop))
            previous = stop
        child.fetching = message.version
        child.credit_bytes = max(0, message.credit_bytes)
        if child.wanted and not item.has_chunk[child.wanted[0]]:
            return [self._send(peer, Waiting(version=message.version))]
        return self._serve(peer, child)

    def _on_credit(
        self, peer: str, child: Child | None, message: Credit, now: float
    ) -> list[Action]:
        if child is None or child.fetching != message.version:
            return []
        child.heard_at, child.unanswered_since = now, None
        child.credit_bytes += max(0, message.credit_bytes)
        return self._serve(peer, child)

    def _serve(self, peer: str, child: Child) -> list[Action]:
        """Send what the child wants, holds credit for, and this node has, in order."""
        actions: list[Action] = []
        if child.fetching is None:
            return actions
        item = self.store[child.fetching]
        while child.wanted and child.credit_bytes > 0 and item.has_chunk[child.wanted[0]]:
            index = child.wanted.popleft()
            chunk = item.chunk(index)
            child.credit_bytes -= len(chunk)
            self.bytes_sent += len(chunk)
            actions.append(self._send(peer, Chunk(version=child.fetching, index=index), chunk))
        if not child.wanted:
            child.fetching = None
        return actions

    def forward(self, version: PolicyVersion, index: int) -> list[Action]:
        """Send on a chunk that has just arrived, to the children that wait for it."""
        return [
            action
            for peer, child in self.children.items()
            if child.fetching == version and child.wanted and child.wanted[0] == index
            for action in self._serve(peer, child)
        ]

    def pinned(self, now: float) -> set[PolicyVersion]:
        """Return the whole versions that children are taking.

        One that is not whole here is not pinned: if this node has moved on to a newer version it
        would never be completed, and the child would wait for ever.
        """
        return {
            child.fetching
            for child in self.children.values()
            if child.fetching is not None
            and now - child.heard_at <= PIN_STALLS * self.stall_s
            and self.store[child.fetching].is_complete
        }

    def drop(self, version: PolicyVersion, *, now: float) -> list[Action]:
        """Remove a version from the store and tell the children that were fetching it."""
        del self.store[version]
        actions: list[Action] = []
        for peer, child in self.children.items():
            if child.fetching == version:
                child.fetching, child.announced = None, None
                child.wanted.clear()
                actions.append(self._send(peer, Gone(version=version)))
                actions += self.announce(peer, now=now)
        return actions

    def forget_silent(self, now: float) -> None:
        """Forget the children that never reacted to an announcement."""
        for peer, child in list(self.children.items()):
            since = child.unanswered_since
            if since is not None and now - since > FORGET_STALLS * self.stall_s:
                del self.children[peer]

    def _send(self, peer: str, message: Message, *payload: Frame) -> Send:
        return Send(peer, encode(message, payload, source=self.node_id))
