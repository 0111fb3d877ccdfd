"""Prompts of a run: the lease of each group id."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import logging
import random
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo.core.errors import DataError, StorageError
from echo.engine.model import build_tokenizer
from echo.leases.run import PromptPendingError
from echo.runtime.learner.batches import prompts as prompts_module
from echo.runtime.learner.batches.prompts import (
    PromptsAhead,
    PromptSource,
    note_origin,
    prompt_time,
)
from echo.sim.clock import InlineThreads
from echo.tasks.dataset import DatasetTask
from echo.tasks.task import Example, Task, is_heldout
from echo.tasks.tokenization import TextCodec

PLAIN: Any = SimpleNamespace(chat_template=None)
"""A tokenizer without a template."""


class Counting(Task):
    def __init__(self, num_train: int | None = None, *, num_heldout: int | None = None) -> None:
        self.numbers = {"train": num_train, "heldout": num_heldout}

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt=f"{split} {index}")

    def reward(self, example: Example, completion: str) -> float:
        return 0.0

    def num_examples(self, *, split: str) -> int | None:
        return self.numbers[split]


class Numbers(TextCodec):
    """Encodes the number in a prompt."""

    def encode_prompt(self, prompt: object, *, tools: object = ()) -> list[int]:
        return [1, int(str(prompt).split()[-1])]


def make(num_train: int | None = None, *, seed: int = 0, task: Task | None = None) -> PromptSource:
    return PromptSource(task or Counting(num_train), Numbers(PLAIN, [], {}), seed=seed)


def test_a_group_has_the_same_prompt_in_every_process_and_attempt() -> None:
    source = make(50)
    lease, again = source.lease(17, 0), source.lease(17, 3)
    assert lease == make(50).lease(17, 0)
    assert (again.prompt_ids, again.example) == (lease.prompt_ids, lease.example)
    assert (again.attempt, lease.attempt) == (3, 0)
    assert again.seed != lease.seed
    assert source.lease(17, 0) == lease


def test_an_epoch_visits_every_example_once_in_an_order_of_its_own() -> None:
    source = make(20)
    epochs = [[source.lease(e * 20 + i, 0).example["index"] for i in range(20)] for e in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
    assert epochs[0] != epochs[1]
    assert [make(20, seed=1).lease(i, 0).example["index"] for i in range(20)] != epochs[0]
    # Asked for out of order, as when an old lease is granted again.
    assert source.lease(3, 1).example["index"] == epochs[0][3]
    # A task without end is walked in order.
    assert [make().lease(i, 0).example["index"] for i in (0, 1, 10**9)] == [0, 1, 10**9]


# --- made ahead -----------------------------------------------------------------------------------


async def make_all(prompts: PromptsAhead) -> list[bool]:
    """Make what is to be made; return which of it somebody had asked for."""
    found, pool = [], InlineThreads().pool("prompts")
    with suppress(TimeoutError):
        while True:
            found.append(await asyncio.wait_for(prompts.make(pool), 0.01))
    return found


def test_prompts_are_made_ahead_and_the_missing_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "NUM_AHEAD", 3)

    async def main() -> None:
        source = make()
        prompts = PromptsAhead(source, num_out=4, first=10, again=[2])
        assert await make_all(prompts) == [True, False, False, False]
        assert prompts.lease(2, 1) == source.lease(2, 1)
        assert [prompts.lease(n, 0).group_id for n in (10, 11, 12)] == [10, 11, 12]
        for group_id in (20, 5):
            with pytest.raises(PromptPendingError, match=f"of group {group_id} is being made"):
                prompts.lease(group_id, 0)
        assert await make_all(prompts) == [True, True, *[False] * 10]
        assert prompts.lease(20, 0) == source.lease(20, 0)
        assert prompts.example(22) == source.make(22).example
        assert await make_all(prompts) == []

    asyncio.run(main())


def test_what_is_kept_is_bounded_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "MIN_KEPT", 50)

    async def main() -> None:
        prompts = PromptsAhead(make(), num_out=4)
        await make_all(prompts)
        assert len(prompts._made) == 50
        with pytest.raises(PromptPendingError):
            prompts.lease(0, 0)
        await make_all(prompts)
        assert prompts.lease(0, 0) == make().lease(0, 0)

    asyncio.run(main())


def test_an_example_that_never_comes_is_left_alone() -> None:
    hold = threading.Event()

    class Hanging(Counting):
        def example(self, index: int, *, split: str) -> Example:
            if index == 3:
                hold.wait()
            return super().example(index, split=split)

    source = PromptSource(Hanging(), Numbers(PLAIN, [], {}), seed=0, timeout_s=0.05)
    with pytest.raises(
        DataError, match=r"example\(3, .* within 0\.05 s; raise task\.step_timeout_s"
    ):
        source.lease(3, 0)
    assert source.lease(4, 0).prompt_ids == (1, 4)
    hold.set()
    source.close()


@pytest.mark.parametrize(("num_heldout", "expected"), [(None, 8), (3, 3), (0, 0), (100, 8)])
def test_no_heldout_prompt_is_used_twice(num_heldout: int | None, expected: int) -> None:
    found = make(task=Counting(num_heldout=num_heldout)).heldout(8)
    assert [example.prompt for example, _ in found] == [f"heldout {i}" for i in range(expected)]
    assert [ids for _, ids in found] == [[1, i] for i in range(expected)]


def test_an_example_is_the_same_for_whichever_thread_asks_while_an_epoch_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where groups are scored at the learner while others are granted."""
    source, shuffle = make(task=Counting(50)), random.Random.shuffle

    def examples() -> list[int]:
        return [source.make(group).example.index for group in range(50)]

    expected, found = examples(), list[int]()

    def interrupted(self: random.Random, order: list[Any]) -> None:
        monkeypatch.undo()
        found.extend(examples())
        shuffle(self, order)
        found.extend(examples())

    monkeypatch.setattr(random.Random, "shuffle", interrupted)
    source.make(50)
    assert found == 2 * expected


