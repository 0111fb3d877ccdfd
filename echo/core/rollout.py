"""Defines policy versions, rollouts and groups, based on numpy arrays.

Shapes: T completion tokens, P prompt tokens, G group size. This module does not import torch,
because a relay does not install torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from echo.core.chains import Branches, find_branch_fault, no_branches
from echo.core.reward_parts import PartedReward
from echo.core.token_sets import TokenSets, join_sets

Int32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
"""A non-negative 32-bit integer. A token's version is stored as two such integers."""

KEEP_VERSIONS = 2
"""Number of whole versions that a node keeps: the version in use and the version before it. Deltas
need the earlier version as their base, and children may still fetch it."""

MAX_UNACKED_GROUPS = 64
"""Largest number of unacknowledged groups that a worker or a relay keeps. The number is several
times larger than the number of groups in a full engine, so that a slow disk does not interrupt
sampling. A group takes little memory: 2 MB for 16 rollouts of 8192 tokens."""


class PolicyVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The name of a set of weights: a lineage of the learner, and a step in this lineage.

    Versions are ordered by lineage first. Every version of a newer lineage supersedes all versions
    of older lineages.
    """

    lineage: Int32
    """Number of the learner's lineage: 1 for a new run, plus 1 at each resume."""
    step: Int32
    """Number of optimizer steps that made these weights. The initial weights have step 0."""

    def __str__(self) -> str:
        return f"v{self.step}" if self.lineage == 1 else f"v{self.step}/L{self.lineage}"


class Lineage(msgspec.Struct, frozen=True):
    """An uninterrupted history of the learner that forked from the previous lineage."""

    lineage: Int32
    fork_step: Int32
    """Last step of the previous lineage that also belongs to this lineage; 0 for the first lineage.
    """


def is_surviving(version: PolicyVersion, lineages: Sequence[Lineage]) -> bool:
    """Return whether a version belongs to the history that led to the last lineage.

    A version exists if its step is at or after its lineage's fork. A version survives if each later
    lineage forked at or after the version's step.
    """
    is_known = False
    for lineage in lineages:
        if lineage.lineage == version.lineage:
            is_known = version.step >= lineage.fork_step
        elif lineage.lineage > version.lineage and version.step > lineage.fork_step:
            return False
    return is_known


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """Completion tokens with log-probabilities, versions and masks."""

    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """[T] sampled ids, including the stop token."""
    sampler_logprobs: npt.NDArray[np.float32] = field(
        default_factory=lambda: np.empty(0, np.float32)
    )
    """[T] natural logarithm of the probability that each id had when it was sampled, nats."""
    policy_versions: npt.NDArray[np.int32] = field(
        default_factory=lambda: np.empty((0, 2), np.int32)
    )
    """[T, 2] (lineage, step) of the weights that sampled each token."""
    completion_mask: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    """[T] True if the policy sampled the token and training may use the token."""
    support: TokenSets | None = None
    """The ids from which each token was drawn; None if every id could be drawn."""
    likely: TokenSets | None = None
    """The sampler's most likely ids for each token, with log-probabilities; None if the loss does
    not need them."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including masked tokens."""
        return int(self.token_ids.shape[0])


