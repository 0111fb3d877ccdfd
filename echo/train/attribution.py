"""Attribution of the sampler-learner mismatch, by re-scoring rollouts.

For each trained token, with pi the learner now, v the version that sampled it, and what the worker
recorded as mu (nats):

    staleness     log pi'(t) - log v(t)          pi' is pi as it would be published: rounded
    truncation    log v(t) - log v_cut(t)        v_cut is v after top_k and top_p; never above 0
    numerics      log v_cut(t) - log mu(t)       what the worker's engine computes otherwise,
                  + log pi(t) - log pi'(t)       and what publishing rounds off
    tokenisation  0                              token ids travel, text is never encoded again

They add up to log pi - log mu. The last is 0 by construction; what a system that sends text would
have added to it shows in `retokenised`: the share of rollouts whose text encodes to other ids.

Versions that are not held any more are left out, and counted.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from echo.algo.batching import TrainingRow
from echo.config.schema import Config
from echo.core.errors import StorageError
from echo.core.rollout import Group, PolicyVersion
from echo.engine.engine import Sampling
from echo.engine.hf.batch import sampling_logprobs
from echo.engine.lora import Lora
from echo.engine.model import make_sampling
from echo.engine.weights import round_tensors, tensors_from_image, torch_dtype
from echo.tasks import tokenization
from echo.train.policy import ModelSource, Policy, frozen_policy
from echo.train.ranks import AnyTrainer
from echo.train.step import StepResult
from echo.weights.manifest import Manifest

# --- variance by cause ----------------------------------------------------------------------------
#
# The log-ratio of a token, log pi(learner) - log mu(sampler), is a sum of parts, one per cause,
# each the difference of two scores that differ in that cause alone. The variance of a sum is the
# sum of each part's covariance with it, so
#
#     share_k = cov(part_k, sum) / var(sum),   and the shares add up to 1, exactly.
#
# A share may be negative (its part works against the others) or above 1.
#
# Shapes: N tokens.


MIN_VARIANCE = 1e-14
"""Nats squared below which there is nothing to divide: float32 scores differ by that much."""


def split_variance(parts: Mapping[str, npt.NDArray[np.floating]]) -> dict[str, float]:
    """Return the variance of the log-ratio (`variance`) and the share of each part.

    Args:
        parts: by cause, [N] nats each, N >= 1; their sum is the log-ratio.

    Returns:
        `variance` in nats squared, and each cause's share by its name; no shares where the variance
        is as good as 0.

    Source: the covariance decomposition of a sum.
    """
    values = {name: np.asarray(part, dtype=np.float64) for name, part in parts.items()}
    total = np.sum(list(values.values()), axis=0)
    away = total - total.mean()
    variance = float((away * away).mean())
    if variance < MIN_VARIANCE:
        return {"variance": variance}
    shares = {name: float((part * away).mean() / variance) for name, part in values.items()}
    return {"variance": variance, **shares}


ROWS_AT_ONCE = 256
"""Tokens whose full logits exist at one time, where truncation has to be looked at."""

Floats = npt.NDArray[np.float64]


class RoundTrip:
    """A tokenizer that tells which token ids a way through text would change."""

    def __init__(self, model_dir: Path) -> None:
        """Load the tokenizer of a model directory."""
        self._tokenizer = tokenization.load_tokenizer(model_dir)
        self.stop_ids = tokenization.stop_ids(self._tokenizer, model_dir)

    def keeps(self, token_ids: Sequence[int]) -> bool:
        """Return whether the text of a completion encodes to the same ids."""
        text = tokenization.decode(self._tokenizer, token_ids, self.stop_ids)
        again = self._tokenizer.encode(text, add_special_tokens=False)
        return list(token_ids[: len(again)]) == again and (
            len(token_ids) == len(again) or token_ids[len(again)] in self.stop_ids
        )


class MismatchProbe:
    """A frozen model into which versions are loaded to score what they sampled."""

    def __init__(
        self,
        policy: Policy,
        versions: VersionRetention,
        text: RoundTrip,
        *,
        sampling: Sampling,
        published_dtype: torch.dtype,
        num_rollouts: int,
        seed: int,
    ) -> None:
        """Take the model and where versions come from.

        Args:
            policy: a frozen model of its own; its weights are overwritten.
            versions: those that can still be loaded.
            text: tells which completions would survive a way through text.
            sampling: how workers sample.
            published_dtype: that versions are rounded to.
            num_rollouts: sampled for each measurement.
            seed: of the choice of rollouts.
        """
        self._policy = policy
        self._versions = versions
        self._text = text
        self._sampling = sampling
        self._published_dtype = published_dtype
        self._num_rollouts = num_rollouts
        self._chance = random.Random(seed)

    def measure(self, groups: Sequence[Group], trainer: AnyTrainer) -> dict[str, float]:
        """Return the variance of the log-ratio over a small sample, and each cause's share.

        Args:
            groups: what the next step is made of.
            trainer: the learner's, before that step.
        """
        chosen = self._choose(groups)
        tokens = sum(int(group.rollouts[0].completion_mask.sum()) for group in chosen)
        if not tokens:
            return {}
        now = [rows[0].astype(np.float64) for rows in trainer.forward(chosen)]
        rounded, _ = self._score(chosen, self._round(trainer.snapshot()))
        parts: dict[str, list[Floats]] = {"staleness": [], "truncation": [], "numerics": []}
        for version in sorted({version for group in chosen for version in group.versions}):
            tensors = self._versions.load(version)
            if tensors is None:
                continue
            members = [index for index, group in enumerate(chosen) if version in group.versions]
            then, kept = self._score([chosen[index] for index in members], tensors)
            for index, own, log_kept in zip(members, then, kept, strict=True):
                rollout = chosen[index].rollouts[0]
                is_its = rollout.completion_mask & (
                    rollout.policy_versions == (version.lineage, version.step)
                ).all(1)
                sampler = rollout.sampler_logprobs.astype(np.float64)
                parts["staleness"].append((rounded[index] - own)[is_its])
                parts["truncation"].append(log_kept[is_its])
                numerics = (own - log_kept - sampler) + (now[index] - rounded[index])
                parts["numerics"].append(numerics[is_its])
        joined = {
            name: np.concatenate(part) if part else np.zeros(0) for name, part in parts.items()
        }
        return self._metrics(joined, chosen, tokens)

    def _metrics(
        self, parts: dict[str, Floats], chosen: Sequence[Group], num_tokens: int
    ) -> dict[str, float]:
        num_scored = len(parts["staleness"])
        is_drifted = [
            not self._text.keeps(group.rollouts[0].token_ids.tolist()) for group in chosen
        ]
        metrics = {
            "tokens": float(num_scored),
            "skipped": 1.0 - num_scored / num_tokens,
            "retokenised": float(np.mean(is_drifted)),
        }
        if num_scored:
            metrics |= split_variance(parts | {"tokenisation": np.zeros(num_scored)})
        return {f"attribution/{name}": value for name, value in metrics.items()}

    def _choose(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups of one rollout each, drawn from those with a trained token."""
        rollouts = [
            replace(group, rollouts=(rollout,))
            for group in groups
            for rollout in group.rollouts
            if rollout.completion_mask.any()
        ]
        return self._chance.sample(rollouts, min(self._num_rollouts, len(rollouts)))

    def _round(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return round_tensors(weights, self._published_dtype, self._policy.unrounded)

    @torch.no_grad()
    def _score(
        self, groups: Sequence[Group], tensors: Mapping[str, Tensor]
    ) -> tuple[list[Floats], list[Floats]]:
        """Return log-probabilities, and the log of the mass that truncation keeps, per token."""
        self._policy.load(tensors)
        samples = [
            TrainingRow(prompt_ids=group.prompt_ids, rollout=group.rollouts[0], advantage=0.0)
            for group in groups
        ]
        logprobs: dict[int, Floats] = {}
        kept: dict[int, Floats] = {}
        for indices, micro in self._policy.micro_batches(samples, score_all=True):
            inv_temperature = 1.0 / self._sampling.temperature
            micro = micro.to(self._policy.device)
            rows, _ = self._policy.logprobs(micro, inv_temperature=inv_temperature)
            masses = torch.zeros_like(rows)
            if self._sampling.top_p < 1 or self._sampling.top_k:
                states, head = self._policy.predictors(micro)
                mask = micro.completion_mask
                values = _log_kept_mass(states, head, micro.token_ids[mask], self._sampling)
                masses = masses.masked_scatter(mask, values)
            for row, index in enumerate(indices):
                size = samples[index].rollout.num_tokens
                logprobs[index] = rows[row, :size].double().cpu().numpy()
                kept[index] = masses[row, :size].double().cpu().numpy()
        order = range(len(samples))
        return [logprobs[index] for index in order], [kept[index] for index in order]


def _log_kept_mass(states: Tensor, head: Tensor, token_ids: Tensor, sampling: Sampling) -> Tensor:
    """Return [N] the log of the probability that top_k and top_p leave, at most 0.

    The token itself counts as kept: it was drawn, whatever rounding says about it here.
    """
    masses = []
    whole = replace(sampling, top_k=0, top_p=1.0)
    for start in range(0, len(states), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        logits = states[rows].float() @ head.float().T
        is_kept = sampling_logprobs(logits, sampling).isfinite()
        is_kept.scatter_(1, token_ids[rows, None], value=True)
        full = sampling_logprobs(logits, whole)
        masses.append(full.masked_fill(~is_kept, -torch.inf).logsumexp(1).clamp(max=0.0))
    return torch.cat(masses)


# --- version retention ----------------------------------------------------------------------------
#
# One safetensors file per version, written beside the publication and renamed into place. The bytes
# are bounded: the oldest version goes first. What is not held is not an error, only unknown.


_NAME = re.compile(r"v(\d+)_(\d+)\.safetensors")


HEADER_BYTES = 256
"""A file is larger than its image by at most this, for itself and for each tensor's name."""


class VersionRetention:
    """Versions on disk."""

    def __init__(self, directory: Path, *, max_bytes: int, max_versions: int) -> None:
        """Find what an earlier process has kept.

        Args:
            directory: made if it is missing.
            max_bytes: bound on all files together.
            max_versions: bound on their number; older ones can belong to no group any more.

        Raises:
            StorageError: if the directory cannot be made.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_versions = max_versions
        self._sizes: dict[PolicyVersion, int] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.iterdir():
                match = _NAME.fullmatch(path.name)
                if match is None:
                    path.unlink()  # a partial file of a process that was killed
                    continue
                version = PolicyVersion(int(match[1]), int(match[2]))
                self._sizes[version] = path.stat().st_size
        except OSError as error:
            raise StorageError(f"cannot keep versions in {directory}: {error}") from error

    @property
    def versions(self) -> list[PolicyVersion]:
        """What is held, oldest first."""
        return sorted(self._sizes)

    def keep(self, manifest: Manifest, image: bytearray | memoryview) -> bool:
        """Write a version and let older ones go; return whether there was room for it.

        Raises:
            StorageError: if it cannot be written.
        """
        file_bytes = manifest.num_bytes + HEADER_BYTES * (1 + len(manifest.tensors))
        if file_bytes > self._max_bytes:
            return False
        self._make_space(file_bytes)
        path = self._path(manifest.version)
        partial = path.with_suffix(".partial")
        view = memoryview(image).toreadonly()
        try:
            save_file(tensors_from_image(manifest.tensors, view), partial)
            partial.rename(path)
            self._sizes[manifest.version] = path.stat().st_size
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise StorageError(
                f"cannot keep {manifest.version} in {self._directory}: {error}; free disk space "
                "or switch the attribution off (metrics.attribution_steps = 0)"
            ) from error
        return True

    def load(self, version: PolicyVersion) -> Mapping[str, Tensor] | None:
        """Return the weights of a version, or None if it is not held (any more)."""
        if version not in self._sizes:
            return None
        try:
            return load_file(self._path(version))
        except (OSError, SafetensorError):
            self._forget(version)
            return None

    def _make_space(self, num_bytes: int) -> None:
        while self._sizes and (
            sum(self._sizes.values()) + num_bytes > self._max_bytes
            or len(self._sizes) >= self._max_versions
        ):
            self._forget(min(self._sizes))

    def _forget(self, version: PolicyVersion) -> None:
        del self._sizes[version]
        self._path(version).unlink(missing_ok=True)

    def _path(self, version: PolicyVersion) -> Path:
        return self._directory / f"v{version.lineage}_{version.step}.safetensors"


# --- attribution every few steps ------------------------------------------------------------------


MAX_KEPT_BYTES = 4 << 30
"""Published versions kept on the learner's disk for it; a larger model shows less of the past."""
NUM_ROLLOUTS = 8
"""Of a batch, scored under each version that sampled them: thousands of tokens for a variance, and
a fraction of what a step costs."""


class Attribution:
    """A trainer's step and a publication, each with what the measurement needs of it."""

    def __init__(
        self,
        trainer: AnyTrainer,
        probe: MismatchProbe,
        retention: VersionRetention,
        *,
        interval_steps: int,
    ) -> None:
        """Join the parts; all of it runs in the trainer's thread.

        Args:
            trainer: the learner's.
            probe: scores versions.
            retention: keeps them.
            interval_steps: steps between measurements, at least 1.
        """
        self._trainer = trainer
        self._probe = probe
        self._retention = retention
        self._interval_steps = interval_steps

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Train on a batch, after a measurement if one is due."""
        trainer = self._trainer
        measured: dict[str, float] = {}
        if trainer.step_count % self._interval_steps == 0:
            measured = self._probe.measure(groups, trainer)
        result = trainer.step(groups)
        return replace(result, metrics=result.metrics | measured)

    def keep(self, manifest: Manifest, image: bytearray | memoryview) -> None:
        """Keep a version that is published, to score with it later."""
        self._retention.keep(manifest, image)


def make_attribution(
    config: Config, model_dir: Path, trainer: AnyTrainer, lora: Lora | None = None
) -> Attribution | None:
    """Return the measurement, or None if it is off.

    Raises:
        StorageError: if the directory for versions cannot be made.
    """
    interval_steps = config.metrics.attribution_steps
    if not interval_steps:
        return None
    retention = VersionRetention(
        config.run_dir / "versions",
        max_bytes=MAX_KEPT_BYTES,
        # One more than may be trained on: the newest is published before the oldest is used up.
        max_versions=config.sync.max_staleness + 2,
    )
    text = RoundTrip(model_dir)
    probe = MismatchProbe(
        frozen_policy(ModelSource(model_dir=model_dir, lora=lora), trainer.compute),
        retention,
        text,
        sampling=make_sampling(config, text.stop_ids),
        published_dtype=torch_dtype(config.model.dtype),
        num_rollouts=NUM_ROLLOUTS,
        seed=config.run.seed,
    )
    return Attribution(trainer, probe, retention, interval_steps=interval_steps)
