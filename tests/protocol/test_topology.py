from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo.protocol.topology import Site, plan_parents

LEARNER = ("learner", "tcp://l:1")


def plan(*sites: Site) -> dict[str, list[str]]:
    parents = plan_parents(sites, learner_address="tcp://l:1")
    return {name: [node_id for node_id, _ in chosen] for name, chosen in parents.items()}


def relay(name: str) -> Site:
    return Site(name, "relay", f"tcp://{name}:1")


def worker(name: str, *, listens: bool = False) -> Site:
    return Site(name, "worker", f"tcp://{name}:1" if listens else None)


def test_without_anybody_who_listens_the_learner_serves_all() -> None:
    assert plan(worker("w1"), worker("w2")) == {"w1": ["learner"], "w2": ["learner"]}


def test_relays_come_first_then_workers_that_listen_then_the_others() -> None:
    found = plan(worker("w1", listens=True), worker("w2"), relay("r1"))
    assert found == {
        "r1": ["learner"],
        "w1": ["r1", "learner"],
        "w2": ["w1", "r1", "learner"],
    }


def test_leaves_are_dealt_round_robin_from_the_end() -> None:
    found = plan(relay("r1"), relay("r2"), worker("w1"), worker("w2"), worker("w3"))
    assert [found[name][0] for name in ("w1", "w2", "w3")] == ["r2", "r1", "r2"]


def test_addresses_go_with_the_names() -> None:
    parents = plan_parents([relay("r1"), worker("w1")], learner_address="")
    assert parents["w1"] == (("r1", "tcp://r1:1"), ("learner", ""))


@given(st.lists(st.tuples(st.sampled_from(["relay", "worker"]), st.booleans()), max_size=12))
def test_every_plan_is_a_tree_that_hangs_from_the_learner(kinds: list[tuple[str, bool]]) -> None:
    sites = [
        Site(f"n{i}", role, f"tcp://n{i}:1" if listens else None)
        for i, (role, listens) in enumerate(kinds)
    ]
    address_of = {site.node_id: site.address for site in sites} | {LEARNER[0]: LEARNER[1]}
    parents = plan_parents(sites, learner_address=LEARNER[1])
    assert parents.keys() == {site.node_id for site in sites}
    for name, chosen in parents.items():
        assert chosen[-1] == LEARNER
        assert len({node_id for node_id, _ in chosen}) == len(chosen)
        assert all(address_of[node_id] == address for node_id, address in chosen)
        # Whichever parents are chosen, no circle can arise.
        for node_id, _ in chosen[:-1]:
            assert name not in {above for above, _ in parents[node_id]}
            assert len(parents[node_id]) < len(chosen)
    at_the_root = [name for name, chosen in parents.items() if chosen[0] == LEARNER]
    if any(site.address for site in sites):
        assert len(at_the_root) == 1
