"""Prompts of a run: the lease of each group id, a pure function of the run's seed.

The ledger's last granted id is therefore the dataset's cursor, and a group that is granted again,
by whichever process, has the same prompt as before.
"""

from __future__ import annotations

import functools
import operator
import random
import reprlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import msgspec

from echo.core.bounds import MAX_LEASE_BYTES
from echo.core.errors import DataError, EchoError
from echo.tasks.environment import Environment
from echo.tasks.process_main import raised_at
from echo.tasks.task import Example, Task
from echo.tasks.tokenization import TextCodec
from echo.wire.messages import Lease

CACHED_LEASES = 4096
"""Leases kept in memory, so that a result is checked without tokenising its prompt again."""
CHECKED_PROMPTS = 32
"""Looked at before a run begins: those of a mixture, or of one table, may be of several kinds."""


class PromptSource:
    """Leases by group id."""

    def __init__(
        self, task: Task, text: TextCodec, *, seed: int, hides_answers: bool = False
    ) -> None:
        """Take the task, whose examples are visited once per epoch in a new order each time.

        Args:
            task: where examples come from.
            text: turns their prompts into tokens.
            seed: the run's seed: order of the examples and seeds of the leases.
            hides_answers: put nothing into leases but the prompt's ids.
        """
        self._task = task
        self._text = text
        self._seed = seed
        self._num_examples = self._count("train")
        self._hides_answers = hides_answers
        self._cache: OrderedDict[int, Lease] = OrderedDict()
        # Of two epochs, for groups of both are under way where one ends and the next begins.
        self._order_of = functools.lru_cache(maxsize=2)(self._shuffled)

    def lease(self, group_id: int, attempt: int) -> Lease:
        """Return the lease of a group; every attempt has the same prompt and another seed.

        Raises:
            DataError: naming the example, if its prompt cannot be turned into tokens.
        """
        lease = self._cache.get(group_id)
        if lease is None:
            lease = self._make(group_id, attempt)
            self._cache[group_id] = lease
            if len(self._cache) > CACHED_LEASES:
                self._cache.popitem(last=False)
        if lease.attempt != attempt:
            lease = Lease(
                group_id=group_id,
                attempt=attempt,
                seed=self._seed_of(group_id, attempt),
                prompt_ids=lease.prompt_ids,
                example=lease.example,
            )
        return lease

    def check(self) -> None:
        """Refuse prompts that cannot be turned into tokens, as far as the first ones show it.

        Raises:
            DataError: as `lease`.
        """
        for group_id in range(min(CHECKED_PROMPTS, self._num_examples or CHECKED_PROMPTS)):
            self.lease(group_id, 0)

    def example(self, group_id: int) -> Example:
        """Return the example of a group, with its answer.

        Raises:
            DataError: if the task has none, or raises whatever else.
        """
        return self._example(self._index(group_id), "train")

    def _example(self, index: int, split: str) -> Example:
        where = f"{type(self._task).__name__}.example({index}, split={split!r})"
        with _naming(where):
            example = self._task.example(index, split=split)
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

    def _make(self, group_id: int, attempt: int) -> Lease:
        example = self.example(group_id)
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
                attempt=attempt,
                seed=self._seed_of(group_id, attempt),
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
        return lease

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
