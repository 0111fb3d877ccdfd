"""Prompts of a run: each group id has one prompt, determined by the run's seed.

New groups get ascending ids. So the last group id in the ledger is also the run's position in the
dataset. A group that is granted again has the same prompt as before, also after a resume. A chat
template that writes the date uses the time at which the run began (`prompt_time`). So the prompt is
the same after midnight.

The task's code makes prompts and may be slow. So a thread makes prompts one by one before they are
needed (`PromptsAhead`). A call that exceeds its time limit is abandoned.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import json
import logging
import operator
import random
import reprlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from echo.core.bounds import MAX_LEASE_BYTES
from echo.core.errors import DataError, EchoError, StorageError
from echo.core.units import one_line
from echo.leases.run import PromptPendingError
from echo.records.files import write_file
from echo.runtime.threads import Pool
from echo.tasks.environment import Environment
from echo.tasks.processes.main import TaskCall, raised_at
from echo.tasks.rewards import ExampleCall, InlineHost, Limits, RewardError
from echo.tasks.task import SPLITS, Example, Task
from echo.tasks.tokenization import UNUSABLE, TextCodec, unmarked
from echo.wire.messages import Lease

MIN_KEPT = 4096
"""At least this many prompts are kept in memory. When a worker delivers a group, the group's prompt
is needed to check the group.
"""
NUM_AHEAD = 64
"""Number of prompts that are made ahead of the last requested prompt, so that a grant rarely waits
for the task's code."""
CHECKED_PROMPTS = 32
"""Number of prompts checked before a run begins, enough to cover a mixture of tasks."""
MADE_TWICE = 4
"""Number of checked prompts that are made twice, to verify that a task repeats them exactly."""
MESSAGE_TOKENS = 64
"""Largest number of tokens that a chat template is assumed to write around one message."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A group's example, and the lease that brings its prompt to a worker."""

    example: Example
    """The example, with its answer."""
    lease: Lease
    """The lease of the group's first attempt. Later attempts have other seeds."""


MAX_SHOWN = 1500
"""Largest number of characters of a prompt in a preview."""


