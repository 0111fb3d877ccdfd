"""The lab of active partial rollouts: its engine takes the time that it should, and runs end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from echo.core.rollout import PolicyVersion
from echo.engine.engine import Request, Sampling

REPOSITORY = Path(__file__).parents[2]
SAMPLING = Sampling(1.0, 1.0, 0, 1 << 20, ())


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    import april_lab

    return april_lab


def setting_of(lab: ModuleType, **changes: Any) -> Any:
    """Weights take a second for each token, caches and prefills nothing."""
    small = {
        "group_size": 2, "groups_per_worker": 1, "groups_per_step": 2, "num_workers": 2,
        "num_steps": 4, "train_s": 5.0, "median_tokens": 100.0, "max_tokens": 400,
        "weights_s": 1.0, "cache_s_per_token": 0.0, "prefill_s_per_token": 0.0,
    }  # fmt: skip
    return lab.Setting(**{**small, **changes})


def ends_of(
    lab: ModuleType, lengths: Sequence[Sequence[int]], *, num_rows: int
) -> dict[str, float]:
    """Hand calls with rollouts of these lengths to an engine; return when each rollout ended."""
    import virtual_time

    class Given:
        def load(self, tensors: Any, version: PolicyVersion) -> None:
            pass

        def enter(self, rows: Sequence[Any]) -> None:
            for row in rows:
                call, member = row.ids
                row.left = lengths[call][member] - row.done

        def completion(self, row: Any, *, is_whole: bool) -> Any:
            return row.request.request_id

    async def main(clock: Any) -> dict[str, float]:
        import asyncio

        setting = setting_of(lab, group_size=num_rows)
        engine = lab.TimedEngine(setting, clock, Given())
        engine.load({}, PolicyVersion(1, 0))
        ends: dict[str, float] = {}

        def sample(call: int) -> None:
            clock.sleep(call / 1024)  # one after the other
            names = [f"{call}.0.{member}" for member in range(len(lengths[call]))]
            engine.generate(
                [Request(name, np.array([1], np.int32), 0) for name in names], SAMPLING,
                should_stop=lambda: False,
                on_completion=lambda name: ends.update({name: clock.now}),  # type: ignore[arg-type, dict-item]
            )  # fmt: skip

        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(None, sample, call) for call in range(len(lengths))]
        await asyncio.gather(*jobs)
        assert engine.use.num_tokens == sum(map(sum, lengths))
        return ends

    return within(120, lambda: virtual_time.run(main))


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return what `work` returns; fail if the virtual clock stands still."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "it failed, or no time passes any more"
    assert_nobody_waits()
    return results[0]


def assert_nobody_waits() -> None:
    """A thread that waits for a time that never comes would keep Python from its end."""
    for thread in threading.enumerate():
        if thread.name.startswith(("sample", "asyncio")):
            thread.join(120)
            assert not thread.is_alive(), thread.name


def test_a_free_row_takes_the_next_rollout_whichever_call_it_came_with(lab: ModuleType) -> None:
    ends = ends_of(lab, [[10, 300], [50], [20, 20]], num_rows=2)
    assert ends["0.0.1"] == 300, "nobody waits for it, and it waits for nobody"
    assert ends["0.0.0"] == 10
    assert sorted(ends[name] for name in ("1.0.0", "2.0.0", "2.0.1"))[-1] == 100
    assert ends_of(lab, [[10, 300], [50]], num_rows=1)["1.0.0"] == 360


@pytest.mark.slow
def test_runs_end_and_over_submission_refills_what_stragglers_leave(lab: ModuleType) -> None:
    for is_continuous in (True, False):
        base = setting_of(lab, is_continuous=is_continuous, groups_per_worker=2, num_steps=8)
        results = [
            within(120, lambda s=s: lab.measure(s))
            for s in (replace(base, max_staleness=0), base, replace(base, over_submission=2.0))
        ]
        for result in results:
            assert len(result["steps"]) == 8
            assert 0 <= result["rows_idle"] < 1
        waiting, plain, early = results
        assert waiting["mean_staleness"] == 0
        assert early["rows_idle"] < plain["rows_idle"] < waiting["rows_idle"]


def test_the_papers_stop_gains_nothing_where_there_is_no_tail(lab: ModuleType) -> None:
    import april_paper

    setting = setting_of(lab, sigma=0.0, num_steps=8)
    waiting, early = (april_paper.play(setting, num_submitted=n) for n in (2, 4))
    assert waiting["rollout_s_per_batch"] == pytest.approx(100, abs=1)
    tailed = replace(setting, sigma=1.0)
    slow, quick = (april_paper.play(tailed, num_submitted=n) for n in (2, 4))
    assert slow["rollout_s_per_batch"] > 100
    assert quick["rollout_tokens_per_s"] > 1.2 * slow["rollout_tokens_per_s"]
    assert early["rows_idle"] < waiting["rows_idle"], "twice as many rows"


@pytest.mark.matrix
def test_a_real_model_is_sampled_and_trained_in_the_time_of_long_rollouts(
    lab: ModuleType, tmp_path: Path
) -> None:
    import april_learning

    from echo.engine.model import build_model, save_tiny_model

    save_tiny_model(tmp_path / "model", build_model(seed=0))
    setting = setting_of(lab, num_steps=4, median_tokens=400.0, max_tokens=4000, train_s=100.0)
    settings = [f"model.name={tmp_path / 'model'}", "eval.num_prompts=4"]
    seen: list[list[Any]] = []

    class Watched(april_learning.Addition):
        def train(self, groups: Any) -> dict[str, float]:
            seen.append(list(groups))
            return super().train(groups)

    result = within(100, lambda: lab.measure(setting, lambda s: Watched(s, settings, eval_steps=2)))
    assert [set(step) >= {"sampled", "greedy"} for step in result["steps"]] == [False, True] * 2
    rollouts = [rollout for groups in seen for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        assert 0 < rollout.num_tokens <= 24
        assert (np.diff(rollout.policy_versions[:, 1]) >= 0).all(), "no version after a newer one"
    assert any(len(set(r.policy_versions[:, 1].tolist())) > 1 for r in rollouts), (
        "swapped in flight"
    )
