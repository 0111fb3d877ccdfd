"""Train at given lags with every correction, and compare.

Each run is learning/colocated.py's: the real trainer, engine, task and small model in one process,
where groups wait for their step as long as the lag says. A run adds its row to the rows file as
it ends, so the grid can be filled over several sessions; --report makes results and plots of what
is there.

    python bench/bench_staleness.py --experiments fixed addition --jobs 2 --resume
    python bench/bench_staleness.py --experiments fixed addition --report

addition, countdown   GRPO on the task of that name, lag fixed and drawn evenly from 0 up
fixed                 every correction on addition, each group exactly 11 versions old
delays                the same at HeteroRL's delays: lognormal, 60 to 1800 s, in both directions
chosen                what the fixed lag recommends, beside GRPO, at smaller fixed lags
corrections           what was published since, beside the best of the losses above and no
                      correction, on addition: fixed lags up to 32, and drawn evenly up to 64
corrections_countdown the same on countdown
pretrained            the best losses of these on dates (learning/dates.py): SmolLM2-135M with an
                      adapter, each group exactly 0 or 11 versions old; with --steps 48 --prompts 32
                      --seeds 0 1

Advantages are divided by their group's spread for every loss but OAPL, so that losses differ in
nothing but how they correct. All else is the quickstart's, but for the number of steps and held-out
prompts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import harness
from harness import add_row, read_rows
from learning import dates
from learning.delays import DelayInjector, DelaySettings, Direction
from learning.quickstart import make_model

CONFIGS = {"addition": "quickstart", "countdown": "countdown", "dates": "word-problems"}
SETTINGS = {
    "dates": (
        "task.kind=dataset",
        "lora.rank=16",
        "optimizer.learning_rate=5e-4",
        "sampling.max_completion_tokens=20",
        "batch.group_size=4",
        "eval.interval_steps=8",
        "worker.dtype=bfloat16",
        "learner.dtype=bfloat16",
    )
}
"""Settings of a task that its configuration does not have."""
LAGS = (
    *(f"fixed:{lag}" for lag in (0, 1, 3, 6, 11)),
    *(f"uniform:{lag}" for lag in (1, 3, 6, 11)),
)
DELAYS = "delays:64"
DELAY_SETTINGS = DelaySettings(law="lognormal", lower_s=60.0, upper_s=1800.0)
STEP_S = 60.0
"""Emulated seconds of an optimizer step among the delays."""
NUM_WORKERS = 4
LOSSES: dict[str, tuple[str, ...]] = {
    # Settings of [loss], or of another section if they name it.
    # The weight is 1 for every token: the plain policy gradient, as if all were on-policy.
    "none": ("kind=cispo", "clip_low=1e-9", "clip_high=1e-9"),
    "grpo": ("kind=grpo",),
    "decoupled_ppo + tis": ("kind=decoupled_ppo", "importance_weight=token_tis"),
    "gspo .2/.28": ("kind=gspo", "clip_low=0.2", "clip_high=0.28"),
    "gspo .02/.03": ("kind=gspo", "clip_low=0.02", "clip_high=0.03"),
    "gspo .02/.05": ("kind=gspo", "clip_low=0.02", "clip_high=0.05"),
    "gspo 3e-4/4e-4": ("kind=gspo", "clip_low=3e-4", "clip_high=4e-4"),
    "gepo no clip": ("kind=gepo", "clip_low=false", "clip_high=false"),
    "gepo .2": ("kind=gepo", "clip_low=0.2", "clip_high=0.2"),
    "gepo .02": ("kind=gepo", "clip_low=0.02", "clip_high=0.02"),
    "gepo+ .2": ("kind=gepo", "clip_low=0.2", "clip_high=0.2", "gate_kl=0.002"),
    "cispo": ("kind=cispo",),
    "m2po": ("kind=m2po",),
    "dppo_tv": ("kind=dppo_tv",),
    "sapo": ("kind=sapo",),
    "oapl": ("kind=oapl", "normalize_by_std=false"),
    "oapl beta .3": ("kind=oapl", "normalize_by_std=false", "beta=0.3"),
    "gspo .02/.03 + ess": (
        "kind=gspo", "clip_low=0.02", "clip_high=0.03", "optimizer.scale_by_ess=true",
    ),
}  # fmt: skip
LOSSES |= {
    "gspo .02/.03 + centering": (
        "kind=gspo", "clip_low=0.02", "clip_high=0.03", "score_centering=32",
    ),
    "none + centering": (*LOSSES["none"], "score_centering=32"),
    "cispo + centering": ("kind=cispo", "score_centering=32"),
}  # fmt: skip
CHOSEN = "gspo .02/.03"
"""The best of the first three ranges. Other losses are compared with it."""
COMPARED = (
    CHOSEN, "gspo .02/.05", f"{CHOSEN} + ess", "dppo_tv", "grpo", "cispo + centering",
    "oapl beta .3", "m2po", f"{CHOSEN} + centering", "none + centering", "sapo", "gepo .2",
    "none", "oapl",
)  # fmt: skip
"""Losses of the experiments `corrections`, those that tell most first."""
AGES = ("fixed:11", "fixed:32", "fixed:6", "fixed:3", "fixed:0", "uniform:64")
"""Lags of the corrections, those that tell most first."""
METRICS = (
    "ess", "ess/rollouts", "mismatch_kl", "is_ratio/max", "clip_ratio/mean", "dropped/m2",
    "dropped/tv", "gepo/gated", "entropy/mean", "grad_norm", "lr", "useful_share",
)  # fmt: skip
"""What a row keeps of a step's metrics."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is varied; seeds repeat it."""

    task: str
    lag: str
    loss: str


