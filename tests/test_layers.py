"""The layers hold: who may import whom, who may start what, and which file owns which package.

Here too, because the tree has been read: no class is two things, and each number has its reason.

The tables are the law (imports point downward only, rooms of one floor do not know each other); the
checks are functions over a source tree, so that each is also shown to fire on a tree with a planted
violation.
"""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch, translate
from itertools import pairwise
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

# Rooms from below: each may import those of the lines above its own.
FLOORS = (
    "core",
    "wire kernels fleet tasks net",
    "algo config weights leases records",
    "engine roles",
    "train",
    "runtime",
    "sim ui",
    "cli",
)
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms.split()}

# Rooms that touch no socket, task, clock, environment or file.
PURE = {"core", "wire", "weights", "leases", "roles", "algo", "kernels", "fleet"}
NOT_PURE = {"core/extras.py", "core/paths.py"}  # our own metadata; where a home directory is

# A foreign package, and the only files that may import it.
OWNERS: dict[str, tuple[str, ...]] = {
    "aiohttp": ("runtime/agents/endpoint.py",),
    "zmq": (
        "net/admission.py",
        "net/channel.py",
        "net/dialler.py",
        "net/listener.py",
        "net/zmq.py",
    ),
    "zstandard": ("weights/delta.py",),
    "psutil": ("config/memory/budget.py", "engine/model.py"),
    "rich": ("ui/*", "cli/*"),
    "triton": ("kernels/*",),
    "verifiers": ("tasks/verifiers.py",),
    "vllm": ("engine/vllm*",),
    "torch": ("engine/*", "train/*", "algo/*", "kernels/*"),
    "transformers": ("engine/*", "train/*", "tasks/tokenization.py"),
    "peft": ("engine/lora.py",),
}

# Distributions whose modules are not called as they are.
MODULES_OF = {
    "huggingface-hub": ("huggingface_hub",),
    "math-verify": ("math_verify",),
    "pydantic": ("pydantic", "pydantic_core"),
    "pyzmq": ("zmq",),
}

