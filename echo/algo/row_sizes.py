"""Sizes to which rows of tokens are filled, so that few sizes occur.

For 16-bit products a CPU's library keeps code and buffers for each number of tokens. So on a CPU
packed and padded rows are filled. A GPU's library keeps a plan for each length of padded rows. So
on a GPU padded rows are lengthened. No plan depends on the length of a packed row.

The tokens that are added to a row are called filling. A packed row takes the smallest fitting size
of the run so far. This must keep filling at most MAX_REUSED of the run's tokens. Otherwise the row
adds a new size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SIZES_PER_OCTAVE = (16, 32, 64)
"""Choices for the number of sizes per octave, which is from a number of tokens to its double. The
first choice that keeps the filling below MAX_FILLED is used. With 16 sizes, on average 2 % of a row
is filling.
"""

MAX_FILLED = 0.028
"""Largest share of a run's tokens that may be filling at the end of packed rows."""

MAX_REUSED = 0.025
"""A row takes the size of an earlier row only if filling is then at most this share of the run's
tokens. The difference to MAX_FILLED is left for rows of new sizes.
"""

NUM_CREDITED = 4
"""Number of full rows of the same size that are assumed to follow a row when the share of filling
is computed. Without them, a run's first row would have to be nearly full.
"""

LONG_TOKENS = 4096
"""For padded rows of at least this number of tokens, a GPU computes attention by plans of cuDNN."""

PLAN_TOKENS = 512
"""On a GPU, padded rows of LONG_TOKENS and more are lengthened to a multiple of this number."""

SHORT_PLAN_TOKENS = 128
"""On a GPU, shorter padded rows are lengthened to a multiple of this number. This must add less
than MAX_LENGTHENED of their length.
"""

MAX_LENGTHENED = 0.1
"""Largest share of a short padded row's tokens that may be added to lengthen it."""

Fills = Literal["nothing", "rows", "widths"]
"""What is filled. A CPU needs "rows": packed and padded rows are filled. A GPU needs "widths":
padded rows are lengthened. "nothing" fills no rows.
"""


def filled_size(num_tokens: int, *, max_tokens: int, per_octave: int = SIZES_PER_OCTAVE[0]) -> int:
    """Return the size in tokens to which a row is filled.

    Args:
        num_tokens: number of tokens of the row before it is filled, >= 1.
        max_tokens: limit of a micro-batch's tokens, also with filling.
        per_octave: number of sizes between a number of tokens and its double.
    """
    step = max(1, (1 << num_tokens.bit_length() - 1) // per_octave)
    size = -(-num_tokens // step) * step
    return size if size <= max_tokens else max(num_tokens, max_tokens)


@dataclass(slots=True, kw_only=True)
class RowSizes:
    """Chooses the sizes that the rows of one model are filled to.

    `max_tokens` of the methods is the limit of a micro-batch's tokens, also with filling.
    """

    fills: Fills = "nothing"
    window: int | None = None
    """Largest length that padded rows are filled to: the model's number of positions; None for no
    limit.
    """
    _sizes: set[int] = field(default_factory=set)
    """Sizes of the run's packed rows so far, in tokens."""
    _num_tokens: int = 0
    _num_filled: int = 0

    def packed(self, num_tokens: int, *, max_tokens: int) -> int:
        """Return the size of the next packed row, whose rollouts have `num_tokens` tokens."""
        if self.fills != "rows":
            return num_tokens
        limit = max(num_tokens, max_tokens)
        known = min((size for size in self._sizes if num_tokens <= size <= limit), default=None)
        if known is not None and self._allows(known, num_tokens, MAX_REUSED):
            size = known
        else:
            for per_octave in SIZES_PER_OCTAVE:
                size = filled_size(num_tokens, max_tokens=max_tokens, per_octave=per_octave)
                if self._allows(size, num_tokens, MAX_FILLED):
                    break
            self._sizes.add(size)
        self._num_tokens += num_tokens
        self._num_filled += size - num_tokens
        return size

    def _allows(self, size: int, num_tokens: int, share: float) -> bool:
        tokens = self._num_tokens + (1 + NUM_CREDITED) * num_tokens
        return self._num_filled + size - num_tokens <= share * tokens

    def width(self, length: int, *, max_tokens: int) -> int:
        """Return the filled length of rows, of which the longest has `length` tokens."""
        size = length
        if self.fills == "rows":
            size = filled_size(length, max_tokens=max_tokens)
        elif self.fills == "widths":
            step = PLAN_TOKENS if length >= LONG_TOKENS else SHORT_PLAN_TOKENS
            more = -length % step
            if length + more <= max_tokens and (
                length >= LONG_TOKENS or more < MAX_LENGTHENED * length
            ):
                size += more
        return size if self.window is None else max(length, min(size, self.window))

    def number(self, num_rows: int, width: int, *, max_tokens: int) -> int:
        """Return how many rows `num_rows` rollouts take, empty rows included."""
        filled = 1 << (num_rows - 1).bit_length()
        is_filled = self.fills == "rows" and filled * width <= max_tokens
        return filled if is_filled else num_rows
