"""Converts durations and sizes from text and to text, and cleans texts for display.

Sizes are exact integers, and printed in binary units (KiB, MiB, ...), because memory and chunk
sizes are powers of two. Ambiguous units are refused: "5m" may be minutes or months, "8G" may be
10^9 or 2^30, and "8Mb" usually means bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TypeGuard

JOIN_SECRET = re.compile(r"(#[^\s.\"']*)\.[^\s\"']+")
"""Matches a join string's key and secret in any text. The secret follows the key."""

_KEY = re.compile(r"(?<=\d)#[\w-]{43}(?:\.[\w-]+)*")

DURATION_UNITS: dict[str, Fraction] = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
"""Seconds in each unit of time, smallest first."""

SIZE_UNITS: dict[str, int] = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
"""Bytes in each unit of size."""

MAX_DURATION_S = 10_000 * 86400.0
"""Largest duration that is accepted: about 27 years. Every clock, timer and message can represent
it."""
MAX_SIZE_BYTES = 10**6 * 2**40
"""Largest size that is accepted. It exceeds the size of any disk. System calls, messages and
databases can represent it."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_QUANTITY = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,18})?)\s*(?P<unit>[A-Za-z]+)")


def parse_duration(value: object) -> float:
    """Return a duration in seconds.

    Args:
        value: seconds as a number, or text with a unit: "100ms", "30s", "5min", "2h", "1d".

    Raises:
        ValueError: for any other value, and if the duration is negative, not finite or above
            `MAX_DURATION_S`.
    """
    seconds: Fraction | float | None = None
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value.strip())
        if match and match["unit"] in DURATION_UNITS:
            seconds = Fraction(match["number"]) * DURATION_UNITS[match["unit"]]
    elif _is_amount(value):
        seconds = value
    if seconds is not None and seconds <= MAX_DURATION_S:
        return float(seconds)
    if seconds is not None:
        raise ValueError(f'{_show(value)} is too long; a duration may have "10000d" at most')
    raise ValueError(
        f"{_show(value)} is not a duration; write a number of seconds, or a number with one of "
        f'{", ".join(DURATION_UNITS)}, such as "30s" or "5min"'
    )


def parse_size(value: object) -> int:
    """Return a size in bytes.

    Args:
        value: bytes as an integer, or text with a unit: "8GiB", "200MB", "512KiB". Fractions of a
            byte are dropped.

    Raises:
        ValueError: for any other value, and if the size is negative or above `MAX_SIZE_BYTES`.
    """
    num_bytes: int | None = None
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value.strip())
        if match and match["unit"] in SIZE_UNITS:
            num_bytes = int(Fraction(match["number"]) * SIZE_UNITS[match["unit"]])
    elif _is_amount(value) and isinstance(value, int):
        num_bytes = value
    if num_bytes is not None and num_bytes <= MAX_SIZE_BYTES:
        return num_bytes
    if num_bytes is not None:
        raise ValueError(f'{_show(value)} is too much; a size may have "1000000TiB" at most')
    raise ValueError(
        f"{_show(value)} is not a size; write a whole number of bytes, or a number with one of "
        f'{", ".join(SIZE_UNITS)}, such as "8GiB" or "200MB"'
    )


def format_duration(seconds: float) -> str:
    """Return a duration with three significant digits: "850ms", "1.5s", "2.25h"."""
    units = [(unit, float(factor)) for unit, factor in DURATION_UNITS.items()]
    return "0s" if seconds == 0 else _format(seconds, units, space="")


def format_bytes(num_bytes: float) -> str:
    """Return a size in binary units with three significant digits: "8 GiB", "201 KiB"."""
    return _format(num_bytes, [(unit, 1024.0**i) for i, unit in enumerate(_BINARY_UNITS)])


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, whose plural ends in s: "1 group", "2 groups"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


MAX_LISTED = 5
"""Largest number of names that a message lists, so that it stays short. The rest is counted."""


def listed(names: Iterable[str]) -> str:
    """Return names for a message: "a, b", or "a, b, c, d, e and 3 more"."""
    found = list(names)
    more = len(found) - MAX_LISTED
    text = ", ".join(found[:MAX_LISTED])
    return f"{text} and {more} more" if more > 0 else text


def _is_amount(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63


def _show(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _format(amount: float, units: Sequence[tuple[str, float]], space: str = " ") -> str:
    """Return an amount as text. The unit is the largest that does not exceed the amount."""
    if amount < 0:
        return f"-{_format(-amount, units, space)}"
    index = max((i for i, (_, factor) in enumerate(units) if amount >= factor), default=0)
    text = _three_digits(amount / units[index][1])
    if index + 1 < len(units) and float(text) * units[index][1] >= units[index + 1][1]:
        index += 1  # rounding reached the next unit: "1 MiB", not "1024 KiB"
        text = _three_digits(amount / units[index][1])
    return f"{text}{space}{units[index][0]}"


def _three_digits(value: float) -> str:
    """Return a number as text with three digits. A number above 999 keeps all whole digits."""
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def without_secrets(text: str) -> str:
    """Return a text in which *** replaces the secret of every join string."""
    return JOIN_SECRET.sub(r"\1.***", text)


def without_keys(text: str) -> str:
    """Return a text from which the keys after all addresses are removed.

    The keys are public, but readers of a log do not need them.
    """
    return _KEY.sub("", text)


def one_line(text: str) -> str:
    """Return text from a peer or user on one line, without cursor movements.

    Unprintable characters, such as escape sequences and line breaks, become Python's escapes.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def per_million(cost: float, num_tokens: int) -> float | None:
    """Return the cost of 10^6 tokens if `num_tokens` have cost `cost`; None without tokens."""
    return cost / num_tokens * 1e6 if num_tokens > 0 else None


GIGABYTE = 1e9
"""Number of bytes in a gigabyte. Providers bill traffic in this unit."""
