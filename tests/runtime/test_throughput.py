"""Throughput: what a worker could sample under full load."""

from __future__ import annotations

import pytest

from echo.runtime.learner.costs.throughput import Throughput


def look(capability: Throughput, *, load: float, rate: float, seconds: int, start: int = 0) -> int:
    """Let time pass at so many tokens per second; return the instant."""
    for second in range(start + 1, start + seconds + 1):
        capability.update(load=load, tokens_sampled=round(rate * second), now=float(second))
    return start + seconds


def test_half_loaded_it_is_taken_for_twice_as_fast() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    look(capability, load=0.5, rate=25.0, seconds=100)
    assert capability.tokens_per_s == pytest.approx(50.0)


def test_nothing_is_known_before_some_tokens_have_come() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    assert capability.tokens_per_s is None
    look(capability, load=1.0, rate=50.0, seconds=2)
    assert capability.tokens_per_s is None
    capability.update(load=1.0, tokens_sampled=150, now=3.0)
    assert capability.tokens_per_s is not None


def test_in_the_middle_of_a_group_its_rate_is_that_of_the_groups_that_have_ended() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    rates = []
    for second in range(1, 160):  # groups of 30 s and 3000 tokens
        capability.update(load=1.0, tokens_sampled=3000 * (second // 30), now=float(second))
        rates.append(capability.tokens_per_s)
    assert rates[88:] == [None] + [pytest.approx(100.0)] * 70
    # In 90 s without a report, 60 s more than ever before, it would have made two groups.
    capability.update(load=1.0, tokens_sampled=15_000, now=240.0)
    slower = capability.tokens_per_s
    assert slower is not None
    assert 60.0 < slower < 75.0


def test_a_single_report_is_an_early_estimate() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    capability.update(load=0.5, tokens_sampled=0, now=20.0)
    assert capability.early_tokens_per_s is None
    capability.update(load=0.5, tokens_sampled=3000, now=60.0)
    assert capability.early_tokens_per_s == pytest.approx(100.0)
    assert capability.tokens_per_s is None


def test_what_was_sampled_before_the_first_report_is_no_rate() -> None:
    # A worker that has long been at work joins a learner that has just come back.
    capability = Throughput(tokens_sampled=None, now=0.0)
    capability.update(load=0.0, tokens_sampled=None, now=1.0)
    for second in range(2, 40):
        capability.update(load=1.0, tokens_sampled=10**6 + 50 * second, now=float(second))
    assert capability.tokens_per_s == pytest.approx(50.0)
