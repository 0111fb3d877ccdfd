"""Recorded nodes replay: real nodes, files and messages in virtual time."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from echo.cli.debug import main
from echo.core.errors import DataError
from echo.core.rollout import Group, PartialRollout, PolicyVersion, Rollout
from echo.leases.book import LeaseBook
from echo.leases.partials import PartialGroup, decode_groups, encode_groups
from echo.records.event_log import HEAD, EventFile, read_frames
from echo.roles.learner import Learner
from echo.roles.relay import Relay
from echo.roles.worker import Worker
from echo.runtime import event_log
from echo.runtime.event_log import replay_log
from echo.runtime.event_values import UnseenFrame, Values, class_at, thin_frames
from echo.runtime.identity import load_or_create_identity
from echo.weights.topology.sites import Site
from echo.wire.codec import decode_group, encode, encode_group
from echo.wire.messages import Chunk, Deliver, Form
from tests.promises.world import CHUNK_BYTES, StubEngine, World
from tests.roles.harness import make_lease

pytestmark = pytest.mark.slow

MakeWorld = Callable[..., World]


@pytest.fixture(scope="module")
def make_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def make(**numbers: Any) -> World:
        directory = tmp_path_factory.mktemp("world")
        worlds.append(World(directory, log_events=True, **numbers))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture(scope="module")
def world(make_world: MakeWorld) -> World:
    """Return a whole run with deltas, in which a learner and a relay die and come back."""
    world = make_world(network={"codec": "delta"}, image_bytes=40 * CHUNK_BYTES, jitter_s=0.01)
    with mock.patch.object(StubEngine, "take_counts", return_value={"engine/looks": 1}):
        world.learner(kill_at="trained", times=4)
        world.relay("r1")
        world.worker("w1", via=["r1"], in_place=True)
        world.worker("w2", serves=True, in_place=True)
        world.worker("w3")
        world.run(6.0)
        world.learner(run={"max_steps": 40})
        world.refuse_group(20)
        world.poison(24)
        world.refuse_version("w2", 6)
        world.run(3.0)
        world.interrupt("w3")
        world.run(3.0)
        world.kill("r1")
        world.run(2.0)
        world.relay("r1")
        world.run_until(lambda: not world.is_alive("learner"))
    assert world.end("learner") == ("finished", "")
    assert world.end("w3") == ("interrupted", "")
    return world


def log_of(world: World, name: str) -> Path:
    return next(path for node, path in world.event_logs if node == name)


def calls_of(path: Path, method: str) -> list[tuple[int, float]]:
    """Return (number, time) of the calls of a role's method."""
    entries = [msgspec.msgpack.decode(frame) for frame in read_frames(path)]
    return [
        (number, entry[2]["now"])
        for number, entry in enumerate(entries, start=1)
        if entry[:2] == ["role", method]
    ]


# --- the same -------------------------------------------------------------------------------------


def test_every_process_of_a_run_replays_to_the_same_actions(world: World) -> None:
    assert [name for name, _ in world.event_logs] == [
        "learner", "r1", "w1", "w2", "w3", "learner", "r1",
    ]  # fmt: skip
    for name, path in world.event_logs:
        played = replay_log(path)
        assert played.difference == "", name
        assert not played.is_bounded
        assert played.num_calls > 100
        assert played.num_actions > 100
    assert not [text for _, text in world.told if "event log" in text]


def test_a_replay_starts_from_what_a_learner_was_resumed_with(world: World) -> None:
    [resumed] = [path for name, path in world.event_logs if name == "learner"][1:]
    entries = [msgspec.msgpack.decode(frame) for frame in read_frames(resumed)]
    before = [entry[:2] for entry in entries]
    before = before[: before.index(["role", "Learner"])]
    assert ["leases", "restore"] in before
    assert ["buffer", "put"] in before


