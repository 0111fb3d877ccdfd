"""The manifest of a version: its tensors, the hashes of its chunks, the learner's signature.

A version is one byte image: the bytes of all tensors, one tensor after the other. The image is
divided into chunks of equal size; the last chunk may be shorter. The manifest lists the tensors and
the BLAKE3 hash of each chunk. The learner signs the hash of the manifest, the **root**. So a single
signature covers every byte. A relay verifies each chunk before forwarding, so a damaged chunk stops
at the first node. If chunks are sent encrypted (`cipher.py`), the manifest has the hashes of both
the plain and the encrypted chunks.

A version may also be sent as an **encoded version**: a delta against a version that the receiver
holds, or a keyframe. An encoded version consists of segments, and the table of each segment is
signed (`encoded.py`). There are two kinds of table. A table of the first kind has the hashes of the
decoded image chunks. The last such table contains the manifest. A table of the second kind has the
hashes of the replaced words of the base. These words and the signed changes determine every decoded
byte. So the learner can send the delta before it hashes the image. The learner hashes the image
during training, and then sends the manifest. A manifest that is sent later than the delta is called
the **seal** of the version.

Sizes from the network are checked against each other before memory is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo.core.errors import RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.weights.cipher import check_key, crypt, hash_key
from echo.wire.messages import ITEM_BYTES

# --- manifest -------------------------------------------------------------------------------------

HASH_BYTES = 32  # of BLAKE3
MIN_CHUNK_BYTES = 1 << 10
"""Smallest size of a chunk in bytes. The hashes of such chunks take 3 % of the image. With much
smaller chunks, the hashes would be a large part of each version.
"""
MAX_CHUNK_BYTES = 16 << 20
"""Largest size of a chunk in bytes. Chunks above 1 MiB make encryption slower, and chunks above 4
MiB do not make a transfer faster (measured on loopback).
"""


class TensorSpec(msgspec.Struct, frozen=True):
    """The type and place of one tensor in a version's byte image."""

    name: str
    dtype: str
    """The tensor's dtype, a key of ITEM_BYTES."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the tensor's first byte in the image."""
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """The description of one version, which the learner signs."""

    run_id: str
    version: PolicyVersion
    tensors: tuple[TensorSpec, ...]
    num_bytes: int
    """Number of bytes of the image."""
    chunk_bytes: int
    chunk_hashes: bytes
    """The BLAKE3-256 hashes of all chunks of the image, concatenated."""
    sent_hashes: bytes = b""
    """The BLAKE3-256 hashes of all encrypted chunks; empty if chunks are sent without encryption.
    """
    key_hash: bytes = b""
    """Hash of the key of the chunks (`cipher.py`); empty if chunks are not encrypted."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks with a hash in the manifest."""
        return len(self.chunk_hashes) // HASH_BYTES

    @property
    def image_hash(self) -> bytes:
        """The hash that a worker's installed weights must have (`hash_image`)."""
        return blake3(self.chunk_hashes).digest()

    @property
    def chunks(self) -> range:
        """The indices of all chunks of the image, including chunks without a hash."""
        return range(-(-self.num_bytes // self.chunk_bytes))

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Return the byte range [start, stop) of chunk `index` in the image."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.num_bytes)

    def chunk_hash(self, index: int) -> bytes:
        """Return the hash that chunk `index` must have in the image."""
        return self.chunk_hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]

    def sent_hash(self, index: int) -> bytes:
        """Return the hash of chunk `index` in the form in which it is sent, encrypted or plain."""
        hashes = self.sent_hashes or self.chunk_hashes
        return hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]


class SignedManifest(msgspec.Struct, frozen=True, array_like=True):
    """A signed manifest or segment table. It is sent only over links that CURVE encrypts.

    `body` has the signed bytes, which contain the hash of `key`. `signature` is the signature of
    the hash of `body`.
    """

    body: bytes
    signature: bytes
    key: bytes = b""
    """The key of the chunks; empty if the chunks are not encrypted."""

    def __repr__(self) -> str:
        return f"SignedManifest(root={self.root.hex()})"  # the key must not appear in a log

    @property
    def root(self) -> bytes:
        """The hash of `body`. For a manifest, this is the root of the version."""
        return blake3(self.body).digest()


_manifest_decoder = msgspec.msgpack.Decoder(Manifest)
_signed_decoder = msgspec.msgpack.Decoder(SignedManifest)


