"""Versions written over the weights of an engine: as if they had been loaded, or not at all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import Sampling
from echo.engine.hf import engine as hf_engine
from echo.engine.hf.engine import TransformersEngine
from echo.engine.model import load_directory
from echo.engine.weights import changes, publish_image, scatter, tensors_from_image
from echo.weights.manifest import TensorSpec
from echo.weights.store.memory import RecycledMemory
from echo.weights.store.patches import Patch
from tests.engine.engine_contract import V1, V2, V3, request, run
from tests.engine.patches import BLOCK_BYTES, assert_identical, patch_between

MakeTinyModel = Callable[..., Path]
KINDS = [
    pytest.param("float32", "float32", marks=pytest.mark.slow),
    pytest.param("bfloat16", "float32", marks=pytest.mark.slow),
    pytest.param("bfloat16", "bfloat16", marks=pytest.mark.slow),
]
"""Dtypes of (image, engine): views, words scattered into float32, views."""


@dataclass
class Version:
    """An image, and where its tensors lie."""

    specs: tuple[TensorSpec, ...]
    image: bytearray

    def copy(self) -> Version:
        """The same in memory of its own."""
        return Version(self.specs, bytearray(self.image))

    def tensors(self) -> Mapping[str, Tensor]:
        return tensors_from_image(self.specs, memoryview(self.image).toreadonly())

    def to(self, other: Version, base: PolicyVersion = V1, version: PolicyVersion = V2) -> Patch:
        return patch_between(self.specs, self.image, other.image, base=base, version=version)


def changed(state: Mapping[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """Return weights of which a share has moved; all of one tensor, and the ends of each."""
    torch.manual_seed(seed)
    new = {}
    for name, tensor in state.items():
        moves = torch.rand(tensor.shape) < (1.0 if "layers.1.mlp.up" in name else share)
        flat = moves.view(-1)
        flat[0] = flat[-1] = True
        new[name] = torch.where(moves, tensor * 1.1 + 0.01, tensor)
    return new


def versions(directory: Path, dtype: str, number: int = 3) -> list[Version]:
    state: Mapping[str, Tensor] = load_directory(directory, "float32")
    found = []
    for seed in range(number):
        found.append(Version(*publish_image(state, dtype)))
        state = changed(state, 0.02, seed)
    return found


@pytest.fixture(params=["tied", pytest.param("untied", marks=pytest.mark.matrix)])
def directory(request: pytest.FixtureRequest, make_tiny_model: MakeTinyModel) -> Path:
    return make_tiny_model(tie_word_embeddings=request.param == "tied", seed=3)


def logprobs(engine: TransformersEngine) -> list[float]:
    [completion] = run(engine, [request([1, 5, 6])], Sampling(1.0, 1.0, 0, 12, ()))
    return [float(each) for each in completion.logprobs]


def parameters(engine: TransformersEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def begun(directory: Path, dtype: str, version: Version) -> TransformersEngine:
    engine = TransformersEngine(directory, dtype=dtype)
    engine.load(version.tensors(), V1)
    return engine


def test_a_block_without_a_change_is_not_handed_over(directory: Path) -> None:
    """Rows of an embedding whose tokens no answer has, or frozen layers."""
    [first] = versions(directory, "bfloat16", 1)
    second = first.copy()
    spec = max(first.specs, key=lambda spec: spec.num_bytes)
    assert spec.num_bytes > 2 * BLOCK_BYTES
    memoryview(second.image)[spec.offset : spec.offset + 2] = b"\1\2"
    [change] = changes(first.to(second), memoryview(second.image), second.specs)
    assert (change.name, change.values.numel()) == (spec.name, 1)
    assert list(changes(first.to(first), memoryview(first.image), first.specs)) == []


@pytest.mark.parametrize(("published", "computed"), KINDS)
def test_a_patch_gives_what_a_load_gives_bit_for_bit_or_is_taken_back(
    directory: Path, published: str, computed: str
) -> None:
    """Tensors lie across blocks, some of which are dense; one after the other, and a load."""
    first, second, third = versions(directory, published)
    there = first.copy()
    engine = begun(directory, computed, there)
    before, sampled = parameters(engine), logprobs(engine)
    with pytest.raises(EngineError, match=r"v2 could not be written in place: .*out of pages"):
        engine.patch(Failing(first.to(second)), memoryview(there.image), there.specs)
    assert engine.installed == V1
    assert there.image == first.image
    assert_identical(parameters(engine), before)
    assert logprobs(engine) == sampled
    kinds = set()
    for old, new, base, version in ((first, second, V1, V2), (second, third, V2, V3)):
        patch = old.to(new, base, version)
        kinds |= {block.where is None for block in patch.blocks.values()}
        engine.patch(patch, memoryview(there.image), there.specs)
        assert engine.installed == version
        assert there.image == new.image
        whole = begun(directory, computed, new.copy())
        assert_identical(parameters(engine), parameters(whole))
        assert logprobs(engine) == logprobs(whole)
    assert kinds == {False, True}
    engine.load(first.tensors(), V1)
    assert logprobs(engine) == sampled


@pytest.mark.parametrize(("computed", "is_view"), [("float32", False), ("bfloat16", True)])
def test_sampling_stands_still_for_what_is_sampled_from_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, computed: str, is_view: bool
) -> None:
    """Nothing is copied where the parameters are the image."""
    first, second = versions(directory, "bfloat16", 2)
    there = first.copy()
    engine = begun(directory, computed, there)
    start = np.frombuffer(there.image, np.uint8).ctypes.data
    inside = {
        start <= tensor.data_ptr() < start + len(there.image)
        for tensor in engine.model.state_dict().values()
    }
    assert inside == {is_view}
    names = dict(engine.model.named_parameters(remove_duplicate=False))
    is_tied = engine.model.config.tie_word_embeddings
    pointers = {names[name].data_ptr() for name in ("lm_head.weight", "model.embed_tokens.weight")}
    assert len(pointers) == (1 if is_tied else 2)
    at_pause = []

    def paused(job: Callable[[], None]) -> None:
        at_pause.append(bytes(there.image))
        job()

    monkeypatch.setattr(engine._mailbox, "do", paused)
    engine.patch(first.to(second), memoryview(there.image), there.specs)
    assert at_pause == [first.image if is_view else second.image]
    assert there.image == second.image


class Failing(Patch):
    """Which memory refuses half way."""

    def __init__(self, patch: Patch) -> None:
        super().__init__(patch.base, patch.version, patch.block_bytes)
        self.blocks = patch.blocks

    def write(self, image: memoryview) -> None:
        for number, block in list(self.blocks.items())[: len(self.blocks) // 2]:
            start = number * self.block_bytes
            block.write(image[start : start + self.block_bytes])
        raise MemoryError("out of pages")


def test_words_that_cannot_be_scattered_are_taken_back_everywhere(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = versions(directory, "bfloat16", 2)
    there = first.copy()
    engine = begun(directory, "float32", there)
    before = parameters(engine)

    def failing(patch: Patch, image: memoryview, *rest: Any) -> None:
        half = Patch(patch.base, patch.version, patch.block_bytes)
        half.blocks = dict(list(patch.blocks.items())[: len(patch.blocks) // 2])
        scatter(half, image, *rest)
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patched:
        patched.setattr(hf_engine, "scatter", failing)
        with pytest.raises(EngineError, match="the device is lost; rolled back, version: v1"):
            engine.patch(first.to(second), memoryview(there.image), there.specs)
    assert there.image == first.image
    assert_identical(parameters(engine), before)


# --- words scattered ------------------------------------------------------------------------------


def mixed(seed: int, share: float) -> dict[str, Tensor]:
    """Tensors of several dtypes and lengths, whose blocks are coded in words of other sizes too."""
    generator = torch.Generator().manual_seed(7)
    chance = torch.Generator().manual_seed(seed)
    layout = {
        "a": (3, torch.int64),
        "b": (5 * BLOCK_BYTES // 4 + 1, torch.float32),
        "c": (1, torch.bool),
        "d": (BLOCK_BYTES, torch.float32),
        "e": (700, torch.uint8),
    }
    state = {}
    for name, (size, dtype) in layout.items():
        values = torch.randn(size, generator=generator) * 40
        values += torch.rand(size, generator=chance) < share
        state[name] = (values if dtype.is_floating_point else values.clamp(min=0)).to(dtype)
    return state


@pytest.mark.parametrize("share", [0.0, 0.01, 0.15, 0.9])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("own_dtype", [torch.float32, torch.bfloat16])
def test_what_is_scattered_is_what_a_copy_gives(
    share: float, dtype: str, own_dtype: torch.dtype
) -> None:
    old = Version(*publish_image(mixed(0, 0.0), dtype))
    new = Version(*publish_image(mixed(1, share), dtype))

    def own(version: Version) -> dict[str, Tensor]:
        return {
            name: tensor.to(own_dtype) if tensor.is_floating_point() else tensor.clone()
            for name, tensor in version.tensors().items()
        }

    target, patch = own(old), old.to(new)
    patch.write(memoryview(old.image))
    assert old.image == new.image
    scatter(patch, memoryview(old.image), old.specs, target)
    assert_identical(target, own(new))


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.slow
def test_memory_that_an_engine_uses_is_never_handed_out_again(
    tiny_model_dir: Path, is_patched: bool
) -> None:
    first, second = versions(tiny_model_dir, "float32", 2)
    memory = RecycledMemory()
    image = memory.take(len(first.image))
    image[:] = first.image
    address = np.frombuffer(image, np.uint8).ctypes.data
    engine = TransformersEngine(tiny_model_dir)
    engine.load(tensors_from_image(first.specs, image.toreadonly()), V1)
    if is_patched:
        engine.patch(first.to(second), image, first.specs)
    expected = logprobs(engine)
    del image
    for _ in range(3):
        other = memory.take(len(first.image))
        assert np.frombuffer(other, np.uint8).ctypes.data != address
        other[:] = bytes(len(other))
        assert logprobs(engine) == expected
    del other
    engine.load(second.tensors(), V2)
    gc.collect()
    free = [memory.take(len(first.image)) for _ in range(4)]
    assert address in [np.frombuffer(each, np.uint8).ctypes.data for each in free]
