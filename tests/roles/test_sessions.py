"""Whole conversations, one scenario per test, with literal times and real sessions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo.core.errors import RefusedError
from echo.core.rollout import PolicyVersion
from echo.roles.learner import Learner
from echo.weights.sender import SLOW_AFTER_S, WAITING_PERIOD_S
from echo.wire import codec
from echo.wire.actions import Action, Note, Send, Stop
from echo.wire.codec import encode
from echo.wire.messages import (
    Ack,
    Chunk,
    Deliver,
    Fetch,
    Finish,
    Probe,
    ProbeAck,
    TopologyPlan,
    Waiting,
)
from tests.roles.harness import (
    LEARNER_ADDRESS,
    Process,
    Run,
    make_group,
    message_of,
)

RELAY = "tcp://r1:1"


def start_all(run: Run, *, workers: int = 1) -> tuple[Process, Process, list[Process]]:
    """Start a learner, a relay, and workers that know the relay first and the learner second."""
    learner, relay = run.start_learner(), run.start_relay("r1")
    connect = [RELAY, LEARNER_ADDRESS]
    return learner, relay, [run.start_worker(f"w{i + 1}", connect=connect) for i in range(workers)]


def of_kind(run: Run, kind: str) -> list[dict[str, Any]]:
    return [record for record in run.records if record["kind"] == kind]


# --- joining -------------------------------------------------------------------------------------


def test_the_learner_dies_while_an_engine_is_built_and_it_is_not_built_twice(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    learner = run.start_learner()
    worker = run.start_worker("w1", build_s=12.0)
    run.world.run(3.0)
    run.world.kill(learner)
    run.world.run(6.0)
    run.start_learner()
    run.world.run(20.0)
    assert worker.session.is_admitted
    assert sum("configured with" in note for note in worker.notes) == 1


@pytest.mark.parametrize("first", ["learner", "relay"])
def test_another_protocol_version_is_refused_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    run = Run(tmp_path)
    learner, relay, _ = start_all(run, workers=0)
    run.world.run(2.0)
    worker = run.start_worker("w1", connect=[RELAY if first == "relay" else LEARNER_ADDRESS])

    ours = codec.PROTOCOL_VERSION

    def as_of_another_release(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(codec, "PROTOCOL_VERSION", ours + 1)
                return call(*args, **kwargs)

        return wrapped

    for name in ("receive", "expire", "connected"):
        setattr(worker.session, name, as_of_another_release(getattr(worker.session, name)))
    run.world.run(5.0)
    assert worker.stop is not None
    assert worker.stop.reason == "protocol_version"
    assert f"speaks protocol version {ours}, this node {ours + 1}" in str(worker.stop.error)
    refuser = relay if first == "relay" else learner
    assert refuser.session.counters["refused/protocol_version"] >= 1
    assert any(f"w1 speaks protocol version {ours + 1}" in note for note in refuser.notes)


def test_a_second_process_of_the_same_name_is_refused_and_the_first_goes_on(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, dead_after_s=4.0)
    run.start_learner()
    first = run.start_worker("w1")
    run.world.run(5.0)
    second = run.start_worker("w1")
    run.world.run(15.0)
    assert second.stop is not None
    assert second.stop.reason == "name_taken"
    assert "worker.name" in str(second.stop.error)
    assert first.session.is_admitted
    run.audit()


def test_a_node_that_every_address_refuses_gives_up_after_three_tries(tmp_path: Path) -> None:
    run = Run(tmp_path, reconnect_for_s=100.0)
    worker = run.start_worker("w1", connect=[RELAY, LEARNER_ADDRESS])
    run.world.run(1.0)
    session = worker.session
    faults = {RELAY: (True, True, False, True, True, True), LEARNER_ADDRESS: (True, True, True)}
    stops = []
    for address in (RELAY, LEARNER_ADDRESS):
        while session._control is None or session._control.address != address:
            run.world.run(run.world.now + 1.0)
        peer = session._control.peer
        assert session.dial_failed("another", "a parent's key", is_refused=True, now=0.0) == []
        for is_refused in faults[address]:
            reason = f"{address} has another key"
            stops += session.dial_failed(peer, reason, is_refused=is_refused, now=0.0)
    [stop] = stops
    assert isinstance(stop, Stop)
    assert isinstance(stop.error, RefusedError)
    assert str(stop.error) == f"{LEARNER_ADDRESS} has another key (tried 3 times)"


def test_a_node_without_its_learner_says_so_once_a_minute_and_why(tmp_path: Path) -> None:
    run = Run(tmp_path, reconnect_for_s=150.0)
    worker = run.start_worker("w1")
    run.world.run(1.0)
    session = worker.session
    assert session._control is not None
    session.dial_failed(session._control.peer, "the port is closed", is_refused=False, now=0.0)
    run.world.run(149.0)
    told = [note for note in worker.notes if "giving up in" in note]
    assert len(told) == 3
    assert all(note.endswith("s: the port is closed") for note in told)
    run.world.run(151.0)
    assert worker.stop is not None
    assert str(worker.stop.error).endswith("\n  last attempt: the port is closed")


@pytest.mark.slow
def test_the_time_without_the_learner_is_counted_from_when_it_was_lost(tmp_path: Path) -> None:
    run = Run(tmp_path, reconnect_for_s=20.0)
    learner = run.start_learner()
    relay = run.start_relay("r1")
    worker = run.start_worker("w1", connect=[RELAY])
    run.world.run(10.0)
    run.world.kill(learner)
    run.world.run(28.0)
    assert worker.stop is None
    assert relay.stop is None
    run.world.run(35.0)
    for node, address in ((relay, LEARNER_ADDRESS), (worker, RELAY)):
        assert node.stop is not None
        assert node.stop.reason == "learner_unreachable"
        assert address in str(node.stop.error)
        assert "for 20 s, since run run was last heard of" in str(node.stop.error)


@pytest.mark.slow
def test_settings_that_changed_with_a_resume_end_a_worker_and_another_directory_does_not(
    tmp_path: Path,
) -> None:
    def code(digest: str, path: str) -> dict[str, Any]:
        return {"task.code": {"rewards": {"hash": digest, "path": path}}}

    run = Run(tmp_path)
    learner = run.start_learner(settings=code("a", "/before/rewards.py"))
    worker, relay = run.start_worker("w1"), run.start_relay("r1")
    run.world.run(3.0)
    for digest, stopped, until in (("a", None, 10.0), ("b", "settings_changed", 20.0)):
        run.world.kill(learner)
        learner = run.start_learner(settings=code(digest, "/after/rewards.py"))
        run.world.run(until)
        assert (worker.stop and worker.stop.reason) == stopped
    assert worker.stop is not None
    assert "task.code" in str(worker.stop.error)
    assert relay.session.is_admitted, "it follows no setting"


# --- losses --------------------------------------------------------------------------------------


def test_finish_reaches_the_workers_behind_a_relay_before_the_relay_stops(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner, relay, workers = start_all(run, workers=2)
    run.world.run(5.0)
    run.world.perform(learner, learner.session.finish("done"))
    run.world.run(5.1)
    for node in (relay, *workers):
        assert node.stop is not None
        assert (node.stop.reason, node.stop.error) == ("done", None)
    assert learner.session.roster.nodes == {}  # each said goodbye, the workers through the relay
    assert not [note for note in learner.notes if "silent" in note]
    for way in ("up", "down"):
        assert relay.session.counters[f"forwarded/{way}"] > 4


def test_a_lost_finish_is_repeated_with_the_next_heartbeat(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner = run.start_learner()
    worker = run.start_worker("w1")
    run.world.run(5.0)
    lost: list[Any] = []
    run.world.drop = lambda source, target, frames: (
        isinstance(message_of(frames), Finish) and not lost and not lost.append(frames)
    )
    run.world.perform(learner, learner.session.finish("done"))
    run.world.run(8.0)
    assert lost
    assert worker.stop is not None
    assert worker.stop.reason == "done"


# --- deaths --------------------------------------------------------------------------------------


def test_after_a_hiccup_of_the_planned_parent_a_node_returns_to_it(tmp_path: Path) -> None:
    run = Run(tmp_path, dead_after_s=4.0)
    _, _, [worker] = start_all(run)
    run.world.run(5.0)
    peer = worker.session._weights._links[0].current.peer
    run.world.perform(worker, worker.session.disconnected(peer, "reset", now=run.world.now))
    run.world.run(7.0)
    assert worker.session.stats().parent == "learner"
    run.world.run(12.0)
    assert worker.session.stats().parent == "r1"


@pytest.mark.slow
def test_a_hung_engine_loses_its_leases_and_is_given_no_more(tmp_path: Path) -> None:
    run = Run(tmp_path, lease_timeout_s=6.0)
    learner = run.start_learner()
    hung = run.start_worker("w1")
    hung.on_action.__self__.is_hung = True
    run.world.run(5.0)
    assert learner.session.leases.num_leases("w1") == 3
    run.start_worker("w2")
    run.world.run(40.0)
    assert len(hung.session.partials.running) == 1
    assert learner.session.leases.num_leases("w1") == 0
    assert learner.session.counters["leases_expired"] == 3
    lines = [note for note in learner.notes if "expired" in note]
    assert lines == ["leases expired without progress: 3 on w1"]
    assert len(run.trained()) > 40
    run.audit()


# --- who may say what ----------------------------------------------------------------------------


def test_a_worker_believes_the_learner_only_on_its_control_link(tmp_path: Path) -> None:
    run = Run(tmp_path)
    _, relay, [worker] = start_all(run)
    run.world.run(5.0)
    finish = encode(Finish(reason="ha"), source="learner", target="w1")
    actions = worker.session.receive("in99", finish, now=5.0)
    assert "Finish that did not come from the learner's side" in actions[0].text
    actions = relay.session.receive("in99", finish, now=5.0)
    assert "did not come from the learner's side" in actions[0].text
    assert worker.session.counters["protocol_errors"] == 1
    assert relay.session.counters["protocol_errors"] == 1


def test_a_message_for_another_node_is_refused_by_who_does_not_relay(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner, _, [worker] = start_all(run)
    run.world.run(3.0)
    stray = encode(Finish(reason="x"), source="learner", target="w9")
    for process in (learner, worker):
        [note] = process.session.receive("in99", stray, now=3.0)
        assert "w9" in note.text


def test_a_probe_of_an_uplink_is_answered(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner, relay, [worker] = start_all(run)
    run.world.run(3.0)
    for process in (learner, relay):
        probe = encode(Probe(), [bytes(1000)], source="w1")
        [answer] = process.session.receive("in99", probe, now=3.0)
        assert isinstance(message_of(answer.frames), ProbeAck)
    # The answer to its own is awaited from its parent alone.
    peer, session = worker.session._control.peer, worker.session
    session._probing.begin(peer, payload_bytes=8 << 20, now=3.0)
    for source, is_awaited in (("in99", True), (peer, False)):
        session.receive(source, encode(ProbeAck(), source="r1"), now=9.0)
        assert (session._probing._awaited is not None) == is_awaited


def test_a_relay_without_route_or_uplink_drops_and_counts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner, relay, _ = start_all(run, workers=0)
    run.world.run(3.0)
    control = relay.session._control.peer
    down = encode(Finish(reason="x"), source="learner", target="w9")
    assert relay.session.receive(control, down, now=3.0) == []
    assert relay.session.counters["dropped/no_route"] == 1
    run.world.kill(learner)
    run.world.run(4.0)
    up = encode(Finish(reason="x"), source="w9", target="learner")
    assert relay.session.receive("in98", up, now=4.0) == []
    assert relay.session.counters["dropped/no_uplink"] == 1


def test_a_restarted_node_is_told_what_it_could_send(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner, relay, _ = start_all(run, workers=0)
    relay.session.broadcast.uplink.show(7e6)
    run.world.run(5.0)
    assert learner.session.uplinks()["r1"] == 7e6
    run.world.kill(relay)
    again = run.start_relay("r1")
    assert again.session.broadcast.uplink_bytes_per_s is None
    run.world.run(20.0)
    assert again.session.broadcast.uplink_bytes_per_s == 7e6
    # So the next plan goes by it.
    [site] = [m.node for m in learner.session.roster.members() if m.node_id == "r1"]
    assert site.stats.uplink_bytes_per_s == 7e6


def deliver(run: Run, group_id: int, **changes: Any) -> tuple[Any, list[Any]]:
    """Send a result straight into the learner's session; return (Ack, other actions)."""
    learner = run.world.process("learner")
    label = {"group_id": group_id, "attempt": 0} | changes.pop("label", {})
    group = changes.pop("group", None) or make_group(group_id, PolicyVersion(1, 0))
    header, arrays = codec.encode_group(group)
    arrays = changes.pop("arrays", arrays)
    frames = encode(Deliver(**label), (header, arrays), source="w1", target="learner")
    actions = learner.session.receive("in0", frames, now=run.world.now)
    messages = [message_of(a.frames) for a in actions if isinstance(a, Send)]
    acks = [message for message in messages if isinstance(message, Ack)]
    return (acks[0] if acks else None), actions


