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
from unittest import mock

import pytest

from echo.core.errors import ConfigError
from echo.tasks.processes.main import TaskCall
from echo.tasks.rewards import MAX_STUCK_THREADS, InlineHost, Limits, PoolHost, RewardError
from echo.tasks.task import Example, Task, load_task
from tests.tasks.pool_tasks import Parting

EXAMPLE = Example(index=3, split="train", prompt="?", answer=3, source="rows.jsonl:4")

LIMITS = Limits(score_s=60.0, step_s=60.0, max_abs_reward=10.0)

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


def test_a_task_in_this_process_is_prepared_before_it_is_called() -> None:
    class Lazy(Grader):
        def prepare(self) -> None:
            self.function = self.function("")  # type: ignore[assignment]

    assert InlineHost(Lazy(lambda _: lambda _: 3), LIMITS).score(EXAMPLE, "") == 3.0
    with pytest.raises(ConfigError, match=r"Lazy\.prepare raised ZeroDivisionError: .*\.py:\d+\)"):
        InlineHost(Lazy(lambda _: 1 / 0), LIMITS)


@pytest.mark.parametrize("value", [0.25, True, -10])
def test_a_finite_number_is_the_reward(value: float) -> None:
    result = InlineHost(Grader(lambda _: value), LIMITS).score(EXAMPLE, "")
    assert (result, type(result)) == (value, float)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "1.0", [1] * 10**4, 10**400, pytest.param(10**5000, id="10**5000"),
     -10.5, 1e38],
)  # fmt: skip
def test_anything_else_is_refused_by_name(value: object) -> None:
    host = InlineHost(Grader(lambda _: value), LIMITS)
    with pytest.raises(
        RewardError, match=r"Grader\.reward on rows\.jsonl:4 returned .{1,100};"
    ) as caught:
        host.score(EXAMPLE, "")
    is_too_large = value in (-10.5, 1e38)
    assert caught.value.reason == ("reward_too_large" if is_too_large else "reward_error")
    assert ("beyond task.max_reward = 10;" in str(caught.value)) is is_too_large
    assert ("or None for no opinion" in str(caught.value)) is not is_too_large
    assert host.take_counts()["env/errors"] == 1


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, TimeoutError, RewardError])
def test_what_it_raises_is_reported_with_its_cause(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo.tasks.rewards.time.sleep", lambda _: None)
    grade = mock.Mock(side_effect=kind("on purpose"))
    what = rf"rows\.jsonl:4 raised {kind.__name__}: on purpose \(.*\.py:\d+\)"
    with pytest.raises(RewardError, match=what) as caught:
        InlineHost(Grader(grade), LIMITS).score(EXAMPLE, "")
    is_transient = kind is TimeoutError
    assert caught.value.reason == ("reward_retries" if is_transient else "reward_error")
    assert grade.call_count == (3 if is_transient else 1)


class ClientError(Exception):
    """As a client of HTTP has its own."""


@pytest.mark.parametrize(
    ("error", "cause", "num_calls"),
    [
        (ClientError("cannot connect"), ConnectionRefusedError(), 3),
        (ClientError("cannot connect"), OSError("all attempts failed"), 1),
        (ClientError("404"), None, 1),
        (ValueError("worth nothing"), TimeoutError(), 1),  # what the code makes of its own limit
    ],
)
def test_a_clients_own_error_of_a_connection_is_tried_again(
    error: Exception, cause: Exception | None, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo.tasks.rewards.time.sleep", lambda _: None)
    error.__cause__ = cause
    grade = mock.Mock(side_effect=error)
    with pytest.raises(RewardError, match="raised"):
        InlineHost(Grader(grade), LIMITS).score(EXAMPLE, "")
    assert grade.call_count == num_calls


@pytest.mark.parametrize("text", ["Event loop is closed", "got a Future of a different loop"])
def test_clients_of_another_event_loop_are_told_which_there_is(text: str) -> None:
    grade = mock.Mock(side_effect=RuntimeError(text))
    with pytest.raises(RewardError, match=f"{text} .*make the function `async`.*in the first call"):
        InlineHost(Grader(grade), LIMITS).score(EXAMPLE, "")


class Ranking(Grader):
    """Judges all answers to a prompt together."""

    async def rewards(self, example: Example, completions: list[str]) -> list[float | None]:
        longest = max(map(len, completions))
        return [None if not text else float(len(text) == longest) for text in completions]


def test_a_class_judges_the_answers_of_a_group_together() -> None:
    host = InlineHost(Ranking(lambda text: 7), LIMITS)
    assert list(host.score_all(EXAMPLE, ["a", "", "bc"])) == [0.0, None, 1.0]
    counts = host.take_counts()
    assert (counts["env/calls"], counts["env/no_opinion"]) == (1, 1)
    assert host.score(EXAMPLE, "a") == 7.0, "an evaluation has one answer"
    slow = replace(LIMITS, score_s=2.0).seconds(TaskCall("reward", texts=("", "", "")))
    assert slow == 6.0, "a call for several answers has the time of as many"


class Patient(Task):
    """Asks a server, as its type says."""

    def example(self, index: int, *, split: str) -> Example:
        return EXAMPLE

    async def reward(self, example: Example, completion: str) -> float | None:
        return float(completion) if completion else None


def test_a_typed_method_may_be_asynchronous_and_have_no_opinion() -> None:
    host = InlineHost(Patient(), LIMITS)
    assert list(host.score_all(EXAMPLE, ["0.5", ""])) == [0.5, None]


def test_an_asynchronous_environment_in_a_mixture_is_awaited_to_its_end() -> None:
    task = load_task("mixture", {"tasks": [{"kind": "tests.tasks.pool_tasks:Parting"}]})
    episode = InlineHost(task, LIMITS).begin(task.example(0, split="train"))
    assert episode.reply("more") == [{"role": "user", "content": "more"}]
    assert episode.reply("") is None
    assert episode.outcome() == 1.0
    before = Parting.num_ended
    episode.close()
    assert Parting.num_ended == before + 1


def test_calls_that_hang_are_abandoned_and_their_number_is_bounded(gate: threading.Event) -> None:
    hung: list[threading.Thread] = []

    def grade(text: str) -> bool:
        if text:
            hung.append(threading.current_thread())
            gate.wait(20)
        return True

    host = InlineHost(Grader(grade), LIMITS)
    what = r"Grader\.reward on rows\.jsonl:4 did not return within 0\.01 s.*reward_timeout_s"
    for number in range(MAX_STUCK_THREADS):
        host.limits = LIMITS
        assert host.score(EXAMPLE, "") == 1.0
        host.limits = replace(LIMITS, score_s=0.01)
        with pytest.raises(RewardError, match=what) as caught:
            host.score(EXAMPLE, "hang")
        assert caught.value.reason == "reward_timeout"
        assert host.take_counts()["env/errors"] == 1, number
    host.limits = LIMITS
    with pytest.raises(RewardError, match=r"8 calls of \w+ never returned"):
        host.score(EXAMPLE, "")
    gate.set()
    for thread in hung:
        thread.join(20)
    assert host.score(EXAMPLE, "") == 1.0


def test_a_task_in_this_process_is_scored_in_order_by_a_thread_that_ends_with_its_host() -> None:
    threads: set[threading.Thread] = set()

    def grade(text: str) -> int:
        threads.add(threading.current_thread())
        return len(text)

    host = InlineHost(Grader(grade), LIMITS)
    assert list(host.score_all(EXAMPLE, ["", "a", "bc"])) == [0, 1, 2]
    assert host.take_counts()["env/calls"] == 3
    [thread] = threads
    assert thread is not threading.current_thread()
    host.close()
    thread.join(20)
    assert not thread.is_alive()


# --- processes ------------------------------------------------------------------------------------


def make_pool(name: str, *, size: int, **settings: Any) -> PoolHost:
    limits = Limits(score_s=60.0, step_s=60.0, **settings)
    return PoolHost(f"tests.tasks.pool_tasks:{name}", {}, limits, max_concurrent=size)


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[PoolHost]:
    host = make_pool("Misbehaving", size=1, memory_bytes=64 << 20, max_abs_reward=1e9)
    yield host
    host.close()


@pytest.fixture
def pool(shared_pool: PoolHost) -> PoolHost:
    """One process for all tests, started anew where one of them has ended it."""
    shared_pool.score(EXAMPLE, "number 1")
    shared_pool.take_counts()
    return shared_pool


@pytest.fixture
def own_pool() -> Iterator[PoolHost]:
    """One that a test may close."""
    host = make_pool("Misbehaving", size=1)
    yield host
    host.close()


@contextmanager
def hurried(pool: PoolHost, **limits: Any) -> Iterator[None]:
    """Have calls of the block end soon; those before and after it may start processes."""
    before = pool.limits
    pool.limits = replace(before, **limits)
    try:
        yield
    finally:
        pool.limits = before


def pid_of(pool: PoolHost) -> int:
    """The id of its process."""
    pid = pool.score(EXAMPLE, "pid")
    assert pid is not None
    return int(pid)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Any, *, within_s: float = 120.0) -> bool:
    give_up_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.02)
    return True


