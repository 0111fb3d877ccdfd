"""Draws a snapshot as rows, and arranges the rows on a screen.

Every function returns rows that rich can draw. Rows are at most as wide as the given width.
`render_live` decides which parts fit into a terminal, and how many rows each part gets. Text from
other nodes is cleaned before display.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.bar import Bar
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from echo.core.monitoring.metrics import held_out
from echo.core.monitoring.status import (
    CostStatus,
    LinkStatus,
    NodeStatus,
    RunStatus,
    SpeedStatus,
    VersionStatus,
)
from echo.core.units import counted, format_bytes, format_duration
from echo.ui.drawing import Curve, Marks, clean, clock, fit, line_chart, short_count, value_range

_MIN_SIDE_BY_SIDE = 56
"""Smallest width, in cells, in which a curve and a histogram fit side by side."""
_MAX_CHART_ROWS = 14
"""Largest number of rows of the curves. A taller terminal shows more nodes and notices."""
_LEAST_BAR = 8
"""Smallest width, in cells, that the progress bar of a version has."""
MAX_NOTICES = 6
"""Largest number of notices on the screen, so that the table of nodes has space."""

_LABEL_WIDTH = 9  # in cells, of the labels to the left of the status lines
_WRAPPER = Console(file=io.StringIO())
"""A console without output. rich needs a console to wrap text."""
_NO_VERSION = VersionStatus(version="-", done=1.0, num_nodes=0, num_complete=0)
_ROLE_ORDER = {"learner": 0, "relay": 1, "worker": 2}
_STATE_STYLES = {"lost": "bold red", "waiting": "yellow", "refused": "bold red"}
_NUMBER_COLUMNS = frozenset({
    "stale", "tok/s", "down/s", "up/s", "rtt", "mismatch", "reward", "leases", "errors", "$/h",
    "seen",
})  # fmt: skip
_DISPENSABLE_COLUMNS = (
    "seen", "$/h", "rtt", "parent", "errors", "up/s", "leases", "mismatch", "role", "reward",
    "down/s", "tok/s", "stale",
)  # fmt: skip
"""Columns that are left out, in this order, until the remaining columns fit."""
_OPTIONAL_COLUMNS = frozenset({"mismatch", "reward", "rtt", "errors", "$/h"})
"""Columns that are left out as long as no node has a value for them."""
_MAX_CELL_WIDTHS = {"node": 12, "parent": 12, "state": len("waiting for weights")}
"""If the space is too small, cells of these columns are cut to these widths."""


def header(snapshot: RunStatus, width: int) -> list[RenderableType]:
    """Return two rows. The first has the run's name, step and times, the second a progress bar."""
    name = Text.assemble(("echo ", "bold cyan"), (clean(snapshot.run_name), "bold"))
    if snapshot.state != "running":
        name.append(f" {snapshot.state}", "bold yellow")
    right = Text(f"step {snapshot.step}/{snapshot.max_steps}", "bold")
    for part in (
        f"{clock(snapshot.elapsed_s)} elapsed",
        f"ETA {'-' if snapshot.eta_s is None else clock(snapshot.eta_s)}",
    ):
        if right.cell_len + len(part) + 3 <= width - 8:
            right.append(f"   {part}", "default not bold")
    name.truncate(max(width - right.cell_len - 2, 0), overflow="ellipsis")
    gap = max(width - name.cell_len - right.cell_len, 1)
    title = Text.assemble(name, " " * gap, right)
    return [fit(title, width), _row(_progress(snapshot.step, snapshot.max_steps, width))]


