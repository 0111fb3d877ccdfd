"""Defines the types of configuration values and the base class of all sections.

Each type checks a single value. The error says what to write instead. echo/config/load.py adds the
file, the key and the value to the error.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
)

from echo.core.bounds import MAX_NAME_LENGTH
from echo.core.paths import MAX_FILE_NAME_BYTES, local_path
from echo.core.units import JOIN_SECRET, parse_duration, parse_size

_ADDRESS = re.compile(
    r"tcp://(?P<host>\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[^\s:/\[\]]+):(?P<port>\d{1,5})"
)
_KEY = re.compile(r"[A-Za-z0-9_-]{43}")
_SECRET = re.compile(r"[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{22}")
_EVERY_INTERFACE = frozenset({"*", "0.0.0.0", "[::]"})
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_TASK_KIND = re.compile(r"[a-z][a-z0-9_]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*")


UNREADABLE = (ValueError, RecursionError)
"""Exceptions that the standard library raises for invalid TOML or JSON. Bad syntax, very long
numbers and very deep nesting raise different exceptions."""


def toml_or_text(text: str) -> Any:
    """Parse a command-line value as TOML. If it is not valid TOML, return it as text."""
    try:
        table = tomllib.loads(f"value = {text}")
    except UNREADABLE:
        return text
    value = table["value"]
    is_plain = len(table) == 1 and isinstance(value, str | int | float | list | dict)
    return value if is_plain else text


NO_VALUES = frozenset({"null", "None", "~"})
"""Words that mean a missing value in YAML, JSON and Python. TOML has no such word."""


def override_of(key: str, text: str) -> str:
    """Return the override `key=text`, with quotes if the text needs them.

    Without quotes, TOML would read some texts as another type.
    """
    is_plain = toml_or_text(text.strip()) == text and text not in NO_VALUES
    return f"{key}={text if is_plain else json.dumps(text, ensure_ascii=False)}"


def _false_is_none(value: object) -> object:
    """Return None for `false`, which means "off" in a file.

    TOML has no word for a missing value.
    """
    return None if value is False else value


def _check_off(value: object) -> object:
    """Return `false`. Refuse every other value, even 0, which equals False in Python."""
    if value is not False:
        raise ValueError("must be false")
    return value


def _one_is_a_list(value: object) -> object:
    """Convert a list to a tuple. Convert a single string to a tuple with one item."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _check_listen(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    if not match or int(match["port"]) > 65535:
        raise ValueError(
            f'"{address}" is not an address to listen on; write "tcp://host:port", for example '
            '"tcp://127.0.0.1:7700" (this machine only) or "tcp://0.0.0.0:7700" (every interface)'
        )
    return address


