"""Multi-turn rollouts: the engine samples turns, and the environment replies.

Sampled tokens are kept as they are. Their text is never encoded again. Each reply of the
environment is encoded once and appended. The next turn is sampled after all these tokens. A
rollout's mask is True for sampled tokens only, and only sampled tokens have log-probabilities.
`max_completion_tokens` bounds all tokens of an episode, including the environment's.

Episodes that are played together advance turn by turn. The engine samples the turn of all running
episodes in one call. Then the environment replies to several episodes concurrently. The finish
reason of an episode is

    stop      if the environment ends the episode
    length    if a turn is cut off at the token limit, if the environment's reply and one more token
              do not fit, or if the environment has not ended the episode after `max_turns` turns

An episode that ends at a limit is counted and gets a reward like any other episode.

If the environment fails, or a log-probability is not finite, the episode's whole group fails and is
not trained on. A group whose only fault is that the environment's process ended (`reward_lost`) is
played again, at most MAX_RETRIES times, because another episode may have ended the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echo.config.schema import RewardSection, TaskSection
from echo.core.errors import ConfigError, DataError
from echo.core.rollout import NO_OPINION, PolicyVersion, Rollout
from echo.core.token_sets import TokenSets, join_sets
from echo.engine.engine import (
    UNWATCHED,
    Completion,
    Engine,
    Request,
    Sampling,
    Watcher,
    describe_nonfinite,
)
from echo.roles.joining import CODE
from echo.tasks.environment import Environment
from echo.tasks.rewards import (
    MAX_RETRIES,
    TICK_S,
    Episode,
    InlineHost,
    Limits,
    PoolHost,
    RewardError,
    TaskHost,
)
from echo.tasks.task import Example, Task, check_code, code_of
from echo.tasks.tokenization import UNUSABLE, TextCodec
from echo.wire.messages import BAD_LOGPROBS, Lease

MAX_THREADS = 64
"""Largest number of threads that wait for replies. The host limits the replies that run at once."""

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Difference between the seeds of consecutive turns in an episode."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opening:
    """The start of a group of episodes: prompt, example and seeds."""

    name: str
    """Prefix of the ids of the group's requests, such as "17.0"."""
    prompt_ids: npt.NDArray[np.int32]
    example: Example
    seeds: Sequence[int]
    """One seed per episode of the group."""


def openings_of(leases: Sequence[Lease], *, group_size: int) -> list[Opening]:
    """Return the opening of each lease's group, in the order of the leases."""
    return [
        Opening(
            name=f"{lease.group_id}.{lease.attempt}",
            prompt_ids=np.array(lease.prompt_ids, dtype=np.int32),
            example=Example(**lease.example),
            seeds=[lease.seed + member for member in range(group_size)],
        )
        for lease in leases
    ]


