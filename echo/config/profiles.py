"""Defaults that depend on how far apart the machines are, and the publish period left to `auto`.

`profile = "lan"`: machines in one building, published every step, little staleness. `"wan"`:
machines across the internet, more staleness in exchange for fewer bytes and more patience.
A key that is not listed here has one default for both, in schema.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DEFAULT_PROFILE = "lan"

PROFILES: Mapping[str, Mapping[str, Any]] = {
    "lan": {
        "sync.max_staleness": 2,
        "sync.publish_period": 1,
        "batch.group_size": 8,
        "batch.groups_per_step": 64,
        "sampling.max_completion_tokens": 4096,
        "checkpoint.interval_steps": 25,
        "checkpoint.interval_s": None,
        "network.heartbeat_s": 2.0,
        "network.dead_after_s": 10.0,
        "network.lease_timeout_s": 60.0,
        "network.reconnect_for_s": 300.0,
    },
    "wan": {
        "sync.max_staleness": 6,
        "sync.publish_period": "auto",
        "batch.group_size": 16,
        "batch.groups_per_step": 32,
        "sampling.max_completion_tokens": 8192,
        "checkpoint.interval_steps": 10,
        "checkpoint.interval_s": 900.0,
        "network.heartbeat_s": 5.0,
        "network.dead_after_s": 45.0,
        "network.lease_timeout_s": 180.0,
        "network.reconnect_for_s": 3600.0,
    },
}
"""Default by profile and dotted key; both profiles list the same keys."""


def preset_publish_period(max_staleness: int) -> int:
    """Return the period that `auto` starts with, before a broadcast has been timed.

    Source: ECHO-2, arXiv:2602.02192: max(1, S - 1).
    """
    return max(1, max_staleness - 1)


def auto_publish_period(t_train_s: float, t_bcast_s: float, max_staleness: int) -> int:
    """Return the smallest period in which training hides the broadcast of one version.

    The smallest kappa with kappa * t_train_s > t_bcast_s, at most S + 1: with a longer period the
    newest published version would be too old to sample for the step before the next publication,
    and learner and workers would wait for each other.

    Args:
        t_train_s: seconds per optimizer step, above 0.
        t_bcast_s: seconds until the slowest active worker holds a published version, from 0 up.
        max_staleness: S, from 0 up.

    Returns:
        Optimizer steps between publications, from 1 to S + 1.

    Raises:
        ValueError: if an argument is out of its range.
    """
    if not (t_train_s > 0 and t_bcast_s >= 0 and max_staleness >= 0):
        raise ValueError(
            f"auto_publish_period({t_train_s=}, {t_bcast_s=}, {max_staleness=}): t_train_s must be "
            "above 0, the others at least 0"
        )
    longest = max_staleness + 1
    ratio = t_bcast_s / t_train_s
    return longest if ratio >= longest else min(longest, math.floor(ratio) + 1)
