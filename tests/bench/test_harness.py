"""The harness of the benchmarks: the trees that are measured in turns."""

from __future__ import annotations

import subprocess
from pathlib import Path

import harness
import pytest


def test_a_commit_is_measured_beside_what_has_become_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)

    def git(*words: str) -> str:
        name = ["-c", "user.name=echo", "-c", "user.email=echo@localhost"]
        command = ["git", "-C", str(tmp_path), *name, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    file = tmp_path / "file"
    file.write_text("committed")
    git("init", "--quiet")
    git("add", "file")
    git("commit", "--quiet", "--message=it", "--no-gpg-sign")
    file.write_text("changed")
    with harness.trees(None) as sides:
        assert sides == {"now": tmp_path}
    with harness.trees("HEAD") as sides:
        found = {side: (tree / "file").read_text() for side, tree in sides.items()}
    assert found == {"before": "committed", "now": "changed"}
    assert len(git("worktree", "list").splitlines()) == 1
