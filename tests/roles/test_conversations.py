"""Whole conversations of real nodes, one scenario per test, on virtual time."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from echo.core.errors import RefusedError
from echo.core.rollout import PolicyVersion
from echo.roles.members import RunEnded
from echo.weights.rates import FIRST_BYTES
from echo.weights.sender import Child
from echo.wire import codec
from echo.wire.actions import Action, Stop
from echo.wire.codec import encode
from echo.wire.messages import (
    FULL,
    PROTOCOL_VERSION,
    Finish,
    Probe,
    ProbeAck,
)
from tests.promises.conftest import MakeWorld
from tests.promises.world import World
from tests.roles.harness import make_group, message_of
from tests.wire.sets import make_sets

RELAY, LEARNER = "tcp://r1:7700", "tcp://learner:7700"
VIA = ["r1", "learner"]
V0 = PolicyVersion(1, 0)


def fleet(make_world: MakeWorld, *workers: str, **sections: Any) -> World:
    """Start a learner, a relay, and workers that know the relay first and the learner second."""
    world = make_world(**sections)
    world.learner()
    world.relay()
    for name in workers:
        world.worker(name, via=VIA)
    world.run_until(lambda: all(world.is_admitted(name) for name in ("r1", *workers)))
    return world


# --- joining -------------------------------------------------------------------------------------


def test_the_learner_dies_while_an_engine_is_built_and_it_is_not_built_twice(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.learner()
    world.worker("w1", build_s=8.0)
    node, built = world.node("w1"), list[Any]()
    build = node.build

    def build_and_note(*arguments: Any) -> Any:
        built.append(arguments)
        return build(*arguments)

    node.build = build_and_note
    world.run(3.0)
    world.kill("learner")
    world.run(1.0)
    world.learner()
    world.run_until(lambda: world.is_admitted("w1"), within_s=14.0)
    assert len(built) == 1


@pytest.mark.parametrize("first", ["learner", "r1"])
def test_another_protocol_version_is_refused_with_both(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    world = fleet(make_world)
    world.worker("w1", via=[first])
    role, ours = world.node("w1").role, PROTOCOL_VERSION

    def as_of_another_release(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(codec, "PROTOCOL_VERSION", ours + 1)
                return call(*args, **kwargs)

        return wrapped

    for name in ("receive", "expire", "connected"):
        setattr(role, name, as_of_another_release(getattr(role, name)))
    world.run_until(lambda: world.end("w1"), within_s=5.0)
    reason, text = world.end("w1") or ("", "")
    assert reason == "protocol_version"
    assert f"speaks protocol version {ours}, this node {ours + 1}" in text
    assert world.count(first, "refused/protocol_version") >= 1
    assert any(f"w1 speaks protocol version {ours + 1}" in note for note in world.notes(first))


def test_a_second_process_of_the_same_name_is_refused_and_the_first_goes_on(
    make_world: MakeWorld,
) -> None:
    world = make_world(network={"dead_after_s": 4.0})
    world.learner()
    world.worker("w1")
    first = world.node("w1")
    world.run(2.0)
    world.worker("w1")
    world.run_until(lambda: world.end("w1"), within_s=10.0)
    reason, text = world.end("w1") or ("", "")
    assert reason == "name_taken"
    assert "worker.name" in text
    assert first.role.is_admitted
    world.audit()


def test_a_node_that_every_address_refuses_gives_up_after_three_tries(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.worker("w1", via=VIA)
    role = world.node("w1").role
    fail, role.dial_failed = role.dial_failed, lambda *_, **__: []  # here others fail
    faults = {RELAY: (True, True, False, True, True, True), LEARNER: (True, True, True)}
    stops: list[Action] = []

    def asks(address: str) -> bool:
        return bool(role.control.address == address)

    for address in (RELAY, LEARNER):
        world.run_until(partial(asks, address))
        peer = role.control.peer
        assert fail("another", "a parent's key", is_refused=True, now=0.0) == []
        for is_refused in faults[address]:
            reason = f"{address} has another key"
            stops += fail(peer, reason, is_refused=is_refused, now=0.0)
    [stop] = stops
    assert isinstance(stop, Stop)
    assert isinstance(stop.error, RefusedError)
    assert str(stop.error) == f"{LEARNER} has another key (tried 3 times)"


def test_a_node_without_its_learner_says_so_once_a_minute_and_why(make_world: MakeWorld) -> None:
    world = make_world(network={"reconnect_for_s": 150.0})
    world.worker("w1")
    world.run(149.0)
    told = [note for note in world.notes("w1") if "giving up in" in note]
    assert len(told) == 3
    assert all(note.endswith("s: no node listens there") for note in told)
    world.run(2.0)
    _, text = world.end("w1") or ("", "")
    assert text.endswith("\n  last attempt: no node listens there")


@pytest.mark.slow
def test_the_time_without_the_learner_is_counted_from_when_it_was_lost(
    make_world: MakeWorld,
) -> None:
    world = make_world(network={"reconnect_for_s": 20.0})
    world.learner()
    world.relay()
    world.worker("w1", via=["r1"])
    world.run(4.0)
    world.kill("learner")
    world.run(18.0)
    assert [world.end(name) for name in ("r1", "w1")] == [None, None]
    world.run(8.0)
    for name, address in (("r1", LEARNER), ("w1", RELAY)):
        reason, text = world.end(name) or ("", "")
        assert reason == "learner_unreachable"
        assert address in text
        assert re.search(r"for 20 s, since run run-\w+ last answered", text)


@pytest.mark.slow
def test_settings_that_changed_with_a_resume_end_a_worker_and_another_directory_does_not(
    make_world: MakeWorld,
) -> None:
    def start(digest: str, path: str) -> None:
        code = {"task.code": {"rewards": {"hash": digest, "path": path}}}
        with mock.patch("echo.runtime.learner.setup.code_settings", return_value=code):
            world.learner()

    world = make_world()
    start("a", "/before/rewards.py")
    world.worker("w1")
    world.relay()
    world.run(3.0)
    for digest, stopped in (("a", None), ("b", "settings_changed")):
        world.kill("learner")
        start(digest, "/after/rewards.py")
        world.run(5.0)
        end = world.end("w1")
        assert (end and end[0]) == stopped
    assert end is not None
    assert "task.code" in end[1]
    assert world.is_admitted("r1"), "it follows no setting"


# --- losses --------------------------------------------------------------------------------------


def test_finish_reaches_the_workers_behind_a_relay_before_the_relay_stops(
    make_world: MakeWorld,
) -> None:
    world = fleet(make_world, "w1", "w2")
    world.run(3.0)
    role, relay = world.node("learner").role, world.node("r1").role
    world.report("learner", RunEnded("done"))
    world.run(0.2)
    assert {world.end(name) for name in ("r1", "w1", "w2")} == {("done", "")}
    assert role.roster.nodes == {}  # each said goodbye, the workers through the relay
    assert not [note for note in world.notes("learner") if "silent" in note]
    for way in ("up", "down"):
        assert relay.counters[f"forwarded/{way}"] > 4


def test_a_lost_finish_is_repeated_with_the_next_heartbeat(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run(3.0)
    lost = world.drop("Finish", times=1)
    world.report("learner", RunEnded("done"))
    world.run_until(lambda: world.end("w1") == ("done", ""), within_s=3.0)
    assert lost


# --- deaths --------------------------------------------------------------------------------------


# --- who may say what ----------------------------------------------------------------------------


def test_the_learner_is_believed_on_its_own_link_and_in_what_is_for_this_node(
    make_world: MakeWorld,
) -> None:
    world = fleet(make_world, "w1")
    finish = encode(Finish(reason="ha"), source="learner", target="w1")
    for name in ("w1", "r1"):
        [note] = world.node(name).role.receive("in99", finish, now=world.now)
        assert "did not come from the learner's side" in note.text
        assert world.count(name, "protocol_errors") == 1
    later = world.now + 61.0  # each is told of once a minute
    stray = encode(Finish(reason="x"), source="learner", target="w9")
    for name in ("learner", "w1"):
        [note] = world.node(name).role.receive("in99", stray, now=later)
        assert "w9" in note.text


def test_a_probe_of_an_uplink_is_answered(make_world: MakeWorld) -> None:
    world = fleet(make_world, "w1")
    for name in ("learner", "r1"):
        probe = encode(Probe(), [bytes(1000)], source="w1")
        [answer] = world.node(name).role.receive("in99", probe, now=world.now)
        assert isinstance(message_of(answer.frames), ProbeAck)
    # The answer to its own is taken from its parent alone.
    role = world.node("w1").role
    peer = role.control.peer
    role.probing.begin(peer, payload_bytes=8 << 20, now=3.0)
    for source, is_taken in (("in99", False), (peer, True)):
        role.receive(source, encode(ProbeAck(), source="r1"), now=9.0)
        next_probe = role.probing.begin(peer, payload_bytes=8 << 20, now=9.0)
        assert bool(next_probe) == is_taken


def test_who_can_serve_shows_its_uplink_before_it_is_given_a_place_and_then_the_learner(
    make_world: MakeWorld,
) -> None:
    world = make_world(image_bytes=8 * FIRST_BYTES)
    world.learner()
    world.worker("w1", build_s=5.0)
    world.relay("r1")

    def is_trusting(name: str) -> bool:
        return bool(world.node(name).role.broadcast.trust.has_key)

    for name, num_probes in (("r1", 1), ("w1", 0)):  # whoever cannot be dialled serves nobody
        world.run_until(partial(is_trusting, name), within_s=5.0)
        node = world.node(name)
        assert node.role.probing.num_probes == num_probes, name
    learner = world.node("learner").role
    world.run_until(lambda: learner.plans.uplinks().get("r1"), within_s=5.0)
    learner.plans.planner.has_news = False
    two_beats_s = 2 * learner.settings.admission.heartbeat_s
    # Beside weights it would show what they leave of it.
    taker = Child(fetching=(learner.broadcast.newest_complete, FULL))
    learner.broadcast.children["taker"] = taker
    world.run(two_beats_s)
    assert "learner" not in learner.plans.uplinks()
    del learner.broadcast.children["taker"]
    world.run_until(lambda: learner.plans.uplinks().get("learner"), within_s=two_beats_s)
    assert learner.plans.planner.has_news


def test_a_relay_without_route_or_link_drops_and_counts(make_world: MakeWorld) -> None:
    world = fleet(make_world)
    relay = world.node("r1").role
    down = encode(Finish(reason="x"), source="learner", target="w9")
    assert relay.receive(relay.control.peer, down, now=world.now) == []
    assert relay.counters["dropped/no_route"] == 1
    world.kill("learner")
    world.run(1.0)
    up = encode(Finish(reason="x"), source="w9", target="learner")
    assert relay.receive("in98", up, now=world.now) == []
    assert relay.counters["dropped/no_link"] == 1


def test_a_restarted_node_is_told_what_it_could_send(make_world: MakeWorld) -> None:
    world = fleet(make_world)
    learner = world.node("learner").role
    world.node("r1").role.broadcast.uplink.show(7e6)
    world.run_until(lambda: learner.plans.uplinks().get("r1") == 7e6, within_s=5.0)
    world.kill("r1")
    world.relay()
    broadcast = world.node("r1").role.broadcast
    assert broadcast.uplink.bytes_per_s is None
    world.run_until(lambda: broadcast.uplink.bytes_per_s == 7e6, within_s=20.0)
    world.run(1.0)
    # So the next plan goes by it.
    [site] = [m.node for m in learner.roster.members() if m.node_id == "r1"]
    assert site.stats.uplink_bytes_per_s == 7e6


# --- what results are worth ----------------------------------------------------------------------


def test_results_are_judged_by_their_content(hung_world: World) -> None:
    """Beside what promise 39 names."""
    world, good = hung_world, make_group(0, V0)
    first = good.rollouts[0]
    for reason, content in {
        "another_prompt": dataclasses.replace(good, prompt_ids=np.array([9], dtype=np.int32)),
        "too_long": make_group(0, V0, num_tokens=17),
        "no_trainable_token": dataclasses.replace(
            good,
            rollouts=tuple(
                dataclasses.replace(r, completion_mask=~r.completion_mask) for r in good.rollouts
            ),
        ),
        "mislabelled": make_group(0, V0, worker="w2"),
    }.items():
        assert world.deliver(0, content=content) == ("refused", reason)
        assert world.count("learner", f"refused/{reason}") == 1
    nan = first.sampler_logprobs * np.float32("nan")
    for reason, change in (
        ("bad_logprobs", {"sampler_logprobs": nan}),
        ("bad_logprobs", {"sampler_logprobs": -first.sampler_logprobs}),
        ("bad_token_ids", {"token_ids": first.token_ids + np.int32(100)}),
        ("bad_token_ids", {"support": make_sets([*first.token_ids[:1], 100], 0, 0)}),
        ("bad_support", {"support": make_sets(0, [int(first.token_ids[1]) + 1], 0)}),
    ):
        assert world.deliver(0, change=change) == ("refused", reason)
    assert world.deliver(77) == ("refused", "unknown_group")
    mixed = {"policy_versions": np.array([(1, 0), (1, 0), (1, 1)], np.int32)}
    # Versions may be mixed here, but the learner has not published the newer one yet.
    assert world.deliver(0, change=mixed) == ("refused", "version_from_the_future")


def test_a_result_that_comes_again_while_it_is_written_is_stored_once(hung_world: World) -> None:
    assert hung_world.deliver(0) == ("stored", "")
    assert hung_world.deliver(0) == ("ignored", ""), "it is acknowledged once it is durable"
    hung_world.run(1.0)
    assert hung_world.stored() == [0]


def test_a_group_that_keeps_failing_to_arrive_is_given_up(hung_world: World) -> None:
    for attempt in range(20):
        assert hung_world.deliver(0, attempt=attempt, size=3)[0] == "refused"
    assert hung_world.count("learner", "discarded/attempts_exhausted") == 1
    assert hung_world.deliver(0) == ("duplicate", "")


@pytest.mark.slow
def test_who_alone_teaches_nothing_is_granted_nothing_until_others_were_heard(
    make_world: MakeWorld,
) -> None:
    world = make_world(batch={"max_zero_signal_batches": 2})
    world.useless_workers = {"bad"}
    world.learner()
    world.worker("good", sample_s=math.inf)
    world.run_until(lambda: world.leased("good"))
    world.worker("bad")
    role = world.node("learner").role

    def set_aside() -> list[str]:
        nodes = role.fleet.nodes(step=role.step, now=world.now)
        return [node.node_id for node in nodes if node.state == "set aside"]

    world.run_until(set_aside)
    assert set_aside() == ["bad"]
    assert role.review.num_discounted >= 4
    assert any("bad is set aside until other workers" in n for n in world.notes("learner"))
    world.run_until(lambda: not world.leased("bad"))
    granted = world.num_granted("bad")
    world.run(15.0)
    assert world.num_granted("bad") == granted
    world.kill("good")
    world.worker("good")
    world.run_until(lambda: not set_aside(), within_s=20.0)
    assert role.review.num_discounted == 0
    world.run_until(lambda: world.num_granted("bad") > granted)


# --- weights, standby ----------------------------------------------------------------------------


def serving(make_world: MakeWorld, *workers: str) -> World:
    """Return a learner and workers that pass weights on."""
    world = make_world(sample_s=0.6, train_s=0.6)
    world.learner()
    for name in workers:
        world.worker(name, serves=True)
    world.run(6.0)
    return world


@pytest.mark.slow
def test_the_children_of_a_worker_that_is_put_on_standby_get_other_parents(
    make_world: MakeWorld,
) -> None:
    names = ["w1", "w2", "w3"]
    world = serving(make_world, *names)
    parents = {world.parent(name) for name in names}
    parent = next(name for name in names if name in parents)
    world.stand_by(parent)
    world.run(8.0)
    newest = world.published()[-1]
    for name in {*names} - {parent}:
        assert world.parent(name) not in ("-", parent)
        assert newest[1] - (world.installed(name) or (0, -9))[1] <= 1


@pytest.mark.slow
def test_a_learner_that_returns_finds_all_workers_active(make_world: MakeWorld) -> None:
    world = serving(make_world, "w1", "w2")
    world.stand_by("w2")
    world.run_until(lambda: world.is_on_standby("w2"), within_s=10.0)
    world.kill("learner")
    world.learner()
    world.run_until(lambda: not world.is_on_standby("w2"), within_s=20.0)
    world.audit()
