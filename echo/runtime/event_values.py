"""Values of an event log: what is kept of arguments and of outcomes.

A replay has each argument back with its type. What no role looks at is thinned out:

* a chunk is its length and hash, an image its length;
* sampled ids and log-probabilities are as many numbers in the same range, so that each check of
  them ends as it did; versions, masks and rewards beside them are whole;
* a private key is not written at all: the role asks for signatures, and the log has them.

An outcome is the kind of each action and a hash of its content.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from echo.core import errors
from echo.core.errors import DataError, EchoError, RemoteProtocolError
from echo.leases.partials import PartialGroup, decode_members, encode_members
from echo.roles.worker import EngineCall
from echo.weights.manifest import SignedManifest, decode_table
from echo.weights.store import EncodedVersion, allocate
from echo.wire.actions import Action, Send, Work
from echo.wire.codec import Frame, decode_group, describe, encode_group
from echo.wire.messages import Form

SAMPLED = {"token_ids", "sampler_logprobs", "logprobs"}
"""Arrays of which only number and range matter."""
BULK = {"image", "storage", "payload"}
"""Arguments whose bytes no role looks at."""
GIVEN_OUT = (Work, EngineCall, PartialGroup)
"""What a role hands out in its actions, and is told of again."""
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

    may_block: bool | None = None
    may_patch: bool | None = None


# --- thinning -------------------------------------------------------------------------------------


def thin(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return as many values in the same range: what a check finds in one it finds in the other."""
    if values.size < 2:
        return values
    thinned = np.full_like(values, values.min())
    thinned[-1] = values.max()
    return thinned


def _thin_each(rollouts: Sequence[Any]) -> tuple[Any, ...]:
    names = ("token_ids", "sampler_logprobs")
    return tuple(
        dataclasses.replace(rollout, **{name: thin(getattr(rollout, name)) for name in names})
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
        if kind in ("Partial", "Grant") and len(frames) == 2:
            return [frames[0], encode_members(_thin_each(decode_members(frames[1])))]
    except RemoteProtocolError:
        pass
    return [bytes(frame) for frame in frames]


# --- arguments ------------------------------------------------------------------------------------


class Values:
    """Packs and unpacks the values of one log; knows the objects that have names in it."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}
        self._objects: dict[str, Any] = {}
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._given_out: dict[int, Any] | None = None
        self._num_given_out = 0
        self.outside: Callable[[list[bool | None]], Any] = lambda traits: None
        """Makes a stand-in for what a role asks, when a log is read."""

    def keep(self) -> None:
        """Keep what is handed out: there is no shell that does."""
        self._given_out = {}

    def name(self, name: str, target: Any) -> None:
        """Give an object a name, by which it is packed from now on."""
        self._ids[id(target)] = name
        self._objects[name] = target

    def find(self, name: str) -> Any:
        """Return the object of a name, or a part of it."""
        first, *rest = name.split(".")
        return functools.reduce(getattr, rest, self._objects[first])

    def give_out(self, action: Any) -> None:
        """Number what an action hands out, and the role is told of again."""
        parts = [action, *fields_of(action).values()] if isinstance(action, Action) else []
        for part in [part for part in parts if isinstance(part, GIVEN_OUT)]:
            for each in (part, *getattr(part, "groups", ())):
                if each not in self._numbers:
                    self._numbers[each] = self._num_given_out
                    if self._given_out is not None:
                        self._given_out[self._num_given_out] = each
                    self._num_given_out += 1

    def number_of(self, target: Any) -> int:
        """Return the number of what was handed out."""
        return self._numbers[target]

    def numbered(self, number: int) -> Any:
        """Return what was handed out under a number; work comes back once."""
        assert self._given_out is not None
        target = self._given_out[number]
        if isinstance(target, Work):
            del self._given_out[number]
        return target

    def pack_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Pack arguments of a call, or fields of a record, by name."""
        return {name: self._pack_field(name, value) for name, value in fields.items()}

    def _pack_field(self, name: str, value: Any) -> Any:
        if name == "frames" and isinstance(value, list):
            value = thin_frames(value)
        elif name in BULK and isinstance(value, bytes | bytearray | memoryview):
            value = memoryview(value)
        elif name in SAMPLED and isinstance(value, np.ndarray):
            value = thin(value)
        return self.pack(value)

    def pack(self, value: Any) -> Any:
        """Return a value as msgpack has it; what it has not, as one of `CODECS`."""
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if type(value) is list:
            return [self.pack(each) for each in value]
        if type(value) is dict and all(type(key) in (str, int) for key in value):
            return {key: self.pack(each) for key, each in value.items()}
        name = self._ids.get(id(value))
        code, plain = 0, name
        if name is None:
            code = next(i for i, codec in enumerate(CODECS) if isinstance(value, codec.kind))
            plain = CODECS[code].pack(self, value)
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(plain))

    def unpack(self, packed: Any) -> Any:
        """Return what was packed."""
        if isinstance(packed, list):
            return [self.unpack(each) for each in packed]
        if isinstance(packed, dict):
            return {key: self.unpack(each) for key, each in packed.items()}
        if isinstance(packed, msgspec.msgpack.Ext):
            return CODECS[packed.code].unpack(self, msgspec.msgpack.decode(packed.data))
        return packed


class Codec(NamedTuple):
    """How the values of a type are packed."""

    kind: Any
    pack: Callable[[Values, Any], Any]
    unpack: Callable[[Values, Any], Any]


def fields_of(record: Any) -> dict[str, Any]:
    """Return what a record is made of, by name."""
    if isinstance(record, msgspec.Struct):
        return {name: getattr(record, name) for name in record.__struct_fields__}
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.init}


def path_of(kind: type) -> str:
    """Return where a class stands."""
    return f"{kind.__module__}:{kind.__qualname__}"


