"""Partial groups: sampled token by token, parked, shipped, and continued elsewhere.

A **partial group** is a leased group while it is sampled. A worker keeps it among its leases
(`PartialGroups`), applies the staleness policy whenever it goes back into an engine, and ships it
to the learner now and then (`ShippedPartials`), which hands it to whoever is leased the group next.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from echo.core.metrics import Counters
from echo.core.rollout import Lineage, PartialRollout, PolicyVersion, StaleTokens, is_surviving
from echo.core.timers import RecentMap
from echo.leases.book import MAX_WORKERS, LeasedWorker
from echo.leases.outbox import Outbox
from echo.wire.codec import DECODE_ERRORS, Frame
from echo.wire.messages import Grant, Heartbeat, Lease, LeaseState, Message

# --- Partial groups and the staleness policy ---
#
# Each member has its tokens so far, with the log-probability and the version that each was sampled
# with, so nothing is ever sampled twice and nothing of it is a guess: a continued rollout is exact
# token by token, whoever continues it.
#
#     empty --sampled--> unfinished <--continued--> ... --> finished          one member
#     all members finished --> the group is scored and delivered              the partial group
#
# What old tokens are worth is decided whenever a partial group goes (back) into an engine
# (`apply_staleness_policy`):
#
# * Tokens of a lineage that was left are of no use: the member begins anew.
# * Tokens older than the age cap (at most S, the bound on staleness) are never trained on. They are
#   masked and stay as context; with stale_tokens = "drop" the member begins anew.
# * Tokens of older versions within the cap: "keep" trains on them with their own log-probabilities;
#   "mask" masks them once the rollout is finished, so that only what its newest version sampled is
#   trained on; "drop" has every unfinished member begin anew under the present weights.
# * A finished member without one token to train on begins anew: a group must not lose a member.
# * Where one version alone may sample a group, a member of another version begins anew.
#
# Each segment has a seed of its own: with the old one the random choices would repeat themselves.


@dataclass(slots=True, eq=False, weakref_slot=True)
class PartialGroup:
    """A leased group while it is sampled; it keeps its lease, whoever else has held it before."""

    lease: Lease
    members: list[PartialRollout]
    num_progress: int = 0
    """Signs of life, tokens and rewards, since it came here: what renews the lease."""
    shipped_at: float = -1e18
    """When the learner was last sent what is here."""
    num_shipped: int = 0
    """Tokens that it was sent then."""
    began_at: float | None = None
    """When the engine took it."""
    is_continued: bool = False
    """Whether it was begun before that, here or elsewhere."""
    is_unwanted: bool = False
    """Whether nobody waits for it any more, though an engine has it."""
    is_reclaimed: bool = False
    """Whether another worker is to continue it as soon as it leaves the engine."""

    def seconds(self, now: float) -> float:
        """Return how long all of it took; 0 where that is not known."""
        return 0.0 if self.began_at is None or self.is_continued else now - self.began_at

    @property
    def key(self) -> tuple[int, int]:
        """(group id, attempt)."""
        return key_of(self.lease)

    @property
    def num_tokens(self) -> int:
        """Tokens of all members so far."""
        return sum(member.num_tokens for member in self.members)

    @property
    def num_unfinished(self) -> int:
        """Members that have not come to their end."""
        return sum(not member.is_finished for member in self.members)

    @property
    def is_whole(self) -> bool:
        """Whether all members have come to their end."""
        return not self.num_unfinished

    @property
    def oldest_step(self) -> int | None:
        """Step of the oldest version that has sampled for it; None without a token."""
        steps = [int(m.policy_versions[:, 1].min()) for m in self.members if m.num_tokens]
        return min(steps, default=None)

    def seed_of(self, member: int) -> int:
        """Return the seed of a member's next segment."""
        num_segments = self.members[member].num_segments
        if not num_segments:
            return self.lease.seed + member
        text = f"{self.lease.seed}/{member}/{num_segments}"
        return random.Random(text).getrandbits(48)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRules:
    """What becomes of unfinished rollouts."""

    over_submission: float = 1.0
    """Groups in the engine for each that is waited for, at least 1."""
    stale_tokens: StaleTokens = "keep"
    one_version: bool = False
    """Whether one version alone samples each group: an engine that holds one version gets newer
    weights once the groups in it are whole."""
    max_age: int = 1 << 30
    """Steps that a token may be old when its rollout is continued."""
    ship_s: float | None = 30.0
    """Seconds between two shipments; None ships only where the worker pauses or leaves."""


