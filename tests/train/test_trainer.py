"""The trainer against autograd on the whole model, its invariances, its state, its refusals."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo.algo.advantages import group_advantages
from echo.algo.diagnostics import GroupStats, Mismatch
from echo.algo.losses import make_loss
from echo.core.errors import DataError, StorageError
from echo.core.rollout import Group, PolicyVersion, Rollout
from echo.core.token_sets import TokenSets
from echo.engine import allocator, weights
from echo.engine.weights import write_image
from echo.train.batch import AdvantageSettings
from echo.train.models import activations
from echo.train.optimizer import OptimizerSettings
from echo.train.step import NonfiniteWeightsError, StepError
from echo.train.trainer import Trainer
from tests.train.trainers import FAST, Descent, fast_trainer

PROMPT = [1, 7, 11, 13, 8, 10, 14, 17]

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_trainer(tiny_model_dir: Path) -> MakeTrainer:
    def make(**options: Any) -> Trainer:
        return fast_trainer(options.pop("model_dir", tiny_model_dir), **options)

    return make


def make_rollout(token_ids: Sequence[int], reward: float, **changes: Any) -> Rollout:
    num_tokens = len(token_ids)
    fields: dict[str, Any] = {
        "token_ids": np.array(token_ids, dtype=np.int32),
        "sampler_logprobs": np.full(num_tokens, -3.0, dtype=np.float32),
        "policy_versions": np.tile(np.array([1, 0], dtype=np.int32), (num_tokens, 1)),
        "completion_mask": np.ones(num_tokens, dtype=np.bool_),
        "reward": reward,
        "finish_reason": "stop",
    }
    return Rollout(**(fields | changes))


def make_group(rewards: Sequence[float], group_id: int = 0, *, seed: int = 0) -> Group:
    """Random completions of 1 to 9 tokens."""
    generator = np.random.default_rng([seed, group_id])
    return Group(
        group_id=group_id,
        attempt=0,
        worker_id="w1",
        prompt_ids=np.array(PROMPT[: 3 + group_id % 6], dtype=np.int32),
        rollouts=tuple(
            make_rollout(generator.integers(3, 28, size=generator.integers(1, 10)).tolist(), reward)
            for reward in rewards
        ),
    )


def make_groups(count: int = 4, *, seed: int = 0) -> list[Group]:
    patterns = [[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]]
    return [make_group(patterns[n % 4], n, seed=seed) for n in range(count)]


def on_policy(trainer: Trainer, groups: Sequence[Group]) -> list[Group]:
    """The same groups, with the trainer's own log-probs in place of the sampler's."""
    return [
        dataclasses.replace(
            group,
            rollouts=tuple(
                dataclasses.replace(rollout, sampler_logprobs=logprobs)
                for rollout, logprobs in zip(group.rollouts, scores, strict=True)
            ),
        )
        for group, scores in zip(groups, trainer.forward(groups), strict=True)
    ]


def change_of(group: Group, index: int, **changes: Any) -> Group:
    rollouts = list(group.rollouts)
    rollouts[index] = dataclasses.replace(rollouts[index], **changes)
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def with_mask(group: Group, index: int, *, is_trained: Any) -> Group:
    """The same group with the mask of a rollout: one value, or one for each token."""
    mask = np.broadcast_to(is_trained, group.rollouts[index].num_tokens).copy()
    return change_of(group, index, completion_mask=mask)


def with_likely(rollout: Rollout, k: int, *, seed: int = 0) -> Rollout:
    """The rollout with k random ids a token, which have 0.9 of the probability."""
    generator = np.random.default_rng([seed, rollout.num_tokens, int(rollout.token_ids[0])])
    ids = [np.sort(generator.choice(32, k, replace=False)) for _ in rollout.token_ids]
    shares = generator.dirichlet(np.ones(k), rollout.num_tokens)
    likely = TokenSets(
        sizes=np.full(rollout.num_tokens, k, np.int32),
        ids=np.concatenate(ids).astype(np.int32),
        logprobs=np.log(0.9 * shares.flatten() + 1e-6).astype(np.float32),
    )
    return dataclasses.replace(rollout, likely=likely)


def gradients(trainer: Trainer, groups: Sequence[Group]) -> dict[str, Tensor]:
    """The unclipped gradient of one step."""
    return gradients_and_metrics(trainer, groups)[0]


def gradients_and_metrics(
    trainer: Trainer, groups: Sequence[Group]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The unclipped gradient of one step, read off a step of plain descent, and its metrics."""
    parameters = trainer.policy.parameters()
    before = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    trainer.adapters.progress.optimizer = Descent(trainer)
    trainer.adapters.progress.settings = OptimizerSettings(
        learning_rate=1.0, warmup_steps=0, max_grad_norm=math.inf
    )
    metrics = trainer.step(groups).metrics
    return {name: before[name] - tensor.detach() for name, tensor in parameters.items()}, metrics