NO_OPINION = math.nan
"""The reward of a rollout that the task could not score. `scored_part` leaves out such rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout(Tokens):
    """A finished answer of at least one token, and its reward."""

    reward: float
    """The reward, or NO_OPINION if the task cannot score the rollout."""
    finish_reason: str
    """"stop" (a stop token), "length" (the token limit) or "abort" (cut short)."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """The parts that make up the reward, under their names; empty if the reward has no parts. By
    default they are the parts of a PartedReward."""
    branches: Branches = field(default_factory=no_branches)
    """[K, 2] the branches between an agent's chains of tokens (core/chains.py). Empty if each token
    follows the previous token."""

    def __post_init__(self) -> None:
        num_tokens = self.token_ids.shape[0] if self.token_ids.ndim == 1 else -1
        expected = {
            "token_ids": (self.token_ids, np.int32, (num_tokens,)),
            "sampler_logprobs": (self.sampler_logprobs, np.float32, (num_tokens,)),
            "policy_versions": (self.policy_versions, np.int32, (num_tokens, 2)),
            "completion_mask": (self.completion_mask, np.bool_, (num_tokens,)),
        }
        for name, (array, dtype, shape) in expected.items():
            if num_tokens < 1 or array.dtype != dtype or array.shape != shape:
                raise ValueError(
                    f"Rollout.{name} is {array.dtype}{list(array.shape)}, expected "
                    f"{np.dtype(dtype)}{list(shape)} with at least one token"
                )
        if isinstance(self.reward, PartedReward):
            object.__setattr__(self, "reward_parts", self.reward.parts)
            object.__setattr__(self, "reward", float(self.reward))
        self._check_sets()
        if fault := find_branch_fault(self.branches, num_tokens=num_tokens):
            raise ValueError(f"Rollout.branches has {fault}")
        if self.finish_reason not in ("stop", "length", "abort"):
            raise ValueError(
                f"Rollout.finish_reason is {self.finish_reason!r}; use stop, length or abort"
            )

    def _check_sets(self) -> None:
        for name, sets, has_logprobs in (
            ("support", self.support, False),
            ("likely", self.likely, True),
        ):
            if sets is not None and (
                sets.num_tokens != self.num_tokens or (sets.logprobs is not None) != has_logprobs
            ):
                raise ValueError(
                    f"Rollout.{name} is of {sets.num_tokens} tokens and has "
                    f"{'no ' if sets.logprobs is None else ''}log-probabilities, expected "
                    f"{self.num_tokens} {'with' if has_logprobs else 'without'}"
                )


def _distinct(rows: npt.NDArray[np.int32]) -> list[PolicyVersion]:
    """Return the distinct versions in an array [T, 2], oldest first."""
    packed = rows.astype(np.int64)
    found: list[int] = np.unique(packed[:, 0] << 32 | packed[:, 1]).tolist()
    return [PolicyVersion(each >> 32, each & 0xFFFFFFFF) for each in found]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The rollouts of one prompt. They are leased, delivered and admitted together."""

    group_id: int
    """Serial number of the group in the run. If a prompt is drawn twice, there are two groups."""
    attempt: int
    """Number of the lease that produced the group, from 0."""
    worker_id: str
    prompt_ids: npt.NDArray[np.int32]
    """[P] prompt token ids."""
    rollouts: tuple[Rollout, ...]
    is_trimmed: bool = False
    """Whether `trim_stale` has masked tokens after the group was stored."""
    versions: tuple[PolicyVersion, ...] = field(init=False)
    """The distinct versions that sampled the group's trainable tokens, oldest first."""

    def __post_init__(self) -> None:
        if (
            self.prompt_ids.dtype != np.int32
            or self.prompt_ids.ndim != 1
            or not len(self.prompt_ids)
        ):
            raise ValueError(f"Group {self.group_id}: prompt_ids must be int32[P] with P >= 1")
        if not self.rollouts:
            raise ValueError(f"Group {self.group_id} has no rollouts")
        self._check_branches()
        # Computed once, since the buffer reads it at every step.
        rows = [rollout.policy_versions[rollout.completion_mask] for rollout in self.rollouts]
        object.__setattr__(self, "versions", tuple(_distinct(np.concatenate(rows))))

    def _check_branches(self) -> None:
        nothing = -1 - len(self.prompt_ids)
        for rollout in self.rollouts:
            if not len(rollout.branches):
                continue
            starts, afters = rollout.branches.T
            if int(afters.min()) < nothing:
                raise ValueError(
                    f"Group {self.group_id}: a piece follows place {int(afters.min())} of a prompt "
                    f"of {len(self.prompt_ids)} tokens"
                )
            if rollout.completion_mask[starts[afters == nothing]].any():
                raise ValueError(f"Group {self.group_id}: a trained token follows nothing")

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """The version that determines the group's staleness; None without trainable tokens."""
        return self.versions[0] if self.versions else None

    @property
    def num_tokens(self) -> int:
        """Number of completion tokens of all rollouts."""
        return sum(rollout.num_tokens for rollout in self.rollouts)

    @property
    def num_trained(self) -> int:
        """Number of trainable completion tokens of all rollouts."""
        return sum(int(np.count_nonzero(rollout.completion_mask)) for rollout in self.rollouts)

    @property
    def rewards(self) -> list[float]:
        """One reward per rollout, in the order of the rollouts."""
        return [rollout.reward for rollout in self.rollouts]


def scored_part(group: Group) -> Group | None:
    """Return a copy of a group that omits the rollouts that the task could not score.

    Returns:
        The group. If rollouts were left out and fewer than two remain, the result is None, because
        an advantage compares several rewards.
    """
    scored = tuple(rollout for rollout in group.rollouts if not math.isnan(rollout.reward))
    if len(scored) == len(group.rollouts):
        return group
    return replace(group, rollouts=scored) if len(scored) > 1 else None


