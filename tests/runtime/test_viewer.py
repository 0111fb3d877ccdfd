"""Tests of viewers' connections over real links: what they are told, and by whom."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo.core.errors import ConfigError, DataError, RefusedError, TransportError
from echo.core.monitoring.metrics import Counters
from echo.core.monitoring.status import RunStatus
from echo.net.transport import Connected, Disconnected, Received, TransportOptions
from echo.net.zmq import ZmqTransport
from echo.records.ledger import lock_run
from echo.roles.viewers import MAX_VIEWERS, OPERATE, VIEW, MakeStatus, Operate, Viewers
from echo.runtime import access, viewer
from echo.runtime.access import Access, Target, find_run, write_access
from echo.runtime.identity import load_or_create_keys
from echo.wire.actions import Action, HangUp, PeerFaults, Send
from echo.wire.messages import Operation, Outcome
from tests.core.test_status import STATUS


class StandIn:
    """The learner's end of viewers, in a thread of its own."""

    def __init__(self, run_dir: Path, listen: str = "tcp://127.0.0.1:0") -> None:
        self.run_dir, self._listen = run_dir, listen
        self.operations: list[Operation] = []
        self.viewers = Viewers(Counters(), PeerFaults())
        self._is_up, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    @contextmanager
    def serving(self) -> Iterator[StandIn]:
        self._thread.start()
        assert self._is_up.wait(30)
        try:
            yield self
        finally:
            self._is_over.set()
            self._thread.join()

    async def _serve(self) -> None:
        keys, _ = load_or_create_keys(self.run_dir)
        transport = ZmqTransport(self._listen, TransportOptions(linger_s=0.2), keys)
        await transport.start()
        write_access(self.run_dir, str(transport.listen_address), keys)
        self._is_up.set()
        viewers, loop = self.viewers, asyncio.get_running_loop()
        while not self._is_over.is_set():
            events: list[Any] = []
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    events = await transport.receive()
            for event in events:
                match event:
                    case Connected(peer, None, user):
                        self._act(transport, viewers.connected(peer, user, now=loop.time()))
                    case Disconnected(peer):
                        viewers.disconnected(peer)
                    case Received(peer, frames) if peer in viewers:
                        self._act(transport, viewers.receive(peer, frames, now=loop.time()))
            self._act(transport, viewers.expire(now=loop.time()))
        await transport.close()

    def _act(self, transport: ZmqTransport, actions: list[Action]) -> None:
        now = asyncio.get_running_loop().time()
        for action in actions:
            match action:
                case Send():
                    transport.send(action.peer, action.frames)
                case HangUp():
                    transport.hang_up(action.peer)
                case MakeStatus():
                    status = replace(STATUS, step=STATUS.step + 1)
                    self._act(transport, self.viewers.status_made(status.to_json(), now=now))
                case Operate(peer, operation):
                    self.operations.append(operation)
                    outcome = Outcome(number=operation.number, is_done=True, text="as asked")
                    self._act(transport, self.viewers.operation_done(peer, outcome))


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[StandIn]:
    with StandIn(tmp_path).serving() as learner:
        yield learner


def target_of(learner: StandIn, key: str = OPERATE) -> Target:
    return find_run(str(learner.run_dir / "keys" / key))


@pytest.mark.parametrize("key", [VIEW, OPERATE])
def test_a_status_is_asked_with_either_key(learner: StandIn, key: str) -> None:
    assert viewer.ask_status(target_of(learner, key)) == replace(STATUS, step=STATUS.step + 1)
    assert viewer.ask_status(find_run(str(learner.run_dir))).step == STATUS.step + 1


def test_a_command_is_carried_out_for_an_operator_only(learner: StandIn) -> None:
    outcome = viewer.send_command(target_of(learner), "drain", "w1")
    assert outcome == Outcome(number=1, is_done=True, text="as asked")
    [operation] = learner.operations
    assert (operation.act, operation.subject) == ("drain", "w1")
    assert "@" in operation.by
    outcome = viewer.send_command(target_of(learner, VIEW), "drain", "w2")
    assert not outcome.is_done
    assert "this key only reads" in outcome.text
    assert len(learner.operations) == 1


def test_a_learner_that_admits_no_more_says_so(learner: StandIn) -> None:
    for number in range(MAX_VIEWERS[VIEW]):
        learner.viewers.connected(f"other-{number}", VIEW, now=1e18)
    with pytest.raises(RefusedError, match="16 viewers are connected"):
        viewer.ask_status(target_of(learner, VIEW))


def test_a_key_of_another_run_is_refused(learner: StandIn) -> None:
    [access] = target_of(learner).accesses
    other = Target("other", None, (Access(access.address, b"x" * 16),))
    with pytest.raises(TransportError, match=r"refuses this key.*copy keys/view or keys/operate"):
        viewer.ask_status(other)


