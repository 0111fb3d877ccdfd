"""Timed engine: it computes how long each token takes.

It keeps a fixed number of rows, each of which samples one rollout; what finds none free waits in
line. It is **continuous** (as vLLM or SGLang: a row that is free takes the next rollout in line at
once, whichever call it came with) or samples one **batch** at a time (as the transformers engine).
Decoding reads the weights once and each row's cache for every token, so few rows cost nearly as
much as many: that is what an idle row loses. New weights are taken over between two tokens, and the
caches of all that is under way are recomputed with them.

Which tokens a row makes, and how many, is a `Script`'s affair.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from april import virtual_time
from echo.core.rollout import PolicyVersion
from echo.engine.engine import (
    UNVERSIONED,
    UNWATCHED,
    Completion,
    Engine,
    Request,
    Sampling,
    Watcher,
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured: the fleet, the lengths, and how partial rollouts are treated."""

    over_submission: float = 1.0
    is_continuous: bool = True
    stale_tokens: str = "keep"
    seed: int = 0
    num_steps: int = 16
    num_workers: int = 8
    group_size: int = 8
    groups_per_worker: int = 8
    """Groups of which an engine has all rows: 64 rollouts, 512 on 8 engines."""
    groups_per_step: int = 32
    max_staleness: int = 5
    """The paper has no bound and sees tokens of up to five steps before."""
    train_s: float = 20.0
    install_s: float = 0.0
    """Until an engine has new weights."""
    chunk_tokens: int = 128
    """Tokens of each row between two looks at the clock."""
    hedge_factor: float | None = None
    """Copies of the last groups, as in the configuration; None for none."""
    is_eager: bool = False
    """Whether groups are granted as early as the bound allows, as with `sync.eager`."""
    prompt_tokens: int = 200
    max_tokens: int = 16384
    median_tokens: float = 3000.0
    sigma: float = 1.0
    """Spread of the log-lengths, half of its square between prompts, half within a group."""
    # Qwen3-4B in bf16 on one H100: 8 GB of weights, 36 layers of 8 heads of 128 for keys and
    # values, 3.35 TB/s and 989 TFLOP/s of which 0.6 is reached.
    weights_s: float = 8e9 / (0.6 * 3.35e12)
    cache_s_per_token: float = 2 * 2 * 36 * 8 * 128 / (0.6 * 3.35e12)
    prefill_s_per_token: float = 2 * 4e9 / (0.6 * 989e12)

    @property
    def num_rows(self) -> int:
        """Rollouts that an engine samples at one time."""
        return self.groups_per_worker * self.group_size

    def length(self, group_id: int, member: int) -> int:
        """Return how long a completion gets: lognormal, cut off at the limit."""
        each = self.sigma / np.sqrt(2)
        prompt = random.Random(f"{self.seed}/{group_id}").gauss(0, each)
        own = random.Random(f"{self.seed}/{group_id}/{member}").gauss(0, each)
        return max(1, min(self.max_tokens, round(self.median_tokens * math.exp(prompt + own))))

    def seconds(self, num_tokens: int, num_rows: int, num_cached: float) -> float:
        """Return how long so many tokens take.

        Args:
            num_tokens: of each row.
            num_rows: that sample.
            num_cached: tokens in the caches of all rows when it begins.
        """
        mean_cached = num_cached + num_rows * num_tokens / 2
        return num_tokens * (self.weights_s + self.cache_s_per_token * mean_cached)


@dataclass
class Use:
    """What an engine has done."""

    num_tokens: int = 0
    num_prefilled: int = 0
    num_stopped: int = 0
    """Tokens of rollouts that were stopped."""
    busy_s: float = 0.0
    row_s: float = 0.0
    """Seconds summed over the rows that were sampling."""


@dataclass(eq=False)
class Row:
    """One rollout in the engine."""

    call: Call
    request: Request
    num_cached: int = 0
    """Length of its context when it came."""
    left: int = 0
    """Tokens of the clock until its end."""
    done: int = 0
    """Tokens of the clock since it came."""
    spans: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    """How many of them each version has made."""
    state: Any = None
    """Whatever its script keeps of it."""
    completion: Completion | None = None

    @property
    def ids(self) -> tuple[int, int]:
        """Group and member."""
        group_id, _, member = map(int, self.request.request_id.split("."))
        return group_id, member