def test_the_first_prompts_are_looked_at_before_a_run_begins() -> None:
    seen: list[int] = []

    class Noted(Counting):
        def example(self, index: int, *, split: str) -> Example:
            seen.append(index)
            return super().example(index, split=split)

    source = make(task=Noted(5))
    source.check()
    assert sorted(set(seen)) == [0, 1, 2, 3, 4]
    assert source.longest == max(len(source.lease(n, 0).prompt_ids) for n in range(5)) > 0
    seen.clear()
    make(task=Noted()).check()
    assert seen[: prompts_module.CHECKED_PROMPTS] == [*range(prompts_module.CHECKED_PROMPTS)]


class Told(Task):
    """Examples as they are given."""

    def __init__(self, prompts: Sequence[Any], tools: Sequence[Any] = ()) -> None:
        self.prompts = iter(prompts)
        self.own_tools = list(tools)

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt=next(self.prompts))

    def reward(self, example: Example, completion: str) -> float:
        return 0.0

    def num_examples(self, *, split: str) -> int:
        return 1

    def tools(self, example: Example) -> list[dict[str, Any]]:
        return self.own_tools


USER = [{"role": "user", "content": "1+1"}]
IGNORES_TOOLS = "the chat template does not mention the tools: the policy does not see them"


@pytest.mark.parametrize(
    ("prompts", "tools", "template", "told"),
    [
        ([USER, USER], [], "{{ messages[0].content }}", []),
        (["1", "1"], [], None, []),
        (["1", "1"], [], "{{ messages[0].content }}", []),
        (["1", "2"], [], None, ["train example 0: asked for again, the task makes another"]),
        (["1", "1"], [{"name": "add"}], None, [IGNORES_TOOLS]),
        ([USER, USER], [{"name": "add"}], "{{ tools }}{{ messages[0].content }}", []),
        (
            [[{"role": "user", "content": "1<eos>"}]] * 2,
            [],
            "{{ messages[0].content }}",
            ["train example 0: its prompt holds '<eos>', a control token of the tokenizer"],
        ),
        (
            ["1", "1"],
            [],
            "{{ range(90000) | random }}{{ messages[0].content }}",
            ["train example 0: asked for again, the chat template makes another prompt"],
        ),
    ],
)
def test_what_is_not_as_expected_of_the_first_prompts_is_told(
    caplog: pytest.LogCaptureFixture,
    prompts: Sequence[Any],
    tools: Sequence[Any],
    template: str | None,
    told: Sequence[str],
) -> None:
    random.seed(0)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    PromptSource(Told(prompts, tools), TextCodec(tokenizer, [], {}), seed=0).check()
    assert len(caplog.messages) == len(told)
    assert all(part in line for part, line in zip(told, caplog.messages, strict=True))


def test_what_many_prompts_have_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Counting):
        def example(self, index: int, *, split: str) -> Example:
            return Example(index=index, split=split, prompt=f"{index}<eos>")

    tokenizer = build_tokenizer()
    tokenizer.chat_template = "1"
    PromptSource(Silent(9), TextCodec(tokenizer, [], {}), seed=0).check()
    [control, content] = [line for line in caplog.messages if "more of the first 9" in line]
    assert "its prompt holds '<eos>'" in control
    assert "leaves out the content of message 1 (user)" in content
    assert "(so it is with 8 more of the first 9 prompts)" in content


