"""Tests of the rules for viewers: who may do what, and what they cannot cost the learner."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from echo.core.monitoring.metrics import Counters
from echo.roles import viewers as rules
from echo.roles.viewers import OPERATE, VIEW, MakeStatus, Operate, Viewers
from echo.wire import messages
from echo.wire.actions import Action, HangUp, Note, PeerFaults, Send
from echo.wire.codec import Envelope, decode_envelope, decode_message, encode
from echo.wire.messages import Operation, Outcome, Refuse, Status, Watch
from tests.promises.conftest import MakeWorld
from tests.wire.schema import extreme_messages, wrong_messages

WATCH = encode(Watch(), source="viewer")
PAUSE = Operation(number=3, act="pause", by="ann@desk")


@pytest.fixture
def viewers() -> Viewers:
    return Viewers(Counters(), PeerFaults())


def sent(actions: list[Action]) -> list[tuple[str, Any]]:
    """Return (peer, message) of each message among the actions."""
    return [
        (action.peer, decode_message(decode_envelope(list(action.frames))))
        for action in actions
        if isinstance(action, Send)
    ]


def ask(viewers: Viewers, *peers: str, now: float) -> None:
    for peer in peers:
        assert viewers.receive(peer, WATCH, now=now) == []


def test_all_who_have_asked_get_the_same_status_once_and_seldom(viewers: Viewers) -> None:
    for peer, user in (("a", VIEW), ("b", OPERATE), ("c", VIEW)):
        assert viewers.connected(peer, user, now=0.0) == []
    assert viewers.expire(now=0.0) == [], "nobody has asked"
    ask(viewers, "a", "b", now=1.0)
    assert viewers.deadline is not None
    assert viewers.deadline <= 1.0
    assert viewers.expire(now=1.0) == [MakeStatus()]
    made = viewers.status_made(b"{}", now=1.0)
    assert sent(made) == [("a", Status(may_operate=False)), ("b", Status(may_operate=True))]
    assert all(isinstance(action, Send) and action.frames[1] == b"{}" for action in made)
    assert viewers.status_made(b"{}", now=1.0) == [], "each asks again"
    ask(viewers, "c", now=1.1)
    assert viewers.expire(now=1.2) == [], "not so soon"
    assert viewers.deadline == 1.0 + rules.STATUS_S
    assert viewers.expire(now=1.5) == [MakeStatus()]
    assert sent(viewers.status_made(b"{}", now=1.5)) == [("c", Status(may_operate=False))]


def test_only_an_operators_key_operations(viewers: Viewers) -> None:
    viewers.connected("a", VIEW, now=0.0)
    viewers.connected("b", OPERATE, now=0.0)
    frames = encode(PAUSE, source="viewer")
    assert viewers.receive("b", frames, now=1.0) == [Operate("b", PAUSE)]
    note, *answer = viewers.receive("a", frames, now=1.0)
    assert isinstance(note, Note)
    [(peer, outcome)] = sent(answer)
    assert (peer, outcome.number, outcome.is_done) == ("a", 3, False)
    assert "keys/operate" in outcome.text
    done = Outcome(number=3, is_done=True, text="paused")
    assert sent(viewers.operation_done("b", done)) == [("b", done)]
    viewers.disconnected("b")
    assert viewers.operation_done("b", done) == [], "it has left"


def test_viewers_are_bounded_and_never_keep_an_operator_out(viewers: Viewers) -> None:
    for number in range(rules.MAX_VIEWERS[VIEW]):
        assert viewers.connected(f"v{number}", VIEW, now=0.0) == []
    *_, refusal, end = viewers.connected("one more", VIEW, now=0.0)
    [(_, refuse)] = sent([refusal])
    assert isinstance(refuse, Refuse)
    assert end == HangUp("one more")
    assert "one more" not in viewers
    assert viewers.connected("op", OPERATE, now=0.0) == []
    viewers.disconnected("v0")
    assert viewers.connected("one more", VIEW, now=0.0) == []
    assert viewers.connected("odd", "root", now=0.0)[-1] == HangUp("odd"), "no key has this name"


def test_a_silent_viewer_makes_space(viewers: Viewers) -> None:
    viewers.connected("a", VIEW, now=0.0)
    viewers.connected("b", VIEW, now=30.0)
    assert viewers.deadline == rules.SILENT_S
    assert viewers.expire(now=60.0) == [HangUp("a")]
    assert "b" in viewers


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x00bulk?"],
        [b"x" * 100],
        [b"\xc1" * 5000],
        [*WATCH, b"x" * rules.MAX_MESSAGE_BYTES],
        encode(Refuse(reason="r", detail="d"), source="viewer"),
        encode(Status(may_operate=True), source="learner"),
        encode(messages.Goodbye(reason="bye"), source="w1", target="learner"),
    ],
)
def test_a_viewer_that_sends_anything_else_is_disconnected(
    viewers: Viewers, frames: list[bytes]
) -> None:
    viewers.connected("a", OPERATE, now=0.0)
    note, end = viewers.receive("a", frames, now=1.0)
    assert isinstance(note, Note)
    assert end == HangUp("a")
    assert "a" not in viewers


def test_a_viewer_that_never_stops_is_disconnected(viewers: Viewers) -> None:
    viewers.connected("a", VIEW, now=0.0)
    for number in range(400):  # as fast as it may
        ask(viewers, "a", now=number / rules.MAX_MESSAGES_PER_S)
    now, number = 100.0, 0
    while "a" in viewers:
        viewers.receive("a", WATCH, now=now)
        number += 1
    assert number <= rules.MAX_MESSAGES_PER_S + 1


def test_a_viewer_of_another_release_is_told_both_versions(viewers: Viewers) -> None:
    viewers.connected("a", VIEW, now=0.0)
    body = msgspec.Raw(msgspec.msgpack.encode(Watch()))
    frames = [msgspec.msgpack.encode(Envelope(messages.PROTOCOL_VERSION + 1, "viewer", "", body))]
    refusal, *_, end = viewers.receive("a", frames, now=1.0)
    [(_, refuse)] = sent([refusal])
    assert str(messages.PROTOCOL_VERSION + 1) in refuse.detail
    assert end == HangUp("a")


@pytest.mark.slow
def test_no_message_of_a_viewer_reaches_the_run(make_world: MakeWorld) -> None:
    """Neither under the names of nodes, nor as one; the run goes on as before."""
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 2)
    role, chance = world.node("learner").role, random.Random(0)
    known, faults = dict(role.roster.nodes), role.counters["protocol_errors"]
    for kind in messages.AnyMessage.__args__:
        built = [*extreme_messages(kind), *(built for _, built in wrong_messages(kind))]
        for each in chance.sample(built, min(3, len(built))):
            role.guest_connected("guest", VIEW, now=world.now)
            try:
                body = msgspec.Raw(msgspec.msgpack.encode(each))
            except OverflowError:
                continue
            envelope = Envelope(messages.PROTOCOL_VERSION, "w1", "learner", body)
            actions = role.receive("guest", [msgspec.msgpack.encode(envelope)], now=world.now)
            if kind not in (Watch, Operation):
                assert "guest" not in role.viewers
            assert all(isinstance(action, Note | HangUp | Send) for action in actions)
            role.disconnected("guest", "", now=world.now)
    assert role.roster.nodes == known
    assert role.counters["protocol_errors"] == faults
    step = world.step
    world.run_until(lambda: world.step >= step + 2)


def test_a_node_cannot_speak_as_a_viewer(make_world: MakeWorld) -> None:
    """A node's link carries no commands, whatever it says."""
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.node("learner").role.roster.nodes)
    role = world.node("learner").role
    for target in ("", "learner"):
        frames = encode(PAUSE, source="w1", target=target)
        actions = role.receive(world.peer_of("w1"), frames, now=world.now)
        assert not any(isinstance(action, Operate) for action in actions)
    assert not role.is_paused


def test_no_exception_of_a_viewers_message_ends_the_learner(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    role = world.node("learner").role
    role.guest_connected("guest", VIEW, now=world.now)
    assert HangUp("guest") in role.expel("guest", WATCH, now=world.now)
    assert "guest" not in role.viewers
