"""Images of versions that all ranks write and code, each a part.

    every rank of rank 0's machine    rounds its rows into the image, in memory that all of them map
    a rank of another machine         rounds them beside, and sends rank 0 what changed since the
                                      version before, PIECE_BYTES of the image at a time
    then, beside the next step        rank 0 deals the blocks of each segment among the ranks of its
                                      machine; each codes its own, and rank 0 signs and sends

Nothing is put together on one rank. Where a row lies in an image depends on the model alone, and a
block codes alike wherever it is coded: versions are those of one process, byte for byte, and deltas
go on after a resume on another number of ranks.

Ranks of a machine meet at a Unix socket that rank 0 listens on: who cannot reach it is on another
one. Two connections stay until a process ends. In the first rank 0 hands over the memory of images,
which has no name and goes with the last process that maps it; in the second it asks for coded
blocks. For a rank that is gone rank 0 codes itself: that the job ends is said elsewhere (ranks.py).

A process alone on a GPU has its image written beside the next step; here the step waits for it.
That the last row is written is known when all ranks have said so, and rows from another machine
come in the process group that the next step needs: both would take groups and threads of their own,
to save what each of N ranks takes to copy the N-th part of a version. The hashes of a whole image
are made by rank 0 alone: its seal follows a delta, and nobody waits for it.

Memory: two images on rank 0's machine, one more while somebody still reads an older one
(`RecycledMemory`), and the coded blocks of a segment or two. On another machine two copies of each
rank's own rows, and one piece. In each rank a piece of 64 MiB, rounded, where the weights are on a
GPU.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
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

from echo.core.rollout import PolicyVersion
from echo.engine.weights import VersionImage, Weights, host_bytes, image_bytes, round_into
from echo.train import sharding
from echo.train.sharding import Ranks
from echo.weights.delta import CodedBlock, WordBytes, code_block, decode_block, word_bytes_of
from echo.weights.manifest import TensorSpec
from echo.weights.store import RecycledMemory, touched_memory

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

    def write(self, place: Tensor, tensor: Tensor) -> None:
        """Round this rank's rows of a tensor into their room, uint8 [stop - start]."""
        round_into(place, self.spec.dtype, sharding.local(tensor).detach())


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

    def __init__(self, spans: Sequence[RowSpan]) -> None:
        """Begin without a version."""
        self._spans = spans
        self._memory = RecycledMemory(2)
        self._last: memoryview | None = None

    def send(self, tensors: Weights) -> None:
        """Round the rows, and send rank 0 what they have become."""
        new = self._memory.take(sum(span.stop - span.start for span in self._spans))
        end = 0
        for span in self._spans:
            begin, end = end, end + span.stop - span.start
            span.write(host_bytes(new[begin:end]), tensors[span.spec.name])
            for start, stop, word_bytes in span.pieces():
                shift = begin - span.start
                coded = code_block(self._last, new, (start + shift, stop + shift, word_bytes)).coded
                dist.send(torch.tensor([len(coded)]), dst=0)
                dist.send(torch.frombuffer(bytearray(coded), dtype=torch.uint8), dst=0)
        self._last = new


def receive_rows(
    rank: int, spans: Sequence[RowSpan], image: memoryview, last: memoryview | None
) -> None:
    """Write what a rank of another machine sends to its places in the image.

    Args:
        rank: which.
        spans: its own.
        image: of this version.
        last: that of the version before; None for the first.
    """
    size = torch.zeros(1, dtype=torch.int64)
    for span in spans:
        for start, stop, _ in span.pieces():
            dist.recv(size, src=rank)
            coded = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(coded, src=rank)
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


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 says of its memory before an image is written; descriptors follow."""

    image: int
    """Number of that which the image is written into."""
    made: tuple[tuple[int, int], ...]
    """Numbers and bytes of what is new, and handed over after this."""
    live: frozenset[int]
    """Numbers of all that is in use."""


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that a rank is asked to code; it answers with a tuple of `CodedBlock`."""

    image: int
    """Number of its memory."""
    base: int | None
    blocks: tuple[tuple[int, int, WordBytes], ...]


_encode = msgspec.msgpack.encode
_memory_decoder = msgspec.msgpack.Decoder(Memory)
_asked_decoder = msgspec.msgpack.Decoder(Asked)
_coded_decoder = msgspec.msgpack.Decoder(list[CodedBlock])

_Socket: TypeAlias = "Connection[bytes, bytes]"


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """What connects rank 0 and another rank of its machine."""

    memory: _Socket
    coding: _Socket


def accept(ranks: Ranks) -> dict[int, Link]:
    """Return the ranks of this machine with their links; rank 0 calls this, the others `reach`."""
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
    return {rank: Link(**connections) for rank, connections in sorted(found.items())}


def reach(ranks: Ranks) -> Link | None:
    """Return the link with rank 0; None from another machine."""
    address = ranks.gather(b"")[0].decode()
    link = None
    with suppress(OSError):
        link = Link(Client(address, "AF_UNIX"), Client(address, "AF_UNIX"))
        link.memory.send_bytes(f"{ranks.rank} memory".encode())
        link.coding.send_bytes(f"{ranks.rank} coding".encode())
    ranks.gather(b"" if link is None else b"near")
    return link


# --- rank 0 ---------------------------------------------------------------------------------------


