from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from echo.core.rollout import (
    NO_OPINION,
    Group,
    Lineage,
    PolicyVersion,
    find_fault,
    is_surviving,
    scored_part,
    staleness_of,
)
from tests.core.groups import make_group, make_rollout

V = PolicyVersion
LINEAGES = (Lineage(1, 0), Lineage(2, 5), Lineage(3, 4))


def test_versions_of_a_newer_lineage_supersede_older_ones() -> None:
    assert V(1, 9) < V(2, 4) < V(2, 5)
    assert (str(V(1, 9)), str(V(2, 4))) == ("v9", "v4/L2")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (V(1, 0), True),
        (V(1, 4), True),
        (V(1, 5), False),  # survived lineage 2, which left at 5, but not lineage 3, which left at 4
        (V(1, 6), False),
        (V(2, 5), False),
        (V(2, 4), False),  # never existed: lineage 2 began at 5
        (V(3, 3), False),  # never existed either
        (V(3, 4), True),
        (V(3, 99), True),
        (V(4, 0), False),
        (V(0, 0), False),
    ],
)
def test_a_version_survives_if_no_later_lineage_left_before_it(
    version: PolicyVersion, expected: bool
) -> None:
    assert is_surviving(version, LINEAGES) is expected


def test_without_lineages_nothing_survives() -> None:
    assert not is_surviving(V(1, 0), ())


def test_masked_tokens_do_not_count_for_the_versions() -> None:
    rollout = make_rollout([(1, 1), (1, 3), (1, 3), (1, 2)], masked=(0,))
    assert list(make_group(rollout).versions) == [V(1, 2), V(1, 3)]
    assert rollout.num_tokens == 4
    group = make_group(rollout, make_rollout([(2, 4)]))
    assert list(group.versions) == [V(1, 2), V(1, 3), V(2, 4)]
    assert group.oldest_version == V(1, 2)
    assert (group.num_tokens, group.rewards) == (5, [0.5, 0.5])


def test_staleness_counts_steps_from_the_oldest_trainable_token() -> None:
    group = make_group(make_rollout([(1, 5), (1, 6)]))
    assert staleness_of(group, step=7) == 2


def test_a_group_without_trainable_tokens_has_no_staleness() -> None:
    group = make_group(make_rollout([(1, 5)], masked=(0,)))
    assert group.oldest_version is None
    with pytest.raises(ValueError, match="group 0 has no trainable token"):
        staleness_of(group, step=7)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([(1, 5)], None),  # staleness 2, the bound
        ([(1, 4), (1, 7)], "stale"),
        ([(1, 8)], "version_from_the_future"),
        ([(2, 7)], "abandoned_version"),
        ([(1, 7), (0, 7)], "abandoned_version"),
    ],
)
def test_faults_at_step_7_with_a_bound_of_2(
    versions: list[tuple[int, int]], expected: str | None
) -> None:
    group = make_group(make_rollout(versions))
    fault = find_fault(group, step=7, max_staleness=2, lineages=[Lineage(1, 0)])
    assert fault == expected


def test_a_group_that_is_all_masked_is_a_fault() -> None:
    group = make_group(make_rollout([(1, 5)], masked=(0,)))
    fault = find_fault(group, step=7, max_staleness=2, lineages=[Lineage(1, 0)])
    assert fault == "no_trainable_token"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"token_ids": np.array([], dtype=np.int32)}, r"token_ids is int32\[0\]"),
        ({"token_ids": np.zeros((2, 1), dtype=np.int32)}, "token_ids"),
        ({"token_ids": np.zeros(2, dtype=np.int64)}, "token_ids is int64"),
        ({"sampler_logprobs": np.zeros(3, dtype=np.float32)}, r"float32\[3\], expected float32\[2"),
        ({"policy_versions": np.zeros(2, dtype=np.int32)}, "policy_versions"),
        ({"completion_mask": np.zeros(2, dtype=np.int8)}, "completion_mask is int8"),
        ({"finish_reason": "eos"}, "'eos'; use stop, length or abort"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(make_rollout([(1, 0), (1, 0)]), **changes)


def test_a_group_needs_a_prompt_and_rollouts() -> None:
    group = make_group(make_rollout([(1, 0)]), group_id=7)
    with pytest.raises(ValueError, match="Group 7 has no rollouts"):
        dataclasses.replace(group, rollouts=())
    prompts: list[Any] = [np.array([], dtype=np.int32), np.array([1], dtype=np.int64)]
    for prompt in prompts:
        with pytest.raises(ValueError, match="Group 7: prompt_ids"):
            dataclasses.replace(group, prompt_ids=prompt)


def test_rollouts_without_an_opinion_are_left_out_and_two_must_be_left() -> None:
    def group(*rewards: float) -> Group:
        return make_group(*(make_rollout([(1, 0)], reward=reward) for reward in rewards))

    whole = group(1.0, 0.0)
    assert scored_part(whole) is whole
    found = scored_part(group(NO_OPINION, 1.0, 0.0, NO_OPINION))
    assert found is not None
    assert found.rewards == [1.0, 0.0]
    assert scored_part(group(NO_OPINION, 1.0)) is None
    assert scored_part(group(NO_OPINION, NO_OPINION)) is None