@dataclass(frozen=True, slots=True)
class FreshPartials:
    """What became of the tokens of members that are continued."""

    members: list[PartialRollout]
    num_masked: int
    """Tokens that will not be trained on and stay as context."""
    num_dropped: int
    """Tokens that were thrown away."""


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
    """Return members as they may be continued now; see the rules above.

    Args:
        members: of one group.
        only_version: the only one that may have sampled any of it; None for any.
        stale_tokens: what becomes of old tokens.
        max_age: steps that a token may be old; at most the bound on staleness.
        step: optimizer steps that the learner has done, as far as is known here.
        installed: the version that will continue them.
        lineages: the learner's histories so far, oldest first.
    """
    kept: list[PartialRollout] = []
    num_masked = num_dropped = 0
    for member in members:
        fresh = member
        if only_version is not None and set(member.versions) - {only_version}:
            fresh = member.anew()
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
        return member.anew()
    is_too_old = member.policy_versions[:, 1] < step - max_age
    if stale_tokens == "drop":
        is_behind = not member.is_finished and versions[0] < installed
        return member.anew() if is_behind or is_too_old.any() else member
    fresh = member.without(is_too_old)
    return fresh if not member.is_finished or fresh.completion_mask.any() else member.anew()


# --- A worker's leases ---
#
#     queue --take--> running --deliver--> outbox --acknowledged-->
#                      |   ^
#                   park   take            parked groups go before fresh ones, oldest first
#                      v   |
#                   interrupted
#
# A lease is in one of the four places until the learner knows what became of it, or does not want
# it any more; all of them are listed in each heartbeat, so the learner counts them all. What a
# place holds is bounded by the number of leases that the learner grants.


LeaseKey = tuple[int, int]
"""(group id, attempt)."""


def key_of(lease: Lease) -> LeaseKey:
    """Return the key of a lease."""
    return lease.group_id, lease.attempt


