"""Groups that a benchmark of the learner trains on."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from echo.core.rollout import Group, Rollout
from echo.engine.model import build_tokenizer
from echo.tasks.task import load_task

GROUP_SIZE = 8
PROMPT_TOKENS = 200


def rollout(token_ids: Sequence[int], reward: float, rng: random.Random) -> Rollout:
    size = len(token_ids)
    logprobs = [-rng.expovariate(1.0) for _ in range(size)]
    return Rollout(
        token_ids=np.array(token_ids, dtype=np.int32),
        sampler_logprobs=np.array(logprobs, dtype=np.float32),
        policy_versions=np.tile(np.array([1, 0], dtype=np.int32), (size, 1)),
        completion_mask=np.ones(size, dtype=np.bool_),
        reward=reward,
        finish_reason="stop",
    )


def make_groups(arguments: argparse.Namespace, vocab_size: int, seed: int = 0) -> list[Group]:
    """Return about as many tokens as the micro-batches hold; half of each group is right."""
    rng = random.Random(seed)
    draw = countdown(rng) if arguments.lengths == "countdown" else noise(arguments, vocab_size, rng)
    if arguments.lengths == "short":
        draw = short(vocab_size, rng)
    groups: list[Group] = []
    left = arguments.tokens * arguments.micro_batches
    while True:
        prompt, completions = next(draw)
        left -= sum(len(prompt) + len(ids) - 1 for ids in completions)
        if left < 0 and groups:
            return groups
        groups.append(
            Group(
                group_id=len(groups),
                attempt=0,
                worker_id="bench",
                prompt_ids=np.array(prompt, dtype=np.int32),
                rollouts=tuple(
                    rollout(ids, float(n % 2), rng) for n, ids in enumerate(completions)
                ),
            )
        )


Drawn = Iterator[tuple[list[int], list[list[int]]]]


def noise(arguments: argparse.Namespace, vocab_size: int, rng: random.Random) -> Drawn:
    """Yield prompts and completions of random tokens; of `full` ones two make a group."""
    limit = arguments.tokens - arguments.prompt_tokens + 1
    is_full = arguments.lengths == "full"
    scale = min(1.0, arguments.tokens / 8192)  # for a look at small budgets
    while True:
        lengths = [
            limit
            if is_full
            else max(1, min(limit, round(scale * 1000 * math.exp(rng.gauss(-0.405, 0.9)))))
            for _ in range(2 if is_full else GROUP_SIZE)
        ]
        prompt = [rng.randrange(vocab_size) for _ in range(arguments.prompt_tokens)]
        yield prompt, [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def short(vocab_size: int, rng: random.Random) -> Drawn:
    """Yield random tokens, as many as word problems and their answers have (word-problems.toml)."""
    while True:
        lengths = [rng.randint(52, 64), *(rng.randint(8, 40) for _ in range(GROUP_SIZE))]
        prompt, *completions = (
            [rng.randrange(vocab_size) for _ in range(length)] for length in lengths
        )
        yield prompt, completions


def countdown(rng: random.Random) -> Drawn:
    task: Any = load_task("countdown", {})
    tokenizer = build_tokenizer()
    while True:
        prompt, _ = task.demonstration(rng)
        texts = [task.demonstration(rng)[1] for _ in range(GROUP_SIZE)]
        ids = [[*tokenizer(text)["input_ids"][1:], 2] for text in texts]
        yield tokenizer(prompt)["input_ids"], ids
