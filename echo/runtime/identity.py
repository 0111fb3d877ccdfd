"""Identity of a run: its id, the learner's signing key, and the join string."""

from __future__ import annotations

import base64
import json
import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.config.fields import has_secret, read_text
from echo.config.schema import SecuritySection
from echo.core.errors import ConfigError, StorageError, TransportError
from echo.core.paths import local_path
from echo.net.curve import KEY_BYTES, SECRET_BYTES, CurveKeys, KeyPair
from echo.net.transport import format_address, is_loopback, parse_address, with_key, without_key
from echo.records.files import make_private_directory, write_file
from echo.roles.joining import fingerprint, show_fingerprint
from echo.roles.viewers import OPERATE, VIEW


@dataclass(frozen=True, slots=True)
class Identity:
    """A run's id and its learner's signing key."""

    run_id: str
    key: Ed25519PrivateKey

    @property
    def public_key(self) -> bytes:
        """The raw public key of the signing key, 32 bytes."""
        return self.key.public_key().public_bytes_raw()


def load_or_create_identity(run_dir: Path, *, run_name: str) -> Identity:
    """Return the identity of the run in `run_dir`. For a new run, create the identity.

    Raises:
        StorageError: if the files cannot be read or written.
    """
    id_path = run_dir / "run.json"
    try:
        if id_path.exists():
            run_id = str(json.loads(id_path.read_text())["run_id"])
            return Identity(run_id, load_signing_key(run_dir))
        # Create the key first: then a run with an id has a key, whenever the process is killed.
        key = load_or_create_signing_key(run_dir)
        run_id = f"{run_name}-{secrets.token_hex(4)}"
        write_file(id_path, json.dumps({"run_id": run_id}).encode())
    except (OSError, ValueError, KeyError, TypeError, UnsupportedAlgorithm) as error:
        raise StorageError(f"cannot read or make the identity of {run_dir}: {error}") from error
    return Identity(run_id, key)


def load_or_create_signing_key(run_dir: Path) -> Ed25519PrivateKey:
    """Return the learner's signing key from a run directory; create the key if it is missing.

    If links are encrypted, a new run gets its key before its id, because `write_join` puts the
    key's fingerprint into the join string.

    Raises:
        StorageError: if the file cannot be read or written.
    """
    # Any bytes of this length are a private key.
    return Ed25519PrivateKey.from_private_bytes(load_or_create(_key_path(run_dir), KEY_BYTES))


def load_signing_key(run_dir: Path) -> Ed25519PrivateKey:
    """Return the learner's signing key from a run directory.

    Raises:
        OSError, ValueError: if the file is missing, unreadable, or contains no key.
    """
    return Ed25519PrivateKey.from_private_bytes(_key_path(run_dir).read_bytes())


def _key_path(run_dir: Path) -> Path:
    return run_dir / "keys" / "learner.key"


# --- The join string of a run: `tcp://host:port#KEY.SECRET.FINGERPRINT` ---
#
# A node that has the string can join the run. The last part is the fingerprint of the key with
# which the learner signs versions, settings and hashes of files (`weights/store/trust.py`). The
# learner keeps all parts in its run directory, so the string stays the same after a restart.
# `net/curve.py` derives the connection keys from the secret.


_JOIN = re.compile(
    r"(?P<address>tcp://[^#]+#[A-Za-z0-9_-]{43})\.(?P<secret>[A-Za-z0-9_-]{22})"
    r"\.(?P<fingerprint>[A-Za-z0-9_-]{22})"
)


@dataclass(frozen=True, slots=True)
class Join:
    """The contents of a join string."""

    address: str
    """Address of the learner or a relay, with the server key of the connection."""
    secret: bytes = field(repr=False)
    fingerprint: bytes
    """Fingerprint of the learner's signing key."""

    @classmethod
    def parse(cls, text: str, *, source: str = "the join string") -> Join:
        """Return the contents of a join string, `tcp://host:port#KEY.SECRET.FINGERPRINT`.

        `source` names the place where the text was found, for the error.

        Raises:
            ConfigError: if the text is malformed. The message does not quote the text.
        """
        match = _JOIN.fullmatch(text.strip())
        try:
            if match is not None:
                parse_address(match["address"])
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
        """Return the join string. The string is secret."""
        secret = base64.urlsafe_b64encode(self.secret).decode().rstrip("=")
        return f"{self.address}.{secret}.{show_fingerprint(self.fingerprint)}"