def test_rewards_come_from_one_process_that_is_used_again(pool: PoolHost) -> None:
    pids = list(pool.score_all(EXAMPLE, ["pid"] * 3))
    assert len(set(pids)) == 1
    assert os.getpid() not in pids
    assert pool.score(EXAMPLE, "number 0.25") == 0.25
    counts = pool.take_counts()
    assert counts.pop("env/milliseconds") >= 0
    assert counts == {"env/calls": 4}
    assert pool.take_counts() == {}
    assert pool.score(EXAMPLE, "print {not an answer}") == 1.0, "what it prints spoils nothing"
    assert pool.score(EXAMPLE, f"hog {16 << 20}") == 16 << 20


def test_asynchronous_code_has_one_event_loop_as_long_as_its_process_lives(pool: PoolHost) -> None:
    assert [pool.score(EXAMPLE, f"ask {number}") for number in (1, 2)] == [2.0, 4.0]
    assert pool.score(EXAMPLE, "number 1") == 1.0
    assert pool.score(EXAMPLE, "ask 3") == 6.0


def test_timers_and_forks_that_a_call_leaves_behind_do_not_reach_the_next(pool: PoolHost) -> None:
    pid = pool.score(EXAMPLE, "pid")
    assert pool.score(EXAMPLE, "alarm") == 1.0
    assert pool.score(EXAMPLE, "sleep 0.02") == 1.0
    assert pool.score(EXAMPLE, "budget") == 1.0
    assert pool.score(EXAMPLE, "busy 0.03") == 1.0
    assert pool.score(EXAMPLE, "fork") == 2.0
    assert pool.score(EXAMPLE, "sleep 0.02") == 1.0, "the fork's answer is not taken for this one's"
    assert pool.score(EXAMPLE, "pid") == pid


