"""Sizes that a computation and the estimate of its memory have in common.

The estimate runs before torch is loaded, so it cannot import the computation's module.
"""

from __future__ import annotations

VOCAB_CHUNK = 8192
"""Number of columns of logits, or of their gradient, that exist at once. With a whole vocabulary,
16 384 tokens would have 10 GB of logits.
"""

MIN_SAVED = 0.2
"""Smallest share of a row's tokens that sharing a prompt must save. Attention is slower with shared
prompts, so smaller savings would cost time on a CPU.
"""

SIZES_PER_OCTAVE = (16, 32, 64)
"""Choices for the number of sizes of rows from a number of tokens to its double. The first choice
that keeps filling below MAX_FILLED (`algo/row_sizes.py`) is used. With 16 sizes, 2 % of a row is
filling on average.
"""

GROWN_BYTES = 256 << 20
"""Growth of a process, in bytes, after which it returns freed memory to the system. A smaller value
would cause more page faults. The peak memory would hardly be lower.
"""

SAMPLING_BYTES_PER_LOGIT = 32
"""Bytes that sampling needs for each logit of a row: for the logit, its float32 copy, its
log-probability and probability, the float64 sum, and a margin.
"""
