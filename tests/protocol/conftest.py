from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.harness import Run


@pytest.fixture
def hanging_run(tmp_path: Path) -> Run:
    """A run whose only worker w1 holds the groups 0, 1 and 2 in an engine that hangs."""
    run = Run(tmp_path)
    run.start_learner()
    worker = run.start_worker("w1")
    worker.on_action.__self__.is_hung = True
    run.world.run(3.0)
    assert len(worker.session.partials) == 3
    return run


@pytest.fixture
def hung_run(hanging_run: Run) -> Run:
    """The same, where it never begins one of them."""
    partials = hanging_run.world.process("w1").session.partials
    partials.queue[0, 0] = partials.running.pop((0, 0)).lease
    assert sorted(group_id for group_id, _ in partials.queue) == [0, 1, 2]
    return hanging_run
