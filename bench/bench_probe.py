"""Count right versions that vLLM's probe refuses, and wrong ones that it lets pass.

Versions are those of a run: each moves every weight by about a learning rate, on and on in a
direction that turns slowly, rounded as they are published. Every one is installed as it is; then
again with a fault between Echo and vLLM, in each of these ways:

    exchanged    two layers are exchanged
    permuted     the rows of one projection are permuted
    zeros        one tensor is zeros
    other        another model of the same shape: each tensor's values, begun elsewhere in it

    python bench/bench_probe.py MODEL [--lora RANK] [--dtype bfloat16]
    python bench/bench_probe.py --families [NAME ...] [--lora RANK]

MODEL is a directory. --families takes tiny random models of the families of docs/models.md that
vLLM samples from on a CPU, and counts right versions alone: of random models no fault is likely to
be seen, since they find everything alike.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import numpy as np
import torch
from torch import Tensor

from echo.core.errors import EchoError, EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.lora import ALL_LINEAR, Lora, build_adapted
from echo.engine.model import load_directory, names_on_disk
from echo.engine.vllm import backend as vllm_backend
from echo.engine.vllm import engine as vllm_engine
from echo.engine.vllm.engine import VllmEngine
from echo.engine.weights import torch_dtype

Weights = Mapping[str, Tensor]

CHANGED_BY_VLLM = ("smollm3", "olmo3")
"""Families that vLLM runs by transformers' classes, of which this process then makes no others."""
CACHE = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8, "max_model_len": 256}
TURN = 0.1
"""Share of a step that is not in the direction of the step before."""
NUM_BEGINNINGS = 1 << 20
"""Of what is drawn by chance."""


def versions(start: Weights, learning_rate: float) -> Iterator[Weights]:
    """Yield a run's versions, from its start on."""
    rng = np.random.default_rng(0)
    masters = {name: tensor.float() for name, tensor in start.items()}
    moves = {name: torch.zeros_like(master) for name, master in masters.items()}
    most = max(tensor.numel() for tensor in start.values())
    # Drawn once, and begun elsewhere each time: drawing would take longer than all else.
    noise = torch.randn(most + NUM_BEGINNINGS, generator=torch.Generator().manual_seed(0))
    while True:
        yield {name: master.to(start[name].dtype) for name, master in masters.items()}
        for name, move in moves.items():
            first = int(rng.integers(NUM_BEGINNINGS))
            fresh = noise[first : first + move.numel()].view_as(move)
            move.mul_(1 - TURN).add_(fresh, alpha=TURN)
            masters[name] = masters[name].add(
                move, alpha=learning_rate / float(move.norm() / move.numel() ** 0.5)
            )


