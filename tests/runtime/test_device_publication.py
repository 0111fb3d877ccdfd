"""Versions made on the device of the weights are those made on the host, encoded ones too."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from echo.config.load import parse_config
from echo.core.rollout import PolicyVersion
from echo.engine.weights import DeviceDelta, VersionImages, Weights
from echo.runtime.learner import publish as encoded_versions
from echo.runtime.learner.publish import (
    CodedSegment,
    Coder,
    Publication,
    make_images,
    make_publication,
)
from echo.weights.broadcast import Broadcast
from echo.weights.store import Transfer

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
CHUNK_BYTES = 1 << 16
BLOCK_BYTES = 4 << 20


def publish(images: VersionImages, weights: Weights, step: int) -> Publication:
    return make_publication(
        weights,
        PolicyVersion(1, step),
        run_id="run",
        model_digest="model",
        images=images,
        chunk_bytes=CHUNK_BYTES,
        key=KEY,
    )


class Learner:
    """Weights that move a little with each step, by an amount that bf16 mostly rounds away."""

    def __init__(self, device: str = "cpu") -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device = device
        embedding = self._random(2500, 1000).to(device)
        self.weights: dict[str, Tensor] = {
            "embedding": embedding,
            "head": embedding,  # tied
            "norm": torch.ones(1001, device=device),
            "matrix": self._random(3000, 701).to(device).t(),
            "frequencies": torch.arange(5, device=device),
            "empty": torch.empty(0, 3, device=device),
        }

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator) * 0.02

    def step(self, share: float, scale: float) -> None:
        """Move a share of the weights, in place as an optimizer does."""
        for name in ("embedding", "matrix"):
            tensor = self.weights[name]
            change = self._random(*tensor.shape) * scale
            change *= torch.rand(tensor.shape, generator=self._generator) < share
            tensor += change.to(self._device)


def assert_same(one: Publication, other: Publication) -> None:
    assert one.signed == other.signed
    assert one.manifest == other.manifest
    assert one.image == other.image


def transfer_of(publication: Publication) -> Transfer:
    broadcast = Broadcast(node_id="x", window_bytes=8 << 20, stall_s=5.0)
    broadcast.publish(publication.signed, publication.manifest, publication.image, now=0.0)
    return broadcast.store[publication.manifest.version]


def encoded(
    coder: Coder, publication: Publication, base: Publication | None
) -> Sequence[tuple[bytes, bytes]]:
    transfer = None if base is None else transfer_of(base)
    made: list[CodedSegment] = list(coder.segments(publication, transfer))
    return [(segment.frame, bytes(segment.payload)) for segment in made]


def compare(device: str, dtype: str, share: float, scale: float) -> list[bool]:
    """Publish four versions both ways; return of which the delta was made on the device."""
    learner = Learner(device)
    here = VersionImages(dtype, block_bytes=BLOCK_BYTES, is_on_device=False)
    there = VersionImages(dtype, block_bytes=BLOCK_BYTES, is_on_device=device == "cpu" or None)
    coder = Coder(KEY, num_threads=2)
    published: list[Publication] = []
    are_coded = []
    for step in range(4):
        expected, made = publish(here, learner.weights, step), publish(there, learner.weights, step)
        assert_same(made, expected)
        assert "head" not in {spec.name for spec in made.manifest.tensors}
        assert expected.coded is None
        are_coded.append(made.coded is not None)
        if published:
            encoded_versions_made = encoded(coder, made, published[-1])
            assert encoded_versions_made == encoded(coder, expected, published[-1])
            with mock.patch.object(coder, "_pool") as pool:  # nothing is coded twice
                if are_coded[-1]:
                    assert encoded(coder, made, published[-1]) == encoded_versions_made
                pool.submit.assert_not_called()
            # Against other bases it is coded as ever.
            assert encoded(coder, made, published[0]) == encoded(coder, expected, published[0])
        published.append(made)
        learner.step(share, scale)
    assert encoded(coder, published[-1], None)
    coder.close()
    return are_coded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "share", "scale", "coded"),
    [
        ("bfloat16", 1.0, 1e-4, [False, True, True, True]),
        ("bfloat16", 0.0, 0.0, [False, True, True, True]),
        ("float32", 0.05, 1e-2, [False, True, True, True]),
        # Nearly all words change: the image crosses whole.
        pytest.param("float32", 1.0, 1e-2, [False] * 4, marks=pytest.mark.matrix),
        ("bfloat16", 1.0, 1.0, [False, False, False, False]),
    ],
)
def test_the_device_makes_what_the_host_makes(
    dtype: str, share: float, scale: float, coded: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded_versions, "SEGMENT_BYTES", BLOCK_BYTES)  # several segments
    assert compare("cpu", dtype, share, scale) == coded


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("dtype", "share", "scale"), [("bfloat16", 1.0, 1e-4), ("float32", 0.05, 1e-2)]
)
def test_a_gpu_makes_what_the_host_makes(dtype: str, share: float, scale: float) -> None:
    assert compare("cuda", dtype, share, scale) == [False, True, True, True]


def test_only_a_number_and_what_changed_cross() -> None:
    learner = Learner()
    images = VersionImages("bfloat16", block_bytes=BLOCK_BYTES, is_on_device=True)
    publish(images, learner.weights, 0)
    learner.step(1.0, 1e-4)
    crossed: list[int] = []
    to_host = functools.partial(Tensor.cpu)

    def counted(tensor: Tensor) -> Tensor:
        crossed.append(tensor.numel() * tensor.element_size())
        return to_host(tensor)

    with mock.patch.object(Tensor, "cpu", counted):
        made = publish(images, learner.weights, 1)
    assert 0 < sum(crossed) < 0.2 * made.manifest.num_bytes


def test_a_changed_layout_crosses_whole() -> None:
    learner = Learner()
    images = VersionImages("bfloat16", block_bytes=BLOCK_BYTES, is_on_device=True)
    publish(images, learner.weights, 0)
    learner.weights["norm"] = torch.ones(7)
    made = publish(images, learner.weights, 1)
    assert made.coded is None
    assert_same(made, publish(VersionImages("bfloat16", block_bytes=1), learner.weights, 1))
    learner.step(1.0, 1e-4)
    following = publish(images, learner.weights, 2)
    assert following.coded is not None
    assert following.coded.base == PolicyVersion(1, 1)


def test_a_device_without_room_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    learner = Learner()
    images = VersionImages("bfloat16", block_bytes=BLOCK_BYTES, is_on_device=True)
    publish(images, learner.weights, 0)
    with mock.patch.object(DeviceDelta, "encode", side_effect=torch.OutOfMemoryError("full")):
        made = publish(images, learner.weights, 1)
    assert made.coded is None
    assert_same(made, publish(VersionImages("bfloat16", block_bytes=1), learner.weights, 1))
    assert publish(images, learner.weights, 2).coded is None
    assert len(caplog.records) == 1


def test_only_cuda_is_a_device_and_only_where_deltas_are_wanted() -> None:
    fake = mock.Mock(device=torch.device("cuda", 1))
    for codec, device in (("auto", fake.device), ("delta", fake.device), ("full", None)):
        images = make_images(parse_config({}, [f"network.codec={codec}"]))
        assert images._device({"w": fake}) == device
        assert images._device({"w": torch.zeros(1)}) is None
        assert images._device({"w": fake, "x": torch.zeros(1)}) is None
