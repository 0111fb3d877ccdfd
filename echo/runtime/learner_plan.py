"""The numbers and names that the learner follows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """The numbers that the training loop follows."""

    run_name: str
    run_dir: Path
    task_name: str
    max_steps: int
    groups_per_step: int
    max_barren_groups: int
    """Groups in a row from which nothing could be learned after which the run ends."""
    codec: str
    """In which forms versions go out (`parcels.py`)."""
    refresh_s: float = 0.25
    """Seconds between snapshots for the display."""