def reward_chart(snapshot: RunStatus, width: int, height: int) -> list[Text]:
    """Return `height` rows that show the newest rewards, and curves of the rewards over the steps.

    With fewer than 4 rows, there are no curves.
    """
    rewards = snapshot.reward_history
    sampled_glyph, greedy_glyph = "●", "◆"
    title = Text.assemble(
        ("reward ", "bold"), (f"{rewards[-1][1]:.3g}" if rewards else "-", "bold cyan")
    )
    if snapshot.eval_history:
        step, sampled, greedy = snapshot.eval_history[-1]
        num_errors = snapshot.eval_errors.get(step, 0)
        if num_errors:
            title.append(f"   {counted(num_errors, 'reward')} failed", "bold red")
        parts = (
            (f"   {held_out(snapshot.evals_are_rates)}", "bold"),
            (f" {sampled_glyph} {sampled:.2f}", "green"),
            (" sampled", "green"),
            (f" {greedy_glyph} {greedy:.2f}", "magenta"),
            (" greedy", "magenta"),
            (f" at step {step}", "dim"),
        )
        # Take the longest title that fits; the last one has only numbers.
        short = ("   held-out", "bold")
        for wanted in (
            parts,
            parts[:-1],
            (parts[0], parts[1], parts[3]),
            (short, parts[1], parts[3]),
            (parts[1], parts[3]),
        ):
            if title.cell_len + sum(len(text) for text, _ in wanted) <= width:
                title.append_text(Text.assemble(*wanted))
                break
    if height < 4:
        return [fit(title, width)][:height]
    values = [reward for _, reward in rewards]
    values += [reward for _, *pair in snapshot.eval_history for reward in pair]
    plot = line_chart(
        [Curve(rewards, "cyan")],
        [
            Marks(
                [(step, sampled) for step, sampled, _ in snapshot.eval_history],
                "green",
                sampled_glyph,
            ),
            Marks(
                [(step, greedy) for step, _, greedy in snapshot.eval_history],
                "magenta",
                greedy_glyph,
            ),
        ],
        width=width,
        height=height - 1,
        x_range=(0, max(snapshot.step, 1)),
        y_range=value_range(values),
    )
    return [fit(title, width), *plot]


def bound_text(snapshot: RunStatus) -> str:
    """Return the staleness bound of new leases as text.

    After the bound was lowered, rollouts of earlier leases may arrive with a higher staleness.
    """
    now = "" if snapshot.staleness_bound is None else " now"
    return f"bound{now} {snapshot.bound}"


