"""Time the learner's step on random weights of a model's real shape, beside a plain one.

    step      the trainer on packed rows, where long prompts are shared, on packed rows with each
              rollout apart, and on padded rows; the same step written plainly with transformers;
              and TRL's own loss with its own optimizer, if TRL is installed; in turns in one
              process: tokens per second and per CPU second, model FLOPs utilization, seconds by
              part, peak memory; seconds of the first step, and how many graphs were compiled in it
    profile   where the time of the trainer's step on packed rows goes, with a version published
              after each step, in parts that add up to the step; and how many launches, copies and
              waits the host asks of a GPU
    exact     log-probabilities of packed and of padded rows against padded rows in float32,
              family by family
    balance   share of all ranks' time that is used, by way of making micro-batches; a calculation
    memory    what --dry-run reckons with, beside what a step takes of a GPU, or without one beside
              what torch's tracker counts of the step on tensors without memory (fake_step.py)
    publish   the same step alone and with a version published after each, as a run does: made while
              the step waits, brought from a GPU, coded and hashed beside the next one; and the host
              memory of each process. By itself one process; several where torchrun starts them

Weights are random, so nothing is downloaded. Lengths: `lognormal` has completions of 1 000 tokens
in the mean after prompts of --prompt-tokens, `full` fills each micro-batch with one rollout,
`countdown` is the second small task with its demonstrations, `short` is as long as the quickstart's
word problems.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
import torch
from learner.exactness import compare_families
from learner.groups import PROMPT_TOKENS, make_groups
from learner.memory import compare_memory, first_line, free_gpu
from learner.models import MODELS, Step, known_model, trainer_step, vocab_size_of
from learner.peers import LIGER_PARTS, plain_step, trl_step, use_liger
from learner.profiling import profile_step
from learner.publication import time_publication
from torch._dynamo.utils import counters
from transformers.utils import logging as transformers_logging

from echo.algo.balance import balanced_rounds
from echo.algo.batching import pack_micro_batches
from echo.core.errors import EchoError
from echo.core.rollout import Group
from echo.engine import allocator
from echo.train.optimizer import KINDS


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the benchmark's arguments."""
    parser = harness.new_parser(__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, default="step")
    parser.add_argument(
        "--model",
        type=known_model,
        default="Qwen3-0.6B",
        help=f"{', '.join(MODELS)}, or a directory with the config.json of your own",
    )
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step, about")
    parser.add_argument(
        "--lengths", choices=("lognormal", "full", "countdown", "short"), default="lognormal"
    )
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=USUAL_WAYS,
        help="what is timed, in turns",
    )
    parser.add_argument(
        "--checkpointing", nargs="?", const=True, default=False, choices=("offload",)
    )
    parser.add_argument(
        "--last-version",
        choices=("gpu", "host"),
        default="gpu",
        help="where `publish` keeps it, if the weights are on a GPU",
    )
    parser.add_argument("--optimizer", nargs="+", choices=KINDS, default=["float32"])
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter; 0: all weights")
    parser.add_argument("--layers", type=int, help="of the model in memory; all unless given")
    parser.add_argument("--compile", action="store_true", help="the trainer's decoder layers")
    parser.add_argument("--liger", nargs="+", choices=LIGER_PARTS, default=(), help="on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=5, help="timed ones, after two")
    parser.add_argument("--rows", type=int, default=512, help="of balance")
    parser.add_argument("--ranks", type=int, help="of balance, 8, and of memory, 1")
    parser.add_argument("--threads", type=int, default=0, help="of torch on a CPU; 0 for all cores")
    return parser


def main() -> None:
    parser = new_parser()
    arguments = harness.parse(parser, model="tiny", tokens=1024, micro_batches=2, steps=2)
    prepare_process(arguments.threads)
    arguments.dtype = arguments.dtype or usual_dtype(arguments.device)
    arguments.ranks = arguments.ranks or {"balance": 8}.get(arguments.part, 1)
    peers = PEERS & set(arguments.ways) if arguments.part == "step" else set()
    if arguments.lora and (arguments.part == "memory" or peers):
        parser.error(f"memory and {', '.join(sorted(PEERS))} are of all weights, without --lora")
    if arguments.liger:
        use_liger(arguments.liger)
    rows = PARTS[arguments.part](arguments)
    if int(os.environ.get("RANK", 0)):
        return
    for row in rows:
        print("  ".join(f"{key} {_shown(value)}" for key, value in row.items()), flush=True)
    settings = vars(arguments) | device_of(arguments.device) | versions_of_peers(arguments)
    result = {"settings": settings, "rows": rows}
    print(harness.save(result_name(arguments, rows), result))
    if any("failed" in row and row.get("way") not in PEERS for row in rows):
        raise SystemExit(1)


def result_name(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """Return the name of the result, in which are the options that have results of their own."""
    model = Path(arguments.model).name
    if arguments.part == "memory":
        return f"learner_memory_{model}_{arguments.tokens}x{arguments.ranks}".lower()
    if arguments.part == "publish":
        place = "_host" if arguments.last_version == "host" else ""
        place = "_sharded" if "RANK" in os.environ and rows[0]["ranks"] == 1 else place
        compiled = "_compiled" if arguments.compile else ""
        return f"learner_publish_{model}_{rows[0]['ranks']}ranks{place}{compiled}".lower()
    if arguments.part == "balance":
        return f"learner_balance_{arguments.rows}x{arguments.tokens}"
    if arguments.part == "exact":
        return "learner_exact"
    name = f"learner_{arguments.part}_{model}_{arguments.lengths}".lower()
    others = (
        (arguments.dtype, arguments.dtype != usual_dtype(arguments.device)),
        (f"p{arguments.prompt_tokens}", arguments.prompt_tokens != PROMPT_TOKENS),
        ("-".join(arguments.ways), arguments.ways != USUAL_WAYS),
        ("checkpointed", arguments.checkpointing is True),
        ("offloaded", arguments.checkpointing == "offload"),
        (arguments.optimizer[0], arguments.optimizer[0] != "float32"),
        (f"lora{arguments.lora}", arguments.lora > 0),
        ("compiled", arguments.compile),
        ("liger", bool(arguments.liger)),
    )
    return "_".join([name, *(other for other, is_on in others if is_on)])


def prepare_process(num_threads: int) -> None:
    transformers_logging.set_verbosity_error()
    allocator.tune(os.environ)  # as every node does; the other ways have it, too
    if num_threads:
        torch.set_num_threads(num_threads)


def usual_dtype(device: str) -> str:
    return "bfloat16" if "cuda" in device else "float32"


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def device_of(device: str) -> dict[str, Any]:
    if "cuda" not in device:
        return {"num_threads": torch.get_num_threads()}
    return {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}


def versions_of_peers(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the versions of what this measurement alone needs."""
    used = {
        "trl": "trl" in arguments.ways,
        "liger-kernel": bool(arguments.liger),
    }
    return {name: metadata.version(name) for name, is_used in used.items() if is_used}


PEERS = {"plain", "trl"}
USUAL_WAYS = ["packed", "padded", "plain"]
WAYS: Mapping[str, Callable[[argparse.Namespace], Step]] = {
    "packed": lambda arguments: trainer_step(arguments, "packed", share_prompts=True),
    "apart": lambda arguments: trainer_step(arguments, "packed"),
    "padded": lambda arguments: trainer_step(arguments, "padded"),
    "plain": plain_step,
    "trl": trl_step,
}


def time_steps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time each way in turns, on a CPU; on a GPU, where two models may not fit, one by one.

    One that fails there is a row, and the others go on: whole logits may not fit where chunks do.
    """
    vocab_size = vocab_size_of(arguments.model)
    batches = [make_groups(arguments, vocab_size, seed) for seed in range(2)]
    if "cuda" not in arguments.device:
        return _timed(arguments, {way: WAYS[way](arguments) for way in arguments.ways}, batches)
    rows: list[dict[str, Any]] = []
    for way in arguments.ways:
        failed = ""
        try:
            rows += _timed(arguments, {way: WAYS[way](arguments)}, batches)
        except (EchoError, RuntimeError) as error:  # out of memory is one of these
            failed = first_line(error)
        if failed:  # the error, whose frames hold the model, is gone
            rows.append({"way": way, "failed": failed})
        free_gpu()
    return rows


def _timed(
    arguments: argparse.Namespace, steps: Mapping[str, Step], batches: Sequence[list[Group]]
) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, float]]] = {way: [] for way in steps}
    firsts: dict[str, dict[str, float]] = {}
    for number in range(2 + arguments.steps):
        groups = batches[number % len(batches)]
        num_tokens = sum(
            len(group.prompt_ids) + member.num_tokens - 1
            for group in groups
            for member in group.rollouts
        )
        for way, step in steps.items():
            if "cuda" in arguments.device:
                torch.cuda.reset_peak_memory_stats()
            before = graphs_compiled()
            cpu_at, began_at = time.process_time(), time.perf_counter()
            speed = dict(step(groups))
            speed["step_s"] = time.perf_counter() - began_at
            speed["rollout_tokens_per_s"] = num_tokens / speed["step_s"]
            speed["tokens_per_cpu_s"] = num_tokens / (time.process_time() - cpu_at)
            if "cuda" in arguments.device:
                speed["perf/peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            if number == 0:
                compiled = graphs_compiled() - before
                firsts[way] = {"first_step_s": speed["step_s"], "graphs_compiled": compiled}
            if number >= 2:
                found[way].append(speed)
    rows: list[dict[str, Any]] = []
    for way, speeds in found.items():
        row: dict[str, Any] = {"way": way, "num_steps": len(speeds), **firsts[way]}
        for name in speeds[0]:
            row[name] = statistics.median(speed[name] for speed in speeds)
        rates = [speed["perf/tokens_per_s"] for speed in speeds]
        row["perf/tokens_per_s_spread"] = [min(rates), max(rates)]
        rows.append(row)
    return rows


def graphs_compiled() -> int:
    """Return how many graphs this process has compiled, as torch's cache did not have them."""
    return int(counters["inductor"]["fxgraph_cache_miss"])


# --- balance --------------------------------------------------------------------------------------


def use_of_ranks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Count how much of all ranks' time is worked, where each round lasts as its heaviest bin."""
    linear, square = 6 * 3.6e9, 6 * 36 * 32 * 128  # of a model with 4e9 parameters

    def work(tokens: int) -> float:
        return linear * tokens + square * tokens * tokens

    shares: dict[str, list[float]] = {"padded and sorted": [], "equal work": []}
    for seed in range(20):
        rng = random.Random(seed)
        lengths = [
            arguments.prompt_tokens + max(1, min(7992, round(900 * math.exp(rng.gauss(0, 0.9)))))
            for _ in range(arguments.rows)
        ]
        works = [work(tokens) for tokens in lengths]
        padded = [
            len(rows) * works[rows[0]]
            for rows in pack_micro_batches(lengths, max_tokens=arguments.tokens)
        ]
        rounds = balanced_rounds(
            lengths, works, max_tokens=arguments.tokens, num_ranks=arguments.ranks
        )
        equal = [sum(works[index] for index in rows) for bins in rounds for rows in bins]
        for name, bins in (("padded and sorted", padded), ("equal work", equal)):
            bins.sort(reverse=True)
            spent = sum(
                max(bins[at : at + arguments.ranks]) for at in range(0, len(bins), arguments.ranks)
            )
            shares[name].append(sum(works) / (arguments.ranks * spent))
    return [
        {"way": name, "used": statistics.fmean(found), "least": min(found)}
        for name, found in shares.items()
    ]


PARTS: Mapping[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "step": time_steps,
    "profile": profile_step,
    "exact": compare_families,
    "balance": use_of_ranks,
    "memory": compare_memory,
    "publish": time_publication,
}


if __name__ == "__main__":
    main()
