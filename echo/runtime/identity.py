"""Who a run is: its id and the key that signs its versions, kept in the run directory."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from echo.errors import StorageError
from echo.runtime.durable import make_private_directory, write_file


@dataclass(frozen=True, slots=True)
class Identity:
    """A run's id and signing key."""

    run_id: str
    key: Ed25519PrivateKey

    @property
    def public_key(self) -> bytes:
        """The raw public key, 32 bytes."""
        return self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def load_or_create_identity(run_dir: Path, *, run_name: str) -> Identity:
    """Return the identity of the run in `run_dir`, making one for a new run.

    Raises:
        StorageError: if the files cannot be read or written.
    """
    id_path, key_path = run_dir / "run.json", run_dir / "keys" / "learner.key"
    try:
        if id_path.exists():
            run_id = str(json.loads(id_path.read_text())["run_id"])
            return Identity(run_id, Ed25519PrivateKey.from_private_bytes(key_path.read_bytes()))
        key = Ed25519PrivateKey.generate()
        run_id = f"{run_name}-{secrets.token_hex(4)}"
        make_private_directory(key_path.parent)
        raw = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        # The key first: a run with an id has its key, whenever the process was killed.
        write_file(key_path, raw, mode=0o600)
        write_file(id_path, json.dumps({"run_id": run_id}).encode())
    except (OSError, ValueError, KeyError, TypeError, UnsupportedAlgorithm) as error:
        raise StorageError(f"cannot read or make the identity of {run_dir}: {error}") from error
    return Identity(run_id, key)