def staleness_bins(
    tokens: Mapping[int, int], max_staleness: int, max_bins: int, *, bound: int | None = None
) -> list[tuple[str, int, bool]]:
    """Return how many trained tokens have each staleness, in at most `max_bins` bins.

    Returns:
        For each bin from staleness 0 to max_staleness: (label, number of tokens, whether the bin
        contains `bound`, which is max_staleness by default). The learner should prevent tokens
        above max_staleness. If such tokens exist, an additional last bin contains them.
    """
    marked = max_staleness if bound is None else bound
    beyond = sum(count for staleness, count in tokens.items() if staleness > max_staleness)
    num_bins = max(max_bins - (beyond > 0), 1)
    per_bin = -(-(max_staleness + 1) // num_bins)
    bins = []
    for low in range(0, max_staleness + 1, per_bin):
        high = min(low + per_bin - 1, max_staleness)
        count = sum(tokens.get(staleness, 0) for staleness in range(low, high + 1))
        bins.append((str(low) if low == high else f"{low}-{high}", count, low <= marked <= high))
    if beyond:
        bins.append((f">{max_staleness}", beyond, False))
    return bins[-max_bins:]


def staleness_histogram(snapshot: RunStatus, width: int, height: int) -> list[RenderableType]:
    """Return at most `height` rows: the mean staleness of trained tokens, and a histogram.

    The histogram shows the share of the trained tokens that has each staleness.
    """
    tokens = snapshot.staleness_tokens
    total = sum(tokens.values())
    mean = sum(staleness * count for staleness, count in tokens.items()) / total if total else 0.0
    figure = f"{mean:.2f}" if total else "-"
    for name, of in (("staleness", "mean "), ("stale", "mean "), ("stale", "")):
        title = Text.assemble(
            (name, "bold"), f" {of if total else ''}{figure}, {bound_text(snapshot)}"
        )
        if title.cell_len <= width:
            break
    bins = staleness_bins(tokens, snapshot.max_staleness, max(height - 2, 1), bound=snapshot.bound)
    marked = [(label, count, "◂ bound" if is_bound else "") for label, count, is_bound in bins]
    return [fit(title, width), staleness_bars(marked, width)]


def staleness_bars(bins: Sequence[tuple[str, int, str]], width: int) -> Table:
    """Return a table that has a label, a bar, a share and a note for each bin."""
    counts = [count for _, count, _ in bins]
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    table.width = width
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    table.add_column(style="bold yellow", no_wrap=True)
    for label, count, note in bins:
        color = "red" if label.startswith(">") else "blue"
        filled = Bar(max(counts) or 1, 0, count, color=color)
        table.add_row(label, filled, _percent(count / (sum(counts) or 1)), note)
    return table


def status(snapshot: RunStatus, width: int, *, num_wait_rows: int) -> list[RenderableType]:
    """Return rows about the groups, about the weights and about the learner's wait.

    There are 2 + `num_wait_rows` rows. After the first timed step, one more row shows the learner's
    speed. If a machine has a price, one or two more rows show the costs and the last change of
    active workers.
    """
    flow = [
        f"{snapshot.num_buffered} buffered, {snapshot.groups_per_step} needed",
        f"{snapshot.num_leased} leased",
    ]
    if (last := snapshot.last_step) is not None:
        rate = f"{short_count(last.accepted_tokens_per_s)} tokens/s"
        flow += [rate] if last.useful_share is None else [rate, f"{last.useful_share:.0%} useful"]
        when = " in the last step"
        if _LABEL_WIDTH + len("   ".join(flow)) + len(when) <= width:
            flow[2] += when
    groups = _labelled("groups", "   ".join(flow))
    newest = snapshot.versions[0] if snapshot.versions else _NO_VERSION
    version = _labelled("weights", f"{clean(newest.version)} ")
    done = f" {newest.done:4.0%}   {format_bytes(snapshot.broadcast_bytes)} sent"
    space = width - version.cell_len - 1
    slowest, time_left = _slowest(newest.slowest)
    for more in (slowest, _older(snapshot.versions[1:]), _cadence(snapshot)):
        if more and len(done) + len(more) + 3 + _LEAST_BAR <= space:
            done += f"   {more}"
            if more == slowest and len(done) + len(time_left) + _LEAST_BAR <= space:
                done += time_left
    bar_width = max(min(space - len(done), 40), 4)
    weights = _row(version, _progress(newest.done, 1, bar_width), done)
    waiting = _waiting(snapshot, width, num_wait_rows)
    costs = [] if snapshot.cost is None else cost_rows(snapshot.cost, width)
    speed = [] if snapshot.speed is None else [fit(speed_row(snapshot.speed), width)]
    return [fit(groups, width), *speed, weights, *(fit(row, width) for row in waiting), *costs]


def _slowest(link: LinkStatus | None) -> tuple[str, str]:
    """Return a text about the slowest link of a broadcast, and a text about the remaining time.

    Both texts are empty if no node fetches the version.
    """
    if link is None:
        return "", ""
    rate = "?" if link.bytes_per_s is None else f"{format_bytes(link.bytes_per_s)}/s"
    left = "" if link.remaining_s is None else f", {clock(link.remaining_s)} left"
    return f"slowest {clean(link.parent)}>{clean(link.child)} {rate}", left


def _older(versions: Sequence[VersionStatus]) -> str:
    return ", ".join(f"{clean(each.version)} to {each.num_nodes} more" for each in versions)


def _cadence(snapshot: RunStatus) -> str:
    period = snapshot.publish_period
    return "a version per " + ("step" if period == 1 else f"{period} steps")


def speed_row(speed: SpeedStatus) -> Text:
    """Return a row that shows the learner's speed and how long the parts of a step take."""
    parts = [f"{short_count(speed.tokens_per_s)} tokens/s"]
    if speed.mfu is not None:
        parts.append(f"{speed.mfu:.0%} MFU")
    parts.append(f"peak {format_bytes(int(speed.peak_memory_bytes))}")
    passes, update = map(format_duration, (speed.forward_backward_s, speed.optimizer_s))
    parts.append(f"{passes} passes, {update} update")
    return _labelled("trainer", "   ".join(parts))


def cost_rows(cost: CostStatus, width: int) -> list[Text]:
    """Return a row about the costs, and a row about the last change of the active workers.

    The second row is missing before the first change.
    """
    parts = [f"${cost.per_h:.2f}/h"]
    total = f"${cost.total:.2f} so far"
    if cost.budget_per_run is not None:
        total += f" of ${cost.budget_per_run:.2f}"
    parts.append(total)
    if cost.per_million_tokens is not None:
        parts.append(f"${cost.per_million_tokens:.3g} per million accepted tokens")
    parts.append(f"{cost.num_active} active, {cost.num_standby} on standby")
    for amount, what in (
        (cost.standby_per_h, "for machines on standby"),
        (cost.unconfirmed_per_h, "for machines not known to be given back"),
    ):
        if amount:
            parts.append(f"${amount:.2f}/h {what}")
    # As many parts as fit, the total before its components.
    while len(parts) > 1 and len("   ".join(parts)) > width - _LABEL_WIDTH:
        parts.pop()
    rows = [_labelled("cost", "   ".join(parts))]
    if cost.decision:
        rows.append(_labelled("", clean(cost.decision), style="dim"))
    return [fit(row, width) for row in rows]


def node_table(nodes: Sequence[NodeStatus], width: int, height: int) -> list[Text]:
    """Return a table: a heading, a row for each node, and a row that counts the hidden nodes.

    The table has at most `height` rows. If columns do not fit, the least important columns are left
    out. If nodes do not fit, workers without problems are hidden first.
    """
    if not nodes or height < min(len(nodes) + 1, 3):
        return []
    ordered = sorted(nodes, key=node_order)
    hidden: list[NodeStatus] = []
    if len(ordered) + 1 > height:
        urgent = sorted(ordered, key=lambda node: (node.role == "worker", not _is_in_trouble(node)))
        kept = {id(node) for node in urgent[: height - 2]}
        hidden = [node for node in ordered if id(node) not in kept]
        ordered = [node for node in ordered if id(node) in kept]
    rows = node_rows(ordered, width)
    if hidden:
        words = [(clean(node.state).split() or ["-"])[0] for node in hidden]
        states = Counter(words)
        summary = ", ".join(f"{count} {state}" for state, count in states.most_common())
        rows.append(fit(Text(f"and {len(hidden)} more: {summary}", "dim"), width))
    return rows


def node_rows(nodes: Sequence[NodeStatus], width: int, *, selected: str = "") -> list[Text]:
    """Return a heading, and a row for each node in the given order.

    If columns do not fit, the least important columns are left out. The row of the node with the id
    `selected` is highlighted.
    """
    columns, gap = _fitting_columns(nodes, width)
    heading = gap.join(_align(column.name, column) for column in columns)
    rows = [fit(Text(heading, "dim"), width)]
    for index, node in enumerate(nodes):
        styles = {"state": _state_style(node), "node": "bold"}
        cells = [(_align(c.cells[index], c) + gap, styles.get(c.name, "")) for c in columns]
        row = fit(Text.assemble(*cells), width)
        if node.node_id == selected:
            row.stylize("reverse")
        rows.append(row)
    return rows


def refusals(refused: Mapping[str, int], width: int) -> list[Text]:
    """Return a row that shows, for each reason, how many groups were refused or dropped.

    The most frequent reason comes first. Without refused or dropped groups, there is no row.
    """
    counts = sorted(((n, reason) for reason, n in refused.items() if n), reverse=True)
    if not counts:
        return []
    text = "   ".join(f"{clean(reason)} {n}" for n, reason in counts)
    return [fit(_labelled("refused", text, style="yellow"), width)]


def notices(lines: Sequence[str], width: int) -> list[list[Text]]:
    """Return the rows of each notice. The oldest notice comes first.

    Notices are neither cut nor indented, because the reader may copy a command or a path from them.
    """
    found = []
    for line in lines:
        text = Text("· " + clean(line), "dim")
        rows = text.wrap(_WRAPPER, width, overflow="fold", no_wrap=False)
        found.append([fit(row, width) for row in rows])
    return found


def idle_shares(snapshot: RunStatus) -> str:
    """Return text with the share of time in which the learner waited, recently and in all."""
    return f"{snapshot.recent_idle_ratio:.0%} recently, {snapshot.idle_ratio:.0%} in all"


def _row(*parts: RenderableType) -> Table:
    """Return a row with all parts side by side, and a line break.

    A rich bar does not end with a line break.
    """
    row = Table.grid()
    for _ in parts:
        row.add_column(no_wrap=True)
    row.add_row(*parts)
    return row


def _progress(done: float, total: float, width: int) -> ProgressBar:
    return ProgressBar(total or 1, done, width, complete_style="cyan", finished_style="green")


def _percent(share: float) -> str:
    """Return a share as text of five characters. Even a small share is not shown as zero."""
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share:5.1%}" if share < 0.9995 else " 100%"


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((label.ljust(_LABEL_WIDTH), "dim"), (text, style))


