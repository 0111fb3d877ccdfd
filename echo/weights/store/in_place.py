"""In place: which delta may be written over its base, and how it is taken back.

A delta on its base is opened block by block as its chunks arrive. An opened block is a
`BlockPatch`: the positions of the changed words, the old words and the new words. When all blocks
are open, the image is still unchanged, and only the new words remain to be written. `PatchMode`
says which thread writes them. It is a thread of this node, or the engine that installs the version
between two tokens that it samples. Afterwards the same memory holds the new version.

The base can still be read, by children and by an engine that returns to it. A reader copies a block
and restores the old words in the copy (`artifacts.py`). If an engine needs its bytes to stay
unchanged, the base is copied and the copy is patched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo.core.errors import LocalProtocolError
from echo.core.rollout import PolicyVersion
from echo.weights.store.artifacts import Transfer
from echo.weights.store.encoded import EncodedVersion
from echo.weights.store.memory import VersionStore
from echo.weights.store.patches import Patch, PatchMode
from echo.wire.actions import Work
from echo.wire.messages import Form, ItemId


@dataclass(frozen=True, slots=True, eq=False)
class ApplyPatch(Work):
    """Work for a thread: write a complete patch over its base; then call `worked`."""

    patch: Patch
    image: memoryview
    store: VersionStore

    def run(self) -> str:
        """Write the patch; return the disk's error, or ""."""
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
        """Start in the mode in which no delta is written over its base.

        The arguments are the item store's own containers.
        """
        self.mode: PatchMode = "copy"
        self._images, self._encoded_versions = images, encoded_versions
        self._version_store = version_store

    @property
    def is_on(self) -> bool:
        """Whether deltas are written over their base."""
        return self.mode != "copy"

    @property
    def ready(self) -> EncodedVersion | None:
        """A delta that may be written over its base now; None if there is none.

        The changes of all its blocks are known, and the memory of its base still holds the base.
        """
        return next((each for each in self.open if not self.is_being_written(each)), None)

    @property
    def open(self) -> list[EncodedVersion]:
        """The deltas that may be written over their base now, or are being written."""
        found = []
        for encoded in self._encoded_versions.values():
            base = encoded.base_among(self._images) if encoded.is_ready else None
            if base is not None and (base.is_current or base.later == [encoded.patch]):
                found.append(encoded)
        return found

    def is_being_written(self, encoded: EncodedVersion) -> bool:
        """Return whether a delta is being written over its base.

        If so, `begin` was called for it, and not all its new words are written yet.
        """
        base = encoded.base_among(self._images) if encoded.is_ready else None
        return base is not None and encoded.patch in base.later

    def begin(self, encoded: EncodedVersion) -> ApplyPatch:
        """Return the work that writes a delta over its base; the delta must be ready.

        From now on readers of the base restore the old words in their copies.
        """
        base, patch = encoded.base_among(self._images), encoded.patch
        if base is None or patch is None:
            raise LocalProtocolError(f"{encoded.version} is not ready to be written")
        for image in self._images_in(base.storage):
            image.later.append(patch)
        return ApplyPatch(patch, memoryview(base.storage), self._version_store)

    def find(self, patch: Patch) -> EncodedVersion | None:
        """Return the delta to which a patch belongs; None if it was dropped meanwhile."""
        encoded = self._encoded_versions.get((patch.version, Form("delta", patch.base)))
        return encoded if encoded is not None and encoded.patch is patch else None

    def take_back(self, encoded: EncodedVersion) -> None:
        """Note that a delta's patch was not written over its base after all."""
        base = encoded.base_among(self._images)
        for image in [] if base is None else self._images_in(base.storage):
            image.later = [patch for patch in image.later if patch is not encoded.patch]

    def _images_in(self, storage: bytearray | memoryview) -> list[Transfer]:
        return [image for image in self._images.values() if image.storage is storage]