def _check_dial(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    if not match or not 1 <= int(match["port"]) <= 65535 or match["host"] in _EVERY_INTERFACE:
        raise ValueError(
            f'"{address}" is not an address to connect to; write "tcp://host:port" with a host '
            'that can be reached and its port, for example "tcp://10.0.0.5:7700"'
        )
    return address


def _check_advertise(address: str) -> str:
    _check_dial(address.partition("#")[0])
    if "#" in address:
        raise ValueError(
            "an address to advertise has no key in it: each process adds its own; write the part "
            "before the #"
        )
    return address


def _check_connect(address: str) -> str:
    place, mark, rest = address.partition("#")
    _check_dial(place)
    key, dot, secret = rest.partition(".")
    if (mark and not _KEY.fullmatch(key)) or (dot and not _SECRET.fullmatch(secret)):
        raise ValueError(
            'what follows the # must be a key of 43 letters or "key.secret.fingerprint", the last '
            "two of 22; "
            "copy the whole line of the learner's keys/join, or write the part before the # and "
            "set ECHO_JOIN"
        )
    return address


def _check_join(text: str) -> str:
    if has_secret(text) or text.startswith("tcp://"):
        _check_connect(text)
        if not has_secret(text):
            raise ValueError(
                "is not a join string; write tcp://host:port#KEY.SECRET.FINGERPRINT as it stands "
                "in keys/join in the learner's run directory, or the name of a file that holds it"
            )
    return text


def _check_web_address(address: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", address):
        raise ValueError("is not a web address; write http://HOST/PATH or https://HOST/PATH")
    return address


def has_secret(address: str) -> bool:
    """Return whether an address is a join string, which contains the run's secret."""
    return "." in address.partition("#")[2]


def _strip_secret(address: str) -> str:
    return JOIN_SECRET.sub(r"\1", address)


def _check_device(device: str) -> str:
    if not _DEVICE.fullmatch(device):
        raise ValueError(f'"{device}" is not a device; write "auto", "cpu", "cuda" or "cuda:1"')
    return device


def _check_task_kind(kind: str) -> str:
    if not _TASK_KIND.fullmatch(kind):
        raise ValueError(
            f'"{kind}" is not a task; write the name of a built-in one, such as "addition", or the '
            'import path of your own, "package.module:Class"'
        )
    return kind


def _check_run_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(f'"{name}" cannot name a directory inside run.dir; write one plain name')
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"has {len(name)} characters; messages hold names of {MAX_NAME_LENGTH}")
    return name


MAX_FILE_LENGTH = 16 << 20
"""Largest number of characters in a file with settings. The learner sends settings in one
message."""


def read_text(path: Path) -> str:
    """Return the text of a file or pipe with settings.

    Raises:
        OSError, UnicodeDecodeError: if the file cannot be read, has more than MAX_FILE_LENGTH
            characters, or is not UTF-8.
    """
    with path.open(encoding="utf-8-sig") as file:  # editors on Windows write a byte order mark
        text = file.read(MAX_FILE_LENGTH + 1)
    if len(text) > MAX_FILE_LENGTH:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return text


def _check_directory(name: str) -> str:
    if any(len(part.encode()) > MAX_FILE_NAME_BYTES for part in name.split("/")):
        raise ValueError(f"a name of more than {MAX_FILE_NAME_BYTES} bytes, which no disk takes")
    return str(local_path(name)) if name.startswith("~") else name


Seconds = Annotated[float, BeforeValidator(parse_duration)]
"""A duration: a number of seconds or text such as "30s"."""

OptionalSeconds = Annotated[Seconds | None, BeforeValidator(_false_is_none)]
"""A duration, or `false` to switch the key off."""

Off = Annotated[Literal[False], BeforeValidator(_check_off)]
"""The value `false`, which switches a key off."""

Bytes = Annotated[int, BeforeValidator(parse_size)]
"""A size: a whole number of bytes or text such as "8GiB"."""

ListenAddress = Annotated[str, AfterValidator(_check_listen)]
"""tcp://host:port to listen on; with port 0 the system chooses a free port."""

AdvertisedAddress = Annotated[str, AfterValidator(_check_advertise)]
"""tcp://host:port that other machines can dial."""

DialAddress = Annotated[
    str, AfterValidator(_check_connect), PlainSerializer(_strip_secret, return_type=str)
]
"""tcp://host:port, optionally followed by #KEY or #KEY.SECRET; pydantic's dumps leave the secret
out."""

DialAddresses = Annotated[tuple[DialAddress, ...], BeforeValidator(_one_is_a_list)]
"""Addresses to try in order; a single address needs no brackets."""

Sinks = Annotated[
    tuple[Literal["tensorboard", "trackio", "wandb"], ...], BeforeValidator(_one_is_a_list)
]
"""Destinations of metrics; a single destination needs no brackets."""

Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
    BeforeValidator(_one_is_a_list),
]
"""Two numbers, each at least 0 and below 1."""

Names = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_one_is_a_list)]
"""A list of names; a single name needs no brackets."""

StopTexts = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
    Field(max_length=16),
    BeforeValidator(_one_is_a_list),
]
"""A list of texts that end an answer; a single text needs no brackets."""

JoinString = Annotated[
    str,
    AfterValidator(_check_join),
    PlainSerializer(lambda text: None if has_secret(text) else text, return_type=str | None),
]
"""tcp://host:port#KEY.SECRET.FINGERPRINT, or a file that holds this text. pydantic's dumps leave
the text out, because it contains the secret."""

WebAddress = Annotated[
    str,
    AfterValidator(_check_web_address),
    PlainSerializer(lambda _: None, return_type=str | None),
]
"""A URL of http or https. pydantic's dumps leave the URL out, because it may contain a token."""

Device = Annotated[str, AfterValidator(_check_device)]
"""The device on which torch computes: auto, cpu, cuda or cuda:N."""

TaskKind = Annotated[str, AfterValidator(_check_task_kind)]
"""A built-in task's name or the import path of a class."""

Directory = Annotated[str, AfterValidator(_check_directory)]
"""The path of a directory, which need not exist yet. `~` at the beginning is expanded."""

RunName = Annotated[str, AfterValidator(_check_run_name)]
"""The name of a run's directory, without slashes."""


Role = Literal["learner", "worker", "relay"]
ROLES: tuple[Role, ...] = ("learner", "worker", "relay")

T = TypeVar("T")
INHERITED = "inherited"
Inherited = Annotated[T, INHERITED]
"""The type of a key whose value the learner sets for all its workers."""
OWN_KIND = "package.module:function"
"""The kind of the section class for the user's own code. In a configuration, the key `kind` then
has the import path of this code."""


class Strict(BaseModel):
    """The base class of a file's tables: immutable, with strict types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Section(Strict):
    """The base class of all sections of a run's configuration."""

    roles: ClassVar[tuple[Role, ...]] = ("learner",)
    """The roles whose nodes read this section."""


def kind_of(value: Any) -> str:
    """Return the `kind` of a section. The section may be a table or an object.

    If the kind is the import path of the user's own code, return OWN_KIND.
    """
    kind = value["kind"] if isinstance(value, Mapping) else value.kind
    return OWN_KIND if ":" in kind else str(kind)
