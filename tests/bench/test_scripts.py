"""Every benchmark can be started; whole runs of them are for whoever benches.

The one that the ordinary run starts is that of the kernels (tests/kernels/test_bench_kernel.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(path.name for path in BENCH.glob("*.py") if "__main__" in path.read_text())


START_EACH = """
import contextlib, io, runpy, sys

for path in sys.argv[1:]:
    sys.argv, out, code = [path.rpartition("/")[2], "--help"], io.StringIO(), "no exit"
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code
    assert not code, f"{path}: {code}"
    assert out.getvalue().startswith(f"usage: {sys.argv[0]}"), path
"""


@pytest.mark.slow
def test_every_script_says_how_it_is_used() -> None:
    """In one process of their own: what they change of the product is theirs."""
    assert len(SCRIPTS) >= 20
    command = [sys.executable, "-c", START_EACH, *(str(BENCH / name) for name in SCRIPTS)]
    paths = {"PYTHONPATH": os.pathsep.join([str(BENCH), str(BENCH.parent)])}
    ended = subprocess.run(
        command, env=os.environ | paths, capture_output=True, text=True, timeout=120, check=False
    )
    assert not ended.returncode, ended.stderr


def test_every_module_can_be_imported() -> None:
    """Those that are no scripts are imported by one that is."""
    modules = {path.stem for path in BENCH.glob("*.py")}
    text = "".join(path.read_text() for path in BENCH.glob("*.py"))
    for name in modules - {script.removesuffix(".py") for script in SCRIPTS}:
        assert f"import {name}\n" in text or f"from {name} import" in text, name
