"""Stores one set of token ids for each token of a rollout.

A rollout may have two kinds of sets. Each kind is recorded only if the learner requests it:

    support   the ids that could be drawn: top-k, top-p and min-p did not remove them. The learner
              scores the token on this set, so that learner and sampler compute its probability in
              the same distribution. For the first `min_tokens` tokens, every id except stop tokens
              can be drawn. Such a set is recorded by its missing ids.
    likely    the sampler's most likely ids with their log-probabilities, which some corrections of
              the loss need

A set is recorded when its token is sampled, because the learner's logits would give a different
set.

Shapes: T tokens, M ids of all sets together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_SET_IDS = 1 << 14
"""The largest number of ids in a set. A larger set is not recorded; its size is TOO_LARGE."""

NOT_RECORDED = 0
"""The size of a set that was not recorded, because every id could be drawn or because no id was
sampled."""

TOO_LARGE = -1
"""The size of a set with more than MAX_SET_IDS ids. Such a set is sent without its ids."""

MAX_LACKING_IDS = 1 << 10
"""A set with many ids may be recorded by the ids that it lacks. The constant is the largest number
of lacking ids."""


def size_lacking(num_ids: int) -> int:
    """Return the entry of `TokenSets.sizes` for a set that is recorded by its missing ids.

    `num_ids` is the number of missing ids, >= 1.
    """
    return TOO_LARGE - num_ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSets:
    """A set of token ids for each of the T tokens of a rollout."""

    sizes: npt.NDArray[np.int32]
    """[T] number of ids in each set. For a set without recorded ids the value is NOT_RECORDED or
    TOO_LARGE. For a set that is recorded by the n ids that it lacks, the value is
    `size_lacking(n)`."""
    ids: npt.NDArray[np.int32]
    """[M] the ids of all sets in the order of the tokens, ascending within a set."""
    logprobs: npt.NDArray[np.float32] | None = None
    """[M] log-probability that each id had when the token was sampled, nats; None if only the ids
    are recorded."""

    def __post_init__(self) -> None:
        """Check the types, sizes and values of the arrays.

        Raises:
            ValueError: if an array has a wrong type or size, or if the ids of a set are negative or
                not ascending.
        """
        if self.sizes.dtype != np.int32 or self.ids.dtype != np.int32 or self.sizes.ndim != 1:
            raise ValueError("sizes and ids of token sets must be int32[T] and int32[M]")
        if len(self.sizes) and self.sizes.max() > MAX_SET_IDS:
            raise ValueError(f"a token set has {self.sizes.max()} ids; at most {MAX_SET_IDS}")
        if len(self.sizes) and self.sizes.min() < size_lacking(MAX_LACKING_IDS):
            lacking = int(TOO_LARGE - self.sizes.min())
            raise ValueError(f"a token set lacks {lacking} ids; at most {MAX_LACKING_IDS}")
        if self.ids.shape != (int(self.counts.sum()),):
            raise ValueError(
                f"token sets of {int(self.counts.sum())} ids in all come with {len(self.ids)}"
            )
        if self.logprobs is not None and (
            self.logprobs.dtype != np.float32 or self.logprobs.shape != self.ids.shape
        ):
            raise ValueError("token sets need one float32 log-probability for each id")
        falls = (np.diff(self.rows) == 0) & (np.diff(self.ids) <= 0)
        if falls.any() or (len(self.ids) and int(self.ids.min()) < 0):
            raise ValueError("the ids of a token set must ascend from 0 or more")

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """The number of recorded ids for each token, [T]."""
        counts: npt.NDArray[np.int32] = np.where(
            self.lacks, TOO_LARGE - self.sizes, np.maximum(self.sizes, 0)
        )
        return counts

    @property
    def lacks(self) -> npt.NDArray[np.bool_]:
        """For each token, whether its set is recorded by the missing ids, [T]."""
        return self.sizes < TOO_LARGE

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including tokens for which no ids are recorded."""
        return len(self.sizes)

    def __getitem__(self, tokens: slice) -> TokenSets:
        """Return the sets of the tokens in a slice. The slice's step is ignored."""
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        first, stop, _ = tokens.indices(self.num_tokens)
        ids = slice(int(starts[first]), int(starts[max(first, stop)]))
        return TokenSets(
            sizes=self.sizes[first:stop],
            ids=self.ids[ids],
            logprobs=None if self.logprobs is None else self.logprobs[ids],
        )

    def within(self, max_ids: int) -> TokenSets:
        """Return a copy that drops the ids of each set with more than `max_ids` ids.

        The size of such a set becomes TOO_LARGE.
        """
        # A mask over the ids: those of a set that is kept.
        is_kept = np.repeat(self.sizes <= max_ids, self.counts)
        return TokenSets(
            sizes=np.where(self.sizes > max_ids, np.int32(TOO_LARGE), self.sizes),
            ids=self.ids[is_kept],
            logprobs=None if self.logprobs is None else self.logprobs[is_kept],
        )

    def includes(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return, for each token, whether the token's set contains the token's id, [T].

        The result is True for a token without recorded ids.
        """
        hits = self.ids == np.repeat(token_ids, self.counts)
        is_listed = self.counts == 0
        is_listed[self.rows[hits]] = True
        found: npt.NDArray[np.bool_] = is_listed != self.lacks
        return found

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """For each recorded id, the index of the token to which it belongs, [M]."""
        return np.repeat(np.arange(self.num_tokens), self.counts)


def not_recorded(num_tokens: int, *, with_logprobs: bool = False) -> TokenSets:
    """Return the sets of `num_tokens` tokens. No set has recorded ids.

    If `with_logprobs`, the result has an empty array of log-probabilities.
    """
    return TokenSets(
        sizes=np.full(num_tokens, NOT_RECORDED, np.int32),
        ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32) if with_logprobs else None,
    )


def all_but(ids: npt.NDArray[np.int32], num_tokens: int, *, of: int) -> TokenSets:
    """Return the sets of `of` tokens.

    Each set of the first `num_tokens` tokens contains all ids except `ids`. The sets of the other
    tokens are not recorded. Repeated ids count once. If `ids` is empty, no set is recorded.
    """
    lacking, num_tokens = np.unique(ids).astype(np.int32), min(num_tokens, of)
    sizes = np.full(of, NOT_RECORDED, np.int32)
    if len(lacking):
        sizes[:num_tokens] = size_lacking(len(lacking))
    return TokenSets(sizes=sizes, ids=np.tile(lacking, num_tokens))


def join_sets(parts: Sequence[tuple[TokenSets | None, int]]) -> TokenSets | None:
    """Join the sets of consecutive parts of a rollout. Return the sets of all tokens.

    Each part is a pair: sets, and the number of tokens. If the sets are None, the part counts as
    not recorded. If no part has sets, the result is None.
    """
    known = [sets for sets, _ in parts if sets is not None]
    if not known:
        return None
    has_logprobs = known[0].logprobs is not None
    whole = [
        not_recorded(num_tokens, with_logprobs=has_logprobs) if sets is None else sets
        for sets, num_tokens in parts
    ]
    logprobs = [sets.logprobs for sets in whole if sets.logprobs is not None]
    return TokenSets(
        sizes=np.concatenate([sets.sizes for sets in whole]),
        ids=np.concatenate([sets.ids for sets in whole]),
        logprobs=np.concatenate(logprobs) if has_logprobs else None,
    )
