"""Bytes to messages and back, with every bound checked before anything is believed.

The header frame is msgpack: [protocol version, source node, target node, message, hops]. A link
message has an empty target. The message itself is decoded in a second step, so that a node of
another protocol version is recognised and told so instead of failing to decode. Payload frames
follow unchanged and uncopied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from echo.errors import RemoteProtocolError
from echo.protocol.messages import PROTOCOL_VERSION, AnyMessage, Message
from echo.rollout import Group, Rollout

Frame = bytes | bytearray | memoryview

MAX_HEADER_BYTES = 8 << 20
"""Largest header accepted; a Welcome with its settings is the largest honest one by far."""
MAX_NODE_ID_LENGTH = 64
MAX_HOPS = 16
"""Relays between a node and the learner at most; more can only be a circle."""
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on bytes that are not what they should be; endless nesting is the last."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What a relay reads of a message."""

    protocol: int
    source: str
    target: str
    """Node id for a routed message, empty for a link message."""
    body: msgspec.Raw
    num_hops: int = 0
    """Relays that have forwarded it."""


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_message_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(
    message: Message, payload: Sequence[Frame] = (), *, source: str, target: str = ""
) -> list[Frame]:
    """Return the frames of `message`: header first, then the payload frames as they are."""
    body = msgspec.Raw(_encoder.encode(message))
    return [_encoder.encode(Envelope(PROTOCOL_VERSION, source, target, body)), *payload]


def decode_envelope(frames: Sequence[Frame]) -> Envelope:
    """Read who sent a message to whom, without looking inside.

    Raises:
        RemoteProtocolError: if the header is missing, too large or malformed.
    """
    if not frames:
        raise RemoteProtocolError("a message without a header frame")
    header = frames[0]
    if len(header) > MAX_HEADER_BYTES:
        raise RemoteProtocolError(
            f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are accepted"
        )
    try:
        envelope = _envelope_decoder.decode(header)
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a header that is not an envelope: {error}") from error
    if not envelope.source or max(len(envelope.source), len(envelope.target)) > MAX_NODE_ID_LENGTH:
        raise RemoteProtocolError("an envelope whose node ids are empty or too long")
    return envelope


def forwarded(envelope: Envelope, payload: Sequence[Frame]) -> list[Frame]:
    """Return the frames that a relay passes on: the same message with one hop more.

    Raises:
        RemoteProtocolError: if relays that dial each other have it going round.
    """
    if envelope.num_hops >= MAX_HOPS:
        raise RemoteProtocolError(
            f"a message from {envelope.source} to {envelope.target} after {MAX_HOPS} relays; check "
            "that no relays are configured to connect to each other in a circle"
        )
    onward = msgspec.structs.replace(envelope, num_hops=envelope.num_hops + 1)
    return [_encoder.encode(onward), *payload]


def other_protocol(envelope: Envelope) -> str | None:
    """Return what to tell the operator if the sender speaks another protocol version, or None."""
    if envelope.protocol == PROTOCOL_VERSION:
        return None
    return (
        f"{envelope.source} speaks protocol version {envelope.protocol}, this node "
        f"{PROTOCOL_VERSION}; install the same release of echo-rl on both"
    )


def decode_message(envelope: Envelope) -> Any:
    """Read the message inside an envelope.

    Raises:
        RemoteProtocolError: if the sender speaks another protocol version or the body is malformed.
    """
    fault = other_protocol(envelope)
    if fault is not None:
        raise RemoteProtocolError(fault)
    try:
        return _message_decoder.decode(envelope.body)
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a malformed message from {envelope.source}: {error}") from error


# --- groups --------------------------------------------------------------------------------------


class GroupHeader(msgspec.Struct, frozen=True):
    """Everything of a group except its arrays."""

    group_id: int
    attempt: int
    worker_id: str
    num_prompt_tokens: int
    num_tokens: tuple[int, ...]
    rewards: tuple[float, ...]
    finish_reasons: tuple[str, ...]


