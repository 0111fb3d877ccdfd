"""The learner's model work: one optimizer step per batch of rollout groups.

A step: advantages per group, rollouts packed into micro-batches, log-probabilities of the trained
tokens at the sampling temperature, loss, gradients accumulated, norm clipped, AdamW. Every loss is
divided by the token count of the whole batch, so how it was cut into micro-batches does not matter,
and rollouts whose advantage is 0 are left out of the forward and backward pass exactly.

`step_count` grows by one with every batch consumed, so that each makes one policy version. Its
weights equal the previous ones if no rollout had an advantage (momentum and weight decay rest too)
or if the gradient was not finite (counted in `optimizer/skipped_nonfinite`).

Log-probabilities are those of the whole distribution at `temperature`. Sampling with top-p or top-k
has other ones, and the caller has to refuse that combination.

`save_state` holds everything the next step depends on: a trainer that loads it continues bit by
bit, on the same hardware and number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.algo.advantages import group_advantages
from echo.algo.batching import MicroBatch, Sample, collate, pack_micro_batches
from echo.algo.losses import Loss, LossInputs
from echo.algo.mismatch import mismatch_metrics
from echo.engine import trainer_state
from echo.engine.device import pick_device
from echo.engine.policy import Policy
from echo.errors import DataError
from echo.rollout import Group

MAX_LOGPROB = 1e-3
"""Log-probabilities above this are none; a little above 0 is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW with a linear warm-up to a constant learning rate."""

    learning_rate: float = 1e-6
    warmup_steps: int = 10
    """Steps until the full learning rate; step n of them, from 1, uses n / warmup_steps of it."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Bound on the norm of the whole gradient; infinity for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step reports."""

    metrics: dict[str, float]
    """Finite numbers under the field's names; a metric without meaning in this step is absent."""


