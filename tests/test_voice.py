"""Docstrings and comments of echo/ say things as an engineer would: patterns a machine can see.

bench/, tests/ and the scripts of docs/ are not held to it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST = 0.01
"""Share of the sentences that may have one."""

PATTERNS = {
    # A sentence without a subject: name the chunk, the child, the version.
    "headless": r"^(?:(?:Who|Whoever|What|Those|Of those|Of what|Where one|As one|Of one)\b"
    r"|One\b,? (?:that|which|who|whose|in|of(?! the)|to|beside|alone|may|is|was|has)\b)[^?]*$",
    # People for machines.
    "people": r"(?i:\bwho(?:m)?ever\b|\b(?:no|any|some|every)body\b|(?:^|[,;:] )who\b)",
    "speech": r"(?i:\bhas? (?:said|told|heard)\b)",
    "literary": r"(?i:\bfor ever\b|\bof late\b|\banew\b|\bin vain\b|\bat one time\b|\bbut for\b)",
    "let go": r"(?i:\blet(?:s|ting)? go of\b)",
    "is there": r"(?i:\bwhat is (?:there|here)\b|\b(?:is|are|was) over(?=[.,;:]| with\b| and\b|$))",
    # A number or a relative without its noun.
    "noun": r"(?i:\bof (?:which|whom)\b|\b(?:so|as) many\b(?! (?:as|more)\b))",
    "not": r"(?i:\bany more\b|\bdo(?:es)? without\b)",
}
COMMENT = re.compile(r"(?: *|.*?\S  )#+ *(.*)")


def texts(source: str) -> Iterator[str]:
    """Yield docstrings, also those of attributes, and blocks of comments."""
    for node in ast.walk(ast.parse(source)):
        parts = getattr(node, "body", ())  # of a lambda it is no list
        for part in parts if isinstance(parts, list) else ():
            match part:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield text
    block, last = list[str](), -1
    for number, line in enumerate(source.splitlines()):
        # The tokenizer would take most of the test's time, for the few texts with a # in them.
        if "#" in line and (comment := COMMENT.match(line)):
            if number != last + 1:
                yield " ".join(block)
                block = []
            block.append(comment[1])
            last = number
    yield " ".join(block)


def sentences(text: str) -> Iterator[str]:
    """Yield the parts of a text up to a full stop, a colon or a semicolon."""
    for paragraph in re.split(r"\n\s*\n|\n\s*[*-] ", text):
        yield from filter(None, re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split())))


def faults(sentence: str) -> list[str]:
    """Return the patterns that a sentence has."""
    return [name for name, pattern in PATTERNS.items() if re.search(pattern, sentence)]


def test_the_patterns_are_found() -> None:
    assert faults("Who is not waited for makes nobody wait.") == ["headless", "people"]
    assert faults("One that lags is dropped.") == ["headless"]
    assert faults("it holds as many, and is not read any more") == ["noun", "not"]
    assert faults("The child that lags is dropped, as many as needed.") == []
    assert list(sentences("A: b; c\n* d. E")) == ["A:", "b;", "c", "d.", "E"]
    assert list(texts('"""A."""\nx = 1  # b\n# c\ny = 2\n"""D."""\n')) == ["A.", "D.", "", "b c"]


@pytest.mark.slow
def test_few_sentences_have_one() -> None:
    num_sentences, found = 0, list[str]()
    for path in sorted((ROOT / "echo").rglob("*.py")):
        for text in texts(path.read_text(encoding="utf-8")):
            for sentence in sentences(text):
                num_sentences += 1
                if names := faults(sentence):
                    found.append(f"{path.relative_to(ROOT)}: {', '.join(names)}: {sentence}")
    assert len(found) <= MOST * num_sentences, "\n".join(found)
