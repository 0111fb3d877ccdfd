"""A keyframe that a killed process has left is resumed; nothing right is asked for again."""

from __future__ import annotations

import random
from typing import Any

import pytest

from echo.weights.manifest import encode_signed
from echo.weights.store import SavedChunk, TrustedManifests
from echo.wire.actions import Note
from echo.wire.messages import FULL, Announce, Fetch, Subscribe
from tests.roles.harness import PUBLIC_KEY, make_broadcast, message_of
from tests.weights.encoded_versions import coded, form_on, published, v, weights
from tests.weights.net import Pages, Rooms


def trust(run_id: str = "run") -> TrustedManifests:
    made = TrustedManifests()
    made.set(public_key=PUBLIC_KEY, run_id=run_id, max_image_bytes=1 << 20)
    return made


def records_of(step: int, base: int | None = None) -> list[SavedChunk]:
    """Return the journal of an encoded version that came whole, segment by segment."""
    records: list[SavedChunk] = []
    num_chunks = 0
    for table, frame, payload in coded(step, base):
        records.append((None, frame))
        for index in range(table.num_chunks):
            start = index * table.chunk_bytes
            chunk = bytes(payload[start : start + table.chunk_bytes])
            records.append((num_chunks + index, chunk))
        num_chunks += table.num_chunks
    return records


def held(encoded: Any) -> list[int]:
    return [index for index, is_held in enumerate(encoded.has_chunk) if is_held]


def node(*steps: int) -> tuple[Any, Rooms]:
    """Return a node that holds versions whole, and its version stores."""
    rooms = Rooms()
    broadcast = make_broadcast("b", version_store=rooms)
    broadcast.trust(public_key=PUBLIC_KEY, run_id="run", max_image_bytes=1 << 20)
    for step in steps:
        broadcast.publish(*published(step), now=0.0)
    return broadcast, rooms


def left(step: int, num_records: int | None = None) -> Any:
    """Return what is rebuilt of the first records of a journal."""
    encoded = trust().rebuild(v(step), records_of(step)[:num_records])
    encoded.journal = Pages()
    return encoded


# --- what is believed ----------------------------------------------------------------------------


def test_what_was_verified_before_is_right_again_in_whatever_order_it_came() -> None:
    records = records_of(1)
    tables = [record for record in records if record[0] is None]
    chunks = [record for record in records if record[0] is not None]
    random.Random(3).shuffle(chunks)
    encoded = trust().rebuild(v(1), [*tables, *chunks[:5]])
    assert encoded.frames == [frame for _, frame in tables]
    assert held(encoded) == sorted(index for index, _ in chunks[:5] if index is not None)
    assert encoded.num_held == 5
    for index in held(encoded):
        assert bytes(encoded.chunk(index)) == dict(chunks)[index]


def test_wrong_chunks_are_not_held_and_right_ones_behind_them_are() -> None:
    (table, first, second, third, *_) = records_of(1, None)
    assert first[0] is not None
    wrong: list[SavedChunk] = [
        (first[0], bytes(reversed(first[1]))),
        (second[0], second[1][:-1]),
        (10_000, second[1]),
        (third[0], first[1]),
    ]
    encoded = trust().rebuild(v(1), [table, *wrong, third, third, first])
    assert held(encoded) == [0, 2]
    assert encoded.num_held == 2
    assert [bytes(encoded.chunk(index)) for index in (0, 2)] == [first[1], third[1]]


def test_nothing_is_read_behind_a_table_that_the_learner_has_not_signed() -> None:
    records = records_of(1, None)
    where = [number for number, (index, _) in enumerate(records) if index is None]
    bad = [*records]
    bad[where[1]] = (None, bytes(reversed(records[where[1]][1])))
    remaining = iter(bad)
    encoded = trust().rebuild(v(1), remaining)
    assert encoded.num_segments == 1
    assert held(encoded) == list(range(where[1] - 1))
    assert len(list(remaining)) == len(records) - where[1] - 1


@pytest.mark.parametrize(
    ("step", "base", "run_id"), [(2, None, "run"), (1, 0, "run"), (1, None, "another")]
)
def test_the_name_of_a_file_is_not_believed(step: int, base: int | None, run_id: str) -> None:
    encoded = trust(run_id).rebuild(v(step), records_of(1, base))
    assert encoded.num_segments == 0


# --- what becomes of it --------------------------------------------------------------------------


