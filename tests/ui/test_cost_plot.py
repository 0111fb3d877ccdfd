"""The plot of cost against waiting is written whole, or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo.core.errors import StorageError
from echo.ui.plots import CostPoint, cost_plot

FRONT = [CostPoint("7 any", 0.0, 9.0, 1.0), CostPoint("4 any", 0.4, 6.0, 1.2)]


def test_it_writes_a_png_into_a_new_directory(tmp_path: Path) -> None:
    out = tmp_path / "new" / "plan.png"
    assert cost_plot(FRONT, FRONT[0], out, title="a plan") == out
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_points_decide_what_is_drawn(tmp_path: Path) -> None:
    one = cost_plot(FRONT, FRONT[0], tmp_path / "one.png", title="").read_bytes()
    assert one == cost_plot(FRONT, FRONT[0], tmp_path / "two.png", title="").read_bytes()
    assert one != cost_plot(FRONT, FRONT[1], tmp_path / "three.png", title="").read_bytes()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        cost_plot(FRONT, FRONT[0], tmp_path / "file" / "plan.png", title="")
