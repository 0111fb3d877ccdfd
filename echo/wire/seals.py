"""Seals of routed messages: proof that they come from the other end, unchanged and only once.

CURVE ends at each hop, so a relay sees what passes through it. It may be any holder of the run's
secret. It can delay and drop messages; it must not change a reward, forge an Ack or a Finish, or
replay one of an earlier time. So node and learner share two keys that no relay has, one for each
direction, and every routed message bears a seal, except for those that make the keys (UNSEALED of
`messages.py`). A relay forwards seals as it forwards all else.

**Agreement.** Both processes have a key pair of curve 25519. Each Hello has the node's public key
and a nonce, each Welcome the learner's public key, a nonce, and the hash of the Hello that it
answers. The learner signs the Welcome with the key whose fingerprint is in the join string. So the
node knows that the learner has its very Hello, with its public key, and that it has the learner's;
a relay that puts a key of its own into either is found out. The shared secret of the pairs, both
nonces and the Hello's hash make the keys of this **channel**. (Without a fingerprint, on links
without CURVE, the first learner that answers is believed, as in all else.)

The learner knows less: the sender of a message is also the sender of that Hello. A relay may say
Hello for a node that has not come, as any member may say Hello for itself. It cannot speak in a
channel that a node has begun.

**Seal.** (channel, number, code): eight bytes that name the channel, the number of the message in
its direction, and BLAKE3 keyed with the direction's key over number, source, target, message and
payload frames. A receiver takes each of the last WINDOW numbers once: a role does not always send
in the order in which it decides, and a relay that changes its own link may mix up a few messages.

**Replay.** Nonces are new with each joining, so what was sealed before a reconnect, another parent
or a restart of either end is of another channel. It is dropped without blame: honest messages are
late, too. A message of this channel with a wrong code, without one, or with a number that was there
already was forged or replayed on the way (`ForgedError`).

**Change of channel.** A node that says Hello again is heard and answered in its former channel
until the learner has opened a message of the new one, in which the node seals from Welcome on.

Only authenticity is kept, not secrecy: relays hold the weights in clear, and rollouts tell less.
BLAKE3 is the hash of everything else here.

The keys lie outside of the role, as the learner's signing key does: an event log has codes, but no
key.
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
"""Channels whose keys are kept at hand; those of others are computed again."""
NONCE_BYTES, NAME_BYTES, CODE_BYTES = 16, 8, 16
WINDOW = 1024
"""Messages by which one may be late in its direction, and count all the same."""

_PRIVATE = "echo-rl 2026-11 private key of a process for seals"
_NONCE = "echo-rl 2026-11 nonce of a joining"
_CHANNEL = "echo-rl 2026-11 channel of a node and its learner"
_KEYS = "echo-rl 2026-11 keys of a channel, up and down"


class Seal(msgspec.Struct, frozen=True, array_like=True):
    """Proof that a routed message comes from the other end."""

    channel: Annotated[bytes, Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
    number: Annotated[int, Meta(ge=1, le=1 << 62)]
    code: Annotated[bytes, Meta(min_length=CODE_BYTES, max_length=CODE_BYTES)]


class SealKeys:
    """The key pair of one process, and what follows from it."""

    def __init__(self, secret: bytes) -> None:
        """Take random bytes that no other process has, new with each process."""
        self._secret, self._num_nonces = secret, 0
        private = blake3(secret, derive_key_context=_PRIVATE).digest()
        self._private = X25519PrivateKey.from_private_bytes(private)
        self._keys = functools.lru_cache(MAX_CHANNELS)(self._derive)

    def seal_key(self) -> bytes:
        """Return the public key, for Hello or Welcome."""
        return self._private.public_key().public_bytes_raw()

    def nonce(self) -> bytes:
        """Return bytes that were never returned before."""
        self._num_nonces += 1
        number = self._num_nonces.to_bytes(8, "big")
        return blake3(self._secret + number, derive_key_context=_NONCE).digest(length=NONCE_BYTES)

    def code(self, theirs: bytes, channel: bytes, is_up: bool, parts: Sequence[_Bytes]) -> bytes:
        """Return the code of a message; empty where `theirs` is no public key.

        Args:
            theirs: the other end's public key.
            channel: as `channel_of` returns it.
            is_up: whether the message goes to the learner.
            parts: what is sealed.
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
    """Return what both ends call a channel, 32 bytes.

    Args:
        hello: hash of the Hello, which has the node's name, public key and nonce.
        nonce: the learner's.
        learner_key: its public key for seals.
        run_id: of the run.
    """
    parts = msgspec.msgpack.encode((hello, nonce, learner_key, run_id))
    return blake3(parts, derive_key_context=_CHANNEL).digest()


@dataclass(slots=True, eq=False)
class Channel:
    """One joining of one node, at one of its two ends."""

    keys: SealKeys
    theirs: bytes
    """The other end's public key."""
    channel: bytes
    is_learner: bool
    """Whether this is the learner's end."""
    num_sent: int = 0
    newest: int = 0
    """The highest number that was opened."""
    _opened: int = 0
    """Bit i is set where newest - i was opened."""

    @property
    def name(self) -> bytes:
        """The channel as seals name it."""
        return self.channel[:NAME_BYTES]

    @property
    def is_possible(self) -> bool:
        """Whether the other end's key is one."""
        return bool(self.keys.code(self.theirs, self.channel, True, ()))

    def seal(self, source: str, target: str, body: _Bytes, payload: Sequence[_Bytes]) -> Seal:
        """Return the seal of the next message to the other end."""
        self.num_sent += 1
        code = self._code(not self.is_learner, self.num_sent, source, target, body, payload)
        return Seal(self.name, self.num_sent, code)

    def open(
        self, seal: Seal, source: str, target: str, body: _Bytes, payload: Sequence[_Bytes]
    ) -> None:
        """Take a message of the other end.

        Raises:
            ForgedError: if it is not that, or was here before.
        """
        age = self.newest - seal.number
        if age >= WINDOW or (age >= 0 and self._opened >> age & 1):
            raise ForgedError(f"it is number {seal.number}, which was here before: replayed")
        right = self._code(self.is_learner, seal.number, source, target, body, payload)
        if not hmac.compare_digest(right, seal.code):  # in the same time wherever they differ
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
    """The channels of a node and its learner at one end: one in use, and one that may follow."""

    confirmed: Channel | None = None
    """The last in which a message was opened here."""
    offered: Channel | None = None
    """A channel that was agreed on since."""

    @property
    def newest(self) -> Channel | None:
        """The channel in which a node seals."""
        return self.offered or self.confirmed

    @property
    def proven(self) -> Channel | None:
        """The channel in which the learner seals."""
        return self.confirmed or self.offered

    def open(
        self, seal: Seal | None, source: str, target: str, body: _Bytes, payload: Sequence[_Bytes]
    ) -> bool:
        """Return whether a message is of one of the channels, so that it counts.

        Raises:
            ForgedError: if it was made, changed or replayed on the way.
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
