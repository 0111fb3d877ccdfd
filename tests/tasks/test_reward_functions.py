"""Reward functions: every callable and both forms, and what is refused with the remedy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from echo.core.errors import ConfigError, DataError
from echo.core.reward_parts import parts_of
from echo.tasks.dataset import DatasetTask
from echo.tasks.rewards import ExampleCall, InlineHost, Limits, RewardError
from echo.tasks.task import Example, code_of, load_function, load_task, task_digests
from tests.tasks.rows import write_jsonl

FUNCTIONS = """
import asyncio, functools, math

seen = []

def all_columns(prompt, completion, **row):
    seen.append(f"{prompt}|{completion}|{sorted(row.items())}")
    return 1

def by_name(completion, answer, level, bonus=7):
    seen.append((completion, answer, level, bonus))
    return 1

def trl(prompts, completions, answer, trainer_state=None, **columns):
    seen.append((prompts, completions, answer, columns))
    return [0.5] * len(completions)

async def later(completions):
    await asyncio.sleep(0)
    return [None, 1][: len(completions)]

def shortest(completions, level, **columns):
    best = min(map(len, completions))
    return tuple(len(text) == best for text in completions)

def weighted(completion, weight, **row):
    return weight

def scores(completion, answer=None):
    return {"right": 1.0, "short": -len(completion) / 4}

def misnamed(completion):
    return {"a b": 1.0}

def empty(completion):
    return {}

def unsure(completion):
    return {"right": math.nan}

def none_or(completion):
    return None if completion == "?" else 1

async def slowly(completion):
    await asyncio.sleep(0)
    return len(completion)

def forgetful(completion, answer):
    float(completion == answer)

def failing(completion, answer):
    return answer["key"]

class Judge:
    def __call__(self, completion, answer):
        return float(completion == answer)

    async def method(self, completion):
        return 2

def unnamed(function):
    return lambda *args, **kwargs: function(*args, **kwargs)

half = functools.partial(weighted, weight=0.5)
judge = Judge()
method = judge.method
cached = functools.lru_cache(judge.__call__)
whole = functools.wraps(judge.__call__)(unnamed(judge))
wrapped = functools.wraps(half)(lambda *a, **k: half(*a, **k))
by_order = functools.partial(lambda weight, completion, **row: weight, 0.25)
hidden = unnamed(judge)
hidden_too = lambda *a, **k: 0.0
without = Judge.__call__
cached_row = functools.lru_cache(all_columns)
cached_group = functools.lru_cache(shortest)
def spread(*completions, **row): return [1.0] * len(completions)
def yields(completion): yield 1.0
def forgets(completions): return [later(completions[:1]), *[0.0] * len(completions[1:])]
def listed(completion): return [1.0]

def own_names(completion, question, target, tools, messages): return (
    len(completion), question[0]["content"], target, tools[0]["name"], messages is question)
def own_lists(completions, prompt, target):
    seen.append((prompt, target))
    return [0.0] * len(completions)
def mixed(prompts, completion): return 0.0
def behind(**kwargs): return 0.0
def neither(text): return 0.0
def nothing(): return 0.0
def by_place(completion, /): return 0.0
def ids(completions, completion_ids): return [0.0]
def verl(data_source, solution_str, ground_truth, extra_info=None): return 0.0
def count(completions): return {"0": 1.0, "3": [1.0] * 3, "d": dict.fromkeys(completions, 1.0),
    "x": 1.0, "n": [math.nan, 1.0], "t": ["1", "1"], "s": "12"}[completions[0]]
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    modules, search = set(sys.modules), list(sys.path)
    yield path
    sys.path[:] = search
    for name in set(sys.modules) - modules:
        del sys.modules[name]


LIMITS = Limits(score_s=60.0, step_s=60.0)
ROW = {"prompt": "p", "answer": "a", "info": {"x": 1}, "level": 3, "weight": 9}
CHAT = [{"role": "user", "content": "p"}]
ANSWER = [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "bcd"}]]


