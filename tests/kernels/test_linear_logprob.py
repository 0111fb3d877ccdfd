"""The chunked log-probabilities against the obvious way in float64, in values and gradients."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echo.kernels.contract import FurtherIds
from echo.kernels.logprob import linear_further_logprobs, linear_logprob
from tests.kernels.reference import linear_logprob_reference


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    ids: Tensor
    inv_temperature: Tensor


def make_case(
    rows: int = 37,
    width: int = 24,
    vocab: int = 211,
    *,
    gain: float = 1.0,
    shift: float = 0.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Random rows whose logits are `gain` times unit normal plus `shift` in every column."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator)
    weight = gain * torch.randn(vocab, width, generator=generator) / math.sqrt(width)
    if shift:  # a constant feature adds the same number to all logits of all rows
        hidden[:, 0] = 1.0
        weight[:, 0] = shift
    ids = torch.randint(vocab, (rows,), generator=generator)
    inv_temperature = 0.5 + torch.rand(rows, generator=generator)
    return Case(hidden.to(dtype), weight.to(dtype), ids, inv_temperature)


class Results(NamedTuple):
    logprobs: Tensor
    entropies: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def evaluate(function: Any, case: Case, **options: Any) -> Results:
    """Values and the gradients of a random combination of both outputs."""
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    logprobs, entropies = function(hidden, weight, case.ids, case.inv_temperature, **options)
    generator = torch.Generator().manual_seed(99)
    coefficients = torch.randn(2, len(case.ids), generator=generator).to(logprobs)
    loss = (coefficients[0] * logprobs).sum() + 0.3 * (coefficients[1] * entropies).sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return Results(logprobs.detach(), entropies.detach(), hidden.grad, weight.grad)


def reference(case: Case) -> Results:
    return evaluate(
        linear_logprob_reference,
        Case(case.hidden.double(), case.weight.double(), case.ids, case.inv_temperature.double()),
    )


def max_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).abs().max())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


# Case, largest error of values, relative error of gradients. A logit of 90 is rounded to 8e-6.
CASES = {
    "plain": (make_case(), 3e-6, 1e-6),
    "vocabulary smaller than a chunk": (make_case(vocab=5), 3e-6, 1e-6),
    "one token": (make_case(rows=1), 3e-6, 1e-6),
    "flat x0.01": (make_case(gain=0.01), 3e-6, 1e-6),
    "peaked x30": (make_case(gain=30.0), 1e-4, 1e-5),
    "shifted by -60": (make_case(shift=-60.0), 5e-5, 3e-5),
    "shifted by +60": (make_case(shift=60.0), 5e-5, 3e-5),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("vocab_chunk", [7, 64, 211, 8192])
def test_float32_agrees_with_float64(name: str, vocab_chunk: int) -> None:
    case, value_error, gradient_error = CASES[name]
    actual = evaluate(linear_logprob, case, entropy="grad", vocab_chunk=vocab_chunk)
    expected = reference(case)
    assert max_error(actual.logprobs, expected.logprobs) < value_error
    assert max_error(actual.entropies, expected.entropies) < value_error
    assert relative_error(actual.grad_hidden, expected.grad_hidden) < gradient_error
    assert relative_error(actual.grad_weight, expected.grad_weight) < gradient_error


@pytest.mark.parametrize("rows", [64, 37])
def test_bfloat16_inputs_lose_nothing_but_the_rounding_of_gradients(rows: int) -> None:
    case = make_case(rows=rows, width=64, vocab=500, gain=5.0, dtype=torch.bfloat16)
    actual = evaluate(linear_logprob, case, entropy="grad", vocab_chunk=128)
    expected = reference(case)
    assert actual.logprobs.dtype == torch.float32
    assert max_error(actual.logprobs, expected.logprobs) < 1e-5  # bf16 logits: around 3e-2
    assert max_error(actual.entropies, expected.entropies) < 1e-5
    assert actual.grad_hidden.dtype == actual.grad_weight.dtype == torch.bfloat16
    # A CPU that multiplies bfloat16 rounds the gradients of logits too, as a GPU does.
    assert relative_error(actual.grad_hidden, expected.grad_hidden) < 3.5e-3
    assert relative_error(actual.grad_weight, expected.grad_weight) < 2.5e-3


# --- further ids of each row ----------------------------------------------------------------------


def random_sets(case: Case, *, seed: int = 0) -> FurtherIds:
    """Sets of 0 to 8 ids, with the row's own id or without it."""
    generator = torch.Generator().manual_seed(seed)
    vocab = len(case.weight)
    sizes = torch.randint(0, min(9, vocab), (len(case.ids),), generator=generator)
    ids = [torch.randperm(vocab, generator=generator)[:size] for size in sizes]
    for row in range(0, len(ids), 2):
        if len(ids[row]) and not (ids[row] == case.ids[row]).any():
            ids[row][0] = case.ids[row]
    rows = torch.arange(len(ids)).repeat_interleave(sizes)
    return FurtherIds(rows, torch.cat([each.sort().values for each in ids]))


