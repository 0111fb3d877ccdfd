"""Time attention of packed and of padded rows, forward and backward, by each implementation.

    python bench/bench_attention.py [--heads 16 --kv-heads 8 --dim 128]
    python bench/bench_attention.py --quick                       on a CPU, writes nothing

Rows are causal segments of one length. `varlen` is what packed rows use, one call for all
segments; the others are torch's dense attention, restricted to one backend. Then how long the first
call takes for each of ten new lengths, as they are and rounded up to a multiple of 512: cuDNN makes
a plan for each length, and keeps it. An implementation that cannot compute it is listed with its
reason.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import varlen as torch_varlen
from torch.nn.functional import scaled_dot_product_attention

SHAPES = ((1, 16384), (4, 4096), (16, 1024))
QUICK_SHAPES = ((1, 64), (2, 32))
ROUNDED_TO = 512
NEW_LENGTHS = 10
DENSE = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
QUICK_DENSE = {"math": SDPBackend.MATH}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [n, H, T, D], keys and values [n, K, T, D] -> [n, H, T, D]."""


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = harness.parse(parser, heads=4, kv_heads=2, dim=16, repeats=2)
    if not arguments.quick and not torch.cuda.is_available():
        parser.error("there is no GPU; --quick tries this program on the CPU")
    shapes = QUICK_SHAPES if arguments.quick else SHAPES
    ways: dict[str, Attend] = {name: dense(backend) for name, backend in dense_backends().items()}
    if not harness.is_quick():
        ways["varlen"] = varlen
    rows = []
    for number, length in shapes:
        for name, attend in ways.items():
            row: dict[str, Any] = {"way": name, "segments": number, "tokens": length}
            try:
                row |= measure(attend, number, length, arguments)
            except RuntimeError as error:  # whatever it cannot compute is its result
                row["reason"] = str(error).splitlines()[0][:200]
            print(row, flush=True)
            rows.append(row)
    firsts = [first_calls(name, ways[name], arguments) for name in dense_backends()]
    result = {"options": vars(arguments), "rows": rows, "new_lengths": firsts}
    print(f"wrote {harness.save(f'attention_{harness.hardware_name()}', result)}")


def dense_backends() -> dict[str, SDPBackend]:
    return QUICK_DENSE if harness.is_quick() else DENSE


def dense(backend: SDPBackend) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
            )

    return attend


def varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend as packed rows do: the segments lie behind each other in one row."""
    number, _, length, _ = query.shape
    queries, keys, values = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    ends = torch.arange(0, (number + 1) * length, length, device=query.device, dtype=torch.int32)
    attended = torch_varlen.varlen_attn(
        queries, keys, values, ends, ends, length, length,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(attended, Tensor)
    return attended.view(number, length, *attended.shape[1:]).transpose(1, 2)


def made(number: int, length: int, arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    device, dtype = ("cpu", torch.float32) if harness.is_quick() else ("cuda", torch.bfloat16)
    heads = (arguments.heads, arguments.kv_heads, arguments.kv_heads)
    query, key, value = (
        torch.randn(number, h, length, arguments.dim, device=device, dtype=dtype).requires_grad_()
        for h in heads
    )
    return query, key, value


def timed_ms(attend: Attend, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return what forward and backward take."""
    synchronize()
    started = time.perf_counter()
    attended = attend(*inputs)
    attended.backward(torch.ones_like(attended))
    synchronize()
    return (time.perf_counter() - started) * 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(attend: Attend, number: int, length: int, arguments: Any) -> dict[str, float]:
    inputs = made(number, length, arguments)
    timed_ms(attend, inputs)
    median_ms = statistics.median(timed_ms(attend, inputs) for _ in range(arguments.repeats))
    # Two products forward and five backward, of which a causal mask leaves half.
    flop = 7 * number * arguments.heads * length**2 * arguments.dim
    return {"ms": round(median_ms, 3), "tflops": round(flop / median_ms / 1e9, 2)}


def first_calls(name: str, attend: Attend, arguments: Any) -> dict[str, Any]:
    """Return what the first call and the second one take for lengths that nobody had before."""
    longest = QUICK_SHAPES[0][1] if harness.is_quick() else 8192
    lengths = [longest - 7 * number for number in range(NEW_LENGTHS)]
    found: dict[str, Any] = {"way": name}
    for kind, rounded_to in (("as they are", 1), ("rounded", ROUNDED_TO)):
        times = []
        for length in lengths:
            inputs = made(1, -(-length // rounded_to) * rounded_to, arguments)
            try:
                times.append([timed_ms(attend, inputs) for _ in range(2)])
            except RuntimeError as error:
                return found | {"reason": str(error).splitlines()[0][:200]}
        first, second = (statistics.median(each) for each in zip(*times, strict=True))
        found[kind] = {"first_ms": round(first, 3), "second_ms": round(second, 3)}
    return found


if __name__ == "__main__":
    main()
