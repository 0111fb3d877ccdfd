"""Encoding and decoding of messages; every bound is checked before a message is used.

The bounds are defined in `core/bounds.py`. This module checks the sizes of encoded and decoded
messages. Field types declare ranges of values, which msgspec's decoder checks.

The header frame is msgpack: [protocol version, source node, target node, message, hops, seal]. A
link message has an empty target and no seal (`seals.py`). The message itself is decoded in a second
step, so that another protocol version is not reported as a decoding error. Payload frames follow
the header, unchanged and not copied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from echo.core.bounds import (
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_MEMBERS,
    MAX_NAME_LENGTH,
    MAX_PAYLOAD_BYTES,
    MAX_TOKENS,
    Attempt,
    Finite,
    GroupId,
    NodeId,
    NumTokens,
    Word,
)
from echo.core.errors import LocalProtocolError, RemoteProtocolError
from echo.core.reward_parts import MAX_PARTS, PartName, find_name_fault
from echo.core.rollout import NO_OPINION, Group, Rollout
from echo.wire.messages import PROTOCOL_VERSION, UNSEALED, AnyMessage, Chunk, Message
from echo.wire.seals import Channel, Seal, Seals
from echo.wire.token_sets import SetBytes, bytes_of_sets, decode_all_sets, encode_all_sets

Frame = bytes | bytearray | memoryview

MAX_HOPS = 16
"""Largest number of relays between a node and the learner. A message that has passed more relays
runs in a circle.
"""
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for malformed bytes, including RecursionError for deep nesting."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header of a message. Every relay on the message's path reads the header."""

    protocol: Annotated[int, Meta(ge=0, le=1 << 31)]
    source: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    target: NodeId
    """The node id of the node to which a routed message is sent; empty for a link message."""
    body: msgspec.Raw
    num_hops: Annotated[int, Meta(ge=0, le=MAX_HOPS)] = 0
    """Number of relays that have forwarded the message."""
    seal: Seal | None = None
    """The sender's seal, which relays forward unchanged; None for a message without a seal."""


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_message_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(
    message: Message,
    payload: Sequence[Frame] = (),
    *,
    source: str,
    target: str = "",
    channel: Channel | None = None,
) -> list[Frame]:
    """Return the frames of a message: the header, then the unchanged payload frames.

    With a `channel`, the message is sealed, except kinds in UNSEALED.

    Raises:
        LocalProtocolError: if the frames are larger than nodes accept.
    """
    body, seal = _encoder.encode(message), None
    if channel is not None and not isinstance(message, UNSEALED):
        seal = channel.seal(source, target, body, payload)
    envelope = Envelope(PROTOCOL_VERSION, source, target, msgspec.Raw(body), seal=seal)
    frames = [_encoder.encode(envelope), *payload]
    fault = _size_fault(frames)
    if fault is not None:
        raise LocalProtocolError(f"{type(message).__name__} to {target or 'a neighbour'}: {fault}")
    return frames


def payload_bytes(payload: Sequence[Frame]) -> int:
    """Return the size of a message's payload frames in bytes."""
    return sum(frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in payload)


def _size_fault(frames: Sequence[Frame]) -> str | None:
    if len(frames[0]) > MAX_HEADER_BYTES:
        return f"a header of {len(frames[0])} bytes; at most {MAX_HEADER_BYTES} are accepted"
    if len(frames) > MAX_FRAMES:
        return f"{len(frames)} frames; at most {MAX_FRAMES} are accepted"
    if (num_bytes := payload_bytes(frames[1:])) > MAX_PAYLOAD_BYTES:
        return f"a payload of {num_bytes} bytes; at most {MAX_PAYLOAD_BYTES} are accepted"
    return None


def decode_envelope(frames: Sequence[Frame]) -> Envelope:
    """Decode the header frame of a message, without decoding the message itself.

    Raises:
        RemoteProtocolError: if the header is missing or malformed, or the message is too large.
    """
    if not frames:
        raise RemoteProtocolError("a message without a header frame")
    fault = _size_fault(frames)
    if fault is not None:
        raise RemoteProtocolError(fault)
    try:
        return _envelope_decoder.decode(frames[0])
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a header that is not an envelope: {error}") from error


def open_seal(seals: Seals, envelope: Envelope, payload: Sequence[Frame]) -> bool:
    """Verify the seal of a message; return whether the message belongs to a current channel.

    Raises:
        ForgedError: if the message was forged, changed or replayed; see `Seals.open`.
    """
    body = memoryview(envelope.body)
    return seals.open(envelope.seal, envelope.source, envelope.target, body, payload)


