"""Images of versions that all ranks write, code and hash, each a part.

    every rank of rank 0's machine    rounds its rows into the image, in memory that all of them map
    a rank of another machine         rounds them beside, and sends rank 0 what changed since the
                                      version before, PIECE_BYTES of the image at a time
    when all of it has come           rank 0 deals the blocks of each segment among the ranks of its
                                      machine; each codes its own, and rank 0 signs and sends
    behind that, for the seal         each of them hashes and encrypts its part of the chunks

All of it is beside the next step. A step waits until its rank's rows are rounded, on a CPU; on a
GPU they cross to pinned memory on a stream of their own, and what changes the weights waits for
that stream. Rows from another machine come in a process group of their own, since the next step
needs the others.

Nothing is put together on one rank. Where a row lies in an image depends on the model alone, and a
block codes alike wherever it is coded: versions are those of one process, byte for byte, and deltas
go on after a resume on another number of ranks.

Ranks of a machine meet at a Unix socket that rank 0 listens on: a rank that cannot reach it is on
another one. Two connections stay until a process ends. In the first rank 0 hands over the memory of
images, which has no name and goes with the last process that maps it, and hears that rows are
written; in the second it asks for coded blocks and for hashes. Rank 0 does the work of a rank that
is gone: that the job ends is said elsewhere (crew.py).

Memory: two images on rank 0's machine, one more while an older one is still read
(`RecycledMemory`), and the coded blocks of a segment or two. On another machine two copies of each
rank's own rows, and one piece. In each rank a piece of 64 MiB, rounded, where the weights are on a
GPU. All that rows are written to is pinned there.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from echo.core.errors import RankError
from echo.core.rollout import PolicyVersion
from echo.engine.weights import (
    CodedDelta,
    CopyStream,
    VersionImage,
    Weights,
    host_bytes,
    image_bytes,
    image_memory,
    pinned,
    round_into,
)
from echo.train.ranks import sharding
from echo.train.ranks.sharding import COLLECTIVE_S, Ranks
from echo.weights.delta import CodedBlock, WordBytes, code_block, decode_block, word_bytes_of
from echo.weights.manifest import ChunkHashes, TensorSpec, hash_chunks
from echo.weights.memory import RecycledMemory

PIECE_BYTES = 4 << 20
"""Image bytes that a rank of another machine sends at a time."""

Bytes = npt.NDArray[np.uint8]


# --- rows of an image -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Where in an image the rows of a tensor lie that one rank has."""

    spec: TensorSpec
    start: int
    stop: int

    def pieces(self) -> Iterator[tuple[int, int, WordBytes]]:
        """Yield where each piece begins and ends, and the size of its words."""
        for first in range(self.start, self.stop, PIECE_BYTES):
            last = min(first + PIECE_BYTES, self.stop)
            yield first, last, word_bytes_of([self.spec], first, last)


def begin_to_write(
    places: Iterable[tuple[RowSpan, Tensor]], tensors: Weights, stream: CopyStream | None
) -> Callable[[], None]:
    """Round this rank's rows into their places; return what waits until they are there.

    Args:
        places: of each span, uint8 [stop - start], on the host.
        tensors: this rank's, by name.
        stream: on which they cross from a GPU: what changes them has to wait for it; None to wait
            here.
    """

    def write() -> None:
        for span, place in places:
            rows = sharding.local(tensors[span.spec.name]).detach()
            round_into(place, span.spec.dtype, rows, is_beside=stream is not None)

    if stream is None:
        write()
        return lambda: None
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        write()
    copied: torch.cuda.Event = stream.record_event()
    return copied.synchronize


def spans_of(specs: Sequence[TensorSpec], tensors: Weights, rank: int, size: int) -> list[RowSpan]:
    """Return what a rank writes: its rows, and of tensors that are not cut all, if it is the first.

    Args:
        specs: where each tensor lies in the image.
        tensors: by name, as any of the ranks has them.
        rank: whose.
        size: how many ranks there are.
    """
    spans = []
    for spec in specs:
        start, stop = spec.offset, spec.offset + spec.num_bytes
        if isinstance(tensors[spec.name], DTensor):
            row_bytes = spec.num_bytes // max(1, spec.shape[0])
            first, last = sharding.rows_of(spec.shape[0], rank, size)
            start, stop = start + first * row_bytes, start + last * row_bytes
        elif rank:
            continue
        if start < stop:
            spans.append(RowSpan(spec, start, stop))
    return spans


