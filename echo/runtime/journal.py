"""The records that the learner's session asks for, as lines of the ledger."""

from __future__ import annotations

from echo.leases.scheduler import RecordCancel, RecordEnd, RecordGrant, RecordRefusal
from echo.records.ledger import Ledger

Record = RecordGrant | RecordCancel | RecordRefusal | RecordEnd


def record(ledger: Ledger, action: Record, *, step: int) -> None:
    """Write what happened to a lease or a group.

    Args:
        ledger: the journal.
        action: what to write.
        step: optimizer steps done.
    """
    match action:
        case RecordGrant():
            installed, lease = action.installed, action.lease
            version = None if installed is None else [installed.lineage, installed.step]
            copy_of = {} if action.copy_of is None else {"copy_of": action.copy_of}
            ledger.append(
                "granted",
                group=lease.group_id,
                attempt=lease.attempt,
                worker=action.worker_id,
                version=version,
                **copy_of,
            )
        case RecordCancel():
            ledger.append(
                "cancelled",
                group=action.group_id,
                attempt=action.attempt,
                worker=action.worker_id,
                tokens=action.num_tokens,
            )
        case RecordRefusal():
            ledger.append(
                "refused",
                group=action.group_id,
                attempt=action.attempt,
                worker=action.worker_id,
                reason=action.reason,
            )
        case RecordEnd():
            ledger.discarded(action.group_id, action.reason, step=step)
