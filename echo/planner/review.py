"""Whether the workers that are active are the right ones, and which step to take if not.

What is active is compared with the cheapest set that satisfies the rule with its margin
(`echo.planner.activation`). Two things keep it calm:

* *hysteresis*: what is active counts as enough with half the margin, and where the learner has not
  waited lately whatever the estimates say; a cheaper set must save `min_saving`, and one with
  other workers that much against the best that those which are active can do by themselves:
  estimates differ from one question to the next, equal workers by chance;
* *small steps*: a quarter of the workers at most is dropped at a time, the worst first: that which
  costs most for each rollout it adds. And only while those that hold weights are enough without it,
  so that one that is activated in another's place has caught up before the other is dropped.

A budget goes before all that. Where nothing satisfies rule and budget, the answer is the cheapest
set for the least longer step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echo.planner.activation import Choice, Links, Outlook, Roll, Worker, choose
from echo.planner.job import Job

IDLE_TOLERANCE = 0.02
"""Share of the time that a learner may wait and still count as busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What to do about a question."""

    active: frozenset[str]
    """Who should generate from now on."""
    before: Outlook
    after: Outlook
    choice: Choice
    cause: str
    """Why anything changes; empty if nothing does."""
    is_pending: bool
    """Whether there is more to be changed that has to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that an answer depends on, at one instant; it can be answered in another thread."""

    workers: tuple[Worker, ...]
    job: Job
    links: Links
    active: frozenset[str]
    settled: frozenset[str]
    """Active workers whose dwell is over."""
    ready: frozenset[str]
    """Workers that hold weights which leases are granted for."""
    idle_share: float
    """Measured, lately."""
    min_saving: float

    def solve(self) -> Answer:
        """Return what to do; takes seconds for many kinds of workers."""
        roll = Roll(self.workers, self.links)
        calm = replace(self.job, margin=self.job.margin / 2)
        before = roll.outlook(calm, self.active)
        choice = self._choose()
        is_enough = before.is_sufficient or self.idle_share <= IDLE_TOLERANCE
        saving = before.cost_per_h - choice.outlook.cost_per_h
        pays = saving > 0 and saving >= self.min_saving * before.cost_per_h
        cause, wanted = "", self.active
        if before.cost_per_h > self.job.budget_per_h * (1 + 1e-9):
            cause, wanted = "the budget per hour is passed", choice.active
        elif not is_enough:
            cause = "the active workers are not enough"
            spared = self.settled if choice.slowdown > 1 and pays else frozenset()
            wanted = self._within_budget(roll, (self.active - spared) | choice.active, choice)
        elif pays:
            cause = "fewer or cheaper workers are enough"
            wanted = self._shrunk(roll, calm, choice)
            if wanted > self.active:
                cause = "cheaper workers are there, and begin before others are put on standby"
        if wanted == self.active:
            cause = ""
        return Answer(
            active=wanted,
            before=before,
            after=roll.outlook(calm, wanted),
            choice=choice,
            cause=cause,
            is_pending=(bool(cause) or pays) and wanted != choice.active,
        )

    def _choose(self) -> Choice:
        """Return the best set, or that of the active workers alone if it is hardly worse."""
        choice = choose(self.workers, self.job, self.links, preferred=self.active)
        if choice.active <= self.active or self.active <= choice.active:
            return choice
        members = [worker for worker in self.workers if worker.name in self.active]
        own = choose(members, self.job, self.links)
        if own.slowdown > 1 >= choice.slowdown:
            return choice
        less = 1 - self.min_saving
        is_faster = choice.slowdown < less * own.slowdown
        is_cheaper = choice.outlook.cost_per_h < less * own.outlook.cost_per_h
        return choice if is_faster or (is_cheaper and choice.slowdown <= own.slowdown) else own

    def _within_budget(self, roll: Roll, names: frozenset[str], choice: Choice) -> frozenset[str]:
        """Return a set, or what was chosen instead if the set costs too much."""
        cost_per_h = roll.outlook(self.job, names).cost_per_h
        return names if cost_per_h <= self.job.budget_per_h else choice.active

    def _shrunk(self, roll: Roll, job: Job, choice: Choice) -> frozenset[str]:
        """Return the active workers without the worst of those that are not chosen.

        Where none can be dropped before others have taken its place, these are activated first.
        """
        names, num_left = self.active, max(1, len(self.active) // 4)
        dropped = [n for n in self.active - choice.active if n in self.settled]
        for name in roll.worst_first(job, dropped):
            without = names - {name}
            if num_left and roll.outlook(job, without & self.ready).is_sufficient:
                names, num_left = without, num_left - 1
        if names == self.active and dropped:
            return self._within_budget(roll, self.active | choice.active, choice)
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A change that was made, with the numbers behind it."""

    step: int
    cause: str
    activated: tuple[str, ...]
    parked: tuple[str, ...]
    num_active: int
    num_standby: int
    before: Outlook
    after: Outlook
    train_s: float
    idle_share: float
    """Measured before the change."""
    slowdown: float
    """Above 1: no set satisfies rule and budget, and steps take so much longer."""
    is_exact: bool

    def __str__(self) -> str:
        """Say what was decided, in one line."""
        parts = [f"{self.num_active} of {self.num_active + self.num_standby} workers active"]
        for verb, names in (("activated", self.activated), ("put on standby", self.parked)):
            if names:
                shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
                parts.append(f"{verb} {shown}")
        after = self.after
        parts.append(
            f"{after.rate:.3g} rollouts/s for the {after.required:.3g} that are needed, broadcast "
            f"{after.broadcast_s:.3g} s"
        )
        parts.append(f"${after.cost_per_h:.2f}/h in place of ${self.before.cost_per_h:.2f}/h")
        if self.slowdown > 1:
            parts.append(
                f"nothing better is there within the budget: the learner waits "
                f"{after.idle_share:.0%} of the time"
            )
        return f"{self.cause}: {'; '.join(parts)}"
