"""Reward calls: what a task's code may do wrong, and that its group alone suffers from it."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo.core.errors import ConfigError
from echo.tasks.rewards import (
    MAX_STUCK_THREADS,
    InlineHost,
    Limits,
    PoolHost,
    RewardError,
)
from echo.tasks.task import Example, RetryCall, Task

EXAMPLE = Example(index=3, split="train", prompt="?", answer=3, source="rows.jsonl:4")

LIMITS = Limits(score_s=60.0, step_s=60.0)

# --- any host, and threads ------------------------------------------------------------------------


class Grader(Task):
    """Scores by a function of a test's."""

    def __init__(self, function: Callable[[str], object]) -> None:
        self.function = function

    def example(self, index: int, *, split: str) -> Example:
        return EXAMPLE

    def reward(self, example: Example, completion: str) -> float:
        return self.function(completion)  # type: ignore[return-value]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that stuck reward functions wait for."""
    event = threading.Event()
    yield event
    event.set()


def score_by(task: Task) -> float:
    return InlineHost(task, LIMITS).score(EXAMPLE, "")


def score(function: Callable[[str], object]) -> float:
    return score_by(Grader(function))


def test_a_task_in_this_process_is_scored_in_order() -> None:
    host = InlineHost(Grader(len), LIMITS)
    assert list(host.score_all(EXAMPLE, ["", "a", "bc"])) == [0, 1, 2]
    assert host.take_counts()["env/calls"] == 3


def test_a_task_in_this_process_is_prepared_before_it_is_called() -> None:
    class Lazy(Grader):
        def prepare(self) -> None:
            self.function = self.function("")  # type: ignore[assignment]

    assert score_by(Lazy(lambda _: lambda _: 3)) == 3.0
    with pytest.raises(ConfigError, match=r"Lazy\.prepare raised ZeroDivisionError: .*\.py:\d+\)"):
        score_by(Lazy(lambda _: 1 / 0))


@pytest.mark.parametrize(("value", "reward"), [(0.25, 0.25), (True, 1.0), (-3, -3.0)])
def test_a_finite_number_is_the_reward(value: object, reward: float) -> None:
    result = score(lambda _: value)
    assert (result, type(result)) == (reward, float)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, None, "1.0", [1] * 10**4, 10**400, pytest.param(10**5000, id="10**5000")],
)
def test_anything_else_is_refused_by_name(value: object) -> None:
    what = r"Grader\.reward on rows\.jsonl:4 returned .{1,100}; .* finite number$"
    with pytest.raises(RewardError, match=what):
        score(lambda _: value)


@pytest.mark.parametrize("reward", [-10.5, 1e38])
def test_a_reward_beyond_the_bound_is_a_fault(reward: float) -> None:
    limits = replace(LIMITS, max_abs_reward=10.0)
    assert InlineHost(Grader(lambda _: -10), limits).score(EXAMPLE, "") == -10.0
    host = InlineHost(Grader(lambda _: reward), limits)
    with pytest.raises(RewardError, match=r"returned .*, beyond task\.max_reward = 10;") as caught:
        host.score(EXAMPLE, "")
    assert caught.value.reason == "reward_too_large"
    assert host.take_counts()["env/errors"] == 1


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, TimeoutError, RewardError])
def test_what_it_raises_is_reported_with_its_cause(kind: type[BaseException]) -> None:
    calls: list[str] = []

    def fail(text: str) -> float:
        calls.append(text)
        raise kind("on purpose")

    what = rf"rows\.jsonl:4 raised {kind.__name__}: on purpose \(test_rewards\.py:\d+\)"
    with pytest.raises(RewardError, match=what) as caught:
        score(fail)
    is_transient = kind is TimeoutError
    assert caught.value.reason == ("reward_retries" if is_transient else "reward_error")
    assert len(calls) == (3 if is_transient else 1)


