"""Where a task's code runs: in this process or in processes of its own.

A host is called from any thread and blocks it until the answer is there, which takes at most the
call's time limit for every time that it is tried. What a task asks to be called again for is tried
again, a bounded number of times. Calls, seconds and faults are counted under `env/...`.
"""

from __future__ import annotations

import abc
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

from echo.tasks.bounded_calls import BoundedCalls
from echo.tasks.calls import Answer, Begin, Call, End, Outcome, Performer, Reply, Score
from echo.tasks.environment import Message
from echo.tasks.faults import RewardError
from echo.tasks.task import Example, Task

MAX_RETRIES = 2
"""How often a call is repeated whose code asks for it or lacks a connection."""

TICK_S = 1.0
"""Seconds after which somebody who waits for a free process is told that all is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a task's code may take."""

    score_s: float
    """Seconds for one reward."""
    step_s: float
    """Seconds for one call of an environment."""
    memory_bytes: int | None = None
    """Bytes that a process of the task's may have; None for any number."""
    max_abs_reward: float = 1e6
    """Largest reward, either way."""

    def seconds(self, call: Call) -> float:
        """Return what a call may take."""
        return self.score_s if isinstance(call, Score) else self.step_s

    def key(self, call: Call) -> str:
        """Return the configuration's key of that limit."""
        return "task.reward_timeout_s" if isinstance(call, Score) else "task.step_timeout_s"


