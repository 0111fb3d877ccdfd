"""Find a task by name or import path, build it, and say which code and data it is made of."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from blake3 import blake3

from echo.errors import ConfigError
from echo.tasks.imports import import_module, nearest
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
