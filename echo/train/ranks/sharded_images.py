"""Images of versions. Each rank writes, codes and hashes a part of each image.

    every rank of rank 0's machine    rounds its rows into the image, in shared memory
    a rank of another machine         rounds its rows into its own memory, and sends rank 0 the
                                      changes since the version before, in pieces of PIECE_BYTES
    once all rows have arrived        rank 0 divides the blocks of each segment among the ranks of
                                      its machine, which code them; rank 0 signs and sends
    after that, for the seal          each rank of the machine hashes and encrypts its part of the
                                      chunks

All of this happens during the next step. On a CPU, the step waits until this rank's rows are
rounded. On a GPU, another stream copies the rows to pinned memory, and the optimizer waits for this
stream. Rows from another machine travel in a separate process group, since the next step uses the
default group.

No rank gathers the model. The bytes of a version do not depend on the number of ranks, so deltas
continue after a resume on another number of ranks.

Each rank tries to connect to a Unix socket of rank 0. A rank that cannot connect is on another
machine. A rank on rank 0's machine keeps two connections. On the first connection, rank 0 sends the
memory of images, and gets a message when rows are written. The memory has no name, so the system
frees it with the last process that maps it. On the second connection, rank 0 requests coded blocks
and hashes. If a rank's process has ended, rank 0 does the work of this rank until rank_group.py
ends the job.

Memory: rank 0's machine holds two images, a third image while an older image is still read
(`RecycledMemory`), and the coded blocks of one or two segments. On another machine, each rank holds
two copies of its own rows, and one piece of PIECE_BYTES. If the weights are on a GPU, each rank
also has a rounded piece of 64 MiB, and rows are copied to pinned memory.
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
from echo.core.rollout import KEEP_VERSIONS, PolicyVersion
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
from echo.weights.store.memory import RecycledMemory

PIECE_BYTES = 4 << 20
"""Number of image bytes that a rank on a different machine sends to rank 0 at a time."""

Bytes = npt.NDArray[np.uint8]


# --- rows of an image -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The range of bytes in an image where one rank's rows of a tensor lie."""

    spec: TensorSpec
    start: int
    stop: int

    def pieces(self) -> Iterator[tuple[int, int, WordBytes]]:
        """Yield the start, end and word size of each piece of the span, in bytes."""
        for first in range(self.start, self.stop, PIECE_BYTES):
            last = min(first + PIECE_BYTES, self.stop)
            yield first, last, word_bytes_of([self.spec], first, last)


def begin_to_write(
    places: Iterable[tuple[RowSpan, Tensor]], tensors: Weights, stream: CopyStream | None
) -> Callable[[], None]:
    """Begin to round this rank's rows into their places; return a function that waits for the end.

    Args:
        places: each span with its memory, uint8 [stop - start] on the host.
        tensors: this rank's weights by name.
        stream: CUDA stream for copies from a GPU; the optimizer has to wait for this stream. None
            to copy before returning.
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
    # A thread that waits for such an event sleeps; otherwise it would keep a core busy.
    copied: torch.cuda.Event = stream.record_event(torch.cuda.Event(blocking=True))
    return copied.synchronize


def spans_of(specs: Sequence[TensorSpec], tensors: Weights, rank: int, size: int) -> list[RowSpan]:
    """Return the spans that a rank writes: its rows, and on rank 0 all unsharded tensors.

    Args:
        specs: the place of each tensor in the image.
        tensors: the weights of any rank by name, sharded or unsharded.
        rank: the rank that writes the spans.
        size: number of ranks.
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


class RemoteRows:
    """Sends the changed rows of this rank to rank 0, which runs on a different machine."""

    def __init__(
        self, spans: Sequence[RowSpan], stream: CopyStream | None, group: dist.ProcessGroup | None
    ) -> None:
        """Allocate memory for the rows of two versions.

        Args:
            spans: this rank's rows.
            stream: see `begin_to_write`.
            group: the process group to send rows in.
        """
        self._spans, self._stream, self._group = spans, stream, group
        self._ends = list(accumulate((span.stop - span.start for span in spans), initial=0))
        self._memory = RecycledMemory(2, image_memory)
        self._last: memoryview | None = None

    def begin(self, tensors: Weights) -> Callable[[], None]:
        """Begin to round the rows of a version; return a function that completes the work.

        The function waits for the rows, and sends the changes to rank 0.
        """
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
    """Receive the rows of a rank on a different machine, and write them into the image.

    Args:
        rank: the rank that sends the rows.
        spans: the spans of the sender's rows.
        image: image of this version.
        last: image of the previous version; None for the first version.
        group: the process group for rows of other machines.
    """
    size = torch.zeros(1, dtype=torch.int64)
    for span in spans:
        for start, stop, _ in span.pieces():
            dist.recv(size, src=rank, group=group)
            coded = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(coded, src=rank, group=group)
            base = None if last is None else last[start:stop]
            decode_block(coded.numpy().data, base, image[start:stop])


