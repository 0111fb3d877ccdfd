"""The random fleets of bench_activation.py, run by the learner in the simulator."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import harness
from bench_activation import Broadcast, best_of_all, judge, random_case

from echo.config.fleet_schema import SimRow
from echo.config.schema import ActivationSection, preset_publish_period
from echo.fleet.activation import (
    IDLE_TOLERANCE,
    MIN_SAVING,
    Links,
    Question,
    ReviewAnswer,
    Roll,
    choose,
)
from echo.fleet.job import Job
from echo.fleet.market import UNLIMITED, Offer, Region, RentedFleet
from echo.sim.scenario import Scenario
from echo.sim.simulation import Simulation
from echo.sim.summary import Summary, summarise

WITHIN = 0.02
"""Gap up to which a set counts as good as the best one."""
STEP_S = 20.0
"""Of the step of the best set: times of a fleet are scaled to it, which changes nothing else."""


def scenario(
    workers: Sequence[Offer], job: Job, links: Links, periods: Sequence[int], *, num_steps: int
) -> Scenario | None:
    """Return a simulation of a random fleet; None where no set of it makes a step."""
    step, _ = best_of_all(workers, job, links, periods)
    if math.isinf(step):
        return None
    # Lengths instead of rates: what a fleet costs per hour stays as it is.
    part = STEP_S / (job.train_s * step)
    job = replace(
        job, train_s=part * job.train_s, version_bytes=part * job.version_bytes,
        completion_tokens=part * job.completion_tokens,
        max_completion_tokens=part * job.max_completion_tokens,
        publish_period=preset_publish_period(job.max_staleness) if len(periods) > 1 else periods[0],
    )  # fmt: skip
    site = Region(name="site", bytes_per_s=UNLIMITED, price_per_gb=links.price_per_gb)
    budget = None if math.isinf(job.budget_per_h) else job.budget_per_h
    return Scenario(
        name="activation",
        fleet=RentedFleet(
            offers=tuple(replace(worker, region=site.name) for worker in workers),
            regions={site.name: site},
            uplink_bytes_per_s=links.uplink_bytes_per_s,
        ),
        job=job,
        counts=[1] * len(workers),
        settings=SimRow(
            num_steps=num_steps, chunks_per_version=8, setup_s=1.0, join_within_s=1.0, swap_s=0.0,
            alone_speedup=1.0,
        ),
        is_auto_period=len(periods) > 1,
        activation=ActivationSection(margin=job.margin, budget_per_h=budget),
        min_dwell_s=3 * STEP_S,
    )  # fmt: skip


def as_simulated(worker: Offer, job: Job) -> Offer:
    """Return a worker as the simulator has it: an engine takes whole groups.

    No machine is lost in these minutes: what is compared is the choice.
    """
    groups = max(1, worker.concurrency // job.group_size)
    return replace(worker, losses_per_h=0.0, concurrency=groups * job.group_size)


def watch(
    scenario: Scenario,
) -> tuple[Summary, list[tuple[Question, ReviewAnswer]], frozenset[str]]:
    """Return what a simulation comes to, what its learner asked itself, and who is active."""
    asked: list[tuple[Question, ReviewAnswer]] = []
    solve = Question.solve

    def kept(question: Question) -> ReviewAnswer:
        answer = solve(question)
        asked.append((question, answer))
        return answer

    with mock.patch.object(Question, "solve", kept):
        simulation = Simulation(scenario)
        summary = summarise(scenario, simulation.run())
    members = simulation.learner.role.roster.members("worker")
    active = frozenset(member.node_id for member in members if not member.is_standby)
    return summary, asked, active


def simulate(seed: int, *, most: int, num_steps: int) -> dict[str, Any] | None:
    """Return how good the set is that a simulated run ends with; None if there is nothing to say.

    Its gaps are to the best set by what the learner has measured, and by the true rates and links.
    """
    workers, job, links, periods = random_case(seed, most=most)
    workers = [as_simulated(worker, job) for worker in workers]
    built = scenario(workers, job, links, periods, num_steps=num_steps)
    if built is None:
        return None
    summary, asked, active = watch(built)
    if not asked:
        return {"seed": seed, "workers": len(workers), "end": summary.end}
    question, answer = asked[-1]
    question = replace(question, links=remembered(question.links))
    named = [replace(each, name=f"{each.name}-1") for each in workers]
    true = Question(
        workers=tuple(named), job=job, links=replace(links, broadcast_s=Broadcast(named, job)),
        active=active, ready=active, idle_share=0.0, periods=tuple(periods),
    )  # fmt: skip
    choice = choose(
        question.workers, question.job, question.links, preferred=active, periods=question.periods
    )
    chosen, own, truth = (
        judge(question, choice.active), judge(question, active), judge(true, active)
    )  # fmt: skip
    row: dict[str, Any] = {
        "seed": seed, "workers": len(workers), "active": len(active),
        "questions": len(asked), "changes": len(summary.decisions), "slowdown": choice.slowdown,
        "choice_step": chosen.step_gap, "choice_cost": chosen.cost_gap,
        "active_step": own.step_gap, "active_cost": own.cost_gap,
        "true_step": truth.step_gap, "true_cost": truth.cost_gap,
        "idle": summary.idle_share, "idle_predicted": answer.after.idle_share,
        "worst_rate": worst_rate(question, workers),
    }  # fmt: skip
    if max(own.step_gap, own.cost_gap) > WITHIN:
        row["why"] = why_not_best(question, answer, active)
    return {name: round(each, 4) if isinstance(each, float) else each for name, each in row.items()}


def worst_rate(question: Question, workers: Sequence[Offer]) -> float:
    """Return the measured rate that is farthest from the true one, as a multiple of it."""
    true = {f"{worker.name}-1": worker.tokens_per_s for worker in workers}
    found = [worker.tokens_per_s / true[worker.name] for worker in question.workers]
    return max(found, key=lambda ratio: abs(math.log(ratio)))


def why_not_best(question: Question, answer: ReviewAnswer, active: Collection[str]) -> str:
    """Return why a set generates that is not the best one, by the last question and its answer."""
    if question.untried & frozenset(active):
        return "a worker is tried"
    if answer.cause.endswith("they begin first"):
        return "a change is under way"
    own = Roll(question.workers, question.links, periods=question.periods).assess(
        question.job, active
    )
    saves_step = answer.choice.slowdown < (1 - MIN_SAVING) * own.slowdown
    saves_cost = answer.choice.prediction.cost_per_h < (1 - MIN_SAVING) * own.cost_per_h
    if not saves_step and not saves_cost:
        return f"the best set saves less than {MIN_SAVING:.0%}"
    if not saves_cost and question.idle_share <= IDLE_TOLERANCE:
        return f"the learner waits {IDLE_TOLERANCE:.0%} of the time or less"
    return "other"


def remembered(links: Links) -> Links:
    """Return links that compute the forecast for a set once: every set is judged several times."""
    known: dict[frozenset[str], float] = {}

    def broadcast_s(names: Collection[str]) -> float:
        chosen = frozenset(names)
        if chosen not in known:
            known[chosen] = links.broadcast_s(chosen)
        return known[chosen]

    return replace(links, broadcast_s=broadcast_s)


def summarise_simulated(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how often simulated runs are within 2 and within 5 percent of the best set."""
    known = [row for row in rows if "active" in row]
    result: dict[str, Any] = {"fleets": len(rows), "compared": len(known)}
    for name in ("choice", "active", "true"):
        for what in ("step", "cost"):
            gaps = [row[f"{name}_{what}"] for row in known]
            result[f"{name}_{what}_worst"] = max(gaps, default=None)
            for percent in (2, 5):
                share = sum(gap <= percent / 100 for gap in gaps) / max(1, len(gaps))
                result[f"{name}_{what}_within_{percent}_percent"] = round(share, 4)
    result["active_beyond_2_percent"] = dict(Counter(r["why"] for r in known if "why" in r))
    errors = [abs(row["idle"] - row["idle_predicted"]) for row in known]
    result["idle_error_median"] = round(statistics.median(errors), 4) if errors else None
    return result


def measure_simulated(
    num_cases: int, *, first: int, most: int, num_steps: int, rows: Path | None
) -> dict[str, Any]:
    """Simulate each fleet; return how good the sets are.

    Args:
        num_cases: how many fleets.
        first: the seed of the first one.
        most: workers at most.
        num_steps: of each run.
        rows: file of rows that are there already, to which each new one is added at once; so fleets
            can be simulated by several processes, and a last call that finds all of them sums up.
    """
    known = {row["seed"]: row for row in (harness.read_rows(rows) if rows else [])}
    for seed in range(first, first + num_cases):
        if seed in known:
            continue
        known[seed] = simulate(seed, most=most, num_steps=num_steps) or {"seed": seed}
        print(known[seed], flush=True)
        if rows:
            with rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[seed]) + "\n")
    found = [known[seed] for seed in sorted(known)]
    result = summarise_simulated(found)
    print(result, flush=True)
    return {"steps": num_steps, "simulated": result, "rows": found}
