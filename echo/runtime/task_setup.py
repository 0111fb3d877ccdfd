"""From the configuration to the place where a task's code runs, and to what plays its episodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from echo.config.schema import Config
from echo.core.errors import ConfigError
from echo.engine.engine import Engine
from echo.protocol.joining import CODE
from echo.runtime.episodes import EpisodePlayer
from echo.tasks import tokenization
from echo.tasks.environment import Environment
from echo.tasks.rewards import InlineHost, LaterHost, Limits, PoolHost, TaskHost
from echo.tasks.task import Task, check_code, code_of, load_task, task_digests

MAX_AUTO_PROCESSES = 4


@dataclass(frozen=True, slots=True)
class Judge:
    """What a worker needs of a task."""

    host: TaskHost
    turns: int | None
    """Most turns of an episode; None where an answer is one turn."""
    digests: dict[str, str]
    """Hashes of its code and data, as far as this node has them."""


def code_settings(config: Config) -> dict[str, Any]:
    """Return what workers are told of the code that the task's settings name."""
    return {CODE: code_of(config.task.kind, config.task.options)} if _needs_code(config) else {}


def check_inherited_code(
    config: Config, settings: Mapping[str, Any], *, inherited_dir: Path
) -> None:
    """Compare the code that a worker is about to import with the learner's.

    Args:
        config: the worker's, with what it inherits.
        settings: what the learner sent.
        inherited_dir: where files are put that came over the network.

    Raises:
        ConfigError: if it is missing here, or is not the learner's.
    """
    if _needs_code(config):
        learners = settings.get(CODE, {})
        check_code(config.task.kind, config.task.options, learners, inherited_dir=inherited_dir)


def _needs_code(config: Config) -> bool:
    """Return whether workers run the task's code."""
    return config.reward.where != "learner"


def make_judge(config: Config) -> Judge:
    """Return who judges the answers of a worker.

    Raises:
        ConfigError: if the task cannot be loaded.
    """
    if config.reward.where == "learner":
        return Judge(LaterHost(), None, {})
    task = load_task(config.task.kind, config.task.options)
    return Judge(make_local_host(config, task), turns_of(config, task), task_digests(task))


def make_task_host(config: Config, task: Task) -> TaskHost:
    """Return where the learner has answers judged; nothing is started or reached for yet.

    Raises:
        ConfigError: if an environment is to run where it cannot.
    """
    if config.reward.where == "learner" and config.agent.listen is not None:
        raise ConfigError(
            'reward.where = "learner": agents, which agent.listen asks for, are rewarded where '
            "they are served; remove one of the two"
        )
    if config.reward.where == "learner" and task.has_turns:
        raise ConfigError(
            f'reward.where = "learner": {type(task).__name__} is an environment, which replies '
            "while workers sample; remove it"
        )
    return make_local_host(config, task)


def make_local_host(config: Config, task: Task) -> TaskHost:
    """Return a host for the task on this machine; no process starts before it is needed."""
    limits = Limits(
        score_s=config.task.reward_timeout_s,
        step_s=config.task.step_timeout_s,
        memory_bytes=config.reward.memory_limit_bytes,
        max_abs_reward=config.task.max_reward,
    )
    if task.is_bounded:
        return InlineHost(task, limits)
    wanted = config.reward.max_concurrent
    size = min(MAX_AUTO_PROCESSES, os.cpu_count() or 1) if wanted == "auto" else wanted
    return PoolHost(config.task.kind, config.task.options, limits, max_concurrent=size)


def turns_of(config: Config, task: Task) -> int | None:
    """Return how many turns an episode may have; None where an answer is one turn."""
    if not isinstance(task, Environment) or not task.has_turns:
        return None
    return task.max_turns or config.task.max_turns


def make_player(
    config: Config,
    turns: int | None,
    host: TaskHost,
    engine: Engine,
    tokenizer: Any,
    stop_ids: Sequence[int],
) -> EpisodePlayer | None:
    """Return what plays the episodes of an environment; None where answers are one turn.

    Args:
        config: with the learner's settings in it.
        turns: most turns of an episode, or None.
        host: where it runs.
        engine: samples.
        tokenizer: of the model.
        stop_ids: what ends a turn.
    """
    if turns is None:
        return None
    return EpisodePlayer(
        engine,
        host,
        encode_turn=partial(
            tokenization.encode_turn,
            tokenizer,
            stop_ids=stop_ids,
            chat_template_kwargs=config.model.chat_template_kwargs,
        ),
        decode=lambda ids: tokenization.decode(tokenizer, ids, stop_ids),
        max_turns=turns,
    )
