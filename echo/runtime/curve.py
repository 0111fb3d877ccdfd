"""The keys of a run's links: who may connect, and how a node knows to whom it has connected.

All links are encrypted with CURVE (elliptic curve 25519, forward secret), and it answers two
questions with two kinds of keys:

* *Is this the process that I want?* Every process that listens has a **server key**, and its
  address says which: `tcp://host:port#KEY`. The learner tells these addresses to all nodes in its
  plans, so nobody copies keys by hand but the first.
* *Does this one belong to the run?* The run has one **secret**. From it follows the key pair with
  which every node of the run dials, and a listener admits that key and no other.

So a node needs one string to join, `tcp://host:port#KEY.SECRET.FINGERPRINT`, and whoever has it is
an insider. The last part is the fingerprint of the key with which the learner signs versions,
settings and hashes of files (`protocol/trust.py`). The learner keeps all parts in its run
directory, and a restart keeps the string.

The server key of a worker is made anew at each start: its address is known from plans only. A relay
is different: its address stands in configurations. Its key follows from the secret, so that the
one string of the run suffices on every machine and outlives the relay's restarts. The price: any
insider can pose as a relay, if it also holds the relay's address. It cannot pose as the learner,
nor change what the learner signs: the fingerprint says whose signature counts.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from echo.config.fields import OLD_JOIN
from echo.core.errors import ConfigError, StorageError, TransportError
from echo.protocol.trust import fingerprint, show_fingerprint
from echo.runtime.durable import make_private_directory, write_file
from echo.runtime.identity import load_or_create_signing_key
from echo.runtime.transport import parse_address, parse_key, with_key, without_key

KEY_BYTES = 32
SECRET_BYTES = 16
"""As many as the strength of the curve; 22 letters in a join string."""

_JOIN = re.compile(
    r"(?P<address>tcp://[^#]+#[A-Za-z0-9_-]{43})\.(?P<secret>[A-Za-z0-9_-]{22})"
    r"(?:\.(?P<fingerprint>[A-Za-z0-9_-]{22}))?"
)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key pair of curve 25519."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> KeyPair:
        """Return the pair with this secret half, any 32 bytes."""
        private = X25519PrivateKey.from_private_bytes(secret)
        return cls(private.public_key().public_bytes_raw(), secret)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """The keys of one process."""

    server: KeyPair
    """With which it listens."""
    client: KeyPair
    """With which every node of the run dials."""
    relay_key: bytes
    """The server key of the run's relays."""
    known: Mapping[str, bytes] = field(default_factory=dict)
    """Server keys by address, for addresses that are written without one."""

    @classmethod
    def of_learner(cls, server: KeyPair, secret: bytes) -> CurveKeys:
        """Return the keys of the learner, which dials nobody."""
        return cls(
            server=server,
            client=_derive(secret, "client"),
            relay_key=_derive(secret, "relay").public,
        )

    @classmethod
    def of_node(cls, role: str, secret: bytes, *addresses: str) -> CurveKeys:
        """Return the keys of a relay, or new ones of a worker.

        Args:
            role: relay or worker.
            secret: of the run, from the join string.
            addresses: that it may dial; their keys serve where one is written without.
        """
        relay = _derive(secret, "relay")
        known = {}
        for address in addresses:
            key = parse_key(address)
            if key is not None:
                known[without_key(address)] = key
        return cls(
            server=relay if role == "relay" else KeyPair.of(secrets.token_bytes(KEY_BYTES)),
            client=_derive(secret, "client"),
            relay_key=relay.public,
            known=known,
        )

    def server_keys(self, address: str) -> tuple[bytes, ...]:
        """Return the keys that the process at `address` may have, the likeliest first.

        One alone if the address says which or is known. Another address without a key leads to a
        relay, or to one that is known under another name: the keys are tried in turn.
        """
        own = parse_key(address) or self.known.get(address)
        if own is not None:
            return (own,)
        _, port = parse_address(address)
        namesakes = [key for known, key in self.known.items() if parse_address(known)[1] == port]
        return tuple(dict.fromkeys((*namesakes, self.relay_key, *self.known.values())))


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


def _derive(secret: bytes, purpose: str) -> KeyPair:
    context = f"echo-rl 2026-11 curve key pair: {purpose}"
    return KeyPair.of(blake3(secret, derive_key_context=context).digest())


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