def set_reference(case: Case, sets: FurtherIds) -> Callable[..., Any]:
    """All log-probabilities, by materialising all logits."""

    def compute(hidden: Tensor, weight: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        scale = case.inv_temperature.double()[:, None]
        logprobs = ((hidden @ weight.T) * scale).log_softmax(1)
        own = logprobs.gather(1, case.ids[:, None]).squeeze(1)
        return own, -(logprobs.exp() * logprobs).sum(1), logprobs[sets.rows, sets.ids]

    return compute


class SetResults(NamedTuple):
    logprobs: Tensor
    entropies: Tensor
    set_logprobs: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def evaluate_sets(
    function: Any,
    case: Case,
    sets: FurtherIds,
    *,
    own: float = 1.0,
    device: str = "cpu",
    **options: Any,
) -> SetResults:
    """Values and the gradients of a random combination of all outputs; rows 1 and 2 have none."""
    case = Case(*(part.to(device) for part in case))
    sets = FurtherIds(sets.rows.to(device), sets.ids.to(device))
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    found = function(hidden, weight, case.ids, sets, case.inv_temperature, **options)
    logprobs, entropies, further = found
    generator = torch.Generator().manual_seed(99)
    of_row = torch.randn(2, len(case.ids), generator=generator).to(logprobs)
    of_id = torch.randn(len(further), generator=generator).to(logprobs)
    of_row[:, 1:3] = 0
    of_id[(sets.rows == 1) | (sets.rows == 2)] = 0
    loss = (own * of_row[0] * logprobs).sum() + (of_id * further).sum()
    (loss + 0.3 * (of_row[1] * entropies).sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    found = (logprobs, entropies, further, hidden.grad, weight.grad)
    return SetResults(*(part.detach().cpu() for part in found))


def check_sets(case: Case, *, value_error: float, gradient_error: float, **options: Any) -> None:
    sets = random_sets(case)
    doubles = Case(case.hidden.double(), case.weight.double(), case.ids, case.inv_temperature)
    for own in (0.0, 1.0):
        expected = evaluate_sets(set_reference(case, sets), doubles, sets, own=own)
        actual = evaluate_sets(
            linear_further_logprobs, case, sets, own=own, entropy="grad", **options
        )
        for name in ("logprobs", "entropies", "set_logprobs"):
            assert max_error(getattr(actual, name), getattr(expected, name)) < value_error
        for name in ("grad_hidden", "grad_weight"):
            assert relative_error(getattr(actual, name), getattr(expected, name)) < gradient_error


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("vocab_chunk", [7, 211, 8192])
def test_further_ids_agree_with_float64(name: str, vocab_chunk: int) -> None:
    case, value_error, gradient_error = CASES[name]
    check_sets(
        case, value_error=value_error, gradient_error=gradient_error, vocab_chunk=vocab_chunk
    )


def test_the_gradient_of_a_whole_vocabularys_set_is_that_of_its_softmax() -> None:
    """With the sets of all ids, sum_v p_v grad log p_v is 0, whatever the head."""
    case = make_case(rows=5, vocab=17)
    rows = torch.arange(5).repeat_interleave(17)
    sets = FurtherIds(rows, torch.arange(17).repeat(5))
    hidden, weight = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    _, _, further = linear_further_logprobs(hidden, weight, case.ids, sets, vocab_chunk=6)
    (further.detach().exp() * further).sum().backward()
    assert further.exp().view(5, 17).sum(1).tolist() == pytest.approx([1.0] * 5)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert float(hidden.grad.abs().max()) < 1e-14
    assert float(weight.grad.abs().max()) < 1e-14


def test_no_further_id_at_all_changes_nothing() -> None:
    case = make_case()
    none = FurtherIds(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    plain, _ = linear_logprob(*case)
    logprobs, _, further = linear_further_logprobs(
        case.hidden, case.weight, case.ids, none, case.inv_temperature
    )
    assert torch.equal(logprobs, plain)
    assert further.shape == (0,)


def test_a_further_id_outside_of_the_head_is_refused() -> None:
    case = make_case()
    sets = FurtherIds(torch.tensor([3]), torch.tensor([211]))
    with pytest.raises(ValueError, match=r"ids span 211\.\.211, but the LM head has 211 rows"):
        linear_further_logprobs(case.hidden, case.weight, case.ids, sets)


def test_numbers_worked_out_by_hand() -> None:
    # Logits (ln 1, ln 3), then at temperature 1/2 (ln 1, ln 9).
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[0.0], [math.log(3.0)]])
    ids = torch.tensor([1])
    logprobs, entropies = linear_logprob(hidden, weight, ids, entropy="value")
    assert entropies is not None
    assert logprobs.item() == pytest.approx(math.log(3 / 4))
    assert entropies.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))
    logprobs, _ = linear_logprob(hidden, weight, ids, 2.0)
    assert logprobs.item() == pytest.approx(math.log(9 / 10))


