"""Time attention of packed and of padded rows, forward and backward, by each implementation.

    python bench/bench_attention.py [--heads 16 --kv-heads 8 --dim 128]
    python bench/bench_attention.py --quick                       on a CPU, writes nothing

Rows are causal segments of one length. The kernels of packed rows (echo/train/models/attention.py)
are timed as the learner calls them: those that it may choose here, with the reason why a trial
fails. The others are torch's dense attention of padded rows, restricted to one backend. Then how
long the first call takes for each of ten new lengths, as they are and rounded up to a multiple of
512: cuDNN makes a plan for each length, and keeps it. An implementation that cannot compute it is
listed with its reason.
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
from torch.nn.functional import scaled_dot_product_attention

from echo.algo.batching import Segments
from echo.train.models import attention, packing
from echo.train.models.attention import Kernel, LayerShape

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
    kernels = {kernel.name: kernel for kernel in attention.candidates(*place())}
    ways |= {name: packed(kernel, arguments) for name, kernel in kernels.items()}
    rows = []
    for number, length in shapes:
        for name, attend in ways.items():
            row: dict[str, Any] = {"way": name, "segments": number, "tokens": length}
            try:
                if name in kernels:
                    attention.activate(kernels[name])
                row |= measure(attend, number, length, arguments)
            except RuntimeError as error:  # whatever it cannot compute is its result
                row["reason"] = str(error).splitlines()[0][:200]
            finally:
                if name in kernels:
                    attention.deactivate(kernels[name])
            print(row, flush=True)
            rows.append(row)
    firsts = [first_calls(name, ways[name], arguments) for name in dense_backends()]
    result = {"options": vars(arguments), "rows": rows, "new_lengths": firsts}
    print(f"wrote {harness.save('attention', result)}")


def dense_backends() -> dict[str, SDPBackend]:
    return QUICK_DENSE if harness.is_quick() else DENSE


def dense(backend: SDPBackend) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
            )

    return attend


def packed(kernel: Kernel, arguments: Any) -> Attend:
    """Attend as packed rows do: the segments lie behind each other in one row."""
    shape = LayerShape(
        num_heads=arguments.heads,
        num_key_heads=arguments.kv_heads,
        width=arguments.dim,
        value_width=arguments.dim,
    )
    is_tried = kernel is not attention.PRODUCTS
    fault = attention.find_kernel_fault(kernel, *place(), {shape}) if is_tried else None
    attention.deactivate(kernel)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if fault is not None:
            raise RuntimeError(fault)
        number, _, length, _ = query.shape
        given = packing.arguments(Segments.of([length] * number).to(query.device), kernel)
        states = (each.transpose(0, 1).flatten(1, 2)[None] for each in (query, key, value))
        call: Any = packing.packed_attention
        attended: Tensor = call(torch.nn.Identity(), *states, None, **given)[0]
        return attended.view(number, length, *attended.shape[2:]).transpose(1, 2)

    return attend


def place() -> tuple[torch.device, torch.dtype]:
    if harness.is_quick():
        return torch.device("cpu"), torch.float32
    return torch.device("cuda"), torch.bfloat16


def made(number: int, length: int, arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    device, dtype = place()
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
