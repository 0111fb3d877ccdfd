"""Where each lease of a worker is until its group is delivered, and in which order they go on.

    queue --take--> running --ended--> (outbox)
                     |   ^
                  park   take            parked groups go before fresh ones, oldest first
                     v   |
                     parked

A lease is in one of the three places until it is delivered, has failed, or is not wanted any more;
all of them are listed in each heartbeat, so the learner counts them all. What a place holds is
bounded by the number of leases that the learner grants.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo.core.rollout import PartialRollout, PolicyVersion
from echo.protocol.partials import Draft
from echo.wire.messages import Lease, LeaseState

Key = tuple[int, int]
"""(group id, attempt)."""


class Drafts:
    """The leases of a worker, with what has been sampled for them."""

    def __init__(self) -> None:
        """Start without leases."""
        self.queue: dict[Key, Lease] = {}
        """Not begun."""
        self.running: dict[Key, Draft] = {}
        """In the engine, or being scored."""
        self.parked: dict[Key, Draft] = {}
        """Begun, and waiting to be continued."""
        self._unwanted: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self.queue or key in self.running or key in self.parked

    def __len__(self) -> int:
        return len(self.queue) + len(self.running) + len(self.parked)

    def add(self, lease: Lease, members: Sequence[PartialRollout] = ()) -> None:
        """Take in a new lease, with what others have sampled for it."""
        key = lease.group_id, lease.attempt
        if members:
            self.parked[key] = Draft(lease, list(members), is_continued=True)
        else:
            self.queue[key] = lease

    def restore(self, drafts: Sequence[Draft]) -> None:
        """Take in what a former process of this worker has left."""
        self.parked.update((draft.key, draft) for draft in drafts if draft.key not in self)

    def take(
        self,
        max_groups: int,
        *,
        group_size: int,
        max_rollouts: int | None = None,
        now: float | None = None,
        installed: PolicyVersion | None = None,
    ) -> list[Draft]:
        """Move groups into the engine: what was begun first, oldest first; none is passed over.

        But those that want another version than `installed` stay where they are. A draft that does
        not have `group_size` members, such as one from before a change of the configuration, begins
        anew.

        Args:
            max_groups: take no more than these.
            group_size: rollouts of a group.
            max_rollouts: room for those that are to be sampled; None for any number.
            now: the present instant.
            installed: the version that will sample them.
        """
        drafts: list[Draft] = []
        waiting = {_key(lease) for lease in self.awaiting(installed) + self.outrun(installed)}
        keys = [*sorted(self.parked.keys() - waiting), *sorted(self.queue.keys() - waiting)]
        for key in keys[: max(0, max_groups)]:
            draft = self.parked.get(key) or Draft(self.queue[key], [])
            is_anew = len(draft.members) != group_size
            num_rollouts = group_size if is_anew else draft.num_unfinished
            if max_rollouts is not None:
                if num_rollouts > max_rollouts:
                    break
                max_rollouts -= num_rollouts
            if self.parked.pop(key, None) is None:
                del self.queue[key]
            else:
                draft.is_continued = True
            draft.began_at = now
            if is_anew:
                draft.members = [PartialRollout()] * group_size
            drafts.append(draft)
        self.running.update((draft.key, draft) for draft in drafts)
        return drafts

    def awaiting(self, installed: PolicyVersion | None) -> list[Lease]:
        """Return the leases here that want a newer version than the one that is installed."""
        return [
            lease
            for lease in self._outside()
            if (wanted := lease.exact_version or lease.min_version) is not None
            and (installed is None or installed < wanted)
        ]

    def outrun(self, installed: PolicyVersion | None) -> list[Lease]:
        """Return the leases here that want exactly a version that has been replaced."""
        return [
            lease
            for lease in self._outside()
            if lease.exact_version is not None
            and installed is not None
            and lease.exact_version < installed
        ]

    def _outside(self) -> list[Lease]:
        """Return the leases that are not in the engine."""
        return [*self.queue.values(), *(draft.lease for draft in self.parked.values())]

    def park(self, draft: Draft) -> bool:
        """Put a draft aside until there is room for it; return whether it is still wanted."""
        if self.running.pop(draft.key, None) is None:
            return False
        if draft.key in self._unwanted:
            self._unwanted.remove(draft.key)
            return False
        self.parked[draft.key] = draft
        return True

    def end(self, key: Key) -> bool:
        """Forget a draft that was in the engine; return whether its result is still wanted."""
        was_running = self.running.pop(key, None) is not None
        is_unwanted = key in self._unwanted
        self._unwanted.discard(key)
        return was_running and not is_unwanted

    def is_unwanted(self, key: Key) -> bool:
        """Return whether nobody waits any more for a draft in the engine."""
        return key in self._unwanted

    def revoke(self, key: Key) -> int:
        """Give up a lease that is not wanted any more; return how many tokens were in vain.

        One that is in the engine is given up when it leaves it.
        """
        if key in self.running:
            is_news = key not in self._unwanted
            self._unwanted.add(key)
            return self.running[key].num_tokens if is_news else 0
        self.queue.pop(key, None)
        draft = self.parked.pop(key, None)
        return 0 if draft is None else draft.num_tokens

    def begun(self) -> list[Draft]:
        """Return every draft with tokens that is not on its way to the learner, oldest first."""
        drafts = sorted((self.parked | self.running).items())
        return [draft for _, draft in drafts if draft.num_tokens]

    def take_due(self, *, interval_s: float, now: float) -> list[Draft]:
        """Return the parked drafts that have grown since they were shipped, and note it.

        Args:
            interval_s: seconds between two shipments of one draft.
            now: the present instant.
        """
        due = [
            draft
            for _, draft in sorted(self.parked.items())
            if draft.num_tokens > draft.num_shipped and now >= draft.shipped_at + interval_s
        ]
        for draft in due:
            draft.shipped_at, draft.num_shipped = now, draft.num_tokens
        return due

    def states(self, *, now: float = 0.0) -> list[LeaseState]:
        """Return the leases here as a heartbeat lists them, now."""
        waiting = dict.fromkeys(self.queue, 0)
        waiting |= {key: draft.num_progress for key, draft in self.parked.items()}
        running = {key: draft.num_progress for key, draft in self.running.items()}
        return [
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

    def _running_s(self, key: Key, now: float) -> float:
        began_at = self.running[key].began_at
        return 0.0 if began_at is None else max(0.0, now - began_at)


def _key(lease: Lease) -> Key:
    return lease.group_id, lease.attempt