class PartialGroups:
    """The leases of a worker, with what has been sampled for them."""

    def __init__(self, outbox: Outbox) -> None:
        """Begin without leases."""
        self.queue: dict[LeaseKey, Lease] = {}
        """Not begun."""
        self.running: dict[LeaseKey, PartialGroup] = {}
        """In the engine, or being scored."""
        self.interrupted: dict[LeaseKey, PartialGroup] = {}
        """Begun, and waiting to be continued."""
        self.outbox = outbox
        """Over, and not yet acknowledged."""

    def __contains__(self, key: LeaseKey) -> bool:
        return any(
            key in place for place in (self.queue, self.running, self.interrupted, self.outbox)
        )

    def __len__(self) -> int:
        return len(self.queue) + len(self.running) + len(self.interrupted) + len(self.outbox)

    def add(self, lease: Lease, members: Sequence[PartialRollout] = ()) -> None:
        """Take in a new lease, with what others have sampled for it."""
        key = key_of(lease)
        if members:
            self.interrupted[key] = PartialGroup(lease, list(members), is_continued=True)
        else:
            self.queue[key] = lease

    def restore(self, partials: Sequence[PartialGroup]) -> None:
        """Take in what a former process of this worker has left."""
        self.interrupted.update(
            (partial.key, partial) for partial in partials if partial.key not in self
        )

    def limit_tokens(self, max_tokens: int) -> int:
        """Have members begin anew that are longer than a completion may be; return their tokens.

        So they are once a former process has left them and the run was resumed with a lower limit.
        """
        num_dropped = 0
        for partial in self.interrupted.values():
            for index, member in enumerate(partial.members):
                if member.num_tokens + (not member.is_finished) > max_tokens:
                    partial.members[index] = member.anew()
                    num_dropped += member.num_tokens
        return num_dropped

    def take(
        self,
        max_groups: int,
        *,
        group_size: int,
        max_rollouts: int | None = None,
        now: float | None = None,
        installed: PolicyVersion | None = None,
    ) -> list[PartialGroup]:
        """Move groups into the engine: what was begun first, oldest first; none is passed over.

        But those that want a newer version than `installed` stay where they are. A partial group
        that does not have `group_size` members, such as one from before a change of the
        configuration, begins anew.

        Args:
            max_groups: take no more than these.
            group_size: rollouts of a group.
            max_rollouts: room for those that are to be sampled; None for any number.
            now: the present instant.
            installed: the newest version that can sample them.
        """
        partials: list[PartialGroup] = []
        waiting = {key_of(lease) for lease in self.awaiting(installed)}
        keys = [*sorted(self.interrupted.keys() - waiting), *sorted(self.queue.keys() - waiting)]
        for key in keys[: max(0, max_groups)]:
            partial = self.interrupted.get(key) or PartialGroup(self.queue[key], [])
            is_anew = len(partial.members) != group_size
            num_rollouts = group_size if is_anew else partial.num_unfinished
            if max_rollouts is not None:
                if num_rollouts > max_rollouts:
                    break
                max_rollouts -= num_rollouts
            if self.interrupted.pop(key, None) is None:
                del self.queue[key]
            else:
                partial.is_continued = True
            partial.began_at = now
            if is_anew:
                partial.members = [PartialRollout()] * group_size
            partials.append(partial)
        self.running.update((partial.key, partial) for partial in partials)
        return partials

    def awaiting(self, installed: PolicyVersion | None) -> list[Lease]:
        """Return the leases here that want a newer version than the one that is installed."""
        outside = [*self.queue.values(), *(partial.lease for partial in self.interrupted.values())]
        return [
            lease
            for lease in outside
            if lease.min_version is not None
            and (installed is None or installed < lease.min_version)
        ]

    def park(self, partial: PartialGroup) -> bool:
        """Put a partial group aside until a place is free; return whether it is still wanted."""
        if self.running.pop(partial.key, None) is None or partial.is_unwanted:
            return False
        self.interrupted[partial.key] = partial
        return True

    def end(self, key: LeaseKey) -> bool:
        """Forget a group that was in the engine; return whether its result is still wanted."""
        partial = self.running.pop(key, None)
        return partial is not None and not partial.is_unwanted

    def deliver(self, key: LeaseKey, message: Message, *payload: Frame) -> None:
        """Let the learner be told what has become of a lease, wherever it is, until it knows."""
        for place in (self.queue, self.running, self.interrupted):
            place.pop(key, None)
        self.outbox.put(key, message, *payload)

    def revoke(self, key: LeaseKey) -> int:
        """Give up a lease that is not wanted any more; return how many tokens were in vain.

        One that is in the engine is given up when it leaves it.
        """
        running = self.running.get(key)
        if running is not None:
            is_news, running.is_unwanted = not running.is_unwanted, True
            return running.num_tokens if is_news else 0
        self.queue.pop(key, None)
        partial = self.interrupted.pop(key, None)
        return 0 if partial is None else partial.num_tokens

    def outside(self, keys: Iterable[LeaseKey]) -> list[LeaseKey]:
        """Return which of these leases are here and neither in the engine nor over."""
        return [key for key in keys if key in self.queue or key in self.interrupted]

    def reclaim(self, keys: Collection[LeaseKey]) -> None:
        """Note that others are to continue these groups once they leave the engine unfinished."""
        for key, partial in self.running.items():
            partial.is_reclaimed |= key in keys and not partial.is_whole

    def take_reclaimed(self) -> list[LeaseKey]:
        """Return the parked groups that others are to continue, and note that it was done."""
        reclaimed = [key for key, partial in self.interrupted.items() if partial.is_reclaimed]
        for key in reclaimed:
            self.interrupted[key].is_reclaimed = False
        return reclaimed

    def begun(self) -> list[PartialGroup]:
        """Return every group with tokens that is not on its way to the learner, oldest first."""
        partials = sorted((self.interrupted | self.running).items())
        return [partial for _, partial in partials if partial.num_tokens]

    def take_due(self, *, interval_s: float, now: float) -> list[PartialGroup]:
        """Return the parked partial groups that have grown since they were shipped, and note it."""
        due = [
            partial
            for _, partial in sorted(self.interrupted.items())
            if partial.num_tokens > partial.num_shipped and now >= partial.shipped_at + interval_s
        ]
        for partial in due:
            partial.shipped_at, partial.num_shipped = now, partial.num_tokens
        return due

    def forget_shipments(self) -> None:
        """Have all of them shipped again: whoever was sent them may have lost them."""
        for partial in (*self.interrupted.values(), *self.running.values()):
            partial.num_shipped = 0

    def states(self, *, now: float = 0.0) -> list[LeaseState]:
        """Return the leases here as a heartbeat lists them, now."""
        waiting = dict.fromkeys(self.queue, 0)
        waiting |= {key: partial.num_progress for key, partial in self.interrupted.items()}
        running = {key: partial.num_progress for key, partial in self.running.items()}
        held = [
            LeaseState(
                group_id=key[0],
                attempt=key[1],
                num_tokens=num,
                is_waiting=is_waiting,
                running_s=0.0 if is_waiting else self._running_s(key, now),
            )
            for places, is_waiting in ((waiting, True), (running, False))
            for key, num in places.items()
        ]
        delivered = (
            LeaseState(group_id=group_id, attempt=attempt, num_tokens=-1)
            for group_id, attempt in self.outbox.keys
        )
        return [*held, *delivered]

    def _running_s(self, key: LeaseKey, now: float) -> float:
        began_at = self.running[key].began_at
        return 0.0 if began_at is None else max(0.0, now - began_at)


