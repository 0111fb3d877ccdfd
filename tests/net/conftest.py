from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from echo.net.curve import CurveKeys
from echo.net.transport import TransportOptions
from echo.net.zmq import ZmqTransport

Run = Callable[[Awaitable[None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Return a function that runs a scenario to its end, on one loop or the other."""

    async def bounded(scenario: Awaitable[None]) -> None:
        async with asyncio.timeout(60):
            await scenario

    def go(scenario: Awaitable[None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(bounded(scenario))

    return go


each_loop_with_all = pytest.mark.parametrize(
    "run",
    [uvloop.new_event_loop, pytest.param(asyncio.new_event_loop, marks=pytest.mark.matrix)],
    ids=["uvloop", "asyncio"],
    indirect=True,
)
"""For scenarios with a process of their own: on one loop, and with --all on both."""


def num_open_files() -> int:
    """Return how many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.asynccontextmanager
async def opened(
    listen: str | None = None,
    keys: CurveKeys | None = None,
    *,
    options: TransportOptions | None = None,
) -> AsyncIterator[ZmqTransport]:
    """A transport that has been started, and is closed at the end."""
    transport = ZmqTransport(listen, options, keys)
    try:
        await transport.start()
        yield transport
    finally:
        await transport.close()
