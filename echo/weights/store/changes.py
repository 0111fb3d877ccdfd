"""Changes of a node's store, which the receiver reports and the sender passes on to children.

The receiver returns them among its actions, in order. `Broadcast`, which owns both halves, replaces
each by the actions with which the sender answers it, so neither half calls the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo.wire.actions import Action
from echo.wire.codec import Frame
from echo.wire.messages import ItemId


class StoreChange(Action):
    """A change of the store; no role receives one."""


@dataclass(frozen=True, slots=True)
class ChunksHeld(StoreChange):
    """Chunks have been verified and written."""

    item: ItemId
    chunks: dict[int, Frame]
    """By index, as they travel."""


@dataclass(frozen=True, slots=True)
class SegmentKnown(StoreChange):
    """The next table of an encoded version is here, and with it the hashes of its chunks."""

    item: ItemId


@dataclass(frozen=True, slots=True)
class ItemsChanged(StoreChange):
    """The items that can be announced may have changed."""


@dataclass(frozen=True, slots=True)
class ItemDropped(StoreChange):
    """An item is no longer in the store."""

    item: ItemId


@dataclass(frozen=True, slots=True)
class EvictionDue(StoreChange):
    """Another item is fetched or complete, so older ones may be dropped."""
