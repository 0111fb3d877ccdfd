"""What the pages under docs/ tell must be true of this checkout."""

from __future__ import annotations

import re
from pathlib import Path

from echo.config.reference import reference
from echo.config.schema import find_leaf, sections

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_keys_beside_those_of_other_frameworks_exist() -> None:
    page = (DOCS / "coming-from-other-frameworks.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    ours = [key for row in rows for key in re.findall(r"`([a-z_]+\.[a-z_0-9]+)", row[-2])]
    assert len(ours) > 40
    assert [key for key in ours if find_leaf(tuple(key.split("."))) is None] == []
    assert {key.partition(".")[0] for key in ours} <= sections().keys()


def test_the_reference_of_the_configuration_is_that_of_the_schema() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "python -m echo.config.reference > docs/configuration.md"
