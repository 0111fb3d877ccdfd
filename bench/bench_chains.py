"""Tokens of agents' episodes that are trained, and that go through the model, by kind of agent.

    python bench/bench_chains.py

Agents of four kinds play episodes with random tokens: one only adds to its history, one drops its
thoughts, one puts a summary in place of its history, one makes calls in parallel. Their calls are
made into rollouts as a worker makes them. Per episode, the script counts the sampled tokens, those
of the longest chain, and the tokens that go through the model: with common tokens of a group once,
and with each chain alone. A training step is made both ways, in turns, and its CPU seconds are
compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import harness
import numpy as np
import torch

from echo.algo.losses import GspoLoss
from echo.core.chains import Tree
from echo.core.rollout import Group, Rollout
from echo.engine.engine import Completion
from echo.runtime.agents.turns import TokenTree, Turn
from echo.train.batch import AdvantageSettings
from echo.train.models.policy import Compute, ModelSource
from echo.train.optimizer import OptimizerSettings
from echo.train.trainer import Trainer

MEMBERS = 4
"""Episodes of a group."""


class Player:
    """Plays one episode with random tokens."""

    def __init__(self, generator: np.random.Generator, scale: int) -> None:
        """Begin an episode; all numbers of tokens are multiples of `scale`."""
        self._generator, self._scale = generator, scale
        self.turns: list[Turn] = []

    def ids(self, number: int) -> list[int]:
        """Return random tokens of a text of the task or the user."""
        return [int(each) for each in self._generator.integers(3, 28, number * self._scale)]

    def ask(self, context: list[int], number: int) -> list[int]:
        """Make a call, and return its answer."""
        ids = self.ids(number)
        answer = np.array(ids, np.int32)
        versions = np.tile(np.array([[1, 0]], np.int32), (len(answer), 1))
        logprobs = np.full(len(answer), -3.0, np.float32)
        completion = Completion("r", answer, logprobs, "stop", versions)
        self.turns.append(Turn(np.array(context, np.int32), completion, "", None))
        return ids


def adds(player: Player, history: list[int]) -> None:
    """Ask eight times, each time with all that was said."""
    for _ in range(8):
        history = history + player.ask(history, 8) + player.ids(4)


def drops_thoughts(player: Player, history: list[int]) -> None:
    """Ask eight times; of each answer the last quarter stays in the history."""
    for _ in range(8):
        answer = player.ask(history, 8)
        history = history + answer[-len(answer) // 4 :] + player.ids(4)


def sums_up(player: Player, history: list[int]) -> None:
    """Ask eight times; after four answers a summary takes their place."""
    prompt = history
    for number in range(8):
        if number == 4:
            history = prompt + player.ids(4)
        history = history + player.ask(history, 8) + player.ids(4)


def asks_in_parallel(player: Player, history: list[int]) -> None:
    """Ask twice, then six times from there, and once with all answers."""
    for _ in range(2):
        history = history + player.ask(history, 8) + player.ids(4)
    answers = [player.ask(history + player.ids(1), 8) for _ in range(6)]
    player.ask(history + [token for answer in answers for token in answer], 8)


AGENTS = {
    "adds to its history": adds,
    "drops its thoughts": drops_thoughts,
    "sums its history up": sums_up,
    "asks in parallel": asks_in_parallel,
}


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--scale", type=int, default=4, help="factor of all lengths")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each way")
    arguments = harness.parse(parser, groups=1, scale=1, repeats=1)
    torch.set_num_threads(1)
    trainers = {shares: _trainer(shares=shares) for shares in (True, False)}
    rows = []
    for name, play in AGENTS.items():
        groups = [_group(play, number, scale=arguments.scale) for number in range(arguments.groups)]
        row: dict[str, Any] = {"agent": name, **_counts(groups)}
        row["computed"], row["computed_apart"] = (
            _num_inputs(trainers[shares], groups) / (MEMBERS * len(groups))
            for shares in (True, False)
        )
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(arguments.repeats + 1):
            for shares, trainer in trainers.items():
                began = time.process_time()
                trainer.step(groups)
                seconds[shares].append(time.process_time() - began)
        together, apart = (median(each[1:] or each) for each in seconds.values())
        rows.append(row | {"step_cpu_s": together, "step_cpu_s_apart": apart})
        print(rows[-1], flush=True)
    options = {"groups": arguments.groups, "scale": arguments.scale, "repeats": arguments.repeats}
    print(f"wrote {harness.save('chains', {'options': options, 'rows': rows})}")


def _group(play: Any, number: int, *, scale: int) -> Group:
    prompt = np.random.default_rng(number).integers(3, 28, 32 * scale).tolist()
    rollouts = []
    for member in range(MEMBERS):
        player = Player(np.random.default_rng([number, member]), scale)
        play(player, prompt)
        tree = TokenTree(player.turns)
        reward = float(member % 2)
        rollouts.append(tree.rollout(len(prompt), reward=reward, finish_reason="stop"))
    return Group(
        group_id=number,
        attempt=0,
        worker_id="w1",
        prompt_ids=np.array(prompt, np.int32),
        rollouts=tuple(rollouts),
    )


def _counts(groups: list[Group]) -> dict[str, float]:
    """Return counts of tokens and chains, per episode."""
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    sums = {"chains": 0, "sampled": 0, "of_longest_chain": 0}
    for group, rollout in rollouts:
        chains = list(_chains(group, rollout))
        sums["chains"] += len(chains)
        sums["sampled"] += int(rollout.completion_mask.sum())
        sums["of_longest_chain"] += max(int(rollout.completion_mask[each].sum()) for each in chains)
    return {name: value / len(rollouts) for name, value in sums.items()}


def _num_inputs(trainer: Trainer, groups: list[Group]) -> int:
    """Return the number of tokens of a step that go through the model."""
    micro_batches = trainer.policy.micro_batches(trainer.prepare(groups).samples)
    return sum(micro.input_ids.numel() for _, micro in micro_batches)


def _chains(group: Group, rollout: Rollout) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the places of each chain's completion tokens."""
    for runs in Tree.of(rollout, num_prompt=len(group.prompt_ids)).chains:
        places = np.concatenate([np.arange(start, end) for start, end in runs])
        yield places[places >= 0]


def _trainer(*, shares: bool) -> Trainer:
    return Trainer(
        ModelSource(model_dir=harness.tiny_model()),
        Compute(device=torch.device("cpu"), packs=True, share_prompts=shares),
        loss=GspoLoss(),
        optimizer=OptimizerSettings(),
        advantages=AdvantageSettings(),
    )


if __name__ == "__main__":
    main()
