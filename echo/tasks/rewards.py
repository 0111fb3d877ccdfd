"""Calls of a task's code, with limits on their time and memory.

To score a group, `score_all` passes each answer to `perform`, or all answers at once if the task
compares them. `perform` counts the call, repeats it after a transient error, and checks that
rewards are within the limits. `_answer` executes the call, in a thread (InlineHost) or in a process
(PoolHost). Any thread may call a host. The call blocks the thread.

**Threads** are for tasks with `is_bounded`, whose code returns soon for any input. A call in a
thread costs much less than a call in a process. A small model makes thousands of short completions
per second, for which processes would cost more than the scoring itself. The code may raise an error
or return a wrong type. If the code does not return, its thread is abandoned, and a new thread takes
the place of the abandoned thread. The number of abandoned threads is limited, since Python cannot
kill a thread. Threads give no protection against code that holds the interpreter's lock forever,
such as a `re` match with catastrophic backtracking or a huge integer power. Such code stalls the
whole node.

**Processes** are for all other tasks. Each process is an interpreter that imports the task and
little else of Echo (processes/main.py). A process is started for the first call that needs a
process, and executes later calls, too. An episode stays in the process in which it began, because
this process holds the episode's state. If a call takes too long, or its process dies, the process
and its child processes are killed. The process's episodes end as lost, and the next call starts a
new process. If the node's process dies first, the guards (processes/guard.py) end the task's
processes within two seconds.

The process pool of the library pebble would not be enough. The pool unpickles a user's data in the
node's process. The pool does not limit memory or the size of a result, and does not kill the
children of a killed process.
"""

from __future__ import annotations

import abc
import json
import os
import queue
import reprlib
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from echo.core.errors import ConfigError, EchoError
from echo.core.reward_parts import PartedReward, parts_of
from echo.tasks.messages import Message
from echo.tasks.processes.main import (
    CallAnswer,
    Performer,
    Pipe,
    TaskCall,
    TaskSpec,
    describe_raised,
)
from echo.tasks.task import Example, Task, code_of, search_path

MAX_RETRIES = 2
"""How often a call is repeated if it raises RetryCall or its connection fails."""

TICK_S = 1.0
"""Seconds between two reports of a process that waits for rewards."""

MAX_STUCK_THREADS = 8
"""Largest number of abandoned threads. Each abandoned thread takes a stack and perhaps a core."""

START_TIMEOUT_S = 120.0
"""Seconds that a process may take to import the task and its libraries, which can be large."""

