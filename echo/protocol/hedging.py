"""Which running groups are worth a second copy on a faster worker.

Only workers with a free place that have made a group, and for which admission has none left, copy
anything, and only while the next batch is not complete: what they do costs nothing but power. A
group is copied where the copy, made from the start, should be done `factor` times sooner than the
original; the one that is expected last comes first. A group has one copy at most.

A copy has the seed of the original: where both sample from the same version it is the same text,
so that the first result to come is not, as of two different ones, the shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo.protocol.leases import LeaseRecord


@dataclass(frozen=True, slots=True)
class Running:
    """A group that one worker works on."""

    record: LeaseRecord
    done_at: float
    """When it is expected."""
    num_tokens: float
    """Expected length of its longest completion, in the end."""


@dataclass(slots=True)
class Helper:
    """A worker that would have nothing to do."""

    node_id: str
    speed: float
    """Tokens per second of one group."""
    num_places: int
    """Groups that it can begin at once."""


def copies(
    groups: Sequence[Running], helpers: Sequence[Helper], *, factor: float, now: float
) -> list[tuple[LeaseRecord, str]]:
    """Return which leases are to be copied, and to whom.

    Args:
        groups: with one lease each.
        helpers: they are changed.
        factor: how many times sooner the copy must be expected.
        now: the present instant.
    """
    fastest_first = sorted(helpers, key=lambda helper: (-helper.speed, helper.node_id))
    chosen: list[tuple[LeaseRecord, str]] = []
    for group in sorted(groups, key=lambda g: (-g.done_at, g.record.group_id)):
        helper = next((h for h in fastest_first if h.num_places), None)
        if helper is None:
            break
        is_own = helper.node_id == group.record.worker_id
        if is_own or group.done_at - now < factor * group.num_tokens / helper.speed:
            continue
        helper.num_places -= 1
        chosen.append((group.record, helper.node_id))
    return chosen
