"""A relay of these tests that changes what passes through it, as its operator could have it do.

The product knows nothing of it: its transport is wrapped in a process that a test starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from echo.net.zmq import ZmqTransport
from echo.wire.codec import decode_envelope, decode_message
from echo.wire.messages import Chunk

Frames = list[Any]


def install(lie: str) -> None:
    """Let this process tell a lie from now on."""
    change, send = LIES[lie](), ZmqTransport.send

    @wraps(send)
    def sending(self: ZmqTransport, peer: str, frames: Frames, **how: bool) -> bool:
        return send(self, peer, change(list(frames)), **how)

    ZmqTransport.send = sending  # type: ignore[method-assign, assignment]


def replay_chunks() -> Callable[[Frames], Frames]:
    """Send the chunks of the first version that passed through in the place of all that follow."""
    first: dict[int, Frames] = {}

    def change(frames: Frames) -> Frames:
        envelope = decode_envelope(frames)
        message = None if envelope.target else decode_message(envelope)
        if not isinstance(message, Chunk):
            return frames
        if message.version.step <= 1:
            first.setdefault(message.index, frames[1:])
            return frames
        return [frames[0], *first.get(message.index, frames[1:])]

    return change


LIES = {lie.__name__: lie for lie in (replay_chunks,)}