class LeadImages:
    """Makes one image after the other, with the other ranks, each of which has `FollowImages`."""

    def __init__(
        self,
        ranks: Ranks,
        specs: tuple[TensorSpec, ...],
        together: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Meet the others.

        Args:
            ranks: all of them.
            specs: where each tensor lies in an image.
            together: within it all of them write an image.
        """
        self._ranks, self._specs, self._together = ranks, specs, together
        self._links = accept(ranks)
        self._pieces: weakref.WeakValueDictionary[int, Bytes] = weakref.WeakValueDictionary()
        self._made: dict[int, tuple[int, int]] = {}
        """Descriptor and bytes of memory that the others do not have yet, by number."""
        self._num_made = 0
        self._memory = RecycledMemory(2, self._make_piece if self._links else touched_memory)
        self._last: memoryview | None = None
        self.helpers = tuple(partial(self._ask, link.coding) for link in self._links.values())
        """One for each other rank of this machine: codes blocks there, and returns them."""

    def make(self, weights: Weights, version: PolicyVersion) -> VersionImage:
        """Return the image of a version; the weights are free to change afterwards.

        Args:
            weights: of this rank, cut up.
            version: its name.

        Raises:
            RankError: if another rank is gone.
        """
        image = self._memory.take(image_bytes(self._specs))
        with self._together():
            self._tell(image)
            place = host_bytes(image)
            for span in spans_of(self._specs, weights, 0, self._ranks.size):
                span.write(place[span.start : span.stop], weights[span.spec.name])
            for rank in range(1, self._ranks.size):
                if rank not in self._links:
                    spans = spans_of(self._specs, weights, rank, self._ranks.size)
                    receive_rows(rank, spans, image, self._last)
            self._ranks.add_up(0.0)  # until all of them have written theirs
        self._last = image
        return VersionImage(self._specs, image)

    def _make_piece(self, num_bytes: int) -> Bytes:
        descriptor, piece = new_memory(num_bytes)
        self._num_made += 1
        self._made[self._num_made] = descriptor, num_bytes
        self._pieces[self._num_made] = piece
        return piece

    def _number(self, image: memoryview) -> int:
        """Return the number of the memory that an image lies in; 0 for any other memory."""
        address = np.frombuffer(image, np.uint8).ctypes.data
        places = {piece.ctypes.data: number for number, piece in self._pieces.items()}
        return places.get(address, 0)

    def _tell(self, image: memoryview) -> None:
        """Tell the ranks of this machine where an image is to be written."""
        made = tuple((number, num_bytes) for number, (_, num_bytes) in self._made.items())
        told = _encode(Memory(self._number(image), made, frozenset(self._pieces)))
        for link in self._links.values():
            link.memory.send_bytes(told)
            for descriptor, _ in self._made.values():
                send_handle(link.memory, descriptor, 0)
        for descriptor, _ in self._made.values():
            os.close(descriptor)
        self._made.clear()

    def _ask(
        self,
        coding: _Socket,
        image: memoryview,
        base: memoryview | None,
        blocks: Sequence[tuple[int, int, WordBytes]],
    ) -> list[CodedBlock]:
        """Have another rank code blocks of an image; do it here, if that rank is gone."""
        asked = Asked(
            self._number(image), None if base is None else self._number(base), tuple(blocks)
        )
        try:
            if asked.image and asked.base != 0:
                coding.send_bytes(_encode(asked))
                return _coded_decoder.decode(coding.recv_bytes())
        except (OSError, EOFError):
            pass
        return [code_block(base, image, block) for block in blocks]


# --- the others -----------------------------------------------------------------------------------


class FollowImages:
    """Writes and codes this rank's part of each image; rank 0 has `LeadImages`."""

    def __init__(self, ranks: Ranks, specs: tuple[TensorSpec, ...], tensors: Weights) -> None:
        """Meet rank 0.

        Args:
            ranks: all of them.
            specs: where each tensor lies in an image.
            tensors: this rank's.
        """
        self._ranks = ranks
        self._spans = spans_of(specs, tensors, ranks.rank, ranks.size)
        self._far = FarRows(self._spans)
        self._memory: dict[int, Bytes] = {}
        """By number."""
        self._link = reach(ranks)
        if self._link is not None:
            # It ends with the process, or with rank 0.
            threading.Thread(target=self._code, name="coder", daemon=True).start()

    def write(self, tensors: Weights) -> None:
        """Write this rank's rows of the next image.

        Raises:
            OSError: if rank 0 is gone.
        """
        if self._link is None:
            self._far.send(tensors)
        else:
            place = host_bytes(self._hear(self._link.memory).data)
            for span in self._spans:
                span.write(place[span.start : span.stop], tensors[span.spec.name])
        self._ranks.add_up(0.0)

    def _hear(self, connection: _Socket) -> Bytes:
        """Return the memory that rank 0 wants the next image in."""
        told = _memory_decoder.decode(connection.recv_bytes())
        for number, num_bytes in told.made:
            descriptor = recv_handle(connection)
            self._memory[number] = map_shared(descriptor, num_bytes)
            os.close(descriptor)
        for number in self._memory.keys() - told.live:
            del self._memory[number]
        return self._memory[told.image]

    def _code(self) -> None:
        """Code what rank 0 asks for until it is gone."""
        assert self._link is not None
        num_threads = max(1, min(16, (os.cpu_count() or 1) // self._ranks.size))
        pool = ThreadPoolExecutor(num_threads, "coder")
        with self._link.coding as coding, pool, suppress(OSError, EOFError):
            while True:
                asked = _asked_decoder.decode(coding.recv_bytes())
                image = self._memory[asked.image].data
                base = None if asked.base is None else self._memory[asked.base].data
                coded = list(pool.map(partial(code_block, base, image), asked.blocks))
                coding.send_bytes(_encode(coded))
