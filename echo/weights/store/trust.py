"""Trust: verifies that manifests and tables were made by the learner.

Any node of the run may be a parent. So this module checks the learner's signature on manifests and
segment tables. `roles/joining.py` checks the signature of the Welcome, which contains the learner's
key. A node verifies each received chunk by the hashes in manifests and tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from echo.core.errors import ForgedError, LocalProtocolError, RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.weights.manifest import Manifest, SegmentTable, SignedManifest, verify
from echo.weights.store.encoded import EncodedVersion
from echo.weights.store.items import Transfer
from echo.wire.codec import Frame
from echo.wire.messages import FULL, ItemId


@contextmanager
def _taken_for_forged() -> Iterator[None]:
    """Raise a ForgedError in place of a RemoteProtocolError of the `with` block.

    ForgedError means that the learner did not sign a forwarded manifest or table.
    """
    try:
        yield
    except RemoteProtocolError as error:
        raise ForgedError(str(error)) from error


class TrustedManifests:
    """Verifies manifests and tables with the learner's key, and keeps verified manifests."""

    def __init__(self) -> None:
        """Start with no key. Call `set` before any verification."""
        self.manifests: dict[PolicyVersion, tuple[SignedManifest, Manifest]] = {}
        self.local_image: tuple[bytearray, bytes] | None = None
        """(image that was on this machine before any fetch, hash of the image); None if there is no
        such image.
        """
        self._public_key: bytes | None = None
        self.run_id = ""
        self._max_image_bytes = 0

    def set(self, *, public_key: bytes, run_id: str, max_image_bytes: int) -> None:
        """Set the learner's key, the run, and the largest size of an image.

        From now on, manifests and tables are verified against these values.
        """
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
        """Verify and return the manifest of a version that a parent announced.

        Raises:
            ForgedError: if the manifest is of another version, is malformed, or was not signed by
                the learner.
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
        """Return this machine's own image if it has the hash of `version`; None otherwise.

        Only the first announced version is compared. Afterwards the image is dropped.
        """
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
        """Verify and return the next table of an encoded version.

        Raises:
            ForgedError: if the table is not the next one, is malformed, or was not signed by the
                learner.
        """
        with _taken_for_forged():
            return encoded.verify(
                frame,
                public_key=self._key(),
                run_id=self.run_id,
                max_bytes=self._max_image_bytes,
            )

    def retire(self, newest: PolicyVersion | None, needed: Iterable[ItemId]) -> None:
        """Forget the manifests of all versions except those of items in `needed`, and of `newest`.

        Of the versions before `newest`, only those of images in `needed` are kept.

        Args:
            newest: the newest complete version; None if there is none.
            needed: the items that the parent offers, and the encoded versions on this node.
        """
        kept = {
            version
            for version, form in needed
            if form == FULL or newest is None or version > newest
        }
        for version in self.manifests.keys() - kept - {newest}:
            del self.manifests[version]
