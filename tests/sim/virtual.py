"""Coroutines of tests on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from echo.sim.clock import VirtualLoop

Returned = TypeVar("Returned")


def run_virtual(main: Coroutine[Any, Any, Returned]) -> Returned:
    """Run a coroutine to its end on a loop of its own, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
