"""The engine of bench_overlap takes its time, and tells of what it has made as real engines do."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion, Request, Sampling

REPOSITORY = Path(__file__).parents[2]
SAMPLING = Sampling(1.0, 1.0, 0, 1 << 20, ())
REQUESTS = [Request(str(number), np.array([5], dtype=np.int32), seed=number) for number in range(3)]


@pytest.fixture
def timed_node(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    import timed_node

    return timed_node


@pytest.mark.parametrize("is_stopped", [False, True])
def test_workers_are_told_of_each_completion_that_is_whole(
    timed_node: ModuleType, is_stopped: bool
) -> None:
    engine = timed_node.TimedEngine(60.0 if is_stopped else 0.3, 0.0)
    engine.load({}, PolicyVersion(1, 2))
    told: list[Completion] = []
    began = time.monotonic()
    made = engine.generate(
        REQUESTS, SAMPLING, should_stop=lambda: is_stopped, on_completion=told.append
    )
    assert [completion.request_id for completion in made] == ["0", "1", "2"]
    assert told == ([] if is_stopped else made)
    assert is_stopped or time.monotonic() - began >= 0.3
