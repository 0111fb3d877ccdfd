r"""Comparison of an answer with its reference, for the rewards `exact` and `math`.

**exact** compares the whole text, without the white space around it. If the reference is a number,
every notation of the number is right: 5.0, 5 and 5e0 are equal. `True` and `true` are equal, too.

**math** extracts an answer from the text. If the text has a `####`, the answer is the rest of the
line after the last `####`. Otherwise the answer is the content of the last `\boxed{...}`. If the
text has neither, the answer is the last number in the text. The answer is right if math-verify
finds that it equals the reference.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from decimal import Decimal
from typing import Any

from echo.core.errors import ConfigError
from echo.core.extras import install_command

MARKER = "####"

MAX_ANSWER_CHARS = 64
"""Number of characters of the longest answer that the computer algebra reads. A longer answer is
right only if its text is equal. For a long expression, the computer algebra can take a long time.
"""

_EXPONENT = r"(?:[eE][-+]?\d{1,2}(?!\d))?"
_NUMBER = re.compile(r"(?:(?<!\d)[-+])?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)" + _EXPONENT)
_PLAIN = re.compile(r"[-+]?\d+(?:\.\d*)?|[-+]?\.\d+")
_ANY_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)" + _EXPONENT, re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:\s+[^\W\d_]+)*")
_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}|\\[$%!,; ]|[$%€£]")


def require_math_verify(where: str) -> None:
    """Check that math-verify, which the setting `where` needs, is installed.

    Raises:
        ConfigError: if math-verify is not installed. The message names the setting and the command
            that installs it.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"{where} needs the package math-verify: {install_command('worker')}")
    # math-verify warns that its time limits are off. Here every reward call has a limit (is_equal).
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def is_plain_number(text: str) -> bool:
    """Return whether a normalised answer is a plain decimal number."""
    return _PLAIN.fullmatch(text) is not None


def extract_answer(completion: str) -> str | None:
    """Return the normalised final answer of a completion, or None."""
    head, marker, tail = completion.rpartition(MARKER)
    if marker and (line := tail.strip().partition("\n")[0]):
        return normalise(line)
    boxed = _last_boxed(completion)
    if boxed is not None:
        return normalise(boxed)
    numbers = _NUMBER.findall(head if marker else completion)
    return normalise(numbers[-1]) if numbers else None


def normalise(answer: str) -> str:
    r"""Return an answer in a normal form, in which equal answers often have the same text.

    Currency signs, percent signs, units, thousands separators and full stops are removed. If an
    answer consists only of text, such as `\text{even}`, the text is no unit and stays.
    """
    bare = _UNITS.sub("", answer)
    answer = _THOUSANDS.sub("", bare if re.search(r"\w", bare) else _UNITS.sub(r"\1", answer))
    answer = answer.strip().strip("*_`").rstrip("*_`.,;").strip()
    if "e" in answer.lower() and _ANY_NUMBER.fullmatch(answer):
        return _written_out(Decimal(answer))
    return answer


def is_equal(reference: str, answer: str) -> bool:
    """Return whether two normalised answers are the same text or mathematically equal.

    math-verify decides equality. An answer with powers or factorials is compared as text only: with
    `9**9**9**9` the computer algebra would never end. Words are compared as text, too, because the
    computer algebra would read them as products of letters.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if not answer or answer == reference:
        return bool(answer)
    if len(answer) > MAX_ANSWER_CHARS or re.search(r"\^|\*\*|!", answer):
        return False
    if _WORDS.fullmatch(reference):
        return False

    def read(text: str) -> Any:
        # The library's time limits use SIGALRM, which works in a main thread only; `score` has a
        # limit.
        if _PLAIN.fullmatch(text):
            return parse(text, [ExprExtractionConfig()], parsing_timeout=None)
        return parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)

    return bool(verify(read(reference), read(answer), timeout_seconds=None))


def _last_boxed(completion: str) -> str | None:
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


# --- the rewards ----------------------------------------------------------------------------------


def check_reference(reward: str, column: str, answer: Any) -> None:
    """Refuse a reference that `exact` or `math` cannot compare with text.

    Raises:
        ValueError, TypeError: if the reference cannot be compared. The message names the column,
            the value and the remedy.
    """
    where = f"`{column}` = {answer!r:.80}"
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"{where}: no text equals it; write a number or a text")
    if isinstance(answer, str) and not answer.strip():
        raise ValueError(f"{where}: an empty answer would be worth 1; write the answer")
    if isinstance(answer, bool) and reward == "math":
        raise ValueError(f'{where}: `math` compares numbers; take reward = "exact"')
    if not isinstance(answer, str | int | float):
        raise TypeError(
            f"{where}: `{reward}` compares with one text or number, not with a "
            f"{type(answer).__name__}; name a function of your own that says what counts, such as "
            "`return float(completion.strip() in answer)`"
        )


def exact(completion: str, answer: str | float) -> float:
    """Return 1 if the completion is equal to the answer, otherwise 0."""
    text = completion.strip()
    if isinstance(answer, bool):
        return float(text.lower() == str(answer).lower())
    if isinstance(answer, str):
        return float(text == answer.strip())
    is_number = _ANY_NUMBER.fullmatch(text) is not None
    return float(is_number and Decimal(text) == Decimal(str(answer)))


def equal_in_mathematics(completion: str, answer: str | float) -> float:
    """Return 1 if the completion's answer is mathematically right, else 0."""
    found = extract_answer(completion)
    reference = answer if isinstance(answer, str) else _written_out(Decimal(str(answer)))
    # Extract only from a whole solution: the last number of a fraction is not its value.
    if MARKER in reference or _last_boxed(reference) is not None:
        reference = extract_answer(reference) or ""
    return float(found is not None and is_equal(normalise(reference), found))


def _written_out(number: Decimal) -> str:
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text
