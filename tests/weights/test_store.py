"""The store: what is kept and dropped, and how encoded versions are put together."""

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
from echo.core.rollout import PolicyVersion
from echo.weights.delta import split_blocks
from echo.weights.manifest import HASH_BYTES, encode_signed, sign
from echo.weights.store.encoded import DecodeBlock, EncodedVersion, OpenBlock
from echo.weights.store.eviction import MAX_ENCODED_VERSIONS, expendable
from echo.weights.store.items import Transfer
from echo.weights.store.memory import allocate
from echo.weights.store.store import ItemStore
from echo.wire.messages import FULL
from tests.roles.harness import CHUNK_BYTES, KEY, PUBLIC_KEY
from tests.weights.encoded_versions import (
    BLOCK_BYTES,
    IMAGE_BYTES,
    coded,
    described,
    encoded_of,
    form_on,
    key_of,
    signed_frame,
    v,
    weights,
)
from tests.weights.net import Rooms


def whole(store: ItemStore, *steps: int) -> ItemStore:
    """Put whole images into a store."""
    for step in steps:
        signed, manifest = described(step)
        held = bytearray(b"\1") * manifest.num_chunks
        store.images[v(step)] = Transfer(signed, manifest, memoryview(weights(step)), held, 41)
    return store


def begun(store: ItemStore, step: int) -> Transfer:
    store.begin_image(*described(step))
    return store.images[v(step)]


def retire(store: ItemStore, *keep: tuple[PolicyVersion, object]) -> None:
    for item in expendable(store, keep):  # type: ignore[arg-type]
        store.drop(item)


def test_the_newest_whole_images_are_kept_and_what_is_in_use() -> None:
    store = whole(ItemStore(keep_versions=2), 1, 2, 3, 4)
    retire(store, (v(1), FULL))
    assert sorted(store.images) == [v(1), v(3), v(4)]
    assert store.newest_complete == store.newest_known == v(4)


def test_the_newest_image_is_kept_half_as_it_is_and_an_older_half_is_not() -> None:
    store = whole(ItemStore(keep_versions=1), 1)
    begun(store, 2)
    begun(store, 3)
    retire(store)
    assert sorted(store.images) == [v(1), v(3)]
    assert store.newest_complete == v(1)
    assert store.newest_known == v(3)


def test_where_space_is_lacking_the_newest_whole_image_and_what_is_in_use_stay() -> None:
    store = whole(ItemStore(keep_versions=2), 1, 2, 3)
    begun(store, 4)
    assert expendable(store, [(v(1), FULL)]) == []
    dropped = expendable(store, [(v(1), FULL)], lacks_space=True)
    assert dropped == [(v(2), FULL), (v(4), FULL)]
    assert expendable(store, [(v(4), FULL)], lacks_space=True) == [(v(1), FULL), (v(2), FULL)]


def test_a_keyframe_and_the_deltas_on_top_of_it_are_kept_until_they_exceed_an_image() -> None:
    store = whole(ItemStore(keep_versions=1), 6)
    store.encoded_versions[v(1), form_on(None)] = encoded_of(1, None)
    for step in range(1, 7):
        store.encoded_versions[v(step), form_on(step - 1)] = encoded_of(step, step - 1)
    retire(store)
    kept = [step for step in range(1, 7) if (v(step), form_on(step - 1)) in store.encoded_versions]
    sizes = {step: store.encoded_versions[v(step), form_on(step - 1)].num_bytes for step in kept}
    assert 2 <= len(kept) < 6
    assert kept == list(range(kept[0], 7))
    assert sum(sizes.values()) <= IMAGE_BYTES
    assert sum(sizes.values()) + encoded_of(kept[0] - 1, kept[0] - 2).num_bytes > IMAGE_BYTES
    assert (v(1), form_on(None)) in store.encoded_versions
    store.encoded_versions[v(6), form_on(None)] = encoded_of(6, None)
    retire(store)
    assert [item for item in store.encoded_versions if item[1].base is None] == [
        (v(6), form_on(None))
    ]


def test_the_number_of_encoded_versions_is_bounded_however_small_they_are() -> None:
    store = whole(ItemStore(keep_versions=1), 1)
    small = coded(2, 1, blocks_per_segment=100)[0]
    for step in range(2, 200):
        encoded = store.encoded_versions[v(step), form_on(step - 1)] = EncodedVersion(
            v(step), form_on(step - 1)
        )
        encoded.add(small[0], small[1], memoryview(b""))
        last = small[0].num_blocks_in_image - 1
        encoded._parts[0].table = msgspec.structs.replace(
            small[0], first_block=last, block_sizes=(1,)
        )
    retire(store)
    assert len(store.encoded_versions) == MAX_ENCODED_VERSIONS
    assert min(store.encoded_versions) == (
        v(200 - MAX_ENCODED_VERSIONS),
        form_on(199 - MAX_ENCODED_VERSIONS),
    )


