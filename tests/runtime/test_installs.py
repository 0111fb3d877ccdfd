"""Versions handed to a worker's engine: whole, or as what changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import UNVERSIONED
from echo.runtime.worker.node import WorkerParts
from echo.weights.delta import BlockPatch
from echo.weights.manifest import TensorSpec
from echo.weights.store.in_place import ApplyPatch
from echo.weights.store.memory import VersionStore
from echo.weights.store.patches import Patch
from tests.promises.world import StubEngine

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
SPECS = (TensorSpec("w", "uint8", (8,), 0, 8),)


class Engine(StubEngine):
    """An engine whose weights are the memory that it was given last."""

    def __init__(self) -> None:
        super().__init__(takes_patches=True)
        self.weights: Tensor | None = None

    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion = UNVERSIONED) -> None:
        super().load(tensors, version)
        self.weights = tensors["w"]

    def patch(self, patch: Patch, image: memoryview, specs: Sequence[TensorSpec]) -> None:
        patch.write(image)
        StubEngine.load(self, None, patch.version)
        self.num_patched += 1

    @property
    def content(self) -> bytes:
        assert self.weights is not None
        return bytes(self.weights.tolist())


class Disk(VersionStore):
    """A store that notes what it is told, and may be full."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.told: list[str] = []
        self._is_full = is_full

    def begin_patch(self, patch: Patch) -> None:
        self.told.append("begin")
        if self._is_full:
            raise OSError(28, "No space left on device")

    def cancel_patch(self, patch: Patch) -> None:
        self.told.append("cancel")


OLD, NEW = bytes(range(8)), bytes([0, 9, 2, 3, 4, 5, 6, 8])


def work_on(image: bytearray, store: Disk) -> ApplyPatch:
    patch = Patch(V1, V2, 8)
    old, new = (np.frombuffer(each, np.uint8)[[1, 7]] for each in (OLD, NEW))
    patch.blocks[0] = BlockPatch(np.array([1, 7]), old, new, b"", b"")
    return ApplyPatch(patch, memoryview(image), store)


def install_patch(engine: Engine, work: ApplyPatch, *, is_loaded: bool = True) -> None:
    parts: Any = SimpleNamespace(engine=engine)
    WorkerParts.install_patch(parts, work, SPECS, is_loaded)


def begun(image: bytearray, version: PolicyVersion = V1) -> Engine:
    engine = Engine()
    engine.load({"w": torch.frombuffer(image, dtype=torch.uint8)}, version)
    return engine


def test_what_changes_is_written_over_what_the_engine_has() -> None:
    image, store = bytearray(OLD), Disk()
    engine = begun(image)
    install_patch(engine, work_on(image, store))
    assert (engine.installed, engine.content, engine.num_patched) == (V2, NEW, 1)
    assert store.told == ["begin"]


@pytest.mark.parametrize("version", [PolicyVersion(1, 0), PolicyVersion(1, 7)])
def test_an_engine_with_another_version_is_given_the_whole(version: PolicyVersion) -> None:
    image, store = bytearray(OLD), Disk()
    engine = begun(bytearray(8), version)
    install_patch(engine, work_on(image, store))
    assert (engine.installed, engine.content, engine.num_patched) == (V2, NEW, 0)
    assert store.told == ["begin"]


def test_an_engine_with_the_same_version_from_damaged_memory_is_given_the_whole() -> None:
    damaged, image, store = bytearray(b"\xff" * 8), bytearray(OLD), Disk()
    engine = begun(damaged)
    install_patch(engine, work_on(image, store), is_loaded=False)
    assert (engine.installed, engine.content, engine.num_patched) == (V2, NEW, 0)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_what_the_engine_refuses_is_taken_back_and_its_record_removed(is_loaded: bool) -> None:
    image, store = bytearray(OLD), Disk()
    engine = begun(image)
    engine.refuses.add(2)
    with pytest.raises(EngineError, match="the probe found other weights"):
        install_patch(engine, work_on(image, store), is_loaded=is_loaded)
    assert (engine.installed, engine.content) == (V1, OLD)
    assert image == OLD
    assert store.told == ["begin", "cancel"]


def test_on_a_full_disk_nothing_is_written() -> None:
    image, store = bytearray(OLD), Disk(is_full=True)
    engine = begun(image)
    with pytest.raises(EngineError, match=r"v2 cannot be written in place: .*No space left"):
        install_patch(engine, work_on(image, store))
    assert (engine.installed, engine.content, store.told) == (V1, OLD, ["begin"])


def test_without_an_engine_a_thread_does_the_same() -> None:
    image = bytearray(OLD)
    assert work_on(image, Disk(is_full=True)).run() == "No space left on device"
    assert image == OLD
    store = Disk()
    assert not work_on(image, store).run()
    assert (bytes(image), store.told) == (NEW, ["begin"])