def test_rows_that_are_longest_through_the_template_or_tools_are_found(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ '1' * 9 }}{{ tools | tojson }}{{ messages[0].content }}"
    path = tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "1" * 20, "answer": "?"},
        {"prompt": "1", "answer": "?", "tools": [{"name": "1" * 30}]},
    ]

    def examine(longest: int, **options: Any) -> dict[str, int | None]:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = DatasetTask(path=str(path), heldout_path=str(path), **options)
        source = PromptSource(task, TextCodec(tokenizer, [], {}), seed=0)
        source.examine(longest, "shorten it")
        sizes = source.sizes()
        indices = [source.make(group_id).example.index for group_id in range(2)]
        assert sorted(indices) == [*range(sizes["train"] or 0), 0][:2], "each row once an epoch"
        return sizes

    assert examine(60) == {"train": 2, "heldout": 2}
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: its prompt has 54 tokens, and at most 40 fit: shorten it"
    ):
        examine(40)
    assert examine(40, skip_bad=True) == {"train": 1, "heldout": 1}
    rows[0]["prompt"] = "<|im_start|>user"
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the text begins with '<\|im_start\|>'"):
        examine(60)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the text begins with '<\|im_start\|>'"):
        examine(1 << 20)


def test_a_resume_reads_the_time_of_the_beginning_and_tells_what_was_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("echo.test")
    began_at = datetime.datetime(2026, 11, 28, 23, 59, tzinfo=datetime.UTC)
    assert prompt_time(tmp_path) > began_at - datetime.timedelta(days=3650)
    note_origin(tmp_path, began_at, chat_template="template", code="code", log=log)
    assert prompt_time(tmp_path) == began_at
    note_origin(tmp_path, began_at, chat_template="template", code="code", log=log)
    assert caplog.messages == []
    note_origin(tmp_path, began_at, chat_template="another", code="code", log=log)
    assert "the chat template is another than before this resume" in caplog.messages.pop()
    note_origin(tmp_path, began_at, chat_template="another", code="other", log=log)
    assert re.match("the task's code, or a file that it imports, is another", caplog.messages[-1])
    (tmp_path / "prompts.json").write_text("{")
    with pytest.raises(StorageError, match=r"prompts\.json: not readable: .* or delete it"):
        prompt_time(tmp_path)


class Odd(Counting):
    """Example 40 is whatever this returns or raises."""

    def __init__(self, make_odd: Callable[[], Any]) -> None:
        super().__init__()
        self.make_odd = make_odd

    def example(self, index: int, *, split: str) -> Example:
        return self.make_odd() if index == 40 else super().example(index, split=split)


def odd_example(prompt: str = "x 40", **info: object) -> Example:
    return Example(index=40, split="train", prompt=prompt, info=info)


ENDLESS: dict[str, object] = {}
ENDLESS["itself"] = ENDLESS
CANNOT_BE_SENT: list[dict[str, Any]] = [
    {"id": 1 << 64},
    {"text": "\ud800"},
    {"lock": threading.Lock()},
    ENDLESS,
]
NO_EXAMPLE = r"Odd\.example\(40, split='train'\) returned .{1,100}; it must return an echo"


@pytest.mark.parametrize(
    ("make_odd", "what"),
    [
        (lambda: None, NO_EXAMPLE),
        (lambda: {"prompt": "x 1"}, NO_EXAMPLE),
        (lambda: "x " + "1" * 10**6, NO_EXAMPLE),
        (
            lambda: {1: ""}[2],
            r"Odd\.example\(40, split='train'\) raised KeyError: 2 \(test_prompts.py:",
        ),
        (
            lambda: odd_example("no number"),
            r"example 40: what its prompt passes through raised ValueError: .*test_prompts\.py:\d",
        ),
        *(
            (partial(odd_example, **info), "example 40 cannot be sent to a worker")
            for info in CANNOT_BE_SENT
        ),
    ],
)
def test_what_makes_no_prompt_is_told_of_its_example_whenever_it_is_asked_for(
    make_odd: Callable[[], Any], what: str
) -> None:
    source = make(task=Odd(make_odd))
    source.check()

    async def main() -> None:
        prompts = PromptsAhead(source, num_out=4, first=40)
        await make_all(prompts)
        for ask in (lambda: prompts.lease(40, 0), lambda: prompts.example(40)):
            with pytest.raises(DataError, match=what):
                ask()
        assert prompts.lease(41, 0).prompt_ids == (1, 41)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("number", "what"), [(-1, "returned -1; it must be at least 0"), (2.5, "raised TypeError")]
)
def test_a_number_of_examples_that_is_none_is_refused(number: object, what: str) -> None:
    for task in (Counting(number), Counting(num_heldout=number)):  # type: ignore[arg-type]
        with pytest.raises(DataError, match=rf"Counting\.num_examples\(split='\w+'\) {what}"):
            make(task=task).heldout(8)


def test_a_task_without_any_row_says_so_itself(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    prompt = next(text for text in map(str, itertools.count()) if is_heldout(text))
    path.write_text(json.dumps({"prompt": prompt, "answer": "?"}))
    with pytest.raises(DataError, match="no train row; a file this small cannot be split by hash"):
        make(task=DatasetTask(path=str(path), reward="exact")).check()
