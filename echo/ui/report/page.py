"""Makes the page of a report: one HTML file with tables, figures and samples.

The page loads no other files. Its content security policy forbids scripts and requests. The
template escapes all text, so a model's text, a node's name or a log line cannot add markup.
Python's escapes replace unprintable characters, which could reorder the text on the screen.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from echo.core.extras import import_extra, version
from echo.core.units import counted, format_bytes, format_duration, one_line, per_million
from echo.records.run_files import values_of
from echo.ui.drawing import clock, short_count
from echo.ui.report.figures import SECTIONS, Plot
from echo.ui.report.run import ReportedRun, differing_settings, utc
from echo.ui.rollouts import VERSION_STYLES, ShownRollout

TEMPLATE = Path(__file__).with_name("page.html")
NUM_LAST = 10
"""Some key figures are averages over this many last steps."""
MAX_STALLS = 20
"""Largest number of stalls that the page lists. The newest stalls are listed."""
NO_VALUE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of texts."""

    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]]
    caption: str = ""
    has_numbers: bool = False
    """Whether all columns except the first have numbers. Numbers are aligned to the right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColouredText:
    """A piece of a completion that one version sampled."""

    text: str
    style: str
    """The class of the HTML element that shows the piece."""
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBox:
    """The texts and facts that the page shows about a rollout."""

    rollout: ShownRollout
    facts: str
    prompt: str
    pieces: Sequence[ColouredText]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """A part of the page, with a heading."""

    heading: str
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    samples: Sequence[RolloutBox] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """Long texts, under their names. The page shows the name, and the reader can unfold the
    text."""
    is_open: bool = False
    note: str = ""

    @property
    def link(self) -> str:
        """The name that links within the page use for this part."""
        return "".join(char if char.isalnum() else "-" for char in self.heading.lower())

    @property
    def is_empty(self) -> bool:
        """Whether the part has a heading but no content."""
        return not (self.tables or self.plots or self.samples or self.texts or self.note)


def render_page(
    runs: Sequence[ReportedRun],
    plots: Sequence[Plot],
    rollouts: Sequence[ShownRollout],
    *,
    without_rollouts: str,
    made_at: float,
) -> str:
    """Return the page as HTML.

    Args:
        runs: the run of the report, followed by the runs for comparison.
        plots: the figures, in order.
        rollouts: rollouts of the first run.
        without_rollouts: the reason why there are no rollouts; empty if there are rollouts.
        made_at: Unix time, seconds.

    Raises:
        ConfigError: if jinja2 is not installed.
    """
    jinja2 = import_extra("jinja2", extra="learner", wanted_by="a report")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["b64"] = lambda data: base64.b64encode(data).decode("ascii")
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    parts = _parts(runs, plots, rollouts, without_rollouts)
    page: str = template.render(
        title=f"Echo run {one_line(runs[0].name)}",
        runs=runs,
        parts=[part for part in parts if not part.is_empty],
        made_at=utc(made_at),
        version=version(),
    )
    return page


def _parts(
    runs: Sequence[ReportedRun],
    plots: Sequence[Plot],
    rollouts: Sequence[ShownRollout],
    without_rollouts: str,
) -> Iterator[PagePart]:
    run = runs[0]
    if run.is_cut_off:
        yield PagePart(heading="How it ended", texts=_log(run), is_open=True)
    yield PagePart(heading="Key figures", tables=list(_key_tables(runs)))
    for section in SECTIONS:
        yield PagePart(heading=section, plots=[plot for plot in plots if plot.section == section])
    if len(runs) == 1:
        yield PagePart(heading="Nodes", tables=_node_tables(run))
        yield PagePart(heading="Stalls", tables=list(_stall_tables(run)))
        yield PagePart(heading="Groups that were not trained", tables=list(_lost_tables(run)))
        yield PagePart(heading="Decisions", tables=_decision_tables(run))
        yield PagePart(
            heading="Warnings",
            texts=_unfolded("The last warnings in the learner's log", run.log_warnings),
        )
        yield PagePart(
            heading="Sample rollouts",
            samples=[_sample(each) for each in rollouts],
            texts=_unfolded("Samples in the learner's log", run.log_samples),
            note=without_rollouts,
        )
        config = json.dumps(run.config, indent=2, ensure_ascii=False)
        texts = {"Configuration": _lines(config)}
        yield PagePart(heading="Files", texts=texts if run.is_cut_off else {**texts, **_log(run)})


def _log(run: ReportedRun) -> dict[str, str]:
    return _unfolded("The last lines of the learner's log", run.log)


def _unfolded(name: str, lines: Sequence[str]) -> dict[str, str]:
    return {name: "\n".join(map(one_line, lines))} if lines else {}


def _lines(text: str) -> str:
    return "\n".join(map(one_line, text.split("\n")))


# --- key figures ----------------------------------------------------------------------------------


def _key_tables(runs: Sequence[ReportedRun]) -> Iterator[Table]:
    figures = [_key_figures(run) for run in runs]
    labels = list(dict.fromkeys(label for each in figures for label in each))
    head = ["", *(one_line(run.name) for run in runs)] if len(runs) > 1 else []
    rows = [[label, *(each.get(label, NO_VALUE) for each in figures)] for label in labels]
    yield Table(head=head, rows=rows)
    if len(runs) > 1:
        differing = differing_settings(runs)
        if differing:
            yield Table(
                head=["setting", *head[1:]],
                rows=[[key, *map(one_line, values)] for key, values in differing.items()],
                caption="Settings that differ",
            )


def _key_figures(run: ReportedRun) -> dict[str, str]:
    figures: dict[str, str] = {}
    summary, train = run.summary, run.history.train
    if summary is None:
        return {"steps": "0"}
    figures["steps"] = f"{summary.num_steps} of {summary.max_steps}"
    figures["time of the learner"] = clock(summary.wall_time_s)
    if summary.resumed:
        figures["resumed"] = summary.resumed
    if summary.reward_before is not None and summary.reward_after is not None:
        change = _change(summary.reward_before, summary.reward_after)
        steps = counted(summary.num_reward_steps, "step")
        figures["reward"] = f"{change} (first and last {steps})"
    before, after = summary.eval_before, summary.eval_after
    if before is not None and after is not None:
        steps = f"(step {_span(before.step, after.step)})"
        sampled = _change(before.sampled, after.sampled)
        figures["held-out, sampled"] = f"{sampled} {steps}"
        figures["held-out, greedy"] = f"{_change(before.greedy, after.greedy)} {steps}"
    figures["staleness"] = (
        f"mean {summary.mean_staleness:.2f}, at most {max(summary.staleness_tokens, default=0)}, "
        f"bound {summary.bound}"
    )
    waited, stepped = values_of(train, "time/wait_for_batch"), values_of(train, "time/step")
    if sum(stepped):
        figures["learner waited"] = f"{min(1.0, sum(waited) / sum(stepped)):.0%} of its time"
    last = train[-NUM_LAST:]
    for label, metric, form in (
        ("effective sample size, last steps", "ess", ".1%"),
        ("mismatch KL, last steps", "mismatch_kl", ".3g"),
        ("clipped tokens, last steps", "clip_ratio/mean", ".2%"),
    ):
        values = values_of(last, metric)
        if values:
            figures[label] = format(fmean(values), form)
    rate = short_count(summary.tokens_per_s)
    figures["tokens accepted"] = f"{short_count(summary.num_tokens)}, {rate} per second"
    figures["groups"] = (
        f"{summary.num_trained} trained, {sum(summary.discarded.values())} discarded"
    )
    figures["weights sent by the learner"] = format_bytes(summary.broadcast_bytes)
    costs = values_of(train, "cost/total")
    if costs:
        figures["cost"] = f"${costs[-1]:.2f}"
        price = per_million(costs[-1], summary.num_tokens)
        if price is not None:
            figures["cost per million accepted tokens"] = f"${price:.3g}"
    return figures


def _change(before: float, after: float) -> str:
    return f"{before:.3f}" if before == after else f"{before:.3f} to {after:.3f}"


# --- tables ---------------------------------------------------------------------------------------


def _node_tables(run: ReportedRun) -> list[Table]:
    if not run.nodes:
        return []
    head = [
        "node", "groups", "tokens", "tokens/s", "s per group", "weights received", "cost",
        "$ per million tokens", "mismatch KL", "reward",
    ]  # fmt: skip
    rows = [
        [
            one_line(node.node_id),
            str(node.num_groups) if node.num_groups else NO_VALUE,
            short_count(node.num_tokens) if node.num_groups else NO_VALUE,
            NO_VALUE if node.rate is None else short_count(node.rate.tokens_per_s),
            NO_VALUE if node.rate is None else f"{node.rate.group_s:.3g}",
            NO_VALUE if node.received_bytes is None else format_bytes(node.received_bytes),
            NO_VALUE if node.cost is None else f"${node.cost:.3g}",
            _number(node.cost_per_million_tokens),
            _number(node.mismatch_kl),
            _number(node.reward),
        ]
        for node in run.nodes
    ]
    columns = [0, *(at for at in range(1, len(head)) if any(row[at] != NO_VALUE for row in rows))]
    return [
        Table(
            head=[head[at] for at in columns],
            rows=[[row[at] for at in columns] for row in rows],
            caption="Accepted groups and their completion tokens; tokens per second while the "
            "worker held a group; cost of the node alone, also per million of its accepted tokens; "
            "mismatch and reward of its newest trained groups.",
            has_numbers=True,
        )
    ]


def _number(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.3g}"


def _stall_tables(run: ReportedRun) -> Iterator[Table]:
    if run.stalls:
        stalls = run.stalls[-MAX_STALLS:]
        left_out = len(run.stalls) - len(stalls)
        yield Table(
            head=["steps", "learner waited", "why, and what would help", "setting"],
            rows=[
                [
                    _span(stall.first_step, stall.last_step),
                    "before a resume"
                    if stall.is_superseded
                    else format_duration(stall.waited_s) + (", not ended" if stall.is_open else ""),
                    one_line(stall.text),
                    one_line(stall.setting) or NO_VALUE,
                ]
                for stall in stalls
            ],
            caption=f"The newest, without {counted(left_out, 'earlier one')}." if left_out else "",
        )
    if run.long_waits:
        rows = [
            [
                str(wait.step),
                utc(wait.at),
                format_duration(wait.waited_s),
                f"{wait.share:.0%}",
                one_line(wait.cause) or NO_VALUE,
            ]
            for wait in run.long_waits
        ]
        head = ["step", "ended", "waited", "of its time", "for what"]
        if not any(wait.cause for wait in run.long_waits):
            head, rows = head[:-1], [row[:-1] for row in rows]
        yield Table(
            head=head,
            rows=rows,
            caption="The longest waits for groups, of those above a second.",
        )


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _lost_tables(run: ReportedRun) -> Iterator[Table]:
    for what, counts in (("discarded", run.discarded), ("refused", run.refused)):
        if counts:
            rows = sorted(counts.items(), key=lambda item: -item[1])
            yield Table(head=[what, "number"], rows=[[one_line(r), str(n)] for r, n in rows])


def _decision_tables(run: ReportedRun) -> list[Table]:
    if not run.decisions:
        return []
    left_out = run.num_decisions - len(run.decisions)
    return [
        Table(
            head=["step", "at", "what"],
            rows=[[str(each.step), utc(each.at), one_line(each.what)] for each in run.decisions],
            caption=f"The newest, without {counted(left_out, 'earlier one')}." if left_out else "",
        )
    ]


# --- rollouts -------------------------------------------------------------------------------------


def _sample(rollout: ShownRollout) -> RolloutBox:
    versions = list(dict.fromkeys(part.version for part in rollout.parts))
    pieces = []
    for part in rollout.parts:
        style = f"v{versions.index(part.version) % len(VERSION_STYLES)}"
        if len(versions) == 1:
            style = ""
        pieces.append(
            ColouredText(
                text=_lines(part.text),
                style=style if part.is_sampled else "inserted",
                about=f"{part.version}, {counted(part.num_tokens, 'token')}"
                + ("" if part.is_sampled else ", inserted by the task"),
            )
        )
    facts = [
        f"mean of the group {rollout.group_mean:.3g}",
        one_line(rollout.worker),
        ", ".join(map(str, versions)),
        f"ended by {rollout.finish_reason}",
    ]
    if rollout.staleness is not None:
        facts.insert(3, f"staleness {_span(*rollout.staleness)}")
    return RolloutBox(
        rollout=rollout, facts=", ".join(facts), prompt=_lines(rollout.prompt), pieces=pieces
    )
