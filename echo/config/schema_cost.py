"""What machines cost, how long they are kept, and which of them generate.

As in schema.py, the text under a field is its help, unit first.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from echo.config.fields import OptionalSeconds
from echo.config.section import Section

Dollars = Annotated[float, Field(ge=0)]


class PricedSection(Section):
    """A machine with a price."""

    price_per_h: Dollars | None = None
    """$ per hour for this machine, from joining until it is given back; unset: not known."""
    price_per_gb: Dollars = 0.0
    """$ per 1e9 bytes in and out of this machine."""


class RentedSection(PricedSection):
    """A machine that may be taken away, and may be given back."""

    losses_per_h: Dollars = 0.0
    """How often such a machine is taken away, as a spot machine is."""
    on_release: str | None = Field(default=None, min_length=1)
    """Shell command that gives the machine back: at the end of the run, or when it is released."""
    release_after_s: OptionalSeconds = Field(default=None, gt=0)
    """Seconds on standby, or without the learner, after which to leave; unset or false: never."""


class ActivationSection(Section):
    """Which workers generate and which stand by, by what they cost."""

    mode: Literal["off", "on"] = "on"
    """on: the cheapest sufficient set of the workers that state prices generates."""
    margin: float = Field(default=0.1, ge=0, le=10)
    """Share by which the rate of the active workers is to exceed the required one."""
    budget_per_h: float | None = Field(default=None, gt=0)
    """$ per hour for active workers and their traffic, without the learner; unset: no limit."""
    budget_per_run: float | None = Field(default=None, gt=0)
    """$ for all that states a price; then the run ends with a checkpoint. Unset: no limit."""
