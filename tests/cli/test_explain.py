from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo.cli.commands.explain import main


def explanation(cause: str) -> dict[str, str]:
    return {"cause": cause, "resource": "r1", "setting": "worker.connect", "text": f"why {cause}"}


def write_run(run_dir: Path, causes: dict[int, str], *, last: str = "") -> None:
    """Write the rows of ten steps, some with an explanation; `last` is that of an open wait."""
    rows: list[dict[str, Any]] = [
        {
            "step": step, "time": float(step), "lineage": 1, "reward/mean": 0.5, "time/step": 20.0,
            "time/wait_for_batch": 5.0, "time/wait/weights": 4.0, "time/wait/sampling": 1.0,
            "rollouts/idle_ratio": 0.1,
        }
        | ({"explain": explanation(causes[step])} if step in causes else {})
        for step in range(1, 11)
    ]  # fmt: skip
    if last:
        rows.append({"step": 10, "time": 99.0, "explain": explanation(last)})
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(text)


def test_stalls_are_told_with_their_steps_times_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    causes = {2: "slow_relay", 3: "slow_relay", 6: "slow_relay", 7: "straggler"}
    write_run(tmp_path, causes, last="slow_reward")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "10 steps: the learner waited 25% of 3.33min (weights 80%, sampling 20%); workers had no "
        "groups 10% of it\n\n"
        "steps 2 to 6, 25s waited: slow_relay\nwhy slow_relay\nchange worker.connect\n\n"
        "step 7, 5s waited: straggler\nwhy straggler\nchange worker.connect\n\n"
        "after step 10, and the wait had not ended: slow_reward\nwhy slow_reward\n"
        "change worker.connect\n"
    )
    assert main([str(tmp_path), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["cause"], each["first_step"], each["is_open"]) for each in found] == [
        ("slow_relay", 2, False), ("straggler", 7, False), ("slow_reward", 11, True),
    ]  # fmt: skip


def test_an_explanation_during_a_wait_belongs_to_the_step_that_waited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {})
    path = tmp_path / "metrics.jsonl"
    waiting = json.dumps({"step": 0, "time": 0.5, "explain": explanation("no_worker")})
    path.write_text(f"{waiting}\n{path.read_text()}")
    assert main([str(tmp_path)]) == 0
    assert "\nstep 1, 5s waited: no_worker\n" in capsys.readouterr().out


def test_a_wait_before_a_resume_is_told_beside_that_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {}, last="no_worker")
    step = {"step": 11, "lineage": 2, "time": 900.0, "reward/mean": 0.5, "time/step": 70.0,
            "time/wait_for_batch": 65.0}  # fmt: skip
    with (tmp_path / "metrics.jsonl").open("a") as file:
        print(
            json.dumps({"step": 10, "time": 890.0, "explain": explanation("no_worker")}), file=file
        )
        print(json.dumps(step), file=file)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("no_worker\n") == 4, "two stalls, with their texts"
    assert "\nafter step 10, before a resume: no_worker\n" in out
    assert "\nstep 11, 1.08min waited: no_worker\n" in out


def test_a_run_without_stalls_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, {})
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("no wait was longer than usual\n")


def test_a_directory_without_a_run_is_unusable_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 3
    assert "metrics.jsonl: no such file" in capsys.readouterr().err
