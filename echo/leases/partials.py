"""Partial groups are unfinished. They are kept, sent to the learner, and continued later.

A **partial group** is a leased group while it is sampled. A worker keeps the partial group among
its leases (`leases/worker/held.py`), and applies the staleness policy whenever the group enters an
engine again. Every `ship_s` seconds the worker ships the group: the tokens are sent to the learner
(`leases/worker/keeper.py`). The learner keeps the tokens (`ShippedPartials`), and sends them with
the next grant of the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from echo.core.bounds import (
    MAX_LEASE_BYTES,
    MAX_LEASES,
    MAX_MEMBERS,
    MAX_PAYLOAD_BYTES,
    MAX_TOKENS,
    NumTokens,
    Step,
    Word,
)
from echo.core.errors import RemoteProtocolError
from echo.core.monitoring.metrics import Counters
from echo.core.rollout import Lineage, PartialRollout, PolicyVersion, StaleTokens, is_surviving
from echo.core.timers import RecentMap
from echo.core.token_sets import TokenSets
from echo.leases.book import MAX_WORKERS, LeasedWorker
from echo.leases.worker.held import PartialGroup
from echo.wire.codec import DECODE_ERRORS, MAX_ARRAY_BYTES, Frame
from echo.wire.messages import Grant, Heartbeat, Lease
from echo.wire.token_sets import SetBytes, decode_all_sets, encode_all_sets

# --- Partial groups and the staleness policy ---
#
# A member has its tokens so far, each with its log-probability and the version that sampled it. So
# no token is sampled twice, and if another worker continues a rollout, the version and
# log-probability of each token stay exact.
#
#     empty --sampled--> unfinished <--continued--> ... --> finished          one member
#     all members finished --> the group is scored and delivered              the partial group
#
# Whenever a partial group enters an engine, `apply_staleness_policy` keeps, masks or drops its old
# tokens:
#
# * A member with tokens of an abandoned lineage is reset.
# * Tokens older than the age cap (at most S, the bound on staleness) are never trained on. They are
#   masked and stay as context; with stale_tokens = "drop" the member is reset.
# * Tokens of older versions within the cap: "keep" trains on them with their own log-probabilities;
#   "mask" masks them once the rollout is finished, so that only the tokens of its newest version
#   are trained on; "drop" resets every unfinished member, which begins again under the present
#   weights.
# * A finished member without a token to train on is reset, because a group must not lose a member.
# * If a single version may sample a group, members with tokens of other versions are reset.
#
# Each segment has its own seed: with the old seed the engine would repeat its random choices.


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRules:
    """The settings for unfinished rollouts."""

    over_submission: float = 1.0
    """Number of groups in the engine, divided by the number of groups that a batch waits for; at
    least 1."""
    stale_tokens: StaleTokens = "keep"
    one_version: bool = False
    """Whether a single version samples each group. If so, an engine that holds one version gets
    newer weights only when all its groups are finished."""
    max_age: int = 1 << 30
    """How old a token may be, in steps, when its rollout is continued."""
    ship_s: float | None = 30.0
    """A group is sent to the learner at most once in this many seconds. If None, groups are sent
    only when the worker pauses or leaves."""


@dataclass(frozen=True, slots=True)
class FreshPartials:
    """The members of a group to continue, and how many of their tokens were masked or dropped."""

    members: list[PartialRollout]
    num_masked: int
    """Number of tokens that stay as context but will not be trained on."""
    num_dropped: int
    """Number of tokens that were lost, because their members were reset and will be sampled from
    the start."""


def apply_staleness_policy(
    members: Iterable[PartialRollout],
    *,
    stale_tokens: StaleTokens,
    max_age: int,
    step: int,
    installed: PolicyVersion,
    lineages: Sequence[Lineage],
    only_version: PolicyVersion | None = None,
) -> FreshPartials:
    """Return the members to continue. Their old tokens are kept, masked or dropped.

    Args:
        members: the members of one group.
        only_version: the single version whose tokens may stay; None if tokens of any version may
            stay.
        stale_tokens: whether old tokens are kept, masked or dropped.
        max_age: largest age of a token in steps; at most the bound on staleness.
        step: number of the learner's optimizer steps, as last reported to this worker.
        installed: the version that will continue the members.
        lineages: the learner's lineages so far, oldest first.
    """
    kept: list[PartialRollout] = []
    num_masked = num_dropped = 0
    for member in members:
        fresh = member
        if only_version is not None and set(member.versions) - {only_version}:
            fresh = member.reset()
        fresh = _refresh_one(fresh, stale_tokens, max_age, step, installed, lineages)
        if fresh.num_tokens < member.num_tokens:
            num_dropped += member.num_tokens
        else:
            num_masked += int(member.completion_mask.sum() - fresh.completion_mask.sum())
        kept.append(fresh)
    return FreshPartials(kept, num_masked, num_dropped)


def _refresh_one(
    member: PartialRollout,
    stale_tokens: StaleTokens,
    max_age: int,
    step: int,
    installed: PolicyVersion,
    lineages: Sequence[Lineage],
) -> PartialRollout:
    if not member.num_tokens:
        return member
    versions = member.versions
    if not all(is_surviving(version, lineages) for version in versions):
        return member.reset()
    is_too_old = member.policy_versions[:, 1] < step - max_age
    if stale_tokens == "drop":
        is_behind = not member.is_finished and versions[0] < installed
        return member.reset() if is_behind or is_too_old.any() else member
    fresh = member.without(is_too_old)
    return fresh if not member.is_finished or fresh.completion_mask.any() else member.reset()


# --- Shipped partial groups: the learner keeps them for the next worker of the group ---
#
# The learner keeps only the newest shipment of each group, in memory: after its restart the workers
# ship again. Shipments beyond the bound are dropped and counted. If a shipment was dropped and its
# worker is then lost, the group is sampled from the start, which costs only tokens.


MAX_HELD_BYTES = 1 << 30
"""Largest number of bytes of rollouts that the learner keeps for workers. At nine bytes per token,
this is enough for 100 million tokens."""
_LIST_BYTES = 16
"""A list with one frame is at most this many bytes longer than the frame."""
PARTIAL_COUNTS = (
    "interrupted", "resumed", "resumed_tokens", "masked_tokens", "wasted_tokens", "too_old_tokens",
    "age_sum", "shipped",
)  # fmt: skip
"""Names of the counts that workers report about unfinished rollouts."""


def _split(
    leases: Sequence[Lease], begun: Sequence[bytes]
) -> Iterator[tuple[tuple[Lease, ...], list[bytes]]]:
    """Divide the leases, with their members, into parts. Each part fits into one message."""
    start = num_bytes = 0
    for index, (lease, frame) in enumerate(zip(leases, begun, strict=True)):
        size = len(msgspec.msgpack.encode(lease)) + len(frame)
        if index > start and num_bytes + size > MAX_LEASE_BYTES:
            yield tuple(leases[start:index]), list(begun[start:index])
            start, num_bytes = index, 0
        num_bytes += size
    if leases:
        yield tuple(leases[start:]), list(begun[start:])


@dataclass(frozen=True, slots=True)
class _Kept:
    attempt: int
    num_tokens: int
    frame: bytes


class ShippedPartials:
    """The learner's copies of the rollouts that workers have sent, at most `max_bytes` in total.

    There is one copy for each group.
    """

    def __init__(self, counters: Counters, *, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._counters = counters
        self._kept: dict[int, _Kept] = {}
        self._counted: RecentMap[str, Mapping[str, int]] = RecentMap(max_entries=MAX_WORKERS)
        """For each worker, those of its counts that were already added to the counters. They are
        kept after a lost link, because the worker's counts continue and do not restart at 0."""

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, group_id: int, attempt: int, frame: Frame, *, num_tokens: int) -> None:
        """Store the members that an attempt of a group has sent.

        `frame` has the members in encoded form. If a newer attempt has shipped at least
        `num_tokens` tokens, nothing changes. If there is too little space, the members are dropped
        and counted, and the earlier copy stays.
        """
        kept = self._kept.get(group_id)
        if kept is not None and kept.attempt > attempt and kept.num_tokens >= num_tokens:
            return
        is_too_long = len(frame) > MAX_PAYLOAD_BYTES - _LIST_BYTES
        num_freed = 0 if kept is None else len(kept.frame)
        if is_too_long or self.num_bytes - num_freed + len(frame) > self.max_bytes:
            self._counters.add("dropped/partials_full")
            return
        self.discard(group_id)
        self._kept[group_id] = _Kept(attempt, num_tokens, bytes(frame))
        self.num_bytes += len(frame)

    def discard(self, group_id: int) -> None:
        """Drop the members of a group that has ended."""
        kept = self._kept.pop(group_id, None)
        if kept is not None:
            self.num_bytes -= len(kept.frame)

    def grants(self, leases: Sequence[Lease]) -> list[tuple[Grant, tuple[Frame, ...]]]:
        """Return the messages that grant these leases.

        Each contains the stored members of its leases.
        """
        kept = [self._kept.get(lease.group_id) for lease in leases]
        self._counters.add("partials/handed_over", len(kept) - kept.count(None))
        frames = [b"" if each is None else each.frame for each in kept]
        return [
            (Grant(leases=some), (encode_continuations(begun),) if any(begun) else ())
            for some, begun in _split(leases, frames)
        ]

    def count(self, worker: LeasedWorker, message: Heartbeat) -> None:
        """Add to the counters what a worker has counted since its last heartbeat.

        The first heartbeat of a worker adds nothing: if the learner has restarted, the counts in
        this heartbeat may have been added before the restart. Also set the worker's `num_waiting`
        from the heartbeat.
        """
        counts = message.stats.partials
        counted = self._counted.get(worker.node_id)
        counted = counts if counted is None else counted
        for name in PARTIAL_COUNTS:
            growth = counts.get(name, 0) - counted.get(name, 0)
            if growth > 0:
                self._counters.add(f"partials/{name}", growth)
                if name == "too_old_tokens":
                    self._counters.add("tokens/too_old", growth)
        self._counted[worker.node_id] = counts
        worker.num_waiting = sum(
            state.is_waiting and state.num_tokens > 0 for state in message.leases
        )


