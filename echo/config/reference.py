"""The reference of the configuration as Markdown, from the schema.

python -m echo.config.reference > docs/configuration.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import groupby

from echo.config.schema import Leaf, every_leaf, sections, show

_HEAD = """# Configuration

One TOML file serves all roles; `--set section.key=value` overrides a key of it. Durations take text
such as "30s", "5min" or "2h", sizes "8GiB" or "200MB". Every key is checked before anything starts,
all errors are told at once, and `--dry-run` prints each value with its source. Keys marked
(learner) are the learner's to decide: its workers take them over when they join.

This page is generated: `python -m echo.config.reference > docs/configuration.md`.
"""


def reference() -> str:
    """Return every key by section and kind, with its default, what it takes and what it means."""
    parts = [_HEAD]
    for (name, kinds), leaves in groupby(every_leaf(), lambda leaf: (_section(leaf), leaf.kinds)):
        if name:
            kind = "".join(kinds)
            summary = (sections()[name][kind].__doc__ or "").partition("\n")[0]
            heading = f"[{name}] kind = {show(kind)}" if kind else f"[{name}]"
            parts.append(f"\n## `{heading}`\n\n{summary}\n")
        parts.append("\n| key | default | takes | |\n|---|---|---|---|\n")
        parts += [_row(leaf) for leaf in leaves]
    return "".join(parts)


def default_text(leaf: Leaf) -> str:
    """Write one default, or one per profile; unset keys of all profiles as "unset"."""
    texts = {name: show(value) for name, value in leaf.defaults.items()}
    if leaf.path == ("profile",):
        return '"lan"'
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{text} ({name})" for name, text in texts.items())


def _section(leaf: Leaf) -> str:
    return leaf.path[0] if len(leaf.path) == 2 else ""


def _row(leaf: Leaf) -> str:
    is_kind = bool(leaf.kinds) and leaf.path[-1] == "kind"
    default = show(leaf.kinds[0]) if is_kind else default_text(leaf)
    takes = default if is_kind else leaf.expected
    help_text = "Chooses these keys." if is_kind else leaf.help
    mark = " (learner)" if leaf.is_inherited else ""
    return f"| `{leaf.path[-1]}`{mark} | {_cells((f'`{default}`', takes, help_text))} |\n"


def _cells(texts: Iterable[str]) -> str:
    return " | ".join(" ".join(text.split()).replace("|", "\\|") for text in texts)


if __name__ == "__main__":
    sys.stdout.write(reference())
