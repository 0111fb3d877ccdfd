"""Attribution of the sampler-learner mismatch to its causes, by re-scoring rollouts.

The log-ratio log pi - log mu of each trained token t is split into four parts, in nats. Here pi is
the learner's present probability, v the probability under the version that sampled the token, and
mu the probability that the worker recorded:

    staleness     log pi'(t) - log v(t)          pi' uses weights rounded as for publication
    truncation    log v(t) - log v_cut(t)        v_cut is v after min_p, top_k, top_p; at most 0
    numerics      log v_cut(t) - log mu(t)       the worker's engine computes differently,
                  + log pi(t) - log pi'(t)       and publishing rounds the weights
    tokenisation  0                              workers send token ids and not text

The four parts add up to the log-ratio. `retokenised` is the share of rollouts whose decoded text
encodes to other ids. A system that sends text would have this mismatch too.

If the version that sampled a token is no longer on disk, the token is left out. `skipped` is the
share of such tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.torch import save_file

from echo.config.schema import SamplingSection
from echo.core.errors import StorageError
from echo.core.rollout import Group, PolicyVersion
from echo.engine.model import make_sampling
from echo.engine.weights import tensors_from_image, torch_dtype
from echo.tasks import tokenization
from echo.train.models.rescoring import Rescoring
from echo.train.ranks.rank_group import AnyTrainer
from echo.train.step import StepError, StepResult
from echo.weights.manifest import Manifest

# --- variance by cause ----------------------------------------------------------------------------
# The log-ratio of a token, log pi(learner) - log mu(sampler), is a sum of parts, one per cause.
# Each part is the difference of two scores that differ in that cause alone. The variance of a sum
# is the sum of the parts' covariances with the sum, so
#
#     share_k = cov(part_k, sum) / var(sum),   and the shares add up to 1, exactly.
# A share may be negative, if its part reduces the variance, or above 1.
#
# Shapes: N tokens.


MIN_VARIANCE = 1e-14
"""Smallest variance, in nats squared, for which shares are computed. Smaller variances may come
from the rounding of float32 scores.
"""


def split_variance(parts: Mapping[str, npt.NDArray[np.floating]]) -> dict[str, float]:
    """Return the variance of the log-ratio, and each cause's share of this variance.

    Args:
        parts: for each cause, its part of the log-ratio of N >= 1 tokens; [N] nats.

    Returns:
        `variance` in nats squared, and the share of each cause by name. If the variance is below
        MIN_VARIANCE, the shares are left out.

    Source: the variance of a sum is the sum of its terms' covariances with the sum.
    """
    values = {name: np.asarray(part, dtype=np.float64) for name, part in parts.items()}
    total = np.sum(list(values.values()), axis=0)
    away = total - total.mean()
    variance = float((away * away).mean())
    if variance < MIN_VARIANCE:
        return {"variance": variance}
    shares = {name: float((part * away).mean() / variance) for name, part in values.items()}
    return {"variance": variance, **shares}


Floats = npt.NDArray[np.float64]


class RoundTrip:
    """Finds completions whose token ids change when they are decoded and encoded again."""

    def __init__(self, model_dir: Path, chat_template: str | None = None) -> None:
        """Load the tokenizer of a model directory.

        `chat_template` replaces the tokenizer's own template; None keeps the template.
        """
        self._tokenizer = tokenization.load_tokenizer(model_dir, chat_template=chat_template)
        self.stop_ids = tokenization.stop_ids(self._tokenizer, model_dir)

    def keeps(self, token_ids: Sequence[int]) -> bool:
        """Return whether a completion keeps its token ids when decoded and encoded again.

        The completion is divided at its stop tokens, and each part must keep its ids. A
        conversation has a stop token after each answer.
        """
        parts: list[list[int]] = [[]]
        for token in token_ids:
            if token in self.stop_ids:
                parts.append([])
            else:
                parts[-1].append(token)
        return all(self._encoded_again(part) == part for part in parts)

    def _encoded_again(self, token_ids: list[int]) -> list[int]:
        text = tokenization.decode(self._tokenizer, token_ids, ())
        again: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return again


class MismatchProbe:
    """Measures the mismatch by scoring rollouts under the versions that sampled them."""

    def __init__(
        self, versions: VersionRetention, text: RoundTrip, *, num_rollouts: int, seed: int
    ) -> None:
        """Store the versions and the settings of measurements.

        Args:
            versions: the versions on disk.
            text: finds completions whose text encodes to other ids.
            num_rollouts: number of rollouts to score in each measurement.
            seed: seed for the choice of rollouts.
        """
        self._versions = versions
        self._text = text
        self._num_rollouts = num_rollouts
        self._chance = random.Random(seed)

    def measure(self, groups: Sequence[Group], trainer: AnyTrainer) -> dict[str, float]:
        """Return the variance of the log-ratio, and each cause's share of the variance.

        The variance is taken over the tokens of a small sample of rollouts.

        Args:
            groups: the groups that the next step trains on.
            trainer: the learner's trainer before that step. The trainer must have a rescorer.

        Raises:
            StepError: if one rollout is too large for the memory.
        """
        chosen = self._choose(groups)
        tokens = sum(int(group.rollouts[0].completion_mask.sum()) for group in chosen)
        if not tokens:
            return {}
        now = [rows[0].astype(np.float64) for rows in trainer.forward(chosen)]
        rounded, _ = _columns(trainer.rescore(chosen, None))
        parts: dict[str, list[Floats]] = {"staleness": [], "truncation": [], "numerics": []}
        for version in sorted({version for group in chosen for version in group.versions}):
            path = self._versions.find(version)
            if path is None:
                continue
            members = [index for index, group in enumerate(chosen) if version in group.versions]
            try:
                scores = trainer.rescore([chosen[index] for index in members], path)
            except StorageError:
                with suppress(OSError):
                    self._versions.forget(version)
                continue
            then, kept = _columns(scores)
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
        """Draw rollouts with a trained token; return each rollout as a group of its own."""
        rollouts = [
            replace(group, rollouts=(rollout,))
            for group in groups
            for rollout in group.rollouts
            if rollout.completion_mask.any()
        ]
        return self._chance.sample(rollouts, min(self._num_rollouts, len(rollouts)))


def _columns(scores: list[list[npt.NDArray[np.float32]]]) -> tuple[list[Floats], list[Floats]]:
    """Return two lists: each rollout's log-probabilities, and each rollout's logs of the kept mass.

    Each group in `scores` has a single rollout.
    """
    pairs = [rollouts[0].astype(np.float64) for rollouts in scores]
    return [pair[:, 0] for pair in pairs], [pair[:, 1] for pair in pairs]


# --- version retention ----------------------------------------------------------------------------
# One safetensors file per version, written while the version is published and renamed into place.
# The total size is bounded: the oldest version is deleted first. A version that is not on disk is
# no error; its tokens are left out.


_NAME = re.compile(r"v(\d+)_(\d+)\.safetensors")


HEADER_BYTES = 256
"""Upper bound on the bytes of a tensor's entry in a file's header, and on the bytes of all other
entries together.
"""


class VersionRetention:
    """Keeps published versions on disk up to a bound, and deletes the oldest versions above it."""

    def __init__(self, directory: Path, *, max_bytes: int, max_versions: int) -> None:
        """Find the versions that an earlier process has kept in the directory.

        Args:
            directory: directory of the files; made if missing.
            max_bytes: largest total size of the files.
            max_versions: largest number of versions to keep. No group has tokens of older versions.

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
        """The versions on disk, oldest first."""
        return sorted(self._sizes)

    def keep(self, manifest: Manifest, image: bytearray | memoryview) -> bool:
        """Write a version and delete older versions.

        Return False if this version alone exceeds the bound.

        Raises:
            StorageError: if the version cannot be written.
        """
        file_bytes = manifest.num_bytes + HEADER_BYTES * (1 + len(manifest.tensors))
        if file_bytes > self._max_bytes:
            return False
        path = self._path(manifest.version)
        partial = path.with_suffix(".partial")
        view = memoryview(image).toreadonly()
        try:
            self._make_space(file_bytes)
            save_file(tensors_from_image(manifest.tensors, view), partial)
            partial.rename(path)
            self._sizes[manifest.version] = path.stat().st_size
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise StorageError(
                f"cannot keep {manifest.version} in {self._directory}: {error}; free disk space "
                "or switch the attribution off (metrics.attribution_steps = 0)"
            ) from error
        return True

    def find(self, version: PolicyVersion) -> Path | None:
        """Return the path of a version's file, or None if the version is not on disk."""
        path = self._path(version)
        if version in self._sizes and not path.exists():  # removed for limits.run_dir_bytes
            del self._sizes[version]
        return path if version in self._sizes else None

    def forget(self, version: PolicyVersion) -> None:
        """Delete a version and its file.

        Raises:
            OSError: if the file cannot be deleted.
        """
        del self._sizes[version]
        self._path(version).unlink(missing_ok=True)

    def _make_space(self, num_bytes: int) -> None:
        while self._sizes and (
            sum(self._sizes.values()) + num_bytes > self._max_bytes
            or len(self._sizes) >= self._max_versions
        ):
            self.forget(min(self._sizes))

    def _path(self, version: PolicyVersion) -> Path:
        return self._directory / f"v{version.lineage}_{version.step}.safetensors"


