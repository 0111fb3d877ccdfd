"""`echo-rl report`: its files, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo.cli.commands import report
from echo.cli.commands.report import main
from echo.core.rollout import Group
from echo.engine.model import build_tokenizer
from echo.records.ledger import Began, Ledger
from echo.ui.report.figures import Plot
from echo.ui.report.run import ReportedRun
from echo.ui.sinks import MetricsWriter
from echo.wire.codec import encode_group
from tests.cli.test_rollouts import make_group


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one step, whose learner was killed; drawing is left out."""

    def draw_all(runs: list[ReportedRun]) -> list[Plot]:
        return [Plot(name="reward", section="Learning", title="Reward", note="", png=b"png")]

    monkeypatch.setattr(report, "draw_all", draw_all)
    run_dir = tmp_path / "run"
    groups: list[Group] = [make_group(0, "12+34=", {"0046": 1.0, "0047": 0.0})]
    with MetricsWriter(run_dir) as writer:
        writer.write(1, {"reward/mean": 0.5, "time/step": 2.0, "time/train": 1.0})
    ledger = Ledger(run_dir, spool_bytes=1 << 20)
    ledger.append(Began(lineage=1, fork_step=0))
    ledger.store(groups[0], *encode_group(groups[0]))
    ledger.commit()
    ledger.trained(groups, lineage=1, consumed_at=5)
    ledger.close()
    (run_dir / "config.json").write_text('{"run": {"name": "sums", "max_steps": 3}}')
    build_tokenizer().save_pretrained(run_dir / "final")
    return run_dir


def test_page_and_figures_are_written_beside_each_other(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run)]) == 0
    assert str(run / "report" / "report.html") in capsys.readouterr().out
    assert {path.name for path in (run / "report").iterdir()} == {"report.html", "reward.png"}
    page = (run / "report" / "report.html").read_text()
    assert "Echo run sums" in page
    assert "without finishing" in page
    assert '<pre class="prompt">12+34=</pre>' in page
    assert page.index(">46</span>") < page.index(">47</span>")  # from the best rollout to the worst


def test_rollouts_of_trained_groups_are_preferred(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "NUM_SAMPLED_GROUPS", 1)
    newer = make_group(1, "56+78=", {"0134": 1.0, "0135": 0.0})
    ledger = Ledger(run, spool_bytes=1 << 20)
    ledger.store(newer, *encode_group(newer))
    ledger.close()
    assert main([str(run)]) == 0
    page = (run / "report" / "report.html").read_text()
    assert "12+34=" in page
    assert "56+78=" not in page


def test_a_report_without_rollouts_says_why(run: Path, tmp_path: Path) -> None:
    for path in (run / "groups").iterdir():
        path.unlink()
    out = tmp_path / "elsewhere"
    assert main([str(run), "--out", str(out), "--trace", "all"]) == 0
    assert (
        "No rollouts of groups: others have deleted their files."
        in (out / "report.html").read_text()
    )
    assert json.loads((out / "trace.json").read_text())["otherData"] == {"run": "sums"}
    for path in (run / "final").iterdir():
        path.unlink()
    (run / "final").rmdir()
    assert main([str(run), "--out", str(out)]) == 0
    assert "is not on this machine" in (out / "report.html").read_text()


def test_errors_name_the_run_and_the_remedy(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none")]) == 3
    assert "the directory of a run?" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(run), "--out", str(tmp_path / "file")]) == 1
    assert "choose another directory with --out" in capsys.readouterr().err
    assert main([str(run), "--trace", "5-3"]) == 2
    assert "the first step is after the last" in capsys.readouterr().err
