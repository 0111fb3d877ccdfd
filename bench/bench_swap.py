"""Time in-flight weight swaps, and measure the log-ratio after them.

Rollouts run, the weights are swapped in the middle, and the log-probabilities of the tokens that
follow are compared with those of the new version alone, computed by transformers: the log-ratio
that the learner would see before it has moved at all.

    python bench/bench_swap.py OLD NEW [--engine vllm|transformers] [--parts 0.01 0.1 1]
    python bench/bench_swap.py OLD NEW --device cuda --dtype bfloat16 --process engine

OLD and NEW are directories with weights of one model, such as two exports of a run; the swaps are
to OLD + part * (NEW - OLD), a part of 0.01 standing for a single optimizer step among a hundred.
A quick run without them swaps random weights of transformers'.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import harness
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion, Engine, Request, Sampling, Watcher
from echo.engine.model import load_directory


class Count(Watcher):
    """Sets an event once so many tokens have come."""

    def __init__(self, event: threading.Event, num_tokens: int) -> None:
        self._event = event
        self._num_left = num_tokens

    def on_tokens(self, number: int) -> None:
        self._num_left -= number
        if self._num_left < 0:
            self._event.set()


OLD, NEW = PolicyVersion(1, 1), PolicyVersion(1, 2)
NUM_ROLLOUTS = 64


def make_engine(arguments: argparse.Namespace, kv_cache: str) -> Engine:
    settings = {"kv_cache": kv_cache, "device": arguments.device, "dtype": arguments.dtype}
    if arguments.engine == "vllm":
        from echo.engine.vllm.engine import VllmEngine

        return VllmEngine(arguments.old, process=arguments.process, num_threads=1, **settings)
    from echo.engine.hf.engine import TransformersEngine

    return TransformersEngine(arguments.old, num_threads=1, **settings)


def swap_in_flight(
    engine: Engine, old: Mapping[str, Tensor], new: Mapping[str, Tensor], requests: list[Request]
) -> tuple[list[Completion], float]:
    """Return the completions and the seconds that `load` took."""
    window = 128 - len(requests[0].prompt_ids)
    half_way = threading.Event()
    engine.load(old, OLD)
    found: list[Completion] = []
    sampling = Sampling(1.0, 1.0, 0, window, ())
    thread = threading.Thread(
        target=lambda: found.extend(
            engine.generate(requests, sampling, Count(half_way, NUM_ROLLOUTS * window // 4))
        )
    )
    thread.start()
    while not half_way.wait(1.0):
        if not thread.is_alive():
            raise SystemExit("the engine ended before a quarter of the tokens was sampled")
    started = time.perf_counter()
    engine.load(new, NEW)
    seconds = time.perf_counter() - started
    thread.join()
    return found, seconds


@torch.no_grad()
def log_ratios(
    model: torch.nn.Module, requests: list[Request], completions: list[Completion]
) -> np.ndarray:
    """Return new policy minus sampler, in nats, of all tokens of the new version."""
    ratios = []
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([*request.prompt_ids.tolist(), *completion.token_ids.tolist()])
        start = len(request.prompt_ids)
        logits = model(input_ids=ids[None]).logits[0, start - 1 : -1].float()
        exact = logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0].numpy()
        is_new = completion.policy_versions[:, 1] == NEW.step
        ratios.append((exact - completion.logprobs)[is_new])
    return np.concatenate(ratios)


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default="float32", help="that the engine computes in")
    parser.add_argument("--process", choices=["inline", "engine"], default="inline")
    parser.add_argument("--parts", type=float, nargs="+", default=[0.01, 0.1, 1.0])
    arguments = harness.parse(parser, engine="transformers", parts=[0.1])
    if arguments.new is None:
        if not arguments.quick:
            parser.error("name OLD and NEW, two directories with weights")
        arguments.old, arguments.new = harness.tiny_model(0), harness.tiny_model(1)
    torch.set_num_threads(1)
    old = load_directory(arguments.old, "float32")
    target = load_directory(arguments.new, "float32")
    rng = np.random.default_rng(0)
    requests = [
        Request(str(n), rng.integers(3, 13, 9).astype(np.int32), n) for n in range(NUM_ROLLOUTS)
    ]
    model = AutoModelForCausalLM.from_pretrained(arguments.old, dtype=torch.float32).eval()
    rows = []
    for kv_cache in ("recompute", "keep"):
        for part in arguments.parts:
            engine = make_engine(arguments, kv_cache)
            new = {name: old[name] + part * (target[name] - old[name]) for name in old}
            model.load_state_dict(new, strict=False)
            model.tie_weights()
            completions, seconds = swap_in_flight(engine, old, new, requests)
            engine.close()
            row = {"engine": arguments.engine, "kv_cache": kv_cache, "part": part}
            rows.append({**row, **judge(log_ratios(model, requests, completions), seconds)})
            print(json.dumps(rows[-1]), flush=True)
    what = f"{arguments.old}, {arguments.dtype} on {arguments.device}"
    result = {"what": what, "rollouts": NUM_ROLLOUTS, "rows": rows}
    print(f"wrote {harness.save('swap', result)}")


def judge(ratios: np.ndarray, seconds: float) -> dict[str, float]:
    return {
        "tokens": len(ratios),
        "log_ratio/mean_abs": float(np.abs(ratios).mean()),
        "log_ratio/max_abs": float(np.abs(ratios).max()),
        "kl_k3": float((np.exp(ratios) - 1 - ratios).mean()),
        "load_s": round(seconds, 4),
    }


if __name__ == "__main__":
    main()
