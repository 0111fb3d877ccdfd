"""Published versions kept on the learner's disk for a while, to score rollouts under them again.

One safetensors file per version, written beside the publication and renamed into place. The bytes
are bounded: the oldest version goes first. What is not held is not an error, only unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from echo.core.errors import StorageError
from echo.core.rollout import PolicyVersion
from echo.engine.weights import tensors_from_image
from echo.weights.manifest import Manifest

_NAME = re.compile(r"v(\d+)_(\d+)\.safetensors")


HEADER_BYTES = 256
"""A file is larger than its image by at most this, for itself and for each tensor's name."""


class VersionRetention:
    """Versions on disk."""

    def __init__(self, directory: Path, *, max_bytes: int, max_versions: int) -> None:
        """Find what an earlier process has kept.

        Args:
            directory: made if it is missing.
            max_bytes: bound on all files together.
            max_versions: bound on their number; older ones can belong to no group any more.

        Raises:
            StorageError: if the directory cannot be made.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_versions = max_versions
        self._sizes: dict[PolicyVersion, int] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.iterdir():
                match = _NAME.fullmatch(path.name)
                if match is None:
                    path.unlink()  # a partial file of a process that was killed
                    continue
                version = PolicyVersion(int(match[1]), int(match[2]))
                self._sizes[version] = path.stat().st_size
        except OSError as error:
            raise StorageError(f"cannot keep versions in {directory}: {error}") from error

    @property
    def versions(self) -> list[PolicyVersion]:
        """What is held, oldest first."""
        return sorted(self._sizes)

    def keep(self, manifest: Manifest, image: bytearray) -> bool:
        """Write a version and let older ones go; return whether there was room for it.

        Raises:
            StorageError: if it cannot be written.
        """
        file_bytes = manifest.num_bytes + HEADER_BYTES * (1 + len(manifest.tensors))
        if file_bytes > self._max_bytes:
            return False
        self._make_room(file_bytes)
        path = self._path(manifest.version)
        partial = path.with_suffix(".partial")
        view = memoryview(image).toreadonly()
        try:
            save_file(tensors_from_image(manifest.tensors, view), partial)
            partial.rename(path)
            self._sizes[manifest.version] = path.stat().st_size
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise StorageError(
                f"cannot keep {manifest.version} in {self._directory}: {error}; free disk space "
                "or switch the attribution off (metrics.attribution_steps = 0)"
            ) from error
        return True

    def load(self, version: PolicyVersion) -> Mapping[str, Tensor] | None:
        """Return the weights of a version, or None if it is not held (any more)."""
        if version not in self._sizes:
            return None
        try:
            return load_file(self._path(version))
        except (OSError, SafetensorError):
            self._forget(version)
            return None

    def _make_room(self, num_bytes: int) -> None:
        while self._sizes and (
            sum(self._sizes.values()) + num_bytes > self._max_bytes
            or len(self._sizes) >= self._max_versions
        ):
            self._forget(min(self._sizes))

    def _forget(self, version: PolicyVersion) -> None:
        del self._sizes[version]
        self._path(version).unlink(missing_ok=True)

    def _path(self, version: PolicyVersion) -> Path:
        return self._directory / f"v{version.lineage}_{version.step}.safetensors"
