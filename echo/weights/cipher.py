"""Chunk cipher: AES-256-GCM, a key for each form of each version, a nonce for each chunk.

    learner          chunk -> encrypted once -> hashed -> hash signed, with the hash of the key
    any node         hash matches? -> kept and forwarded as it arrived, without the key
    with the key     -> decrypted: an image when it is written, a coded block when it is decoded

So weights need no encryption by their links: their bytes travel over sockets without CURVE
(`net/zmq.py`), which costs far less. All other messages, tables and keys included, use CURVE.

**Keys.** The learner draws a key for each form of each version, in memory, and keeps no list. A key
travels beside the signature of the manifest or table that commits to it (`SignedManifest.key`). So
it arrives inside CURVE before the first chunk that needs it, and a wrong key is refused before any
chunk is decrypted. Versions of a resumed learner have another lineage, with other names and keys.

**Nonces** are the indices of chunks. A form of a version has one content, and its key encrypts
nothing else, so no nonce is used for two texts.

**No tag.** The learner signs the hash of the encrypted chunk. That is stronger than a tag, whose
key every receiver has. So encryption does not lengthen a chunk.

**At rest.** A node keeps an image decrypted: an engine reads it, deltas are written over it, and on
a disk the same pages lie in a file that only its owner can read. A second, encrypted image would
cost as much memory as the model. A requested chunk is encrypted again, to the same bytes that the
learner has signed (same key, nonce and text). Encrypted chunks that have just arrived or been made
are kept for a while, for siblings (`SentChunks`). Where memory may change, the hash is compared
before a chunk is sent: a changed text must not be encrypted with the nonce of the signed one.
Encoded versions are kept in memory encrypted, with their tables and so their keys.

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

# The context in which a key is hashed. The signed hash must reveal nothing else of the key.
_COMMITMENT = "echo-rl 2026-11 key of one form of a version"
_BLOCK_BYTES = 16
_NONCE_BYTES = 12
_FIRST_COUNTER = 2
"""GCM's counter in the first block of a text; 1 is used for the tag."""


def hash_key(key: bytes) -> bytes:
    """Return the hash of a key, which the learner signs instead of the key; empty without a key."""
    return blake3(key, derive_key_context=_COMMITMENT).digest() if key else b""


def check_key(key: bytes, key_hash: bytes) -> None:
    """Refuse a key whose hash is not the one that the learner has signed.

    Raises:
        RemoteProtocolError: if the key is wrong, missing, or given where none is expected.
    """
    if len(key) not in (0, KEY_BYTES) or hash_key(key) != key_hash:
        raise RemoteProtocolError("a key of a version that is not the one which the learner drew")


def crypt(key: bytes, index: int, data: Frame, out: memoryview) -> None:
    """Encrypt or decrypt chunk `index`; without a tag both are the same operation.

    Args:
        key: of the chunk's form and version, KEY_BYTES long.
        index: of the chunk.
        data: the whole chunk.
        out: memory of the result, of the same length; may be the memory of `data`.
    """
    nonce = index.to_bytes(_NONCE_BYTES, "big")
    _context(key, modes.GCM(nonce)).update_into(data, out)


def _context(key: bytes, mode: modes.GCM | modes.CTR) -> CipherContext:
    return Cipher(algorithms.AES256(key), mode).encryptor()


@dataclass(frozen=True, slots=True)
class Encrypted:
    """Where a run of encrypted bytes lies in the chunks of a form, with the key of these chunks."""

    key: bytes
    chunk: int
    """Index of the chunk in which the run begins."""
    start: int
    """Offset of its first byte in that chunk."""
    chunk_bytes: int

    def decrypt(self, data: memoryview) -> memoryview:
        """Return the run `data` decrypted; it may begin and end anywhere in a chunk."""
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
"""Bytes of encrypted image chunks that are kept; siblings are a few chunks apart
(`weights/sender.py`)."""


class SentChunks:
    """Encrypted chunks of images that have recently arrived or been made."""

    def __init__(self) -> None:
        """Start without chunks."""
        self._frames: OrderedDict[tuple[bytes, int], Frame] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: bytes, index: int) -> Frame | None:
        """Return a chunk as it travels, or None if it is not kept; the key identifies the form."""
        return self._frames.get((key, index))

    def add(self, key: bytes, index: int, frame: Frame) -> None:
        """Keep a verified chunk, and drop the oldest beyond the bound."""
        if (key, index) in self._frames:
            return
        self._frames[key, index] = frame
        self._num_bytes += len(frame)
        while self._num_bytes > SENT_BYTES:
            self._num_bytes -= len(self._frames.popitem(last=False)[1])
