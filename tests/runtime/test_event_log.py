"""`--log-events`: what a role received and returned, as JSON lines without secrets and weights."""

from __future__ import annotations

import base64
import datetime
import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from echo.core.errors import StorageError
from echo.core.rollout import PolicyVersion
from echo.net.transport import Disconnected, Received
from echo.roles.joining import Configure
from echo.roles.worker.sampling import Score
from echo.runtime import event_log
from echo.runtime.event_log import EventLog
from echo.runtime.identity import load_or_create_identity
from echo.weights.receiver import VersionAudited
from echo.wire.actions import Dial, Send
from echo.wire.codec import encode
from echo.wire.messages import Announce, Grant, Welcome
from tests.promises.world import CHUNK_BYTES, World
from tests.roles.harness import make_lease

LOG = logging.getLogger("test.event_log")
KEY = bytes(range(160, 192))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def line_for(path: Path, kind: str, what: Any) -> dict[str, Any]:
    """Return what is written of one event."""
    log = EventLog(path, log=LOG)
    log.write(kind, what, now=1.5)
    log.close()
    return lines_of(path)[-1]


def received(frames: Any) -> Received:
    return Received("p", frames)


def assert_hidden(secret: bytes, written: bytes) -> None:
    for form in (secret, secret.hex().encode(), *map(base64.b64encode, (secret, secret[1:]))):
        assert form[:20] not in written


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_writes_what_each_role_received_and_returned(tmp_path: Path) -> None:
    world = World(tmp_path, log_events=True, network={"codec": "delta"})
    try:
        world.learner(run={"max_steps": 6})
        world.relay("r1")
        world.worker("w1", via=["r1"])
        world.run_until(lambda: world.installed("w1") == (1, 1))
        world.kill("r1")
        world.relay("r1")
        world.run_until(lambda: not world.is_alive("learner"))
    finally:
        world.close()
    lines = {name: lines_of(tmp_path / f"{name}.jsonl") for name in ("learner", "r1", "w1")}

    def first(name: str, kind: str, what: str) -> dict[str, Any]:
        return next(line for line in lines[name] if line.get(kind) == what)

    assert [sum("started" in line for line in each) for each in lines.values()] == [1, 2, 1]
    assert first("w1", "received", "Grant")["fields"]["leases"][0]["group_id"] == 0
    sampled = first("w1", "returned", "Sample")["call"]["groups"]
    assert sampled[0]["lease"]["group_id"] == 0
    grown = first("w1", "reported", "MembersGrown")
    assert grown["group"]["lease"]["group_id"] == 0
    delivered = first("w1", "returned", "Deliver")
    assert first("w1", "reported", "Started")["now"] < grown["now"] <= delivered["now"]
    arrived = first("learner", "received", "Deliver")
    assert delivered["payload"] == arrived["payload"]
    assert arrived["now"] > delivered["now"]
    for what in ("AppendRecord", "StoreGroup", "Ack"):
        assert first("learner", "returned", what)
    chunk = first("r1", "received", "Chunk")["payload"][0]
    assert set(chunk) == {"bytes", "blake3"}
    assert first("r1", "worked", "DecodeBlock")["result"] == ""
    assert first("w1", "returned", "Install")["version"] == [1, 0]
    assert first("w1", "received", "Disconnected")["reason"]

    written = b"".join((tmp_path / f"{name}.jsonl").read_bytes() for name in lines)
    identity = load_or_create_identity(world.run_dir, run_name="run")
    assert_hidden(identity.key.private_bytes_raw(), written)
    assert_hidden(world.weights.tobytes()[:CHUNK_BYTES], written)


def test_a_node_whose_log_cannot_be_written_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, log_events=True)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write, paths = os.write, []

    def fail(fd: int, data: bytes) -> int:
        if b'"now"' in data:
            paths.append(fd)
            raise full
        return write(fd, data)

    monkeypatch.setattr(os, "write", fail)
    try:
        world.learner(run={"max_steps": 2})
        world.worker("w1")
        world.run_until(lambda: not world.is_alive("learner"))
        assert world.end("learner") == ("finished", "")
    finally:
        world.close()
    assert len(paths) == 2, "each node has tried once"
    assert [text for text in world.notes("w1") if "event log" in text] == [
        f"the event log {tmp_path / 'w1.jsonl'} ends here: [Errno 28] No space left on device"
    ]


# --- the file -------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"^--log-events: .*/x cannot be written: No such file"):
        EventLog(tmp_path / "nowhere" / "x", log=LOG)


def test_the_newest_lines_stay_within_twice_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_FILE_BYTES", 1000)
    log, path = EventLog(tmp_path / "log", log=LOG), tmp_path / "log"
    for number in range(100):
        log.write("received", Disconnected(f"in-{number}", "closed"), now=float(number))
    log.close()
    old = tmp_path / "log.1"
    assert sorted(tmp_path.iterdir()) == [path, old]
    numbers = [line["now"] for line in lines_of(old) + lines_of(path)]
    assert numbers == [float(number) for number in range(int(numbers[0]), 100)]
    assert 1000 <= old.stat().st_size < 1100
    assert path.stat().st_mode & 0o777 == 0o600


