"""Images are counted against a limit, and recycled only when nobody can read them any more."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from echo.core.errors import StorageError
from echo.core.rollout import PolicyVersion
from echo.runtime.disk_store import MAX_SPARES, DiskStore, MappedStore, MemoryStore, open_store
from tests.runtime.test_disk_store_scan import CHUNK_BYTES, IMAGE, describe, held

SIZE = 1 << 16


def version(step: int, lineage: int = 1) -> PolicyVersion:
    return PolicyVersion(lineage, step)


def is_same_place(first: int, view: memoryview) -> bool:
    return first == address(view)


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MappedStore]:
    made = MemoryStore(8 * SIZE) if request.param == "memory" else DiskStore(tmp_path, 8 * SIZE)
    assert made.recover("run") == []
    yield made
    made.close()


def test_a_storage_is_room_to_write_to(store: MappedStore) -> None:
    storage = store.create(version(1), b"manifest", SIZE + 1)
    assert (len(storage), storage.readonly, storage.format) == (SIZE + 1, False, "B")
    storage[:] = bytes(range(256)) * (SIZE // 256) + b"\7"
    assert bytes(storage[-3:]) == b"\xfe\xff\7"
    assert store.bytes_held == SIZE + 1


def test_the_same_version_twice_or_no_bytes_is_a_bug(store: MappedStore) -> None:
    store.create(version(1), None, SIZE)
    with pytest.raises(ValueError, match=r"v1: .* asked for twice"):
        store.create(version(1), None, SIZE)
    with pytest.raises(ValueError, match="v2: 0 bytes"):
        store.create(version(2), None, 0)
    with pytest.raises(ValueError, match="limit_bytes is 0"):
        MemoryStore(0)


def test_the_limit_counts_what_was_not_dropped(store: MappedStore) -> None:
    store.create(version(1), None, 5 * SIZE)
    with pytest.raises(
        StorageError, match=r"v2 needs 256 KiB, but 320 KiB of 512 KiB .* v1; raise"
    ):
        store.create(version(2), None, 4 * SIZE)
    store.create(version(2), None, 3 * SIZE)
    store.drop(version(1))
    store.create(version(3), None, 4 * SIZE)  # the spare had to make room
    assert store.bytes_held == 7 * SIZE
    assert store._spares == []


def test_to_drop_what_is_not_there_is_no_error(store: MappedStore) -> None:
    store.drop(version(1))
    store.create(version(1), None, SIZE)
    store.drop(version(1))
    store.drop(version(1))
    assert store.bytes_held == 0


def test_a_dropped_storage_is_recycled_when_no_view_is_left(store: MappedStore) -> None:
    storage = store.create(version(1), None, SIZE)
    place = address(storage)
    piece = storage[10:20].toreadonly()
    piece_of_numpy = np.frombuffer(storage, np.uint8)[5:]
    storage[10:20] = b"0123456789"
    del storage
    store.drop(version(1))
    second = store.create(version(2), None, SIZE)
    second[:] = bytes(SIZE)
    assert not is_same_place(place, second)
    del piece_of_numpy
    third = store.create(version(3), None, SIZE)
    third[:] = bytes(SIZE)
    assert not is_same_place(place, third)
    assert bytes(piece) == b"0123456789"
    del piece
    other_size = store.create(version(4), None, SIZE - 1)
    assert not is_same_place(place, other_size)
    assert is_same_place(place, store.create(version(5), None, SIZE))


@pytest.mark.slow
def test_a_tensor_made_from_a_storage_keeps_it(store: MappedStore) -> None:
    """As of the weights that a worker on a CPU has installed."""
    storage = store.create(version(1), None, SIZE)
    place = address(storage)
    whole = torch.frombuffer(storage[:64], dtype=torch.float32)
    part = whole.view(4, 4)[1:]
    part.fill_(1.5)
    del storage, whole
    store.drop(version(1))
    gc.collect()
    second = store.create(version(2), None, SIZE)
    second[:] = bytes(SIZE)
    assert part.eq(1.5).all()
    del part
    gc.collect()
    assert is_same_place(place, store.create(version(3), None, SIZE))


def test_only_the_largest_spares_are_kept_and_views_of_the_others_stay_valid(
    store: MappedStore,
) -> None:
    views = [store.create(version(step), None, step * 4096) for step in range(1, 5)]
    for step, view in enumerate(views, start=1):
        view[:] = bytes([step]) * len(view)
    for step in range(1, 5):
        store.drop(version(step))
    assert [len(spare) for spare in store._spares] == [4 * 4096, 3 * 4096]
    assert len(store._spares) == MAX_SPARES
    assert [view[0] for view in views] == [1, 2, 3, 4]


def test_views_outlive_the_store(store: MappedStore) -> None:
    kept = store.create(version(1), None, SIZE)
    dropped = store.create(version(2), None, SIZE)
    kept[:4], dropped[:4] = b"kept", b"drop"
    store.drop(version(2))
    store.close()
    gc.collect()
    assert (bytes(kept[:4]), bytes(dropped[:4])) == (b"kept", b"drop")


@pytest.mark.slow
def test_what_libzmq_has_not_sent_yet_is_not_handed_out(store: MappedStore) -> None:
    """The receiver takes nothing at first, so slices wait in the sender without a copy."""
    num_bytes = 24 << 20  # more than the sockets' buffers hold
    store.limit_bytes = 8 * num_bytes
    storage = store.create(version(1), None, num_bytes)
    storage[:] = b"\1" * num_bytes
    place = address(storage)
    with (
        zmq.Context() as context,
        context.socket(zmq.PUSH) as push,
        context.socket(zmq.PULL) as pull,
    ):
        push.sndhwm, pull.rcvhwm, pull.rcvbuf, push.linger = 0, 1, 1 << 16, 0
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        push.connect(f"tcp://127.0.0.1:{port}")
        for start in range(0, num_bytes, 1 << 20):
            push.send(storage[start : start + (1 << 20)].toreadonly(), copy=False)
        del storage
        store.drop(version(1))
        second = store.create(version(2), None, num_bytes)
        second[:] = b"\2" * num_bytes
        assert not is_same_place(place, second)
        for _ in range(num_bytes >> 20):
            assert set(pull.recv()) == {1}
        deadline = time.monotonic() + 60  # libzmq tells Python in a thread of its own
        while store._spares[0].is_lent and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_same_place(place, store.create(version(3), None, num_bytes))


def test_the_rehash_looks_at_the_version_s_own_bytes(store: MappedStore) -> None:
    store.limit_bytes = 2 * len(IMAGE)
    manifest = describe(IMAGE)
    storage = store.create(manifest.version, b"", len(IMAGE))
    storage[: 3 * CHUNK_BYTES] = IMAGE[: 3 * CHUNK_BYTES]
    assert held(store.verify_held(manifest, storage)) == [0, 1, 2]
    with pytest.raises(StorageError, match="image of v1 has 5 bytes, its manifest says"):
        store.verify_held(manifest, storage[:5])


def test_a_new_run_drops_the_versions_of_the_old_one(store: MappedStore) -> None:
    store.create(version(1), b"manifest", SIZE)
    assert store.recover("another") == []
    assert store.bytes_held == 0
    store.create(version(1), b"manifest", SIZE)


def test_no_memory_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    too_much = 1 << 60
    with pytest.raises(StorageError, match=r"no 1024 PiB for v1: .*set network.store_dir"):
        MemoryStore(too_much).create(version(1), None, too_much)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert len(MemoryStore(SIZE).create(version(1), None, SIZE)) == SIZE


def test_the_configuration_chooses_the_store(tmp_path: Path) -> None:
    memory = open_store(None, None)
    assert isinstance(memory, MemoryStore)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.limit_bytes <= pages
    assert open_store(None, 5).limit_bytes == 5
    files = open_store(str(tmp_path / "new" / "directory"), None)
    assert isinstance(files, DiskStore)
    assert files.limit_bytes > SIZE
    files.close()


class Recycling(RuleBasedStateMachine):
    """Whatever is created, dropped and kept, no view ever sees another version's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(6 * 4096)
        self.steps = itertools.count(1)
        self.live: dict[int, memoryview] = {}
        self.pending: list[tuple[int, memoryview]] = []

    @rule(num_pages=st.integers(1, 2))
    def create(self, num_pages: int) -> None:
        step = next(self.steps)
        num_bytes = num_pages * 4096
        held_bytes = sum(len(view) for view in self.live.values())
        if held_bytes + num_bytes > self.store.limit_bytes:
            with pytest.raises(StorageError):
                self.store.create(version(step), None, num_bytes)
            return
        view = self.store.create(version(step), None, num_bytes)
        view[:] = bytes([step % 256]) * num_bytes
        self.live[step] = view

    @rule(data=st.data(), keeps=st.booleans())
    def drop(self, data: st.DataObject, keeps: bool) -> None:
        if self.live:
            step = data.draw(st.sampled_from(sorted(self.live)))
            view = self.live.pop(step)
            if keeps:
                self.pending.append((step, view[7:100].toreadonly()))
            self.store.drop(version(step))

    @rule()
    def send(self) -> None:
        if self.pending:
            self.pending.pop(0)

    @invariant()
    def all_bytes_are_as_written(self) -> None:
        for step, view in [*self.live.items(), *self.pending]:
            assert set(bytes(view)) == {step % 256}

    @invariant()
    def the_books_are_right(self) -> None:
        spares = sum(map(len, self.store._spares))
        assert self.store.bytes_held == sum(map(len, self.live.values()))
        assert self.store.bytes_held + spares <= self.store.limit_bytes
        assert len(self.store._spares) <= MAX_SPARES


TestRecycling = Recycling.TestCase
TestRecycling.settings = settings(stateful_step_count=30)
