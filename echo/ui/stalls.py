"""Finds a run's stalls in its metrics. Each stall has a cause, a duration and a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    is_superseded: bool
    """Whether the learner was resumed after the wait, and made the step only then. `waited_s` is
    then 0, because the duration of the wait is not recorded."""


def stalls_of(history: MetricsHistory) -> list[Stall]:
    """Return the stalls of a run, oldest first."""
    steps = {row["step"]: row for row in history.train}
    parts: list[list[MetricsRow]] = []
    last: tuple[str, bool] | None = None
    for row in history.explained:
        kind = row["explain"]["cause"], _is_superseded(row, steps)
        if kind != last or row["step"] > parts[-1][-1]["step"] + MAX_GAP_STEPS:
            parts.append([])
        parts[-1].append(row)
        last = kind
    return [_stall(rows, history, is_superseded=_is_superseded(rows[0], steps)) for rows in parts]


def _is_superseded(row: MetricsRow, steps: Mapping[int, MetricsRow]) -> bool:
    """Return whether the learner was resumed between the explained wait and its step."""
    step = _step_of(row)
    made, before = steps.get(step), steps.get(step - 1, {})
    if made is None or made.get("lineage", 1) == before.get("lineage", 1):
        return False
    is_earlier: bool = row["time"] < made["time"] - (made.get("time/step") or 0.0)
    return is_earlier


def _stall(rows: Sequence[MetricsRow], history: MetricsHistory, *, is_superseded: bool) -> Stall:
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
        waited_s=0.0
        if is_superseded
        else sum(row.get("time/wait_for_batch") or 0.0 for row in steps),
        is_open=is_open,
        is_superseded=is_superseded,
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