@pytest.mark.parametrize(
    ("completion", "reason", "message"),
    [
        ("fail on purpose", "reward_error", r"Misbehaving\.reward on rows\.jsonl:4 raised ZeroDiv"),
        ("number nan", "reward_error", "returned nan; it must return a finite number"),
        ("crash", "reward_lost", r"died during reward on rows\.jsonl:4: signal SIGSEGV"),
        ("leave", "reward_lost", "ended by itself with code 7"),
        (f"hog {256 << 20}", "reward_memory", r"ran out of memory; raise reward\.memory_limit_by"),
    ],
)
@pytest.mark.slow
def test_what_goes_wrong_is_named_and_the_next_call_works(
    pool: PoolHost, completion: str, reason: str, message: str
) -> None:
    rewards = pool.score_all(EXAMPLE, ["number 1", completion, "number 2"])
    assert next(rewards) == 1.0
    with pytest.raises(RewardError, match=message) as caught:
        next(rewards)
    assert caught.value.reason == reason
    assert pool.score(EXAMPLE, "number 1") == 1.0
    assert pool.take_counts()["env/errors"] == 1


@pytest.mark.slow
def test_a_catastrophic_regex_is_killed_and_stalls_nobody(pool: PoolHost) -> None:
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.01):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    what = r"within 0\.3 s; raise task\.reward_timeout_s"
    with pytest.raises(RewardError, match=what) as caught, hurried(pool, score_s=0.3):
        pool.score(EXAMPLE, "regex")
    stop.set()
    ticker.join()
    assert caught.value.reason == "reward_timeout"
    assert len(ticks) > 3, "this process went on meanwhile"
    assert pool.score(EXAMPLE, "number 1") == 1.0


