"""CPU seconds are charged to the package whose test used them, children and fixtures included."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest

from tests import cpu_time

pytest_plugins = ["pytester"]

SESSION = """
    import os
    import pytest

    def pytest_addoption(parser):
        parser.addoption("--all", action="store_true")

    def use(seconds):
        os.environ["CPU_S"] = str(float(os.environ["CPU_S"]) + seconds)

    @pytest.fixture(scope="session")
    def model():
        use(8)

    @pytest.fixture
    def node():
        use(1)
        yield
        use(2)
"""


BUDGET = """
piece_of_work_s = 0.01

[cpu_s]
sim = 20
ui = 2.9
top = 0.1
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the clock of CPU seconds go as the tests of a planted session say, a quarter slower."""
    (tmp_path / "budget.toml").write_text(BUDGET)
    monkeypatch.setenv("CPU_S", "0")
    monkeypatch.setattr(cpu_time, "used_s", lambda: float(os.environ["CPU_S"]))
    monkeypatch.setattr(cpu_time, "piece_of_work_s", lambda: 0.0125)
    monkeypatch.setattr(cpu_time, "BUDGET", tmp_path / "budget.toml")


@pytest.fixture
def run(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Return a function that runs a planted session."""

    def run(files: dict[str, str], *options: str) -> pytest.RunResult:
        pytester.makeini("[pytest]\ntestpaths = tests")
        pytester.makeconftest(SESSION)
        for name, text in files.items():
            path = pytester.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("import pytest\nfrom conftest import use\n" + text)
        return pytester.runpytest_inprocess("-p", "tests.cpu_time", *options)

    return run


Run = Callable[..., pytest.RunResult]
FILES = {
    "tests/sim/test_a.py": "def test_a(model, node): use(1)\ndef test_b(model): use(.5)",
    "tests/ui/test_b.py": "def test_c(node): assert False",
    "tests/test_c.py": "use(32)\ndef test_d(): use(.5)",
    "tests/z/test_vllm_d.py": "def test_e(node): use(.25)",
}


def lines_of(result: pytest.RunResult) -> list[str]:
    """Return the lines under the plugin's head."""
    [head] = [n for n, line in enumerate(result.outlines) if "CPU seconds by package" in line]
    lines = takewhile(lambda line: line[:1] != "=", result.outlines[head + 1 :])
    return [" ".join(line.split()) for line in lines if line]


@pytest.mark.slow
def test_every_package_has_its_line_with_set_up_and_teardown(run: Run) -> None:
    assert lines_of(run(FILES)) == [
        "sim = 12.5 # of 20, 2 tests",
        "vllm = 3.2 # 1 tests",
        "ui = 3.0 # of 2.9, 1 tests",
        "top = 0.5 # of 0.1, 1 tests",
        "# 51.2 in all, 32.0 outside tests, on a machine 1.25 times as slow as the budgets'",
        "OVER BUDGET: top used 0.5 s of CPU, and its budget is 0.1 s (times 2.50 on this machine): "
        "see --durations=20",
    ]


@pytest.mark.parametrize(
    ("ci", "piece_s", "status"), [("true", 0.0125, 1), ("true", 0.0151, 0), ("", 0.0125, 0)]
)
@pytest.mark.parametrize(
    "files",
    [
        {"tests/test_c.py": FILES["tests/test_c.py"]},
        {"tests/sim/test_a.py": "def test_a(): use(3.1)"},
    ],
    ids=["a package", "a test"],
)
def test_in_continuous_integration_limits_bind_on_a_quiet_machine(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    ci: str,
    piece_s: float,
    status: int,
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(cpu_time, "piece_of_work_s", lambda: piece_s)
    result = run(files)
    assert result.ret == status
    assert "OVER" in result.stdout.str()


@pytest.mark.parametrize(
    ("used", "over"),
    [
        ([1.8, 1.9, 2.0, 2.1, 3.9], {}),
        ([1.8, 1.9, 2.0, 2.1, 4.1], {"wire": "4.1 s of CPU, and its budget is 1 s (times 4.00"}),
        (
            [2.5, 2.5, 2.5, 2.5, 2.6],
            {"all together": "12.6 s of CPU, and its budget is 5 s (times 2.50"},
        ),
    ],
)
def test_a_package_is_measured_by_the_others_and_all_by_the_piece_of_work(
    run: Run, tmp_path: Path, used: list[float], over: dict[str, str]
) -> None:
    packages = ("core", "net", "sim", "ui", "wire")
    limits = "".join(f"{package} = 1\n" for package in packages)
    (tmp_path / "budget.toml").write_text(f"piece_of_work_s = 0.01\n[cpu_s]\n{limits}")
    files = {
        f"tests/{name}/test_{name}.py": f"def test(): use({s})"
        for name, s in zip(packages, used, strict=True)
    }
    told = [line for line in lines_of(run(files)) if "OVER BUDGET" in line]
    expected = [f"OVER BUDGET: {name} used {text}" for name, text in over.items()]
    assert [line.partition(" on this")[0] for line in told] == expected


@pytest.mark.parametrize(
    ("mark", "use", "options", "is_over"),
    [
        ("", 2.4, [], False),
        ("", 2.6, [], True),
        ("", 2.6, ["tests/sim"], False),
        ("", 2.6, ["--all"], False),
        ("slow", 24, [], False),
        ("slow", 26, [], True),
        ("e2e", 99, [], False),
    ],
)
def test_what_a_test_uses_by_itself_has_a_limit(
    run: Run, mark: str, use: float, options: list[str], is_over: bool
) -> None:
    decorator = f"@pytest.mark.{mark}\n" if mark else ""
    files = {"tests/sim/test_a.py": f"{decorator}def test_a(model): use({use})"}
    result = run(files, *options)
    assert (f"test_a used {use:.2f} s of CPU by itself" in result.stdout.str()) == is_over


@pytest.mark.slow
def test_children_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    program = "import time\nwhile time.process_time() < .1: pass"
    before = cpu_time.used_s()
    subprocess.run([sys.executable, "-S", "-c", program], check=True)
    assert cpu_time.used_s() - before > 0.03


@pytest.mark.skipif(sys.platform != "linux", reason="it is read from /proc")
@pytest.mark.slow
def test_a_child_that_still_runs_is_counted_and_so_are_those_that_it_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    program = "import time\nwhile time.process_time() < .1: pass"
    waiting = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])\n"
    waiting += "print('done', flush=True)\nsys.stdin.read()"
    before = cpu_time.used_s()
    with subprocess.Popen(
        [sys.executable, "-c", waiting, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        assert cpu_time.used_s() - before >= 0.05
        child.communicate()


def test_every_package_has_a_budget_and_all_together_one() -> None:
    budget = tomllib.loads((Path(__file__).with_name("budget.toml")).read_text())
    folders = {path.parent.name for path in Path(__file__).parent.glob("*/test_*.py")}
    assert set(budget["cpu_s"]) == folders | {"top", "vllm"}
    assert sum(budget["cpu_s"].values()) <= budget["total_s"]
