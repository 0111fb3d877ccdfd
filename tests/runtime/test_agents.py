"""Calls that wait for a version."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from echo.core.metrics import Counters
from echo.core.rollout import PolicyVersion
from echo.engine.engine import VersionError
from echo.runtime.agents.sessions import Agents, CallBounds, CallOptions
from echo.runtime.threads import ThreadPools

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def make_agents(clock: Any) -> Agents:
    """Return the agents of a worker on v1, which samples nothing."""
    session = SimpleNamespace(max_groups=0, installed_version=V1, counters=Counters())
    parts: Any = SimpleNamespace(group_size=1, session_timeout_s=60.0)
    sampler: Any = None
    pool = ThreadPools().pool("reward")
    return Agents(
        parts, session, sampler,  # type: ignore[arg-type]
        reward_pool=pool, perform=lambda actions: None, clock=clock,
    )  # fmt: skip


@pytest.mark.parametrize("bounds", [CallBounds(min_version=V2), CallBounds(exact_version=V2)])
def test_a_call_that_waits_for_a_version_is_refused_once_the_worker_stops(
    bounds: CallBounds,
) -> None:
    async def main() -> None:
        agents = make_agents(lambda: 0.0)  # its patience never ends
        options = CallOptions(bounds=bounds, version_wait_s=60.0)
        call = asyncio.create_task(agents.call(None, "1+1=", options))
        await asyncio.sleep(0.01)
        assert not call.done()
        agents.close()
        async with asyncio.timeout(60):
            with pytest.raises(VersionError, match="v2 is wanted, v1 is installed"):
                await call
        assert agents.session.counters["engine/version_refused"] == 1

    asyncio.run(main())
