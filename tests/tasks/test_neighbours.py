"""Files beside a task's code: found as Python finds them, and compared between nodes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo.core.errors import ConfigError
from echo.tasks.rewards import Limits, PoolHost, RewardError
from echo.tasks.task import Example, check_code, code_digest, code_of, load_function

SPAWNING = """
import multiprocessing, os, wave
from concurrent.futures import ProcessPoolExecutor
def judge(text): return len(text)
def f(completion):
    if completion == "die":
        os._exit(1)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(judge, completion).result()
"""

FILES = {
    "sub/rewards.py": "from helper import worth\nimport echo.tasks.task, json, os.path\n"
    "def f(completion):\n    import tools.late\n    return worth(completion) + tools.late.BONUS\n",
    "sub/helper.py": "import common\ndef worth(text): return len(text) * common.SCALE\n",
    "sub/tools/late.py": "BONUS = 0.5\n",
    "sub/unused.py": "1 / 0\n",
    "common.py": "SCALE = 2\n",
    "pack/__init__.py": "",
    "pack/deep/__init__.py": "",
    "pack/deep/rewards.py": "from . import near\nfrom ..far import SCALE\n"
    "def f(completion): return near.worth(completion) * SCALE\n",
    "pack/deep/near.py": "from .nearest import worth\n",
    "pack/deep/nearest.py": "def worth(text): return len(text)\n",
    "pack/far.py": "SCALE = 3\n",
    "flat/rewards.py": "from .near import worth as f\n",
    "flat/near.py": "def worth(completion): return 7\n",
    "hidden/rewards.py": "import importlib\nf = importlib.import_module('veiled').worth\n",
    "hidden/veiled.py": "def worth(completion): return 8\n",
    "other/rewards.py": "def f(completion):\n    from helper import worth\n    return worth('')\n",
    "other/helper.py": "def worth(text): return 9\n",
    "shadow/rewards.py": "import random\ndef f(completion): return random.random()\n",
    "shadow/random.py": "def random(): return 0\n",
    "broken/rewards.py": "import no_such_neighbour\n",
    "looped/rewards.py": "import asyncio\nasyncio.get_running_loop()\n",
    **{f"crowd/{name}.py": "raise SystemExit\n" for name in ("random", "numpy", "msgspec", "wave")},
    "crowd/rewards.py": SPAWNING,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The learner's directory; imports are undone afterwards."""
    modules, search = set(sys.modules), list(sys.path)
    write(tmp_path / "learner")
    monkeypatch.chdir(tmp_path / "learner")
    yield tmp_path
    sys.path[:] = search
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(directory: Path) -> Path:
    for name, text in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory


CASES = [
    ("sub", 4.5, ["../common.py", "helper.py", "tools/late.py"]),
    ("pack/deep", 6, ["../__init__.py", "../far.py", "__init__.py", "near.py", "nearest.py"]),
    ("flat", 7, ["near.py"]),
    ("hidden", 8, ["veiled.py"]),
    ("other", 9, ["helper.py"]),
]


@pytest.mark.parametrize(("directory", "reward", "neighbours"), CASES)
def test_a_file_finds_its_neighbours_and_all_that_it_uses_are_hashed(
    directory: str, reward: float, neighbours: list[str]
) -> None:
    spec = f"{directory}/rewards.py:f"
    assert load_function("x", spec)("ab") == reward
    [code] = code_of("dataset", {"reward": spec}).values()
    assert sorted(code["neighbours"]) == sorted(neighbours)


@pytest.mark.parametrize(("directory", "reward", "neighbours"), CASES)
def test_a_worker_refuses_other_neighbours_before_it_runs_any(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    directory: str,
    reward: float,
    neighbours: list[str],
) -> None:
    options = {"reward": f"{directory}/rewards.py:f"}
    load_function("x", options["reward"])
    learners = code_of("dataset", options)
    worker = write(here / "worker")
    monkeypatch.chdir(worker)
    for name in set(sys.modules):  # another process
        if str(here) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.path[:] = [each for each in sys.path if str(here) not in each]

    def check() -> None:
        check_code("dataset", options, learners, inherited_dir=here / "inherited")

    check()
    same = code_digest("dataset", options)
    for place in neighbours:
        file = Path(os.path.normpath(worker / directory / place))
        before = file.read_text()
        file.write_text(before + "raise SystemExit  # another\n")
        theirs = here / "learner" / file.relative_to(worker)
        with pytest.raises(ConfigError, match=f"another one here than {re.escape(str(theirs))}"):
            check()
        is_hidden = directory == "hidden"  # its neighbour is found once it is loaded
        assert is_hidden or code_digest("dataset", options) != same
        file.unlink()
        if not place.endswith("__init__.py"):  # a directory is a package without it, too
            with pytest.raises(ConfigError, match=f"is not here: copy {re.escape(str(theirs))}"):
                check()
        file.write_text(before)
    check()


def test_a_neighbour_that_the_learner_lacks_is_refused(here: Path) -> None:
    (here / "learner" / "sub" / "helper.py").rename(here / "learner" / "helper.py")
    options = {"reward": "sub/rewards.py:f"}
    learners = code_of("dataset", options)
    (here / "learner" / "sub" / "json.py").write_text("raise SystemExit\n")
    with pytest.raises(ConfigError, match=r"is here and not on the learner's.*remove .*json\.py"):
        check_code("dataset", options, learners, inherited_dir=here / "inherited")


def test_neighbours_of_equal_name_are_refused_whichever_is_imported_first() -> None:
    load_function("x", "other/rewards.py:f")  # which imports its own only when it is called
    what = (
        r"x: .*sub/rewards\.py imports 'helper' from .*sub/helper\.py, but 'helper' is .*other/hel"
    )
    with pytest.raises(ConfigError, match=what):
        load_function("x", "sub/rewards.py:f")


def test_a_neighbour_that_another_module_hides_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"imports 'random' from .*shadow/random\.py: Python's own .*rename"
    ):
        load_function("x", "shadow/rewards.py:f")


def test_what_needs_a_running_loop_is_told_where_to_make_it() -> None:
    with pytest.raises(ConfigError, match=r"no running event loop; make what needs .* first call"):
        load_function("x", "looped/rewards.py:f")


@pytest.mark.slow
def test_files_that_no_reward_imports_hide_nothing_and_code_that_changes_is_not_run(
    here: Path,
) -> None:
    """The code also finds its own functions in processes that it spawns."""
    file = here / "learner" / "crowd" / "rewards.py"
    file.write_text(SPAWNING.replace(", wave", ""))
    options = {"reward": "crowd/rewards.py:f"}
    limits = Limits(score_s=60.0, step_s=60.0)
    example = Example(index=0, split="train", prompt="?")
    host = PoolHost("dataset", options, limits, max_concurrent=1)
    try:
        assert host.score(example, "abc") == 3
        file.write_text(SPAWNING)
        with pytest.raises(RewardError, match="process died"):
            host.score(example, "die")
        with pytest.raises(RewardError, match=rf"{file} is not what it was when this node started"):
            host.score(example, "abc")
    finally:
        host.close()
    with pytest.raises(ConfigError, match=r"imports 'wave' from .*wave\.py: Python's own"):
        load_function("x", options["reward"])


def test_a_neighbour_that_is_not_found_is_told_with_the_places() -> None:
    what = (
        r"No module named 'no_such_neighbour'; looked in .*broken, .*learner and among the install"
    )
    with pytest.raises(ConfigError, match=what):
        load_function("x", "broken/rewards.py:f")
