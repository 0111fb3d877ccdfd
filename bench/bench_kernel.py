"""Time log-probabilities from hidden states, beside other kernels.

All run in one process on the same tensors, in turns, so that clocks and temperature hit all alike;
the rate of a plain matrix product, measured in the same run, is the ceiling. A kernel that is not
installed, or cannot compute the shape, is listed as ABSENT with the reason, never left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from echo.kernels import logprob
from echo.kernels.contract import host_waits
from echo.kernels.logprob import linear_logprob

INV_TEMPERATURE = 1 / 0.9
Scores = tuple[Tensor, Tensor | None]
Provider = Callable[[Tensor, Tensor, Tensor, bool], Scores]


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    device = "cpu" if arguments.quick else "cuda"
    problem = Problem(arguments.tokens, arguments.width, arguments.vocab, arguments.live, device)
    found, absent = providers(arguments)
    results: dict[str, dict[str, Any]] = {}
    for name, provider in found.items():
        before: dict[str, Any] = {}
        last: dict[str, Any] = {}
        try:
            # The first compile; the last two are compared bit by bit.
            for _ in range(2 if arguments.quick else 3):
                before, last = last, problem.measure(provider, arguments.entropy)
            results[name] = problem.errors(last, with_entropy=arguments.entropy)
            results[name]["same_bits"] = all(
                torch.equal(before[part], last[part]) for part in ("logprobs", "grad")
            )
        except Exception as error:  # whatever stops a kernel of others is its result
            if name.startswith("echo"):
                raise
            absent[name] = f"{type(error).__name__}: {error}"[:200]
    rounds, rates = [], []
    for _ in range(arguments.repeats):
        rates += [problem.product_tflops() for _ in range(4)][1:]  # the first wakes the clocks
        rounds.append(
            {name: problem.measure(found[name], arguments.entropy)["figures"] for name in results}
        )
    for name, result in results.items():
        for figure in ("forward_ms", "backward_ms", "peak_mib"):
            values = [one[name][figure] for one in rounds]
            result[figure] = statistics.median(values)
            result[f"{figure}_spread"] = [min(values), max(values)]
    report(arguments, problem, statistics.median(rates), results, absent)


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the benchmark's arguments."""
    parser = harness.new_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--live", type=float, default=1.0, help="share of rows with a gradient")
    parser.add_argument("--entropy", action="store_true", help="with its gradient, where offered")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--path", type=Path, nargs="+", default=[], help="packages not installed")
    parser.add_argument("--verl", type=Path, help="a checkout of verl, of which two files are run")
    parser.add_argument("--out", type=Path, help="file for the result, instead of bench/results")
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = new_parser()
    # A tiny shape on the CPU.
    arguments = harness.parse(parser, tokens=40, width=64, vocab=500, repeats=2)
    if not arguments.quick and not torch.cuda.is_available():
        parser.error("there is no GPU; --quick tries this program on the CPU")
    sys.path[:0] = map(str, arguments.path)
    return arguments