def test_uniform_logits_have_the_entropy_log_v() -> None:
    hidden = torch.zeros(3, 4)
    _, entropies = linear_logprob(
        hidden, torch.randn(1000, 4), torch.tensor([0, 5, 999]), entropy="value", vocab_chunk=300
    )
    assert entropies is not None
    assert entropies.tolist() == pytest.approx([math.log(1000)] * 3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("inv_temperature", [0.7, torch.tensor([0.5, 1.0, 2.0, 0.9, 1.3])])
def test_gradcheck_in_float64(inv_temperature: float | Tensor) -> None:
    case = make_case(rows=5, width=3, vocab=11, dtype=torch.float64)

    def of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropies = linear_logprob(
            hidden, weight, case.ids, inv_temperature, entropy="grad", vocab_chunk=4
        )
        assert entropies is not None
        return logprobs, entropies

    assert torch.autograd.gradcheck(
        of, (case.hidden.requires_grad_(), case.weight.requires_grad_())
    )


@pytest.mark.slow
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 6),
    vocab=st.integers(1, 30),
    vocab_chunk=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_chunk_gives_the_same(
    rows: int, width: int, vocab: int, vocab_chunk: int, seed: int
) -> None:
    case = make_case(rows, width, vocab, dtype=torch.float64, seed=seed)
    actual = evaluate(linear_logprob, case, entropy="grad", vocab_chunk=vocab_chunk)
    expected = reference(case)
    for one, other in zip(actual, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_no_rows_at_all() -> None:
    empty = evaluate(linear_logprob, make_case(rows=0), entropy="grad")
    assert empty.logprobs.shape == (0,)
    assert not empty.grad_weight.any()


def test_rows_without_gradient_contribute_nothing() -> None:
    case = make_case()
    coefficients = torch.randn(37).masked_fill(torch.arange(37) % 2 == 0, 0.0)
    dead = coefficients == 0

    def gradients(hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of the states and the weight, by a launch over `rows`."""
        states = hidden[rows].requires_grad_()
        weight = case.weight.clone().requires_grad_()
        logprobs, _ = linear_logprob(states, weight, case.ids[rows], case.inv_temperature[rows])
        found = torch.autograd.grad((logprobs * coefficients[rows]).sum(), (states, weight))
        return found[0], found[1]

    every = torch.arange(37)
    grad_states, grad_weight = gradients(case.hidden, every)
    spoilt = gradients(case.hidden.masked_fill(dead[:, None], math.nan), every)
    assert not grad_states[dead].any()
    assert torch.equal(grad_states, spoilt[0])
    assert torch.equal(grad_weight, spoilt[1])
    # A launch without them is another product, which a BLAS may round in another way.
    _, alone = gradients(case.hidden, every[~dead])
    assert relative_error(grad_weight, alone.double()) < 1e-6


def test_entropy_modes() -> None:
    case = make_case()
    weight = case.weight.clone().requires_grad_()
    _, none = linear_logprob(case.hidden, weight, case.ids, entropy="none")
    _, value = linear_logprob(case.hidden, weight, case.ids, entropy="value")
    _, grad = linear_logprob(case.hidden, weight, case.ids, entropy="grad")
    assert none is None
    assert value is not None
    assert grad is not None
    assert not value.requires_grad  # a constant, so that nobody takes it for a bonus
    assert grad.requires_grad
    assert torch.equal(value, grad)


def test_a_frozen_head_or_frozen_states_get_no_gradient() -> None:
    case = make_case()
    hidden = case.hidden.clone().requires_grad_()
    linear_logprob(hidden, case.weight, case.ids)[0].sum().backward()
    weight = case.weight.clone().requires_grad_()
    linear_logprob(case.hidden, weight, case.ids)[0].sum().backward()
    both = evaluate(
        lambda *args: (linear_logprob(*args[:3])[0], torch.zeros(37)),
        case,
    )
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.shape == both.grad_hidden.shape
    assert hidden.grad.any()
    assert weight.grad.any()


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operation made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, Tensor):
                self.num_elements = max(self.num_elements, part.numel())
        return result


@pytest.mark.slow
def test_the_full_logit_matrix_never_exists() -> None:
    rows, width, vocab, vocab_chunk = 300, 8, 1000, 100
    with LargestTensor() as ours:
        evaluate(
            linear_logprob,
            make_case(rows, width, vocab),
            entropy="grad",
            vocab_chunk=vocab_chunk,
        )
    case = make_case(rows, width, vocab)
    with LargestTensor() as with_sets:
        evaluate_sets(
            linear_further_logprobs,
            case,
            random_sets(case),
            entropy="grad",
            vocab_chunk=vocab_chunk,
        )
    assert with_sets.num_elements == rows * vocab_chunk
    with LargestTensor() as obvious:
        evaluate(linear_logprob_reference, make_case(rows, width, vocab))
    assert obvious.num_elements == rows * vocab
    assert ours.num_elements == rows * vocab_chunk


# VmHWM starts afresh with a program; ru_maxrss would begin at the size of the one that started it.
MEMORY_SCRIPT = r"""
import pathlib, re, torch
from echo.kernels.logprob import linear_logprob
from tests.kernels.reference import linear_logprob_reference
def step(function, rows, vocab, **options):
    hidden = torch.ones(rows, 16, requires_grad=True)
    weight = torch.ones(vocab, 16, requires_grad=True)
    function(hidden, weight, torch.zeros(rows, dtype=torch.long), **options)[0].sum().backward()
def peak_kib():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
for function in (linear_logprob, linear_logprob_reference):
    step(function, 8, 64)
start = peak_kib()
step(linear_logprob, 1024, 32000, entropy="value", vocab_chunk=4096)
ours = peak_kib()
step(linear_logprob_reference, 1024, 32000)
print(ours - start, peak_kib() - start)
"""


@pytest.mark.matrix  # the test before it says the same of every tensor
@pytest.mark.skipif(sys.platform != "linux", reason="reads the high-water mark from /proc")
def test_peak_memory_of_the_process_is_a_fraction_of_the_obvious_path() -> None:
    # The high-water mark only rises, so the smaller consumer has to run first.
    # A fixed mmap threshold returns every freed matrix at once; glibc's moving one adds 100 MB of
    # chance to either figure.
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    ours_kib, obvious_kib = map(int, result.stdout.split())
    assert obvious_kib > 2 * 1024 * 32000 * 4 / 1024  # two [N, V] float32 matrices at least
    assert ours_kib < 0.25 * obvious_kib


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([0, 1, 11])}, r"ids span 0\.\.11, but the LM head has 11 rows"),
        ({"ids": torch.tensor([0, -1, 3])}, r"ids span -1\.\.3"),
        ({"ids": torch.tensor([0, 1])}, r"ids has shape \[2\], expected \[3\]"),
        ({"weight": torch.ones(11, 5)}, r"hidden \[3, 4\] and weight \[11, 5\]"),
        ({"inv_temperature": 0.0}, r"inv_temperature = 0\.0: must be positive"),
        ({"inv_temperature": float("nan")}, "must be positive and finite"),
        ({"inv_temperature": torch.ones(2)}, r"inv_temperature has shape \[2\], expected \[3\]"),
        ({"inv_temperature": torch.tensor([1.0, -1.0, 1.0])}, "in every row"),
        ({"inv_temperature": torch.ones(3, requires_grad=True)}, "requires a gradient"),
        ({"entropy": "yes"}, "use 'none', 'value' or 'grad'"),
        ({"vocab_chunk": 0}, "vocab_chunk = 0"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.ones(3, 4),
        "weight": torch.ones(11, 4),
        "ids": torch.tensor([0, 1, 10]),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        linear_logprob(**arguments)
