"""An encoded version is put together in any order, and no lie in its tables is believed."""

from __future__ import annotations

import functools
import random
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import RemoteProtocolError
from echo.weights.delta import split_blocks
from echo.weights.manifest import HASH_BYTES, encode_signed, sign
from echo.weights.store import DecodeBlock, EncodedVersion, Transfer, allocate
from tests.roles.harness import CHUNK_BYTES, PUBLIC_KEY
from tests.weights.encoded_versions import (
    BLOCK_BYTES,
    IMAGE_BYTES,
    coded,
    described,
    form_on,
    signed_frame,
    v,
    weights,
)

verify = functools.partial(
    EncodedVersion.verify, public_key=PUBLIC_KEY, run_id="run", max_bytes=IMAGE_BYTES
)


def receiver(num_pieces: int, base: int | None = 0) -> EncodedVersion:
    """Return v1 on its way, with its first tables and no chunk."""
    encoded = EncodedVersion(v(1), form_on(base))
    for _, frame, _ in coded(1, base)[:num_pieces]:
        encoded.add(verify(encoded, frame), frame)
    encoded.storage = allocate(IMAGE_BYTES)
    return encoded


def payloads(encoded: EncodedVersion, base: int | None = 0) -> list[memoryview]:
    """Return all chunks of v1, in order."""
    return [
        payload[start : start + CHUNK_BYTES]
        for _, _, payload in coded(1, base)
        for start in range(0, len(payload), CHUNK_BYTES)
    ]


# --- tables --------------------------------------------------------------------------------------


FIRST, MIDDLE, LAST = range(3)
HASH = b"x" * HASH_BYTES


def sizes_of(place: int) -> tuple[int, ...]:
    return coded(1, 0)[place][0].block_sizes


@pytest.mark.parametrize(
    ("place", "lie", "match"),
    [
        (FIRST, {"run_id": "other"}, "got"),
        (FIRST, {"version": v(2)}, "got"),
        (FIRST, {"base": v(3)}, "got"),
        (FIRST, {"base": None}, "got"),
        (FIRST, {"index": 1}, "got"),
        (FIRST, {"index": -1}, "got"),
        (MIDDLE, {"index": 2}, "got"),
        (FIRST, {"chunk_bytes": 0}, "chunks of"),
        (FIRST, {"chunk_bytes": 1 << 30}, "chunks of"),
        (FIRST, {"image_chunk_bytes": 1}, "chunks of"),
        (FIRST, {"image_chunk_bytes": 1 << 30}, "chunks of"),
        (FIRST, {"image_bytes": 0}, "accepts at most"),
        (FIRST, {"image_bytes": -5}, "accepts at most"),
        (FIRST, {"image_bytes": IMAGE_BYTES + 1}, "accepts at most"),
        (FIRST, {"image_bytes": 1 << 62}, "accepts at most"),
        (FIRST, {"block_bytes": 0}, "blocks of 0"),
        (FIRST, {"block_bytes": -CHUNK_BYTES}, "blocks of -"),
        (FIRST, {"block_bytes": CHUNK_BYTES + 1}, "blocks of"),
        (FIRST, {"first_block": 1}, "do not follow"),
        (FIRST, {"block_sizes": ()}, "do not follow"),
        (FIRST, {"block_sizes": (1,) * 12}, "do not follow"),
        (FIRST, {"block_sizes": (1,) * 11}, "do not follow"),
        (FIRST, {"manifest": encode_signed(described(1)[0])}, "do not follow"),
        (LAST, {"manifest": None}, "do not follow"),
        (FIRST, {"block_sizes": (0, *sizes_of(FIRST)[1:])}, "empty or longer"),
        (FIRST, {"block_sizes": (-1, *sizes_of(FIRST)[1:])}, "empty or longer"),
        (FIRST, {"block_sizes": (BLOCK_BYTES + 65, *sizes_of(FIRST)[1:])}, "empty or longer"),
        (FIRST, {"result_hashes": HASH * 15}, "result hashes"),
        (FIRST, {"result_hashes": HASH * 17}, "result hashes"),
        (FIRST, {"chunk_hashes": HASH * 40}, "chunk hashes"),
        (FIRST, {"chunk_hashes": b""}, "chunk hashes"),
        (MIDDLE, {"image_bytes": IMAGE_BYTES - 1}, "layout"),
        (MIDDLE, {"chunk_bytes": 2 * CHUNK_BYTES}, "layout"),
        (MIDDLE, {"block_bytes": 2 * BLOCK_BYTES}, "layout"),
        (MIDDLE, {"first_block": 0}, "do not follow"),
        (LAST, {"result_hashes": HASH * 9}, "another image"),
        (LAST, {"manifest": encode_signed(described(2)[0])}, "another image"),
        (LAST, {"manifest": b"junk"}, "malformed manifest"),
    ],
)
def test_every_lie_of_a_table_is_refused(place: int, lie: dict[str, Any], match: str) -> None:
    table = coded(1, 0)[place][0]
    encoded = receiver(place)
    with pytest.raises(RemoteProtocolError, match=match):
        verify(encoded, signed_frame(msgspec.structs.replace(table, **lie)))
    assert encoded.num_segments == place
    verify(encoded, signed_frame(table))


