"""Values of an event log: what is kept of arguments and of outcomes.

A replay has each argument back with its type. What no role looks at is thinned out:

* a chunk is its length and hash, an image its length;
* sampled ids and log-probabilities are as many numbers in the same range, so that each check of
  them ends as it did; versions, masks and rewards beside them are whole;
* a private key is not written at all: the role asks for signatures, and the log has them.

What both sides have is referred to: a part of the role by its name, and what the role has handed
out by where it lay in memory, which until it comes back nothing else can.

An outcome is the kind of each action and a hash of its content.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec.structs import replace

from echo.core.errors import DataError, EchoError, RemoteProtocolError
from echo.leases.partials import (
    PartialGroup,
    SavedPartialGroups,
    decode_continuations,
    decode_members,
    encode_continuations,
    encode_members,
)
from echo.roles.worker import EngineCall
from echo.weights.manifest import SignedManifest, decode_table
from echo.weights.store import EncodedVersion, allocate
from echo.wire.actions import Action, Send, Work
from echo.wire.codec import DECODE_ERRORS, Frame, decode_group, describe, encode_group

SAMPLED = ("token_ids", "sampler_logprobs")
"""Arrays of which only number and range matter."""
BULK = {"image", "storage", "payload"}
"""Arguments whose bytes no role looks at."""
DIGEST_BYTES = 6


@dataclasses.dataclass(frozen=True)
class UnseenFrame:
    """A frame of which only length and hash are known."""

    num_bytes: int
    digest: bytes

    def __len__(self) -> int:
        return self.num_bytes


class Outside:
    """Something that a role asks, and that is not recorded itself."""

    def __init__(self, ask: Callable[..., Any], traits: Iterable[Any]) -> None:
        """Take who answers a question with a name and arguments, and a version store's traits."""
        self._ask = ask
        self.may_block, self.may_patch = traits

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._ask, name)


# --- thinning -------------------------------------------------------------------------------------


