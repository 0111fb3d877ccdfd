"""Controls a node's link to the learner: which address to dial, and when to give up.

The control link transports the messages between a node and the learner. The rules are:

* If the link is lost or the learner is silent for `dead_after_s`, the node dials the next address.
  The node tries the configured addresses. If a plan has contained the learner's own address, the
  node tries this address, too. So the workers of a dead relay can reach the learner directly.
* After `reconnect_for_s` without the learner, the node stops with an error that names remedies.
* If every address has refused the node MAX_REFUSALS times in a row, the node stops, because waiting
  cannot help. A refusal is a rejected key, another protocol version, or a Welcome without the
  learner's signature (`roles/joining.py`). A refusal by one address is not sufficient, because a
  dishonest relay may answer there.
"""

from __future__ import annotations

import math
from collections import Counter

from echo.core.errors import RefusedError, TransportError
from echo.roles.joining import Joining, NodeSettings, NodeState
from echo.weights.parents import CONNECT_TIMEOUT_S, Connection, Parents
from echo.wire.actions import Action, Dial, HangUp, Note

MAX_REFUSALS = 3
"""A node gives up after every address has refused it this many times in succession."""
WARN_AFTER_S = 5.0
"""A node warns the operator after this many seconds without the learner. Most lost links are
restored sooner."""
LOST_LINK = "lost link"
"""Topic of the log lines on a lost link to the learner."""


