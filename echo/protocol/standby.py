"""Workers on standby: registered, in touch, and without work until they are needed.

A worker on standby keeps its control link and its heartbeats, so that it can be activated within
one message. It is granted nothing; what it has in hand it finishes and delivers. It gets no weights
either (`weights/topology/plan.py`): they would cost traffic, and the broadcast would take as long
as for all workers and not as long as for those that generate. Activated again it fetches, like a
late joiner, the cheapest of image, anchor and deltas, and is granted leases once it has them.

A worker knows that it stands by from its Plan, which then names no parents; the learner repeats the
Plan with each heartbeat until it is obeyed, so a lost one does no harm.
"""

from __future__ import annotations

from collections.abc import Collection

from echo.protocol.learner_session import LearnerSession
from echo.wire.actions import Action


def set_standby(session: LearnerSession, names: Collection[str], *, now: float) -> list[Action]:
    """Put exactly these workers on standby; return what is to be done where anything changes.

    Args:
        session: the learner's.
        names: node ids; of others than workers, and of workers that are gone, nothing is done.
        now: the present.
    """
    changed = False
    for member in session.roster.members("worker"):
        is_standby = member.node_id in names
        changed |= is_standby != member.is_standby
        member.is_standby = is_standby
    return [*session.replan(now), *session.grant(now=now)] if changed else []
