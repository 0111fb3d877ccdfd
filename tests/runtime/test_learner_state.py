"""What a learner's configuration says of groups that grow old."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo.runtime.learner.resume import trims_stale
from echo.sim.network import Network
from tests.runtime.harness import Run


@pytest.mark.parametrize(
    ("max_staleness", "stale_tokens", "expected"),
    [(2, "keep", True), (2, "mask", True), (2, "drop", False), (0, "keep", False)],
)
def test_a_group_keeps_its_younger_tokens_where_those_are_of_use(
    tmp_path: Path, max_staleness: int, stale_tokens: str, expected: bool
) -> None:
    run = Run(tmp_path, tmp_path / "model", Network())
    config = run.config(
        "learner",
        sync={"max_staleness": max_staleness},
        rollout={"stale_tokens": stale_tokens},
    )
    assert trims_stale(config) is expected
