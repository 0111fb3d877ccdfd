"""The learner dies at chosen points and is resumed, while its workers live on: one run."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.e2e.audit import Audit
from tests.e2e.cluster import Cluster, NodeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

INTERVAL = 3
"""Steps between checkpoints."""
MAX_STEPS = 12
"""More than the last step at which the learner dies: the version of that step may not be published,
and the next one is offered in its place."""
FIRST_DEATH = 6
"""Step at which nothing older than v2 may still be trained on, as max_staleness is 3."""
HELD_FROM = 28
"""Group from which on none is finished in the first life; it trains on those before."""


class Lives:
    """One run and the learners that lead it, one after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        pace = {"REWARD_S": "0.02"}
        self.workers = [cluster.start("worker", name=name, env=pace) for name in ("w1", "w2")]
        self.fork_steps: list[int] = []

    def start(self, *arguments: str, **settings: object) -> NodeProcess:
        """Start the learner, resuming if it lived before."""
        resume = ["--resume"] if self.fork_steps else []
        self.fork_steps.append(self.saved_step)
        settings = {"run.max_steps": MAX_STEPS, "checkpoint.interval_steps": INTERVAL, **settings}
        return self.cluster.start("learner", *resume, *arguments, settings=settings)

    def live_until(self, point: str, **settings: object) -> None:
        """Let the learner live until that point; its workers must survive it."""
        learner = self.start("--crash-at", point, **settings)
        code = self.cluster.wait_for_end(learner)
        assert code == -signal.SIGKILL, f"ended with {code} before {point}\n{self.cluster.logs}"
        assert all(worker.is_running for worker in self.workers), self.cluster.logs

    @property
    def saved_step(self) -> int:
        """Step of the checkpoint that a resumed learner takes; 0 without one.

        A learner that dies between its very first checkpoint and the pointer leaves no pointer.
        """
        pointer = self.cluster.run_dir / "checkpoints" / "latest"
        if pointer.exists():
            return int(pointer.read_text().strip().removeprefix("step_"))
        complete = pointer.parent.glob("step_*")
        return max((int(path.name.removeprefix("step_")) for path in complete), default=0)


def choose_point(name: str, lives: Lives, rng: random.Random) -> str:
    """Choose when the learner dies at a point of this name, in the life that begins now."""
    saved_step = lives.saved_step
    match name:
        case "stored":
            new_groups = [record["group"] for record in lives.cluster.records("granted")]
            return f"stored:{max(new_groups, default=-1) + 1 + rng.randrange(8)}"
        case "stepped" | "trained":
            return f"{name}:{saved_step + 1 + rng.randrange(INTERVAL)}"
        case _:
            # The step of a checkpoint: "published" is then the instant between the two.
            return f"{name}:{saved_step + INTERVAL}"


@dataclass
class Run:
    """A finished run, and what its lives began with."""

    cluster: Cluster
    audit: Audit
    fork_steps: list[int]
    held: set[tuple[int, str]]
    """Groups, and their workers, that were not finished when the learner died first."""


@pytest.fixture(scope="module")
def run(make_cluster: Callable[[], Cluster]) -> Run:
    """Return the run.

    The first life makes no checkpoint, so that all its versions but v0 are abandoned, and when it
    ends workers hold groups of them. Then the learner dies at each of the six points once.
    """
    cluster = make_cluster()
    rng = random.Random(7)
    points = ["stored", "stepped", "trained", "published", "checkpoint", "checkpointed"]
    rng.shuffle(points)
    lives = Lives(cluster)
    cluster.hold_from(HELD_FROM)
    lives.live_until(f"stepped:{FIRST_DEATH}", **{"checkpoint.interval_steps": 100})
    held = {
        (group, node.name) for node in lives.workers for group in cluster.open_groups(node.name)
    }
    cluster.let_go()
    for name in points:
        lives.live_until(choose_point(name, lives, rng))
    cluster.finish(lives.start(), *lives.workers)
    return Run(cluster, cluster.audit(), lives.fork_steps, held)


def test_a_learner_killed_at_every_point_goes_on_each_time(run: Run) -> None:
    assert run.audit.num_steps == MAX_STEPS
    assert run.audit.fork_steps == dict(enumerate(run.fork_steps, start=1))
    assert len(run.fork_steps) == 8
    assert INTERVAL in run.fork_steps, "no life began at a checkpoint"


def test_both_workers_live_through_all_of_it(run: Run) -> None:
    workers = {"w1", "w2"}
    assert {record["worker"] for record in run.cluster.records("accepted")} == workers
    for name in workers:
        lineages = [record["version"][0] for record in run.cluster.installed(name)]
        assert lineages == sorted(lineages)
        # Not always the last: what lay in the buffer may have been enough for the steps of a life.
        assert lineages[-1] > 1, "no version of a later life was taken"


def test_rollouts_of_abandoned_versions_are_refused_with_that_reason(run: Run) -> None:
    assert run.held, "the workers held nothing that could be refused"
    refused = {
        (record["group"], record["worker"])
        for record in run.cluster.records("refused")
        if record["reason"] == "abandoned_version"
    }
    assert refused & run.held
    for _, worker in refused:
        assert "refused: abandoned_version" in run.cluster.log(worker)


def test_accepted_rollouts_of_abandoned_versions_end_with_that_reason(run: Run) -> None:
    assert run.audit.discard_reasons["abandoned_version"] > 0, "what the journal held at the crash"