class Faults:
    """Ways in which what vLLM has is not the version."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def exchanged(self, weights: Weights) -> Weights:
        layers = sorted({_layer(name) for name in weights} - {""})
        one, other = self._rng.choice(layers, 2, replace=False)
        found = dict(weights)
        for name in weights:
            if _layer(name) == one:
                twin = name.replace(f".layers.{one}.", f".layers.{other}.")
                found[name], found[twin] = weights[twin], weights[name]
        return found

    def permuted(self, weights: Weights) -> Weights:
        matrices = [name for name, tensor in weights.items() if tensor.dim() == 2 and _layer(name)]
        name = self._rng.choice(matrices)
        order = self._rng.permutation(len(weights[name]))
        return {**weights, name: weights[name][torch.from_numpy(order)].contiguous()}

    def zeros(self, weights: Weights) -> Weights:
        name = self._rng.choice(list(weights))
        return {**weights, name: torch.zeros_like(weights[name])}

    def other(self, weights: Weights) -> Weights:
        return {
            name: tensor.flatten().roll(int(self._rng.integers(1, tensor.numel()))).view_as(tensor)
            for name, tensor in weights.items()
        }


def _layer(name: str) -> str:
    parts = name.split(".")
    return parts[parts.index("layers") + 1] if "layers" in parts else ""


def make_lora(model_dir: Path, rank: int, targets: tuple[str, ...]) -> Lora | None:
    if not rank:
        return None
    return Lora(base_dir=model_dir, rank=rank, alpha=2 * rank, target_modules=targets)


class Bench:
    """An engine, and what its probe has found."""

    def __init__(
        self, model_dir: Path, dtype: str, lora: Lora | None, options: Mapping[str, Any]
    ) -> None:
        self.engine = VllmEngine(
            model_dir, dtype=dtype, num_threads=1, lora=lora, arguments=options
        )
        self._number = 0

    def is_refused(self, weights: Weights, wrong: Weights | None = None) -> bool:
        """Install a version, or hand over a wrong one in its place; return what the probe says."""
        engine = self.engine
        if wrong is not None and engine.takes_patches:
            # The version is installed, and comes back with the next one: no time is lost on going
            # back to it, and on what it is expected to give, which is known.
            there = names_on_disk(engine._probe.model, wrong)  # noqa: SLF001
            installed = engine._good  # noqa: SLF001
            assert installed is not None
            return engine._hand_over(there, installed) is not None  # noqa: SLF001
        self._number += 1
        hand_over = vllm_backend.hand_over_adapter

        def hand_over_wrongly(where: Any, right: Weights, *rest: Any) -> None:
            hand_over(where, right if wrong is None else wrong, *rest)

        try:
            with mock.patch.object(vllm_engine, "hand_over_adapter", hand_over_wrongly):
                engine.load(weights, PolicyVersion(1, self._number))
        except EngineError as error:
            if "not what vLLM samples from" not in str(error):
                raise
            return True
        return False


def measure(
    model_dir: Path,
    arguments: argparse.Namespace,
    options: Mapping[str, Any],
    kinds: Sequence[str] = (),
    targets: tuple[str, ...] = (ALL_LINEAR,),
) -> dict[str, Any]:
    """Return how many versions of a model were refused, right ones and those with each fault."""
    # First: of some families vLLM changes the classes of transformers for this process.
    start: Weights = load_directory(model_dir, arguments.dtype)
    if lora := make_lora(model_dir, arguments.lora, targets):
        start = build_adapted(lora, torch_dtype(arguments.dtype), "eager")[1]
    bench = Bench(model_dir, arguments.dtype, lora, options)
    probe = bench.engine._probe  # noqa: SLF001 -- whose numbers no error has
    seen: list[tuple[float, float]] = []
    find_fault = probe.find_fault

    def noting(measured: Any, expectation: Any, weights: Any) -> str | None:
        difference = probe._difference(measured, expectation.logprobs)  # noqa: SLF001
        seen.append((difference, expectation.allowed))
        return find_fault(measured, expectation, weights)

    probe.find_fault = noting  # type: ignore[method-assign, assignment]
    faults = Faults()
    rows: dict[str, list[tuple[bool, float]]] = {kind: [] for kind in ("right", *kinds)}
    allowed: set[float] = set()
    started = time.perf_counter()
    for number, weights in zip(
        range(arguments.versions), versions(start, arguments.learning_rate), strict=False
    ):
        for kind, found in rows.items():
            wrong = None if kind == "right" else getattr(faults, kind)(weights)
            seen.clear()
            is_refused = bench.is_refused(weights, wrong)
            found.append((is_refused, seen[0][0]))
            allowed.add(round(seen[0][1], 5))
        if number % 20 == 0:
            told = {kind: sum(is_refused for is_refused, _ in rows[kind]) for kind in rows}
            print(number + 1, f"{time.perf_counter() - started:.0f} s", told, flush=True)
    bench.engine.close()
    return {
        "allowed": sorted(allowed),
        **{
            kind: {
                "versions": len(found),
                "refused": sum(is_refused for is_refused, _ in found),
                "least_difference": round(min(d for _, d in found), 5),
                "most_difference": round(max(d for _, d in found), 5),
            }
            for kind, found in rows.items()
        },
    }


def of_families(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what was refused of each family that vLLM samples from."""
    sys.path.insert(0, str(harness.ROOT))
    from tests.runtime.families import FAMILIES, save_family

    rows = []
    for name in sorted(FAMILIES, key=CHANGED_BY_VLLM.__contains__):
        family = FAMILIES[name]
        is_named = name in arguments.families or not arguments.families
        if not is_named or family.vllm or (arguments.lora and family.vllm_lora):
            continue
        with tempfile.TemporaryDirectory() as directory:
            save_family(Path(directory), name)
            options = {**CACHE, "max_model_len": -1, **family.vllm_options}
            try:
                found = measure(Path(directory), arguments, options, targets=family.lora_targets)
            except EchoError as error:
                found = {"error": str(error)}
        rows.append({"family": name, **found})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--families", nargs="*", metavar="NAME")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--dtype", default="bfloat16", help="that vLLM computes in")
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, help="2e-5, with --lora 2e-4")
    arguments = harness.parse(parser, versions=2)
    if arguments.quick and arguments.model is None and arguments.families is None:
        arguments.families = ["qwen3"]
    if (arguments.families is None) == (arguments.model is None):
        parser.error("name either MODEL or --families")
    arguments.learning_rate = arguments.learning_rate or (2e-4 if arguments.lora else 2e-5)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("echo.engine.vllm.probe").setLevel(logging.INFO)
    weights = f"LoRA of rank {arguments.lora}" if arguments.lora else "full weights"
    kind = "lora" if arguments.lora else "full"
    result: dict[str, Any]
    if arguments.families is not None:
        name, result = f"probe_families_{kind}", {"families": of_families(arguments)}
    else:
        kinds = ["exchanged", "permuted", "zeros", "other"]
        found = measure(arguments.model, arguments, CACHE, kinds)
        name, result = f"probe_{arguments.model.name}_{kind}", found
        print(json.dumps(found))
    what = f"{arguments.dtype}, {weights}"
    result = {"what": what, "learning_rate": arguments.learning_rate, **result}
    print(f"wrote {harness.save(name, result)}")


if __name__ == "__main__":
    main()
    harness.end_at_once()
