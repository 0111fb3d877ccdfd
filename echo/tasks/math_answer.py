r"""The final answer of a mathematical text, and whether it is the right one, by math-verify.

An answer is what follows the last `####` of a text; failing that its last `\boxed{...}`; failing
that its last number. It is right if math-verify finds it equal to the reference.
"""

from __future__ import annotations

import importlib.util
import logging
import re

from echo.errors import ConfigError
from echo.extras import install_command

MARKER = "####"

MAX_ANSWER_CHARS = 64

_NUMBER = re.compile(r"(?:(?<!\d)[-+])?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_PLAIN = re.compile(r"[-+]?\d+(?:\.\d*)?|[-+]?\.\d+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}|\\[$%!,; ]|[$%€£]")


def require_math_verify(where: str) -> None:
    """Refuse a setting that needs math-verify where it is not installed.

    Raises:
        ConfigError: naming the setting.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"{where} needs the package math-verify: {install_command('worker')}")
    # It warns that its time limits are off; they are, because every reward has one (is_equal).
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def is_plain_number(text: str) -> bool:
    """Return whether a normalised answer is a plain decimal number."""
    return _PLAIN.fullmatch(text) is not None


def extract_answer(completion: str) -> str | None:
    """Return the final answer of a completion, normalised; None if there is none."""
    head, marker, tail = completion.rpartition(MARKER)
    if marker and (line := tail.strip().partition("\n")[0]):
        return normalise(line)
    boxed = _last_boxed(completion)
    if boxed is not None:
        return normalise(boxed)
    numbers = _NUMBER.findall(head if marker else completion)
    return normalise(numbers[-1]) if numbers else None


def normalise(answer: str) -> str:
    """Remove what is not the value: currency, percent, units in text, thousands, full stops."""
    answer = _THOUSANDS.sub("", _UNITS.sub("", answer))
    return answer.strip().strip("*_`").rstrip(".,;").strip()


def is_equal(reference: str, answer: str) -> bool:
    """Return whether math-verify finds two answers equal.

    Powers and factorials are refused unread: no answer here needs them, and `9**9**9**9` would
    keep the computer algebra busy for ever.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if not answer or len(answer) > MAX_ANSWER_CHARS or re.search(r"\^|\*\*|!", answer):
        return False
    # The library's own time limits use SIGALRM, which only a main thread may; `score` has one.
    target = parse(reference, [ExprExtractionConfig()], parsing_timeout=None)
    if _PLAIN.fullmatch(answer):
        value = parse(answer, [ExprExtractionConfig()], parsing_timeout=None)
    else:
        value = parse(f"${answer}$", [LatexExtractionConfig()], parsing_timeout=None)
    return bool(verify(target, value, timeout_seconds=None))


def _last_boxed(completion: str) -> str | None:
    r"""Return what stands inside the last complete \boxed{...}."""
    start = completion.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = start + len(r"\boxed{")
    depth = 1
    for position in range(begin, len(completion)):
        depth += {"{": 1, "}": -1}.get(completion[position], 0)
        if depth == 0:
            return completion[begin:position]
    return None