def test_what_may_work_later_is_tried_again_and_counted() -> None:
    calls: list[str] = []

    def fail_once(text: str) -> float:
        calls.append(text)
        if len(calls) == 1:
            raise RetryCall("not yet")
        return 1.0

    host = InlineHost(Grader(fail_once), LIMITS)
    assert host.score(EXAMPLE, "x") == 1.0
    counts = host.take_counts()
    assert (counts["env/calls"], counts["env/retries"]) == (2, 1)
    assert "env/errors" not in counts


def test_a_call_that_hangs_is_abandoned_and_the_next_one_works(gate: threading.Event) -> None:
    host = InlineHost(Grader(lambda text: not text or gate.wait(20)), LIMITS)
    host.limits = replace(LIMITS, score_s=0.02)
    what = r"Grader\.reward on rows\.jsonl:4 did not return within 0\.02 s.*reward_timeout_s"
    with pytest.raises(RewardError, match=what) as caught:
        host.score(EXAMPLE, "hang")
    assert caught.value.reason == "reward_timeout"
    assert host.take_counts()["env/errors"] == 1
    host.limits = LIMITS
    assert host.score(EXAMPLE, "") == 1.0


def test_the_number_of_stuck_calls_is_bounded_and_recovers(gate: threading.Event) -> None:
    host = InlineHost(Grader(lambda text: not text or gate.wait(20)), LIMITS)
    host.limits = replace(LIMITS, score_s=0.001)
    for _ in range(MAX_STUCK_THREADS):
        with pytest.raises(RewardError, match="did not return"):
            host.score(EXAMPLE, "hang")
    host.limits = LIMITS
    with pytest.raises(RewardError, match="8 calls of reward functions never returned"):
        host.score(EXAMPLE, "")
    stuck = list(host._stuck)
    gate.set()
    for thread in stuck:
        thread.join(20)
    assert host.score(EXAMPLE, "") == 1.0


def test_threads_are_used_again_and_end_with_their_host() -> None:
    threads: set[threading.Thread] = set()
    host = InlineHost(Grader(lambda _: threads.add(threading.current_thread()) or 1), LIMITS)
    assert list(host.score_all(EXAMPLE, [""] * 20)) == [1.0] * 20
    [thread] = threads
    assert thread is not threading.current_thread()
    host.close()
    thread.join(20)
    assert not thread.is_alive()


# --- processes ------------------------------------------------------------------------------------


KIND = "tests.tasks.pool_tasks:Misbehaving"


class Pools:
    """Makes hosts, and closes them."""

    def __init__(self) -> None:
        self.hosts: list[PoolHost] = []

    def __call__(self, kind: str = KIND, *, size: int = 1, **settings: Any) -> PoolHost:
        options = settings.pop("options", {})
        limits = Limits(**{"score_s": 60.0, "step_s": 60.0, **settings})
        self.hosts.append(PoolHost(kind, options, limits, max_concurrent=size))
        return self.hosts[-1]


@pytest.fixture
def make_pool() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    for host in pools.hosts:
        host.close()


@contextmanager
def hurried(pool: PoolHost, **limits: float) -> Iterator[None]:
    """Have calls of the block end soon; those before and after it may start processes."""
    before = pool.limits
    pool.limits = replace(before, **limits)
    try:
        yield
    finally:
        pool.limits = before


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Any, *, within_s: float = 120.0) -> bool:
    give_up_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.02)
    return True


def test_rewards_come_from_one_process_that_is_used_again(make_pool: Pools) -> None:
    pool = make_pool()
    pids = {pool.score(EXAMPLE, "pid") for _ in range(3)}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert pool.score(EXAMPLE, "number 0.25") == 0.25
    assert pool.score(EXAMPLE, "calls") == 5
    counts = pool.take_counts()
    assert counts.pop("env/milliseconds") >= 0
    assert counts == {"env/calls": 5}
    assert pool.take_counts() == {}