def change(group: Any, **fields: Any) -> Any:
    """Return a group whose first rollout has other arrays."""
    first = dataclasses.replace(group.rollouts[0], **fields)
    return dataclasses.replace(group, rollouts=(first, *group.rollouts[1:]))


def test_results_are_judged_by_their_content(hung_run: Run) -> None:
    good = make_group(0, PolicyVersion(1, 0))
    first = good.rollouts[0]
    bad = {
        "group_size": make_group(0, PolicyVersion(1, 0), size=3),
        "another_prompt": dataclasses.replace(good, prompt_ids=np.array([9], dtype=np.int32)),
        "too_long": make_group(0, PolicyVersion(1, 0), num_tokens=17),
        "bad_logprobs": change(good, sampler_logprobs=first.sampler_logprobs * np.float32("nan")),
        "bad_token_ids": change(good, token_ids=first.token_ids + np.int32(100)),
        "no_trainable_token": dataclasses.replace(
            good,
            rollouts=tuple(
                dataclasses.replace(r, completion_mask=~r.completion_mask) for r in good.rollouts
            ),
        ),
        "mislabelled": make_group(0, PolicyVersion(1, 0), worker="w2"),
        "version_from_the_future": make_group(0, PolicyVersion(1, 3)),
        "abandoned_version": make_group(0, PolicyVersion(2, 0)),
    }
    for reason, group in bad.items():
        ack, _ = deliver(hung_run, 0, group=group)
        assert ack is not None, reason
        assert (ack.outcome, ack.reason) == ("refused", reason)
        assert hung_run.learner.counters[f"refused/{reason}"] == 1
    positive = change(good, sampler_logprobs=-first.sampler_logprobs)
    assert deliver(hung_run, 0, group=positive)[0].reason == "bad_logprobs"
    assert deliver(hung_run, 0, arrays=b"xx")[0].reason == "malformed"
    ack, _ = deliver(hung_run, 77, group=make_group(77, PolicyVersion(1, 0)))
    assert ack.reason == "unknown_group"
    ack, actions = deliver(hung_run, 0, group=good)
    assert ack is None
    assert type(actions[0]).__name__ == "StoreGroup"


