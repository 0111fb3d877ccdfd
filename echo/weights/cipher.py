"""The cipher of chunks: AES-256-GCM, with a key for each form of each version.

    learner           encrypts each chunk once, hashes the result, and signs this hash and the hash
                      of the key
    any node          keeps and forwards an encrypted chunk whose hash matches, without the key
    node with a key   decrypts an image's chunk when writing the chunk, and a coded block when
                      decoding the block

Encrypted chunks are sent over sockets without CURVE (`net/zmq.py`). This takes far less CPU than a
second encryption by CURVE. All other messages, including tables and keys, use CURVE.

**Keys.** The learner draws a key for each form of each version, and keeps keys only in memory. Each
manifest or table contains the hash of the key, and is sent together with the key
(`SignedManifest.key`). So the key arrives inside CURVE before the first chunk. A wrong key is
refused before any chunk is decrypted. After a resume, the learner's versions have new names and new
keys.

**Nonces** are the indices of chunks. A key encrypts one form of one version, and the content of
this form never changes. So no nonce is used for two different texts.

**No tag.** The learner signs the hash of the encrypted chunk. A signed hash is stronger than GCM's
tag: every receiver has the key and could make a valid tag. Without a tag, an encrypted chunk is as
long as the plain chunk.

**At rest.** A node keeps images decrypted, because engines read images and deltas are written over
them. A second, encrypted image would cost as much memory as the model. The file of an image on disk
is readable only by its owner. To send a chunk, the node encrypts the chunk again. Key, nonce and
text are the same, so the result is the bytes that the learner has signed. Recent encrypted chunks
are cached for further children (`SentChunks`). A nonce must not encrypt a second text. So if an
image's memory may change, the node hashes the encrypted chunk, and sends the chunk only if the
learner has signed this hash. Encoded versions are kept in memory encrypted, together with their
tables and keys.

With `security.curve = false`, chunks are not encrypted, and hashes are of the plain chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from echo.core.errors import RemoteProtocolError
from echo.wire.codec import Frame

KEY_BYTES = 32  # of AES-256

# The context in which a key is hashed. The signed hash must reveal nothing else of the key.
_COMMITMENT = "echo-rl 2026-11 key of one form of a version"
_BLOCK_BYTES = 16  # of AES, which GCM's counter counts
_NONCE_BYTES = 12  # of GCM: with another length, GCM would hash the nonce first
_FIRST_COUNTER = 2
"""GCM's counter of the first block of a text; counter 1 is reserved for the tag."""


def hash_key(key: bytes) -> bytes:
    """Return the hash of a key; b"" if there is no key. The learner signs the hash."""
    return blake3(key, derive_key_context=_COMMITMENT).digest() if key else b""


def check_key(key: bytes, key_hash: bytes) -> None:
    """Check that a key has the hash that the learner has signed.

    Raises:
        RemoteProtocolError: if the key is wrong, missing or unexpected.
    """
    if len(key) not in (0, KEY_BYTES) or hash_key(key) != key_hash:
        raise RemoteProtocolError("a key of a version that is not the one which the learner drew")


def crypt(key: bytes, index: int, data: Frame, out: memoryview) -> None:
    """Encrypt or decrypt a chunk. Without a tag, encryption and decryption are the same operation.

    Args:
        key: the key of the chunk's form and version, KEY_BYTES long.
        index: the index of the chunk.
        data: the whole chunk.
        out: memory for the result, of the same length; it may be the memory of `data`.
    """
    nonce = index.to_bytes(_NONCE_BYTES, "big")
    _context(key, modes.GCM(nonce)).update_into(data, out)


def _context(key: bytes, mode: modes.GCM | modes.CTR) -> CipherContext:
    return Cipher(algorithms.AES256(key), mode).encryptor()


@dataclass(frozen=True, slots=True)
class Encrypted:
    """Where a run of encrypted bytes lies in the chunks of a form, and the form's key."""

    key: bytes
    chunk: int
    """Index of the chunk in which the run begins."""
    start: int
    """Offset of the first byte of the run in that chunk."""
    chunk_bytes: int

    def decrypt(self, data: memoryview) -> memoryview:
        """Decrypt the bytes `data` of the run, and return the result.

        The run may begin and end anywhere in a chunk, and may span several chunks.
        """
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
"""Largest size of the cache in bytes. Children that fetch the same item are only a few chunks apart
(`weights/sender.py`), so a small cache is enough.
"""


class SentChunks:
    """A cache of encrypted image chunks, which holds at most SENT_BYTES."""

    def __init__(self) -> None:
        """Start with no chunks."""
        self._frames: OrderedDict[tuple[bytes, int], Frame] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: bytes, index: int) -> Frame | None:
        """Return an encrypted chunk; None if the cache lacks the chunk.

        `key`, the key of the chunk's form, identifies the form.
        """
        return self._frames.get((key, index))

    def add(self, key: bytes, index: int, frame: Frame) -> None:
        """Add a verified encrypted chunk. Above SENT_BYTES, drop the oldest chunks."""
        if (key, index) in self._frames:
            return
        self._frames[key, index] = frame
        self._num_bytes += len(frame)
        while self._num_bytes > SENT_BYTES:
            self._num_bytes -= len(self._frames.popitem(last=False)[1])
