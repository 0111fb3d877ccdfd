"""The throughput of an engine at a high and at a low load."""

from __future__ import annotations

import msgspec
import pytest

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


def test_an_engine_whose_cores_are_the_limit_does_not_scale() -> None:
    scaling = measured(step_s=0.0, rollout_s=0.1, lengths=LENGTHS).scaling
    assert scaling == pytest.approx(0.0, abs=0.02)


def test_an_engine_that_waits_for_memory_scales_with_its_rollouts() -> None:
    scaling = measured(step_s=0.1, rollout_s=0.0, lengths=LENGTHS).scaling
    assert scaling == pytest.approx(1.0, abs=0.02)


def test_an_engine_between_the_two_scales_in_part() -> None:
    scaling = measured(step_s=0.1, rollout_s=0.02, lengths=LENGTHS).scaling
    assert scaling is not None
    # From 3 rollouts to 7 on average: .16 and .24 s for a step.
    assert scaling == pytest.approx(0.55, abs=0.05)


@pytest.mark.parametrize(("num_tokens", "scaling"), [(1, 0.0), (10**18, 1.0)])
def test_any_scaling_fits_into_a_heartbeat(num_tokens: int, scaling: float) -> None:
    throughput = EngineThroughput()
    for now, (num_rollouts, tokens) in enumerate([(8, 0), (8, num_tokens), (1, 0), (1, 100)]):
        throughput.look(num_rollouts, tokens, now=10.0 * now)
    assert throughput.scaling == scaling
    assert msgspec.convert({"scaling": scaling}, NodeStats).scaling == scaling


def test_without_both_loads_the_scaling_is_unknown() -> None:
    assert measured(step_s=0.1, rollout_s=0.0, lengths=[400] * 8).scaling is None
    assert measured(step_s=1e-3, rollout_s=0.0, lengths=LENGTHS).scaling is None, "too short a time"
    nearly_equal = measured(step_s=0.1, rollout_s=0.0, lengths=[200] * 4 + [400] * 4)
    assert nearly_equal.scaling is None or nearly_equal.scaling == pytest.approx(1.0, abs=0.02)