@pytest.mark.parametrize(
    ("completion", "reason", "message"),
    [
        ("fail on purpose", "reward_error", r"Misbehaving\.reward on rows\.jsonl:4 raised ZeroDiv"),
        ("number nan", "reward_error", "returned nan; it must return a finite number"),
        ("crash", "reward_lost", r"died during reward on rows\.jsonl:4: signal SIGSEGV"),
        ("leave", "reward_lost", "ended by itself with code 7"),
    ],
)
@pytest.mark.slow
def test_what_goes_wrong_is_named_and_the_next_call_works(
    make_pool: Pools, completion: str, reason: str, message: str
) -> None:
    pool = make_pool()
    with pytest.raises(RewardError, match=message) as caught:
        pool.score(EXAMPLE, completion)
    assert caught.value.reason == reason
    assert pool.score(EXAMPLE, "number 1") == 1.0
    assert pool.take_counts()["env/errors"] == 1


@pytest.mark.slow
def test_a_catastrophic_regex_is_killed_and_stalls_nobody(make_pool: Pools) -> None:
    pool = make_pool()
    pool.score(EXAMPLE, "number 1")
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.01):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    what = r"within 0\.5 s; raise task\.reward_timeout_s"
    with pytest.raises(RewardError, match=what) as caught, hurried(pool, score_s=0.5):
        pool.score(EXAMPLE, "regex")
    stop.set()
    ticker.join()
    assert caught.value.reason == "reward_timeout"
    assert len(ticks) > 5, "this process went on meanwhile"
    assert pool.score(EXAMPLE, "number 1") == 1.0


@pytest.mark.slow
def test_what_a_killed_process_has_started_is_killed_too(make_pool: Pools, tmp_path: Path) -> None:
    pool = make_pool()
    pool.score(EXAMPLE, "number 1")
    path = tmp_path / "pid"
    with pytest.raises(RewardError, match="did not return"), hurried(pool, score_s=1.0):
        pool.score(EXAMPLE, f"child {path}")
    if path.exists():  # it may not have come that far on a busy machine
        assert wait_until(lambda: not is_running(int(path.read_text())))


@pytest.mark.slow
def test_memory_is_limited(make_pool: Pools) -> None:
    pool = make_pool(memory_bytes=64 << 20, max_abs_reward=1e9)  # it returns how many bytes
    assert pool.score(EXAMPLE, f"hog {16 << 20}") == 16 << 20
    what = r"ran out of memory; raise reward\.memory_limit_bytes"
    with pytest.raises(RewardError, match=what) as caught:
        pool.score(EXAMPLE, f"hog {256 << 20}")
    assert caught.value.reason == "reward_memory"
    assert pool.score(EXAMPLE, "number 1") == 1.0


@pytest.mark.slow
def test_what_it_prints_spoils_nothing(make_pool: Pools) -> None:
    assert make_pool().score(EXAMPLE, "print {not an answer}") == 1.0


@pytest.mark.slow
def test_a_call_that_asks_for_it_is_tried_again(make_pool: Pools, tmp_path: Path) -> None:
    pool = make_pool(options={"directory": str(tmp_path)})
    assert pool.score(EXAMPLE, "retry 3") == 1.0
    assert pool.take_counts()["env/retries"] == 2


@pytest.mark.slow
def test_no_more_run_at_once_than_are_allowed(make_pool: Pools) -> None:
    pool = make_pool(size=2)
    pids = list(pool.score_all(EXAMPLE, ["pid"] * 12))
    assert len(pids) == 12
    assert 1 <= len(set(pids)) <= 2


@pytest.mark.slow
def test_the_first_fault_ends_a_group_and_the_pool_goes_on(make_pool: Pools) -> None:
    pool = make_pool(size=2)
    with pytest.raises(RewardError, match="on purpose"):
        list(pool.score_all(EXAMPLE, ["number 1", "fail on purpose", "number 2"]))
    assert list(pool.score_all(EXAMPLE, ["number 1", "number 2"])) == [1.0, 2.0]


def test_who_stops_early_cancels_the_rest_and_who_waits_is_told_of_the_end(
    make_pool: Pools,
) -> None:
    pool = make_pool()
    rewards = pool.score_all(EXAMPLE, ["calls", *["sleep 600"] * 9])
    assert next(rewards) == 1.0
    rewards.close()
    others = pool.score_all(EXAMPLE, ["number 1"] * 2)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(list, others)
        assert wait_until(lambda: pool._busy)
        pool.close()
        with pytest.raises(RewardError) as caught:
            waiting.result(timeout=120)
    assert caught.value.reason == "reward_lost"
    with pytest.raises(RewardError, match="is being closed"):
        next(pool.score_all(EXAMPLE, ["number 1"]))