def staleness_of(group: Group, *, step: int) -> int:
    """Return how stale a group is when the learner is at a given step.

    The staleness is `step` minus the step of the version that sampled the oldest trainable token.

    Raises:
        ValueError: if the group has no trainable token.
    """
    oldest = group.oldest_version
    if oldest is None:
        raise ValueError(f"group {group.group_id} has no trainable token")
    return step - oldest.step


def trim_stale(group: Group, *, step: int, max_staleness: int) -> Group | None:
    """Return a copy of a group in which all tokens beyond the staleness bound are masked.

    A rollout that continues after a change of weights may have such tokens.

    Returns:
        The copy. None if no token is beyond the bound, or if a rollout would lose all trainable
        tokens.
    """
    rollouts = []
    for rollout in group.rollouts:
        is_stale = rollout.completion_mask & (rollout.policy_versions[:, 1] < step - max_staleness)
        kept = rollout.completion_mask & ~is_stale
        if is_stale.any() and not kept.any():
            return None
        rollouts.append(replace(rollout, completion_mask=kept) if is_stale.any() else rollout)
    if all(new is old for new, old in zip(rollouts, group.rollouts, strict=True)):
        return None
    return replace(group, rollouts=tuple(rollouts), is_trimmed=True)


def find_fault(
    group: Group, *, step: int, max_staleness: int, lineages: Sequence[Lineage]
) -> str | None:
    """Return the reason why a group must not be trained on at a given step.

    If the group may be trained on, return None.
    """
    versions = group.versions
    if not versions:
        return "no_trainable_token"
    if not all(is_surviving(version, lineages) for version in versions):
        return "abandoned_version"
    if max(version.step for version in versions) > step:
        return "version_from_the_future"
    if staleness_of(group, step=step) > max_staleness:
        return "stale"
    return None


MAX_LOGPROB = 1e-3
"""Largest log-probability that is accepted. It is above 0, because rounding makes some values
slightly positive."""


StaleTokens = Literal["keep", "mask", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialRollout(Tokens):
    """An answer that may be unfinished. Another engine call can continue it."""

    finish_reason: str = ""
    """"stop" or "length"; empty while the answer is unfinished."""
    num_segments: int = 0
    """Number of engine calls for this answer, including calls whose tokens were dropped."""

    @property
    def versions(self) -> list[PolicyVersion]:
        """The distinct versions that sampled the answer's tokens, oldest first.

        Versions of masked tokens are included.
        """
        return _distinct(self.policy_versions)

    @property
    def is_finished(self) -> bool:
        return bool(self.finish_reason)

    def extended(
        self,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        versions: npt.NDArray[np.int32],
        *,
        finish_reason: str,
        support: TokenSets | None = None,
        likely: TokenSets | None = None,
    ) -> PartialRollout:
        """Return a copy of the answer to which one more segment of tokens is appended.

        After a segment with the `finish_reason` "abort" the answer is still unfinished.
        """
        before, new = self.num_tokens, len(token_ids)
        return PartialRollout(
            token_ids=np.concatenate([self.token_ids, token_ids]),
            sampler_logprobs=np.concatenate([self.sampler_logprobs, logprobs]),
            policy_versions=np.concatenate([self.policy_versions, versions]),
            completion_mask=np.concatenate(
                [self.completion_mask, np.ones(len(token_ids), np.bool_)]
            ),
            support=join_sets([(self.support, before), (support, new)]),
            likely=join_sets([(self.likely, before), (likely, new)]),
            finish_reason="" if finish_reason == "abort" else finish_reason,
            num_segments=self.num_segments + 1,
        )

    def reset(self) -> PartialRollout:
        """Return a copy of the answer without its tokens.

        The number of segments stays the same, so that the next segment has a new seed.
        """
        return PartialRollout(num_segments=self.num_segments)

    def without(self, is_stale: npt.NDArray[np.bool_]) -> PartialRollout:
        """Return a copy of the answer in which the stale tokens are masked."""
        if not (self.completion_mask & is_stale).any():
            return self
        return replace(self, completion_mask=self.completion_mask & ~is_stale)

    def rollout(self, reward: float, *, stale_tokens: StaleTokens) -> Rollout:
        """Return the finished answer as a rollout that has this reward.

        If `stale_tokens` is "mask", tokens of earlier versions than the last token's version are
        masked.
        """
        finished = self
        if stale_tokens == "mask":
            newest = self.policy_versions[-1]
            finished = self.without((self.policy_versions != newest).any(axis=1))
        return Rollout(
            token_ids=finished.token_ids,
            sampler_logprobs=finished.sampler_logprobs,
            policy_versions=finished.policy_versions,
            completion_mask=finished.completion_mask,
            support=finished.support,
            likely=finished.likely,
            reward=reward,
            finish_reason=finished.finish_reason,
        )
