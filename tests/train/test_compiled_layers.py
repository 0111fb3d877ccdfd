"""Graphs of compiled layers: rows of all lengths share a few, without a break.

The compiler's front end alone traces the layers, as on a GPU: with the varlen kernel, in whose
place an operation without meaning stands.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir
from transformers.modeling_layers import GradientCheckpointingLayer

from echo.algo.batching import Segments
from echo.core.errors import EngineError
from echo.engine.lora import ALL_LINEAR
from echo.engine.model import drop_towers, model_class
from echo.train.models import attention, compiling, packing
from echo.train.models.attention import DENSE, VARLEN, Kernel
from echo.train.models.compiling import RECOMPILE_LIMIT, compile_layers
from echo.train.models.policy import NO_ROW
from tests.runtime.families import FAMILIES, config_of

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
    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    compile_layer = partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(name: str, *, has_adapter: bool = False, must: bool = True, **changes: Any) -> Any:
    """A model of random weights of a family, with its rows, and its layers compiled."""
    family, config = FAMILIES[name], config_of(name, changes)
    model: Any = model_class(config).from_config(config, attn_implementation=family.attention)
    model = drop_towers(model).to(torch.bfloat16).eval()
    if not family.padded:
        model.set_attn_implementation(packing.NAME)
    if has_adapter:
        targets = list(family.lora_targets)
        lora = LoraConfig(r=4, target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets)
        model = get_peft_model(model, lora).base_model.model
    compile_layers(layers_of(model), must=must)
    return model


def with_reference(name: str) -> tuple[Any, Any]:
    """The compiled model of a family, with an adapter if it can have one, and a reference."""
    has_experts = any("experts" in setting for setting in FAMILIES[name].settings)
    model = compiled(name, has_adapter=not has_experts)
    return model, compiled(name).requires_grad_(False)


def layers_of(model: Any) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def compute(
    model: Any, lengths: Sequence[int], prefixes: Any = None, kernel: Kernel = VARLEN
) -> Tensor:
    segments = Segments.of(lengths, prefixes)
    return _sum(model, torch.arange(sum(lengths))[None], **packing.arguments(segments, kernel))


def compute_padded(model: Any, num_rows: int, length: int) -> Tensor:
    return _sum(model, torch.arange(num_rows * length).view(num_rows, length))


def _sum(model: Any, ids: Tensor, **given: Any) -> Tensor:
    ids = ids % 28  # larger ones stand for images
    states: Tensor = model.base_model(input_ids=ids, use_cache=False, **given).last_hidden_state
    return states.float().sum()


def num_graphs() -> int:
    assert not torch._dynamo.utils.counters["graph_break"]
    found: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


MAX_KERNELS = 21
"""Generated for a Qwen3 layer, forward and backward; uncompiled it launches 140 beside products."""

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
PACKED = [name for name, family in FAMILIES.items() if not family.padded]
"""Families of docs/models.md whose rollouts share rows, those that read images among them."""
PADDED = [name for name, family in FAMILIES.items() if family.padded]
RECTANGLES = [(2, 50), (3, 33), (1, 12), (4, 20), (5, 9)]
"""Rows, and tokens of each."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.matrix) for name in [*KINDS][1:])]
)
def test_rows_of_all_lengths_share_a_few_graphs(name: str) -> None:
    kind, num_kinds, options = KINDS[name]
    model = compiled(kind, **options)
    compute(model, ROWS[0]).backward()
    found = num_graphs()
    compute(model, [NO_ROW.num_inputs]).backward()  # a rank without rows needs no graph of its own
    assert num_graphs() == found
    for lengths in ROWS:
        compute(model, lengths).backward()
    assert 0 < num_graphs() <= MAX_GRAPHS * num_kinds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_long_segments_add_graphs_for_the_code_around_them_only() -> None:
    """Their attention is not compiled, so the graph breaks there; lengths are in no guard."""
    model, kernel = compiled("qwen3"), replace(DENSE, long_from=20)
    added = []
    for lengths in ([50, 30, 9], [20, 20], [70, 9, 8, 1], [40, 41, 42, 5], [64, 3], [90, 25]):
        compute(model, lengths, kernel=kernel).backward()
        added.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert added[1] == added[-1] <= 2 * MAX_GRAPHS


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PACKED)
def test_all_that_steps_do_stays_below_the_limit(name: str) -> None:
    """Shared prompts, scores without a gradient, an adapter, and a reference in the process."""
    model, reference = with_reference(name)
    for lengths in ROWS[:9]:
        compute(model, lengths).backward()
    for prompt, *completions in SHARED:
        prefixes = [(), *[((0, prompt),)] * len(completions)]
        compute(model, [prompt, *completions], prefixes).backward()
    with torch.no_grad():
        for each in (model, reference):
            for lengths in ROWS[:3]:
                compute(each, lengths)
    found = num_graphs()
    assert found <= RECOMPILE_LIMIT // 2
    compute(model, [17, 33]).backward()
    assert num_graphs() == found


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PADDED)
def test_padded_rows_of_all_sizes_stay_below_the_limit(name: str) -> None:
    """With an adapter, and a reference in the process."""
    model, reference = with_reference(name)
    for rectangle in RECTANGLES:
        compute_padded(model, *rectangle).backward()
    with torch.no_grad():
        for each in (model, reference):
            for rectangle in RECTANGLES[:3]:
                compute_padded(each, *rectangle)
    found = num_graphs()
    assert 0 < found <= RECOMPILE_LIMIT // 2
    compute_padded(model, 6, 17).backward()
    assert num_graphs() == found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_layers_whose_experts_have_adapters_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Peft's code would break a layer into some 60 graphs, and more with each length."""
    monkeypatch.setattr(compiling._OneNotice, "_is_logged", False)
    with pytest.raises(EngineError, match=r"experts: set learner.compile_layers = false"):
        compiled("qwen3_moe", has_adapter=True)
    for _ in range(2):
        model = compiled("qwen3_moe", has_adapter=True, must=False)
    compute(model, [5, 9]).backward()
    assert num_graphs() == 0
    [told] = [record.getMessage() for record in caplog.records]
    assert told.endswith("run as they are: peft adapts the weights of their experts")