def provisional(manifest: Manifest, version: PolicyVersion) -> Manifest:
    """Return a manifest of `version` that has the layout of `manifest` and no hashes."""
    return msgspec.structs.replace(
        manifest, version=version, chunk_hashes=b"", sent_hashes=b"", key_hash=b""
    )


class ChunkHashes(NamedTuple):
    """BLAKE3-256 hashes of some chunks of an image, concatenated."""

    plain: bytes
    sent: bytes
    """The hashes of the encrypted chunks; empty if chunks are not encrypted."""


def hash_chunks(
    image: bytes | bytearray | memoryview, chunk_bytes: int, chunks: range, key: bytes = b""
) -> ChunkHashes:
    """Return the hashes of some chunks of an image, both plain and encrypted.

    Args:
        image: the bytes of the image.
        chunk_bytes: size of a chunk.
        chunks: indices of the chunks to hash.
        key: a key that was never used before; empty if chunks are not encrypted.
    """
    view = memoryview(image)
    plain, sent = [], []
    encrypted = memoryview(bytearray(min(chunk_bytes, len(view)) if key else 0))
    for index in chunks:
        chunk = view[index * chunk_bytes : (index + 1) * chunk_bytes]
        plain.append(blake3(chunk).digest())
        if key:  # while the chunk is in the caches
            crypt(key, index, chunk, encrypted[: len(chunk)])
            sent.append(blake3(encrypted[: len(chunk)]).digest())
    return ChunkHashes(b"".join(plain), b"".join(sent))


