"""Changes of a node's store. The receiver reports changes, and the sender informs children.

The receiver returns changes among its actions, in order. `Broadcast` owns receiver and sender, and
replaces each change by the sender's actions. So receiver and sender do not call each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo.wire.actions import Action
from echo.wire.codec import Frame
from echo.wire.messages import ItemId


class StoreChange(Action):
    """A change of the store. `Broadcast` replaces it by actions of the sender."""


@dataclass(frozen=True, slots=True)
class ChunksHeld(StoreChange):
    """Chunks of an item were verified and written."""

    item: ItemId
    chunks: dict[int, Frame]
    """The chunks by index, in the form in which chunks are sent."""


@dataclass(frozen=True, slots=True)
class SegmentKnown(StoreChange):
    """The next table of an encoded version has arrived, with the hashes of the segment's chunks."""

    item: ItemId


@dataclass(frozen=True, slots=True)
class ItemsChanged(StoreChange):
    """The items that can be announced may have changed."""


@dataclass(frozen=True, slots=True)
class ItemDropped(StoreChange):
    """An item was dropped from the store."""

    item: ItemId


@dataclass(frozen=True, slots=True)
class EvictionDue(StoreChange):
    """Older items may be dropped, because the node has begun to fetch an item or completed one."""
