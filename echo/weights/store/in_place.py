"""In-place patching: writes a delta over the image of its base, and can undo the change.

As the chunks of a delta arrive, each block is decoded to a `BlockPatch`: the positions of the
changed words, the old words and the new words. The image stays unchanged during this time. When all
blocks are decoded, the new words are written over the image: by a thread of this node, or by the
engine, between two tokens, when installing the version (`PatchMode`). Afterwards the same memory
holds the new version.

Children, or an engine that returns to the base, can still read the base: a reader copies a block
and restores the old words in the copy (`items.py`). If an engine needs unchanged bytes, the
base is copied and the copy is patched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo.core.errors import LocalProtocolError
from echo.core.rollout import PolicyVersion
from echo.weights.store.encoded import EncodedVersion
from echo.weights.store.items import Transfer
from echo.weights.store.memory import VersionStore
from echo.weights.store.patches import Patch, PatchMode
from echo.wire.actions import Work
from echo.wire.messages import Form, ItemId


@dataclass(frozen=True, slots=True, eq=False)
class ApplyPatch(Work):
    """Work for a thread: write a complete patch over its base."""

    patch: Patch
    image: memoryview
    store: VersionStore

    def run(self) -> str:
        """Write the patch; return the disk's error, or "" for success."""
        try:
            self.store.begin_patch(self.patch)
        except OSError as error:
            return error.strerror or str(error) or "unknown error"
        self.patch.write(self.image)
        return ""


class InPlace:
    """Decides which deltas may be written over their base."""

    def __init__(
        self,
        images: Mapping[PolicyVersion, Transfer],
        encoded_versions: Mapping[ItemId, EncodedVersion],
        version_store: VersionStore,
    ) -> None:
        """Start with in-place patching switched off.

        The arguments are shared with the item store.
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
        """A delta that may be written over its base now; None if no delta is ready.

        The delta's changes are known completely, and the memory of its base is not patched.
        """
        return next((each for each in self.open if not self.is_being_written(each)), None)

    @property
    def open(self) -> list[EncodedVersion]:
        """The deltas that are ready to be written over their base, or are being written."""
        found = []
        for encoded in self._encoded_versions.values():
            base = encoded.base_among(self._images) if encoded.is_ready else None
            if base is not None and (base.is_current or base.later == [encoded.patch]):
                found.append(encoded)
        return found

    def is_being_written(self, encoded: EncodedVersion) -> bool:
        """Return whether a delta is being written over its base.

        True from `begin` until all new words are written.
        """
        base = encoded.base_among(self._images) if encoded.is_ready else None
        return base is not None and encoded.patch in base.later

    def begin(self, encoded: EncodedVersion) -> ApplyPatch:
        """Return the work that writes a delta over its base; the delta must be ready.

        From now on, readers of the base get copies with the old words.
        """
        base, patch = encoded.base_among(self._images), encoded.patch
        if base is None or patch is None:
            raise LocalProtocolError(f"{encoded.version} is not ready to be written")
        for image in self._images_in(base.storage):
            image.later.append(patch)
        return ApplyPatch(patch, memoryview(base.storage), self._version_store)

    def find(self, patch: Patch) -> EncodedVersion | None:
        """Return the delta to which a patch belongs; None if the delta has been dropped."""
        encoded = self._encoded_versions.get((patch.version, Form("delta", patch.base)))
        return encoded if encoded is not None and encoded.patch is patch else None

    def take_back(self, encoded: EncodedVersion) -> None:
        """Undo `begin`, because the patch of the delta was not written."""
        base = encoded.base_among(self._images)
        for image in [] if base is None else self._images_in(base.storage):
            image.later = [patch for patch in image.later if patch is not encoded.patch]

    def _images_in(self, storage: bytearray | memoryview) -> list[Transfer]:
        return [image for image in self._images.values() if image.storage is storage]