# What a pure room may not import.
IMPURE = {
    "asyncio", "concurrent", "datetime", "multiprocessing", "os", "pathlib", "secrets", "selectors",
    "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip

# Who blocks the caller or takes threads in runtime/ beside its port, and why the loop never waits.
BLOCKING: dict[str, str] = {
    "threads.py": "the port itself",
    "disk_store.py": "writes in order what nobody waits for, hashes on all cores within one call",
    "learner/versions/publish.py": "codes on all cores within one blocking call",
    "episodes.py": "plays on all threads within one blocking call of an engine",
}
THREAD_CALLS = {"to_thread", "run_in_executor", "submit"}
CLOCK_CALLS = {"monotonic", "perf_counter", "sleep"}


@dataclass(frozen=True)
class Owned:
    """What only some rooms may start or use, and which files do so beside them, and why."""

    what: str
    rooms: tuple[str, ...]
    others: dict[str, str]
    calls: tuple[str, ...] = ()
    """Patterns of what is called, by its whole name as far as that is known."""
    imports: tuple[str, ...] = ()
    """Packages or modules."""


OWNED = (
    Owned(
        "a process",
        rooms=("tasks", "engine"),
        others={
            "cli/commands/quickstart.py": "the learner and the workers, as their user would",
            "cli/commands/sim.py": "simulations on all cores",
            "cli/commands/node.py": "the learner itself again, after a rollback",
            "runtime/commands.py": "the operator's commands: a machine given back, an alert",
        },
        calls=(
            "subprocess.*", "*.create_subprocess_*", "*.Process", "*.ProcessPoolExecutor",
            "os.exec*", "os.fork*", "os.popen", "os.posix_spawn*", "os.spawn*", "os.system",
        ),
    ),
    Owned(
        "a thread",
        rooms=("tasks", "engine", "runtime"),  # of the last see BLOCKING
        others={
            "cli/interrupts.py": "ends the process where something keeps it, or with its parent",
            "net/zmq.py": "the end of ZeroMQ's context, which waits for what lingers",
            "train/ranks/sharded_images.py": "codes on a rank's cores, for the learner's thread",
            "ui/live.py": "draws, so that nobody waits for a terminal",
            "ui/sinks.py": "feeds trackers, whose libraries wait for a network",
        },
        calls=("threading.Thread", "threading.Timer", "*.ThreadPoolExecutor", "*.to_thread"),
    ),
    Owned(
        "an event loop",
        rooms=(),  # a node runs in the one that it is given
        others={
            "cli/commands/node.py": "that of the process, and one that tries addresses",
            "cli/commands/doctor.py": "that of the process, while it tries the way to the learner",
            "sim/simulation.py": "virtual time",
            "engine/vllm/backend.py": "vLLM's client, which is asynchronous, in its own thread",
            "runtime/viewer.py": "that of a viewer's process, which has no node",
            "tasks/processes/main.py": "a task's code that is asynchronous",
            "tasks/verifiers.py": "environments, which are asynchronous, in their own thread",
        },
        calls=(
            "asyncio.run", "asyncio.Runner", "*.new_event_loop", "*.run_forever",
            "*.run_until_complete", "uvloop.*",
        ),
    ),
    Owned(
        "a task of an event loop",
        rooms=("net",),
        others={
            "runtime/node.py": "`spawn`: a failure ends the node, and the node's end ends the task",
            "runtime/worker/release.py": "the release, which goes on when the node is over",
            "sim/simulation.py": "whole nodes, each as in a process of its own",
            "engine/vllm/backend.py": "requests, in the loop of its own thread",
            "tasks/verifiers.py": "episodes, in the loop of their own thread",
        },
        calls=("*.create_task", "*.ensure_future", "*.TaskGroup", "*.run_coroutine_threadsafe"),
    ),
    Owned(
        "the event loop",
        rooms=("runtime", "net", "sim"),
        others={
            "cli/commands/node.py": "starts it, and hands it signals and a worker's status line",
            "cli/commands/doctor.py": "see above",
            "engine/vllm/backend.py": "see above",
            "tasks/processes/main.py": "see above",
            "tasks/verifiers.py": "see above",
        },
        imports=("asyncio", "uvloop"),
    ),
    Owned(
        "a wait without a turn of the loop",  # where all is done that is waited for: Python 3.12
        rooms=(),
        others={
            "sim/simulation.py": "at its end, once: nothing is asked again afterwards",
            "runtime/agents/agents.py": "an event that has just been cleared",
            "engine/vllm/backend.py": "a call, once",
        },
        calls=("asyncio.gather", "asyncio.wait_for"),
    ),
    Owned(
        "ZeroMQ",
        rooms=("runtime", "net"),
        others={"cli/commands/node.py": "tries addresses, raises the limit of sockets"},
        imports=("zmq", "echo.net.zmq", "echo.net.listener"),
    ),
)  # fmt: skip

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# A larger class is two things: see which of its methods use which of its fields.
MAX_CLASS_LINES = 500
MAX_PUBLIC_METHODS = 25  # properties included

# The whole configuration, and what reads or makes one. Every other file takes its sections.
WHOLE = ("echo.config.schema.Config", "echo.config.load", "echo.config.load.*")
SEES_WHOLE = ("config/*", "cli/*", "runtime/learner/setup.py", "runtime/worker/setup.py")

# What a relay's process imports, as far as it is written.
RELAY_ROOTS = (
    "core/*", "wire/*", "weights/*", "leases/*", "roles/*", "net/*", "config/*",
    "runtime/relay.py", "cli/main.py", "cli/commands/node.py",
)  # fmt: skip


class SourceTree:
    """The modules below one directory that holds a package `echo`, their imports and calls."""

    def __init__(self, directory: Path) -> None:
        self.paths: dict[str, Path] = {}
        for path in sorted((directory / "echo").rglob("*.py")):
            parts = path.relative_to(directory).with_suffix("").parts
            self.paths[".".join(parts).removesuffix(".__init__")] = path
        self._root = directory / "echo"
        # (line, imported module) wherever it stands; `from` names resolve to modules.
        self.imports: dict[str, list[tuple[int, str]]] = {}
        # Those at the head of a module, which importing it follows.
        self.heads: dict[str, set[str]] = {}
        self.calls: dict[str, list[ast.Call]] = {}
        self.classes: dict[str, list[ast.ClassDef]] = {}
        # (line, source) of each constant that is a number and has no text beside it.
        self.bare_numbers: dict[str, list[tuple[int, str]]] = {}
        # (line, whole name of what is called), such as "subprocess.Popen" for an imported `Popen`.
        self.called: dict[str, list[tuple[int, str]]] = {}
        # (line, whole name of what is imported or reached through a module).
        self.names: dict[str, list[tuple[int, str]]] = {}
        for name, path in self.paths.items():
            text = path.read_text()
            module = ast.parse(text, str(path))
            self.bare_numbers[name] = list(bare_numbers(module, text.splitlines()))
            nodes = list(ast.walk(module))
            imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
            self.imports[name] = [found for node in imports for found in self._imported(node)]
            self.heads[name] = {found for node in module.body for _, found in self._imported(node)}
            self.calls[name] = [node for node in nodes if isinstance(node, ast.Call)]
            self.classes[name] = [node for node in nodes if isinstance(node, ast.ClassDef)]
            known = dict(pair for node in imports for pair in self._named(node))
            self.called[name] = [
                (call.lineno, self._whole_name(call.func, known)) for call in self.calls[name]
            ]
            reached = [node for node in nodes if isinstance(node, ast.Attribute)]
            self.names[name] = [(node.lineno, self._whole_name(node, known)) for node in reached]
            self.names[name] += [found for node in imports for found in self._brought(node)]

    def place(self, module: str) -> str:
        """Return the path of `module` inside the package, as the tables write it."""
        return self.paths[module].relative_to(self._root).as_posix()

    def _whole_name(self, node: ast.expr, known: dict[str, str]) -> str:
        """Return the whole name of what is called; of an expression's attribute, `.attribute`."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        first = known.get(node.id, node.id) if isinstance(node, ast.Name) else ""
        return ".".join([first, *reversed(parts)])

    def _named(self, node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
        if isinstance(node, ast.Import):
            return [(alias.asname, alias.name) for alias in node.names if alias.asname]
        return [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]

    def _brought(self, node: ast.Import | ast.ImportFrom) -> list[tuple[int, str]]:
        if isinstance(node, ast.Import):
            return [(node.lineno, alias.name) for alias in node.names]
        return [(node.lineno, name) for _, name in self._named(node)]

    def _imported(self, node: ast.AST) -> list[tuple[int, str]]:
        if isinstance(node, ast.Import):
            return [(node.lineno, alias.name) for alias in node.names]
        if not isinstance(node, ast.ImportFrom):
            return []
        source = node.module or ""
        inner = {f"{source}.{alias.name}" for alias in node.names}
        targets = {name if name in self.paths else source for name in inner}
        return [(node.lineno, target) for target in sorted(targets)]


def is_number(value: ast.expr) -> bool:
    """Return whether an expression is a number, a calculation with numbers, or several of them."""
    match value:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()) | ast.UnaryOp(operand=ast.Constant()):
            return True
        case ast.BinOp(left=left, right=right):
            return any(map(is_number, (left, right)))
        case ast.Tuple(elts=parts):
            return bool(parts) and all(map(is_number, parts))
    return False


def bare_numbers(module: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the source of each number that has neither a docstring nor a comment."""
    for node, below in pairwise([*module.body, ast.Pass()]):
        match node, below:
            case _, ast.Expr(value=ast.Constant(value=str())):
                continue
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value), _:
                own, above = lines[node.lineno - 1 : node.end_lineno], lines[node.lineno - 2]
                is_commented = above.startswith("#") or any("#" in line for line in own)
                if is_number(value) and not is_commented:
                    yield node.lineno, own[0]


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def upward_imports(tree: SourceTree) -> list[str]:
    """Return every import that the floors do not permit."""
    found = []
    for module in tree.paths:
        place = tree.place(module)
        room = place.rpartition("/")[0].partition("/")[0]
        if room not in HEIGHT and place != "__init__.py":
            found.append(f"{place}: it is in no room of the table")
            continue
        for line, target in tree.imports[module]:
            # `from echo import __version__` is open to all: the root imports nothing itself.
            if not is_within(target, "echo") or target == "echo":
                continue
            used = target.split(".")[1]
            is_below = room in HEIGHT and HEIGHT[room] > HEIGHT.get(used, len(HEIGHT))
            if used != room and not is_below:
                found.append(f"{place}:{line}: {module} may not import {target}")
    return found