def test_where_nothing_listens_this_is_said(tmp_path: Path) -> None:
    with StandIn(tmp_path).serving() as learner:
        target = target_of(learner)
    with pytest.raises(TransportError, match=r"no learner answers: the port of tcp://127.*closed"):
        viewer.ask_status(target)
    with pytest.raises(TransportError, match="no learner answers"):
        viewer.watch(target, Watcher(lambda _: None))


def test_a_learner_that_is_starting_is_dialled_until_it_answers(tmp_path: Path) -> None:
    with StandIn(tmp_path).serving() as learner:
        target = replace(target_of(learner), run_dir=tmp_path)

    def then(watcher: Watcher) -> None:
        watcher.is_over = watcher.said[-1:] == ["the learner is starting: it does not answer yet"]

    watcher = Watcher(then)
    lock = lock_run(tmp_path)
    try:
        viewer.watch(target, watcher)
    finally:
        os.close(lock)
    assert watcher.is_over
    with pytest.raises(TransportError, match="no learner answers"):
        viewer.watch(target, Watcher(then))


class Watcher:
    """Records what it is shown, and ends when a function of it says so."""

    keyboard: int | None = None

    def __init__(self, then: Callable[[Watcher], None]) -> None:
        self.statuses: list[RunStatus] = []
        self.said: list[str] = []
        self.pressed: list[Operation] = []
        self.is_over = False
        self._then = then

    def show(self, status: RunStatus, *, may_operate: bool) -> None:
        assert may_operate
        self.statuses.append(status)
        self._then(self)

    def say(self, text: str) -> None:
        self.said.append(text)
        self._then(self)

    def read_keys(self) -> list[Operation]:
        assert self.keyboard is not None
        os.read(self.keyboard, 100)
        return self.pressed


def test_a_run_is_watched_and_operated_by_keys(
    learner: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer, "ASK_S", 0.01)
    keyboard, person = os.pipe()

    def then(watcher: Watcher) -> None:
        if len(watcher.statuses) == 2 and not learner.operations:
            os.write(person, b"p")
        watcher.is_over = "as asked" in watcher.said

    watcher = Watcher(then)
    watcher.keyboard, watcher.pressed = keyboard, [Operation(number=5, act="pause", by="ann")]
    viewer.watch(target_of(learner), watcher)
    assert [operation.act for operation in learner.operations][:1] == ["pause"]
    assert len(watcher.statuses) >= 2
    os.close(keyboard)
    os.close(person)


# --- keys -----------------------------------------------------------------------------------------


def test_a_target_is_a_directory_a_file_or_a_key(learner: StandIn, tmp_path: Path) -> None:
    text = (learner.run_dir / "keys" / VIEW).read_text()
    assert find_run(text).accesses == target_of(learner, VIEW).accesses
    assert Access.parse(text, source="x").secret.hex() not in repr(find_run(text))
    assert find_run(text).name == text.partition("#")[0]
    assert find_run(str(tmp_path)).run_dir == tmp_path
    empty = tmp_path / "empty"
    empty.mkdir()
    assert find_run(str(empty)).accesses == (), "a run without encryption, or none"
    (empty / "keys").mkdir()
    (empty / "keys" / "join").write_text("of an evaluation")
    with pytest.raises(DataError, match="no run has started here; an evaluation"):
        find_run(str(empty))
    assert oct((learner.run_dir / "keys" / OPERATE).stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nowhere", "'nowhere' is no run: expected the directory of a run"),
        ("x" * 300, "is no run"),
        ("tcp://host:1", "the argument is no viewer's key"),
        (
            "tcp://host:1#" + "k" * 43 + "." + "s" * 22 + "." + "f" * 22,
            "A join string is for nodes",
        ),
    ],
)
def test_other_texts_are_refused_and_not_repeated(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        find_run(text)
    assert "kkk" not in str(error.value)


def test_a_learner_on_this_machine_is_dialled_here_first(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    key = "k" * 43
    (tmp_path / "keys" / OPERATE).write_text(f"tcp://192.0.2.7:9000#{key}.{'A' * 22}\n")
    for listen, own in (
        ("tcp://0.0.0.0:7700", "tcp://127.0.0.1:7700"),
        ("tcp://0.0.0.0:0", "tcp://127.0.0.1:9000"),
        ("tcp://10.0.0.1:7700", "tcp://10.0.0.1:7700"),
    ):
        (tmp_path / "config.json").write_text(f'{{"learner": {{"listen": "{listen}"}}}}')
        addresses = [each.address for each in access.find_run(str(tmp_path)).accesses]
        assert addresses == [f"{own}#{key}", f"tcp://192.0.2.7:9000#{key}"]