def plain_logprobs(model: Any, group: Group, rollout: Rollout, temperature: float) -> Tensor:
    """[T] log-probs of one rollout by the model's own logits, nothing padded."""
    ids = torch.tensor([*group.prompt_ids, *rollout.token_ids])
    logits = model(input_ids=ids[None, :-1]).logits[0, len(group.prompt_ids) - 1 :]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, ids[len(group.prompt_ids) :, None]).squeeze(1)


def own_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients that a plain backward pass left on a model's parameters."""
    parameters = dict(model.named_parameters())
    return {name: each.grad for name, each in parameters.items() if each.grad is not None}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal up to float32 rounding of the whole gradient."""
    assert actual.keys() == expected.keys()
    assert any(float(tensor.abs().max()) > 1e-2 for tensor in expected.values())
    for name, tensor in expected.items():
        assert float((actual[name] - tensor).abs().max()) < 3e-7, name


# ------------------------------------------------------------------------------------ log-probs


@pytest.mark.parametrize(("temperature", "micro_batch_tokens"), [(1.0, 40), (0.6, 1)])
def test_scores_are_the_models_own(
    make_trainer: MakeTrainer, tiny_model_dir: Path, temperature: float, micro_batch_tokens: int
) -> None:
    trainer = make_trainer(temperature=temperature, micro_batch_tokens=micro_batch_tokens)
    groups = make_groups()
    groups[0] = with_mask(groups[0], 0, is_trained=False)  # is scored, too
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    for group, scores in zip(groups, trainer.forward(groups), strict=True):
        for rollout, score in zip(group.rollouts, scores, strict=True):
            with torch.no_grad():
                expected = plain_logprobs(model, group, rollout, temperature)
            assert score.dtype == np.float32
            assert np.allclose(score, expected.numpy(), atol=2e-6)


# ------------------------------------------------------------------------------------- gradient


@pytest.mark.slow
def test_gradient_is_that_of_the_formula(make_trainer: MakeTrainer, tiny_model_dir: Path) -> None:
    """Masked tokens add nothing, and groups of equal rewards count in the normaliser."""
    trainer = make_trainer()
    groups = make_groups()
    spoilt = np.arange(groups[0].rollouts[0].num_tokens) % 2 == 0
    logprobs = np.where(spoilt, np.nan, -3.0).astype(np.float32)
    groups[0] = change_of(groups[0], 0, completion_mask=~spoilt, sampler_logprobs=logprobs)
    groups[2] = with_mask(groups[2], 0, is_trained=False)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    masks = [rollout.completion_mask for group in groups for rollout in group.rollouts]
    num_tokens = sum(int(mask.sum()) for mask in masks)
    loss = torch.zeros(())
    for group in groups:
        rewards = np.array([group.rewards], np.float64)
        advantages = torch.from_numpy(group_advantages(rewards, normalize_by_std=False)[0])
        for rollout, advantage in zip(group.rollouts, advantages.float(), strict=True):
            mask = torch.from_numpy(rollout.completion_mask)
            ratio = (plain_logprobs(model, group, rollout, 1.0)[mask] + 3.0).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            if advantage < 0:
                surrogate = torch.maximum(surrogate, 3.0 * advantage)
            loss = loss - surrogate.sum() / num_tokens
    loss.backward()
    expected = own_gradients(model)
    assert trainer.snapshot().keys() == expected.keys()
    assert_close(gradients(trainer, groups), expected)


def test_the_order_of_groups_and_rollouts_does_not_matter(make_trainer: MakeTrainer) -> None:
    groups = make_groups(5)
    shuffled = [
        dataclasses.replace(group, rollouts=tuple(reversed(group.rollouts)))
        for group in reversed(groups)
    ]
    assert_close(gradients(make_trainer(), shuffled), gradients(make_trainer(), groups))


@pytest.mark.slow
def test_without_staleness_it_is_the_plain_policy_gradient(
    make_trainer: MakeTrainer, tiny_model_dir: Path
) -> None:
    trainer = make_trainer()
    groups = on_policy(trainer, make_groups())
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    loss = torch.zeros(())
    for group in groups:
        mean = sum(group.rewards) / len(group.rewards)
        for rollout in group.rollouts:
            logprobs = plain_logprobs(model, group, rollout, 1.0)
            loss = loss - (rollout.reward - mean) * logprobs.sum()
    (loss / sum(group.num_tokens for group in groups)).backward()
    expected = own_gradients(model)
    metrics = make_trainer().step(groups).metrics
    assert metrics["is_ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["is_ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["clip_ratio/mean"] == 0.0
    assert_close(gradients(trainer, groups), expected)


def test_gradient_checkpointing_changes_nothing_and_offloaded_inputs_no_bit(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = make_groups()
    expected = gradients(make_trainer(gradient_checkpointing=True), groups)
    assert_close(expected, gradients(make_trainer(), groups))
    assert equal(gradients(make_trainer(gradient_checkpointing="offload"), groups), expected)
    kept: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    monkeypatch.setattr(activations, "begin_to_offload", pack)
    monkeypatch.setattr(activations, "begin_to_restore", lambda tensor: tensor)
    trainer = make_trainer(gradient_checkpointing="offload")
    assert equal(gradients(trainer, groups), expected)
    config = trainer.policy.model.config
    (shape,) = set(kept)
    assert shape[2] == config.hidden_size
    assert len(kept) % config.num_hidden_layers == 0, "what goes into each layer, and nothing else"


class LateStream:
    """In place of a GPU's stream: it copies only when training or the test waits for it."""

    device = torch.device("cpu")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._queue: list[Callable[[], None]] = []
        self._has_run = threading.Event()
        self._sees_training = False
        training = SimpleNamespace(wait_stream=lambda other: other.run())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: training)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
        monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(weights, "write_image", self._write_image)

    def _write_image(self, *arguments: Any, is_beside: bool = False) -> None:
        write = partial(write_image, *arguments)
        if is_beside:
            assert self._sees_training
            self._queue.append(write)
        else:
            write()

    def wait_stream(self, _: object) -> None:
        self._sees_training = True

    def record_event(self, event: SimpleNamespace) -> Any:
        assert event.blocking, "who waits for it is asleep"
        return SimpleNamespace(synchronize=self._wait)

    def _wait(self) -> None:
        assert self._has_run.wait(10)

    def run(self) -> None:
        for each in self._queue:
            each()
        self._queue.clear()
        self._has_run.set()


