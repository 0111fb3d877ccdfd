from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Sequence

import msgspec
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bench.delays import DelayInjector, DelaySettings, delay_installs
from echo.core.rollout import Group, PolicyVersion
from echo.engine.weights import VersionImages, tensors_from_image
from echo.runtime.learner.publish import make_publication
from echo.train.trainer import StepResult
from echo.weights.manifest import verify
from echo.weights.schedule import MAX_PENDING, PublishPace
from tests.runtime.harness import Play, Run, running


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


def due_steps(pace: PublishPace, steps: Iterable[int]) -> list[int]:
    """Publish where it is due; return those steps."""
    due = []
    for step in steps:
        if pace.is_due(step):
            pace.published(version(step), num_bytes=1, now=float(step))
            due.append(step)
    return due


def test_a_fixed_period_stays() -> None:
    pace = PublishPace(period=2, is_auto=False, max_staleness=3)
    assert due_steps(pace, range(7)) == [0, 2, 4, 6]
    pace.published(version(6), num_bytes=100, now=0.0)
    assert pace.received([version(6)], now=50.0, train_s=1.0)
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


def test_the_period_counts_from_the_last_version_whatever_its_step() -> None:
    pace = PublishPace(period=4, is_auto=False, max_staleness=6)
    pace.published(version(9), num_bytes=1, now=0.0)  # as after a resume
    assert due_steps(pace, range(10, 20)) == [13, 17]
    pace.limit(2)
    assert due_steps(pace, range(20, 30)) == [20, 23, 26, 29]
    # A raised bound gives the period back, and the next version is not put off to a multiple of it.
    pace.limit(6)
    assert due_steps(pace, range(30, 40)) == [33, 37]
    pace = PublishPace(period=7, is_auto=True, max_staleness=6)
    pace.published(version(0), num_bytes=1, now=0.0)
    pace.limit(1)
    pace.limit(6)
    assert due_steps(pace, range(1, 9)) == [2, 4, 6, 8]  # until it is measured again


@pytest.mark.parametrize("max_staleness", [3, 6, 10])
@pytest.mark.parametrize("seed", range(5))
def test_two_versions_are_never_further_apart_than_the_bound_allows(
    max_staleness: int, seed: int
) -> None:
    pace = PublishPace(period=max(1, max_staleness - 1), is_auto=True, max_staleness=max_staleness)
    chance = random.Random(seed)
    pace.published(version(0), num_bytes=1, now=0.0)
    arrivals, now, last, gaps, periods = [(4.5, version(0))], 0.0, 0, [], set()
    for step in range(1, 301):
        train_s = max(0.1, chance.gauss(1.0, 0.2))
        now += train_s
        while arrivals and arrivals[0][0] <= now:
            at, arrived = arrivals.pop(0)
            pace.received([arrived], now=at, train_s=train_s)
            periods.add(pace.period)
        if pace.is_due(step):
            gaps.append(step - last)
            pace.published(version(step), num_bytes=1, now=now)
            arrivals.append((now + 4.5, version(step)))
            last = step
    assert len(periods) > 1 or max_staleness == 3  # the noise changes what is measured
    assert max(gaps) <= max_staleness + 1
    assert 300 - last <= max_staleness


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_real_pair_finishes_though_the_measured_period_changes(play: Play, seed: int) -> None:
    """Weights reach the worker 1 to 4 s late, and steps of .2 s vary by a fifth."""
    max_staleness, chance = 6, random.Random(seed)

    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run={"max_steps": 120, "seed": seed},
            sync={"max_staleness": max_staleness, "publish_period": "auto"},
        )
        step = learner._train_on

        def train(groups: Sequence[Group]) -> StepResult:
            ends_at = time.monotonic() + 0.2 * chance.gauss(1.0, 0.2)
            result = step(groups)
            time.sleep(max(0.0, ends_at - time.monotonic()))
            return result

        learner._train_on = train
        worker = await run.worker("w1")
        law = DelaySettings(law="lognormal", lower_s=1.0, upper_s=4.0)
        delay_installs(worker, DelayInjector(law, direction="weights", seed=seed))
        async with running(learner, worker) as (learning, _):
            assert await learning == "finished"
        steps = [record["version"][1] for record in run.ledger("published")]
        assert max(b - a for a, b in itertools.pairwise(steps)) <= max_staleness + 1

    play(scenario, limit_s=250)