class TaskHost(abc.ABC):
    """A task that can be called; thread-safe."""

    def __init__(self, name: str, limits: Limits, *, max_concurrent: int) -> None:
        """Start with nothing counted.

        Args:
            name: what messages call the task.
            limits: of its calls.
            max_concurrent: calls of `score_all` at a time; 0 to make them where it is called.
        """
        self.name = name
        self.limits = limits
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._max_concurrent = max_concurrent
        self._threads: ThreadPoolExecutor | None = None

    # --- what hosts fill in ----------------------------------------------------------------------

    @abc.abstractmethod
    def _answer(self, call: Call) -> Answer:
        """Carry out a call.

        Raises:
            RewardError: if it does not come back; trying again will not help.
        """

    def close(self) -> None:
        """Let go of everything; calls that still run end with an error."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    # --- calls -----------------------------------------------------------------------------------

    def score(self, example: Example, completion: str) -> float:
        """Return what an answer is worth.

        Raises:
            RewardError: if the task's code cannot say.
        """
        return float(self.perform(Score(asdict(example), completion)))

    def score_all(
        self,
        example: Example,
        completions: Sequence[str],
        *,
        on_progress: Callable[[int], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[float]:
        """Return what each answer is worth, several at a time.

        Args:
            example: what they answer.
            completions: the answers.
            on_progress: told 1 for every answer that is scored, and now and then while waiting.
            should_stop: once it returns True fewer rewards come back, or none.

        Raises:
            RewardError: the first that there was; the other answers are not waited for.
        """
        if not self._max_concurrent:
            rewards = []
            for text in completions:
                rewards.append(self.score(example, text))
                on_progress(1)
                if should_stop():
                    break
            return rewards
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._max_concurrent, "echo-score")
            futures = [self._threads.submit(self.score, example, text) for text in completions]
        running = set(futures)
        try:
            while running:
                done, running = wait(running, timeout=TICK_S, return_when=FIRST_COMPLETED)
                on_progress(max(1, len(done)))
                for future in done:
                    future.result()
                if running and should_stop():
                    return []
                # `close` cancels what has not begun, and `wait` would wait for it for ever.
                if any(future.cancelled() for future in running):
                    raise RewardError(f"{self.name} is being closed", reason="reward_lost")
        finally:
            for future in running:
                future.cancel()
        return [future.result() for future in futures]

    def begin(self, example: Example) -> Episode:
        """Open an episode.

        Raises:
            RewardError: if the task's code cannot.
        """
        episode = f"{example}#{uuid.uuid4().hex}"
        self.perform(Begin(episode, asdict(example)))
        return Episode(self, episode)

    def perform(self, call: Call) -> Any:
        """Return the value of a call, which is tried again where it asks for that.

        Raises:
            RewardError: if there is none.
        """
        for attempt in range(MAX_RETRIES + 1):
            if attempt:
                self.count("env/retries")
                time.sleep(0.1 * 2**attempt)
            started_at = time.monotonic()
            try:
                answer = self._answer(call)
            except RewardError:
                self.count("env/errors")
                raise
            finally:
                milliseconds = round(1000 * (time.monotonic() - started_at))
                self.count("env/calls")
                self.count("env/milliseconds", milliseconds)
            if answer.fault is None:
                return self._bounded(call, answer.value)
            if not answer.fault.is_transient:
                break
        self.count("env/errors")
        assert answer.fault is not None
        if answer.fault.is_transient:
            text = f"{answer.fault.text}; tried {attempt + 1} times"
            raise RewardError(text, reason="reward_retries", traceback=answer.fault.traceback)
        fault = answer.fault
        raise RewardError(fault.text, reason=fault.reason, traceback=fault.traceback)

    def _bounded(self, call: Call, value: Any) -> Any:
        """Return what a call gave; a reward must be one that a step can bear."""
        bound = self.limits.max_abs_reward
        if not isinstance(call, Score | Outcome):
            return value
        if isinstance(value, int | float) and abs(value) <= bound:
            return value
        self.count("env/errors")
        raise RewardError(
            f"{self.name}.{call} returned {value!r}, beyond task.max_reward = {bound:g}; scale the "
            "task's rewards, or raise it",
            reason="reward_too_large",
        )

    def timed_out(self, call: Call) -> RewardError:
        """Return the error of a call that did not come back in time."""
        return RewardError(
            f"{self.name}.{call} did not return within {self.limits.seconds(call):g} s; raise "
            f"{self.limits.key(call)} or make it faster",
            reason="reward_timeout",
        )

    # --- counts ----------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since the last call, by the counter's name."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def count(self, name: str, number: int = 1) -> None:
        """Count something; names begin with "env/"."""
        with self._lock:
            self._counts[name] += number


class Episode:
    """One episode that is open on a host."""

    def __init__(self, host: TaskHost, episode: str) -> None:
        self._host = host
        self._episode = episode

    def reply(self, text: str) -> list[Message] | None:
        """Return what the environment says to a turn; None when the episode is over."""
        messages: list[Message] | None = self._host.perform(Reply(self._episode, text))
        return messages

    def outcome(self) -> float:
        """Return what the episode was worth."""
        return float(self._host.perform(Outcome(self._episode)))

    def close(self) -> None:
        """Let the host forget it."""
        self._host.perform(End(self._episode))


class InlineHost(TaskHost):
    """A task in this process: for one whose code is known to return soon."""

    def __init__(self, task: Task, limits: Limits, *, calls: BoundedCalls | None = None) -> None:
        """Start no thread yet.

        Args:
            task: whose code it is.
            limits: of its calls.
            calls: the threads that make them; its own where they are shared with nobody.
        """
        super().__init__(type(task).__name__, limits, max_concurrent=0)
        self._performer = Performer(task)
        self._calls = calls or BoundedCalls()

    def _answer(self, call: Call) -> Answer:
        try:
            return self._calls.call(lambda: self._performer.answer(call), self.limits.seconds(call))
        except TimeoutError:
            raise self.timed_out(call) from None


class LaterHost(TaskHost):
    """A stand-in where others judge: every answer is worth 0 for the time being."""

    def __init__(self) -> None:
        super().__init__("later", Limits(score_s=1.0, step_s=1.0), max_concurrent=0)

    def _answer(self, call: Call) -> Answer:
        return Answer(0.0)

    def take_counts(self) -> dict[str, int]:
        """Return nothing: nothing was called."""
        return {}
