"""The keys with which `echo-rl status`, `top` and `ctl` reach a run's learner.

    tcp://host:port#KEY.SECRET      in keys/view: may read the status of the run
                                    in keys/operate: may also change the run

KEY is the learner's connection key, as in the join string. SECRET differs from the join string's
secret. A join string is refused for viewing, and a viewer's key is refused for joining.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from echo.config.fields import read_text
from echo.core.errors import ConfigError, DataError, StorageError, TransportError
from echo.net.curve import SECRET_BYTES, CurveKeys
from echo.net.transport import format_address, parse_address, with_key
from echo.records.files import write_file
from echo.records.ledger import is_in_use
from echo.records.run_files import read_config
from echo.roles.viewers import OPERATE, VIEW
from echo.runtime.identity import load_or_create

_ACCESS = re.compile(
    r"(?P<address>tcp://[^#]+#[A-Za-z0-9_-]{43})\.(?P<secret>[A-Za-z0-9_-]{22})"
)  # fmt: skip
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Access:
    """The contents of a viewer's key."""

    address: str
    """Address of the learner, with its connection key."""
    secret: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str, *, source: str) -> Access:
        """Return the contents of a viewer's key.

        `source` names the place where the text was found, for the error.

        Raises:
            ConfigError: if the text is malformed. The message does not quote the text.
        """
        match = _ACCESS.fullmatch(text.strip())
        try:
            if match is not None:
                parse_address(match["address"])
                return cls(match["address"], base64.urlsafe_b64decode(match["secret"] + "=="))
        except TransportError:
            pass
        raise ConfigError(
            f"{source} is no viewer's key; expected tcp://host:port#KEY.SECRET with 43 and 22 "
            "letters after the #, as the learner wrote it into runs/NAME/keys/view (read only) and "
            "runs/NAME/keys/operate. A join string is for nodes, and shows nothing"
        )

    def __str__(self) -> str:
        """Return the viewer's key as text. The text is secret."""
        return f"{self.address}.{base64.urlsafe_b64encode(self.secret).decode().rstrip('=')}"


def write_access(run_dir: Path, address: str, keys: CurveKeys) -> None:
    """Write the files keys/view and keys/operate in a run's directory.

    Raises:
        StorageError: if a file cannot be written.
    """
    directory = run_dir / "keys"
    for name in (VIEW, OPERATE):
        secret = load_or_create(directory / f"{name}.secret", SECRET_BYTES)
        text = f"{Access(with_key(address, keys.server.public), secret)}\n"
        try:
            write_file(directory / name, text.encode(), mode=0o600)
        except OSError as error:
            raise StorageError(f"cannot write {directory / name}: {error}") from error


@dataclass(frozen=True, slots=True)
class Target:
    """The run that a command names, and how to reach its learner."""

    name: str
    """The run as the user named it, without secrets."""
    run_dir: Path | None
    """The run's directory, if it is on this machine."""
    accesses: tuple[Access, ...]
    """Keys and addresses to try, in order; empty if the run's links are not encrypted."""

    @property
    def is_in_use(self) -> bool:
        """Whether a learner on this machine has the run open. It may still be starting."""
        return self.run_dir is not None and is_in_use(self.run_dir)


def find_run(text: str) -> Target:
    """Return the run that a command-line argument names.

    `text` is the directory of the run, the path of a file with a viewer's key, or the key itself.
    If `text` is a directory, two addresses are tried: first the learner's address on this machine,
    then the address that the learner has advertised.

    Raises:
        ConfigError: if `text` is none of these, or if the key is malformed.
        DataError: if no run has started in the directory.
    """
    if "tcp://" in text:
        access = Access.parse(text, source="the argument")
        return Target(access.address.partition("#")[0], None, (access,))
    path = Path(text)
    try:
        if path.is_dir():
            if (path / "keys" / "join").exists() and not (path / "config.json").exists():
                raise DataError(
                    f"{text}: no run has started here; an evaluation (echo-rl eval --serve) shows "
                    "its progress in its own terminal, and ends by Ctrl-C there"
                )
            return Target(text, path, _own_accesses(path))
        access = Access.parse(read_text(path), source=repr(text))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{text!r} is no run: expected the directory of a run, or a file with the line in "
            "keys/view or keys/operate of that directory, copied from the learner's machine "
            f"({getattr(error, 'strerror', None) or error})"
        ) from error
    return Target(text, None, (access,))


def _own_accesses(run_dir: Path) -> tuple[Access, ...]:
    """Return the operator's keys for a learner on this machine."""
    path = run_dir / "keys" / OPERATE
    try:
        access = Access.parse(read_text(path), source=repr(str(path)))
    except (OSError, UnicodeDecodeError):
        return ()
    try:
        listen = read_config(run_dir).get("learner", {}).get("listen")
        host, port = parse_address(listen)
    except (DataError, StorageError, TransportError, AttributeError, TypeError):
        return (access,)
    _, advertised_port = parse_address(access.address)
    place = format_address(_WILDCARDS.get(host, host), port or advertised_port)
    key = access.address.partition("#")[2]
    own = replace(access, address=f"{place}#{key}")
    return tuple(dict.fromkeys((own, access)))
