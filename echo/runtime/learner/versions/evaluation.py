"""Evaluate published versions: mean rewards of answers to held-out prompts.

The evaluation has its own engine and thread, so training continues meanwhile. All answers of an
evaluation are sampled from one version.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from echo.core.errors import EngineError
from echo.core.monitoring.metrics import held_out
from echo.core.monitoring.samples import MAX_SAMPLES, TextSample
from echo.core.monitoring.scores import PromptScores
from echo.core.reward_parts import PartedReward, part_means, parts_of
from echo.core.rollout import PolicyVersion, Rollout
from echo.core.units import format_duration
from echo.engine import allocator
from echo.engine.engine import (
    UNWATCHED,
    Completion,
    Engine,
    Request,
    Sampling,
    Watcher,
    describe_nonfinite,
    is_out_of_memory,
)
from echo.runtime.episodes import EpisodeRunner, Opening
from echo.runtime.learner.follower import Follower
from echo.runtime.learner.report import Progress
from echo.runtime.learner.samples import SampleLog
from echo.runtime.learner.versions.publish import Publication
from echo.runtime.threads import Pool
from echo.tasks.rewards import RewardError, TaskHost
from echo.tasks.task import Example
from echo.tasks.tokenization import TextCodec
from echo.wire.messages import BAD_LOGPROBS

if TYPE_CHECKING:
    from echo.engine.weights import Weights


FIRST_SEED = 1_000_003
"""Seed of the first prompt. It does not depend on run.seed, so that runs can be compared."""


SAMPLE_STRIDE = 0xD1B54A32D192ED03
"""Difference between the seeds of consecutive answers to a prompt.

It differs from SEED_STRIDE, the difference between the seeds of an episode's turns.
"""


MAX_SEED = 1 << 62
"""Every seed is below this number. The same is true of the seeds of leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The scores of one version on the held-out prompts."""

    version: PolicyVersion
    scores: PromptScores
    """Rewards of sampled answers; a failed reward counts as 0."""
    greedy_scores: PromptScores
    """Rewards of one greedy answer to each prompt; a failed reward counts as 0."""
    num_rewards: int
    """Number of answers, including those with a failed reward or a reward of None."""
    num_reward_errors: int
    """Number of answers whose reward failed. Each such answer counts as 0 in the means."""
    num_unscored: int = 0
    """Number of answers with a reward of None. The means leave them out."""
    error: str = ""
    """The message of the last reward error; empty if no reward failed."""
    samples: Sequence[TextSample] = field(default=(), compare=False)
    """Sampled answers to the first prompts, which are the same in every evaluation."""

    @property
    def sampled(self) -> float:
        """Mean reward of sampled answers; NaN if no answer was scored."""
        return self.scores.mean.mean

    @property
    def greedy(self) -> float:
        """Mean reward of greedy answers; NaN if no answer was scored."""
        return self.greedy_scores.mean.mean

    @property
    def part_means(self) -> dict[str, float]:
        """Mean of each part of the reward over the sampled answers, by the part's name."""
        return part_means(map(parts_of, self.scores.rewards))

    @property
    def is_rate(self) -> bool:
        """Whether every reward was 0 or 1, so that the means are pass rates."""
        return self.scores.is_rate and self.greedy_scores.is_rate

    @property
    def has_figure(self) -> bool:
        """Whether at least one reward succeeded and both means are numbers."""
        return self.num_reward_errors < self.num_rewards and not math.isnan(
            self.sampled + self.greedy
        )

    def metrics(self, task_name: str) -> dict[str, float]:
        """Return the row for metrics.jsonl. If `has_figure` is false, the row has no means."""
        row: dict[str, float] = {
            "eval/version": self.version.step,
            "eval/reward_errors": self.num_reward_errors,
        }
        if self.num_unscored:
            row["eval/no_opinion"] = self.num_unscored
        if self.has_figure:
            row[f"eval/{task_name}/reward"] = self.sampled
            row[f"eval/{task_name}/greedy"] = self.greedy
            row |= self._sample_metrics(task_name)
            for name, mean in self.part_means.items():
                row[f"eval/{task_name}/reward/{name}"] = mean
        return row

    def _sample_metrics(self, task_name: str) -> dict[str, float]:
        scores, row = self.scores, {}
        if scores.num_samples > 1:
            row[f"eval/{task_name}/avg@{scores.num_samples}"] = self.sampled
        if self.is_rate:
            for k in scores.ks:
                value = scores.pass_at(k).mean
                if not math.isnan(value):
                    row[f"eval/{task_name}/pass@{k}"] = value
        return row

    def describe(self, *, is_rate: bool) -> str:
        """Return a log line.

        Args:
            is_rate: whether every reward of the run's evaluations so far was 0 or 1. If so, the
                line calls the means pass rates. It also has pass@k if each prompt had k > 1 sampled
                answers.
        """
        figure = f"{held_out(is_rate)} {self.sampled:.3f} sampled, {self.greedy:.3f} greedy"
        if is_rate and self.scores.num_samples > 1:
            k = self.scores.num_samples
            figure += f", pass@{k} {self.scores.pass_at(k)}"
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


