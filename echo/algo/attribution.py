"""Where the mismatch between sampler and learner comes from: its variance split by cause.

The log-ratio of a token, log pi(learner) - log mu(sampler), is a sum of parts, one per cause, each
the difference of two scores that differ in that cause alone. The variance of a sum is the sum of
each part's covariance with it, so

    share_k = cov(part_k, sum) / var(sum),   and the shares add up to 1, exactly.

A share may be negative (its part works against the others) or above 1.

Shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

MIN_VARIANCE = 1e-14
"""Nats squared below which there is nothing to divide: float32 scores differ by that much."""


def split_variance(parts: Mapping[str, npt.NDArray[np.floating]]) -> dict[str, float]:
    """Return the variance of the log-ratio (`variance`) and the share of each part.

    Args:
        parts: by cause, [N] nats each, N >= 1; their sum is the log-ratio.

    Returns:
        `variance` in nats squared, and each cause's share by its name; no shares where the variance
        is as good as 0.

    Source: the covariance decomposition of a sum.
    """
    values = {name: np.asarray(part, dtype=np.float64) for name, part in parts.items()}
    total = np.sum(list(values.values()), axis=0)
    away = total - total.mean()
    variance = float((away * away).mean())
    if variance < MIN_VARIANCE:
        return {"variance": variance}
    shares = {name: float((part * away).mean() / variance) for name, part in values.items()}
    return {"variance": variance, **shares}
