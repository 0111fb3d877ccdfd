"""Pages and files outside docs/ that the site needs: a hook of mkdocs.

Where a repository is browsed `../bench/results/x.json` leads to the file, but a site ends at docs/.
So what pages link to is put into the site with its path in the repository, and links follow.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md")
LINK = re.compile(r"\]\(([^)#:\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/, and every file outside it that a page links to."""
    found = {ROOT / name for name in OUTSIDE}
    for page in [*found, *(ROOT / "docs").glob("*.md")]:
        links = LINK.findall(page.read_text(encoding="utf-8"))
        found |= {(page.parent / link).resolve() for link in links}
    for path in sorted(found):
        if path.is_file() and not path.is_relative_to(ROOT / "docs"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links into and out of docs/ lead to where these files are in the site."""
    is_outside = page.file.src_uri in OUTSIDE
    return re.sub(r"\]\(docs/" if is_outside else r"\]\(\.\./", "](", markdown)