EXPERIMENTS: dict[str, tuple[Case, ...]] = {
    "fixed": tuple(Case("addition", "fixed:11", loss) for loss in LOSSES),
    "addition": tuple(Case("addition", lag, "grpo") for lag in LAGS),
    "delays": tuple(Case("addition", DELAYS, loss) for loss in LOSSES),
    "countdown": tuple(Case("countdown", lag, "grpo") for lag in LAGS),
    "chosen": tuple(
        Case("addition", lag, loss)
        for lag in ("fixed:0", "fixed:3", "fixed:6", "fixed:11")
        for loss in ("grpo", CHOSEN)
    ),
    **{
        name: tuple(Case(task, lag, loss) for lag in AGES for loss in COMPARED)
        for name, task in (("corrections", "addition"), ("corrections_countdown", "countdown"))
    },
    "pretrained": tuple(
        Case("dates", lag, loss)
        for loss in (CHOSEN, "dppo_tv", "grpo")
        for lag in ("fixed:0", "fixed:11")
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One training run."""

    case: Case
    seed: int
    steps: int
    prompts: int
    """Held-out ones of an evaluation."""
    overrides: tuple[str, ...] = ()
    """Further settings of the configuration."""

    @property
    def key(self) -> dict[str, Any]:
        """What its row begins with, and is found by."""
        own = {"seed": self.seed, "steps": self.steps, "prompts": self.prompts}
        return {**asdict(self.case), **own, "set": list(self.overrides)}


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=[*EXPERIMENTS])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, help="only these")
    parser.add_argument("--lags", nargs="+", help="only these, such as fixed:11")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=512, help="held-out, for each evaluation")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, a thread each")
    parser.add_argument("--rows", type=Path, help="results/staleness_rows.jsonl if left out")
    parser.add_argument("--resume", action="store_true", help="skip runs whose rows are there")
    parser.add_argument("--report", action="store_true", help="run nothing; write what is there")
    quick = {"experiments": ["delays"], "losses": ["grpo"], "seeds": [0], "steps": 6, "prompts": 64}
    arguments = harness.parse(parser, **quick)
    arguments.rows = arguments.rows or harness.RESULTS / "staleness_rows.jsonl"
    if arguments.report:
        from learning import report

        same = {"steps": arguments.steps, "prompts": arguments.prompts, "set": arguments.set}
        rows = [row for row in read_rows(arguments.rows) if same.items() <= row.items()]
        chosen = {name: EXPERIMENTS[name] for name in arguments.experiments}
        report.report(rows, chosen, same)
        return
    if arguments.rows.exists() and not arguments.resume:
        sys.exit(f"{arguments.rows} exists; --resume goes on with it, --rows names another")
    found = list(plan(arguments))
    done = [{name: row[name] for name in found[0].key} for row in read_rows(arguments.rows)]
    left = [run for run in found if run.key not in done]
    print(f"{len(left)} of {len(found)} runs to do", flush=True)
    execute(left, arguments.rows, arguments.jobs)
    if arguments.quick:
        harness.save("staleness", {"rows": read_rows(arguments.rows)})


def plan(arguments: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs, every case of an experiment with one seed before the next seed."""
    seen = set()
    for name in arguments.experiments:
        for seed in arguments.seeds:
            for case in EXPERIMENTS[name]:
                is_wanted = (arguments.losses is None or case.loss in arguments.losses) and (
                    arguments.lags is None or case.lag in arguments.lags
                )
                if is_wanted and (case, seed) not in seen:
                    seen.add((case, seed))
                    yield Run(case, seed, arguments.steps, arguments.prompts, tuple(arguments.set))


def execute(runs: Sequence[Run], rows: Path, jobs: int) -> None:
    """Do the runs in processes of one thread each, and add the row of each as it ends."""
    if not runs:
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    models = {task: make_old_model(task) for task in {run.case.task for run in runs}}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(train_one, run, models[run.case.task]) for run in runs]
        for future in as_completed(futures):
            row = future.result()
            add_row(rows, row)
            last = row["evaluations"][-1]
            print(
                f"{row['task']} {row['lag']} {row['loss']} seed {row['seed']}: sampled "
                f"{last['sampled']:.3f}, greedy {last['greedy']:.3f}, {row['cpu_s']:.0f} s of CPU",
                flush=True,
            )


def make_old_model(task: str) -> Path:
    """Return the small model by the recipe of the first rows, so that all rows start equally.

    Dates have the pretrained model.
    """
    from echo.engine.pretrained import make_smollm2
    from echo.train.models.warmup import RECIPES

    if task == "dates":
        return make_smollm2(harness.RESULTS.parents[1] / "build" / "models", show=print)
    num_steps = {"addition": 450, "countdown": 400}[task]
    old = replace(RECIPES[task], num_steps=num_steps, batch_size=64, learning_rate=2e-3)
    RECIPES[task] = old
    return make_model(task)


def train_one(run: Run, model: Path) -> dict[str, Any]:
    """Train once and return the row."""
    from learning.colocated import make_lags, scores, train

    from echo.config.load import load_config

    case = run.case
    options: list[str] = []
    if case.task == "dates":
        rows = dates.write_rows(model.parent / f"dates-{os.getpid()}.jsonl")
        options = [f'task.options={{ path = "{rows}", reward = "{dates.__file__}:graded" }}']
    overrides = [
        f"model.name={model}",
        f"run.seed={run.seed}",
        f"run.max_steps={run.steps}",
        f"eval.interval_steps={max(1, run.steps // 10)}",
        f"eval.num_prompts={run.prompts}",
        "loss.normalize_by_std=true",
        *options,
        *SETTINGS.get(case.task, ()),
        *(each if "." in each.partition("=")[0] else f"loss.{each}" for each in LOSSES[case.loss]),
        *run.overrides,
    ]
    path = harness.RESULTS.parents[1] / "configs" / f"{CONFIGS[case.task]}.toml"
    config = load_config(path, overrides, "learner")
    delays = {
        direction: DelayInjector(DELAY_SETTINGS, direction=direction, seed=run.seed)
        for direction in get_args(Direction)
    }
    lags = make_lags(case.lag, delays, seed=run.seed, step_s=STEP_S, num_workers=NUM_WORKERS)
    began = time.process_time()
    found = list(train(config, lags))
    return {
        **run.key,
        "model": digest_of(model),
        "evaluations": [scores(part.result) for part in found],
        "metrics": [
            {name: float(f"{part.metrics[name]:.5g}") for name in METRICS if name in part.metrics}
            for part in found[1:]
        ],
        "staleness": found[-1].staleness,
        "lost_groups": getattr(lags, "num_lost", 0),
        "cpu_s": round(time.process_time() - began, 1),
        "commit": harness.environment()["commit"],
    }  # fmt: skip


def digest_of(model: Path) -> str:
    """Return a short hash of the weights that a run starts from."""
    from blake3 import blake3

    return blake3((model / "model.safetensors").read_bytes()).hexdigest()[:12]


if __name__ == "__main__":
    main()
