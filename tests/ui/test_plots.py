from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path

import pytest

from echo.core.errors import ConfigError, DataError, StorageError
from echo.fleet.provisioning import outcome_of
from echo.records.run_files import read_metrics
from echo.ui import plots
from echo.ui.sinks import MetricsWriter
from tests.fleet.fleets import JOB, make_fleet, make_offer
from tests.ui.conftest import MakeRun, evaluation

Figure = pytest.importorskip("matplotlib.figure").Figure


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


@pytest.mark.slow
def test_runs_make_a_png_and_leave_matplotlibs_global_state_alone(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # of somebody else
    out = tmp_path / "figures" / "curve.png"
    gaps = make_run(rewards=lambda step: math.nan if step == 2 else 0.5)
    (gaps / "config.json").unlink()
    rows = [json.loads(line) for line in (gaps / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("staleness/hist", None)
    (gaps / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plots.learning_curve(gaps, out) == out
    assert png_size(out) == (1440, 604)
    whole = make_run("whole", rewards=lambda step: -step)
    assert png_size(plots.learning_curve(whole, tmp_path / "curve.png"))[0] == 1440
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "heldout", "limits"),
    [(0.5, 0.5, [(0, 1)]), (-3.0, 0.5, [None]), (1.2, 0.8, [None]), (-3.0, 2.5, [None])],
)
def test_every_reward_is_within_the_plot(
    make_run: MakeRun, train: float, heldout: float, limits: list[tuple[int, int] | None]
) -> None:
    run_dir = make_run(rewards=lambda step: train)
    with MetricsWriter(run_dir) as writer:
        writer.write(10, evaluation(10, heldout, heldout))
    figure = Figure()
    plots.draw_curves(figure.subplots(), read_metrics(run_dir))
    for axes, wanted in zip(figure.axes, limits, strict=True):
        low, high = axes.get_ylim()
        assert wanted is None or (low, high) == wanted
        values = [value for line in axes.lines for value in line.get_ydata()]
        assert low <= min(values)
        assert max(values) <= high


def test_the_reward_is_smoothed_over_the_last_steps_only() -> None:
    smooth = plots.smoothed([float(step) for step in range(1, 8)])
    assert smooth == [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]


@pytest.mark.slow
def test_bad_input_is_named(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, run_dir = tmp_path / "curve.png", make_run()
    with pytest.raises(DataError, match=r"nowhere/metrics.jsonl: no such file"):
        plots.learning_curve(tmp_path / "nowhere", out)
    with pytest.raises(StorageError, match="cannot be written"):
        plots.learning_curve(run_dir, run_dir / "metrics.jsonl" / "curve.png")
    (run_dir / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match=r"metrics.jsonl: no optimizer step yet"):
        plots.learning_curve(run_dir, out)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = "the learning curve needs matplotlib, which is not installed; install it with"
    with pytest.raises(ConfigError, match=text):
        plots.learning_curve(make_run("other"), out)


@pytest.mark.slow
def test_costs_are_plotted_into_a_new_directory(tmp_path: Path) -> None:
    fleet = make_fleet(make_offer("any"))
    front = {f"{n} any": outcome_of(fleet, JOB, [n]) for n in (7, 4)}
    out = tmp_path / "new" / "plan.png"
    assert plots.cost_plot(front, front["7 any"], out, title="a plan") == out
    assert png_size(out)[0] == 1440
