"""Who a run is: its id and the key that signs its versions, kept in the run directory."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.errors import StorageError
from echo.records.files import make_private_directory, write_file


@dataclass(frozen=True, slots=True)
class Identity:
    """A run's id and signing key."""

    run_id: str
    key: Ed25519PrivateKey

    @property
    def public_key(self) -> bytes:
        """The raw public key, 32 bytes."""
        return self.key.public_key().public_bytes_raw()


def load_or_create_identity(run_dir: Path, *, run_name: str) -> Identity:
    """Return the identity of the run in `run_dir`, making one for a new run.

    Raises:
        StorageError: if the files cannot be read or written.
    """
    id_path = run_dir / "run.json"
    try:
        if id_path.exists():
            run_id = str(json.loads(id_path.read_text())["run_id"])
            return Identity(run_id, load_signing_key(run_dir))
        # The key first: a run with an id has its key, whenever the process was killed.
        key = load_or_create_signing_key(run_dir)
        run_id = f"{run_name}-{secrets.token_hex(4)}"
        write_file(id_path, json.dumps({"run_id": run_id}).encode())
    except (OSError, ValueError, KeyError, TypeError, UnsupportedAlgorithm) as error:
        raise StorageError(f"cannot read or make the identity of {run_dir}: {error}") from error
    return Identity(run_id, key)


def load_or_create_signing_key(run_dir: Path) -> Ed25519PrivateKey:
    """Return the key with which the learner of this run directory signs.

    The join string has its fingerprint, and may be written before the run has an id.

    Raises:
        StorageError: if it cannot be read or written.
    """
    path = _key_path(run_dir)
    try:
        if not path.exists():
            make_private_directory(path.parent)
            write_file(path, Ed25519PrivateKey.generate().private_bytes_raw(), mode=0o600)
        return load_signing_key(run_dir)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise StorageError(f"cannot read or make {path}: {error}") from error


def load_signing_key(run_dir: Path) -> Ed25519PrivateKey:
    """Return the signing key that lies in a run directory.

    Raises:
        OSError, ValueError: if there is none, or none that can be read.
    """
    return Ed25519PrivateKey.from_private_bytes(_key_path(run_dir).read_bytes())


def _key_path(run_dir: Path) -> Path:
    return run_dir / "keys" / "learner.key"
