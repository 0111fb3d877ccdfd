"""The report of a run: what it reads from the files, its figures and its page."""

from __future__ import annotations

import colorsys
import itertools
import json
import re
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from echo.core.errors import ConfigError, DataError, StorageError
from echo.core.rollout import PolicyVersion
from echo.fleet.explain import WaitStage
from echo.records.ledger import Ledger
from echo.ui.report import figures
from echo.ui.report.figures import Plot, draw_all, learning_curve
from echo.ui.report.page import render_page
from echo.ui.report.run import MAX_LONG_WAITS, ReportedRun, read_run, read_runs
from echo.ui.rollouts import Part, ShownRollout
from echo.ui.sinks import MetricsWriter
from echo.ui.trace import ALL, parse_window, render_trace
from tests.records.rows import write_ledger
from tests.ui.conftest import MakeRun, evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figure = pytest.importorskip("matplotlib.figure").Figure
EVIL = "<script>alert(1)</script>\x1b[2J\u202e"


def add_columns(run_dir: Path, **columns: Any) -> None:
    """Add columns to the rows of a run's steps; a function gets the number of the step."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if "reward/mean" in row:
            for name, value in columns.items():
                row[name.replace("__", "/")] = value(row["step"]) if callable(value) else value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_dir(make_run: MakeRun) -> Path:
    """A run of 10 steps of a second each; a wait of 30 s came before step 7."""
    path = make_run()
    add_columns(
        path,
        time__step=1.0,
        time__train=0.6,
        time__publish=0.1,
        time__wait_for_batch=lambda step: 30.0 if step == 7 else 0.3,
        cost__by_node={"learner": 0.2, "w1": 0.1},
        links__bytes={"learner > w1": 500.0},
        links__goodput=lambda step: {"learner > w1": 1e6 * step},
    )
    return path


def page_of(run: ReportedRun, *rollouts: ShownRollout) -> str:
    return render_page([run], [], rollouts, without_rollouts="", made_at=0.0)


def make_rollout(*, prompt: str, parts: list[Part]) -> ShownRollout:
    return ShownRollout(
        group=1,
        attempt=0,
        index=0,
        worker="w1",
        end="trained in step 3",
        step=3,
        reward=1.0,
        group_mean=0.5,
        finish_reason="stop",
        staleness=(0, 1),
        prompt=prompt,
        parts=parts,
    )


def make_part(text: str, step: int) -> Part:
    return Part(text=text, num_tokens=4, version=PolicyVersion(1, step), is_sampled=True)


def test_nodes_have_what_they_delivered_received_and_cost(run_dir: Path) -> None:
    granted = [{"kind": "granted", "group": 200 + n, "at": 1000.0 + n} for n in range(2)]
    accepted = [
        {"kind": "accepted", "group": 200 + n, "tokens": 50, "at": 1001.0 + n} for n in range(2)
    ]
    write_ledger(run_dir, [*granted, *accepted])
    learner, worker = read_run(run_dir).nodes
    assert (learner.node_id, learner.num_groups) == ("learner", 0)
    assert learner.cost == pytest.approx(2.0)
    assert (worker.num_groups, worker.num_tokens, worker.received_bytes) == (2, 100, 5000)
    assert worker.cost_per_million_tokens == pytest.approx(10_000)
    add_columns(run_dir, cost__total=0.025, cost__per_hour=1.0)
    assert ">$50</td>" in page_of(read_run(run_dir)), "of all 500 accepted tokens"
    assert worker.rate is not None
    assert worker.rate.tokens_per_s == pytest.approx(50.0)


def test_long_waits_and_stalls_have_the_explanation_of_the_run(run_dir: Path) -> None:
    add_columns(run_dir, time__wait__weights=lambda step: 30.0 if step == 7 else 0.0)
    [wait] = read_run(run_dir).long_waits
    assert (wait.step, wait.waited_s, wait.cause) == (7, 30.0, "weights 30s")
    text = "v6 is slow to w1; add a relay"
    found = {"cause": "weights", "resource": "w1", "setting": "relay", "text": text}
    row = {"step": 7, "time": 1007.5, "explain": found}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    run = read_run(run_dir)
    assert [(stall.first_step, stall.text) for stall in run.stalls] == [(8, text)]
    page = page_of(run)
    assert page.index(text) < page.index("weights 30s")


def test_of_a_run_that_always_waits_long_the_longest_waits_are_listed(run_dir: Path) -> None:
    add_columns(run_dir, time__wait_for_batch=lambda step: 30.0 + step)
    waits = [wait.waited_s for wait in read_run(run_dir).long_waits]
    assert len(waits) == MAX_LONG_WAITS
    assert waits == sorted(waits, reverse=True)
    assert waits[0] == 30.0 + read_run(run_dir).step


def test_the_state_of_a_run_that_ended_goes_on_or_was_cut_off(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert run.is_cut_off
    assert "ended after 10 of 10 steps without finishing" in run.state
    assert "it has no checkpoint" in run.state
    write_ledger(run_dir, [{"kind": "checkpoint", "lineage": 1, "step": 8}])
    assert "continues from the checkpoint of step 8" in read_run(run_dir).state
    learner = Ledger(run_dir, spool_bytes=1)
    assert read_run(run_dir).state == "under way, 10 of 10 steps made"
    learner.close()
    write_ledger(run_dir, [{"kind": "finished", "step": 10}])
    assert read_run(run_dir).state == "finished"
    back = {"kind": "rollback", "step": 10, "to_step": 8, "number": 1, "cause": "NaN"}
    paused = {"act": "pause", "subject": "", "value": "", "outcome": "paused at step 9"}
    write_ledger(run_dir, [{"kind": "operated", "step": 9, "by": "ann", **paused}])
    write_ledger(run_dir, [{"kind": "checkpoint", "lineage": 1, "step": 10}])
    write_ledger(run_dir, [back, {"kind": "lineage", "lineage": 2, "fork_step": 8}])
    run = read_run(run_dir)
    assert run.is_cut_off
    assert "continues from the checkpoint of step 8" in run.state
    assert [each.what for each in run.decisions] == [
        "finished",
        "ann: paused at step 9",
        "rolled back to the checkpoint of step 8: NaN",
        "resumed from the checkpoint of step 8",
    ]


def test_a_run_that_crashed_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"run": {"name": "early", "max_steps": 9}}')
    write_ledger(tmp_path, [{"kind": "lineage", "lineage": 1, "fork_step": 0}])
    (tmp_path / "logs").mkdir()
    lines = (f"10:00:00 INFO    out of memory {EVIL}", "10:00:01 WARNING disk is full")
    (tmp_path / "logs" / "learner.log").write_text("\n".join(lines))
    run = read_run(tmp_path)
    page = page_of(run)
    assert "ended after 0 of 9 steps without finishing" in page
    assert "out of memory &lt;script&gt;" in page
    assert run.log_warnings == [lines[1]]
    assert draw_all([run]) == []
    with pytest.raises(DataError, match="no such steps"):
        render_trace(run, ALL)


def test_text_of_models_and_nodes_is_escaped_and_the_page_loads_nothing(run_dir: Path) -> None:
    add_columns(run_dir, cost__by_node={EVIL: 1.0})
    rollout = make_rollout(prompt=EVIL, parts=[make_part(EVIL, 1), make_part('" onload="x', 2)])
    page = page_of(read_run(run_dir), rollout)
    assert "<script" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert 'onload="' not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J\\u202e") == 3
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)


def test_a_completion_of_several_versions_is_coloured(run_dir: Path) -> None:
    parts = [make_part("older", 1), make_part("newer", 2)]
    page = page_of(read_run(run_dir), make_rollout(prompt="p", parts=parts))
    assert '<span class="v0" title="v1, 4 tokens">older</span>' in page
    assert '<span class="v1" title="v2, 4 tokens">newer</span>' in page
    assert "staleness 0 to 1" in page


def test_runs_are_compared_by_figures_and_settings(make_run: MakeRun) -> None:
    paths = [make_run("one"), make_run("two", num_steps=20)]
    runs = read_runs(paths)
    page = render_page(runs, [], [], without_rollouts="", made_at=0.0)
    assert "Settings that differ" in page
    assert "run.max_steps" in page
    assert "sync.max_staleness" not in page
    assert "Sample rollouts" not in page
    with pytest.raises(DataError, match="compared with itself"):
        read_runs([paths[0], paths[0] / ".." / "one"])


def test_runs_of_the_same_name_are_told_apart_by_number(make_run: MakeRun) -> None:
    paths = [make_run("here/run"), make_run("there/run"), make_run("other")]
    for path in paths[:2]:
        config = json.loads((path / "config.json").read_text())
        config["run"]["name"] = "run"
        (path / "config.json").write_text(json.dumps(config))
    assert [run.name for run in read_runs(paths)] == ["run (1)", "run (2)", "other"]


@pytest.mark.slow
def test_each_figure_is_drawn_for_one_run_and_for_two(
    run_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "DPI", 20)
    monkeypatch.setattr(figures, "CURVES", figures.CURVES[:1])
    add_columns(
        run_dir,
        staleness__mean=0.25,
        groups__useful=0.5,
        groups__all_right=0.25,
        groups__all_wrong=0.25,
    )
    add_columns(run_dir, reward__format__mean=0.5, reward__answer__mean=lambda step: step / 10)
    write_ledger(run_dir, [{"kind": "lineage", "lineage": 2, "fork_step": 8, "at": 1020.0}])
    runs = [read_run(run_dir), read_run(make_run("_other $x^2"))]
    plots = draw_all(runs[:1])
    assert {plot.name for plot in plots} == {
        *("reward", "staleness", "timeline", "step_times", "waiting"),
        *("link_bytes", "link_goodput", "cost_by_node", "useful_groups"),
        "reward_parts",
    }
    assert all(plot.png.startswith(b"\x89PNG") for plot in plots)
    compared = {plot.name for plot in draw_all(runs)}
    assert compared == {"reward", "staleness", "waiting", "useful_groups"}
    page = render_page(runs[:1], plots, [], without_rollouts="", made_at=time.time())
    assert page.count('src="data:image/png;base64,iVBOR') == len(plots)


@pytest.mark.slow
def test_a_learning_curve_leaves_matplotlibs_global_state_alone(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # of somebody else
    out, run_dir = tmp_path / "figures" / "curve.png", make_run()
    assert learning_curve(read_run(run_dir), out) == out
    assert out.read_bytes()[16:24] == struct.pack(">II", 1440, 604)
    add_columns(run_dir, staleness__hist=None, reward__mean=lambda step: None if step == 2 else 1)
    assert learning_curve(read_run(run_dir), out) == out
    assert "matplotlib.pyplot" not in sys.modules
    with pytest.raises(StorageError, match="cannot be written"):
        learning_curve(read_run(run_dir), run_dir / "metrics.jsonl" / "curve.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"the learning curve needs matplotlib, .* not installed"):
        learning_curve(read_run(run_dir), out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "heldout", "limits"),
    [(0.5, 0.5, (0, 1)), (-3.0, 0.5, None), (1.2, 0.8, None), (-3.0, 2.5, None)],
)
def test_every_reward_is_within_the_figure(
    make_run: MakeRun, train: float, heldout: float, limits: tuple[int, int] | None
) -> None:
    run_dir = make_run(rewards=lambda step: train)
    with MetricsWriter(run_dir) as writer:
        writer.write(10, evaluation(10, heldout, heldout))
    axes = Figure(layout="constrained").subplots()
    [reward] = [drawing for drawing in figures.DRAWINGS if drawing.name == "reward"]
    reward.draw(axes, [read_run(run_dir)])
    low, high = axes.get_ylim()
    assert limits is None or (low, high) == limits
    values = [value for line in axes.lines for value in line.get_ydata()]
    assert low <= min(values)
    assert max(values) <= high


def curve_of(run_dir: Path, name: str) -> Axes:
    """Draw the figure of this name; return its axes."""
    axes: Axes = Figure(layout="constrained").subplots()
    [curve] = [curve for curve in figures.CURVES if curve.name == name]
    assert figures._draw_curve(curve, axes, [read_run(run_dir)])
    return axes


def test_a_step_without_a_value_interrupts_the_line(run_dir: Path) -> None:
    add_columns(run_dir, entropy__mean=lambda step: None if step in {3, 4, 6} else float(step))
    line, dots = curve_of(run_dir, "entropy").lines
    values = np.asarray(line.get_ydata(), float)
    assert np.isnan(values).tolist() == [False, False, True, False, True] + [False] * 4
    assert values[~np.isnan(values)].tolist() == [1, 2, 5, 7, 8, 9, 10]
    assert np.asarray(dots.get_xdata()).tolist() == [5]


@pytest.mark.parametrize("largest", [1.1, 4.0, 40.0, 1e5])
def test_the_largest_ratio_can_be_read_at_the_axis(run_dir: Path, largest: float) -> None:
    add_columns(run_dir, is_ratio__max=largest, is_ratio__mean=1.0)
    axes = curve_of(run_dir, "is_ratio")
    low, high = axes.get_ylim()
    assert low <= 1 < largest <= high
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 3


def test_no_two_parts_of_a_step_have_nearly_the_same_colour() -> None:
    colors = (figures._TRAINS, figures._PUBLISHES, *figures._STAGE_COLORS)
    assert len(figures._STAGE_COLORS) >= len(WaitStage)
    hues = sorted(colorsys.rgb_to_hsv(*bytes.fromhex(color[1:]))[0] for color in colors)
    assert min(high - low for low, high in itertools.pairwise(hues)) > 10 / 360


def test_a_figure_is_below_the_heading_of_its_part(run_dir: Path) -> None:
    plot = Plot(name="x", section=figures.COST, title="Cost of x", note="Read so.", png=b"\x00")
    page = render_page([read_run(run_dir)], [plot], [], without_rollouts="why", made_at=0.0)
    assert page.index('id="cost"') < page.index('alt="Cost of x"') < page.index("Read so.")
    assert "why" in page


# --- trace ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "window"), [("3-5", (3, 5)), ("7", (7, 7)), ("all", ALL)])
def test_a_window_is_one_step_some_or_all(text: str, window: tuple[int, int]) -> None:
    assert parse_window(text) == window


@pytest.mark.parametrize("text", ["", "5-3", "-3", "3-", "x", "1-2-3"])
def test_another_window_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--trace"):
        parse_window(text)


def test_leases_steps_and_decisions_are_on_one_clock(run_dir: Path) -> None:
    leases = [("w1", 1, 1002.0, 1004.0), ("w1", 2, 1003.0, 1004.5), ("w2", 3, 1002.0, 1009.5)]
    rows: list[dict[str, Any]] = []
    for worker, group, start, end in leases:
        lease = {"group": group, "worker": worker}
        rows += [
            {"kind": "granted", "at": start, **lease},
            {"kind": "accepted", "at": end, "tokens": 9, **lease},
        ]
    rows.append({"kind": "published", "version": [1, 3], "at": 1003.5})
    write_ledger(run_dir, sorted(rows, key=lambda row: float(row["at"])))
    trace = json.loads(render_trace(read_run(run_dir), (3, 5)))
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "learner", 1: "w1", 2: "w2"}
    spans = {(e["name"], e["tid"]): e for e in events if e["ph"] == "X"}
    # The trace begins at 1002, with step 3, and ends with step 5.
    assert (spans["group 1", 0]["ts"], spans["group 1", 0]["dur"]) == (0, 2_000_000)
    assert spans["group 2", 1]["ts"] == 1_000_000
    assert spans["step 3", 0]["ts"] == 400_000
    assert spans["group 3", 0]["args"]["end"] == "not ended yet"
    steps = {"step 3", "step 4", "step 5"}
    assert {name for name, _ in spans} == {"group 1", "group 2", "group 3", *steps}
    [mark] = [e for e in events if e["ph"] == "i" and e["ts"] == 1_500_000]
    assert mark["name"] == "v3 published"


def test_no_span_lies_before_0_or_overlaps_its_successor(run_dir: Path) -> None:
    ends = [1000.0, *(1002 + tenth / 1e7 for tenth in range(6, 60, 7))]
    rows: list[dict[str, Any]] = []
    for group, (start, end) in enumerate(itertools.pairwise(ends)):
        lease = {"group": group, "worker": "w1"}
        rows += [
            {"kind": "granted", "at": start, **lease},
            {"kind": "accepted", "at": end, "tokens": 9, **lease},
        ]
    write_ledger(run_dir, rows)
    events = json.loads(render_trace(read_run(run_dir), (3, 5)))["traceEvents"]
    leases = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert {lease["tid"] for lease in leases} == {0}
    assert leases[0]["ts"] == 0  # granted before the window
    ends_us = [lease["ts"] + lease["dur"] for lease in leases]
    assert all(end <= lease["ts"] for end, lease in zip(ends_us, leases[1:], strict=False))
    assert all(event["ts"] >= 0 for event in events if event["ph"] != "M")


def test_every_lease_ends_in_the_way_that_the_ledger_has(run_dir: Path) -> None:
    def granted(group: int, attempt: int, **more: Any) -> dict[str, Any]:
        return {"kind": "granted", "group": group, "attempt": attempt, "at": 1001.0, **more}

    rows: list[dict[str, Any]] = [
        *(granted(1, 0), granted(1, 1), granted(1, 2, copy_of=1)),
        *(granted(2, 0), granted(3, 0), granted(4, 0), granted(5, 0), granted(6, 0)),
        {"kind": "cancelled", "group": 1, "attempt": 1, "at": 1002.0},
        {"kind": "refused", "group": 2, "attempt": 0, "reason": "stale", "at": 1003.0},
        {"kind": "discarded", "group": 3, "reason": "lost", "at": 1004.0},
        # A resume: the worker of group 5 has stayed, those of groups 1, 4 and 6 have left.
        {"kind": "lineage", "lineage": 2, "fork_step": 8, "at": 1005.0},
        {"kind": "accepted", "group": 5, "attempt": 0, "tokens": 9, "at": 1006.0},
        {"kind": "granted", "group": 4, "attempt": 1, "worker": "w2", "at": 1007.0},
    ]
    write_ledger(run_dir, rows)
    events = json.loads(render_trace(read_run(run_dir), ALL))["traceEvents"]
    leases = [e for e in events if e["pid"] == 1 and e["ph"] == "X"]
    ends = [(e["name"], e["args"]["attempt"], e["args"]["end"]) for e in leases]
    assert ends == [
        ("group 1", 0, "not finished, granted again"),
        ("group 1", 1, "cancelled"),
        ("group 2", 0, "refused: stale"),
        ("group 3", 0, "discarded: lost"),
        ("group 4", 0, "the learner ended"),
        ("group 1", 2, "the learner ended"),
        ("group 6", 0, "the learner ended"),
        ("group 5", 0, "accepted, 9 tokens"),
    ]
    assert {e["dur"] for e in leases if e["args"]["end"] == "the learner ended"} == {3_000_000}


def test_a_trace_that_is_too_large_is_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo.ui.trace.MAX_EVENTS", 5)
    with pytest.raises(DataError, match="choose fewer steps"):
        render_trace(read_run(run_dir), ALL)
