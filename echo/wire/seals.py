"""Seals of routed messages, which prove sender and content, and prevent replays.

CURVE encrypts each hop separately, so a relay sees the messages that it forwards. Any holder of the
run's secret may be a relay. A relay can delay and drop messages, but must not be able to change a
reward, forge an Ack or a Finish, or replay an earlier message. So node and learner share two keys
that no relay has, one for each direction. Every routed message has a seal, except the messages that
agree on the keys (UNSEALED in `messages.py`). Relays forward seals unchanged.

**Agreement.** Both processes have a key pair of curve 25519. Each Hello has the node's public key
and a nonce. Each Welcome has the learner's public key, a nonce, and the hash of the answered Hello.
The learner signs the Welcome with the key whose fingerprint is in the join string. So the node can
verify that the learner received the Hello unchanged, and that the public key in the Welcome is the
learner's. A relay that replaces one of the two public keys is detected. Node and learner compute
two secret keys, one for each direction, from the shared secret of the key pairs, both nonces and
the Hello's hash. The messages that these two secret keys seal form a **channel**. On links without
CURVE there is no fingerprint, and the node accepts the first learner that answers.

The learner can verify only that a message comes from the sender of the Hello. Any node of the run
may send a Hello, so a relay may send a Hello in the name of an absent node. But a relay cannot send
messages in a channel that another node has begun.

**Seal.** (channel, number, code). `channel` is eight bytes that name the channel. `number` counts
the messages of one direction. `code` is BLAKE3, keyed with the direction's key, over number,
source, target, message and payload frames. A receiver accepts each of the last WINDOW numbers once,
in any order, because roles and relays may reorder messages.

**Replay.** Each joining has new nonces. So a message from before a reconnect, a change of parent or
a restart belongs to an earlier channel. Such a message is dropped silently, since an honest message
may be late. `ForgedError` is raised in three cases: a message has no seal, a wrong code in the
present channel, or a repeated number.

**Change of channel.** After a new Welcome, a node seals in the new channel. The learner uses the
former channel, in both directions, until a message of the new channel has been verified.

Seals give authenticity and no secrecy: relays can read rollouts.

The keys of channels are stored outside the role, as is the learner's signing key. So an event log
contains no keys.
"""

from __future__ import annotations

import functools
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from msgspec import Meta

from echo.core.errors import ForgedError

_Bytes = bytes | bytearray | memoryview

MAX_CHANNELS = 1 << 14
"""Number of channels whose keys are cached. Keys of other channels are computed again if needed."""
NONCE_BYTES, NAME_BYTES, CODE_BYTES = 16, 8, 16
"""Size in bytes of the nonces of a joining, of a channel's name, and of a seal's code. A node
without the keys cannot guess a code of 16 bytes. A name need only differ between the channels of a
run.
"""
WINDOW = 1024
"""A message is no longer accepted once this number of later messages in the same direction has been
verified.
"""

_PRIVATE = "echo-rl 2026-11 private key of a process for seals"
_NONCE = "echo-rl 2026-11 nonce of a joining"
_CHANNEL = "echo-rl 2026-11 channel of a node and its learner"
_KEYS = "echo-rl 2026-11 keys of a channel, up and down"