def test_mixed_versions_are_refused_where_a_lease_names_one(hung_run: Run) -> None:
    learner = hung_run.learner
    first = make_group(0, PolicyVersion(1, 0)).rollouts[0].policy_versions.copy()
    first[-1] = 1, 1
    group = change(make_group(0, PolicyVersion(1, 0)), policy_versions=first)
    settings = learner._scheduler.settings
    learner._scheduler.settings = dataclasses.replace(settings, exact_version=True)
    assert deliver(hung_run, 0, group=group)[0].reason == "mixed_versions"
    learner._scheduler.settings = settings
    # Elsewhere only that the learner has not published it yet is wrong with it.
    assert deliver(hung_run, 0, group=group)[0].reason == "version_from_the_future"


def test_a_group_that_keeps_failing_to_arrive_is_given_up(hung_run: Run) -> None:
    learner = hung_run.learner
    for attempt in range(20):
        wrong = make_group(0, PolicyVersion(1, 0), attempt=attempt, size=3)
        deliver(hung_run, 0, group=wrong, label={"attempt": attempt})
    assert learner.counters["discarded/attempts_exhausted"] == 1
    ack, _ = deliver(hung_run, 0)
    assert ack.outcome == "duplicate"


def test_an_acknowledgement_takes_a_lease_from_the_queue(hung_run: Run) -> None:
    worker = hung_run.world.process("w1")
    ack = Ack(group_id=1, attempt=0, outcome="duplicate")
    control = worker.session._control.peer
    worker.session.receive(control, encode(ack, source="learner", target="w1"), now=3.0)
    assert sorted(group_id for group_id, _ in worker.session.partials.queue) == [0, 2]