@dataclass(frozen=True, slots=True)
class Answer:
    """The completion of a held-out prompt, and the result of its reward."""

    text: str
    reward: float | RewardError | None
    """A number, the error of a failed reward, or None if the task gave no reward."""

    @classmethod
    def of(cls, rollout: Rollout, text: TextCodec) -> Answer:
        """Return the answer of a scored rollout."""
        completion = text.decode(rollout.token_ids.tolist())
        if math.isnan(rollout.reward):
            return cls(completion, None)
        parts = rollout.reward_parts
        return cls(completion, PartedReward(parts) if parts else rollout.reward)


Answers = Sequence[Sequence[Answer]]
"""The answers to each prompt, in the order of the prompts."""


def heldout_openings(
    prompts: Sequence[tuple[Example, Sequence[int]]], num_samples: int
) -> list[Opening]:
    """Return the opening of each held-out prompt, with the seeds of its `num_samples` answers.

    The seeds are the same in every evaluation.
    """
    return [
        Opening(
            name=f"eval.{index}",
            prompt_ids=np.array(token_ids, dtype=np.int32),
            example=example,
            seeds=[
                (FIRST_SEED + index + sample * SAMPLE_STRIDE) % MAX_SEED
                for sample in range(num_samples)
            ],
        )
        for index, (example, token_ids) in enumerate(prompts)
    ]


def result_of(
    version: PolicyVersion,
    openings: Sequence[Opening],
    sampled: Answers,
    greedy: Answers,
    text: TextCodec,
) -> EvalResult:
    """Return the scores of the sampled and greedy answers to all prompts."""
    rewards = [answer.reward for prompt in (*sampled, *greedy) for answer in prompt]
    errors = [reward for reward in rewards if isinstance(reward, RewardError)]
    return EvalResult(
        version=version,
        scores=_scores_of(sampled),
        greedy_scores=_scores_of(greedy),
        num_rewards=len(rewards),
        num_reward_errors=len(errors),
        num_unscored=sum(reward is None for reward in rewards),
        error=str(errors[-1]) if errors else "",
        samples=[
            TextSample(
                kind="eval",
                prompt=text.decode_all(opening.prompt_ids.tolist()),
                completion=first.text,
                reward=float(first.reward) if isinstance(first.reward, float | int) else math.nan,
                source=str(version),
            )
            for opening, [first, *_] in zip(openings[:MAX_SAMPLES], sampled, strict=False)
        ],
    )


def _scores_of(answers: Answers) -> PromptScores:
    """Return the rewards of all answers. A failed reward is 0; a reward of None is left out."""
    by_prompt = tuple(
        tuple(
            0.0 if isinstance(answer.reward, RewardError) else answer.reward
            for answer in prompt
            if answer.reward is not None
        )
        for prompt in answers
    )
    return PromptScores(by_prompt, len(answers[0]))


