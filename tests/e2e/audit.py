"""An independent reading of a run's ledger, written from its documented format alone.

It imports nothing of echo on purpose: the code that keeps the promises must not be the code that
checks them. It reads the tables by SQL of its own; they are described at the top of
echo/records/ledger.py. What is checked:

* records are numbered 1, 2, ..., and each has the bytes of its hash;
* lineages are numbered 1, 2, ..., each forks off at a step that its predecessor made;
* the surviving optimizer steps are 1, 2, ..., without gap or double, each of `groups_per_step`
  groups, each recorded under the lineage of its time;
* group ids are granted without gap; a group is accepted at most once, from a worker that it was
  granted to, and only with samples of versions that had been published;
* an accepted group has at most one end (trained on the surviving line, or discarded), and exactly
  one when the run is finished; a group that ends without having been accepted (its rewards were
  all equal, its worker gave it up) was granted, ends once, and is neither accepted nor trained
  afterwards;
* no token was trained on beyond `max_staleness`, computed from the versions of the accepted group
  and the step at which it was consumed, in abandoned steps too; and every version trained on lay
  on the history of its time;
* nothing that a resume could need was removed: each group in a removed file had ended, by a discard
  or by a step up to the newest checkpoint, and the newest checkpoint itself was never removed;
* a bound on staleness that the learner chose for itself lay within `max_staleness`.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from blake3 import blake3

Record = dict[str, Any]


@dataclass
class Audit:
    """What a ledger says, and everything that is wrong with it."""

    problems: list[str] = field(default_factory=list)
    fork_steps: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, Record] = field(default_factory=dict)
    trained: dict[int, list[int]] = field(default_factory=dict)
    """Group -> the surviving steps that it was trained at."""
    discarded: Counter[int] = field(default_factory=Counter)
    discard_reasons: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    """Tokens trained on the surviving line by staleness."""
    num_steps: int = 0
    """Optimizer steps of the surviving line."""


def read_ledger(run_dir: Path, *, after: int = 0) -> list[Record]:
    """Return the records of a run that are committed, beyond the first `after` of them."""
    path = run_dir / "ledger.sqlite"
    if not path.exists():
        return []
    query = "SELECT seq, body, hash FROM records WHERE seq > ? ORDER BY seq"
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        rows = database.execute(query, (after,)).fetchall() if "records" in tables else []
    for number, (seq, body, digest) in enumerate(rows, after + 1):
        assert seq == number, f"record {number} is missing"
        assert digest == blake3(seq.to_bytes(8, "little") + body.encode()).digest(), body
    return [json.loads(body) for _, body, _ in rows]


def read_jsonl(path: Path) -> list[Record]:
    """Return the whole lines of a file; a last line without its end is not one yet."""
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


def audit(
    records: Iterable[Record], *, max_staleness: int, groups_per_step: int, is_finished: bool
) -> Audit:
    """Check a ledger against the promises; the result's `problems` are empty if they were kept."""
    return _Auditor(list(records), max_staleness, groups_per_step).run(is_finished=is_finished)