class FarRows:
    """Rows of a rank of another machine: the newest version's, and those of the one before."""

    def __init__(
        self, spans: Sequence[RowSpan], stream: CopyStream | None, group: dist.ProcessGroup | None
    ) -> None:
        """Begin without a version.

        Args:
            spans: the rows.
            stream: see `begin_to_write`.
            group: in which they are sent.
        """
        self._spans, self._stream, self._group = spans, stream, group
        self._ends = list(accumulate((span.stop - span.start for span in spans), initial=0))
        self._memory = RecycledMemory(2, image_memory)
        self._last: memoryview | None = None

    def begin(self, tensors: Weights) -> Callable[[], None]:
        """Round the rows; return what waits for them and sends rank 0 what has changed."""
        new = self._memory.take(self._ends[-1])
        places = [host_bytes(new[first:last]) for first, last in pairwise(self._ends)]
        wait = begin_to_write(zip(self._spans, places, strict=True), tensors, self._stream)
        last, self._last = self._last, new

        def send() -> None:
            wait()
            for span, first in zip(self._spans, self._ends, strict=False):
                shift = first - span.start
                for start, stop, word_bytes in span.pieces():
                    coded = code_block(last, new, (start + shift, stop + shift, word_bytes)).coded
                    size, data = torch.tensor([len(coded)]), bytearray(coded)
                    dist.send(size, dst=0, group=self._group)
                    dist.send(torch.frombuffer(data, dtype=torch.uint8), dst=0, group=self._group)

        return send


def receive_rows(
    rank: int,
    spans: Sequence[RowSpan],
    image: memoryview,
    last: memoryview | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Write what a rank of another machine sends to its places in the image.

    Args:
        rank: which.
        spans: its own.
        image: of this version.
        last: that of the version before; None for the first.
        group: in which they come.
    """
    size = torch.zeros(1, dtype=torch.int64)
    for span in spans:
        for start, stop, _ in span.pieces():
            dist.recv(size, src=rank, group=group)
            coded = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(coded, src=rank, group=group)
            base = None if last is None else last[start:stop]
            decode_block(coded.numpy().data, base, image[start:stop])


# --- memory in common -----------------------------------------------------------------------------


def new_memory(num_bytes: int) -> tuple[int, Bytes]:
    """Return zeros that other processes can map, with the descriptor to hand to them."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("echo-image")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor, map_shared(descriptor, num_bytes)


def map_shared(descriptor: int, num_bytes: int) -> Bytes:
    """Return memory that another process has made, too."""
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)


def address_of(image: memoryview) -> int:
    """Return where an image lies in this process."""
    return np.frombuffer(image, np.uint8).ctypes.data


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's message about its memory before an image is written; descriptors follow."""

    image: int
    """Number of that which the image is written into."""
    made: tuple[tuple[int, int], ...]
    """Numbers and bytes of what is new, and handed over after this."""
    live: frozenset[int]
    """Numbers of all that is in use."""


class AskedBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that a rank is asked to code; it answers with a list of `CodedBlock`."""

    image: int
    """Number of its memory."""
    base: int | None
    blocks: tuple[tuple[int, int, WordBytes], ...]


class AskedHashes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Chunks that a rank is asked to hash; it answers with `ChunkHashes`."""

    image: int
    """Number of its memory."""
    chunk_bytes: int
    first: int
    stop: int
    key: bytes


_encode = msgspec.msgpack.encode
_memory_decoder = msgspec.msgpack.Decoder(Memory)
_asked_decoder = msgspec.msgpack.Decoder(AskedBlocks | AskedHashes)
_coded_decoder = msgspec.msgpack.Decoder(list[CodedBlock])
_hashes_decoder = msgspec.msgpack.Decoder(ChunkHashes)