def test_only_the_learner_is_believed() -> None:
    table, frame, _ = coded(1, 0)[0]
    encoded = receiver(0)
    stranger = msgspec.msgpack.encode(sign(table, Ed25519PrivateKey.generate()))
    with pytest.raises(RemoteProtocolError, match="did not sign"):
        verify(encoded, stranger)
    for place in range(0, len(frame), 7):
        damaged = bytearray(frame)
        damaged[place] ^= 1
        with pytest.raises(RemoteProtocolError):
            verify(encoded, damaged)
    # A manifest is signed by the same key, and is no table.
    with pytest.raises(RemoteProtocolError, match="malformed segment"):
        verify(encoded, encode_signed(described(1)[0]))


def test_what_is_taken_for_a_table_is_bounded_by_the_image() -> None:
    """All that a table makes a node allocate is its payload and the image."""
    overhead = 64 * len(split_blocks(IMAGE_BYTES, BLOCK_BYTES))
    sizes = tuple(min(b - a, BLOCK_BYTES) + 64 for a, b in split_blocks(IMAGE_BYTES, BLOCK_BYTES))
    num_chunks = -(-sum(sizes) // CHUNK_BYTES)
    table = msgspec.structs.replace(
        coded(1, 0)[LAST][0],
        index=0,
        first_block=0,
        block_sizes=sizes,
        chunk_hashes=HASH * num_chunks,
        result_hashes=described(1)[1].chunk_hashes,
    )
    encoded = receiver(0)
    assert verify(encoded, signed_frame(table)).num_bytes == IMAGE_BYTES + overhead


# --- chunks and blocks ---------------------------------------------------------------------------


def put(
    encoded: EncodedVersion, index: int, data: bytes | memoryview, base: int | None
) -> list[DecodeBlock]:
    encoded.hold(index, data)
    return encoded.decodable(index, None if base is None else memoryview(weights(base)))


@pytest.mark.parametrize("base", [0, None])
@given(seed=st.integers(0, 2**32))
def test_each_block_is_decoded_once_in_any_order_of_chunks(base: int | None, seed: int) -> None:
    chance = random.Random(seed)
    encoded = receiver(0, base)
    waiting, seen = [], []
    found: Transfer | None = None
    chunks = payloads(encoded, base)
    order: list[int] = []
    pieces = list(coded(1, base))
    while pieces or order or waiting:
        choice = chance.choice(["table", "chunk", "chunk", "decode"])
        if choice == "table" and pieces:
            _, frame, _ = pieces.pop(0)
            first = encoded.num_chunks
            encoded.add(verify(encoded, frame), frame)
            order += range(first, encoded.num_chunks)
            chance.shuffle(order)
        elif choice == "chunk" and order:
            index = order.pop()
            works = put(encoded, index, chunks[index], base)
            waiting += works
            seen += [work.block for work in works]
            assert encoded.decodable(index, None) == []
        elif choice == "decode" and waiting:
            work = waiting.pop(chance.randrange(len(waiting)))
            assert work.run() == ""
            assert found is None
            found = encoded.decoded(work)
    assert sorted(seen) == list(range(11))
    assert found is not None
    assert bytes(found.storage) == weights(1)
    assert found.is_complete
    assert found.manifest == described(1)[1]
    assert encoded.storage is None
    assert encoded.is_complete


@pytest.mark.parametrize("base", [2, None])
def test_a_wrong_base_is_found_out(base: int | None) -> None:
    encoded = receiver(3)
    faults = [
        work.run()
        for i, data in enumerate(payloads(encoded))
        for work in put(encoded, i, data, base)
    ]
    wanted = "needs a base" if base is None else "does not have the hashes"
    assert any(wanted in fault for fault in faults)


def test_a_base_of_another_size_is_found_out() -> None:
    encoded = receiver(3)
    for index, data in enumerate(payloads(encoded)):
        encoded.hold(index, data)
    index = encoded.num_chunks - 1
    [*_, last] = encoded.decodable(index, memoryview(weights(0)[:-1]))
    assert "base of its own length" in last.run()


def test_a_wrong_hash_of_what_comes_out_is_found_out() -> None:
    pieces = coded(1, 0)
    table = pieces[0][0]
    hashes = HASH + table.result_hashes[HASH_BYTES:]
    encoded = EncodedVersion(v(1), form_on(0))
    frame = signed_frame(msgspec.structs.replace(table, result_hashes=hashes))
    encoded.add(verify(encoded, frame), frame)
    encoded.storage = allocate(IMAGE_BYTES)
    chunks = payloads(encoded)
    works = [work for i in range(encoded.num_chunks) for work in put(encoded, i, chunks[i], 0)]
    assert [bool(work.run()) for work in works] == [True, False, False, False]


def test_the_learners_encoded_is_whole_as_soon_as_it_is_coded() -> None:
    encoded = EncodedVersion(v(1), form_on(0))
    assert encoded.is_half
    for number, (table, frame, payload) in enumerate(coded(1, 0)):
        encoded.expected_bytes = 1 << 20
        encoded.add(table, frame, payload)
        assert not encoded.is_half
        assert encoded.is_being_coded == encoded.is_open == (number < 2)
        assert encoded.num_bytes == ((1 << 20) if number < 2 else sum(map(len, payloads(encoded))))
    assert encoded.is_complete
    assert [bytes(encoded.chunk(i)) for i in range(encoded.num_chunks)] == payloads(encoded)
    assert encoded.chunk(0).readonly
