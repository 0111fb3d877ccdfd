from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.promises.plants import PLANTS
from tests.promises.world import World

MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    """Return a function that makes a world from numbers and sections of the configuration."""
    worlds: list[World] = []

    def make(**numbers: Any) -> World:
        worlds.append(World(tmp_path, **numbers))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture(autouse=True)
def _planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the product as the plant of a promise says, where one was asked for."""
    number = request.config.getoption("--plant")
    if number is not None:
        PLANTS[number](monkeypatch)
