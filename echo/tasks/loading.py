"""Find a task by name or import path, build it, and say which code and data it is made of.

A worker is told by the learner which task to build, and settings may name code: the task's class, a
reward function, an environment. That code is never sent. It lies on the worker, and it is imported
only after its hash was found to be the learner's (`code_of`, `check_code`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from blake3 import blake3

from echo.errors import ConfigError
from echo.tasks.imports import find_code, import_module, nearest
from echo.tasks.task import Task

BUILT_IN = {
    "addition": "echo.tasks.addition:AdditionTask",
    "countdown": "echo.tasks.countdown:CountdownTask",
    "dataset": "echo.tasks.dataset:DatasetTask",
    "gsm8k": "echo.tasks.gsm8k:Gsm8kTask",
    "mixture": "echo.tasks.mixture:MixtureTask",
    "verifiers": "echo.tasks.verifiers_task:VerifiersTask",
}
"""The tasks that have a name of their own."""


def load_task(kind: str, options: Mapping[str, Any]) -> Task:
    """Build the task that `kind` names.

    Args:
        kind: a name from BUILT_IN, or "package.module:Class". Modules are looked for in the
            current directory too, so that a user's own file needs no installation.
        options: keyword arguments of its constructor, from [task.options].

    Raises:
        ConfigError: if there is no such task, or it does not take these options.
    """
    if kind not in BUILT_IN and ":" not in kind:
        raise ConfigError(
            f"task.kind = {kind!r} is unknown{nearest(kind, BUILT_IN)}; built in are "
            f"{', '.join(BUILT_IN)}; your own task is named 'package.module:Class'"
        )
    module_name, _, class_name = BUILT_IN.get(kind, kind).partition(":")
    task_class = _find_class(kind, import_module(f"task.kind = {kind!r}", module_name), class_name)
    _check_options(kind, task_class, options)
    try:
        return task_class(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.kind = {kind!r}: it refused its options: {error}") from error


def task_digests(task: Task) -> dict[str, str]:
    """Hash the code and the data of a task, to compare them between nodes.

    Returns:
        "task_source": of the files that define the task's class and those it builds on, as a
            helper function beside the class matters as much as the class.
        "dataset": of the dataset's files; empty if it has none, or if this node lacks one of them.
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


def code_of(kind: str, options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the modules that a task's settings name and that lie here: hash and path of each."""
    found = {name: find_code(name) for name in _named_modules(kind, options)}
    return {
        name: {"hash": _hash_files(files), "path": str(files[-1])}
        for name, files in found.items()
        if files
    }


def check_code(
    kind: str,
    options: Mapping[str, Any],
    learners: Mapping[str, Mapping[str, str]],
    *,
    inherited_dir: Path,
) -> None:
    """Compare the code that inherited settings name with the learner's; import nothing.

    Args:
        kind: task.kind.
        options: task.options.
        learners: `code_of` on the learner.
        inherited_dir: where files are put that came over the network; no code is taken from there.

    Raises:
        ConfigError: if code is missing here, or is not the learner's.
    """
    for name in _named_modules(kind, options):
        files, theirs = find_code(name), learners.get(name)
        if not files and theirs is None:
            continue  # a text that only looks like the name of a function
        where = f"the task's code {name!r}, which the learner's task.kind or task.options name"
        if not files:
            assert theirs is not None
            raise ConfigError(
                f"{where}, is not on this machine, and code is never sent: copy {theirs['path']} "
                f"from the learner's machine to {_place_of(name, theirs['path'])}, or install here "
                "the package that holds it"
            )
        inherited = [path for path in files if path.is_relative_to(inherited_dir.resolve())]
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


_MODULE_FILE = re.compile(r"(?P<module>[^:]+\.py):[A-Za-z_]\w*")
_MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")


def _named_modules(kind: str, options: Mapping[str, Any]) -> list[str]:
    """Return all modules that a task's settings may name, each once."""
    return list(dict.fromkeys(_find_modules({"kind": kind, "options": options})))


def _find_modules(value: object) -> Iterator[str]:
    match value:
        case str():
            found = _MODULE_FILE.fullmatch(value) or _MODULE.fullmatch(value)
            if found is not None:
                yield found["module"]
        case Mapping():
            # Those of `verifiers` are named without a function, with dashes and an owner.
            options = value.get("options", value)
            if value.get("kind") == "verifiers" and isinstance(options, Mapping):
                yield str(options.get("env", "")).rpartition("/")[2].replace("-", "_")
            for part in value.values():
                yield from _find_modules(part)
        case list() | tuple():
            for part in value:
                yield from _find_modules(part)


def _hash_files(files: list[Path]) -> str:
    """Hash the files that importing one module runs, with Unix line ends."""
    digest = blake3()
    for path in files:
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _place_of(name: str, path: str) -> Path:
    """Return where a worker looks for a module that lies at `path` on the learner's machine."""
    if name.endswith(".py"):
        return Path(name).expanduser().absolute()
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
            f"{nearest(name, tasks)}{listing}"
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
                f"task.options.{name}: {kind!r} has no such option{nearest(name, known)}; "
                f"it takes {', '.join(known) or 'none'}"
            )


def _source_of(task_class: type) -> str:
    """Return the text of the file that defines a class, with Unix line ends."""
    try:
        path = inspect.getsourcefile(task_class)
    except TypeError:
        path = None
    if path is None or not Path(path).is_file():
        raise ConfigError(
            f"the task {task_class.__qualname__} has no source file to hash; put it into a .py file"
        )
    return Path(path).read_text(encoding="utf-8")
