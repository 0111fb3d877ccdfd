"""Defines the ledger records that the lease scheduler makes.

`echo/records/ledger.py` defines the other records, and writes all records to the file.
"""

from __future__ import annotations

import msgspec

from echo.core.rollout import PolicyVersion


class Record(msgspec.Struct, kw_only=True, tag_field="kind", omit_defaults=True):
    """An event of the run, as the ledger stores it."""

    at: float = 0.0
    """Unix time of the event in seconds. If it is 0, `append` replaces it by the present time."""


class Granted(Record, tag="granted"):
    """A group was leased to a worker."""

    group: int
    attempt: int
    worker: str
    version: PolicyVersion | None = None
    """The version that the worker had installed when the lease was granted."""
    copy_of: int | None = None
    """The number of the attempt that this lease repeats on a faster worker. None if it repeats
    none."""


class Cancelled(Record, tag="cancelled"):
    """A lease was cancelled because another attempt at its group was accepted first."""

    group: int
    attempt: int
    worker: str
    tokens: int
    """Number of tokens that the worker had sampled for this lease, according to its last report."""


class Refused(Record, tag="refused"):
    """The result of a lease was refused. The lease's group is granted again."""

    group: int
    attempt: int
    worker: str
    reason: str


class Discarded(Record, tag="discarded"):
    """A group ended without being trained on, and it will not be granted again."""

    group: int
    reason: str
    step: int
