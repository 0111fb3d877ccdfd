"""Prompts of a run: the lease of each group id."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from echo.core.errors import DataError
from echo.leases.scheduler import PromptPendingError
from echo.runtime.learner import prompts as prompts_module
from echo.runtime.learner.prompts import PromptsAhead, PromptSource
from echo.runtime.threads import Pool
from echo.tasks.dataset import DatasetTask
from echo.tasks.task import Example, Task, is_heldout
from echo.tasks.tokenization import TextCodec


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
    return PromptSource(task or Counting(num_train), Numbers(None, [], {}), seed=seed)


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


def test_an_endless_task_is_walked_in_order() -> None:
    assert [make().lease(i, 0).example["index"] for i in (0, 1, 10**9)] == [0, 1, 10**9]


# --- made ahead -----------------------------------------------------------------------------------


class Here(Pool):
    """Makes each call in the loop."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(function(*arguments))
        except DataError as error:
            future.set_exception(error)
        return future


async def make_all(prompts: PromptsAhead) -> list[bool]:
    """Make what is to be made; return which of it somebody had asked for."""
    found = []
    with suppress(TimeoutError):
        while True:
            found.append(await asyncio.wait_for(prompts.make(Here()), 0.01))
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


def test_a_prompt_that_cannot_be_made_says_so_whenever_it_is_asked_for() -> None:
    class Gone(Counting):
        def example(self, index: int, *, split: str) -> Example:
            raise KeyError(index)

    async def main() -> None:
        prompts = PromptsAhead(make(task=Gone()), num_out=4)
        await make_all(prompts)
        for ask in (lambda: prompts.lease(0, 0), lambda: prompts.example(0)):
            with pytest.raises(DataError, match=r"Gone\.example\(0, split='train'\) raised KeyErr"):
                ask()

    asyncio.run(main())


def test_an_example_that_never_comes_is_left_alone() -> None:
    hold = threading.Event()

    class Hanging(Counting):
        def example(self, index: int, *, split: str) -> Example:
            if index == 3:
                hold.wait()
            return super().example(index, split=split)

    source = PromptSource(Hanging(), Numbers(None, [], {}), seed=0, timeout_s=0.05)
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


ENDLESS: dict[str, object] = {}
ENDLESS["itself"] = ENDLESS


@pytest.mark.parametrize(
    "info", [{"id": 1 << 64}, {"text": "\ud800"}, {"lock": threading.Lock()}, ENDLESS]
)
def test_an_example_that_no_message_holds_is_named(info: dict[str, object]) -> None:
    class Large(Counting):
        def example(self, index: int, *, split: str) -> Example:
            return Example(index=index, split=split, prompt=f"x {index}", info=info)

    with pytest.raises(DataError, match="example 3 cannot be sent to a worker"):
        make(task=Large()).lease(3, 0)


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


def test_prompts_that_cannot_be_had_are_found_before_a_run_begins() -> None:
    seen: list[int] = []

    class NoSeven(Numbers):
        def encode_prompt(self, prompt: object, *, tools: object = ()) -> list[int]:
            _, number = super().encode_prompt(prompt)
            if number == 7:
                raise DataError("no chat template")
            seen.append(number)
            return [1]

    text = NoSeven(None, [], {})
    with pytest.raises(DataError, match="example 7: no chat template"):
        PromptSource(Counting(), text, seed=0).check()
    seen.clear()
    PromptSource(Counting(5), text, seed=0).check()
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_what_a_tasks_code_raises_is_told_of_its_example() -> None:
    class Gappy(Counting):
        def example(self, index: int, *, split: str) -> Example:
            prompts = {0: "one 1", 1: "no number"}
            return Example(index=index, split=split, prompt=prompts[index])

    source = make(task=Gappy(num_heldout=3))
    assert source.lease(0, 0).prompt_ids == (1, 1)
    what = r"example 1: what its prompt passes through raised ValueError: .*test_prompts\.py:\d+"
    with pytest.raises(DataError, match=what):
        source.lease(1, 0)
    what = r"Gappy\.example\(2, split='train'\) raised KeyError: 2 \(test_prompts\.py:\d+\)"
    with pytest.raises(DataError, match=what):
        source.lease(2, 0)
    with pytest.raises(DataError, match="split='heldout'"):
        source.heldout(3)


@pytest.mark.parametrize("found", [None, {"prompt": "x 1"}, "x " + "1" * 10**6])
def test_what_is_no_example_is_told_of_by_its_number(found: object) -> None:
    class Careless(Counting):
        def example(self, index: int, *, split: str) -> Example:
            return found if index == 40 else super().example(index, split=split)  # type: ignore[return-value]

    source = make(task=Careless())
    source.check()
    what = r"Careless\.example\(40, split='train'\) returned .{1,100}; it must return an echo"
    with pytest.raises(DataError, match=what):
        source.lease(40, 0)


@pytest.mark.parametrize(
    ("number", "what"), [(-1, "returned -1; it must be at least 0"), (2.5, "raised TypeError")]
)
def test_a_number_of_examples_that_is_none_is_refused(number: object, what: str) -> None:
    for task in (Counting(number), Counting(num_heldout=number)):  # type: ignore[arg-type]
        with pytest.raises(DataError, match=rf"Counting\.num_examples\(split='\w+'\) {what}"):
            make(task=task).heldout(8)


def test_a_task_without_any_row_says_so_itself(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    rows = (json.dumps({"prompt": str(number), "answer": ""}) for number in itertools.count())
    path.write_text(next(row for row in rows if is_heldout(row)))
    with pytest.raises(DataError, match="no train row; a file this small cannot be split by hash"):
        make(task=DatasetTask(path=str(path), reward="exact")).check()