class Trainer:
    """A policy, its optimizer, and the step that joins them."""

    def __init__(
        self,
        model_dir: Path,
        *,
        loss: Loss,
        optimizer: OptimizerSettings,
        temperature: float = 1.0,
        normalize_by_std: bool = True,
        device: str = "auto",
        init_tensors: Mapping[str, Tensor] | None = None,
        micro_batch_tokens: int = 16384,
        vocab_chunk: int = 8192,
        gradient_checkpointing: bool = False,
        attn_implementation: str = "sdpa",
        seed: int = 0,
    ) -> None:
        """Load the model and start its optimizer.

        Args:
            model_dir: Hugging Face directory; config.json is enough if `init_tensors` is given.
            loss: the policy loss, for example from `make_loss`.
            optimizer: its settings.
            temperature: of sampling, > 0.
            normalize_by_std: whether advantages are divided by their group's standard deviation.
            device: torch's name of it, or "auto" for CUDA where there is a GPU, else the CPU.
            init_tensors: weights to start from instead of the directory's.
            micro_batch_tokens: padded tokens that go through the model at once.
            vocab_chunk: columns of logits held at a time.
            gradient_checkpointing: recompute activations in the backward, for less memory.
            attn_implementation: transformers' name of the attention code.
            seed: of torch's global generator, for models that draw random numbers.

        Raises:
            DataError: if the model cannot be loaded.
            EngineError: if it cannot be trained here.
        """
        if not 0.0 < temperature < math.inf:
            raise ValueError(f"temperature = {temperature}: must be positive and finite")
        torch.manual_seed(seed)
        self.device = torch.device(pick_device(device))
        self._policy = Policy(
            model_dir,
            device=self.device,
            tensors=init_tensors,
            attn_implementation=attn_implementation,
            gradient_checkpointing=gradient_checkpointing,
        )
        self._loss = loss
        self._settings = optimizer
        self._inv_temperature = 1.0 / temperature
        self._normalize_by_std = normalize_by_std
        self._micro_batch_tokens = micro_batch_tokens
        self._vocab_chunk = vocab_chunk
        self._parameters = self._policy.parameters()
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._num_skipped_nonfinite = 0
        self._step_count = 0

    @property
    def step_count(self) -> int:
        """Batches consumed so far: the step of the policy version that these weights are."""
        return self._step_count

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Train on one batch of groups.

        Args:
            groups: at least one, each with two or more rollouts.

        Raises:
            DataError: if a group cannot be trained on; it is named, and nothing was changed.
        """
        samples = self._samples(groups)
        num_tokens = sum(sample.num_trained for sample in samples)
        live = [sample for sample in samples if sample.advantage != 0 and sample.num_trained]
        metrics = _batch_metrics(groups, samples)
        metrics |= self._accumulate_gradients(live, num_tokens)
        metrics["lr"] = self._learning_rate()
        if live:
            metrics |= self._update_weights()
        metrics["optimizer/skipped_nonfinite"] = self._num_skipped_nonfinite
        self._step_count += 1
        return StepResult(
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)}
        )

    @torch.no_grad()
    def score(self, groups: Sequence[Group]) -> list[list[npt.NDArray[np.float32]]]:
        """Return this policy's log-probability of every completion token, masked ones included.

        Returns:
            For each group and rollout, [T] nats at the sampling temperature.
        """
        samples = [
            Sample(prompt_ids=group.prompt_ids, rollout=rollout, advantage=0.0)
            for group in groups
            for rollout in group.rollouts
        ]
        scores: dict[int, npt.NDArray[np.float32]] = {}
        for indices, batch in self._micro_batches(samples, score_all=True):
            logprobs, _ = self._logprobs(batch)
            for index, row in zip(indices, logprobs.cpu().numpy(), strict=True):
                scores[index] = row[: samples[index].rollout.num_tokens].copy()
        ordered = iter(range(len(samples)))
        return [[scores[next(ordered)] for _ in group.rollouts] for group in groups]

    def snapshot(self) -> dict[str, Tensor]:
        """Return a copy of the weights on the CPU, float32, by name, tied ones once."""
        return {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self._policy.tensors().items()
        }

    def save_state(self, directory: Path) -> None:
        """Write everything the next step depends on into an existing directory.

        Raises:
            StorageError: if it cannot be written.
        """
        trainer_state.save(
            directory,
            weights=self._policy.tensors(),
            moments=trainer_state.moments_of(self._optimizer, self._parameters),
            device=self.device,
            counters={
                "step_count": self._step_count,
                "num_skipped_nonfinite": self._num_skipped_nonfinite,
            },
        )

    def load_state(self, directory: Path) -> None:
        """Continue where `save_state` left off.

        Raises:
            StorageError: if the files are missing or damaged.
            DataError: if they belong to another model.
        """
        state = trainer_state.load(directory, self.device)
        self._policy.load(state.weights)
        trainer_state.restore_moments(self._optimizer, self._parameters, state.moments)
        self._step_count = state.counters["step_count"]
        self._num_skipped_nonfinite = state.counters["num_skipped_nonfinite"]

    def _samples(self, groups: Sequence[Group]) -> list[Sample]:
        samples = []
        for group in groups:
            _check_group(group, self._policy.vocab_size)
            rewards = torch.tensor([group.rewards], dtype=torch.float64)
            advantages = group_advantages(rewards, normalize_by_std=self._normalize_by_std)
            samples += [
                Sample(prompt_ids=group.prompt_ids, rollout=rollout, advantage=advantage)
                for rollout, advantage in zip(group.rollouts, advantages[0].tolist(), strict=True)
            ]
        return samples

    def _micro_batches(
        self, samples: Sequence[Sample], *, score_all: bool = False
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yield indices of `samples` and their micro-batch on the device."""
        lengths = [sample.num_inputs for sample in samples]
        for indices in pack_micro_batches(lengths, max_tokens=self._micro_batch_tokens):
            batch = collate([samples[index] for index in indices], score_all=score_all)
            yield indices, batch.to(self.device)

    def _logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return self._policy.logprobs(
            batch, inv_temperature=self._inv_temperature, vocab_chunk=self._vocab_chunk
        )

    def _accumulate_gradients(self, live: Sequence[Sample], num_tokens: int) -> dict[str, float]:
        """Run forward and backward over the samples; return the metrics of loss and ratios."""
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        token_counts: dict[str, list[Tensor]] = {}
        learner: list[Tensor] = []
        sampler: list[Tensor] = []
        entropies: list[Tensor] = []
        for _, batch in self._micro_batches(live):
            logprobs, entropy = self._logprobs(batch)
            output = self._loss(
                LossInputs(
                    learner_logprobs=logprobs,
                    sampler_logprobs=batch.sampler_logprobs,
                    advantages=batch.advantages,
                    completion_mask=batch.completion_mask,
                    num_tokens=num_tokens,
                )
            )
            output.loss.backward()  # type: ignore[no-untyped-call]
            losses.append(output.loss.detach())
            for name, count in output.token_counts.items():
                token_counts.setdefault(name, []).append(count)
            learner.append(logprobs.detach()[batch.completion_mask])
            sampler.append(batch.sampler_logprobs[batch.completion_mask])
            entropies.append(entropy)
        if not live:
            return {"loss/policy": 0.0}
        # Read back only here: every number fetched from a GPU makes the CPU wait for it.
        num_scored = sum(len(part) for part in learner)
        metrics = mismatch_metrics(torch.cat(learner), torch.cat(sampler))
        metrics["loss/policy"] = float(torch.stack(losses).sum())
        metrics["entropy/mean"] = float(torch.cat(entropies).mean())
        for name, counts in token_counts.items():
            metrics[name] = float(torch.stack(counts).sum()) / num_scored
        return metrics

    def _learning_rate(self) -> float:
        """The learning rate of the step about to be made."""
        warmup = max(1, self._settings.warmup_steps)
        return self._settings.learning_rate * min(1.0, (self._step_count + 1) / warmup)

    def _update_weights(self) -> dict[str, float]:
        """Clip the accumulated gradient and apply it, unless it is not finite."""
        parameters = list(self._parameters.values())
        gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm = float(norm)
        if math.isfinite(grad_norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, self._settings.max_grad_norm, norm)
            for param_group in self._optimizer.param_groups:
                param_group["lr"] = self._learning_rate()
            self._optimizer.step()
        else:
            self._num_skipped_nonfinite += 1
        self._optimizer.zero_grad()
        return {"grad_norm": grad_norm}


