"""Carry out the operations that operators request, and answer each with text.

An operation such as "pause" sets a state, so repeating it changes nothing. The ledger and the log
record each change with the operator's name. A change is lost when the learner restarts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from echo.core.errors import ConfigError, nearest
from echo.core.units import counted, listed, one_line
from echo.records.ledger import LedgerQueue, Operated
from echo.roles.learner import HoldChosen, Learner, Paused
from echo.roles.members import Hold, Member
from echo.roles.viewers import Operate, OperationDone
from echo.runtime.learner.batches.bound import AdaptiveBound
from echo.runtime.learner.costs.control import CostControl
from echo.runtime.learner.report import Progress
from echo.wire.messages import Operation, Outcome


class Operations:
    """Carries out operations.

    Each operation returns a text that says what was done, or raises ConfigError.
    """

    def __init__(
        self,
        role: Learner,
        *,
        progress: Progress,
        bound: AdaptiveBound,
        costs: CostControl,
        ledger: LedgerQueue,
        report: Callable[[Any], None],
        stop: Callable[[], None],
        clock: Callable[[], float],
        log: logging.Logger,
    ) -> None:
        """Change the role, the staleness bound and the costs as operators request.

        `report` passes an event to the role. `stop` saves the run and ends the learner.
        """
        self._role, self._bound, self._costs, self._ledger = role, bound, costs, ledger
        self._progress, self._clock = progress, clock
        self._report, self._stop, self._log = report, stop, log

    def carry_out(self, action: Operate) -> None:
        """Carry out an operation, record it, and report the outcome to the role."""
        operation = action.operation
        try:
            text, is_done = self._act(operation), True
        except ConfigError as error:
            text, is_done = str(error), False
        words = filter(None, (operation.act, operation.subject, operation.value))
        what, by = one_line(" ".join(words)), one_line(operation.by) or "an operator"
        self._log.info("%s: %s: %s%s", by, what, "" if is_done else "not done: ", text)
        if is_done:
            self._ledger.append(
                Operated(
                    step=self._role.step,
                    by=by,
                    act=operation.act,
                    subject=operation.subject,
                    value=operation.value,
                    outcome=text,
                )
            )
        outcome = Outcome(number=operation.number, is_done=is_done, text=text)
        self._report(OperationDone(action.peer, outcome))

    def _act(self, operation: Operation) -> str:
        if self._role.shutdown.reason is not None:
            raise ConfigError("the run has ended")
        return self.ACTS[operation.act](self, operation)

    # --- the run ---------------------------------------------------------------------------------

    def _pause(self, operation: Operation) -> str:
        self._check_no_subject(operation)
        self._set_paused(True)
        running = counted(self._role.leases.num_running, "group")
        return (
            f"paused at step {self._role.step}: no group is granted; what workers hold ({running}) "
            "is finished, and trained on once the run is resumed or a batch is full"
        )

    def _resume(self, operation: Operation) -> str:
        if operation.subject:
            self._hold(self._node(operation), None)
            return f"{operation.subject} is given leases and weights again, as far as it is needed"
        self._set_paused(False)
        return f"goes on at step {self._role.step}"

    def _set_paused(self, is_paused: bool) -> None:
        self._progress.pause(is_paused, now=self._clock())
        self._report(Paused(is_paused=is_paused))

    def _stop_run(self, operation: Operation) -> str:
        self._check_no_subject(operation)
        self._stop()
        return (
            f"the learner ends its step, saves the run and stops (step {self._role.step} is done); "
            "continue with --resume"
        )

    def _set(self, operation: Operation) -> str:
        if operation.subject not in self.KEYS:
            near = nearest(operation.subject, self.KEYS)
            guess = f"did you mean {near}? " if near else ""
            raise ConfigError(
                f"{operation.subject!r} cannot be set while a run goes on; {guess}these can: "
                f"{', '.join(self.KEYS)}"
            )
        return self.KEYS[operation.subject](self, operation)

    def _set_bound(self, operation: Operation) -> str:
        if not operation.value.isdecimal():
            raise ConfigError(
                f"{operation.subject} = {operation.value!r}: expected a number of steps"
            )
        before = self._role.buffer.admission_staleness
        bound = int(operation.value[:9])
        if bound == before:
            return f"staleness bound for new leases: {bound} already"
        self._bound.set(self._role.step, bound, cause=f"operator: {one_line(operation.by)}")
        return f"staleness bound for new leases: {before} -> {bound}"

    def _set_budget(self, operation: Operation) -> str:
        try:
            budget = float(operation.value)
        except ValueError:
            budget = math.nan
        if not 0 < budget < math.inf:
            raise ConfigError(f"{operation.subject} = {operation.value!r}: expected $, above 0")
        cost = self._costs.view()
        if cost is None:
            raise ConfigError("no machine states a price, so a budget could never be spent")
        self._costs.set_budget(budget)
        return f"budget of the run: ${budget:.2f}, of which ${cost.total:.2f} are spent"

    # --- a node ----------------------------------------------------------------------------------

    def _drain(self, operation: Operation) -> str:
        member = self._node(operation)
        self._hold(member, "drain")
        if member.role == "relay":
            return f"{member.node_id} leaves once no node gets weights from it"
        num_leases = self._role.leases.num_leases(member.node_id)
        return f"{member.node_id} is given no more leases, and leaves after its {num_leases}"

    def _standby(self, operation: Operation) -> str:
        member = self._node(operation)
        if member.role != "worker":
            raise ConfigError(f"{member.node_id} is a {member.role}: only a worker can stand by")
        self._hold(member, "standby")
        leases = counted(self._role.leases.num_leases(member.node_id), "lease")
        return f"{member.node_id} stands by after its {leases}, until `resume {member.node_id}`"

    def _hold(self, member: Member, hold: Hold | None) -> None:
        self._report(HoldChosen(member.node_id, hold))

    def _node(self, operation: Operation) -> Member:
        nodes = self._role.roster.nodes
        if (member := nodes.get(operation.subject)) is not None:
            return member
        near = nearest(operation.subject, nodes)
        guess = f"did you mean {near}?" if near else f"connected: {listed(nodes) or 'no node'}"
        raise ConfigError(f"no node is called {operation.subject!r}; {guess}")

    def _check_no_subject(self, operation: Operation) -> None:
        if operation.subject:
            raise ConfigError(
                f"{operation.act} is for the whole run, and takes no {operation.subject!r}"
            )

    ACTS: ClassVar[Mapping[str, Callable[[Operations, Operation], str]]] = {
        "pause": _pause,
        "resume": _resume,
        "drain": _drain,
        "standby": _standby,
        "set": _set,
        "stop": _stop_run,
    }
    KEYS: ClassVar[Mapping[str, Callable[[Operations, Operation], str]]] = {
        "sync.max_staleness": _set_bound,
        "activation.budget_per_run": _set_budget,
    }
    """The settings that can be changed during a run."""