class Seal(msgspec.Struct, frozen=True, array_like=True):
    """The seal of a routed message: the name of its channel, its number, and its code."""

    channel: Annotated[bytes, Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
    number: Annotated[int, Meta(ge=1, le=1 << 62)]
    code: Annotated[bytes, Meta(min_length=CODE_BYTES, max_length=CODE_BYTES)]


class SealKeys:
    """The key pair, nonces and channel keys of a process."""

    def __init__(self, secret: bytes) -> None:
        """Derive the key pair from `secret`, random bytes that only this process has."""
        self._secret, self._num_nonces = secret, 0
        private = blake3(secret, derive_key_context=_PRIVATE).digest()
        self._private = X25519PrivateKey.from_private_bytes(private)
        self._keys = functools.lru_cache(MAX_CHANNELS)(self._derive)

    def seal_key(self) -> bytes:
        """Return the public key that a Hello or a Welcome sends."""
        return self._private.public_key().public_bytes_raw()

    def nonce(self) -> bytes:
        """Return a new nonce, different at each call."""
        self._num_nonces += 1
        number = self._num_nonces.to_bytes(8, "big")
        return blake3(self._secret + number, derive_key_context=_NONCE).digest(length=NONCE_BYTES)

    def code(self, theirs: bytes, channel: bytes, is_up: bool, parts: Sequence[_Bytes]) -> bytes:
        """Return the authentication code of a message.

        The code is empty if `theirs` is not a valid public key.

        Args:
            theirs: the public key of the other end.
            channel: the id of the channel, the result of `channel_of`.
            is_up: whether the message goes to the learner.
            parts: the bytes to authenticate.
        """
        keys = self._keys(theirs, channel)
        if not keys:
            return b""
        hasher = blake3(key=keys[is_up])
        for part in parts:
            hasher.update(part)
        return hasher.digest(length=CODE_BYTES)

    def _derive(self, theirs: bytes, channel: bytes) -> tuple[bytes, ...]:
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError:
            return ()
        keys = blake3(shared + channel, derive_key_context=_KEYS).digest(length=64)
        return keys[:32], keys[32:]


def channel_of(*, hello: bytes, nonce: bytes, learner_key: bytes, run_id: str) -> bytes:
    """Return the id of a channel, 32 bytes. Both ends compute the same id.

    Args:
        hello: the hash of the Hello.
        nonce: the nonce in the learner's Welcome.
        learner_key: the learner's public key for seals.
        run_id: the id of the run.
    """
    parts = msgspec.msgpack.encode((hello, nonce, learner_key, run_id))
    return blake3(parts, derive_key_context=_CHANNEL).digest()


@dataclass(slots=True, eq=False)
class Channel:
    """One end of a channel between a node and the learner."""

    keys: SealKeys
    theirs: bytes
    """The public key of the process at the other end."""
    channel: bytes
    is_learner: bool
    """Whether this is the learner's end."""
    num_sent: int = 0
    newest: int = 0
    """The highest number among the messages opened at this end."""
    _opened: int = 0
    """Bitmap of opened messages; bit i is for message number `newest - i`."""

    @property
    def name(self) -> bytes:
        """The name of the channel in seals, eight bytes."""
        return self.channel[:NAME_BYTES]

    @property
    def is_possible(self) -> bool:
        """Whether `theirs` is a valid public key."""
        return bool(self.keys.code(self.theirs, self.channel, True, ()))

    def seal(self, source: str, target: str, body: _Bytes, payload: Sequence[_Bytes]) -> Seal:
        """Return the seal of the next message that this end sends."""
        self.num_sent += 1
        code = self._code(not self.is_learner, self.num_sent, source, target, body, payload)
        return Seal(self.name, self.num_sent, code)

    def open(
        self, seal: Seal, source: str, target: str, body: _Bytes, payload: Sequence[_Bytes]
    ) -> None:
        """Verify the seal of a message from the other end, and mark the seal's number as used.

        Raises:
            ForgedError: if the message was forged or replayed.
        """
        age = self.newest - seal.number
        if age >= WINDOW or (age >= 0 and self._opened >> age & 1):
            raise ForgedError(f"it is number {seal.number}, which was here before: replayed")
        right = self._code(self.is_learner, seal.number, source, target, body, payload)
        if not hmac.compare_digest(right, seal.code):  # in constant time
            raise ForgedError("its seal is wrong: changed or forged")
        if age < 0:
            former = 0 if -age >= WINDOW else self._opened << -age
            self.newest, self._opened = seal.number, former % (1 << WINDOW) | 1
        else:
            self._opened |= 1 << age

    def _code(
        self,
        is_up: bool,
        number: int,
        source: str,
        target: str,
        body: _Bytes,
        payload: Sequence[_Bytes],
    ) -> bytes:
        sizes = [f.nbytes if isinstance(f, memoryview) else len(f) for f in (body, *payload)]
        head = msgspec.msgpack.encode((number, source, target, sizes))
        return self.keys.code(self.theirs, self.channel, is_up, (head, body, *payload))


@dataclass(slots=True)
class Seals:
    """The present and the next channel between a node and the learner, stored at one end."""

    confirmed: Channel | None = None
    """The channel of the last message opened at this end; None before the first message."""
    offered: Channel | None = None
    """The channel of the latest Welcome, while no message of this channel was opened; otherwise
    None.
    """

    @property
    def newest(self) -> Channel | None:
        """The channel in which the node seals messages; None before the first Welcome."""
        return self.offered or self.confirmed

    @property
    def proven(self) -> Channel | None:
        """The channel in which the learner seals messages; None before the first Welcome."""
        return self.confirmed or self.offered

    def open(
        self, seal: Seal | None, source: str, target: str, body: _Bytes, payload: Sequence[_Bytes]
    ) -> bool:
        """Verify the seal of a message; return whether the message belongs to a current channel.

        The caller must ignore messages of earlier channels. These may be honest messages that
        arrive late.

        Raises:
            ForgedError: if the message was forged, changed or replayed on the way.
        """
        if seal is None:
            raise ForgedError("it has no seal: forged")
        for channel in (self.offered, self.confirmed):
            if channel is not None and channel.name == seal.channel:
                channel.open(seal, source, target, body, payload)
                if channel is self.offered:
                    self.confirmed, self.offered = channel, None
                return True
        return False
