from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from echo.sim.network import Network
from tests.promises.conftest import make_world  # noqa: F401 -- a fixture
from tests.runtime.harness import Play, Run


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def write_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that makes a module with a task importable: (name, source)."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


@pytest.fixture
def play(tmp_path: Path, model_dir: Path) -> Play:
    """Return a function that plays a scenario, a coroutine function of a `Run`."""

    def run_scenario(scenario: Callable[[Run], Awaitable[None]], *, limit_s: float = 100) -> None:
        async def main() -> None:
            async with asyncio.timeout(limit_s):
                await scenario(Run(tmp_path, model_dir, Network()))

        asyncio.run(main())

    return run_scenario
