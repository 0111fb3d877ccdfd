"""Graphs of compiled layers: rows of all lengths share a few, without a break.

The compiler's front end alone traces the layers, as on a GPU: with the varlen kernel, in whose
place an operation without meaning stands.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from echo.algo.batching import Segments
from echo.train.models import packing
from echo.train.models.compiling import RECOMPILE_LIMIT, compile_layers
from tests.runtime.families import FAMILIES, SMALL

MAX_GRAPHS = 4
"""Of one kind of layer of one model: forward and backward, with a gradient and without."""
ROWS = [
    [50, 30, 20, 7], [90, 10, 30], [128], [64, 64], [5, 9], [11] * 12, [1], [40, 41],
    *(random.Random(seed).choices(range(3, 60), k=2 + seed) for seed in range(6)),
]  # fmt: skip
"""Tokens of the segments of each row."""
SHARED = [(9, 3, 6), (20, 5, 7)]
"""Tokens of a prompt and of two completions that share it."""


@torch.library.custom_op("echo_tests::varlen", mutates_args=())
def varlen(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, window: int) -> Tensor:
    return query.clone() + value.mean()


@varlen.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, window: int) -> Tensor:
    return torch.empty_like(query)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.zeros = [torch.zeros_like(each) for each in inputs[1:3]]


varlen.register_autograd(lambda ctx, grad: (grad, *ctx.zeros, None, None), setup_context=_keep)


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *others: Any, **how: Any
) -> Tensor:
    found: Tensor = varlen(query, key, value, ends, how["window_size"][0])
    return found


@pytest.fixture(autouse=True)
def front_end_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packing, "varlen_attn", varlen_attn)
    compile_layer = partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(kind: str, *, has_adapter: bool = False, **changes: Any) -> Any:
    """A model of random weights with packed rows, and its layers compiled."""
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=packing.NAME)
    model = model.to(torch.bfloat16).eval()
    if has_adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).base_model.model
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    compile_layers(layers, must=True)
    return model


def compute(model: Any, lengths: Sequence[int], prefixes: Any = None) -> Tensor:
    segments = Segments.of(lengths, prefixes)
    ids = torch.arange(sum(lengths))[None] % 30
    given = packing.arguments(segments, uses_kernel=True)
    states: Tensor = model.base_model(input_ids=ids, use_cache=False, **given).last_hidden_state
    return states.float().sum()


def num_graphs() -> int:
    assert not torch._dynamo.utils.counters["graph_break"]
    found: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3": ("qwen3", 1, {}),
    "adapter": ("qwen3", 1, {"has_adapter": True}),
    "two kinds": (
        "gemma3_text",
        2,
        {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
"""Architecture, kinds of layers, and options."""
MORE_FAMILIES = ("llama", "phi3", "smollm3", "gemma4_text", "olmo3")
"""Families of docs/models.md whose layers have other windows, norms or rotations."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.matrix) for name in [*KINDS][1:])]
)
def test_rows_of_all_lengths_share_a_few_graphs(name: str) -> None:
    kind, num_kinds, options = KINDS[name]
    model = compiled(kind, **options)
    for lengths in ROWS:
        compute(model, lengths).backward()
    assert 0 < num_graphs() <= MAX_GRAPHS * num_kinds


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*KINDS, *MORE_FAMILIES])
def test_all_that_steps_do_stays_below_the_limit(name: str) -> None:
    """Shared prompts, scores without a gradient, and a reference model in the same process."""
    kind, _, options = KINDS.get(name) or (name, 1, dict(FAMILIES[name].settings))
    model, reference = compiled(kind, **options), compiled(kind, **options).requires_grad_(False)
    for lengths in ROWS:
        compute(model, lengths).backward()
    for prompt, *completions in SHARED:
        prefixes = [(0, 0), *[(0, prompt)] * len(completions)]
        compute(model, [prompt, *completions], prefixes).backward()
    with torch.no_grad():
        for each in (model, reference):
            for lengths in ROWS[:3]:
                compute(each, lengths)
    found = num_graphs()
    assert found <= RECOMPILE_LIMIT // 2
    compute(model, [17, 33]).backward()
    assert num_graphs() == found
