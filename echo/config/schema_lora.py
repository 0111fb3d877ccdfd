"""The section on adapters; as in schema.py, the text under a field is its help, unit first."""

from __future__ import annotations

from pydantic import Field

from echo.config.fields import Names
from echo.config.section import Inherited, Section


class LoraSection(Section):
    """Low-rank adapters (LoRA), trained and sent in place of all weights; needs the extra lora."""

    roles = ("learner", "worker")
    rank: Inherited[int] = Field(default=0, ge=0)
    """Rank of the two matrices next to each target; 0 trains all weights."""
    alpha: Inherited[int | None] = Field(default=None, ge=1)
    """Their product counts alpha / rank times; unset: twice the rank."""
    target_modules: Inherited[Names] = ("all-linear",)
    """Last parts of the names of linear layers, such as q_proj; all-linear: all but the head."""