def test_what_the_learner_is_coding_is_never_dropped() -> None:
    store = whole(ItemStore(keep_versions=1), 2)
    for base in (1, 0, None):
        store.encoded_versions[v(2), form_on(base)] = encoded_of(2, base, num_pieces=1)
        store.encoded_versions[v(2), form_on(base)].expected_bytes = IMAGE_BYTES
    retire(store)
    assert len(store.encoded_versions) == 3


def test_an_encoded_that_was_given_up_is_dropped_with_the_room_for_its_image() -> None:
    rooms = Rooms()
    store = whole(ItemStore(keep_versions=1, version_store=rooms), 1)
    for step in (2, 3):
        item = (v(step), form_on(1))
        store.begin_encoded(item, expected_bytes=10)
        table, frame, _ = coded(step, 1)[0]
        assert store.add_segment(store.encoded_versions[item], table, frame) == ""
    store.begin_encoded((v(4), form_on(1)), expected_bytes=10)
    retire(store, (v(3), form_on(1)))
    assert list(store.encoded_versions) == [(v(3), form_on(1))]
    assert list(rooms.live) == [v(3)]


def test_an_image_that_comes_out_of_an_encoded_outlives_it() -> None:
    rooms = Rooms()
    store = whole(ItemStore(keep_versions=1, version_store=rooms), 1)
    item = (v(2), form_on(1))
    store.begin_encoded(item, expected_bytes=10)
    encoded, is_whole = store.encoded_versions[item], False
    for table, frame, payload in coded(2, 1):
        first = encoded.num_chunks
        assert store.add_segment(encoded, table, frame) == ""
        for index in range(first, encoded.num_chunks):
            start = (index - first) * table.chunk_bytes
            encoded.put(index, payload[start : start + encoded.chunk_size(index)])
            encoded.mark(index)
            for work in store.decodable(encoded, index):
                assert work.run() == ""
                is_whole = encoded.decoded(work)
    assert is_whole
    store.end_decoding(encoded)
    store.drop(item)
    assert rooms.live == {v(2): encode_signed(described(2)[0])}
    assert bytes(store.images[v(2)].storage) == weights(2)
    store.drop((v(2), FULL))
    assert rooms.live == {}


def test_the_size_of_chunks_is_a_usual_one_where_nothing_is_known() -> None:
    store = whole(ItemStore(keep_versions=1), 1)
    assert store.chunk_bytes((v(1), FULL)) == 1024
    assert store.chunk_bytes(None) == store.chunk_bytes((v(9), FULL)) == 1 << 20
    store.begin_encoded((v(2), form_on(1)), expected_bytes=5)
    assert store.chunk_bytes((v(2), form_on(1))) == 1 << 20


# --- encoded versions -----------------------------------------------------------------------------

verified = functools.partial(
    EncodedVersion.verify, public_key=PUBLIC_KEY, run_id="run", max_bytes=IMAGE_BYTES
)


def receiver(num_pieces: int, base: int | None = 0) -> EncodedVersion:
    """Return v1 on its way, with its first tables and no chunk."""
    encoded = EncodedVersion(v(1), form_on(base))
    for _, frame, _ in coded(1, base)[:num_pieces]:
        encoded.add(verified(encoded, frame), frame)
    encoded.storage = allocate(IMAGE_BYTES)
    return encoded


def payloads(encoded: EncodedVersion, base: int | None = 0) -> list[memoryview]:
    """Return all chunks of v1, in order."""
    return [
        payload[start : start + CHUNK_BYTES]
        for _, _, payload in coded(1, base)
        for start in range(0, len(payload), CHUNK_BYTES)
    ]


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
        (FIRST, {"key_hash": HASH}, "not the one which the learner drew"),
        (FIRST, {"key_hash": HASH * 2}, "not the one which the learner drew"),
        (MIDDLE, {"key_hash": b""}, "layout"),
        (LAST, {"result_hashes": HASH * 9}, "another image"),
        (LAST, {"manifest": encode_signed(described(2)[0])}, "another image"),
        (LAST, {"manifest": b"junk"}, "malformed manifest"),
    ],
)
def test_every_lie_of_a_table_is_refused(place: int, lie: dict[str, Any], match: str) -> None:
    table = coded(1, 0)[place][0]
    encoded = receiver(place)
    with pytest.raises(RemoteProtocolError, match=match):
        verified(encoded, signed_frame(msgspec.structs.replace(table, **lie)))
    assert encoded.num_segments == place
    verified(encoded, signed_frame(table))


