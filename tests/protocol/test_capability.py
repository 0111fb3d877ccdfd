"""What a worker could make, from what it makes of what it is given."""

from __future__ import annotations

import pytest

from echo.leases.dispatch import Throughput


def run(capability: Throughput, *, load: float, rate: float, seconds: int, start: int = 0) -> int:
    """Let time pass at so many tokens per second; return the instant."""
    for second in range(start + 1, start + seconds + 1):
        capability.look(load=load, tokens_sampled=round(rate * second), now=float(second))
    return start + seconds


def test_at_full_load_it_is_tokens_over_time() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    run(capability, load=1.0, rate=50.0, seconds=60)
    assert capability.tokens_per_s == pytest.approx(50.0)


def test_a_worker_that_waits_for_leases_is_not_slow() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    at = run(capability, load=1.0, rate=50.0, seconds=60)
    for second in range(at, at + 600):
        capability.look(load=0.0, tokens_sampled=3000, now=float(second))
    assert capability.tokens_per_s == pytest.approx(50.0)


def test_half_loaded_it_is_taken_for_twice_as_fast() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    run(capability, load=0.5, rate=25.0, seconds=100)
    assert capability.tokens_per_s == pytest.approx(50.0)


def test_nothing_is_known_before_some_tokens_have_come() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    assert capability.tokens_per_s is None
    run(capability, load=1.0, rate=50.0, seconds=2)
    assert capability.tokens_per_s is None
    capability.look(load=1.0, tokens_sampled=150, now=3.0)
    assert capability.tokens_per_s is not None


def test_a_worker_that_has_become_slower_is_seen_so_after_a_while() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    run(capability, load=1.0, rate=100.0, seconds=600)
    for second in range(601, 1801):
        capability.look(load=1.0, tokens_sampled=60_000 + 10 * (second - 600), now=float(second))
    assert capability.tokens_per_s == pytest.approx(10.0, rel=0.2)


def test_what_was_sampled_before_the_first_report_is_no_rate() -> None:
    # A worker that has long been at work joins a learner that has just come back.
    capability = Throughput(tokens_sampled=None, now=0.0)
    capability.look(load=0.0, tokens_sampled=None, now=1.0)
    for second in range(2, 40):
        capability.look(load=1.0, tokens_sampled=10**6 + 50 * second, now=float(second))
    assert capability.tokens_per_s == pytest.approx(50.0)
