"""Swarm of bench/: the same bytes everywhere, nothing asked for twice, whoever dies meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.chunk_sets import Rarity, indices, runs_of, set_of
from swarm.messages import Want, message_of
from swarm.paper import PaperFleet, random_image
from swarm.protocol import ItemArrived, Swarm

from echo.core.errors import RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.weights.store import EncodedVersion, ItemStore, Transfer
from echo.wire.actions import Send
from echo.wire.messages import FULL, Chunk, Form, Segment
from tests.weights.encoded_versions import coded, v

CHUNK = 1 << 10
SIZE = 24 * CHUNK - 100


# --- sets of chunks -------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 300)))
def test_runs_name_a_set(chunks: set[int]) -> None:
    bits = sum(1 << index for index in chunks)
    assert set(indices(bits)) == chunks
    assert set_of(runs_of(bits)) == bits


@pytest.mark.parametrize("runs", [(1,), (2, 2), (3, 1), (0, 4, 2, 6)])
def test_runs_that_are_no_ascending_pairs_are_refused(runs: tuple[int, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match="ascending"):
        set_of(runs)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 255)), max_size=20))
def test_the_rarest_have_the_fewest_holders(told: list[tuple[int, int]]) -> None:
    rarity, theirs = Rarity(), [0] * 5
    for holder, bits in told:
        if theirs[holder] & bits:  # it leaves
            rarity.remove(theirs[holder])
            theirs[holder] = 0
        else:
            rarity.add(bits)
            theirs[holder] |= bits
    copies = Counter(index for bits in theirs for index in indices(bits))
    among = sum(1 << index for index in copies)
    rarest = set(indices(rarity.rarest(among))) if among else set()
    assert rarest == {index for index, count in copies.items() if count == min(copies.values())}


def test_what_was_not_offered_is_refused() -> None:
    signed, image = random_image(9, SIZE, CHUNK)
    item, num_chunks = (signed[1].version, FULL), signed[1].num_chunks
    has_chunk = bytearray(b"\1" * 3) + bytearray(num_chunks - 3)
    store = ItemStore()
    store.images[item[0]] = Transfer(*signed, bytearray(image), has_chunk, 3)
    swarm = Swarm(store, node_id="here")
    swarm.want(item, now=0.0)
    swarm.meet("a", "a", "a/bulk", now=0.0)
    wanted = Want(version=item[0], form=FULL, number=0, chunks=(5,))
    with pytest.raises(RemoteProtocolError, match="not offered"):
        swarm.receive("a", wanted, [], now=0.0)


# --- whole fleets ---------------------------------------------------------------------------------


def image_at(fleet: Any, name: str, step: int) -> bytes:
    return bytes(fleet.nodes[name].store.images[PolicyVersion(1, step)].storage)


def rates_of(chance: random.Random, count: int) -> list[float]:
    """Return uplinks of a source and some receivers, some of which cannot serve."""
    rates = [chance.choice([0.0, 2e3, 2e4, 1e5]) for _ in range(count)]
    return [chance.choice([2e4, 1e5]), *rates]


@given(st.integers(0, 10**6))
@pytest.mark.slow
def test_every_node_gets_the_same_bytes(seed: int) -> None:
    chance = random.Random(seed)
    fleet = PaperFleet(rates_of(chance, 5), seed=seed, latency_s=chance.choice([0.001, 0.05]))
    fleet.deliver(1, SIZE, CHUNK)
    right = bytes(random_image(1, SIZE, CHUNK)[1])
    for node in fleet.nodes.values():
        assert image_at(fleet, node.name, 1) == right


def test_it_reaches_those_who_are_no_neighbours_of_the_source() -> None:
    fleet = PaperFleet([5e4] * 9, degree=2, seed=3)
    fleet.deliver(1, SIZE, CHUNK)
    right = bytes(random_image(1, SIZE, CHUNK)[1])
    assert all(image_at(fleet, name, 1) == right for name in fleet.nodes)


def test_no_chunk_that_is_held_is_asked_for_again() -> None:
    fleet = PaperFleet([5e4] * 6, seed=3)
    item_id = fleet.publish(1, SIZE, CHUNK)
    seen = 0
    others = [node for node in fleet.nodes.values() if node.name != "n0"]
    while not all(item_id in node.arrived for node in others):
        before = {node.name: len(node.asked) for node in others}
        held = {
            node.name: bytes(node.store.images[item_id[0]].has_chunk)
            for node in others
            if item_id[0] in node.store.images
        }
        fleet.step()
        for node in others:
            for _, told in node.asked[before[node.name] :]:
                if isinstance(told, Want):
                    seen += len(told.chunks)
                    assert not any(held[node.name][index] for index in told.chunks)
    assert seen >= 5 * 24


@pytest.mark.parametrize("is_seen", [True, False], ids=["killed", "black-holed"])
@pytest.mark.slow
def test_a_node_that_dies_in_mid_transfer_costs_little(is_seen: bool) -> None:
    whole = PaperFleet([4e4] * 8, seed=5).deliver(1, 4 * SIZE, CHUNK)
    fleet = PaperFleet([4e4] * 8, seed=5)
    fleet.at(whole / 2, lambda: fleet.kill("n3", is_seen=is_seen))
    took = fleet.deliver(1, 4 * SIZE, CHUNK)
    right = bytes(random_image(1, 4 * SIZE, CHUNK)[1])
    for name in set(fleet.nodes) - {"n3"}:
        assert image_at(fleet, name, 1) == right
    # An eighth of the uplinks is gone for half of the time.
    assert took < whole * 1.15 + 1.0


@pytest.mark.slow
def test_it_fills_the_uplinks_with_few_duplicates_and_little_control() -> None:
    fleet = PaperFleet([8e4, *[2e4] * 5, *[0.0] * 2], seed=7)
    num_bytes = 8 * SIZE
    seconds = fleet.deliver(1, num_bytes, CHUNK)
    assert num_bytes / (1.8e5 / 7) / seconds > 0.8  # (8 + 5 * 2) / 7 is what each may get
    duplicates = sum(node.swarm.num_duplicate_chunks for node in fleet.nodes.values())
    assert duplicates <= 0.03 * 7 * num_bytes / CHUNK
    control = sum(node.control_bytes for node in fleet.nodes.values())
    # For chunks of 256 KiB instead of these of 1 KiB.
    assert control * CHUNK / (256 << 10) < 0.004 * 7 * num_bytes


def test_wrong_chunks_are_never_held_and_their_sender_is_left() -> None:
    fleet = PaperFleet([4e4] * 4, seed=1)
    fleet.corrupt = lambda name, data: bytes(len(data)) if name == "n2" else data
    fleet.deliver(1, SIZE, CHUNK)
    right = bytes(random_image(1, SIZE, CHUNK)[1])
    assert all(image_at(fleet, name, 1) == right for name in fleet.nodes)
    assert {each.peer for each in fleet.failed} == {"n2"}


def test_an_open_item_spreads_as_its_tables_become_known() -> None:
    pieces = coded(2, 1, blocks_per_segment=1)
    item_id = v(2), Form("delta", v(1))
    source, receiver = ItemStore(), ItemStore()
    here, there = Swarm(source, node_id="s"), Swarm(receiver, node_id="r")
    here.meet("r", "r", "r/bulk", now=0.0)
    there.meet("s", "s", "s/bulk", now=0.0)
    open_item = source.encoded_versions[item_id] = EncodedVersion(*item_id)
    fetched = receiver.encoded_versions[item_id] = EncodedVersion(*item_id)
    arrived: list[Any] = []

    def settle(first: list[Any], *, of: Any) -> None:
        queue = [(of, action) for action in first]
        while queue:
            swarm, action = queue.pop(0)
            if isinstance(action, ItemArrived):
                arrived.append(action.item_id)
            if not isinstance(action, Send):
                continue
            other = there if swarm is here else here
            message = message_of(action.frames)
            payload = [bytes(each) for each in action.frames[1:]]
            if isinstance(message, Segment):
                table = pieces[message.index][0]
                if message.index == fetched.num_segments:
                    fetched.add(table, payload[0])
                    queue += [(other, each) for each in other.extend(item_id, now=0.1)]
                continue
            sender = "s" if swarm is here else "r"
            queue += [(other, one) for one in other.receive(sender, message, payload, now=0.1)]
            if isinstance(message, Chunk):
                queue += [(swarm, one) for one in swarm.left(action.peer, 0, now=0.1)]

    settle(here.publish(item_id, now=0.0), of=here)
    settle(there.want(item_id, now=0.0), of=there)
    for table, frame, payload in pieces:
        assert not fetched.is_complete
        open_item.add(table, frame, memoryview(payload))
        settle(here.extend(item_id, now=0.1), of=here)
        assert fetched.num_held == fetched.num_chunks == open_item.num_chunks
    assert item_id in arrived
