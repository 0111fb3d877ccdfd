"""Activation on paper: real sessions, virtual time, and steps of a given length."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from echo.core.price import Price
from echo.fleet.activation import ActivationDecision
from echo.runtime.learner.cost import Activation, ActivationSettings, StepTimes
from tests.roles.harness import LEARNER_ADDRESS, Process, Run

SETTINGS = {
    "groups_per_step": 2,
    "group_size": 2,
    "max_completion_tokens": 3,
    "margin": 0.1,
    "min_dwell_s": 20.0,
    "review_s": 5.0,
    "budget_per_h": math.inf,
}


class Play:
    """A run whose learner reports steps of `step_s`, of which it waited `waited_s`."""

    def __init__(self, tmp_path: Path, prices: list[float | None], **settings: Any) -> None:
        self.run = Run(tmp_path, sample_s=0.5, max_staleness=6)
        self.learner = self.run.start_learner()
        self.session = self.learner.session
        self.activation = Activation(
            ActivationSettings(**SETTINGS | settings), now=self.run.world.now
        )
        self.decisions: list[tuple[float, ActivationDecision]] = []
        self.waited_s = 0.0
        self.step_s = 5.0
        self._stepped_at = 0.0
        for number, price in enumerate(prices, start=1):
            self.join(f"w{number}", price)

    def join(self, name: str, price: float | None) -> Process:
        return self.run.start_worker(name, connect=[LEARNER_ADDRESS], price=Price(per_h=price))

    def until(self, seconds: float) -> None:
        """Let time pass as `runtime/learner/cost.py` does it."""
        world = self.run.world
        while world.now < seconds:
            world.run(world.now + 1.0)
            now = world.now
            world.perform(self.learner, self.activation.look(self.session, now=now))
            if now >= self._stepped_at + self.step_s:
                self._stepped_at = now
                times = StepTimes(
                    step_s=self.step_s,
                    waited_s=self.waited_s,
                    completion_tokens=3.0,
                    useful_share=1.0,
                )
                self.activation.stepped(times)
            question = self.activation.question(
                self.session, publish_period=1, broadcast_s=None, waiting_s=0.0, now=now
            )
            if question is None:
                continue
            actions, decision = self.activation.decide(
                self.session, question, question.solve(), now=now
            )
            world.perform(self.learner, actions)
            if decision is not None:
                self.decisions.append((now, decision))

    @property
    def standby(self) -> list[str]:
        return sorted(m.node_id for m in self.session.roster.nodes.values() if m.is_standby)


@pytest.mark.slow
def test_the_dearest_stand_by_one_after_the_other_and_the_cheapest_stays(tmp_path: Path) -> None:
    play = Play(tmp_path, [0.3, 0.1, 0.2])
    play.until(120.0)
    assert [d.interrupted for _, d in play.decisions] == [("w1",), ("w3",)]
    assert play.standby == ["w1", "w3"]
    # Not before their dwell is over, and with steps in between.
    assert play.decisions[0][0] >= 20.0
    first = play.decisions[0][1]
    assert first.before.cost_per_h == pytest.approx(0.6, abs=0.01)
    assert first.after.cost_per_h == pytest.approx(0.3, abs=0.01)
    assert (first.num_active, first.num_standby) == (2, 1)
    assert "put on standby w1" in str(first)
    assert "$0.30/h in place of $0.60/h" in str(first)
    play.run.audit()


@pytest.mark.slow
def test_a_learner_that_waits_gets_its_workers_back_and_keeps_them_longer(tmp_path: Path) -> None:
    play = Play(tmp_path, [0.3, 0.1])
    play.until(60.0)
    assert play.standby == ["w1"]
    # The learner has become much faster: one worker is not enough any more.
    play.step_s, play.waited_s = 0.9, 0.7
    play.until(90.0)
    assert play.decisions[-1][1].activated == ("w1",)
    assert play.standby == []
    back_at = play.decisions[-1][0]
    play.step_s, play.waited_s = 5.0, 0.0
    play.until(back_at + 35.0)
    assert play.standby == []
    play.until(back_at + 120.0)
    assert play.standby == ["w1"]
    assert play.decisions[-1][0] >= back_at + 40.0


@pytest.mark.slow
def test_nobody_stands_by_for_a_worker_that_is_set_aside(tmp_path: Path) -> None:
    play = Play(tmp_path, [0.3, 0.1])
    play.until(10.0)
    play.session.roster.nodes["w2"].worker.is_set_aside = True  # and w1 would stand by, as above
    play.until(60.0)
    assert play.standby == []


@pytest.mark.slow
@pytest.mark.matrix
def test_without_prices_everybody_works(tmp_path: Path) -> None:
    play = Play(tmp_path, [None, None, None])
    play.until(80.0)
    assert play.decisions == []
    assert play.standby == []


def test_one_who_would_pass_the_budget_stands_by_from_the_beginning(tmp_path: Path) -> None:
    play = Play(tmp_path, [0.3, 0.3], budget_per_h=0.7)
    play.until(5.0)
    play.join("late", 0.3)
    play.join("unknown", None)
    play.until(12.0)
    assert play.standby == ["late"]
    notes = "\n".join(play.learner.notes)
    assert "late stands by: with it the active workers would cost $0.90/h" in notes
    assert "activation.budget_per_h is $0.70" in notes
    assert "unknown states no price" in notes
    assert "worker.price_per_h" in notes


@pytest.mark.slow
def test_a_dead_worker_is_made_up_for_at_once(tmp_path: Path) -> None:
    play = Play(tmp_path, [0.3, 0.1])
    play.until(60.0)
    assert play.standby == ["w1"]
    play.run.world.kill(play.run.world.process("w2"))
    play.waited_s = 2.0
    play.until(90.0)
    assert play.standby == []


@pytest.mark.slow
def test_questions_that_change_nothing_come_more_and_more_seldom(tmp_path: Path) -> None:
    play = Play(tmp_path, [0.3])
    play.waited_s = 2.5
    asked: list[float] = []
    ask = play.activation.question

    def count(*args: Any, **kwargs: Any) -> Any:
        question = ask(*args, **kwargs)
        if question is not None:
            asked.append(kwargs["now"])
        return question

    play.activation.question = count  # type: ignore[method-assign]
    play.until(200.0)
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert len(asked) < 10
    assert gaps[-1] > 3 * min(gaps)


def test_what_a_broadcast_took_beyond_its_forecast_is_added_to_the_next(tmp_path: Path) -> None:
    play = Play(tmp_path, [0.3, 0.1])
    play.until(10.0)
    planned = play.session.planning.topology
    assert planned is not None
    members = play.session.roster.members("worker")

    def forecast_s(took_s: float | None) -> float:
        return play.activation._links(play.session, members, took_s).broadcast_s(["w1", "w2"])

    assert forecast_s(planned.predicted_s + 7.0) == pytest.approx(forecast_s(None) + 7.0)
    assert forecast_s(planned.predicted_s / 2) == forecast_s(None)