_header_decoder = msgspec.msgpack.Decoder(GroupHeader)
_BYTES_PER_TOKEN = 4 + 4 + 8 + 1
"""int32 id, float32 log-prob, two int32 of the version, one byte of mask."""


def encode_group(group: Group) -> tuple[bytes, bytes]:
    """Return a group as (header, arrays); the same bytes travel and lie on the learner's disk.

    Arrays, little-endian, one after the other: prompt ids, then for each rollout token ids,
    log-probs, versions and mask.
    """
    header = GroupHeader(
        group_id=group.group_id,
        attempt=group.attempt,
        worker_id=group.worker_id,
        num_prompt_tokens=len(group.prompt_ids),
        num_tokens=tuple(rollout.num_tokens for rollout in group.rollouts),
        rewards=tuple(rollout.reward for rollout in group.rollouts),
        finish_reasons=tuple(rollout.finish_reason for rollout in group.rollouts),
    )
    parts = [group.prompt_ids.astype("<i4").tobytes()]
    for rollout in group.rollouts:
        parts.append(rollout.token_ids.astype("<i4").tobytes())
        parts.append(rollout.sampler_logprobs.astype("<f4").tobytes())
        parts.append(rollout.policy_versions.astype("<i4").tobytes())
        parts.append(rollout.completion_mask.astype("u1").tobytes())
    return _encoder.encode(header), b"".join(parts)


def decode_group(header_frame: Frame, arrays_frame: Frame) -> Group:
    """Read a group back; the arrays are copies, so the frames may be released.

    Raises:
        RemoteProtocolError: if sizes disagree, a reward is not finite, or a field is out of range.
    """
    try:
        header = _header_decoder.decode(header_frame)
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a malformed group header: {error}") from error
    num_rollouts = len(header.num_tokens)
    if not num_rollouts or not (num_rollouts == len(header.rewards) == len(header.finish_reasons)):
        raise RemoteProtocolError(
            f"group {header.group_id}: lengths, rewards and finish reasons disagree"
        )
    if header.num_prompt_tokens < 1 or min(header.num_tokens) < 1:
        raise RemoteProtocolError(f"group {header.group_id}: an empty prompt or completion")
    if not all(math.isfinite(reward) for reward in header.rewards):
        raise RemoteProtocolError(f"group {header.group_id}: a reward that is not finite")
    expected = 4 * header.num_prompt_tokens + _BYTES_PER_TOKEN * sum(header.num_tokens)
    if len(arrays_frame) != expected:
        raise RemoteProtocolError(
            f"group {header.group_id}: {len(arrays_frame)} bytes of arrays where its header needs "
            f"{expected}"
        )
    try:
        return _build_group(header, memoryview(arrays_frame))
    except ValueError as error:
        raise RemoteProtocolError(f"group {header.group_id}: {error}") from error


def _build_group(header: GroupHeader, arrays: memoryview) -> Group:
    offset = 0

    def take(dtype: str, count: int) -> npt.NDArray[Any]:
        nonlocal offset
        values = np.frombuffer(arrays, dtype=dtype, count=count, offset=offset)
        offset += values.nbytes
        return values

    prompt_ids = take("<i4", header.num_prompt_tokens).astype(np.int32)
    rollouts = []
    for num_tokens, reward, finish_reason in zip(
        header.num_tokens, header.rewards, header.finish_reasons, strict=True
    ):
        rollouts.append(
            Rollout(
                token_ids=take("<i4", num_tokens).astype(np.int32),
                sampler_logprobs=take("<f4", num_tokens).astype(np.float32),
                policy_versions=take("<i4", 2 * num_tokens).astype(np.int32).reshape(num_tokens, 2),
                completion_mask=take("u1", num_tokens).astype(np.bool_),
                reward=reward,
                finish_reason=finish_reason,
            )
        )
    return Group(
        group_id=header.group_id,
        attempt=header.attempt,
        worker_id=header.worker_id,
        prompt_ids=prompt_ids,
        rollouts=tuple(rollouts),
    )