# --- Codec: to the learner, along with a lease, and into a worker's own file ---
# Versions are encoded as runs, because one version samples hundreds of tokens in a row. So a token
# costs nine bytes. A decoder checks every field before it returns anything, as for finished groups.


_HEADER_LENGTH_BYTES = 4  # size of the first field: the header's length
_SAVED_BYTES_PER_TOKEN = 4 + 4 + 1
"""Bytes that each token takes in a worker's file: int32 id, float32 log-probability, one byte of
mask."""


class MemberHeader(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a group's member, without the arrays."""

    finish_reason: Word
    num_segments: Step
    spans: Annotated[tuple[tuple[Step, Step, NumTokens], ...], Meta(max_length=MAX_TOKENS)]
    """For each run of tokens that one version sampled: (lineage, step, number of tokens)."""
    set_bytes: SetBytes = (0, 0)
    """Bytes that the member's token sets take (wire/token_sets.py)."""


class SavedPartialGroup(msgspec.Struct, frozen=True, array_like=True):
    """A partial group in the form in which a worker's file stores it."""

    lease: Lease
    members: bytes


class SavedPartialGroups(msgspec.Struct, frozen=True):
    """What a worker's file of partial groups contains."""

    run_id: str
    partials: tuple[SavedPartialGroup, ...]


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(
    Annotated[tuple[MemberHeader, ...], Meta(max_length=MAX_MEMBERS)]
)
_list_decoder = msgspec.msgpack.Decoder(Annotated[tuple[bytes, ...], Meta(max_length=MAX_LEASES)])
_file_decoder = msgspec.msgpack.Decoder(SavedPartialGroups)


def encode_members(members: Sequence[PartialRollout]) -> bytes:
    """Encode the members of a group as one frame.

    The frame has the header, then ids, log-probs and mask of each member, then the token sets of
    each member.
    """
    num_bytes = _SAVED_BYTES_PER_TOKEN * sum(member.num_tokens for member in members)
    blocks = encode_all_sets(members, max_bytes=MAX_ARRAY_BYTES - num_bytes)
    header = _encoder.encode([_header_of(*each) for each in zip(members, blocks, strict=True)])
    parts = [len(header).to_bytes(_HEADER_LENGTH_BYTES, "little"), header]
    for member in members:
        parts.append(member.token_ids.astype("<i4").tobytes())
        parts.append(member.sampler_logprobs.astype("<f4").tobytes())
        parts.append(member.completion_mask.astype("u1").tobytes())
    return b"".join(itertools.chain(parts, *blocks))


def encode_continuations(frames: Sequence[bytes]) -> bytes:
    """Return the payload of a Grant.

    `frames` has the encoded members of each lease. The frame of a lease without members is empty.
    """
    return _encoder.encode(frames)


def decode_continuations(frame: Frame) -> list[list[PartialRollout]]:
    """Decode the payload of a Grant. Return the members of each lease.

    The list of a lease without members is empty.

    Raises:
        RemoteProtocolError: if the frame is malformed.
    """
    try:
        frames = _list_decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a malformed list of partial rollouts: {error}") from error
    return [decode_members(each) if each else [] for each in frames]


def _header_of(member: PartialRollout, blocks: tuple[bytes, bytes]) -> MemberHeader:
    versions = member.policy_versions
    starts = np.flatnonzero((versions[1:] != versions[:-1]).any(axis=1)) + 1
    bounds = [0, *starts.tolist(), len(versions)] if len(versions) else []
    spans = tuple(
        (int(versions[start, 0]), int(versions[start, 1]), stop - start)
        for start, stop in itertools.pairwise(bounds)
    )
    set_bytes = len(blocks[0]), len(blocks[1])
    return MemberHeader(member.finish_reason, member.num_segments, spans, set_bytes)


def decode_members(frame: Frame) -> list[PartialRollout]:
    """Decode the members of a partial group from a frame. Their arrays are copies.

    Raises:
        RemoteProtocolError: if sizes disagree or a field is out of range.
    """
    view = memoryview(frame)
    num_header_bytes = int.from_bytes(view[:_HEADER_LENGTH_BYTES], "little")
    offset = _HEADER_LENGTH_BYTES + num_header_bytes
    try:
        headers = _header_decoder.decode(view[_HEADER_LENGTH_BYTES:offset])
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a malformed header of partial rollouts: {error}") from error
    sizes = [_checked_size(header) for header in headers]
    start = offset + _SAVED_BYTES_PER_TOKEN * sum(sizes)
    set_bytes = [header.set_bytes for header in headers]
    expected = start + sum(map(sum, set_bytes))
    if len(view) != expected:
        raise RemoteProtocolError(
            f"partial rollouts of {len(view)} bytes where their header needs {expected}"
        )
    members = []
    all_sets = decode_all_sets(view[start:], sizes, set_bytes)
    for header, size, sets in zip(headers, sizes, all_sets, strict=True):
        members.append(_build_member(header, size, view, offset, sets))
        offset += _SAVED_BYTES_PER_TOKEN * size
    return members


def _checked_size(header: MemberHeader) -> int:
    """Check the header of a member. Return how many tokens the member has."""
    size = sum(count for _, _, count in header.spans)
    if size > MAX_TOKENS:
        raise RemoteProtocolError(f"partial rollout of {size} tokens; at most {MAX_TOKENS}")
    if header.finish_reason not in ("", "stop", "length") or (header.finish_reason and not size):
        raise RemoteProtocolError(
            f"partial rollout of {size} tokens that ended with {header.finish_reason!r}"
        )
    return size


def _build_member(
    header: MemberHeader,
    size: int,
    view: memoryview,
    offset: int,
    sets: Mapping[str, TokenSets | None],
) -> PartialRollout:
    ids = np.frombuffer(view, "<i4", size, offset)
    logprobs = np.frombuffer(view, "<f4", size, offset + 4 * size)
    mask = np.frombuffer(view, "u1", size, offset + 8 * size)
    counts = [count for _, _, count in header.spans]
    versions = np.array([span[:2] for span in header.spans], np.int32).reshape(-1, 2)
    return PartialRollout(
        token_ids=ids.astype(np.int32),
        sampler_logprobs=logprobs.astype(np.float32),
        policy_versions=np.repeat(versions, counts, axis=0),
        completion_mask=mask.astype(np.bool_),
        finish_reason=header.finish_reason,
        num_segments=header.num_segments,
        **sets,
    )


def encode_groups(run_id: str, partials: Sequence[PartialGroup]) -> bytes:
    """Encode partial groups as the content of a worker's file."""
    saved = tuple(
        SavedPartialGroup(partial.lease, encode_members(partial.members)) for partial in partials
    )
    return _encoder.encode(SavedPartialGroups(run_id, saved))


def decode_groups(data: Frame, *, run_id: str) -> list[PartialGroup]:
    """Return the partial groups in a worker's file. Return [] if the file is from another run.

    Raises:
        RemoteProtocolError: if the file is damaged.
    """
    try:
        saved = _file_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a malformed file of partial rollouts: {error}") from error
    if saved.run_id != run_id:
        return []
    return [PartialGroup(each.lease, decode_members(each.members)) for each in saved.partials]
