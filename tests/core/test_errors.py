from __future__ import annotations

from echo.core.errors import in_one, nearest


def test_all_problems_make_one_message() -> None:
    assert in_one("fleet", ["a = 1: no", "a = 1: no"]) == "a = 1: no"
    assert in_one("fleet", ["a", "b", "a"]) == "the fleet has 2 problems:\n  a\n  b"


def test_the_nearest_name_is_found_or_none() -> None:
    assert nearest("gruop_size", ["group_size", "groups_per_step"]) == "group_size"
    assert nearest("zebra", ["group_size"]) is None
