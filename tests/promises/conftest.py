from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.promises.plants import PLANTS
from tests.promises.world import World

if TYPE_CHECKING:
    from tests.promises.nodes import NodeWorld

MakeWorld = Callable[..., World]
MakeNodes = Callable[..., "NodeWorld"]


@pytest.fixture
def make_world(tmp_path: Path) -> MakeWorld:
    """Return a function that makes a world from the numbers of its configuration."""
    return lambda **numbers: World(tmp_path, **numbers)


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[MakeNodes]:
    """Return a function that makes a world of real nodes from numbers and configuration."""
    # Only here: it brings torch, which level R does without.
    from tests.promises.nodes import NodeWorld

    worlds: list[NodeWorld] = []

    def make(**numbers: Any) -> NodeWorld:
        worlds.append(NodeWorld(tmp_path, **numbers))
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