def test_half_a_keyframe_is_decoded_and_the_rest_is_asked_for() -> None:
    broadcast, _ = node()
    encoded = left(1, 8)
    num_held = encoded.num_held
    works = broadcast.resume(encoded, now=0.0)
    assert works, "some blocks can be decoded already"
    for work in works:
        assert work.run() == ""
        broadcast.worked(work, "", now=0.0)
    assert broadcast.progress() == (v(1), num_held, encoded.num_chunks)
    asked = [message_of(action.frames) for action in broadcast.set_parent("a", now=0.0)]
    (fetch,) = [message for message in asked if isinstance(message, Fetch)]
    assert fetch.form == form_on(None)
    assert fetch.num_segments == encoded.num_segments
    assert fetch.ranges[0][0] == num_held
    # The rest comes, and is written down behind what was left.
    for index, data in records_of(1)[8:]:
        if index is None:
            table = broadcast.receiver.trust.segment(encoded, data)
            broadcast.receiver.store.add_segment(encoded, table, data)
        else:
            encoded.hold(index, data)
            for work in broadcast.receiver.store.decodable(encoded, index):
                assert work.run() == ""
                broadcast.worked(work, "", now=0.0)
    assert encoded.journal.records == records_of(1)[8:]
    assert broadcast.newest_complete == v(1)
    assert bytes(broadcast.store[v(1)].storage) == weights(1)


def test_a_whole_keyframe_whose_image_was_not_done_is_decoded_without_a_parent() -> None:
    broadcast, _ = node(0)
    for work in broadcast.resume(left(1), now=0.0):
        broadcast.worked(work, work.run(), now=0.0)
    assert broadcast.newest_complete == v(1)
    assert broadcast.fetching is None


def test_whole_keyframes_of_versions_that_are_here_are_served_again() -> None:
    broadcast, _ = node(1, 2)
    for step in (2, 1):
        assert broadcast.resume(left(step), now=0.0) == []
    assert set(broadcast.encoded_versions) == {(v(2), form_on(None)), (v(1), form_on(None))}
    assert broadcast.fetching is None
    answers = broadcast.receive("c", Subscribe(newest=None), [], now=0.0)
    (announce,) = [message_of(action.frames) for action in answers]
    assert isinstance(announce, Announce)
    assert {offer.version for offer in announce.offers} == {v(1), v(2)}


@pytest.mark.parametrize(
    ("num_records", "here"),
    [
        (0, []),  # without a table
        (8, [1]),  # the version came in another form
        (8, [2]),  # or was passed
    ],
)
def test_what_is_of_no_use_is_removed(num_records: int, here: list[int]) -> None:
    broadcast, rooms = node(*here)
    encoded = left(1, num_records)
    (note,) = broadcast.resume(encoded, now=0.0)
    assert isinstance(note, Note)
    assert encoded.journal.is_removed
    assert broadcast.encoded_versions == {}
    assert rooms.live == {}


def test_one_is_gone_on_with_the_newest() -> None:
    broadcast, _ = node(1)
    newer, older = left(3, 8), left(2, 8)
    broadcast.resume(newer, now=0.0)
    broadcast.resume(older, now=0.0)
    assert list(broadcast.encoded_versions) == [(v(3), form_on(None))]
    assert older.journal.is_removed
    assert not newer.journal.is_removed


def test_an_image_that_is_half_here_goes_on_in_full() -> None:
    broadcast, rooms = node()
    signed, manifest, _ = published(1)
    broadcast.receiver.trust.manifests[v(1)] = signed, manifest
    storage = rooms.create(v(1), b"", manifest.num_bytes)
    frame = encode_signed(signed)
    broadcast.recover(v(1), frame, storage, bytearray(manifest.num_chunks), now=0.0)
    encoded = left(1, 8)
    broadcast.resume(encoded, now=0.0)
    assert encoded.journal.is_removed
    assert broadcast.receiver.store.get((v(1), FULL)) is not None


def test_without_room_for_the_image_it_is_removed() -> None:
    broadcast, rooms = node(0)
    rooms.is_full = True
    encoded = left(1, 8)
    (note,) = broadcast.resume(encoded, now=0.0)
    assert isinstance(note, Note)
    assert "no space" in note.text
    assert encoded.journal.is_removed
    assert broadcast.fetching is None


def test_an_image_is_taken_though_its_manifest_was_forgotten_while_it_was_hashed() -> None:
    broadcast, rooms = node()
    signed, manifest, image = published(1)
    frame = encode_signed(signed)
    assert broadcast.manifest(v(1), frame) == manifest
    broadcast.receiver.trust.retire(v(3))  # as newer versions do that have come meanwhile
    storage = rooms.create(v(1), frame, manifest.num_bytes)
    storage[:] = image
    broadcast.recover(v(1), frame, storage, bytearray(b"\x01" * manifest.num_chunks), now=0.0)
    assert broadcast.receiver.store.get((v(1), FULL)) is not None
