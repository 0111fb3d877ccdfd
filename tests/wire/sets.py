"""Token sets at random, as they look after a journey."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from echo.core.token_sets import TOO_LARGE, TokenSets, size_lacking

IDS = st.integers(0, 40) | st.integers(0, 2**31 - 1)


class Lacking(list[int]):
    """The ids that a set of the whole vocabulary lacks."""


def make_sets(*sets: list[int] | int, logprobs: list[float] | None = None) -> TokenSets:
    """Return the sets of tokens: a list of its ids or of those it lacks, or the size of a set that
    has none recorded.
    """
    lists = [[] if isinstance(each, int) else each for each in sets]
    sizes = [
        each
        if isinstance(each, int)
        else size_lacking(len(each))
        if isinstance(each, Lacking)
        else len(each)
        for each in sets
    ]
    return TokenSets(
        sizes=np.array(sizes, np.int32),
        ids=np.array([token_id for each in lists for token_id in each], np.int32),
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
    )


def lacking_ids() -> st.SearchStrategy[Lacking]:
    """Draw the ids that a set lacks."""
    return st.sets(IDS, min_size=1, max_size=3).map(lambda ids: Lacking(sorted(ids)))


@st.composite
def token_sets(draw: st.DrawFn, num_tokens: int, *, with_logprobs: bool) -> TokenSets:
    """Draw the sets of a rollout; log-probabilities are bfloat16 already."""
    sets = draw(
        st.lists(
            st.just(TOO_LARGE) | lacking_ids() | st.sets(IDS, max_size=5).map(sorted),
            min_size=num_tokens,
            max_size=num_tokens,
        )
    )
    found = make_sets(*sets)
    if not with_logprobs:
        return found
    size = len(found.ids)
    drawn = draw(st.lists(st.floats(-30, 0, width=16), min_size=size, max_size=size))
    halves = np.array(drawn, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return TokenSets(sizes=found.sizes, ids=found.ids, logprobs=halves.view(np.float32))


def is_same_sets(one: TokenSets | None, other: TokenSets | None) -> bool:
    """Return whether two rollouts have the same sets."""
    if one is None or other is None:
        return one is other

    def fields(sets: TokenSets) -> tuple[Any, ...]:
        logprobs = None if sets.logprobs is None else sets.logprobs.tobytes()
        return sets.sizes.tobytes(), sets.ids.tobytes(), logprobs

    return fields(one) == fields(other)