# --- Shipped partial groups: the learner keeps them for whoever is leased the group next ---
#
# Only the newest of each group is kept, in memory: after the learner's restart the workers ship
# again. What does not fit into the bound is not kept and counted; its group then begins anew if its
# worker is lost, which costs tokens and nothing else.


MAX_HELD_BYTES = 1 << 30
"""Of shipped rollouts: at nine bytes per token, 100 million tokens."""
_LIST_BYTES = 16
"""At most, of a list of one frame beside the frame itself."""
PARTIAL_COUNTS = (
    "interrupted", "resumed", "resumed_tokens", "masked_tokens", "wasted_tokens", "age_sum",
    "shipped",
)  # fmt: skip
"""What workers count of unfinished rollouts."""


def _split(
    leases: Sequence[Lease], begun: Sequence[bytes]
) -> Iterator[tuple[tuple[Lease, ...], list[bytes]]]:
    """Yield the leases in order, with what was sampled for each, as many as fit into a message."""
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
    """Shipped rollouts by group, within a bound."""

    def __init__(self, counters: Counters, *, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._counters = counters
        self._kept: dict[int, _Kept] = {}
        self._counted: RecentMap[str, Mapping[str, int]] = RecentMap(max_entries=MAX_WORKERS)
        """Of each worker, what is added already of its counts, which go on over a cut."""

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, group_id: int, attempt: int, frame: Frame, *, num_tokens: int) -> None:
        """Keep what was sampled for a group, unless a newer attempt has got further."""
        kept = self._kept.get(group_id)
        if kept is not None and kept.attempt > attempt and kept.num_tokens >= num_tokens:
            return
        self.discard(group_id)
        is_too_long = len(frame) > MAX_PAYLOAD_BYTES - _LIST_BYTES
        if is_too_long or self.num_bytes + len(frame) > self.max_bytes:
            self._counters.add("dropped/partials_full")
            return
        self._kept[group_id] = _Kept(attempt, num_tokens, bytes(frame))
        self.num_bytes += len(frame)

    def discard(self, group_id: int) -> None:
        """Forget a group that has come to its end."""
        kept = self._kept.pop(group_id, None)
        if kept is not None:
            self.num_bytes -= len(kept.frame)

    def grants(self, leases: Sequence[Lease]) -> list[tuple[Grant, tuple[Frame, ...]]]:
        """Return the messages that carry these leases, with what there is of each."""
        kept = [self._kept.get(lease.group_id) for lease in leases]
        self._counters.add("partials/handed_over", len(kept) - kept.count(None))
        frames = [b"" if each is None else each.frame for each in kept]
        return [
            (Grant(leases=some), (encode_continuations(begun),) if any(begun) else ())
            for some, begun in _split(leases, frames)
        ]

    def count(self, worker: LeasedWorker, message: Heartbeat) -> None:
        """Add what has become of a worker's unfinished rollouts since its last heartbeat."""
        counts = message.stats.partials
        counted = self._counted.get(worker.node_id) or {}
        for name in PARTIAL_COUNTS:
            growth = counts.get(name, 0) - counted.get(name, 0)
            if growth > 0:
                self._counters.add(f"partials/{name}", growth)
        self._counted[worker.node_id] = counts
        worker.num_waiting = sum(
            state.is_waiting and state.num_tokens > 0 for state in message.leases
        )


# --- Codec: to the learner, along with a lease, and into a worker's own file ---
#
# Versions travel as runs, because hundreds of tokens in a row come from the same one; so a token
# costs nine bytes. Everything is checked before anything is believed, as for finished groups.


_HEADER_LENGTH_BYTES = 4
_SAVED_BYTES_PER_TOKEN = 4 + 4 + 1
"""int32 id, float32 log-prob, one byte of mask."""


