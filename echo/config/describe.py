"""Text made from the schema and from a configuration: `--help` and `--dry-run`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from echo.config.leaves import Leaf, every_leaf, kinds_of, leaves, sections, show
from echo.config.memory import Budget
from echo.config.reference import default_text
from echo.config.schema import Config
from echo.config.section import Role
from echo.core.units import format_bytes, without_secrets

_WIDTH = 96


def schema_help(role: Role | None = None) -> str:
    """Return every key that `role` reads (None: all), with its values, default and meaning."""
    lines = [
        'Configuration keys (TOML). Durations take "30s", "5min", "2h"; sizes take "8GiB", "200MB".'
    ]
    for (name, kind), group in _by_section(every_leaf(), role).items():
        lines.append("")
        if name:
            summary = (sections()[name][kind].__doc__ or "").partition("\n")[0]
            heading = f"[{name}] kind = {show(kind)}" if kind else f"[{name}]"
            lines.append(f"{heading}  {summary}")
        for leaf in group:
            lines.append(f"  {leaf.path[-1]} = {default_text(leaf)}")
            text = f"{leaf.help} Takes {leaf.expected}."
            lines += textwrap.wrap(text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def dry_run_text(
    config: Config, role: Role, *, budget: Budget | None = None, notices: Iterable[str] = ()
) -> str:
    """Return what would start, its memory budget, and every setting with its source.

    Args:
        config: the configuration.
        role: what would start.
        budget: from `memory.memory_budget`; None leaves the line out.
        notices: shown before the settings.
    """
    lines = [f"would start: {_describe_start(config, role)}"]
    if budget is not None:
        lines.append(f"memory: {'' if budget.fits else 'DOES NOT FIT: '}{budget.line}")
    lines += [f"notice: {notice}" for notice in notices]
    lines.append(f'profile: "{config.profile}"')
    lines += ["", *resolved_lines(config, role)]
    return "\n".join(lines)


def resolved_lines(config: Config, role: Role | None = None) -> list[str]:
    """Return the configuration as TOML, each line with where its value came from."""
    lines: list[str] = []
    for (name, _), group in _by_section(leaves(kinds_of(config)).values(), role).items():
        if name:
            lines += ["", f"[{name}]"]
        for leaf in group:
            value = _value(config, leaf)
            notes = [config.sources.get(leaf.key, "")]
            if leaf.key.endswith("_bytes") and isinstance(value, int):
                notes.append(format_bytes(value))
            # TOML has no word for a missing value, and this text should load again.
            text = f"# {leaf.path[-1]}" if value is None else f"{leaf.path[-1]} = {show(value)}"
            notes += ["not set"] if value is None else []
            note = ", ".join(filter(None, notes))
            lines.append(f"{text:<56} # {note}" if note else text)
    return lines


def _by_section(keys: Iterable[Leaf], role: Role | None) -> dict[tuple[str, str], list[Leaf]]:
    """Return the keys that `role` reads by section and kind, "" for the top level."""
    groups: dict[tuple[str, str], list[Leaf]] = {}
    for leaf in keys:
        if role is None or role in leaf.roles:
            place = leaf.path[0] if len(leaf.path) == 2 else ""
            groups.setdefault((place, "".join(leaf.kinds)), []).append(leaf)
    return groups


def _value(config: Config, leaf: Leaf) -> object:
    value: object = config
    for part in leaf.path:
        value = getattr(value, part)
    return value


def _describe_start(config: Config, role: Role) -> str:
    if role == "learner":
        batch, period = config.batch, config.sync.publish_period
        rollouts = batch.groups_per_step * batch.group_size
        if period == "auto":
            cadence = f"auto, {config.sync.initial_publish_period} until measured"
        else:
            cadence = str(period)
        return (
            f"a learner of {config.model.name} on {config.learner.listen}, {config.run.max_steps} "
            f"steps of {rollouts} rollouts ({batch.groups_per_step} groups x {batch.group_size}) "
            f'of task "{config.task.kind}", staleness at most {config.sync.max_staleness}, '
            f"publish period {cadence}, into {config.run_dir}"
        )
    node = config.worker if role == "worker" else config.relay
    serves = f"serves on {node.listen}" if node.listen else "serves no weights to others"
    addresses = without_secrets(", then ".join(node.connect)) or "the address of its join string"
    return f"a {role} that connects to {addresses} and {serves}"
