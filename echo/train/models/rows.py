"""Planning of micro-batches: divides the rows of a batch into packed or padded micro-batches.

Packed rows have no padding, and rollouts of one prompt can share the prompt. But without a varlen
kernel (attention.py), attention is called once for each run of equal segments. A small model with
many lengths spends more time in these calls than on padding. On some GPUs, attention is also faster
for padded rows than for packed rows. So both layouts are planned, and the cheaper layout is used.
The cost counts the model's operations on rollouts and padding, and the calls of attention. All
ranks make the same plan from the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from echo.algo.balance import balanced_rounds
from echo.algo.batching import TrainingRow, pack_micro_batches, share_prompts
from echo.algo.row_sizes import RowSizes
from echo.train.models.attention import Kernel
from echo.train.models.flops import ModelFlops
from echo.train.ranks.sharding import Ranks

CALL_FLOPS = {"cpu": 6e6, "cuda": 5e9}
"""Fixed cost of one call of attention, forward and backward, in operations. Each call takes a fixed
time for the host's code and, on a GPU, for some forty launches. The cost is the number of
operations that the device could make in that time.
"""


Spans = list[tuple[int, int]]
"""For each segment of a row: (number of tokens, number of earlier tokens that the segment attends
to).
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPlan:
    """The division of a batch's rows into micro-batches."""

    bins: list[list[int]]
    """For each of this rank's micro-batches, the indices of its rows."""
    units: Sequence[int]
    """For each row, the number of its unit: rows of one unit may share their prompt in a packed
    row.
    """
    is_packed: bool
    shares_tokens: bool
    """Whether rollouts of one prompt, and chains of one rollout, share tokens in a packed row."""
    cost: float
    """Cost of the plan in operations, summed over the ranks. CALL_FLOPS is added for each call of
    attention.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """Properties of a model and its device that determine the layout of rows."""

    flops: ModelFlops
    kernel: Kernel
    sizes: RowSizes
    device_type: str
    ranks: Ranks
    can_pack: bool
    """Whether the model keeps rollouts of a packed row apart."""
    can_pad: bool
    """Whether padded rows are allowed for a model that can take packed rows."""
    can_share_prompts: bool

    def plan(
        self, rows: Sequence[TrainingRow], *, max_tokens: int, group_index: Sequence[int] | None
    ) -> RowPlan:
        """Return the cheapest plan for these rows, packed or padded.

        Args:
            rows: any number of rows, in any order.
            max_tokens: limit of a micro-batch's tokens.
            group_index: group of each row, to keep groups whole; None for no groups.
        """
        plans = []
        if self.can_pack:
            plans.append(self._packed(rows, max_tokens, group_index))
        if self.can_pad or not self.can_pack:
            plans.append(self._padded(rows, max_tokens, group_index))
        return min(plans, key=lambda plan: plan.cost)  # the packed one, if costs are equal

    def _packed(
        self, rows: Sequence[TrainingRow], max_tokens: int, group_index: Sequence[int] | None
    ) -> RowPlan:
        of_row = [row.spans if self.can_share_prompts else _alone(row) for row in rows]
        lengths = [sum(length for length, _ in spans) for spans in of_row]
        work = [
            self._flops(spans) + self.flops.row(0, row.rollout.num_tokens)
            for spans, row in zip(of_row, rows, strict=True)
        ]
        units: Sequence[int] = range(len(rows))
        cost = sum(map(self._attended, of_row)) + sum(map(self._flops, of_row))
        if self.can_share_prompts:
            shared, units = share_prompts(rows, max_tokens=max_tokens, whole=group_index)
            # A shared prompt is computed for the first row of its unit only.
            saved = [
                self.flops.row(all_ - own, 0) for all_, own in zip(lengths, shared, strict=True)
            ]
            work = [each - less for each, less in zip(work, saved, strict=True)]
            cost -= sum(saved)
            lengths = shared
        rounds = balanced_rounds(
            lengths,
            work,
            max_tokens=max_tokens,
            num_ranks=self.ranks.size,
            group_index=units if group_index is None else group_index,
        )
        long_from = self.kernel.long_from
        in_lines = [[_in_a_line(each, rows, units, long_from) for each in bins] for bins in rounds]
        if not self.kernel.is_varlen:
            calls = sum(_num_runs(each, rows, units) for bins in in_lines for each in bins)
            calls += sum(len(spans) - 1 for spans in of_row)
            cost += self._calls(calls)
        bins = [each[self.ranks.rank] for each in in_lines]
        return RowPlan(
            bins=bins,
            units=units,
            is_packed=True,
            shares_tokens=self.can_share_prompts,
            cost=cost,
        )

    def _padded(
        self, rows: Sequence[TrainingRow], max_tokens: int, group_index: Sequence[int] | None
    ) -> RowPlan:
        sizes = self.sizes
        chains = [row.chain_inputs for row in rows]
        counts = list(map(len, chains))
        widths = [sizes.width(max(each), max_tokens=max_tokens) for each in chains]
        bins = pack_micro_batches(
            widths,
            max_tokens=max_tokens,
            counts=counts,
            group_index=group_index,
            by_powers=sizes.fills == "rows",
        )
        cost = 0.0
        for each in bins:
            width = max(widths[index] for index in each)
            number = sum(counts[index] for index in each)
            cost += sizes.number(number, width, max_tokens=max_tokens) * self.flops.row(width, 0)
        cost += self._calls(0 if self.kernel.is_varlen else len(bins))
        bins += [[] for _ in range(-len(bins) % self.ranks.size)]
        own = bins[self.ranks.rank :: self.ranks.size]
        units = range(len(rows))
        return RowPlan(bins=own, units=units, is_packed=False, shares_tokens=False, cost=cost)

    def _flops(self, spans: Spans) -> int:
        row = self.flops.row
        return sum(row(before + length, 0) - row(before, 0) for length, before in spans)

    def _attended(self, spans: Spans) -> float:
        """Return by how many operations attention costs more in a packed row than in padded rows.

        Only the attention of segments without dense products costs more.
        """
        attention, long_from = self.flops.attention_of, self.kernel.long_from
        slow = sum(
            attention(before + length) - attention(before)
            for length, before in spans
            if before or long_from is None or length < long_from
        )
        return (self.kernel.slowdown - 1.0) * slow

    def _calls(self, number: int) -> float:
        return number * CALL_FLOPS[self.device_type] * len(self.flops.attention)


def _in_a_line(
    indices: Iterable[int],
    rows: Sequence[TrainingRow],
    units: Sequence[int],
    long_from: int | None,
) -> list[int]:
    """Return the order in which to put a micro-batch's rows. Rows of one prompt are neighbours.

    Rows of at least `long_from` tokens come first. Within a unit, and among rows without a shared
    prompt, the longest row comes first, because neighbours of equal length save calls of attention.
    """
    sizes = Counter(units[index] for index in indices)

    def place(index: int) -> tuple[bool, int, int]:
        unit, length = units[index], rows[index].num_inputs
        is_alone = sizes[unit] == 1
        is_long = long_from is not None and is_alone and length >= long_from
        return not is_long, (len(rows) if is_alone else unit), -length

    return sorted(indices, key=place)


def _alone(row: TrainingRow) -> Spans:
    """Return the spans of a row whose chains are separate segments."""
    return [(length, 0) for length in row.chain_inputs]


def _num_runs(indices: Sequence[int], rows: Sequence[TrainingRow], units: Sequence[int]) -> int:
    """Return how many runs of equal segments these rows have if they are packed into one row."""
    sizes = Counter(units[index] for index in indices)
    shared = [unit for unit, size in sizes.items() if size > 1]
    lengths = ((units[i] if sizes[units[i]] > 1 else -1, rows[i].num_inputs) for i in indices)
    return len(shared) + len(list(groupby(lengths)))
