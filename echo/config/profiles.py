"""Defaults that depend on how far apart the machines are, and the publish period left to `auto`.

`profile = "lan"`: machines in one building, published every step, little staleness. `"wan"`:
machines across the internet, more staleness in exchange for fewer bytes and more patience.
A key that is not listed here has one default for both, in schema.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo.fleet.overlap import auto_publish_period as auto_publish_period

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
        "loss.kind": "grpo",
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
        # What learned best from old rollouts in this project's experiments: bench/README.md.
        "loss.kind": "gspo",
    },
}
"""Default by profile and dotted key; both profiles list the same keys."""


PULL: Mapping[str, Any] = {"sync.max_staleness": 0, "sync.publish_period": 1}
"""What `sync.mode = "pull"` means, in place of a profile's defaults: on-policy, step by step."""


def preset_publish_period(max_staleness: int) -> int:
    """Return the period that `auto` starts with, before a broadcast has been timed.

    Source: ECHO-2, arXiv:2602.02192: max(1, S - 1).
    """
    return max(1, max_staleness - 1)
