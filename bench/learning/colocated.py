"""Train in one process, on-policy or at a lag, without a network.

On-policy it is what pull mode is compared with: the same task, prompts, model, sampling, loss and
optimizer, but each batch is sampled and trained on in turn. Prompts come in the order in which the
learner would hand them out. At a lag, each group is sampled by an older version and waits for its
step: `fixed:N`, `uniform:N` (0 to N, equally often), or `delays:N`, where the lag follows from
delays (delays.py) with steps of --step-s emulated seconds, and groups beyond N are lost.
The same command gives the same numbers again.

    cd bench; python -m learning.colocated ../configs/quickstart.toml --set model.name=DIR
    ... --lag uniform:11 --set loss.kind=gspo
    ... --lag delays:64 --step-s 30 --workers 4 --law lognormal
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echo.algo.loss import needs_of
from echo.config.load import load_config
from echo.config.schema import Config
from echo.core.rollout import Group, Lineage, PolicyVersion, Rollout, staleness_of
from echo.engine.engine import Completion, Request, Sampling
from echo.engine.hf.engine import TransformersEngine
from echo.engine.model import make_sampling, pick_device
from echo.engine.weights import Weights, publish_image, tensors_from_image
from echo.runtime.learner.saving.resume import StartingPoint
from echo.runtime.learner.setup import (
    Data,
    build_evaluator,
    build_loss,
    build_trainer,
    load_data,
)
from echo.runtime.learner.versions.evaluation import EvalResult
from echo.tasks.rewards import InlineHost
from echo.tasks.task import Example
from echo.train.trainer import Trainer
from echo.wire.messages import Lease
from learning.delays import (
    DelayInjector,
    DelayLags,
    Direction,
    FixedLag,
    Lags,
    UniformLag,
    add_options,
    read_injectors,
)

MAX_TRIES = 4
"""Prompts tried for each group, before a step takes groups that teach nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--lag", default="fixed:0", help="fixed:N, uniform:N or delays:N versions")
    parser.add_argument("--step-s", type=float, default=30.0, help="emulated seconds of a step")
    parser.add_argument("--workers", type=int, default=4, help="that delays are drawn for")
    add_options(parser)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.set, "learner")
    lags = make_lags(
        arguments.lag,
        read_injectors(arguments, config.run.seed),
        seed=config.run.seed,
        step_s=arguments.step_s,
        num_workers=arguments.workers,
    )
    for progress in train(config, lags):
        print(json.dumps({**scores(progress.result), "staleness": progress.staleness}), flush=True)


def scores(result: EvalResult) -> dict[str, float]:
    """Return the pass rates of a version."""
    return {"step": result.version.step, "sampled": result.sampled, "greedy": result.greedy}


