"""Cases that the Triton backend has to get right, on a GPU or in Triton's interpreter.

test_triton_kernels.py runs this file in a process of its own: whether kernels are interpreted is
decided when triton is imported. By hand:
    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton_cases.py
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from echo.kernels import triton_kernels
from echo.kernels.adamw_8bit import update_weights
from echo.kernels.contract import BackendName, RatioClip
from echo.kernels.logprob import linear_logprob, linear_policy_loss
from echo.kernels.triton_kernels import LaunchConfig
from tests.kernels import test_adamw_8bit as adamw
from tests.kernels import test_linear_set_logprob as set_cases
from tests.kernels.test_linear_logprob import (
    Case,
    check_sets,
    evaluate,
    make_case,
    max_error,
    reference,
    relative_error,
)

pytestmark = pytest.mark.slow  # under the interpreter
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
DEVICE = "cpu" if triton_kernels.IS_INTERPRETED else "cuda"

SMALL = LaunchConfig(32, 64, 32, num_warps=4, num_stages=2, group_rows=2)
"""Use small tiles, so that a case has several in each direction, the last ones incomplete."""

TABLE = triton_kernels._config


def more(*case: Any) -> Any:
    """Mark cases whose kind has another case in every run."""
    return pytest.param(*case, marks=pytest.mark.matrix)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "_config", lambda *_: SMALL)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that a read before a write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(DEVICE, copy=True).requires_grad_()


def triton_results(case: Case, **options: Any) -> Any:
    case = Case(*(part.to(DEVICE) for part in case))
    options = {"entropy": "grad", "vocab_chunk": 128, **options}
    results = evaluate(linear_logprob, case, backend="triton", **options)
    return type(results)(*(part.cpu() for part in results))


def check(case: Case, *, value_error: float, gradient_error: float, **options: Any) -> None:
    actual, expected = triton_results(case, **options), reference(case)
    assert actual.logprobs.dtype == torch.float32
    assert actual.grad_hidden.dtype == actual.grad_weight.dtype == case.hidden.dtype
    assert max_error(actual.logprobs, expected.logprobs) < value_error
    assert max_error(actual.entropies, expected.entropies) < value_error
    assert relative_error(actual.grad_hidden, expected.grad_hidden) < gradient_error
    assert relative_error(actual.grad_weight, expected.grad_weight) < gradient_error


# Case, largest error of values, relative error of gradients, both against float64.
CASES = {
    "ragged rows, width and vocabulary": (make_case(), 3e-6, 1e-6),
    "a whole number of tiles": (make_case(32, 64, 128), 3e-6, 1e-6),
    "vocabulary smaller than a tile": (make_case(vocab=5), 3e-6, 1e-6),
    "vocabulary one over a tile": (make_case(vocab=65), 3e-6, 1e-6),
    "one token": (make_case(rows=1), 3e-6, 1e-6),
    "flat x0.01": (make_case(gain=0.01), 3e-6, 1e-6),
    "peaked x30": (make_case(gain=30.0), 3e-4, 1e-5),
    "shifted by -60": (make_case(shift=-60.0), 5e-5, 3e-5),
    "shifted by +60": (make_case(shift=60.0), 5e-5, 3e-5),
}


@pytest.mark.parametrize("name", ["ragged rows, width and vocabulary", *map(more, list(CASES)[1:])])
def test_float32_agrees_with_float64(name: str) -> None:
    case, value_error, gradient_error = CASES[name]
    check(case, value_error=value_error, gradient_error=gradient_error)


@pytest.mark.parametrize(
    ("dtype", "gradient_error"),
    # The interpreter truncates to bfloat16 where a GPU rounds.
    [more(torch.float16, 1e-3), (torch.bfloat16, 1.2e-2 if DEVICE == "cpu" else 2.6e-3)],
)
@pytest.mark.parametrize("gain", [more(1.0), 5.0])
def test_16_bit_inputs_lose_nothing_but_the_rounding_of_gradients(
    dtype: torch.dtype, gradient_error: float, gain: float
) -> None:
    check(make_case(gain=gain, dtype=dtype), value_error=1e-5, gradient_error=gradient_error)


@pytest.mark.parametrize(
    ("dtype", "value_error", "gradient_error"),
    [(torch.float32, 3e-6, 1e-6), (torch.bfloat16, 1e-5, 1.2e-2)],
)
def test_further_ids_agree_with_float64(
    dtype: torch.dtype, value_error: float, gradient_error: float
) -> None:
    check_sets(
        make_case(dtype=dtype),
        value_error=value_error,
        gradient_error=gradient_error,
        vocab_chunk=64,
        backend="triton",
        device=DEVICE,
    )


@pytest.mark.parametrize("max_splits", [more(1), 3, more(16)])
def test_any_number_of_splits_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, max_splits: int
) -> None:
    monkeypatch.setattr(triton_kernels, "MAX_SPLITS", max_splits)
    check(make_case(vocab=700), value_error=3e-6, gradient_error=1e-6)


@pytest.mark.parametrize("vocab_chunk", [more(1), more(7), 64, more(8192)])
def test_any_chunk_of_the_backward_gives_the_same(vocab_chunk: int) -> None:
    vocab = 9 if vocab_chunk == 1 else 211
    check(make_case(vocab=vocab), value_error=3e-6, gradient_error=1e-6, vocab_chunk=vocab_chunk)


@pytest.mark.matrix
def test_the_tiles_of_the_table_agree_with_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "_config", TABLE)
    case = make_case(rows=140, width=72, vocab=1031, dtype=torch.bfloat16)
    check(case, value_error=1e-5, gradient_error=1.2e-2, vocab_chunk=600)


@pytest.mark.parametrize("vocab", [5, 211])
def test_no_column_past_the_vocabulary_counts(vocab: int) -> None:
    # All logits are -60: a phantom column with a logit of 0 would take all the probability.
    hidden = torch.ones(3, 8, device=DEVICE)
    weight = torch.full((vocab, 8), -7.5, device=DEVICE)
    ids = torch.tensor([0, 1, vocab - 1], device=DEVICE)
    logprobs, entropies = linear_logprob(hidden, weight, ids, entropy="value", backend="triton")
    uniform = torch.tensor(vocab).log()
    assert entropies is not None
    assert torch.allclose(logprobs.cpu(), -uniform.expand(3), atol=1e-5)
    assert torch.allclose(entropies.cpu(), uniform.expand(3), atol=1e-5)


def test_without_the_entropy_the_rest_is_the_same() -> None:
    case = make_case()
    weight = leaf(case.weight)
    hidden, ids = case.hidden.to(DEVICE), case.ids.to(DEVICE)
    plain, none = linear_logprob(hidden, weight, ids, 0.7, backend="triton")
    with_value, value = linear_logprob(hidden, weight, ids, 0.7, entropy="value", backend="triton")
    assert none is None
    assert value is not None
    assert not value.requires_grad
    assert torch.equal(plain, with_value)


@pytest.mark.parametrize("rows", [0, 37])
def test_no_live_row_gives_zero_gradients(rows: int) -> None:
    case = make_case(rows=rows)
    hidden, weight = leaf(case.hidden), leaf(case.weight)
    logprobs, _ = linear_logprob(hidden, weight, case.ids.to(DEVICE), backend="triton")
    (0.0 * logprobs).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, about NaN
def test_rows_without_gradient_contribute_nothing() -> None:
    case = make_case()
    coefficients = torch.randn(37).masked_fill(torch.arange(37) % 2 == 0, 0.0)
    dead = coefficients == 0
    gradients = []
    for hidden in (case.hidden, case.hidden.masked_fill(dead[:, None], float("nan"))):
        states, weight = leaf(hidden), leaf(case.weight)
        logprobs, _ = linear_logprob(states, weight, case.ids.to(DEVICE), backend="triton")
        (logprobs * coefficients.to(DEVICE)).sum().backward()
        assert states.grad is not None
        assert weight.grad is not None
        gradients.append((states.grad, weight.grad))
    (grad_states, grad_weight), (spoilt_states, spoilt_weight) = gradients
    assert not grad_states[dead].any()
    assert torch.equal(grad_states, spoilt_states)
    assert torch.equal(grad_weight, spoilt_weight)
    # A launch without them rounds as it likes: products differ by where in a tile a row lies.
    alone = leaf(case.weight)
    logprobs, _ = linear_logprob(
        case.hidden[~dead].to(DEVICE), alone, case.ids[~dead].to(DEVICE), backend="triton"
    )
    (logprobs * coefficients[~dead].to(DEVICE)).sum().backward()
    assert alone.grad is not None
    assert relative_error(grad_weight, alone.grad.double()) < 1e-6


def test_the_result_of_a_row_does_not_depend_on_the_others() -> None:
    case = make_case(dtype=torch.float16)
    whole = triton_results(case)
    first = triton_results(Case(*(part[:9] if len(part) == 37 else part for part in case)))
    assert torch.equal(whole.logprobs[:9], first.logprobs)
    assert torch.equal(whole.entropies[:9], first.entropies)


@pytest.mark.matrix
def test_the_same_input_gives_the_same_bits() -> None:
    case = make_case(vocab=700)
    assert all(map(torch.equal, triton_results(case), triton_results(case)))


def test_every_launch_is_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []

    def device_of(tensor: torch.Tensor) -> Any:
        devices.append(tensor.device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    triton_results(make_case(rows=1))
    assert [device.type for device in devices] == [DEVICE] * 2  # forward, backward


@pytest.mark.matrix
def test_frozen_and_tied_heads() -> None:
    case = make_case()
    full = triton_results(case)
    hidden = leaf(case.hidden)
    ids, scale = case.ids.to(DEVICE), case.inv_temperature.to(DEVICE)
    linear_logprob(hidden, case.weight.to(DEVICE), ids, scale, backend="triton")[0].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == full.grad_hidden.shape
    # Tied: the head is the embedding too, and its gradient the sum of both uses.
    table = leaf(case.weight)
    head = leaf(case.weight)
    rows = torch.arange(37, device=DEVICE)
    linear_logprob(table[rows], table, ids, scale, backend="triton")[0].sum().backward()
    states = leaf(case.weight[:37])
    linear_logprob(states, head, ids, scale, backend="triton")[0].sum().backward()
    assert table.grad is not None
    assert head.grad is not None
    assert states.grad is not None
    expected = head.grad.clone()
    expected[:37] += states.grad
    assert torch.equal(table.grad, expected)


@pytest.mark.matrix
def test_outputs_can_be_changed_in_place() -> None:
    case = make_case()
    hidden, ids = leaf(case.hidden), case.ids.to(DEVICE)
    gradients: list[torch.Tensor] = []
    for factor in (1.0, 2.0):
        hidden.grad = None
        logprobs, _ = linear_logprob(hidden, case.weight.to(DEVICE), ids, backend="triton")
        logprobs.mul_(factor).sum().backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad)
    assert torch.allclose(gradients[1], 2.0 * gradients[0], atol=1e-6)


def test_states_that_tma_cannot_read_are_copied() -> None:
    case = make_case()
    spread = torch.zeros(37, 25, device=DEVICE)[:, :24]  # rows begin at multiples of 100 bytes
    spread.copy_(case.hidden)
    arguments = case.weight.to(DEVICE), case.ids.to(DEVICE)
    actual, _ = linear_logprob(spread, *arguments, backend="triton")
    expected, _ = linear_logprob(case.hidden.to(DEVICE), *arguments, backend="triton")
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("hidden", "weight", "message"),
    [
        (torch.ones(3, 8).half(), torch.ones(5, 8), "hidden is torch.float16, but weight is"),
        (torch.ones(3, 8).double(), torch.ones(5, 8).double(), "no kernel for torch.float64"),
        (torch.ones(3, 7), torch.ones(5, 7), r"begin at multiples of 16 bytes"),
        (torch.ones(3, 8), torch.ones(8, 5).T, r"weight \[5, 8\] has strides \[1, 5\]"),
    ],
)
def test_input_that_has_no_kernel_is_named(
    hidden: torch.Tensor, weight: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        linear_logprob(
            hidden.to(DEVICE), weight.to(DEVICE), torch.zeros(3, device=DEVICE).long(),
            backend="triton",
        )  # fmt: skip


# ---- the policy's loss


@pytest.mark.parametrize("dual_clip", [3.0, more(1.4), None])
def test_the_fused_loss_is_that_of_its_parts(dual_clip: float | None) -> None:
    """Every branch several times, a bounded log ratio, and advantages of 0."""
    case = make_case(rows=128, gain=2.0)
    generator = torch.Generator().manual_seed(3)
    log_ratio = 0.6 * torch.randn(128, generator=generator)
    log_ratio[:4] = torch.tensor([25.0, -25.0, 25.0, -25.0])
    advantages = torch.randn(128, generator=generator)
    advantages[:8] = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0, 1.0, -1.0])
    log_ratio[6:8] = 0.0
    sampler = linear_logprob(*case)[0] - log_ratio
    results = []
    places: dict[BackendName, str] = {"triton": DEVICE, "torch": "cpu"}
    for backend, device in places.items():
        hidden = case.hidden.to(device, copy=True).requires_grad_()
        weight = case.weight.to(device, copy=True).requires_grad_()
        tokens = linear_policy_loss(
            hidden, weight, case.ids.to(device), sampler.to(device), advantages.to(device),
            case.inv_temperature.to(device),
            clip=RatioClip(dual_clip=dual_clip), vocab_chunk=128, backend=backend,
        )  # fmt: skip
        assert not tokens.ratios.requires_grad
        (tokens.losses.sum() / 128).backward()
        values = [getattr(tokens, field.name) for field in fields(tokens)]
        found = [*values, hidden.grad, weight.grad]
        results.append([part.detach().cpu() for part in found if part is not None])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=2e-5, atol=2e-6)
    assert torch.equal(results[0][-2].any(1), results[1][-2].any(1)), "the same tokens are clipped"


def test_a_nan_comes_out_of_the_policy_loss() -> None:
    case = make_case(rows=3)
    sampler, advantages = -torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
    sampler[0] = advantages[1] = float("nan")
    hidden = leaf(case.hidden)
    tokens = linear_policy_loss(
        hidden, case.weight.to(DEVICE), case.ids.to(DEVICE), sampler, advantages,
        clip=RatioClip(), backend="triton",
    )  # fmt: skip
    assert tokens.losses.isnan().tolist() == [True, True, False]
    tokens.losses.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isnan().any(1).tolist() == [True, True, False]


# ---- an optimizer step


@pytest.mark.matrix
@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 0.99), (torch.float32, 0.999999)])
def test_a_step_of_the_learner_has_the_gradient_of_the_other_backend(
    make_tiny_model: Callable[..., Path], dtype: torch.dtype, least: float
) -> None:
    from echo.algo.losses import make_loss
    from echo.train.optimizer import OptimizerSettings
    from tests.train.test_trainer import gradients, make_groups
    from tests.train.trainers import trainer_of

    torch.use_deterministic_algorithms(False)  # not all of the model's operations have one
    found = []
    for backend in ("triton", "torch"):
        trainer = trainer_of(
            make_tiny_model(),
            loss=make_loss("grpo"),
            optimizer=OptimizerSettings(),
            device=torch.device(DEVICE),
            dtype=dtype,
            backend=backend,
        )
        parts = gradients(trainer, make_groups()).values()
        found.append(torch.cat([part.flatten().cpu() for part in parts]))
    one, other = found
    assert float(torch.nn.functional.cosine_similarity(one, other, dim=0)) > least


# ------------------------------------------------------------------------------ 8-bit AdamW


@pytest.mark.parametrize("betas", [more((0.9, 0.999)), (0.4, 0.95)])
def test_an_update_of_8_bit_moments_is_that_of_torch(betas: tuple[float, float]) -> None:
    weights = torch.randn(adamw.SHAPE, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    expected = weights.clone()
    moments, others = adamw.new_moments(DEVICE), adamw.new_moments(DEVICE)
    for step, update in enumerate(adamw.updates(betas), 1):
        gradients = adamw.gradients(step).to(DEVICE)
        update_weights(weights, gradients, *moments, update, backend="triton")
        update_weights(expected, gradients, *others, update, backend="torch")
    assert max_error(weights, expected) < 1e-6
    for one, other in zip(moments, others, strict=True):
        # A rounding of the last bit may move a value across the middle of two codes.
        differ = one.codes != other.codes
        assert int(differ.sum()) <= 1e-3 * differ.numel()
        assert relative_error(one.scales, other.scales) < 1e-6


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU may round the last bit to the other side")
@pytest.mark.parametrize("betas", [more(adamw.BETAS[0]), adamw.BETAS[1]])
def test_updates_of_8_bit_moments_are_those_of_torchao(betas: tuple[float, float]) -> None:
    adamw.check_numbers_of_torchao(betas, "triton")


# --- sets of ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ragged", *(more(name) for name in set_cases.CASES if name != "ragged")]
)
def test_rows_are_scored_on_their_sets(name: str) -> None:
    case, value_error, gradient_error = set_cases.CASES[name]
    for every in (4, 1000):
        set_cases.check(
            case,
            value_error=value_error,
            gradient_error=gradient_error,
            every=every,
            backend="triton",
            device=DEVICE,
        )


def test_sets_in_bfloat16_have_sums_in_float32() -> None:
    case = make_case(rows=200, dtype=torch.bfloat16)
    set_cases.check(case, gradient_error=5e-3, backend="triton", device=DEVICE)


def test_the_gradients_of_sets_have_the_same_bits_again() -> None:
    case = make_case(rows=200, vocab=9)  # every id is in many sets
    one, two = (set_cases.set_results(case, backend="triton", device=DEVICE) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))
