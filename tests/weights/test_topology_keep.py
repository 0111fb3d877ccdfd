from __future__ import annotations

from echo.weights.topology.plan import Parents, patched, with_backups
from echo.weights.topology.sites import Site
from tests.weights.fleets import MBIT, fleet_of, site

NODES = [site(f"n{i}", 200) for i in range(1, 8)]
#        1 .. 7 in a line, two of them as leaves of n5
TREE = [-1, 0, 1, 2, 3, 4, 5, 5]


def parents_of(nodes: list[Site], tree: list[int]) -> Parents:
    return with_backups(fleet_of(nodes), [tree], previous={})


def patch(nodes: list[Site], rate: float = 100 * MBIT) -> list[str] | None:
    fleet = fleet_of(nodes)
    trees = patched(fleet, parents_of(NODES, TREE), num_stripes=1, rate_bytes_per_s=rate)
    return None if trees is None else [fleet.names[i] if i >= 0 else "-" for i in trees[0]]


def test_a_newcomer_goes_where_there_is_room_nearest_to_the_learner() -> None:
    found = patch([*NODES, site("new")])
    assert found is not None
    assert found[-1] == "n1"


def test_without_room_it_goes_where_most_is_left() -> None:
    found = patch([*NODES, site("new")], rate=1000 * MBIT)
    assert found is not None
    assert found[-1] == "learner"


def test_the_place_of_the_first_node_is_taken_over() -> None:
    found = patch([s for s in NODES if s.node_id != "n1"])
    assert found is not None
    assert found[1] == "learner"


def test_too_many_changes_are_not_patched() -> None:
    assert patch([*NODES, *(site(f"x{i}") for i in range(4))]) is None
