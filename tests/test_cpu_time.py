"""CPU seconds are charged to the package whose test used them, children and fixtures included."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import takewhile

import pytest

from tests import cpu_time

pytest_plugins = ["pytester"]

SESSION = """
    import os
    import pytest

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


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of CPU seconds go as the tests of a planted session say."""
    monkeypatch.setenv("CPU_S", "0")
    monkeypatch.setattr(cpu_time, "used_s", lambda: float(os.environ["CPU_S"]))


def run(pytester: pytest.Pytester, files: dict[str, str], *options: str) -> list[str]:
    """Run a planted session and return the lines under the plugin's head."""
    pytester.makeconftest(SESSION)
    for name, text in files.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from conftest import use\n" + text)
    result = pytester.runpytest_inprocess("-p", "tests.cpu_time", *options)
    [head] = [n for n, line in enumerate(result.outlines) if "CPU seconds by package" in line]
    lines = takewhile(lambda line: line[:1] != "=", result.outlines[head + 1 :])
    return [" ".join(line.split()) for line in lines if line]


@pytest.mark.slow
@pytest.mark.usefixtures("spent")
def test_every_package_has_its_line_with_set_up_and_teardown(pytester: pytest.Pytester) -> None:
    files = {
        "tests/sim/test_a.py": "def test_a(model, node): use(4)\ndef test_b(model): use(16)",
        "tests/ui/test_b.py": "def test_c(node): assert False",
        "tests/test_c.py": "use(32)\ndef test_d(): use(.5)",
    }
    assert run(pytester, files) == [
        "sim = 31.0 # 2 tests",
        "ui = 3.0 # 1 tests",
        "top = 0.5 # 1 tests",
        "# 66.5 in all, 32.0 of them outside tests",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("spent")
def test_a_second_run_is_charged_with_the_first(pytester: pytest.Pytester) -> None:
    flaky = "def test_a(node):\n    use(4)\n    assert float(os.environ['CPU_S']) > 8"
    files = {"tests/sim/test_a.py": f"import os\n{flaky}"}
    assert run(pytester, files, "--reruns", "1")[0] == "sim = 14.0 # 1 tests"


def test_children_are_counted() -> None:
    program = "import time\nwhile time.process_time() < .05: pass"
    before = cpu_time.used_s()
    subprocess.run([sys.executable, "-S", "-c", program], check=True)
    assert cpu_time.used_s() - before >= 0.04


@pytest.mark.skipif(sys.platform != "linux", reason="it is read from /proc")
def test_a_child_that_still_runs_is_counted_and_so_are_those_that_it_waited_for() -> None:
    program = "import time\nwhile time.process_time() < .05: pass"
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
