"""Attention of packed rows by each kernel: as each segment alone, and which kernel is chosen.

torch's varlen operator runs on GPUs only; `varlen_on_a_cpu` stands in for it, and a test for a GPU
compares the two: `python -m pytest -m gpu tests/train/test_attention.py`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from echo.algo.batching import RowRuns, Segments
from echo.algo.losses import make_loss
from echo.train.models import attention, packing, policy
from echo.train.models.attention import DENSE, FA3, FA4, PRODUCTS, VARLEN, Kernel, LayerShape
from tests.train.test_trainer import gradients, make_groups
from tests.train.trainers import CPU, fast_trainer, policy_of

REPOSITORY = Path(__file__).parents[2]
CUDA = torch.device("cuda")
SHAPE = LayerShape(num_heads=4, num_key_heads=2, width=16, value_width=16)
WITH_WINDOW = replace(SHAPE, window=20)
SMALL_DENSE = replace(DENSE, long_from=64)
"""Takes segments as long that a CPU computes in a moment."""
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def varlen_on_a_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """torch's varlen_attn, as documented: the last query is aligned with the last key."""
    before, after = window_size
    assert after == 0
    parts = []
    spans = zip(query_ends.diff().tolist(), key_ends.diff().tolist(), strict=True)
    starts = zip(query_ends.tolist(), key_ends.tolist(), strict=False)
    assert (len(query), len(key)) == (int(query_ends[-1]), int(key_ends[-1]))
    for (length, num_keys), (first, first_key) in zip(spans, starts, strict=False):
        assert length <= longest_query
        assert num_keys <= longest_key
        mask = torch.ones(length, num_keys, dtype=torch.bool).tril(num_keys - length)
        if before >= 0:
            mask &= ~mask.tril(num_keys - length - before - 1)
        q, k, v = (
            x[None, start : start + size].transpose(1, 2)
            for x, start, size in (
                (query, first, length),
                (key, first_key, num_keys),
                (value, first_key, num_keys),
            )
        )
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=mask.to(q.device), scale=scale, enable_gqa=enable_gqa
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the operator, and pad long segments to small multiples."""
    monkeypatch.setattr(attention, "varlen_attn", varlen_on_a_cpu)
    monkeypatch.setattr(attention, "PLAN_TOKENS", 32)


# --- values and gradients -------------------------------------------------------------------------

ROWS: Mapping[str, tuple[list[int], list[RowRuns] | None]] = {
    "one short": ([9], None),
    "one long": ([70], None),
    "long ones alone": ([128, 97, 64], None),
    "long ones and others": ([97, 65, 40, 40, 7, 1, 1], None),
    "a long one behind": ([40, 97], None),
    "shared prompts": ([20, 5, 9, 9, 7, 1], [(), *[((0, 20),)] * 3, (), ()]),
    "shared prompts behind long ones": ([97, 64, 20, 5, 9, 9], [(), (), (), *[((161, 20),)] * 3]),
    "a long prompt is shared": ([80, 70, 9], [(), ((0, 80),), ((0, 80),)]),
    "chains": ([70, 9, 5, 7, 8], [(), ((0, 20),), ((0, 20), (70, 4)), ((0, 12),), ()]),
}
"""Tokens of the segments of each row, and the runs of tokens before them."""


def attended(*states: Tensor, **given: Any) -> Tensor:
    attend: Any = packing.packed_attention
    found: Tensor = attend(torch.nn.Identity(), *states, None, **given)[0]
    return found


def expected_of(
    states: tuple[Tensor, ...], segments: Segments, window: int | None, scaling: float
) -> Tensor:
    """Attention of each segment with the tokens before it, written with a softmax."""
    query, key, value = states
    times = query.shape[1] // key.shape[1]
    parts, start = [], 0
    for length, runs in zip(segments.lengths, segments.prefixes, strict=True):
        places = [place for first, size in runs for place in range(first, first + size)]
        size = len(places)
        places += range(start, start + length)
        q = query[0, :, start : start + length]
        k, v = (x[0, :, places].repeat_interleave(times, 0) for x in (key, value))
        age = torch.arange(size, size + length)[:, None] - torch.arange(size + length)
        hidden = (age < 0) | (age >= (window or size + length))
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(hidden, -torch.inf)
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(parts)[None]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    "kernel", [PRODUCTS, VARLEN, SMALL_DENSE], ids=["products", "varlen", "dense"]
)
def test_each_kernel_computes_what_each_segment_has_alone(
    kernel: Kernel, row: str, window: int | None, on_a_cpu: None
) -> None:
    segments = Segments.of(*ROWS[row])
    size = sum(segments.lengths)
    generator = torch.Generator().manual_seed(1)

    def drawn(heads: int, width: int) -> Tensor:
        return torch.randn(1, heads, size, width, generator=generator, dtype=torch.float64)

    states = tuple(x.requires_grad_() for x in (drawn(4, 16), drawn(2, 16), drawn(2, 24)))
    seen: set[LayerShape] = set()
    given = packing.arguments(segments, kernel, seen=seen)
    del given["position_ids"]
    found = attended(*states, scaling=0.3, sliding_window=window, **given)
    expected = expected_of(states, segments, window, 0.3)
    assert torch.allclose(found, expected, atol=1e-12)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    pairs = zip(
        torch.autograd.grad((found * weights).sum(), states),
        torch.autograd.grad((expected * weights).sum(), states),
        strict=True,
    )
    for one, other in pairs:
        assert torch.allclose(one, other, atol=1e-12)
    assert seen == {replace(SHAPE, value_width=24, window=window)}


def test_long_segments_are_computed_in_few_shapes_apart_from_the_row(
    monkeypatch: pytest.MonkeyPatch, on_a_cpu: None
) -> None:
    """cuDNN makes a plan for each shape and its strides."""
    plans: set[tuple[torch.Size, tuple[int, ...]]] = set()
    with_operator: list[int] = []

    def watched(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        assert how["is_causal"]
        plans.update((x.shape, x.stride()) for x in (query, key, value))
        return scaled_dot_product_attention(query, key, value, **how)

    def counted(query: Tensor, *others: Any, **how: Any) -> Tensor:
        with_operator.append(len(query))
        return varlen_on_a_cpu(query, *others, **how)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(attention, "varlen_attn", counted)
    for lengths in ([97, 65, 8], [128], [100, 70, 66, 3], [120, 96, 90]):
        size = sum(lengths)
        states = (torch.randn(1, heads, size, 16) for heads in (4, 2, 2))
        given = packing.arguments(Segments.of(lengths), SMALL_DENSE)
        del given["position_ids"]
        attended(*states, **given)
    assert {shape[2] for shape, _ in plans} == {96, 128}
    assert len(plans) == 4  # queries and keys of either length
    assert with_operator == [8, 3]


@pytest.mark.parametrize("width", [256, 20])
def test_heads_that_cudnn_does_not_take_stay_with_the_operator(
    width: int, monkeypatch: pytest.MonkeyPatch, on_a_cpu: None
) -> None:
    monkeypatch.setattr(attention, "scaled_dot_product_attention", None)
    given = packing.arguments(Segments.of([70, 80]), SMALL_DENSE)
    del given["position_ids"]
    states = (torch.randn(1, 2, 150, width) for _ in range(3))
    found = attended(*states, **given)
    assert found.shape == (1, 150, 2, width)


@pytest.mark.parametrize("kernel", [VARLEN, replace(DENSE, long_from=8)], ids=["varlen", "dense"])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.slow
def test_a_trainer_has_the_padded_rows_gradient_with_each_kernel(
    kernel: Kernel,
    shares: bool,
    make_tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    on_a_cpu: None,
) -> None:
    """One layer has a window; long rows come first in their row."""
    model_dir = make_tiny_model(use_sliding_window=True, sliding_window=5, max_window_layers=1)
    monkeypatch.setattr(policy, "choose_kernel", lambda *_: kernel)
    groups = make_groups(6)
    options = {"loss": make_loss("grpo"), "micro_batch_tokens": 200}
    trainer = fast_trainer(model_dir, share_prompts=shares, **options)
    assert trainer.describe_rows().endswith(f"packed rows; attention by {kernel.name}")
    plain = fast_trainer(model_dir, packs=False, **options)
    for one, two in zip(trainer.forward(groups), plain.forward(groups), strict=True):
        for row, other in zip(one, two, strict=True):
            assert abs(row - other).max() < 2e-6
    expected = gradients(plain, groups)
    for name, tensor in gradients(trainer, groups).items():
        assert torch.allclose(tensor, expected[name], atol=3e-7), name


# --- the choice -----------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Kernel]]:
    """Returns the candidates of a GPU with some packages."""

    def candidates(
        major: int, *installed: str, dtype: torch.dtype = torch.bfloat16
    ) -> list[Kernel]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
        monkeypatch.setattr(attention, "is_installed", lambda name: name in installed)
        return attention.candidates(CUDA, dtype)

    return candidates


def test_capability_and_packages_decide_what_is_tried(machine: Callable[..., list[Kernel]]) -> None:
    own, of_vllm = attention.FA4_MODULES
    every = attention.FA3_MODULE, own, of_vllm
    assert machine(9, *every) == [FA3, FA4, DENSE, VARLEN]
    assert machine(9, of_vllm) == [FA4, DENSE, VARLEN]
    assert machine(9) == [DENSE, VARLEN]
    assert machine(10, *every) == [FA4, VARLEN]
    for major in (8, 12):
        assert machine(major, *every) == [VARLEN]
    assert machine(9, *every, dtype=torch.float32) == [PRODUCTS]
    for dtype in (torch.float32, torch.bfloat16):
        assert attention.candidates(CPU, dtype) == [PRODUCTS]


def test_a_package_is_found_without_running_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "echo_tests_package" / "cute"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('it was run')")
    (folder / "interface.py").write_text("raise RuntimeError('it was run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert attention.is_installed("echo_tests_package.cute.interface")
    assert attention.is_installed("echo_tests_package")
    for name in ("echo_tests_package.cute.other", "echo_tests_package.x.interface", "no_such.one"):
        assert not attention.is_installed(name)


@pytest.mark.parametrize("shapes", [{SHAPE}, {SHAPE, WITH_WINDOW}])
@pytest.mark.parametrize("kernel", [VARLEN, DENSE])
def test_a_right_kernel_passes_its_trial(
    kernel: Kernel, shapes: set[LayerShape], on_a_cpu: None
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert attention.find_kernel_fault(kernel, CPU, dtype, shapes) is None


def wrongly(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda *states, **how: change(varlen_on_a_cpu(*states, **how))


class ZeroGradient(torch.autograd.Function):
    """Has the right values."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 0.0 * gradients[0]


