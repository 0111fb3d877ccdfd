"""The run's secret and the string with which a node joins, `tcp://host:port#KEY.SECRET.FINGERPRINT`.

Whoever has it is an insider. The last part is the fingerprint of the key with which the learner
signs versions, settings and hashes of files (`weights/store.py`). The learner keeps all parts in
its run directory, and a restart keeps the string. What keys follow from it: `net/curve.py`.
"""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from echo.config.fields import OLD_JOIN
from echo.core.errors import ConfigError, StorageError, TransportError
from echo.net.curve import KEY_BYTES, SECRET_BYTES, CurveKeys, KeyPair
from echo.net.transport import parse_address, with_key
from echo.records.files import make_private_directory, write_file
from echo.runtime.identity import load_or_create_signing_key
from echo.weights.store import fingerprint, show_fingerprint

_JOIN = re.compile(
    r"(?P<address>tcp://[^#]+#[A-Za-z0-9_-]{43})\.(?P<secret>[A-Za-z0-9_-]{22})"
    r"(?:\.(?P<fingerprint>[A-Za-z0-9_-]{22}))?"
)


@dataclass(frozen=True, slots=True)
class Join:
    """What a join string says."""

    address: str
    """Of the learner or a relay, with its server key."""
    secret: bytes = field(repr=False)
    fingerprint: bytes
    """Of the learner's signing key."""

    @classmethod
    def parse(cls, text: str, *, source: str = "the join string") -> Join:
        """Read `tcp://host:port#KEY.SECRET.FINGERPRINT`.

        Raises:
            ConfigError: if it has another form; the message does not repeat it.
        """
        match = _JOIN.fullmatch(text.strip())
        try:
            if match is not None:
                parse_address(match["address"])
                if match["fingerprint"] is None:
                    raise ConfigError(f"{source} is {OLD_JOIN}")
                secret, fingerprint = (
                    base64.urlsafe_b64decode(match[name] + "==")
                    for name in ("secret", "fingerprint")
                )
                return cls(match["address"], secret, fingerprint)
        except TransportError:
            pass
        raise ConfigError(
            f"{source} is not a join string; expected tcp://host:port#KEY.SECRET.FINGERPRINT with "
            "43, 22 and 22 letters after the #, as the learner wrote it into runs/NAME/keys/join"
        )

    def __str__(self) -> str:
        """Return the string itself, which is a secret."""
        secret = base64.urlsafe_b64encode(self.secret).decode().rstrip("=")
        return f"{self.address}.{secret}.{show_fingerprint(self.fingerprint)}"


def load_or_create_keys(run_dir: Path) -> tuple[CurveKeys, bytes]:
    """Return the learner's keys and the run's secret, making both for a new run.

    Raises:
        StorageError: if the files cannot be read or written.
    """
    directory = run_dir / "keys"
    server = KeyPair.of(_load_or_create(directory / "server.key", KEY_BYTES))
    secret = _load_or_create(directory / "join.secret", SECRET_BYTES)
    return CurveKeys.of_learner(server, secret), secret


def write_join(run_dir: Path, address: str, keys: CurveKeys, secret: bytes) -> Join:
    """Write the string with which others join into the run directory, and return it.

    Raises:
        StorageError: if the file cannot be written.
    """
    public_key = load_or_create_signing_key(run_dir).public_key().public_bytes_raw()
    join = Join(with_key(address, keys.server.public), secret, fingerprint(public_key))
    path = run_dir / "keys" / "join"
    try:
        write_file(path, f"{join}\n".encode(), mode=0o600)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error
    return join


def _load_or_create(path: Path, num_bytes: int) -> bytes:
    try:
        if not path.exists():
            make_private_directory(path.parent)
            write_file(path, secrets.token_bytes(num_bytes), mode=0o600)
        raw = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read or make {path}: {error}") from error
    if len(raw) != num_bytes:
        raise StorageError(
            f"{path} holds {len(raw)} bytes instead of {num_bytes}; without the right ones no node "
            "of the run can reach its learner: restore it, or delete it and give all nodes the new "
            "join string"
        )
    return raw
