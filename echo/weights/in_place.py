"""Deltas that are written over their base."""

from __future__ import annotations

from dataclasses import dataclass

from echo.weights.memory import VersionStore
from echo.weights.patches import Patch
from echo.wire.actions import Work


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