def _waiting(snapshot: RunStatus, width: int, num_rows: int) -> list[Text]:
    state = f"waits for {clean(snapshot.waiting_for)}"
    if not snapshot.waiting_for:
        state = snapshot.activity or snapshot.state
        if snapshot.explanation:
            state += f"; advice from the last steps: {clean(snapshot.explanation)}"
    wrapped = textwrap.wrap(
        f"idle {idle_shares(snapshot)}   {state}",
        max(width - _LABEL_WIDTH, 20),
        max_lines=num_rows,
        placeholder=" ...",
    )
    style = "yellow" if snapshot.waiting_for else "green"
    rows = [_labelled("" if i else "learner", line, style) for i, line in enumerate(wrapped)]
    return rows + [Text()] * (num_rows - len(rows))


def node_order(node: NodeStatus) -> tuple[int, list[tuple[int, str]]]:
    """Return the sort key of a node: first the role, then the name. Numbers in names sort by value.

    So the node w2 is shown before w10.
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", node.node_id)
    # Numbers sort by their length first; leading zeros are not worth handling.
    return _ROLE_ORDER.get(node.role, 3), [(len(p) if p[0].isdigit() else 0, p) for p in parts]


def _is_in_trouble(node: NodeStatus) -> bool:
    return node.state.startswith(("lost", "refused", "waiting"))


def _state_style(node: NodeStatus) -> str:
    first_word = node.state.split(" ", 1)[0]
    return _STATE_STYLES.get(first_word, "green")


@dataclass(slots=True)
class _Column:
    name: str
    cells: list[str]
    width: int
    is_number: bool


def _align(cell: str, column: _Column) -> str:
    missing = " " * max(column.width - cell_len(cell), 0)
    if cell_len(cell) > column.width:
        return set_cell_size(cell, column.width - 1) + "…"
    return missing + cell if column.is_number else cell + missing


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _bytes(value: float) -> str:
    return format_bytes(value) if value >= 1 else "-"


def _fitting_columns(nodes: Sequence[NodeStatus], width: int) -> tuple[list[_Column], str]:
    """Return the columns that fit into `width`, and the text that separates columns."""
    content: dict[str, list[str]] = {
        "node": [node.node_id for node in nodes],
        "role": [node.role for node in nodes],
        "version": [node.version for node in nodes],
        "stale": ["-" if node.staleness is None else str(node.staleness) for node in nodes],
        "tok/s": [short_count(node.tokens_per_s) if node.tokens_per_s else "-" for node in nodes],
        "down/s": [_bytes(node.bytes_per_s) for node in nodes],
        "up/s": [_bytes(node.bytes_sent_per_s) for node in nodes],
        "rtt": ["-" if node.rtt_s is None else f"{1000 * node.rtt_s:.0f}ms" for node in nodes],
        "mismatch": [_number(node.mismatch_kl, ".2g") for node in nodes],
        "reward": [_number(node.reward, ".3f") for node in nodes],
        "leases": [str(node.num_leases) if node.num_leases else "-" for node in nodes],
        "errors": [short_count(node.num_errors) if node.num_errors else "-" for node in nodes],
        "$/h": [_number(node.price_per_h, ".2f") for node in nodes],
        "state": [node.state for node in nodes],
        "parent": [node.parent for node in nodes],
        "seen": ["-" if node.role == "learner" else f"{clock(node.seen_s)}" for node in nodes],
    }
    columns = []
    for name, raw in content.items():
        if name in _OPTIONAL_COLUMNS and set(raw) <= {"-"}:
            continue
        cells = [clean(cell) for cell in raw]
        natural = max(map(cell_len, [name, *cells]))
        limit = _MAX_CELL_WIDTHS.get(name, natural)
        columns.append(_Column(name, cells, min(natural, limit), name in _NUMBER_COLUMNS))
    gap = "  "
    for dropped in ("", "", *_DISPENSABLE_COLUMNS):
        columns = [column for column in columns if column.name != dropped]
        if sum(column.width for column in columns) + len(gap) * (len(columns) - 1) <= width:
            break
        gap = " "
    # The remaining width goes to the cut columns, the state before the names.
    spare = width - sum(column.width for column in columns) - len(gap) * (len(columns) - 1)
    for name in ("state", "node", "parent"):
        for column in columns:
            if column.name == name and spare > 0:
                extra = min(max(map(cell_len, column.cells)) - column.width, spare)
                column.width += max(extra, 0)
                spare -= max(extra, 0)
    return columns, gap


# --- the whole screen ----------------------------------------------------------------------------


def render_live(
    snapshot: RunStatus,
    width: int,
    *,
    height: int | None = None,
    has_chart: bool = True,
    table: Callable[[int, int], list[Text]] | None = None,
) -> Group:
    """Draw a snapshot. Return at most `height` rows, each exactly `width` cells wide.

    Args:
        snapshot: the status of the run.
        width: number of cells of each row.
        height: largest number of rows; None for no limit.
        has_chart: whether to show the curves.
        table: function that returns the table of nodes for a width and a height; None to use
            `node_table`.
    """
    width = max(width, 1)
    rows_left = height if height is not None else 2 + _MAX_CHART_ROWS + len(snapshot.nodes) + 20
    title = header(snapshot, width)
    num_wait_rows = 2 if width < 100 and rows_left >= 22 else 1
    state = status(snapshot, width, num_wait_rows=num_wait_rows)
    refused = refusals(snapshot.refused, width)
    shown = notices(snapshot.notices[-MAX_NOTICES:], width)
    rows_of_newest, rows_of_notices = len(shown[-1]) if shown else 0, sum(map(len, shown))
    # Least and most rows of each part, most important first; gaps come before larger parts.
    rows_left -= len(title) + len(state)
    num_nodes, num_heads = len(snapshot.nodes), 1 if table is None else 2
    wanted = {
        "chart": (6, _MAX_CHART_ROWS) if has_chart else (1, 1),
        "table": (min(num_nodes, 5) + num_heads, num_nodes + num_heads),
        "refused": (len(refused), len(refused)),
        "notices": (rows_of_newest, rows_of_notices),
        "gaps": (4 if refused or shown else 3,) * 2,
    }
    granted = _share_out(wanted, rows_left)
    make_table = table or partial(node_table, snapshot.nodes)
    rows_of_nodes = make_table(width, granted["table"])
    charts = _charts(snapshot, width, granted["chart"])
    foot = refused[: granted["refused"]] + _newest_whole(shown, granted["notices"])
    rows = _join([title, charts, state, rows_of_nodes, foot], granted["gaps"])
    return Group(*(rows if height is None else rows[:height]))


def _newest_whole(notices: list[list[Text]], num_rows: int) -> list[Text]:
    """Return the rows of the newest notices.

    Notices are included, from the newest to older ones, as long as they fit completely into
    `num_rows`. If even the newest notice does not fit, it is cut.
    """
    rows: list[Text] = []
    for notice in reversed(notices):
        if rows and len(rows) + len(notice) > num_rows:
            break
        rows = notice + rows
    return rows[:num_rows]


def _share_out(wanted: Mapping[str, tuple[int, int]], num_rows: int) -> dict[str, int]:
    """Return how many rows each part of the screen gets.

    First each part gets its smallest number of rows, in the order of `wanted`. Then table, notices
    and chart, in this order, get more rows, up to the largest number of each part.

    Args:
        wanted: (smallest, largest) number of rows of each part, most important part first.
        num_rows: number of rows to distribute.
    """
    granted = dict.fromkeys(wanted, 0)
    for name, limit in [
        *((name, least) for name, (least, _) in wanted.items()),
        *((name, wanted[name][1]) for name in ("table", "notices", "chart")),
    ]:
        extra = max(min(limit - granted[name], num_rows), 0)
        granted[name] += extra
        num_rows -= extra
    return granted


def _charts(snapshot: RunStatus, width: int, height: int) -> list[RenderableType]:
    """Return the reward curve.

    If the width allows it, the staleness histogram is beside the curve.
    """
    if width < _MIN_SIDE_BY_SIDE:
        return [*reward_chart(snapshot, width, height)]
    right_width = min(max(width * 3 // 10, 21), 44)
    left_width = width - right_width - 3
    beside = Table.grid(padding=(0, 3, 0, 0))
    for column_width in (left_width, right_width):
        beside.add_column(width=column_width)
    histogram = staleness_histogram(snapshot, right_width, height)
    beside.add_row(Group(*reward_chart(snapshot, left_width, height)), Group(*histogram[:height]))
    return [beside]


def _join(blocks: Iterable[Sequence[RenderableType]], num_gaps: int) -> list[RenderableType]:
    """Return the rows of all blocks. A blank row follows each of the first `num_gaps` blocks."""
    rows: list[RenderableType] = []
    for block in blocks:
        if block and rows and num_gaps > 0:
            rows.append(Text())
            num_gaps -= 1
        rows += block
    return rows