def test_a_version_store_that_survives_and_has_no_space_left_replays(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    store = {"store_dir": str(tmp_path / "versions"), "store_bytes": 90 * CHUNK_BYTES}
    world = make_world(image_bytes=60 * CHUNK_BYTES, network={"codec": "delta"})
    world.learner()
    world.run_until(world.published)
    world.link("learner", "r1", bytes_per_s=50_000)
    world.relay("r1", network=store)
    world.run_until(lambda: world.chunks_held("r1")[0] >= 15)
    world.kill("r1")
    world.relay("r1", network=store)
    world.run_until(lambda: world.installed("r1") == (1, 0))
    world.worker("w1", via=["r1"])
    world.run_until(lambda: (world.installed("w1") or (0, 0)) >= (1, 4))
    world.kill("r1")
    world.relay("r1", network=store | {"store_bytes": 40 * CHUNK_BYTES})
    world.run_until(lambda: any("trying again later" in text for text in world.notes("r1")))
    world.run(5.0)
    logs = [path for name, path in world.event_logs if name == "r1"]
    assert [replay_log(path).difference for path in logs] == ["", "", ""]


def test_a_damaged_chunk_is_refused_in_the_replay_as_it_was(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    world.damage_chunks("learner", number=2)
    world.relay("r1")
    world.run_until(lambda: world.installed("r1"))
    assert any("does not match its hash" in text for text in world.notes("r1"))
    assert replay_log(log_of(world, "r1")).difference == ""


# --- another --------------------------------------------------------------------------------------


def no_acknowledgement(learner: Learner, group_id: int, *, now: float) -> list[Any]:
    return learner.grant(now=now)


FAULTS = {
    "learner": (Learner, "stored", no_acknowledgement, "Send Ack"),
    "r1": (Relay, "connected", lambda *args, **kwargs: [], "Send Greet"),
    "w1": (Worker, "connected", lambda *args, **kwargs: [], "Send Greet"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_at_the_call_where_it_shows(
    world: World, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    role, method, fault, was = FAULTS[name]
    path = log_of(world, name)
    number, now = calls_of(path, method)[0]
    with mock.patch.object(role, method, fault):
        assert main([str(path)]) == 1
    told = capsys.readouterr().out
    where = f"call {number}, role.{method} at {now:.6f} s: action 1 was {was} "
    assert where in told
    assert re.search(r"was Send \w+ [0-9a-f]{12} and is now \w+", told)
    assert main([str(path)]) == 0
    assert re.fullmatch(r"\d+ calls, \d+ actions: the same\n", capsys.readouterr().out)


def test_an_attribute_that_a_shell_sets_is_set_in_the_replay(tmp_path: Path) -> None:
    log = event_log.EventLog(tmp_path / "log")
    leases = log.build("leases", LeaseBook, timeout_s=1.0)
    leases.timeout_s = 100.0
    leases.adopt(0, 0, "w1", now=0.0)
    assert leases.expire(now=50.0) == []
    log.close()
    assert replay_log(tmp_path / "log").difference == ""


def test_an_exception_that_was_not_there_before_is_a_difference(world: World) -> None:
    path = log_of(world, "r1")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("planted")

    with mock.patch.object(Relay, "start", fail):
        difference = replay_log(path).difference
    assert "role.start" in difference
    assert "is now ValueError" in difference
    assert "planted" in difference


# --- the file -------------------------------------------------------------------------------------


def test_a_log_that_is_cut_off_is_replayed_up_to_there(world: World, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(log_of(world, "r1").read_bytes()[:-3])
    with pytest.raises(DataError, match=r"is cut off; the \d+ calls before it came out the same"):
        replay_log(cut)
    assert main([str(cut)]) == 3


@pytest.mark.parametrize(
    "entry",
    [
        ["leases", "_changed", {"worker_id": "w1"}],
        ["leases._changes", "clear", {}],
        ["leases", "adopt"],
        ["leases", "adopt", "w1"],
        ["x", "EventFile", {"path": "x"}],
    ],
    ids=["private", "part", "short", "untyped", "class"],
)
def test_a_log_calls_nothing_but_a_role(tmp_path: Path, entry: list[Any]) -> None:
    log = event_log.EventLog(tmp_path / "log")
    log.build("leases", LeaseBook, timeout_s=1.0)
    log.close()
    with (tmp_path / "log").open("ab") as file:
        other = EventFile(tmp_path / "other")
        other.write(msgspec.msgpack.encode(entry))
        other.close()
        file.write((tmp_path / "other").read_bytes()[len(HEAD) :])
    with pytest.raises(DataError, match=r"entry 2 cannot be called: .*; the 1 calls before it"):
        replay_log(tmp_path / "log")


@pytest.mark.parametrize("end", ["bound", "disk"])
def test_a_log_that_ends_early_says_so_and_the_node_goes_on(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = event_log.EventLog(tmp_path / "log")
    leases = log.build("leases", LeaseBook, timeout_s=1.0)
    leases.adopt(0, 0, "w1", now=0.0)
    if end == "bound":
        monkeypatch.setattr(log._file, "_left", 10)
        why = "it has reached its bound"
    else:
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(EventFile, "write", mock.Mock(side_effect=full))
        why = "No space left on device"
    for group in range(1, 4):
        leases.adopt(group, 0, "w1", now=0.0)
    assert leases.num_running == 4
    assert caplog.messages == [f"the event log {tmp_path / 'log'} ends here: {why}"]
    played = replay_log(tmp_path / "log")
    assert (played.num_calls, played.difference) == (2, "")
    assert played.is_bounded == (end == "bound")


def test_no_private_key_and_no_weights_are_written(world: World) -> None:
    identity = load_or_create_identity(world.run_dir, run_name="run")
    written = b"".join(b"".join(read_frames(path)) for _, path in world.event_logs)
    assert identity.key.private_bytes_raw() not in written
    assert identity.key.public_key().public_bytes_raw() in written
    assert world.weights.tobytes()[:1000] not in written


# --- what is thinned out --------------------------------------------------------------------------


def group_with(logprobs: list[float]) -> Group:
    num_tokens = len(logprobs)
    rollout = Rollout(
        token_ids=np.arange(num_tokens, dtype=np.int32) + 7,
        sampler_logprobs=np.array(logprobs, np.float32),
        policy_versions=np.ones((num_tokens, 2), np.int32),
        completion_mask=np.ones(num_tokens, np.bool_),
        reward=0.5,
        finish_reason="stop",
    )
    prompt_ids = np.array([1, 2, 3], np.int32)
    return Group(group_id=4, attempt=0, worker_id="w1", prompt_ids=prompt_ids, rollouts=(rollout,))


@pytest.mark.parametrize(
    "logprobs", [[-1.0], [-1.0, -2.0, -3.0, -0.5], [-1.0, float("nan"), -2.0], [-1.0, 9.0, -1.0]]
)
def test_a_delivered_group_keeps_its_size_and_the_range_of_what_was_sampled(
    logprobs: list[float],
) -> None:
    group = group_with(logprobs)
    frames = encode(Deliver(group_id=4, attempt=0), encode_group(group), source="w1")
    thinned = thin_frames(frames)
    assert [len(frame) for frame in thinned] == [len(frame) for frame in frames]
    assert thinned[:2] == frames[:2]
    before, [after] = group.rollouts[0], decode_group(*thinned[1:]).rollouts
    for name in ("token_ids", "sampler_logprobs"):
        for bound in (np.min, np.max):
            was, is_now = bound(getattr(before, name)), bound(getattr(after, name))
            assert np.array_equal(was, is_now, equal_nan=True)
    assert np.array_equal(before.policy_versions, after.policy_versions)


def test_what_a_worker_has_saved_keeps_its_size_and_the_range_of_what_was_sampled() -> None:
    ids, logprobs = np.array([7, 9, 8], np.int32), np.array([-1.0, -3.0, -2.0], np.float32)
    begun = PartialRollout().extended(
        ids, logprobs, np.ones((3, 2), np.int32), finish_reason="abort"
    )
    data = encode_groups("run", [PartialGroup(make_lease(4), [begun, PartialRollout()])])
    thinned = Values().pack(data, "saved")
    assert len(thinned) == len(data)
    [group] = decode_groups(thinned, run_id="run")
    assert group.lease == make_lease(4)
    assert group.members[0].token_ids.tolist() == [7, 7, 9]
    assert group.members[0].sampler_logprobs.tolist() == [-3.0, -3.0, -1.0]
    assert Values().pack(b"not a file", "saved") == b"not a file"


def test_a_chunk_is_its_length_and_hash_and_what_is_malformed_stays() -> None:
    chunk = encode(Chunk(version=PolicyVersion(1, 0), index=0), [b"x" * 5000], source="r1")
    frame = thin_frames(chunk)[1]
    assert isinstance(frame, UnseenFrame)
    assert len(frame) == 5000
    assert len(msgspec.msgpack.encode(Values().pack(frame))) < 100
    odd = encode(Deliver(group_id=4, attempt=0), [b"header", b"arrays"], source="w1")
    assert thin_frames(odd) == odd
    assert thin_frames([b"nothing"]) == [b"nothing"]


def pack_and_unpack(value: Any) -> Any:
    return Values().decoder.decode(msgspec.msgpack.encode(Values().pack(value)))


@pytest.mark.parametrize(
    "value",
    [
        {1: [{3, 4}], "x": (None, True), "y": {"a": b"b"}},
        Site("w1", "worker", "tcp://w1:1", price_per_gb=0.5),
        [Form("delta", PolicyVersion(1, 2)), bytearray(b"ab"), 1.5],
    ],
    ids=["containers", "record", "list"],
)
def test_values_come_back_with_their_types(value: Any) -> None:
    unpacked = pack_and_unpack(value)
    assert repr(unpacked) == repr(value)
    assert type(unpacked) is type(value)


def test_sampled_arrays_keep_their_shapes_and_ranges_and_the_others_all() -> None:
    [rollout] = group_with([-1.0, -2.0, -4.0, -3.0]).rollouts
    unpacked = pack_and_unpack(rollout)
    assert unpacked.token_ids.tolist() == [7, 7, 7, 10]
    assert unpacked.sampler_logprobs.tolist() == [-4.0, -4.0, -4.0, -1.0]
    assert unpacked.policy_versions.tolist() == [[1, 1]] * 4
    assert (unpacked.reward, unpacked.finish_reason) == (0.5, "stop")


def test_a_value_that_cannot_be_recorded_ends_the_log_and_not_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = event_log.EventLog(tmp_path / "log")
    leases = log.build("leases", LeaseBook, timeout_s=1.0)
    for worker in ("w1", object(), "w3"):
        leases.adopt(0, 0, worker, now=0.0)  # type: ignore[arg-type]
    assert len(leases.leases_of(0)) == 3
    assert "leases.adopt cannot be recorded" in caplog.text
    assert (replay_log(tmp_path / "log").num_calls, len(caplog.messages)) == (2, 1)


def test_what_is_not_recorded_is_a_method_of_one_class_only() -> None:
    for name in event_log.READS:
        assert sum(hasattr(kind, name) for kind in event_log.BUILT.values()) == 1, name


class Foreign(msgspec.Struct):
    """A record, but none of Echo's."""


def test_only_records_of_echo_are_made() -> None:
    assert class_at("echo.wire.messages:Chunk") is Chunk
    others = ("os:system", "echo.records.event_log:EventFile", "echo.core.units:one_line")
    for path in (*others, f"{__name__}:Foreign"):
        with pytest.raises(DataError, match="unknown class"):
            class_at(path)
