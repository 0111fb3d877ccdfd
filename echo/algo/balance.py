"""Balanced micro-batches: bins of equal work, divided among ranks in rounds.

Ranks that train one model together wait for each other at every layer. A round is one micro-batch
on each rank, and lasts as long as its heaviest micro-batch. So all micro-batches (bins) get nearly
the same work, and the heaviest bins are in the same round.

Source: the greedy rule of scheduling, longest processing time first (R. L. Graham, 1969).
Differs from the source: a bin holds a bounded number of tokens, and the function finds the number
of bins itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

Bin = list[int]
"""Indices of the rows of one micro-batch, the longest first."""


def balanced_rounds(
    lengths: Sequence[int],
    work: Sequence[float],
    *,
    max_tokens: int,
    num_ranks: int = 1,
    group_index: Sequence[int] | None = None,
) -> list[list[Bin]]:
    """Divide rows into rounds. Each round has one micro-batch for each rank.

    The heaviest round comes first, so that a lack of memory shows at once. Rows are never cut, and
    a row longer than `max_tokens` gets its own micro-batch. With `group_index`, groups are never
    cut.

    Args:
        lengths: number of tokens of each row, >= 1.
        work: work of each row, in any unit, > 0.
        max_tokens: bound on the tokens of a micro-batch, inclusive.
        num_ranks: number of micro-batches in a round.
        group_index: group of each row, to keep groups whole; None for no groups.

    Returns:
        A bin for each round and rank, empty if there are not enough rows. Each index is in exactly
        one bin.
    """
    if max_tokens < 1 or num_ranks < 1:
        raise ValueError(f"max_tokens = {max_tokens}, num_ranks = {num_ranks}: must be at least 1")
    units: dict[int, Bin] = {}
    for index in range(len(lengths)):
        units.setdefault(index if group_index is None else group_index[index], []).append(index)
    sized = [
        (sum(work[index] for index in unit), sum(lengths[index] for index in unit), unit)
        for unit in units.values()
    ]
    sized.sort(key=lambda item: -item[0])
    bins = _fewest(sized, max_tokens, num_ranks)
    for _, rows in bins:
        rows.sort(key=lambda index: -lengths[index])
    bins.sort(key=lambda item: -item[0])
    return [
        [rows for _, rows in bins[first : first + num_ranks]]
        for first in range(0, len(bins), num_ranks)
    ]


def _fewest(
    units: Sequence[tuple[float, int, Bin]], max_tokens: int, num_ranks: int
) -> list[tuple[float, Bin]]:
    """Return the work and the rows of each bin. The number of rounds is as small as possible.

    Each unit is (work, tokens, rows).
    """
    total = sum(min(tokens, max_tokens) for _, tokens, _ in units)
    num_alone = sum(2 * tokens > max_tokens for _, tokens, _ in units)  # one per bin
    num_rounds = -(-max(-(-total // max_tokens), num_alone) // num_ranks)
    too_few, more = num_rounds - 1, 1
    while (bins := _fill(units, num_rounds * num_ranks, max_tokens)) is None:
        too_few, num_rounds, more = num_rounds, num_rounds + more, 2 * more
    while num_rounds - too_few > 1:
        middle = (too_few + num_rounds) // 2
        fewer = _fill(units, middle * num_ranks, max_tokens)
        if fewer is None:
            too_few = middle
        else:
            num_rounds, bins = middle, fewer
    return bins


def _fill(
    units: Sequence[tuple[float, int, Bin]], num_bins: int, max_tokens: int
) -> list[tuple[float, Bin]] | None:
    """Put the units (work, tokens, rows) into bins, the heaviest unit first.

    Each unit goes into the lightest bin that can hold it.

    Returns:
        The work and the rows of each bin; None if some unit fits into no bin.
    """
    contents: list[Bin] = [[] for _ in range(num_bins)]
    works = [0.0] * num_bins
    lightest = [(0.0, number, 0) for number in range(num_bins)]  # (work, bin, tokens)
    fewest = list(accumulate((tokens for _, tokens, _ in reversed(units)), min))
    for work, tokens, rows in units:
        too_full = []
        while lightest and lightest[0][2] and lightest[0][2] + tokens > max_tokens:
            popped = heapq.heappop(lightest)
            if popped[2] + fewest[-1] <= max_tokens:  # else the bin can hold no later unit
                too_full.append(popped)
        if not lightest:
            return None
        held, number, filled = heapq.heappop(lightest)
        contents[number] += rows
        works[number] = held + work
        for item in (*too_full, (held + work, number, filled + tokens)):
            heapq.heappush(lightest, item)
        fewest.pop()
    return list(zip(works, contents, strict=True))
