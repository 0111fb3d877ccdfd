"""The keys on who is given which group."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from echo.config.fields import Off
from echo.config.section import Section


class DispatchSection(Section):
    """Who is given which group of prompts."""

    policy: Literal["speed", "even"] = "speed"
    """speed: who should have finished it first; even: who has the smallest share of its room."""
    hedge_factor: Annotated[float, Field(ge=1)] | Off = 2.0
    """Idle workers repeat a group of a batch that waits if so many times sooner; false: never."""