def class_at(path: str, others: Sequence[type] = ()) -> type:
    """Return a class of Echo's records, or one of `others`.

    Raises:
        DataError: if it is neither: a file must not choose what is called.
    """
    module, _, name = path.partition(":")
    found = getattr(importlib.import_module(module), name) if module.startswith("echo.") else None
    is_record = isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, msgspec.Struct | Enum)
    )
    if not is_record and found not in others:
        raise DataError(f"a value of the unknown class {path}")
    return found  # type: ignore[return-value]


def _pack_encoded(values: Values, encoded: EncodedVersion) -> list[Any]:
    base = values.pack(encoded.form.base)
    return [values.pack(encoded.version), base, encoded.frames, bytes(encoded.has_chunk)]


def _unpack_encoded(values: Values, packed: list[Any]) -> EncodedVersion:
    """Return a keyframe that is resumed; its tables were verified when they were read."""
    version, base, frames, has_chunk = (values.unpack(each) for each in packed)
    encoded = EncodedVersion(version, Form("keyframe") if base is None else Form("delta", base))
    for frame in frames:
        signed = msgspec.msgpack.decode(frame, type=SignedManifest)
        encoded.add(decode_table(signed.body), frame)
    for index in (index for index, is_held in enumerate(has_chunk) if is_held):
        encoded.mark(index)
    return encoded


def _pack_record(values: Values, record: Any) -> list[Any]:
    return [path_of(type(record)), values.pack_fields(fields_of(record))]


def _unpack_record(values: Values, packed: list[Any]) -> Any:
    path, fields = packed
    return class_at(path)(**values.unpack(fields))


CODECS = (
    Codec((), lambda v, named: None, lambda v, name: v.find(name)),
    Codec(
        Enum,
        lambda v, each: [path_of(type(each)), each.value],
        lambda v, packed: class_at(packed[0])(packed[1]),
    ),
    Codec(bytearray, lambda v, data: bytes(data), lambda v, data: bytearray(data)),
    Codec(memoryview, lambda v, view: view.nbytes, lambda v, num_bytes: allocate(num_bytes)),
    Codec(tuple, lambda v, items: v.pack(list(items)), lambda v, items: tuple(v.unpack(items))),
    Codec(
        set | frozenset,
        lambda v, items: sorted(map(v.pack, items), key=repr),
        lambda v, items: set(v.unpack(items)),
    ),
    Codec(
        dict,
        lambda v, table: [v.pack([key, each]) for key, each in table.items()],
        lambda v, pairs: {v.unpack(key): v.unpack(each) for key, each in pairs},
    ),
    Codec(
        np.ndarray,
        lambda v, array: [array.dtype.str, array.shape, array.tobytes()],
        lambda v, packed: np.frombuffer(packed[2], packed[0]).reshape(packed[1]),
    ),
    Codec(GIVEN_OUT, lambda v, each: v.number_of(each), lambda v, number: v.numbered(number)),
    Codec(
        UnseenFrame,
        lambda v, frame: [frame.num_bytes, frame.digest],
        lambda v, packed: UnseenFrame(*packed),
    ),
    Codec(
        Outside,
        lambda v, each: [each.may_block, each.may_patch],
        lambda v, traits: v.outside(traits),
    ),
    Codec(
        Ed25519PublicKey,
        lambda v, key: key.public_bytes_raw(),
        lambda v, data: Ed25519PublicKey.from_public_bytes(data),
    ),
    Codec(
        EchoError,
        lambda v, error: [type(error).__name__, str(error)],
        lambda v, packed: getattr(errors, packed[0])(packed[1]),
    ),
    Codec(EncodedVersion, _pack_encoded, _unpack_encoded),
    Codec(object, _pack_record, _unpack_record),
)
"""By code; the first is for objects with names, the last for dataclasses and structs."""


# --- outcomes -------------------------------------------------------------------------------------


def digests_of(result: Any, values: Values) -> list[list[Any]]:
    """Return [kind, hash of content] of each action, or of another result; number its work."""
    actions = result if isinstance(result, list) and _are_actions(result) else [result]
    for action in actions:
        values.give_out(action)
    return [[_kind_of(action), _digest(action)] for action in actions]


def _are_actions(result: list[Any]) -> bool:
    return all(isinstance(each, Action) for each in result)


def _kind_of(result: Any) -> str:
    """Return what a reader calls an action: its class, with the message of a Send."""
    kind = type(result).__name__
    return f"{kind} {describe(result.frames)[2]}" if isinstance(result, Send) else kind


def _digest(result: Any) -> bytes:
    return blake3(msgspec.msgpack.encode(_content(result))).digest(DIGEST_BYTES)


def _content(value: Any) -> Any:
    """Return what tells one outcome from another, without what is thinned out."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for kind, content in _CONTENTS:
        if isinstance(value, kind):
            return content(value)
    if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
        return _content(fields_of(value))
    return type(value).__name__


def _simple_fields(work: Any) -> Iterator[Any]:
    return (value for value in fields_of(work).values() if isinstance(value, int | str | tuple))


_CONTENTS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (bytes | bytearray | memoryview | UnseenFrame, len),
    (Send, lambda a: [a.peer, bytes(a.frames[0]), [len(frame) for frame in a.frames[1:]]]),
    (Work, lambda work: [_content(value) for value in _simple_fields(work)]),
    (list | tuple, lambda items: [_content(each) for each in items]),
    (dict, lambda table: [[_content(k), _content(v)] for k, v in table.items()]),
    (set | frozenset, lambda items: sorted(map(_content, items), key=repr)),
    (np.ndarray, lambda array: array.shape),
    (Exception, lambda error: f"{type(error).__name__}: {error}"),
)
