"""The cipher of chunks: AES-256-GCM, with a key for each form of each version.

    learner           encrypts each chunk once, hashes the result, and signs this hash and the hash
                      of the key
    any node          keeps and forwards an encrypted chunk whose hash matches, without the key
    node with a key   decrypts an image's chunk when it is written, and a coded block's chunk when
                      the block is decoded

So the links need not encrypt weights: the bytes of weights travel over sockets without CURVE
(`net/zmq.py`), which takes far less CPU. All other messages, tables and keys included, use CURVE.

**Keys.** The learner draws a key for each form of each version, in memory, and keeps no list of
keys. A key travels beside the signature of the manifest or table that commits to it
(`SignedManifest.key`). So the key arrives inside CURVE before the first chunk that needs it. A
wrong key is refused before any chunk is decrypted. A resumed learner's versions have another
lineage, with other names and keys.

**Nonces** are the indices of chunks. A form of a version has a single content, and its key encrypts
nothing else. So no nonce is used for two different texts.

**No tag.** The learner signs the hash of the encrypted chunk. A signed hash is stronger than GCM's
tag, because every receiver has the key of the tag. Without a tag, an encrypted chunk is as long as
the plain chunk.

**At rest.** A node keeps an image decrypted, because engines read it and deltas are written over
it. A second, encrypted image would cost as much memory as the model. If the image is on a disk,
only the owner of its file can read the file. A requested chunk is encrypted again. Key, nonce and
text are the same, so the result is the bytes that the learner has signed. Encrypted chunks that
have just arrived or been made are kept for a while, for further children (`SentChunks`). If an
image's memory may change, the hash is compared before a chunk is sent. A changed text must not be
encrypted with the nonce of the signed text. Encoded versions are kept in memory encrypted, with
their tables and therefore with their keys.

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
"""GCM's counter for a text's first block; counter 1 belongs to the tag."""


def hash_key(key: bytes) -> bytes:
    """Return the hash of a key, which the learner signs; b"" without a key."""
    return blake3(key, derive_key_context=_COMMITMENT).digest() if key else b""


def check_key(key: bytes, key_hash: bytes) -> None:
    """Check that a key has the hash that the learner has signed.

    Raises:
        RemoteProtocolError: if the key is wrong, is missing, or is given although none is expected.
    """
    if len(key) not in (0, KEY_BYTES) or hash_key(key) != key_hash:
        raise RemoteProtocolError("a key of a version that is not the one which the learner drew")


def crypt(key: bytes, index: int, data: Frame, out: memoryview) -> None:
    """Encrypt or decrypt a chunk; without a tag both are the same operation.

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
    """Where a run of encrypted bytes lies among a form's chunks, and their key."""

    key: bytes
    chunk: int
    """Index of the chunk in which the run begins."""
    start: int
    """Offset of the first byte of the run in that chunk."""
    chunk_bytes: int

    def decrypt(self, data: memoryview) -> memoryview:
        """Return the decrypted bytes of the run `data`.

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
"""Number of bytes of encrypted image chunks that are kept. Few bytes are enough, because children
that fetch the same item are only a few chunks apart (`weights/sender.py`)."""


class SentChunks:
    """The newest encrypted chunks of images, up to SENT_BYTES."""

    def __init__(self) -> None:
        """Start with no chunks."""
        self._frames: OrderedDict[tuple[bytes, int], Frame] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: bytes, index: int) -> Frame | None:
        """Return an encrypted chunk, or None if it is not kept.

        `key` is the key of the chunk's form, and identifies this form.
        """
        return self._frames.get((key, index))

    def add(self, key: bytes, index: int, frame: Frame) -> None:
        """Keep an encrypted chunk that was verified; drop the oldest chunks above SENT_BYTES."""
        if (key, index) in self._frames:
            return
        self._frames[key, index] = frame
        self._num_bytes += len(frame)
        while self._num_bytes > SENT_BYTES:
            self._num_bytes -= len(self._frames.popitem(last=False)[1])