@pytest.mark.parametrize(
    ("place", "lie", "match"),
    [
        (FIRST, {"old_hashes": HASH * 3}, "old hashes"),
        (FIRST, {"old_hashes": HASH * 5}, "old hashes"),
        (FIRST, {"old_hashes": HASH * 4 + b"x"}, "old hashes"),
        (FIRST, {"result_hashes": HASH * 16}, "result hashes"),
        (FIRST, {"old_hashes": b""}, "result hashes"),
        (MIDDLE, {"old_hashes": b"", "result_hashes": HASH * 16}, "layout"),
        (LAST, {"manifest": encode_signed(described(1)[0])}, "do not follow"),
    ],
)
def test_every_lie_of_a_table_on_its_base_is_refused(
    place: int, lie: dict[str, Any], match: str
) -> None:
    pieces = coded(1, 0, is_on_base=True)
    encoded = EncodedVersion(v(1), form_on(0))
    for _, frame, _ in pieces[:place]:
        encoded.add(verified(encoded, frame), frame)
    with pytest.raises(RemoteProtocolError, match=match):
        verified(encoded, signed_frame(msgspec.structs.replace(pieces[place][0], **lie)))
    verified(encoded, signed_frame(pieces[place][0]))


def test_a_keyframe_has_no_base_to_say_anything_about() -> None:
    table = msgspec.structs.replace(coded(1, None)[0][0], result_hashes=b"", old_hashes=HASH * 4)
    with pytest.raises(RemoteProtocolError, match="old hashes"):
        verified(EncodedVersion(v(1), form_on(None)), signed_frame(table))


def test_only_the_learner_is_believed() -> None:
    table, frame, _ = coded(1, 0)[0]
    encoded = receiver(0)
    stranger = msgspec.msgpack.encode(sign(table, Ed25519PrivateKey.generate()))
    with pytest.raises(RemoteProtocolError, match="did not sign"):
        verified(encoded, stranger)
    for place in range(0, len(frame), 7):
        damaged = bytearray(frame)
        damaged[place] ^= 1
        with pytest.raises(RemoteProtocolError):
            verified(encoded, damaged)
    for key in (b"", key_of(2, form_on(0))):
        with pytest.raises(RemoteProtocolError, match="not the one which the learner drew"):
            verified(encoded, encode_signed(sign(table, KEY, key)))
    # A manifest is signed by the same key, and is no table.
    with pytest.raises(RemoteProtocolError, match="malformed segment"):
        verified(encoded, encode_signed(described(1)[0]))


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
    assert verified(encoded, signed_frame(table)).num_bytes == IMAGE_BYTES + overhead


# --- chunks and blocks ---------------------------------------------------------------------------


def put(
    encoded: EncodedVersion, index: int, data: bytes | memoryview, base: int | None
) -> list[DecodeBlock | OpenBlock]:
    encoded.put(index, data)
    encoded.mark(index)
    return encoded.decodable(index, None if base is None else memoryview(weights(base)))


@pytest.mark.parametrize("base", [0, None])
@given(seed=st.integers(0, 2**32))
def test_each_block_is_decoded_once_in_any_order_of_chunks(base: int | None, seed: int) -> None:
    chance = random.Random(seed)
    encoded = receiver(0, base)
    waiting, seen = list[DecodeBlock | OpenBlock](), list[int]()
    found: Transfer | None = None
    chunks = payloads(encoded, base)
    order: list[int] = []
    pieces = list(coded(1, base))
    while pieces or order or waiting:
        choice = chance.choice(["table", "chunk", "chunk", "decode"])
        if choice == "table" and pieces:
            _, frame, _ = pieces.pop(0)
            first = encoded.num_chunks
            encoded.add(verified(encoded, frame), frame)
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
            found = encoded.image(None) if encoded.decoded(work) else None
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
        encoded.put(index, data)
        encoded.mark(index)
    index = encoded.num_chunks - 1
    [*_, last] = encoded.decodable(index, memoryview(weights(0)[:-1]))
    assert "base of its own length" in last.run()


def test_a_wrong_hash_of_what_comes_out_is_found_out() -> None:
    pieces = coded(1, 0)
    table = pieces[0][0]
    hashes = HASH + table.result_hashes[HASH_BYTES:]
    encoded = EncodedVersion(v(1), form_on(0))
    frame = signed_frame(msgspec.structs.replace(table, result_hashes=hashes))
    encoded.add(verified(encoded, frame), frame)
    encoded.storage = allocate(IMAGE_BYTES)
    chunks = payloads(encoded)
    works = [work for i in range(encoded.num_chunks) for work in put(encoded, i, chunks[i], 0)]
    assert [bool(work.run()) for work in works] == [True, False, False, False]