@pytest.mark.slow
@pytest.mark.matrix
def test_a_layer_takes_few_kernels_on_a_gpu() -> None:
    """Torch writes them without one."""
    script = Path(__file__).with_name("generated_kernels.py")
    found = subprocess.run(
        [sys.executable, str(script)],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert 0 < int(found.stdout) <= MAX_KERNELS


COMPILE_ONE = """
import torch
from torch._dynamo.utils import counters
from echo.train.models.compiling import compile_layers

class Layer(torch.nn.Linear):
    def forward(self, states):
        return torch.nn.functional.silu(super().forward(states))

layer = Layer(8, 8)
compile_layers([layer], must=True)
layer(torch.ones(3, 8)).sum().backward()
print(sum(counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss")))
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_processes_share_what_they_have_compiled(tmp_path: Path) -> None:
    """Two at once, and a third that finds it."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", COMPILE_ONE], stdout=subprocess.PIPE, text=True, env=environment
        )

    def figures(process: subprocess.Popen[str]) -> list[int]:
        out, _ = process.communicate(timeout=500)
        assert process.returncode == 0
        return [int(line) for line in out.split()]

    together = [start(), start()]
    for process in together:
        assert figures(process)[0] == 1
    assert figures(start()) == [1, 1]


def test_the_cache_of_compilation_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name, before = "TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "before")
    monkeypatch.setenv(name, before)  # what is set below goes with the test
    monkeypatch.setattr(compiling, "models_directory", lambda: tmp_path / "models")
    caplog.set_level("INFO")
    compile_layers([torch.nn.Linear(1, 1)], must=True)
    assert os.environ[name] == before
    del os.environ[name]
    assert cache_dir() == os.environ[name]  # what torch sets when it is imported
    compile_layers([torch.nn.Linear(1, 1)], must=True)
    assert os.environ[name] == cache_dir() == str(tmp_path / "compiled")
    assert (tmp_path / "compiled").is_dir()
    assert "the first step takes some 20 to 30 s longer" in caplog.text
