from __future__ import annotations

from typing import Any

import msgspec
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.weights.manifest import (
    MAX_CHUNK_BYTES,
    Manifest,
    SignedManifest,
    TensorSpec,
    build_manifest,
    encode_signed,
    hash_image,
    sign,
    verify,
)
from tests.roles.harness import KEY, PUBLIC_KEY, make_version

SIGNED, MANIFEST, IMAGE = make_version(1, 3, num_chunks=3)
FRAME = encode_signed(SIGNED)


def check(frame: bytes, **changes: Any) -> Manifest:
    arguments: dict[str, Any] = {"public_key": PUBLIC_KEY, "run_id": "run", "max_bytes": 1 << 20}
    return verify(frame, **(arguments | changes))[1]


def resigned(**changes: Any) -> bytes:
    """Return the manifest with other fields, properly signed."""
    return encode_signed(sign(msgspec.structs.replace(MANIFEST, **changes), KEY))


def test_a_manifest_survives_and_describes_its_image() -> None:
    assert check(FRAME) == MANIFEST
    assert MANIFEST.num_chunks == 3
    assert [MANIFEST.chunk_range(i) for i in range(3)] == [(0, 1024), (1024, 2048), (2048, 2148)]
    for index in range(3):
        start, stop = MANIFEST.chunk_range(index)
        assert MANIFEST.chunk_hash(index) == blake3(IMAGE[start:stop]).digest()
    assert MANIFEST.image_hash == blake3(MANIFEST.chunk_hashes).digest()
    assert MANIFEST.image_hash == hash_image(IMAGE, MANIFEST.chunk_bytes)
    assert SIGNED.root == blake3(SIGNED.body).digest()


def test_no_byte_can_be_changed_and_no_prefix_is_enough() -> None:
    for index in range(len(FRAME)):
        damaged = bytearray(FRAME)
        damaged[index] ^= 0x41
        for frame in (bytes(damaged), FRAME[:index]):
            with pytest.raises(RemoteProtocolError):
                check(frame)


def test_a_manifest_commits_to_the_key_of_its_chunks() -> None:
    key = bytes(range(32))
    manifest = build_manifest(
        run_id="run",
        version=MANIFEST.version,
        tensors=MANIFEST.tensors,
        image=IMAGE,
        chunk_bytes=MANIFEST.chunk_bytes,
        key=key,
    )
    signed = sign(manifest, KEY, key)
    assert check(encode_signed(signed)) == manifest
    assert key.hex() not in repr(signed)
    assert repr(key) not in repr(signed)
    for index in range(manifest.num_chunks):
        start, stop = manifest.chunk_range(index)
        assert manifest.chunk_hash(index) == MANIFEST.chunk_hash(index)
        sealed = AESGCM(key).encrypt(index.to_bytes(12, "big"), IMAGE[start:stop], None)
        assert manifest.sent_hash(index) == blake3(sealed[: stop - start]).digest()
    for other in (b"", key[:-1], bytes(32)):
        with pytest.raises(RemoteProtocolError, match="not the one which the learner drew"):
            check(encode_signed(sign(manifest, KEY, other)))
    for lie in ({"key_hash": b""}, {"sent_hashes": b""}, {"sent_hashes": bytes(64)}):
        with pytest.raises(RemoteProtocolError, match="do not fit"):
            check(encode_signed(sign(msgspec.structs.replace(manifest, **lie), KEY, key)))
    with pytest.raises(RemoteProtocolError, match="not the one which the learner drew"):
        check(encode_signed(sign(MANIFEST, KEY, key)))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_remote_error(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        check(frame)


def test_nesting_without_end_is_a_remote_error() -> None:
    body = msgspec.msgpack.encode(b"x")
    with pytest.raises(RemoteProtocolError):
        check(b"\x93" + body + body + b"\x91" * 100_000 + b"\xc0")


def test_another_key_run_or_size_is_refused() -> None:
    other = Ed25519PrivateKey.generate()
    with pytest.raises(RemoteProtocolError, match="the learner's key did not sign"):
        check(encode_signed(sign(MANIFEST, other)))
    with pytest.raises(RemoteProtocolError, match="the learner's key did not sign"):
        check(FRAME, public_key=other.public_key().public_bytes_raw())
    with pytest.raises(RemoteProtocolError, match="run 'run'; this node belongs to 'another'"):
        check(FRAME, run_id="another")
    with pytest.raises(RemoteProtocolError, match="2148 bytes; this node accepts at most 2147"):
        check(FRAME, max_bytes=2147)
    assert check(FRAME, max_bytes=2148)


def spec(**changes: Any) -> tuple[TensorSpec, ...]:
    fields: dict[str, Any] = {
        "name": "w", "dtype": "float32", "shape": (2, 3), "offset": 0, "num_bytes": 24,
    }  # fmt: skip
    return (TensorSpec(**(fields | changes)),)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes is 0, must be 1024 to"),
        ({"chunk_bytes": MAX_CHUNK_BYTES + 1}, "chunk_bytes"),
        ({"num_bytes": 0, "chunk_hashes": b""}, "do not fit"),
        ({"num_bytes": -1}, "do not fit"),
        ({"num_bytes": 2**62}, "do not fit"),
        ({"num_bytes": 4097}, "do not fit"),
        ({"chunk_hashes": MANIFEST.chunk_hashes + b"x"}, "do not fit"),
        ({"tensors": spec(dtype="object")}, "unknown dtype 'object'"),
        ({"tensors": spec(num_bytes=25)}, "does not have 25 bytes"),
        ({"tensors": spec(shape=(-2, -3))}, "does not have 24 bytes"),
        ({"tensors": spec(shape=(2**40, 2**40))}, "does not have 24 bytes"),
        ({"tensors": spec(offset=-4)}, "overlaps"),
        ({"tensors": spec() + spec(name="v", offset=20)}, "v overlaps the one before"),
        ({"tensors": spec(offset=2125)}, "past the image's 2148 bytes"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused_even_if_signed(
    changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        check(resigned(**changes))


def test_tensors_may_be_scalars_and_empty_and_end_with_the_image() -> None:
    tensors = (
        *spec(shape=(), num_bytes=4),
        *spec(name="none", shape=(0, 7), offset=4, num_bytes=0),
        *spec(name="last", offset=2124),
    )
    assert check(resigned(tensors=tensors)).tensors == tensors


def test_an_image_that_cannot_be_described_is_refused_at_home() -> None:
    fields: dict[str, Any] = {
        "run_id": "run", "version": PolicyVersion(1, 0), "chunk_bytes": 1024,
    }  # fmt: skip
    with pytest.raises(RemoteProtocolError, match="past the image's 23 bytes"):
        build_manifest(**fields, tensors=spec(), image=bytes(23))
    assert build_manifest(**fields, tensors=spec(), image=bytes(24)).num_chunks == 1


def test_a_signature_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        check(encode_signed(SignedManifest(SIGNED.body, b"short")))
