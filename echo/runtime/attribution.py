"""The learner's step with, every so often, a look at where the mismatch of its batch comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from echo.config.schema import Config
from echo.core.rollout import Group, PolicyVersion
from echo.engine.attribution import MismatchProbe
from echo.engine.device import pick_device
from echo.engine.lora import Lora
from echo.engine.policy import frozen_policy
from echo.engine.retention import VersionRetention
from echo.engine.trainer import StepResult, Trainer
from echo.engine.weights import Weights, torch_dtype
from echo.runtime.publication import Publication
from echo.runtime.worker_setup import make_sampling
from echo.tasks import tokenization

MAX_KEPT_BYTES = 4 << 30
"""Published versions kept on the learner's disk for it; a larger model shows less of the past."""
NUM_ROLLOUTS = 8
"""Of a batch, scored under each version that sampled them: thousands of tokens for a variance, and
a fraction of what a step costs."""
Publish = Callable[[Weights, PolicyVersion], Publication]


class Attribution:
    """A trainer's step and a publication, each with what the measurement needs of it."""

    def __init__(
        self,
        trainer: Trainer,
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
            measured = self._probe.measure(groups, score=trainer.score, weights=trainer.snapshot())
        result = trainer.step(groups)
        return StepResult(metrics=result.metrics | measured)

    def publishing(self, publish: Publish) -> Publish:
        """Return `publish` such that every version is kept too."""

        def publish_and_keep(weights: Weights, version: PolicyVersion) -> Publication:
            publication = publish(weights, version)
            self._retention.keep(publication.manifest, publication.image)
            return publication

        return publish_and_keep


def make_attribution(
    config: Config, model_dir: Path, trainer: Trainer, lora: Lora | None = None
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
    tokenizer = tokenization.load_tokenizer(model_dir)
    stop_ids = tokenization.stop_ids(tokenizer, model_dir)

    def is_canonical(token_ids: Sequence[int]) -> bool:
        text = tokenization.decode(tokenizer, token_ids, stop_ids)
        again = tokenizer.encode(text, add_special_tokens=False)
        return list(token_ids[: len(again)]) == again and (
            len(token_ids) == len(again) or token_ids[len(again)] in stop_ids
        )

    learner = config.learner
    probe = MismatchProbe(
        frozen_policy(
            model_dir,
            device=pick_device(learner.device),
            lora=lora,
            attn_implementation=config.model.attn_implementation,
        ),
        sampling=make_sampling(config, stop_ids),
        published_dtype=torch_dtype(config.model.dtype),
        load_version=retention.load,
        is_canonical=is_canonical,
        num_rollouts=NUM_ROLLOUTS,
        micro_batch_tokens=learner.micro_batch_tokens,
        seed=config.run.seed,
    )
    return Attribution(trainer, probe, retention, interval_steps=interval_steps)
