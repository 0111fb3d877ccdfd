"""Whether the completions that are trained on are as long as those that are sampled.

Short completions are finished first. Where groups are trained as they come, and all the more where
long ones are put off for a later step (active partial rollouts), each batch is biased towards short
ones. They are put off, not lost, so over a whole run the two distributions agree but for what is
discarded; what remains is that long completions are trained later, on older tokens.

The two samples compared: the groups trained last, in the order of training; and a cohort without
such a choice, the newest groups **in the order in which they were granted**, as far as every group
before them has come to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from echo.core.rollout import Group

WINDOW = 256
"""Groups in each of the two samples, at most."""
MIN_GROUPS = 8
"""Groups below which nothing is said."""


class LengthBias:
    """The lengths of what was delivered and of what was trained."""

    def __init__(self, *, window: int = WINDOW) -> None:
        """Start without groups."""
        self.window = window
        self._delivered: dict[int, tuple[int, ...]] = {}
        self._trained: deque[tuple[int, ...]] = deque(maxlen=window)

    def delivered(self, group: Group) -> None:
        """Note a group that a worker has finished, whatever becomes of it."""
        self._delivered[group.group_id] = _lengths(group)

    def trained(self, groups: Iterable[Group]) -> None:
        """Note the groups of a step."""
        self._trained.extend(_lengths(group) for group in groups)

    def metrics(self, *, oldest_open: int | None) -> dict[str, float]:
        """Compare the two samples; empty while there is too little of either.

        Args:
            oldest_open: the first group that has been granted and has not ended; None for none.

        Returns:
            `lengths/{trained,sampled}/{mean,p90}` in tokens; `lengths/bias`, the difference of the
            means as a share of the sampled one; `lengths/ks`, the largest distance between the two
            cumulative distributions, 0 to 1.
        """
        ids = [i for i in sorted(self._delivered) if oldest_open is None or i < oldest_open]
        for group_id in ids[: -self.window]:
            del self._delivered[group_id]
        cohort = [self._delivered[group_id] for group_id in ids[-self.window :]]
        if min(len(cohort), len(self._trained)) < MIN_GROUPS:
            return {}
        sampled, trained = _flat(cohort), _flat(self._trained)
        return {
            "lengths/trained/mean": float(trained.mean()),
            "lengths/trained/p90": float(np.quantile(trained, 0.9)),
            "lengths/sampled/mean": float(sampled.mean()),
            "lengths/sampled/p90": float(np.quantile(sampled, 0.9)),
            "lengths/bias": float(trained.mean() / sampled.mean() - 1),
            "lengths/ks": _distance(trained, sampled),
        }


def _lengths(group: Group) -> tuple[int, ...]:
    return tuple(rollout.num_tokens for rollout in group.rollouts)


def _flat(groups: Iterable[tuple[int, ...]]) -> npt.NDArray[np.int64]:
    return np.sort(np.fromiter((n for lengths in groups for n in lengths), np.int64))


def _distance(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> float:
    """Return the Kolmogorov-Smirnov distance of two sorted samples."""
    points = np.concatenate([a, b])
    below_a = np.searchsorted(a, points, side="right") / len(a)
    below_b = np.searchsorted(b, points, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())
