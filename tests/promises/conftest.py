from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.promises.plants import PLANTS
from tests.promises.world import World

MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(tmp_path: Path) -> MakeWorld:
    """Return a function that makes a world from the numbers of its configuration."""
    return lambda **numbers: World(tmp_path, **numbers)


@pytest.fixture(autouse=True)
def _planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the product as the plant of a promise says, where one was asked for."""
    number = request.config.getoption("--plant")
    if number is not None:
        PLANTS[number](monkeypatch)
