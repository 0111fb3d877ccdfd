"""Checks of delivered groups against their leases and the settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echo.core.rollout import PolicyVersion
from echo.leases.checks import find_group_fault
from tests.leases.test_scheduler import make_settings
from tests.roles.harness import make_group, make_lease

LEASE = make_lease(12, 0)


def fault_of(versions: list[tuple[int, int]] | None = None, **settings: Any) -> str | None:
    """Return the fault of a group of lease 12; `versions` are those of each token."""
    group = make_group(12, PolicyVersion(1, 3))
    if versions is not None:
        rollouts = tuple(
            replace(rollout, policy_versions=np.array(versions, np.int32))
            for rollout in group.rollouts
        )
        group = replace(group, rollouts=rollouts)
    return find_group_fault(group, LEASE, make_settings(**settings))


def test_a_group_as_it_was_asked_for_has_no_fault() -> None:
    assert fault_of() is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"group_size": 3}, "group_size"),
        ({"max_completion_tokens": 1}, "too_long"),
        ({"vocab_size": 1}, "bad_token_ids"),
    ],
)
def test_a_group_is_compared_with_the_settings(settings: dict[str, Any], expected: str) -> None:
    assert fault_of(**settings) == expected


def test_two_versions_in_a_group_are_a_fault_only_where_one_must_have_sampled_it() -> None:
    mixed = [(1, 2), (1, 2), (1, 3)]
    assert fault_of(mixed) is None
    assert fault_of(mixed, exact_version=True) == "mixed_versions"
    assert fault_of([(1, 3)] * 3, exact_version=True) is None


def test_chains_are_for_agents_and_bounded_alone_and_together() -> None:
    group = make_group(12, PolicyVersion(1, 3))
    num_prompt = len(group.prompt_ids)
    rollouts = tuple(  # of three tokens, of which the last two follow the prompt
        replace(rollout, branches=np.array([[1, -1]], np.int32)) for rollout in group.rollouts
    )
    group = replace(group, rollouts=rollouts)

    def fault(**settings: Any) -> str | None:
        return find_group_fault(group, LEASE, make_settings(**settings))

    assert num_prompt
    assert fault() == "malformed"
    assert fault(max_tree_tokens=3, max_completion_tokens=2) is None
    assert fault(max_tree_tokens=2, max_completion_tokens=2) == "too_long"
    assert fault(max_tree_tokens=3, max_completion_tokens=1) == "too_long"
