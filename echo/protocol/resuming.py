"""An anchor that a killed process of this node has left half done is gone on with.

Its journal is a list of records: signed tables and chunks, in the order in which they came. Nothing
of it is believed: each table must be the next one that the learner has signed, each chunk must
match the hash in its table. What is right counts as held: it is decoded anew, since nobody can tell
how much of the image had come out, and never asked for again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from blake3 import blake3

from echo.errors import RemoteProtocolError, StorageError
from echo.protocol.actions import Action, Note
from echo.protocol.manifest import Form
from echo.protocol.parcel import Parcel
from echo.protocol.trust import Trust
from echo.rollout import PolicyVersion

if TYPE_CHECKING:
    from echo.protocol.pulling import Pulling

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


def resume(pulling: Pulling, parcel: Parcel, *, now: float) -> list[Action]:
    """Take what was rebuilt: to serve it if it is whole and done, else to go on fetching it.

    Newer ones must come first, and images before anchors. What is of no use is removed.
    """
    store, item = pulling.store, (parcel.version, parcel.form)
    newest = store.newest_complete
    is_past = newest is not None and parcel.version <= newest
    if is_past and parcel.is_complete:
        store.parcels[item] = parcel
        return pulling.serving.announce(now=now)
    fault = ""
    if is_past or not parcel.num_segments or parcel.version in store.images or pulling.item:
        fault = "it is of no use any more"
    else:
        try:
            store.resume(parcel)
        except StorageError as error:
            fault = str(error)
    if fault:
        if parcel.journal is not None:
            parcel.journal.remove()
        text = f"dropped what was left here of {parcel.version} as {parcel.form}: {fault}"
        return [Note("info", text)]
    held = [index for index in range(parcel.num_chunks) if parcel.has_chunk[index]]
    decoding = [work for index in held for work in store.decodable(parcel, index)]
    return [*pulling.begin(item, now), *decoding]
