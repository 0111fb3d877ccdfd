"""What a node must have in common with the learner before it may take part.

Model, tokenizer, chat template, stop ids, task source and dataset are compared by hash. A node that
brings none of them inherits the files from the learner (configuration and tokenizer, never code
and never weights) and is right by construction.
"""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from echo.errors import RemoteProtocolError


def digest_mismatch(*, ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Return what differs between a node's hashes and the learner's, or None.

    Only what both sides have is compared; an empty hash means "does not have it".
    """
    faults = [
        f"{name}: this node has {value[:16]}, the learner {theirs[name][:16]}"
        for name, value in sorted(ours.items())
        if value and theirs.get(name) and theirs[name] != value
    ]
    if not faults:
        return None
    return (
        f"{'; '.join(faults)}. Give both the same files, or leave model and task out of the node's "
        "configuration so that it inherits the learner's"
    )


def describe_assets(files: dict[str, bytes]) -> dict[str, tuple[str, int]]:
    """Return what Welcome says of the files that a worker may inherit: hash and size by name."""
    return {name: (blake3(data).hexdigest(), len(data)) for name, data in files.items()}


class Assets:
    """Files being inherited from the learner."""

    def __init__(
        self,
        expected: dict[str, tuple[str, int]] | None = None,
        *,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Expect these files: name -> (blake3 hex, bytes)."""
        self.expected = expected or {}
        self.settings = settings or {}
        self.files: dict[str, bytes] = {}
        for name in self.expected:
            if not name or name.startswith(".") or "/" in name or "\\" in name:
                raise RemoteProtocolError(f"an inherited file with the unsafe name {name!r}")

    @property
    def missing(self) -> list[str]:
        """Names still to be fetched."""
        return [name for name in self.expected if name not in self.files]

    def add(self, name: str, data: bytes) -> None:
        """Take a file that has arrived.

        Raises:
            RemoteProtocolError: if it is not the file that was announced.
        """
        digest, num_bytes = self.expected[name]
        if len(data) != num_bytes or blake3(data).hexdigest() != digest:
            raise RemoteProtocolError(f"inherited file {name} does not match its announced hash")
        self.files[name] = data
