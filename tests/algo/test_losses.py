"""GRPO against numbers worked out by hand, finite differences, and its invariances."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from echo.algo.losses import LOSSES, GrpoLoss, LossInputs, LossOutput, make_loss
from echo.errors import ConfigError

torch.set_num_threads(1)


def make_inputs(
    learner: Tensor, sampler: Tensor, advantages: Tensor, mask: Tensor | None = None, **counts: int
) -> LossInputs:
    mask = torch.ones_like(learner, dtype=torch.bool) if mask is None else mask
    return LossInputs(
        learner_logprobs=learner,
        sampler_logprobs=sampler,
        advantages=advantages,
        completion_mask=mask,
        num_tokens=counts.get("num_tokens", int(mask.sum())),
    )


def random_inputs(seed: int = 0, *, spread: float = 0.5) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    sampler = -3.0 * torch.rand(6, 5, dtype=torch.float64, generator=generator)
    noise = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    lengths = torch.tensor([5, 4, 3, 2, 1, 5])
    return make_inputs(
        (sampler + spread * noise).requires_grad_(),
        sampler,
        torch.randn(6, dtype=torch.float64, generator=generator),
        torch.arange(5)[None] < lengths[:, None],
    )


def gradient(loss: GrpoLoss, inputs: LossInputs) -> Tensor:
    (grad,) = torch.autograd.grad(loss(inputs).loss, inputs.learner_logprobs)
    return grad


def test_each_branch_by_hand() -> None:
    # Ratios per row: inside, below, above the range, and above the dual clip.
    ratios = torch.tensor([[1.1, 0.5, 2.0, 4.0], [1.1, 0.5, 2.0, 4.0]], dtype=torch.float64)
    learner = ratios.log().requires_grad_()
    inputs = make_inputs(learner, torch.zeros_like(learner), torch.tensor([2.0, -1.0]))
    output = GrpoLoss()(inputs)
    #        A = 2: -min(2 r, 2 clip(r))        A = -1: -min(-r, -clip(r)), at most 3
    losses = [-2.2, -1.0, -2.56, -2.56, 1.1, 0.8, 2.0, 3.0]
    assert output.loss.item() == pytest.approx(sum(losses) / 8)
    assert {name: int(count) for name, count in output.token_counts.items()} == {
        "clip_ratio/low": 1,
        "clip_ratio/high": 2,
        "clip_ratio/dual": 1,
        "clip_ratio/mean": 4,
    }
    output.loss.backward()
    assert learner.grad is not None
    # -A r / 8 where the ratio still counts, nothing where it is clipped.
    assert (8 * learner.grad).flatten().tolist() == pytest.approx(
        [-2.2, -1.0, 0.0, 0.0, 1.1, 0.0, 2.0, 0.0]
    )


def test_without_dual_clip_a_bad_token_pulls_without_bound() -> None:
    learner = torch.tensor([[math.log(50.0)]], dtype=torch.float64, requires_grad=True)
    inputs = make_inputs(learner, torch.zeros_like(learner), torch.tensor([-1.0]))
    assert GrpoLoss(dual_clip=None)(inputs).loss.item() == pytest.approx(50.0)
    assert GrpoLoss(dual_clip=10.0)(inputs).loss.item() == pytest.approx(10.0)


def test_published_vector() -> None:
    """ALGORITHMS.md 4.4 with the proximal policy as sampler: u = [1.105, 1.221, .607, 1]."""
    learner = torch.tensor([[-1.0, -0.5, -2.0, -0.1]], dtype=torch.float64)
    sampler = torch.tensor([[-1.1, -0.7, -1.5, -0.1]], dtype=torch.float64)
    output = GrpoLoss()(make_inputs(learner, sampler, torch.tensor([1.0])))
    assert output.loss.item() == pytest.approx(-0.9832760840, abs=1e-10)


def slow_grpo(inputs: LossInputs, low: float, high: float, dual: float | None) -> float:
    """The same equation, one token at a time."""
    total = 0.0
    for row, column in inputs.completion_mask.nonzero().tolist():
        advantage = float(inputs.advantages[row])
        ratio = math.exp(
            float(inputs.learner_logprobs[row, column].detach())
            - float(inputs.sampler_logprobs[row, column])
        )
        surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if dual is not None and advantage < 0:
            surrogate = max(surrogate, dual * advantage)
        total -= surrogate
    return total / inputs.num_tokens


@pytest.mark.parametrize("dual_clip", [3.0, None])
@pytest.mark.parametrize("spread", [0.05, 0.5, 2.0])
def test_agrees_with_the_equation_token_by_token(dual_clip: float | None, spread: float) -> None:
    inputs = random_inputs(spread=spread)
    output = GrpoLoss(dual_clip=dual_clip)(inputs)
    assert output.loss.item() == pytest.approx(slow_grpo(inputs, 0.2, 0.28, dual_clip), abs=1e-12)


@pytest.mark.parametrize("dual_clip", [3.0, None])
def test_gradcheck_in_float64(dual_clip: float | None) -> None:
    inputs = random_inputs(spread=1.0)
    loss = GrpoLoss(dual_clip=dual_clip)

    def function(learner: Tensor) -> Tensor:
        return loss(
            make_inputs(learner, inputs.sampler_logprobs, inputs.advantages, inputs.completion_mask)
        ).loss

    assert torch.autograd.gradcheck(function, inputs.learner_logprobs)


def test_without_staleness_it_is_the_plain_policy_gradient() -> None:
    inputs = random_inputs(spread=0.0)
    expected = -inputs.advantages[:, None].expand(6, 5) / inputs.num_tokens
    expected = torch.where(inputs.completion_mask, expected, 0.0)
    assert torch.allclose(gradient(GrpoLoss(), inputs), expected, atol=0, rtol=1e-15)
    assert not any(GrpoLoss()(inputs).token_counts.values())


def test_no_advantage_gives_exactly_no_gradient() -> None:
    inputs = random_inputs()
    zero = make_inputs(
        inputs.learner_logprobs, inputs.sampler_logprobs, torch.zeros(6), inputs.completion_mask
    )
    assert not gradient(GrpoLoss(), zero).any()
    assert GrpoLoss()(zero).loss == 0


def test_padding_changes_nothing_whatever_it_holds() -> None:
    inputs = random_inputs()

    def pad(tensor: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, 3), value=value)

    learner = pad(inputs.learner_logprobs.detach(), math.nan).requires_grad_()
    mask = torch.nn.functional.pad(inputs.completion_mask, (0, 3))
    padded = make_inputs(learner, pad(inputs.sampler_logprobs, -math.inf), inputs.advantages, mask)
    assert torch.equal(GrpoLoss()(padded).loss, GrpoLoss()(inputs).loss)
    assert torch.equal(gradient(GrpoLoss(), padded)[:, :5], gradient(GrpoLoss(), inputs))
    assert not gradient(GrpoLoss(), padded)[:, 5:].any()


def test_the_order_of_rollouts_does_not_matter() -> None:
    inputs = random_inputs()
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    learner = inputs.learner_logprobs.detach()[order].requires_grad_()
    shuffled = make_inputs(
        learner,
        inputs.sampler_logprobs[order],
        inputs.advantages[order],
        inputs.completion_mask[order],
    )
    assert torch.allclose(GrpoLoss()(shuffled).loss, GrpoLoss()(inputs).loss, rtol=1e-14)
    assert torch.equal(gradient(GrpoLoss(), shuffled), gradient(GrpoLoss(), inputs)[order])


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    inputs = random_inputs()

    def part(rows: slice) -> LossOutput:
        return GrpoLoss()(
            make_inputs(
                inputs.learner_logprobs[rows],
                inputs.sampler_logprobs[rows],
                inputs.advantages[rows],
                inputs.completion_mask[rows],
                num_tokens=inputs.num_tokens,
            )
        )

    parts = [part(slice(0, 1)), part(slice(1, 4)), part(slice(4, 6))]
    whole = GrpoLoss()(inputs)
    assert sum(one.loss.item() for one in parts) == pytest.approx(whole.loss.item(), abs=1e-14)
    for name, count in whole.token_counts.items():
        assert sum(int(one.token_counts[name]) for one in parts) == int(count)


def test_a_fully_masked_row_contributes_nothing() -> None:
    inputs = random_inputs()
    mask = inputs.completion_mask.clone()
    mask[0] = False
    masked = make_inputs(
        inputs.learner_logprobs, inputs.sampler_logprobs, inputs.advantages, mask, num_tokens=15
    )
    assert not gradient(GrpoLoss(), masked)[0].any()
    assert gradient(GrpoLoss(), masked)[1:].any()


def test_an_extreme_ratio_stays_finite() -> None:
    learner = torch.tensor([[-0.1, -500.0]], requires_grad=True)
    sampler = torch.tensor([[-500.0, -0.1]])
    for advantage in (1.0, -1.0):
        inputs = make_inputs(learner, sampler, torch.tensor([advantage]))
        assert GrpoLoss(dual_clip=None)(inputs).loss.isfinite()
        assert gradient(GrpoLoss(dual_clip=None), inputs).isfinite().all()


def test_the_registry_builds_what_it_names() -> None:
    loss = make_loss("grpo", clip_low=0.1, clip_high=0.3, dual_clip=None)
    assert loss == GrpoLoss(clip_low=0.1, clip_high=0.3, dual_clip=None)
    assert set(LOSSES) == {"grpo"}


def test_an_unknown_loss_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'grop': no such loss; did you mean 'grpo'\?"):
        make_loss("grop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.5}, r"loss\.clip_low = 1\.5"),
        ({"clip_low": math.nan}, r"loss\.clip_low = nan"),
        ({"clip_high": -0.1}, r"loss\.clip_high = -0\.1"),
        ({"dual_clip": 1.2}, r"loss\.dual_clip = 1\.2: must be above .* 1\.28"),
    ],
)
def test_unusable_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loss("grpo", **options)