def trespasses(tree: SourceTree) -> list[str]:
    """Return every import of a foreign package outside the files that own it."""
    return [
        f"{tree.place(module)}:{line}: only {', '.join(OWNERS[foreign])} may import {foreign}"
        for module in tree.paths
        for line, target in tree.imports[module]
        if (foreign := target.partition(".")[0]) in OWNERS
        and not any(fnmatch(tree.place(module), owner) for owner in OWNERS[foreign])
    ]


def impurities(tree: SourceTree) -> list[str]:
    """Return every reach of the pure layers into the world outside."""
    found = []
    for module in tree.paths:
        place = tree.place(module)
        if module.partition(".")[2].partition(".")[0] not in PURE or place in NOT_PURE:
            continue
        found += [
            f"{tree.place(module)}:{line}: a pure layer may not import {target}"
            for line, target in tree.imports[module]
            if target.partition(".")[0] in IMPURE
        ]
        found += [
            f"{tree.place(module)}:{node.lineno}: a pure layer may not open files"
            for node in tree.calls[module]
            if isinstance(node.func, ast.Name) and node.func.id == "open"
        ]
    return found


def threads_beside_the_port(tree: SourceTree) -> list[str]:
    """Return every call of runtime/ into a thread, or for the time, that virtual time cannot see.

    Threads go through `runtime/threads.py`, and the only clock is the loop's.
    """
    found = []
    for module in tree.paths:
        folder, _, file = tree.place(module).partition("/")
        if folder != "runtime" or file in BLOCKING:
            continue
        for node in tree.calls[module]:
            if not isinstance(node.func, ast.Attribute):
                continue
            name, owner = node.func.attr, node.func.value
            is_time = isinstance(owner, ast.Name) and owner.id == "time"
            if name in THREAD_CALLS or (is_time and name in CLOCK_CALLS):
                found.append(f"{tree.place(module)}:{node.lineno}: {name} goes past the port")
        found += [
            f"{tree.place(module)}:{line}: threads come from the port"
            for line, target in tree.imports[module]
            if is_within(target, "concurrent.futures")
        ]
    return found


