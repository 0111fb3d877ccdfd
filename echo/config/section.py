"""What all sections of the configuration have in common."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

Role = Literal["learner", "worker", "relay"]
ROLES: tuple[Role, ...] = ("learner", "worker", "relay")


class Section(BaseModel):
    """What all sections have in common: frozen, strict about types and unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    roles: ClassVar[tuple[Role, ...]] = ("learner",)
    """Which roles read this section."""
