"""Measure how far vLLM's log-probabilities are from the learner's, by the type of vLLM's logits.

vLLM samples rollouts in 16 bits, once with logits as it computes them by default ("model": rounded
to 16 bits) and once with logits in float32, as Echo has it on a GPU. The learner's values for the
same tokens are those of Echo's head over transformers' hidden states in the same type.

    python bench/bench_mismatch.py MODEL [--device cuda] [--dtype bfloat16]

MODEL is a directory. A quick run without it takes a tiny random model.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion, Request, Sampling
from echo.engine.model import load_directory
from echo.engine.vllm.engine import VllmEngine
from echo.engine.weights import torch_dtype
from echo.kernels.logprob import linear_logprob

TOPICS = (
    "the sea", "a train journey", "bees", "the history of bread", "prime numbers", "a lost key",
    "mountains in winter", "how a clock works", "a city at night", "why leaves fall", "an old map",
    "the invention of paper", "learning to swim", "the moon", "a letter to a friend", "rivers",
)  # fmt: skip


def make_requests(model_dir: Path) -> list[Request]:
    """Return prompts in the model's chat format, or ids if the directory has no tokenizer."""
    if not (model_dir / "tokenizer.json").is_file():
        prompts = [[1, 5, 6 + number] for number in range(len(TOPICS))]
    else:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        prompts = []
        for topic in TOPICS:
            message = {"role": "user", "content": f"Write a few sentences about {topic}."}
            text = tokenizer.apply_chat_template(
                [message], add_generation_prompt=True, tokenize=False
            )
            prompts.append(tokenizer.encode(str(text), add_special_tokens=False))
    return [
        Request(str(number), np.array(prompt, np.int32), seed=number)
        for number, prompt in enumerate(prompts)
    ]


def sample(
    arguments: argparse.Namespace, head: str, requests: Sequence[Request]
) -> list[Completion]:
    engine = VllmEngine(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        process="inline",
        arguments={
            "hf_overrides": {"head_dtype": head},
            "kv_cache_memory_bytes": 256 << 20,
        },
        num_threads=1,
    )
    try:
        engine.load(load_directory(arguments.model, arguments.dtype), PolicyVersion(1, 1))
        return engine.generate(requests, Sampling(1.0, 1.0, 0, arguments.tokens, ()))
    finally:
        engine.close()


@torch.inference_mode()
def learners(
    model: Any, requests: Sequence[Request], completions: Sequence[Completion]
) -> list[np.ndarray[Any, Any]]:
    """Return the learner's log-probabilities of each completion."""
    found = []
    device, head = model.device, model.get_output_embeddings().weight
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([*request.prompt_ids.tolist(), *completion.token_ids.tolist()])
        hidden = model.base_model(ids[None].to(device)).last_hidden_state[0]
        start = len(request.prompt_ids)
        logprobs, _ = linear_logprob(hidden[start - 1 : -1], head, ids[start:].to(device))
        found.append(logprobs.float().cpu().numpy())
    return found


def compare(
    completions: Sequence[Completion], learned: Sequence[np.ndarray[Any, Any]]
) -> dict[str, float]:
    sampled = np.concatenate([completion.logprobs for completion in completions])
    log_ratio = (np.concatenate(learned) - sampled).astype(np.float64)
    apart = np.abs(log_ratio)
    return {
        "tokens": len(apart),
        "mean_nats": round(float(apart.mean()), 5),
        "p99_nats": round(float(np.quantile(apart, 0.99)), 5),
        "most_nats": round(float(apart.max()), 5),
        "k3_kl": round(float((np.exp(log_ratio) - 1 - log_ratio).mean()), 7),
    }


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=128, help="of each rollout")
    arguments = harness.parse(parser, tokens=16)
    if arguments.model is None and not arguments.quick:
        parser.error("name MODEL")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        if arguments.model is None:
            sys.path.insert(0, str(harness.ROOT))
            from tests.runtime.families import save_family

            arguments.model = Path(directory)
            save_family(arguments.model, "qwen3")
        requests = make_requests(arguments.model)
        rows = []
        for head in ("model", "float32"):
            completions = sample(arguments, head, requests)
            gc.collect()
            model = AutoModelForCausalLM.from_pretrained(
                arguments.model, dtype=torch_dtype(arguments.dtype)
            )
            learned = learners(model.eval().to(arguments.device), requests, completions)
            rows.append({"head_dtype": head, **compare(completions, learned)})
            print(json.dumps(rows[-1]), flush=True)
    what = f"vLLM in {arguments.dtype} on {arguments.device} beside the learner's head"
    result = {"what": what, "model": arguments.model.name, "rows": rows}
    print(f"wrote {harness.save('mismatch', result)}")


if __name__ == "__main__":
    main()
    harness.end_at_once()
