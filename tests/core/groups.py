"""Rollouts and groups of a few tokens, each of a version of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from echo.core.rollout import Group, PartialRollout, Rollout


def make_partial(versions: Sequence[tuple[int, int]], reason: str = "abort") -> PartialRollout:
    """Return a part of a rollout with one token per (lineage, step), each unlike the others."""
    count = len(versions)
    return PartialRollout().extended(
        np.arange(count, dtype=np.int32),
        -np.arange(1, count + 1, dtype=np.float32),
        np.array(versions, np.int32).reshape(-1, 2),
        finish_reason=reason,
    )


def make_rollout(
    versions: Sequence[tuple[int, int]], masked: Iterable[int] = (), *, reward: float = 0.5
) -> Rollout:
    """Return a rollout with one token per (lineage, step); those at `masked` are masked."""
    mask = np.ones(len(versions), dtype=np.bool_)
    mask[list(masked)] = False
    return Rollout(
        token_ids=np.arange(3, 3 + len(versions), dtype=np.int32),
        sampler_logprobs=np.full(len(versions), -0.5, dtype=np.float32),
        policy_versions=np.array(versions, dtype=np.int32),
        completion_mask=mask,
        reward=reward,
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
