"""Prompts of a run: the lease of each group id, a pure function of the run's seed.

The ledger's last granted id is therefore the dataset's cursor, and a group that is granted again,
by whichever process, has the same prompt as before.

A task's code makes them, which may take its time. So they are made ahead, one after the other in a
thread (`PromptsAhead`), and each in bounded time: code that never returns is left alone.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import random
import reprlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import msgspec

from echo.core.bounds import MAX_LEASE_BYTES
from echo.core.errors import DataError, EchoError
from echo.leases.scheduler import PromptPendingError
from echo.runtime.threads import Pool
from echo.tasks.environment import Environment
from echo.tasks.process_main import TaskCall, raised_at
from echo.tasks.rewards import InlineHost, Limits, RewardError
from echo.tasks.task import Example, Task
from echo.tasks.tokenization import TextCodec
from echo.wire.messages import Lease

MIN_KEPT = 4096
"""Prompts kept in memory, so that a result is checked without making its prompt again."""
NUM_AHEAD = 64
"""Prompts made beyond the last one that was asked for."""
CHECKED_PROMPTS = 32
"""Looked at before a run begins: those of a mixture, or of one table, may be of several kinds."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a group."""

    example: Example
    """With its answer."""
    lease: Lease
    """Of the first attempt."""


class PromptSource:
    """Prompts by group id; thread-safe."""

    def __init__(
        self,
        task: Task,
        text: TextCodec,
        *,
        seed: int,
        hides_answers: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        """Take the task, whose examples are visited once per epoch in a new order each time.

        The run's seed gives that order, and the seeds of the leases. With `hides_answers` leases
        have nothing but the prompt's ids. The task may take `timeout_s` for one example.
        """
        self._task = task
        self._text = text
        self._seed = seed
        self._num_examples = self._count("train")
        self._hides_answers = hides_answers
        self._host = InlineHost(task, Limits(score_s=timeout_s, step_s=timeout_s))
        # Of two epochs, for groups of both are under way where one ends and the next begins.
        self._order_of = functools.lru_cache(maxsize=2)(self._shuffled)

    def lease(self, group_id: int, attempt: int) -> Lease:
        """Return a group's lease, as `make`; each attempt has the same prompt and another seed."""
        return self.lease_of(self.make(group_id), attempt)

    def lease_of(self, prompt: Prompt, attempt: int) -> Lease:
        """Return the lease of an attempt at a prompt."""
        seed = self._seed_of(prompt.lease.group_id, attempt)
        return msgspec.structs.replace(prompt.lease, attempt=attempt, seed=seed)

    def close(self) -> None:
        """Let go of the threads in which the task is asked."""
        self._host.close()

    def check(self) -> None:
        """Raise as `make` for prompts that cannot be turned into tokens, as far as some show it."""
        for group_id in range(min(CHECKED_PROMPTS, self._num_examples or CHECKED_PROMPTS)):
            self.make(group_id)

    def _example(self, index: int, split: str) -> Example:
        call = TaskCall("example", index=index, split=split)
        where = f"{self._host.name}.{call}"
        if self._task.is_bounded:  # it needs no thread that could be left alone
            with _naming(where):
                example = self._task.example(index, split=split)
        else:
            try:
                example = self._host.perform(call)
            except RewardError as error:
                raise DataError(str(error)) from error
        if not isinstance(example, Example):
            raise DataError(
                f"{where} returned {reprlib.repr(example)}; it must return an "
                "echo.tasks.task.Example"
            )
        return example

    def _count(self, split: str) -> int | None:
        """Return how many examples a split has; None if there is no end."""
        where = f"{type(self._task).__name__}.num_examples(split={split!r})"
        with _naming(where):
            number = self._task.num_examples(split=split)
            number = None if number is None else operator.index(number)
        if number is not None and number < 0:
            raise DataError(f"{where} returned {number}; it must be at least 0, or None for no end")
        return number

    def heldout(self, num_prompts: int) -> list[tuple[Example, list[int]]]:
        """Return the held-out examples of an evaluation with their token ids, always the same."""
        num_examples = self._count("heldout")
        if num_examples is not None:
            num_prompts = min(num_prompts, num_examples)
        examples = [self._example(index, "heldout") for index in range(num_prompts)]
        return [(example, self._encode(example)) for example in examples]

    def _encode(self, example: Example) -> list[int]:
        with _naming("what its prompt passes through"):
            tools = self._task.tools(example) if isinstance(self._task, Environment) else ()
            return self._text.encode_prompt(example.prompt, tools=tools)

    def make(self, group_id: int) -> Prompt:
        """Return the prompt of a group; it blocks.

        Raises:
            DataError: naming the example, if there is none, or it cannot be turned into tokens.
        """
        example = whole = self._example(self._index(group_id), "train")
        try:
            prompt_ids = tuple(self._encode(example))
        except DataError as error:
            raise DataError(f"example {example.index}: {error}") from error
        if self._hides_answers:
            # A source may be a name that tells the answer, so that stays here, too.
            example = Example(index=example.index, split=example.split, prompt="")
        try:
            lease = Lease(
                group_id=group_id,
                attempt=0,
                seed=self._seed_of(group_id, 0),
                prompt_ids=prompt_ids,
                example=asdict(example),
            )
            num_bytes = len(msgspec.msgpack.encode(lease))
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"example {example.index} cannot be sent to a worker: {error}; its fields may "
                "hold text, lists, tables and numbers of 64 bits"
            ) from error
        if num_bytes > MAX_LEASE_BYTES:
            raise DataError(
                f"example {example.index}: {num_bytes} bytes with its prompt of {len(prompt_ids)} "
                f"tokens; a message to a worker holds {MAX_LEASE_BYTES}"
            )
        return Prompt(whole, lease)

    def _seed_of(self, group_id: int, attempt: int) -> int:
        return random.Random(f"{self._seed}/{group_id}/{attempt}").getrandbits(48)

    def _index(self, group_id: int) -> int:
        if not self._num_examples:
            return group_id  # there is no end, or nothing: then the task says so
        epoch, position = divmod(group_id, self._num_examples)
        return self._order_of(epoch)[position]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._num_examples or 0))
        random.Random(f"{self._seed}/epoch {epoch}").shuffle(order)
        return order


