"""Single requests on an engine that takes one batch at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion, Request, Sampling, VersionError
from echo.engine.hf.engine import TransformersEngine
from echo.engine.model import load_directory
from echo.runtime.agents.sessions import ANY_VERSION, CallBounds, CallSampler
from echo.runtime.threads import ThreadPools

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
HOW = Sampling(1.0, 1.0, 0, 4, ())


def test_each_request_is_sampled_within_its_own_bounds(tiny_model_dir: Path) -> None:
    engine = TransformersEngine(tiny_model_dir, num_threads=1)
    engine.load(load_directory(tiny_model_dir, "float32"), V1)
    wanted = [
        ANY_VERSION,
        CallBounds(exact_version=V1),
        CallBounds(min_version=V2),
        CallBounds(V1, V2),
    ]

    async def main() -> list[Completion | BaseException]:
        threads = ThreadPools()
        sampler = CallSampler(engine, threads=threads, should_stop=lambda: False)
        requests = [Request(f"r{n}", np.array([1, 5], np.int32), n) for n in range(len(wanted))]
        # All are there before the first batch is made.
        calls = [sampler.sample(r, HOW, b) for r, b in zip(requests, wanted, strict=True)]
        answers = asyncio.gather(*calls, return_exceptions=True)
        running = asyncio.create_task(sampler.run())
        async with asyncio.timeout(60):
            found = await answers
        running.cancel()
        threads.close()
        return found

    first, second, third, fourth = asyncio.run(main())
    assert [isinstance(one, Completion) for one in (first, second)] == [True, True]
    assert isinstance(third, VersionError)
    assert "at least v2 is wanted" in str(third)
    assert isinstance(fourth, VersionError)
    assert "exactly v2 is wanted" in str(fourth)
    engine.close()
