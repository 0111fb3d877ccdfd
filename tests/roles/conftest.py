from __future__ import annotations

import math

import pytest

from tests.promises.conftest import MakeWorld, make_world  # noqa: F401 -- a fixture
from tests.promises.world import World


@pytest.fixture
def hung_world(make_world: MakeWorld) -> World:  # noqa: F811
    """Return a world whose only worker w1 holds the groups 0 and 1 in an engine that hangs."""
    world = make_world(sampling={"max_completion_tokens": 16}, leases={"hedge_factor": False})
    world.learner()
    world.worker("w1", sample_s=math.inf)
    world.run_until(lambda: world.sampling("w1") == {0, 1})
    return world
