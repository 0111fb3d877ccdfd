"""Virtual time: order of calls, and where it ends."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.sim.clock import InlineThreads, StandstillError
from tests.sim.virtual import run_virtual


@given(st.lists(st.sampled_from([0.0, 0.1, 2.5, 10.0]), max_size=30))
def test_calls_happen_in_order_of_time_and_then_of_asking(instants: list[float]) -> None:
    found: list[tuple[float, int]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number, instant in enumerate(instants):
            loop.call_at(instant, lambda n: found.append((loop.time(), n)), number)
        await asyncio.sleep(10.5)

    run_virtual(main())
    assert found == sorted(zip(instants, range(len(instants)), strict=True))


def test_hours_pass_at_once_and_timers_fire_at_their_instants() -> None:
    async def sleeper(name: str, seconds: float, found: list[tuple[str, float]]) -> None:
        await asyncio.sleep(seconds)
        found.append((name, asyncio.get_running_loop().time()))

    async def main() -> list[tuple[str, float]]:
        found: list[tuple[str, float]] = []
        async with asyncio.TaskGroup() as group:
            for name, seconds in (("day", 86_400.0), ("b", 0.3), ("a", 0.1), ("b2", 0.3)):
                group.create_task(sleeper(name, seconds, found))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3 * 86_400.0):
                await asyncio.Event().wait()
        found.append(("late", asyncio.get_running_loop().time()))
        return found

    began = time.monotonic()
    found = run_virtual(main())
    assert found == [("a", 0.1), ("b", 0.3), ("b2", 0.3), ("day", 86_400.0), ("late", 345_600.0)]
    assert time.monotonic() - began < 60.0


def test_a_run_in_which_nothing_will_happen_is_an_error_that_names_who_waits() -> None:
    async def main() -> None:
        await asyncio.sleep(2.5)
        await asyncio.create_task(asyncio.Event().wait(), name="patient")

    with pytest.raises(StandstillError, match=r"nothing will ever happen: at 2\.500 s .*patient"):
        run_virtual(main())


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(int)

    with pytest.raises(RuntimeError, match="hand InlineThreads to its owner"):
        run_virtual(main())


class SlowThreads(InlineThreads):
    def takes(self, pool: str, function: object) -> float:
        return {"one": 2.0, "two": 3.0}[pool]


def test_calls_take_their_time_and_wait_for_a_free_thread() -> None:
    async def main() -> list[tuple[str, float]]:
        threads = SlowThreads()
        one, two = threads.pool("one"), threads.pool("two", 2)
        now, found = asyncio.get_running_loop().time, []

        def note(name: str) -> str:
            found.append((name, now()))
            return name

        calls = [one.run(note, "a"), one.run(note, "b"), *(two.run(note, n) for n in "cde")]
        assert await asyncio.gather(*calls) == list("abcde")
        with pytest.raises(ZeroDivisionError):
            await one.run(lambda: 1 / 0)
        late = one.run(note, "never")
        threads.close()
        await asyncio.sleep(10.0)
        assert not late.done()
        return found

    found = run_virtual(main())
    assert found == [("a", 2.0), ("c", 3.0), ("d", 3.0), ("b", 4.0), ("e", 6.0)]
