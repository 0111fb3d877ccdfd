"""Relays between a worker and its learner that change, forge and replay: on virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from echo.roles.joining import sign_answer
from echo.roles.members import RunEnded
from echo.wire.codec import (
    decode_envelope,
    decode_group,
    decode_message,
    encode,
    encode_group,
)
from echo.wire.messages import (
    LEARNER_ID,
    Ack,
    Deliver,
    Failed,
    Finish,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    Message,
    NodeStats,
    Partial,
    Pulse,
    Reclaim,
    Refuse,
    TopologyPlan,
    Welcome,
)
from tests.promises.conftest import MakeWorld
from tests.promises.world import FOREIGN_KEY, World
from tests.roles.harness import make_lease

Change = Callable[[Message, list[Any]], list[Any] | None]
"""(message, frames) -> the frames to pass on in their place, None for none."""


def fleet(make_world: MakeWorld, *, via: tuple[str, ...] = ("r1",), **sections: Any) -> World:
    """Start a learner, a relay, and w1 behind it."""
    world = make_world(**sections)
    world.learner()
    world.relay()
    world.worker("w1", via=via)
    world.run_until(lambda: world.trained())
    return world


def corrupt(world: World, change: Change) -> None:
    """Let r1 change what it passes on."""
    relay = world.node("r1").role
    forward = relay.forward

    def changed(peer: str, envelope: Any, frames: list[Any]) -> Any:
        passed = change(decode_message(envelope), frames)
        return [] if passed is None else forward(peer, decode_envelope(passed), passed)

    relay.forward = changed


def say(world: World, message: Message, target: str = "w1") -> None:
    """Have r1 say something in the learner's name to w1, or in w1's to the learner."""
    relay = world.node("r1").role
    if target == LEARNER_ID:
        frames = encode(message, source="w1", target=LEARNER_ID)
        world.perform("r1", relay.forward("in99", decode_envelope(frames), frames))
        return
    frames = encode(message, source=LEARNER_ID, target=target)
    world.perform("r1", relay.forward(relay.control.peer, decode_envelope(frames), frames))


@pytest.mark.slow
def test_a_relay_cannot_change_a_reward_and_the_group_is_granted_again(
    make_world: MakeWorld,
) -> None:
    world = fleet(make_world, network={"lease_timeout_s": 5.0})

    def flatter(message: Message, frames: list[Any]) -> list[Any]:
        if not isinstance(message, Deliver):
            return frames
        group = decode_group(*frames[1:])
        rollouts = tuple(dataclasses.replace(each, reward=1.0) for each in group.rollouts)
        return [frames[0], *encode_group(dataclasses.replace(group, rollouts=rollouts))]

    corrupt(world, flatter)
    world.run(1.0)
    held, stored = world.leased("w1"), set(world.stored())
    assert held
    world.worker("w2")
    world.run_until(lambda: held <= set(world.stored()), within_s=40.0)
    assert world.num_stored("w1", of=set(world.stored()) - stored) == 0
    assert world.count("learner", "refused/forged") > 0
    [note] = world.notes_of("refused a Deliver")[:1]
    assert note == (
        "refused a Deliver under the name of w1: its seal is wrong: changed or forged; it came "
        "over the link of r1"
    )
    world.audit()


def test_a_worker_keeps_a_group_whose_ack_is_forged(make_world: MakeWorld) -> None:
    world = fleet(make_world)
    lost = world.drop("Deliver", source="w1")
    world.run_until(lambda: lost)
    kept = world.undelivered("w1")
    for group, attempt in world.node("w1").role.outbox.keys:
        say(world, Ack(group_id=group, attempt=attempt, outcome="accepted"))
    world.run(0.1)
    assert world.undelivered("w1") >= kept > 0
    assert world.count("w1", "refused/forged") >= kept
    assert any("refused a message from r1: a Ack of the learner's" in n for n in world.notes("w1"))
    world.stop_dropping()
    world.run_until(lambda: world.undelivered("w1") == 0)


def forged_ends(world: World) -> list[Message]:
    """Return ends of the run for w1 that the learner has not stated."""
    joining = world.node("w1").role.joining
    finish = Finish(reason="over", answers=joining.hello_hash)
    refuse = Refuse(reason="no", detail="no", answers=joining.hello_hash)
    public_key = FOREIGN_KEY.public_key().public_bytes_raw()
    signed = (
        sign_answer(replace(finish, public_key=public_key), FOREIGN_KEY),
        sign_answer(replace(refuse, public_key=public_key), FOREIGN_KEY),
    )
    return [Finish(reason="over"), finish, refuse, *signed]


def test_no_order_of_the_learner_can_be_forged(make_world: MakeWorld) -> None:
    """Neither the end of the run nor a lease, and no plan that strikes out other parents."""
    world = fleet(make_world)
    forged = [
        *forged_ends(world),
        Grant(leases=(make_lease(900),)),
        Reclaim(leases=((0, 0),), is_begun_too=True),
        TopologyPlan(epoch=99, parents=(("r1", "tcp://r1:7700"),)),
        TopologyPlan(epoch=99, parents=()),
        Pulse(step=9, newest=None),
    ]
    for number, message in enumerate(forged, start=1):
        say(world, message)
        world.run(0.03)
        assert world.count("w1", "refused/forged") == number, message
    assert (900, 0) not in world.node("w1").role.held
    step = world.step
    world.run_until(lambda: world.step > step + 2)
    assert world.is_admitted("w1")


def test_nothing_can_be_said_in_a_nodes_name(make_world: MakeWorld) -> None:
    world = fleet(make_world)
    world.hang_engine("w1")
    world.run(1.0)
    held = world.leased("w1")
    forged = [
        Goodbye(reason="forged"),
        Partial(group_id=0, attempt=0),
        Heartbeat(installed=None, capacity=0, leases=(), stats=NodeStats()),
        *(Failed(group_id=each, attempt=0, reason="lost", detail="") for each in held),
    ]
    for number, message in enumerate(forged, start=1):
        say(world, message, LEARNER_ID)
        world.run(0.03)
        assert world.count("learner", "refused/forged") == number, message
    assert world.is_admitted("w1")
    assert world.leased("w1") == held


def test_what_was_sealed_is_taken_once(make_world: MakeWorld) -> None:
    world = fleet(make_world)
    corrupt(world, lambda message, frames: frames)
    relay, passed = world.node("r1").role, list[Any]()
    forward = relay.forward

    def recorded(peer: str, envelope: Any, frames: list[Any]) -> Any:
        if isinstance(decode_message(envelope), Ack | Deliver):
            passed.append((peer, envelope, list(frames)))
        return forward(peer, envelope, frames)

    relay.forward = recorded
    world.run(2.0)
    relay.forward = forward
    kinds = {type(decode_message(envelope)) for _, envelope, _ in passed}
    assert kinds == {Ack, Deliver}
    before = len(world.stored())
    for each in passed:
        world.perform("r1", forward(*each))
    world.run(0.05)
    forged = world.count("w1", "refused/forged") + world.count("learner", "refused/forged")
    assert forged == len(passed)
    assert len(world.stored()) <= before + 2
    world.audit()


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_finish_of_before_a_resume_ends_nobody_after_it(
    make_world: MakeWorld, *, is_admitted: bool
) -> None:
    world = fleet(make_world)
    relay, kept = world.node("r1").role, list[Any]()
    forward = relay.forward

    def keep_back(peer: str, envelope: Any, frames: list[Any]) -> Any:
        if isinstance(decode_message(envelope), Finish | Ack):
            kept.append((envelope, list(frames)))
            return []
        return forward(peer, envelope, frames)

    relay.forward = keep_back
    world.report("learner", RunEnded("all steps are made"))
    world.run(1.0)
    world.kill("learner")
    relay.forward = forward
    world.learner()
    roster = world.node("learner").role.roster
    world.drop("Ack", source="learner")
    if is_admitted:
        world.run_until(lambda: {m.node_id for m in roster.members()} == {"w1", "r1"})
        world.run(0.1)  # w1 has received that it is admitted: until then its old channel counts
    else:
        seals = world.node("w1").role.joining.seals
        world.run_until(lambda: seals.offered is not None)
    kinds = {type(decode_message(envelope)) for envelope, _ in kept}
    assert kinds == {Ack, Finish}
    held = world.undelivered("w1")
    if not is_admitted:
        kept = [each for each in kept if isinstance(decode_message(each[0]), Finish)]
    for envelope, frames in kept:
        world.perform("r1", forward(relay.control.peer, envelope, frames))
    world.run(0.05)
    assert world.count("w1", "dropped/other_channel") >= len(kept)
    assert world.count("w1", "refused/forged") == 0
    assert world.undelivered("w1") >= held > 0
    world.stop_dropping()
    step = world.step
    world.run_until(lambda: world.step > step + 2)
    assert world.is_admitted("w1")
    world.audit()


def test_a_hello_with_a_key_of_the_relays_brings_nobody_in(make_world: MakeWorld) -> None:
    """The node finds the learner another way; over this one it would be heard by nobody."""
    world = make_world()
    world.learner()
    world.relay()
    world.run(1.0)
    theirs = world.node("r1").role.settings.seal_keys.seal_key()

    def put_own_key(message: Message, frames: list[Any]) -> list[Any]:
        if not isinstance(message, Hello):
            return frames
        return encode(replace(message, seal_key=theirs), source="w1", target=LEARNER_ID)

    corrupt(world, put_own_key)
    world.worker("w1", via=["r1", "learner"])
    world.run(3.0)
    assert not world.is_admitted("w1")
    took_s = world.run_until(lambda: world.is_admitted("w1"), within_s=20.0)
    assert took_s < 10.0


@pytest.mark.slow
def test_honest_ways_blame_nobody(make_world: MakeWorld) -> None:
    """Relays die, the learner is resumed, links are cut, messages are lost."""
    world = fleet(make_world, via=("r1", "learner"), loss=0.02, network={"dead_after_s": 2.0})
    world.worker("w2")
    events: list[Callable[[], object]] = [
        lambda: world.kill("r1"),
        lambda: world.relay(),
        lambda: world.kill("learner"),
        lambda: world.learner(),
        lambda: world.cut("w1", "learner"),
        lambda: world.mend("w1", "learner"),
        lambda: world.kill("w2"),
        lambda: world.worker("w2"),
    ]
    for event in events:
        event()
        world.run(3.0)
    step = world.step
    world.run_until(lambda: world.step > step + 2)
    for name in ("learner", "r1", "w1", "w2"):
        assert world.count(name, "refused/forged") == 0, name
    assert world.is_admitted("w1")
    assert world.is_admitted("w2")
    world.audit()


def test_a_replayed_hello_neither_moves_a_node_nor_ends_its_channel(
    make_world: MakeWorld,
) -> None:
    world = fleet(make_world, via=("learner",))
    role = world.node("learner").role
    hello = world.node("w1").role.joining.hello
    before = world.peer_of("w1")
    for message in (hello, replace(hello, nonce=b"old")):
        frames = encode(message, source="w1", target=LEARNER_ID)
        role.receive(world.peer_of("r1"), frames, now=world.now)
        assert world.peer_of("w1") == before
    step = world.step
    world.run_until(lambda: world.step > step + 2)
    assert world.count("learner", "refused/forged") == 0
    assert world.count("learner", "dropped/other_channel") == 0


@pytest.mark.parametrize("what", ["protocol", "signature"])
def test_a_relay_that_refuses_in_the_learners_name_is_left_for_the_learner(
    make_world: MakeWorld, what: str
) -> None:
    world = make_world()
    world.learner()
    world.relay()
    world.run(1.0)

    def refuse(message: Message, frames: list[Any]) -> list[Any]:
        envelope = decode_envelope(frames)
        if not isinstance(message, Welcome):
            return frames
        if what == "signature":
            made = replace(message, settings={})
            return encode(made, source=LEARNER_ID, target=envelope.target)
        return [msgspec.msgpack.encode(replace(envelope, protocol=9))]

    corrupt(world, refuse)
    world.worker("w1", via=["r1", "learner"])
    world.run_until(lambda: world.is_admitted("w1"), within_s=5.0)
    assert world.peer_of("w1") != world.peer_of("r1")
