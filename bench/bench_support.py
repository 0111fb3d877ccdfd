"""Bytes of the ids that tokens were drawn from, and ratios with and without them.

    python bench/bench_support.py MODEL [--engine vllm]

An engine samples from a model directory under several truncations; groups are encoded as they
travel. The learner then scores the tokens with the same weights, once on the supports and once on
the whole vocabulary: on-policy, so that every ratio should be 1. Both compute in float32.

Each completion of the questions is sampled in a call of its own, since vLLM's engine asks for more
ids from the next call on when a support has more than it asked for. The ratios are of tokens whose
support travelled; `too_large` is the share of the others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

from echo.algo.losses import GrpoLoss
from echo.core.rollout import Group, PartialRollout, PolicyVersion
from echo.core.token_sets import TOO_LARGE
from echo.engine.engine import Engine, Request, Sampling
from echo.engine.hf.engine import TransformersEngine
from echo.engine.model import VLLM_HEAD_DIM, load_directory
from echo.tasks import tokenization
from echo.train.batch import AdvantageSettings
from echo.train.models.policy import Compute, ModelSource
from echo.train.optimizer import OptimizerSettings
from echo.train.trainer import Trainer
from echo.wire.codec import BYTES_PER_TOKEN, encode_group

TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_p 0.5": {"top_p": 0.5},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.99": {"top_p": 0.99},
    "top_k 5": {"top_k": 5},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "min_p 0.3": {"min_p": 0.3},
}
QUESTIONS = (
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many in all?",
    "Write a short story about a lighthouse keeper.",
    "Explain to a child why the sky is blue.",
    "Write a Python function that reverses a linked list.",
)


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a model directory with weights")
    parser.add_argument("--tokens", type=int, default=96, help="per completion")
    parser.add_argument("--members", type=int, default=2, help="completions of each question")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--only", nargs="+", choices=TRUNCATIONS, default=[*TRUNCATIONS])
    arguments = harness.parse(parser, tokens=8, members=2)
    if arguments.model is None and not harness.is_quick():
        parser.error("name a model directory")
    is_tiny = arguments.model is None
    shape = {"head_dim": VLLM_HEAD_DIM} if arguments.engine == "vllm" else {}
    model_dir: Path = harness.tiny_model(**shape) if is_tiny else arguments.model
    prompts = _prompts(model_dir, is_tiny=is_tiny)
    engine = _start(arguments.engine, model_dir)
    engine.load(load_directory(model_dir, "float32"), PolicyVersion(1, 0))
    size = {"tokens": arguments.tokens, "members": arguments.members}
    groups, requested = {}, {}
    for name in arguments.only:
        sampling = replace(Sampling(1.0, 1.0, 0, 1, ()), **TRUNCATIONS[name])
        groups[name], requested[name] = _sample(engine, prompts, sampling, **size)
    engine.close()
    trainer = Trainer(
        ModelSource(model_dir=model_dir),
        Compute(device=torch.device("cpu"), micro_batch_tokens=2048),
        loss=GrpoLoss(),
        optimizer=OptimizerSettings(),
        advantages=AdvantageSettings(),
    )
    rows = []
    for name, sampled in groups.items():
        rows.append({"truncation": name, **requested[name], **_row(trainer, sampled)})
        print(rows[-1], flush=True)
    result = {
        "model": model_dir.name,
        "engine": arguments.engine,
        "options": size,
        "rows": rows,
    }
    kind = "support_vllm" if arguments.engine == "vllm" else "support"
    print(f"wrote {harness.save(kind, result)}")


def _start(kind: str, model_dir: Path) -> Engine:
    if kind == "transformers":
        return TransformersEngine(model_dir, dtype="float32")
    from echo.engine.vllm.engine import VllmEngine  # not installed everywhere

    return VllmEngine(
        model_dir,
        dtype="float32",
        process="inline",
        arguments={"kv_cache_memory_bytes": 512 << 20},  # a window of SmolLM2 takes 360 MiB
        num_threads=1,
    )


def _prompts(model_dir: Path, *, is_tiny: bool) -> list[list[int]]:
    if is_tiny:
        return [[1, 5, 6], [1, 7]]
    tokenizer: Any = tokenization.load_tokenizer(model_dir)
    texts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [
        list(tokenizer.apply_chat_template(text, add_generation_prompt=True)["input_ids"])
        for text in texts
    ]


def _sample(
    engine: Engine,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    tokens: int,
    members: int,
) -> tuple[list[Group], dict[str, list[int]]]:
    """Return a group of each prompt, and how many ids each call asked of vLLM for a token."""
    sampling, calls, requested = replace(sampling, max_completion_tokens=tokens), [], []
    for member in range(members):
        requested.append(getattr(engine, "num_set_ids", 0))
        requests = [
            Request(f"{number}", np.array(prompt, np.int32), 100 * number + member)
            for number, prompt in enumerate(prompts)
        ]
        calls.append(engine.generate(requests, sampling))
    found = [call[number] for number in range(len(prompts)) for call in calls]
    rollouts = [
        PartialRollout()
        .extended(
            done.token_ids,
            done.logprobs,
            done.policy_versions,
            finish_reason="length",
            support=done.support,
        )
        .rollout(0.0, stale_tokens="keep")
        for done in found
    ]
    groups = [
        Group(
            group_id=number,
            attempt=0,
            worker_id="w1",
            prompt_ids=np.array(prompt, np.int32),
            rollouts=tuple(rollouts[number * members : (number + 1) * members]),
        )
        for number, prompt in enumerate(prompts)
    ]
    return groups, {"requested_ids": requested} if any(requested) else {}


def _row(trainer: Trainer, groups: list[Group]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    num_tokens = sum(rollout.num_tokens for rollout in rollouts)
    num_bytes = sum(
        len(encode_group(group)[1]) - 4 * len(group.prompt_ids) - BYTES_PER_TOKEN * group.num_tokens
        for group in groups
    )
    sizes = np.concatenate(
        [rollout.support.sizes for rollout in rollouts if rollout.support is not None]
    )
    known = sizes[sizes > 0] if (sizes > 0).any() else np.zeros(1)
    bare = [
        replace(group, rollouts=tuple(replace(each, support=None) for each in group.rollouts))
        for group in groups
    ]
    travels = sizes != TOO_LARGE
    with_sets, without = (_ratios(trainer, each)[travels] for each in (groups, bare))
    return {
        "tokens": num_tokens,
        "set_bytes_per_token": round(num_bytes / num_tokens, 2),
        "other_bytes_per_token": BYTES_PER_TOKEN,
        "ids_mean": round(float(known.mean()), 2),
        "ids_median": float(np.median(known)),
        "ids_max": int(sizes.max()),
        "too_large": float((sizes == TOO_LARGE).mean()),
        "ratio_mean": float(with_sets.mean()),
        "ratio_min": float(with_sets.min()),
        "ratio_max": float(with_sets.max()),
        "ratio_mean_without_sets": float(without.mean()),
    }


def _ratios(trainer: Trainer, groups: list[Group]) -> Any:
    parts = [
        scores - rollout.sampler_logprobs
        for group, each in zip(groups, trainer.forward(groups), strict=True)
        for rollout, scores in zip(group.rollouts, each, strict=True)
    ]
    return np.exp(np.concatenate(parts).astype(np.float64))


if __name__ == "__main__":
    main()
    harness.end_at_once()