class MemberHeader(msgspec.Struct, frozen=True, array_like=True):
    """Everything of a member except its arrays."""

    finish_reason: Word
    num_segments: Step
    spans: Annotated[tuple[tuple[Step, Step, NumTokens], ...], Meta(max_length=MAX_TOKENS)]
    """Runs of (lineage, step, tokens)."""


class SavedPartialGroup(msgspec.Struct, frozen=True, array_like=True):
    """One partial group in a worker's file."""

    lease: Lease
    members: bytes


class SavedPartialGroups(msgspec.Struct, frozen=True):
    """A worker's file of partial groups."""

    run_id: str
    partials: tuple[SavedPartialGroup, ...]


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(
    Annotated[tuple[MemberHeader, ...], Meta(max_length=MAX_MEMBERS)]
)
_list_decoder = msgspec.msgpack.Decoder(Annotated[tuple[bytes, ...], Meta(max_length=MAX_LEASES)])
_file_decoder = msgspec.msgpack.Decoder(SavedPartialGroups)


def encode_members(members: Sequence[PartialRollout]) -> bytes:
    """Return members as one frame: header, then ids, log-probs and mask of each."""
    header = _encoder.encode([_header_of(member) for member in members])
    parts = [len(header).to_bytes(_HEADER_LENGTH_BYTES, "little"), header]
    for member in members:
        parts.append(member.token_ids.astype("<i4").tobytes())
        parts.append(member.sampler_logprobs.astype("<f4").tobytes())
        parts.append(member.completion_mask.astype("u1").tobytes())
    return b"".join(parts)


def encode_continuations(frames: Sequence[bytes]) -> bytes:
    """Return the payload of a Grant: of each lease `encode_members`, or nothing."""
    return _encoder.encode(frames)


def decode_continuations(frame: Frame) -> list[list[PartialRollout]]:
    """Read back what was sampled for each lease of a Grant; an empty list for nothing.

    Raises:
        RemoteProtocolError: if it is malformed.
    """
    try:
        frames = _list_decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a malformed list of partial rollouts: {error}") from error
    return [decode_members(each) if each else [] for each in frames]


def _header_of(member: PartialRollout) -> MemberHeader:
    versions = member.policy_versions
    starts = np.flatnonzero((versions[1:] != versions[:-1]).any(axis=1)) + 1
    bounds = [0, *starts.tolist(), len(versions)] if len(versions) else []
    spans = tuple(
        (int(versions[start, 0]), int(versions[start, 1]), stop - start)
        for start, stop in itertools.pairwise(bounds)
    )
    return MemberHeader(member.finish_reason, member.num_segments, spans)


def decode_members(frame: Frame) -> list[PartialRollout]:
    """Read the members of a partial group back; the arrays are copies.

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
    expected = offset + _SAVED_BYTES_PER_TOKEN * sum(sizes)
    if len(view) != expected:
        raise RemoteProtocolError(
            f"partial rollouts of {len(view)} bytes where their header needs {expected}"
        )
    members = []
    for header, size in zip(headers, sizes, strict=True):
        members.append(_build_member(header, size, view, offset))
        offset += _SAVED_BYTES_PER_TOKEN * size
    return members


def _checked_size(header: MemberHeader) -> int:
    """Return the number of tokens of a member after checking what can be checked without them."""
    size = sum(count for _, _, count in header.spans)
    if size > MAX_TOKENS:
        raise RemoteProtocolError(f"partial rollout of {size} tokens; at most {MAX_TOKENS}")
    if header.finish_reason not in ("", "stop", "length") or (header.finish_reason and not size):
        raise RemoteProtocolError(
            f"partial rollout of {size} tokens that ended with {header.finish_reason!r}"
        )
    return size


def _build_member(header: MemberHeader, size: int, view: memoryview, offset: int) -> PartialRollout:
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
    )


def encode_groups(run_id: str, partials: Sequence[PartialGroup]) -> bytes:
    """Return a worker's file of partial groups."""
    saved = tuple(
        SavedPartialGroup(partial.lease, encode_members(partial.members)) for partial in partials
    )
    return _encoder.encode(SavedPartialGroups(run_id, saved))


def decode_groups(data: Frame, *, run_id: str) -> list[PartialGroup]:
    """Read a worker's file of partial groups; those of another run are none.

    Raises:
        RemoteProtocolError: if it is damaged.
    """
    try:
        saved = _file_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a malformed file of partial rollouts: {error}") from error
    if saved.run_id != run_id:
        return []
    return [PartialGroup(each.lease, decode_members(each.members)) for each in saved.partials]
