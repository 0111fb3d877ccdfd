"""What becomes of a chunk that has come: verified and written, then held, served and credited.

take -> WriteChunk -> here and now, or in a thread (`writing.py` has the rules) -> written
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echo.errors import RemoteProtocolError, StorageError
from echo.protocol.actions import Action, Note
from echo.protocol.codec import Frame
from echo.protocol.lanes import MAX_BAD_CHUNKS, Lane, ParentFailed
from echo.protocol.messages import Chunk
from echo.protocol.parcel import Parcel
from echo.protocol.writing import WRONG_HASH, WriteChunk

if TYPE_CHECKING:
    from echo.protocol.pulling import Pulling


def take(
    pulling: Pulling, peer: str, message: Chunk, payload: list[Frame], *, now: float
) -> list[Action | ParentFailed]:
    """Begin to write a chunk that a parent has sent; one of somebody else is ignored.

    Raises:
        RemoteProtocolError: if it belongs nowhere.
    """
    item_id = (message.version, message.form)
    lane, item = pulling.heard(peer), pulling.store.get(item_id)
    if lane is None or item is None:
        return []
    if len(payload) != 1 or not 0 <= message.index < item.num_chunks:
        raise RemoteProtocolError(
            f"a Chunk of {message.version} with a bad index or without its bytes"
        )
    data = payload[0]
    pulling.bytes_received += len(data)
    if item.has_chunk[message.index] or message.index in item.writing:
        pulling.num_duplicate_chunks += 1
        return []
    if not lane.has_room(len(data)):
        reason = "it sends far more than it was given credit for"
        return [ParentFailed(pulling.disconnect(lane), reason)]
    write = pulling.store.arenas.write
    work = WriteChunk(item_id, item, message.index, peer, data, write)
    if len(data) != item.chunk_size(message.index):
        return _refuse(pulling, work, now)
    item.writing.add(message.index)
    lane.came(len(data), now=now)
    pulling.rate.add(len(data), now=now)
    if not pulling.store.may_block(item_id):
        return written(pulling, work, work.run(), now=now)
    if item_id == pulling.item and not pulling.asking.is_missing(lane, item):
        lane.finish()
    # Until it is written a lane without credit brings nothing, and that tells nothing of its rate.
    if not lane.can_bring:
        lane.rate.pause()
    if not any(each.can_bring for each in pulling.lanes):
        pulling.rate.pause()
    return [work]


def written(
    pulling: Pulling, work: WriteChunk, fault: str, *, now: float
) -> list[Action | ParentFailed]:
    """Take the result of a WriteChunk."""
    item, index, size = work.item, work.index, len(work.data)
    lane = pulling.lanes.of(work.peer)  # None if that parent was left meanwhile
    if lane is not None:
        lane.settle(size, now=now)
    item.writing.discard(index)
    if pulling.store.get(work.item_id) is not item:
        # It was dropped. What the chunk took of the window is free again.
        return [*_give_credit(pulling, lane, size)]
    if fault == WRONG_HASH:
        return _refuse(pulling, work, now)
    if fault:
        return [*_leave(pulling, work, fault, now)]
    item.mark(index)
    if lane is not None:
        pulling.watchdog.came(lane, now=now)
    actions: list[Action | ParentFailed] = [
        *pulling.serving.forward(work.item_id, index, now),
        *_give_credit(pulling, lane, size),
    ]
    if isinstance(item, Parcel):
        return [*actions, *pulling.store.decodable(item, index)]
    if item.is_complete:
        return [*actions, *pulling.arrived(work.item_id, now)]
    return actions


def _give_credit(pulling: Pulling, lane: Lane | None, size: int) -> list[Action]:
    """Acknowledge what was written, of whatever item, and ask for more of the present one."""
    if lane is None:
        return []
    taken, credit = lane.took(size, chunk_bytes=size)
    item = None if pulling.item is None else pulling.store.get(pulling.item)
    if item is None or pulling.item is None:
        return []
    if not pulling.asking.is_missing(lane, item):
        lane.finish()
        return []
    return pulling.asking.give_credit(pulling.item, lane, taken, credit)


def _refuse(pulling: Pulling, work: WriteChunk, now: float) -> list[Action | ParentFailed]:
    """Ask again for a chunk that is wrong, or leave the parent that sends such."""
    pulling.num_bad_chunks += 1
    version, _ = work.item_id
    text = f"chunk {work.index} of {version} from {work.peer} does not match its hash"
    actions: list[Action | ParentFailed] = [Note("warning", f"{text}; asking again")]
    lane = pulling.lanes.of(work.peer)  # None if that parent was left meanwhile
    if lane is not None:
        lane.num_bad_chunks += 1
        if lane.num_bad_chunks >= MAX_BAD_CHUNKS:
            pulling.disconnect(lane)
            actions.append(ParentFailed(work.peer, text, is_corrupt=True))
    return [*actions, *_ask_again(pulling, work, now)]


def _ask_again(pulling: Pulling, work: WriteChunk, now: float) -> list[Action]:
    """Ask for a chunk over the lane whose it is now: while it was written they may have changed."""
    if pulling.item != work.item_id:
        return []
    lanes = pulling.lanes
    shares = [(lane, lanes.share(lane)) for lane in lanes]
    asked = [lane for lane, share in shares if share and work.index % share[1] == share[0]]
    return pulling.asking.request_all(pulling.item, now, asked)


def _leave(pulling: Pulling, work: WriteChunk, fault: str, now: float) -> list[Action]:
    """Leave an item that the disk refuses, as one for which there is no room."""
    version, _ = work.item_id
    error = StorageError(f"chunk {work.index} of {version} cannot be written: {fault}")
    if pulling.item == work.item_id:
        pulling.end()
    return [*pulling.room.lacks(error, now=now), *pulling.serving.drop(work.item_id, now=now)]
