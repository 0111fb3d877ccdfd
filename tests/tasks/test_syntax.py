"""Syntax trees, parsed by one thread at a time."""

from __future__ import annotations

import ast
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo.tasks import syntax
from echo.tasks.builtin import evaluate
from echo.tasks.neighbours import neighbours_of


def test_two_threads_never_parse_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.11.8 they could spoil each other's trees."""
    path = tmp_path / "rewards.py"
    path.write_text("import helper\n")
    (tmp_path / "helper.py").write_text("")
    together = threading.Barrier(2)

    def slow_parse(source: str | bytes, *, mode: str) -> ast.AST:
        with pytest.raises(threading.BrokenBarrierError):  # no other thread comes
            together.wait(0.02)
        together.reset()
        return ast.parse(source, mode=mode)

    monkeypatch.setattr(syntax, "ast", SimpleNamespace(parse=slow_parse))
    with ThreadPoolExecutor(2) as threads:
        value = threads.submit(evaluate, "1+2*3")
        found = threads.submit(neighbours_of, path, [tmp_path])
    assert value.result() == (7, [1, 2, 3])
    assert set(found.result()) == {"helper"}