# --- shared memory --------------------------------------------------------------------------------


def new_memory(num_bytes: int) -> tuple[int, Bytes]:
    """Return new shared memory, filled with zeros: (file descriptor, mapping)."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("echo-image")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor, map_shared(descriptor, num_bytes)


def map_shared(descriptor: int, num_bytes: int) -> Bytes:
    """Map the memory of a file descriptor, which may come from another process."""
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)


def address_of(image: memoryview) -> int:
    """Return the address of an image in this process."""
    return np.frombuffer(image, np.uint8).ctypes.data


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's message about the memory of the next image.

    File descriptors follow the message.
    """

    image: int
    """Number of the image's memory area."""
    made: tuple[tuple[int, int], ...]
    """(number, size in bytes) of each new memory area."""
    live: frozenset[int]
    """Numbers of all memory areas in use."""


class AskedBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request to code blocks; the answer is a list of `CodedBlock`."""

    image: int
    """Number of the image's memory area."""
    base: int | None
    blocks: tuple[tuple[int, int, WordBytes], ...]


class AskedHashes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request to hash chunks; the answer is a `ChunkHashes`."""

    image: int
    """Number of the image's memory area."""
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
    """Wait for and return the next message of a rank.

    Raises:
        OSError: if the rank sends no message for COLLECTIVE_S seconds, or the connection breaks.
        EOFError: if the rank's process has ended.
    """
    if not connection.poll(COLLECTIVE_S):
        raise TimeoutError(f"no answer for {COLLECTIVE_S:.0f} s")
    return connection.recv_bytes()


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """The two connections between rank 0 and a second rank on the same machine."""

    memory: _Socket
    coding: _Socket


@dataclass(frozen=True, slots=True, eq=False)
class Rendezvous:
    """Connections of the ranks on rank 0's machine, and the group of ranks on other machines."""

    links: dict[int, Link]
    """On rank 0: links to the ranks on the same machine, by rank. On those ranks: the link to rank
    0.
    """
    remote: dist.ProcessGroup | None
    """Process group for the rows of ranks on other machines; None if there are no such ranks."""


def _remote_group(ranks: Ranks, num_local: int) -> dist.ProcessGroup | None:
    if num_local == ranks.size - 1:
        return None
    group: dist.ProcessGroup = dist.new_group(
        backend="gloo", timeout=timedelta(seconds=COLLECTIVE_S)
    )
    return group


def accept(ranks: Ranks) -> Rendezvous:
    """Wait until the ranks on rank 0's machine have connected.

    Rank 0 calls this function. All other ranks call `reach` at the same time.
    """
    found: dict[int, dict[str, _Socket]] = {}
    # A socket's path has at most some 100 bytes, and schedulers of clusters set longer TMPDIRs.
    place = tempfile.gettempdir() if len(tempfile.gettempdir()) < 64 else "/tmp"
    with tempfile.TemporaryDirectory(prefix="echo-", dir=place) as directory:
        address = str(Path(directory) / "ranks")
        with Listener(address, "AF_UNIX", backlog=2 * ranks.size) as listener:
            ranks.gather(address.encode())
            num_local = ranks.gather(b"").count(b"local")
            for _ in range(2 * num_local):
                connection = listener.accept()
                rank, purpose = connection.recv_bytes().decode().split()
                found.setdefault(int(rank), {})[purpose] = connection
    links = {rank: Link(**connections) for rank, connections in sorted(found.items())}
    return Rendezvous(links, _remote_group(ranks, num_local))


def reach(ranks: Ranks) -> Rendezvous:
    """Connect to rank 0, which must call `accept` at the same time.

    A rank on another machine gets no connection.
    """
    address = ranks.gather(b"")[0].decode()
    links = {}
    with suppress(OSError):
        link = Link(Client(address, "AF_UNIX"), Client(address, "AF_UNIX"))
        link.memory.send_bytes(f"{ranks.rank} memory".encode())
        link.coding.send_bytes(f"{ranks.rank} coding".encode())
        links[0] = link
    num_local = ranks.gather(b"local" if links else b"").count(b"local")
    return Rendezvous(links, _remote_group(ranks, num_local))


