"""Checks whether rollouts from a worker can be the result of their lease.

Each check returns the reason for refusing the rollouts, or None if the rollouts are valid.
`core.rollout.find_fault` checks whether the rollouts are too old.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echo.core.chains import Tree, num_tokens_of
from echo.core.rollout import MAX_LOGPROB, Group, PartialRollout, Rollout, Tokens
from echo.leases.run import LeaseSettings
from echo.wire.messages import BAD_LOGPROBS, Lease


def find_group_fault(group: Group, lease: Lease, settings: LeaseSettings) -> str | None:
    """Return the reason why a group cannot be the result of its lease. Return None if it can."""
    if group.prompt_ids.tolist() != list(lease.prompt_ids):
        if not settings.prompts_are_free:
            return "another_prompt"
        if int(group.prompt_ids.min()) < 0:
            return "bad_token_ids"
        if int(group.prompt_ids.max()) >= settings.vocab_size:
            return "bad_token_ids"
    if len(group.rollouts) != settings.group_size:
        return "group_size"
    if settings.exact_version and len(group.versions) > 1:
        return "mixed_versions"
    for rollout in group.rollouts:
        fault = _find_length_fault(rollout, len(group.prompt_ids), settings)
        if fault is not None:
            return fault
        fault = _find_token_fault(rollout, settings.vocab_size)
        if fault is not None:
            return fault
    return None


def _find_length_fault(rollout: Rollout, num_prompt: int, settings: LeaseSettings) -> str | None:
    """Return the fault of a rollout that is too long or must not branch; None if it has no fault.

    A rollout may branch only if `settings.max_tree_tokens` is set.
    """
    longest = num_tokens = rollout.num_tokens
    if len(rollout.branches):
        if settings.max_tree_tokens is None:
            return "malformed"
        if num_tokens > settings.max_tree_tokens:
            return "too_long"
        tree = Tree.of(rollout, num_prompt=num_prompt)
        longest = max(map(num_tokens_of, tree.chains)) - num_prompt
    return "too_long" if longest > settings.max_completion_tokens else None


def find_partial_fault(
    members: Sequence[PartialRollout], settings: LeaseSettings, *, lineage: int, step: int
) -> str | None:
    """Return why the members of a group cannot be partial rollouts at this step of a lineage.

    Return None if they can. Earlier lineages may have had further steps.
    """
    if len(members) != settings.group_size:
        return f"{len(members)} members"
    for member in (member for member in members if member.num_tokens):
        if member.num_tokens > settings.max_completion_tokens:
            return f"{member.num_tokens} tokens"
        if not member.is_finished and member.num_tokens >= settings.max_completion_tokens:
            return "nothing is left to sample"
        fault = _find_token_fault(member, settings.vocab_size)
        if fault is not None:
            return fault
        if any(v.lineage >= lineage and v.step > step for v in member.versions):
            return "version_from_the_future"
    return None


def _find_token_fault(tokens: Tokens, vocab_size: int) -> str | None:
    """Return the fault that sampled tokens have. Return None if they are valid."""
    ids, logprobs = tokens.token_ids, tokens.sampler_logprobs
    if not np.isfinite(logprobs).all() or float(logprobs.max()) > MAX_LOGPROB:
        return BAD_LOGPROBS
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return "bad_token_ids"
    for sets in (tokens.support, tokens.likely):
        if sets is not None and len(sets.ids) and int(sets.ids.max()) >= vocab_size:
            return "bad_token_ids"
    if tokens.support is not None and not tokens.support.includes(ids).all():
        return "bad_support"
    return None
