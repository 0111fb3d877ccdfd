"""Partial rollouts as bytes: to the learner, along with a lease, and into a worker's own file.

Versions travel as runs, because hundreds of tokens in a row come from the same one; so a token
costs nine bytes. Everything is checked before anything is believed, as for finished groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from echo.core.bounds import MAX_MEMBERS, MAX_TOKENS, NumTokens, Step, Word
from echo.core.errors import RemoteProtocolError
from echo.core.rollout import PartialRollout
from echo.protocol.partials import Draft
from echo.wire.codec import DECODE_ERRORS, Frame
from echo.wire.messages import Lease

_HEADER_LENGTH_BYTES = 4
_SAVED_BYTES_PER_TOKEN = 4 + 4 + 1
"""int32 id, float32 log-prob, one byte of mask."""


class MemberHeader(msgspec.Struct, frozen=True, array_like=True):
    """Everything of a member except its arrays."""

    finish_reason: Word
    num_segments: Step
    spans: Annotated[tuple[tuple[Step, Step, NumTokens], ...], Meta(max_length=MAX_TOKENS)]
    """Runs of (lineage, step, tokens)."""


class SavedDraft(msgspec.Struct, frozen=True, array_like=True):
    """One draft in a worker's file."""

    lease: Lease
    members: bytes


class SavedDrafts(msgspec.Struct, frozen=True):
    """A worker's file of drafts."""

    run_id: str
    drafts: tuple[SavedDraft, ...]


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(
    Annotated[tuple[MemberHeader, ...], Meta(max_length=MAX_MEMBERS)]
)
_file_decoder = msgspec.msgpack.Decoder(SavedDrafts)


def encode_members(members: Sequence[PartialRollout]) -> bytes:
    """Return the members of a draft as one frame: header, then ids, log-probs and mask of each."""
    header = _encoder.encode([_header_of(member) for member in members])
    parts = [len(header).to_bytes(_HEADER_LENGTH_BYTES, "little"), header]
    for member in members:
        parts.append(member.token_ids.astype("<i4").tobytes())
        parts.append(member.sampler_logprobs.astype("<f4").tobytes())
        parts.append(member.completion_mask.astype("u1").tobytes())
    return b"".join(parts)


def _header_of(member: PartialRollout) -> MemberHeader:
    versions = member.policy_versions
    starts = np.flatnonzero((versions[1:] != versions[:-1]).any(axis=1)) + 1
    bounds = [0, *starts.tolist(), len(versions)] if len(versions) else []
    spans = tuple(
        (int(versions[start, 0]), int(versions[start, 1]), stop - start)
        for start, stop in itertools.pairwise(bounds)
    )
    return MemberHeader(member.finish_reason, member.num_segments, spans)


def decode_members(frame: Frame) -> list[PartialRollout]:
    """Read the members of a draft back; the arrays are copies.

    Raises:
        RemoteProtocolError: if sizes disagree or a field is out of range.
    """
    view = memoryview(frame)
    num_header_bytes = int.from_bytes(view[:_HEADER_LENGTH_BYTES], "little")
    offset = _HEADER_LENGTH_BYTES + num_header_bytes
    try:
        headers = _header_decoder.decode(view[_HEADER_LENGTH_BYTES:offset])
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a malformed header of partial rollouts: {error}") from error
    sizes = [_checked_size(header) for header in headers]
    expected = offset + _SAVED_BYTES_PER_TOKEN * sum(sizes)
    if len(view) != expected:
        raise RemoteProtocolError(
            f"partial rollouts of {len(view)} bytes where their header needs {expected}"
        )
    members = []
    for header, size in zip(headers, sizes, strict=True):
        members.append(_build_member(header, size, view, offset))
        offset += _SAVED_BYTES_PER_TOKEN * size
    return members


def _checked_size(header: MemberHeader) -> int:
    """Return the number of tokens of a member after checking what can be checked without them."""
    size = sum(count for _, _, count in header.spans)
    if size > MAX_TOKENS:
        raise RemoteProtocolError(f"partial rollout of {size} tokens; at most {MAX_TOKENS}")
    if header.finish_reason not in ("", "stop", "length") or (header.finish_reason and not size):
        raise RemoteProtocolError(
            f"partial rollout of {size} tokens that ended with {header.finish_reason!r}"
        )
    return size


def _build_member(header: MemberHeader, size: int, view: memoryview, offset: int) -> PartialRollout:
    ids = np.frombuffer(view, "<i4", size, offset)
    logprobs = np.frombuffer(view, "<f4", size, offset + 4 * size)
    mask = np.frombuffer(view, "u1", size, offset + 8 * size)
    counts = [count for _, _, count in header.spans]
    versions = np.array([span[:2] for span in header.spans], np.int32).reshape(-1, 2)
    return PartialRollout(
        token_ids=ids.astype(np.int32),
        sampler_logprobs=logprobs.astype(np.float32),
        policy_versions=np.repeat(versions, counts, axis=0),
        completion_mask=mask.astype(np.bool_),
        finish_reason=header.finish_reason,
        num_segments=header.num_segments,
    )


def encode_drafts(run_id: str, drafts: Sequence[Draft]) -> bytes:
    """Return a worker's file of drafts."""
    saved = tuple(SavedDraft(draft.lease, encode_members(draft.members)) for draft in drafts)
    return _encoder.encode(SavedDrafts(run_id, saved))


def decode_drafts(data: Frame, *, run_id: str) -> list[Draft]:
    """Read a worker's file of drafts; those of another run are none.

    Raises:
        RemoteProtocolError: if it is damaged.
    """
    try:
        saved = _file_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise RemoteProtocolError(f"a malformed file of partial rollouts: {error}") from error
    if saved.run_id != run_id:
        return []
    return [Draft(each.lease, decode_members(each.members)) for each in saved.drafts]
