"""Rows and facts in, alerts out: each once in an episode."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from echo.core.monitoring.alerts import (
    NUM_REWARDS,
    REPEAT_S,
    Alert,
    AlertLimits,
    AlertRules,
    RunFacts,
)


def play(rules: AlertRules, rows: list[dict[str, Any]], *, first: int = 1) -> list[Alert]:
    """Make a step a minute; return all alerts."""
    steps = enumerate(rows, first)
    return [alert for step, row in steps for alert in rules.stepped(step, row, now=60.0 * step)]


def said(alerts: list[Alert]) -> list[tuple[str, int, bool]]:
    return [(each.kind, each.step, each.is_cleared) for each in alerts]


@pytest.mark.parametrize(
    ("kind", "metric", "limits", "good", "bad"),
    [
        ("entropy", "entropy/mean", {"min_entropy": 0.1}, 0.5, 0.01),
        ("ess", "ess", {"min_ess": 0.5}, 0.9, 0.2),
    ],
)
def test_a_floor_raises_one_alert_per_episode_and_ignores_single_steps(
    kind: str, metric: str, limits: dict[str, float], good: float, bad: float
) -> None:
    rules = AlertRules(AlertLimits(**limits), step=0, now=0.0)  # type: ignore[arg-type]
    values = [good] * 6 + [bad, math.nan, None, good] + [bad] * 20 + [good] * 9
    found = play(rules, [{metric: value} for value in values])
    assert said(found) == [(kind, 12, False), (kind, 33, True)]
    assert found[0].good_step == 7
    assert f"alerts.{next(iter(limits))}" in found[0].text


def test_a_value_that_moves_around_its_floor_is_not_told_at_each_crossing() -> None:
    rules = AlertRules(AlertLimits(min_ess=0.5), step=0, now=0.0)
    rows = [{"ess": 0.2 if step // 6 % 2 else 0.9} for step in range(60)]
    raised = [each.step for each in play(rules, rows) if not each.is_cleared]
    assert len(raised) > 2
    assert all(late - early >= REPEAT_S / 60 for early, late in pairwise(raised))


def test_a_collapse_of_the_reward_names_the_last_good_step() -> None:
    rules = AlertRules(AlertLimits(reward_drop=0.3), step=0, now=0.0)
    rewards = [0.05 * step for step in range(1, 17)] + [0.1] * 15 + [0.7] * 10
    [raised, cleared] = play(rules, [{"reward/mean": reward} for reward in rewards])
    assert (raised.kind, raised.good_step, cleared.is_cleared) == ("reward", 16, True)
    assert 16 < raised.step < 16 + NUM_REWARDS


def test_after_a_resume_the_best_rewards_before_still_count() -> None:
    earlier = [0.0] * 5 + [0.9] * NUM_REWARDS + [math.nan, 0.8]
    rules = AlertRules(AlertLimits(reward_drop=0.3), step=40, rewards=earlier, now=0.0)
    assert play(rules, [{"reward/mean": 0.5}] * (NUM_REWARDS - 1), first=41) == []
    [alert] = play(rules, [{"reward/mean": 0.5}], first=50)
    assert (alert.good_step, alert.step) == (38, 50)


def test_nothing_is_raised_without_limits() -> None:
    rules = AlertRules(AlertLimits(), step=0, now=0.0)
    row = {"reward/mean": -1.0, "ess": 0.0, "entropy/mean": 0.0}
    assert play(rules, [{"reward/mean": 1.0}] * 10 + [row] * 20) == []
    facts = RunFacts(step=1, activity="", cost_per_h=9e9, cost_total=9e9, free_disk_bytes=0)
    assert rules.check(facts, now=1e9) == []


def test_nan_is_raised_once_and_cleared_by_the_next_step() -> None:
    rules = AlertRules(AlertLimits(), step=0, now=0.0)
    alerts = [alert for _ in range(3) for alert in rules.failed(4, "step 5 failed", now=300.0)]
    alerts += play(rules, [{}], first=5)
    assert said(alerts) == [("nonfinite", 4, False), ("nonfinite", 5, True)]


def test_a_stall_names_what_the_learner_waits_for_and_the_next_step_clears_it() -> None:
    rules = AlertRules(AlertLimits(stall_s=100.0), step=0, now=0.0)
    alerts = play(rules, [{}])
    for now in range(60, 300, 5):
        alerts += rules.check(RunFacts(step=1, activity="waiting for w3"), now=float(now))
    assert alerts[0].text == "no optimizer step for 1.67min: waiting for w3"
    alerts += play(rules, [{}], first=5)
    assert said(alerts) == [("stall", 1, False), ("stall", 5, True)]


@pytest.mark.parametrize(
    ("kind", "limits", "good", "bad", "text"),
    [
        ("cost_per_h", {"max_cost_per_h": 3.0}, {"cost_per_h": 3.0}, {"cost_per_h": 3.5}, "$3.50"),
        ("cost_total", {"max_cost": 50.0}, {"cost_total": 1.0}, {"cost_total": 51.0}, "$51.00"),
        (
            "disk",
            {"min_free_disk_bytes": 2**30},
            {"free_disk_bytes": 2**30},
            {"free_disk_bytes": 2**20},
            "1 MiB are free",
        ),
    ],
)
def test_a_periodic_check_compares_with_its_limit(
    kind: str, limits: Any, good: Any, bad: Any, text: str
) -> None:
    rules = AlertRules(AlertLimits(**limits), step=0, now=0.0)
    alerts = []
    for now, facts in enumerate((good, bad, bad, good, {})):
        alerts += rules.check(RunFacts(step=2, activity="", **facts), now=float(now))
    assert said(alerts) == [(kind, 2, False), (kind, 2, True)]
    assert alerts[0].text.startswith(text)
