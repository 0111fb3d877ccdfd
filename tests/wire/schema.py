"""Messages made from their types alone: valid ones, and ones with one value out of its range.

A message is built as plain lists and dicts, the way it travels, so that it can say what no instance
of its class would be made with.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

T = TypeVar("T")
KEY = object()
"""In a path: the key of a mapping, not its value."""
MAX_BUILT = 1 << 17
"""Longer collections are not built: the bound on the header's bytes comes first."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One bounded thing in a message."""

    path: tuple[Any, ...]
    kind: Any

    def __str__(self) -> str:
        return ".".join("KEY" if step is KEY else str(step) for step in self.path)


def leaves(kind: Any, path: tuple[Any, ...] = ()) -> Iterator[Leaf]:  # noqa: C901, PLR0912
    """Yield all that has a range: numbers, texts, bytes and the lengths of collections."""
    match kind:
        case inspect.Metadata():
            yield from leaves(kind.type, path)
        case inspect.StructType():
            for index, field in enumerate(kind.fields):
                step = index if kind.array_like else field.encode_name
                yield from leaves(field.type, (*path, step))
        case inspect.UnionType():
            for each in kind.types:
                yield from leaves(each, path)
        case inspect.TupleType():
            for index, each in enumerate(kind.item_types):
                yield from leaves(each, (*path, index))
        case inspect.ListType() | inspect.VarTupleType():
            yield Leaf(path, kind)
            yield from leaves(kind.item_type, (*path, 0))
        case inspect.DictType():
            yield Leaf(path, kind)
            yield from leaves(kind.key_type, (*path, KEY))
            yield from leaves(kind.value_type, (*path, "x"))
        case inspect.NoneType() | inspect.BoolType() | inspect.LiteralType() | inspect.RawType():
            pass
        case _:
            yield Leaf(path, kind)


def given(value: T | None) -> T:
    """Return what a type says: of a limit `is_bounded` has shown that it is there."""
    assert value is not None
    return value


def is_bounded(kind: Any) -> bool:
    """Return whether a leaf has a range that is not open on either side."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return None not in (kind.ge, kind.le)
        case inspect.AnyType():
            return False
    return kind.max_length is not None


def smallest(kind: Any) -> Any:  # noqa: C901, PLR0912
    """Return a valid value with one element in each collection, as it travels."""
    match kind:
        case inspect.Metadata():
            return smallest(kind.type)
        case inspect.StructType():
            values = {field.encode_name: smallest(field.type) for field in kind.fields}
            if kind.array_like:
                return list(values.values())
            return values if kind.tag is None else {kind.tag_field: kind.tag, **values}
        case inspect.UnionType():
            return smallest(next(e for e in kind.types if not isinstance(e, inspect.NoneType)))
        case inspect.TupleType():
            return [smallest(each) for each in kind.item_types]
        case inspect.ListType() | inspect.VarTupleType():
            return [smallest(kind.item_type)]
        case inspect.DictType():
            return {"x": smallest(kind.value_type)}
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.IntType() | inspect.FloatType():
            return max(given(kind.ge), min(given(kind.le), 1))
        case inspect.StrType():
            return "x"
        case inspect.BytesType():
            return b"x" * (kind.min_length or 1)
        case inspect.BoolType():
            return False
    return None


def wrong_values(kind: Any) -> Iterator[Any]:
    """Yield values that a leaf must not have."""
    match kind:
        case inspect.IntType():
            yield from (given(kind.ge) - 1, given(kind.le) + 1, -(2**63), 2**64 - 1)
        case inspect.FloatType():
            yield from (math.nan, math.inf, -math.inf)
            if given(kind.le) < 1e308:
                yield from (-1.0, 1e308, 2 * given(kind.le))
        case inspect.StrType():
            yield "x" * (given(kind.max_length) + 1)
        case inspect.BytesType():
            yield bytes(given(kind.max_length) + 1)
        case inspect.ListType() | inspect.VarTupleType() if given(kind.max_length) < MAX_BUILT:
            yield [smallest(kind.item_type)] * (given(kind.max_length) + 1)
        case inspect.DictType():
            value = smallest(kind.value_type)
            yield {f"x{index}": value for index in range(given(kind.max_length) + 1)}


def with_value(message: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a built message with another value at a leaf."""
    if not path:
        return value
    changed = copy.copy(message)
    step, *rest = path
    if step is KEY:
        return {value: message["x"]}
    changed[step] = with_value(message[step], tuple(rest), value)
    return changed


def wrong_messages(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (what is wrong, message) for every value of every leaf that is out of its range."""
    info = inspect.type_info(kind)
    valid = smallest(info)
    for leaf in leaves(info):
        for value in wrong_values(leaf.kind):
            yield f"{leaf} = {value!r:.40}", with_value(valid, leaf.path, value)


def values(kind: Any) -> st.SearchStrategy[Any]:  # noqa: C901, PLR0912
    """Return a strategy for valid values, as they travel."""
    match kind:
        case inspect.Metadata():
            return values(kind.type)
        case inspect.StructType():
            fields = {field.encode_name: values(field.type) for field in kind.fields}
            if kind.array_like:
                return st.tuples(*fields.values())
            if kind.tag is not None:
                fields[given(kind.tag_field)] = st.just(kind.tag)
            return st.fixed_dictionaries(fields)
        case inspect.UnionType():
            return st.one_of([values(each) for each in kind.types])
        case inspect.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case inspect.ListType() | inspect.VarTupleType():
            return st.lists(values(kind.item_type), max_size=3)
        case inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.IntType():
            return st.integers(kind.ge, kind.le)
        case inspect.FloatType():
            return st.floats(kind.ge, kind.le)
        case inspect.StrType():
            return st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
        case inspect.BytesType():
            return st.binary(max_size=40)
        case inspect.BoolType():
            return st.booleans()
        case inspect.AnyType():
            return JSON
    return st.none()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=20),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=20), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def instances(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for valid messages of a class."""
    return values(inspect.type_info(kind)).map(
        lambda built: msgspec.msgpack.decode(msgspec.msgpack.encode(built), type=kind)
    )


def extreme_values(kind: Any) -> Iterator[Any]:
    """Yield the ends of a leaf's range."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield from (kind.ge, kind.le)
        case inspect.StrType():
            yield from ("", "x" * given(kind.max_length))
        case inspect.ListType() | inspect.VarTupleType():
            yield []
        case inspect.DictType():
            yield {}


def extreme_messages(kind: type[Any]) -> Iterator[Any]:
    """Yield valid messages, in each of which one value lies at an end of its range."""
    info = inspect.type_info(kind)
    valid = smallest(info)
    for leaf in leaves(info):
        for value in extreme_values(leaf.kind):
            yield with_value(valid, leaf.path, value)
