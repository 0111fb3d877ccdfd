"""What is right of an anchor that a killed process of this node has left half done.

Its journal is a list of records: signed tables and chunks, in the order in which they came. Nothing
of it is believed: each table must be the next one that the learner has signed, each chunk must
match the hash in its table. What is right counts as held: it is decoded anew, since nobody can tell
how much of the image had come out, and never asked for again.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from echo.core.errors import RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.protocol.parcel import Parcel
from echo.protocol.trust import Trust
from echo.wire.messages import Form

Record = tuple[int | None, bytes]
"""A signed table (None, frame), or a chunk (its index, its bytes)."""


def rebuild(version: PolicyVersion, records: Iterable[Record], trust: Trust) -> Parcel:
    """Return what is right of a journal; it is read up to the first table that is not.

    Args:
        version: what the anchor is said to be of.
        records: the journal; not asked for more after a table that is refused.
        trust: whom the tables must be signed by.
    """
    parcel = Parcel(version, Form("anchor"))
    for index, data in records:
        if index is None:
            try:
                parcel.add(trust.segment(parcel, data), data)
            except RemoteProtocolError:
                break
        elif (
            index < parcel.num_chunks
            and not parcel.has_chunk[index]
            and len(data) == parcel.chunk_size(index)
            and blake3(data).digest() == parcel.chunk_hash(index)
        ):
            parcel.hold(index, data)
    return parcel
