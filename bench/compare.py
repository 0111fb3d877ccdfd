"""Quick benchmarks at two commits in turns: medians, spread, and what has become worse.

    python bench/compare.py OLD [NEW] [--only delta topology] [--rounds 3]
    python bench/compare.py OLD [NEW] --only quickstart --options="--seeds 0 1 2"

Each commit has a worktree of its own, and each turn runs one benchmark at the old commit and then
at the new one, with the packages of this environment. A figure is marked where its median has
become worse by more than 5 % and by more than the rounds of one commit differ. What a script of an
older commit has no option for is ABSENT, and so is what fails or takes too long, with the reason.
Options take the place of the quick form, at both commits. A round that fails ends its benchmark,
and the rounds before it count.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

ROOT = Path(__file__).resolve().parents[1]
WORSE = 0.05
QUICK = ("april", "broadcast", "delta", "dispatch", "ledger", "overlap", "quickstart", "rule",
         "sim", "staleness", "topology", "update", "uplink_errors")  # fmt: skip
GAINS = ("per_s", "gb_s", "ratio", "promised", "got", "sampled", "greedy", "speed", "is_complete")
"""In names of figures of which more is better."""
COSTS = ("_s", "_ms", "_mib", "bytes", "idle", "wasted", "stale", "worst", "_step", "_tokens",
         "warm", "cold", "least", "warm_all", "warm_wall")  # fmt: skip
"""At the end of names, or of what they begin with, of figures of which less is better."""


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--only", nargs="+", choices=QUICK, default=QUICK)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--options", help="for the scripts, in place of their quick form")
    parser.add_argument("--limit-s", type=float, default=300, help="for one run")
    arguments = parser.parse_args()
    commits = {"old": commit(arguments.old), "new": commit(arguments.new)}
    found: dict[str, Any] = {}
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        trees = {side: Path(scratch) / side for side in commits}
        try:
            for side, tree in trees.items():
                git("worktree", "add", "--detach", str(tree), commits[side])
                # The small models are named after what they are made of, and take minutes.
                (tree / "build").symlink_to(ROOT / "build")
            for name in arguments.only:
                ask = functools.partial(run, name, arguments.options, arguments.limit_s)
                found[name] = compare(ask, trees, arguments.rounds)
                show(name, found[name])
                result = {
                    "commits": commits,
                    "rounds": arguments.rounds,
                    "options": arguments.options,
                    "benchmarks": found,
                }
                # After each, so that a run which is ended keeps what it has.
                print(f"wrote {harness.save('compare', result)}", flush=True)
        finally:
            for tree in trees.values():
                git("worktree", "remove", "--force", str(tree))


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(name: str) -> str:
    """Return the short name of a commit."""
    return git("rev-parse", "--short", f"{name}^{{commit}}")


def compare(
    ask: Callable[[Path], dict[str, float]], trees: dict[str, Path], rounds: int
) -> dict[str, Any]:
    """Run one benchmark in turns; return old and new median of every figure, and the verdicts."""
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in trees}
    ended = ""
    for _ in range(rounds):
        turn = {}
        for side, tree in trees.items():
            try:
                turn[side] = ask(tree)
            except RuntimeError as error:
                ended = f"{side}: {error}"
                break
        if ended:
            break
        for side, figures in turn.items():
            runs[side].append(figures)
    if not runs["old"]:
        return {"absent": ended}
    rows: dict[str, dict[str, Any]] = {}
    common = runs["old"][0].keys() & runs["new"][0].keys()
    for figure in sorted(each for each in common if "spread" not in each):
        values = {side: [each[figure] for each in own] for side, own in runs.items()}
        old, new = (statistics.median(values[side]) for side in ("old", "new"))
        spread = max(max(own) - min(own) for own in values.values())
        rows[figure] = {"old": old, "new": new, "spread": spread}
        if abs(new - old) > max(WORSE * abs(old), spread):
            is_more = new > old
            better = is_gain(figure)
            verdict = "changed" if better is None else "better" if is_more is better else "WORSE"
            rows[figure]["verdict"] = verdict
    return {
        "rounds": len(runs["old"]),
        "ended": ended,
        "figures": rows,
        "unmatched": sorted(runs["old"][0].keys() ^ runs["new"][0].keys()),
    }


def is_gain(figure: str) -> bool | None:
    """Return whether more of a figure is better; None where nobody can tell."""
    parts = figure.split("/")
    own = next((part for part in reversed(parts) if not part.isdigit()), "")
    if any(word in own for word in GAINS):
        return True
    return False if own.endswith(COSTS) else None


def run(name: str, options: str | None, limit_s: float, tree: Path) -> dict[str, float]:
    """Run a benchmark in a worktree; return its figures, printed or in the file that it wrote.

    Raises:
        RuntimeError: if there are none, with the reason.
    """
    if options is None:
        if "--quick" not in (tree / "bench" / "harness.py").read_text():
            raise RuntimeError("its script has no quick form")
        options = "--quick"
    command = [sys.executable, f"bench/bench_{name}.py", *shlex.split(options)]
    began_at = time.time()
    process = subprocess.Popen(
        command, cwd=tree, env=harness.finding(tree), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took longer than {limit_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its nodes, too: they are in its session
        process.wait()
    lines = output.splitlines()
    if process.returncode:
        raise RuntimeError(f"exit {process.returncode}: {' '.join(lines[-1:])}")
    printed = [line for line in lines if line.startswith('{"figures": ')]
    if printed:
        found: dict[str, float] = json.loads(printed[-1])["figures"]
        return found
    written = [p for p in tree.glob("bench/results/*.json") if p.stat().st_mtime >= began_at]
    if not written:
        raise RuntimeError("it has neither printed nor written any figures")
    newest = max(written, key=lambda path: path.stat().st_mtime)
    return dict(harness.figures(json.loads(newest.read_text())))


def show(name: str, found: dict[str, Any]) -> None:
    """Print what differs."""
    if "absent" in found:
        print(f"{name}: ABSENT: {found['absent']}", flush=True)
        return
    rows = found["figures"]
    marked = {figure: row for figure, row in rows.items() if "verdict" in row}
    only = len(found["unmatched"])
    print(f"{name}: {len(rows)} figures, {len(marked)} differ; {only} in one commit", flush=True)
    if found["ended"]:
        print(f"  after {found['rounds']} rounds: {found['ended']}")
    for figure, row in marked.items():
        print(f"  {row['verdict']:8} {row['old']:>11.5g} -> {row['new']:>11.5g}  {figure}")


if __name__ == "__main__":
    main()
