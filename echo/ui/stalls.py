"""Finds a run's stalls in its metrics. Each stall has a cause, a duration and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo.core.units import format_duration
from echo.records.run_files import MetricsHistory, MetricsRow

MAX_GAP_STEPS = 5
"""Successive explanations belong to the same stall only if at most this many steps lie between
them."""
WAIT = "time/wait/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A series of waits of the learner or of workers, with one cause and few steps in between."""

    cause: str
    resource: str
    setting: str
    """The configuration key to change; empty if only another machine would help."""
    text: str
    """The newest explanation, as text."""
    first_step: int
    last_step: int
    waited_s: float
    """Seconds for which the learner waited in the steps of the stall."""
    is_open: bool
    """Whether the wait was still going on when the row with the newest explanation was written."""


def stalls_of(history: MetricsHistory) -> list[Stall]:
    """Return the stalls of a run, oldest first."""
    parts: list[list[MetricsRow]] = []
    for row in history.explained:
        before = parts[-1][-1] if parts else None
        is_next = before is not None and row["step"] <= before["step"] + MAX_GAP_STEPS
        if before is None or not is_next or before["explain"]["cause"] != row["explain"]["cause"]:
            parts.append([])
        parts[-1].append(row)
    return [_stall(rows, history) for rows in parts]


def _stall(rows: Sequence[MetricsRow], history: MetricsHistory) -> Stall:
    first, last = _step_of(rows[0]), _step_of(rows[-1])
    found = rows[-1]["explain"]
    is_open = last > (history.train or [{"step": 0}])[-1]["step"]
    steps = [row for row in history.train if first <= row["step"] <= last]
    return Stall(
        cause=found["cause"],
        resource=found["resource"],
        setting=found["setting"],
        text=found["text"],
        first_step=first,
        last_step=last,
        waited_s=sum(row.get("time/wait_for_batch") or 0.0 for row in steps),
        is_open=is_open,
    )


def _step_of(row: MetricsRow) -> int:
    """Return the step before which the explained wait took place.

    If the row has a reward, it is the row of a completed step, and the wait was before this step.
    Otherwise the row was written during a wait, and has the number of the last completed step.
    """
    step: int = row["step"]
    return step if "reward/mean" in row else step + 1


def describe_waits(train: Sequence[MetricsRow]) -> str:
    """Return text that says for which share of time the learner and the workers waited.

    The text is empty without optimizer steps.
    """
    total_s = sum(row.get("time/step") or 0.0 for row in train)
    if not total_s:
        return ""
    waited_s = sum(row.get("time/wait_for_batch") or 0.0 for row in train)
    by_stage: dict[str, float] = {}
    for row in train:
        for name, seconds in row.items():
            if name.startswith(WAIT) and seconds:
                stage = name.removeprefix(WAIT)
                by_stage[stage] = by_stage.get(stage, 0.0) + seconds
    text = f"the learner waited {waited_s / total_s:.0%} of {format_duration(total_s)}"
    known_s = sum(by_stage.values())
    parts = sorted(by_stage.items(), key=lambda part: -part[1])
    shares = [f"{stage} {s / known_s:.0%}" for stage, s in parts if s >= 0.01 * known_s]
    if shares:
        text += f" ({', '.join(shares)})"
    idle = [(row["rollouts/idle_ratio"], row.get("time/step") or 0.0) for row in train
            if row.get("rollouts/idle_ratio") is not None]  # fmt: skip
    if any(step_s for _, step_s in idle):
        share = sum(each * step_s for each, step_s in idle) / sum(step_s for _, step_s in idle)
        text += f"; workers had no groups {share:.0%} of it"
    return text
