"""The class Task, which makes prompts and computes the rewards of answers.

A task is the one small class that a user writes. The learner calls `example` and sends the
`Example` inside a lease. A worker calls `reward` with that example and needs no dataset. So an
example must consist of JSON values. `reward` must depend only on the example and the completion.

    class Reverse(Task):
        def example(self, index: int, *, split: str) -> Example:
            word = random.Random(f"{split}:{index}").choice(WORDS)
            return Example(index=index, split=split, prompt=f"Reverse {word}", answer=word[::-1])

        def reward(self, example: Example, completion: str) -> float:
            return float(completion.strip() == example.answer)

The learner sends its workers the task's settings. The settings may name code: the task's class, a
reward function, an environment. The code itself is never sent. A worker has its own copy of the
code, and imports this copy only if its hash equals the hash of the learner's copy (`code_of`,
`check_code`).
"""

from __future__ import annotations

import abc
import importlib
import importlib.util
import inspect
import json
import os
import random
import re
import sys
import sysconfig
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from blake3 import blake3

from echo.core.errors import ConfigError, nearest
from echo.core.paths import local_path
from echo.tasks.neighbours import INSTALLED, neighbours_of, relative_level

SPLITS = ("train", "heldout")

HELDOUT_ONE_IN = 10
"""If a task splits prompts by hash, one in this number of prompts is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt, with the data for `reward`, in JSON's types."""

    index: int
    """The number of the example in its split, from 0."""
    split: str
    """"train" or "heldout"."""
    prompt: str | list[dict[str, Any]]
    """Plain text, or chat messages with `role` and `content`.

    Text becomes one user message if the tokenizer has a chat template. If the last message is the
    assistant's, the policy continues it."""
    answer: Any = None
    """The reference answer, in the form that the task's `reward` expects."""
    info: dict[str, Any] = field(default_factory=dict)
    """Further data for `reward`."""
    columns: dict[str, Any] = field(default_factory=dict)
    """All columns of the example's row apart from prompt, answer and info; empty if there is no
    row.
    """
    task: str = ""
    """The name of the example's task in a mixture; otherwise empty."""
    source: str = ""
    """The place of the example's row, such as "train.jsonl:12", for messages; empty if there is no
    row.
    """

    def __post_init__(self) -> None:
        if self.index < 0 or self.split not in SPLITS:
            raise ValueError(
                f"example {self.index} of split {self.split!r}: the index must be at least 0 "
                f"and the split one of {', '.join(SPLITS)}"
            )

    def __str__(self) -> str:
        return self.source or f"{self.split} example {self.index}"


class RetryCall(Exception):  # noqa: N818 -- a request of the task's, not an error of ours
    """An error that a task's code raises if a second call may succeed.

    For example, a judge model may still be starting. The call is repeated up to two times.
    ConnectionError and TimeoutError have the same effect.
    """


Opinion: TypeAlias = float | Mapping[str, float] | None
"""The reward of one answer: a number, or named parts that add up to the reward
(core/reward_parts.py). The value is None if the task cannot score the answer.
"""
Reward: TypeAlias = Opinion | Awaitable[Opinion]
"""The reward of one answer, perhaps as an awaitable."""
Rewards: TypeAlias = Sequence[Opinion] | Awaitable[Sequence[Opinion]]
"""The rewards of all answers of a group, perhaps as an awaitable."""