class PromptsAhead:
    """The prompts of a run as the role asks for them: those that are made."""

    def __init__(
        self, source: PromptSource, *, num_out: int, first: int = 0, again: Iterable[int] = ()
    ) -> None:
        """Begin with the groups `again`, which are out already, then with `first` and on.

        At least the prompts of `num_out` groups, which may be out at one time, are kept.
        """
        self._source = source
        self._num_kept = max(MIN_KEPT, 2 * num_out)
        self._made: OrderedDict[int, Prompt | DataError] = OrderedDict()
        self._wanted = dict.fromkeys(again)
        self._next, self._end = first, first + NUM_AHEAD
        self._has_work = asyncio.Event()
        self._has_work.set()

    def lease(self, group_id: int, attempt: int) -> Lease:
        """Return the lease of a group.

        Raises:
            DataError: as `PromptSource.make`.
            PromptPendingError: if its prompt is still to be made, which is done first now.
        """
        self._end = max(self._end, group_id + NUM_AHEAD)
        self._has_work.set()
        made = self._made.get(group_id)
        if made is None:
            self._wanted[group_id] = None
            raise PromptPendingError(f"the prompt of group {group_id} is being made")
        if isinstance(made, DataError):
            raise made
        return self._source.lease_of(made, attempt)

    def example(self, group_id: int) -> Example:
        """Return the example of a granted group with its answer, as `make`; from any thread."""
        made = self._made.get(group_id)
        if not isinstance(made, Prompt):
            made = self._source.make(group_id)
        return made.example

    async def make(self, pool: Pool) -> bool:
        """Wait until a prompt is to be made, and make it; return whether it was asked for."""
        while not self._wanted and self._next >= self._end:
            self._has_work.clear()
            await self._has_work.wait()
        group_id = next(iter(self._wanted), self._next)
        self._next += group_id == self._next
        if group_id not in self._made:
            try:
                self._made[group_id] = await pool.run(self._source.make, group_id)
            except DataError as error:
                self._made[group_id] = error
            if len(self._made) > self._num_kept:
                self._made.popitem(last=False)
        is_wanted = group_id in self._wanted
        self._wanted.pop(group_id, None)
        return is_wanted


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn whatever a task's code or a chat template raises into an error that says what it was."""
    try:
        yield
    except EchoError:
        raise
    except Exception as error:
        text = f"{what} raised {type(error).__name__}: {error}{raised_at(error)}"
        raise DataError(text) from error