class Problem:
    """The tensors, and what float64 says about them."""

    def __init__(self, tokens: int, width: int, vocab: int, live: float, device: str) -> None:
        self.is_cuda = device == "cuda"
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        hidden = 2.5 * torch.randn(tokens, width, device=device)
        weight = torch.randn(vocab, width, device=device) / math.sqrt(width)
        self.ids = torch.randint(vocab, (tokens,), device=device)
        # Push the sampled token's logit to where its probability is .3 to .97, as in RL.
        boost = math.log(vocab) + 2.5**2 / 2 + 1.5 * torch.randn(tokens, 1, device=device)
        chosen = weight[self.ids]
        hidden += chosen * boost / INV_TEMPERATURE / chosen.square().sum(1, keepdim=True)
        self.hidden, self.weight = hidden.to(self.dtype), weight.to(self.dtype)
        self.coefficients = torch.randn(tokens, device=device)
        self.coefficients[torch.rand(tokens, device=device) >= live] = 0.0
        self.products_tflop = 2 * tokens * width * vocab / 1e12
        self.columns = torch.cat([self.ids[:32], torch.randint(vocab, (32,), device=device)])
        self._answer()
        side = 8192 if self.is_cuda else 256
        self.square = torch.randn(2, side, side, device=device).to(self.dtype)

    def _answer(self) -> None:
        """Log-probabilities, and the gradient of the weight's rows `columns`, in float64."""
        parts, probabilities = [], []
        head = self.weight.double()
        for states, ids in zip(self.hidden.double().split(256), self.ids.split(256), strict=True):
            logprobs = torch.log_softmax(INV_TEMPERATURE * (states @ head.T), dim=1)
            parts.append(logprobs.gather(1, ids[:, None]).squeeze(1))
            probabilities.append(logprobs[:, self.columns].exp())
        self.logprobs = torch.cat(parts)
        is_target = self.ids[:, None] == self.columns[None, :]
        grad_logits = is_target.double() - torch.cat(probabilities)
        grad_logits *= INV_TEMPERATURE * self.coefficients[:, None].double()
        self.grad_columns = grad_logits.T @ self.hidden.double()

    def product_tflops(self) -> float:
        """Return the rate of one square product, TFLOP/s; its median is the ceiling."""
        side = self.square.shape[1]
        started = self._now()
        self.square[0] @ self.square[1]
        return 2 * side**3 / 1e9 / self._elapsed_ms(started, self._now())

    def _now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed_ms(self, start: Any, end: Any) -> float:
        if not self.is_cuda:
            return float(1e3 * (end - start))
        end.synchronize()
        return float(start.elapsed_time(end))

    def measure(self, provider: Provider, with_entropy: bool) -> dict[str, Any]:
        """Run forward and backward once; memory is what stands above the inputs."""
        hidden, weight = (part.detach().requires_grad_() for part in (self.hidden, self.weight))
        base = 0
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        started = self._now()
        logprobs, entropies = provider(hidden, weight, self.ids, with_entropy)
        scored = self._now()
        loss = (logprobs.float() * self.coefficients).sum()
        if entropies is not None and entropies.requires_grad:
            loss = loss - 0.001 * (entropies.float() * (self.coefficients != 0)).sum()
        loss.backward()
        finished = self._now()
        figures = {
            "forward_ms": self._elapsed_ms(started, scored),
            "backward_ms": self._elapsed_ms(scored, finished),
            "peak_mib": (torch.cuda.max_memory_allocated() - base) / 2**20 if self.is_cuda else 0.0,
        }
        return {"figures": figures, "logprobs": logprobs.detach(), "grad": weight.grad}

    def errors(self, last: dict[str, Any], *, with_entropy: bool) -> dict[str, Any]:
        """Return the distance from float64; the gradient's only where it is the loss's alone."""
        error = (last["grad"][self.columns].double() - self.grad_columns).norm()
        return {
            "max_logprob_error": (last["logprobs"].double() - self.logprobs).abs().max().item(),
            "grad_weight_error": None
            if with_entropy
            else (error / self.grad_columns.norm()).item(),
        }


# ---- who computes


def naive(hidden: Tensor, weight: Tensor, ids: Tensor, with_entropy: bool) -> Scores:
    logprobs = torch.log_softmax((hidden @ weight.T).float() * INV_TEMPERATURE, dim=-1)
    picked = logprobs.gather(1, ids[:, None]).squeeze(1)
    return picked, -(logprobs.exp() * logprobs).sum(-1) if with_entropy else None


def echo(backend: Any, *, counts_live_rows: bool = False) -> Provider:
    """Return our own; on a GPU it waits for the rows with a gradient only if asked."""
    waits = (lambda _: False) if counts_live_rows else host_waits

    def score(hidden: Tensor, weight: Tensor, ids: Tensor, with_entropy: bool) -> Scores:
        logprob.host_waits = waits  # type: ignore[attr-defined] # for the backward pass as well
        return linear_logprob(
            hidden, weight, ids, INV_TEMPERATURE,
            entropy="grad" if with_entropy else "none", backend=backend,
        )  # fmt: skip

    return score


def compiled() -> Provider:
    if not torch.cuda.is_available():
        raise RuntimeError("compiled on a GPU only")
    return torch.compile(naive)


def cut_cross_entropy(implementation: str) -> Provider:
    from cut_cross_entropy import linear_cross_entropy

    def score(hidden: Tensor, weight: Tensor, ids: Tensor, _with_entropy: bool) -> Scores:
        scaled = hidden * INV_TEMPERATURE  # it knows no temperature; this rounds once more
        losses = linear_cross_entropy(scaled, weight, ids, reduction="none", impl=implementation)
        return -losses, None

    return score


def liger_chunked() -> Provider:
    from liger_kernel.chunked_loss import fused_linear_ppo

    function = fused_linear_ppo._ChunkedSelectiveLogProbFunction  # noqa: SLF001  no public one
    temperature = 1 / INV_TEMPERATURE
    return lambda hidden, weight, ids, _with_entropy: (
        function.apply(hidden, weight, ids, None, temperature, 4096),
        None,
    )


def liger_hopper() -> Provider:
    from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90

    function = fused_scaled_cross_entropy_sm90.LigerFusedScaledCrossEntropySM90Function

    def score(hidden: Tensor, weight: Tensor, ids: Tensor, with_entropy: bool) -> Scores:
        out = function.apply(hidden, weight, ids, 1 / INV_TEMPERATURE, -100, 1, with_entropy)
        return (-out[0], out[1]) if with_entropy else (-out, None)

    return score