def host_of(name: str) -> InlineHost:
    """A host as on a worker, which has no rows."""
    return InlineHost(load_task("dataset", {"reward": f"rewards.py:{name}"}), LIMITS)


@pytest.mark.parametrize(
    ("function", "row", "seen"),
    [
        (
            "all_columns",
            {"prompt": "p", "answer": "a", "level": 3},
            ["p|a|[('answer', 'a'), ('info', {}), ('level', 3)]",
             "p|bcd|[('answer', 'a'), ('info', {}), ('level', 3)]"],
        ),
        ("by_name", ROW, [("a", "a", 3, 7), ("bcd", "a", 3, 7)]),
        (
            "trl",
            ROW,
            [(["p", "p"], ["a", "bcd"], ["a", "a"],
              {"info": [{"x": 1}] * 2, "level": [3, 3], "weight": [9, 9]})],
        ),
        (
            "trl",
            {"messages": CHAT, "answer": "a"},
            [([CHAT, CHAT], ANSWER, ["a", "a"], {"info": [{}, {}]})],
        ),
    ],
)  # fmt: skip
def test_a_function_gets_what_its_parameters_name(
    tmp_path: Path, function: str, row: dict[str, Any], seen: object
) -> None:
    """Of a row that a learner has read and sent to a worker."""
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    task = DatasetTask(path=path, heldout_path=path, reward=f"rewards.py:{function}")
    sent = Example(**json.loads(json.dumps(asdict(task.example(0, split="train")))))
    host = host_of(function)
    assert len(list(host.score_all(sent, ["a", "bcd"]))) == 2
    module = sys.modules[load_function("x", f"rewards.py:{function}").__module__]
    assert module.seen == seen
    assert host.take_counts()["env/calls"] == len(module.seen)


@pytest.mark.parametrize(
    ("function", "rewards"),
    [
        ("half", [0.5, 0.5]),  # and not the row's weight
        ("wrapped", [0.5, 0.5]),
        ("by_order", [0.25, 0.25]),
        ("judge", [1, 0]),
        ("method", [2, 2]),
        ("cached", [1, 0]),
        ("whole", [1, 0]),
        ("later", [None, 1]),
        ("shortest", [1, 0]),
    ],
)
def test_any_callable_will_do(tmp_path: Path, function: str, rewards: list[float | None]) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [ROW])
    task = DatasetTask(path=path, heldout_path=path, reward=f"rewards.py:{function}")
    example = task.example(0, split="train")
    host = InlineHost(task, LIMITS)
    assert list(host.score_all(example, ["a", "bcd"])) == rewards
    assert host.score(example, "a") == rewards[0], "an evaluation has one answer"
    assert host.take_counts().get("env/no_opinion", 0) == 2 * rewards.count(None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("neither", r"takes text; a reward is f\(completion, \*\*row\).*f\(prompts, completions, "),
        ("nothing", r"takes nothing; a reward is"),
        ("behind", r"takes kwargs; .*: name one of them"),
        ("hidden", r"takes args, kwargs; .*functools\.wraps"),
        ("hidden_too", r"takes a, k; .*functools\.wraps"),
        ("without", r"is a method without its instance; name a method of an instance"),
        ("by_place", r"takes completion by position only.*remove the `/`"),
        ("ids", r"needs completion_ids, which Echo never gives.*default"),
        ("verl", r"verl's solution_str is completion here, and its ground_truth is answer"),
        ("Judge", r"is a class; name an instance .*reward = Judge\(\)"),
        ("cached_row", r"lru_cache cannot hash all columns"),
        (
            "cached_group",
            r"lru_cache cannot hash the lists of a group; cache a function of one tex",
        ),
        ("spread", r"takes completions, row; .*: name one of them"),
        ("hole", r"no function 'hole' \(did you mean 'whole'"),
    ],
)
def test_what_cannot_be_called_as_a_reward_is_refused_with_the_remedy(
    name: str, message: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"^task.options.reward = 'rewards.py:{name}': .*{message}"
    ):
        host_of(name)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exakt", r"did you mean 'exact'\?\); there are exact, math, or a f"),
        (7, "name a function, or several with weights"),
        ([7], "name a function, or several with weights"),
        ({"exact": "1"}, "the weight of 'exact' is '1', no number"),
        (["exact", "rewards.py:exact"], "two functions have one name"),
        ("math:prod", r"math is no Python file.*call it from a function"),
    ],
)
def test_what_names_no_function_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DatasetTask(reward=spec)


