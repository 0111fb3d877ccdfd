"""Follow the saving that ECHO-2 publishes from stated inputs.

Published (arXiv:2602.02192): batches of 128 prompts x 16 answers of at most 8192 tokens; 8 A100
that generate and train in turn need about 1508 s per step; a learner with cheap remote workers
costs 33.3 to 36.3 % less for models of 4B and 8B at equal quality, with S up to 6.

Ours: the same 8 A100 only train, and the cheapest fleet that keeps them busy generates. A step
costs the learner's machine and the fleet, traffic included, for the time that training takes. That
time is the planner's estimate (echo/fleet/gpus.py), and so are the workers' rates. What the
paper leaves out gets a range, and the result is the interval over all corners; then each input is
moved alone from the middle of its range.
"""

from __future__ import annotations

import itertools
from typing import Any

import harness

from echo.fleet.gpus import BYTES_PER_WEIGHT, GPUS, MODELS, ModelShape, decode_rate, train_seconds
from echo.fleet.job import Job
from echo.fleet.market import Offer, Region, RentedFleet
from echo.fleet.provisioning import outcome_of
from echo.fleet.selection import select

PUBLISHED = (0.333, 0.363)
SUBJECTS = ("Qwen3-4B", "Qwen3-8B")
BASELINE_STEP_S = 1508.0
GROUPS, SIZE, MAX_TOKENS, PROMPT_TOKENS, STALENESS = 128, 16, 8192, 500, 6
LEARNER, NUM_GPUS = "A100-80GB", 8
WORKERS = {"RTX 3090": 0.18, "RTX 4090": 0.34, "RTX 5090": 0.55, "RTX A6000": 0.45, "L40S": 0.80}
"""On offer, by the $ per hour that each typically costs; the planner takes the cheapest mixture."""
MEGABIT = 1e6 / 8
RANGES: dict[str, tuple[float, float, float]] = {
    "mean_tokens": (3000, 5000, 7000),
    "a100_price_per_h": (1.0, 1.39, 2.0),
    "worker_price_factor": (0.7, 1.0, 1.5),
    "worker_rate_factor": (0.7, 1.0, 1.3),
    "uplink_mbit_per_s": (100, 300, 1000),
    "delta_divisor": (1, 24, 118),
}
"""(low, middle, high). The last: weights sent whole, or deltas as measured by bench_delta.py at
learning rates of 1e-5 and 1e-6."""


def saving(model_name: str, inputs: dict[str, float]) -> dict[str, Any] | None:
    """Return the saving over the baseline and the fleet that makes it; None if nothing fits."""
    model, link = MODELS[model_name], inputs["uplink_mbit_per_s"] * MEGABIT
    offers = offers_of(model, inputs)
    region = Region(name="remote", bytes_per_s=link, latency_s=0.05)
    fleet = RentedFleet(offers=offers, regions={"remote": region}, uplink_bytes_per_s=link)
    job = job_of(model, inputs)
    selection = select(fleet, job, periods=range(1, STALENESS + 2))
    if selection is None or job.train_s >= BASELINE_STEP_S:
        return None
    outcome = outcome_of(fleet, selection.job, selection.counts)
    baseline = job.learner_price_per_h * BASELINE_STEP_S / 3600
    counts = zip(offers, selection.counts, strict=True)
    return {
        "saving": 1 - outcome.cost_per_step / baseline,
        "train_s": round(job.train_s),
        "step_s": round(outcome.prediction.step_s),
        "publish_period": selection.job.publish_period,
        "broadcast_s": round(outcome.broadcast_s, 1),
        "fleet": {offer.name: count for offer, count in counts if count},
        "fleet_per_h": round(outcome.rent_per_h + outcome.traffic_per_h, 2),
    }


def offers_of(model: ModelShape, inputs: dict[str, float]) -> tuple[Offer, ...]:
    """Return the workers that the model fits on, at their estimated rates."""
    tokens, link = inputs["mean_tokens"], inputs["uplink_mbit_per_s"] * MEGABIT
    offers = []
    for name, price_per_h in WORKERS.items():
        rate = decode_rate(
            GPUS[name],
            model,
            prompt_tokens=PROMPT_TOKENS,
            completion_tokens=tokens,
            max_tokens=PROMPT_TOKENS + MAX_TOKENS,
        )
        if rate is not None:
            offers.append(
                Offer(
                    name=name,
                    region="remote",
                    count=200,
                    price_per_h=price_per_h * inputs["worker_price_factor"],
                    tokens_per_s=rate.tokens_per_s * inputs["worker_rate_factor"],
                    concurrency=rate.concurrency,
                    down_bytes_per_s=link,
                    up_bytes_per_s=link,
                    can_listen=True,
                    price_per_gb=0.01,
                )
            )
    return tuple(offers)


def job_of(model: ModelShape, inputs: dict[str, float]) -> Job:
    """Return the steps of the study, on its learner."""
    tokens = inputs["mean_tokens"]
    return Job(
        groups_per_step=GROUPS,
        group_size=SIZE,
        max_staleness=STALENESS,
        publish_period=1,
        train_s=train_seconds(
            GPUS[LEARNER],
            model,
            num_gpus=NUM_GPUS,
            num_tokens=GROUPS * SIZE * (tokens + PROMPT_TOKENS),
            mean_tokens=tokens + PROMPT_TOKENS,
        ),
        completion_tokens=tokens,
        max_completion_tokens=MAX_TOKENS,
        completion_spread=0.5,
        version_bytes=model.num_params * BYTES_PER_WEIGHT / inputs["delta_divisor"],
        margin=0.1,
        learner_price_per_h=NUM_GPUS * inputs["a100_price_per_h"],
    )


def study(model: str) -> dict[str, Any]:
    """Return the interval, the middle, and the saving as each input moves alone."""
    middle = {name: values[1] for name, values in RANGES.items()}
    found, infeasible = [], 0
    # The saving rises or falls with each input, so the ends of the interval lie at corners.
    for values in itertools.product(*((low, high) for low, _, high in RANGES.values())):
        result = saving(model, dict(zip(RANGES, values, strict=True)))
        if result is None:
            infeasible += 1
        else:
            found.append(result["saving"])
    found.sort()
    moved = {}
    for name, values in RANGES.items():
        row = {}
        for value in values:
            result = saving(model, {**middle, name: value})
            row[f"{value:g}"] = None if result is None else round(result["saving"], 3)
        moved[name] = row
    central = saving(model, middle)
    return {
        "corners": len(found),
        "infeasible": infeasible,
        "low": round(found[0], 3),
        "median_of_corners": round(found[len(found) // 2], 3),
        "high": round(found[-1], 3),
        "middle": None if central is None else {**central, "saving": round(central["saving"], 3)},
        "holds_published": found[0] <= PUBLISHED[0] and PUBLISHED[1] <= found[-1],
        "by_input": moved,
    }


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=SUBJECTS)
    arguments = harness.parse(parser, models=SUBJECTS[:1])
    result: dict[str, Any] = {"published": PUBLISHED, "baseline_step_s": BASELINE_STEP_S}
    result |= {"ranges": RANGES, "models": {}}
    for model in arguments.models:
        result["models"][model] = row = study(model)
        print(f"{model}: saves {row['low']:.0%} to {row['high']:.0%}, middle {row['middle']}")
        for name, moved in row["by_input"].items():
            print(f"  {name:<22} {moved}")
    print(f"wrote {harness.save('echo2', result)}")


if __name__ == "__main__":
    main()
