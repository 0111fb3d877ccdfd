"""A node's link to its parent for the weights: follow the plan, fall back, come back.

The plan names parents in order of preference. The first is dialled; when a link is lost, does not
answer or does not deliver, the next one is, and after the last the first again. The link in use is
kept until the one that replaces it has answered.

A parent that failed while the plan stayed the same is preferred again when the learner repeats the
plan (it does so while the node's parent is another), but not before `retry_preferred_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo.protocol.actions import Action, Dial, HangUp, Note
from echo.protocol.broadcast import Broadcast
from echo.protocol.messages import Plan

CONNECT_TIMEOUT_S = 3.0
"""Seconds to wait for a dialled address before the next is tried; a WAN handshake takes under 1."""


@dataclass(slots=True)
class Uplink:
    """One outbound link."""

    address: str
    peer: str = ""
    node_id: str = ""
    """Who answered; empty until Greeted."""
    dialled_at: float = 0.0


class WeightsLink:
    """Which parent the broadcast of a node has."""

    def __init__(self, broadcast: Broadcast, *, retry_s: float) -> None:
        """Start without a plan.

        Args:
            broadcast: the node's part of the weights plane; it is told its parent.
            retry_s: seconds to wait when no parent of the plan could be reached.
        """
        self.broadcast = broadcast
        self.retry_s = retry_s
        self.retry_preferred_s = 0.0
        self.current: Uplink | None = None
        self.next: Uplink | None = None
        self._plan = Plan(epoch=-1, parents=())
        self._index = 0
        self._follow_at: float | None = None
        self._failed_at: float | None = None

    @property
    def parent(self) -> str:
        """Node id of the parent in use, "-" if there is none."""
        return self.current.node_id if self.current is not None else "-"

    def new_learner(self) -> None:
        """Note that plans are numbered anew, as after a restart of the learner."""
        self._plan = Plan(epoch=-1, parents=self._plan.parents)

    def on_plan(self, plan: Plan, *, control: Uplink | None, now: float) -> list[Action]:
        """Follow a plan, unless it is older than the one that is followed."""
        if plan.epoch < self._plan.epoch:
            return []
        if plan.parents == self._plan.parents:
            self._plan = plan
            may_return = (
                self._index > 0
                and self.next is None
                and (self._failed_at is None or now >= self._failed_at + self.retry_preferred_s)
            )
            if not may_return:
                return []
        self._plan, self._index = plan, 0
        return self._follow(control, now)

    def _follow(self, control: Uplink | None, now: float) -> list[Action]:
        """Dial the preferred parent unless the link to it stands already."""
        self._follow_at = None
        actions: list[Action] = []
        if self.next is not None:
            actions += [HangUp(self.next.peer)] if self.next.peer else []
            self.next = None
        while self._index < len(self._plan.parents):
            node_id, address = self._plan.parents[self._index]
            if self.current is not None and self.current.node_id == node_id:
                return actions
            if not address and control is not None and control.node_id == node_id:
                address = control.address
            if address:
                self.next = Uplink(address, dialled_at=now)
                return [*actions, Dial(address, "weights")]
            self._index += 1
        self._index, self._follow_at = 0, now + self.retry_s
        return actions

    def has(self, peer: str) -> bool:
        """Return whether `peer` is the parent or may become it."""
        return any(link is not None and link.peer == peer for link in (self.current, self.next))

    def greeted(self, peer: str, node_id: str, *, now: float) -> list[Action]:
        """Take weights from the parent that has answered, instead of the one before."""
        link = self.next
        if link is None or link.peer != peer:
            return []
        link.node_id = node_id
        old, self.current, self.next = self.current, link, None
        actions: list[Action] = [HangUp(old.peer)] if old is not None else []
        return actions + self.broadcast.set_parent(peer, now=now)

    def failed(self, peer: str, reason: str, *, control: Uplink | None, now: float) -> list[Action]:
        """Go on with the next parent of the plan."""
        link = self.next if self.next is not None and self.next.peer == peer else self.current
        if link is None or link.peer != peer:
            return []
        name = link.node_id or link.address
        actions: list[Action] = [HangUp(peer)] if peer else []
        actions.append(Note("warning", f"weights from {name} failed: {reason}"))
        self._failed_at = now
        if link is self.current:
            self.current = None
            actions += self.broadcast.set_parent(None, now=now)
            if self.next is not None:
                return actions
        else:
            self.next = None
        self._index += 1
        return actions + self._follow(control, now)

    @property
    def deadline(self) -> float | None:
        """When `expire` should be called next."""
        if self.next is not None:
            return self.next.dialled_at + CONNECT_TIMEOUT_S
        return self._follow_at

    def expire(self, *, control: Uplink | None, now: float) -> list[Action]:
        """Give up a parent that does not answer; try again when all have failed."""
        link = self.next
        if link is not None and now >= link.dialled_at + CONNECT_TIMEOUT_S:
            return self.failed(link.peer, "no answer", control=control, now=now)
        if self._follow_at is not None and now >= self._follow_at:
            return self._follow(control, now)
        return []
