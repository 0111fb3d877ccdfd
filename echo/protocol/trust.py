"""What a node believes: what the learner of its run has signed.

Links are encrypted hop by hop, and any member may be a hop. So what a node takes over from the
learner is signed end to end: manifests, segment tables, and Welcome with the settings and the
hashes of files. The join string holds the fingerprint of the key, which a node therefore knows
before anybody has told it anything. Where no fingerprint is known (links that are not encrypted,
`security.curve = false`) a node can only check that one key has signed everything it sees.
"""

from __future__ import annotations

import base64

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo.core.errors import LocalProtocolError, RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.protocol.manifest import Manifest, SignedManifest, verify
from echo.protocol.parcel import Parcel, SegmentTable
from echo.protocol.transfer import Transfer
from echo.wire.codec import Frame
from echo.wire.messages import Welcome

FINGERPRINT_BYTES = 16
"""128 bits: whoever wants another key with the same fingerprint has 2^128 to try."""

# Neither hash can be taken for a manifest's root, which the same key signs.
_FINGERPRINT = "echo-rl 2026-11 fingerprint of a learner's signing key"
_WELCOME = "echo-rl 2026-11 welcome"

_welcome_decoder = msgspec.msgpack.Decoder(Welcome)


def fingerprint(public_key: bytes) -> bytes:
    """Return the fingerprint of a signing key, FINGERPRINT_BYTES long."""
    return blake3(public_key, derive_key_context=_FINGERPRINT).digest(length=FINGERPRINT_BYTES)


def show_fingerprint(value: bytes) -> str:
    """Return a fingerprint as it stands in a join string."""
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def sign_welcome(welcome: Welcome, key: Ed25519PrivateKey) -> Welcome:
    """Return the message with the signature of everything else in it.

    It names the incarnation of the node that it answers, so it is of no use to any other process.
    """
    # As it arrives: a whole number in the place of a fraction would be encoded otherwise there.
    arriving = _welcome_decoder.decode(msgspec.msgpack.encode(welcome))
    return msgspec.structs.replace(arriving, signature=key.sign(_hash(arriving)))


def welcome_fault(welcome: Welcome, *, known: bytes | None) -> tuple[str, str] | None:
    """Return why a Welcome is not the learner's, as (reason, detail), or None if it is.

    Args:
        welcome: as it arrived.
        known: the fingerprint of the learner's key; None where nothing has told it.
    """
    found = fingerprint(welcome.public_key)
    if known is not None and found != known:
        return "wrong_signing_key", (
            f"the signing key has the fingerprint {show_fingerprint(found)}, this node's join "
            "string (or the run directory, where links are not encrypted) says "
            f"{show_fingerprint(known)}. Either the line in runs/NAME/keys/join on the learner's "
            "machine is another one by now: copy it again; or somebody between poses as the learner"
        )
    try:
        key = Ed25519PublicKey.from_public_bytes(welcome.public_key)
        key.verify(welcome.signature, _hash(welcome))
    except (InvalidSignature, ValueError):
        return "wrong_signature", (
            "the learner's key has not signed the settings and files that this node is to take "
            "over: somebody on the way has changed them"
        )
    return None


def _hash(welcome: Welcome) -> bytes:
    body = msgspec.msgpack.encode(msgspec.structs.replace(welcome, signature=b""))
    return blake3(body, derive_key_context=_WELCOME).digest()


class Trust:
    """The learner's key, and the manifests that it was found under."""

    def __init__(self) -> None:
        """Believe nobody until `set` is called."""
        self.manifests: dict[PolicyVersion, tuple[SignedManifest, Manifest]] = {}
        self.local_image: tuple[bytearray, bytes] | None = None
        """Bytes that lie here, laid out as an image, and their hash."""
        self._public_key: bytes | None = None
        self.run_id = ""
        self._max_image_bytes = 0

    def set(self, *, public_key: bytes, run_id: str, max_image_bytes: int) -> None:
        """Accept what this key has signed for this run, up to this size."""
        self._public_key, self.run_id, self._max_image_bytes = public_key, run_id, max_image_bytes

    @property
    def has_key(self) -> bool:
        """Whether `set` was called."""
        return self._public_key is not None

    def _key(self) -> bytes:
        if self._public_key is None:
            raise LocalProtocolError("a parent was set before the learner's key was known")
        return self._public_key

    def manifest(self, version: PolicyVersion, frame: Frame) -> Manifest:
        """Return the verified manifest of a version that was announced.

        Raises:
            RemoteProtocolError: if it is not what it says, or not the learner's.
        """
        if version not in self.manifests:
            signed, manifest = verify(
                frame,
                public_key=self._key(),
                run_id=self.run_id,
                max_bytes=self._max_image_bytes,
            )
            if manifest.version != version:
                raise RemoteProtocolError(
                    f"an Announce of {version} with the manifest of {manifest.version}"
                )
            self.manifests[version] = signed, manifest
        return self.manifests[version][1]

    def use_local_image(self, version: PolicyVersion) -> Transfer | None:
        """Return the image that this machine has already, if it is the first one announced."""
        found, local = self.manifests.get(version), self.local_image
        if found is None or local is None:
            return None
        self.local_image = None
        signed, manifest = found
        if local[1] != manifest.image_hash:
            return None
        has_chunk = bytearray(b"\1") * manifest.num_chunks
        return Transfer(signed, manifest, local[0], has_chunk, manifest.num_chunks)

    def segment(self, parcel: Parcel, frame: Frame) -> SegmentTable:
        """Return the verified next table of a parcel.

        Raises:
            RemoteProtocolError: if it is not that, or not the learner's.
        """
        return parcel.verify(
            frame,
            public_key=self._key(),
            run_id=self.run_id,
            max_bytes=self._max_image_bytes,
        )

    def retire(self, oldest: PolicyVersion | None) -> None:
        """Forget the manifests of versions older than this one."""
        for version in [v for v in self.manifests if oldest is not None and v < oldest]:
            del self.manifests[version]
