"""The learner dies at chosen points and is resumed, while its workers live on."""

from __future__ import annotations

import random
import signal

import pytest

from tests.e2e.cluster import Cluster, NodeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

INTERVAL = 3
"""Steps between checkpoints."""
MAX_STEPS = 9


class Lives:
    """One run and the learners that lead it, one after the other."""

    def __init__(self, cluster: Cluster, *, reward_s: float, **settings: object) -> None:
        self.cluster = cluster
        self.settings = settings
        pace = {"REWARD_S": str(reward_s)}
        self.workers = [cluster.start("worker", name=name, env=pace) for name in ("w1", "w2")]
        self.num_lives = 0

    def start(self, kill_at: str = "") -> NodeProcess:
        """Start the learner, resuming if it lived before, to die at a point."""
        settings = {"run.max_steps": MAX_STEPS, **self.settings}
        arguments = ["--resume"] if self.num_lives else []
        arguments += ["--crash-at", kill_at] if kill_at else []
        self.num_lives += 1
        return self.cluster.start("learner", *arguments, settings=settings)

    def start_with_workers(self, kill_at: str = "") -> NodeProcess:
        """Start the learner, and let no group be finished before both workers are there."""
        self.cluster.hold_from(0)
        num_joined = {worker.name: self.count_joined(worker.name) for worker in self.workers}
        learner = self.start(kill_at)
        for name, number in num_joined.items():
            self.cluster.wait_for(
                lambda name=name, number=number: self.count_joined(name) > number,
                f"{name} joins",
                alive=learner,
            )
        self.cluster.let_go()
        return learner

    def count_joined(self, name: str) -> int:
        return self.cluster.log(name).count("joined run")

    def live_until(self, kill_at: str, *, with_workers: bool = False) -> None:
        """Let the learner live until that point; its workers must survive it."""
        start = self.start_with_workers if with_workers else self.start
        code = self.cluster.wait_for_end(start(kill_at))
        assert code == -signal.SIGKILL, f"ended with {code} before {kill_at}\n{self.cluster.logs}"
        assert all(worker.is_running for worker in self.workers), self.cluster.logs

    def live_to_the_end(self, *, with_workers: bool = False) -> None:
        """Let the learner finish the run, and the workers end with it."""
        start = self.start_with_workers if with_workers else self.start
        self.cluster.finish(start(), *self.workers)

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint; 0 without one."""
        pointer = self.cluster.run_dir / "checkpoints" / "latest"
        return int(pointer.read_text().strip().removeprefix("step_")) if pointer.exists() else 0


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


def test_a_learner_killed_at_every_point_goes_on_each_time(cluster: Cluster) -> None:
    rng = random.Random(7)
    points = ["stored", "stepped", "trained", "published", "checkpoint", "checkpointed"]
    rng.shuffle(points)
    lives = Lives(cluster, reward_s=0.02)
    fork_steps = [0]

    for name in points:
        lives.live_until(choose_point(name, lives, rng))
        fork_steps.append(lives.saved_step)
    lives.live_to_the_end()

    result = cluster.audit()
    assert result.num_steps == MAX_STEPS
    assert result.fork_steps == dict(enumerate(fork_steps, start=1))
    assert INTERVAL in fork_steps, "no life began at a checkpoint"
    assert {worker.name for worker in lives.workers} == {
        record["worker"] for record in cluster.records("accepted")
    }


def test_rollouts_of_abandoned_versions_are_refused_with_that_reason(cluster: Cluster) -> None:
    """Without a checkpoint every version after the first is abandoned when the learner dies.

    When step 6 has been made nothing older than v2 may still be sampled from (max_staleness 3), so
    whatever the workers hold then is refused when they deliver it to the next learner.
    """
    lives = Lives(cluster, reward_s=0.02, **{"checkpoint.interval_steps": 100})
    num_held = 0
    for _ in range(2):
        lives.live_until("stepped:6", with_workers=True)
        num_held += len(cluster.open_groups("w1") | cluster.open_groups("w2"))
    assert num_held, "the workers held nothing that could be refused"

    lives.live_to_the_end(with_workers=True)

    result = cluster.audit()
    assert result.fork_steps == {1: 0, 2: 0, 3: 0}
    assert result.num_steps == MAX_STEPS
    assert cluster.count("refused/abandoned_version") > 0
    assert result.discard_reasons["abandoned_version"] > 0, "what the journal held at the crash"
    for name in ("w1", "w2"):
        assert "refused: abandoned_version" in cluster.log(name)
        lineages = [record["version"][0] for record in cluster.installed(name)]
        assert lineages == sorted(lineages)
        assert lineages[-1] == 3