class Script(Protocol):
    """What rows sample."""

    def load(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Take weights over."""

    def enter(self, rows: Sequence[Row]) -> None:
        """Set `num_cached` and `left` of rows that came in, or whose weights have changed."""

    def completion(self, row: Row, *, is_whole: bool) -> Completion:
        """Return what a row has sampled since it came."""


class Lengths:
    """Nothing but lengths, from the setting's distribution; all tokens are 0."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._length = functools.cache(setting.length)

    def load(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        pass

    def enter(self, rows: Sequence[Row]) -> None:
        for row in rows:
            num_before = len(row.request.prefix_ids)
            row.num_cached = len(row.request.prompt_ids) + num_before
            row.left = self._length(*row.ids) - num_before - row.done

    def completion(self, row: Row, *, is_whole: bool) -> Completion:
        versions = np.array([(v.lineage, v.step) for _, v in row.spans], np.int32).reshape(-1, 2)
        return Completion(
            row.request.request_id,
            np.zeros(row.done, np.int32),
            np.zeros(row.done, np.float32),
            "stop" if is_whole else "abort",
            np.repeat(versions, [num for num, _ in row.spans], axis=0),
        )


@dataclass(eq=False)
class Call:
    """One call of `generate`."""

    watcher: Watcher
    rows: list[Row] = field(default_factory=list)
    turn: threading.Event = field(default_factory=threading.Event)
    """Set when it is over, or when its thread is to work for all."""

    @property
    def is_over(self) -> bool:
        return all(row.completion is not None for row in self.rows)


class TimedEngine(Engine):
    """Takes as long as a GPU that reads its weights and caches for each token of the batch.

    The thread of one call works for all calls until its own is over; then another one's does.
    """

    window = None

    def __init__(
        self, setting: Setting, clock: virtual_time.VirtualClock, script: Script | None = None
    ) -> None:
        self.setting = setting
        self.clock = clock
        self.use = Use()
        self.is_continuous = setting.is_continuous
        self._script = Lengths(setting) if script is None else script
        self._version: PolicyVersion | None = None
        self._arrived: tuple[Mapping[str, Any], PolicyVersion] | None = None
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._new: list[Row] = []
        self._line: deque[Row] = deque()
        self._running: list[Row] = []
        self._driver: Call | None = None

    @property
    def installed(self) -> PolicyVersion | None:
        arrived = self._arrived
        return self._version if arrived is None else arrived[1]

    def load(self, tensors: Mapping[str, Any], version: PolicyVersion = UNVERSIONED) -> None:
        if self.setting.install_s:
            self.clock.sleep(self.setting.install_s)
        with self._lock:
            self._arrived = tensors, version

    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        return self.setting.num_rows

    def close(self) -> None:
        pass

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        watcher: Watcher = UNWATCHED,
        *,
        version: PolicyVersion | None = None,
    ) -> list[Completion]:
        call = Call(watcher)
        call.rows = [Row(call, request) for request in requests]
        with self._lock:
            self._calls.append(call)
            self._new += call.rows
            must_wait = self._driver is not None
            if not must_wait:
                self._driver = call
        if must_wait:
            self.clock.wait(call.turn)
        if self._driver is call:
            while not call.is_over:
                self._advance()
            self._hand_over()
        return [row.completion for row in call.rows if row.completion is not None]

    def _hand_over(self) -> None:
        with self._lock:
            self._driver = self._calls[0] if self._calls else None
            if self._driver is not None:
                self.clock.wake(self._driver.turn)

    def _advance(self) -> None:
        """Let all rows sample until the first of them ends, or for a chunk of tokens."""
        setting, use = self.setting, self.use
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            if call.watcher.should_stop():
                self._stop(call)
        seconds = self._take_in()
        rows, version = self._running, self._version
        if not rows:
            return
        assert version is not None
        step = min(setting.chunk_tokens, *(row.left for row in rows))
        seconds += setting.seconds(
            step, len(rows), sum([row.num_cached + row.done for row in rows])
        )
        self.clock.sleep(seconds)
        use.num_tokens += step * len(rows)
        use.busy_s += seconds
        use.row_s += seconds * len(rows)
        for row in rows:
            row.done += step
            row.left -= step
            row.spans.append((step, version))
        for call, num_rows in Counter(row.call for row in rows).items():
            call.watcher.on_tokens(step * num_rows)
        ended = [row for row in rows if not row.left]
        for row in ended:
            row.completion = self._script.completion(row, is_whole=True)
            row.call.watcher.on_completion(row.completion)
        if ended:
            self._settle({row.call for row in ended})

    def _take_in(self) -> float:
        """Fill free rows and take new weights over; return the seconds that prefills take."""
        with self._lock:
            new, self._new = self._new, []
            arrived, self._arrived = self._arrived, None
        if arrived is not None:
            self._script.load(*arrived)
            self._version = arrived[1]
        if not (new or self._line or arrived):
            return 0.0
        waiting = [*self._line, *new]
        resampled = [*self._running, *waiting] if arrived is not None else new
        if resampled:
            self._script.enter(resampled)
        num_free = self.setting.num_rows - len(self._running)
        entering = waiting[:num_free]
        self._line = deque(waiting[num_free:])
        prefilled = entering if arrived is None else [*self._running, *entering]
        self._running += entering
        num_tokens = sum([row.num_cached + row.done for row in prefilled])
        self.use.num_prefilled += num_tokens
        return self.setting.prefill_s_per_token * num_tokens

    def _stop(self, call: Call) -> None:
        for row in call.rows:
            if row.completion is None:
                row.completion = self._script.completion(row, is_whole=False)
                self.use.num_stopped += row.done
        self._settle([call])

    def _settle(self, calls: Iterable[Call]) -> None:
        """Let go of the rows that have ended, and of the calls that are over."""
        self._running = [row for row in self._running if row.completion is None]
        self._line = deque(row for row in self._line if row.completion is None)
        with self._lock:
            self._new = [row for row in self._new if row.completion is None]
            for call in calls:
                if call.is_over and call in self._calls:
                    self._calls.remove(call)
                    if call is not self._driver:
                        self.clock.wake(call.turn)