def forwarded(envelope: Envelope, payload: Sequence[Frame]) -> list[Frame]:
    """Return the frames that a relay forwards: the same message with one more hop.

    Raises:
        RemoteProtocolError: if the message runs in a circle of relays, or exceeds a size limit.
    """
    if envelope.num_hops >= MAX_HOPS:
        raise RemoteProtocolError(
            f"a message from {envelope.source} to {envelope.target} after {MAX_HOPS} relays; check "
            "that no relays are configured to connect to each other in a circle"
        )
    onward = msgspec.structs.replace(envelope, num_hops=envelope.num_hops + 1)
    frames = [_encoder.encode(onward), *payload]
    fault = _size_fault(frames)
    if fault is not None:
        raise RemoteProtocolError(f"a message from {envelope.source}: {fault}")
    return frames


def other_protocol(envelope: Envelope) -> str | None:
    """Return a text for the operator if the sender's protocol version is not this node's.

    Return None if the versions are equal.
    """
    if envelope.protocol == PROTOCOL_VERSION:
        return None
    return (
        f"{envelope.source} speaks protocol version {envelope.protocol}, this node "
        f"{PROTOCOL_VERSION}; install the same release of echo-rl on both"
    )


def decode_message(envelope: Envelope) -> Any:
    """Return the message that an envelope contains.

    Raises:
        RemoteProtocolError: if the sender has another protocol version, or the message is
            malformed.
    """
    fault = other_protocol(envelope)
    if fault is not None:
        raise RemoteProtocolError(fault)
    try:
        return _message_decoder.decode(envelope.body)
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a malformed message from {envelope.source}: {error}") from error


class _Tag(msgspec.Struct):
    type: Word = "message of no kind"


_tag_decoder = msgspec.msgpack.Decoder(_Tag)


def describe(frames: Sequence[Frame]) -> tuple[str, str, str]:
    """Return (source, target, kind) of a message, for logs.

    Source and target are empty if the envelope cannot be read.
    """
    try:
        envelope = decode_envelope(frames)
        return envelope.source, envelope.target, _tag_decoder.decode(envelope.body).type
    except (RemoteProtocolError, *DECODE_ERRORS):
        return "", "", _Tag().type


def is_public(frames: Sequence[Frame]) -> bool:
    """Return whether a message may arrive unencrypted: only a Chunk from a neighbour may.

    Chunks are safe, because each chunk is compared with a signed hash before it is stored.
    """
    source, target, kind = describe(frames)
    return bool(source) and not target and kind == Chunk.__name__


# --- groups --------------------------------------------------------------------------------------


NumBranches = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


RewardParts = Annotated[dict[PartName, Finite], Meta(max_length=MAX_PARTS)]


class GroupHeader(msgspec.Struct, frozen=True):
    """The fields of a group, without its arrays."""

    group_id: GroupId
    attempt: Attempt
    worker_id: NodeId
    num_prompt_tokens: NumTokens
    num_tokens: Annotated[tuple[NumTokens, ...], Meta(max_length=MAX_MEMBERS)]
    rewards: Annotated[tuple[Finite | None, ...], Meta(max_length=MAX_MEMBERS)]
    """The reward of each rollout; None for a rollout that the task could not score."""
    finish_reasons: Annotated[tuple[Word, ...], Meta(max_length=MAX_MEMBERS)]
    set_bytes: Annotated[tuple[SetBytes, ...], Meta(max_length=MAX_MEMBERS)] = ()
    """For each rollout, the sizes of its token sets in bytes (wire/token_sets.py); empty if no
    rollout has sets.
    """
    num_branches: Annotated[tuple[NumBranches, ...], Meta(max_length=MAX_MEMBERS)] = ()
    """For each rollout, the number of its branches (core/chains.py); empty if no rollout has
    branches.
    """
    reward_parts: Annotated[tuple[RewardParts, ...], Meta(max_length=MAX_MEMBERS)] = ()
    """For each rollout: name -> part of the reward; empty if no reward has parts."""


_header_decoder = msgspec.msgpack.Decoder(GroupHeader)
BYTES_PER_TOKEN = 4 + 4 + 8 + 1
"""Size of a token in bytes: int32 id, float32 log-prob, two int32 of version, one byte of mask."""
BYTES_PER_BRANCH = 4 + 4
"""Size of a branch in bytes: two int32."""
MAX_ARRAY_BYTES = 60 << 20
"""Largest size of a group's arrays, in bytes. It leaves space for the group's header in the same
message.
"""


