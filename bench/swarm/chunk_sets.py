"""Sets of chunks as integers, and how many neighbours hold each chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from echo.core.errors import RemoteProtocolError


def indices(bits: int) -> Iterator[int]:
    """Yield the members of a set of chunks, ascending; such a set is an integer."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def runs_of(bits: int) -> tuple[int, ...]:
    """Return a set of chunks as start, stop, start, stop, ..."""
    found, at = [], 0
    while bits:
        skipped = (bits & -bits).bit_length() - 1
        bits >>= skipped
        length = (~bits & (bits + 1)).bit_length() - 1
        found += [at + skipped, at + skipped + length]
        bits >>= length
        at += skipped + length
    return tuple(found)


def set_of(runs: tuple[int, ...]) -> int:
    """Return the set of chunks in these runs.

    Raises:
        RemoteProtocolError: if they are not ascending pairs.
    """
    if len(runs) % 2 or any(start >= stop for start, stop in itertools.pairwise(runs)):
        raise RemoteProtocolError("a Have whose runs are not ascending pairs")
    bits = 0
    for start, stop in zip(runs[::2], runs[1::2], strict=True):
        bits |= (1 << stop) - (1 << start)
    return bits


class Rarity:
    """Sets of chunks by how many neighbours hold them."""

    def __init__(self) -> None:
        """Start with nothing held by anybody."""
        self._by_copies: list[int] = [0]

    def add(self, bits: int) -> None:
        """Count one more holder of each of these."""
        by_copies = self._by_copies
        rest = bits
        for copies in range(len(by_copies) - 1, 0, -1):
            moved = by_copies[copies] & bits
            if moved:
                by_copies[copies] ^= moved
                rest ^= moved
                self._put(copies + 1, moved)
        self._put(1, rest)

    def remove(self, bits: int) -> None:
        """Count one holder less of each of these."""
        for copies in range(1, len(self._by_copies)):
            moved = self._by_copies[copies] & bits
            self._by_copies[copies] ^= moved
            self._by_copies[copies - 1] |= moved

    def _put(self, copies: int, bits: int) -> None:
        if copies == len(self._by_copies):
            self._by_copies.append(0)
        self._by_copies[copies] |= bits

    def rarest(self, among: int) -> int:
        """Return those of a set with the fewest holders that are known."""
        for held in self._by_copies[1:]:
            if rare := among & held:
                return rare
        return among
