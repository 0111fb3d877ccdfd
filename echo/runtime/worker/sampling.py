"""How a worker keeps its engine busy: which groups go into it, and when it is stopped.

An engine that takes requests at any time gets one call per group, as soon as there is room for it.
Any other gets one batch of groups after another, and a batch lasts as long as its longest rollout,
while fewer and fewer of its rows do anything. So with `over_submission` = f > 1 (active partial
rollouts, APRIL) a batch of N groups is stopped when N / f of them are whole and others wait for the
room: what is unfinished is parked with its tokens, log-probabilities and versions, and goes on in
the next batch, before fresh groups, oldest first, under the newest weights. A continued group takes
only the rows of its unfinished rollouts, and fresh groups take the others. A group that is whole
is scored and delivered at once, whatever the others do, so nothing that was finished is lost. An
engine that takes requests at any time has no batch to wait for: there f times as many groups as its
memory holds are handed to it, so that its queue never runs dry while stragglers hold on to theirs.

A call lasts `ship_s` at most: then what it has sampled is parked, written to this worker's own
file, shipped to the learner, and continued. So a worker that is killed loses no more than that.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.rollout import PolicyVersion, Rollout, StaleTokens
from echo.engine.engine import Completion, Engine, Request, Sampling, VersionError
from echo.leases.partials import PartialGroup, apply_staleness_policy, decode_groups, encode_groups
from echo.records.files import write_file
from echo.roles.worker import Worker
from echo.runtime.episodes import EpisodeRunner, openings_of
from echo.runtime.threads import Threads
from echo.tasks.rewards import RewardError
from echo.wire.actions import Action
from echo.wire.messages import Lease

# --- One call of the engine: what it is asked for, what has come of it, and when it is to stop ---


def exact_version_of(leases: Iterable[Lease]) -> PolicyVersion | None:
    """Return the version that some of these leases want, which must be the only one; or None."""
    return next((version for lease in leases if (version := lease.exact_version)), None)


class EngineCall:
    """The groups of one call of the engine; its methods are called from the engine's thread."""

    def __init__(
        self,
        partials: Sequence[PartialGroup],
        *,
        num_awaited: int,
        max_s: float | None,
        has_others: Callable[[], bool],
        has_ended: Callable[[], bool],
        on_whole: Callable[[PartialGroup], None],
        clock: Callable[[], float],
    ) -> None:
        """Take the groups; nothing is sampled before the engine asks.

        Args:
            partials: at least one of each one's members is unfinished.
            num_awaited: whole groups after which the call ends if others wait for the room.
            max_s: seconds after which it ends; None for never.
            has_others: whether others wait.
            has_ended: whether nobody wants any of this any more.
            on_whole: told each group that has come to its end.
            clock: the loop's, seconds.
        """
        self.partials = list(partials)
        self.num_tokens = 0
        self.is_recalled = False
        self._members: dict[str, tuple[PartialGroup, int]] = {}
        self._num_awaited = num_awaited
        self._num_whole = 0
        self.exact_version = exact_version_of(partial.lease for partial in partials)
        """Where one is wanted, the call goes on to its end: newer weights wait for it, and what it
        left unfinished they could not continue."""
        max_s = math.inf if max_s is None or self.exact_version else max_s
        self._clock = clock
        self._ends_at = clock() + max_s
        self._has_others = has_others
        self._has_ended = has_ended
        self._on_whole = on_whole

    def requests(self) -> list[Request]:
        """Return what is to be sampled: every unfinished member from where it stopped."""
        requests = []
        for partial in self.partials:
            prompt_ids = np.array(partial.lease.prompt_ids, dtype=np.int32)
            for index, member in enumerate(partial.members):
                if member.is_finished:
                    continue
                request = Request(
                    request_id=f"{partial.lease.group_id}.{partial.lease.attempt}.{index}",
                    prompt_ids=prompt_ids,
                    seed=partial.seed_of(index),
                    prefix_ids=member.token_ids,
                )
                self._members[request.request_id] = partial, index
                requests.append(request)
        return requests

    def on_tokens(self, number: int) -> None:
        """Count tokens, as a sign of life of every group in the call."""
        self.num_tokens += number
        for partial in self.partials:
            partial.num_progress += number

    def on_completion(self, completion: Completion) -> None:
        """Take a rollout that has come to its end, and tell of its group if it was the last."""
        partial = self._extend(completion)
        if partial.is_whole:
            self._num_whole += 1
            self._on_whole(partial)

    def should_stop(self) -> bool:
        """Return whether what is unfinished goes on another time."""
        return (
            self.is_recalled
            or self._has_ended()
            # With something to show for it, or a slow start would be repeated for ever.
            or (self._clock() >= self._ends_at and self.num_tokens > 0)
            or (self._num_whole >= self._num_awaited and self._has_others())
        )

    def stopped(self, completions: Sequence[Completion]) -> list[PartialGroup]:
        """Take what the engine gave back in the end; return the groups that are unfinished."""
        for completion in completions:
            if completion.finish_reason == "abort":
                self._extend(completion)
        return [partial for partial in self.partials if not partial.is_whole]

    def _extend(self, completion: Completion) -> PartialGroup:
        partial, index = self._members[completion.request_id]
        partial.members[index] = partial.members[index].extended(
            completion.token_ids,
            completion.logprobs,
            completion.policy_versions,
            finish_reason=completion.finish_reason,
        )
        return partial


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRules:
    """What becomes of unfinished rollouts."""

    over_submission: float = 1.0
    """Groups in the engine for each that is waited for, at least 1."""
    stale_tokens: StaleTokens = "keep"
    max_age: int = 1 << 30
    """Steps that a token may be old when its rollout is continued."""
    ship_s: float | None = 30.0
    """Seconds between two shipments; None ships only where the worker pauses or leaves."""


