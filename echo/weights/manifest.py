"""Manifest of a version: tensors, chunk hashes, and the learner's signature.

A version is one byte image: its tensors one after the other, each once. The image is divided into
chunks of equal size (the last may be shorter). The manifest lists the tensors and the BLAKE3 hash
of each chunk. Its own hash is the **root**, which the learner signs. So one signature covers every
byte, a relay verifies each chunk before it forwards it, and a chunk that was damaged on the way
stops at the first hop. If chunks travel encrypted (`cipher.py`), the manifest also has the hashes
of the encrypted chunks.

A version may also travel as an **encoded version**: a delta against a version that the receiver
holds, or a keyframe, in segments whose tables are signed one by one (`encoded.py`). A table has
either the hashes of the decoded image chunks, and then the last table contains the manifest; or the
hashes of the words in the base that it replaces. The replaced words and the signed changes
determine every decoded byte, so such a delta is sent before its image has been hashed. The manifest
follows as the version's **seal**, when the learner has hashed the image beside the training.

Sizes come from the network, and are checked against each other before memory is allocated.
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

HASH_BYTES = 32
MIN_CHUNK_BYTES = 1 << 10
MAX_CHUNK_BYTES = 16 << 20
"""Above 1 MiB encryption gets slower, above 4 MiB nothing gets faster (measured on loopback)."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor inside a version's byte image."""

    name: str
    dtype: str
    """A key of ITEM_BYTES."""
    shape: tuple[int, ...]
    offset: int
    """Byte offset in the image."""
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """The signed description of one version."""

    run_id: str
    version: PolicyVersion
    model_digest: str
    """Hash of the model configuration that the tensors belong to."""
    tensors: tuple[TensorSpec, ...]
    num_bytes: int
    """Bytes of the image."""
    chunk_bytes: int
    chunk_hashes: bytes
    """BLAKE3-256 of each chunk, one after the other."""
    sent_hashes: bytes = b""
    """BLAKE3-256 of each encrypted chunk; empty if chunks travel without encryption."""
    key_hash: bytes = b""
    """Hash of the key (`cipher.py`); empty without a key."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the image."""
        return len(self.chunk_hashes) // HASH_BYTES

    @property
    def image_hash(self) -> bytes:
        """The hash that a worker's installed weights must have (`hash_image`)."""
        return blake3(self.chunk_hashes).digest()

    @property
    def chunks(self) -> range:
        """Chunks of the image, with or without hashes."""
        return range(-(-self.num_bytes // self.chunk_bytes))

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Return the byte range [start, stop) of chunk `index` in the image."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.num_bytes)

    def chunk_hash(self, index: int) -> bytes:
        """Return the hash that chunk `index` must have in the image."""
        return self.chunk_hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]

    def sent_hash(self, index: int) -> bytes:
        """Return the hash that chunk `index` must have as it travels."""
        hashes = self.sent_hashes or self.chunk_hashes
        return hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]


class SignedManifest(msgspec.Struct, frozen=True, array_like=True):
    """A manifest or a segment's table as it travels, inside CURVE.

    It has the signed bytes, the signature of their hash, and the key that they commit to.
    """

    body: bytes
    signature: bytes
    key: bytes = b""
    """Key of the chunks; empty if they are not encrypted."""

    def __repr__(self) -> str:
        return f"SignedManifest(root={self.root.hex()})"  # the key must not appear in a log

    @property
    def root(self) -> bytes:
        """The version's root hash."""
        return blake3(self.body).digest()


_manifest_decoder = msgspec.msgpack.Decoder(Manifest)
_signed_decoder = msgspec.msgpack.Decoder(SignedManifest)


def provisional(manifest: Manifest, version: PolicyVersion) -> Manifest:
    """Return a manifest of `version` without hashes, with the layout of another manifest."""
    return msgspec.structs.replace(
        manifest, version=version, chunk_hashes=b"", sent_hashes=b"", key_hash=b""
    )


class ChunkHashes(NamedTuple):
    """Hashes (BLAKE3-256) of some chunks of an image, one after the other."""

    plain: bytes
    sent: bytes
    """Hashes of the encrypted chunks; empty if chunks are not encrypted."""


