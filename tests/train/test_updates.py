"""Updates of a step: the three operations, several minibatches, learning rates, entropy bonus.

Helpers come from test_trainer.py.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from echo.algo.batching import MicroBatch
from echo.algo.loss import LossInputs, LossNeeds, LossOutput, needs_of
from echo.algo.losses import EntropyBonusLoss, GrpoLoss, make_loss
from echo.core.errors import EngineError
from echo.core.rollout import Group
from echo.train.batch import StepBatch
from echo.train.optimizer import OptimizerSettings
from echo.train.step import StepError
from echo.train.trainer import Trainer
from tests.train.test_trainer import (
    assert_close,
    equal,
    gradients,
    make_group,
    on_policy,
    own_gradients,
)
from tests.train.trainers import FAST, TWO_UPDATES, fast_trainer


def useful_groups(count: int, *, seed: int = 0) -> list[Group]:
    return [make_group([1, 0, 0, 1], n, seed=seed) for n in range(count)]


# --------------------------------------------------------------------------- the three operations


def gradient_now(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in trainer.policy.parameters().items():
        assert tensor.grad is not None
        found[name] = tensor.grad.clone()
    return found


def halves(trainer: Trainer, groups: list[Group]) -> list[StepBatch]:
    """Both halves of a batch, with the counts of the whole."""
    whole = trainer.prepare(groups)
    half = len(whole.samples) // 2
    return [
        dataclasses.replace(whole, samples=rows)
        for rows in (whole.samples[:half], whole.samples[half:])
    ]


@pytest.mark.slow
def test_gradients_add_up_over_calls(tiny_model_dir: Path) -> None:
    groups, trainer = useful_groups(4), fast_trainer(tiny_model_dir)
    found = [trainer.forward_backward(part, GrpoLoss()) for part in halves(trainer, groups)]
    assert_close(gradient_now(trainer), gradients(fast_trainer(tiny_model_dir), groups))
    metrics = fast_trainer(tiny_model_dir).step(groups).metrics
    assert found[0]["loss/policy"] + found[1]["loss/policy"] == pytest.approx(
        metrics["loss/policy"]
    )
    assert trainer.optim_step(FAST) == pytest.approx(metrics["grad_norm"], rel=1e-5)
    assert all(tensor.grad is None for tensor in trainer.policy.parameters().values())


@pytest.mark.slow
def test_a_step_is_its_operations_in_a_row(tiny_model_dir: Path) -> None:
    groups = useful_groups(4)
    whole = fast_trainer(tiny_model_dir, optimizer=TWO_UPDATES)
    metrics = whole.step(groups).metrics
    by_hand = fast_trainer(tiny_model_dir)
    norms = []
    for part in (groups[::2], groups[1::2]):  # dealt, since the quick ones arrive first
        by_hand.forward_backward(by_hand.prepare(part), GrpoLoss())
        norms.append(by_hand.optim_step(FAST))
    assert equal(whole.snapshot(), by_hand.snapshot())
    assert metrics["grad_norm"] == sum(norms) / 2
    assert whole.step_count == 1
    assert not equal(whole.snapshot(), stepped(tiny_model_dir, groups).snapshot())


def stepped(model_dir: Path, *batches: list[Group], **options: Any) -> Trainer:
    trainer = fast_trainer(model_dir, **options)
    for groups in batches:
        trainer.step(groups)
    return trainer


def test_a_call_that_fails_leaves_no_gradient(tiny_model_dir: Path) -> None:
    trainer = fast_trainer(tiny_model_dir)
    first, second = halves(trainer, useful_groups(4))

    def raising(inputs: LossInputs) -> LossOutput:
        raise OverflowError("too much")

    trainer.forward_backward(first, GrpoLoss())
    with pytest.raises(StepError, match="the step raised OverflowError: too much"):
        trainer.forward_backward(second, raising)
    assert all(tensor.grad is None for tensor in trainer.policy.parameters().values())


@pytest.mark.parametrize("optimizer", [FAST, TWO_UPDATES])
def test_the_rate_is_scaled_by_the_effective_sample_size_of_rollouts(
    optimizer: OptimizerSettings, tiny_model_dir: Path
) -> None:
    groups = useful_groups(4)  # their log-probabilities are made up, so all ratios differ
    scaled = fast_trainer(tiny_model_dir, optimizer=optimizer, scales_by_ess=True)
    metrics = scaled.step(groups).metrics
    by_hand = fast_trainer(tiny_model_dir)
    rates = []
    count = optimizer.minibatches_per_step
    for part in (groups[first::count] for first in range(count)):
        batch = by_hand.prepare(part)
        log_ratios = [
            float((learner - rollout.sampler_logprobs)[rollout.completion_mask].sum())
            for group, scores in zip(part, by_hand.forward(part), strict=True)
            for rollout, learner in zip(group.rollouts, scores, strict=True)
        ]
        weights = np.exp(np.clip(log_ratios, -20, 20))
        ess = weights.sum() ** 2 / (len(weights) * np.square(weights).sum())
        assert ess < 0.9
        by_hand.forward_backward(batch, GrpoLoss())
        rates.append(FAST.learning_rate * math.sqrt(ess))
        by_hand.optim_step(dataclasses.replace(FAST, learning_rate=rates[-1]))
    assert metrics["lr"] == pytest.approx(sum(rates) / count, rel=1e-4)
    assert_close(scaled.snapshot(), by_hand.snapshot())
    if count == 1:
        assert metrics["ess/rollouts"] == pytest.approx(ess, rel=1e-4)


def test_on_policy_the_scaled_rate_is_the_whole_rate(tiny_model_dir: Path) -> None:
    trainer = fast_trainer(tiny_model_dir, scales_by_ess=True)
    metrics = trainer.step(on_policy(trainer, useful_groups(2))).metrics
    assert metrics["lr"] == pytest.approx(FAST.learning_rate, rel=1e-5)
    assert metrics["ess/rollouts"] == pytest.approx(1.0, rel=1e-5)


# ------------------------------------------------------------------------------- several updates


def test_a_part_without_a_gradient_makes_no_update(tiny_model_dir: Path) -> None:
    useful, idle = make_group([1, 0, 0, 1], 0), make_group([1, 1, 1], 1)
    cut = stepped(tiny_model_dir, [useful, idle], optimizer=TWO_UPDATES)
    # In a minibatch of its own, the useful group does not share its normaliser with the other.
    assert equal(cut.snapshot(), stepped(tiny_model_dir, [useful]).snapshot())


def test_later_updates_are_held_to_the_policy_at_the_start(tiny_model_dir: Path) -> None:
    seen: list[LossInputs] = []
    decoupled = make_loss("decoupled_ppo", clip_low=0.01, clip_high=0.01)

    def loss(inputs: LossInputs) -> LossOutput:
        seen.append(inputs)
        return decoupled(inputs)

    loss.needs = needs_of(decoupled)  # type: ignore[attr-defined]
    fast = dataclasses.replace(FAST, learning_rate=3e-3)
    twice = dataclasses.replace(fast, minibatches_per_step=2)
    trainer = fast_trainer(tiny_model_dir, loss=loss, optimizer=twice)
    groups = on_policy(trainer, [make_group([1, 0], n) for n in (4, 4)])
    metrics = trainer.step(groups).metrics
    first, second = seen
    assert first.proximal_logprobs is not None
    assert second.proximal_logprobs is not None
    mask = second.completion_mask
    start = second.sampler_logprobs[mask].numpy()  # sampled by the policy at the start
    assert np.allclose(second.proximal_logprobs[mask].numpy(), start, atol=1e-5)
    assert np.abs(second.learner_logprobs.detach()[mask].numpy() - start).max() > 1e-2
    assert metrics["clip_ratio/mean"] > 0.1  # of the second update alone: the first's ratios are 1
    assert stepped_metrics(tiny_model_dir, decoupled, fast, groups)["clip_ratio/mean"] == 0.0


def stepped_metrics(
    model_dir: Path, loss: Any, optimizer: OptimizerSettings, groups: list[Group]
) -> dict[str, float]:
    return fast_trainer(model_dir, loss=loss, optimizer=optimizer).step(groups).metrics


@pytest.mark.parametrize("reason", ["nonfinite_gradient", "step_error"])
@pytest.mark.slow
def test_a_later_update_that_fails_undoes_the_earlier_ones(
    tiny_model_dir: Path, reason: str
) -> None:
    trainer = stepped(tiny_model_dir, useful_groups(4), optimizer=TWO_UPDATES)
    before = trainer.snapshot()
    calls: list[int] = []

    def failing(inputs: LossInputs) -> LossOutput:
        calls.append(1)
        output = GrpoLoss()(inputs)
        if len(calls) == 1:
            return output
        if reason == "step_error":
            raise OverflowError("too much")
        return dataclasses.replace(output, loss=output.loss * math.nan)

    trainer.loss = failing
    with pytest.raises(StepError) as caught:
        trainer.step(useful_groups(4, seed=1))
    assert caught.value.reason == reason
    assert len(calls) == 2
    assert equal(trainer.snapshot(), before)
    trainer.loss = GrpoLoss()
    trainer.step(useful_groups(4, seed=2))
    undisturbed = stepped(
        tiny_model_dir, useful_groups(4), useful_groups(4, seed=2), optimizer=TWO_UPDATES
    )
    assert equal(trainer.snapshot(), undisturbed.snapshot())  # the moments are as before, too


# --------------------------------------------------------------------------------- learning rates


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "expected"),
    [
        ("constant", 2, [0.5, 1, 1, 1, 1, 1]),
        ("linear", 2, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", 2, [0.5, 1, 1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", 8, [n / 8 for n in range(1, 7)]),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    schedule: Any, warmup_steps: int, expected: list[float]
) -> None:
    settings = OptimizerSettings(
        learning_rate=1.0, warmup_steps=warmup_steps, lr_schedule=schedule, num_steps=6
    )
    assert [settings.learning_rate_at(step) for step in range(1, 7)] == pytest.approx(expected)
    if schedule != "constant" and warmup_steps < 6:
        assert settings.learning_rate_at(9) == pytest.approx(0.0)


def test_a_schedule_needs_its_end() -> None:
    with pytest.raises(ValueError, match='lr_schedule = "linear" needs num_steps'):
        OptimizerSettings(lr_schedule="linear")


# ---------------------------------------------------------------------------------- entropy bonus


def zero_loss(inputs: LossInputs) -> LossOutput:
    return LossOutput(loss=0.0 * inputs.learner_logprobs.sum(), token_counts={})


def test_the_bonus_is_the_mean_entropy_of_every_rollout(tiny_model_dir: Path) -> None:
    groups = [make_group([1, 0], 0), make_group([1, 1], 1)]  # the second has no advantage
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    bonus, num_tokens = torch.zeros(()), sum(group.num_tokens for group in groups)
    for group in groups:
        for rollout in group.rollouts:
            ids = torch.tensor([*group.prompt_ids, *rollout.token_ids[:-1]])
            logits = model(input_ids=ids[None]).logits[0, len(group.prompt_ids) - 1 :]
            bonus = bonus + torch.distributions.Categorical(logits=logits).entropy().sum()
    (-0.5 * bonus / num_tokens).backward()
    loss = EntropyBonusLoss(loss=zero_loss, coef=0.5)
    assert needs_of(loss) == LossNeeds(every_rollout=True, entropies=True)
    trainer = fast_trainer(tiny_model_dir, loss=loss, micro_batch_tokens=30)
    assert trainer.refusal(groups[1]) is None
    expected = own_gradients(model)
    found = gradients(trainer, groups)
    for name, tensor in expected.items():
        assert float((found[name] - tensor).abs().max()) < 3e-7, name


# ----------------------------------------------------------------------------------------- memory


def with_memory_for(trainer: Trainer, num_tokens: int, *, from_call: int = 0) -> Trainer:
    """The same trainer, on a device that holds `num_tokens` at a time after `from_call` calls."""
    score = trainer.policy.predictors
    calls: list[int] = []

    def predictors(batch: MicroBatch) -> Any:
        calls.append(batch.input_ids.numel())
        if calls[-1] > num_tokens and len(calls) > from_call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.\nDetails")
        return score(batch)

    trainer.policy.predictors = predictors  # type: ignore[method-assign]
    return trainer


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.slow
def test_a_step_that_runs_out_of_memory_goes_on_with_smaller_micro_batches(
    tiny_model_dir: Path, minibatches: int
) -> None:
    options: dict[str, Any] = {
        "loss": make_loss("decoupled_ppo"),
        "optimizer": dataclasses.replace(FAST, minibatches_per_step=minibatches),
        "micro_batch_tokens": 90,
        "share_prompts": False,
    }
    groups = useful_groups(6)
    # In the second micro-batch, when there is a gradient of the first.
    trainer = with_memory_for(fast_trainer(tiny_model_dir, **options), 40, from_call=1)
    result = trainer.step(groups)
    smaller = trainer.compute.micro_batch_tokens
    assert 20 <= smaller <= 40
    undisturbed = fast_trainer(tiny_model_dir, **(options | {"micro_batch_tokens": smaller}))
    assert result == undisturbed.step(groups)
    assert equal(trainer.snapshot(), undisturbed.snapshot())
    assert f"it goes on with learner.micro_batch_tokens = {smaller}: set that" in result.notices[-1]
    assert result.notices[0].startswith("step 1, ")
    assert "(CUDA out of memory. Tried to allocate 7 GiB.)" in result.notices[0]
    assert trainer.step(groups).notices == ()


def test_a_rollout_that_the_memory_does_not_hold_ends_its_group(tiny_model_dir: Path) -> None:
    short, long = make_group([1, 0], 0), make_group([1, 0, 0, 1], 5)
    longest = max(r.num_tokens for r in long.rollouts) + len(long.prompt_ids) - 1
    trainer = with_memory_for(fast_trainer(tiny_model_dir), longest - 1)
    before = trainer.snapshot()
    with pytest.raises(StepError, match=f"with {longest} tokens in a micro-batch, which cannot be"):
        trainer.step([short, long])
    assert trainer.find_faulty([short, long]) == {5: "out_of_memory"}
    assert equal(trainer.snapshot(), before)
    trainer.step([short])


def test_memory_that_the_optimizer_lacks_is_no_groups_fault(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(**settings: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer = fast_trainer(tiny_model_dir)
    monkeypatch.setattr(trainer.adapters.progress.optimizer, "step", step)
    with pytest.raises(EngineError, match=r"= .float32. ran out of memory beside 787 KiB"):
        trainer.step(useful_groups(1))


def test_gradients_of_earlier_calls_are_not_lost_in_silence(tiny_model_dir: Path) -> None:
    trainer = fast_trainer(tiny_model_dir, share_prompts=False)
    first, second = halves(trainer, useful_groups(4))
    trainer.forward_backward(first, GrpoLoss())
    with_memory_for(trainer, 60)
    with pytest.raises(StepError, match="gradients of earlier calls were lost"):
        trainer.forward_backward(second, GrpoLoss())
    assert all(tensor.grad is None for tensor in trainer.policy.parameters().values())
    trainer.forward_backward(first, GrpoLoss())  # with what the memory holds
    trainer.forward_backward(second, GrpoLoss())


# ------------------------------------------------------------------------------------------ speed


def test_a_step_tells_its_speed(tiny_model_dir: Path) -> None:
    groups = [*useful_groups(3), make_group([1, 1], 7)]  # the last never gets to the model
    trainer = fast_trainer(tiny_model_dir, micro_batch_tokens=60, share_prompts=False)
    speed = trainer.step(groups).speed
    rows = trainer.prepare(groups).samples
    num_tokens, num_scored = sum(r.num_inputs for r in rows), sum(r.num_trained for r in rows)
    assert len(rows) == 12
    ratio = speed["perf/scored_tokens_per_s"] / speed["perf/tokens_per_s"]
    assert ratio == pytest.approx(num_scored / num_tokens)
    num_micro_batches = sum(1 for _ in trainer.policy.micro_batches(rows))
    assert num_micro_batches > 1
    assert speed["perf/row_fill"] == pytest.approx(num_tokens / (60 * num_micro_batches))
    assert 0.5 < speed["perf/balance"] <= 1
    assert speed["perf/peak_memory_gb"] > 0.01
    assert "perf/mfu" not in speed  # the peak of this device is not known
    parts = [speed[f"time/{name}"] for name in ("pack", "forward_backward", "optimizer")]
    assert min(parts) > 0
    assert sum(parts) < num_tokens / speed["perf/tokens_per_s"]
    assert trainer.step([make_group([1, 1], 1)]).speed == {}