def hash_image(image: bytes | bytearray | memoryview, chunk_bytes: int) -> bytes:
    """Return the hash of the hashes of an image's plain chunks."""
    chunks = range(-(-len(image) // chunk_bytes))
    return blake3(hash_chunks(image, chunk_bytes, chunks).plain).digest()


def with_hashes(manifest: Manifest, parts: Iterable[ChunkHashes], key: bytes = b"") -> Manifest:
    """Return `manifest` with the hashes of all chunks.

    Args:
        manifest: a manifest without hashes.
        parts: the hashes of all chunks, in the order of the chunks.
        key: the key of the chunks; empty if they are not encrypted.
    """
    plain, sent = zip(*parts, strict=True)
    hashed = msgspec.structs.replace(
        manifest, chunk_hashes=b"".join(plain), sent_hashes=b"".join(sent), key_hash=hash_key(key)
    )
    _check_manifest(hashed)
    return hashed


def build_manifest(
    *,
    run_id: str,
    version: PolicyVersion,
    tensors: Sequence[TensorSpec],
    image: bytes | bytearray | memoryview,
    chunk_bytes: int,
    key: bytes = b"",
) -> Manifest:
    """Return the manifest of an image, with the hashes of every plain and encrypted chunk.

    Args:
        run_id: the run that the version belongs to.
        version: the name of the version.
        tensors: types and places of the tensors in the image.
        image: the bytes of the image.
        chunk_bytes: size of a chunk, between MIN_CHUNK_BYTES and MAX_CHUNK_BYTES.
        key: a key that was never used before; empty if chunks are not encrypted.
    """
    manifest = Manifest(
        run_id=run_id,
        version=version,
        tensors=tuple(tensors),
        num_bytes=len(image),
        chunk_bytes=chunk_bytes,
        chunk_hashes=b"",
    )
    return with_hashes(manifest, [hash_chunks(image, chunk_bytes, manifest.chunks, key)], key)


def sign(
    manifest: Manifest | SegmentTable, key: Ed25519PrivateKey, chunk_key: bytes = b""
) -> SignedManifest:
    """Sign the hash of a manifest or of a segment's table with the learner's key.

    Args:
        manifest: the manifest or table.
        key: the learner's private key.
        chunk_key: key of the chunks that the manifest or table describes; empty if they are not
            encrypted.
    """
    body = msgspec.msgpack.encode(manifest)
    return SignedManifest(body, key.sign(blake3(body).digest()), chunk_key)


def encode_signed(signed: SignedManifest) -> bytes:
    """Return a signed manifest or table as the payload frame of a message."""
    return msgspec.msgpack.encode(signed)


def verify_signature(frame: bytes | bytearray | memoryview, *, public_key: bytes) -> SignedManifest:
    """Check the learner's signature of a manifest or table; return the decoded frame.

    Raises:
        RemoteProtocolError: if the frame is malformed, or the learner has not signed it.
    """
    try:
        signed = _signed_decoder.decode(frame)
        Ed25519PublicKey.from_public_bytes(public_key).verify(signed.signature, signed.root)
    except InvalidSignature as error:
        raise RemoteProtocolError("a manifest that the learner's key did not sign") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a malformed manifest: {error}") from error
    return signed


def verify(
    frame: bytes | bytearray | memoryview, *, public_key: bytes, run_id: str, max_bytes: int
) -> tuple[SignedManifest, Manifest]:
    """Verify a manifest from the network; return the signed and the decoded manifest.

    Args:
        frame: the payload frame of an Announce.
        public_key: the learner's raw Ed25519 key, 32 bytes.
        run_id: the run that this node belongs to.
        max_bytes: size of the largest image that this node accepts, in bytes.

    Raises:
        RemoteProtocolError: if the signature, the run, the key or any size is wrong.
    """
    signed = verify_signature(frame, public_key=public_key)
    try:
        manifest = _manifest_decoder.decode(signed.body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a malformed manifest: {error}") from error
    if manifest.run_id != run_id:
        raise RemoteProtocolError(
            f"a manifest of run {manifest.run_id!r}; this node belongs to {run_id!r}"
        )
    _check_manifest(manifest)
    check_key(signed.key, manifest.key_hash)
    if manifest.num_bytes > max_bytes:
        raise RemoteProtocolError(
            f"{manifest.version} has {manifest.num_bytes} bytes; this node accepts at most "
            f"{max_bytes}"
        )
    return signed, manifest


def _check_manifest(manifest: Manifest) -> None:
    where = f"manifest of {manifest.version}"
    if not MIN_CHUNK_BYTES <= manifest.chunk_bytes <= MAX_CHUNK_BYTES:
        raise RemoteProtocolError(
            f"{where}: chunk_bytes is {manifest.chunk_bytes}, must be {MIN_CHUNK_BYTES} to "
            f"{MAX_CHUNK_BYTES}"
        )
    num_chunks = -(-manifest.num_bytes // manifest.chunk_bytes)
    if manifest.num_bytes < 1 or len(manifest.chunk_hashes) != num_chunks * HASH_BYTES:
        raise RemoteProtocolError(
            f"{where}: {manifest.num_bytes} bytes do not fit its list of chunk hashes"
        )
    sizes = (len(manifest.key_hash), len(manifest.sent_hashes))
    if sizes not in ((0, 0), (HASH_BYTES, num_chunks * HASH_BYTES)):
        raise RemoteProtocolError(f"{where}: its key and its hashes of what travels do not fit")
    offset = 0
    for tensor in manifest.tensors:
        item_bytes = ITEM_BYTES.get(tensor.dtype)
        if item_bytes is None:
            raise RemoteProtocolError(
                f"{where}: tensor {tensor.name} has the unknown dtype {tensor.dtype!r}"
            )
        if min(tensor.shape, default=0) < 0 or tensor.num_bytes != item_bytes * math.prod(
            tensor.shape
        ):
            raise RemoteProtocolError(
                f"{where}: tensor {tensor.name} does not have {tensor.num_bytes} bytes"
            )
        if tensor.offset < offset:
            raise RemoteProtocolError(f"{where}: tensor {tensor.name} overlaps the one before")
        offset = tensor.offset + tensor.num_bytes
    if offset > manifest.num_bytes:
        raise RemoteProtocolError(
            f"{where}: its tensors reach past the image's {manifest.num_bytes} bytes"
        )


# --- segment tables of an encoded version ---------------------------------------------------------

MAX_BLOCK_OVERHEAD_BYTES = 64
"""Largest number of bytes by which a coded block may be longer than the block itself."""


class SegmentTable(msgspec.Struct, frozen=True):
    """The table of one segment of an encoded version, which the learner signs."""

    run_id: str
    version: PolicyVersion
    base: PolicyVersion | None
    index: int
    image_bytes: int
    image_chunk_bytes: int
    block_bytes: int
    chunk_bytes: int
    """Size of a payload chunk; the last chunk of each segment may be shorter."""
    first_block: int
    block_sizes: tuple[int, ...]
    """Number of bytes of each coded block of the segment."""
    chunk_hashes: bytes
    """The BLAKE3-256 hashes of all payload chunks in the form in which they are sent, concatenated.
    """
    result_hashes: bytes = b""
    """The BLAKE3-256 hashes of all decoded image chunks; empty if the table has `old_hashes`."""
    manifest: bytes | None = None
    """The signed and encoded manifest of the image, in the last segment of a hashed encoded
    version; None in all other tables.
    """
    old_hashes: bytes = b""
    """For each block, the BLAKE3-256 hash of the bytes of the base that the block replaces
    (`delta.py`); empty if the table has `result_hashes`.
    """
    key_hash: bytes = b""
    """Hash of the key that encrypts the chunks (`cipher.py`); empty if chunks are not encrypted."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the segment's payload."""
        return sum(self.block_sizes)

    @property
    def num_chunks(self) -> int:
        """Number of payload chunks of the segment."""
        return len(self.chunk_hashes) // HASH_BYTES

    @property
    def num_blocks_in_image(self) -> int:
        """Number of blocks of the whole image."""
        return -(-self.image_bytes // self.block_bytes)

    @property
    def is_on_base(self) -> bool:
        """Whether the table has hashes of the replaced words, and not of the decoded image."""
        return bool(self.old_hashes)

    @property
    def is_last(self) -> bool:
        """Whether this segment is the last of its encoded version."""
        return self.first_block + len(self.block_sizes) == self.num_blocks_in_image

    @property
    def layout(self) -> tuple[object, ...]:
        """The fields that all segments of an encoded version must have in common."""
        return (
            self.run_id, self.version, self.base, self.image_bytes, self.image_chunk_bytes,
            self.block_bytes, self.chunk_bytes, self.is_on_base, self.key_hash,
        )  # fmt: skip

    def check(self, where: str, *, first_block: int, max_bytes: int) -> None:
        """Check that the numbers in a table agree with each other and with this node's limits.

        Args:
            where: the name of the segment in error messages.
            first_block: number of the block with which this segment must begin.
            max_bytes: size of the largest image that this node accepts, in bytes.

        Raises:
            RemoteProtocolError: if two numbers contradict each other, or a number exceeds this
                node's limits; the text names the numbers.
        """
        chunk_bytes = (self.chunk_bytes, self.image_chunk_bytes)
        if not all(MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES for size in chunk_bytes):
            raise RemoteProtocolError(
                f"{where}: chunks of {chunk_bytes} bytes; {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} "
                "are accepted"
            )
        if not 0 < self.image_bytes <= max_bytes:
            raise RemoteProtocolError(
                f"{where}: an image of {self.image_bytes} bytes; "
                f"this node accepts at most {max_bytes}"
            )
        if self.block_bytes < 1 or self.block_bytes % self.image_chunk_bytes:
            raise RemoteProtocolError(f"{where}: blocks of {self.block_bytes} bytes")
        stop = first_block + len(self.block_sizes)
        has_manifest = self.is_last and not self.is_on_base
        if self.first_block != first_block or not self.block_sizes or (
            stop > self.num_blocks_in_image or has_manifest != (self.manifest is not None)
        ):  # fmt: skip
            raise RemoteProtocolError(f"{where}: its blocks do not follow those before")
        image_start = first_block * self.block_bytes
        image_stop = min(stop * self.block_bytes, self.image_bytes)
        most = min(self.block_bytes, self.image_bytes) + MAX_BLOCK_OVERHEAD_BYTES
        if not all(0 < size <= most for size in self.block_sizes):
            raise RemoteProtocolError(
                f"{where}: a coded block that is empty or longer than its block"
            )
        num_results = -(-(image_stop - image_start) // self.image_chunk_bytes)
        num_hashes = (0, len(self.block_sizes)) if self.is_on_base else (num_results, 0)
        has_hashes = (len(self.result_hashes), len(self.old_hashes))
        if has_hashes != tuple(number * HASH_BYTES for number in num_hashes) or (
            self.is_on_base and self.base is None
        ):  # fmt: skip
            raise RemoteProtocolError(
                f"{where}: {has_hashes[0]} bytes of result hashes, {has_hashes[1]} of old hashes"
            )
        num_chunks = -(-self.num_bytes // self.chunk_bytes)
        if len(self.chunk_hashes) != num_chunks * HASH_BYTES:
            raise RemoteProtocolError(f"{where}: {len(self.chunk_hashes)} bytes of chunk hashes")


_table_decoder = msgspec.msgpack.Decoder(SegmentTable)


def decode_table(body: bytes) -> SegmentTable:
    """Decode a signed table, without checking its numbers.

    Raises:
        RemoteProtocolError: if the encoding is malformed.
    """
    try:
        return _table_decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a malformed segment: {error}") from error