def hash_chunks(
    image: bytes | bytearray | memoryview, chunk_bytes: int, chunks: range, key: bytes = b""
) -> ChunkHashes:
    """Return the hashes of chunks of an image, plain and encrypted.

    Args:
        image: the bytes.
        chunk_bytes: size of a chunk.
        chunks: indices of the chunks.
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
    """Return the hash of an image: the hash of its chunks' hashes, computed in parallel."""
    chunks = range(-(-len(image) // chunk_bytes))
    return blake3(hash_chunks(image, chunk_bytes, chunks).plain).digest()


def with_hashes(manifest: Manifest, parts: Iterable[ChunkHashes], key: bytes = b"") -> Manifest:
    """Return a manifest with the hashes of all its chunks.

    Args:
        manifest: a manifest without hashes.
        parts: the hashes, in order of the chunks.
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
    model_digest: str,
    tensors: Sequence[TensorSpec],
    image: bytes | bytearray | memoryview,
    chunk_bytes: int,
    key: bytes = b"",
) -> Manifest:
    """Return the manifest of `image`, with the hashes of every chunk, plain and encrypted.

    Args:
        run_id: the run that the version belongs to.
        version: its name.
        model_digest: hash of the model configuration.
        tensors: places of the tensors in the image.
        image: the bytes.
        chunk_bytes: size of a chunk, between MIN_CHUNK_BYTES and MAX_CHUNK_BYTES.
        key: a key that was never used before; empty if chunks are not encrypted.
    """
    manifest = Manifest(
        run_id=run_id,
        version=version,
        model_digest=model_digest,
        tensors=tuple(tensors),
        num_bytes=len(image),
        chunk_bytes=chunk_bytes,
        chunk_hashes=b"",
    )
    return with_hashes(manifest, [hash_chunks(image, chunk_bytes, manifest.chunks, key)], key)


def sign(
    manifest: Manifest | SegmentTable, key: Ed25519PrivateKey, chunk_key: bytes = b""
) -> SignedManifest:
    """Sign the root of a manifest, or of a segment's table, with the learner's key.

    Args:
        manifest: the manifest or table.
        key: the learner's.
        chunk_key: key of the chunks that it describes; empty if they are not encrypted.
    """
    body = msgspec.msgpack.encode(manifest)
    return SignedManifest(body, key.sign(blake3(body).digest()), chunk_key)


def encode_signed(signed: SignedManifest) -> bytes:
    """Return the payload frame of an Announce."""
    return msgspec.msgpack.encode(signed)


def verify_signature(frame: bytes | bytearray | memoryview, *, public_key: bytes) -> SignedManifest:
    """Check that the learner has signed a manifest or a segment's table, and return it.

    Raises:
        RemoteProtocolError: if the learner has not signed it.
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
    """Check a manifest that came from the network and return it.

    Args:
        frame: the payload frame of an Announce.
        public_key: the learner's raw Ed25519 key, 32 bytes.
        run_id: the run that this node belongs to.
        max_bytes: largest image that this node will hold.

    Raises:
        RemoteProtocolError: if the signature, the run or any size is wrong.
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
    """Refuse a manifest whose numbers contradict each other."""
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
"""Bytes by which a coded block may exceed its block: a tag and a length."""


class SegmentTable(msgspec.Struct, frozen=True):
    """One segment of an encoded version; the learner signs its encoding."""

    run_id: str
    version: PolicyVersion
    base: PolicyVersion | None
    index: int
    image_bytes: int
    image_chunk_bytes: int
    block_bytes: int
    chunk_bytes: int
    """Size of a payload chunk; the last of each segment may be shorter."""
    first_block: int
    block_sizes: tuple[int, ...]
    """Bytes of each coded block."""
    chunk_hashes: bytes
    """BLAKE3-256 of each payload chunk, as it travels."""
    result_hashes: bytes = b""
    """BLAKE3-256 of each decoded image chunk; empty if `old_hashes` are given."""
    manifest: bytes | None = None
    """In the last segment: the signed manifest of the image, encoded; None if it is sent later."""
    old_hashes: bytes = b""
    """BLAKE3-256 of the bytes of the base that each block replaces (`delta.py`)."""
    key_hash: bytes = b""
    """Hash of the encoded version's key (`cipher.py`); empty without a key."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the segment's payload."""
        return sum(self.block_sizes)

    @property
    def num_chunks(self) -> int:
        """Payload chunks."""
        return len(self.chunk_hashes) // HASH_BYTES

    @property
    def num_blocks_in_image(self) -> int:
        """Blocks of the whole image."""
        return -(-self.image_bytes // self.block_bytes)

    @property
    def is_on_base(self) -> bool:
        """Whether it holds hashes of the bytes that it replaces, and not of the result."""
        return bool(self.old_hashes)

    @property
    def is_last(self) -> bool:
        """Whether no segment follows."""
        return self.first_block + len(self.block_sizes) == self.num_blocks_in_image

    @property
    def layout(self) -> tuple[object, ...]:
        """Fields that all segments of an encoded version must agree on."""
        return (
            self.run_id, self.version, self.base, self.image_bytes, self.image_chunk_bytes,
            self.block_bytes, self.chunk_bytes, self.is_on_base, self.key_hash,
        )  # fmt: skip

    def check(self, where: str, *, first_block: int, max_bytes: int) -> None:
        """Refuse a table whose numbers contradict each other or exceed what this node accepts.

        Args:
            where: name of the segment in messages.
            first_block: the block after the last one of the segment before.
            max_bytes: bound of the image.

        Raises:
            RemoteProtocolError: with the two numbers that contradict each other.
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
    """Return the table in a signed encoding, without a check of its numbers.

    Raises:
        RemoteProtocolError: if it is malformed.
    """
    try:
        return _table_decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a malformed segment: {error}") from error
