"""Whole conversations, one scenario per test, with literal times and real sessions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo.core.errors import RefusedError, TransportError
from echo.core.rollout import PolicyVersion
from echo.weights.sender import SLOW_AFTER_S, WAITING_PERIOD_S
from echo.wire import codec
from echo.wire.actions import Action, Send, Stop
from echo.wire.codec import encode
from echo.wire.messages import (
    Ack,
    Chunk,
    Deliver,
    Fetch,
    Finish,
    Heartbeat,
    Hello,
    NodeStats,
    Ready,
    Rehello,
    Waiting,
)
from tests.roles.harness import (
    LEARNER_ADDRESS,
    Process,
    Run,
    make_group,
    make_image,
    message_of,
    state_of,
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


def test_a_worker_joins_through_a_relay_and_its_groups_are_trained(tmp_path: Path) -> None:
    run = Run(tmp_path)
    _, relay, [worker] = start_all(run)
    run.world.run(20.0)
    assert worker.session.is_admitted
    assert "configured with ['config.json', 'tokenizer.json']" in worker.notes
    assert worker.session.stats().parent == "r1"
    assert relay.session.stats().parent == "learner"
    assert relay.session.counters["forwarded/up"] > 20
    assert len(run.trained()) >= 20
    run.audit()


def test_weights_go_from_learner_to_relay_to_worker_to_worker(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner, relay, _ = start_all(run, workers=0)
    first = run.start_worker("w1", connect=[RELAY], address="tcp://w1:1")
    run.world.run(2.0)
    second = run.start_worker("w2", connect=[RELAY])
    run.world.run(10.0)
    assert (relay.session.stats().parent, first.session.stats().parent) == ("learner", "r1")
    assert second.session.stats().parent == "w1"
    newest = second.session.installed_version
    assert newest is not None
    assert second.session.broadcast.store[newest].storage == make_image(newest)
    # The learner's uplink carries each version once, but for what moved at the start.
    per_version = len(make_image(newest))
    num_published = len(of_kind(run, "trained")) + 1
    assert learner.session.broadcast.bytes_sent <= (num_published + 2) * per_version


def test_an_engine_that_takes_longer_to_build_than_the_silence_allowed_still_joins(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, dead_after_s=4.0)
    learner = run.start_learner()
    worker = run.start_worker("w1", build_s=30.0)
    run.world.run(20.0)
    assert state_of(worker) == "configuring"
    assert [view.state for view in learner.session.views(now=20.0)] == ["joining"]
    run.world.run(40.0)
    assert worker.session.is_admitted
    assert sum("configured with" in note for note in worker.notes) == 1
    assert run.trained()


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


def test_hashes_that_differ_at_hello_are_refused_with_both(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner = run.start_learner()
    settings: dict[str, Any] = {"digests": {"model": "cccc"}}
    session_settings = run.node_settings("w1", "worker", [LEARNER_ADDRESS], **settings)
    worker = run.start_worker("w1")
    worker.session.settings = worker.session._joining.settings = session_settings
    run.world.run(3.0)
    assert worker.stop is not None
    assert isinstance(worker.stop.error, RefusedError)
    assert "this node has cccc, the learner aaaa" in str(worker.stop.error)
    assert learner.session.counters["refused/digest_mismatch"] == 1


def test_hashes_that_differ_once_the_task_is_built_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start_learner()
    worker = run.start_worker("w1", digests={"tokenizer": "dddd", "model": ""})
    run.world.run(3.0)
    assert worker.stop is not None
    assert worker.stop.reason == "digest_mismatch"
    assert "tokenizer: this node has dddd, the learner bbbb" in str(worker.stop.error)


@pytest.mark.parametrize("first", ["learner", "relay"])
def test_another_protocol_version_is_refused_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    run = Run(tmp_path)
    learner, relay, _ = start_all(run, workers=0)
    run.world.run(2.0)
    worker = run.start_worker("w1", connect=[RELAY if first == "relay" else LEARNER_ADDRESS])
    receive, expire, connected = (
        worker.session.receive,
        worker.session.expire,
        worker.session.connected,
    )

    def as_of_another_release(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(codec, "PROTOCOL_VERSION", 5)
                return call(*args, **kwargs)

        return wrapped

    worker.session.receive = as_of_another_release(receive)
    worker.session.expire = as_of_another_release(expire)
    worker.session.connected = as_of_another_release(connected)
    run.world.run(5.0)
    assert worker.stop is not None
    assert worker.stop.reason == "protocol_version"
    assert "speaks protocol version 4, this node 5" in str(worker.stop.error)
    refuser = relay if first == "relay" else learner
    assert refuser.session.counters["refused/protocol_version"] >= 1
    assert any("w1 speaks protocol version 5" in note for note in refuser.notes)


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


def test_a_quick_restart_takes_its_name_over_even_after_a_rival_asked_for_it_long_ago(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, dead_after_s=4.0)
    run.start_learner()
    first = run.start_worker("w1")
    run.world.run(5.0)
    rival = run.start_worker("w1")
    run.world.run(6.0)
    run.world.kill(rival)
    run.world.run(30.0)
    run.world.kill(first)
    again = run.start_worker("w1")
    run.world.run(36.0)
    assert again.stop is None
    assert again.session.is_admitted
    run.audit()


def test_a_learner_that_is_nowhere_ends_the_node_with_a_remedy(tmp_path: Path) -> None:
    run = Run(tmp_path, reconnect_for_s=20.0)
    worker = run.start_worker("w1", connect=[RELAY, LEARNER_ADDRESS])
    run.world.run(19.0)
    assert worker.stop is None
    assert any("giving up in" in note for note in worker.notes)
    run.world.run(21.0)
    assert worker.stop is not None
    assert isinstance(worker.stop.error, TransportError)
    text = f"{RELAY}, {LEARNER_ADDRESS} for 20 s, since this worker started"
    assert text in str(worker.stop.error)
    assert "[worker] connect" in str(worker.stop.error)


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


def test_another_run_at_the_learners_address_ends_the_node(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner = run.start_learner()
    worker = run.start_worker("w1")
    run.world.run(3.0)
    run.world.kill(learner)
    run.start_learner(run_id="another")
    run.world.run(10.0)
    assert worker.stop is not None
    assert worker.stop.reason == "another_run"


def test_settings_that_changed_with_a_resume_are_not_ignored(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner = run.start_learner()
    worker, relay = run.start_worker("w1"), run.start_relay("r1")
    run.world.run(3.0)
    run.world.kill(learner)
    run.start_learner(settings={"sampling": {"temperature": 0.5}})
    run.world.run(10.0)
    assert worker.stop is not None
    assert worker.stop.reason == "settings_changed"
    assert "sampling" in str(worker.stop.error)
    assert relay.session.is_admitted


def test_a_resume_from_another_directory_changes_no_setting(tmp_path: Path) -> None:
    def code(digest: str, path: str) -> dict[str, Any]:
        return {"task.code": {"rewards": {"hash": digest, "path": path}}}

    run = Run(tmp_path)
    learner = run.start_learner(settings=code("a", "/before/rewards.py"))
    worker = run.start_worker("w1")
    run.world.run(3.0)
    for digest, stopped, until in (("a", None, 10.0), ("b", "settings_changed", 20.0)):
        run.world.kill(learner)
        learner = run.start_learner(settings=code(digest, "/after/rewards.py"))
        run.world.run(until)
        assert (worker.stop and worker.stop.reason) == stopped
    assert worker.stop is not None
    assert "task.code" in str(worker.stop.error)


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


def test_a_relay_is_dismissed_at_the_last_call_though_its_worker_never_left(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner, relay, workers = start_all(run, workers=1)
    run.world.run(5.0)
    run.world.kill(workers[0], is_silent=True)
    run.world.perform(learner, learner.session.finish("done"))
    run.world.run(5.1)
    assert relay.stop is None
    run.world.perform(learner, learner.session.dismiss_all())
    run.world.run(5.2)
    assert relay.stop is not None


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


def test_workers_learn_the_learners_address_from_the_plan(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start_learner()
    relay = run.start_relay("r1")
    worker = run.start_worker("w1", connect=[RELAY])
    run.world.run(5.0)
    run.world.kill(relay)
    run.world.run(15.0)
    assert worker.session.is_admitted
    assert worker.session._control.address == LEARNER_ADDRESS


@pytest.mark.slow
def test_a_relay_that_comes_back_serves_its_workers_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    _, relay, workers = start_all(run, workers=2)
    run.world.run(5.0)
    run.world.kill(relay)
    run.world.run(12.0)
    relay = run.start_relay("r1")
    run.world.run(25.0)
    assert [worker.session.stats().parent for worker in workers] == ["r1", "r1"]
    assert relay.session.broadcast.bytes_sent > 0
    run.audit()


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


def test_the_groups_of_a_dead_worker_are_granted_again(tmp_path: Path) -> None:
    run = Run(tmp_path, sample_s=1.0)
    learner, _, [doomed] = start_all(run)
    run.world.run(4.0)
    held = {r.group_id for r in learner.session.leases.worker_leases("w1")}
    assert held
    run.world.kill(doomed)
    run.start_worker("w2")
    run.world.run(20.0)
    attempts = {(r["group"], r["attempt"]) for r in of_kind(run, "granted")}
    again = {group_id for group_id in held if (group_id, 1) in attempts}
    done = {r["group"] for r in of_kind(run, "accepted")}
    assert held <= again | done
    assert held <= done
    run.audit()


def test_a_worker_that_leaves_gives_its_groups_back_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, sample_s=1.0)
    learner = run.start_learner()
    worker = run.start_worker("w1")
    run.world.run(4.0)
    assert learner.session.leases.num_leases("w1")
    run.world.perform(worker, worker.session.leave("done here"))
    run.world.run(4.1)
    assert learner.session.leases.num_leases("w1") == 0
    assert len(learner.session.leases._returned) == 3
    assert not learner.session.roster.nodes


@pytest.mark.slow
def test_a_killed_learner_resumes_in_a_new_lineage_and_refuses_abandoned_versions(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, checkpoint_interval=100, sample_s=0.5, max_staleness=4)
    learner, _, workers = start_all(run, workers=2)
    run.world.run(8.0)
    assert learner.session.step >= 3
    run.world.kill(learner)
    starts = [worker.session.settings.incarnation for worker in workers]
    run.world.run(12.0)
    learner = run.start_learner()
    assert learner.session.lineages[-1].fork_step == 0
    run.world.run(40.0)
    # Nobody was restarted, everybody is back, nobody holds weights that are gone.
    assert [worker.session.settings.incarnation for worker in workers] == starts
    for worker in workers:
        assert worker.session.is_admitted
        assert worker.session.installed_version.lineage == 2
    # What was finished under the weights that are gone was refused, with that reason.
    assert learner.session.counters["refused/abandoned_version"] >= 1
    assert any(w.session.counters["refused/abandoned_version"] for w in workers)
    # What was accepted under them was discarded, unless it is older than the fork.
    for record in of_kind(run, "discarded"):
        assert record["reason"] in ("abandoned_version", "stale")
    assert learner.session.step > 5
    run.audit()


def test_a_group_that_cannot_be_rewarded_ends_with_its_reason_and_the_worker_lives(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    learner = run.start_learner()
    worker = run.start_worker("w1")
    engine = worker.on_action.__self__
    engine.fail_with = "reward_error"
    run.world.run(3.0)
    engine.fail_with = None
    run.world.run(10.0)
    failed = [r for r in of_kind(run, "discarded") if r["reason"] == "reward_error"]
    assert failed
    assert learner.session.counters["discarded/reward_error"] == len(failed)
    assert worker.session.is_admitted
    assert not len(worker.session.outbox)
    assert run.trained()
    run.audit()


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


def test_leases_that_wait_behind_a_long_group_do_not_expire(tmp_path: Path) -> None:
    run = Run(tmp_path, sample_s=10.0, lease_timeout_s=6.0)
    learner = run.start_learner()
    worker = run.start_worker("w1")

    def report(num_tokens: int) -> None:
        for partial in worker.session.partials.running.values():
            partial.num_progress = num_tokens
        run.world.later(0.5, lambda: report(num_tokens + 1))

    report(1)
    run.world.run(40.0)
    assert learner.session.counters["leases_expired"] == 0
    assert {r["attempt"] for r in of_kind(run, "granted")} == {0}


def test_admission_counts_the_batch_that_is_being_trained(tmp_path: Path) -> None:
    run = Run(tmp_path, max_staleness=0, groups_per_step=2, train_s=5.0, sample_s=0.1)
    run.start_learner()
    run.start_worker("w1")
    run.world.run(30.0)
    assert len(run.trained()) >= 8
    # With S = 0 a group sampled while a step is made would be stale when it is done.
    assert of_kind(run, "discarded") == []


def test_one_place_is_not_given_to_two_workers_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, max_staleness=0, groups_per_step=1, sample_s=5.0)
    learner = run.start_learner()
    for name in ("w1", "w2", "w3"):
        run.start_worker(name)
    run.world.run(4.0)
    assert learner.session.leases.num_running == 1
    assert len(of_kind(run, "granted")) == 1


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


def test_a_group_is_acknowledged_only_after_it_is_stored_and_once(hung_run: Run) -> None:
    ack, actions = deliver(hung_run, 0)
    assert ack is None
    store = actions[0]
    assert deliver(hung_run, 0) == (None, [])
    learner = hung_run.learner
    sent = [message_of(a.frames) for a in learner.stored(0, now=3.0) if isinstance(a, Send)]
    assert sent[0] == Ack(group_id=0, attempt=0, outcome="accepted")
    assert store.group.group_id == 0
    ack, _ = deliver(hung_run, 0, label={"attempt": 4})
    assert (ack.outcome, ack.attempt) == ("duplicate", 4)
    assert learner.counters["duplicates"] == 1
    assert learner.counters["accepted"] == 1


def test_a_late_result_of_a_group_granted_again_wins_if_it_is_the_first(hung_run: Run) -> None:
    learner = hung_run.world.process("learner")
    record = learner.session.leases.worker_leases("w1")[0]
    learner.session.leases.revoke(record)
    assert len(learner.session.leases._returned) == 1
    ack, actions = deliver(hung_run, 0)
    assert ack is None
    assert type(actions[0]).__name__ == "StoreGroup"
    learner.session.stored(0, now=3.0)
    assert len(learner.session.leases._returned) == 0


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


def test_a_full_outbox_stops_leases_until_it_is_acknowledged(hung_run: Run) -> None:
    worker = hung_run.world.process("w1")
    session = worker.session
    session.outbox.max_deliveries = 1
    [partial] = session.partials.take(1, group_size=2, installed=PolicyVersion(1, 0))
    session.finished(make_group(partial.lease.group_id, PolicyVersion(1, 0)), now=3.0)
    assert session.outbox.is_full
    assert session.capacity() == 0
    ack = encode(Ack(group_id=0, attempt=0, outcome="accepted"), source="l", target="w1")
    actions = session.receive(session._control.peer, ack, now=3.1)
    assert isinstance(message_of(actions[-1].frames), Heartbeat)
    assert session.capacity() == 3


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


def test_a_node_that_is_not_known_is_told_to_say_hello(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner = run.start_learner()
    beat = Heartbeat(installed=None, capacity=0, leases=(), stats=NodeStats())
    frames = encode(beat, source="w7", target="learner")
    [answer] = learner.session.receive("in0", frames, now=0.0)
    assert type(message_of(answer.frames)).__name__ == "Rehello"


def test_the_ready_of_a_process_that_was_replaced_does_not_admit_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner = run.start_learner()
    run.start_worker("w1")
    run.world.run(3.0)
    ready = encode(Ready(incarnation="older", digests={}), source="w1", target="learner")
    [answer] = learner.session.receive("in9", ready, now=3.0)
    assert isinstance(message_of(answer.frames), Rehello)


def test_a_node_that_was_forgotten_while_it_waited_says_hello_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.world.drop = lambda source, target, frames: isinstance(message_of(frames), Ready)
    learner = run.start_learner()
    worker = run.start_worker("w1")
    run.world.run(2.0)
    assert state_of(worker) == "readying"
    learner.session.roster.nodes.clear()
    rehello = encode(Rehello(), source="learner", target="w1")
    [answer] = worker.session.receive(worker.session._control.peer, rehello, now=2.0)
    assert isinstance(message_of(answer.frames), Hello)
    assert state_of(worker) == "joining"


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
