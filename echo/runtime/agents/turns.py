"""Calls of a session, and the tree of their tokens, which becomes a rollout.

A call continues an earlier call's chain if its context begins with that call's context and
completion. Any other call begins a chain, for example after the agent has rewritten its history.
All chains of a session are one rollout, whose tokens form a tree (core/chains.py).

If the tree already has the first tokens of a context, these tokens are not added again. The tokens
that a call samples are always added, even if another call sampled the same tokens at the same
place. So each sampled token is trained exactly once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo.core.rollout import Rollout
from echo.core.token_sets import TokenSets, join_sets
from echo.engine.engine import Completion

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A call of a session and its completion."""

    context_ids: Ids
    """[C] the C tokens of the context."""
    completion: Completion
    text: str
    """Context and completion as text, special tokens included."""
    parent: Turn | None
    """The call that this call continues; None if this call begins a chain."""
    num_hidden: int = 0
    """Number of characters at the end of `text` that the agent does not see.

    The hidden characters are the stop string that ended the completion, and any text after the stop
    string.
    """

    @property
    def shown_text(self) -> str:
        """The context and completion as text, up to the stop string."""
        return self.text[: len(self.text) - self.num_hidden]

    @property
    def ids(self) -> Ids:
        """[C + T] the C tokens of the context and the T tokens of the completion."""
        return np.concatenate([self.context_ids, self.completion.token_ids])

    @property
    def chain(self) -> list[Turn]:
        """This call and the earlier calls that it continues, oldest first."""
        turns, turn = [self], self.parent
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled along the call's chain."""
        return num_sampled_of(self.chain)


def num_sampled_of(turns: Iterable[Turn]) -> int:
    """Return the number of tokens sampled in these calls."""
    return sum(len(turn.completion.token_ids) for turn in turns)


class TokenTree:
    """A tree of the tokens of calls. Calls that begin with the same tokens share these tokens.

    A token's place is its index in the tree; the first token has place 0.
    """

    def __init__(self, turns: Iterable[Turn]) -> None:
        """Make the tree of the calls.

        Args:
            turns: the calls, oldest first, each call after its parent. At least one call has a
                token.
        """
        turns = list(turns)
        self.first_context = turns[0].context_ids
        """[C] the C tokens of the first call's context, with which the tree begins."""
        self.num_tokens = 0
        self._ids: Ids = np.empty(0, np.int32)  # longer than `num_tokens`, so that it can grow
        self._branches: list[tuple[int, int]] = []
        self._starts: list[int] = []  # of all pieces
        self._begun: dict[tuple[int, int], int] = {}
        """(place, token) -> place of the first token of the first branch that leaves this place
        with this token. The place is -1 for a branch at the root.
        """
        self._parts: list[tuple[Completion | None, int]] = []
        """The parts of the tree in order: (completion, number of tokens). For tokens of a context,
        the completion is None.
        """
        self._ends: dict[Turn, int] = {}
        for turn in turns:
            self._add(turn)

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        followed = {after for _, after in self._branches}
        ends = (start - 1 for start in [*self._starts[1:], self.num_tokens])
        return sum(end not in followed for end in ends)

    def rollout(self, num_prompt: int, *, reward: float, finish_reason: str) -> Rollout:
        """Return the tree as a rollout.

        The first `num_prompt` tokens of the tree are the group's prompt.
        """
        completions = [(each, number) for each, number in self._parts if each is not None]
        sampled = np.concatenate([each.policy_versions for each, _ in completions])
        # Masked tokens need a version too, not newer than that of any sampled token.
        oldest = sampled[np.lexsort((sampled[:, 1], sampled[:, 0]))[0]]
        versions = np.tile(oldest, (self.num_tokens, 1)).astype(np.int32)
        mask = np.repeat(
            [each is not None for each, _ in self._parts], [number for _, number in self._parts]
        )
        logprobs = np.zeros(self.num_tokens, np.float32)
        versions[mask] = sampled
        logprobs[mask] = np.concatenate([each.logprobs for each, _ in completions])
        branches = np.array(self._branches, np.int32).reshape(-1, 2) - np.int32(num_prompt)
        return Rollout(
            token_ids=self._ids[num_prompt : self.num_tokens].astype(np.int32),
            sampler_logprobs=logprobs[num_prompt:],
            policy_versions=versions[num_prompt:],
            completion_mask=mask[num_prompt:],
            support=self._sets("support", num_prompt),
            likely=self._sets("likely", num_prompt),
            branches=branches,
            reward=reward,
            finish_reason=finish_reason,
        )

    def _sets(self, name: str, num_prompt: int) -> TokenSets | None:
        parts = [(getattr(each, name, None), number) for each, number in self._parts]
        joined = join_sets(parts)
        return None if joined is None else joined[num_prompt:]

    def _add(self, turn: Turn) -> None:
        place, rest = self._find(turn)
        sampled = turn.completion.token_ids
        start, number = self.num_tokens, len(rest) + len(sampled)
        self._ends[turn] = start + number - 1 if number else place
        if not number:
            return
        if start + number > len(self._ids):
            self._ids = np.concatenate([self._ids[:start], np.empty(start + number, np.int32)])
        self._ids[start : start + number] = np.concatenate([rest, sampled])
        if start and place != start - 1:
            self._branches.append((start, place))
        if not start or place != start - 1:
            self._starts.append(start)
            self._begun.setdefault((place, int(self._ids[start])), start)
        self._parts += [(None, len(rest)), (turn.completion, len(sampled))]
        self.num_tokens += number

    def _find(self, turn: Turn) -> tuple[int, Ids]:
        """Find the longest beginning of a call's context that is already in the tree.

        Return the place of the last token found, and the token ids of the rest of the context. The
        place is -1 if the tree has no common beginning with the context.
        """
        place, rest = -1, turn.context_ids
        if turn.parent is not None:
            place = self._ends[turn.parent]
            rest = rest[len(turn.parent.context_ids) + len(turn.parent.completion.token_ids) :]
        while len(rest):
            start = self._next(place, int(rest[0]))
            if start is None:
                break
            number = bisect_right(self._starts, start)
            end = self._starts[number] if number < len(self._starts) else self.num_tokens
            length = min(end - start, len(rest))
            differs = np.flatnonzero(self._ids[start : start + length] != rest[:length])
            num_same = int(differs[0]) if len(differs) else length
            place, rest = start + num_same - 1, rest[num_same:]
        return place, rest

    def _next(self, place: int, token: int) -> int | None:
        after = place + 1
        is_inside = after < self.num_tokens and after > 0
        number = bisect_right(self._starts, after) - 1
        if is_inside and self._starts[number] != after and self._ids[after] == token:
            return after
        return self._begun.get((place, token))


def tree_of(turns: Sequence[Turn], *, max_tokens: int) -> TokenTree:
    """Return the tree of a session's calls; there must be at least one call.

    If the chains have more than `max_tokens` tokens in total, the chains with the fewest sampled
    tokens are left out. At least one chain is always kept.
    """
    tree = TokenTree(turns)
    if tree.num_tokens <= max_tokens:
        return tree
    continued = {turn.parent for turn in turns}
    leaves = [turn for turn in turns if turn not in continued]
    leaves.sort(key=lambda turn: -turn.num_sampled)

    def tree_with(number: int) -> TokenTree:
        kept = {turn for leaf in leaves[:number] for turn in leaf.chain}
        return TokenTree(turn for turn in turns if turn in kept)

    fits, too_many = 1, len(leaves)  # more chains have more tokens
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if tree_with(middle).num_tokens <= max_tokens:
            fits = middle
        else:
            too_many = middle
    return tree_with(fits)
