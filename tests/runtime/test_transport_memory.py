"""What only the simulated network can show: delays, losses and cuts, at will."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from echo.net.transport import Connected, Disconnected, Received, TransportOptions
from echo.runtime.transport_memory import MemoryNetwork, MemoryTransport
from echo.sim.network import Link

ADDRESS = "tcp://parent:7700"
OPTIONS = TransportOptions(dead_after_s=0.03, min_redial_s=0.2, max_redial_s=0.4)

Scenario = Callable[[MemoryNetwork, MemoryTransport, MemoryTransport, str], Awaitable[None]]


def run(scenario: Scenario) -> None:
    async def joined() -> None:
        network = MemoryNetwork()
        parent = MemoryTransport(network, "parent", ADDRESS, OPTIONS)
        child = MemoryTransport(network, "child", None, OPTIONS)
        async with asyncio.timeout(60):
            await parent.start()
            await child.start()
            up = child.dial(ADDRESS)
            assert await child.receive() == [Connected(up, ADDRESS)]
            await scenario(network, parent, child, up)
            await child.close()
            await parent.close()

    asyncio.run(joined())


def test_a_delay_is_kept_each_way() -> None:
    async def scenario(
        network: MemoryNetwork, parent: MemoryTransport, child: MemoryTransport, up: str
    ) -> None:
        network.links.set_link("child", "parent", Link(delay_s=0.05))
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        assert child.send(up, [b"x"])
        await parent.receive()
        assert loop.time() - sent_at >= 0.05

    run(scenario)


def test_a_cut_ends_both_sides_and_mending_it_joins_them_again() -> None:
    async def scenario(
        network: MemoryNetwork, parent: MemoryTransport, child: MemoryTransport, up: str
    ) -> None:
        assert child.send(up, [b"x"])
        down = (await parent.receive())[0].peer
        network.cut("child", "parent")
        assert parent.send(down, [b"never arrives"])
        assert await child.receive() == [Disconnected(up, "no answer for 0.03 s")]
        assert isinstance((await parent.receive())[-1], Disconnected)
        await asyncio.sleep(0.05)
        network.links.mend("child", "parent")
        assert await child.receive() == [Connected(up, ADDRESS)]
        assert child.send(up, [b"back"])
        connected, received = await parent.receive()
        assert isinstance(connected, Connected)
        assert connected.peer != down
        assert received == Received(connected.peer, [b"back"])

    run(scenario)


def test_a_partition_takes_what_is_in_flight() -> None:
    async def scenario(
        network: MemoryNetwork, parent: MemoryTransport, child: MemoryTransport, up: str
    ) -> None:
        network.links.set_link("child", "parent", Link(delay_s=0.02))
        assert child.send(up, [b"in flight"])
        network.partition(["parent"], ["child"])
        network.links.heal()
        assert await child.receive() == [Disconnected(up, "no answer for 0.03 s")]
        assert await child.receive() == [Connected(up, ADDRESS)]
        assert child.send(up, [b"second"])
        _, received = await parent.receive()
        assert isinstance(received, Received)
        assert received.frames == [b"second"]

    run(scenario)


def test_nothing_follows_a_lost_message_on_its_connection() -> None:
    async def scenario(
        network: MemoryNetwork, parent: MemoryTransport, child: MemoryTransport, up: str
    ) -> None:
        assert child.send(up, [b"0"])
        await parent.receive()
        network.links.set_link("child", "parent", Link(loss=1.0))
        assert child.send(up, [b"1"])
        network.links.set_link("child", "parent", Link())
        assert child.send(up, [b"2"])
        events = await parent.receive()
        assert [type(event) for event in events] == [Disconnected]

    run(scenario)
