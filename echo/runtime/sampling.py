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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.rollout import StaleTokens
from echo.engine.engine import Engine, Sampling, VersionError
from echo.leases.partials import PartialGroup, apply_staleness_policy, decode_groups, encode_groups
from echo.protocol.worker_session import WorkerSession
from echo.records.files import write_file
from echo.runtime.engine_call import EngineCall
from echo.runtime.threads import Threads
from echo.wire.actions import Action
from echo.wire.messages import Lease


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
        session: WorkerSession,
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
            session: the worker's conversation, which holds the drafts.
            engine: samples.
            sampling: how.
            rules: of unfinished rollouts.
            group_size: rollouts of a group.
            groups_per_batch: groups that the engine holds at one time.
            path: file in which drafts outlive this process.
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
            room = self.num_places - sum(len(call.drafts) for call in self._calls)
        is_closed = self._is_held or (self.is_busy and not is_continuous)
        if session.installed_version is None or is_closed:
            room = 0
        drafts = []
        taken = session.take(
            room,
            group_size=self._group_size,
            max_rollouts=self._max_rollouts,
            now=self._clock(),
        )
        for draft in taken:
            self._freshen(draft)
            if draft.is_whole:
                # By somebody else, or by this worker before it was stopped.
                self._deliver(draft)
            elif self._admit(draft):
                drafts.append(draft)
        size = 1 if is_continuous else max(1, len(drafts))
        for start in range(0, len(drafts), size):
            self._begin(drafts[start : start + size])
        if not self.is_busy:
            # What is parked now is not continued soon.
            self._ship(is_pausing=True)

    def _freshen(self, draft: PartialGroup) -> None:
        """Decide what the tokens so far are worth under the present weights."""
        session = self._session
        installed, num_tokens = session.installed_version, draft.num_tokens
        assert installed is not None
        if not num_tokens:
            return
        step = max(session.learner_step, installed.step)
        oldest = draft.oldest_step
        result = apply_staleness_policy(
            draft.members,
            stale_tokens=self.rules.stale_tokens,
            max_age=self.rules.max_age,
            step=step,
            installed=installed,
            lineages=session.lineages,
            exact_version=draft.lease.exact_version,
        )
        draft.members = result.members
        counts = session.partials
        counts["resumed"] += 1
        counts["resumed_tokens"] += num_tokens
        counts["masked_tokens"] += result.num_masked
        counts["wasted_tokens"] += result.num_dropped
        counts["age_sum"] += 0 if oldest is None else max(0, step - oldest)

    def _begin(self, drafts: list[PartialGroup]) -> None:
        loop, places = asyncio.get_running_loop(), self._session.drafts

        def on_whole(draft: PartialGroup) -> None:
            if not self._has_ended():
                loop.call_soon_threadsafe(self._deliver, draft)

        call = EngineCall(
            drafts,
            num_awaited=math.ceil(len(drafts) / self.rules.over_submission),
            max_s=self.rules.ship_s,
            has_others=lambda: bool(places.queue or places.parked),
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
            self._refuse([draft.lease for draft in call.drafts], str(error))
            self._wake()
            return
        if self._has_ended():
            return
        session.tokens_sampled += sum(len(c.token_ids) for c in completions)
        for draft in call.stopped(completions):
            session.park(draft)
            session.partials["parked"] += 1
        self._calls.discard(call)
        self._ship()
        await self._save_if_due()
        self._wake()

    # --- out of the engine -----------------------------------------------------------------------

    def give_up(self) -> None:
        """Stop the calls of which no group is wanted any more."""
        for call in self._calls:
            if all(self._session.is_cancelled(draft.lease) for draft in call.drafts):
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
            drafts = decode_groups(data, run_id=self._session.broadcast.run_id)
        except RemoteProtocolError as error:
            self._log.warning("dropped %s: %s", self._path, error)
            return
        self._session.drafts.restore(drafts)
        if drafts:
            num_tokens = sum(draft.num_tokens for draft in drafts)
            self._log.info("found %d unfinished groups of %d tokens", len(drafts), num_tokens)

    async def _save_if_due(self) -> None:
        if self.rules.ship_s is not None and self._clock() >= self._saved_at + self.rules.ship_s:
            await self._save()

    async def _save(self) -> None:
        """Write what is unfinished; a disk that takes no more is told of and survived."""
        self._saved_at = self._clock()
        drafts = self._session.drafts.begun()
        data = encode_groups(self._session.broadcast.run_id, drafts)
        if data == self._saved or not (drafts or self._saved):
            return
        self._saved = data
        try:
            await self._file_pool.run(write_file, self._path, data)
        except OSError as error:
            self._session.counters.add("partials_unsaved")
            text = "cannot keep unfinished rollouts in %s: %s; a restart would sample them anew"
            self._log.warning(text, self._path, error)
