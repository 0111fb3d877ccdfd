"""Decisions of the staleness controller, and what follows them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from echo.algo.corrections import ControlSettings
from echo.config.load import parse_config
from echo.core.buffer import StalenessBuffer
from echo.core.rollout import Lineage
from echo.records.ledger import Ledger
from echo.runtime.learner.node import Adaptation
from echo.weights.schedule import PublishPace
from tests.e2e.audit import read_ledger
from tests.runtime.harness import Play, Run, running

GOOD = {"ess": 0.99, "mismatch_kl": 0.0, "clip_ratio/mean": 0.0}


class Parts:
    """An adaptation and what it takes hold of."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        config = parse_config({}, ["sync.max_staleness=6", "sync.publish_period=5", *overrides])
        self.buffer = StalenessBuffer(max_staleness=6, lineages=(Lineage(1, 0),))
        self.pace = PublishPace(period=5, is_auto=False, max_staleness=6)
        self.ledger = Ledger(directory, spool_bytes=1 << 20)
        self.made = Adaptation(
            config,
            buffer=self.buffer,
            pace=self.pace,
            ledger=self.ledger,
            log=logging.getLogger("test"),
        )

    def step(self, step: int, **changes: float) -> bool:
        return self.made.after_step(step, GOOD | changes, {6: 10, 2: 3})

    @property
    def records(self) -> list[dict[str, Any]]:
        self.ledger.commit()
        return [r for r in read_ledger(self.ledger.run_dir) if r["kind"] == "bound"]


MakeParts = Callable[..., Parts]


def quick(patch: pytest.MonkeyPatch, **limits: float) -> None:
    """Let the controller decide within the steps of a test."""
    settings = partial(ControlSettings, **limits)
    patch.setattr("echo.runtime.learner.node.ControlSettings", settings)


@pytest.fixture
def make_parts(tmp_path: Path) -> Iterator[MakeParts]:
    made: list[Parts] = []

    def make(*overrides: str) -> Parts:
        made.append(Parts(tmp_path, *overrides))
        return made[-1]

    yield make
    for parts in made:
        parts.ledger.close()


def test_a_decision_is_noted_with_its_cause(make_parts: MakeParts) -> None:
    parts = make_parts("sync.adaptive=true")
    assert parts.step(1, ess=0.1)
    [record] = parts.records
    assert {name: record[name] for name in ("step", "before", "bound", "cause")} == {
        "step": 1,
        "before": 6,
        "bound": 3,
        "cause": "ess 0.1 below 0.8",
    }
    assert parts.made.metrics() == {"staleness/bound": 3}


def test_it_gates_leases_and_publishes_at_once_and_more_often(
    make_parts: MakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch, patience=1)
    parts = make_parts("sync.adaptive=true")
    assert parts.step(1, ess=0.1)
    assert (parts.buffer.admission_staleness, parts.pace.period) == (3, 4)
    assert parts.buffer.max_staleness == 6
    published = [step for step in range(2, 40) if parts.step(step)]
    # Smoothed signals take a while to recover; then the bound rises, and the period with it. Only
    # a lower bound needs a version at once.
    assert published == [r["step"] for r in parts.records[1:] if r["bound"] < r["before"]]
    assert (parts.buffer.admission_staleness, parts.pace.period) == (6, 5)
    assert [r["bound"] for r in parts.records][-4:] == [3, 4, 5, 6]


def test_it_stays_above_the_least_bound(make_parts: MakeParts) -> None:
    parts = make_parts("sync.adaptive=true", "sync.min_staleness=3")
    for step in range(40):
        parts.step(step, ess=0.1)
    assert parts.buffer.admission_staleness == 3


@pytest.mark.parametrize("overrides", [[], ["sync.adaptive=true", "sync.min_staleness=6"]])
def test_nothing_happens_where_there_is_nothing_to_choose(
    overrides: list[str], make_parts: MakeParts
) -> None:
    parts = make_parts(*overrides)
    assert not parts.step(1, ess=0.1)
    assert parts.made.metrics() == {}
    assert parts.records == []


@pytest.mark.slow
def test_a_run_that_follows_it_grants_for_the_lower_bound(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch, ess_low=0.999, kl_high=1e-5, patience=2)

    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run={"max_steps": 40},
            sync={"max_staleness": 4, "publish_period": 3, "adaptive": True},
            optimizer={"learning_rate": 3e-2, "warmup_steps": 0},
            task={"kind": "tests.runtime.rewards:SometimesEqual"},
        )
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        bounds = run.ledger("bound")
        assert bounds[0]["before"] == 4
        assert bounds[0]["bound"] < 4
        assert all(0 <= record["bound"] <= 4 for record in bounds)
        # The first of them published at once, between the versions that were due anyway.
        published = [record["version"][1] for record in run.ledger("published")]
        assert bounds[0]["step"] in published
        # New leases are for the lower bound; what was out before may be as old as the hard one.
        lags = {r["step"]: max(map(int, r["staleness"])) for r in run.ledger("trained")}
        assert max(lags.values()) <= 4
        lowest = min(record["bound"] for record in bounds)
        assert min(lags[step] for step in list(lags)[-10:]) <= max(lowest, 2)
        row = [row for _, row in run.rows if "staleness/bound" in row][-1]
        assert row["staleness/bound"] == bounds[-1]["bound"]

    play(scenario)