class ControlLink:
    """Dials the learner's addresses in turn. If all of them fail, stops the node."""

    def __init__(
        self, settings: NodeSettings, joining: Joining, parents: Parents, *, now: float
    ) -> None:
        """Make a link without a connection; `begin` dials the first address.

        Args:
            settings: the settings of the node.
            joining: the node's admission, which gets the events of new and lost links.
            parents: has the learner's addresses. The weights link may share the control link's
                connection.
            now: the present time, seconds.
        """
        self._settings, self.joining, self._parents = settings, joining, parents
        self._connection: Connection | None = None
        self._address_index = 0
        self.lost_at = self.received_at = now
        """lost_at: when the learner was last reachable. received_at: when the last message from the
        learner, or the link's answer, arrived."""
        self._faults: dict[str, str] = {}
        """For each address, the error of the last failed attempt to dial it."""
        self._num_refusals: Counter[str] = Counter()
        self._warned_at: dict[str, float] = {}
        """For each state of the admission, the time of the last warning that the learner is
        missing."""

    # --- the connection --------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The address that was dialled last; "" before the first dial."""
        return "" if self._connection is None else self._connection.address

    @property
    def peer(self) -> str:
        """The peer id of the connection; "" without a connection."""
        return "" if self._connection is None else self._connection.peer

    @property
    def node_id(self) -> str:
        """The id of the node at the other end; "" before the node has answered."""
        return "" if self._connection is None else self._connection.node_id

    def has(self, peer: str) -> bool:
        """Return whether `peer` is the peer id of this link's connection."""
        return self._connection is not None and self._connection.peer == peer

    def dial(self, now: float) -> list[Action]:
        """Dial the present address. Each address of the learner has its turn."""
        addresses = self._parents.learner_addresses
        address = addresses[self._address_index % len(addresses)]
        self._connection = self._parents.control = Connection(address, dialled_at=now)
        lost = self.joining.lost(retry_at=now + CONNECT_TIMEOUT_S, now=now)
        return [*lost, Dial(address, "control")]

    def dial_next(self, now: float) -> list[Action]:
        """Close the connection and dial the address that follows the present one."""
        actions: list[Action] = [HangUp(self.peer)] if self.peer else []
        self._address_index += 1
        return actions + self.dial(now)

    def dialled(self, address: str, peer: str) -> None:
        """Record the peer id of the connection that the action Dial has opened."""
        if self._connection is not None and self._connection.address == address:
            self._connection.peer = self._connection.peer or peer

    def connected(self, *, now: float) -> None:
        """Record that the connection has opened, for the first time or again."""
        assert self._connection is not None
        self._connection.greeted_at = now

    def greeted(self, node_id: str, *, now: float) -> list[Action]:
        """Handle the Greeted that the other end has sent.

        If the connection is new, send Hello over it.
        """
        if self._connection is None or self._connection.node_id:
            return []
        self._connection.node_id = node_id
        self._faults.pop(self.address, None)
        self.received_at = now
        self.joining.via = f"{self.address.partition('#')[0]} ({node_id})"
        return self.joining.linked(now=now)

    def disconnected(self, reason: str, *, now: float) -> list[Action]:
        """Handle the loss of the connection: warn the operator, and dial the next address."""
        text = f"lost the link to {self.address}: {reason}"
        return [Note("warning", text, LOST_LINK), *self.dial_next(now)]

    # --- useless addresses -----------------------------------------------------------------------

    def dial_failed(self, reason: str, *, is_refused: bool, now: float) -> list[Action]:
        """Handle a failed attempt to dial. If all addresses refuse the node, stop the node."""
        self._faults[self.address] = reason
        if is_refused:
            return self._refused("refused", reason, now)
        self._num_refusals[self.address] = 0
        return []

    def leave_address(self, reason: str, text: str, now: float) -> list[Action]:
        """Count a refusal by the present address. Then dial the next address or stop the node.

        The process at the present address may be dishonest.
        """
        if self._connection is None or self.joining.state is NodeState.STOPPED:
            return []
        self._faults[self.address] = text
        stop = self._refused(reason, text, now)
        return stop or [Note("warning", text, reason), *self.dial_next(now)]

    def _refused(self, reason: str, text: str, now: float) -> list[Action]:
        """Count a refusal by the present address.

        If all addresses have refused the node, stop it.
        """
        self._num_refusals[self.address] += 1
        addresses = self._parents.learner_addresses
        if any(self._num_refusals[each] < MAX_REFUSALS for each in addresses):
            return []
        error = RefusedError(f"{text} (tried {MAX_REFUSALS} times)")
        return self.joining.give_up(reason, error, now=now)

    def welcomed(self) -> None:
        """Forget all refusals, because the learner has answered with a Welcome."""
        self._num_refusals.clear()

    # --- time without the learner ----------------------------------------------------------------

    def begin(self, *, now: float) -> list[Action]:
        """Dial the first address. From now on, measure the time without the learner."""
        self.lost_at = self.received_at = now
        return self.dial(now)

    def received(self, *, now: float) -> None:
        """Record that a message from the learner arrived now."""
        self.received_at = self.lost_at = now

    @property
    def silent_at(self) -> float:
        """Time at which the learner counts as silent, if no message from it arrives before then."""
        return self.received_at + self.joining.dead_after_s

    def deadline(self, *, is_leaving: bool) -> float:
        """Return when `expire` must be called next. The node is not admitted.

        At this time the node makes its next attempt, or gives up. A leaving node does not give up.
        """
        return min(self.joining.retry_at, math.inf if is_leaving else self._give_up_at)

    @property
    def _give_up_at(self) -> float:
        return self.lost_at + self._settings.reconnect_for_s

    def expire(self, *, is_leaving: bool, now: float) -> list[Action]:
        """Send an unanswered joining message again, dial the next address, or stop the node."""
        joining = self.joining
        remaining_s = self._give_up_at - now
        if remaining_s <= 0 and not is_leaving:
            error = TransportError(self._describe_failure())
            return joining.give_up("learner_unreachable", error, now=now)
        if now < joining.retry_at:
            return []
        is_silent = is_leaving or joining.state is NodeState.CONFIGURING
        actions = [] if is_silent else self._warn(remaining_s, now)
        if joining.state is NodeState.DIALLING or now >= self.silent_at:
            return actions + self.dial_next(now)
        return actions + joining.repeat(now)

    def leave_silent(self, *, now: float) -> list[Action]:
        """Warn the operator and dial the next address, because the learner was silent too long.

        The limit is `dead_after_s` seconds.
        """
        text = f"no message from the learner for {self.joining.dead_after_s:.0f} s"
        return [Note("warning", text, "silent learner"), *self.dial_next(now)]

    def _describe_failure(self) -> str:
        role, run_id = self._settings.role, self.joining.run_id
        since = f"run {run_id} last answered" if run_id else f"this {role} started"
        text = (
            f"no learner reached at {', '.join(self._parents.learner_addresses)} for "
            f"{self._settings.reconnect_for_s:.0f} s, since {since}; check that it runs, that its "
            f"port is open, and the addresses under [{role}] connect; network.reconnect_for_s sets "
            "how long to try"
        )
        return "\n  last attempt: ".join([text, *self._faults.values()])

    def _warn(self, remaining_s: float, now: float) -> list[Action]:
        """If the learner has been unreachable for WARN_AFTER_S, return a warning.

        Each state of the admission causes at most one warning per minute. The warning says that the
        node gives up after `remaining_s` more seconds.
        """
        state = self.joining.state
        if state is NodeState.DIALLING and self._connection is not None:
            self._faults.setdefault(
                self.address,
                f"{self.address.partition('#')[0]} does not answer: the host is off or "
                "cannot be reached, or a firewall drops what is sent to it",
            )
        if now < max(self.lost_at + WARN_AFTER_S, self._warned_at.get(state, -math.inf) + 60):
            return []
        self._warned_at[state] = now
        where = self.address or "?"
        text = f"{state}: no learner at {where} yet; giving up in {remaining_s:.0f} s"
        why = self._faults.get(where)
        return [Note("warning", f"{text}: {why}" if why else text)]