class PromptSource:
    """Makes the prompt of any group id from the task; thread-safe."""

    def __init__(
        self,
        task: Task,
        text: TextCodec,
        *,
        seed: int,
        hides_answers: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        """Use each of the task's examples once per epoch.

        Args:
            task: the task.
            text: converts prompts to token ids.
            seed: the run's seed, which determines each epoch's order and the seeds of the leases.
            hides_answers: whether leases leave out the example's text, answer and further data. A
                lease then has only the prompt's token ids, and the example's index and split.
            timeout_s: longest time in which the task must make an example, seconds.
        """
        self._task = task
        self._text = text
        self._seed = seed
        self._num_examples = self._count("train")
        self._hides_answers = hides_answers
        self.longest = 0
        """Number of tokens of the longest prompt that `examine` or `check` has encoded; 0 before
        the first call.
        """
        self._host = InlineHost(task, Limits(score_s=timeout_s, step_s=timeout_s))
        # Two epochs: at the end of one, groups of both are running.
        self._order_of = functools.lru_cache(maxsize=2)(self._shuffled)

    def lease(self, group_id: int, attempt: int) -> Lease:
        """Return the lease of an attempt at a group.

        All attempts have the same prompt, but different seeds. The method calls `make`, so it
        blocks and raises as `make` does.
        """
        return self.lease_of(self.make(group_id), attempt)

    def lease_of(self, prompt: Prompt, attempt: int) -> Lease:
        """Return the lease of an attempt at the group of `prompt`."""
        seed = self._seed_of(prompt.lease.group_id, attempt)
        return msgspec.structs.replace(prompt.lease, attempt=attempt, seed=seed)

    def close(self) -> None:
        """End the threads that run the task's code."""
        self._host.close()

    def check(self) -> None:
        """Make the first CHECKED_PROMPTS prompts, and log their unusual properties.

        Raises:
            DataError: if `make` raises it.
        """
        number = min(CHECKED_PROMPTS, self._num_examples or CHECKED_PROMPTS)
        made = [self.make(group_id) for group_id in range(number)]
        self.longest = max([self.longest, *(len(prompt.lease.prompt_ids) for prompt in made)])
        for line in dict.fromkeys(self._notices(made)):
            _log.warning("%s", line)
        has_template = self._text.tokenizer.chat_template is not None
        if has_template and any(isinstance(prompt.example.prompt, str) for prompt in made):
            _log.info(
                "the prompts are text: each becomes one user message of the chat template; "
                'model.chat_template = "none" sends text as it stands'
            )

    def examine(self, max_prompt_tokens: int, remedy: str) -> None:
        """Check every row of the dataset; a prompt may have at most `max_prompt_tokens` tokens.

        The task decides whether a faulty row is refused or left out. The message about a row that
        is too long ends with `remedy`. To save time, a row is tokenized only if its number of bytes
        allows more than `max_prompt_tokens` tokens. Of all other rows, only the largest is
        tokenized.

        Raises:
            DataError: if a row is refused. The message names the row.
        """
        largest: tuple[int, Example | None] = (0, None)

        def fault_of(example: Example) -> str:
            nonlocal largest
            try:
                if isinstance(example.prompt, str):
                    self._text.check_text(example.prompt)
                most = self._most_tokens(example)
                if most <= max_prompt_tokens:
                    if most > largest[0]:
                        largest = most, example
                    return ""
                length = len(self._encode(example))
            except DataError as error:
                return str(error)
            if length <= max_prompt_tokens:
                self.longest = max(self.longest, length)
                return ""
            return f"its prompt has {length} tokens, and at most {max_prompt_tokens} fit: {remedy}"

        self._task.examine(fault_of)
        if largest[1] is not None:
            with suppress(DataError):  # raised again when the run makes this prompt
                self.longest = max(self.longest, len(self._encode(largest[1])))
        self._num_examples = self._count("train")

    def sizes(self) -> dict[str, int | None]:
        """Return the number of examples of each split; None for an endless split."""
        return {split: self._count(split) for split in SPLITS}

    def preview(self, num_groups: int) -> list[str]:
        """Return lines for a terminal that show a run's data and its first prompt.

        The lines show the sizes of the splits, the number of passes over the data, the first prompt
        as the model gets it, and rewards of two sample answers.

        Raises:
            DataError: if `make` raises it for the first prompt.
        """
        first = self.make(0)
        sizes = self.sizes()
        counts = (
            f"{'endless' if count is None else count} {words}"
            for count, words in ((sizes["train"], "to train on"), (sizes["heldout"], "held out"))
        )
        lines = [f"examples: {', '.join(counts)}"]
        if sizes["train"]:
            passes = num_groups / sizes["train"]
            lines.append(
                f"prompts: the run takes {num_groups}, {passes:.3g} times each example, and more "
                "where a group does not count"
            )
        ids = first.lease.prompt_ids
        lines.append(f"first prompt: {first.example}, {len(ids)} tokens:")
        text = str(self._text.tokenizer.decode(list(ids), skip_special_tokens=False))
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
        lines += [f"    {one_line(part)}" for part in shown.splitlines()]
        return [*lines, *self._reward_lines(first.example)]

    def _reward_lines(self, example: Example) -> Iterator[str]:
        """Yield lines with the rewards of sample answers. For an environment, yield no lines."""
        if isinstance(self._task, Environment):
            return
        call = ExampleCall.of(self._host, example, self._task.right_completion(example))
        yield call.line
        if call.fault:
            yield f"notice: {call.fault}"

    def _notices(self, made: Sequence[Prompt]) -> Iterator[str]:
        """Yield one line for each kind of unusual property, with an example."""
        for prompt in made[:MADE_TWICE]:
            again = self.make(prompt.lease.group_id)
            if (
                again.lease.prompt_ids == prompt.lease.prompt_ids
                and again.example == prompt.example
            ):
                continue
            who = "chat template" if again.example == prompt.example else "task"
            yield (
                f"{prompt.example}: asked for again, the {who} makes another prompt; it must "
                "make the same prompt each time, or running groups are refused after a resume"
            )
            break
        found: dict[str, list[Example]] = {}
        for prompt in made:
            for what in self._oddities(prompt.example):
                found.setdefault(what, []).append(prompt.example)
        for what, examples in found.items():
            more = f" (so it is with {len(examples) - 1} more of the first {len(made)} prompts)"
            yield f"{examples[0]}: {what}{more if len(examples) > 1 else ''}"

    def _oddities(self, example: Example) -> Iterator[str]:
        """Yield a line for each unusual property of one example's prompt."""
        has_template = self._text.tokenizer.chat_template is not None
        if isinstance(example.prompt, str):
            texts = [example.prompt] if has_template else []
        else:
            texts = [str(part) for part in example.prompt if part["role"] != "assistant"]
        if control := next(filter(None, map(self._text.control_token_in, texts)), ""):
            yield (
                f"its prompt holds {control!r}, a control token of the tokenizer; only the chat "
                "template writes those: in a prompt they are encoded as text"
            )
        tools = self._task.tools(example)
        if tools and not self._text.shows_tools(tools, example.prompt):
            yield (
                "the chat template does not mention the tools: the policy does not see them; "
                "describe them in a message, or set model.chat_template to one that does"
            )
        yield from self._text.oddities(example.prompt, tools)

    def _most_tokens(self, example: Example) -> int:
        """Return an upper bound on the number of tokens of a prompt, computed from its bytes."""
        num_bytes = len(msgspec.json.encode([example.prompt, self._task.tools(example)]))
        num_messages = 1 if isinstance(example.prompt, str) else len(example.prompt)
        return num_bytes + MESSAGE_TOKENS * num_messages + self._template_bytes

    @functools.cached_property
    def _template_bytes(self) -> int:
        if self._text.tokenizer.chat_template is None:
            return 0
        try:
            text = unmarked(self._text.render([{"role": "user", "content": "-"}]))
        except (DataError, *UNUSABLE):  # the template needs other messages
            return 1 << 31  # no bound is known, so every prompt is encoded
        return len(text.encode())

    def _example(self, index: int, split: str) -> Example:
        call = TaskCall("example", index=index, split=split)
        where = f"{self._host.name}.{call}"
        if self._task.is_bounded:  # a bounded call needs no thread of its own
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
        where = f"{type(self._task).__name__}.num_examples(split={split!r})"
        with _naming(where):
            number = self._task.num_examples(split=split)
            number = None if number is None else operator.index(number)
        if number is not None and number < 0:
            raise DataError(f"{where} returned {number}; it must be at least 0, or None for no end")
        return number

    def heldout(self, num_prompts: int) -> list[tuple[Example, list[int]]]:
        """Return the first `num_prompts` held-out examples, each with its prompt's token ids."""
        num_examples = self._count("heldout")
        if num_examples is not None:
            num_prompts = min(num_prompts, num_examples)
        examples = [self._example(index, "heldout") for index in range(num_prompts)]
        return [(example, self._encode_named(example)) for example in examples]

    def _encode(self, example: Example) -> list[int]:
        with _naming("what its prompt passes through"):
            return self._text.encode_prompt(example.prompt, tools=self._task.tools(example))

    def _encode_named(self, example: Example) -> list[int]:
        try:
            return self._encode(example)
        except DataError as error:
            raise DataError(f"{example}: {error}") from error

    def make(self, group_id: int) -> Prompt:
        """Make and return the prompt of a group. The call blocks while the task's code runs.

        Raises:
            DataError: if the example is missing, or cannot be tokenized or sent to a worker. The
                message names the example.
        """
        example = self._example(self._index(group_id), "train")
        prompt_ids = self._encode_named(example)
        return self.prompt_of(example, prompt_ids, group_id, seed=self._seed_of(group_id, 0))

    def prompt_of(
        self, example: Example, prompt_ids: Sequence[int], group_id: int, *, seed: int
    ) -> Prompt:
        """Return an example's prompt, with a lease of this group id and seed.

        Raises:
            DataError: if the example cannot be sent to a worker. The message names the example.
        """
        whole = example
        if self._hides_answers:
            # The example's source is left out, too: its name may give the answer away.
            example = Example(index=example.index, split=example.split, prompt="")
        try:
            lease = Lease(
                group_id=group_id,
                attempt=0,
                seed=seed,
                prompt_ids=tuple(prompt_ids),
                example=asdict(example),
            )
            num_bytes = len(msgspec.msgpack.encode(lease))
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"{whole} cannot be sent to a worker: {error}; its fields may "
                "hold text, lists, tables and numbers of 64 bits"
            ) from error
        if num_bytes > MAX_LEASE_BYTES:
            raise DataError(
                f"{whole}: {num_bytes} bytes with its prompt of {len(prompt_ids)} "
                f"tokens; a message to a worker holds {MAX_LEASE_BYTES}"
            )
        return Prompt(whole, lease)

    def _seed_of(self, group_id: int, attempt: int) -> int:
        return random.Random(f"{self._seed}/{group_id}/{attempt}").getrandbits(48)

    def _index(self, group_id: int) -> int:
        if not self._num_examples:
            return group_id  # no end is known, or no example: the task then raises
        epoch, position = divmod(group_id, self._num_examples)
        return self._order_of(epoch)[position]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._num_examples or 0))
        random.Random(f"{self._seed}/epoch {epoch}").shuffle(order)
        return order


