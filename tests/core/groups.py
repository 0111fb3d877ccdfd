"""Groups of a few tokens, each of a version of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from echo.core.rollout import Group, Rollout


def make_rollout(versions: Sequence[tuple[int, int]], masked: Iterable[int] = ()) -> Rollout:
    """Return a rollout with one token per (lineage, step); those at `masked` are masked."""
    mask = np.ones(len(versions), dtype=np.bool_)
    mask[list(masked)] = False
    return Rollout(
        token_ids=np.arange(len(versions), dtype=np.int32),
        sampler_logprobs=np.zeros(len(versions), dtype=np.float32),
        policy_versions=np.array(versions, dtype=np.int32),
        completion_mask=mask,
        reward=0.5,
        finish_reason="stop",
    )


def make_group(*rollouts: Rollout, group_id: int = 0) -> Group:
    """Return a group of these rollouts."""
    return Group(
        group_id=group_id,
        attempt=0,
        worker_id="w",
        prompt_ids=np.array([1], dtype=np.int32),
        rollouts=rollouts,
    )
