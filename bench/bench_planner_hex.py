"""Compare the division of unequal GPUs with the ratios that AReaL-Hex publishes.

Published inputs: GPUs, links and models (echo/fleet/gpus.py) and prices of arXiv:2511.00796.
Efficiencies are those of echo/fleet/gpus.py, sourced there, fixed before this comparison and
the same for all models and baselines. What the paper leaves out gets a range, and each result is
the interval over it: the length of completions, the weight update (the links' estimate, or the
times that the paper measured) and how a budget is divided between the types.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import harness
from hex_search import HexScheduler

from echo.fleet.gpus import GPUS, MODELS
from echo.fleet.hetero import Cluster, SiteJob

PUBLISHED = {  # model: (over H800 only, over H20 only) at equal budget
    "Qwen2.5-1.5B": (1.36, 2.80),
    "Qwen2.5-7B": (1.31, 2.76),
    "Qwen2.5-14B": (1.50, 2.29),
}
PRICES_PER_H = {"H800": 5.28, "H20": 1.85}
"""$ of one GPU, as printed."""
PUBLISHED_COST = 126.72 / 86.64
"""24 H800 against 8 H800 and 24 H20 (the counts follow from the prices), at equal throughput."""
UPDATES = {  # model: measured seconds of an update (unequal GPUs, H800 only)
    "Qwen2.5-1.5B": (10.06, 4.75),
    "Qwen2.5-7B": (58.34, 14.79),
    "Qwen2.5-14B": (112.93, 26.0),
}
LENGTHS = (4_000, 8_000, 16_000)
"""Unpublished: mean completion of the R1-distilled models under training."""
FLEETS = ((8, 40), (16, 24), (24, 32))
"""Unpublished: (H800, H20), whole machines; the last has the 56 GPUs of the paper's largest."""
ROLLOUTS, PROMPT_TOKENS, MAX_TOKENS = 512 * 16, 200, 28_672
"""AReaL's own settings (arXiv:2505.24298): 512 prompts x 16 answers of at most 27k tokens."""

COST_RATIOS = (2.72, 3.12)
"""Published costs per token: generation on an H20 and training on an H800 are cheaper by these."""


def from_published_costs(model: str) -> dict[str, float]:
    """Derive one published ratio from the other and the published costs per token alone.

    With training 1 and generation x in dollars per token on H800, unequal GPUs cost 1 + x / 2.72,
    H800 only 1 + x and H20 only 3.12 + x / 2.72. The ratio over H800 gives x, x the one over H20.
    """
    over_h800, over_h20 = PUBLISHED[model]
    generation, training = COST_RATIOS
    x = (over_h800 - 1) / (1 - over_h800 / generation)
    derived = (training + x / generation) / (1 + x / generation)
    return {
        "generation_over_training_cost": round(x, 3),
        "over_h20": round(derived, 3),
        "published": over_h20,
        "error": round(derived / over_h20 - 1, 3),
    }


def most_over_h20() -> float:
    """Return the most that printed FLOP/s and prices allow over H20 only, at equal efficiency.

    Training is all that an H800 does cheaper, and cheaper by no more than this.
    """
    h20, h800 = GPUS["H20"], GPUS["H800"]
    cheaper = PRICES_PER_H["H20"] / PRICES_PER_H["H800"]
    return cheaper * h800.flops_per_s / h20.flops_per_s


def throughput(model: str, length: int, h800: int, h20: int, update_s: float | None) -> float:
    """Return optimizer steps per second."""
    counts = {name: n for name, n in (("H800", h800), ("H20", h20)) if n}
    job = SiteJob(
        model=MODELS[model],
        rollouts_per_step=ROLLOUTS,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=length,
        max_tokens=MAX_TOKENS,
    )
    cluster = Cluster(gpus={name: GPUS[name] for name in counts}, counts=counts)
    return 1 / HexScheduler(cluster, job, update_s=update_s).find().step_s


def price(h800: int, h20: int) -> float:
    return h800 * PRICES_PER_H["H800"] + h20 * PRICES_PER_H["H20"]


def compare(model: str) -> dict[str, Any]:
    """Return intervals of the ratios of one model; equal budget is steps per dollar."""
    over_h800, over_h20, cheaper = [], [], []
    for length, is_measured in itertools.product(LENGTHS, (False, True)):
        mixed_s, equal_s = UPDATES[model] if is_measured else (None, None)
        per_dollar = {
            fleet: throughput(model, length, *fleet, update_s) / price(*fleet)
            for fleet, update_s in [
                ((24, 0), equal_s),
                ((0, 64), equal_s),
                *((fleet, mixed_s) for fleet in FLEETS),
            ]
        }
        over_h800 += [per_dollar[fleet] / per_dollar[24, 0] for fleet in FLEETS]
        over_h20 += [per_dollar[fleet] / per_dollar[0, 64] for fleet in FLEETS]
        small = throughput(model, length, 8, 24, mixed_s) / price(8, 24)
        cheaper.append(small / per_dollar[24, 0])
    return {
        "over_h800": interval(over_h800, PUBLISHED[model][0]),
        "over_h20": interval(over_h20, PUBLISHED[model][1]),
        "cheaper_at_equal_throughput": interval(cheaper, PUBLISHED_COST),
    }


def interval(values: list[float], published: float) -> dict[str, Any]:
    low, high = min(values), max(values)
    return {
        "low": round(low, 3),
        "high": round(high, 3),
        "published": round(published, 3),
        "holds_published": low <= published <= high,
        "within_10_percent": low / 1.1 <= published <= high * 1.1,
    }


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=PUBLISHED, default=[*PUBLISHED])
    arguments = harness.parse(parser, models=[*PUBLISHED][:1])
    result: dict[str, Any] = {"models": {}, "seconds_for_56_gpus": {}}
    for model in arguments.models:
        began = time.perf_counter()
        throughput(model, 8_000, 24, 32, None)
        result["seconds_for_56_gpus"][model] = round(time.perf_counter() - began, 2)
        result["models"][model] = compare(model)
        result["models"][model]["from_published_costs"] = derived = from_published_costs(model)
        print(model, f"(56 GPUs in {result['seconds_for_56_gpus'][model]} s)")
        for name, row in result["models"][model].items():
            if "low" in row:
                held = "holds" if row["holds_published"] else "misses"
                print(f"  {name:<28} {row['low']} to {row['high']}, {held} {row['published']}")
        said = f"{derived['over_h20']} for {derived['published']} ({derived['error']:+.1%})"
        print(f"  over_h20 from published costs per token: {said}")
    result["most_over_h20_at_equal_efficiency"] = round(most_over_h20(), 3)
    print(f"at equal efficiency FLOP/s and prices allow at most {most_over_h20():.2f} over H20")
    print(f"wrote {harness.save('planner_hex', result)}")


if __name__ == "__main__":
    main()
