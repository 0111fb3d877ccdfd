"""Encoding of token sets (core/token_sets.py), for the network and for disks.

A token set has some ids of the vocabulary for one token. The sets of a rollout of T tokens, with M
ids in all, are encoded as

    T varints    for each token: 0 for TOO_LARGE, 1 for NOT_RECORDED, 1 + n for a set of n ids,
                 MAX_SET_IDS + 1 + n for a set of all ids except n
    M varints    for each id: the difference to the previous id of the set, minus 1; for the
                 first id of a set, the id itself
    M bfloat16   the log-probabilities, little-endian, rounded to nearest; only if the sets have any

A varint has 7 bits of a number in each byte, the lowest bits first. The highest bit is set in every
byte except the last byte of the number. Most differences take one or two bytes.

A rollout has two blocks, one for each kind of set: `support`, the ids that could be drawn, without
log-probabilities; and `likely`, the most likely ids, with log-probabilities. A block without sets
is empty. A group is one message. If the blocks would exceed the message's size, the largest sets of
the `support` blocks are left out. The blocks of all rollouts follow the other arrays of the group
(codec.py, leases/partials.py). The group's header has the lengths of both blocks for each rollout,
or no lengths if no rollout has sets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from echo.core.bounds import MAX_PAYLOAD_BYTES
from echo.core.errors import RemoteProtocolError
from echo.core.rollout import Tokens
from echo.core.token_sets import MAX_LACKING_IDS, MAX_SET_IDS, TOO_LARGE, TokenSets

_Length = Annotated[int, Meta(ge=0, le=MAX_PAYLOAD_BYTES)]
SetBytes = tuple[_Length, _Length]
"""Sizes of the blocks `support` and `likely` of a rollout, in bytes."""

MAX_IDS = 1 << 22
"""Largest number of ids in the sets of one rollout. Decoding this number of ids takes about 200 MB
for a moment.
"""
_LARGEST = MAX_SET_IDS + 1
"""The largest coded size of a set that is recorded by its own ids.

Larger coded sizes mean sets that are recorded by their missing ids.
"""
_MAX_VARINT_BYTES = 5
"""Size of the largest varint in bytes; ids have 31 bits."""


def encode_all_sets(rollouts: Sequence[Tokens], *, max_bytes: int) -> list[tuple[bytes, bytes]]:
    """Return the blocks `support` and `likely` of each rollout.

    Args:
        rollouts: the rollouts of a group.
        max_bytes: the largest size of all blocks together. If the blocks exceed this size, or a
            rollout exceeds MAX_IDS, the largest `support` sets are left out and marked TOO_LARGE.
    """
    likely = [encode_sets(rollout.likely) for rollout in rollouts]
    max_ids, supports = MAX_SET_IDS, [rollout.support for rollout in rollouts]
    while True:
        if all(sets is None or len(sets.ids) <= MAX_IDS for sets in supports):
            blocks = [encode_sets(support) for support in supports]
            if sum(map(len, blocks + likely)) <= max_bytes or not max_ids:
                return list(zip(blocks, likely, strict=True))
        max_ids //= 2
        supports = [None if sets is None else sets.within(max_ids) for sets in supports]


def bytes_of_sets(blocks: Sequence[tuple[bytes, bytes]]) -> tuple[SetBytes, ...]:
    """Return the sizes in bytes of each rollout's two blocks; () if all blocks are empty."""
    lengths = tuple((len(support), len(likely)) for support, likely in blocks)
    return lengths if any(map(any, lengths)) else ()


def decode_all_sets(
    blocks: memoryview, num_tokens: Sequence[int], set_bytes: Sequence[SetBytes]
) -> Iterator[dict[str, TokenSets | None]]:
    """Decode the blocks of all rollouts; yield `support` and `likely` of each rollout.

    Args:
        blocks: the concatenated blocks of all rollouts, with the sizes in `set_bytes`.
        num_tokens: the number of tokens of each rollout.
        set_bytes: the result of `bytes_of_sets`, whose length the caller has checked.

    Raises:
        RemoteProtocolError: if a block is malformed.
    """
    offset = 0
    for length, sizes in zip(num_tokens, set_bytes or itertools.repeat((0, 0)), strict=False):
        fields: dict[str, TokenSets | None] = {}
        for name, size in zip(("support", "likely"), sizes, strict=True):
            fields[name] = decode_sets(
                blocks[offset : offset + size],
                num_tokens=length,
                with_logprobs=name == "likely",
            )
            offset += size
        yield fields


def encode_sets(sets: TokenSets | None) -> bytes:
    """Return the block of a rollout's sets; an empty block for None."""
    if sets is None:
        return b""
    sizes = sets.sizes.astype(np.int64)
    coded_sizes = np.where(sets.lacks, _LARGEST + TOO_LARGE - sizes, sizes + 1)
    numbers = np.concatenate([coded_sizes, _differences(sets)])
    logprobs = b"" if sets.logprobs is None else _round(sets.logprobs).tobytes()
    return _encode_varints(numbers) + logprobs