def whole_configurations(tree: SourceTree) -> list[str]:
    """Return every place beside the set-ups that takes or reads a whole configuration."""
    is_whole = re.compile("|".join(map(translate, WHOLE))).match
    return [
        f"{tree.place(module)}:{line}: {name} is for the set-ups: take the sections that it reads"
        for module in tree.paths
        for line, name in tree.names[module]
        if is_whole(name) and not any(fnmatch(tree.place(module), one) for one in SEES_WHOLE)
    ]


def strangers(tree: SourceTree, owned: Owned) -> list[str]:
    """Return every place outside its rooms that starts or uses something, exceptions as well."""
    found = []
    is_call = re.compile("|".join(map(translate, owned.calls)) or "(?!)").match
    for module in tree.paths:
        place = tree.place(module)
        if place.partition("/")[0] in owned.rooms:
            continue
        lines = [(line, name) for line, name in tree.called[module] if is_call(name)]
        lines += [
            (line, target)
            for line, target in tree.imports[module]
            if any(is_within(target, package) for package in owned.imports)
        ]
        found += [f"{place}:{line}: {name} is not for this file" for line, name in lines]
    return found


def unpermitted(tree: SourceTree, owned: Owned) -> list[str]:
    """Return every place that starts or uses something without a reason in the table."""
    return [line for line in strangers(tree, owned) if line.partition(":")[0] not in owned.others]


def undeclared_imports(tree: SourceTree, declared: set[str]) -> list[str]:
    """Return every import of a foreign package that no requirement of pyproject.toml brings."""
    known = declared | sys.stdlib_module_names | {"echo", "__future__"}
    return [
        f"{tree.place(module)}:{line}: {target} is not in pyproject.toml"
        for module in tree.paths
        for line, target in tree.imports[module]
        if target.partition(".")[0] not in known
    ]


def needed_at_start(tree: SourceTree, root: str) -> set[str]:
    """Return the foreign packages without which a module cannot be imported."""
    found, waiting = set(), [root]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += tree.heads.get(module, ())
    packages = {module.partition(".")[0] for module in found}
    return packages - sys.stdlib_module_names - {"echo", "__future__"}


