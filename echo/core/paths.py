"""Paths as users write them, and where they lead on this machine."""

from __future__ import annotations

import os
from pathlib import Path

MAX_FILE_NAME_BYTES = 255
"""Most bytes of one part of a path: no disk takes more."""


def local_path(name: str | Path) -> Path:
    """Return where a name leads on this machine; `~user` stays where no such user is known."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 -- pathlib's raises there