def load_or_create_keys(run_dir: Path) -> tuple[CurveKeys, bytes]:
    """Return the learner's connection keys and the run's secret; create them for a new run.

    Raises:
        StorageError: if the files cannot be read or written.
    """
    directory = run_dir / "keys"
    server = KeyPair.of(load_or_create(directory / "server.key", KEY_BYTES))
    secret = load_or_create(directory / "join.secret", SECRET_BYTES)
    guests = {
        name: load_or_create(directory / f"{name}.secret", SECRET_BYTES) for name in (VIEW, OPERATE)
    }
    return CurveKeys.of_learner(server, secret, guests), secret


def write_join(run_dir: Path, address: str, keys: CurveKeys, secret: bytes) -> Join:
    """Write the join string into the run directory, and return it in parsed form.

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


def load_or_create(path: Path, num_bytes: int) -> bytes:
    """Return the random bytes of a private file; create the file if it is missing.

    Only the file's owner may read the file.

    Raises:
        StorageError: if the file cannot be read or written, or does not have `num_bytes` bytes.
    """
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


# --- Lookup of the join string by a relay or worker, and the values derived from it ---


ECHO_JOIN = "ECHO_JOIN"
"""Environment variable with the join string, which `echo-rl node` reads."""


@dataclass(frozen=True, slots=True)
class JoinSource:
    """The settings from which a relay or worker finds the join string."""

    role: Literal["relay", "worker"]
    connect: Sequence[str]
    """Addresses or join strings in the node's own section of the configuration."""
    security: SecuritySection
    run_dir: Path

    def find(self) -> Join | None:
        """Return this node's join string; None if there is none.

        The join string is taken from `connect`, else from security.join, else from the run
        directory. Nodes on the learner's machine share the run directory. security.join contains
        the join string itself, or the path of a file that contains it.

        Raises:
            ConfigError: if the file cannot be read, or if the text that is found is not a join
                string.
        """
        for address in filter(has_secret, self.connect):
            return Join.parse(address, source=f"{self.role}.connect")
        given = self.security.join
        if given is not None and has_secret(given):
            return Join.parse(given, source="security.join")
        if given is not None:
            path, key = local_path(given), "security.join = "
        else:
            path, key = self.run_dir / "keys" / "join", ""
            if not path.exists():
                return None
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{key}{str(path)!r}: cannot be read: {error}; copy the learner's "
                "runs/NAME/keys/join there"
            ) from error
        return Join.parse(text, source=f"{key}{str(path)!r}")

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses that the node dials first, in order and without the secret."""
        if self.connect:
            return tuple(_without_secret(address) for address in self.connect)
        join = self.find()
        return () if join is None else (join.address,)

    def fingerprint(self) -> bytes | None:
        """Return the fingerprint of the learner's signing key; None if it is not known.

        The join string contains the fingerprint. If links are not encrypted and every address is a
        loopback address, the fingerprint is computed from the key in the run directory. Otherwise
        the result is None.
        """
        join = self.find() if self.security.curve else None
        if join is not None:
            return join.fingerprint
        if not all(map(is_loopback, self.addresses())):
            return None
        try:
            key = load_signing_key(self.run_dir)
        except (OSError, ValueError):
            return None
        return fingerprint(key.public_key().public_bytes_raw())

    def keys(self) -> CurveKeys | None:
        """Return the connection keys of the node; None if links are not encrypted.

        Raises:
            ConfigError: if links are encrypted and there is no join string.
        """
        if not self.security.curve:
            return None
        join = self.find()
        if join is None:
            raise ConfigError(
                f"this {self.role} has no join string, and links are encrypted: copy the line in "
                "runs/NAME/keys/join on the learner's machine and set the environment's ECHO_JOIN "
                "to it, or name a file that holds it with security.join (a run that shall not be "
                "encrypted: security.curve=false on all its nodes)"
            )
        return CurveKeys.of_node(self.role, join.secret, *self.addresses(), join.address)


def join_address(address: str, advertise: str | None) -> str:
    """Return the address at which other nodes reach a learner that listens on `address`.

    If `address` is a wildcard, the result is a guess: the address of the interface with the default
    route.
    """
    if advertise is not None:
        return advertise
    host, port = parse_address(address)
    if host not in ("0.0.0.0", "::"):
        return without_key(address)
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    anyone = "2001:db8::1" if host == "::" else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((anyone, 9))  # makes the kernel choose a route; sends nothing
        except OSError:
            return format_address(socket.gethostname(), port)
        return format_address(str(probe.getsockname()[0]), port)


def is_own_machine(address: str) -> bool:
    """Return whether an address, with or without a key, belongs to this machine."""
    try:
        host, _ = parse_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (OSError, TransportError):
        return False
    return True


def _without_secret(address: str) -> str:
    key = address.partition("#")[2].partition(".")[0]
    return without_key(address) + (f"#{key}" if key else "")
