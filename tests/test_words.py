"""Words of the field, one for one thing: in names, and in what an operator reads."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A word that we had once, and what we say now.
INSTEAD = {
    "anchor": "keyframe",
    "anew": "again",
    "arena": "version store",
    "barren": "zero-signal",
    "bears": "has",
    "calm": "idle",
    "complaint": "error, fault",
    "composite": "encoded version",
    "crew": "rank group",
    "dismissal": "release of the machine",
    "draft": "partial group",
    "far_rows": "remote shard",
    "farewell": "shutdown",
    "fence": "version barrier",
    "foreseen": "predicted",
    "forsake": "abandon",
    "freshen": "apply the staleness policy",
    "hand_out": "grant",
    "handover": "one of its two meanings",
    "heard": "received",
    "heard_at": "last_seen",
    "heed": "the event that it handles",
    "hope": "estimate",
    "intake": "accept",
    "judge": "reward call",
    "lane": "connection",
    "last_words": "crash reason",
    "loudest": "dominant",
    "make_way": "preempt",
    "metering": "cost meter",
    "near_rank": "local shard",
    "nobody": "no node, no user",
    "obstacle": "fault, reason",
    "outlook": "prediction, forecast",
    "outrun": "superseded",
    "parcel": "encoded version",
    "parked": "interrupted, standby",
    "player": "episode runner",
    "prompting": "prompt source",
    "reception": "admission",
    "retirement": "release of the machine",
    "room": "space",
    "second_opinion": "quorum",
    "settle": "close, finish, release",
    "settled": "finished groups",
    "skeleton": "meta-device model",
    "somebody": "the process, the user",
    "spoilt": "nonfinite",
    "stray": "unknown leases",
    "tell": "log, report, send",
    "told": "logged, reported",
    "wave": "static batch",
    "whoever": "any node",
    "why_unplaced": "placement fault",
}
ALL = "|".join(INSTEAD).replace("_", ".")
HINT = re.compile(rf"(?<![A-Za-z])({ALL})|{ALL.title()}|{ALL.upper()}")
TELL = {"debug", "info", "warning", "error", "exception", "critical", "Note", "print", "fail"}
METRIC = re.compile(r"[a-z_]+(/[a-z0-9_]+)+")
QUESTION = re.compile(r"(What|Who|Whose|Whether|Which|How|Where|When|Why)\b")
# Two backends of one contract, and what each command has.
SHARED = {"forward", "backward", "pair_logits", "pair_gradients", "run", "main"}
TOP = re.compile(r"^(?:class|def|async def) ([A-Za-z]\w*)", re.M)
AGAIN = re.compile(r"^(?:from .* import .*|import .*|\s+)\b(\w+) as \1\b,?$", re.M)


@cache
def sources(*folders: str) -> dict[str, str]:
    """Return the text of each module in these folders by its path."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def named(node: ast.AST) -> Iterator[str]:
    """Yield what a part of a module names: a class, function, parameter, attribute or variable."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.Name(id=name, ctx=ast.Store()):
            yield name


def told(node: ast.AST) -> Iterator[str]:
    """Yield the texts that reach an operator: logs, notes, output, errors, metrics."""
    match node:
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if (
            called in TELL or called.endswith("Error")
        ):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.value
        case ast.Constant(value=str() as text) if METRIC.fullmatch(text):
            yield text


def words(text: str) -> set[str]:
    """Return the words of a name or a text, and its pairs of words, without a plural's s."""
    parts = [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)]
    parts = [*parts, *map("_".join, pairwise(parts))]
    return {*parts, *(part.removesuffix("s") for part in parts)}


def gone(source: str) -> list[str]:
    """Return the names and texts of a module that have a word of before."""
    if not HINT.search(source):
        return []
    texts = {text for node in ast.walk(ast.parse(source)) for text in (*named(node), *told(node))}
    return [
        f"{text}: say {INSTEAD[word]}"
        for text in sorted(filter(HINT.search, texts))
        for word in sorted(words(text) & INSTEAD.keys())
    ]


@pytest.mark.slow
def test_nothing_is_called_as_it_was() -> None:
    found = {path: gone(text) for path, text in sources("echo").items()}
    assert {path: texts for path, texts in found.items() if texts} == {}
    assert [path for path in found if words(Path(path).stem) & INSTEAD.keys()] == []


def test_a_word_of_before_is_found() -> None:
    assert gone("class LaneLink: ...") == ["LaneLink: say connection"]
    assert gone("class A:\n    num_strays: int") == ["num_strays: say unknown leases"]
    assert gone("def f():\n    told = why_unplaced()") == ["told: say logged, reported"]
    assert gone("class RankCrew: ...") == ["RankCrew: say rank group"]
    assert gone("log.info('the %s leaves its last words', x)") != []
    assert gone("counters.add('groups/barren')") == ["groups/barren: say zero-signal"]
    assert gone("def plane(): 'No lane.'") == []


def test_sessions_are_those_of_agents() -> None:
    """What decides for a node is its role."""
    found = {
        path: re.findall(r"\b_?session\b(?=[.,:)])", text)
        for path, text in sources("echo").items()
        if "agents/" not in path and "verifiers" not in path
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_a_public_name_is_one_thing() -> None:
    places = defaultdict(set)
    for path, text in sources("echo").items():
        for name in TOP.findall(text):
            places[name].add(path)
    assert {name for name, found in places.items() if len(found) > 1} == SHARED


def test_a_name_has_one_address() -> None:
    found = {path: AGAIN.findall(text) for path, text in sources("echo").items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_module_says_what_it_is() -> None:
    heads = {
        path: text.partition("\n")[0] for path, text in sources("echo", "bench", "tests").items()
    }
    assert [path for path, head in heads.items() if QUESTION.match(head.removeprefix('"""'))] == []