def _batch_metrics(groups: Sequence[Group], samples: Sequence[Sample]) -> dict[str, float]:
    """The metrics that need no model: all rollouts, also those without an advantage.

    A group is all_right or all_wrong if its rewards are equal, and above 0 or not; else useful.
    """
    rewards = np.array([reward for group in groups for reward in group.rewards], dtype=np.float64)
    rollouts = [sample.rollout for sample in samples]
    is_equal = np.array([min(group.rewards) == max(group.rewards) for group in groups])
    is_positive = np.array([max(group.rewards) > 0 for group in groups])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "completions/mean_length": float(np.mean([rollout.num_tokens for rollout in rollouts])),
        "completions/clipped_ratio": float(
            np.mean([rollout.finish_reason == "length" for rollout in rollouts])
        ),
        "groups/all_right": float((is_equal & is_positive).mean()),
        "groups/all_wrong": float((is_equal & ~is_positive).mean()),
        "groups/useful": float((~is_equal).mean()),
    }


def _check_group(group: Group, vocab_size: int) -> None:
    """Refuse what would poison the weights or stop the process inside a GPU kernel."""
    where = f"group {group.group_id} (attempt {group.attempt}, worker {group.worker_id})"
    if len(group.rollouts) < 2:
        raise DataError(f"{where} has one rollout: advantages need two or more of each prompt")
    if not np.isfinite(group.rewards).all():
        raise DataError(f"{where}: rewards are not all finite: {group.rewards}")
    ids = [("prompt", group.prompt_ids)]
    for index, rollout in enumerate(group.rollouts):
        ids.append((f"rollout {index}", rollout.token_ids))
        logprobs = rollout.sampler_logprobs
        is_bad = rollout.completion_mask & ~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB))
        if is_bad.any():
            token = int(is_bad.argmax())
            raise DataError(
                f"{where}, rollout {index}: sampler log-prob of token {token} is "
                f"{logprobs[token]}, expected a finite number of at most 0; the group cannot be "
                "trained on, and its worker's sampler is at fault"
            )
    for name, token_ids in ids:
        if token_ids.min() < 0 or token_ids.max() >= vocab_size:
            raise DataError(
                f"{where}, {name}: token ids span {token_ids.min()}..{token_ids.max()}, outside "
                f"the model's vocabulary of {vocab_size}; the worker has another tokenizer"
            )