def test_a_version_that_comes_down_late_has_the_weights_of_its_step(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, stream = make_trainer(), LateStream(monkeypatch)
    trainer.weights.copy_stream = stream  # type: ignore[assignment]
    images = weights.VersionImages(
        "bfloat16",
        block_bytes=1 << 16,
        copy_stream=stream,  # type: ignore[arg-type]
    )
    _, before = weights.publish_image(trainer.tensors(), "bfloat16")
    made = images.make(trainer.tensors(), PolicyVersion(1, 0))
    assert made.ready is not None
    assert not made.ready.done()
    trainer.step(make_groups())
    stream.run()  # at last, had nobody waited for it
    assert made.ready.result() is None
    assert made.memory == before
    assert weights.publish_image(trainer.tensors(), "bfloat16")[1] != before


def test_no_step_waits_for_a_version_that_is_compared_on_the_device(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing reads the weights by then, but a copy of them."""
    trainer, stream, gate = make_trainer(), LateStream(monkeypatch), threading.Event()
    trainer.weights.copy_stream = stream  # type: ignore[assignment]
    monkeypatch.setattr(stream, "wait_stream", mock.Mock(side_effect=AssertionError))
    images = weights.VersionImages(
        "bfloat16",
        block_bytes=1 << 14,
        is_on_device=True,
        copy_stream=stream,  # type: ignore[arg-type]
    )
    first = images.make(trainer.tensors(), PolicyVersion(1, 0))
    assert first.ready is not None
    first.ready.result()
    bring = weights.copy_to_host
    monkeypatch.setattr(weights, "copy_to_host", lambda tensors: gate.wait(10) and bring(tensors))
    trainer.step(make_groups())
    _, expected = weights.publish_image(trainer.tensors(), "bfloat16")
    made = images.make(trainer.tensors(), PolicyVersion(1, 1))
    trainer.step(make_groups())
    assert made.ready is not None
    assert not made.ready.done()
    gate.set()
    made.ready.result()
    assert made.memory == expected


# --------------------------------------------------------------------------------------- update


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_equal_rewards_leave_the_weights_bit_identical(make_trainer: MakeTrainer) -> None:
    decaying = dataclasses.replace(FAST, weight_decay=0.1)
    trainer = make_trainer(optimizer=decaying)
    trainer.step(make_groups())  # momentum that would move the weights
    before = trainer.snapshot()
    result = trainer.step([make_group([0.1] * 7, 0), make_group([0.3] * 3, 1)])
    assert equal(trainer.snapshot(), before)
    assert result.metrics["loss/policy"] == 0.0
    assert result.metrics["groups/useful"] == 0.0
    assert "grad_norm" not in result.metrics
    assert trainer.step_count == 2  # the batch was consumed all the same
    masked = make_group([1, 0])
    for index in (0, 1):
        masked = with_mask(masked, index, is_trained=False)
    trainer.step([masked])
    found = trainer.forward_backward(trainer.prepare([make_group([1, 1])]), trainer.loss)
    assert found["loss/policy"] == trainer.optim_step(decaying) == 0.0
    assert equal(trainer.snapshot(), before)


def test_warm_up_is_linear(make_trainer: MakeTrainer) -> None:
    settings = OptimizerSettings(learning_rate=1e-3, warmup_steps=4)
    trainer = make_trainer(optimizer=settings)
    rates = [trainer.step([make_group([1, 0])]).metrics["lr"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_the_first_adam_step_moves_each_weight_by_the_learning_rate(
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer(optimizer=dataclasses.replace(FAST, learning_rate=1e-3, warmup_steps=2))
    before = trainer.snapshot()
    assert trainer.step(make_groups()).metrics["lr"] == pytest.approx(0.5e-3)
    moved = torch.cat([(t - before[n]).abs().flatten() for n, t in trainer.snapshot().items()])
    assert float(moved.max()) == pytest.approx(0.5e-3, rel=1e-2)  # half the rate, by warm-up
    assert float(moved.median()) == pytest.approx(0.5e-3, rel=1e-2)


def test_the_gradient_is_clipped_to_its_norm(make_trainer: MakeTrainer) -> None:
    groups = make_groups()
    norm = make_trainer().step(groups).metrics["grad_norm"]
    trainer = make_trainer()
    trainer.adapters.progress.optimizer = Descent(trainer)
    trainer.adapters.progress.settings = OptimizerSettings(
        learning_rate=1.0, warmup_steps=0, max_grad_norm=norm / 4
    )
    before = trainer.snapshot()
    metrics = trainer.step(groups).metrics
    moved = torch.cat([(t - before[n]).flatten() for n, t in trainer.snapshot().items()]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)  # as it was before clipping
    assert float(moved) == pytest.approx(norm / 4, rel=1e-3)


@pytest.mark.parametrize("num_updates", [1, 2])
def test_a_step_that_has_grown_gives_back_what_it_has_freed(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, num_updates: int
) -> None:
    """It does so after the gradients of each update were dropped."""
    optimizer = dataclasses.replace(FAST, minibatches_per_step=num_updates)
    trainer = make_trainer(optimizer=optimizer)
    had_gradients: list[bool] = []

    def note() -> None:
        tensors = trainer.policy.parameters().values()
        had_gradients.append(any(tensor.grad is not None for tensor in tensors))

    monkeypatch.setattr(allocator, "give_back", note)
    monkeypatch.setattr(allocator, "GROWN_BYTES", -(1 << 40))  # it has always grown by that
    trainer.step([make_group([1, 0, 0, 1], number) for number in range(2)])
    assert had_gradients.count(False) >= num_updates
    assert not had_gradients[-1]


def test_a_step_that_has_not_grown_keeps_what_it_has_freed(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page faults would take a third of a small model's step."""
    trainer = make_trainer()
    groups = [make_group([1, 0, 0, 1], number) for number in range(2)]
    trainer.step(groups)  # the first one also allocates the optimizer's moments
    given_back: list[None] = []
    monkeypatch.setattr(allocator, "give_back", lambda: given_back.append(None))
    trainer.step(groups)
    assert not given_back


@pytest.mark.parametrize("has_checkpointing", [False, True])
def test_memory_is_looked_after_at_each_layer_that_keeps_any(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, *, has_checkpointing: bool
) -> None:
    """After a layer's forward, before its backward, after the update; not without a gradient."""
    calls: list[None] = []
    monkeypatch.setattr(allocator, "Trimmer", lambda: lambda: calls.append(None))
    trainer = make_trainer(gradient_checkpointing=has_checkpointing)
    groups = [make_group([1, 0], 2)]
    trainer.forward(groups)
    assert not calls
    trainer.step(groups)
    num_layers = trainer.policy.model.config.num_hidden_layers
    num_calls = 2 * num_layers + 1
    assert len(calls) >= num_calls
    assert len(calls) == num_calls or has_checkpointing, "a layer that is computed again"


@pytest.mark.parametrize("reason", ["nonfinite_gradient", "step_error"])
@pytest.mark.slow
def test_a_step_that_fails_changes_nothing_and_names_its_groups(
    make_trainer: MakeTrainer, reason: str
) -> None:
    trainer = make_trainer()
    trainer.step(make_groups())
    before = trainer.snapshot()
    good_loss = trainer.loss

    def failing(inputs: Any) -> Any:
        """Fails on a batch in which a reward is far from the others."""
        output = good_loss(inputs)
        if float(inputs.advantages.abs().max()) < 2:
            return output
        if reason == "step_error":
            raise OverflowError("too much")
        return dataclasses.replace(output, loss=output.loss * math.inf)

    trainer.loss = failing
    groups = [*make_groups(2, seed=1), make_group([9, 0], 7)]
    with pytest.raises(StepError) as caught:
        trainer.step(groups)
    assert caught.value.reason == reason
    assert trainer.find_faulty(groups) == {7: reason}
    assert equal(trainer.snapshot(), before)
    assert trainer.step_count == 1
    twin = make_trainer()
    for batch in (make_groups(), groups[:2]):
        twin.step(batch)
    metrics = trainer.step(groups[:2]).metrics
    assert metrics["optimizer/skipped_nonfinite"] == (reason == "nonfinite_gradient")
    assert equal(trainer.snapshot(), twin.snapshot())


@pytest.mark.parametrize("normalize", [True, False])
def test_no_reward_overflows_in_a_step(make_trainer: MakeTrainer, normalize: bool) -> None:
    trainer = make_trainer(advantages=AdvantageSettings(normalize_by_std=normalize))
    before = trainer.snapshot()
    for reward in (1e38, 1.7e308):
        group = make_group([reward, -reward, reward, 0.0])
        assert trainer.refusal(group) == "reward_too_large"
        with pytest.raises(StepError, match=r"rewards lie beyond task\.max_reward = 1e\+06"):
            trainer.step([group])
    assert equal(trainer.snapshot(), before)
    group = make_group([1e6, -1e6, 1e6, 0.0])
    assert trainer.refusal(group) is None
    assert trainer.step([group]).metrics["grad_norm"] > 0
    assert not equal(trainer.snapshot(), before)


# -------------------------------------------------------------------------------------- metrics


def test_a_step_has_the_metrics_of_its_groups_and_of_its_pass(make_trainer: MakeTrainer) -> None:
    groups = [change_of(make_group([1, 0, 0, 1]), 0, finish_reason="length"), *make_groups(4)[1:]]
    metrics = make_trainer().step(groups).metrics
    assert metrics.items() >= GroupStats.of(groups).metrics().items()
    assert metrics["completions/clipped_ratio"] == 1 / 16
    assert metrics["groups/all_right"] == metrics["groups/all_wrong"] == 0.25
    assert metrics["optimizer/skipped_nonfinite"] == 0
    assert 0 < metrics["entropy/mean"] <= math.log(32)
    of_pass = {"loss/policy", "grad_norm", "lr", "is_ratio/mean", "is_ratio/max", "ess"}
    of_pass |= {"mismatch_kl", "clip_ratio/low", "clip_ratio/high", "clip_ratio/mean"}
    assert of_pass <= metrics.keys()
    assert all(type(value) in (float, int) for value in metrics.values())


def test_ratio_statistics_see_a_stale_sampler(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    groups = on_policy(trainer, make_groups())
    stale = [
        change_of(group, index, sampler_logprobs=rollout.sampler_logprobs - np.float32(math.log(2)))
        for group in groups
        for index, rollout in enumerate(group.rollouts)
        if index == 0
    ]
    # Group 0 and 2 are trained; in each the first rollout's ratio is 2, the others' are 1.
    first = sum(stale[n].rollouts[0].num_tokens for n in (0, 2))
    total = sum(stale[n].num_tokens for n in (0, 2))
    metrics = trainer.step(stale).metrics
    assert metrics["is_ratio/max"] == pytest.approx(2.0, rel=1e-5)
    assert metrics["is_ratio/mean"] == pytest.approx(1 + first / total, rel=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx((1 - math.log(2)) * first / total, rel=1e-4)


def test_a_step_tells_the_mismatch_of_each_group(make_trainer: MakeTrainer) -> None:
    """Also if a step has several updates, and micro-batches divide a group."""
    optimizer = dataclasses.replace(FAST, minibatches_per_step=2, learning_rate=1e-9)
    trainer = make_trainer(micro_batch_tokens=24, optimizer=optimizer)
    groups = on_policy(trainer, [make_group([1, 0, 1, 0], n, seed=n) for n in range(10, 14)])
    lying = dataclasses.replace(
        groups[1],
        rollouts=tuple(
            dataclasses.replace(each, sampler_logprobs=each.sampler_logprobs - np.float32(3))
            for each in groups[1].rollouts
        ),
    )
    result = trainer.step([groups[0], lying, *groups[2:]])
    assert {*result.by_group} == {10, 11, 12, 13}
    for group in groups:
        found = result.by_group[group.group_id]
        assert found.num_tokens == group.num_trained
        is_lying = group.group_id == lying.group_id
        metrics = found.metrics()
        assert metrics["logprob_difference"] == pytest.approx(3.0 * is_lying, abs=1e-3)
        kl = math.exp(3) - 4 if is_lying else 0.0
        assert metrics["mismatch_kl"] == pytest.approx(kl, abs=1e-2)
        assert metrics["ess"] == pytest.approx(1.0, abs=1e-3), "all ratios are equal"
    total = sum(result.by_group.values(), Mismatch())
    assert result.metrics["mismatch_kl"] == pytest.approx(total.mean_kl)


# ---------------------------------------------------------------------------------------- state


def test_weights_that_hold_nan_are_not_saved(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    name, weights = list(trainer.tensors().items())[3]
    with torch.no_grad():
        weights.flatten()[5] = torch.nan
    with pytest.raises(NonfiniteWeightsError) as raised:
        trainer.save_state(tmp_path)
    assert (raised.value.names, raised.value.num_tensors) == ([name], len(trainer.tensors()))
    assert not list(tmp_path.iterdir())


RESUMED: dict[str, dict[str, Any]] = {
    "float32": {"optimizer": dataclasses.replace(FAST, warmup_steps=6, weight_decay=0.01)},
    "bfloat16": {"dtype": torch.bfloat16},
    "offloaded": {"optimizer_state": "offloaded"},
    "8bit": {"optimizer_state": "8bit"},
    "several updates": {
        "loss": make_loss("decoupled_ppo"),
        "optimizer": dataclasses.replace(FAST, minibatches_per_step=3),
    },
}
"""Trainers whose states differ in what they hold."""


@pytest.mark.parametrize("way", RESUMED)
@pytest.mark.slow
def test_a_resumed_trainer_continues_bit_by_bit(
    make_trainer: MakeTrainer, tmp_path: Path, way: str
) -> None:
    trainer, resumed = (make_trainer(seed=seed, **RESUMED[way]) for seed in (0, 5))
    trainer.adapters.progress.num_skipped_nonfinite = 2
    resumed.step(make_groups(seed=9))  # state that has to vanish
    for seed in range(2):  # before the first step, and after it
        trainer.save_state(tmp_path)
        draw = torch.rand(3)
        resumed.load_state(tmp_path)
        assert torch.equal(torch.rand(3), draw)
        assert resumed.step_count == trainer.step_count == seed
        metrics = trainer.step(make_groups(6, seed=seed)).metrics
        assert metrics["optimizer/skipped_nonfinite"] == 2
        assert resumed.step(make_groups(6, seed=seed)).metrics == metrics
        assert equal(resumed.snapshot(), trainer.snapshot())


def test_a_snapshot_is_a_copy(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    snapshot = trainer.snapshot()
    kept = {name: tensor.clone() for name, tensor in snapshot.items()}
    trainer.step(make_groups())
    assert equal(snapshot, kept)
    assert not equal(trainer.snapshot(), kept)
    assert "lm_head.weight" not in snapshot  # tied to the embedding
    assert all(t.dtype == torch.float32 and not t.requires_grad for t in snapshot.values())


def test_initial_tensors_replace_the_directorys(
    make_trainer: MakeTrainer, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    trained = make_trainer()
    trained.step(make_groups())
    weights = {name: tensor.bfloat16() for name, tensor in trained.snapshot().items()}
    (tmp_path / "config.json").write_text((make_tiny_model() / "config.json").read_text())
    other = make_trainer(model_dir=tmp_path, tensors=weights)
    assert equal(other.snapshot(), {name: tensor.float() for name, tensor in weights.items()})
    other.step(make_groups())
    assert other.step_count == 1


def test_an_untied_head_is_trained_too(
    make_trainer: MakeTrainer, make_tiny_model: Callable[..., Path]
) -> None:
    trainer = make_trainer(model_dir=make_tiny_model(tie_word_embeddings=False))
    before = trainer.snapshot()
    trainer.step(make_groups())
    after = trainer.snapshot()
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_damaged_state_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.step(make_groups())
    with pytest.raises(StorageError, match="cannot write the trainer's state"):
        trainer.save_state(tmp_path / "missing")
    trainer.save_state(tmp_path)
    damages: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("weights.safetensors", lambda data: data[:-7]),
        ("optimizer.safetensors", lambda data: data[:-7]),
        ("trainer.json", lambda data: data[:-7]),
        ("trainer.json", lambda data: data.replace(b'"cpu"', b'"gpu"')),
        ("trainer.json", lambda data: data.replace(b"step_count", b"step count")),
    ]
    for name, damage in damages:
        path = tmp_path / name
        whole = path.read_bytes()
        path.write_bytes(damage(whole))
        with pytest.raises(StorageError, match="cannot read the trainer's state"):
            trainer.load_state(tmp_path)
        path.unlink()
        with pytest.raises(StorageError, match="cannot read the trainer's state"):
            trainer.load_state(tmp_path)
        path.write_bytes(whole)
    trainer.load_state(tmp_path)


def test_state_of_another_model_is_refused(
    make_trainer: MakeTrainer, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    make_trainer(model_dir=make_tiny_model(intermediate_size=96)).save_state(tmp_path)
    with pytest.raises(DataError, match=r"mlp\.\w+\.weight has shape .* another model"):
        make_trainer().load_state(tmp_path)


# ------------------------------------------------------------------------------------- refusals


def test_a_temperature_of_zero_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=r"temperature = 0\.0"):
        make_trainer(temperature=0.0)