_Socket: TypeAlias = "Connection[bytes, bytes]"


def answer(connection: _Socket) -> bytes:
    """Return what a rank says next.

    Raises:
        OSError: if it is gone, or hangs.
        EOFError: if it is gone.
    """
    if not connection.poll(COLLECTIVE_S):
        raise TimeoutError(f"no answer for {COLLECTIVE_S:.0f} s")
    return connection.recv_bytes()


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """The connection of rank 0 and another rank of its machine."""

    memory: _Socket
    coding: _Socket


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """Which ranks are on rank 0's machine, and how the others send their rows."""

    links: dict[int, Link]
    """With the others of this machine, by rank; in these with rank 0 alone."""
    far: dist.ProcessGroup | None
    """None where there are no others."""


def _group_of_far(ranks: Ranks, num_near: int) -> dist.ProcessGroup | None:
    if num_near == ranks.size - 1:
        return None
    group: dist.ProcessGroup = dist.new_group(
        backend="gloo", timeout=timedelta(seconds=COLLECTIVE_S)
    )
    return group


def accept(ranks: Ranks) -> Meeting:
    """Meet the others; rank 0 calls this, the others `reach`."""
    found: dict[int, dict[str, _Socket]] = {}
    # The system takes names of some 100 bytes, and schedulers of clusters make longer ones.
    place = tempfile.gettempdir() if len(tempfile.gettempdir()) < 64 else "/tmp"
    with tempfile.TemporaryDirectory(prefix="echo-", dir=place) as directory:
        address = str(Path(directory) / "ranks")
        with Listener(address, "AF_UNIX", backlog=2 * ranks.size) as listener:
            ranks.gather(address.encode())
            num_near = ranks.gather(b"").count(b"near")
            for _ in range(2 * num_near):
                connection = listener.accept()
                rank, purpose = connection.recv_bytes().decode().split()
                found.setdefault(int(rank), {})[purpose] = connection
    links = {rank: Link(**connections) for rank, connections in sorted(found.items())}
    return Meeting(links, _group_of_far(ranks, num_near))


def reach(ranks: Ranks) -> Meeting:
    """Meet rank 0, which calls `accept`."""
    address = ranks.gather(b"")[0].decode()
    links = {}
    with suppress(OSError):
        link = Link(Client(address, "AF_UNIX"), Client(address, "AF_UNIX"))
        link.memory.send_bytes(f"{ranks.rank} memory".encode())
        link.coding.send_bytes(f"{ranks.rank} coding".encode())
        links[0] = link
    num_near = ranks.gather(b"near" if links else b"").count(b"near")
    return Meeting(links, _group_of_far(ranks, num_near))


# --- rank 0 ---------------------------------------------------------------------------------------


class NearRank:
    """Another rank of this machine, which codes and hashes parts of images."""

    def __init__(self, coding: _Socket, numbers: Mapping[int, int]) -> None:
        """Take what connects them.

        Args:
            coding: where it is asked.
            numbers: of memory that both map, by address.
        """
        self._coding, self._numbers = coding, numbers

    def code(
        self,
        image: memoryview,
        base: memoryview | None,
        blocks: Sequence[tuple[int, int, WordBytes]],
    ) -> list[CodedBlock]:
        """Return blocks coded, as `code_block` does."""
        number = None if base is None else self._number(base)
        told = None
        if number != 0:  # of memory that is this process's alone the other could make nothing
            told = self._ask(AskedBlocks(self._number(image), number, tuple(blocks)))
        if told is None:
            return [code_block(base, image, block) for block in blocks]
        return _coded_decoder.decode(told)

    def hash(self, image: memoryview, chunk_bytes: int, chunks: range, key: bytes) -> ChunkHashes:
        """Return hashes of chunks, as `hash_chunks` does."""
        asked = AskedHashes(self._number(image), chunk_bytes, chunks.start, chunks.stop, key)
        told = self._ask(asked)
        if told is None:
            return hash_chunks(image, chunk_bytes, chunks, key)
        return _hashes_decoder.decode(told)

    def _number(self, image: memoryview) -> int:
        """Return the number of the memory that an image lies in; 0 for any other memory."""
        return self._numbers.get(address_of(image), 0)

    def _ask(self, asked: AskedBlocks | AskedHashes) -> bytes | None:
        """Return the answer; None if the rank cannot give one."""
        if not asked.image or self._coding.closed:
            return None
        try:
            self._coding.send_bytes(_encode(asked))
            return answer(self._coding)
        except (OSError, EOFError):
            self._coding.close()  # or a late answer would be taken for the next one
            return None