GUARD_TIMEOUT_S = 10.0
"""Seconds that a guard may take to end its processes."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from echo.tasks.processes.main import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class RewardError(EchoError):
    """A call of a task's code failed.

    The failure is counted, and never replaced by a reward of 0. `reason` is the name of the failure
    in counters and in the ledger:

        reward_error     the code raised, or returned no finite number
        reward_too_large the code returned a number beyond task.max_reward
        reward_timeout   the code did not return in time, and its process was killed
        reward_memory    the code ran out of the memory that it may use
        reward_lost      the task's process has ended
        reward_retries   the error was transient, and remained after all retries
        bad_logprobs     the engine returned no usable logprobs, so no reward was called
    """

    def __init__(self, text: str, *, reason: str = "reward_error", traceback: str = "") -> None:
        super().__init__(text)
        self.reason = reason
        self.traceback = traceback
        """The traceback of the task's code, as Python prints it; empty if the code raised no error.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the calls of a task's code."""

    score_s: float
    """Seconds that one reward may take. A call that rewards n answers may take n times as long."""
    step_s: float
    """Seconds that one example, or one call of an environment, may take."""
    memory_bytes: int | None = None
    """Bytes of memory that one process of the task may use; None if there is no limit."""
    max_abs_reward: float = 1e6
    """Largest absolute value of a reward."""

    def seconds(self, call: TaskCall) -> float:
        """Return how many seconds a call may take."""
        return self.score_s * len(call.texts) if call.method == "reward" else self.step_s

    def key(self, call: TaskCall) -> str:
        """Return the key of the setting that limits the time of a call."""
        return "task.reward_timeout_s" if call.method == "reward" else "task.step_timeout_s"


class TaskHost(abc.ABC):
    """Executes calls of a task's code. Any thread may use the host.

    The host counts the calls, the milliseconds that they take, and their faults, under names that
    begin with `env/`.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        compares_answers: Callable[[Example], bool] = lambda _: False,
    ) -> None:
        """Start with all counters at zero.

        Args:
            name: the name of the task in messages.
            limits: the limits on calls of the task's code.
            compares_answers: returns whether one call rewards all answers to an example.
        """
        self.name = name
        self.limits = limits
        self.compares_answers = compares_answers
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    # --- calls -----------------------------------------------------------------------------------

    def score_all(
        self, example: Example, completions: Sequence[str]
    ) -> Generator[float | None, None, None]:
        """Yield the reward of each answer; None if the task cannot score an answer.

        If the task compares the answers, one call rewards all of them. If the caller stops before
        the last reward, calls that have not begun are cancelled.

        Raises:
            RewardError: if the call for an answer fails. The calls for later answers are not
                awaited.
        """
        if self.compares_answers(example):
            yield from self._rewards(example, completions)
            return
        yield from self._score_each(example, completions)

    def _score_each(self, example: Example, completions: Sequence[str]) -> Iterator[float | None]:
        for text in completions:
            yield self.score(example, text)

    def score(self, example: Example, completion: str) -> float | None:
        """Return the reward of an answer; None if the task cannot score the answer.

        Raises:
            RewardError: if the call of the task's code fails.
        """
        return self._rewards(example, [completion])[0]

    def _rewards(self, example: Example, texts: Sequence[str]) -> list[float | None]:
        call = TaskCall("reward", str(example), example=asdict(example), texts=tuple(texts))
        rewards: list[float | None] = self.perform(call)
        return rewards

    def begin(self, example: Example) -> Episode:
        """Begin and return an episode for an example.

        Raises:
            RewardError: if the call of the task's code fails.
        """
        label, episode = str(example), uuid.uuid4().hex
        self.perform(TaskCall("begin", label, example=asdict(example), episode=episode))
        return Episode(self, label, episode)

    def perform(self, call: TaskCall) -> Any:
        """Make a call and return its value. Repeat the call after a transient fault.

        Raises:
            RewardError: if the call fails, or if all repetitions fail after a transient fault.
        """
        try:
            return self._perform(call)
        except RewardError:
            self.count("env/errors")
            raise

    def _perform(self, call: TaskCall) -> Any:
        for attempt in range(MAX_RETRIES + 1):
            if attempt:
                self.count("env/retries")
                time.sleep(0.1 * 2**attempt)
            fault = (answer := self._timed_answer(call)).fault
            if fault is None:
                return self._bounded(call, answer.value)
            if not fault.is_transient:
                break
        assert fault is not None
        reason, text = fault.reason, fault.text
        if fault.is_transient:
            reason, text = "reward_retries", f"{text}; tried {MAX_RETRIES + 1} times"
        raise RewardError(text, reason=reason, traceback=fault.traceback)

    def _timed_answer(self, call: TaskCall) -> CallAnswer:
        started_at = time.monotonic()
        try:
            return self._answer(call)
        except TimeoutError:
            raise RewardError(
                f"{self.name}.{call} did not return within {self.limits.seconds(call):g} s; raise "
                f"{self.limits.key(call)} or make it faster",
                reason="reward_timeout",
            ) from None
        finally:
            self.count("env/calls")
            self.count("env/milliseconds", round(1000 * (time.monotonic() - started_at)))

    @abc.abstractmethod
    def _answer(self, call: TaskCall) -> CallAnswer:
        """Execute a call once, and return its value or fault.

        Raises:
            TimeoutError: if the call exceeds its time limit.
            RewardError: if the call was lost with its process. The call is then not repeated.
        """

    def _bounded(self, call: TaskCall, value: Any) -> Any:
        """Return the value of a call after checking that its rewards are within the limit.

        A reward in parts becomes a PartedReward, which is the sum of the parts.

        Raises:
            RewardError: if a reward exceeds task.max_reward.
        """
        if call.method == "outcome":
            return self._bounded_reward(call, value)
        if call.method == "reward":
            return [self._bounded_reward(call, reward) for reward in value]
        return value

    def _bounded_reward(
        self, call: TaskCall, value: float | dict[str, float] | None
    ) -> float | None:
        if value is None:
            self.count("env/no_opinion")
            return None
        reward, bound = PartedReward(value) if isinstance(value, dict) else value, self.limits
        if any(abs(each) > bound.max_abs_reward for each in (reward, *parts_of(reward).values())):
            raise RewardError(
                f"{self.name}.{call} returned {value!r}, beyond task.max_reward = "
                f"{bound.max_abs_reward:g}; scale the task's rewards, or raise it",
                reason="reward_too_large",
            )
        return reward

    def close(self) -> None:  # noqa: B027, a stand-in holds nothing
        """Release threads and processes. Running calls end with an error."""

    # --- counts ----------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, int]:
        """Return the counts by name, and reset them."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def count(self, name: str, number: int = 1) -> None:
        """Add a number to the counter `name`, which begins with "env/"."""
        with self._lock:
            self._counts[name] += number


class Episode:
    """An episode of an environment that has begun on a host."""

    def __init__(self, host: TaskHost, label: str, episode: str) -> None:
        self._host = host
        self._label = label
        self._episode = episode

    def reply(self, text: str) -> list[Message] | None:
        """Return the reply to a turn of the policy; None if the episode has ended."""
        messages: list[Message] | None = self._perform("reply", text)
        return messages

    def outcome(self) -> float | None:
        """Return the reward of the episode; None if the task cannot score the episode."""
        outcome: float | None = self._perform("outcome")
        return outcome

    def close(self) -> None:
        """End the episode and release its state."""
        self._perform("end")

    def _perform(self, method: Literal["reply", "outcome", "end"], text: str = "") -> Any:
        return self._host.perform(TaskCall(method, self._label, text=text, episode=self._episode))


class LaterHost(TaskHost):
    """Gives every answer the reward 0, because the learner computes the real rewards later."""

    def __init__(self) -> None:
        super().__init__("later", Limits(score_s=1.0, step_s=1.0))

    def _answer(self, call: TaskCall) -> CallAnswer:
        return CallAnswer([0.0] * len(call.texts))

    def take_counts(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True, slots=True)
class ExampleCall:
    """The result of trying a task's reward on one example, before a run."""

    line: str
    """A line for the user with the rewards, or with the error."""
    fault: str = ""
    """Why a run with these rewards would train nothing, with the remedy; "" if the run would train.
    """

    @classmethod
    def of(cls, host: TaskHost, example: Example, right: str | None) -> ExampleCall:
        """Call the reward for the empty answer, and for the right answer if it is known."""
        texts = [*([] if right is None else [right]), ""]
        try:
            rewards = list(host.score_all(example, texts))
        except RewardError as error:
            return cls(f"reward: {error}", f"the reward fails: {error}")
        figures = [
            f"{'no opinion' if reward is None else format(reward, 'g')} for {reprlib.repr(text)}"
            for text, reward in zip(texts, rewards, strict=True)
        ]
        fault = ""
        if right is not None and not any(reward is not None for reward in rewards):
            fault = (
                f"{example}: the reward gives None for its own answer and for an empty one; a "
                "function without `return` does, and no answer without a reward is trained on"
            )
        return cls(f"reward on {example}: {', '.join(figures)}", fault)


