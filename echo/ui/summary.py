"""Makes the summary of a run from the files in the run's directory.

The distribution of staleness is computed from the ledger, because the ledger records the groups
that were trained on.
"""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo.core.errors import DataError
from echo.core.extras import command
from echo.core.monitoring.metrics import held_out
from echo.core.units import counted, format_bytes, per_million
from echo.records.ledger import FILE, LedgerTotals, read_records, totals_of
from echo.records.run_files import Evaluation, MetricsHistory, MetricsRow, read_config, read_metrics
from echo.ui.drawing import UNWRAPPED, clock, short_count, to_ascii
from echo.ui.screen import staleness_bars, staleness_bins
from echo.ui.stalls import describe_waits, stalls_of

# A run's learning, from its metrics: which groups taught, and how far off-policy


CAUSES = ("staleness", "numerics", "truncation", "tokenisation")
"""Causes of the mismatch between sampler and learner, in the order in which the summary lists
them."""


def learning_facts(
    train: Sequence[MetricsRow], *, num_last: int, num_tokens: int
) -> tuple[tuple[str, str], ...]:
    """Return (label, text) for each fact about learning that was measured.

    Args:
        train: rows of metrics of optimizer steps, in order.
        num_last: number of last steps that describe the end of the run. Some facts are computed
            over these steps alone.
        num_tokens: number of completion tokens in the groups that the run has accepted.
    """
    last = train[-num_last:]
    facts = [
        ("useful groups", _groups(last)),
        ("off-policy", _off_policy(last)),
        ("mismatch", _mismatch(train)),
        ("reference", _reference(last)),
        ("cost", _cost(train, num_tokens)),
        ("continued", _continued(train[-1])),
        ("lengths", _lengths(train)),
    ]
    return tuple((label, text) for label, text in facts if text)


