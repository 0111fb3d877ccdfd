"""Every benchmark can be started; whole runs of them are for whoever benches, and for --all.

The one that the ordinary run starts is that of the kernels (tests/kernels/test_bench_kernel.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.name for path in (REPOSITORY / "bench").glob("*.py") if "__main__" in path.read_text()
)
# One process for all of them: most of what each takes is the import of the same packages.
HELP = """
import contextlib, io, runpy, sys
for name in sys.argv[1:]:
    out = io.StringIO()
    sys.argv = [name, "--help"]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(f"bench/{name}", run_name="__main__")
    except SystemExit as end:
        assert not end.code, (name, end.code)
    assert out.getvalue().startswith(f"usage: {name}"), (name, out.getvalue())
    print(name)
"""


@pytest.mark.slow
def test_every_script_says_how_it_is_used() -> None:
    assert len(SCRIPTS) >= 20
    done = subprocess.run(
        [sys.executable, "-c", HELP, *SCRIPTS],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'bench'}"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == SCRIPTS


def test_every_module_can_be_imported() -> None:
    """Those that are no scripts are imported by one that is."""
    modules = {path.stem for path in (REPOSITORY / "bench").glob("*.py")}
    text = "".join(path.read_text() for path in (REPOSITORY / "bench").glob("*.py"))
    for name in modules - {script.removesuffix(".py") for script in SCRIPTS}:
        assert f"import {name}\n" in text or f"from {name} import" in text, name
