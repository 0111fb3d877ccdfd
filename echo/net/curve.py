"""CURVE key pairs: how listeners prove their identity, and how dialling nodes are admitted.

All links are encrypted with CURVE (elliptic curve 25519, forward secret). Two kinds of keys answer
two questions:

* *Is this the right process?* Every process that listens has a **server key**, which is a part of
  its address: `tcp://host:port#KEY`. The learner's plans contain these addresses, so a user copies
  only the learner's key by hand.
* *Does the dialler belong to the run?* The run has one **secret**. All nodes of the run dial with
  one key pair, which is derived from this secret. A listener admits only this key.

**Guests** are not nodes: they watch the run, or operate it. Each kind of guest has a secret of its
own, and dials with a key pair that is derived from this secret. Only the learner admits these keys.
The learner's transport reports the name of the key with each guest's connection. The learner does
not trust guests, and accepts only small messages from guests.

A worker makes a new server key at each start, because other nodes learn its address only from
plans. The address of a relay is written into configurations. So a relay's key is derived from the
secret. Then the run's join string is enough to dial the relay from any machine, and stays valid
when the relay restarts. As a consequence, any node of the run can pose as a relay if it also takes
over the relay's address. No node can pose as the learner or change signed data, because the join
string has the fingerprint of the learner's key.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from echo.net.transport import parse_address, parse_key, without_key

KEY_BYTES = 32  # size of a public and of a private key of curve 25519
SECRET_BYTES = 16
"""Number of bytes of the secret. The secret is as strong as the curve, and takes 22 letters in a
join string.
"""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key pair of curve 25519."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> KeyPair:
        """Return the key pair whose secret key is `secret`, any 32 bytes."""
        private = X25519PrivateKey.from_private_bytes(secret)
        return cls(private.public_key().public_bytes_raw(), secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """The keys that one process uses."""

    server: KeyPair
    """Key pair with which this process listens."""
    client: KeyPair
    """Key pair with which every node of the run dials."""
    relay_key: bytes
    """The public server key of all relays of the run."""
    guests: Mapping[bytes, str] = field(default_factory=dict)
    """Public key of a kind of guest -> name of the kind; empty if this process is not the learner.
    """
    known: Mapping[str, bytes] = field(default_factory=dict)
    """Address -> server key, for addresses that are written without a key."""

    @classmethod
    def of_learner(
        cls, server: KeyPair, secret: bytes, guests: Mapping[str, bytes] | None = None
    ) -> CurveKeys:
        """Return the keys of the learner, which does not dial.

        `guests` maps the name of each kind of guest to its secret.
        """
        return cls(
            server=server,
            client=_derive(secret, "client"),
            relay_key=_derive(secret, "relay").public,
            guests={_derive(each, "guest").public: name for name, each in (guests or {}).items()},
        )

    @classmethod
    def of_guest(cls, secret: bytes, server_key: bytes) -> CurveKeys:
        """Return the keys of a guest, which dials only the learner."""
        guest = _derive(secret, "guest")
        return cls(server=guest, client=guest, relay_key=server_key)

    @classmethod
    def of_node(cls, role: str, secret: bytes, *addresses: str) -> CurveKeys:
        """Return the keys of a relay or worker.

        Each call makes a new server key for a worker. If `addresses` contains an address with its
        key, the key also applies to the same address without a key.
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

        If the address contains its key or is in `known`, a single key is returned. Any other
        address may belong to a relay, or may be another name of a known process. So several keys
        are returned, and the caller tries the keys in turn.
        """
        own = parse_key(address) or self.known.get(address)
        if own is not None:
            return (own,)
        _, port = parse_address(address)
        namesakes = [key for known, key in self.known.items() if parse_address(known)[1] == port]
        return tuple(dict.fromkeys((*namesakes, self.relay_key, *self.known.values())))


def _derive(secret: bytes, purpose: str) -> KeyPair:
    context = f"echo-rl 2026-11 curve key pair: {purpose}"
    return KeyPair.of(blake3(secret, derive_key_context=context).digest())
