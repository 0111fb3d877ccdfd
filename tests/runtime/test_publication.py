from __future__ import annotations

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from echo.engine.version_images import VersionImages
from echo.engine.weights import tensors_from_image
from echo.protocol.manifest import verify
from echo.rollout import PolicyVersion
from echo.runtime.publication import MAX_PENDING, PublishPace, make_publication


def version(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


def test_a_publication_is_signed_and_rounded() -> None:
    key = Ed25519PrivateKey.generate()
    tensors = {"w": torch.linspace(-1, 1, 1000), "steps": torch.arange(3)}
    publication = make_publication(
        tensors,
        version(4),
        run_id="toy",
        model_digest="m",
        images=VersionImages("bfloat16", block_bytes=1024),
        chunk_bytes=1024,
        key=key,
    )
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    _, manifest = verify(
        msgspec.msgpack.encode(publication.signed),
        public_key=public,
        run_id="toy",
        max_bytes=1 << 20,
    )
    assert manifest.version == version(4)
    assert manifest.num_chunks == 2
    back = tensors_from_image(manifest.tensors, memoryview(publication.image))
    assert torch.equal(back["w"], tensors["w"].to(torch.bfloat16))
    assert torch.equal(back["steps"], tensors["steps"])


def test_a_fixed_period_stays() -> None:
    pace = PublishPace(period=2, is_auto=False, max_staleness=3)
    assert [step for step in range(7) if pace.is_due(step)] == [0, 2, 4, 6]
    pace.published(version(0), num_bytes=100, now=0.0)
    assert pace.received([version(0)], now=50.0, train_s=1.0)
    assert pace.period == 2
    assert pace.metrics() == {
        "publish_period": 2,
        "broadcast/seconds": 50.0,
        "broadcast/goodput": 2.0,
    }


def test_auto_takes_the_smallest_period_that_hides_the_broadcast() -> None:
    pace = PublishPace(period=2, is_auto=True, max_staleness=3)
    assert pace.metrics() == {"publish_period": 2}
    for broadcast_s, period in ((0.5, 1), (2.5, 3), (100.0, 4)):  # never above S + 1
        pace.published(version(8), num_bytes=100, now=10.0)
        assert pace.received([version(8)], now=10.0 + broadcast_s, train_s=1.0)
        assert pace.period == period


def test_the_slowest_worker_counts_and_one_without_weights_is_waited_for() -> None:
    pace = PublishPace(period=1, is_auto=True, max_staleness=3)
    pace.published(version(1), num_bytes=1, now=1.0)
    pace.published(version(2), num_bytes=1, now=2.0)
    assert not pace.received([version(2), version(0)], now=3.0, train_s=1.0)
    assert not pace.received([version(2), None], now=3.0, train_s=1.0)
    assert not pace.received([], now=3.0, train_s=1.0)
    assert pace.received([version(2), version(1)], now=3.0, train_s=1.0)
    assert pace.broadcast_s == 2.0
    assert pace.received([version(2), version(2)], now=3.5, train_s=1.0)
    assert pace.broadcast_s == 1.5
    assert not pace.received([version(2), version(2)], now=9.0, train_s=1.0)


def test_the_period_waits_until_a_step_was_timed() -> None:
    pace = PublishPace(period=2, is_auto=True, max_staleness=3)
    pace.published(version(0), num_bytes=1, now=0.0)
    assert pace.received([version(0)], now=60.0, train_s=None)
    assert pace.period == 2


def test_versions_that_nobody_takes_are_forgotten() -> None:
    pace = PublishPace(period=1, is_auto=False, max_staleness=3)
    for step in range(10 * MAX_PENDING):
        pace.published(version(step), num_bytes=1, now=float(step))
    assert not pace.received([version(8 * MAX_PENDING)], now=1e6, train_s=1.0)


def test_a_lower_bound_shortens_the_period_and_a_higher_one_gives_it_back() -> None:
    pace = PublishPace(period=4, is_auto=False, max_staleness=6)
    for bound, period in ((5, 4), (2, 3), (0, 1), (6, 4)):
        pace.limit(bound)
        assert pace.period == period
    pace = PublishPace(period=4, is_auto=True, max_staleness=6)
    pace.limit(1)
    assert pace.period == 2
    pace.published(version(0), num_bytes=1, now=0.0)
    pace.received([version(0)], now=50.0, train_s=1.0)
    assert pace.period == 2  # 50 steps long, and the bound lets it be S + 1
