"""Speed of a step: tokens, operations, seconds of the step's parts, and peak memory.

Seconds are measured on the host. A host runs ahead of its GPU. So a part of a step must not end
before the host has read the part's last result. Reading this result makes the host wait once more
in each update. With several ranks, operations and tokens are summed over the ranks, memory is the
maximum over the ranks, and seconds are this rank's.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import torch

from echo.train.models.flops import ModelFlops, peak_flops
from echo.train.models.policy import Compute

T = TypeVar("T")

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Unit of `ru_maxrss`, in bytes."""


@dataclass(slots=True)
class _Totals:
    began_at: float
    part_s: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    num_scored: int = 0
    flops: int = 0
    palm_flops: int = 0
    micro_batch_flops: list[int] = field(default_factory=list)


class Speedometer:
    """Measures how fast each step is: tokens, operations, seconds and memory."""

    def __init__(self, model: ModelFlops, compute: Compute) -> None:
        self._ranks = compute.ranks
        self._model = model
        self._device = compute.device
        self.micro_batch_tokens = compute.micro_batch_tokens
        """Limit of a micro-batch in tokens. Metrics of filling divide by this limit."""
        self._peak_flops = peak_flops(compute.device)
        self._totals = _Totals(time.perf_counter())

    def begin(self) -> None:
        """Begin a step: set all counts to 0."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._totals = _Totals(time.perf_counter())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds within the `with` block to a part of the step.

        Args:
            name: forward_backward, optimizer, or pack (within forward_backward).
        """
        began_at = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - began_at
            self._totals.part_s[name] = self._totals.part_s.get(name, 0.0) + spent_s

    def packing(self, packed: Iterator[T]) -> Iterator[T]:
        """Yield the items of an iterator, and count the waits for items as packing time."""
        while True:
            with self.part("pack"):
                found = next(packed, None)
            if found is None:
                return
            yield found

    def passed(self, spans: Sequence[tuple[int, int]], num_scored: int, *, is_packed: bool) -> None:
        """Count a micro-batch that has made its forward and its backward pass.

        Args:
            spans: for each segment: its number of tokens, and the number of tokens of its shared
                prompt.
            num_scored: number of tokens that went through the loss.
            is_packed: whether all segments were in one row.
        """
        totals, row = self._totals, self._model.row
        lengths = [length for length, _ in spans]
        num_tokens = sum(lengths)
        flops = row(0, num_scored)
        flops += sum(row(before + length, 0) - row(before, 0) for length, before in spans)
        totals.num_tokens += num_tokens
        totals.num_scored += num_scored
        totals.flops += flops
        totals.palm_flops += self._model.palm([num_tokens] if is_packed else lengths)
        totals.micro_batch_flops.append(flops)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step that ends now.

        The result is empty without a counted micro-batch.

        All ranks call this method together.
        """
        peak_bytes, totals = self._add_up()
        works = totals.micro_batch_flops
        if not works:
            return {}
        step_s = max(time.perf_counter() - totals.began_at, 1e-9)
        pack_s = totals.part_s.get("pack", 0.0)
        metrics = {
            "perf/tokens_per_s": totals.num_tokens / step_s,
            "perf/scored_tokens_per_s": totals.num_scored / step_s,
            "perf/row_fill": totals.num_tokens / (len(works) * self.micro_batch_tokens),
            "perf/balance": sum(works) / len(works) / max(1, *works),
            "perf/peak_memory_gb": peak_bytes / 1e9,
            "time/pack": pack_s,
            "time/forward_backward": totals.part_s.get("forward_backward", 0.0) - pack_s,
            "time/optimizer": totals.part_s.get("optimizer", 0.0),
        }
        if self._peak_flops is not None and self._model.is_exact:
            available = step_s * self._peak_flops * self._ranks.size
            metrics["perf/mfu"] = totals.flops / available
            metrics["perf/mfu_palm"] = totals.palm_flops / available
        return metrics

    def _add_up(self) -> tuple[int, _Totals]:
        """Return the largest peak memory of any rank in bytes, and the counts summed over ranks."""
        own = json.dumps({"peak_bytes": self._peak_bytes(), **asdict(self._totals)}).encode()
        gathered = [json.loads(each) for each in self._ranks.gather(own)]
        added = {
            name: sum(each[name] for each in gathered)
            for name in ("num_tokens", "num_scored", "flops", "palm_flops")
        }
        works = [work for each in gathered for work in each["micro_batch_flops"]]
        totals = _Totals(self._totals.began_at, self._totals.part_s, **added)
        totals.micro_batch_flops = works
        return max(each["peak_bytes"] for each in gathered), totals

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