EXAMPLE = Example(index=0, split="train", prompt="?", source="rows.jsonl:1")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("3", "returned 3 rewards; it must return a list of 2 numbers, one for each answer"),
        ("d", r"returned \{.*\}; it must return a list of 2 numbers"),
        ("x", r"returned 1\.0; it must return a list of 2"),
        ("s", r"returned '12'; it must return a list of 2"),
        ("n", "returned nan; it must return a finite number, or None for no opinion"),
        ("t", "returned '1'; it must return a finite number"),
        ("?", r"raised KeyError: '\?'"),
    ],
)
def test_a_list_that_does_not_fit_fails_its_group(kind: str, message: str) -> None:
    what = rf"DatasetTask\.reward on rows\.jsonl:1 {message}"
    with pytest.raises(RewardError, match=what) as caught:
        list(host_of("count").score_all(EXAMPLE, [kind, "b"]))
    assert caught.value.reason == "reward_error"


@pytest.mark.parametrize("kind", ["3", "x"])
def test_what_is_no_list_of_one_fails_the_one_answer_of_an_evaluation(kind: str) -> None:
    with pytest.raises(RewardError, match=r"returned .*1\.0.*not a list of one number, for one"):
        host_of("count").score(EXAMPLE, kind)


def test_a_reward_in_parts_is_their_sum() -> None:
    reward = host_of("scores").score(EXAMPLE, "aa")
    assert reward == 0.5
    assert parts_of(reward) == {"right": 1.0, "short": -0.5}
    assert parts_of(1.0) == {}
    with pytest.raises(RewardError, match="part right returned nan; it must return a finite"):
        host_of("unsure").score(EXAMPLE, "a")


@pytest.mark.parametrize("also_async", [False, True])
def test_several_functions_are_parts_with_weights(also_async: bool) -> None:
    """One for each answer, one for all answers to a prompt, and one without an opinion on some."""
    weights = {"exact": 1.0, "rewards.py:none_or": 2, "rewards.py:shortest": 0.5}
    if also_async:
        weights["rewards.py:slowly"] = 0.25
    task = load_task("dataset", {"reward": weights})
    host = InlineHost(task, Limits(score_s=60.0, step_s=60.0))
    example = replace(EXAMPLE, answer="?", columns={"level": 1})
    found = list(host.score_all(example, ["?", "abc"]))
    more = [{"slowly": 0.25}, {"slowly": 0.75}] if also_async else [{}, {}]
    assert [parts_of(reward or 0.0) for reward in found] == [
        {"exact": 1.0, "shortest": 0.5, **more[0]},
        {"exact": 0.0, "none_or": 2.0, "shortest": 0.0, **more[1]},
    ]
    sums = [1.75, 2.75] if also_async else [1.5, 2.0]
    assert [float(reward or 0.0) for reward in found] == sums
    assert len(task.source_files()) == 1, "all are of one file, whose code is compared"
    assert [*code_of("dataset", {"reward": weights})] == ["rewards.py"]


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        ("yields", r"<generator .*: say `return` in place of `yield`"),
        ("forgets", r"<coroutine .*: make the function `async` and await this, .*asyncio\.gather"),
        ("misnamed", r"\{'a b': 1\.0\}: a part is named 'a b': use letters, digits"),
        ("empty", r"\{\}: a reward has 1 to 32 parts, not 0"),
        ("listed", r"\[1\.0\]; .*: a list is what f\(completions, \.\.\.\) returns"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_to_return(function: str, advice: str) -> None:
    with pytest.raises(RewardError, match=f"returned {advice}"):
        list(host_of(function).score_all(EXAMPLE, ["a", "b"]))


def test_a_cached_function_is_refused_by_the_row_that_it_cannot_hash(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "answer": ["a"]}])
    what = r"rows\.jsonl:1: .*lru_cache cannot hash `answer`, a list in this row; cache a function"
    with pytest.raises(DataError, match=what):
        DatasetTask(path=path, reward="rewards.py:cached").example(0, split="train")