class Task(abc.ABC):
    """A source of prompts, which also computes the rewards of the answers.

    The constructor of a subclass gets the settings in [task.options] as keyword arguments. The
    constructor must not read datasets, since a worker builds the same task and has no datasets.
    """

    is_bounded = False
    """Whether `example` and `reward` return soon for any input. If so, these methods run in threads
    of the node. The code of other tasks runs in processes that can be killed.
    """
    has_turns = False
    """Whether an episode may have several turns (environment.py)."""

    def prepare(self) -> None:  # noqa: B027, most have nothing to prepare
        """Do slow preparations, once in each process, before all other calls."""

    @abc.abstractmethod
    def example(self, index: int, *, split: str) -> Example:
        """Return example `index` of a split. Every call returns the same example.

        Args:
            index: a number from 0 up, without a limit. A finite dataset starts again after its last
                row.
            split: "train" or "heldout". No prompt may be in both splits.
        """

    @abc.abstractmethod
    def reward(self, example: Example, completion: str) -> Reward:
        """Return the reward of a completion: a finite number, or named parts.

        Return None if the task cannot score the answer. The group then continues without this
        answer. The method may be `async`.
        """

    def compares_answers(self, example: Example) -> bool:
        """Return whether `rewards` scores all answers to an example in one call."""
        return type(self).rewards is not Task.rewards

    def rewards(self, example: Example, completions: list[str]) -> Rewards:
        """Return the rewards of a group's answers, in order, each as `reward` would return it.

        A task overrides this method to compare the answers to a prompt. For a single answer
        `reward` is called. The method may be `async`.
        """
        raise NotImplementedError(f"{type(self).__name__} rewards each answer on its own")

    def right_completion(self, example: Example) -> str | None:
        """Return a completion that should earn the reward, if one is known.

        By default this is the example's answer, if the answer is text or a number.
        """
        return str(example.answer) if isinstance(example.answer, str | int | float) else None

    def num_examples(self, *, split: str) -> int | None:
        """Return the number of examples of a split; None if the number is unlimited."""
        return None

    def tools(self, example: Example) -> list[dict[str, Any]]:
        """Return the policy's tools for the chat template, as JSON schemas."""
        return []

    def examine(self, fault_of: Callable[[Example], str]) -> None:  # noqa: B027, most have no rows
        """Before a run, check each row with `fault_of`.

        `fault_of` gets the example of a row and returns what is wrong with it, or "".

        Raises:
            DataError: if a row is bad and the task does not leave out bad rows. The message names
                the first bad row.
        """

    def dataset_files(self) -> list[Path]:
        """Return the files of the dataset. Their hash identifies the dataset."""
        return []

    def data_problems(self) -> list[str]:
        """Return the faults that can be found in the datasets without a download."""
        return []

    def parts(self) -> list[Task]:
        """Return the tasks of a mixture. Other tasks return an empty list."""
        return []

    def source_files(self) -> list[Path]:
        """Return the files with code that `reward` calls, except the file of the task's class."""
        return []


class GeneratedTask(Task):
    """A task with random prompts and with demonstrations of answers.

    The hash of a prompt decides its split. So a prompt that is drawn twice is in the same split
    both times. Demonstrations are for the supervised warm-up. All demonstrations have training
    prompts.
    """

    max_completion_tokens: int
    """Number of characters of the longest demonstration, plus one for the stop token."""

    @abc.abstractmethod
    def reward(self, example: Example, completion: str) -> float:
        """Return the reward of a completion as a number."""

    @abc.abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Return a random prompt of either split, and its demonstration."""

    @abc.abstractmethod
    def answer(self, prompt: str) -> Any:
        """Return the reference answer to a prompt, which becomes `example.answer`."""

    def example(self, index: int, *, split: str) -> Example:
        """Return example `index` of a split, drawn with a seed made from `index` and `split`."""
        # A string seed is hashed with SHA-512: the same on every machine and Python.
        prompt, _ = self._draw_from(random.Random(f"{type(self).__name__}:{split}:{index}"), split)
        return Example(index=index, split=split, prompt=prompt, answer=self.answer(prompt))

    def demonstration(self, rng: random.Random) -> tuple[str, str]:
        """Return a random training prompt and a completion to imitate.

        The completion may be wrong.
        """
        return self._draw_from(rng, "train")

    def _draw_from(self, rng: random.Random, split: str) -> tuple[str, str]:
        while True:
            prompt, demonstration = self.draw(rng)
            if is_heldout(prompt) == (split == "heldout"):
                return prompt, demonstration


def is_heldout(text: str) -> bool:
    """Return whether a text belongs to the held-out split, by the text's hash."""
    return zlib.crc32(text.encode()) % HELDOUT_ONE_IN == 0