# --- what is not written --------------------------------------------------------------------------


def test_bytes_are_their_number_and_the_start_of_their_hash(tmp_path: Path) -> None:
    announce = encode(Announce(version=PolicyVersion(1, 0)), [b"manifest" + KEY], source="learner")
    line = line_for(tmp_path / "log", "returned", Send("out-1", announce))
    [frame] = line.pop("payload")
    assert (frame["bytes"], len(frame["blake3"])) == (40, 12)
    fields = {"version": [1, 0], "offers": []}
    message = {"source": "learner", "target": "", "fields": fields}
    assert line == {"now": 1.5, "returned": "Announce", "peer": "out-1", **message}
    assert "image_hash" in line_for(
        tmp_path / "log", "returned", VersionAudited(PolicyVersion(1, 0), KEY)
    )
    assert_hidden(KEY, (tmp_path / "log").read_bytes())


def test_neither_settings_nor_the_secret_of_a_join_string_are_written(tmp_path: Path) -> None:
    settings = {"task.options": {"api_key": "do-not-tell"}, "sampling.top_p": 1.0}
    welcome = Welcome(
        run_id="run", incarnation="i", public_key=KEY, lineages=(), settings=settings, assets={},
        digests={}, heartbeat_s=1.0, dead_after_s=5.0, signature=KEY,
    )  # fmt: skip
    path, names = tmp_path / "log", ["sampling.top_p", "task.options"]
    frames = encode(welcome, source="learner", target="w1")
    assert line_for(path, "received", received(frames))["fields"]["settings"] == names
    configure = Configure(settings, {"tokenizer.json": KEY})
    assert line_for(path, "returned", configure)["settings"] == names
    join = f"tcp://host:1#{'k' * 43}.{'s' * 22}.{'f' * 22}"
    dialled = line_for(path, "returned", Dial(join, "control"))["address"]
    assert dialled == f"tcp://host:1#{'k' * 43}.***"
    written = path.read_bytes()
    assert b"do-not-tell" not in written
    assert b"s" * 22 not in written
    assert_hidden(KEY, written)


def test_long_texts_and_lists_are_shortened(tmp_path: Path) -> None:
    lease = msgspec.structs.replace(
        make_lease(4), prompt_ids=tuple(range(1000)), example={"prompt": "x" * 5000}
    )
    grant = encode(Grant(leases=(lease,)), source="learner", target="w1")
    [written] = line_for(tmp_path / "log", "returned", Send("p", grant))["fields"]["leases"]
    assert written["prompt_ids"] == [*range(16), "... 1000 in all"]
    assert written["example"]["prompt"] == "x" * 200 + "... 5000 characters"


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"nothing"], [b"\xc1" * 9, b"payload"], [b"\x91" * 5000]]
)
def test_a_malformed_message_is_its_size(tmp_path: Path, frames: list[bytes]) -> None:
    line = line_for(tmp_path / "log", "received", received(frames))
    size = sum(map(len, frames))
    assert line == {"now": 1.5, "received": "malformed", "peer": "p", "bytes": size}


@pytest.mark.parametrize(
    "odd",
    [
        {b"key": {(1, 2): 3}},
        {"settings": {1: "api_key", "b": 2}},
        [msgspec.msgpack.Ext(5, b"x" * 40), 1 << 63],
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    ],
)
def test_no_message_of_a_peer_ends_the_log(tmp_path: Path, odd: Any) -> None:
    deep: Any = odd
    for _ in range(400):
        deep = [deep]
    log = EventLog(tmp_path / "log", log=LOG)
    for body in (odd, {"type": odd, "a": odd}, {"type": "Chunk", "a": [odd, deep]}):
        header = msgspec.msgpack.encode([10, "w1", "learner", body])
        log.write("received", received([header]), now=1.5)
    log.write("returned", Dial("tcp://host:1", "control"), now=2.5)
    log.close()
    assert lines_of(tmp_path / "log")[-1]["address"] == "tcp://host:1"
    assert "api_key" not in (tmp_path / "log").read_text()


def test_values_that_json_lacks_are_written(tmp_path: Path) -> None:
    odd = [
        float("nan"), np.float64(2.5), np.zeros((2, 3)), memoryview(bytes(9)), bytearray(3),
        {4: {5}}, "\ud800", object(), ValueError("why"),
    ]  # fmt: skip
    line = line_for(tmp_path / "log", "returned", Score(odd))  # type: ignore[arg-type]
    expected = [
        None, 2.5, {"shape": [2, 3]}, {"bytes": 9}, {"bytes": 3}, {"4": [5]}, "?", "object", "why",
    ]  # fmt: skip
    assert line["group"] == expected


def test_a_value_that_cannot_be_written_ends_the_log_and_not_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in (endless, {(1, 2): 3}):
        log = EventLog(tmp_path / "log", log=LOG)
        for group in (value, "ignored"):
            log.write("returned", Score(group), now=1.5)  # type: ignore[arg-type]
    assert len(caplog.messages) == 2
    assert all("ends here" in text for text in caplog.messages)
    assert all("started" in line for line in lines_of(tmp_path / "log"))
