"""Units: round trips, refusals that say what to write, rounding at the borders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.units import (
    DURATION_UNITS,
    MAX_DURATION_S,
    MAX_SIZE_BYTES,
    SIZE_UNITS,
    counted,
    format_bytes,
    format_duration,
    listed,
    one_line,
    parse_duration,
    parse_size,
)

DURATIONS: list[Any] = [
    ("30s", 30.0), ("5min", 300.0), ("2h", 7200.0), ("100ms", 0.1), ("1.5 s", 1.5), (3, 3.0),
    ("1d", 86400.0), ("250us", 0.00025), (0, 0.0), (0.25, 0.25), ("10000d", MAX_DURATION_S),
]  # fmt: skip
SIZES: list[Any] = [
    ("8GiB", 8 * 2**30), ("200MB", 200_000_000), ("1 MiB", 2**20), ("1.5KiB", 1536), (17, 17),
    ("0B", 0), ("2TiB", 2 * 2**40), ("3kB", 3000), ("3KB", 3000), ("1000000TiB", MAX_SIZE_BYTES),
]  # fmt: skip
NO_DURATIONS: list[Any] = [
    "fast", "5m", "30", "", "-3s", "9" * 400 + "s", "1e30h", -1, True, None, float("nan"),
    float("inf"), 10**400, [3],
]  # fmt: skip
NO_SIZES: list[Any] = ["8G", "8Mb", "8", "big", -1, 1.5, True, None]
TOO_LONG: list[Any] = ["10001d", "9" * 18 + "h", "240000.1h", 864_000_001, 1e18]
TOO_MUCH: list[Any] = ["1000001TiB", "9" * 18 + "MiB", 2**62]
PARSERS: list[tuple[Callable[[object], float], Mapping[str, Any]]] = [
    (parse_duration, DURATION_UNITS),
    (parse_size, SIZE_UNITS),
]


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [(parse_duration, *each) for each in DURATIONS] + [(parse_size, *each) for each in SIZES],
)
def test_what_is_written_is_read(
    parse: Callable[[object], float], text: object, expected: float
) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "values", "message"),
    [
        (parse_duration, NO_DURATIONS, r'is not a duration; .*us, ms, s, min, h, d.*"30s"'),
        (parse_size, NO_SIZES, r'is not a size; .*KiB, MiB.*"8GiB"'),
        (parse_duration, TOO_LONG, r'is too long; a duration may have "10000d" at most'),
        (parse_size, TOO_MUCH, r'is too much; a size may have "1000000TiB" at most'),
    ],
)
def test_a_refusal_says_what_to_write(
    parse: Callable[[object], float], values: list[Any], message: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=message):
            parse(value)


@pytest.mark.parametrize(("parse", "units"), PARSERS)
@given(number=st.integers(0, 10**4), data=st.data())
def test_a_number_with_a_unit_is_exact(
    parse: Callable[[object], float], units: Mapping[str, Any], number: int, data: st.DataObject
) -> None:
    unit = data.draw(st.sampled_from(sorted(units)))
    assert parse(f"{number}{unit}") == float(number * units[unit])


@given(st.integers(0, 2**49))
def test_a_formatted_size_reads_back_within_half_a_percent(num_bytes: int) -> None:
    read = parse_size(format_bytes(num_bytes))
    assert abs(read - num_bytes) <= 0.0051 * num_bytes + 1  # the fraction of a byte is cut off


@given(st.floats(1e-6, 1e7))
def test_a_formatted_duration_reads_back_within_half_a_percent(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.0051)


@given(st.integers(1, 999), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_whole_binary_sizes_read_back_exactly(number: int, unit: str) -> None:
    assert parse_size(format_bytes(number * SIZE_UNITS[unit])) == number * SIZE_UNITS[unit]


def test_people_read_these() -> None:
    assert format_bytes(8 * 2**30) == "8 GiB"
    assert format_bytes(201_472) == "197 KiB"
    assert format_bytes(2**20 - 1) == "1 MiB"
    assert format_bytes(0) == "0 B"
    assert format_bytes(-2048) == "-2 KiB"
    assert format_bytes(1000 * 2**40) == "1000 TiB"
    assert format_duration(0) == "0s"
    assert format_duration(0.85) == "850ms"
    assert format_duration(90) == "1.5min"
    assert format_duration(59.999) == "1min"
    assert format_duration(1e-7) == "0.1us"
    assert format_bytes(2.1 * 2**20) == "2.1 MiB"
    assert [counted(number, "group") for number in range(3)] == ["0 groups", "1 group", "2 groups"]


def test_a_text_of_somebody_else_stays_on_its_line() -> None:
    assert one_line("plain, with \u00e9 and \u4e16") == "plain, with \u00e9 and \u4e16"
    assert one_line("a\nb\r\x1b[2J\u202e\ud800") == "a\\nb\\r\\x1b[2J\\u202e\\ud800"


def test_of_many_names_five_are_listed_and_the_rest_is_counted() -> None:
    assert listed([]) == ""
    assert listed("abcde") == "a, b, c, d, e"
    assert listed(f"w{number}" for number in range(8)) == "w0, w1, w2, w3, w4 and 3 more"