# --- threads -------------------------------------------------------------------------------------


class InlineHost(TaskHost):
    """Executes calls in threads of this process, for code that returns soon."""

    def __init__(self, task: Task, limits: Limits) -> None:
        """Prepare the task. Threads start with the first call.

        Raises:
            ConfigError: if the task's `prepare` raises an error.
        """
        super().__init__(type(task).__name__, limits, task.compares_answers)
        try:
            task.prepare()
        except EchoError:
            raise
        except Exception as error:  # a task's code raises anything
            what = f"{self.name}.prepare raised {describe_raised(error)}"
            raise ConfigError(f"the task cannot be prepared: {what}") from error
        self._performer = Performer(task)
        self._idle: list[_CallingThread] = []
        self._stuck: list[_CallingThread] = []

    def _answer(self, call: TaskCall) -> CallAnswer:
        thread = self._take_thread()
        try:
            answer = thread.answer(call, self.limits.seconds(call))
        except TimeoutError:
            thread.end()  # takes effect if the call ever returns
            with self._lock:
                self._stuck.append(thread)
            raise
        with self._lock:
            self._idle.append(thread)
        return answer

    def _take_thread(self) -> _CallingThread:
        with self._lock:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            if len(self._stuck) >= MAX_STUCK_THREADS:
                raise RewardError(
                    f"{len(self._stuck)} calls of {self.name} never returned; no more are started "
                    "until one ends: make its code stop by itself",
                    reason="reward_timeout",
                )
            return self._idle.pop() if self._idle else _CallingThread(self._performer)

    def close(self) -> None:
        """End the idle threads."""
        with self._lock:
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.end()