def test_a_process_that_cannot_be_started_fails_its_group_alone(
    make_pool: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("echo.tasks.rewards.subprocess.Popen", refuse)
    pool = make_pool()
    for _ in range(2):
        with pytest.raises(RewardError, match=r"cannot be started: .*Resource temp") as caught:
            pool.score(EXAMPLE, "number 1")
        assert caught.value.reason == "reward_lost"


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_is_idle_costs_no_reward(make_pool: Pools) -> None:
    pool = make_pool()
    pid = int(pool.score(EXAMPLE, "pid"))
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_running(pid))
    assert pool.score(EXAMPLE, "number 1") == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Missing", "no 'Missing'"),
        ("Unready", r"FileNotFoundError: no such sandbox \(pool_tasks\.py:\d+\)$"),
    ],
)
def test_a_task_that_cannot_be_built_is_named(make_pool: Pools, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=f"process cannot build it: .*{message}") as caught:
        make_pool(f"tests.tasks.pool_tasks:{name}").score(EXAMPLE, "number 1")
    assert caught.value.reason == "reward_lost"


@pytest.mark.slow
def test_closing_kills_what_runs(make_pool: Pools) -> None:
    pool = make_pool()
    pid = int(pool.score(EXAMPLE, "pid"))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(pool.score, EXAMPLE, "sleep 600")
        assert wait_until(lambda: pool._busy)
        pool.close()
        with pytest.raises(RewardError):
            running.result(timeout=120)
    assert not is_running(pid)
    with pytest.raises(RewardError, match="is being closed"):
        pool.score(EXAMPLE, "number 1")


# --- episodes ------------------------------------------------------------------------------------


ENVIRONMENT = "tests.tasks.pool_tasks:Counting"


@pytest.mark.slow
def test_an_episode_keeps_its_state_among_others(make_pool: Pools) -> None:
    pool = make_pool(ENVIRONMENT, size=2)
    with pytest.raises(RewardError, match=r"begin on .* raised ValueError"):
        pool.begin(replace(EXAMPLE, answer="many"))
    episodes = [pool.begin(EXAMPLE) for _ in range(5)]
    go_on = [{"role": "user", "content": "go on"}]
    assert [episode.reply("1") for episode in episodes] == [go_on] * 5
    assert episodes[0].reply("7") == [{"role": "user", "content": "no"}]
    assert episodes[1].reply("2") is not None
    assert episodes[1].reply("3") is None
    assert [episode.outcome() for episode in episodes[:3]] == [1 / 3, 1.0, 1 / 3]
    for episode in episodes:
        episode.close()
    assert not pool._homes, "nothing is kept of one that did not begin"
    assert [process.num_episodes for process in pool._free] == [0, 0]
    with pytest.raises(RewardError, match=r"another call in its process failed|not known here"):
        episodes[0].reply("2")


@pytest.mark.slow
def test_a_stuck_episode_takes_only_its_own_process_along(make_pool: Pools) -> None:
    pool = make_pool(ENVIRONMENT, size=2)
    stuck, *others = (pool.begin(EXAMPLE) for _ in range(3))
    homes = pool._homes.copy()
    home = homes[stuck._episode]
    lost = [episode for episode in others if homes[episode._episode] is home]
    assert (len(set(homes.values())), len(lost)) == (2, 1), "they are spread over two processes"
    what = r"reply on rows\.jsonl:4 did not return .* task\.step_timeout_s"
    with pytest.raises(RewardError, match=what), hurried(pool, step_s=1.0):
        stuck.reply("regex")
    with pytest.raises(RewardError, match="ended the process and this episode") as caught:
        lost[0].reply("1")
    assert caught.value.reason == "reward_lost"
    assert all(episode.reply("1") for episode in others if episode not in lost)
    stuck.close()
    assert pool.begin(EXAMPLE).reply("1") is not None
