"""Three fleets of real processes for bench_activation.py."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from broadcast.paths import Wan
from nodes.processes import run_nodes

from echo.engine.model import build_config, model_class, save_tiny_model
from echo.records.ledger import ActivationChanged, read_records

GROUPS, SIZE, TOKENS, SLOTS = 8, 4, 16, 2
"""Groups of a step, rollouts of a group, tokens of a rollout, groups that a worker has at once."""
WIDTH = 2730
"""Of the model's MLP: a version of 2 MB takes a link that is thin, and thicker than messages."""
LEARNER, SITE = 0, 1
"""The namespaces."""
WITHIN = 10.0
"""Times the learner's own steps that a run may take; a fleet that is chosen badly takes longer."""
DWELL = 4.0
"""Steps between two questions, in place of the minutes of a long run."""
START_S = 300.0
"""In which nodes import torch and join, on a busy machine."""


@dataclass(frozen=True, slots=True)
class RealWorker:
    """A process whose groups take a time, in steps of the learner."""

    price_per_h: float
    group: float
    can_listen: bool = False


@dataclass(frozen=True, slots=True)
class RealFleet:
    """Learner, workers, and the link between them."""

    workers: tuple[RealWorker, ...]
    max_staleness: int
    copy: float
    """Steps that one copy of a version takes on the learner's uplink; 0 where nothing limits it."""
    has_relay: bool = False


REAL = {
    # The case: with each more of them the broadcast alone is longer than the bound allows.
    "thin": RealFleet((RealWorker(0.8, 0.075),) * 8, 1, 0.7),
    # Two of those at $0.50 and $0.55 make the rate with its margin, at the least cost.
    "enough": RealFleet(
        (
            RealWorker(1.0, 0.33), RealWorker(0.9, 0.33), RealWorker(0.5, 0.42),
            RealWorker(0.55, 0.42), RealWorker(0.2, 1.3),
        ),
        3, 0.0, has_relay=True,
    ),
    # Those that listen pass versions on; each of the others takes a copy of its own.
    "mixed": RealFleet(
        (RealWorker(0.8, 0.25, can_listen=True),) * 2 + (RealWorker(0.4, 0.17),) * 3, 1, 0.3
    ),
}  # fmt: skip


def run_real(name: str, *, num_steps: int, step_s: float, where: Path) -> dict[str, Any]:
    """Run a learner and workers, and return how good the set is that generates in the end."""
    fleet = REAL[name]
    config = build_config()
    config.intermediate_size = WIDTH
    model = model_class(config).from_config(config)
    save_tiny_model(where / "model", model)
    # Versions are in bfloat16.
    version_bytes = 2 * sum(tensor.numel() for tensor in model.parameters())
    verdicts = where / "verdicts.jsonl"
    wan = Wan(2, rate_mbit=0, latency_ms=1, tuned=True)
    with contextlib.closing(wan):
        if fleet.copy:
            wan.set(LEARNER, "up", version_bytes * 8e-6 / (fleet.copy * step_s))
        learner, relay = f"tcp://{wan.host(LEARNER)}:7700", f"tcp://{wan.host(SITE)}:7701"
        dialled = relay if fleet.has_relay else learner
        nodes: list[dict[str, Any]] = []
        if fleet.has_relay:
            sets = [f"relay.listen={relay}", f"relay.connect=['{learner}']", "relay.name=relay"]
            nodes.append({"role": "relay", "group_s": 0.0, "set": sets})
        for number, worker in enumerate(fleet.workers):
            sets = [
                f"worker.name=w{number}", f"worker.price_per_h={worker.price_per_h}",
                f"worker.connect=['{dialled}']",
            ]  # fmt: skip
            if worker.can_listen:
                sets.append(f"worker.listen={wan.listen(SITE)}")
            nodes.append({"role": "worker", "group_s": worker.group * step_s, "set": sets})
        run_dir = run_nodes(
            "nodes.priced_node",
            where,
            ["site"],
            lambda of: [
                "--set", f"learner.listen={learner}", "--set", "activation.mode=on",
                "--set", "sync.publish_period=auto", "--set", "network.chunk_bytes=65536",
                f"--verdicts={verdicts}", f"--step-s={step_s}",
                f"--dwell-s={DWELL * step_s}",
                *(f"--node={json.dumps(node)}" for node in nodes if of == "site"),
            ],
            within_s=START_S + WITHIN * num_steps * step_s,
            inside=lambda of: wan.inside(LEARNER if of == "learner" else SITE),
            steps=num_steps, tokens=TOKENS, max_staleness=fleet.max_staleness, group_size=SIZE,
            groups_per_step=GROUPS, max_concurrent_rollouts=SLOTS * SIZE, dead_after_s=20,
        )  # fmt: skip
    return describe_real(name, run_dir, harness.read_rows(verdicts))


def describe_real(name: str, run_dir: Path, verdicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run came to, by its last choice and by its metrics after the last change."""
    rows = [row for row in harness.read_rows(run_dir / "metrics.jsonl") if "time/step" in row]
    changes = [each for each in read_records(run_dir) if isinstance(each, ActivationChanged)]
    last_change = max((each.step for each in changes), default=0)
    settled = rows[last_change:]
    step_s = sum(row["time/step"] for row in settled)
    waited_s = sum(row["time/wait_for_batch"] for row in settled)
    return {
        "fleet": name,
        "steps": len(rows),
        "steps_after_the_last_change": len(settled),
        "idle_after_the_last_change": round(waited_s / step_s, 4) if settled else None,
        "cost_per_hour_of_the_active": rows[-1].get("cost/per_hour", 0.0)
        - rows[-1].get("cost/standby_per_hour", 0.0),
        "changes": [
            {
                "step": each.step,
                "cause": each.cause,
                "activated": list(each.activated),
                "deactivated": list(each.deactivated),
            }
            for each in changes
        ],
        "questions": len(verdicts),
        "last": verdicts[-1] if verdicts else None,
        "worst_gap_of_a_choice": max(
            (gap for each in verdicts for gap in each["chosen_gaps"].values()), default=None
        ),
    }


def measure_real(names: Sequence[str], *, num_steps: int, step_s: float) -> dict[str, Any]:
    """Run the fleets of these names, one after the other."""
    runs = []
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            runs.append(run_real(name, num_steps=num_steps, step_s=step_s, where=Path(scratch)))
        print(runs[-1], flush=True)
    return {"step_s": step_s, "runs": runs}
