"""Changes of a node's store: the receiver reports them, and the sender informs children.

The receiver returns the changes among its actions, in order. `Broadcast`, which owns receiver and
sender, replaces each change by the sender's actions. So neither half calls the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo.wire.actions import Action
from echo.wire.codec import Frame
from echo.wire.messages import ItemId


class StoreChange(Action):
    """A change of the store, which `Broadcast` turns into actions before a role gets them."""


@dataclass(frozen=True, slots=True)
class ChunksHeld(StoreChange):
    """Chunks of an item were verified and written, so the node holds them."""

    item: ItemId
    chunks: dict[int, Frame]
    """The chunks by index, in the form in which they are sent."""


@dataclass(frozen=True, slots=True)
class SegmentKnown(StoreChange):
    """The next table of an encoded version has arrived, with the hashes of its chunks."""

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
    """Older items may be dropped: the node fetches another item, or has completed one."""
