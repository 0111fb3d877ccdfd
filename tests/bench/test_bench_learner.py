"""The figures of a first step, in which layers are compiled, are no part of the others."""

from __future__ import annotations

import time

import bench_learner
import pytest
from torch._dynamo.utils import counters

from echo.core.rollout import Group


def test_the_first_step_has_a_figure_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And tells whether its graphs were compiled in it, or found where a process left them."""

    def step(_: list[Group]) -> dict[str, float]:
        done.append(len(done))
        if len(done) == 1:
            counters["inductor"]["fxgraph_cache_miss"] += 3
            time.sleep(0.2)
        return {"perf/tokens_per_s": 1.0}

    done: list[int] = []
    monkeypatch.setitem(counters["inductor"], "fxgraph_cache_miss", 7)
    monkeypatch.setattr(bench_learner, "WAYS", {"packed": lambda _: step})
    options = "step --model tiny --tokens 64 --micro-batches 1 --device cpu --steps 3 --ways packed"
    [row] = bench_learner.time_steps(bench_learner.new_parser().parse_args(options.split()))
    assert row["num_steps"] == 3
    assert row["first_step_s"] >= 0.2 > row["step_s"]
    assert row["graphs_compiled"] == 3