class LeadImages:
    """Makes one image after the other, with the other ranks, which have `FollowImages`."""

    def __init__(
        self,
        ranks: Ranks,
        specs: tuple[TensorSpec, ...],
        stream: CopyStream | None,
        *,
        together: Callable[[], AbstractContextManager[None]],
        lost: Callable[[BaseException], RankError],
    ) -> None:
        """Meet the others.

        Args:
            ranks: all of them.
            specs: where each tensor lies in an image.
            stream: see `begin_to_write`.
            together: within it all of them begin to write an image.
            lost: says what has become of those whose rows do not come.
        """
        self._ranks, self._specs, self._stream = ranks, specs, stream
        self._together, self._lost = together, lost
        self._meeting = accept(ranks)
        self._numbers: dict[int, int] = {}
        """Of memory that all ranks of this machine map, by address, as long as it is in use."""
        self._num_made = 0
        self._made: dict[int, tuple[int, int]] = {}
        """Descriptor and bytes of memory that the others do not have yet, by number."""
        links = self._meeting.links
        self._memory = RecycledMemory(2, self._make_piece if links else image_memory)
        self._last: memoryview | None = None
        self._thread = ThreadPoolExecutor(1, "image")
        self._ready: Future[CodedDelta | None] | None = None
        self.helpers = tuple(NearRank(link.coding, self._numbers) for link in links.values())

    def make(self, weights: Weights, version: PolicyVersion) -> VersionImage:
        """Return the image of a version, which is still on its way.

        Args:
            weights: of this rank, cut up.
            version: its name.

        Raises:
            RankError: if another rank is gone.
        """
        if self._ready is not None:
            self._ready.result()
        image, size = self._memory.take(image_bytes(self._specs)), self._ranks.size
        with self._together():
            self._tell(image)
            room = host_bytes(image)
            own = spans_of(self._specs, weights, 0, size)
            places = [(span, room[span.start : span.stop]) for span in own]
            wait = begin_to_write(places, weights, self._stream)
        far = {
            rank: spans_of(self._specs, weights, rank, size)
            for rank in range(1, size)
            if rank not in self._meeting.links
        }
        self._ready = self._thread.submit(self._receive, wait, far, image, self._last)
        self._last = image
        return VersionImage(self._specs, image, self._ready)

    def _receive(
        self,
        wait: Callable[[], None],
        far: Mapping[int, Sequence[RowSpan]],
        image: memoryview,
        last: memoryview | None,
    ) -> CodedDelta | None:
        """Wait until all rows are in an image; its delta is made when it is asked for."""
        try:
            wait()
            for link in self._meeting.links.values():
                answer(link.memory)
            for rank, spans in far.items():
                receive_rows(rank, spans, image, last, self._meeting.far)
        except (OSError, EOFError, RuntimeError) as error:
            raise self._lost(error) from error
        return None

    def _make_piece(self, num_bytes: int) -> Bytes:
        descriptor, piece = new_memory(num_bytes)
        piece = pinned(piece)
        self._num_made += 1
        self._made[self._num_made] = descriptor, num_bytes
        address = piece.ctypes.data
        self._numbers[address] = self._num_made
        # Before the memory goes, or another's at its address would be taken for it.
        weakref.finalize(piece, self._numbers.pop, address).atexit = False
        return piece

    def _tell(self, image: memoryview) -> None:
        """Tell the ranks of this machine where an image is to be written."""
        made = tuple((number, num_bytes) for number, (_, num_bytes) in self._made.items())
        number = self._numbers.get(address_of(image), 0)
        told = _encode(Memory(number, made, frozenset(self._numbers.values())))
        for link in self._meeting.links.values():
            link.memory.send_bytes(told)
            for descriptor, _ in self._made.values():
                send_handle(link.memory, descriptor, 0)
        for descriptor, _ in self._made.values():
            os.close(descriptor)
        self._made.clear()


