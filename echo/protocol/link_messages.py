"""The messages that concern the two ends of one connection only: greeting, and the weights plane.

`messages.py` says who may send what, and names them all.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from echo.protocol.bounds import (
    MAX_NODES,
    MAX_RANGES,
    Lane,
    NodeId,
    Place,
    Seconds,
    Size,
    Word,
)
from echo.protocol.manifest import FULL, Form
from echo.rollout import PolicyVersion

OPEN_END = 1 << 40
"""Where a run of places stops whose end is not known yet."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; the tag is the class name. Every field has a range (`bounds.py`)."""


class Greet(Message, frozen=True):
    """First message on a dialled link: who dials, and what the link is for."""

    node_id: NodeId
    role: Word
    purpose: Word
    """"control" (routed messages) or "weights" (the pull protocol)."""


class Greeted(Message, frozen=True):
    """Answer to Greet: who was reached."""

    node_id: NodeId
    role: Word


class Probe(Message, frozen=True):
    """Child to parent: bytes of nothing, to see how fast they come through (`probing.py`)."""


class ProbeAck(Message, frozen=True):
    """Parent to child: they have come."""


class Subscribe(Message, frozen=True):
    """Child to parent: tell me of versions newer than this; answered by Announce or Waiting."""

    newest: PolicyVersion | None


class ParcelOffer(msgspec.Struct, frozen=True, array_like=True):
    """One parcel (`parcel.py`) that a parent has, or is getting."""

    version: PolicyVersion
    base: PolicyVersion | None
    """What the receiver must hold; None for an anchor."""
    num_bytes: Size
    """Its size, or what it is expected to be while it is still being coded."""


class Announce(Message, frozen=True):
    """Parent to child: what can be had here.

    The payload frame, if there is one, is the signed manifest of `version`, whose image can be had
    in full. Without it the version is still being coded or is on its way, as a parcel.
    """

    version: PolicyVersion
    offers: Annotated[tuple[ParcelOffer, ...], Meta(max_length=MAX_NODES)] = ()


class Fetch(Message, frozen=True):
    """Child to parent: send these chunks, in ascending order, up to the credit.

    Resuming after a cut and changing the parent are this same message with other ranges. It
    replaces any earlier Fetch over this link. Of the item's chunks it concerns only lane `lane`,
    those with index % num_lanes == lane: the others are fetched over other links.
    """

    version: PolicyVersion
    ranges: Annotated[tuple[tuple[Place, Place], ...], Meta(max_length=MAX_RANGES)]
    """Half-open [start, stop) runs of missing places in the lane, ascending; place p is the chunk
    lane + p * num_lanes. A last run that stops at OPEN_END goes on with chunks yet to be coded."""
    credit_bytes: Size
    form: Form = FULL
    lane: Lane = 0
    num_lanes: Lane = 1
    num_segments: Place = 0
    """Segments of the parcel that the child has; it is sent those that follow."""


class Credit(Message, frozen=True):
    """Child to parent: so many bytes have come, and that many more may be sent."""

    version: PolicyVersion
    credit_bytes: Size
    form: Form = FULL
    taken_bytes: Size = 0
    """Since the last Credit; they show the rate of the uplink."""


class Segment(Message, frozen=True):
    """Parent to child: the next part of a parcel's table; signed, it is the payload frame."""

    version: PolicyVersion
    form: Form
    index: Place


class Chunk(Message, frozen=True):
    """Parent to child: one chunk; its bytes are the payload frame."""

    version: PolicyVersion
    index: Place
    form: Form = FULL


class Waiting(Message, frozen=True):
    """Parent to child: I live, but what you want has not reached me yet."""

    version: PolicyVersion | None
    """The version of the chunk that is wanted; None if it is any newer version."""
    form: Form = FULL
    again_s: Seconds = 0.0
    """Within how long I say so again, seconds; 0 for as often as anybody does."""


class Gone(Message, frozen=True):
    """Parent to child: this version, in this form, can no longer be had here."""

    version: PolicyVersion
    form: Form = FULL
