"""Resolving paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

MAX_FILE_NAME_BYTES = 255
"""Largest number of bytes in a part of a path, on every file system."""


def local_path(name: str | Path) -> Path:
    """Return a path with `~` and `~user` expanded; an unknown user's `~user` is kept."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 -- pathlib's raises there
