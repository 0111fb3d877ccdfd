"""Deltas that are written over their base: which may be, which is being, and how to go back.

The base is read through the patch from `begin` on, so that its readers need no lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo.core.errors import LocalProtocolError
from echo.core.rollout import PolicyVersion
from echo.weights.artifacts import Transfer
from echo.weights.encoded import EncodedVersion
from echo.weights.memory import VersionStore
from echo.weights.patches import Patch, PatchMode
from echo.wire.actions import Work
from echo.wire.messages import Form, ItemId


@dataclass(frozen=True, slots=True, eq=False)
class ApplyPatch(Work):
    """Work for a thread: write a patch that is whole over its base; then call `worked`."""

    patch: Patch
    image: memoryview
    store: VersionStore

    def run(self) -> str:
        """Return what the disk has against it, or nothing."""
        try:
            self.store.begin_patch(self.patch)
        except OSError as error:
            return error.strerror or str(error) or "unknown error"
        self.patch.write(self.image)
        return ""


class InPlace:
    """Decides which delta may be written over its base."""

    def __init__(
        self,
        images: Mapping[PolicyVersion, Transfer],
        encoded_versions: Mapping[ItemId, EncodedVersion],
        version_store: VersionStore,
    ) -> None:
        """Write nothing in place until `mode` is set; all three are the item store's own."""
        self.mode: PatchMode = "copy"
        self._images, self._encoded_versions = images, encoded_versions
        self._version_store = version_store

    @property
    def is_on(self) -> bool:
        """Whether a delta on its base is written over it."""
        return self.mode != "copy"

    @property
    def ready(self) -> EncodedVersion | None:
        """The delta that is ready to be written over its base, which is current."""
        return next((each for each in self.open if not self.is_being_written(each)), None)

    @property
    def open(self) -> list[EncodedVersion]:
        """Deltas that are ready to be written over their base, or are being written."""
        found = []
        for encoded in self._encoded_versions.values():
            base = encoded.base_among(self._images) if encoded.is_ready else None
            if base is not None and (base.is_current or base.later == [encoded.patch]):
                found.append(encoded)
        return found

    def is_being_written(self, encoded: EncodedVersion) -> bool:
        """Return whether a delta has begun and has not ended."""
        base = encoded.base_among(self._images) if encoded.is_ready else None
        return base is not None and encoded.patch in base.later

    def begin(self, encoded: EncodedVersion) -> ApplyPatch:
        """Return the work that writes a delta that is ready over its base.

        From now on the base is read through the patch.
        """
        base, patch = encoded.base_among(self._images), encoded.patch
        if base is None or patch is None:
            raise LocalProtocolError(f"{encoded.version} is not ready to be written")
        for image in self._images_in(base.storage):
            image.later.append(patch)
        return ApplyPatch(patch, memoryview(base.storage), self._version_store)

    def find(self, patch: Patch) -> EncodedVersion | None:
        """Return the delta that a patch was made of; None if its memory was dropped meanwhile."""
        encoded = self._encoded_versions.get((patch.version, Form("delta", patch.base)))
        return encoded if encoded is not None and encoded.patch is patch else None

    def take_back(self, encoded: EncodedVersion) -> None:
        """Forget a patch whose words are not, or no longer, in the image."""
        base = encoded.base_among(self._images)
        for image in [] if base is None else self._images_in(base.storage):
            image.later = [patch for patch in image.later if patch is not encoded.patch]

    def _images_in(self, storage: bytearray | memoryview) -> list[Transfer]:
        """Return the images that lie in this memory."""
        return [image for image in self._images.values() if image.storage is storage]
