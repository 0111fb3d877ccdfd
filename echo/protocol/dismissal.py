"""The end of a run: who is told when, so that everybody hears of it.

What goes to a worker may pass through a relay, so relays are told last, and not before nobody else
is left, except from the last call on.
"""

from __future__ import annotations

from echo.protocol.membership import Member, Roster
from echo.wire.actions import Action, Routes
from echo.wire.messages import Finish


class Dismissal:
    """Tells the nodes that the run is over."""

    def __init__(self, roster: Roster, routes: Routes) -> None:
        """Start with a run that is not over.

        Args:
            roster: the learner's.
            routes: lead to the nodes.
        """
        self.reason: str | None = None
        self.is_last_call = False
        self._roster = roster
        self._routes = routes

    def tell(self) -> list[Action]:
        """Tell whoever may leave, if the run is over."""
        if self.reason is None:
            return []
        finish = Finish(reason=self.reason)
        nodes = sorted(self._roster.nodes.values(), key=lambda node: node.role == "relay")
        return [
            action
            for node in nodes
            if self.may_leave(node)
            for action in self._routes.to(node.node_id, finish)
        ]

    def may_leave(self, member: Member) -> bool:
        """Return whether no other node may need this one to hear that the run is over."""
        return (
            self.is_last_call
            or member.role != "relay"
            or all(node.role == "relay" for node in self._roster.nodes.values())
        )