class Evaluator:
    """Computes the mean rewards of versions on a fixed set of held-out prompts."""

    def __init__(
        self,
        engine: Engine,
        host: TaskHost,
        *,
        prompts: Sequence[tuple[Example, list[int]]],
        text: TextCodec,
        sampling: Sampling,
        num_samples: int = 1,
        runner: EpisodeRunner | None = None,
    ) -> None:
        """Evaluate versions on held-out prompts, which are pairs of an example and its token ids.

        `num_samples` answers are sampled for each prompt. `runner` plays episodes; None if the task
        has no episodes.
        """
        self._engine = engine
        self._host = host
        self._openings = heldout_openings(prompts, num_samples)
        self._text = text
        self._sampling = sampling
        self._runner = runner

    def evaluate(
        self,
        version: PolicyVersion,
        tensors: Weights,
        watcher: Watcher = UNWATCHED,
    ) -> EvalResult | None:
        """Return the scores of a version, or None if the watcher stopped the call.

        The call blocks.
        """
        try:
            return self._evaluate(version, tensors, watcher)
        finally:
            allocator.give_back()  # otherwise the memory is kept until the next evaluation

    def _evaluate(
        self, version: PolicyVersion, tensors: Weights, watcher: Watcher
    ) -> EvalResult | None:
        self._engine.load(tensors)
        sampled = self._answer(self._openings, self._sampling, watcher)
        if sampled is None:
            return None
        # A greedy answer does not depend on the seed.
        once = [replace(each, seeds=each.seeds[:1]) for each in self._openings]
        greedy = self._answer(once, replace(self._sampling, greedy=True), watcher)
        if greedy is None:
            return None
        return result_of(version, self._openings, sampled, greedy, self._text)

    def _answer(
        self, openings: Sequence[Opening], sampling: Sampling, watcher: Watcher
    ) -> list[list[Answer]] | None:
        if self._runner is not None:
            results = self._runner.play(openings, sampling, watcher)
            if watcher.should_stop():
                return None
            return [
                [Answer("", result)] * len(opening.seeds)
                if isinstance(result, RewardError)
                else [Answer.of(rollout, self._text) for rollout in result]
                for opening, result in zip(openings, results, strict=True)
            ]
        requests = [
            Request(request_id=f"{each.name}.{sample}", prompt_ids=each.prompt_ids, seed=seed)
            for each in openings
            for sample, seed in enumerate(each.seeds)
        ]
        completions = iter(self._engine.generate(requests, sampling, watcher))
        found = []
        for opening in openings:
            answers = []
            for completion in islice(completions, len(opening.seeds)):
                if watcher.should_stop():
                    return None
                answers.append(self._score(opening.example, completion))
            found.append(answers)
        return found

    def _score(self, example: Example, completion: Completion) -> Answer:
        text = self._text.decode(completion.token_ids.tolist())
        if completion.finish_reason == "nonfinite":
            return Answer(text, RewardError(describe_nonfinite(completion), reason=BAD_LOGPROBS))
        try:
            return Answer(text, self._host.score(example, text))
        except RewardError as error:
            return Answer(text, error)


class EvaluationSchedule:
    """Decides for each published version whether it is evaluated.

    Some steps are not published. So a version is due if its step, or any step since the previous
    version's, is a multiple of the interval. A version is skipped while another evaluation runs.
    The last step's version is never due, because the end of the run evaluates it.
    """

    def __init__(self, *, interval_steps: int, max_steps: int) -> None:
        """Evaluate every `interval_steps` steps of a run of `max_steps` steps.

        `interval_steps` is at least 1.
        """
        self._interval_steps = interval_steps
        self._max_steps = max_steps
        self._seen_step: int | None = None

    def is_due(self, step: int, *, is_running: bool) -> bool:
        """Return whether to evaluate the version of `step`.

        Call this method once per version, in order.
        """
        seen_step = step - 1 if self._seen_step is None else self._seen_step
        self._seen_step = step
        is_reached = step // self._interval_steps > seen_step // self._interval_steps
        return is_reached and not is_running and step < self._max_steps


class _StopWhen(Watcher):
    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop

    def should_stop(self) -> bool:
        return self._should_stop()