@pytest.mark.parametrize(
    ("operator", "fault"),
    [
        (wrongly(lambda x: 1.1 * x), "RuntimeError: its values or gradients are wrong by 10%"),
        (
            wrongly(lambda x: x * torch.nan),
            "RuntimeError: its values or gradients are wrong by nan%",
        ),
        (wrongly(ZeroGradient.apply), "RuntimeError: its values or gradients are wrong by 100%"),
        (lambda *_, **__: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_kernel_is_told_once_and_the_next_one_is_taken(
    operator: Callable[..., Tensor],
    fault: str,
    machine: Callable[..., list[Kernel]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    on_a_cpu: None,
) -> None:
    machine(9)
    monkeypatch.setattr(attention, "candidates", lambda *_: [WRONG, DENSE, VARLEN])
    monkeypatch.setattr(attention, "varlen_attn", operator)
    attention.choose_kernel.cache_clear()
    for _ in range(2):
        chosen = attention.choose_kernel(CPU, torch.float32, frozenset({SHAPE}))
        assert chosen is DENSE
    notices = [record.getMessage() for record in caplog.records]
    assert notices == [f"attention by another kernel was tried and is not used: {fault}"]
    attention.choose_kernel.cache_clear()


WRONG = Kernel(name="another kernel")


def test_a_missing_package_leaves_the_operator_as_it_is(on_a_cpu: None) -> None:
    for kernel in (FA3, FA4):
        fault = attention.find_kernel_fault(kernel, CPU, torch.bfloat16, {SHAPE})
        assert fault is not None
        assert "Error: " in fault
        assert torch_attention.current_flash_attention_impl() is None


@pytest.fixture
def package_of_fa4(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """A package in the place of FlashAttention 4, as far as torch looks before a call."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        module = ModuleType(name)
        module.__path__ = [str(tmp_path)]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(attention, "is_installed", lambda name: name.startswith("flash_attn."))
    monkeypatch.delitem(sys.modules, attention.FA4_ADAPTER, raising=False)
    yield sys.modules["flash_attn.cute.interface"]
    torch_attention.restore_flash_attention_impl(_raise_warn=False)
    sys.modules.pop(attention.FA4_ADAPTER, None)


@pytest.mark.parametrize("num_further", [0, 2, 3])
def test_torch_gets_two_values_of_any_flash_attention_4(
    num_further: int, package_of_fa4: ModuleType
) -> None:
    from torch.nn.attention import _fa4

    called: dict[str, Any] = {}

    def forward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Any, ...]:
        called.update(options)
        return (query, key[..., 0], *[None] * num_further)

    package_of_fa4._flash_attn_fwd = forward  # type: ignore[attr-defined]
    package_of_fa4._flash_attn_bwd = lambda *states, **_: states[:3]  # type: ignore[attr-defined]
    _fa4._fa4_import_module.cache_clear()
    attention.activate(FA4)
    assert torch_attention.current_flash_attention_impl() == "FA4"
    query, ends = torch.randn(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    run: Any = _fa4._fa4_run_forward
    out, lse = run(query, query, query, ends, ends, 5, 5, None, True, -1, 0, None)
    assert out is query
    assert torch.equal(lse, query[..., 0])
    assert called["causal"] is True
    backward: Any = _fa4._fa4_run_backward
    found = backward(query, query, query, query, query, lse, ends, ends, None, True, -1, 0)
    assert len(found) == 3
    attention.deactivate(FA4)
    assert torch_attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("file", ["tests/train/test_attention.py", "bench/bench_attention.py"])
def test_a_torch_whose_flash_kernels_cannot_be_replaced_is_enough(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare machine may have one: both files are imported there."""
    for name in ("activate", "current", "register", "restore"):
        monkeypatch.delattr(torch_attention, f"{name}_flash_attention_impl")
    assert runpy.run_path(str(REPOSITORY / file))


def test_a_cpu_is_not_asked(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_kernel_fault", None)
    assert "attention by" not in policy_of(tiny_model_dir, dtype=torch.bfloat16).describe_rows()


# --- on a GPU -------------------------------------------------------------------------------------

GPU_SHAPES = {
    LayerShape(num_heads=16, num_key_heads=8, width=128, value_width=128),
    LayerShape(num_heads=4, num_key_heads=1, width=64, value_width=64, window=100),
}


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("window", [None, 20])
def test_the_stand_in_computes_what_the_operator_does(
    window: int | None, row: str, device: str
) -> None:
    segments = Segments.of(*ROWS[row]).to(torch.device(device))
    size = sum(segments.lengths)
    states = [torch.randn(size, heads, 64, device=device).bfloat16() for heads in (4, 2, 2)]
    if segments.keys is not None:
        states[1:] = (x.index_select(0, segments.keys) for x in states[1:])
    longest = max(segments.lengths)
    most = int(segments.key_ends.diff().max())
    given = segments.ends, segments.key_ends, longest, most
    how: dict[str, Any] = {
        "scale": None,
        "window_size": (-1 if window is None else window - 1, 0),
        "enable_gqa": True,
    }
    operator: Any = varlen_attn
    stand_in: Any = varlen_on_a_cpu
    found: Tensor = operator(*states, *given, **how)
    expected = stand_in(*(x.float() for x in states), *given, **how)
    assert float((found.float() - expected).norm() / expected.norm()) < attention.MAX_ERROR


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_GPU)])
def test_all_candidates_of_this_gpu_are_right(device: str) -> None:
    """FlashAttention 3 and 4 only if they are installed; the name of each is printed."""
    given = torch.device(device), torch.bfloat16
    for kernel in attention.candidates(*given):
        fault = attention.find_kernel_fault(kernel, *given, GPU_SHAPES)
        print(f"{kernel.name}: {fault or 'right'}")
        attention.deactivate(kernel)
        assert fault is None
