"""Splits a rollout into chains: sequences of tokens sampled one after another.

Most rollouts are one chain, in which each token follows the previous token. If an agent rewrites
its history or makes parallel calls, the rollout has several chains. Their tokens form a tree, which
a rollout stores as a list of pieces. Within a piece, each token follows the previous token. The
first token of a piece may follow any earlier token. So chains share the tokens of their common
beginning, and each sampled token is stored once. The start of a piece, except the first, is a
branch. A branch is stored as two places: that of the piece's first token, and that of the token
before it in the chain.

A place is a token's number in the completion. The prompt's tokens have negative places: the last
token has place -1 and the first token has place -P. A token that follows place -P - 1 has no
previous token.

Shapes: T completion tokens, P prompt tokens, K branches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

Branches: TypeAlias = npt.NDArray[np.int32]
"""[K, 2] (start, after), ordered by start: the place where a piece starts, and the place of the
token that the piece continues. The first piece starts at 0 after the prompt and is not listed."""

Run = tuple[int, int]
"""Consecutive tokens: the place of the first token, and the place after the last token."""


class Piece(NamedTuple):
    """A sequence of completion tokens that were sampled one after another."""

    start: int
    end: int
    """The place after the last token."""
    after: int
    """The place of the token that the piece's first token follows."""


def no_branches() -> Branches:
    """Return an array without branches, for a rollout with a single chain."""
    return np.empty((0, 2), np.int32)


def find_branch_fault(branches: Branches, *, num_tokens: int) -> str | None:
    """Return the error in a completion's branches. Return None if there is no error.

    A piece may follow a token of the prompt. Such a token has a negative place, and any negative
    place is accepted, because the prompt's length is not known here.
    """
    if branches.dtype != np.int32 or branches.ndim != 2 or branches.shape[1] != 2:
        return f"{branches.dtype}{list(branches.shape)}, expected int32[K, 2]"
    if not len(branches):
        return None
    starts, afters = branches.astype(np.int64).T
    if starts[0] < 1 or starts[-1] >= num_tokens or (np.diff(starts) < 1).any():
        return (
            f"pieces that start at {starts.tolist()}, expected ascending places in "
            f"1..{num_tokens - 1}"
        )
    if (afters >= starts).any():
        return "a piece that follows a later token"
    return None


def predecessors(branches: Branches, *, num_tokens: int) -> npt.NDArray[np.int64]:
    """Return, for each completion token, the place of the token that it follows, [T]."""
    before = np.arange(-1, num_tokens - 1)
    before[branches[:, 0]] = branches[:, 1]
    return before


class HasBranches(Protocol):
    """A completion whose tokens may form a tree, such as a rollout."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def branches(self) -> Branches: ...


class Tree:
    """The pieces of a completion, and the tokens that precede each piece."""

    @classmethod
    def of(cls, rollout: HasBranches, *, num_prompt: int) -> Self:
        """Return the tree of a rollout. The rollout's prompt has `num_prompt` tokens."""
        return cls(rollout.branches, num_tokens=rollout.num_tokens, num_prompt=num_prompt)

    def __init__(self, branches: Branches, *, num_tokens: int, num_prompt: int) -> None:
        starts = [0, *branches[:, 0].tolist()]
        ends = [*starts[1:], num_tokens]
        afters = [-1, *branches[:, 1].tolist()]
        self.pieces = [Piece(*each) for each in zip(starts, ends, afters, strict=True)]
        self.num_prompt = num_prompt
        self._starts = starts
        self._followed = {piece.after for piece in self.pieces}

    def is_continued(self, piece: Piece) -> bool:
        """Return whether another piece follows the last token of this piece."""
        return piece.end - 1 in self._followed

    def way_to(self, piece: Piece) -> list[Run]:
        """Return the tokens from the prompt's start to the last token before a piece, as runs.

        A run lies within the prompt or within one piece.
        """
        runs, after = [], piece.after
        while after >= 0:
            other = self.pieces[bisect_right(self._starts, after) - 1]
            runs.append((other.start, after + 1))
            after = other.after
        if after >= -self.num_prompt:
            runs.append((-self.num_prompt, after + 1))
        return runs[::-1]

    @property
    def chains(self) -> list[list[Run]]:
        """All chains. Each chain is a list of runs that begins with the prompt.

        A chain ends with a piece that no other piece continues.
        """
        return [
            [*self.way_to(piece), (piece.start, piece.end)]
            for piece in self.pieces
            if not self.is_continued(piece)
        ]


def num_tokens_of(runs: Sequence[Run]) -> int:
    """Return the number of tokens of these runs."""
    return sum(end - start for start, end in runs)
