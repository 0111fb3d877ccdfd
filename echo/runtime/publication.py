"""From the trainer's weights to a signed version that can be sent."""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.config.schema import Config
from echo.core.rollout import PolicyVersion
from echo.engine.weights import CodedDelta, VersionImages, Weights
from echo.weights.delta import block_bytes_of
from echo.weights.manifest import Manifest, SignedManifest, build_manifest, sign
from echo.weights.schedule import MAX_PENDING as MAX_PENDING
from echo.weights.schedule import PublishPace as PublishPace


@dataclass(frozen=True, slots=True)
class Publication:
    """One version, ready for the broadcast."""

    signed: SignedManifest
    manifest: Manifest
    image: bytearray
    coded: CodedDelta | None = None
    """Its delta against the version before, where making the image has made it too."""


def make_images(config: Config) -> VersionImages:
    """Return what makes the images of a run; without deltas there is nothing to find on a GPU."""
    return VersionImages(
        config.model.dtype,
        block_bytes=block_bytes_of(config.network.chunk_bytes),
        is_on_device=False if config.network.codec == "full" else None,
    )


def make_publication(
    tensors: Weights,
    version: PolicyVersion,
    *,
    run_id: str,
    model_digest: str,
    images: VersionImages,
    chunk_bytes: int,
    key: Ed25519PrivateKey,
) -> Publication:
    """Round weights to the published dtype, lay them out, hash and sign them."""
    made = images.make(tensors, version)
    manifest = build_manifest(
        run_id=run_id,
        version=version,
        model_digest=model_digest,
        tensors=made.specs,
        image=made.image,
        chunk_bytes=chunk_bytes,
    )
    return Publication(sign(manifest, key), manifest, made.image, made.coded)
