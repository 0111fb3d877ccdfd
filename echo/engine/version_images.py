"""The image of each version, made where the weights live: little of it crosses to the host.

The first version crosses whole. From then on, where the weights are on a GPU:

    weights -> image on the GPU --+--> changed words --> coded blocks on the host
               last image there --+                        |
                          host image of the last version --+--> host image of this one

The host's image comes out of the same blocks that receivers get, on the same base, so it is what
they will hold, and it is that which is hashed and signed.

It costs the GPU one image that stays (footprint.py counts it). While a version is made there are
two; the second has the room of the gradients, which are let go at the end of a step and are no
smaller.

The image crosses whole, and its delta is coded on the host beside the next step, where coding here
would only hold the trainer up: above SPARSE_SHARE changed words, when what the model consists of
changed, and after a restart.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from echo.core.rollout import PolicyVersion
from echo.engine.device_delta import DeviceDelta
from echo.engine.weights import (
    ALIGNMENT_BYTES,
    Weights,
    host_bytes,
    image_bytes,
    lay_out,
    publish_image,
    write_image,
)
from echo.weights.delta import SPARSE_SHARE, decode_block
from echo.weights.manifest import TensorSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CodedDelta:
    """A version as the blocks that lead to it from another one."""

    base: PolicyVersion
    block_bytes: int
    """Image bytes per block."""
    blocks: tuple[bytes, ...]
    """All of them, as `encode_block` returns them."""


@dataclass(frozen=True, slots=True)
class VersionImage:
    """A version on the host."""

    specs: tuple[TensorSpec, ...]
    image: bytearray
    coded: CodedDelta | None
    """Its delta against the version before, where it had to be made anyway."""


@dataclass(frozen=True, slots=True)
class _Last:
    """The last version, on the host and on the device."""

    version: PolicyVersion
    made: VersionImage
    device: torch.device
    delta: DeviceDelta


class VersionImages:
    """Makes one image after the other."""

    def __init__(self, dtype: str, *, block_bytes: int, is_on_device: bool | None = None) -> None:
        """Begin without a version.

        Args:
            dtype: of the floating-point tensors in the image.
            block_bytes: image bytes per coded block.
            is_on_device: whether to find what changed where the weights are; None for: where that
                is a CUDA device.
        """
        self._dtype = dtype
        self._block_bytes = block_bytes
        self._is_on_device = False if block_bytes % ALIGNMENT_BYTES else is_on_device
        self._last: _Last | None = None

    def make(self, weights: Weights, version: PolicyVersion) -> VersionImage:
        """Return the image of a version; the weights are free to change afterwards."""
        device = self._device(weights)
        if device is not None:
            try:
                return self._make_there(weights, version, device)
            except torch.OutOfMemoryError:
                _log.warning(
                    "%s has no room for the last version beside the training: whole versions are "
                    "copied to the host from now on",
                    device,
                )
                self._is_on_device = False
        self._last = None
        specs, image = publish_image(weights, self._dtype)
        return VersionImage(specs, image, None)

    def _device(self, weights: Weights) -> torch.device | None:
        """Return where to look for changes; None for nowhere."""
        devices = {tensor.device for tensor in weights.values()}
        if len(devices) != 1 or self._is_on_device is False:
            return None
        [device] = devices
        return device if self._is_on_device or device.type == "cuda" else None

    def _make_there(
        self, weights: Weights, version: PolicyVersion, device: torch.device
    ) -> VersionImage:
        specs, tensors = lay_out(weights, self._dtype)
        last = self._last
        if last is not None and (last.made.specs, last.device) != (specs, device):
            last = self._last = None  # its memory may be needed
        new = torch.zeros(image_bytes(specs), dtype=torch.uint8, device=device)
        write_image(specs, tensors, new)
        if last is None or last.delta.changed_share(new, specs) > SPARSE_SHARE:
            image = bytearray(new.numel())
            host_bytes(image).copy_(new)
            made = VersionImage(specs, image, None)
            delta = DeviceDelta(new, block_bytes=self._block_bytes)
        else:
            made = self._follow(last, new, specs)
            delta = last.delta
        self._last = _Last(version, made, device, delta)
        return made

    def _follow(self, last: _Last, new: Tensor, specs: tuple[TensorSpec, ...]) -> VersionImage:
        """Return an image that is made of the last one and what changed."""
        held = memoryview(last.made.image)
        image = bytearray(new.numel())
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1), "changes") as pool:
            blocks = tuple(last.delta.encode(new, specs, held=held, pool=pool))
            pieces = _pieces(len(image), self._block_bytes)

            def decode(block: bytes, piece: slice) -> None:
                decode_block(memoryview(block), held[piece], memoryview(image)[piece])

            for _ in pool.map(decode, blocks, pieces):
                pass
        return VersionImage(specs, image, CodedDelta(last.version, self._block_bytes, blocks))


def _pieces(num_bytes: int, block_bytes: int) -> Iterator[slice]:
    stops: Sequence[int] = [*range(0, num_bytes, block_bytes), num_bytes]
    return (slice(start, stop) for start, stop in pairwise(stops))
