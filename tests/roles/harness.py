"""Parts of tests of roles: keys, versions, leases, groups, messages."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.rollout import Group, PolicyVersion
from echo.roles.joining import NodeSettings
from echo.weights.broadcast import Broadcast
from echo.weights.manifest import Manifest, SignedManifest, TensorSpec, build_manifest, sign
from echo.wire.codec import Frame, decode_envelope, decode_message
from echo.wire.messages import Hello, Lease
from echo.wire.seals import SealKeys
from tests.core.groups import make_rollout

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC_KEY = KEY.public_key().public_bytes_raw()
CHUNK_BYTES = 1024


def make_image(version: PolicyVersion, *, num_chunks: int = 6) -> bytearray:
    """Return the weights of a version: bytes that depend on nothing but its name."""
    size = (num_chunks - 1) * CHUNK_BYTES + 100
    return bytearray(random.Random(f"{version}").randbytes(size))


def make_version(
    lineage: int, step: int, *, num_chunks: int = 6, key: Ed25519PrivateKey = KEY, run: str = "run"
) -> tuple[SignedManifest, Manifest, bytearray]:
    """Return (signed manifest, manifest, image) of one version."""
    version = PolicyVersion(lineage, step)
    image = make_image(version, num_chunks=num_chunks)
    manifest = build_manifest(
        run_id=run,
        version=version,
        tensors=[TensorSpec("w", "uint8", (len(image),), 0, len(image))],
        image=image,
        chunk_bytes=CHUNK_BYTES,
    )
    return sign(manifest, key), manifest, image


def make_hello(name: str = "w1", **fields: Any) -> Hello:
    """Return the Hello of a worker that brings no hashes."""
    hello = Hello(
        node_id=name,
        role="worker",
        incarnation="i1",
        echo_version="0",
        advertise=None,
        digests={},
        seal_key=SealKeys(name.encode()).seal_key(),
        nonce=b"1",
    )
    return msgspec.structs.replace(hello, **fields)


def make_node_settings(**fields: Any) -> NodeSettings:
    """Return the settings of a worker that looks for the learner at one address."""
    settings: dict[str, Any] = {
        "node_id": "w1", "role": "worker", "incarnation": "i1",
        "addresses": ("tcp://learner:1",), "advertise": None, "echo_version": "0",
        "reconnect_for_s": 600.0, "max_image_bytes": 1 << 30, "digests": {},
        "seal_keys": SealKeys(b"w1"),
    }  # fmt: skip
    return NodeSettings(**(settings | fields))


def make_lease(group_id: int, attempt: int = 0, **fields: Any) -> Lease:
    """Return the lease of a group as a learner of `tests/promises/world.py` grants it."""
    lease = Lease(
        group_id=group_id,
        attempt=attempt,
        seed=1000 * group_id + attempt,
        prompt_ids=(1, 2, 3),
        example={"index": group_id},
    )
    return msgspec.structs.replace(lease, **fields)


class Prompts:
    """Leases by group id, but for those whose prompts have a fault."""

    def __init__(self, faults: Mapping[int, Exception]) -> None:
        self._faults = faults

    def lease(self, group_id: int, attempt: int) -> Lease:
        if group_id in self._faults:
            raise self._faults[group_id]
        return make_lease(group_id, attempt)


def make_group(
    group_id: int,
    version: PolicyVersion,
    *,
    attempt: int = 0,
    worker: str = "w1",
    size: int = 2,
    num_tokens: int = 3,
) -> Group:
    """Return a group that answers `make_lease`."""
    return Group(
        group_id=group_id,
        attempt=attempt,
        worker_id=worker,
        prompt_ids=np.array(make_lease(group_id, attempt).prompt_ids, dtype=np.int32),
        rollouts=tuple(
            make_rollout([(version.lineage, version.step)] * num_tokens, reward=float(i))
            for i in range(size)
        ),
    )


def make_broadcast(node_id: str, **overrides: Any) -> Broadcast:
    settings: dict[str, Any] = {"window_bytes": 4096, "keep_versions": 2, "stall_s": 0.5}
    return Broadcast(node_id=node_id, **(settings | overrides))


def message_of(frames: Sequence[Frame]) -> Any:
    """Return the message inside the frames of one of our nodes."""
    return decode_message(decode_envelope(list(frames)))
