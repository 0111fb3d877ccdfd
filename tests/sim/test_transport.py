"""Transports on paper: what only they can show, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from echo.core.errors import TransportError
from echo.net.transport import Connected, DialFailed, Disconnected, Received, TransportOptions
from echo.sim.network import Network, Port, Route
from echo.sim.transport import SimTransport
from tests.sim.virtual import run_virtual

ADDRESS = "tcp://parent:7700"
OPTIONS = TransportOptions(dead_after_s=3.0, min_redial_s=0.2, max_redial_s=0.4, linger_s=2.5)
BULK = bytes(1_000_000)


class Pair:
    """A parent that listens and a child that has dialled it, 50 ms apart."""

    def __init__(self) -> None:
        self.network = Network(between=Route(latency_s=0.05))
        self.parent = SimTransport(self.network, Port("parent", address=ADDRESS), OPTIONS)
        self.child = SimTransport(self.network, Port("child"), OPTIONS)
        self.up = ""

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def join(self) -> str:
        """Let the child say something, and return what the parent calls it."""
        assert self.child.send(self.up, [b"hello"])
        connected, received = await self.parent.receive()
        assert isinstance(connected, Connected)
        assert received == Received(connected.peer, [b"hello"])
        return connected.peer


def run(scenario: Callable[[Pair], Awaitable[None]]) -> None:
    async def joined() -> None:
        pair = Pair()
        await pair.parent.start()
        pair.up = pair.child.dial(ADDRESS)
        assert await pair.child.receive() == [Connected(pair.up, ADDRESS)]
        await scenario(pair)
        await pair.child.close()
        await pair.parent.close()

    run_virtual(joined())


def test_handshake_and_messages_take_the_latency_each_way() -> None:
    async def scenario(pair: Pair) -> None:
        assert pair.now == pytest.approx(0.2)  # four trips
        down = await pair.join()
        assert pair.now == pytest.approx(0.25)
        pair.network.set_route("parent", "child", Route(latency_s=0.5))
        assert pair.parent.send(down, [b"x"])
        assert await pair.child.receive() == [Received(pair.up, [b"x"])]
        assert pair.now == pytest.approx(0.75)

    run(scenario)


def test_a_cut_ends_both_sides_and_mending_it_joins_them_again() -> None:
    async def scenario(pair: Pair) -> None:
        down = await pair.join()
        assert pair.child.send(pair.up, [b"in flight"])
        pair.network.cut("child", "parent")
        assert pair.parent.send(down, [b"never arrives"])
        assert await pair.child.receive() == [Disconnected(pair.up, "no answer for 3 s")]
        assert await pair.parent.receive() == [Disconnected(down, "no answer for 3 s")]
        assert pair.now == pytest.approx(3.25)
        assert not pair.parent.send(down, [b"x"])
        pair.network.mend("child", "parent")
        assert await pair.child.receive() == [Connected(pair.up, ADDRESS)]
        assert pair.now == pytest.approx(3.25 + 0.2 + 0.2)
        assert await pair.join() != down

    run(scenario)


def test_whoever_cannot_connect_is_told_each_time_and_pauses_longer() -> None:
    async def scenario(pair: Pair) -> None:
        nobody = pair.child.dial("tcp://nobody:1")
        failure = DialFailed(nobody, "no node listens there", is_refused=False)
        # No trip to nowhere: at once, then after pauses of .2, .4 and .4 s.
        for at in (0.202, 0.404, 0.806, 1.208, 1.61):
            assert await pair.child.receive() == [failure]
            assert pair.now == pytest.approx(at, abs=0.001)
        pair.child.hang_up(nobody)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pair.child.receive(), 5.0)

    run(scenario)


def test_a_killed_process_is_noticed_at_once_and_a_lost_machine_late() -> None:
    async def scenario(pair: Pair) -> None:
        down = await pair.join()
        pair.child.kill()
        assert await pair.parent.receive() == [Disconnected(down, "the peer's connection closed")]
        assert pair.now == pytest.approx(0.3)
        pair.child = SimTransport(pair.network, pair.child.port, OPTIONS)
        pair.up = pair.child.dial(ADDRESS)
        await pair.child.receive()
        down = await pair.join()
        lost_at = pair.now
        pair.child.kill(is_silent=True)
        with pytest.raises(TransportError, match="closed"):
            await pair.child.receive()
        assert await pair.parent.receive() == [Disconnected(down, "no answer for 3 s")]
        assert pair.now == pytest.approx(lost_at + 3.0)

    run(scenario)


def test_what_was_sent_before_the_end_arrives_for_as_long_as_it_may_linger() -> None:
    async def scenario(pair: Pair) -> None:
        down = await pair.join()
        pair.network.set_route("child", "parent", Route(bytes_per_s=1e6, latency_s=0.05))
        for _ in range(5):
            assert pair.child.send(pair.up, [BULK])
        await pair.child.close()  # one takes a second, and two and a half are left
        events = [await pair.parent.receive() for _ in range(3)]
        assert [type(event) for [event] in events] == [Received, Received, Disconnected]
        assert not pair.parent.send(down, [b"x"])

    run(scenario)
