"""Mean rewards of held-out prompts under one published version, sampled and greedy.

The evaluation has its own engine and thread, so training goes on; it is pinned to the version whose
weights it was given.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from echo.core.metrics import held_out
from echo.core.rollout import PolicyVersion
from echo.engine import allocator
from echo.engine.engine import (
    NOBODY,
    Engine,
    Request,
    Sampling,
    Watcher,
    describe_nonfinite,
)
from echo.runtime.episodes import EpisodeRunner, Opening
from echo.tasks.rewards import RewardError, TaskHost
from echo.tasks.task import Example
from echo.tasks.tokenization import TextCodec
from echo.wire.messages import BAD_LOGPROBS

if TYPE_CHECKING:
    from echo.engine.weights import Weights


FIRST_SEED = 1_000_003
"""The same prompts and samples whatever run.seed is, so that runs compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Mean rewards over the held-out prompts."""

    version: PolicyVersion
    sampled: float
    """At the run's sampling temperature."""
    greedy: float
    is_rate: bool
    """Whether every reward was 0 or 1, so that the means are pass rates."""
    num_rewards: int
    """Completions that were to be judged."""
    num_reward_errors: int
    """Answers whose reward failed; each counts as 0."""
    num_unscored: int = 0
    """Answers on which the task has no opinion; they are in no mean."""
    error: str = ""
    """The last of these errors."""

    @property
    def has_figure(self) -> bool:
        """Whether anything was judged at all."""
        return self.num_reward_errors < self.num_rewards and not math.isnan(
            self.sampled + self.greedy
        )

    def metrics(self, task_name: str) -> dict[str, float]:
        """Return the row for metrics.jsonl; without means where nothing was judged."""
        row: dict[str, float] = {
            "eval/version": self.version.step,
            "eval/reward_errors": self.num_reward_errors,
        }
        if self.num_unscored:
            row["eval/no_opinion"] = self.num_unscored
        if self.has_figure:
            row[f"eval/{task_name}/reward"] = self.sampled
            row[f"eval/{task_name}/greedy"] = self.greedy
            if self.is_rate:
                row[f"eval/{task_name}/pass@1"] = self.sampled
        return row

    def __str__(self) -> str:
        figure = f"{held_out(self.is_rate)} {self.sampled:.3f} sampled, {self.greedy:.3f} greedy"
        if not self.has_figure:
            figure = "no figure"
        if self.num_unscored:
            figure += f" (no opinion on {self.num_unscored} of {self.num_rewards} answers)"
        if not self.num_reward_errors:
            return f"evaluation of {self.version}: {figure}"
        failed = f"{self.num_reward_errors} of {self.num_rewards} rewards failed"
        failed += " and count as 0" if self.has_figure else ""
        separator = ";" if self.has_figure else ","
        return f"evaluation of {self.version}: {figure}{separator} {failed}: {self.error}"