class _Auditor:
    """One pass in the order in which things happened, then the questions about the whole."""

    def __init__(self, records: list[Record], max_staleness: int, groups_per_step: int) -> None:
        self.records = records
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        self.result = Audit()
        self.lineage = 0
        self.grants: set[tuple[int, int, str]] = set()
        self.granted: set[int] = set()
        self.unusable: set[int] = set()
        """Groups whose prompts could not be had."""
        self.published: set[tuple[int, int]] = set()
        self.steps: list[Record] = []
        self.checkpoint = 0
        """Step of the newest checkpoint of the surviving line."""

    def run(self, *, is_finished: bool) -> Audit:
        for record in self.records:
            handler = getattr(self, f"_on_{record['kind']}", None)
            if handler is not None:
                handler(record)
        self._check_group_ids()
        self._check_surviving_steps()
        self._check_ends(is_finished)
        return self.result

    def _problem(self, text: str) -> None:
        self.result.problems.append(text)

    # --- in order --------------------------------------------------------------------------------

    def _on_lineage(self, record: Record) -> None:
        lineage, fork_step = record["lineage"], record["fork_step"]
        if lineage != self.lineage + 1:
            self._problem(f"lineage {lineage} follows lineage {self.lineage}")
        last = max((step["step"] for step in self._surviving()), default=0)
        if fork_step > last:
            self._problem(f"lineage {lineage} forks at {fork_step}, but only {last} steps exist")
        self.lineage = lineage
        self.checkpoint = fork_step
        self.result.fork_steps[lineage] = fork_step

    def _on_granted(self, record: Record) -> None:
        self.grants.add((record["group"], record["attempt"], record["worker"]))
        self.granted.add(record["group"])

    def _on_published(self, record: Record) -> None:
        version = tuple(record["version"])
        if version in self.published:
            self._problem(f"version {version} was published twice")
        if version[0] != self.lineage:
            self._problem(f"version {version} was published in lineage {self.lineage}")
        self.published.add(version)

    def _on_accepted(self, record: Record) -> None:
        group = record["group"]
        if group in self.result.accepted:
            self._problem(f"group {group} was accepted twice")
        if self.result.discarded[group]:
            self._problem(f"group {group} was accepted after its discard")
        if (group, record["attempt"], record["worker"]) not in self.grants:
            self._problem(
                f"group {group} was accepted from {record['worker']} (attempt {record['attempt']})"
                ", to whom it was not granted"
            )
        for version in record["versions"]:
            if tuple(version) not in self.published:
                self._problem(f"group {group} has samples of {version}, which nobody published")
        self.result.accepted[group] = record

    def _on_discarded(self, record: Record) -> None:
        group = record["group"]
        if record["reason"] == "prompt_error":
            self.unusable.add(group)
        elif group not in self.granted:
            self._problem(f"group {group} was discarded and never granted")
        self.result.discarded[group] += 1
        self.result.discard_reasons[record["reason"]] += 1

    def _on_trained(self, record: Record) -> None:
        step, consumed_at = record["step"], record["consumed_at"]
        if record["lineage"] != self.lineage:
            self._problem(f"step {step} of lineage {record['lineage']} in lineage {self.lineage}")
        if step != consumed_at + 1:
            self._problem(f"step {step} was consumed at {consumed_at}")
        if len(record["groups"]) != self.groups_per_step:
            self._problem(f"step {step} is made of {len(record['groups'])} groups")
        tokens: Counter[int] = Counter()
        for group in record["groups"]:
            trimmed = record.get("trimmed", {}).get(str(group))
            tokens += self._check_trained_group(group, consumed_at, trimmed)
        recorded = Counter({int(lag): count for lag, count in record["staleness"].items()})
        if recorded != tokens:
            self._problem(f"step {step} says staleness {dict(recorded)}, it was {dict(tokens)}")
        self.steps.append({**record, "tokens_by_staleness": tokens})

    def _on_checkpoint(self, record: Record) -> None:
        self.checkpoint = record["step"]

    def _on_removed(self, record: Record) -> None:
        if f"checkpoints/step_{self.checkpoint:06d}" in record["paths"]:
            self._problem(f"the newest checkpoint, of step {self.checkpoint}, was removed")
        if not record["cause"]:
            self._problem(f"{record['paths']} were removed without a cause")
        ends = {group: each["step"] for each in self._surviving() for group in each["groups"]}
        for group, accepted in self.result.accepted.items():
            is_over = ends.get(group, self.checkpoint + 1) <= self.checkpoint
            if f"groups/{accepted['place'][0]}" not in record["paths"]:
                continue
            if not is_over and not self.result.discarded[group]:
                self._problem(f"group {group} was removed, and a resume would need it")

    def _on_bound(self, record: Record) -> None:
        if not 0 <= record["bound"] <= self.max_staleness or not record["cause"]:
            self._problem(f"step {record['step']} chose the bound {record['bound']}")

    def _check_trained_group(
        self, group: int, consumed_at: int, trimmed: list[int] | None
    ) -> Counter[int]:
        """Check one group of a step, or what was left of it; return its tokens by staleness."""
        accepted = self.result.accepted.get(group)
        if accepted is None:
            self._problem(f"group {group} was trained at step {consumed_at + 1} before acceptance")
            return Counter()
        if self.result.discarded[group]:
            self._problem(f"group {group} was trained at step {consumed_at + 1} after its discard")
        versions, counts = accepted["versions"], accepted["version_tokens"]
        if trimmed is not None:
            versions, left_out = versions[-len(trimmed) :], versions[: -len(trimmed)]
            counts = counts[-len(trimmed) :]
            if counts != trimmed or not left_out:
                self._problem(f"group {group} was trimmed to {trimmed} of {counts} tokens")
            if any(consumed_at - step <= self.max_staleness for _, step in left_out):
                self._problem(f"group {group} was trimmed of {left_out} at step {consumed_at + 1}")
        self._check_versions(group, versions, consumed_at)
        if not versions or len(counts) != len(versions) or min(counts) < 1:
            self._problem(f"group {group} was sampled by {versions}, {counts} tokens each")
            return Counter()
        if sum(counts) > accepted["tokens"]:
            self._problem(f"group {group} has {accepted['tokens']} tokens, trained are {counts}")
        tokens: Counter[int] = Counter()
        for (_, step), count in zip(versions, counts, strict=True):
            tokens[consumed_at - step] += count
        return tokens

    def _check_versions(self, group: int, versions: list[list[int]], consumed_at: int) -> None:
        for lineage, step in versions:
            lag = consumed_at - step
            if not 0 <= lag <= self.max_staleness:
                self._problem(f"group {group} was trained with staleness {lag}")
            later = (fork for own, fork in self.result.fork_steps.items() if own > lineage)
            if any(step > fork for fork in later):
                self._problem(f"group {group} was trained with the abandoned {[lineage, step]}")

    # --- the whole -------------------------------------------------------------------------------

    def _surviving(self) -> list[Record]:
        forks = self.result.fork_steps
        return [
            record
            for record in self.steps
            if all(record["step"] <= fork for own, fork in forks.items() if own > record["lineage"])
        ]

    def _check_group_ids(self) -> None:
        missing = set(range(max(self.granted, default=-1) + 1)) - self.granted - self.unusable
        if missing:
            self._problem(f"groups {sorted(missing)} were never granted, later ones were")

    def _check_surviving_steps(self) -> None:
        surviving = self._surviving()
        steps = [record["step"] for record in surviving]
        if steps != list(range(1, len(steps) + 1)):
            self._problem(f"the surviving steps are {steps}")
        self.result.num_steps = len(steps)
        for record in surviving:
            self.result.staleness.update(record["tokens_by_staleness"])
            for group in record["groups"]:
                self.result.trained.setdefault(group, []).append(record["step"])

    def _check_ends(self, is_finished: bool) -> None:
        for group in sorted({*self.result.accepted, *self.result.trained, *self.result.discarded}):
            steps, num_discards = self.result.trained.get(group, []), self.result.discarded[group]
            num_ends = len(steps) + num_discards
            if num_ends > 1:
                self._problem(f"group {group}: trained at {steps}, discarded {num_discards} times")
            if is_finished and not num_ends:
                self._problem(f"group {group} was accepted and has no end")
