"""Chunks between their arrival and the arena: verified, written, and only then held.

    Chunk -> WriteChunk -> [a thread, or here and now] -> `Receiver.written`: held, served, credited

Where an arena may make its writer wait (a mapped file, whose pages the kernel holds back when the
disk is behind), the work goes to a thread and the loop goes on. In memory it is done at once, since
a thread costs more than the copy; so are chunks of parcels, which lie in memory everywhere.

* **Backpressure.** Credit is given for what has been written: what waits in memory is bounded by
  the windows of the lanes, and a slow disk slows the parent. One that sends far more than its
  credit is left.
* **Order.** Writes end in any order; nothing depends on it. A chunk that is being written is not
  missing (it is not asked for, of whatever parent; a second copy is thrown away), and not held (it
  is not served).
* **What becomes of the arena meanwhile** does not matter. Bytes are verified before they are
  written, so what is written late is right. The work keeps the arena lent, so that it is not
  recycled for another version. The result of a write into an item that was dropped is ignored, but
  for the credit that it frees.
* **Silence.** While a chunk of a lane is being written its parent is not to blame (`lanes.py`), and
  where no credit is left meanwhile, the time does not count for the rate of the link.
* **A disk that refuses** is as good as full: the item is dropped, and tried again (`room.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from echo.core.rollout import PolicyVersion
from echo.protocol.transfer import Chunked
from echo.wire.actions import Action, Work
from echo.wire.codec import Frame
from echo.wire.messages import ItemId

WRONG_HASH = "its hash is wrong"
"""What `run` returns of a chunk that is not what the learner signed; else the disk is at fault."""


@dataclass(frozen=True, slots=True)
class VersionArrived(Action):
    """A version is complete and verified in the store; a worker may install it."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True, eq=False)
class WriteChunk(Work):
    """Work for a thread: verify one chunk and write it; then call `worked`."""

    item_id: ItemId
    item: Chunked
    index: int
    peer: str
    """The parent that has sent it."""
    data: Frame
    write: Callable[[memoryview, Frame], None]

    def run(self) -> str:
        """Return what is wrong, or nothing."""
        if blake3(self.data).digest() != self.item.chunk_hash(self.index):
            return WRONG_HASH
        try:
            self.write(self.item.place(self.index), self.data)
        except OSError as error:
            return error.strerror or str(error) or "unknown error"
        return ""