def test_groups_that_an_engine_gives_back_go_on_before_fresh_ones(hung_run: Run) -> None:
    session = hung_run.world.process("w1").session
    held, v0 = session.partials, PolicyVersion(1, 0)
    partials = held.take(2, group_size=2, installed=v0)
    partials[1].num_progress = 7
    held.park(partials[1])
    states = {state.group_id: state for state in session.lease_states()}
    assert [states[i].num_tokens for i in range(3)] == [0, 7, 0]
    assert [states[i].is_waiting for i in range(3)] == [False, True, True]
    assert [partial.lease.group_id for partial in held.take(3, group_size=2, installed=v0)] == [
        1,
        2,
    ]


# --- exactly once --------------------------------------------------------------------------------


def test_the_learner_looks_after_the_children_that_it_holds_back(tmp_path: Path) -> None:
    session = Run(tmp_path).start_learner().session
    version = session.broadcast.newest_complete
    assert version is not None

    def fetch(peer: str, credit_bytes: int) -> list[Action]:
        message = Fetch(version=version, ranges=((0, 6),), credit_bytes=credit_bytes)
        return session.receive(peer, encode(message, source=peer), now=1.0)

    fetch("stuck", 1)
    num_sent = sum(chunks_to("fast", fetch("fast", 1 << 20)))
    assert num_sent < 6
    assert session.deadline <= 1.0 + WAITING_PERIOD_S
    told = [message_of(action.frames) for action in session.expire(now=1.5)]
    assert [message.version for message in told if isinstance(message, Waiting)] == [version]
    assert num_sent + sum(chunks_to("fast", session.expire(now=1.0 + SLOW_AFTER_S))) == 6