class RolloutLoop:
    """Hands groups to the engine as there is room, and parks what it gives back unfinished."""

    def __init__(
        self,
        session: Worker,
        engine: Engine,
        sampling: Sampling,
        *,
        rules: PartialRules,
        group_size: int,
        groups_per_batch: int,
        path: Path,
        admit: Callable[[PartialGroup], bool],
        refuse: Callable[[Sequence[Lease], str], None],
        deliver: Callable[[PartialGroup], None],
        wake: Callable[[], None],
        perform: Callable[[Sequence[Action]], None],
        spawn: Callable[..., asyncio.Task[None]],
        threads: Threads,
        clock: Callable[[], float],
        has_ended: Callable[[], bool],
        log: logging.Logger,
    ) -> None:
        """Join the parts; `recover`, then `sample_more`.

        Args:
            session: the worker's conversation, which holds the partial groups.
            engine: samples.
            sampling: how.
            rules: of unfinished rollouts.
            group_size: rollouts of a group.
            groups_per_batch: groups that the engine holds at one time.
            path: file in which partial groups outlive this process.
            admit: whether a group can be sampled at all; it reports those that cannot.
            refuse: gives back leases whose version has been replaced.
            deliver: takes a whole group.
            wake: has `sample_more` called soon.
            perform: carries out actions.
            spawn: runs a coroutine until the node's end.
            threads: the node's.
            clock: the loop's, seconds.
            has_ended: whether the node is over; asked from the engine's threads.
            log: where to tell what happens.
        """
        self._session = session
        self._engine = engine
        self._sampling = sampling
        self.rules = rules
        self._group_size = group_size
        self._path = path
        self._admit = admit
        self._refuse = refuse
        self._deliver = deliver
        self._wake = wake
        self._perform = perform
        self._spawn = spawn
        self._clock = clock
        self._has_ended = has_ended
        self._log = log
        self._calls: set[EngineCall] = set()
        self._is_held = False
        self._is_leaving = False
        self._saved_at = -math.inf
        self._saved: bytes = b""
        num_over = math.ceil(groups_per_batch * rules.over_submission)
        self.num_places = num_over if engine.is_continuous else groups_per_batch
        """Groups that the engine has at one time, if each has all of its rollouts to sample."""
        self.max_groups = num_over + groups_per_batch
        """Groups to have at one time, so that the engine never waits for the network."""
        self._max_rollouts = None if engine.is_continuous else groups_per_batch * group_size
        num_threads = self.num_places if engine.is_continuous else 1
        self._pool = threads.pool("sample", num_threads)
        self._file_pool = threads.pool("partials")

    @property
    def is_busy(self) -> bool:
        """Whether anything is in the engine."""
        return bool(self._calls)

    @property
    def num_tokens(self) -> int:
        """Tokens that the calls under way have sampled so far."""
        return sum(call.num_tokens for call in self._calls)

    # --- into the engine -------------------------------------------------------------------------

    def sample_more(self) -> None:
        """Give the engine as many groups as it has room for."""
        is_continuous, session = self._engine.is_continuous, self._session
        room = self.max_groups
        if is_continuous:
            room = self.num_places - sum(len(call.partials) for call in self._calls)
        is_closed = self._is_held or (self.is_busy and not is_continuous)
        if session.installed_version is None or is_closed:
            room = 0
        partials = []
        taken = session.take(
            room,
            group_size=self._group_size,
            max_rollouts=self._max_rollouts,
            now=self._clock(),
        )
        for partial in taken:
            self._refresh(partial)
            if partial.is_whole:
                # By somebody else, or by this worker before it was stopped.
                self._deliver(partial)
            elif self._admit(partial):
                partials.append(partial)
        size = 1 if is_continuous else max(1, len(partials))
        for start in range(0, len(partials), size):
            self._begin(partials[start : start + size])
        if not self.is_busy:
            # What is parked now is not continued soon.
            self._ship(is_pausing=True)

    def _refresh(self, partial: PartialGroup) -> None:
        """Decide what the tokens so far are worth under the present weights."""
        session = self._session
        installed, num_tokens = session.installed_version, partial.num_tokens
        assert installed is not None
        if not num_tokens:
            return
        step = max(session.learner_step, installed.step)
        oldest = partial.oldest_step
        result = apply_staleness_policy(
            partial.members,
            stale_tokens=self.rules.stale_tokens,
            max_age=self.rules.max_age,
            step=step,
            installed=installed,
            lineages=session.lineages,
            exact_version=partial.lease.exact_version,
        )
        partial.members = result.members
        counts = session.partial_counts
        counts["resumed"] += 1
        counts["resumed_tokens"] += num_tokens
        counts["masked_tokens"] += result.num_masked
        counts["wasted_tokens"] += result.num_dropped
        counts["age_sum"] += 0 if oldest is None else max(0, step - oldest)

    def _begin(self, partials: list[PartialGroup]) -> None:
        loop, places = asyncio.get_running_loop(), self._session.partials

        def on_whole(partial: PartialGroup) -> None:
            if not self._has_ended():
                loop.call_soon_threadsafe(self._deliver, partial)

        call = EngineCall(
            partials,
            num_awaited=math.ceil(len(partials) / self.rules.over_submission),
            max_s=self.rules.ship_s,
            has_others=lambda: bool(places.queue or places.interrupted),
            has_ended=self._has_ended,
            on_whole=on_whole,
            clock=loop.time,
        )
        self._calls.add(call)
        self._spawn(self._run(call), name="sample")

    async def _run(self, call: EngineCall) -> None:
        """See one call of the engine through, and park what it leaves unfinished."""
        session = self._session
        requests = call.requests()
        try:
            completions = await self._pool.run(
                lambda: self._engine.generate(
                    requests,
                    self._sampling,
                    should_stop=call.should_stop,
                    on_tokens=call.on_tokens,
                    on_completion=call.on_completion,
                    exact_version=call.exact_version,
                ),
            )
        except VersionError as error:
            # Newer weights came first.
            self._calls.discard(call)
            self._refuse([partial.lease for partial in call.partials], str(error))
            self._wake()
            return
        if self._has_ended():
            return
        session.tokens_sampled += sum(len(c.token_ids) for c in completions)
        for partial in call.stopped(completions):
            session.park(partial)
            session.partial_counts["interrupted"] += 1
        self._calls.discard(call)
        self._ship()
        await self._save_if_due()
        self._wake()

    # --- out of the engine -----------------------------------------------------------------------

    def give_up(self) -> None:
        """Stop the calls of which no group is wanted any more."""
        for call in self._calls:
            if all(self._session.is_cancelled(partial.lease) for partial in call.partials):
                call.is_recalled = True

    async def hold(self) -> None:
        """Stop the engine and park all that is in it, until `release`."""
        self._is_held = True
        while self._calls:
            for call in self._calls:
                call.is_recalled = True
            await asyncio.sleep(0.01)

    def release(self) -> None:
        """Let sampling go on."""
        self._is_held = self._is_leaving
        self._wake()

    async def leave(self) -> None:
        """Hand over everything that is unfinished: this worker stops for good, or for long."""
        self._is_leaving = True
        await self.hold()
        self._ship(is_pausing=True)
        await self._save()

    def _ship(self, *, is_pausing: bool = False) -> None:
        interval_s = 0.0 if is_pausing else self.rules.ship_s
        if interval_s is not None:
            self._perform(self._session.ship(interval_s=interval_s, now=self._clock()))

    # --- across a restart ------------------------------------------------------------------------

    async def recover(self) -> None:
        """Take over what a former process of this worker has left unfinished.

        Raises:
            StorageError: if the file is there and cannot be read.
        """
        try:
            data = await self._file_pool.run(self._path.read_bytes)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"cannot read {self._path}: {error}") from error
        try:
            partials = decode_groups(data, run_id=self._session.broadcast.run_id)
        except RemoteProtocolError as error:
            self._log.warning("dropped %s: %s", self._path, error)
            return
        self._session.partials.restore(partials)
        if partials:
            num_tokens = sum(partial.num_tokens for partial in partials)
            self._log.info("found %d unfinished groups of %d tokens", len(partials), num_tokens)

    async def _save_if_due(self) -> None:
        if self.rules.ship_s is not None and self._clock() >= self._saved_at + self.rules.ship_s:
            await self._save()

    async def _save(self) -> None:
        """Write what is unfinished; a disk that takes no more is told of and survived."""
        self._saved_at = self._clock()
        partials = self._session.partials.begun()
        data = encode_groups(self._session.broadcast.run_id, partials)
        if data == self._saved or not (partials or self._saved):
            return
        self._saved = data
        try:
            await self._file_pool.run(write_file, self._path, data)
        except OSError as error:
            self._session.counters.add("partials_unsaved")
            text = "cannot keep unfinished rollouts in %s: %s; a restart would sample them anew"
            self._log.warning(text, self._path, error)