class _CallingThread(threading.Thread):
    def __init__(self, performer: Performer) -> None:
        super().__init__(name="echo-reward", daemon=True)
        self._performer = performer
        self._calls: queue.SimpleQueue[TaskCall | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[CallAnswer] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._answers.put(self._performer.answer(call))

    def answer(self, call: TaskCall, timeout_s: float) -> CallAnswer:
        self._calls.put(call)
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None

    def end(self) -> None:
        self._calls.put(None)


# --- processes -----------------------------------------------------------------------------------


class PoolHost(TaskHost):
    """Executes calls in a limited number of processes.

    A call waits for a free process. This wait is bounded, because every earlier call has a time
    limit.
    """

    def __init__(
        self,
        kind: str,
        options: Mapping[str, Any],
        limits: Limits,
        *,
        max_concurrent: int,
        compares_answers: Callable[[Example], bool] = lambda _: False,
    ) -> None:
        """Start without processes. Calls start processes.

        Args:
            kind: the value of task.kind.
            options: the value of task.options.
            limits: the limits on calls of the task's code.
            max_concurrent: largest number of processes and of simultaneous calls, at least 1.
            compares_answers: returns whether one call rewards all answers to an example.
        """
        super().__init__(kind.rpartition(":")[2], limits, compares_answers)
        code = code_of(kind, options)
        self._spec = TaskSpec(kind, dict(options), limits.memory_bytes, code)
        self._size = max_concurrent
        self._threads = ThreadPoolExecutor(max_concurrent, "echo-score")
        self._changed = threading.Condition()
        self._free: list[TaskProcess] = []
        self._busy: set[TaskProcess] = set()
        self._num_starting = 0
        self._homes: dict[str, TaskProcess] = {}
        self._is_closed = False

    def _score_each(self, example: Example, completions: Sequence[str]) -> Iterator[float | None]:
        """Yield the reward of each answer, in order. Processes run calls at the same time."""
        try:
            futures = [self._threads.submit(self.score, example, text) for text in completions]
        except RuntimeError:  # the executor was shut down
            raise self._closing() from None
        try:
            for future in futures:
                yield future.result()
        except CancelledError:
            raise self._closing() from None
        finally:
            for future in futures:
                future.cancel()

    def _answer(self, call: TaskCall) -> CallAnswer:
        process = self._take(call)
        if process is None:
            return CallAnswer()
        answer = None
        try:
            answer = process.call(call, self.limits.seconds(call))
            return answer
        finally:
            self._give_back(process, call, has_begun=answer is not None and answer.fault is None)

    def close(self) -> None:
        """Kill every process. Waiting callers get a RewardError."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            self._is_closed = True
            free, busy = self._free, list(self._busy)
            self._free = []
            self._changed.notify_all()
        for process in busy:
            process.kill()  # the waiting caller gets a RewardError
        for process in free:
            process.discard()

    def _closing(self) -> RewardError:
        return RewardError(f"{self.name} is being closed", reason="reward_lost")

    def _take(self, call: TaskCall) -> TaskProcess | None:
        """Return a process for a call: wait for a free process, or start a process.

        For the call `end`, return None if no process has the episode.

        Raises:
            RewardError: if the episode of the call was lost with its process, or the host is
                closed.
        """
        with self._changed:
            while True:
                if self._is_closed:
                    raise self._closing()
                if not call.needs_episode:
                    process = self._take_any()
                else:
                    home = self._homes.get(call.episode)
                    if home is None and call.method == "end":
                        return None
                    if home is None:
                        raise RewardError(
                            f"{self.name}.{call}: another call in its process failed, which "
                            "ended the process and this episode with it",
                            reason="reward_lost",
                        )
                    process = self._take_this(home)
                if process is not None:
                    return process
                if not call.needs_episode and self._may_start:
                    self._num_starting += 1
                    break
                self._changed.wait()
        return self._start()

    @property
    def _may_start(self) -> bool:
        return len(self._free) + len(self._busy) + self._num_starting < self._size

    def _take_any(self) -> TaskProcess | None:
        """Return the free process with the fewest episodes, and mark it as busy.

        Return None if the caller should start a process or wait for one.
        """
        for dead in [process for process in self._free if not process.is_alive]:
            self._free.remove(dead)  # the system may have killed it to free memory
            self._remove(dead)
        process = min(self._free, key=lambda process: process.num_episodes, default=None)
        if process is None or (process.num_episodes and self._may_start):
            return None
        return self._take_this(process)

    def _take_this(self, process: TaskProcess) -> TaskProcess | None:
        if process not in self._free:
            return None
        self._free.remove(process)
        self._busy.add(process)
        return process

    def _start(self) -> TaskProcess:
        try:
            process = TaskProcess(self._spec)
        except BaseException:
            with self._changed:
                self._num_starting -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            self._num_starting -= 1
            self._busy.add(process)
            if self._is_closed:
                process.kill()
        return process

    def _give_back(self, process: TaskProcess, call: TaskCall, *, has_begun: bool) -> None:
        with self._changed:
            self._busy.discard(process)
            if self._is_closed:
                process.discard()
            elif process.is_alive:
                self._free.append(process)
                if call.method == "begin" and has_begun:
                    self._homes[call.episode] = process
                    process.num_episodes += 1
                elif call.method == "end" and call.episode in self._homes:
                    del self._homes[call.episode]
                    process.num_episodes -= 1
            else:
                self._remove(process)
            self._changed.notify_all()

    def _remove(self, process: TaskProcess) -> None:
        process.discard()
        self._homes = {
            episode: home for episode, home in self._homes.items() if home is not process
        }


class TaskProcess:
    """A process that runs a task's code.

    If a call exceeds its limits, the process is killed.
    """

    def __init__(self, spec: TaskSpec) -> None:
        """Start the process and wait until the process has built its task.

        Raises:
            RewardError: if the process cannot be started or cannot build its task.
        """
        self.num_episodes = 0
        try:
            self._child, self._pipe = _start_child()
        except OSError as error:  # the system has no more processes, descriptors or memory
            raise RewardError(
                f"the process of the task {spec.kind} cannot be started: {error}",
                reason="reward_lost",
            ) from error
        try:
            self._pipe.send(spec, within_s=START_TIMEOUT_S)
            answer = self._pipe.receive(CallAnswer, within_s=START_TIMEOUT_S)
        except (TimeoutError, OSError) as error:
            self.discard()
            raise RewardError(
                f"the process of the task {spec.kind} did not start: {self._how_it_ended(error)}",
                reason="reward_lost",
            ) from error
        if answer.fault is not None:
            self.discard()
            raise RewardError(answer.fault.text, reason=answer.fault.reason)

    def call(self, call: TaskCall, timeout_s: float) -> CallAnswer:
        """Let the process execute a call, and return the result.

        Raises:
            TimeoutError: if the call takes longer than `timeout_s`. The process is then killed.
            RewardError: if the process died during the call.
        """
        try:
            self._pipe.send(call, within_s=timeout_s)
            answer: CallAnswer = self._pipe.receive(CallAnswer, within_s=timeout_s)
        except TimeoutError:
            self.discard()
            raise
        except (OSError, msgspec.DecodeError) as error:
            self.discard()
            raise RewardError(
                f"the task's process died during {call}: {self._how_it_ended(error)}",
                reason="reward_lost",
            ) from error
        return answer

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None and self._pipe.is_open

    def kill(self) -> None:
        """Kill the process and all its children. Any thread may call this method."""
        self._child.terminate()
        try:
            self._child.wait(GUARD_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # the guard is stopped, or cannot kill a child
            self._child.kill()
            self._child.wait()

    def discard(self) -> None:
        """Kill the process and close the socket. No other thread may use the socket."""
        self.kill()
        self._pipe.close()

    def _how_it_ended(self, error: Exception) -> str:
        code = self._child.poll()
        if code is None or code == -signal.SIGKILL:
            return (
                f"{error or type(error).__name__} (killed: by the system if memory was short, else "
                "by a limit or a signal of the task's own code)"
            )
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"it ended by itself with code {code}"


def _start_child() -> tuple[subprocess.Popen[bytes], Pipe]:
    own, theirs = socket.socketpair()
    arguments = [json.dumps(search_path()), str(theirs.fileno()), str(os.getpid())]
    with theirs:
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_stderr() else subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        except OSError:
            own.close()
            raise
    return child, Pipe(own)


def _has_stderr() -> bool:
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