def import_cycle(tree: SourceTree) -> list[str]:
    """Return one import cycle as a list of modules, empty if there is none."""
    graph = {
        module: {target for _, target in tree.imports[module] if target in tree.paths}
        for module in tree.paths
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def large_classes(tree: SourceTree) -> list[str]:
    """Return every class with more lines or public methods than one thing has."""
    found = []
    for module in tree.paths:
        for node in tree.classes[module]:
            num_lines = (node.end_lineno or 0) - node.lineno + 1
            methods = [each for each in node.body if isinstance(each, FUNCTIONS)]
            num_public = sum(not each.name.startswith("_") for each in methods)
            if num_lines > MAX_CLASS_LINES or num_public > MAX_PUBLIC_METHODS:
                place = f"{tree.place(module)}:{node.lineno}"
                found.append(
                    f"{place}: {node.name} has {num_lines} lines, {num_public} public methods"
                )
    return found


def import_without(blocked: list[str], modules: list[str], directory: Path) -> str:
    """Import `modules` in a fresh interpreter where `blocked` packages do not exist.

    Returns:
        The last line of its error output: empty if all of them could be imported.
    """
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip().rpartition("\n")[2]


def declared_modules(*extras: str) -> set[str]:
    """Return the modules that the requirements of pyproject.toml bring, of all extras or these."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [project["dependencies"], *(optional[name] for name in extras or optional)]
    names = {re.split(r"[^\w-]", requirement)[0] for group in wanted for requirement in group}
    return {module for name in names for module in MODULES_OF.get(name, (name,))}


# What only the extras install; a base installation has none of it.
NOT_FOR_RELAYS = [
    "accelerate", "aiohttp", "math_verify", "matplotlib", "peft", "pyarrow", "safetensors", "scipy",
    "tensorboard", "tokenizers", "torch", "transformers", "triton", "verifiers", "vllm",
    "wandb",
]  # fmt: skip


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    return SourceTree(REPOSITORY)


def plant(directory: Path, files: dict[str, str]) -> SourceTree:
    """Write `files` ("wire/codec" is echo/wire/codec.py) and return their tree."""
    for name, text in files.items():
        path = directory / "echo" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SourceTree(directory)


@pytest.mark.slow
def test_imports_point_downward(tree: SourceTree) -> None:
    assert "\n".join(upward_imports(tree)) == ""


def test_each_foreign_package_stays_in_the_files_that_own_it(tree: SourceTree) -> None:
    assert "\n".join(trespasses(tree)) == ""


def test_pure_layers_do_not_reach_outside(tree: SourceTree) -> None:
    assert "\n".join(impurities(tree)) == ""


def test_threads_and_time_come_from_the_port_and_the_loop(tree: SourceTree) -> None:
    assert "\n".join(threads_beside_the_port(tree)) == ""
    files = {tree.place(module) for module in tree.paths}
    assert {f"runtime/{file}" for file in BLOCKING} <= files


@pytest.mark.parametrize("owned", OWNED, ids=lambda owned: owned.what)
def test_only_some_may_start_processes_threads_loops_and_tasks(
    tree: SourceTree, owned: Owned
) -> None:
    assert "\n".join(unpermitted(tree, owned)) == ""
    # And each exception is one.
    assert owned.others.keys() == {line.partition(":")[0] for line in strangers(tree, owned)}


def test_every_component_takes_its_sections_of_the_configuration(tree: SourceTree) -> None:
    assert "\n".join(whole_configurations(tree)) == ""
    # And each set-up has the whole in its hand.
    files = {tree.place(module) for module in tree.paths}
    assert {place for place in SEES_WHOLE if "*" not in place} <= files


def test_every_foreign_import_is_a_declared_dependency(tree: SourceTree) -> None:
    assert "\n".join(undeclared_imports(tree, declared_modules())) == ""


@pytest.mark.parametrize(
    ("root", "extras"),
    [
        ("echo.runtime.worker.setup", ("worker",)),
        ("echo.runtime.learner.setup", ("worker", "planner")),
    ],
)
def test_a_role_starts_without_the_extras_of_options(
    tree: SourceTree, root: str, extras: tuple[str, ...]
) -> None:
    assert needed_at_start(tree, root) - declared_modules(*extras) == set()


def test_there_is_no_import_cycle(tree: SourceTree) -> None:
    assert " -> ".join(import_cycle(tree)) == ""


def test_no_class_is_two_things(tree: SourceTree) -> None:
    assert "\n".join(large_classes(tree)) == ""


def test_each_number_has_its_reason(tree: SourceTree) -> None:
    found = [
        f"{tree.place(module)}:{line}: {source}: say what it limits, its unit, and why this value"
        for module, numbers in tree.bare_numbers.items()
        for line, source in numbers
    ]
    assert "\n".join(found) == ""


@pytest.mark.slow
def test_a_relay_imports_with_the_base_installation_alone(tree: SourceTree) -> None:
    roots = [
        module
        for module in tree.paths
        if any(fnmatch(tree.place(module), pattern) for pattern in RELAY_ROOTS)
    ]
    assert import_without(NOT_FOR_RELAYS, roots, REPOSITORY) == ""


@pytest.mark.slow
def test_planning_and_simulating_need_no_torch() -> None:
    others = [name for name in NOT_FOR_RELAYS if name not in ("scipy", "matplotlib")]
    modules = ["echo.cli.commands.plan", "echo.cli.commands.sim", "echo.sim.simulation"]
    assert import_without(others, modules, REPOSITORY) == ""


@pytest.mark.parametrize(
    ("module", "line", "complaint"),
    [
        ("wire/codec", "import echo.runtime.relay", "echo.wire.codec may not import"),
        ("wire/codec", "from echo.roles import node", "may not import echo.roles.node"),
        ("weights/store", "from echo.leases import book", "may not import echo.leases.book"),
        ("tasks/task", "def f():\n    import echo.config.load", "echo.tasks.task may not import"),
        ("__init__", "import echo.core.errors", "__init__.py:1: echo may not import echo.core"),
        ("helpers", "", "helpers.py: it is in no room"),
        ("tools/helpers", "", "tools/helpers.py: it is in no room"),
    ],
)
def test_a_planted_upward_import_is_found(
    tmp_path: Path, module: str, line: str, complaint: str
) -> None:
    known = ["core/errors", "runtime/relay", "roles/node", "leases/book", "config/load"]
    [found] = upward_imports(plant(tmp_path, dict.fromkeys(known, "") | {module: line}))
    assert complaint in found


def test_permitted_imports_are_left_alone(tmp_path: Path) -> None:
    planted = plant(
        tmp_path,
        {
            "__init__": "__version__ = '1'",
            "core/errors": "",
            "core/units": "from echo.core.errors import EchoError",
            "wire/messages": "from echo import __version__\nfrom echo.core.errors import EchoError",
            "wire/codec": "from echo.wire import messages",
            "weights/manifest": "from echo.wire.messages import Form",
            "engine/weights": "from echo.weights.manifest import TensorSpec\nimport torch",
            "net/zmq": "import os, zmq.asyncio\nfrom echo.core import errors",
        },
    )
    assert [*upward_imports(planted), *trespasses(planted), *impurities(planted)] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("runtime/relay", "from zmq import Context"),
        ("runtime/learner", "import rich.console"),
        ("engine/trainer", "import triton"),
        ("engine/transformers_engine", "import vllm"),
        ("tasks/addition", "if True:\n    from torch import nn"),
        ("tasks/addition", "import transformers"),
    ],
)
def test_a_planted_trespass_is_found(tmp_path: Path, module: str, line: str) -> None:
    [found] = trespasses(plant(tmp_path, {module: line}))
    assert "may import" in found


@pytest.mark.parametrize("line", ["import time", "from os import environ", "text = open('a')"])
def test_a_planted_impurity_is_found(tmp_path: Path, line: str) -> None:
    [found] = impurities(plant(tmp_path, {"wire/codec": line, "runtime/relay": line}))
    assert found.startswith("wire/codec.py:1: a pure layer may not ")


@pytest.mark.parametrize(
    "line",
    [
        "asyncio.to_thread(f)",
        "loop.run_in_executor(None, f)",
        "pool.submit(f)",
        "x = time.monotonic()",
        "from concurrent.futures import ThreadPoolExecutor",
    ],
)
def test_a_planted_way_past_the_port_is_found(tmp_path: Path, line: str) -> None:
    files = {"runtime/relay": line, "runtime/episodes": line, "tasks/host": line}
    [found] = threads_beside_the_port(plant(tmp_path, files))
    assert found.startswith("runtime/relay.py:1: ")


@pytest.mark.parametrize(
    ("what", "module", "lines"),
    [
        ("a process", "runtime/relay", "import subprocess as s\ns.run('ls')"),
        ("a process", "records/ledger", "from multiprocessing import Process\nProcess(target=f)"),
        ("a process", "cli/plan", "import asyncio\nasyncio.create_subprocess_exec('ls')"),
        ("a process", "train/ranks/rank_group", "from os import fork\nif not fork(): pass"),
        ("a thread", "records/ledger", "from threading import Thread\nThread(target=f).start()"),
        ("a thread", "weights/store", "import asyncio\nasyncio.to_thread(f)"),
        ("an event loop", "runtime/relay", "import asyncio\nasyncio.run(f())"),
        ("an event loop", "cli/sim", "from uvloop import run\nrun(f())"),
        ("an event loop", "net/zmq", "import asyncio\nloop = asyncio.new_event_loop()"),
        ("a task of an event loop", "runtime/relay", "import asyncio\nasyncio.create_task(f())"),
        ("a task of an event loop", "sim/worker", "asyncio.get_running_loop().create_task(f)"),
        ("the event loop", "records/ledger", "import asyncio"),
        ("the event loop", "ui/plots", "def f():\n    from asyncio import Event"),
        ("a wait without a turn of the loop", "runtime/node", "import asyncio\nasyncio.gather(t)"),
        ("ZeroMQ", "cli/sim", "from echo.net.zmq import ZmqTransport"),
        ("ZeroMQ", "sim/network", "import zmq.asyncio"),
    ],
)
def test_a_planted_start_is_found(tmp_path: Path, what: str, module: str, lines: str) -> None:
    [owned] = [owned for owned in OWNED if owned.what == what]
    known = dict.fromkeys((*owned.others, *(f"{room}/any" for room in owned.rooms)), lines)
    files = {name.removesuffix(".py"): text for name, text in known.items()}
    planted = plant(tmp_path, files | {"net/zmq": "", "core/run": "run()"} | {module: lines})
    [found] = unpermitted(planted, owned)
    assert re.match(rf"{module}\.py:[12]: .* is not for this file", found)


@pytest.mark.parametrize(
    "lines",
    [
        "from echo.config.schema import Config",
        "from echo.config.schema import Config as Settings",
        "from echo.config import schema\ndef f(c: schema.Config): pass",
        "import echo.config.schema as s\ndef f(c: s.Config): pass",
        "def f():\n    from echo.config.load import parse_config",
        "from echo.config import load",
        "import echo.config.load",
    ],
)
def test_a_planted_whole_configuration_is_found(tmp_path: Path, lines: str) -> None:
    places = ("runtime/relay", "runtime/worker/setup", "cli/commands/node", "config/checks")
    known = {"config/schema": "class Config: pass", "config/load": ""}
    [found] = whole_configurations(plant(tmp_path, known | dict.fromkeys(places, lines)))
    assert re.match(r"runtime/relay\.py:[12]: echo\.config\.\S+ is for the set-ups", found)


def test_a_planted_undeclared_import_is_found(tmp_path: Path) -> None:
    planted = plant(tmp_path, {"tasks": "import json, requests\nimport zmq"})
    [found] = undeclared_imports(planted, declared_modules())
    assert found == "tasks.py:1: requests is not in pyproject.toml"


def test_a_planted_cycle_is_found(tmp_path: Path) -> None:
    planted = plant(
        tmp_path,
        {
            "config/schema": "import echo.config.loading",
            "config/loading": "def load():\n    from echo.config import schema",
        },
    )
    assert set(import_cycle(planted)) == {"echo.config.schema", "echo.config.loading"}


@pytest.mark.parametrize(
    "member", ["    x = 0\n" * MAX_CLASS_LINES, "    def a(): pass\n" * (1 + MAX_PUBLIC_METHODS)]
)
def test_a_planted_large_class_is_found(tmp_path: Path, member: str) -> None:
    planted = plant(tmp_path, {"wire/codec": f"class A:\n{member}class B: pass"})
    [found] = large_classes(planted)
    assert re.match(r"wire/codec\.py:1: A has \d+ lines, \d+ public methods", found)


@pytest.mark.parametrize("number", ["A = 3", "A: int = -3", "A = 1 << B", "A, B = 3, 0.5"])
def test_a_planted_number_without_a_reason_is_found(tmp_path: Path, number: str) -> None:
    texts = (number, f"{number}  # b", f"# b\n{number}", f'{number}\n"""B."""', "A = B | C")
    tree = plant(tmp_path, {f"wire/{i}": f"import os\n\n{text}\n" for i, text in enumerate(texts)})
    assert {name: found for name, found in tree.bare_numbers.items() if found} == {
        "echo.wire.0": [(3, number)]
    }


def test_a_planted_heavy_import_stops_the_relay(tmp_path: Path) -> None:
    plant(tmp_path, {"runtime/relay": "import echo.tasks", "tasks": "import torch"})
    assert "torch" in import_without(NOT_FOR_RELAYS, ["echo.runtime.relay"], tmp_path)
