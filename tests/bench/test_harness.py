"""The harness of the benchmarks: trees that are measured in turns, and the path of processes."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("given", [None, "", "/packages:/more"])
def test_what_the_caller_finds_is_found_by_a_benchmarks_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONPATH", given)
    found = harness.finding(tmp_path)["PYTHONPATH"]
    assert found == (f"{tmp_path}:{given}" if given else str(tmp_path))


def test_no_benchmark_leaves_out_the_callers_path() -> None:
    """What a machine lacks may lie where only the caller's PYTHONPATH leads."""
    for path in sorted(Path(harness.__file__).parent.rglob("*.py")):
        if path.name != "harness.py":
            assert "PYTHONPATH" not in path.read_text(), f"{path}: see harness.finding"


def test_a_result_tells_what_was_set_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(harness.ALLOCATOR)]:
        monkeypatch.delenv(name)
    assert "allocator" not in harness.environment()
    given = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "MALLOC_ARENA_MAX": "2"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert harness.environment()["allocator"] == given
