"""Every benchmark can be started; whole runs of them are for whoever benches.

The one that the ordinary run starts is that of the kernels (tests/kernels/test_bench_kernel.py).
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import re
import runpy
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
MODULES = {
    ".".join(path.relative_to(BENCH).with_suffix("").parts): path.read_text()
    for path in sorted(BENCH.rglob("*.py"))
    if path.name != "__init__.py"
}
SCRIPTS = [name for name, text in MODULES.items() if "__main__" in text]


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
        assert out.getvalue().startswith("usage: "), name


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
