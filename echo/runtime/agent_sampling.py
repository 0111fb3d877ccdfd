"""The engine as one caller after the other sees it: one request in, one completion out.

An engine that takes requests at any time gets each in a call of its own; any other gets all that
wait and are sampled alike in one call, and then the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echo.core.errors import EchoError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion, Engine, Request, Sampling
from echo.runtime.threads import Threads

MAX_CALLS = 64
"""Threads that wait for an engine that takes requests at any time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which versions may sample; see `Engine.generate`."""

    min_version: PolicyVersion | None = None
    exact_version: PolicyVersion | None = None


ANY_VERSION = Bounds()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    request: Request
    sampling: Sampling
    bounds: Bounds
    answer: asyncio.Future[Completion]


class CallSampler:
    """Samples single requests."""

    def __init__(
        self, engine: Engine, *, threads: Threads, should_stop: Callable[[], bool]
    ) -> None:
        """Start without requests; `run` has to run beside the callers.

        Args:
            engine: samples.
            threads: the node's.
            should_stop: asked again and again; once true, unfinished completions are cut short.
        """
        self._engine = engine
        self._should_stop = should_stop
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        num_threads = MAX_CALLS if engine.is_continuous else 1
        self._pool = threads.pool("agent-call", num_threads)

    async def sample(self, request: Request, sampling: Sampling, bounds: Bounds) -> Completion:
        """Return what is sampled for a request.

        Raises:
            VersionError: if the version that is installed is not within the bounds.
            EchoError: if the engine fails, or cannot sample such a request.
        """
        if self._engine.is_continuous:
            [completion] = await self._generate([request], sampling, bounds)
            return completion
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Waiting(request, sampling, bounds, answer))
        return await answer

    async def run(self) -> None:
        """Answer what waits, all that are sampled alike at once, the oldest first."""
        waiting: list[_Waiting] = []
        while True:
            if not waiting:
                waiting.append(await self._queue.get())
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            how = waiting[0].sampling, waiting[0].bounds
            batch = [one for one in waiting if (one.sampling, one.bounds) == how]
            waiting = [one for one in waiting if (one.sampling, one.bounds) != how]
            await self._answer(batch, *how)

    async def _answer(self, batch: Sequence[_Waiting], sampling: Sampling, bounds: Bounds) -> None:
        try:
            completions = await self._generate([one.request for one in batch], sampling, bounds)
        except EchoError as error:
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        for one, completion in zip(batch, completions, strict=True):
            if not one.answer.done():  # it is where its caller has hung up
                one.answer.set_result(completion)

    async def _generate(
        self, requests: Sequence[Request], sampling: Sampling, bounds: Bounds
    ) -> list[Completion]:
        return await self._pool.run(
            lambda: self._engine.generate(
                requests,
                sampling,
                should_stop=self._should_stop,
                min_version=bounds.min_version,
                exact_version=bounds.exact_version,
            ),
        )
