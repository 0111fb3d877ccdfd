from __future__ import annotations

import struct
from pathlib import Path

import pytest

from echo.fleet.provisioning import outcome_of
from echo.ui import plots
from tests.fleet.fleets import JOB, make_fleet, make_offer

pytest.importorskip("matplotlib.figure")


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_the_reward_is_smoothed_over_the_last_steps_only() -> None:
    smooth = plots.smoothed([float(step) for step in range(1, 8)])
    assert smooth == [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]


@pytest.mark.slow
def test_costs_are_plotted_into_a_new_directory(tmp_path: Path) -> None:
    fleet = make_fleet(make_offer("any"))
    front = {f"{n} any": outcome_of(fleet, JOB, [n]) for n in (7, 4)}
    out = tmp_path / "new" / "plan.png"
    assert plots.cost_plot(front, front["7 any"], out, title="a plan") == out
    assert png_size(out)[0] == 1440