# --- rank 0 ---------------------------------------------------------------------------------------


class LocalRank:
    """A rank on rank 0's machine that codes and hashes parts of images for rank 0."""

    def __init__(self, coding: _Socket, numbers: Mapping[int, int]) -> None:
        """Store the connection and the table of memory areas.

        Args:
            coding: the connection for requests.
            numbers: number of each memory area that both processes map, by address in this process.
        """
        self._coding, self._numbers = coding, numbers

    def code(
        self,
        image: memoryview,
        base: memoryview | None,
        blocks: Sequence[tuple[int, int, WordBytes]],
    ) -> list[CodedBlock]:
        """Have the rank code blocks of an image; return the results of `code_block`."""
        number = None if base is None else self._number(base)
        answered = None
        if number != 0:  # the other process does not map memory 0
            answered = self._ask(AskedBlocks(self._number(image), number, tuple(blocks)))
        if answered is None:
            return [code_block(base, image, block) for block in blocks]
        return _coded_decoder.decode(answered)

    def hash(self, image: memoryview, chunk_bytes: int, chunks: range, key: bytes) -> ChunkHashes:
        """Have the rank hash chunks of an image; return the result of `hash_chunks`."""
        asked = AskedHashes(self._number(image), chunk_bytes, chunks.start, chunks.stop, key)
        answered = self._ask(asked)
        if answered is None:
            return hash_chunks(image, chunk_bytes, chunks, key)
        return _hashes_decoder.decode(answered)

    def _number(self, image: memoryview) -> int:
        """Return the number of an image's memory area; 0 if this rank lacks the area."""
        return self._numbers.get(address_of(image), 0)

    def _ask(self, asked: AskedBlocks | AskedHashes) -> bytes | None:
        """Send a request to the rank; return the answer, or None if the rank has failed."""
        if not asked.image or self._coding.closed:
            return None
        try:
            self._coding.send_bytes(_encode(asked))
            return answer(self._coding)
        except (OSError, EOFError):
            self._coding.close()  # otherwise a late answer would pass for the next one
            return None


class LeadImages:
    """Makes images on rank 0. On all other ranks, `FollowImages` makes parts of these images."""

    def __init__(
        self,
        ranks: Ranks,
        specs: tuple[TensorSpec, ...],
        stream: CopyStream | None,
        *,
        together: Callable[[], AbstractContextManager[None]],
        lost: Callable[[BaseException], RankError],
    ) -> None:
        """Connect to the other ranks of this machine, and find the ranks on other machines.

        Args:
            ranks: all ranks of the learner.
            specs: the place of each tensor in an image.
            stream: see `begin_to_write`.
            together: a context manager in which all ranks begin to write an image.
            lost: a function that returns the error for ranks whose rows do not arrive.
        """
        self._ranks, self._specs, self._stream = ranks, specs, stream
        self._together, self._lost = together, lost
        self._rendezvous = accept(ranks)
        self._numbers: dict[int, int] = {}
        """Address of a memory area in use -> number of the area."""
        self._num_made = 0
        self._made: dict[int, tuple[int, int]] = {}
        """Number of a memory area that the other ranks lack -> (file descriptor, size) of the area.
        """
        links = self._rendezvous.links
        self._memory = RecycledMemory(
            2, self._make_piece if links else image_memory, max_pieces=KEEP_VERSIONS + 1
        )
        self._last: memoryview | None = None
        self._thread = ThreadPoolExecutor(1, "image")
        self._ready: Future[CodedDelta | None] | None = None
        self._growing: Future[None] | None = None
        self.helpers = tuple(LocalRank(link.coding, self._numbers) for link in links.values())

    def prepare(self) -> bool:
        """Return whether `make` would run without waiting for memory.

        If memory is lacking, begin an allocation.
        """
        if any(each is not None and not each.done() for each in (self._ready, self._growing)):
            return False
        if self._memory.can_grow and not self._memory.has_free:
            self._growing = self._thread.submit(self._memory.grow)
            return False
        return self._memory.has_free

    def make(self, weights: Weights, version: PolicyVersion) -> VersionImage:
        """Return the image of a version. All ranks write the image during the next step.

        Args:
            weights: this rank's weights, sharded.
            version: the version that the image holds.

        Raises:
            RankError: if another rank's process has ended.
        """
        for each in (self._ready, self._growing):
            if each is not None:
                each.result()
        image, size = self._memory.take(image_bytes(self._specs)), self._ranks.size
        with self._together():
            self._send_memory(image)
            memory = host_bytes(image)
            own = spans_of(self._specs, weights, 0, size)
            places = [(span, memory[span.start : span.stop]) for span in own]
            wait = begin_to_write(places, weights, self._stream)
        remote = {
            rank: spans_of(self._specs, weights, rank, size)
            for rank in range(1, size)
            if rank not in self._rendezvous.links
        }
        self._ready = self._thread.submit(self._receive, wait, remote, image, self._last)
        self._last = image
        return VersionImage(self._specs, image, self._ready)

    def _receive(
        self,
        wait: Callable[[], None],
        remote: Mapping[int, Sequence[RowSpan]],
        image: memoryview,
        last: memoryview | None,
    ) -> CodedDelta | None:
        """Wait until all rows are in the image. Return None, because no delta has been coded.

        Raises:
            RankError: if the rows of a rank do not arrive.
        """
        try:
            wait()
            for link in self._rendezvous.links.values():
                answer(link.memory)
            for rank, spans in remote.items():
                receive_rows(rank, spans, image, last, self._rendezvous.remote)
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
        # Forget the address before the memory is freed: other memory may get the same address.
        weakref.finalize(piece, self._numbers.pop, address).atexit = False
        return piece

    def _send_memory(self, image: memoryview) -> None:
        made = tuple((number, num_bytes) for number, (_, num_bytes) in self._made.items())
        number = self._numbers.get(address_of(image), 0)
        message = _encode(Memory(number, made, frozenset(self._numbers.values())))
        for link in self._rendezvous.links.values():
            link.memory.send_bytes(message)
            for descriptor, _ in self._made.values():
                send_handle(link.memory, descriptor, 0)
        for descriptor, _ in self._made.values():
            os.close(descriptor)
        self._made.clear()