def make_lags(
    text: str,
    delays: Mapping[Direction, DelayInjector],
    *,
    seed: int,
    step_s: float,
    num_workers: int,
) -> Lags:
    """Return where lags come from, as --lag says."""
    kind, _, number = text.partition(":")
    if kind not in ("fixed", "uniform", "delays") or not number.isdecimal():
        raise SystemExit(f"--lag {text}: write fixed:N, uniform:N or delays:N")
    if kind == "fixed":
        return FixedLag(int(number))
    if kind == "uniform":
        return UniformLag(int(number), seed=seed)
    if not delays:
        raise SystemExit("--lag delays needs delays, such as --law lognormal")
    return DelayLags(
        weights=delays.get("weights"),
        rollouts=delays.get("rollouts"),
        num_workers=num_workers,
        step_s=step_s,
        max_lag=int(number),
        seed=seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """An evaluation, and what was trained on until then."""

    result: EvalResult
    staleness: dict[int, int]
    """Groups so far, by the versions that they were old."""
    metrics: dict[str, float]
    """Means over the steps since the evaluation before; empty at the first."""


def train(config: Config, lags: Lags) -> Iterator[Progress]:
    """Train `run.max_steps` steps and yield at each of the configured evaluations."""
    data = load_data(config)
    start = StartingPoint(lineages=(Lineage(1, 0),))
    trainer = build_trainer(config, data.model_dir, start, data.lora)
    assert isinstance(trainer, Trainer)
    evaluator = build_evaluator(config, data, log=logging.getLogger("colocated"))
    backlog = Backlog(config, data, lags, trainer.refusal)
    staleness: Counter[int] = Counter()
    metrics: list[dict[str, float]] = []
    for step in range(config.run.max_steps + 1):
        version, weights = PolicyVersion(1, step), as_published(trainer, config.model.dtype)
        is_last = step == config.run.max_steps
        if evaluator is not None and (is_last or not step % config.eval.interval_steps):
            result = evaluator.evaluate(version, weights)
            assert result is not None, "nothing stops it"
            yield Progress(
                result=result, staleness=dict(sorted(staleness.items())), metrics=means(metrics)
            )
            metrics.clear()
        if is_last:
            return
        backlog.sample(version, weights)
        batch = backlog.pop(step)
        staleness.update(staleness_of(group, step=step) for group in batch)
        metrics.append(trainer.step(batch).metrics | {"useful_share": backlog.useful_share})


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each number, over the rows that have it."""
    names = sorted({name for row in rows for name in row})
    return {name: statistics.fmean(row[name] for row in rows if name in row) for name in names}


class Backlog:
    """Groups that were sampled while their version was the newest, and wait for their step.

    Lags are drawn for all steps in advance, so each version samples in one go all that later steps
    will want of it, and no weights are kept. As the learner does, it takes prompts in order and
    passes over groups that are refused, such as those without an advantage. It tries at most
    MAX_TRIES prompts for each group: beyond that, groups of zero variance fill the step, or a
    policy that answers nothing right would be sampled for ever.
    """

    def __init__(
        self,
        config: Config,
        data: Data,
        lags: Lags,
        refusal: Callable[[Group], str | None],
    ) -> None:
        self.useful_share = 0.5
        """Groups that were taken, of those that were tried last."""
        self._data = data
        self._refusal = refusal
        self._sampler = Sampler(config, data)
        self._next_group = 0
        self._waiting: dict[int, list[Group]] = {}
        self._steps: dict[int, list[int]] = {}
        for step in range(config.run.max_steps):
            for _ in range(config.batch.groups_per_step):
                self._steps.setdefault(step - lags.draw(step), []).append(step)

    def sample(self, version: PolicyVersion, weights: Weights) -> None:
        """Sample what will be wanted of this version."""
        steps = self._steps.pop(version.step, [])
        if not steps:
            return
        self._sampler.load(weights, version)
        for step, group in zip(steps, self._take(len(steps)), strict=True):
            self._waiting.setdefault(step, []).append(group)

    def pop(self, step: int) -> list[Group]:
        """Return the batch of a step."""
        return self._waiting.pop(step)

    def _take(self, number: int) -> list[Group]:
        """Return so many groups, the useful ones among the next prompts."""
        taken: list[Group] = []
        spare: list[Group] = []
        num_tried = 0
        while len(taken) < number and num_tried < MAX_TRIES * number:
            # One large call costs less than several small ones. What it makes too much is put
            # back: the order of prompts is as if they had been sampled one by one.
            wanted = math.ceil(1.1 * (number - len(taken)) / max(self.useful_share, 1 / MAX_TRIES))
            ids = range(self._next_group, self._next_group + wanted)
            groups = self._sampler.sample([self._data.prompts.lease(group, 0) for group in ids])
            for group in groups:
                if len(taken) == number:
                    break
                num_tried += 1
                self._next_group = group.group_id + 1
                reason = self._refusal(group)
                if reason is None:
                    taken.append(group)
                elif reason == "zero_variance":
                    spare.append(group)
                else:
                    raise ValueError(f"group {group.group_id} cannot be trained on: {reason}")
            self.useful_share = len(taken) / num_tried
        return taken + spare[: number - len(taken)]


def as_published(trainer: Trainer, dtype: str) -> Weights:
    """Return the weights rounded as a worker would get them."""
    specs, image = publish_image(trainer.snapshot(), dtype)
    return tensors_from_image(specs, memoryview(image))


class Sampler:
    """What a worker does with a lease, in this process."""

    def __init__(self, config: Config, data: Data) -> None:
        self._config = config
        self._data = data
        # A task that is judged in this process needs no thread to watch over each call.
        is_inline = isinstance(data.host, InlineHost)
        self._reward = data.task.reward if is_inline else data.host.score
        self._sampling: Sampling = make_sampling(
            config.sampling,
            data.text,
            likely_ids=needs_of(build_loss(config)).likely_ids,
        )
        self._engine = TransformersEngine(
            data.model_dir,
            device=pick_device(config.learner.device),
            # The rows so far are of "auto", which on a CPU was float32.
            dtype="float32" if config.worker.dtype == "auto" else config.worker.dtype,
            attn_implementation=config.model.attn_implementation,
            lora=data.lora,
        )

    def load(self, weights: Weights, version: PolicyVersion) -> None:
        self._engine.load(weights, version)

    def sample(self, leases: list[Lease]) -> list[Group]:
        """Return a group for each lease, sampled and scored."""
        size = self._config.batch.group_size
        requests = [
            Request(
                request_id=f"{lease.group_id}.{member}",
                prompt_ids=np.array(lease.prompt_ids, dtype=np.int32),
                seed=lease.seed + member,
            )
            for lease in leases
            for member in range(size)
        ]
        found = self._engine.generate(requests, self._sampling)
        return [
            Group(
                group_id=lease.group_id,
                attempt=0,
                worker_id="here",
                prompt_ids=np.array(lease.prompt_ids, dtype=np.int32),
                rollouts=tuple(
                    self._rollout(Example(**lease.example), completion)
                    for completion in found[index * size : (index + 1) * size]
                ),
            )
            for index, lease in enumerate(leases)
        ]

    def _rollout(self, example: Example, completion: Completion) -> Rollout:
        text = self._data.text.decode(completion.token_ids.tolist())
        reward = self._reward(example, text)
        assert isinstance(reward, float), "built-in tasks answer at once, with an opinion"
        return Rollout(
            token_ids=completion.token_ids,
            sampler_logprobs=completion.logprobs,
            policy_versions=completion.policy_versions,
            completion_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
            likely=completion.likely,
            reward=reward,
            finish_reason=completion.finish_reason,
        )


if __name__ == "__main__":
    main()