# How a worker keeps its engine busy where answers take several turns: whole groups, played out
#
# The state of an episode lives in its environment, which no other worker has, so nothing unfinished
# is parked, shipped or continued here: a group that was begun is played to its end.


class EpisodeLoop:
    """Hands groups to the player as the engine has room."""

    def __init__(
        self,
        session: Worker,
        runner: EpisodeRunner,
        sampling: Sampling,
        *,
        group_size: int,
        groups_per_batch: int,
        is_continuous: bool,
        admit: Callable[[PartialGroup], bool],
        refuse: Callable[[Sequence[Lease], str], None],
        deliver: Callable[[Lease, Sequence[Rollout] | RewardError], None],
        wake: Callable[[], None],
        spawn: Callable[..., Any],
        threads: Threads,
        has_ended: Callable[[], bool],
    ) -> None:
        """Join the parts.

        Args:
            session: the worker's conversation.
            runner: plays.
            sampling: how.
            group_size: rollouts of a group.
            groups_per_batch: groups in the engine at one time.
            is_continuous: whether groups may join those that are played.
            admit: whether a group can be sampled at all; it reports those that cannot.
            refuse: gives back leases whose version has been replaced.
            deliver: takes what came of a group.
            wake: has `sample_more` called soon.
            spawn: runs a coroutine until the node's end.
            threads: the node's.
            has_ended: whether the node is over; asked from the player's threads.
        """
        self._session = session
        self._runner = runner
        self._sampling = sampling
        self._group_size = group_size
        self._groups_per_batch = groups_per_batch
        self._is_continuous = is_continuous
        self._admit = admit
        self._refuse = refuse
        self._deliver = deliver
        self._wake = wake
        self._spawn = spawn
        self._has_ended = has_ended
        self._num_playing = 0
        num_threads = groups_per_batch if is_continuous else 1
        self._pool = threads.pool("play", num_threads)

    @property
    def is_busy(self) -> bool:
        """Whether anything is played."""
        return self._num_playing > 0

    def sample_more(self) -> None:
        """Begin as many groups as there is room for."""
        room = self._groups_per_batch - self._num_playing
        if self._session.installed_version is None or (self.is_busy and not self._is_continuous):
            room = 0
        taken = self._session.take(room, group_size=self._group_size)
        partials = [partial for partial in taken if self._admit(partial)]
        size = 1 if self._is_continuous else max(1, len(partials))
        for start in range(0, len(partials), size):
            batch = partials[start : start + size]
            self._num_playing += len(batch)
            self._spawn(self._play(batch), name="play")

    async def _play(self, partials: Sequence[PartialGroup]) -> None:
        leases = [partial.lease for partial in partials]
        openings = openings_of(leases, group_size=self._group_size)
        exact_version = exact_version_of(leases)

        def on_progress(number: int) -> None:
            for partial in partials:
                partial.num_progress += number

        try:
            results = await self._pool.run(
                lambda: self._runner.play(
                    openings,
                    self._sampling,
                    should_stop=self._has_ended,
                    on_progress=on_progress,
                    exact_version=exact_version,
                ),
            )
        except VersionError as error:
            self._refuse(leases, str(error))
            return
        finally:
            self._num_playing -= len(partials)
            self._wake()
        if self._has_ended():
            return
        for partial, result in zip(partials, results, strict=True):
            if not isinstance(result, RewardError):
                masks = [rollout.completion_mask for rollout in result]
                self._session.tokens_sampled += sum(int(mask.sum()) for mask in masks)
            self._deliver(partial.lease, result)