def decode_sets(block: memoryview, *, num_tokens: int, with_logprobs: bool) -> TokenSets | None:
    """Return the sets in a block; None if the block is empty.

    Raises:
        RemoteProtocolError: if the block is not for `num_tokens` tokens, or contains an invalid
            set.
    """
    if not len(block):
        return None
    data = np.frombuffer(block, np.uint8)
    coded_sizes, offset = _decode_varints(data, num_tokens)
    if int(coded_sizes.max()) > _LARGEST + MAX_LACKING_IDS:
        raise RemoteProtocolError(
            f"a token set of coded size {coded_sizes.max()}; at most {_LARGEST + MAX_LACKING_IDS}"
        )
    lacking = coded_sizes - _LARGEST
    sizes = np.where(lacking > 0, TOO_LARGE - lacking, coded_sizes - 1).astype(np.int32)
    counts = np.where(lacking > 0, lacking, np.maximum(sizes, 0))
    num_ids = int(counts.sum(dtype=np.int64))
    if num_ids > MAX_IDS:
        raise RemoteProtocolError(f"token sets of {num_ids} ids in all; at most {MAX_IDS}")
    differences, num_bytes = _decode_varints(data[offset:], num_ids)
    offset += num_bytes
    expected = offset + (2 * num_ids if with_logprobs else 0)
    if len(data) != expected:
        raise RemoteProtocolError(
            f"token sets of {len(data)} bytes where their sizes need {expected}"
        )
    logprobs = None
    if with_logprobs:
        halves = np.frombuffer(block, "<u2", num_ids, offset)
        logprobs = (halves.astype(np.uint32) << 16).view(np.float32)
    ids = _ids(counts, differences)
    if num_ids and int(ids.max()) > np.iinfo(np.int32).max:
        raise RemoteProtocolError(f"token sets with id {ids.max()}")
    try:
        return TokenSets(sizes=sizes, ids=ids.astype(np.int32), logprobs=logprobs)
    except ValueError as error:
        raise RemoteProtocolError(f"malformed token sets: {error}") from error


def _differences(sets: TokenSets) -> npt.NDArray[np.int64]:
    """Return, for each id, the id minus the previous id of the set, minus 1; [M].

    For the first id of a set, the value is the id itself.
    """
    ids = sets.ids.astype(np.int64)
    differences = np.diff(ids, prepend=-1) - 1
    firsts = _firsts(sets.counts)
    differences[firsts] = ids[firsts]
    return differences


def _ids(
    counts: npt.NDArray[np.int64], differences: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the ids of all sets from the result of `_differences`.

    `counts` has the number of ids in each set.
    """
    steps = np.cumsum(differences + 1)
    firsts = _firsts(counts)
    before = steps[firsts] - (differences[firsts] + 1)
    ids: npt.NDArray[np.int64] = steps - 1 - np.repeat(before, counts[counts > 0])
    return ids


def _firsts(counts: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Return the index of the first id of each nonempty set, among the ids of all sets."""
    ends = np.cumsum(counts, dtype=np.int64)
    firsts: npt.NDArray[np.int64] = (ends - counts)[counts > 0]
    return firsts


def _encode_varints(numbers: npt.NDArray[np.int64]) -> bytes:
    lengths = np.ones(len(numbers), np.int64)
    for place in range(1, _MAX_VARINT_BYTES):
        lengths += numbers >> 7 * place > 0
    ends = np.cumsum(lengths)
    encoded = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    for place in range(_MAX_VARINT_BYTES):
        has = lengths > place
        bits = (numbers[has] >> 7 * place) & 0x7F | (lengths[has] > place + 1) * 0x80
        encoded[(ends - lengths)[has] + place] = bits
    return encoded.tobytes()


def _decode_varints(data: npt.NDArray[np.uint8], count: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return the first `count` varints, and their total number of bytes.

    Raises:
        RemoteProtocolError: if the data has fewer than `count` varints, or a varint is too long.
    """
    ends = np.flatnonzero(data[: count * _MAX_VARINT_BYTES] < 0x80)[:count] + 1
    if len(ends) < count:
        raise RemoteProtocolError("token sets that end early, or a number in them is too long")
    starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    lengths = ends - starts
    if count and int(lengths.max()) > _MAX_VARINT_BYTES:
        raise RemoteProtocolError("token sets with a number that is too long")
    numbers = np.zeros(count, np.int64)
    for place in range(_MAX_VARINT_BYTES):
        has = lengths > place
        numbers[has] |= (data[starts[has] + place].astype(np.int64) & 0x7F) << (7 * place)
    return numbers, int(ends[-1]) if count else 0


def _round(logprobs: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of each number rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = logprobs.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = np.uint32(0x7FC0)
    return np.where(np.isnan(logprobs), nan, rounded).astype("<u2")
