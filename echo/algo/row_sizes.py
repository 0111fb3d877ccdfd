"""Sizes to which rows of tokens are filled, so that only a few different sizes occur.

To fill a row means to add tokens that no result depends on. The added tokens are called filling.
Each new size costs time and memory in the libraries that compute products and attention:

* On a CPU, the library of 16-bit products keeps code and buffers for each number of tokens. So
  packed and padded rows are filled.
* On a GPU, the library of attention keeps a plan for each length of padded rows. So only padded
  rows are filled. For memory, packed rows need no filling: torch's allocator splits the blocks
  that a longer row has left, and joins their parts again when they are free.

A packed row is filled to the smallest size that holds the row, among the sizes that this training
run has already used. With this size, the share of filling in the run's tokens may be at most
MAX_REUSED. If the share would be larger, a new size is made for the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from echo.core.memory_sizes import SIZES_PER_OCTAVE

MAX_FILLED = 0.028
"""Largest share of filling in the tokens of a run's packed rows."""

MAX_REUSED = 0.025
"""A row reuses an earlier size only if filling then is at most this share of the run's tokens. The
share is below MAX_FILLED, so that rows of new sizes can be filled too.
"""

NUM_CREDITED = 4
"""Number of full rows of the same size that are assumed to follow when the share of filling is
computed. Otherwise a run's first row would have to be nearly full.
"""

LONG_TOKENS = 4096
"""Shortest padded row, in tokens, for which a GPU computes attention by plans of cuDNN."""

PLAN_TOKENS = 512
"""On a GPU, padded rows of at least LONG_TOKENS are lengthened to a multiple of this number."""

SHORT_PLAN_TOKENS = 128
"""On a GPU, padded rows shorter than LONG_TOKENS are lengthened to a multiple of this number, if
this adds less than MAX_LENGTHENED of their length.
"""

MAX_LENGTHENED = 0.1
"""Largest lengthening of a short padded row, as a share of the row's length."""

Fills = Literal["nothing", "rows", "widths"]
"""The rows to fill. "rows", for a CPU: packed and padded rows are filled. "widths", for a GPU:
padded rows are lengthened. "nothing": no row is filled.
"""


def filled_size(num_tokens: int, *, max_tokens: int, per_octave: int = SIZES_PER_OCTAVE[0]) -> int:
    """Return the size to which a row is filled, in tokens.

    Args:
        num_tokens: number of tokens of the row before it is filled, >= 1.
        max_tokens: limit of a micro-batch's tokens, including filling.
        per_octave: number of sizes between a number of tokens and its double.
    """
    step = max(1, (1 << num_tokens.bit_length() - 1) // per_octave)
    size = -(-num_tokens // step) * step
    return size if size <= max_tokens else max(num_tokens, max_tokens)


@dataclass(slots=True, kw_only=True)
class RowSizes:
    """Chooses the sizes to which the rows of one model are filled.

    In all methods, `max_tokens` is the limit of a micro-batch's tokens, including filling.
    """

    fills: Fills = "nothing"
    window: int | None = None
    """Largest length to which padded rows are filled: the model's number of positions; None for no
    limit.
    """
    _sizes: set[int] = field(default_factory=set)
    """Sizes of the run's packed rows so far, in tokens."""
    _num_tokens: int = 0
    _num_filled: int = 0

    def packed(self, num_tokens: int, *, max_tokens: int) -> int:
        """Return the size of the next packed row, filling included.

        `num_tokens` counts the row's tokens before it is filled.
        """
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
        """Return the filled length of padded rows; the longest row has `length` tokens."""
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
        """Return the number of padded rows for `num_rows` rollouts, including rows of padding."""
        filled = 1 << (num_rows - 1).bit_length()
        is_filled = self.fills == "rows" and filled * width <= max_tokens
        return filled if is_filled else num_rows
