"""What a node keeps, what it drops, and what it says of it."""

from __future__ import annotations

from echo.core.rollout import PolicyVersion
from echo.weights.manifest import encode_signed
from echo.weights.store import MAX_ENCODED_VERSIONS, EncodedVersion, ItemStore, Transfer
from echo.wire.messages import FULL, EncodedVersionOffer
from tests.weights.encoded_versions import (
    IMAGE_BYTES,
    coded,
    described,
    encoded_of,
    form_on,
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
    for item in store.expendable(keep):  # type: ignore[arg-type]
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
        encoded._parts[0].table = encoded._parts[0].table.__replace__(block_sizes=(1,))  # type: ignore[attr-defined]
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
    encoded = store.encoded_versions[item]
    image = None
    for table, frame, payload in coded(2, 1):
        first = encoded.num_chunks
        assert store.add_segment(encoded, table, frame) == ""
        for index in range(first, encoded.num_chunks):
            start = (index - first) * table.chunk_bytes
            encoded.hold(index, payload[start : start + encoded.chunk_size(index)])
            for work in store.decodable(encoded, index):
                assert work.run() == ""
                image = encoded.decoded(work)
    assert image is not None
    store.end_decoding(image)
    store.drop(item)
    assert rooms.live == {v(2): encode_signed(described(2)[0])}
    assert bytes(store.images[v(2)].storage) == weights(2)
    store.drop((v(2), FULL))
    assert rooms.live == {}


def test_what_is_announced() -> None:
    store = ItemStore(keep_versions=1)
    assert store.announcement() is None
    encoded = store.encoded_versions[v(2), form_on(1)] = encoded_of(2, 1)
    offer = EncodedVersionOffer(v(2), v(1), encoded.num_bytes)
    assert store.announcement() == (v(2), (offer,), None)
    whole(store, 1)
    assert store.announcement() == (v(1), (offer,), encode_signed(described(1)[0]))


def test_the_size_of_chunks_is_a_usual_one_where_nothing_is_known() -> None:
    store = whole(ItemStore(keep_versions=1), 1)
    assert store.chunk_bytes((v(1), FULL)) == 1024
    assert store.chunk_bytes(None) == store.chunk_bytes((v(9), FULL)) == 1 << 20
    store.begin_encoded((v(2), form_on(1)), expected_bytes=5)
    assert store.chunk_bytes((v(2), form_on(1))) == 1 << 20