@pytest.mark.parametrize(
    ("function", "answer", "line", "fault"),
    [
        ("judge", "a", "reward on rows.jsonl:1: 1 for 'a', 0 for ''", ""),
        ("later", 5, "reward on rows.jsonl:1: no opinion for '5', 1 for ''", ""),
        ("later", [5], "reward on rows.jsonl:1: no opinion for ''", ""),
        (
            "forgetful",
            "a",
            "reward on rows.jsonl:1: no opinion for 'a', no opinion for ''",
            "gives None for its own answer and for an empty one; a function without `return` does",
        ),
        ("failing", "a", "reward: DatasetTask.reward on rows.jsonl:1 raised", "the reward fails: "),
    ],
)
def test_an_example_call_says_what_a_right_answer_is_worth(
    function: str, answer: Any, line: str, fault: str
) -> None:
    example = replace(EXAMPLE, answer=answer)
    right = DatasetTask().right_completion(example)
    call = ExampleCall.of(host_of(function), example, right)
    assert call.line.startswith(line)
    assert fault in call.fault
    assert bool(call.fault) is bool(fault)


def test_a_row_without_a_named_column_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p"}])
    task = DatasetTask(path=path, reward="rewards.py:by_name")
    what = r"rows\.jsonl:1: .*needs the columns answer, level; it has prompt; .*answer = \"ITS"
    with pytest.raises(Exception, match=what):
        task.example(0, split="train")


def test_columns_are_known_by_the_datasets_own_names_too(tmp_path: Path) -> None:
    row = {"question": CHAT, "target": "a", "functions": [{"name": "f"}], "level": 1}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    columns = {"prompt": "question", "answer": "target", "tools": "functions"}
    options: dict[str, Any] = {"path": path, "heldout_path": path, "columns": columns}
    task = DatasetTask(**options, reward="rewards.py:own_names")
    seen: Any = task.reward(task.example(0, split="train"), "xy")
    assert seen == (2, "p", "a", "f", True)
    task = DatasetTask(**options, reward="rewards.py:own_lists")
    assert task.rewards(task.example(0, split="train"), ["x", "y"]) == [0.0, 0.0]
    module = sys.modules[load_function("x", "rewards.py:own_lists").__module__]
    assert module.seen == [([CHAT, CHAT], ["a", "a"])]
    write_jsonl(tmp_path / "rows.jsonl", [{**row, "target": None}])
    with pytest.raises(DataError, match="needs `target`, whose value is null in this row"):
        DatasetTask(**options, reward="rewards.py:own_names").example(0, split="train")
    with pytest.raises(DataError, match="takes prompts and completions, one of which it calls com"):
        DatasetTask(path=path, reward="rewards.py:mixed", columns=columns).example(0, split="train")


def test_the_digest_follows_the_functions_file(functions: Path) -> None:
    options = {"reward": "rewards.py:judge"}
    before = task_digests(load_task("dataset", options))
    functions.write_text(FUNCTIONS + "# another\n", encoding="utf-8")
    assert task_digests(load_task("dataset", options))["task_source"] != before["task_source"]