def verl(checkout: Path | None) -> Provider:
    """Load verl's two kernel files alone: its package would import ray and more."""
    name = "verl.utils.kernel"
    if checkout is not None:
        device = types.ModuleType("verl.utils.device")
        device.__dict__.update(
            get_device_capability=torch.cuda.get_device_capability,
            get_device_name=lambda: "cuda",
            get_torch_device=lambda: torch.cuda,
            is_cuda_available=torch.cuda.is_available(),
        )
        for parent in ("verl", "verl.utils", name):
            sys.modules.setdefault(parent, types.ModuleType(parent))
        sys.modules["verl.utils.device"] = device
        for part in ("kernels", "linear_cross_entropy"):
            path = checkout / "verl" / "utils" / "kernel" / f"{part}.py"
            specification = importlib.util.spec_from_file_location(f"{name}.{part}", path)
            assert specification is not None
            assert specification.loader is not None
            module = importlib.util.module_from_spec(specification)
            sys.modules[f"{name}.{part}"] = module
            setattr(sys.modules[name], part, module)
            specification.loader.exec_module(module)
    function = importlib.import_module(f"{name}.linear_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, ids, _with_entropy: function(
        hidden, weight, ids, 1 / INV_TEMPERATURE, "none"
    )


def providers(arguments: argparse.Namespace) -> tuple[dict[str, Provider], dict[str, str]]:
    """Return who can be loaded, by name, and why the others cannot; ours first, then naive."""
    makers: dict[str, Callable[[], Provider]] = {
        "echo": lambda: echo("auto"),
        "echo, live rows": lambda: echo("auto", counts_live_rows=True),
        "naive": lambda: naive,
        "torch.compile": compiled,
        "echo torch": lambda: echo("torch"),
        "liger chunked": liger_chunked,
        "liger sm90": liger_hopper,
        "cce": lambda: cut_cross_entropy("cce"),
        "cce exact": lambda: cut_cross_entropy("cce_exact"),
        "verl": lambda: verl(arguments.verl),
    }
    found, absent = {}, {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except Exception as error:  # noqa: BLE001  foreign code fails in foreign ways
            absent[name] = f"{type(error).__name__}: {error}"[:200]
    return found, absent


def report(
    arguments: argparse.Namespace,
    problem: Problem,
    ceiling_tflops: float,
    results: dict[str, dict[str, Any]],
    absent: dict[str, str],
) -> None:
    """Print the table and write the file."""
    device = torch.cuda.get_device_name() if problem.is_cuda else "cpu"
    shape = f"tokens {arguments.tokens} width {arguments.width} vocabulary {arguments.vocab}"
    print(f"{device}: {shape}, live {arguments.live}, ceiling {ceiling_tflops:.4g} TFLOP/s")
    for name, row in results.items():
        total = row["forward_ms"] + row["backward_ms"]
        row["total_ms"] = total
        row["speed_vs_naive"] = None
        if "naive" in results:
            base = results["naive"]
            row["speed_vs_naive"] = (base["forward_ms"] + base["backward_ms"]) / total
        # Products that the equation asks for: one forward, three backward, one of them again.
        for part, count in (("forward", 1), ("backward", 3)):
            rate = 1e3 * count * problem.products_tflop / row[f"{part}_ms"]
            row[f"{part}_of_ceiling"] = rate / ceiling_tflops
        error = row["grad_weight_error"]
        print(
            f"{name:14} forward {row['forward_ms']:8.2f} ms ({row['forward_of_ceiling']:4.0%})  "
            f"backward {row['backward_ms']:8.2f} ms ({row['backward_of_ceiling']:4.0%})  "
            f"peak {row['peak_mib']:7.0f} MiB  max|dlogp| {row['max_logprob_error']:.1e}  "
            f"dW {'-' if error is None else format(error, '.1e')}  "
            f"{'same bits' if row['same_bits'] else 'other bits each time'}"
        )
    for name, reason in absent.items():
        print(f"{name:14} ABSENT {reason}")
    settings = {name: str(value) for name, value in vars(arguments).items() if name != "out"}
    result = {
        "device": device,
        "driver_cuda": torch.version.cuda,
        "arguments": settings,
        "ceiling_tflops": ceiling_tflops,
        "results": results,
        "absent": absent,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    else:
        print(harness.save(result_name(arguments, device), result))


def result_name(arguments: argparse.Namespace, device: str) -> str:
    """Return the name of the result, in which are the options that have results of their own."""
    name = f"kernel_{device}_{arguments.tokens}x{arguments.width}".lower().replace(" ", "-")
    live = "" if arguments.live == 1 else f"_live{arguments.live:g}"
    return name + live + ("_entropy" if arguments.entropy else "")


if __name__ == "__main__":
    main()
