"""Quickstart's small model, trained in the time of long rollouts.

Each rollout has a length drawn from the tail, and each of its real tokens takes as long as so many
tokens that an average answer takes the length drawn. So what each version samples, how stale it is
when it is trained on, and what becomes of it when a rollout is stopped and continued are real, and
happen when they would with heavy-tailed rollouts. A rollout's length says nothing of its prompt.

A row's answer is sampled in one go when it comes in; when weights change, what it had not reached
by then is thrown away and sampled again with the new ones, which is the same as sampling it late.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from april.engine import Row, Script, Setting
from april.lab import Content
from echo.config.load import load_config
from echo.core.rollout import Group, Lineage, PolicyVersion
from echo.engine.engine import Completion, FinishReason, Request, Sampling
from echo.engine.hf.engine import TransformersEngine
from echo.engine.model import make_sampling
from echo.engine.weights import publish_image, tensors_from_image
from echo.runtime.learner.saving.resume import StartingPoint
from echo.runtime.learner.setup import build_evaluator, build_trainer, load_data
from echo.tasks.rewards import TaskHost
from echo.train.trainer import Trainer
from echo.weights.manifest import TensorSpec
from echo.wire.messages import Lease

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
MEAN_TOKENS = 16
"""Real tokens of an average answer."""


@dataclass
class Answer:
    """What a row is going to have sampled when it ends, if no other weights come before."""

    cost: float
    """Tokens of the clock for each of its own."""
    num_samplings: int = 0
    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 2), np.int32))
    finish_reason: Any = "abort"

    def cut(self, num_tokens: int) -> None:
        """Keep so many tokens only."""
        self.token_ids = self.token_ids[:num_tokens]
        self.logprobs = self.logprobs[:num_tokens]
        self.versions = self.versions[:num_tokens]

    def extend(self, found: Completion) -> None:
        self.token_ids = np.concatenate([self.token_ids, found.token_ids])
        self.logprobs = np.concatenate([self.logprobs, found.logprobs])
        self.versions = np.concatenate([self.versions, found.policy_versions])
        self.finish_reason = found.finish_reason
        self.num_samplings += 1


class Answers:
    """Rows that sample from a model; a `Script`."""

    def __init__(self, setting: Setting, engine: TransformersEngine, sampling: Sampling) -> None:
        self._setting = setting
        self._engine = engine
        self._sampling = sampling

    def load(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        self._engine.load({name: tensor.clone() for name, tensor in tensors.items()}, version)

    def enter(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.state is None:
                row.state = Answer(self._setting.length(*row.ids) / MEAN_TOKENS)
                num_before = round(len(row.request.prefix_ids) * row.state.cost)
                row.num_cached = len(row.request.prompt_ids) + num_before
            row.state.cut(self._num_reached(row))
        requests = [self._request(row) for row in rows]
        found = self._engine.generate(requests, self._sampling)
        for row, completion in zip(rows, found, strict=True):
            answer = row.state
            answer.extend(completion)
            row.left = math.ceil(len(answer.token_ids) * answer.cost) - row.done

    def completion(self, row: Row, *, is_whole: bool) -> Completion:
        answer = row.state
        if not is_whole:
            answer.cut(self._num_reached(row))
        reason: FinishReason = answer.finish_reason if is_whole else "abort"
        name = row.request.request_id
        return Completion(name, answer.token_ids, answer.logprobs, reason, answer.versions)

    def _num_reached(self, row: Row) -> int:
        # The last one is reached where a row ends, and not before.
        most = max(0, len(row.state.token_ids) - 1)
        return int(min(most, math.floor(row.done / row.state.cost)))

    def _request(self, row: Row) -> Request:
        answer = row.state
        seed = random.Random(f"{row.request.seed}/{answer.num_samplings}").getrandbits(48)
        prefix = np.concatenate([row.request.prefix_ids, answer.token_ids])
        return replace(row.request, seed=seed, prefix_ids=prefix)


class Addition(Content):
    """The quickstart's task, model and trainer."""

    def __init__(self, setting: Setting, overrides: Sequence[str], *, eval_steps: int) -> None:
        super().__init__(setting)
        own = [
            f"run.seed={setting.seed}", f"sync.max_staleness={setting.max_staleness}",
            f"batch.group_size={setting.group_size}", f"eval.interval_steps={eval_steps}",
            f"batch.groups_per_step={setting.groups_per_step}", "batch.keep_zero_variance=true",
        ]  # fmt: skip
        self._config = load_config(CONFIG, [*own, *overrides], "learner")
        self._data = load_data(self._config)
        self.vocab_size = self._data.vocab_size
        self.sampling = make_sampling(self._config.sampling, self._data.text)
        start = StartingPoint(lineages=(Lineage(1, 0),))
        self._trainer = build_trainer(self._config, self._data.model_dir, start)
        evaluator = build_evaluator(self._config, self._data, log=logging.getLogger("bench"))
        assert evaluator is not None
        self._evaluate = evaluator.evaluate
        self._eval_steps = eval_steps
        self.first_rewards = self._rewards()

    def make_host(self) -> TaskHost:
        return self._data.host

    def make_script(self) -> Script:
        engine = TransformersEngine(self._data.model_dir, num_threads=1)
        return Answers(self.setting, engine, self.sampling)

    def lease(self, group_id: int, attempt: int) -> Lease:
        return self._data.prompts.lease(group_id, attempt)

    def decode(self, ids: Sequence[int]) -> str:
        return self._data.text.decode(ids)

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        result = self._trainer.step(groups)
        noted = {"reward": result.metrics["reward/mean"]}
        is_due = self._trainer.step_count % self._eval_steps == 0
        return noted | (self._rewards() if is_due else {})

    def image(self, version: PolicyVersion) -> tuple[Sequence[TensorSpec], bytearray]:
        assert isinstance(self._trainer, Trainer)
        return publish_image(self._trainer.snapshot(), self._config.model.dtype)

    def _rewards(self) -> dict[str, float]:
        """Return what the present weights earn on held-out prompts."""
        version = PolicyVersion(1, self._trainer.step_count)
        specs, image = self.image(version)
        weights = tensors_from_image(specs, memoryview(image))
        result = self._evaluate(version, weights)
        assert result is not None, "nothing stops it"
        return {"sampled": result.sampled, "greedy": result.greedy}
