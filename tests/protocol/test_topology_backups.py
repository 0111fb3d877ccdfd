from __future__ import annotations

from echo.weights.topology.plan import MAX_PARENTS, with_backups
from tests.protocol.fleets import fleet_of, site

#            learner
#            1     2
#          3   4   5
#        6   7
TREE = [-1, 0, 0, 1, 1, 2, 3, 3]


def names(num_nodes: int, tree: list[int]) -> dict[str, list[str]]:
    fleet = fleet_of([site(f"n{i}") for i in range(1, num_nodes + 1)])
    found = with_backups(fleet, [tree], previous={})
    return {name: [node_id for node_id, _ in lists[0]] for name, lists in found.items()}


def test_parent_first_then_a_stand_in_that_differs_between_siblings() -> None:
    found = names(7, TREE)
    assert found["n1"] == ["learner"]
    assert found["n3"] == ["n1", "n2", "learner"]
    assert found["n6"][0] == found["n7"][0] == "n3"
    assert found["n6"][1] == "n1"
    assert found["n7"][1] in ("n4", "n5")
    assert found["n7"][-2:] == ["n1", "learner"]


def test_lists_are_bounded() -> None:
    found = names(20, [-1, *range(20)])
    assert max(map(len, found.values())) == MAX_PARENTS
    assert found["n20"] == ["n19", "n18", "n17", "n16", "n15", "learner"]


def test_a_list_that_still_serves_is_kept() -> None:
    nodes = [site(f"n{i}") for i in range(1, 8)]
    fleet = fleet_of(nodes)
    other = with_backups(fleet, [TREE], previous={})
    hop = {name: (name, f"tcp://{name}:1") for name in fleet.names}
    learner = ("learner", "tcp://l:1")
    mine = ((hop["n3"], hop["n5"], learner),)
    assert with_backups(fleet, [TREE], previous={**other, "n6": mine})["n6"] == mine
    # Not one that names a node as far from the learner as itself, or at an old address.
    for bad in ((hop["n3"], hop["n7"], learner), (hop["n3"], ("n5", "tcp://old:1"), learner)):
        assert with_backups(fleet, [TREE], previous={**other, "n6": (bad,)}) == other
