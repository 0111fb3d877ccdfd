"""Nodes of a benchmark that do not come, and do not go, end it in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nodes import processes

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_learner_that_says_nothing_and_hears_nothing_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    monkeypatch.setattr(processes, "END_S", 0.1)
    names = ("steps", "tokens", "max_staleness", "group_size", "groups_per_step")
    settings: dict[str, Any] = dict.fromkeys((*names, "max_concurrent_rollouts", "dead_after_s"), 1)
    with pytest.raises(SystemExit, match="no learner that workers can join: it is silent"):
        processes.run_nodes(
            "deaf", tmp_path, [], lambda _: [], within_s=0.5, tree=tmp_path, **settings
        )
