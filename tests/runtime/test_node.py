from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from echo.core.errors import StorageError
from echo.core.rollout import PolicyVersion
from echo.net.transport import Received
from echo.roles.node import Role
from echo.roles.worker.departure import Drained
from echo.runtime.node import STALL_S, BusyTime, Node, Topics
from echo.sim.clock import InlineThreads
from echo.sim.network import Network, Port
from echo.sim.transport import SimTransport
from echo.weights.store.encoded import DecodeBlock
from echo.wire.actions import Action, Dial, HangUp, Note, Send, Stop, Work
from echo.wire.codec import Frame, encode
from echo.wire.messages import Chunk, Gone, Goodbye
from tests.promises.conftest import MakeWorld
from tests.sim.virtual import run_virtual


class Script(Role):
    """A role that answers what it is told to."""

    deadline: float | None = None

    def __init__(self) -> None:
        self.on_message: Callable[[str, list[Frame]], list[Action]] = lambda peer, frames: []
        self.on_expire: Callable[[], list[Action]] = list
        self.expelled: list[str] = []

    def receive(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        return self.on_message(peer, frames)

    def validate(self) -> None:
        """Find nothing wrong."""

    def expel(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        self.expelled.append(peer)
        return [HangUp(peer)]

    def disconnected(self, peer: str, reason: str, *, now: float) -> list[Action]:
        return []

    def handle(self, event: Any, *, now: float) -> list[Action]:
        return []

    def worked(self, work: Work, fault: str, *, now: float) -> list[Action]:
        return fail()

    def expire(self, *, now: float) -> list[Action]:
        self.deadline = None
        return self.on_expire()


def fail() -> list[Action]:
    raise StorageError("the disk is full")


async def begun(node: Node) -> asyncio.Task[str]:
    """Let a node begin to run."""
    running = asyncio.create_task(node.run())
    await asyncio.sleep(0)
    return running


def play(scenario: Callable[[Node, Script, Network], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            network, script = Network(), Script()
            transport = SimTransport(network, Port("node", address="tcp://node:1"))
            await transport.start()
            await scenario(Node(script, transport, log=logging.getLogger("test")), script, network)

    asyncio.run(main())


def test_stop_ends_it_with_the_reason_and_the_first_one_counts() -> None:
    async def scenario(node: Node, script: Script, network: Network) -> None:
        running = await begun(node)
        assert not node.has_ended
        node.perform([Stop("first"), Stop("second", StorageError("late"))])
        assert node.has_ended
        assert await running == "first"
        assert network.listener("tcp://node:1") is None

    play(scenario)


def test_an_error_of_a_task_ends_it_and_everything_beside_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(node: Node, script: Script, network: Network) -> None:
        async def broken() -> None:
            raise KeyError("bug")

        async def endless() -> None:
            await asyncio.Event().wait()

        running = await begun(node)
        beside = node.spawn(endless(), name="endless")
        node.spawn(broken(), name="broken")
        with pytest.raises(KeyError):
            await running
        assert beside.cancelled()

    play(scenario)
    assert "internal error" in caplog.text


@pytest.mark.timeout(20)
def test_it_ends_where_all_its_tasks_are_over_by_themselves() -> None:
    async def scenario(node: Node, script: Script, network: Network) -> None:
        script.on_message = lambda peer, frames: fail()
        running = await begun(node)
        other = SimTransport(network, Port("other"))
        await other.start()
        peer = other.dial("tcp://node:1")
        await other.receive()
        other.send(peer, [b"anything"])
        with pytest.raises(StorageError):
            await running
        await other.close()

    play(scenario)


def test_work_that_the_end_overtakes_is_closed_before_it_began() -> None:
    async def scenario(node: Node, script: Script, network: Network) -> None:
        running = await begun(node)
        late: list[Coroutine[Any, Any, None]] = []

        async def endless() -> None:
            await asyncio.Event().wait()

        async def begin_another() -> None:
            try:
                await endless()
            finally:
                late.append(endless())
                node.spawn(late[-1], name="late")

        node.spawn(begin_another(), name="first")
        await asyncio.sleep(0)
        late.append(endless())
        node.stop("done")
        node.spawn(late[-1], name="too late")
        assert await running == "done"
        assert [inspect.getcoroutinestate(work) for work in late] == [inspect.CORO_CLOSED] * 2

    play(scenario)


def test_a_message_is_answered_and_the_timer_fires() -> None:
    async def scenario(node: Node, script: Script, network: Network) -> None:
        fired = asyncio.Event()

        def expire() -> list[Action]:
            fired.set()
            return []

        def answer(peer: str, frames: list[Frame]) -> list[Action]:
            script.deadline = node.now
            return [Note("info", "heard"), Send(peer, [b"answer"])]

        script.on_message, script.on_expire = answer, expire
        running = asyncio.create_task(node.run())
        other = SimTransport(network, Port("other"))
        await other.start()
        peer = other.dial("tcp://node:1")
        await other.receive()
        other.send(peer, [b"question"])
        [event] = await other.receive()
        assert event.frames == [b"answer"]  # type: ignore[union-attr]
        await fired.wait()
        node.stop("done")
        await running
        await other.close()

    play(scenario)


def test_what_came_unencrypted_is_dropped_unless_it_is_a_chunk_of_a_neighbour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Somebody on the way may have made it."""
    chunk = Chunk(version=PolicyVersion(1, 1), index=0)
    forged: list[Any] = [
        encode(Gone(version=PolicyVersion(1, 1)), source="a"),
        encode(chunk, [b"data"], source="a", target="learner"),  # a relay would pass it on
        [b"nonsense"],
        [],
    ]

    async def scenario(node: Node, script: Script, network: Network) -> None:
        heard: list[list[Frame]] = []

        def note(peer: str, frames: list[Frame]) -> list[Action]:
            heard.append(frames)
            return [Stop("done")] if frames == [b"last"] else []

        script.on_message = note
        right = encode(chunk, [b"data"], source="a")
        events = [Received("p", frames, is_public=True) for frames in (*forged, right)]
        told = iter([[*events, Received("p", [b"last"])]])

        async def receive() -> Any:
            return next(told, None) or await asyncio.Event().wait()

        node.transport.receive = receive  # type: ignore[method-assign]
        assert await node.run() == "done"
        assert heard == [right, [b"last"]]

    play(scenario)
    assert caplog.text.count("unencrypted message that is no chunk") == 1


class HandleLoop(asyncio.SelectorEventLoop):
    """Answers `call_at` with a plain Handle, as uvloop does for an instant that has just passed."""

    def call_at(  # type: ignore[override] # no TimerHandle
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)


def test_the_timer_fires_again_and_again_where_its_handle_knows_no_instant() -> None:
    async def main() -> None:
        script, num_fired = Script(), 0
        transport = SimTransport(Network(), Port("node"))
        await transport.start()
        node = Node(script, transport, log=logging.getLogger("test"))

        def expire() -> list[Action]:
            nonlocal num_fired
            num_fired += 1
            script.deadline = 0.0
            return [Stop("done")] if num_fired == 3 else []

        script.on_expire = expire
        script.deadline = 0.0
        running = await begun(node)
        node.perform([])
        assert await running == "done"

    with asyncio.Runner(loop_factory=HandleLoop) as runner:
        runner.run(main())


def test_an_action_of_another_role_is_a_bug() -> None:
    async def scenario(node: Node, script: Script, network: Network) -> None:
        with pytest.raises(TypeError, match="Drained is not for Node"):
            node.perform([Drained()])
        await node.transport.close()

    play(scenario)


def test_notes_of_a_topic_are_told_once_a_minute_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    topics = Topics(logging.getLogger("test.topics"))
    with caplog.at_level(logging.INFO):
        for second in range(130):
            topics.log(Note("info", f"lease {second} expired", "expired"), now=float(second))
            topics.log_due(now=float(second))
        topics.log(Note("info", "no topic"), now=130.0)
        topics.log(Note("info", "no topic"), now=130.0)
    assert [record.getMessage() for record in caplog.records] == [
        "lease 0 expired",
        "lease 59 expired (59 like it in the last minute)",
        "lease 119 expired (60 like it in the last minute)",
        "no topic",
        "no topic",
    ]


def test_a_topic_that_is_over_is_told_of_no_more(caplog: pytest.LogCaptureFixture) -> None:
    topics = Topics(logging.getLogger("test.topics"))
    with caplog.at_level(logging.INFO):
        for second in range(3):
            topics.log(Note("warning", "lost the link", "lost link"), now=float(second))
        topics.log(Note("info", "joined", ends="lost link"), now=3.0)
        topics.log_due(now=100.0)
        topics.log(Note("warning", "lost the link", "lost link"), now=100.0)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["lost the link", "joined", "lost the link"]


def test_an_address_that_cannot_be_dialled_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(node: Node, script: Script, network: Network) -> None:
        for _ in range(3):
            node.perform([Dial("tcp://nowhere", "weights")])
        await node.transport.close()

    play(scenario)
    [told] = [each.getMessage() for each in caplog.records]
    assert "'tcp://nowhere' is not an address" in told


def test_what_cannot_be_let_go_of_keeps_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(node: Node, script: Script, network: Network) -> None:
        let_go: list[str] = []
        node.release = lambda: let_go.append("role") or 1 / 0  # type: ignore[assignment, func-returns-value]
        node.at_release.append(lambda: let_go.append("engine"))
        closed, close = [], node.transport.close

        async def closing() -> None:
            closed.append(1)
            await close()

        node.transport.close = closing  # type: ignore[method-assign]
        running = await begun(node)
        node.stop("done")
        assert await running == "done"
        assert (let_go, closed) == (["role", "engine"], [1])

    play(scenario)
    assert "cannot release something" in caplog.text


def test_an_interrupt_drains_once() -> None:
    async def scenario(node: Node, script: Script, network: Network) -> None:
        drained = []

        async def drain() -> None:
            drained.append(1)

        node.drain = drain  # type: ignore[method-assign]
        running = await begun(node)
        node.interrupt()
        node.interrupt()
        assert await running == "interrupted"
        assert drained == [1]

    play(scenario)


async def two_messages(node: Node, network: Network) -> None:
    """Have another node send the same message twice, and let them arrive."""
    other = SimTransport(network, Port("other"))
    await other.start()
    peer = other.dial("tcp://node:1")
    await other.receive()
    for _ in range(2):
        other.send(peer, encode(Goodbye(reason="x"), source="w1", target="learner"))
        for _ in range(10):  # rounds of the loop
            await asyncio.sleep(0)
    await other.close()


def test_a_fault_in_handling_a_message_ends_its_sender_and_not_the_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(node: Node, script: Script, network: Network) -> None:
        script.on_message = lambda peer, frames: [][1]
        running = await begun(node)
        await two_messages(node, network)
        assert not node.has_ended
        node.stop("done")
        assert await running == "done"
        assert script.expelled == ["in-1"], "what it sends after that is not read"

    play(scenario)
    [record] = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert record.getMessage().startswith("internal error in a Goodbye from w1: closing its link")
    assert "IndexError" in caplog.text


@pytest.mark.parametrize("where", ["timer", "message", "thread", "result of a thread"])
def test_a_fault_of_the_nodes_own_disk_ends_it_without_a_trace(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Block(DecodeBlock):
        def run(self) -> str:
            return str(fail()) if where == "thread" else ""

    async def scenario(node: Node, script: Script, network: Network) -> None:
        script.on_expire, script.on_message = fail, lambda peer, frames: fail()
        running = await begun(node)
        if where == "message":
            await two_messages(node, network)
        else:
            script.deadline = 0.0 if where == "timer" else None
            node.perform([] if where == "timer" else [object.__new__(Block)])
        with pytest.raises(StorageError, match="the disk is full"):
            await running
        assert not script.expelled, "whoever was heard is not to blame"

    play(scenario)
    assert "internal error" not in caplog.text


def test_the_timer_is_armed_anew_only_for_an_earlier_deadline() -> None:
    async def main() -> list[float]:
        loop, armed, fired = asyncio.get_running_loop(), [], []
        script = Script()
        transport = SimTransport(Network(), Port("node", address="tcp://node:1"))
        await transport.start()
        node = Node(script, transport, threads=InlineThreads(), log=logging.getLogger("test"))
        running = await begun(node)
        set_timer = node._set_timer

        def note(at: float) -> None:
            armed.append(at)
            set_timer(at)

        def expire() -> list[Action]:
            fired.append(loop.time())
            return []

        node._set_timer = note  # type: ignore[method-assign]
        script.on_expire = expire
        for deadline in (5.0, 7.0, 5.0, 3.0, 4.0):
            script.deadline = deadline
            node.perform([])
        assert armed == [5.0, 3.0]
        await asyncio.sleep(10.0)
        node.stop("over")
        await running
        return fired

    assert run_virtual(main()) == [3.0]


def test_a_loop_that_is_held_up_again_and_again_comes_to_what_is_due() -> None:
    async def scenario(node: Node, script: Script, network: Network) -> None:
        running, fired = await begun(node), list[int]()

        def fire() -> list[Action]:
            fired.append(1)
            return []

        script.on_expire = fire
        for num_fired in (0, 1, 1, 2):
            node._set_timer(node.now - 2 * STALL_S)
            node._on_timer()
            assert len(fired) == num_fired
        node.stop("done")
        await running

    play(scenario)


def test_a_relay_tells_of_the_versions_that_it_holds_now_and_then(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    world.relay("r1")
    world.worker("w1")
    world.run_until(lambda: world.step >= 5)
    assert [note for note in world.notes("r1") if "holds" in note] == ["holds v0"]


def test_busy_time_counts_calls_that_overlap_once() -> None:
    busy = BusyTime()
    busy.begin(now=1.0)
    busy.begin(now=1.5)
    busy.end(now=2.0)
    assert busy.take_ms(now=2.5) == 1500
    busy.end(now=3.0)
    assert busy.take_ms(now=9.0) == 500
    busy.begin(now=9.0)
    assert (busy.take_ms(now=9.0004), busy.take_ms(now=9.0015)) == (0, 1)
