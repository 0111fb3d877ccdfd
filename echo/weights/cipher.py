"""Chunk cipher: AES-256-GCM, a key for each form of each version, a nonce for each chunk.

    learner          chunk -> encrypted, once -> hash of that -> signed, with the hash of the key
    whoever has it   hash right? -> kept and passed on, as it came; no key is needed for that
    with the key     -> decrypted: an image into its place, a coded block when it is decoded

So weights need no encryption by their links: their bytes travel over sockets without CURVE
(`net/zmq.py`), which costs far less. Everything else, tables and keys among it, stays inside CURVE.

**Keys.** The learner draws one for each form of each version, in memory; it keeps no list. A key
travels beside the signature of the manifest or table that commits to it (`SignedManifest.key`): so
it comes before the first chunk that needs it, from the peer that announces the version inside
CURVE, and a wrong one is refused before anything is decrypted. Versions of a resumed learner are of
another lineage, with other names and other keys.

**Nonces** are the indices of chunks. A form of a version has one content, and its key nothing else
to encrypt: no nonce ever covers two texts.

**No tag.** The learner has signed the hash of what is sent, which says more than a tag whose key
every receiver has. So a chunk is as long as what it holds.

**At rest.** A node keeps an image as it is: an engine reads it, deltas are written over it, and on
a disk the same pages lie in a file that only its owner reads. A second, encrypted image would cost
as much memory as the model. A chunk that is asked for is encrypted again, to the very bytes that
the learner has signed (same key, same nonce, same text), and for siblings what has just come or
been made is kept for a while (`SentChunks`). Where memory may change, the hash is compared before
anything leaves: a text that is not the signed one must not meet its nonce. Coded forms are kept in
memory as they came, with their tables and so their keys.

With `security.curve = false` nothing is encrypted, and hashes are of the plain chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from echo.core.errors import RemoteProtocolError
from echo.wire.codec import Frame

KEY_BYTES = 32

# The hash of a key is signed where the key itself travels: it must tell nothing else.
_COMMITMENT = "echo-rl 2026-11 key of one form of a version"
_BLOCK_BYTES = 16
_NONCE_BYTES = 12
_FIRST_COUNTER = 2
"""Of the counter of GCM in the first block of a text; 1 is the tag's."""


def hash_key(key: bytes) -> bytes:
    """Return what is signed in the place of a key: a hash of it, nothing for no key."""
    return blake3(key, derive_key_context=_COMMITMENT).digest() if key else b""


def check_key(key: bytes, key_hash: bytes) -> None:
    """Refuse a key that is not the one which the learner has committed to.

    Raises:
        RemoteProtocolError: if it is another one, or missing, or none was to come.
    """
    if len(key) not in (0, KEY_BYTES) or hash_key(key) != key_hash:
        raise RemoteProtocolError("a key of a version that is not the one which the learner drew")


def crypt(key: bytes, index: int, data: Frame, out: memoryview) -> None:
    """Encrypt chunk `index`, or decrypt it, which is the same without a tag.

    Args:
        key: of the form of a version that the chunk belongs to, KEY_BYTES long.
        index: of the chunk.
        data: the whole chunk.
        out: where it goes; of the same length, and may be the same memory.
    """
    nonce = index.to_bytes(_NONCE_BYTES, "big")
    _context(key, modes.GCM(nonce)).update_into(data, out)


def _context(key: bytes, mode: modes.GCM | modes.CTR) -> CipherContext:
    return Cipher(algorithms.AES256(key), mode).encryptor()


@dataclass(frozen=True, slots=True)
class Encrypted:
    """Where a run of bytes lies in the chunks of a form, and how to decrypt it."""

    key: bytes
    chunk: int
    """In which it begins."""
    start: int
    """Its first byte in that chunk."""
    chunk_bytes: int

    def decrypt(self, data: memoryview) -> memoryview:
        """Return the run; parts of chunks are decrypted by the counter of their blocks."""
        out = np.empty(len(data), np.uint8).data
        done, chunk, start = 0, self.chunk, self.start
        while done < len(data):
            stop = min(len(data), done + self.chunk_bytes - start)
            counter, skipped = divmod(start, _BLOCK_BYTES)
            counter += _FIRST_COUNTER
            nonce = chunk.to_bytes(_NONCE_BYTES, "big") + counter.to_bytes(4, "big")
            context = _context(self.key, modes.CTR(nonce))
            context.update(bytes(skipped))
            context.update_into(data[done:stop], out[done:stop])
            done, chunk, start = stop, chunk + 1, 0
        return out


SENT_BYTES = 8 << 20
"""Kept of what was sent of images: siblings are some chunks apart (`weights/sender.py`)."""


class SentChunks:
    """Encrypted chunks of images that came or were made recently."""

    def __init__(self) -> None:
        """Start with none."""
        self._frames: OrderedDict[tuple[bytes, int], Frame] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: bytes, index: int) -> Frame | None:
        """Return a chunk as it travels, if it is here; the key names the form."""
        return self._frames.get((key, index))

    def add(self, key: bytes, index: int, frame: Frame) -> None:
        """Keep a chunk that has the hash which the learner signed, in the place of the oldest."""
        if (key, index) in self._frames:
            return
        self._frames[key, index] = frame
        self._num_bytes += len(frame)
        while self._num_bytes > SENT_BYTES:
            self._num_bytes -= len(self._frames.popitem(last=False)[1])
