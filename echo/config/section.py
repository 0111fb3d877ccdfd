"""What all sections of the configuration have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

Role = Literal["learner", "worker", "relay"]
ROLES: tuple[Role, ...] = ("learner", "worker", "relay")

T = TypeVar("T")
INHERITED = "inherited"
Inherited = Annotated[T, INHERITED]
"""The type of a key that the learner decides for its workers."""
OWN_KIND = "package.module:function"
"""The kind of a section's class for something of the user's own, which has an import path."""


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


def kind_of(value: Any) -> str:
    """Return which class of a section a table or an object is of."""
    kind = value["kind"] if isinstance(value, Mapping) else value.kind
    return OWN_KIND if ":" in kind else str(kind)
