"""Parts of a step's time that add up to the step, from what torch's profiler has recorded."""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from echo.algo.losses import GrpoLoss
from echo.engine.weights import VersionImages
from echo.kernels import logprob
from echo.train.trainer import Trainer
from echo.weights.delta import block_bytes_of
from learner.groups import make_groups
from learner.models import make_trainer, vocab_size_of
from learner.publication import CHUNK_BYTES, Publications

WAITING = "waiting"
"""The rest: the device waits for the host; on a CPU, Python between the operations."""
MARKED = ("head and loss", "optimizer", "publication")
"""Parts that are recorded under these names; what runs within them belongs to them."""
KERNELS = {
    "elementwise": r"^triton_(poi|red|per)_fused",  # what torch has compiled
    "attention": r"flash|fmha|attention|sdpa",
    "head and loss": r"scores_kernel|combine_kernel|logits_kernel",
    "products": r"gemm|nvjet|cutlass|cublas|wgmma|xmma|splitk",
    "optimizer": r"adam|lpnorm",
}
"""Parts by what is in the names of a GPU's kernels, the first that fits."""
OPERATIONS = {
    "attention": r"scaled_dot_product|ScaledDotProduct|flash_attention",
    "products": r"aten::(mm|addmm|bmm|baddbmm|matmul|linear|_grouped_mm)$|mkldnn_linear",
    "elementwise": r"^aten::|CompiledFunction|Torch-Compiled",
}
"""Parts by the names of a CPU's operations."""
PARTS = ("head and loss", "optimizer", "attention", "products", "elementwise", "publication")
"""If two run at the same time, the time counts for the first of them: a publication costs a step
only the time in which nothing else runs.
"""
CALLS = {
    "launches": r"LaunchKernel|GraphLaunch",
    "copies": r"Memcpy(Async)?$",
    "synchronisations": r"Synchronize$",
}
"""What the host asks of a GPU, by the names of the calls."""


@dataclass(frozen=True, slots=True)
class Span:
    """One recorded event, in microseconds."""

    name: str
    start: float
    end: float
    lane: int
    """A thread of the host, or a stream of a GPU; events of a lane nest or follow each other."""


def spans_of(events: Iterable[Any], *, on_gpu: bool) -> list[Span]:
    """Return what ran on a GPU, or the operations of this thread."""
    kind = "CUDA" if on_gpu else "CPU"
    found = [
        Span(
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.device_resource_id if on_gpu else event.thread,
        )
        for event in events
        if event.device_type.name == kind
    ]
    if on_gpu:
        return found
    marked = {span.lane for span in found if span.name in MARKED}
    return [span for span in found if span.lane in marked]


def seconds_of(
    spans: Sequence[Span], names: Mapping[str, str], *, on_gpu: bool
) -> dict[str, float]:
    """Return the seconds of each part; no instant counts twice."""
    points: list[tuple[float, int, str]] = []
    for span, part in _in_parts(spans, names, on_gpu=on_gpu):
        points += [(span.start, 1, part), (span.end, -1, part)]
    seconds = dict.fromkeys(PARTS, 0.0)
    active: Counter[str] = Counter()
    before = 0.0
    for at, change, part in sorted(points):
        running = next((each for each in PARTS if active[each]), None)
        if running is not None:
            seconds[running] += (at - before) / 1e6
        active[part] += change
        before = at
    return seconds


def _in_parts(
    spans: Sequence[Span], names: Mapping[str, str], *, on_gpu: bool
) -> Iterator[tuple[Span, str]]:
    """Yield each span that belongs to a part, with the part.

    A GPU's marks last from their first kernel to their last, also where nothing runs in between.
    Versions come down on streams of their own, from threads that the profiler does not record.
    """
    busy: Counter[int] = Counter()
    for span in spans:
        busy[span.lane] += round(span.end - span.start)
    steps_lane = max(busy, key=lambda lane: busy[lane], default=0)
    ends: dict[int, tuple[float, str]] = {}
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        end, part = ends.get(span.lane, (0.0, ""))
        if span.name in MARKED:
            if span.start >= end:
                ends[span.lane] = span.end, span.name
            if not on_gpu:
                yield span, span.name
            continue
        if span.start >= end:
            is_beside = on_gpu and span.lane != steps_lane
            part = "publication" if is_beside else _part_by_name(span.name, names)
            part = part or ("elementwise" if on_gpu else "")
        if part:
            yield span, part


def _part_by_name(name: str, names: Mapping[str, str]) -> str:
    return next((part for part, each in names.items() if re.search(each, name, re.IGNORECASE)), "")


@contextmanager
def _marked(places: Iterable[tuple[Any, str, str]]) -> Iterator[None]:
    """Record calls of functions under the name of a part: (owner, name of the function, part)."""
    before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in places]

    def under(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            with record_function(part):
                return function(*arguments, **options)

        return call

    for owner, name, part in places:
        found = under(part, getattr(owner, name))
        is_static = isinstance(owner.__dict__.get(name), staticmethod)
        setattr(owner, name, staticmethod(found) if is_static else found)
    try:
        yield
    finally:
        for owner, name, own in before:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def profile_step(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return milliseconds and share of each part of a step with a publication after it."""
    on_gpu = "cuda" in arguments.device
    vocab_size = vocab_size_of(arguments.model)
    batches = [make_groups(arguments, vocab_size, seed) for seed in range(2)]
    trainer = make_trainer(arguments, "packed", None, share_prompts=True)
    print(trainer.describe_rows(), flush=True)
    images = VersionImages(
        "bfloat16",
        block_bytes=block_bytes_of(CHUNK_BYTES),
        is_on_device=False if arguments.last_version == "host" else None,
        copy_stream=trainer.weights.copy_stream,
    )
    publications = Publications(trainer, images)
    head = logprob._LinearLogprob  # noqa: SLF001 -- a product has no place for marks
    places = (
        (head, "forward", "head and loss"),
        (head, "backward", "head and loss"),
        (GrpoLoss, "__call__", "head and loss"),
        (trainer, "optim_step", "optimizer"),
        (publications, "publish", "publication"),
    )

    def steps(number: int) -> float:
        began_at = time.perf_counter()
        for each in range(number):
            trainer.step(batches[each % len(batches)])
            publications.publish()
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - began_at) / number

    steps(2)
    alone_s = steps(arguments.steps)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with _marked(places), profile(activities=activities) as profiled:
        step_s = steps(arguments.steps)
    publications.wait()
    names = KERNELS if on_gpu else OPERATIONS
    events = profiled.events()
    seconds = seconds_of(spans_of(events, on_gpu=on_gpu), names, on_gpu=on_gpu)
    parts = {part: seconds[part] / arguments.steps for part in PARTS}
    parts[WAITING] = max(0.0, step_s - sum(parts.values()))
    rows = [
        {"part": part, "ms_per_step": 1e3 * each, "share": each / step_s}
        for part, each in parts.items()
    ]
    asked = Counter(
        what
        for event in events
        if event.device_type.name == "CPU"
        for what, pattern in CALLS.items()
        if re.search(pattern, event.name)
    )
    calls = {f"{what}_per_step": asked[what] / arguments.steps for what in CALLS}
    sums = {"ms_per_step": 1e3 * step_s, "ms_without_profiler": 1e3 * alone_s}
    return [
        *rows,
        {"part": "step", **sums, "micro_batches": _micro_batches(trainer, batches[0])} | calls,
    ]


def _micro_batches(trainer: Trainer, groups: Any) -> int:
    samples = trainer.prepare(groups).samples
    return len(list(trainer.policy.micro_batches(samples)))
