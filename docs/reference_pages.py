"""References of configuration and of fleet files as Markdown, generated from their schemas.

python docs/reference_pages.py > docs/configuration.md
python docs/reference_pages.py fleet > docs/fleet-files.md
python docs/reference_pages.py names     (the table of docs/coming-from-other-frameworks.md)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby

from pydantic import BaseModel

from echo.config.fleet_schema import RelayRow, ScenarioFile, tables_of
from echo.config.other_names import names_table
from echo.config.schema import Leaf, default_text, every_leaf, expected_text, sections, show

_HEAD = """# Configuration

One TOML file serves all roles; `--set section.key=value` overrides a key of it. Durations take text
such as "30s", "5min" or "2h", sizes "8GiB" or "200MB". Every key is checked before anything starts,
all errors are told at once, and `--dry-run` prints each value with its source. Keys marked
(learner) are the learner's to decide: its workers take them over when they join.

This page is generated: `python docs/reference_pages.py > docs/configuration.md`.
"""

_FLEET_HEAD = """# Fleet and scenario files

A fleet file of [`echo-rl plan`](planning.md) has the tables up to `[[models]]`. A scenario of
[`echo-rl sim`](simulator.md) has the others, too, and `[activation]` as a
[configuration](configuration.md) has it. Double brackets are tables that repeat. Rates are in
Mbit/s, prices in $ per hour or per GB of 10^9 bytes, as marketplaces quote them.

This page is generated: `python docs/reference_pages.py fleet > docs/fleet-files.md`.
"""


def configuration_page() -> str:
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


def fleet_page() -> str:
    """Return every key of fleet and scenario files by table."""
    parts = [_FLEET_HEAD]
    for heading, kind in _tables():
        summary = (kind.__doc__ or "").partition("\n")[0]
        parts.append(f"\n## `{heading}`\n\n{summary}\n")
        parts.append("\n| key | default | takes | |\n|---|---|---|---|\n")
        fragments = kind.model_json_schema()["properties"]
        for name, field in kind.model_fields.items():
            if field.annotation in (RelayRow, RelayRow | None):
                continue  # a table of its own
            default = (
                "required"
                if field.is_required()
                else f"`{show(field.get_default(call_default_factory=True))}`"
            )
            takes = expected_text(fragments[name], name)
            cells = _cells((default, takes, field.description or ""))
            parts.append(f"| `{name}` | {cells} |\n")
    return "".join(parts)


def _tables() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, (table, is_list) in tables_of(ScenarioFile).items():
        if name == "activation":
            continue  # as in a run's configuration
        yield f"[[{name}]]" if is_list else f"[{name}]", table
        if name == "regions":
            yield "[regions.relay]", RelayRow


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
    PAGES = {"fleet": fleet_page, "names": names_table, "": configuration_page}
    sys.stdout.write(PAGES["".join(sys.argv[1:])]())