def chunks_to(peer: str, actions: list[Action]) -> list[bool]:
    sends = [action for action in actions if isinstance(action, Send) and action.peer == peer]
    return [isinstance(message_of(send.frames), Chunk) for send in sends]


def start_workers(tmp_path: Path, *, workers: int = 2) -> tuple[Run, Process, list[Process]]:
    run = Run(tmp_path)
    learner = run.start_learner()
    started = [
        run.start_worker(f"w{i + 1}", connect=[LEARNER_ADDRESS], address=f"tcp://w{i + 1}:1")
        for i in range(workers)
    ]
    run.world.run(10.0)
    return run, learner, started


def park(run: Run, learner: Process, *names: str) -> None:
    run.world.perform(learner, learner.session.set_standby(names, now=run.world.now))


@pytest.mark.slow
def test_who_alone_teaches_nothing_is_granted_nothing_until_others_were_heard(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    learner = run.start_learner(max_zero_signal_groups=4)
    run.start_worker("bad")
    run.start_worker("good")
    run.world.run(10.0)
    session: Learner = learner.session

    def delivered(worker: str, *, is_useful: bool) -> str:
        actions = session.delivered(worker, is_useful=is_useful, now=run.world.now)
        run.world.perform(learner, actions)
        notes = [action.text for action in actions if isinstance(action, Note)]
        set_aside = [v.node_id for v in session.views(now=run.world.now) if v.state == "set aside"]
        assert set_aside == [name for name in ("bad",) if session.num_discounted]
        return "".join(notes)

    assert [delivered("bad", is_useful=False) for _ in range(3)] == [""] * 3
    assert delivered("bad", is_useful=False).startswith("bad is set aside until other workers")
    assert session.num_discounted == 4
    run.world.run(run.world.now + 20.0)
    assert session.leases.num_leases("bad") == 0
    assert session.leases.num_leases("good") > 0
    delivered("good", is_useful=True)
    assert session.num_discounted == 0
    run.world.run(run.world.now + 5.0)
    assert session.leases.num_leases("bad") > 0


@pytest.mark.slow
def test_the_children_of_a_worker_that_is_put_on_standby_get_other_parents(tmp_path: Path) -> None:
    run, learner, workers = start_workers(tmp_path, workers=3)
    parents = {p.session.stats().parent for p in workers}
    [serving] = [p for p in workers if p.name in parents][:1]
    park(run, learner, serving.name)
    run.world.run(30.0)
    others = [p for p in workers if p is not serving]
    assert all(p.session.stats().parent not in ("-", serving.name) for p in others)
    newest = learner.session.broadcast.newest_complete
    assert newest is not None
    assert all(newest.step - p.session.installed_version.step <= 1 for p in others)


@pytest.mark.slow
def test_a_lost_plan_is_repeated_until_the_worker_stands_by(tmp_path: Path) -> None:
    run, learner, [_, w2] = start_workers(tmp_path)
    lost: list[TopologyPlan] = []

    def drop(source: str, target: str, frames: list[bytes]) -> bool:
        if source != "learner" or target != "w2" or len(lost) >= 3:
            return False
        message = message_of(frames)
        if isinstance(message, TopologyPlan):
            lost.append(message)
        return isinstance(message, TopologyPlan)

    run.world.drop = drop
    park(run, learner, "w2")
    run.world.run(20.0)
    assert len(lost) == 3
    assert all(plan.is_standby for plan in lost)
    assert w2.session.standby_since is not None


@pytest.mark.slow
def test_a_learner_that_returns_finds_all_workers_active(tmp_path: Path) -> None:
    run, learner, [_, w2] = start_workers(tmp_path)
    park(run, learner, "w2")
    run.world.run(20.0)
    run.world.kill(learner)
    run.world.run(21.0)
    run.start_learner()
    run.world.run(45.0)
    assert w2.session.standby_since is None
    run.audit()
