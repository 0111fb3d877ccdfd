from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from echo.core.bounds import (
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_LEASE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_RATE,
    MIN_RATE,
    clamped_rate,
)
from echo.core.errors import LocalProtocolError, RemoteProtocolError
from echo.core.monitoring.metrics import Counters
from echo.core.rollout import PolicyVersion
from echo.leases.partials import MemberHeader, ShippedPartials
from echo.leases.results import StoreGroup
from echo.leases.scheduler import Scheduler
from echo.leases.worker.held import Reported
from echo.roles.worker import outcomes
from echo.wire import messages
from echo.wire.actions import HangUp, Note
from echo.wire.codec import (
    Envelope,
    GroupHeader,
    decode_envelope,
    encode,
    encode_group,
)
from echo.wire.messages import Deliver, Failed
from echo.wire.seals import Channel
from tests.promises.conftest import MakeWorld
from tests.promises.world import World
from tests.roles.harness import make_group, make_lease
from tests.roles.test_worker import Paper
from tests.wire.schema import (
    extreme_messages,
    is_bounded,
    leaves,
    smallest,
    wrong_messages,
)

KINDS: list[Any] = [*messages.AnyMessage.__args__, Envelope, GroupHeader, MemberHeader]
FREE = {("settings", "x"), ("example", "x"), ("leases", 0, "example", "x")}
"""What a run's configuration or a task's examples hold: bounded by the message's size alone."""


def frames_of(built: Any, *, source: str, target: str, channel: Channel | None = None) -> list[Any]:
    body = msgspec.Raw(msgspec.msgpack.encode(built))
    seal = None if channel is None else channel.seal(source, target, bytes(body), ())
    envelope = Envelope(messages.PROTOCOL_VERSION, source, target, body, seal=seal)
    return [msgspec.msgpack.encode(envelope)]


# --- ranges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_number_text_and_collection_has_a_range(kind: Any) -> None:
    open_ended = [
        str(leaf)
        for leaf in leaves(inspect.type_info(kind))
        if not is_bounded(leaf.kind) and leaf.path not in FREE
    ]
    assert not open_ended


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_out_of_its_range_is_refused(kind: Any) -> None:
    valid = msgspec.msgpack.encode(smallest(inspect.type_info(kind)))
    msgspec.msgpack.decode(valid, type=kind)
    for what, built in wrong_messages(kind):
        try:
            data = msgspec.msgpack.encode(built)
            msgspec.msgpack.decode(data, type=kind)
        except (msgspec.ValidationError, OverflowError):
            continue
        pytest.fail(f"{kind.__name__}: {what} was accepted")


@pytest.fixture
def fleet(make_world: MakeWorld) -> World:
    """A learner, a relay, and a worker behind it, that work."""
    world = make_world(sample_s=0.6)
    world.learner()
    world.relay()
    world.worker("w1", via=["r1"])
    world.run_until(lambda: world.step >= 2)
    return world


WAYS = [
    ("learner", "w1", "learner"),
    ("learner", "w1", ""),
    ("r1", "w1", ""),
    ("w1", "learner", "w1"),
]
"""Whose role is fed, as from whom, and for whom."""


@pytest.mark.slow
def test_no_value_out_of_range_harms_a_session(fleet: World) -> None:
    step = fleet.step
    for name, source, target in WAYS:
        role = fleet.node(name).role
        peer = role.control.peer if name == "w1" else "in1"
        before, num_sent = role.counters["protocol_errors"], 0
        for kind in messages.AnyMessage.__args__:
            for what, built in wrong_messages(kind):
                try:
                    frames = frames_of(built, source=source, target=target)
                except OverflowError:
                    continue
                num_sent += 1
                actions = role.receive(peer, frames, now=fleet.now)
                assert all(isinstance(action, Note) for action in actions), (name, what)
        assert role.counters["protocol_errors"] - before == num_sent > 300
    fleet.run_until(lambda: fleet.step >= step + 2)


