"""Write some rollouts of steps and evaluations as text, for the log and the trackers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from echo.core.chains import Tree
from echo.core.monitoring.samples import TextSample, spread_over
from echo.core.rollout import Group, Rollout
from echo.core.units import one_line
from echo.runtime.learner.follower import Follower

SAMPLE_STEPS = 10
"""Number of optimizer steps from one sampled step to the next."""
MAX_CHARACTERS = 2000
"""Largest number of logged characters of a prompt or completion.

The middle of a longer text is left out.
"""

NEW_CHAIN = "\n[another chain]\n"
"""Text before a chain that branches off an earlier chain of the rollout."""

Decode = Callable[[list[int]], str]
"""Type of a function that decodes token ids."""


class SampleLog:
    """Chooses rollouts, decodes them, and passes them to the log and the follower."""

    def __init__(
        self, number: int, follower: Follower, *, decode: Decode, log: logging.Logger
    ) -> None:
        """Take `number` rollouts of every evaluation and of every SAMPLE_STEPS-th step."""
        self._number, self._follower, self._decode, self._log = number, follower, decode, log

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        """Write some rollouts of a step, from best to worst reward.

        Only every SAMPLE_STEPS-th step is sampled.
        """
        if step % SAMPLE_STEPS or not self._number:
            return
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        rollouts.sort(key=lambda pair: pair[1].reward, reverse=True)
        self.write(
            step,
            [
                TextSample(
                    kind="train",
                    prompt=self._decode(group.prompt_ids.tolist()),
                    completion=self._completion(group, rollout),
                    reward=rollout.reward,
                    source=group.worker_id,
                )
                for group, rollout in spread_over(rollouts, self._number)
            ],
        )

    def _completion(self, group: Group, rollout: Rollout) -> str:
        """Return a completion's text, with NEW_CHAIN where an agent begins another chain."""
        tree = Tree.of(rollout, num_prompt=len(group.prompt_ids))
        ids = rollout.token_ids.tolist()
        return NEW_CHAIN.join(self._decode(ids[piece.start : piece.end]) for piece in tree.pieces)

    def write(self, step: int, samples: Sequence[TextSample]) -> None:
        """Write samples of a step to the log and the follower, up to the configured number."""
        samples = samples[: self._number]
        for sample in samples:
            self._log.info(
                "sample of step %d (%s, %s, reward %g): %s -> %s",
                step,
                sample.kind,
                one_line(sample.source),
                sample.reward,
                _shortened(sample.prompt),
                _shortened(sample.completion),
                extra={FILE_ONLY: True},
            )
        if samples:
            self._follower.write_samples(step, samples)


FILE_ONLY = "is_file_only"
"""Attribute of log records that go to the log file but not to the terminal."""


def _shortened(text: str) -> str:
    """Return a text in quotes on one line. The middle of a long text is left out."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        left_out = len(text) - MAX_CHARACTERS
        text = f"{text[:half]} [... {left_out} characters ...] {text[-half:]}"
    return f'"{one_line(text)}"'
