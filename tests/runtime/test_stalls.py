"""Stalls of whole runs on virtual time: each injected fault is named, and healthy runs are silent.

The faults are those of the table in docs/troubleshooting.md.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from echo.fleet.explain import ObservedFleet
from echo.fleet.market import Region
from echo.roles.fleet import FleetView
from echo.runtime.learner import setup
from echo.sim.scenario import Scenario
from tests.promises.conftest import MakeWorld
from tests.promises.world import Rated, World
from tests.sim.scenarios import MB, make_job, make_offer, make_scenario, simulate

pytestmark = pytest.mark.slow

PACE = Rated(tokens_per_s=10.0)
"""Of a worker that is fast enough: a group takes three seconds, and a step ten."""
WORKERS = ("w1", "w2")
IMAGE = 30 * 4096


class Run:
    """A run of two workers that are fast enough, and the world around it."""

    def __init__(self, make_world: MakeWorld, **changes: Any) -> None:
        sections: dict[str, Any] = {
            "sampling": {"max_completion_tokens": 30},
            "batch": {"groups_per_step": 4},
            "sync": {"max_staleness": 2},
            "network": {"heartbeat_s": 2.0, "dead_after_s": 20.0, "lease_timeout_s": 600.0},
        }
        numbers = {"train_s": 10.0} | {k: v for k, v in changes.items() if k not in sections}
        for name, section in changes.items():
            if isinstance(section, dict):
                sections[name] = sections.get(name, {}) | section
        plain = {k: v for k, v in numbers.items() if not isinstance(v, dict)}
        self.world: World = make_world(**plain, **sections)
        self.world.is_watching = False

    def start(self, *, rated: Rated = PACE, num_workers: int = 2, **how: Any) -> World:
        self.world.learner()
        for number in range(num_workers):
            self.world.worker(f"w{number + 1}", rated=rated, **how)
        return self.world


def beats(pace: float) -> dict[str, Any]:
    """Return the settings of a run whose steps take as many times less than usual."""
    return {"network": {"heartbeat_s": 0.5}} if pace > 1 else {}


def few_in_flight(make_world: MakeWorld) -> World:
    few = {"batch": {"groups_per_step": 2}, "sync": {"max_staleness": 0}}
    return Run(make_world, **few).start(rated=Rated(tokens_per_s=3.0, places=8))


def few_places(make_world: MakeWorld) -> World:
    return Run(make_world).start(rated=Rated(tokens_per_s=2.0, places=1, fit=12))


def small_kv_cache(make_world: MakeWorld) -> World:
    rated = Rated(tokens_per_s=2.0, places=1, fit=1)
    return Run(make_world).start(rated=rated, engine="vllm bfloat16")


def slow_weights(make_world: MakeWorld) -> World:
    run = Run(make_world, image_bytes=IMAGE)
    for name in WORKERS:
        run.world.link("learner", name, bytes_per_s=4000)
    return run.start(serves=True)


def slow_relay(make_world: MakeWorld) -> World:
    world = Run(make_world, image_bytes=IMAGE, network={"heartbeat_s": 0.5}).world
    for name in WORKERS:
        world.link("r1", name, bytes_per_s=4000)
        world.link("learner", name, bytes_per_s=2000)
    world.learner()
    world.relay()
    for name in WORKERS:
        world.worker(name, rated=PACE, via=["r1", "learner"])
    return world


def leaves_without_a_relay(make_world: MakeWorld) -> World:
    run = Run(make_world, image_bytes=IMAGE)
    for name in WORKERS:
        run.world.link("learner", name, bytes_per_s=4000)
    return run.start()


def slow_disk_of_the_learner(make_world: MakeWorld) -> World:
    run = Run(make_world)
    run.world.slow_disk("learner", 20.0)
    return run.start()


def slow_disk_of_a_worker(make_world: MakeWorld) -> World:
    world = Run(make_world, image_bytes=IMAGE, sync={"max_staleness": 1}).world
    world.learner()
    for name in WORKERS:
        world.slow_disk(name, 3.0)
        world.worker(name, rated=PACE, network={"store_dir": str(world.directory / name)})
    return world


def stuck_reward(make_world: MakeWorld) -> World:
    return Run(make_world).start(reward_s=80.0)


def useless_groups(make_world: MakeWorld) -> World:
    world = Run(make_world).start()
    world.run_until(lambda: world.step >= 4, within_s=300.0)
    world.useless_workers = set(WORKERS)
    return world


def straggler(make_world: MakeWorld, *, pace: float = 1.0) -> World:
    slowdown = {"w3": 1.0}
    rated = replace(PACE, tokens_per_s=pace * PACE.tokens_per_s)
    how: dict[str, Any] = {"sync": {"max_staleness": 0}, "leases": {"hedge_factor": False}}
    world = Run(make_world, train_s=10.0 / pace, **how, **beats(pace)).start(rated=rated)
    slow = replace(rated, slowdown_of=lambda key: slowdown["w3"])
    world.worker("w3", rated=slow)
    world.run_until(lambda: world.step >= 6 and world.sampling("w3"), within_s=300.0)
    slowdown["w3"] = 20.0
    return world


def needless_checkpointing(make_world: MakeWorld) -> World:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "is_recomputing", lambda *_: True)
        return Run(make_world).start()


def slow_learner(make_world: MakeWorld) -> World:
    return Run(make_world, train_s=40.0).start()


def few_workers(make_world: MakeWorld, *, pace: float = 1.0) -> World:
    rated = Rated(tokens_per_s=pace, places=12)
    run = Run(make_world, train_s=10.0 / pace, **beats(pace))
    return run.start(rated=rated, num_workers=1)


FAULTS: Mapping[str, tuple[Callable[..., World], str, str, str]] = {
    "few in flight": (few_in_flight, "few_in_flight", "sync.max_staleness", "staleness bound"),
    "few places": (few_places, "few_in_flight", "worker.max_concurrent_rollouts", "engine of w."),
    "small KV cache": (
        small_kv_cache,
        "small_kv_cache",
        "engine.options.kv_cache_memory_bytes",
        "memory of w.",
    ),
    "slow weights": (
        slow_weights,
        "slow_weights",
        "sync.publish_period",
        "link from the learner to w.",
    ),
    "slow relay": (slow_relay, "slow_relay", "worker.connect", "r1"),
    "leaves without a relay": (
        leaves_without_a_relay,
        "no_relay",
        "worker.advertise",
        "uplink of the learner",
    ),
    "disk of the learner": (
        slow_disk_of_the_learner,
        "slow_disk",
        "run.dir",
        "disk of the learner",
    ),
    "disk of a worker": (slow_disk_of_a_worker, "slow_disk", "network.store_dir", "disk of w."),
    "stuck reward": (stuck_reward, "slow_reward", "task.reward_timeout_s", "task at w1 and w2"),
    "useless groups": (useless_groups, "useless_groups", "batch.group_size", "task"),
    "straggler": (straggler, "straggler", "leases.hedge_factor", "w3"),
    "needless checkpointing": (
        needless_checkpointing,
        "needless_checkpointing",
        "learner.gradient_checkpointing",
        "learner",
    ),
    "slow learner": (slow_learner, "slow_learner", "learner.num_threads", "learner"),
    "few workers": (few_workers, "few_workers", "", "workers"),
}
DEAR = (
    "few in flight", "few places", "disk of the learner", "disk of a worker", "slow weights",
    "leaves without a relay", "needless checkpointing", "slow learner",
)  # fmt: skip
MAX_STEPS = 20


def explained(world: World) -> list[dict[str, str]]:
    """Return the explanations in the rows of metrics."""
    return [row["explain"] for row in world.rows if "explain" in row]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.matrix) if name in DEAR else name for name in FAULTS],
)
def test_a_fault_is_named_with_its_resource_and_setting(make_world: MakeWorld, name: str) -> None:
    make, cause, setting, resource = FAULTS[name]
    world = make(make_world)
    begun = world.step
    world.run_until(lambda: explained(world) or world.step >= begun + MAX_STEPS, within_s=2000.0)
    assert world.step < MAX_STEPS
    first = explained(world)[0]
    assert (first["cause"], first["setting"]) == (cause, setting), first["text"]
    assert re.fullmatch(resource, first["resource"]), first
    assert any(first["text"] in note for note in world.notes("learner"))


@pytest.mark.parametrize("name", ["few workers", "straggler"])
def test_a_fault_is_named_where_steps_take_a_second(make_world: MakeWorld, name: str) -> None:
    make, cause, setting, resource = FAULTS[name]
    world = make(make_world, pace=15.0)
    begun = world.step
    world.run_until(lambda: explained(world) or world.step >= begun + MAX_STEPS)
    first = explained(world)[0]
    assert (first["cause"], first["setting"]) == (cause, setting), first["text"]
    assert re.fullmatch(resource, first["resource"]), first


def balanced(seed: int) -> Scenario:
    """Return a fleet that samples about twice as fast as the learner trains."""
    chance = random.Random(seed)
    num_workers, groups_per_step = chance.choice([3, 4, 5, 8]), chance.choice([4, 6])
    job = make_job(
        groups_per_step=groups_per_step,
        max_staleness=chance.choice([3, 4, 6]),
        useful_share=chance.choice([1.0, 0.8]),
    )
    rate = job.groups_per_step * job.group_size / job.train_s * chance.uniform(1.8, 2.2)
    tokens_per_s = rate / num_workers * job.completion_tokens
    concurrency = chance.choice([8, 16])
    return make_scenario(
        make_offer(
            "near", count=num_workers - 1, tokens_per_s=tokens_per_s, concurrency=concurrency,
            can_listen=True,
        ),
        make_offer(
            "far", region="far", count=1, tokens_per_s=tokens_per_s * chance.uniform(0.7, 1.2),
            concurrency=concurrency,
        ),
        job=job,
        regions=(
            Region(name="near", bytes_per_s=50 * MB, latency_s=0.02),
            Region(name="far", bytes_per_s=20 * MB, latency_s=0.1),
        ),
        seed=seed, num_steps=25, heartbeat_s=2.0, dead_after_s=10.0, speed_spread=0.1,
        train_spread=0.1,
    )  # fmt: skip


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.matrix) if seed else seed for seed in range(20)]
)
def test_a_run_with_fast_enough_workers_gets_no_explanation(seed: int) -> None:
    summary, history = simulate(balanced(seed + 2))
    assert summary.is_complete
    assert history.explained == []


def test_a_cause_is_logged_once_while_it_lasts(make_world: MakeWorld) -> None:
    world = few_workers(make_world)
    world.run_until(lambda: world.step >= MAX_STEPS, within_s=2000.0)
    assert len(explained(world)) > 2
    assert len([note for note in world.notes("learner") if "the learner wait" in note]) == 1
    rows = [row for row in world.rows if "time/wait_for_batch" in row]
    for row in rows[1:]:  # the first step also waited for the workers to join
        by_stage = sum(value for name, value in row.items() if name.startswith("time/wait/"))
        assert by_stage == pytest.approx(row["time/wait_for_batch"], abs=0.1)


def test_engines_that_start_slowly_are_no_reason_to_publish_less(make_world: MakeWorld) -> None:
    world = Run(make_world).start(rated=replace(PACE, install_s=90.0))
    world.run(80.0)
    assert "installing v0" in world.node("learner")._stalls.waiting_for
    assert explained(world) == []
    world.run_until(lambda: bool(explained(world)), within_s=600.0)
    assert explained(world)[0]["cause"] == "slow_install"


def test_the_time_without_a_worker_is_no_wait_for_its_groups(make_world: MakeWorld) -> None:
    world = Run(make_world).world
    world.learner()
    world.run(200.0)
    assert [each["cause"] for each in explained(world)] == ["no_worker"]
    stalls = world.node("learner")._stalls
    assert "start workers" in stalls.waiting_for
    for name in WORKERS:
        world.worker(name, rated=PACE)
    world.run_until(lambda: "w1 has" in stalls.waiting_for, within_s=200.0)
    assert "start workers" not in stalls.waiting_for
    world.run_until(lambda: world.step >= 2, within_s=200.0)
    assert len(explained(world)) == 1
    first = world.rows[1]
    assert sum(value for name, value in first.items() if name.startswith("time/wait/")) < 20.0


def test_a_wait_after_the_last_worker_is_gone_is_for_a_worker(make_world: MakeWorld) -> None:
    world = Run(make_world).start()
    world.run_until(lambda: world.step >= 4)
    for name in WORKERS:
        world.kill(name)
    world.run_until(lambda: bool(explained(world)), within_s=200.0)
    assert explained(world)[-1]["cause"] == "no_worker"
    assert "start workers" in world.node("learner")._stalls.waiting_for


def test_a_long_wait_is_observed_once_in_a_heartbeat(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Run(make_world).start(rated=replace(PACE, slowdown_of=lambda key: 1e9))
    world.run(60.0)
    observe, seen = FleetView.observe, []

    def counted(view: FleetView) -> ObservedFleet:
        seen.append(world.now)
        return observe(view)

    monkeypatch.setattr(FleetView, "observe", counted)
    world.run(60.0)
    heartbeat_s = world.node("learner").role.settings.leases.heartbeat_s
    assert len(seen) == pytest.approx(60.0 / heartbeat_s, abs=1)


def test_a_wait_that_goes_on_is_in_the_files_of_the_run(make_world: MakeWorld) -> None:
    slowdown = {"all": 1.0}
    world = Run(make_world).start(rated=replace(PACE, slowdown_of=lambda key: slowdown["all"]))
    world.run_until(lambda: world.step >= 4)
    slowdown["all"] = 1e9
    world.run(120.0)
    waiting_for = world.node("learner")._stalls.waiting_for
    assert waiting_for.startswith("4 of 4 groups; ")
    assert waiting_for.index("add workers") < waiting_for.index("w1 has")
    status = world.node("learner")._reporter.status(now=world.now)
    assert status.explanation.startswith("add workers, or lower ")
    [row] = [row for row in world.rows if "explain" in row]
    assert "reward/mean" not in row
    assert world.step < 12