# --- attribution every few steps ------------------------------------------------------------------


MAX_KEPT_BYTES = 4 << 30
"""Largest total size, in bytes, of the versions on the learner's disk."""
NUM_ROLLOUTS = 8
"""Number of rollouts scored in a measurement. These rollouts have thousands of tokens, enough for a
variance, and take a fraction of a step's time.
"""


class Attribution:
    """Measures the mismatch before steps, and keeps the versions that the measurements need."""

    def __init__(
        self,
        trainer: AnyTrainer,
        probe: MismatchProbe,
        retention: VersionRetention,
        *,
        interval_steps: int,
    ) -> None:
        """Store the parts of the measurement.

        All parts run in the trainer's thread.

        Args:
            trainer: the learner's trainer.
            probe: makes the measurement.
            retention: keeps published versions on disk.
            interval_steps: steps between measurements, at least 1.
        """
        self._trainer = trainer
        self._probe = probe
        self._retention = retention
        self._interval_steps = interval_steps
        self._not_kept: list[str] = []

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Train on a batch, after a measurement if one is due.

        If the measurement fails, the result has a notice instead of the metrics.
        """
        trainer = self._trainer
        measured: dict[str, float] = {}
        notices, self._not_kept = self._not_kept, []
        if trainer.step_count % self._interval_steps == 0:
            try:
                measured = self._probe.measure(groups, trainer)
            except StepError as error:
                notices.append(f"no attribution at step {trainer.step_count + 1}: {error}")
        result = trainer.step(groups)
        return replace(
            result,
            metrics=result.metrics | measured,
            notices=(*notices, *result.notices),
        )

    def keep(self, manifest: Manifest, image: bytearray | memoryview) -> None:
        """Write a published version to disk for later measurements.

        If the version cannot be written, the next step's result has a notice.
        """
        try:
            self._retention.keep(manifest, image)
        except StorageError as error:
            self._not_kept = [str(error)]


def make_attribution(
    trainer: AnyTrainer,
    text: RoundTrip,
    versions_dir: Path,
    *,
    interval_steps: int,
    max_staleness: int,
    seed: int,
) -> Attribution:
    """Return the attribution for a trainer.

    Build the trainer with the result of `make_rescoring`.

    Raises:
        StorageError: if the directory for versions cannot be made.
    """
    retention = VersionRetention(
        versions_dir,
        max_bytes=MAX_KEPT_BYTES,
        # Groups may have tokens of max_staleness + 1 versions. One more is kept, because the newest
        # version is published before the oldest tokens have been trained on.
        max_versions=max_staleness + 2,
    )
    probe = MismatchProbe(retention, text, num_rollouts=NUM_ROLLOUTS, seed=seed)
    return Attribution(trainer, probe, retention, interval_steps=interval_steps)


def make_rescoring(sampling: SamplingSection, published_dtype: str) -> Rescoring:
    """Return the `rescoring` argument that a trainer needs for attribution."""
    return Rescoring(
        sampling=make_sampling(sampling, None), published_dtype=torch_dtype(published_dtype)
    )
