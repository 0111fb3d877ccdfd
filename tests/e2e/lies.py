"""Lies that a node of these tests tells, as its operator could have it do.

The product knows nothing of them: they are wrapped around a relay's transport, and around the role
of a worker, in a process that a test starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

from echo.core.rollout import Group
from echo.net.zmq import ZmqTransport
from echo.roles.worker import outcomes
from echo.wire.codec import decode_envelope, decode_group, decode_message, encode_group
from echo.wire.messages import LEARNER_ID, Chunk, Deliver

Frames = list[Any]
NATS = 3.0


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
            frames = [frames[0], *encode_group(changed(decode_group(*frames[1:]), reward=1.0))]
        return send(self, peer, frames, **how)

    ZmqTransport.send = sending  # type: ignore[method-assign]


def state_less() -> None:
    """Sample honestly, and state log-probabilities that are NATS less."""
    answer_to = outcomes.answer_to

    @wraps(answer_to)
    def lying(*lease: Any, **worker_id: Any) -> Group:
        return changed(answer_to(*lease, **worker_id), nats=NATS)

    outcomes.answer_to = lying


def changed(group: Group, *, nats: float = 0.0, reward: float | None = None) -> Group:
    """Return a group with other log-probabilities or rewards."""
    rollouts = tuple(
        dataclasses.replace(
            each,
            sampler_logprobs=each.sampler_logprobs - nats,
            reward=each.reward if reward is None else reward,
        )
        for each in group.rollouts
    )
    return dataclasses.replace(group, rollouts=rollouts)


LIES: dict[str, Callable[[], None]] = {lie.__name__: lie for lie in (relay_lies, state_less)}
