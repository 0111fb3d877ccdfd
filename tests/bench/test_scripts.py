"""Every benchmark can be started; whole runs of them are for whoever benches.

The one that the ordinary run starts is that of the kernels (tests/kernels/test_bench_kernel.py).
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(path.name for path in BENCH.glob("*.py") if "__main__" in path.read_text())


@pytest.mark.slow
def test_every_script_says_how_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has most of what they import."""
    monkeypatch.syspath_prepend(str(BENCH))
    assert len(SCRIPTS) >= 20
    for name in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
            runpy.run_path(str(BENCH / name), run_name="__main__")
        assert not end.value.code, name
        assert out.getvalue().startswith(f"usage: {name}")


def test_every_module_can_be_imported() -> None:
    """Those that are no scripts are imported by one that is."""
    modules = {path.stem for path in BENCH.glob("*.py")}
    text = "".join(path.read_text() for path in BENCH.glob("*.py"))
    for name in modules - {script.removesuffix(".py") for script in SCRIPTS}:
        assert f"import {name}\n" in text or f"from {name} import" in text, name