class Evaluations:
    """Evaluates published versions in a thread during training, and reports the results."""

    def __init__(
        self,
        evaluator: Evaluator,
        schedule: EvaluationSchedule,
        progress: Progress,
        follower: Follower,
        samples: SampleLog | None,
        *,
        task_kind: str,
        pool: Pool,
        spawn: Callable[..., asyncio.Task[None]],
        scored: Callable[[int, float | None], Awaitable[None]] | None,
        should_stop: Callable[[], bool],
        log: logging.Logger,
    ) -> None:
        """Evaluate the versions that the schedule selects.

        Args:
            evaluator: computes the mean rewards of a version.
            schedule: selects the versions to evaluate.
            progress: gets the points of the held-out curves.
            follower: gets a row of metrics for each evaluation.
            samples: gets some answers of each evaluation; None if samples are switched off.
            task_kind: the value of task.kind, whose last part is in the metrics' names.
            pool: the thread of the evaluator.
            spawn: starts a coroutine as a task of the node.
            scored: called with (step, score) after each evaluation; may be None. The score is None
                if the evaluation has no result.
            should_stop: returns whether to stop the running evaluation; called in its thread.
            log: gets a line for each evaluation.
        """
        self._evaluator, self._schedule = evaluator, schedule
        self._progress, self._follower, self._samples = progress, follower, samples
        self._task_name = task_kind.rpartition(":")[2]
        self._pool, self._spawn, self._scored = pool, spawn, scored
        self._watcher = _StopWhen(should_stop)
        self._log = log
        self._evaluated_step: int | None = None
        """Step of the last version whose evaluation was begun; None before the first evaluation."""
        self._task: asyncio.Task[None] | None = None

    def published(self, publication: Publication) -> bool:
        """Begin to evaluate a newly published version if the version is due.

        Returns:
            Whether the version was due.
        """
        step = publication.manifest.version.step
        is_running = self._task is not None and not self._task.done()
        if not self._schedule.is_due(step, is_running=is_running):
            return False
        self._evaluated_step = step
        self._task = self._spawn(self._evaluate(publication), name="evaluation")
        return True

    async def finish(self, last: Publication) -> None:
        """Finish the running evaluation. If the last version was not evaluated, evaluate it."""
        if self._task is not None:
            await self._task
        if self._evaluated_step != last.manifest.version.step:
            await self._evaluate(last)

    async def _evaluate(self, publication: Publication) -> None:
        score = await self._measure(publication)
        if self._scored is not None and not self._watcher.should_stop():
            await self._scored(publication.manifest.version.step, score)

    async def _measure(self, publication: Publication) -> float | None:
        """Evaluate a version and report the result. Return the score; None if there is none."""
        version = publication.manifest.version
        began_at = asyncio.get_running_loop().time()
        try:
            result = await self._pool.run(
                # The tensors are read in that thread: the weights may still be on their way.
                lambda: self._evaluator.evaluate(version, publication.tensors(), self._watcher),
            )
        except EngineError as error:
            if not is_out_of_memory(error):
                raise
            text = "%s is not evaluated, the run goes on: %s; eval.interval_steps=0 does without"
            self._log.warning(text, version, error)
            return None
        if result is None:
            return None
        if result.has_figure:
            self._progress.evaluated(
                version.step,
                result.sampled,
                result.greedy,
                is_rate=result.is_rate,
                num_errors=result.num_reward_errors,
            )
        seconds = asyncio.get_running_loop().time() - began_at
        row = result.metrics(self._task_name)
        row |= {"eval/seconds": seconds, "lineage": version.lineage}
        self._follower.write_metrics(version.step, row)
        if self._samples is not None:
            self._samples.write(version.step, result.samples)
        level = logging.WARNING if result.num_reward_errors else logging.INFO
        # One evaluation may have no reward but 0 and 1 by chance.
        text = result.describe(is_rate=result.is_rate and self._progress.curves.evals_are_rates)
        self._log.log(level, "%s, in %s", text, format_duration(seconds))
        return result.sampled if result.has_figure else None