def _mean(rows: Sequence[MetricsRow], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return fmean(values) if values else None


def _groups(last: Sequence[MetricsRow]) -> str:
    useful = _mean(last, "groups/useful")
    right, wrong = _mean(last, "groups/all_right"), _mean(last, "groups/all_wrong")
    if useful is None or right is None or wrong is None:
        return ""
    return (
        f"{useful:.0%} in the last {counted(len(last), 'step')} (rewards all equal: {right:.0%} "
        f"above 0, {wrong:.0%} at 0 or less)"
    )


def _off_policy(last: Sequence[MetricsRow]) -> str:
    names = {"ess": "ess", "mismatch KL": "mismatch_kl", "clipped": "clip_ratio/mean"}
    values = {label: _mean(last, name) for label, name in names.items()}
    parts = [
        f"{label} {value:.1%}" if label == "clipped" else f"{label} {value:.3g}"
        for label, value in values.items()
        if value is not None
    ]
    return ", ".join(parts) + f" in the last {counted(len(last), 'step')}" if parts else ""


def _mismatch(train: Sequence[MetricsRow]) -> str:
    """Return text that says which share of the mismatch's variance each cause has.

    The shares are computed over all measurements of the run.
    """
    measured = [row for row in train if row.get("attribution/variance") is not None]
    shared = [row for row in measured if row.get(f"attribution/{CAUSES[0]}") is not None]
    total = sum(row["attribution/variance"] for row in shared)
    skipped = _mean(train, "attribution/skipped")
    gone = f"{skipped:.0%} of the tokens skipped, their versions are gone" if skipped else ""
    if not total:
        return gone
    shares = {
        cause: sum(row[f"attribution/{cause}"] * row["attribution/variance"] for row in shared)
        / total
        for cause in CAUSES
    }
    text = ", ".join(f"{share:.0%} {cause}" for cause, share in shares.items())
    text += f" (variance {total / len(shared):.3g} nats^2, {counted(len(measured), 'measurement')})"
    return f"{text}; {gone}" if gone else text


def _reference(last: Sequence[MetricsRow]) -> str:
    divergence = _mean(last, "kl/reference")
    return "" if divergence is None else f"{divergence:.3g} nats per token away"


def _cost(train: Sequence[MetricsRow], num_tokens: int) -> str:
    rows = [row for row in train if row.get("cost/total") is not None]
    if not rows:
        return ""
    text = f"${rows[-1]['cost/total']:.2f}, ${rows[-1]['cost/per_hour']:.2f}/h in the end"
    price = per_million(rows[-1]["cost/total"], num_tokens)
    return text if price is None else f"{text}, ${price:.3g} per million accepted tokens"


def _continued(row: MetricsRow) -> str:
    """Return text about continued groups: their number, their age, and their lost tokens."""
    resumed = row.get("count/partials/resumed")
    age, wasted = row.get("partials/mean_age"), row.get("partials/wasted_ratio")
    if not resumed or age is None or wasted is None:
        return ""
    shipped = row.get("count/partials/handed_over", 0)
    return (
        f"{counted(round(resumed), 'time')} a group was continued, {age:.1f} steps old on "
        "average; "
        f"{wasted:.1%} of the tokens not trained on; {shipped:.0f} handed over"
    )


def _lengths(train: Sequence[MetricsRow]) -> str:
    """Return text that compares the lengths of trained rollouts with those of sampled rollouts.

    The text is empty if the run did not continue rollouts.
    """
    rows = [row for row in train if row.get("lengths/bias") is not None]
    if not rows or not rows[-1].get("count/partials/resumed"):
        return ""
    last = rows[-1]
    return (
        f"trained {last['lengths/trained/mean']:.0f} tokens (p90 {last['lengths/trained/p90']:.0f})"
        f", sampled {last['lengths/sampled/mean']:.0f} (p90 {last['lengths/sampled/p90']:.0f}), "
        f"bias {fmean(row['lengths/bias'] for row in rows):+.1%} over the run"
    )


REWARD_STEPS = 5
"""Number of steps over which a mean reward is taken. It has less than half the noise of one batch.
"""
MAX_TOO_OLD = 0.01
"""If a larger share of tokens was dropped as too old, the summary highlights it."""
_MAX_BINS = 12
"""Largest number of bars for the staleness of tokens. With more bars, a bar stands for several
values of the staleness."""
_BARS_WIDTH = 60
"""Width of the staleness bars with their labels, in cells. It fits a terminal of 80 cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The numbers, texts and paths in the summary of a run."""

    run_dir: Path
    num_steps: int
    max_steps: int
    bounds: tuple[int, ...]
    """Bounds on staleness: the one in the configuration, then the one after each step."""
    publish_period: int | str
    wall_time_s: float
    """Seconds from the start of each lineage to its last row of metrics, summed over all
    lineages."""
    num_lineages: int
    """Number of lineages: 1, plus 1 for each resume."""
    num_reward_steps: int
    """Number of steps over which each of the means `reward_before` and `reward_after` is taken."""
    reward_before: float | None
    """Mean reward of the first steps; None if it is not finite."""
    reward_after: float | None
    """Mean reward of the last steps; None if it is not finite."""
    eval_before: Evaluation | None
    eval_after: Evaluation | None
    evals_are_rates: bool
    """Whether every reward of every evaluation was 0 or 1."""
    staleness_tokens: dict[int, int]
    """For each staleness, the number of trained tokens, according to the ledger."""
    num_trained: int
    """Number of groups that were trained on."""
    discarded: dict[str, int]
    """For each reason, the number of discarded groups."""
    num_tokens: int
    """Number of completion tokens in the groups that were accepted."""
    num_sampled: int
    """Number of tokens that workers have sampled; 0 if they were not counted."""
    num_too_old: int
    """Number of sampled tokens that were dropped because they were too old."""
    broadcast_bytes: float
    """Number of bytes of weights that the learner sent."""
    learning: tuple[tuple[str, str], ...]
    """Facts about learning that were measured: (label, text)."""
    paths: dict[str, Path]
    """Paths of those files of the run that exist, under their labels."""
    commands: tuple[str, ...]
    """Command lines that the user may try next."""

    @property
    def resumed(self) -> str:
        """The number of resumes as text, such as "once"; empty without one."""
        times = self.num_lineages - 1
        return "" if times == 0 else "once" if times == 1 else f"{times} times"

    @property
    def max_staleness(self) -> int:
        """The largest bound on staleness that the run had, in steps."""
        return max(self.bounds)

    @property
    def bound(self) -> str:
        """The bounds on staleness as text, such as "2", or "1 to 3, 2 in the end"."""
        least, most = min(self.bounds), max(self.bounds)
        return f"{most}" if least == most else f"{least} to {most}, {self.bounds[-1]} in the end"

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens that were accepted per second of wall time."""
        return self.num_tokens / self.wall_time_s if self.wall_time_s > 0 else 0.0

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the trained tokens; 0 without trained tokens."""
        total = sum(self.staleness_tokens.values())
        return sum(s * n for s, n in self.staleness_tokens.items()) / total if total else 0.0


def summarise_run(run_dir: Path, *, commands: Sequence[str] | None = None) -> RunSummary:
    """Return the summary of a run from its ledger, metrics.jsonl and config.json.

    Args:
        run_dir: directory of the run.
        commands: command lines that the user may try next; None for three commands that suit the
            configuration.

    Raises:
        DataError: if a file is missing or the run has not made a step yet.
        StorageError: if a file is damaged. A last line that a crash has cut off is no error.
    """
    config = read_config(run_dir)
    history = read_metrics(run_dir)
    ledger = totals_of(read_records(run_dir))
    if not history.train:
        raise DataError(
            f"{run_dir / 'metrics.jsonl'}: no optimizer step yet, nothing to sum up; "
            f"the learner's log is in {run_dir / 'logs'}"
        )
    rewards = [row["reward/mean"] for row in history.train if row["reward/mean"] is not None]
    num_reward_steps = min(REWARD_STEPS, max(len(rewards) // 2, 1))
    run, sync = _section(config, "run"), _section(config, "sync")
    num_steps = int(history.train[-1]["step"])
    bound = int(sync.get("max_staleness", max(ledger.staleness_tokens, default=0)))
    return RunSummary(
        run_dir=run_dir,
        num_steps=num_steps,
        max_steps=int(run.get("max_steps", num_steps)),
        bounds=(bound, *(int(row.get("staleness/bound", bound)) for row in history.train)),
        publish_period=sync.get("publish_period", "auto"),
        wall_time_s=_wall_time_s(history, ledger),
        num_lineages=max(len(ledger.lineage_starts), 1),
        num_reward_steps=num_reward_steps,
        reward_before=fmean(rewards[:num_reward_steps]) if rewards else None,
        reward_after=fmean(rewards[-num_reward_steps:]) if rewards else None,
        eval_before=history.evaluations[0] if history.evaluations else None,
        eval_after=history.evaluations[-1] if history.evaluations else None,
        evals_are_rates=history.evals_are_rates,
        staleness_tokens=dict(sorted(ledger.staleness_tokens.items())),
        num_trained=ledger.num_trained,
        discarded=ledger.discarded,
        num_tokens=ledger.num_tokens,
        num_sampled=int(history.counts.get("count/tokens/sampled", 0)),
        num_too_old=int(history.counts.get("count/tokens/too_old", 0)),
        broadcast_bytes=history.broadcast_bytes,
        learning=(
            *learning_facts(history.train, num_last=num_reward_steps, num_tokens=ledger.num_tokens),
            *_waits(history),
        ),
        paths=_paths(run_dir),
        commands=tuple(_next_commands(run_dir, config) if commands is None else commands),
    )


def render_summary(summary: RunSummary) -> Group:
    """Return a summary that a rich console of at least 60 columns can show."""
    title = Text.assemble(
        ("echo ", "bold cyan"),
        (summary.run_dir.resolve().name, "bold"),
        f": {summary.num_steps} of {summary.max_steps} steps in {clock(summary.wall_time_s)}",
    )
    if summary.resumed:
        title.append(f", resumed {summary.resumed}", "yellow")
    parts: list[RenderableType] = [title, Text(), _before_and_after(summary), Text()]
    parts += [*_staleness_rows(summary), Text(), _facts(summary)]
    if summary.commands:
        parts += [Text(), Text("Try next", "bold")]
        # Without indent, which a copied command of several lines would include.
        parts += [Text(command, "cyan", overflow="fold") for command in summary.commands]
    return Group(*parts)


def as_text(summary: RunSummary, *, width: int | None = None) -> str:
    """Return a summary as plain ASCII text.

    Args:
        summary: the summary of a run.
        width: the width of the terminal; None for a file or a pipe, where no line wraps.
    """
    lines = io.StringIO()
    console = Console(
        file=lines, width=UNWRAPPED if width is None else width, color_system=None,
        force_terminal=False,
    )  # fmt: skip
    console.print(render_summary(summary))
    # The columns of a table are as wide as its widest cell.
    return "".join(f"{line.rstrip()}\n" for line in to_ascii(lines.getvalue()).splitlines())


def _before_and_after(summary: RunSummary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("mean reward")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    table.add_column("")
    before, after = summary.eval_before, summary.eval_after
    if before is not None and after is not None:
        note = f"steps {before.step}, {after.step}"
        if before.num_errors or after.num_errors:
            note += f"; {before.num_errors}, {after.num_errors} rewards failed"
        name = held_out(summary.evals_are_rates)
        _add_change(table, f"{name}, sampled", before.sampled, after.sampled, note)
        _add_change(table, f"{name}, greedy", before.greedy, after.greedy, note)
    if summary.reward_before is not None and summary.reward_after is not None:
        note = f"{counted(summary.num_reward_steps, 'step')} each"
        _add_change(table, "reward of the steps", summary.reward_before, summary.reward_after, note)
    return table


def _add_change(table: Table, name: str, before: float, after: float, note: str) -> None:
    style = "bold green" if after > before else "bold red" if after < before else "bold"
    change = Text(f"{after - before:+.3f}", style)
    table.add_row(name, f"{before:.3f}", Text(f"{after:.3f}", "bold"), change, Text(note, "dim"))


def _staleness_rows(summary: RunSummary) -> list[RenderableType]:
    tokens = summary.staleness_tokens
    title = Text.assemble(
        ("Staleness of trained tokens", "bold"),
        f": mean {summary.mean_staleness:.2f}, at most {max(tokens, default=0)}, "
        f"bound {summary.bound}",
        (" (from the ledger)", "dim"),
    )
    bins = staleness_bins(tokens, summary.max_staleness, _MAX_BINS)
    bars = [(label, count, counted(count, "token")) for label, count, _ in bins]
    return [title, staleness_bars(bars, _BARS_WIDTH)]


def _facts(summary: RunSummary) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("tokens", _tokens(summary))
    rate = short_count(summary.tokens_per_s)
    table.add_row("accepted", f"{summary.num_tokens} tokens, {rate} per second")
    lost = ", ".join(f"{count} {reason}" for reason, count in summary.discarded.items())
    groups = f"{summary.num_trained} trained, {sum(summary.discarded.values())} discarded"
    table.add_row("groups", groups + (f" ({lost})" if lost else ""))
    for label, text in summary.learning:
        table.add_row(label, text)
    table.add_row("weights sent", format_bytes(summary.broadcast_bytes))
    table.add_row("wall time", clock(summary.wall_time_s))
    for label, path in summary.paths.items():
        table.add_row(label, Text(str(path)))
    return table


def _tokens(summary: RunSummary) -> Text:
    trained = f"{sum(summary.staleness_tokens.values())} trained"
    if not summary.num_sampled:
        return Text(trained)
    share = summary.num_too_old / summary.num_sampled
    too_old = f"{summary.num_too_old} thrown away for age ({share:.1%})"
    style = "yellow" if share > MAX_TOO_OLD else ""
    return Text.assemble(f"{summary.num_sampled} sampled, {trained}, ", (too_old, style))


def _wall_time_s(history: MetricsHistory, ledger: LedgerTotals) -> float:
    """Return how many seconds the learner ran. Times between a crash and a resume do not count."""
    starts = ledger.lineage_starts or [history.times[0]]
    total = 0.0
    for start, end in zip(starts, [*starts[1:], float("inf")], strict=True):
        total += max((at - start for at in history.times if start <= at < end), default=0.0)
    return total


def _paths(run_dir: Path) -> dict[str, Path]:
    candidates = {
        "run directory": run_dir,
        "metrics": run_dir / "metrics.jsonl",
        "ledger": run_dir / FILE,
        "learning curve": run_dir / "learning_curve.png",
        "HF checkpoint": run_dir / "final",
    }
    return {label: path for label, path in candidates.items() if path.exists()}


def _next_commands(run_dir: Path, config: MetricsRow) -> list[str]:
    run, sync = _section(config, "run"), _section(config, "sync")
    # Broken into lines with backslashes, so that they can be copied from a narrow terminal.
    config_path = shlex.quote(str(run_dir / "config.json"))
    learner = f"{command('node')} --role learner --config {config_path}"
    max_steps = int(run.get("max_steps", 100))
    other_bound = 2 * int(sync.get("max_staleness", 1)) + 1
    name = shlex.quote(f"{run_dir.resolve().name}-s{other_bound}")
    mode = " --set sync.mode=push_pull" if sync.get("mode") == "pull" else ""
    final = run_dir / "final"
    auto = f"AutoModelFor{'ImageTextToText' if _reads_images(final) else 'CausalLM'}"
    load = f"print({auto}.from_pretrained({str(final)!r}))"
    return [
        f"{learner} \\\n  --resume --set run.max_steps={2 * max_steps}",
        f"{learner} \\\n  --set run.name={name} --set sync.max_staleness={other_bound}{mode}",
        f'{shlex.quote(sys.executable)} -c "from transformers import {auto}\n{load}"',
    ]


def _reads_images(model_dir: Path) -> bool:
    path = model_dir / "config.json"
    return path.is_file() and "vision_config" in json.loads(path.read_text(encoding="utf-8"))


def _waits(history: MetricsHistory) -> list[tuple[str, str]]:
    """Return (label, text) pairs about the run's waits and about its longest stall."""
    waits, stalls = describe_waits(history.train), stalls_of(history)
    facts = [("waits", waits)] if waits else []
    if stalls:
        longest = max(stalls, key=lambda stall: stall.waited_s)
        facts.append(("stalled by", f"{longest.cause}: {longest.text} (see echo-rl explain)"))
    return facts


def _section(config: MetricsRow, name: str) -> MetricsRow:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
