from __future__ import annotations

import pytest

from echo.ui.live import RemainingTime, clock


def test_eta_follows_the_pace_of_the_last_steps(make_snapshot) -> None:
    pace = RemainingTime()
    for step, at in ((5, 100.0), (6, 110.0), (7, 120.0)):
        pace.observe(make_snapshot(step=step, elapsed_s=at, max_steps=10))
    assert pace.eta_s(make_snapshot(step=7, elapsed_s=120.0, max_steps=10)) == 30.0
    # Three seconds into the step under way, three fewer are left.
    assert pace.eta_s(make_snapshot(step=7, elapsed_s=123.0, max_steps=10)) == 27.0


def test_eta_of_a_resumed_run_ignores_the_steps_made_before(make_snapshot) -> None:
    pace = RemainingTime()
    pace.observe(make_snapshot(step=80, elapsed_s=0.0, max_steps=100))
    assert pace.eta_s(make_snapshot(step=80, elapsed_s=5.0, max_steps=100)) is None
    pace.observe(make_snapshot(step=81, elapsed_s=10.0, max_steps=100))
    assert pace.eta_s(make_snapshot(step=81, elapsed_s=10.0, max_steps=100)) == 190.0


def test_eta_starts_anew_when_steps_are_made_again(make_snapshot) -> None:
    pace = RemainingTime()
    pace.observe(make_snapshot(step=8, elapsed_s=10.0))
    pace.observe(make_snapshot(step=9, elapsed_s=20.0))
    pace.observe(make_snapshot(step=5, elapsed_s=30.0))
    assert pace.eta_s(make_snapshot(step=5, elapsed_s=30.0)) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (7.4, "0:07"),
        (59.6, "1:00"),
        (754, "12:34"),
        (3723, "1:02:03"),
        (183840, "2d 03:04"),
        (-1, "0:00"),
        (float("inf"), "-"),
    ],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