class Evaluator:
    """Scores versions on a fixed set of held-out prompts."""

    def __init__(
        self,
        engine: Engine,
        host: TaskHost,
        *,
        prompts: Sequence[tuple[Example, list[int]]],
        text: TextCodec,
        sampling: Sampling,
        runner: EpisodeRunner | None = None,
    ) -> None:
        """Take held-out prompts with their token ids; episodes of several turns need a runner."""
        self._engine = engine
        self._host = host
        self._openings = [
            Opening(
                name=f"eval.{index}",
                prompt_ids=np.array(token_ids, dtype=np.int32),
                example=example,
                seeds=(FIRST_SEED + index,),
            )
            for index, (example, token_ids) in enumerate(prompts)
        ]
        self._text = text
        self._sampling = sampling
        self._runner = runner

    def evaluate(
        self,
        version: PolicyVersion,
        tensors: Weights,
        watcher: Watcher = NOBODY,
    ) -> EvalResult | None:
        """Return the mean rewards of a version, or None if told to stop."""
        try:
            return self._evaluate(version, tensors, watcher)
        finally:
            allocator.give_back()  # beside training it would stay until the next evaluation

    def _evaluate(
        self, version: PolicyVersion, tensors: Weights, watcher: Watcher
    ) -> EvalResult | None:
        self._engine.load(tensors)
        rates: list[float] = []
        errors: list[RewardError] = []
        is_rate, num_unscored = True, 0
        for is_greedy in (False, True):
            sampling = replace(self._sampling, greedy=is_greedy)
            rewards = self._rewards(sampling, watcher)
            if rewards is None:
                return None
            num_unscored += sum(reward is None for reward in rewards)
            errors += [reward for reward in rewards if isinstance(reward, RewardError)]
            figures = [
                0.0 if isinstance(reward, RewardError) else reward
                for reward in rewards
                if reward is not None
            ]
            is_rate &= all(figure in (0.0, 1.0) for figure in figures)
            rates.append(math.fsum(figures) / len(figures) if figures else math.nan)
        return EvalResult(
            version=version,
            sampled=rates[0],
            greedy=rates[1],
            is_rate=is_rate,
            num_rewards=2 * len(self._openings),
            num_reward_errors=len(errors),
            num_unscored=num_unscored,
            error=str(errors[-1]) if errors else "",
        )

    def _rewards(
        self, sampling: Sampling, watcher: Watcher
    ) -> list[float | RewardError | None] | None:
        """Return one reward per prompt, or why it has none; None in all if told to stop.

        None for one prompt is no opinion.
        """
        if self._runner is not None:
            results = self._runner.play(self._openings, sampling, watcher)
            if watcher.should_stop():
                return None
            return [
                result
                if isinstance(result, RewardError)
                else None
                if math.isnan(result[0].reward)
                else result[0].reward
                for result in results
            ]
        requests = [
            Request(request_id=each.name, prompt_ids=each.prompt_ids, seed=each.seeds[0])
            for each in self._openings
        ]
        completions = self._engine.generate(requests, sampling, watcher)
        rewards: list[float | RewardError | None] = []
        for opening, completion in zip(self._openings, completions, strict=True):
            if watcher.should_stop():
                return None
            if completion.finish_reason == "nonfinite":
                why = describe_nonfinite(completion)
                rewards.append(RewardError(why, reason=BAD_LOGPROBS))
                continue
            text = self._text.decode(completion.token_ids.tolist())
            try:
                rewards.append(self._host.score(opening.example, text))
            except RewardError as error:
                rewards.append(error)
        return rewards


class Evaluations:
    """Which versions are evaluated, one at a time, without making the training wait.

    An evaluation is due where a multiple of the interval was reached since the version before, for
    not every step is published; it is skipped if the evaluation before still runs. The last version
    is not among them: the end of the run always evaluates it.
    """

    def __init__(self, evaluator: Evaluator, *, interval_steps: int, max_steps: int) -> None:
        """Take the evaluator and the steps between evaluations, at least 1."""
        self.evaluate = evaluator.evaluate
        self.evaluated_step: int | None = None
        """Step of the version that was found due last."""
        self._interval_steps = interval_steps
        self._max_steps = max_steps
        self._seen_step: int | None = None
        self._task: asyncio.Task[None] | None = None

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate the version of a step now; ask once for each, in order."""
        seen_step = step - 1 if self._seen_step is None else self._seen_step
        self._seen_step = step
        is_reached = step // self._interval_steps > seen_step // self._interval_steps
        is_running = self._task is not None and not self._task.done()
        if not is_reached or is_running or step >= self._max_steps:
            return False
        self.evaluated_step = step
        return True

    def started(self, task: asyncio.Task[None]) -> None:
        """Note the evaluation that now runs beside the training."""
        self._task = task

    async def wait(self) -> None:
        """Wait for the evaluation that runs, if one does."""
        if self._task is not None:
            await self._task
