"""CURVE key pairs: admission of nodes, and identity of listeners.

All links are encrypted with CURVE (elliptic curve 25519, forward secret). Two kinds of keys answer
two questions:

* *Is this the right process?* Every process that listens has a **server key**, which is a part of
  its address: `tcp://host:port#KEY`. The learner sends these addresses to all nodes in its plans,
  so a user copies only the learner's key by hand.
* *Does the dialler belong to the run?* The run has one **secret**. The key pair with which every
  node of the run dials is derived from it, and a listener admits only that key.

A worker makes a new server key at each start, because its address is known from plans only. The
address of a relay is part of configurations. Its key is derived from the secret, so the join string
of the run is enough on every machine and stays valid when the relay restarts. As a consequence any
member of the run can pose as a relay if it also takes over the relay's address. It cannot pose as
the learner or change signed data: the join string has the fingerprint of the learner's key.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from echo.net.transport import parse_address, parse_key, without_key

KEY_BYTES = 32
SECRET_BYTES = 16
"""Bytes of the secret: the strength of the curve, and 22 letters in a join string."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """The keys of one process."""

    server: KeyPair
    """Key pair with which the process listens."""
    client: KeyPair
    """Key pair with which every node of the run dials."""
    relay_key: bytes
    """The server key of the run's relays."""
    known: Mapping[str, bytes] = field(default_factory=dict)
    """Server keys by address, for addresses that are written without one."""

    @classmethod
    def of_learner(cls, server: KeyPair, secret: bytes) -> CurveKeys:
        """Return the keys of the learner, which does not dial."""
        return cls(
            server=server,
            client=_derive(secret, "client"),
            relay_key=_derive(secret, "relay").public,
        )

    @classmethod
    def of_node(cls, role: str, secret: bytes, *addresses: str) -> CurveKeys:
        """Return the keys of a relay, or new ones of a worker.

        The keys in `addresses` are used for the same addresses written without a key.
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
        """Return the possible keys of the process at `address`, the likeliest first.

        There is one key if the address has a key or is known. Another address without a key may be
        a relay's, or another name of a known process: its keys are tried in turn.
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
