"""Records of the ledger that the scheduler of leases makes.

They are made where it is decided what becomes of a group, which knows no files.
`echo/records/ledger.py` has all others, and writes them.
"""

from __future__ import annotations

import msgspec

from echo.core.rollout import PolicyVersion


class Record(msgspec.Struct, kw_only=True, tag_field="kind", omit_defaults=True):
    """Something that happened."""

    at: float = 0.0
    """Unix seconds; set when it is appended without it."""


class Granted(Record, tag="granted"):
    """A group was leased to a worker."""

    group: int
    attempt: int
    worker: str
    version: PolicyVersion | None = None
    """The version that the worker had installed."""
    copy_of: int | None = None
    """The attempt that it repeats on a faster worker."""


class Cancelled(Record, tag="cancelled"):
    """A lease was ended, since another attempt was first."""

    group: int
    attempt: int
    worker: str
    tokens: int
    """Tokens that it had sampled, as far as was known."""


class Refused(Record, tag="refused"):
    """The result of a lease was refused; its group is granted again."""

    group: int
    attempt: int
    worker: str
    reason: str


class Discarded(Record, tag="discarded"):
    """A group ended untrained; this is final."""

    group: int
    reason: str
    step: int