@pytest.mark.slow
def test_the_ends_of_all_ranges_harm_no_session(fleet: World) -> None:
    """What is within the ranges may be nonsense, but costs neither the process nor much time."""
    for name, source, target in WAYS[:3]:
        role = fleet.node(name).role
        for kind in messages.AnyMessage.__args__:
            for built in extreme_messages(kind):
                channel = fleet.channel_of("w1") if target == "learner" else None
                frames = frames_of(built, source=source, target=target, channel=channel)
                role.receive("in1", frames, now=fleet.now)
                role.expire(now=fleet.now)


def test_a_measured_rate_is_told_within_its_range() -> None:
    assert [clamped_rate(rate) for rate in (None, 1e-9, 5.0, 1e300)] == [
        None,
        MIN_RATE,
        5,
        MAX_RATE,
    ]


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        ([bytes(40 << 20), bytes(40 << 20)], "a payload of"),
        ([bytes(MAX_PAYLOAD_BYTES + 1)], "a payload of"),
        ([b""] * MAX_FRAMES, f"{MAX_FRAMES + 1} frames"),
    ],
)
def test_sender_and_receiver_have_the_same_bounds(payload: list[bytes], what: str) -> None:
    message = Deliver(group_id=0, attempt=0)
    with pytest.raises(LocalProtocolError, match=f"Deliver to learner: {what}"):
        encode(message, payload, source="w1", target="learner")
    frames = encode(message, source="w1", target="learner")
    with pytest.raises(RemoteProtocolError, match=what):
        decode_envelope([*frames, *payload])


def test_a_header_is_bounded_at_both_ends() -> None:
    message = messages.Welcome(
        run_id="r", incarnation="i", public_key=b"", lineages=(), assets={}, digests={},
        settings={"text": "x" * MAX_HEADER_BYTES}, heartbeat_s=1.0, dead_after_s=1.0,
    )  # fmt: skip
    with pytest.raises(LocalProtocolError, match="Welcome to w1: a header of"):
        encode(message, source="learner", target="w1")


def test_a_group_that_no_message_holds_fails_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outcomes, "MAX_PAYLOAD_BYTES", 200)
    paper = Paper({0: (9, 9)})
    paper.grant(make_lease(0))
    paper.report(outcomes.GroupFinished(make_group(0, PolicyVersion(1, 0))))
    failed, _ = paper.role.results()[0]
    assert isinstance(failed, Failed)
    assert failed.reason == "group_too_large"
    assert "a message holds 200; lower batch.group_size" in failed.detail
    assert len(paper.role.outbox) == 1