def encode_group(group: Group) -> tuple[bytes, bytes]:
    """Return a group as two frames, header and arrays.

    The frames are used on the network and on the learner's disk. The arrays are concatenated,
    little-endian, in this order: the prompt's ids; for each rollout the token ids, log-probs,
    versions, mask and branches; for each rollout the token sets (wire/token_sets.py).
    """
    num_branches = tuple(len(rollout.branches) for rollout in group.rollouts)
    reward_parts = tuple(dict(rollout.reward_parts) for rollout in group.rollouts)
    num_bytes = 4 * len(group.prompt_ids) + BYTES_PER_TOKEN * group.num_tokens
    num_bytes += BYTES_PER_BRANCH * sum(num_branches)
    blocks = encode_all_sets(group.rollouts, max_bytes=MAX_ARRAY_BYTES - num_bytes)
    header = GroupHeader(
        group_id=group.group_id,
        attempt=group.attempt,
        worker_id=group.worker_id,
        num_prompt_tokens=len(group.prompt_ids),
        num_tokens=tuple(rollout.num_tokens for rollout in group.rollouts),
        rewards=tuple(
            None if math.isnan(rollout.reward) else rollout.reward for rollout in group.rollouts
        ),
        finish_reasons=tuple(rollout.finish_reason for rollout in group.rollouts),
        set_bytes=bytes_of_sets(blocks),
        num_branches=num_branches if any(num_branches) else (),
        reward_parts=reward_parts if any(reward_parts) else (),
    )
    parts = [group.prompt_ids.astype("<i4").tobytes()]
    for rollout in group.rollouts:
        parts.append(rollout.token_ids.astype("<i4").tobytes())
        parts.append(rollout.sampler_logprobs.astype("<f4").tobytes())
        parts.append(rollout.policy_versions.astype("<i4").tobytes())
        parts.append(rollout.completion_mask.astype("u1").tobytes())
        parts.append(rollout.branches.astype("<i4").tobytes())
    parts += itertools.chain(*blocks)
    return _encoder.encode(header), b"".join(parts)


def decode_group(header_frame: Frame, arrays_frame: Frame) -> Group:
    """Decode a group from its two frames.

    The group's arrays are copies of the frames.

    Raises:
        RemoteProtocolError: if the sizes of the arrays disagree with the header, or a field is out
            of range.
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
    if header.set_bytes and len(header.set_bytes) != num_rollouts:
        raise RemoteProtocolError(f"group {header.group_id}: lengths of token sets disagree")
    if header.num_branches and len(header.num_branches) != num_rollouts:
        raise RemoteProtocolError(f"group {header.group_id}: numbers of branches disagree")
    if header.reward_parts and len(header.reward_parts) != num_rollouts:
        raise RemoteProtocolError(f"group {header.group_id}: numbers of reward parts disagree")
    for parts in filter(None, header.reward_parts):
        if fault := find_name_fault(parts):
            raise RemoteProtocolError(f"group {header.group_id}: {fault}")
    expected = 4 * header.num_prompt_tokens + _rollout_bytes(header)
    expected += sum(map(sum, header.set_bytes))
    if len(arrays_frame) != expected:
        raise RemoteProtocolError(
            f"group {header.group_id}: {len(arrays_frame)} bytes of arrays where its header needs "
            f"{expected}"
        )
    try:
        return _build_group(header, memoryview(arrays_frame))
    except ValueError as error:
        raise RemoteProtocolError(f"group {header.group_id}: {error}") from error


def _rollout_bytes(header: GroupHeader) -> int:
    """Return the size in bytes of all rollouts' arrays, without token sets."""
    return BYTES_PER_TOKEN * sum(header.num_tokens) + BYTES_PER_BRANCH * sum(header.num_branches)


def _build_group(header: GroupHeader, arrays: memoryview) -> Group:
    offset = 0

    def take(dtype: str, count: int) -> npt.NDArray[Any]:
        nonlocal offset
        values = np.frombuffer(arrays, dtype=dtype, count=count, offset=offset)
        offset += values.nbytes
        return values

    prompt_ids = take("<i4", header.num_prompt_tokens).astype(np.int32)
    start = offset + _rollout_bytes(header)
    num_branches = header.num_branches or (0,) * len(header.num_tokens)
    all_parts: Sequence[RewardParts] = header.reward_parts or ({},) * len(header.num_tokens)
    all_sets = decode_all_sets(arrays[start:], header.num_tokens, header.set_bytes)
    rollouts = []
    for num_tokens, number, reward, parts, finish_reason, sets in zip(
        header.num_tokens,
        num_branches,
        header.rewards,
        all_parts,
        header.finish_reasons,
        all_sets,
        strict=True,
    ):
        rollouts.append(
            Rollout(
                token_ids=take("<i4", num_tokens).astype(np.int32),
                sampler_logprobs=take("<f4", num_tokens).astype(np.float32),
                policy_versions=take("<i4", 2 * num_tokens).astype(np.int32).reshape(num_tokens, 2),
                completion_mask=take("u1", num_tokens).astype(np.bool_),
                branches=take("<i4", 2 * number).astype(np.int32).reshape(number, 2),
                reward=NO_OPINION if reward is None else reward,
                reward_parts=parts,
                finish_reason=finish_reason,
                **sets,
            )
        )
    return Group(
        group_id=header.group_id,
        attempt=header.attempt,
        worker_id=header.worker_id,
        prompt_ids=prompt_ids,
        rollouts=tuple(rollouts),
    )
