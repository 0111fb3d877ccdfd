"""Resolves paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

MAX_FILE_NAME_BYTES = 255
"""Length in bytes of the longest file name that every file system allows."""


def local_path(name: str | Path) -> Path:
    """Return a path with `~` and `~user` expanded.

    `~user` is kept if the user is unknown.
    """
    return Path(os.path.expanduser(name))  # noqa: PTH111 -- pathlib's raises there
