from __future__ import annotations

from echo.core.timers import RecentMap


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