class PromptsAhead:
    """Makes the prompts of a run before they are needed."""

    def __init__(
        self, source: PromptSource, *, num_out: int, first: int = 0, again: Iterable[int] = ()
    ) -> None:
        """Make the prompts of the groups in `again`. Then make prompts from group `first` on.

        Args:
            source: makes each prompt.
            num_out: largest number of groups that are leased at the same time. Twice this number of
                prompts is kept, at least MIN_KEPT.
            first: id of the first new group.
            again: ids of groups that were granted before a resume.
        """
        self._source = source
        self._num_kept = max(MIN_KEPT, 2 * num_out)
        self._made: OrderedDict[int, Prompt | DataError] = OrderedDict()
        self._wanted = dict.fromkeys(again)
        self._next, self._end = first, first + NUM_AHEAD
        self._has_work = asyncio.Event()
        self._has_work.set()

    def lease(self, group_id: int, attempt: int) -> Lease:
        """Return the lease of an attempt at a group.

        Raises:
            DataError: if `PromptSource.make` raised it for this group.
            PromptPendingError: if the prompt is not made yet. `make` makes such prompts first.
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
        """Return the example of a granted group, with its answer; thread-safe.

        If the group's prompt is no longer kept, the call blocks while the task makes the prompt
        again.
        """
        made = self._made.get(group_id)
        if not isinstance(made, Prompt):
            made = self._source.make(group_id)
        return made.example

    async def make(self, pool: Pool) -> bool:
        """Make the next prompt. Return whether `lease` had asked for this prompt.

        If enough prompts are ready, the call first waits until another prompt is needed.
        """
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


# --- What prompts were first made with ---

_ORIGIN = "prompts.json"


def prompt_time(run_dir: Path) -> datetime.datetime:
    """Return the time that chat templates use: the time at which the run began.

    For a new run, this is the present time.
    """
    noted = _read_origin(run_dir).get("began_at")
    return datetime.datetime.fromisoformat(noted) if noted else datetime.datetime.now().astimezone()


def note_origin(
    run_dir: Path,
    began_at: datetime.datetime,
    *,
    chat_template: str,
    code: str,
    log: logging.Logger,
) -> None:
    """Record a run's chat template and task code, and warn of changes since the last start.

    Args:
        run_dir: directory of the run, where the record is written.
        began_at: the time that chat templates use, from `prompt_time`.
        chat_template: hash of the chat template and its arguments.
        code: hash of the task's code and of the files that the code imports.
        log: receives a warning for each hash that has changed.

    Raises:
        StorageError: if the file cannot be read or written.
    """
    before = _read_origin(run_dir)
    if before.get("chat_template", chat_template) != chat_template:
        log.warning(
            "the chat template is another than before this resume: running groups have "
            "the old prompts, and are refused (another_prompt)"
        )
    if before.get("code", code) != code:
        log.warning(
            "the task's code, or a file that it imports, is another than before this resume: "
            "rewards from now on are those of the new code"
        )
    noted = {"began_at": began_at.isoformat(), "chat_template": chat_template, "code": code}
    try:
        write_file(run_dir / _ORIGIN, json.dumps(noted).encode())
    except OSError as error:
        raise StorageError(f"cannot write {run_dir / _ORIGIN}: {error}") from error


def _read_origin(run_dir: Path) -> dict[str, str]:
    path = run_dir / _ORIGIN
    try:
        noted = json.loads(path.read_bytes()) if path.is_file() else {}
        datetime.datetime.fromisoformat(noted.get("began_at", "2000-01-01"))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise StorageError(
            f"{path}: not readable: {error}; restore it from a copy of the run, or delete it: "
            "then templates that write the date write today's"
        ) from error
    return dict(noted)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn an exception of a task's code or a chat template into a DataError that names `what`."""
    try:
        yield
    except EchoError:
        raise
    except Exception as error:
        text = f"{what} raised {type(error).__name__}: {error}{raised_at(error)}"
        raise DataError(text) from error
