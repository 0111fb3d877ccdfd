"""Ledgers from plain rows, as tests of their readers want them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from echo.records.ledger import AnyRecord, Ledger

DEFAULTS: dict[str, dict[str, Any]] = {
    "granted": {"attempt": 0, "worker": "w1"},
    "cancelled": {"attempt": 0, "worker": "w1", "tokens": 0},
    "refused": {"attempt": 0, "worker": "w1"},
    "accepted": {
        "attempt": 0, "worker": "w1", "versions": [[1, 0]], "version_tokens": [1], "tokens": 1,
        "rewards": [], "place": ["000001.bin", 0, 0, ""],
    },
    "trained": {"consumed_at": 0},
    "discarded": {"step": 0},
    "sealed": {"image_hash": ""},
}  # fmt: skip
"""Fields that a test may leave out, by kind."""


def records_of(rows: Iterable[dict[str, Any]]) -> list[AnyRecord]:
    """Return rows as records; an instant 0 is just after it, since the ledger takes 0 for none."""
    return [
        msgspec.convert(
            DEFAULTS.get(row["kind"], {})
            | row
            | ({"at": row["at"] or 1e-9} if "at" in row else {}),
            AnyRecord,
            strict=False,
        )
        for row in rows
    ]


def write_ledger(run_dir: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows behind those that a run's ledger has; each keeps its `at`, if it has one."""
    ledger = Ledger(run_dir, spool_bytes=1 << 20)
    for record in records_of(rows):
        ledger.append(record)
    ledger.close()