# --- the others -----------------------------------------------------------------------------------


class FollowImages:
    """Writes, codes and hashes this rank's part of each image; rank 0 has `LeadImages`."""

    def __init__(
        self,
        ranks: Ranks,
        specs: tuple[TensorSpec, ...],
        tensors: Weights,
        stream: CopyStream | None,
    ) -> None:
        """Meet rank 0.

        Args:
            ranks: all of them.
            specs: where each tensor lies in an image.
            tensors: this rank's.
            stream: see `begin_to_write`.
        """
        self._stream = stream
        self._spans = spans_of(specs, tensors, ranks.rank, ranks.size)
        self._memory: dict[int, Bytes] = {}
        """By number."""
        meeting = reach(ranks)
        self._link = meeting.links.get(0)
        self._far = None if self._link else FarRows(self._spans, stream, meeting.far)
        self._thread = ThreadPoolExecutor(1, "image")
        self._sending: Future[None] | None = None
        if self._link is not None:
            num_threads = max(1, min(16, (os.cpu_count() or 1) // ranks.size))
            # It ends with the process, or with rank 0.
            answering = threading.Thread(
                target=self._answer, args=(self._link.coding, num_threads), daemon=True
            )
            answering.start()

    def write(self, tensors: Weights) -> None:
        """Begin to write this rank's rows of the next image.

        Raises:
            OSError: if rank 0 is gone.
        """
        if self._far is not None:
            send = self._far.begin(tensors)
        else:
            assert self._link is not None
            room = host_bytes(self._hear(self._link.memory).data)
            places = [(span, room[span.start : span.stop]) for span in self._spans]
            wait = begin_to_write(places, tensors, self._stream)
            send = partial(_say_written, wait, self._link.memory)
        self._sending = self._thread.submit(send)

    def check(self) -> None:
        """Look what has come of the rows.

        Raises:
            RankError: if they could not be written, or sent.
        """
        sent = self._sending
        if sent and sent.done() and (error := sent.exception()) is not None:
            raise RankError(f"rows of a version: {error}") from error

    def _hear(self, connection: _Socket) -> Bytes:
        """Return the memory that rank 0 wants the next image in."""
        told = _memory_decoder.decode(connection.recv_bytes())
        for number, num_bytes in told.made:
            descriptor = recv_handle(connection)
            self._memory[number] = pinned(map_shared(descriptor, num_bytes))
            os.close(descriptor)
        for number in self._memory.keys() - told.live:
            del self._memory[number]
        return self._memory[told.image]

    def _answer(self, coding: _Socket, num_threads: int) -> None:
        """Code and hash what rank 0 asks for until it is gone."""
        pool = ThreadPoolExecutor(num_threads, "coder")
        with coding, pool, suppress(OSError, EOFError):
            while True:
                asked = _asked_decoder.decode(coding.recv_bytes())
                image = self._memory[asked.image].data
                answered: list[CodedBlock] | ChunkHashes
                if isinstance(asked, AskedHashes):
                    chunks = range(asked.first, asked.stop)
                    answered = hash_chunks(image, asked.chunk_bytes, chunks, asked.key)
                else:
                    base = None if asked.base is None else self._memory[asked.base].data
                    answered = list(pool.map(partial(code_block, base, image), asked.blocks))
                coding.send_bytes(_encode(answered))


def _say_written(wait: Callable[[], None], memory: _Socket) -> None:
    """Tell rank 0 that this rank's rows are in the image."""
    wait()
    memory.send_bytes(b"")
