"""A task in a bounded number of processes of its own.

Processes start when they are first needed and are used again. An episode stays with the process in
which it began, because that holds its state. A call that does not come back in time, or dies,
takes its process with it, and the episodes in there: they end as lost, and the next call starts a
new process. Whoever finds no free process waits; the wait is bounded, because every call is.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from echo.tasks.calls import Answer, Begin, Call, End, Score
from echo.tasks.faults import RewardError
from echo.tasks.host import Limits, TaskHost
from echo.tasks.process import TaskProcess, TaskSpec


class PoolHost(TaskHost):
    """A task in processes of its own."""

    def __init__(
        self, kind: str, options: Mapping[str, Any], limits: Limits, *, max_concurrent: int
    ) -> None:
        """Start no process yet.

        Args:
            kind: of the task, as in task.kind.
            options: of the task.
            limits: of its calls.
            max_concurrent: processes, and so calls at a time; at least 1.
        """
        super().__init__(kind.rpartition(":")[2], limits, max_concurrent=max_concurrent)
        self._spec = TaskSpec(kind, dict(options), limits.memory_bytes)
        self._size = max_concurrent
        self._changed = threading.Condition()
        self._free: list[TaskProcess] = []
        self._busy: set[TaskProcess] = set()
        self._num_starting = 0
        self._homes: dict[str, TaskProcess] = {}
        self._is_closed = False

    def _answer(self, call: Call) -> Answer:
        process = self._take(call)
        if process is None:
            return Answer()
        try:
            return process.call(call, self.limits.seconds(call))
        except TimeoutError:
            raise self.timed_out(call) from None
        finally:
            self._give_back(process, call)

    def close(self) -> None:
        """Kill every process."""
        super().close()
        with self._changed:
            self._is_closed = True
            free, busy = self._free, list(self._busy)
            self._free = []
            self._changed.notify_all()
        for process in busy:
            process.kill()  # whoever waits for its answer learns that it is gone
        for process in free:
            process.discard()

    # --- whose turn it is ------------------------------------------------------------------------

    def _take(self, call: Call) -> TaskProcess | None:
        """Wait for a process to be free; None where there is nothing left to end."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise RewardError(f"{self.name} is being closed", reason="reward_lost")
                if isinstance(call, Score | Begin):
                    process = self._take_any()
                else:
                    home = self._homes.get(call.episode)
                    if home is None and isinstance(call, End):
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
                if isinstance(call, Score | Begin) and self._has_room:
                    self._num_starting += 1
                    break
                self._changed.wait()
        return self._start()

    @property
    def _has_room(self) -> bool:
        return len(self._free) + len(self._busy) + self._num_starting < self._size

    def _take_any(self) -> TaskProcess | None:
        """Return the free process with the fewest episodes, unless a new one would have fewer."""
        process = min(self._free, key=lambda process: process.num_episodes, default=None)
        if process is None or (process.num_episodes and self._has_room):
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

    def _give_back(self, process: TaskProcess, call: Call) -> None:
        with self._changed:
            self._busy.discard(process)
            if self._is_closed:
                process.discard()
            elif process.is_alive:
                self._free.append(process)
                if isinstance(call, Begin):
                    self._homes[call.episode] = process
                    process.num_episodes += 1
                elif isinstance(call, End) and call.episode in self._homes:
                    del self._homes[call.episode]
                    process.num_episodes -= 1
            else:
                self._homes = {
                    episode: home for episode, home in self._homes.items() if home is not process
                }
            self._changed.notify_all()
