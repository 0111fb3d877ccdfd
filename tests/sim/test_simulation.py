"""Whole fleets on virtual time: what the real roles do, and that the same seed repeats it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from echo.config.fleet_schema import FaultRow, PriceRow
from echo.config.schema import ActivationSection
from echo.fleet.market import Region
from echo.fleet.overlap import predict
from echo.runtime.relay import RelayNode
from echo.sim.faults import SimulatedSite
from echo.sim.learner import SimLearner
from echo.sim.scenario import Scenario
from echo.sim.simulation import Simulation
from echo.sim.summary import History, Summary
from echo.sim.worker import SimWorker
from tests.sim.scenarios import MB, make_job, make_offer, make_scenario, simulate

QUIET = make_scenario(num_steps=12, heartbeat_s=1.0, dead_after_s=5.0)


@pytest.fixture(scope="module", autouse=True)
def validation() -> Iterator[None]:
    """Validate the whole state of each role after every event, in all simulations."""
    with pytest.MonkeyPatch.context() as patch:
        for shell in (SimLearner, SimWorker, RelayNode):
            patch.setattr(shell, "perform", validated(shell.perform))
        yield


def validated(perform: Any) -> Any:
    """Return `perform` followed by a look over the whole state of the role."""

    def perform_and_validate(self: Any, actions: Any) -> None:
        perform(self, actions)
        self.role.validate()

    return perform_and_validate


@pytest.fixture(scope="module")
def quiet() -> tuple[Summary, History]:
    """What becomes of a fleet that is large enough, if nothing else happens."""
    return simulate(QUIET)


@pytest.mark.slow
def test_a_run_with_workers_enough_never_waits(quiet: tuple[Summary, History]) -> None:
    summary, history = quiet
    assert summary.is_complete
    assert summary.idle_share == pytest.approx(0.0, abs=0.02)
    assert summary.step_s == pytest.approx(10.0, rel=0.02)
    assert 0 < summary.max_staleness <= 2
    assert summary.thrown_away == pytest.approx(0.0, abs=1e-9)
    assert [step.step for step in history.steps] == list(range(1, 13))


@pytest.mark.slow
def test_too_slow_a_fleet_makes_the_learner_wait_as_the_model_says() -> None:
    # Four nodes of .28 rollouts per second need 14.3 s for the 16 rollouts of a step of 10 s.
    offer = make_offer(tokens_per_s=28.0, concurrency=4, can_listen=True)
    scenario = make_scenario(offer, job=make_job(max_staleness=6), num_steps=20)
    summary, _ = simulate(scenario)
    fleet, job, counts = scenario.fleet, scenario.job, scenario.counts
    expected = predict(
        job,
        rate=fleet.rate(job, counts),
        broadcast_s=summary.broadcast_s,
        latency_s=fleet.latency_s(job, counts),
    )
    assert expected.idle_share > 0.2
    assert summary.idle_share == pytest.approx(expected.idle_share, abs=0.05)


def troubled(seed: int = 1) -> Scenario:
    """Return a scenario with everything in it."""
    scenario = make_scenario(
        make_offer("spot", can_listen=True, losses_per_h=20.0, restart_s=20.0),
        make_offer("nat", region="far", count=2, tokens_per_s=50.0),
        regions=(
            Region(name="near", bytes_per_s=50 * MB, latency_s=0.02, relay_bytes_per_s=100 * MB),
            Region(name="far", bytes_per_s=20 * MB, latency_s=0.1),
        ),
        job=make_job(useful_share=0.8),
        seed=seed,
        num_steps=12,
        heartbeat_s=2.0,
        dead_after_s=8.0,
        lease_timeout_s=30.0,
        speed_spread=0.2,
        train_spread=0.1,
    )
    return replace(
        scenario,
        faults=[
            FaultRow(at_s=40.0, kind="cut", target="far", for_s=15.0),
            FaultRow(at_s=60.0, kind="kill", target="spot-2", for_s=10.0),
            FaultRow(at_s=80.0, kind="preempt", target="nat", for_s=20.0),
            FaultRow(at_s=50.0, kind="slow", target="spot-1", for_s=20.0, factor=0.2),
            FaultRow(at_s=110.0, kind="cut", target="learner", for_s=10.0),
        ],
        prices=[PriceRow(offer="spot", at_s=30.0, price_per_h=2.0)],
    )


@pytest.fixture(scope="module")
def trouble() -> tuple[Summary, History]:
    """What becomes of that fleet."""
    return simulate(troubled())


HISTORY = """
from tests.sim.test_simulation import digest, simulate, troubled
print(digest(simulate(troubled())[1]))
"""


def digest(history: History) -> str:
    return hashlib.sha256(repr(history).encode()).hexdigest()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_history_in_every_process(
    trouble: tuple[Summary, History],
) -> None:
    root = Path(__file__).parents[2]
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-c", HISTORY],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
    )
    _, other = simulate(troubled(2))
    assert digest(trouble[1]) == done.stdout.strip() != digest(other)


@pytest.mark.slow
def test_a_fleet_in_trouble_trains_on_and_keeps_the_promises(
    trouble: tuple[Summary, History],
) -> None:
    summary, history = trouble
    assert summary.is_complete
    assert summary.max_staleness <= 2
    assert summary.num_deaths >= 3
    assert summary.discarded["zero_variance"] > 0
    assert any(link.startswith("rollouts far") for link in summary.gigabytes)
    # Every token that was made has one end: trained, useless, on its way, or thrown away.
    useless = history.lost_tokens["zero_variance"]
    assert 0 < summary.tokens_trained + useless < summary.tokens_made


@pytest.mark.slow
def test_a_spot_machine_that_is_replaced_at_once_works_on() -> None:
    offer = make_offer(count=2, can_listen=True, losses_per_h=60.0, restart_s=0.0)
    _, history = simulate(make_scenario(offer, num_steps=12))
    assert history.num_deaths > 2
    assert [rental.until_s for rental in history.rentals].count(None) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method"),
    [(SimLearner, "write_metrics"), (SimWorker, "work"), (SimWorker, "_wake")],
    ids=["in the learner", "in a worker", "in a call of the loop"],
)
def test_a_fault_of_the_program_ends_the_run_with_its_name(
    owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(owner, method, fail)
    with pytest.raises(KeyError, match="broken"):
        simulate(make_scenario(num_steps=2))


@pytest.mark.slow
def test_a_cut_stops_those_behind_it_until_it_is_mended(quiet: tuple[Summary, History]) -> None:
    before, _ = quiet
    cut = FaultRow(at_s=40.0, kind="cut", target="near", for_s=40.0)
    after, history = simulate(replace(QUIET, faults=[cut]))
    waits = [step.waited_s for step in history.steps]
    assert max(waits) > 15
    assert after.is_complete
    assert after.duration_s == pytest.approx(before.duration_s + max(waits), rel=0.2)


@pytest.mark.slow
def test_without_pacing_rollouts_are_thrown_away() -> None:
    job = make_job(max_staleness=1)
    paced, _ = simulate(make_scenario(job=job, num_steps=10))
    unpaced, _ = simulate(make_scenario(job=job, num_steps=10, is_paced=False))
    assert paced.thrown_away < 0.1
    assert unpaced.thrown_away > 0.3
    assert unpaced.max_staleness <= 1


@pytest.mark.slow
def test_pausing_workers_make_nothing_while_weights_arrive() -> None:
    # 80 MB at 8 MB/s: 10 s of each 10 s step.
    slow = Region(name="near", bytes_per_s=8 * MB, latency_s=0.02)
    job = make_job(max_staleness=4, publish_period=2)
    offer = make_offer(count=2, tokens_per_s=100.0)
    through, _ = simulate(make_scenario(offer, job=job, regions=(slow,), num_steps=20))
    pausing, _ = simulate(
        make_scenario(
            offer, job=replace(job, has_pausing_workers=True), regions=(slow,), num_steps=20
        )
    )
    assert pausing.idle_share > through.idle_share + 0.1
    # All of it, not only from the first of a few coarse chunks on: of 20 s, 10 are left.
    job = replace(job, has_pausing_workers=True)
    scenario = make_scenario(offer, job=job, regions=(slow,), num_steps=20, chunks_per_version=2)
    coarse, _ = simulate(scenario)
    assert coarse.idle_share == pytest.approx(pausing.idle_share, abs=0.05)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_measured_period_that_changes_stops_no_run(seed: int) -> None:
    # A broadcast of about 4.5 noisy steps: the period is measured anew after each version.
    slow = Region(name="near", bytes_per_s=80 * MB / 4.5, latency_s=0.02)
    scenario = make_scenario(
        make_offer(count=1, tokens_per_s=4000.0),
        job=make_job(max_staleness=6, train_s=1.0),
        regions=(slow,),
        num_steps=40,
        seed=seed,
        train_spread=0.2,
    )
    summary, history = simulate(replace(scenario, is_auto_period=True))
    assert summary.is_complete
    assert len({step.publish_period for step in history.steps}) > 2


@pytest.mark.slow
def test_machines_are_paid_for_while_they_are_rented_at_the_price_of_the_time() -> None:
    scenario = make_scenario(make_offer(count=1, can_listen=True), num_steps=6)
    summary, history = simulate(scenario)
    hours = history.ended_at / 3600
    assert summary.cost_of_nodes == pytest.approx(hours * 1.0, rel=0.01)
    half = history.ended_at / 2
    changed = replace(scenario, prices=[PriceRow(offer="gpu", at_s=half, price_per_h=3.0)])
    assert simulate(changed)[0].cost_of_nodes == pytest.approx(hours * 2.0, rel=0.02)
    gone = replace(
        make_scenario(make_offer(can_listen=True), num_steps=6),
        faults=[FaultRow(at_s=half, kind="preempt", target="gpu-1")],
    )
    after, later = simulate(gone)
    expected = (3 * later.ended_at + half) / 3600
    assert after.cost_of_nodes == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_a_machine_that_is_lost_before_it_joins_starts_one_worker_once_it_is_back() -> None:
    scenario = make_scenario(make_offer(can_listen=True), num_steps=3, join_within_s=8.0)
    faults = [
        FaultRow(at_s=0.5, kind="preempt", target="gpu-4", for_s=1.0),  # back before it joins
        FaultRow(at_s=1.0, kind="kill", target="gpu-3", for_s=14.0),
    ]
    summary, history = simulate(replace(scenario, faults=faults))
    assert summary.is_complete
    began = {rental.name: rental.since_s for rental in history.rentals}
    assert began == {"gpu-1": 0.0, "gpu-2": 2.0, "gpu-4": 6.0, "gpu-3": 15.0}
    assert len(history.rentals) == 4
    assert history.num_deaths == 0


@pytest.mark.slow
def test_weights_take_their_true_size_on_the_links_whatever_the_grain() -> None:
    for num_chunks in (4, 16):
        summary, history = simulate(
            make_scenario(make_offer(count=1), num_steps=5, chunks_per_version=num_chunks)
        )
        sent = summary.gigabytes["weights learner > near"] * 1e9
        # Versions 0 to 4, each once to the one node.
        assert sent == pytest.approx(5 * 80 * MB, rel=0.02)
        assert summary.broadcast_s == pytest.approx(80 * MB / (50 * MB), abs=1.5)
        assert history.steps[-1].broadcast_s is not None


def crowded(**rule: Any) -> Scenario:
    """A fleet of five times what is needed, of a cheap and a dear kind."""
    scenario = make_scenario(
        make_offer("cheap", count=2, tokens_per_s=200.0, price_per_h=1.0, can_listen=True),
        make_offer("dear", count=2, tokens_per_s=200.0, price_per_h=5.0, can_listen=True),
        num_steps=20,
    )
    return replace(scenario, activation=ActivationSection(**rule), min_dwell_s=20.0)


@pytest.fixture(scope="module")
def crowd() -> tuple[Summary, History]:
    """What becomes of a fleet that is too large, if nothing else happens."""
    return simulate(crowded())


@pytest.mark.slow
def test_workers_that_are_not_needed_stand_by_all_the_dear_ones(
    crowd: tuple[Summary, History],
) -> None:
    summary, history = crowd
    assert summary.is_complete
    assert summary.num_standby >= 2
    standby: set[str] = set()
    for _, made in history.decisions:
        standby = (standby - set(made.activated)) | set(made.deactivated)
    assert len(standby) == summary.num_standby
    assert standby >= {"dear-1", "dear-2"}
    assert summary.idle_share < 0.1
    assert len(history.broadcasts) == 20, "those on standby are not waited for"
    # They bill all the same: what the learner counts is what the machines cost.
    assert summary.cost_as_counted == pytest.approx(summary.cost, rel=0.02)
    assert len(history.bills) == 20
    prices = [5.0 if name.startswith("dear") else 1.0 for name in standby]
    assert history.bills[-1].standby_per_h == pytest.approx(sum(prices))


@pytest.mark.slow
def test_a_worker_that_was_interrupted_for_long_gives_its_machine_back(
    crowd: tuple[Summary, History],
) -> None:
    scenario = crowded()
    settings = scenario.settings.model_copy(update={"release_after_s": 30.0})
    without, _ = crowd
    summary, history = simulate(replace(scenario, settings=settings))
    ended = {rental.name for rental in history.rentals if rental.until_s is not None}
    assert ended >= {"dear-1", "dear-2"}
    assert summary.is_complete
    assert summary.cost < 0.9 * without.cost
    # The learner knows that they are released, and counts them no more.
    assert summary.cost_as_counted == pytest.approx(summary.cost, rel=0.02)


@pytest.mark.matrix
def test_a_machine_that_was_given_back_is_never_rented_again() -> None:
    scenario = crowded()
    settings = scenario.settings.model_copy(update={"release_after_s": 30.0})
    death = FaultRow(at_s=150.0, kind="preempt", target="dear", for_s=5.0)
    _, history = simulate(replace(scenario, settings=settings, faults=[death]))
    gone = [rental.name for rental in history.rentals if (rental.until_s or 150.0) < 150.0]
    assert len(gone) >= 2
    for name in gone:
        assert [rental.name for rental in history.rentals].count(name) == 1


@pytest.mark.matrix
def test_the_share_of_useful_groups_is_what_the_activation_reckons_with() -> None:
    scenario = replace(crowded(), job=make_job(useful_share=0.5))
    simulation = Simulation(scenario)
    simulation.run()
    activation = simulation.learner.costs.activation
    assert activation is not None
    shares = [times.useful_share for times in activation.steps]
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.15)


@pytest.mark.slow
def test_a_run_ends_when_its_budget_is_spent(crowd: tuple[Summary, History]) -> None:
    full, _ = crowd
    summary, _ = simulate(crowded(budget_per_run=full.cost / 2))
    assert not summary.is_complete
    assert summary.end == "the budget of the run is spent"
    assert summary.cost == pytest.approx(full.cost / 2, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [16, 48])
def test_equal_workers_that_join_one_after_the_other_share_the_first_batch(
    concurrency: int,
) -> None:
    """Groups take 10 s and more; the second worker joins 4 s after the first."""
    offer = make_offer(count=2, concurrency=concurrency, tokens_per_s=10.0 * concurrency)
    job = make_job(groups_per_step=12, max_staleness=0, completion_spread=0.0)
    workers: list[SimWorker | None] = []

    class Watched(Simulation):
        def start_worker(self, site: SimulatedSite) -> None:
            super().start_worker(site)
            workers.append(site.worker)

    Watched(make_scenario(offer, job=job, num_steps=1, heartbeat_s=1.0, join_within_s=8.0)).run()
    made = [worker.role.num_accepted for worker in workers if worker is not None]
    assert sum(made) == 12
    assert abs(made[0] - made[1]) <= 1


def test_the_learner_measures_the_true_lengths_and_speeds() -> None:
    fast = make_offer("fast", count=1, tokens_per_s=800.0)
    simulation = Simulation(make_scenario(fast, make_offer("slow", count=1, tokens_per_s=200.0)))
    simulation.run()
    measured = simulation.learner.role.scheduler.finish_times
    lengths = [simulation.groups.length(number).longest for number in range(40)]
    assert measured.lengths.mean == pytest.approx(fmean(lengths), rel=0.1)
    speeds = [measured.of(name).measured or 0.0 for name in ("fast-1", "slow-1")]
    assert speeds[0] == pytest.approx(4 * speeds[1], rel=0.25)