def thin(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return as many values in the same range: what a check finds in one it finds in the other."""
    if values.size < 2:
        return values
    thinned = np.full_like(values, values.min())
    thinned[-1] = values.max()
    return thinned


def _thin_each(rollouts: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        dataclasses.replace(rollout, **{name: thin(getattr(rollout, name)) for name in SAMPLED})
        for rollout in rollouts
    )


def thin_frames(frames: Sequence[Frame]) -> list[Any]:
    """Return a message with what is kept of its payload; what is malformed is kept as it is."""
    kind = describe(frames)[2]
    try:
        if kind == "Chunk":
            return [frames[0], *(UnseenFrame(len(f), blake3(f).digest()) for f in frames[1:])]
        if kind == "Deliver" and len(frames) == 3:
            group = decode_group(frames[1], frames[2])
            thinned = dataclasses.replace(group, rollouts=_thin_each(group.rollouts))
            return [*frames[:2], encode_group(thinned)[1]]
        if kind == "Partial" and len(frames) == 2:
            return [frames[0], encode_members(_thin_each(decode_members(frames[1])))]
        if kind == "Grant" and len(frames) == 2:
            begun = decode_continuations(frames[1])
            continued = [encode_members(_thin_each(each)) if each else b"" for each in begun]
            return [frames[0], encode_continuations(continued)]
    except RemoteProtocolError:
        pass
    return [bytes(frame) for frame in frames]


def thin_saved(data: Frame) -> bytes:
    """Return a worker's file of unfinished groups likewise."""
    try:
        saved = msgspec.msgpack.decode(data, type=SavedPartialGroups)
        partials = [
            replace(each, members=encode_members(_thin_each(decode_members(each.members))))
            for each in saved.partials
        ]
    except (RemoteProtocolError, *DECODE_ERRORS):
        return bytes(data)
    return msgspec.msgpack.encode(replace(saved, partials=tuple(partials)))


# --- arguments ------------------------------------------------------------------------------------


class Values:
    """Packs and unpacks the values of one log."""

    def __init__(self, answer: Callable[..., Any] = lambda name, *arguments: None) -> None:
        """Know nothing yet; in a replay `answer` answers for what lies outside."""
        self.names: dict[int, str] = {}
        """Name of each part of the role, by where it lies; filled by who records."""
        self.known: dict[int | str, Any] = {}
        """What the log refers to; filled by who replays."""
        self._makers: dict[str, Callable[[Any], Any]] = {
            "": self.known.__getitem__,
            "tuple": tuple,
            "set": set,
            "bytearray": bytearray,
            "memoryview": allocate,
            "array": lambda parts: np.frombuffer(parts[2], parts[0]).reshape(parts[1]),
            "key": Ed25519PublicKey.from_public_bytes,
            "encoded": lambda parts: _remake(*parts),
            "outside": lambda traits: Outside(answer, traits),
        }
        self.decoder = msgspec.msgpack.Decoder(ext_hook=self._make)
        """Reads what was packed and encoded."""

    def pack(self, value: Any, field: str = "") -> Any:
        """Return a value as msgpack has it; what it has not, as its maker and of what to make it.

        Raises:
            TypeError: if it cannot be made again.
        """
        if field == "frames":
            value = thin_frames(value)
        elif field == "saved":
            value = thin_saved(value)
        elif field in SAMPLED and isinstance(value, np.ndarray):
            value = thin(value)
        elif field in BULK and isinstance(value, bytes | bytearray):
            value = memoryview(value)
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if type(value) is list:
            return [self.pack(each) for each in value]
        if type(value) is dict:
            return {self.pack(key): self.pack(each) for key, each in value.items()}
        return msgspec.msgpack.Ext(0, msgspec.msgpack.encode(self._parts(value)))

    def pack_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Pack arguments of a call, or fields of a record, by name."""
        return {name: self.pack(value, name) for name, value in fields.items()}

    def _parts(self, value: Any) -> tuple[str, Any]:
        """Return what makes a value, and of what."""
        if id(value) in self.names:
            return "", self.names[id(value)]
        match value:
            case Work() | EngineCall() | PartialGroup():
                return "", id(value)
            case tuple() | set() | bytearray() if type(value) in (tuple, set, bytearray):
                return type(value).__name__, self.pack(list(value))
            case memoryview():
                return "memoryview", value.nbytes
            case np.ndarray():
                return "array", [value.dtype.str, value.shape, value.tobytes()]
            case Ed25519PublicKey():
                return "key", value.public_bytes_raw()
            case EncodedVersion():
                parts = [value.version, value.form, value.frames, value.has_chunk]
                return "encoded", self.pack(parts)
            case Outside():
                return "outside", [value.may_block, value.may_patch]
            case EchoError():
                return _path_of(value), [str(value)]
        return _path_of(value), self.pack_fields(_fields_of(value))

    def _make(self, _: int, data: memoryview) -> Any:
        maker, parts = self.decoder.decode(data)
        if maker in self._makers:
            return self._makers[maker](parts)
        kind = class_at(maker)
        return kind(*parts) if isinstance(parts, list) else kind(**parts)


def _fields_of(record: Any) -> dict[str, Any]:
    """Return what a record is made of, by name; a TypeError if it is none."""
    if isinstance(record, msgspec.Struct):
        return msgspec.structs.asdict(record)
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.init}


def _path_of(record: Any) -> str:
    return f"{type(record).__module__}:{type(record).__qualname__}"


def class_at(path: str) -> Any:
    """Return a class of Echo's records or errors.

    Raises:
        DataError: if it is neither: a file must not choose what is called.
    """
    module, _, name = path.partition(":")
    kind = getattr(sys.modules.get(module), name, None) if module.startswith("echo.") else None
    if isinstance(kind, type) and (
        dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct | EchoError)
    ):
        return kind
    raise DataError(f"a value of the unknown class {path}")


def _remake(version: Any, form: Any, frames: list[bytes], has_chunk: bytearray) -> EncodedVersion:
    """Return a keyframe that is resumed; its tables were verified when they were read."""
    encoded = EncodedVersion(version, form)
    for frame in frames:
        signed = msgspec.msgpack.decode(frame, type=SignedManifest)
        encoded.add(decode_table(signed.body), frame)
    encoded.has_chunk, encoded.num_held = has_chunk, sum(has_chunk)
    return encoded


# --- outcomes -------------------------------------------------------------------------------------


def outcomes(result: Any) -> list[str]:
    """Return kind and hash of each action, or of another result."""
    return [_describe(action) for action in actions_of(result)]


def actions_of(result: Any) -> list[Any]:
    """Return a result as a list."""
    return result if isinstance(result, list) else [] if result is None else [result]


def handed_out(result: Any) -> list[Any]:
    """Return what actions hand out, and the role is told of again."""
    parts = [
        part
        for action in actions_of(result)
        for part in (action, getattr(action, "call", None), getattr(action, "group", None))
        if isinstance(part, Work | EngineCall | PartialGroup)
    ]
    return parts + [group for part in parts for group in getattr(part, "groups", ())]


def _describe(action: Any) -> str:
    """Return the class of an action, the message of a Send, and a hash without what is thinned."""
    kind, content = type(action).__name__, action
    if isinstance(action, Send):
        header, *payload = action.frames
        kind = f"Send {describe(action.frames)[2]}"
        content = action.peer, header, [len(frame) for frame in payload]
    elif isinstance(action, Action):
        fields = list(_fields_of(action).values())
        if isinstance(action, Work):
            fields = [value for value in fields if isinstance(value, int | str | tuple)]
        content = [len(value) if isinstance(value, Frame) else value for value in fields]
    return f"{kind} {blake3(_encoder.encode(content)).hexdigest(DIGEST_BYTES)}"


def _in_brief(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape
    name = type(value).__name__
    return f"{name}: {value}" if isinstance(value, Exception) else name


_encoder = msgspec.msgpack.Encoder(enc_hook=_in_brief, order="deterministic")
