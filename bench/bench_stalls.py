"""Inject faults into whole runs on virtual time, and see which explanation the learner gives.

The runs are those of tests/runtime/test_stalls.py: real nodes and files, with an engine, a trainer
and links that take the seconds that a fault says. A fault is named if the first explanation in the
metrics has its cause, its resource and the setting to change. The healthy runs are simulated fleets
that sample about twice as fast as the learner trains, with random sizes.

    step      optimizer steps from the fault to the explanation; 20 at most
    cause     the cause in the explanation, and the setting

    python bench/bench_stalls.py
    python bench/bench_stalls.py --quick            two faults, two healthy runs, writes nothing
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

COLUMNS = "{:<24} {:>5}  {:<24} {:<40} {}"


def main() -> None:
    sys.path.insert(0, str(harness.ROOT))
    from tests.runtime.test_stalls import FAULTS, balanced
    from tests.sim.scenarios import simulate

    parser = harness.new_parser(__doc__)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), help="their names")
    parser.add_argument("--healthy", type=int, default=20, help="number of healthy runs")
    arguments = harness.parse(parser, faults=["slow relay", "stuck reward"], healthy=2)
    print(COLUMNS.format("fault", "step", "cause", "setting", "right"))
    rows = [inject(name) for name in arguments.faults]
    explained = [len(simulate(balanced(seed))[1].explained) for seed in range(arguments.healthy)]
    num_right = sum(row["is_right"] for row in rows)
    print(f"{num_right} of {len(rows)} faults are named with resource and setting")
    print(f"{sum(map(bool, explained))} of {len(explained)} healthy runs got an explanation")
    result = {"faults": rows, "explanations_of_healthy_runs": explained}
    print(f"wrote {harness.save('stalls', result)}")


def inject(name: str) -> dict[str, Any]:
    """Run until the learner explains something; return what it explained."""
    from tests.promises.world import World
    from tests.runtime.test_stalls import FAULTS, MAX_STEPS, explained

    make, cause, setting, resource = FAULTS[name]
    with tempfile.TemporaryDirectory() as directory:
        world = make(lambda **numbers: World(Path(directory), **numbers))
        try:
            begun = world.step
            world.run_until(
                lambda: explained(world) or world.step >= begun + MAX_STEPS, within_s=2000.0
            )
            num_steps, found = world.step - begun, explained(world)
        finally:
            world.close()
    first = found[0] if found else {"cause": "", "setting": "", "resource": "", "text": ""}
    is_right = (first["cause"], first["setting"]) == (cause, setting)
    is_right &= re.fullmatch(resource, first["resource"]) is not None
    print(COLUMNS.format(name, num_steps, first["cause"], first["setting"], is_right), flush=True)
    return {"fault": name, "steps": num_steps, "is_right": is_right, **first}


if __name__ == "__main__":
    main()