@pytest.mark.slow
def test_what_a_killed_process_has_started_is_killed_too(pool: PoolHost, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pytest.raises(RewardError, match="did not return"), hurried(pool, score_s=0.5):
        pool.score(EXAMPLE, f"child {path}")
    if path.exists():  # it may not have come that far on a busy machine
        assert wait_until(lambda: not is_running(int(path.read_text())))


def test_a_call_that_asks_for_it_is_tried_again_and_counted(
    pool: PoolHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo.tasks.rewards.time.sleep", lambda _: None)
    assert pool.score(EXAMPLE, "retry 3") == 1.0
    counts = pool.take_counts()
    assert (counts["env/calls"], counts["env/retries"]) == (3, 2)
    assert "env/errors" not in counts


@pytest.mark.slow
def test_who_stops_early_cancels_the_rest_and_who_waits_is_told_of_the_end(
    own_pool: PoolHost,
) -> None:
    pid = pid_of(own_pool)
    rewards = own_pool.score_all(EXAMPLE, ["calls", *["sleep 600"] * 9])
    assert next(rewards) == 2.0
    rewards.close()
    # Whether a sleep of the first ones had begun is chance: these keep the process busy themselves.
    others = own_pool.score_all(EXAMPLE, ["sleep 600", "number 1"])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(list, others)
        assert wait_until(lambda: own_pool._busy)
        own_pool.close()
        with pytest.raises(RewardError) as caught:
            waiting.result(timeout=120)
    assert caught.value.reason == "reward_lost"
    assert not is_running(pid), "what runs is killed"
    ways: list[Callable[[], object]] = [
        lambda: next(own_pool.score_all(EXAMPLE, ["number 1"])),
        lambda: own_pool.score(EXAMPLE, "number 1"),
    ]
    for ask in ways:
        with pytest.raises(RewardError, match="is being closed"):
            ask()


def test_a_process_that_cannot_be_started_fails_its_group_alone(
    own_pool: PoolHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("echo.tasks.rewards.subprocess.Popen", refuse)
    for _ in range(2):
        with pytest.raises(RewardError, match=r"cannot be started: .*Resource temp") as caught:
            own_pool.score(EXAMPLE, "number 1")
        assert caught.value.reason == "reward_lost"


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_is_idle_costs_no_reward(pool: PoolHost) -> None:
    pid = pid_of(pool)
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
def test_a_task_that_cannot_be_built_is_named(name: str, message: str) -> None:
    host = make_pool(name, size=1)
    with pytest.raises(RewardError, match=f"process cannot build it: .*{message}") as caught:
        host.score(EXAMPLE, "number 1")
    assert caught.value.reason == "reward_lost"
    host.close()


# --- episodes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def episodes() -> Iterator[PoolHost]:
    host = make_pool("Counting", size=2)
    yield host
    host.close()


@pytest.mark.slow
def test_an_episode_keeps_its_state_among_others(episodes: PoolHost) -> None:
    with pytest.raises(RewardError, match=r"begin on .* raised ValueError"):
        episodes.begin(replace(EXAMPLE, answer="many"))
    begun = [episodes.begin(EXAMPLE) for _ in range(5)]
    go_on = [{"role": "user", "content": "go on"}]
    assert [episode.reply("1") for episode in begun] == [go_on] * 5
    assert begun[0].reply("7") == [{"role": "user", "content": "no"}]
    assert begun[1].reply("2") is not None
    assert begun[1].reply("3") is None
    assert [episode.outcome() for episode in begun[:3]] == [1 / 3, 1.0, 1 / 3]
    for episode in begun:
        episode.close()
    assert not episodes._homes, "nothing is kept of one that did not begin"
    assert [process.num_episodes for process in episodes._free] == [0, 0], "two at one time"
    with pytest.raises(RewardError, match=r"another call in its process failed|not known here"):
        begun[0].reply("2")


@pytest.mark.slow
def test_a_stuck_episode_takes_only_its_own_process_along(episodes: PoolHost) -> None:
    stuck, *others = (episodes.begin(EXAMPLE) for _ in range(3))
    pids = [episode.reply("pid") for episode in (stuck, *others)]
    lost = [episode for episode, pid in zip(others, pids[1:], strict=True) if pid == pids[0]]
    assert len(lost) == 1, "they are spread over two processes"
    what = r"reply on rows\.jsonl:4 did not return .* task\.step_timeout_s"
    with pytest.raises(RewardError, match=what), hurried(episodes, step_s=0.3):
        stuck.reply("regex")
    with pytest.raises(RewardError, match="ended the process and this episode") as caught:
        lost[0].reply("1")
    assert caught.value.reason == "reward_lost"
    assert all(episode.reply("1") for episode in others if episode not in lost)
    stuck.close()
    assert episodes.begin(EXAMPLE).reply("1") is not None
