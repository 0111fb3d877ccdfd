"""Findings of forward and backward passes, and the metrics computed from them.

A finding is a sum over the tokens that went through the loss, named like the metric computed from
it. Three kinds of findings are not sums over tokens: the loss itself, the largest ratio (a
maximum), and the sums over rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echo.algo.diagnostics import (
    MAX_RATIO,
    ROLLOUT_ESS,
    ROLLOUT_SUMS,
    mismatch_metrics,
    rollout_ess,
)
from echo.train.ranks.sharding import Ranks

LOSS, ENTROPY, NUM_TOKENS = "loss/policy", "entropy/mean", "num_tokens"

Sums = dict[str, float]


def gather_findings(
    parts: Sequence[Mapping[str, Tensor]], by_group: Sequence[Tensor], ranks: Ranks
) -> tuple[Sums, list[list[float]]]:
    """Return sums over all micro-batches and ranks, and sums by group.

    The host waits for the device only once.

    Args:
        parts: for each micro-batch of this rank, scalars on the device by name.
        by_group: for each micro-batch of this rank, float64 [G, K] sums of G groups.
        ranks: the ranks that call this function together.

    Returns:
        The sums by name, and G rows of K sums. The rows are [] if no rank has parts.
    """
    names = [name for part in parts for name in part]
    values = [value.double() for part in parts for value in part.values()]
    if not values:
        own: dict[str, list[Any]] = {"sums": [], "table": []}
    else:
        table = torch.stack(list(by_group)).sum(0)
        # The only place that waits for the device.
        numbers = torch.cat([torch.stack(values), table.flatten()]).tolist()
        cells = iter(numbers[len(names) :])
        own = {
            "sums": list(zip(names, numbers, strict=False)),
            "table": [[next(cells) for _ in range(table.shape[1])] for _ in range(len(table))],
        }
    gathered = [json.loads(each) for each in ranks.gather(json.dumps(own).encode())]
    tables = [each["table"] for each in gathered if each["table"]]
    added = [
        [sum(column) for column in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)
    ]
    return _joined(pair for each in gathered for pair in each["sums"]), added


def pass_metrics(passes: Sequence[Sums]) -> dict[str, float]:
    """Return a step's metrics: loss, ratios, entropy, clips.

    Args:
        passes: the findings of each update; the step's loss is the mean of the updates' losses.
    """
    sums = _joined(pair for each in passes for pair in each.items())
    num_tokens, loss = sums.pop(NUM_TOKENS), sums.pop(LOSS)
    of_rollouts = {name: sums.pop(name) for name in ROLLOUT_SUMS}
    means = {name: value / num_tokens for name, value in sums.items()}
    own = {LOSS: loss / len(passes), ROLLOUT_ESS: rollout_ess(of_rollouts)}
    return means | mismatch_metrics(sums, num_tokens) | own


def _joined(pairs: Iterable[tuple[str, float]]) -> Sums:
    found: Sums = {}
    for name, value in pairs:
        before = found.get(name, 0.0)
        found[name] = max(before, value) if name == MAX_RATIO else before + value
    return found
