"""Work that costs in proportion to the fleet, and the first of many moving deadlines."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from echo.core.timers import (
    MANY_NODES,
    MAX_LINES,
    Deadlines,
    OncePerMinute,
    Paced,
    RecentMap,
    earliest,
)


def test_small_fleets_are_served_at_once() -> None:
    paced = Paced(1e-2)
    assert all(paced.may(MANY_NODES, now=now) for now in (0.0, 0.0, 0.1))
    assert paced.deadline is None


def test_large_fleets_wait_in_proportion_to_their_size_and_are_not_forgotten() -> None:
    paced = Paced(1e-2)
    assert paced.may(1000, now=5.0)
    assert not paced.may(1000, now=5.0)
    assert not paced.may(1000, now=14.9)
    assert paced.deadline == 15.0
    assert not paced.is_due(now=14.9)
    assert paced.is_due(now=15.0)
    assert paced.may(1000, now=15.0)
    assert paced.deadline is None


@dataclass(eq=False)
class Thing:
    at: float | None


class Things:
    def deadline_of(self, thing: Thing) -> float | None:
        return thing.at


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "later", "over", "take"]),
            st.integers(0, 9),
            st.floats(0.0, 5.0),
        ),
        max_size=60,
    )
)
def test_the_first_deadline_is_that_of_a_search_through_all(
    events: list[tuple[str, int, float]],
) -> None:
    deadlines: Deadlines[Thing] = Deadlines(Things())
    watched: list[Thing] = []
    now = 0.0
    for kind, index, number in events:
        thing = watched[index % len(watched)] if watched else None
        match kind:
            case "add":
                watched.append(Thing(now + number))
                deadlines.add(watched[-1])
            case "later" if thing is not None and thing.at is not None:
                thing.at += number
            case "over" if thing is not None:
                thing.at = None
                watched.remove(thing)
            case "take":
                now += number
                due = [t for t in watched if t.at is not None and t.at <= now]
                assert set(map(id, deadlines.take_due(now=now))) == set(map(id, due))
                watched = [t for t in watched if t not in due]
        first = min((t.at for t in watched if t.at is not None), default=None)
        assert deadlines.first == first


@given(st.lists(st.none() | st.floats(allow_nan=False)))
def test_the_earliest_is_the_least_of_those_that_are(instants: list[float | None]) -> None:
    assert earliest(*instants) == min((at for at in instants if at is not None), default=None)


def test_a_line_is_said_once_a_minute_for_each_peer_and_reason() -> None:
    lines = OncePerMinute()
    assert lines.line("w1", "stale", "too old", now=0.0) == "too old"
    assert lines.line("w1", "stale", "too old", now=59.0) is None
    assert lines.line("w1", "stale", "too old", now=59.5) is None
    assert lines.line("w1", "other", "else", now=59.5) == "else"
    assert lines.line("w2", "stale", "too old", now=59.5) == "too old"
    assert lines.line("w1", "stale", "older", now=60.0) == "older (2 more of these before)"


def test_made_up_names_do_not_fill_the_log() -> None:
    lines = OncePerMinute()
    said = [lines.line(f"w{i}", "stale", "x", now=i / 1000) for i in range(10 * MAX_LINES)]
    assert sum(line is not None for line in said) == MAX_LINES
    assert lines.line("w0", "stale", "x", now=60.5) is not None


def test_the_entry_written_longest_ago_is_forgotten() -> None:
    routes: RecentMap[str, str] = RecentMap(max_entries=2)
    routes["a"] = "1"
    routes["b"] = "2"
    routes["a"] = "3"
    routes["c"] = "4"
    assert len(routes) == 2
    assert "b" not in routes
    assert [routes.get(key) for key in "abc"] == ["3", None, "4"]


def test_entries_are_forgotten_by_key_and_by_value() -> None:
    routes: RecentMap[str, str] = RecentMap(max_entries=9)
    for key, value in zip("abcd", "1122", strict=True):
        routes[key] = value
    routes.discard_value("1")
    routes.discard("c")
    routes.discard("never there")
    assert (len(routes), routes.get("d")) == (1, "2")
