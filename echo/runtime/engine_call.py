"""One call of the engine: what it is asked for, what has come of it, and when it is to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion, Request
from echo.leases.partials import PartialGroup
from echo.wire.messages import Lease


def exact_version_of(leases: Iterable[Lease]) -> PolicyVersion | None:
    """Return the version that some of these leases want, which must be the only one; or None."""
    return next((version for lease in leases if (version := lease.exact_version)), None)


class EngineCall:
    """The groups of one call of the engine; its methods are called from the engine's thread."""

    def __init__(
        self,
        drafts: Sequence[PartialGroup],
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
            drafts: at least one of each one's members is unfinished.
            num_awaited: whole groups after which the call ends if others wait for the room.
            max_s: seconds after which it ends; None for never.
            has_others: whether others wait.
            has_ended: whether nobody wants any of this any more.
            on_whole: told each group that has come to its end.
            clock: the loop's, seconds.
        """
        self.drafts = list(drafts)
        self.num_tokens = 0
        self.is_recalled = False
        self._members: dict[str, tuple[PartialGroup, int]] = {}
        self._num_awaited = num_awaited
        self._num_whole = 0
        self.exact_version = exact_version_of(draft.lease for draft in drafts)
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
        for draft in self.drafts:
            prompt_ids = np.array(draft.lease.prompt_ids, dtype=np.int32)
            for index, member in enumerate(draft.members):
                if member.is_finished:
                    continue
                request = Request(
                    request_id=f"{draft.lease.group_id}.{draft.lease.attempt}.{index}",
                    prompt_ids=prompt_ids,
                    seed=draft.seed_of(index),
                    prefix_ids=member.token_ids,
                )
                self._members[request.request_id] = draft, index
                requests.append(request)
        return requests

    def on_tokens(self, number: int) -> None:
        """Count tokens, as a sign of life of every group in the call."""
        self.num_tokens += number
        for draft in self.drafts:
            draft.num_progress += number

    def on_completion(self, completion: Completion) -> None:
        """Take a rollout that has come to its end, and tell of its group if it was the last."""
        draft = self._extend(completion)
        if draft.is_whole:
            self._num_whole += 1
            self._on_whole(draft)

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
        return [draft for draft in self.drafts if not draft.is_whole]

    def _extend(self, completion: Completion) -> PartialGroup:
        draft, index = self._members[completion.request_id]
        draft.members[index] = draft.members[index].extended(
            completion.token_ids,
            completion.logprobs,
            completion.policy_versions,
            finish_reason=completion.finish_reason,
        )
        return draft