def test_leases_with_long_prompts_travel_in_several_grants() -> None:
    shipped = ShippedPartials(Counters())
    lease = make_lease(0, prompt_ids=(10**6,) * (MAX_LEASE_BYTES // 11))
    grants = [grant for grant, _ in shipped.grants([lease] * 5)]
    assert [len(grant.leases) for grant in grants] == [2, 2, 1]
    for grant in grants:
        encode(grant, source="learner", target="w1")


def sealed(world: World, message: Any, payload: Sequence[bytes] = ()) -> list[Any]:
    """Return a message of w1 as it comes to the learner."""
    channel = world.channel_of("w1")
    return encode(message, payload, source="w1", target="learner", channel=channel)


# --- faults --------------------------------------------------------------------------------------


def test_a_fault_in_a_routed_message_ends_the_member_and_not_the_relays_link(fleet: World) -> None:
    role = fleet.node("learner").role
    frames = encode(messages.Goodbye(reason="x"), source="w1", target="learner")
    peer = role.routes.peer_of("w1")
    assert role.leases.num_leases("w1")
    assert role.expel(peer, frames, now=fleet.now) == []
    assert "w1" not in role.roster.nodes
    assert not role.leases.num_leases("w1")
    assert role.counters["internal_errors"] == 1
    step = role.step
    fleet.run_until(lambda: role.step >= step + 2)
    assert "w1" in role.roster.nodes, "it has said hello again"


def test_a_member_that_is_ready_with_other_hashes_is_refused_and_loses_its_leases(
    hung_world: World,
) -> None:
    role = hung_world.node("learner").role
    member = role.roster.nodes["w1"]
    ready = messages.Ready(incarnation=member.incarnation, digests={"model": "other"})
    assert role.leases.num_leases("w1") == 2
    role.receive(hung_world.peer_of("w1"), sealed(hung_world, ready), now=3.0)
    assert "w1" not in role.roster.nodes
    assert role.counters["refused/digest_mismatch"] == 1
    assert not role.leases.num_leases("w1"), "they are granted again, and not after a timeout"


def test_a_fault_in_a_link_message_ends_the_link(fleet: World) -> None:
    role, step = fleet.node("r1").role, fleet.step
    [peer] = role.broadcast.children
    frames = encode(messages.Subscribe(newest=None), source="w1")
    actions = role.expel(peer, frames, now=fleet.now)
    assert HangUp(peer) in actions
    assert not role.broadcast.children
    fleet.perform("r1", actions)
    fleet.run_until(lambda: fleet.step >= step + 2)
    assert fleet.is_admitted("w1")


def test_a_group_that_was_taken_is_stored_though_granting_fails(
    hung_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = hung_world.node("learner").role
    group = make_group(0, PolicyVersion(1, 0))
    message = Deliver(group_id=0, attempt=0)
    frames = sealed(hung_world, message, encode_group(group))
    peer = hung_world.peer_of("w1")
    monkeypatch.setattr(Scheduler, "grant", lambda self, workers, *, now: 1 / 0)
    [action] = role.receive(peer, frames, now=3.0)
    assert isinstance(action, StoreGroup)
    assert role.deadline == 3.0, "what it makes possible is granted at once"
    with pytest.raises(ZeroDivisionError):
        role.expire(now=3.0)


# --- what a peer's words do ----------------------------------------------------------------------


def test_no_word_of_a_peer_names_a_metric(hung_world: World) -> None:
    role = hung_world.node("learner").role
    failed = Failed(group_id=0, attempt=0, reason="loss_mean", detail="x")
    role.receive(hung_world.peer_of("w1"), sealed(hung_world, failed), now=3.0)
    assert role.counters["discarded/other"] == 1
    worker = hung_world.node("w1").role
    peer = worker.control.peer
    worker.held.handle(worker.held.get((1, 0)), Reported(failed))
    ack = messages.Ack(group_id=1, attempt=0, outcome="refused", reason="x" * 99)
    channel = role.roster.channel_of("w1")
    frames = encode(ack, source="learner", target="w1", channel=channel)
    worker.receive(peer, frames, now=3.0)
    assert worker.counters["refused/other"] == 1
    assert not any("loss" in name or "xx" in name for name in role.counters.as_dict())


def test_every_reason_that_a_worker_gives_is_known() -> None:
    """Whatever ends a group under this name is counted under it."""
    found = set()
    for path in Path(messages.__file__).parents[1].rglob("*.py"):
        text = path.read_text()
        if "RewardError" in text:
            found |= set(re.findall(r'"(reward_[a-z]+)"', text))
        found |= set(re.findall(r'\b(?:NoResult|_give_up)\(\s*[\w.]+,\s*"(\w+)"', text))
    assert {"reward_error", "prompt_too_long", "agent_timeout", "group_too_large"} <= found
    assert {reason for reason in found if messages.known_reason(reason) != reason} == set()


def test_a_peer_that_is_refused_again_and_again_takes_one_line(hung_world: World) -> None:
    role = hung_world.node("learner").role
    said = [role.receive("in1", [b"\xc1"], now=hung_world.now + i / 100) for i in range(50)]
    assert sum(map(len, said)) == 1
    assert role.counters["protocol_errors"] == 50
