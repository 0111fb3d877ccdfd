"""Virtual time: order of calls, and where it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo.sim.clock import Clock


@given(st.lists(st.floats(0, 10), max_size=30))
def test_calls_happen_in_order_of_time_and_then_of_asking(instants: list[float]) -> None:
    clock, found = Clock(), []
    for number, instant in enumerate(instants):
        clock.at(instant, lambda n: found.append((clock.now, n)), number)
    clock.run()
    assert found == sorted(zip(instants, range(len(instants)), strict=True))
    assert clock.num_events == len(instants)


def test_the_past_is_the_present_and_run_stops_where_it_is_told_to() -> None:
    clock, found = Clock(), []
    clock.at(5.0, lambda: clock.at(1.0, lambda: found.append(clock.now)))
    clock.at(7.0, clock.stop)
    clock.at(8.0, lambda: found.append("never"))
    clock.run(until=4.0)
    assert (clock.now, found) == (4.0, [])
    clock.run(until=100.0)
    assert (clock.now, found) == (7.0, [5.0])
