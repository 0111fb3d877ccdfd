"""Lies that a node of these tests tells, as its operator could have it do.

The product knows nothing of them: they are wrapped around a relay's transport, in a process that a
test starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

from echo.core.rollout import Group
from echo.net.zmq import ZmqTransport
from echo.wire.codec import decode_envelope, decode_group, decode_message, encode_group
from echo.wire.messages import LEARNER_ID, Chunk, Deliver

Frames = list[Any]


def install(lie: str) -> None:
    """Let this process tell a lie from now on."""
    LIES[lie]()


def relay_lies() -> None:
    """Send the chunks of the first version in the place of others, and give rewards of 1."""
    first: dict[int, Frames] = {}
    send = ZmqTransport.send

    @wraps(send)
    def sending(self: ZmqTransport, peer: str, frames: Any, **how: bool) -> bool:
        envelope = decode_envelope(frames)
        message = decode_message(envelope)
        if isinstance(message, Chunk) and message.version.step <= 1:
            first.setdefault(message.index, frames[1:])
        elif isinstance(message, Chunk):
            frames = [frames[0], *first.get(message.index, frames[1:])]
        elif isinstance(message, Deliver) and envelope.target == LEARNER_ID:
            frames = [frames[0], *encode_group(best(decode_group(*frames[1:])))]
        return send(self, peer, frames, **how)

    ZmqTransport.send = sending  # type: ignore[method-assign]


def best(group: Group) -> Group:
    """Return a group with rewards of 1."""
    rollouts = tuple(dataclasses.replace(each, reward=1.0) for each in group.rollouts)
    return dataclasses.replace(group, rollouts=rollouts)


LIES: dict[str, Callable[[], None]] = {"relay_lies": relay_lies}
