"""From the trainer's weights to a signed version that can be sent, and how often to send one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.config.profiles import auto_publish_period
from echo.engine.weights import Weights, publish_image
from echo.protocol.manifest import Manifest, SignedManifest, build_manifest, sign
from echo.rollout import PolicyVersion

MAX_PENDING = 64
"""Versions whose arrival is awaited for the measurement; a slower node is not waited for."""


@dataclass(frozen=True, slots=True)
class Publication:
    """One version, ready for the broadcast."""

    signed: SignedManifest
    manifest: Manifest
    image: bytearray


def make_publication(
    tensors: Weights,
    version: PolicyVersion,
    *,
    run_id: str,
    model_digest: str,
    dtype: str,
    chunk_bytes: int,
    key: Ed25519PrivateKey,
) -> Publication:
    """Round weights to the published dtype, lay them out, hash and sign them."""
    specs, image = publish_image(tensors, dtype)
    manifest = build_manifest(
        run_id=run_id,
        version=version,
        model_digest=model_digest,
        tensors=specs,
        image=image,
        chunk_bytes=chunk_bytes,
    )
    return Publication(sign(manifest, key), manifest, image)


class PublishPace:
    """When to publish: a fixed period, or one that follows what was measured."""

    def __init__(self, *, period: int, is_auto: bool, max_staleness: int) -> None:
        """Start with `period` steps between publications.

        Args:
            period: kappa, or where to begin if it is measured.
            is_auto: whether it follows what is measured.
            max_staleness: S, which bounds it.
        """
        self.period = period
        self._is_auto = is_auto
        self._max_staleness = max_staleness
        self._published_at: dict[PolicyVersion, float] = {}
        self._num_bytes = 0
        self.broadcast_s: float | None = None
        """Seconds that the last fully received version took to reach every node."""

    def is_due(self, step: int) -> bool:
        """Return whether the weights after `step` are to be published."""
        return step % self.period == 0

    def published(self, version: PolicyVersion, *, num_bytes: int, now: float) -> None:
        """Note when a version of this size was published."""
        self._num_bytes = num_bytes
        self._published_at[version] = now
        if len(self._published_at) > MAX_PENDING:
            del self._published_at[min(self._published_at)]

    def received(
        self, installed: Sequence[PolicyVersion | None], *, now: float, train_s: float | None
    ) -> bool:
        """Note what every node holds; return whether a version has reached all of them."""
        slowest = min((v for v in installed if v is not None), default=None)
        if slowest is None or None in installed:
            return False
        arrived = [v for v in self._published_at if v <= slowest]
        if not arrived:
            return False
        self.broadcast_s = now - self._published_at[max(arrived)]
        for version in arrived:
            del self._published_at[version]
        if self._is_auto and train_s is not None:
            self.period = auto_publish_period(train_s, self.broadcast_s, self._max_staleness)
        return True

    def metrics(self) -> dict[str, float]:
        """Return the period, and what the last measured broadcast took."""
        row: dict[str, float] = {"publish_period": self.period}
        if self.broadcast_s is not None:
            row["broadcast/seconds"] = self.broadcast_s
            row["broadcast/goodput"] = self._num_bytes / max(self.broadcast_s, 1e-6)
        return row
