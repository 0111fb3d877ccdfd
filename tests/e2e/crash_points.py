"""Six points of a learner at which it kills itself, for the crash tests.

Such a kill is a real one (SIGKILL to itself, no cleanup, nothing flushed), only its moment is
chosen, so that the rare moments can be tested as reliably as the common ones. The product knows
nothing of them: they are wrapped around its ledger, its trainer and its transport.

Points, in the order in which a group and a step come by them:

    stored:GROUP          the group is on the disk, nobody has been told
    stepped:STEP          the optimizer step is made, the ledger does not know
    trained:STEP          the ledger knows, nothing was published
    published:STEP        the version, or the next one if that step is not published, is offered
    checkpoint:STEP       the checkpoint is written and not yet visible
    checkpointed:STEP     it is visible, and the ledger knows
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from typing import Any

from echo.core.rollout import Group
from echo.net.zmq import ZmqTransport
from echo.records.ledger import Ledger, LedgerQueue
from echo.train.trainer import Trainer
from echo.wire.codec import Frame, decode_envelope, decode_message
from echo.wire.messages import Announce

Test = Callable[..., object]
"""Whether a call is the one to die at; it gets the arguments of the call."""


def install(point: str) -> None:
    """Let this process die at a point such as "published:7"."""
    name, _, number = point.partition(":")
    POINTS[name](int(number))


def stored(group: int) -> None:
    written: set[int] = set()
    store = Ledger.store

    def remember(self: LedgerQueue, group: Group, header: Frame, arrays: Frame) -> None:
        store(self, group, header, arrays)
        written.add(group.group_id)

    Ledger.store = remember  # type: ignore[method-assign]
    # What is written while a sync runs may not be on the disk after it.
    die(Ledger, "sync", lambda: group in written)


def stepped(step: int) -> None:
    die(Ledger, "trained", lambda *_, consumed_at, **__: consumed_at == step - 1, before=True)


def trained(step: int) -> None:
    die(Ledger, "trained", lambda *_, consumed_at, **__: consumed_at == step - 1)


def published(step: int) -> None:
    def is_offer(_: str, frames: Any, **__: bool) -> bool:
        message = decode_message(decode_envelope(frames))
        return isinstance(message, Announce) and message.version.step >= step

    die(ZmqTransport, "send", is_offer)


def checkpoint(step: int) -> None:
    die(Trainer, "save_state", lambda directory: directory.name == f".step_{step:06d}.tmp")


def checkpointed(step: int) -> None:
    die(Ledger, "checkpointed", lambda **fields: fields["step"] == step)


POINTS: dict[str, Callable[[int], None]] = {
    point.__name__: point
    for point in (stored, stepped, trained, published, checkpoint, checkpointed)
}


def die(owner: type, name: str, is_reached: Test, *, before: bool = False) -> None:
    """Kill this process at the end of a method, or before it begins, in the call that is chosen."""
    method = getattr(owner, name)

    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        is_last = is_reached(*args, **named)
        result = None if is_last and before else method(self, *args, **named)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call)
