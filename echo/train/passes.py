"""Findings of forward and backward passes, and the metrics that a step makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echo.algo.diagnostics import mismatch_metrics
from echo.train.ranks.sharding import Ranks

LOSS, COUNT = "loss", "count/"
PER_TOKEN = ("learner_logprobs", "sampler_logprobs", "entropies")
"""Fields of a `Pass`, and what stands before the names of its counts, as ranks tell them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """What a pass over a batch found, without gradient; N tokens went through the loss.

    Everything lies on the device: each number that is read back makes the CPU wait for a GPU.
    """

    loss: Tensor
    """Scalar."""
    learner_logprobs: Tensor
    """[N] nats."""
    sampler_logprobs: Tensor
    """[N] nats."""
    entropies: Tensor
    """[N] nats."""
    token_counts: Mapping[str, Tensor]
    """Scalars, as in `LossOutput`."""

    @staticmethod
    def of_nothing(device: torch.device) -> Pass:
        """Return what is found where no rollout has a gradient."""
        none = torch.zeros(0, device=device)
        return Pass(
            loss=none.sum(),
            learner_logprobs=none,
            sampler_logprobs=none,
            entropies=none,
            token_counts={},
        )

    @staticmethod
    def joined(parts: Sequence[Pass]) -> Pass:
        """Return the passes over the parts of one batch as one; at least one."""
        names = dict.fromkeys(name for part in parts for name in part.token_counts)
        return Pass(
            loss=torch.stack([part.loss for part in parts]).sum(),
            learner_logprobs=torch.cat([part.learner_logprobs for part in parts]),
            sampler_logprobs=torch.cat([part.sampler_logprobs for part in parts]),
            entropies=torch.cat([part.entropies for part in parts]),
            token_counts={
                name: torch.stack(
                    [part.token_counts[name] for part in parts if name in part.token_counts]
                ).sum()
                for name in names
            },
        )


def gather_passes(parts: Sequence[Pass], ranks: Ranks, device: torch.device) -> Pass:
    """Return the passes over the parts of one batch that all ranks have made as one.

    Args:
        parts: of this rank; perhaps none.
        ranks: which call this together.
        device: where the result lies.
    """
    own: dict[str, Tensor] = {}
    if parts:
        joined = Pass.joined(parts)
        own = {name: getattr(joined, name) for name in (LOSS, *PER_TOKEN)}
        own |= {f"{COUNT}{name}": count for name, count in joined.token_counts.items()}
    found = [
        Pass(
            loss=part[LOSS],
            **{name: part[name] for name in PER_TOKEN},
            token_counts={
                name.removeprefix(COUNT): part[name] for name in part if name.startswith(COUNT)
            },
        )
        for part in ranks.gather_tensors(own)
        if part
    ]
    whole = Pass.joined(found)
    return Pass(
        loss=whole.loss.to(device),
        **{name: getattr(whole, name).to(device) for name in PER_TOKEN},
        token_counts={name: count.to(device) for name, count in whole.token_counts.items()},
    )


def pass_metrics(passes: Sequence[Pass]) -> dict[str, float]:
    """Return loss, ratios, entropy and clips of a step.

    Args:
        passes: one for each of its updates; the loss is their mean.
    """
    whole = Pass.joined(passes)
    num_scored = len(whole.learner_logprobs)
    found = mismatch_metrics(whole.learner_logprobs, whole.sampler_logprobs)
    found["loss/policy"] = whole.loss.double() / len(passes)
    found["entropy/mean"] = whole.entropies.mean()
    for name, count in whole.token_counts.items():
        found[name] = count.double() / num_scored
    values = torch.stack([value.double() for value in found.values()])
    return dict(zip(found, values.tolist(), strict=True))  # one wait for all of them
