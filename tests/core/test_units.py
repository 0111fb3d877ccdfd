"""Units: round trips, refusals that say what to write, rounding at the borders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.units import (
    DURATION_UNITS,
    MAX_DURATION_S,
    MAX_SIZE_BYTES,
    SIZE_UNITS,
    format_bytes,
    format_duration,
    one_line,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("5min", 300.0),
        ("2h", 7200.0),
        ("100ms", 0.1),
        ("1.5 s", 1.5),
        (3, 3.0),
        ("1d", 86400.0),
        ("250us", 0.00025),
        (0, 0.0),
        (0.25, 0.25),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("200MB", 200_000_000),
        ("1 MiB", 2**20),
        ("1.5KiB", 1536),
        (17, 17),
        ("0B", 0),
        ("2TiB", 2 * 2**40),
        ("3kB", 3000),
        ("3KB", 3000),
    ],
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "value",
    [
        "fast",
        "5m",
        "30",
        "",
        "-3s",
        "9" * 400 + "s",
        "1e30h",
        -1,
        True,
        None,
        float("nan"),
        float("inf"),
        10**400,
        [3],
    ],
)
def test_not_a_duration_says_what_to_write(value: object) -> None:
    with pytest.raises(ValueError, match=r'is not a duration; .*us, ms, s, min, h, d.*"30s"'):
        parse_duration(value)


@pytest.mark.parametrize("value", ["8G", "8Mb", "8", "big", -1, 1.5, True, None])
def test_not_a_size_says_what_to_write(value: object) -> None:
    with pytest.raises(ValueError, match=r'is not a size; .*KiB, MiB.*"8GiB"'):
        parse_size(value)


@pytest.mark.parametrize("value", ["10001d", "9" * 18 + "h", "240000.1h", 864_000_001, 1e18])
def test_a_duration_has_a_bound(value: object) -> None:
    assert parse_duration("10000d") == MAX_DURATION_S
    with pytest.raises(ValueError, match=r'is too long; a duration may have "10000d" at most'):
        parse_duration(value)


@pytest.mark.parametrize("value", ["1000001TiB", "9" * 18 + "MiB", 2**62])
def test_a_size_has_a_bound(value: object) -> None:
    assert parse_size("1000000TiB") == MAX_SIZE_BYTES
    with pytest.raises(ValueError, match=r'is too much; a size may have "1000000TiB" at most'):
        parse_size(value)


@given(st.integers(0, 10**6), st.sampled_from(sorted(SIZE_UNITS)))
def test_a_size_with_a_unit_is_exact(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == number * SIZE_UNITS[unit]


@given(st.integers(0, 10**4), st.sampled_from(sorted(DURATION_UNITS)))
def test_a_duration_with_a_unit_is_exact(number: int, unit: str) -> None:
    assert parse_duration(f"{number}{unit}") == float(number * DURATION_UNITS[unit])


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


def test_a_text_of_somebody_else_stays_on_its_line() -> None:
    assert one_line("plain, with \u00e9 and \u4e16") == "plain, with \u00e9 and \u4e16"
    assert one_line("a\nb\r\x1b[2J\u202e\ud800") == "a\\nb\\r\\x1b[2J\\u202e\\ud800"