class EpisodeRunner:
    """Plays groups of episodes in an environment; thread-safe."""

    def __init__(
        self,
        engine: Engine,
        host: TaskHost,
        text: TextCodec,
        *,
        max_turns: Callable[[Example], int],
    ) -> None:
        self._engine = engine
        self._host = host
        self._text = text
        self._max_turns = max_turns
        self._threads = ThreadPoolExecutor(MAX_THREADS, "echo-episode")

    def play(
        self,
        openings: Sequence[Opening],
        sampling: Sampling,
        watcher: Watcher = UNWATCHED,
        *,
        version: PolicyVersion | None = None,
    ) -> list[list[Rollout] | RewardError]:
        """Play groups to the end. Return each group's rollouts, or its error.

        `sampling.max_completion_tokens` bounds a whole episode. The watcher receives counts of
        tokens and replies. If the watcher stops the call, unfinished groups are dropped. If a
        group's environment lost its process, the group is played again. If `version` is given, this
        version samples all turns.

        Raises:
            VersionError: before the first turn, if the given version is not installed.
        """
        held = nullcontext() if version is None else self._engine.holding(version)
        results: list[list[Rollout] | RewardError] = [
            RewardError("not played", reason="reward_lost") for _ in openings
        ]
        with held:
            for _ in range(MAX_RETRIES + 1):
                wanted = [
                    index
                    for index, result in enumerate(results)
                    if isinstance(result, RewardError) and result.reason == "reward_lost"
                ]
                if not wanted or watcher.should_stop():
                    break
                groups = [
                    [_Play(opening, member, sampling) for member in range(len(opening.seeds))]
                    for opening in (openings[index] for index in wanted)
                ]
                self._play(groups, sampling, watcher, version)
                for index, group in zip(wanted, groups, strict=True):
                    results[index] = _result(group)
                    if not isinstance(results[index], RewardError):
                        self._count(group)
        return results

    def _count(self, group: Sequence[_Play]) -> None:
        self._host.count("env/episodes", len(group))
        self._host.count("env/turns", sum(play.num_turns for play in group))
        self._host.count("env/tool_calls", sum(play.num_tool_calls for play in group))

    def close(self) -> None:
        """End the threads that wait for replies. The call returns at once."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _play(
        self,
        groups: Sequence[Sequence[_Play]],
        sampling: Sampling,
        watcher: Watcher,
        version: PolicyVersion | None,
    ) -> None:
        plays = [play for group in groups for play in group]
        try:
            self._each(self._begin, plays, watcher)
            limits = [self._max_turns(play.opening.example) for play in plays]
            for turn in range(max(limits, default=0)):
                # One fault fails the whole group, so its other episodes stop.
                running = [
                    play
                    for group in groups
                    if not any(play.fault for play in group)
                    for play in group
                    if not play.reason
                ]
                if not running or watcher.should_stop():
                    break
                requests = [play.request(turn) for play in running]
                completions = self._engine.generate(requests, sampling, watcher, version=version)
                if watcher.should_stop():
                    break
                for play, completion in zip(running, completions, strict=True):
                    play.add_sampled(completion)
                running = [play for play in running if not play.fault]
                self._each(self._reply, running, watcher)
            self._take_rewards(groups, watcher)
        finally:
            for play in plays:
                if play.episode is not None:
                    # When the node ends, `close` may already have ended the threads and the host.
                    with suppress(RuntimeError):
                        self._threads.submit(_close, play.episode)

    def _each(
        self,
        function: Callable[[_Play], None],
        plays: Sequence[_Play],
        watcher: Watcher,
    ) -> None:
        """Call a function for each episode in a thread.

        A RewardError becomes the episode's `fault`.
        """

        def guarded(play: _Play) -> None:
            try:
                function(play)
            except RewardError as error:
                play.fault = error

        running = {self._threads.submit(guarded, play) for play in plays}
        while running:
            done, running = wait(running, timeout=TICK_S, return_when=FIRST_COMPLETED)
            watcher.on_tokens(max(1, len(done)))
            for future in done:
                future.result()
            # `close` cancels calls that have not begun, and `wait` would wait for them forever.
            running = {future for future in running if not future.cancelled()}

    def _begin(self, play: _Play) -> None:
        play.episode = self._host.begin(play.opening.example)

    def _reply(self, play: _Play) -> None:
        """Send the sampled turn to the environment; append the reply, or end the episode."""
        assert play.episode is not None
        messages = play.episode.reply(self._text.decode(play.turn_ids.tolist()))
        play.num_turns += 1
        play.num_tool_calls += sum(each.get("role") == "tool" for each in messages or ())
        if messages is None and not play.is_cut:
            play.reason = "stop"
        elif messages is None or play.is_cut:
            play.reason = "length"
            self._host.count("env/token_limit")
        elif play.num_turns == self._max_turns(play.opening.example):
            play.reason = "length"
            self._host.count("env/turn_limit")
        else:
            try:
                ids = self._text.encode_turn(messages, is_closed=play.is_closed)
            except (DataError, *UNUSABLE) as error:
                what = f"{self._host.name} on {play.opening.example}"
                text = f"{what}: what it says cannot be turned into tokens: {error}"
                raise RewardError(text) from error
            if not play.add_answer(ids):
                play.reason = "length"
                self._host.count("env/token_limit")

    def _take_rewards(self, groups: Sequence[Sequence[_Play]], watcher: Watcher) -> None:
        """Compute the rewards of finished episodes.

        If the task compares answers, all answers of a group are scored together.
        """
        together = {
            group[0]: group
            for group in groups
            if self._host.compares_answers(group[0].opening.example)
        }

        def take_group(first: _Play) -> None:
            texts = [self._text.decode(play.turn_ids.tolist()) for play in together[first]]
            rewards = self._host.score_all(first.opening.example, texts)
            for play, reward in zip(together[first], rewards, strict=True):
                play.reward = NO_OPINION if reward is None else reward

        def is_over(play: _Play) -> bool:
            return bool(play.reason) and not play.fault

        whole = [first for first, group in together.items() if all(map(is_over, group))]
        self._each(take_group, whole, watcher)
        each = [play for group in groups if group[0] not in together for play in group]
        self._each(self._take_reward, list(filter(is_over, each)), watcher)

    def _take_reward(self, play: _Play) -> None:
        assert play.episode is not None
        outcome = play.episode.outcome()
        play.reward = NO_OPINION if outcome is None else outcome


class _Play:
    """One running episode: its tokens so far and its state."""

    def __init__(self, opening: Opening, member: int, sampling: Sampling) -> None:
        self.opening = opening
        self.episode: Episode | None = None
        self.fault: RewardError | None = None
        self.reason = ""
        """The finish reason; empty while the episode runs."""
        self.reward = 0.0
        self.num_turns = self.num_tool_calls = 0
        self.turn_ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        """The tokens of the last sampled turn."""
        self.is_cut = False
        """Whether the last sampled turn ended without a stop token or a stop string."""
        self._stop_ids = sampling.stop_ids
        self._member = member
        self._max_tokens = sampling.max_completion_tokens
        self._parts: list[tuple[Any, Any, Any, Any]] = []
        self._supports: list[tuple[TokenSets | None, int]] = []
        self._likely: list[tuple[TokenSets | None, int]] = []
        self._num_tokens = 0

    def request(self, turn: int) -> Request:
        seed = self.opening.seeds[self._member] + turn * SEED_STRIDE
        return Request(
            request_id=f"{self.opening.name}.{self._member}.{turn}",
            prompt_ids=self.opening.prompt_ids,
            seed=seed & (2**63 - 1),
            prefix_ids=self._joined(0, np.int32),
            turn_start=self._num_tokens,
        )

    @property
    def is_closed(self) -> bool:
        """Whether the last sampled turn ends with a stop token. A stop string does not count."""
        return int(self.turn_ids[-1]) in self._stop_ids

    def add_sampled(self, completion: Completion) -> None:
        """Append a sampled turn; set `fault` if a log-probability is not finite."""
        if completion.finish_reason == "nonfinite":
            self.fault = RewardError(describe_nonfinite(completion), reason=BAD_LOGPROBS)
            return
        ids = completion.token_ids
        self.turn_ids, self.is_cut = ids, completion.finish_reason != "stop"
        mask = np.ones(len(ids), np.bool_)
        self._parts.append((ids, completion.logprobs, completion.policy_versions, mask))
        self._supports.append((completion.support, len(ids)))
        self._likely.append((completion.likely, len(ids)))
        self._num_tokens += len(ids)

    def add_answer(self, ids: Sequence[int]) -> bool:
        """Append the environment's reply if it fits; return whether it fits.

        The reply fits if there is space for the reply and one more token.
        """
        if self._num_tokens + len(ids) >= self._max_tokens:
            return False
        length = len(ids)
        version = self._parts[-1][2][-1:]
        self._parts.append(
            (
                np.array(ids, np.int32),
                np.zeros(length, np.float32),
                np.repeat(version, length, axis=0),
                np.zeros(length, np.bool_),
            )
        )
        self._supports.append((None, length))
        self._likely.append((None, length))
        self._num_tokens += length
        return True

    def rollout(self) -> Rollout:
        return Rollout(
            token_ids=self._joined(0, np.int32),
            sampler_logprobs=self._joined(1, np.float32),
            policy_versions=self._joined(2, np.int32),
            completion_mask=self._joined(3, np.bool_),
            support=join_sets(self._supports),
            likely=join_sets(self._likely),
            reward=self.reward,
            finish_reason=self.reason,
        )

    def _joined(self, column: int, dtype: Any) -> Any:
        if not self._parts:
            return np.empty(0, dtype)
        return np.concatenate([part[column] for part in self._parts])


def _result(group: Sequence[_Play]) -> list[Rollout] | RewardError:
    faults = [play.fault for play in group if play.fault is not None]
    if faults:
        # A lost process is reported only if it is the only fault: the group is then played again.
        return min(faults, key=lambda fault: fault.reason == "reward_lost")
    if any(not play.reason for play in group):
        return RewardError("the node ended first", reason="reward_lost")
    return [play.rollout() for play in group]


def _close(episode: Episode) -> None:
    with suppress(RewardError):
        episode.close()


# --- Set-up of the host of a task's code, and of the runner of its episodes ---


MAX_AUTO_PROCESSES = 4
"""Largest number of processes for `reward.max_concurrent = "auto"`. Each process imports the task's
code and what it needs, so a process for each of a hundred cores would take much memory.
"""


def code_settings(section: TaskSection, reward: RewardSection) -> dict[str, Any]:
    """Return the inherited setting `CODE`: the path and the hashes of each module of the task.

    Workers compare these hashes with the hashes of their own code. If only the learner runs the
    code, the result is empty.
    """
    if reward.where == "learner":
        return {}  # only the learner runs the code
    return {CODE: code_of(section.kind, section.options)}


def check_inherited_code(
    section: TaskSection,
    reward: RewardSection,
    settings: Mapping[str, Any],
    *,
    inherited_dir: Path,
) -> None:
    """Check that a worker's task code equals the learner's. Called before the code is imported.

    Raises:
        ConfigError: if the code is missing on this machine, or differs from the learner's.
    """
    if reward.where != "learner":
        learners = settings.get(CODE, {})
        check_code(section.kind, section.options, learners, inherited_dir=inherited_dir)


def make_local_host(section: TaskSection, reward: RewardSection, task: Task) -> TaskHost:
    """Return the host that runs the task's code on this machine.

    The host starts its processes on first use.

    Raises:
        ConfigError: if rewards are computed on the learner but the task is an environment.
    """
    if reward.where == "learner" and task.has_turns:
        raise ConfigError(
            f'reward.where = "learner": {type(task).__name__} is an environment, which replies '
            "while workers sample; remove it"
        )
    limits = Limits(
        score_s=section.reward_timeout_s,
        step_s=section.step_timeout_s,
        memory_bytes=reward.memory_limit_bytes,
        max_abs_reward=section.max_reward,
    )
    if task.is_bounded:
        return InlineHost(task, limits)
    wanted = reward.max_concurrent
    size = min(MAX_AUTO_PROCESSES, os.cpu_count() or 1) if wanted == "auto" else wanted
    return PoolHost(
        section.kind,
        section.options,
        limits,
        max_concurrent=size,
        compares_answers=task.compares_answers,
    )


def turns_of(section: TaskSection, task: Task) -> Callable[[Example], int] | None:
    """Return a function: an example -> the largest number of turns in its episodes.

    Return None if the task has no episodes.
    """
    if not isinstance(task, Environment) or not task.has_turns:
        return None
    return lambda example: task.turn_limit(example) or section.max_turns


def make_runner(
    turns: Callable[[Example], int] | None,
    host: TaskHost,
    engine: Engine,
    text: TextCodec,
) -> EpisodeRunner | None:
    """Return the runner of an environment's episodes; None if the task has no episodes."""
    if turns is None:
        return None
    return EpisodeRunner(engine, host, text, max_turns=turns)
