"""The sections that say where prompts come from and who judges the answers.

As in schema.py, the text under a field is its help, unit first.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from echo.config.fields import Bytes, Seconds, TaskKind
from echo.config.section import Inherited, Section


class TaskSection(Section):
    """Where prompts and rewards come from."""

    roles = ("learner", "worker")
    kind: Inherited[TaskKind] = "addition"
    """addition, countdown, dataset, gsm8k, mixture, verifiers, or your own, "module:Class"."""
    options: Inherited[dict[str, Any]] = Field(default_factory=dict)
    """Keyword arguments of the task's class."""
    reward_timeout_s: Inherited[Seconds] = Field(default=10.0, gt=0)
    """Seconds that one reward may take before its group is refused."""
    step_timeout_s: Inherited[Seconds] = Field(default=60.0, gt=0)
    """Seconds that one call of an environment (a tool, a turn) may take."""
    max_reward: Inherited[float] = Field(default=1e6, gt=0, le=1e9)
    """Largest reward, either way; a group with one beyond it ends as reward_too_large."""
    max_turns: Inherited[int] = Field(default=16, ge=1, le=1000)
    """Turns of the policy after which an environment that goes on is ended."""


class RewardSection(Section):
    """Where and how the task's code runs that judges answers and plays environments."""

    roles = ("learner", "worker")
    where: Inherited[Literal["worker", "learner"]] = "worker"
    """worker: where the answer is sampled; learner: there, and references never leave it."""
    max_concurrent: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Calls at a time, each in a process of its own; auto: the cores, at most 4."""
    memory_limit_bytes: Bytes | None = Field(default=2 * 2**30, ge=2**20)
    """Bytes that the task may take in one process, beside its imports."""
