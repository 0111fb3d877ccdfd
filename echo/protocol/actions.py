"""What a session asks of the process around it.

The sessions of this package decide and never act: each method returns a list of these, and the
node (`runtime/node.py`) or a test carries them out in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from echo.errors import EchoError
from echo.protocol.codec import Frame
from echo.protocol.messages import Lease
from echo.protocol.parcel import DecodeBlock
from echo.protocol.writing import WriteChunk
from echo.rollout import Group, PolicyVersion


@dataclass(frozen=True, slots=True)
class Send:
    """Hand these frames to the transport; if it refuses them they are lost, which is allowed."""

    peer: str
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to `address` and report the new peer with the session's `dialled`."""

    address: str
    purpose: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the link to `peer`."""

    peer: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something the operator may want to read."""

    level: str
    """"info" or "warning"."""
    text: str
    topic: str = ""
    """Where many may follow: one a minute of each topic is told, with how many there were."""


@dataclass(frozen=True, slots=True)
class VersionArrived:
    """A version is complete and verified in the store; a worker may install it."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class Configure:
    """Build task and engine from what the learner said, then call the session's `configured`."""

    settings: dict[str, Any]
    assets: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class LeasesChanged:
    """New leases wait in the worker's queue."""


@dataclass(frozen=True, slots=True)
class LeaseCancelled:
    """Nobody waits any more for a group that the worker has begun."""

    group_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class RecordGrant:
    """Journal that a lease was granted, before the Grant that follows is sent."""

    lease: Lease
    worker_id: str
    installed: PolicyVersion | None
    copy_of: int | None = None
    """The attempt that it repeats on a faster worker."""


@dataclass(frozen=True, slots=True)
class RecordCancel:
    """Journal that a lease was ended because another worker was first with its group."""

    group_id: int
    attempt: int
    worker_id: str
    num_tokens: int
    """What it had sampled, as far as was known."""


@dataclass(frozen=True, slots=True)
class RecordRefusal:
    """Journal that the result of a lease was refused; its group is granted again."""

    group_id: int
    attempt: int
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StoreGroup:
    """Put this group on the disk, then call the session's `stored`."""

    group: Group
    header: Frame
    arrays: Frame


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """Journal that a group that was never accepted has come to an end, with its reason."""

    group_id: int
    reason: str
    worker_id: str = ""
    """The worker that could not finish it; empty where none was asked to."""
    cause: str = ""
    """What that worker says of it, with the traceback of the task's code in further lines."""


@dataclass(frozen=True, slots=True)
class Stop:
    """This node's work is over: cleanly, or with the error that the user must see."""

    reason: str
    error: EchoError | None = None


Work = DecodeBlock | WriteChunk
"""Something to be done in a thread, and then told to the session with its result (`worked`)."""

Action = (
    Send
    | Dial
    | HangUp
    | Note
    | VersionArrived
    | Work
    | Configure
    | LeasesChanged
    | LeaseCancelled
    | RecordGrant
    | RecordCancel
    | RecordRefusal
    | StoreGroup
    | RecordEnd
    | Stop
)