# --- the others -----------------------------------------------------------------------------------


class FollowImages:
    """Writes, codes and hashes this rank's parts of images, for `LeadImages` on rank 0."""

    def __init__(
        self,
        ranks: Ranks,
        specs: tuple[TensorSpec, ...],
        tensors: Weights,
        stream: CopyStream | None,
    ) -> None:
        """Connect to rank 0.

        Args:
            ranks: all ranks of the learner.
            specs: the place of each tensor in an image.
            tensors: this rank's weights by name.
            stream: see `begin_to_write`.
        """
        self._stream = stream
        self._spans = spans_of(specs, tensors, ranks.rank, ranks.size)
        self._memory: dict[int, Bytes] = {}
        """The memory areas of images that this rank maps, by number."""
        rendezvous = reach(ranks)
        self._link = rendezvous.links.get(0)
        self._remote_rows = (
            None if self._link else RemoteRows(self._spans, stream, rendezvous.remote)
        )
        self._thread = ThreadPoolExecutor(1, "image")
        self._sending: Future[None] | None = None
        if self._link is not None:
            num_threads = max(1, min(16, (os.cpu_count() or 1) // ranks.size))
            # The thread ends with this process, or when rank 0's process ends.
            answering = threading.Thread(
                target=self._answer, args=(self._link.coding, num_threads), daemon=True
            )
            answering.start()

    def write(self, tensors: Weights) -> None:
        """Begin to write this rank's rows of the next image.

        Raises:
            OSError: if rank 0's process has ended.
        """
        if self._remote_rows is not None:
            send = self._remote_rows.begin(tensors)
        else:
            assert self._link is not None
            memory = host_bytes(self._receive_memory(self._link.memory).data)
            places = [(span, memory[span.start : span.stop]) for span in self._spans]
            wait = begin_to_write(places, tensors, self._stream)
            send = partial(_report_written, wait, self._link.memory)
        self._sending = self._thread.submit(send)

    def check(self) -> None:
        """Raise an error if the rows of the last image could not be written or sent.

        Raises:
            RankError: if writing or sending failed.
        """
        sent = self._sending
        if sent and sent.done() and (error := sent.exception()) is not None:
            raise RankError(f"rows of a version: {error}") from error

    def _receive_memory(self, connection: _Socket) -> Bytes:
        message = _memory_decoder.decode(connection.recv_bytes())
        for number, num_bytes in message.made:
            descriptor = recv_handle(connection)
            self._memory[number] = pinned(map_shared(descriptor, num_bytes))
            os.close(descriptor)
        for number in self._memory.keys() - message.live:
            del self._memory[number]
        return self._memory[message.image]

    def _answer(self, coding: _Socket, num_threads: int) -> None:
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


def _report_written(wait: Callable[[], None], memory: _Socket) -> None:
    wait()
    memory.send_bytes(b"")
