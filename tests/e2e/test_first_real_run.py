"""docs/first-real-run.md as its reader follows it: the files, the program, the four processes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import reserve_port
from tests.test_docs import FIRST_RUN, blocks, commands, files_of

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with the page's files and its data, on ports that are free here."""
    ports = [reserve_port() for _ in range(2)]
    for name, text in files_of(FIRST_RUN).items():
        for (_, port), written in zip(ports, ("7700", "7701"), strict=True):
            text = text.replace(written, str(port))
        (tmp_path / name).write_text(text, encoding="utf-8")
    [line] = [code for code in blocks(FIRST_RUN, "") if "make_rows.py" in code]
    command = line.strip().replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=60)
    yield tmp_path
    for reserved, _ in ports:
        reserved.close()


def start(place: Path, words: list[str], model: Path) -> subprocess.Popen[str]:
    """Start a program of the page, with this model in place of the hub's."""
    program, *rest = words
    name = program.removeprefix("bin/echo-")
    line = [name, *rest] if name != "rl" else rest
    if name == "node" and "learner" in rest:
        line += ["--set", f"model.name={model}", "--set", "ui.live=off"]
    root = str(FIRST_RUN.parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "ECHO_JOIN": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "echo.cli.main", *line],
        cwd=place, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def output(process: subprocess.Popen[str], *, within_s: float) -> str:
    """Return what a program has printed; it must have ended well."""
    text, _ = process.communicate(timeout=within_s)
    assert process.returncode == 0, text
    return text


def test_the_files_are_what_the_page_says(place: Path) -> None:
    rows = [json.loads(line) for line in (place / "dates.jsonl").read_text().splitlines()]
    assert len(rows) == 2000
    scope: dict[str, object] = {}
    exec((place / "rewards.py").read_text(), scope)
    reward = scope["iso_date"]
    assert callable(reward)
    right = rows[0]["answer"]
    answers = (f" {right}\n", f"It is {right}.", "1999-12-31", "tomorrow")
    assert [reward(completion=text, **rows[0]) for text in answers] == [1.0, 0.5, 0.1, 0.0]
    assert HUB_ID in (place / "dates.toml").read_text()


@pytest.mark.e2e
@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_the_page_trains_the_pretrained_model(smollm2: Path, place: Path) -> None:
    lines = [words for words in commands(FIRST_RUN) if words[0] != "python"]
    [look] = [words for words in lines if "--dry-run" in words]
    text = output(start(place, look, smollm2), within_s=300)
    assert "Write this date as YYYY-MM-DD." in text
    assert "would start: a learner" in text

    def is_node(words: list[str], role: str) -> bool:
        return words[0] == "bin/echo-node" and role in words and "--dry-run" not in words

    short = ["--set", "run.max_steps=2", "--set", "eval.num_prompts=4"]
    [learner] = [words for words in lines if is_node(words, "learner")]
    others = [words for words in lines if is_node(words, "relay") or is_node(words, "worker")]
    assert len(others) == 3
    nodes = [start(place, words, smollm2) for words in [[*learner, *short], *others]]
    try:
        for node in nodes:
            output(node, within_s=1500)
    finally:
        for node in nodes:
            if node.poll() is None:
                node.kill()
                node.wait()
    show = next(words for words in lines if words[:2] == ["bin/echo-rl", "rollouts"])
    assert "Write this date as YYYY-MM-DD." in output(start(place, show, smollm2), within_s=300)
    [use] = [code for code in blocks(FIRST_RUN, "python") if "runs/dates/final" in code]
    ended = subprocess.run(
        [sys.executable, "-c", use],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ended.stdout.strip()
    assert shlex.join(show) == "bin/echo-rl rollouts runs/dates"
