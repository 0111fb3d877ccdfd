"""The engine as one caller after the other sees it: one request in, one completion out.

An engine that takes requests at any time gets each in a call of its own; any other gets all that
wait and are sampled alike in one call, and then the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from echo.core.errors import EchoError, EngineError
from echo.engine.engine import (
    Completion,
    Engine,
    Request,
    Sampling,
    Watcher,
    describe_error,
    describe_nonfinite,
)
from echo.runtime.threads import Threads

MAX_CALLS = 64
"""Threads that wait for an engine that takes requests at any time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    request: Request
    sampling: Sampling
    answer: asyncio.Future[Completion]


class CallSampler:
    """Samples single requests."""

    def __init__(self, engine: Engine, watcher: Watcher, *, threads: Threads) -> None:
        """Start without requests; `run` has to run beside the callers."""
        self._engine = engine
        self._watcher = watcher
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        num_threads = MAX_CALLS if engine.is_continuous else 1
        self._pool = threads.pool("agent-call", num_threads)

    async def sample(self, request: Request, sampling: Sampling) -> Completion:
        """Return what is sampled for a request.

        Raises:
            EchoError: if the engine fails, or cannot sample such a request.
        """
        if self._engine.is_continuous:
            [completion] = await self._generate([request], sampling)
        else:
            answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            self._queue.put_nowait(_Waiting(request, sampling, answer))
            completion = await answer
        if completion.finish_reason == "nonfinite":
            raise EngineError(describe_nonfinite(completion))
        return completion

    async def run(self) -> None:
        """Answer what waits, all that are sampled alike at once, the oldest first."""
        waiting: list[_Waiting] = []
        while True:
            if not waiting:
                waiting.append(await self._queue.get())
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            waiting = [one for one in waiting if not one.answer.done()]  # its caller has hung up
            if not waiting:
                continue
            how = waiting[0].sampling
            batch = [one for one in waiting if one.sampling == how]
            waiting = [one for one in waiting if one.sampling != how]
            await self._answer(batch, how)

    async def _answer(self, batch: Sequence[_Waiting], sampling: Sampling) -> None:
        try:
            completions = await self._generate([one.request for one in batch], sampling)
        except EchoError as error:
            if len(batch) > 1:
                # It may be the fault of one of them.
                for one in batch:
                    await self._answer([one], sampling)
                return
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        for one, completion in zip(batch, completions, strict=True):
            if not one.answer.done():  # it is where its caller has hung up
                one.answer.set_result(completion)

    async def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        generated = self._pool.run(lambda: self._engine.generate(requests, sampling, self._watcher))
        try:
            return await generated
        except EchoError:
            raise
        except Exception as error:
            # A fault of one request, or of an engine that cannot serve any other.
            if not await self._pool.run(self._engine.can_sample):
                raise
            raise EngineError(f"the engine has raised {describe_error(error)}") from error
