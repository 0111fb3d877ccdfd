"""Rollout phases of a synchronous learner, with APRIL's early stop.

What the paper compares, step by step, without Echo: a phase submits N' groups, what was left over
first, spreads their rollouts over the engines, and ends when N groups are whole; N' = N waits for
every one. What is unfinished keeps its tokens and goes on in the next phase. Engines take as long
as `april_engine.TimedEngine`. It tells how much the paper's algorithm gains on given lengths, so
that gains of ours are compared on lengths where the paper's are those that it publishes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from april.engine import Setting

STEP_TOKENS = 32
"""Grid of the tokens that an engine's rows have made."""

Array = npt.NDArray[np.float64]


@dataclass
class _Rollout:
    length: int
    done: float = 0.0


@dataclass
class _Group:
    rollouts: list[_Rollout] = field(default_factory=list)


def play(setting: Setting, *, num_submitted: int, warm_up: int = 3) -> dict[str, Any]:
    """Return the figures of `setting.num_steps` rollout phases.

    Args:
        setting: the engines, the lengths, N (`groups_per_step`) and the size of a group.
        num_submitted: N'.
        warm_up: first phases that do not count.
    """
    left_over: list[_Group] = []
    next_id, seconds, row_s, num_sampled = 0, 0.0, 0.0, 0.0
    for number in range(setting.num_steps):
        groups = left_over[:num_submitted]
        waiting = left_over[num_submitted:]
        while len(groups) < num_submitted:
            lengths = [setting.length(next_id, member) for member in range(setting.group_size)]
            groups.append(_Group([_Rollout(length) for length in lengths]))
            next_id += 1
        phase_s, phase_row_s, phase_tokens, is_whole = _play_phase(setting, groups)
        left_over = [group for group, whole in zip(groups, is_whole, strict=True) if not whole]
        left_over += waiting
        if number >= warm_up:
            seconds += phase_s
            row_s += phase_row_s
            num_sampled += phase_tokens
    return {
        "num_submitted": num_submitted,
        "rollout_tokens_per_s": num_sampled / seconds,
        "rollout_s_per_batch": seconds / (setting.num_steps - warm_up),
        "rows_idle": 1 - row_s / (setting.num_workers * setting.num_rows * seconds),
    }


def _play_phase(setting: Setting, groups: list[_Group]) -> tuple[float, float, float, list[bool]]:
    """Sample until N groups are whole; return seconds, row seconds, tokens, and which are."""
    unfinished = [r for group in groups for r in group.rollouts if r.done < r.length]
    engines = [
        _Engine(setting, unfinished[index :: setting.num_workers])
        for index in range(setting.num_workers)
    ]
    ends_at = {id(r): at for e in engines for r, at in zip(e.rollouts, e.ends_at, strict=True)}
    whole_at = [max((ends_at.get(id(r), 0.0) for r in g.rollouts), default=0.0) for g in groups]
    stop_at = sorted(whole_at)[setting.groups_per_step - 1]
    num_tokens = sum(engine.stop(stop_at) for engine in engines)
    row_s = sum(float(np.minimum(engine.ends_at, stop_at).sum()) for engine in engines)
    # Groups that are whole at the same instant beyond the N are lost in the paper's code.
    return stop_at, row_s, num_tokens, [at <= stop_at for at in whole_at]


class _Engine:
    """When each of its rows ends, if nothing stops it."""

    def __init__(self, setting: Setting, rollouts: list[_Rollout]) -> None:
        self.rollouts = rollouts
        left: Array = np.array([r.length - r.done for r in rollouts])
        cached: Array = np.array([setting.prompt_tokens + r.done for r in rollouts])
        self._tokens: Array = np.arange(0, left.max(initial=0) + STEP_TOKENS, STEP_TOKENS)
        begin = self._tokens[:-1, None]
        is_running = left[None, :] > begin
        num_cached = (is_running * (cached[None, :] + begin)).sum(axis=1)
        mean_cached = num_cached + is_running.sum(axis=1) * STEP_TOKENS / 2
        seconds = STEP_TOKENS * (setting.weights_s + setting.cache_s_per_token * mean_cached)
        prefill_s = setting.prefill_s_per_token * cached.sum()
        self._seconds: Array = prefill_s + np.concatenate([[0.0], seconds.cumsum()])
        self._left = left
        self.ends_at: Array = np.interp(left, self._tokens, self._seconds)

    def stop(self, at: float) -> float:
        """Let its rows have what they have sampled by then; return how many tokens that is."""
        num_made = np.interp(at, self._seconds, self._tokens)
        made = np.where(self.ends_at <= at, self._left, np.minimum(self._left, num_made))
        for rollout, number in zip(self.rollouts, made, strict=True):
            rollout.done += float(number)
        return float(made.sum())
