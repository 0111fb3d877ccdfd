"""Lengths of the rows of a run: how many, how much filling, and what each leaves in memory."""

from __future__ import annotations

import argparse
import gc
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import torch

from echo.algo import row_sizes
from echo.algo.losses import GrpoLoss
from echo.core.rollout import Group
from echo.engine import allocator
from echo.train.models import policy as policy_module
from echo.train.models.policy import Compute, ModelSource
from echo.train.optimizer import OptimizerSettings
from echo.train.trainer import Trainer
from learner.groups import rollout

WAYS = ("unfilled", "16 per octave", "now", "padded")
GROUP_SIZE = 4
GROUPS = {"small": 2, "large": 16}
COMPLETION_TOKENS = {"small": 12, "large": 300}
"""Mean of the completions of a step's groups; the lengths are log-normal."""
WARM_STEPS = 3


def groups_of(kind: str, seed: int) -> list[Group]:
    rng = random.Random(seed)
    most = 2 * COMPLETION_TOKENS[kind]
    return [
        Group(
            group_id=number,
            attempt=0,
            worker_id="bench",
            prompt_ids=np.full(rng.randrange(20, 80), 5, np.int32),
            rollouts=tuple(
                rollout([rng.randrange(3, 30) for _ in range(length)], float(place % 2), rng)
                for place, length in enumerate(
                    max(2, min(most, round(most / 2 * rng.lognormvariate(-0.3, 0.8))))
                    for _ in range(GROUP_SIZE)
                )
            ),
        )
        for number in range(GROUPS[kind])
    ]


def trainer_of(arguments: argparse.Namespace, way: str) -> Trainer:
    """Return a trainer that fills rows in one way; it changes this process for good."""
    if way == "unfilled":
        vars(policy_module)["_fills"] = lambda _: "nothing"
    if way == "16 per octave":
        vars(row_sizes).update(SIZES_PER_OCTAVE=(16,), MAX_REUSED=-1.0)
    return Trainer(
        ModelSource(model_dir=arguments.model),
        Compute(
            device=torch.device("cpu"),
            dtype=getattr(torch, arguments.dtype),
            packs=way != "padded",
        ),
        loss=GrpoLoss(),
        optimizer=OptimizerSettings(learning_rate=1e-6, warmup_steps=0),
    )


def watch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the memory of small steps; then count the lengths of the steps of each kind."""
    allocator.tune(os.environ)
    torch.set_num_threads(arguments.threads)
    trainer = trainer_of(arguments, arguments.way)
    found: dict[str, Any] = {"way": arguments.way}
    sizes, process = [], psutil.Process()
    for seed in range(arguments.measured):
        trainer.forward_backward(trainer.prepare(groups_of("small", seed)), trainer.loss)
        trainer.weights.drop_gradients()
        gc.collect()
        allocator.give_back()
        sizes.append(process.memory_info().rss)
    found["grown_mb"] = round((sizes[-1] - sizes[min(WARM_STEPS, len(sizes) - 1)]) / 1e6)
    found["resident_mb"] = [round(size / 1e6) for size in sizes]
    found["cpu_s"] = round(sum(process.cpu_times()[:2]), 1)
    for kind in GROUPS:
        found[kind] = count(trainer, kind, arguments.steps)
    return found


def count(trainer: Trainer, kind: str, num_steps: int) -> dict[str, Any]:
    """Return the numbers of rows and of their sizes, and the share of tokens that fill them."""
    shapes: list[tuple[int, ...]] = []
    num_tokens = 0
    for spans, shape in micro_batches(trainer, kind, num_steps):
        shapes.append(shape)
        num_tokens += spans
    total = sum(number * length for number, length in shapes)
    return {
        "rows": len(shapes),
        "shapes": len(set(shapes)),
        "sizes": len({number * length for number, length in shapes}),
        "filled": round(total / num_tokens - 1.0, 4),
    }


def micro_batches(
    trainer: Trainer, kind: str, num_steps: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the tokens of the rollouts of each micro-batch, and the shape that the model gets."""
    for seed in range(num_steps):
        samples = trainer.prepare(groups_of(kind, seed)).samples
        for indices, micro in trainer.policy.micro_batches(samples):
            spans = micro.spans([samples[index] for index in indices])
            yield sum(length for length, _ in spans), tuple(micro.input_ids.shape)
