"""Messages of a swarm: frequent, so with short names of their fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from echo.core.bounds import MAX_RANGES, Place
from echo.core.bounds import Rate as BytesPerS
from echo.core.errors import RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.wire.codec import DECODE_ERRORS, Frame, decode_envelope
from echo.wire.messages import (
    AnyMessage,
    Form,
    Message,
)

MAX_CHUNKS = 1 << 20
"""Chunks of one item in a swarm: 256 GiB at the smallest usual size."""

ChunkIndex = Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]
ChunkIndices = Annotated[tuple[ChunkIndex, ...], Meta(max_length=MAX_RANGES)]

_SHORT = {
    "version": "v", "form": "f", "runs": "r", "is_wanting": "w", "num_segments": "s",
    "uplink_bytes_per_s": "u", "number": "n", "num_chunks": "k", "named": "c", "chunks": "c",
}  # fmt: skip


class Have(Message, frozen=True, omit_defaults=True, rename=_SHORT):
    """Neighbour to neighbour: I take part in this item, and hold these chunks of it, too."""

    version: PolicyVersion
    form: Form
    runs: ChunkIndices
    """Start, stop, start, stop, ...: half-open runs that were not told before, ascending."""
    is_wanting: bool
    """Whether I lack any of it."""
    num_segments: ChunkIndex = 0
    """Tables of an encoded version that can be had from me."""
    uplink_bytes_per_s: BytesPerS | None = None
    """What I was seen to send in all."""


class Turn(Message, frozen=True, omit_defaults=True, rename=_SHORT):
    """Server to receiver: name so many chunks, and I send them next; answered by Want."""

    version: PolicyVersion
    form: Form
    number: Place
    """Names this turn in its answer; ascending, from 1."""
    num_chunks: ChunkIndex
    named: ChunkIndices = ()
    """What to take if it is lacking: the source's own choice, so that each chunk leaves it once
    before any leaves it twice."""


class Want(Message, frozen=True, omit_defaults=True, rename=_SHORT):
    """Receiver to server: send these chunks, in this order; none at all passes the turn."""

    version: PolicyVersion
    form: Form
    number: Place
    """Of the turn that it answers; 0 if it asks unbidden, near the end."""
    chunks: ChunkIndices


class Tables(Message, frozen=True, omit_defaults=True, rename=_SHORT):
    """Neighbour to neighbour: send me the item's manifest, or its signed tables from here on."""

    version: PolicyVersion
    form: Form
    num_segments: ChunkIndex


_decoder = msgspec.msgpack.Decoder(AnyMessage | Have | Turn | Want | Tables)


def message_of(frames: Sequence[Frame]) -> Message:
    """Return the message of some frames: one of the project's, or of those above."""
    try:
        return _decoder.decode(decode_envelope(frames).body)
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a malformed message: {error}") from error