# --- a task by its name ---------------------------------------------------------------------------


BUILT_IN_TASKS = {
    "addition": "echo.tasks.builtin:AdditionTask",
    "countdown": "echo.tasks.builtin:CountdownTask",
    "dataset": "echo.tasks.dataset:DatasetTask",
    "gsm8k": "echo.tasks.builtin:Gsm8kTask",
    "mixture": "echo.tasks.mixture:MixtureTask",
    "verifiers": "echo.tasks.verifiers:VerifiersTask",
    "word_problems": "echo.tasks.word_problems:WordProblemTask",
}
"""The module and the class of each built-in task, by the task's name in task.kind."""


def load_task(kind: str, options: Mapping[str, Any]) -> Task:
    """Build and return the task that the settings name.

    Args:
        kind: a name from BUILT_IN_TASKS, or "package.module:Class". The current directory is
            searched, too.
        options: keyword arguments of the task's constructor, from [task.options].

    Raises:
        ConfigError: if there is no such task, or its constructor does not take these options.
    """
    if kind not in BUILT_IN_TASKS and ":" not in kind:
        raise ConfigError(
            f"task.kind = {kind!r} is unknown{did_you_mean(kind, BUILT_IN_TASKS)}; built in are "
            f"{', '.join(BUILT_IN_TASKS)}; your own task is named 'package.module:Class'"
        )
    module_name, _, class_name = BUILT_IN_TASKS.get(kind, kind).partition(":")
    task_class = _find_class(kind, import_module(f"task.kind = {kind!r}", module_name), class_name)
    _check_options(kind, task_class, options)
    try:
        return task_class(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.kind = {kind!r}: it refused its options: {error}") from error


def task_digests(task: Task) -> dict[str, str]:
    """Return hashes of a task's code and data, which nodes compare.

    Returns:
        "task_source": the hash of the files that define the task's class and its base classes.
            Whole files are hashed, since helper functions beside a class matter, too.
        "dataset": the hash of the dataset's files. The hash is empty if there are no files, or if
            this node lacks a file.
    """
    source = blake3()
    for part in (task, *task.parts()):
        _update_source(source, part)
    dataset = ""
    files = task.dataset_files()
    if files and all(path.is_file() for path in files):
        hashes = [blake3().update_mmap(path).digest() for path in files]
        dataset = blake3(b"".join(hashes)).hexdigest()
    return {"task_source": source.hexdigest(), "dataset": dataset}


def code_of(kind: str, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the user's own modules that a task's settings name, with their neighbours.

    Returns:
        For each module: the hash of its code, its path, and the hashes of its neighbours, by
        relative path. A module's neighbours are the files that it imports, and the files in its
        directory that Python loaded during its import.
    """
    found = {name: find_code(name) for name in _named_modules(kind, options)}
    return {
        name: {
            "hash": _hash_files(files),
            "path": str(files[-1]),
            "neighbours": _hash_neighbours(name, files[-1], _LOADED.get(str(files[-1]), ())),
        }
        for name, files in found.items()
        if files
    }


def code_digest(kind: str, options: Mapping[str, Any]) -> str:
    """Return one hash of all the user's code that a task's settings name, or ""."""
    found = [
        [name, code["hash"], code["neighbours"]] for name, code in code_of(kind, options).items()
    ]
    return blake3(json.dumps(found, sort_keys=True).encode()).hexdigest() if found else ""


def check_code(
    kind: str,
    options: Mapping[str, Any],
    learners: Mapping[str, Mapping[str, Any]],
    *,
    inherited_dir: Path,
) -> None:
    """Check that this node's copy of the task's code equals the learner's.

    No code is imported.

    Args:
        kind: the value of task.kind.
        options: the value of task.options.
        learners: the result of `code_of` on the learner.
        inherited_dir: the directory with files from the learner. No code in it is accepted.

    Raises:
        ConfigError: if code is missing on this node, or differs from the learner's.
    """
    for name in _named_modules(kind, options):
        files, theirs = find_code(name), learners.get(name)
        if not files and theirs is None:
            continue  # text of another meaning, with a colon
        where = f"the task's code {name!r}, which the learner's task.kind or task.options name"
        if not files:
            assert theirs is not None
            raise ConfigError(
                f"{where}, is not on this machine, and code is never sent: copy {theirs['path']} "
                f"from the learner's machine to {_place_of(name, theirs['path'])}, or install here "
                "the package that holds it"
            )
        all_files = [*files, *_neighbours(name, files[-1]).values()]
        inherited = [path for path in all_files if path.is_relative_to(inherited_dir.resolve())]
        if inherited:
            raise ConfigError(
                f"{where}, is {inherited[0]}, among files that came over the network; none of them "
                "is ever run"
            )
        ours = _hash_files(files)
        if theirs is None or theirs["hash"] != ours:
            hashes = f"{ours[:16]} in {files[-1]} here, " + (
                f"{theirs['hash'][:16]} in {theirs['path']} on the learner's machine"
                if theirs is not None
                else "and nothing of that name on the learner's machine"
            )
            raise ConfigError(
                f"{where}, is another one than the learner's ({hashes}); it was not run. Give both "
                "the same file"
            )
        _check_neighbours(where, name, files[-1], theirs)


def check_unchanged(code: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the task's code has not changed since the call of `code_of`.

    Raises:
        ConfigError: if a file has changed. The message names it.
    """
    if (changed := next(_changed_files(code), None)) is not None:
        raise ConfigError(
            f"{changed} is not what it was when this node started, and rewards of both would be "
            "mixed: restart the node, or restore the file"
        )


def _changed_files(code: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, known in code.items():
        files = find_code(name)
        if not files or _hash_files(files) != known["hash"]:
            yield str(known["path"])
            continue
        wanted: Mapping[str, str] = known["neighbours"]
        path = files[-1]
        ours = _hash_neighbours(name, path, [path.parent / place for place in wanted])
        for place in sorted({*wanted, *ours}):
            if wanted.get(place) != ours.get(place):
                yield os.path.normpath(path.parent / place)


def _check_neighbours(where: str, name: str, path: Path, theirs: Mapping[str, Any]) -> None:
    wanted: Mapping[str, str] = theirs.get("neighbours", {})
    ours = _hash_neighbours(name, path, [path.parent / place for place in wanted])
    for place in sorted({*wanted, *ours}):
        own, learners = ours.get(place), wanted.get(place)
        if own == learners:
            continue
        file = os.path.normpath(path.parent / place)
        source = os.path.normpath(Path(theirs["path"]).parent / place)
        if own is None:
            problem = f"is not here: copy {source} from the learner's machine to {file}"
        elif learners is None:
            problem = f"is here and not on the learner's machine: remove {file}, or copy it there"
        else:
            problem = f"is another one here than {source} on the learner's machine: copy that here"
        raise ConfigError(f"{where}, imports a file that {problem}; nothing was run")


_MODULE_FILE = re.compile(r"(?P<module>[^:]+\.py):(?P<name>[^\W\d]\w*)")
_MODULE = re.compile(r"(?P<module>[^\W\d]\w*(?:\.\w+)*):(?P<name>[^\W\d]\w*)")


def _named_modules(kind: str, options: Mapping[str, Any]) -> list[str]:
    """Return the distinct names of modules that a task's settings may name."""
    return list(dict.fromkeys(_find_modules({"kind": kind, "options": options})))


def _find_modules(value: object) -> Iterator[str]:
    match value:
        case str():
            found = _MODULE_FILE.fullmatch(value) or _MODULE.fullmatch(value)
            if found is not None:
                yield found["module"]
        case Mapping():
            # The name of a `verifiers` environment names no function; it has dashes, and perhaps an
            # owner.
            options = value.get("options", value)
            if value.get("kind") == "verifiers" and isinstance(options, Mapping):
                yield str(options.get("env", "")).rpartition("/")[2].replace("-", "_")
            # A table of functions and their weights names the functions as keys.
            for part in (*value, *value.values()):
                yield from _find_modules(part)
        case list() | tuple():
            for part in value:
                yield from _find_modules(part)


def _hash_files(files: list[Path]) -> str:
    """Return one hash of the files. Line ends are hashed as on Unix."""
    digest = blake3()
    for path in files:
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _hash_neighbours(name: str, path: Path, others: Iterable[Path]) -> dict[str, str]:
    """Return the hashes of the files that `path` imports, and of the files in `others`.

    The key of each hash is the file's path relative to the directory of `path`.
    """
    files = {*_neighbours(name, path).values(), *(each.resolve() for each in others)}
    return {
        Path(os.path.relpath(file, path.parent)).as_posix(): _hash_files([file])
        for file in files
        if file.is_file() and file != path
    }


def _neighbours(name: str, path: Path) -> dict[str, Path]:
    # The directory of a file, or the parent of its outermost package, is on the import path.
    num_packages = 0 if name.endswith(".py") else name.count(".") + (path.name == "__init__.py")
    return neighbours_of(path, [path.parents[num_packages], Path.cwd()])


def _place_of(name: str, path: str) -> Path:
    """Return the path on this worker of a module that has the path `path` on the learner."""
    if name.endswith(".py"):
        return local_path(name).absolute()
    last = Path(path).name
    place = Path.cwd().joinpath(*name.split("."))
    return place / last if last == "__init__.py" else place.with_suffix(".py")


def _update_source(source: blake3, task: Task) -> None:
    for base in type(task).__mro__:
        if issubclass(base, Task) and base is not Task:
            source.update(f"{base.__qualname__}\0{_source_of(base)}\0".encode())
    for path in task.source_files():
        source.update(f"{path.name}\0{path.read_text(encoding='utf-8')}\0".encode())


def _find_class(kind: str, module: ModuleType, name: str) -> type[Task]:
    found = getattr(module, name, None)
    tasks = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, Task)
        and value.__module__ == module.__name__
    ]
    listing = f"; {module.__name__} defines the tasks {', '.join(tasks) or '(none)'}"
    if found is None:
        raise ConfigError(
            f"task.kind = {kind!r}: {module.__name__} has no {name!r}"
            f"{did_you_mean(name, tasks)}{listing}"
        )
    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise ConfigError(
            f"task.kind = {kind!r}: {name} is not a subclass of echo.tasks.task.Task{listing}"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"task.kind = {kind!r}: {name} does not define {missing}")
    return found


def _check_options(kind: str, task_class: type[Task], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(task_class).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"task.options.{name}: {kind!r} has no such option{did_you_mean(name, known)}; "
                f"it takes {', '.join(known) or 'none'}"
            )


def _source_of(task_class: type) -> str:
    try:
        path = inspect.getsourcefile(task_class)
    except TypeError:
        path = None
    if path is None or not Path(path).is_file():
        raise ConfigError(
            f"the task {task_class.__qualname__} has no source file to hash; put it into a .py file"
        )
    return Path(path).read_text(encoding="utf-8")


# --- code by its name -----------------------------------------------------------------------------


def import_module(where: str, name: str) -> ModuleType:
    """Import and return a module, named by its file or its dotted name.

    A dotted name is also searched in the current directory.

    Args:
        where: the beginning of error messages, such as "task.kind = 'my_task:Reverse'".
        name: "package.module", or a path that ends in ".py".

    Raises:
        ConfigError: if there is no such module, or if the module cannot be imported.
    """
    directory = str(Path.cwd())
    _search_in(Path(directory))
    before = set(sys.modules)
    try:
        files = find_code(name)
        if files:
            _claim(name, files[-1])
        module = _import_file(name) if name.endswith(".py") else importlib.import_module(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # a user's module raises anything
        if isinstance(error, FileNotFoundError) and name.endswith(".py"):
            problem = f"no file {name!r} in {directory}"
        elif isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            neighbours = [path.stem for path in Path(directory).glob("*.py")]
            problem = (
                f"no module {name!r} in {directory} or among the installed packages"
                f"{did_you_mean(name, neighbours)}"
            )
        else:
            problem = f"importing {name!r} failed: {type(error).__name__}: {error}"
            if isinstance(error, RuntimeError) and "event loop" in str(error):
                problem += "; make what needs a running event loop in the first call"
            if isinstance(error, ImportError):
                own = [str(local_path(name).resolve().parent)] if name.endswith(".py") else []
                places = ", ".join(dict.fromkeys([*own, directory]))
                problem += f"; looked in {places} and among the installed packages"
        raise ConfigError(f"{where}: {problem}") from error
    if files:
        _note_loaded(files[-1], set(sys.modules) - before)
    return module


def find_code(name: str) -> list[Path]:
    """Return the Python files that `import_module` would run for a name.

    These are the module's file and the `__init__.py` of each package that contains the module.
    Files of Python's standard library are left out.

    Returns:
        The files in the order in which they would run; empty if there is no such module.
    """
    if name.endswith(".py"):
        path = local_path(name).resolve()
        return [path] if path.is_file() else []
    importlib.invalidate_caches()
    found: list[Path] = []
    package = ""
    directory = str(Path.cwd())
    is_listed = directory in search_path()
    search: Sequence[str] | None = sys.path if is_listed else [directory, *sys.path]
    for part in name.split("."):
        package = f"{package}.{part}" if package else part
        known = getattr(sys.modules.get(package), "__spec__", None)
        try:
            spec = known or (None if search is None else _find_spec(package, search))
        except KeyError:
            # A directory without __init__.py in a package: Python looks for the package in
            # sys.modules, where it is missing, since nothing was imported.
            search = [str(place) for base in search or () if (place := Path(base, part)).is_dir()]
            continue
        if spec is None:
            return []
        if spec.has_location and spec.origin is not None:
            found.append(Path(spec.origin).resolve())
        search = spec.submodule_search_locations
    return [path for path in found if path.suffix == ".py" and not _is_pythons_own(path)]


def load_function(where: str, spec: str) -> Callable[..., Any]:
    """Import and return a function.

    `spec` is "package.module:name" or "path/to/file.py:name".

    Raises:
        ConfigError: if there is no such function, or if its module cannot be imported.
    """
    named = _MODULE_FILE.fullmatch(spec) or _MODULE.fullmatch(spec)
    if named is None or named["module"].endswith(".ipynb"):
        # The code of anything else could not be compared between nodes.
        raise ConfigError(
            f"{where}: name what a Python file defines, as 'package.module:function' or "
            "'path/to/file.py:function'; an expression, a method or a cell of a notebook gets a "
            "name in a .py file first"
        )
    module_name, name = named["module"], named["name"]
    module = import_module(where, module_name)
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise ConfigError(
            f"{where}: {module_name} has no function {name!r}{did_you_mean(name, own)}; it defines "
            f"{', '.join(own) or 'none'}"
        )
    function: Callable[..., Any] = found
    return function


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'NAME'?)" with a similar known name, or ""."""
    near = nearest(name, known)
    return f" (did you mean {near!r}?)" if near else ""


def _find_spec(name: str, search: Sequence[str]) -> ModuleSpec | None:
    # Not importlib.util.find_spec, which imports the packages around a module.
    specs = (finder.find_spec(name, search) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _is_pythons_own(path: Path) -> bool:
    library = Path(sysconfig.get_path("stdlib")).resolve()
    return path.is_relative_to(library) and not INSTALLED & {*path.parts}


_CLAIMS: dict[str, dict[str, Path]] = {}
"""For each imported file: the path of each neighbour, by the name under which it is imported."""

_OWN: dict[str, Path] = {}
"""Top-level module names of users' files, with the directory of each."""


class _OwnFirst:
    """An import finder that finds users' files before other modules of the same name.

    The finder finds only names in `_OWN`. The users' directories are last on sys.path. If they were
    first, any file in these directories could hide another module of the same name. For example, a
    `random.py` that no reward imports would hide Python's own module.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import spec of a user's file; None for any other module."""
        if path is not None or name not in _OWN:
            return None
        return PathFinder.find_spec(name, [str(_OWN[name])], target)


_LOADED: dict[str, set[Path]] = {}
"""For each imported file, the files in its directory that Python loaded with the file."""


def _claim(name: str, path: Path) -> None:
    """Record a file's neighbours, so that the file's next import finds these neighbours.

    Raises:
        ConfigError: if a neighbour's module name already belongs to another file. A process has
            only one module of each name.
    """
    if name.partition(".")[0] == "echo":
        return
    own = {
        key: file for key, file in _neighbours(name, path).items() if not Path(key).is_absolute()
    }
    _refuse_pythons_names(path, own)
    imported = {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
    for key, file in own.items():
        known = getattr(sys.modules.get(key), "__file__", None)
        others = [
            claims[key]
            for claimant, claims in _CLAIMS.items()
            if key in claims and claimant != str(path) and claimant in imported
        ]
        others += [Path(known).resolve()] if known else []
        for other in others:
            if other != file:
                raise ConfigError(
                    f"{path} imports {key!r} from {file}, but {key!r} is {other} in this process "
                    "already; rename one of the two"
                )
    _CLAIMS[str(path)] = own
    _find_first(own if name.endswith(".py") else own | {name: path})


def _refuse_pythons_names(path: Path, neighbours: Mapping[str, Path]) -> None:
    for key, file in neighbours.items():
        if key.partition(".")[0] in sys.stdlib_module_names:
            raise ConfigError(
                f"{path} imports {key!r} from {file}: Python's own library has a module of that "
                "name, which all other code in this process needs; rename the file"
            )


def _find_first(files: Mapping[str, Path]) -> None:
    for name, file in files.items():
        num_packages = name.count(".") + (file.name == "__init__.py")
        if not INSTALLED & {*file.parts}:
            _OWN[name.partition(".")[0]] = file.parents[num_packages]
    if _OwnFirst not in sys.meta_path:
        sys.meta_path.insert(0, _OwnFirst)


def _note_loaded(path: Path, names: Iterable[str]) -> None:
    loaded = {
        Path(file).resolve()
        for file in (getattr(sys.modules.get(name), "__file__", None) for name in names)
        if file is not None and file.endswith(".py")
    }
    _LOADED.setdefault(str(path), set()).update(
        file
        for file in loaded
        if file.is_relative_to(path.parent) and not INSTALLED & {*file.parts}
    )


def _import_file(file: str) -> ModuleType:
    """Import a file as `python FILE` would, and return the module.

    A file with relative imports is imported as a part of its package.
    """
    path = local_path(file).resolve()
    _search_in(path.parent)
    level = relative_level(path) if path.is_file() else 0
    if level:
        return _import_in_package(path, level)
    name = path.stem
    if not _is_free(name, path):
        name = f"echo_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Entered before it runs, since dataclasses look up their module in sys.modules.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_free(name: str, path: Path) -> bool:
    """Return whether an import of `name` finds `path`, also in spawned processes."""
    if not name.isidentifier() or name in sys.stdlib_module_names:
        return False
    known = getattr(sys.modules.get(name), "__spec__", None) or _find_spec(name, sys.path)
    origin = None if known is None or not known.has_location else known.origin
    return origin is not None and Path(origin).resolve() == path


def _import_in_package(path: Path, level: int) -> ModuleType:
    packages = [path.parent]
    while len(packages) < level or (packages[-1].parent / "__init__.py").is_file():
        packages.append(packages[-1].parent)
    _search_in(packages[-1].parent)
    module = importlib.import_module(
        ".".join([*(package.name for package in reversed(packages)), path.stem])
    )
    if module.__file__ is None or Path(module.__file__).resolve() != path:
        raise ConfigError(
            f"{module.__name__!r} is {module.__file__} in this process already, and not {path}; "
            "rename one of the two directories"
        )
    return module


_ADDED: set[str] = set()
"""Users' directories that this module has added to sys.path."""


def search_path() -> list[str]:
    """Return sys.path without the users' directories."""
    return [os.fspath(place) for place in sys.path if place not in _ADDED]


def _search_in(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
        _ADDED.add(str(directory))
        importlib.invalidate_caches()
