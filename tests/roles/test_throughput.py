"""The throughput of an engine at a high and at a low load."""

from __future__ import annotations

import msgspec
import pytest

from echo.core.bounds import MAX_RATIO
from echo.roles.worker.throughput import EngineThroughput
from echo.wire.messages import NodeStats


def measured(*, step_s: float, rollout_s: float, lengths: list[int]) -> EngineThroughput:
    """Return what is measured of rollouts of these lengths in tokens, looking at every step.

    A step of the engine takes `step_s`, and `rollout_s` for each of its rollouts.
    """
    throughput, num_tokens, now = EngineThroughput(), 0, 0.0
    for step in range(max(lengths)):
        num_running = sum(length > step for length in lengths)
        throughput.look(num_running, num_tokens, now=now)
        num_tokens += num_running
        now += step_s + rollout_s * num_running
    return throughput


LENGTHS = [100, 100, 200, 200, 300, 300, 400, 400]


def test_an_engine_whose_cores_are_the_limit_gains_nothing() -> None:
    gain = measured(step_s=0.0, rollout_s=0.1, lengths=LENGTHS).gain
    assert gain == pytest.approx(1.0, abs=0.02)


def test_an_engine_that_waits_for_memory_gains() -> None:
    gain = measured(step_s=0.1, rollout_s=0.0, lengths=LENGTHS).gain
    assert gain is not None
    assert gain > 2.0


def test_any_gain_fits_into_a_heartbeat() -> None:
    slower, faster = EngineThroughput(), EngineThroughput()
    for throughput, num_tokens in ((slower, 1), (faster, 10**18)):
        for now, (num_rollouts, tokens) in enumerate([(8, 0), (8, num_tokens), (1, 0), (1, 100)]):
            throughput.look(num_rollouts, tokens, now=10.0 * now)
    gains = [slower.gain, faster.gain]
    assert gains == [0.01, MAX_RATIO]
    for gain in gains:
        assert msgspec.convert({"gain": gain}, NodeStats).gain == gain


def test_without_both_loads_the_gain_is_unknown() -> None:
    assert measured(step_s=0.1, rollout_s=0.0, lengths=[400] * 8).gain is None
    assert measured(step_s=1e-3, rollout_s=0.0, lengths=LENGTHS).gain is None, "too short a time"
