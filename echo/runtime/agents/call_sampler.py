"""Sample single requests of many callers with one engine.

A continuous engine gets each request in a separate call. For any other engine, waiting requests
with the same sampling settings are sampled in one call.
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
"""Largest number of threads for calls of a continuous engine; each thread waits for one call."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    request: Request
    sampling: Sampling
    answer: asyncio.Future[Completion]


class CallSampler:
    """Samples single requests, in batches if the engine is not continuous."""

    def __init__(self, engine: Engine, watcher: Watcher, *, threads: Threads) -> None:
        """Start without requests. The caller must run `run`."""
        self._engine = engine
        self._watcher = watcher
        self._queue: asyncio.Queue[_Waiting | EchoError] = asyncio.Queue()
        """The requests for `run`. An error says that the engine can no longer sample."""
        num_threads = MAX_CALLS if engine.is_continuous else 1
        self._pool = threads.pool("agent-call", num_threads)

    async def sample(self, request: Request, sampling: Sampling) -> Completion:
        """Sample a request, and return its completion.

        Raises:
            EchoError: if the engine fails, or cannot sample this request.
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
        """Sample waiting requests until cancelled.

        Each batch has the oldest waiting request, and all other waiting requests with the same
        settings.

        Raises:
            EchoError: if the engine can no longer sample, so that the node must end.
        """
        waiting: list[_Waiting] = []
        while True:
            if not waiting:
                waiting.append(_checked(await self._queue.get()))
            while not self._queue.empty():
                waiting.append(_checked(self._queue.get_nowait()))
            waiting = [one for one in waiting if not one.answer.done()]  # its caller is gone
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
                # One request may have caused the error, so sample each alone.
                for one in batch:
                    await self._answer([one], sampling)
                return
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        for one, completion in zip(batch, completions, strict=True):
            if not one.answer.done():  # already done if its caller has gone
                one.answer.set_result(completion)

    async def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        generate = self._engine.generate
        try:
            return await self._pool.run(lambda: generate(requests, sampling, self._watcher))
        except Exception as error:
            text = f"the engine has raised {describe_error(error)}"
            can_sample = await self._pool.run(self._engine.can_sample)
            if not can_sample:
                text += " and cannot sample any more; restart the worker"
            failure = error if isinstance(error, EchoError) else EngineError(text)
            if not can_sample:
                self._queue.put_nowait(failure)  # for `run`, which ends the node
            if failure is error:
                raise
            raise failure from error


def _checked(found: _Waiting | EchoError) -> _Waiting:
    if isinstance(found, EchoError):
        raise found
    return found
