"""Trust: what the learner of the run has signed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from echo.core.errors import ForgedError, LocalProtocolError, RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.weights.artifacts import Transfer
from echo.weights.encoded import EncodedVersion
from echo.weights.manifest import Manifest, SegmentTable, SignedManifest, verify
from echo.wire.codec import Frame
from echo.wire.messages import FULL, ItemId


@contextmanager
def _taken_for_forged() -> Iterator[None]:
    """Blame the peer that passed on an item that cannot be verified."""
    try:
        yield
    except RemoteProtocolError as error:
        raise ForgedError(str(error)) from error


class TrustedManifests:
    """The learner's key, and the manifests that it was found under."""

    def __init__(self) -> None:
        """Verify nothing until `set` is called."""
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
            ForgedError: if it is not what it says, or not the learner's.
        """
        if version not in self.manifests:
            with _taken_for_forged():
                signed, manifest = verify(
                    frame,
                    public_key=self._key(),
                    run_id=self.run_id,
                    max_bytes=self._max_image_bytes,
                )
            if manifest.version != version:
                raise ForgedError(
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

    def segment(self, encoded: EncodedVersion, frame: Frame) -> SegmentTable:
        """Return the verified next table of an encoded version.

        Raises:
            ForgedError: if it is not that, or not the learner's.
        """
        with _taken_for_forged():
            return encoded.verify(
                frame,
                public_key=self._key(),
                run_id=self.run_id,
                max_bytes=self._max_image_bytes,
            )

    def retire(self, oldest: PolicyVersion | None, offered: Iterable[ItemId] = ()) -> None:
        """Forget the manifests of older versions, except those that may be fetched again."""
        kept = {version for version, form in offered if form == FULL}
        old = [v for v in self.manifests if oldest is not None and v < oldest and v not in kept]
        for version in old:
            del self.manifests[version]
