"""Test the connection to the learner for `echo-rl doctor`.

The doctor dials and joins as a relay does, up to the Welcome. The doctor never sends Ready, so the
learner gives it no place in the broadcast and no lease. At the end the doctor sends Goodbye.

    Greet -> Greeted      the node that answers
    Probe -> ProbeAck     round-trip time; upload rate, measured with blocks of zeros
    Hello -> Welcome      the learner's signature and settings, the hashes of the learner's files,
                          and the learner's time of day
    AssetRequest -> Asset download rate, measured with the largest file that a node may request
    Goodbye

If the doctor dials a relay, Greet and Probe measure the link to the relay. The later messages
measure the whole way to the learner.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from echo import __version__
from echo.core.errors import EchoError, RefusedError, TransportError
from echo.core.units import format_bytes, format_duration
from echo.net.transport import (
    Connected,
    DialFailed,
    Disconnected,
    Received,
    Transport,
    TransportEvent,
    parse_address,
    without_key,
)
from echo.roles.joining import answer_fault, hash_hello
from echo.runtime.doctor.machine import Finding
from echo.wire.codec import (
    Frame,
    decode_envelope,
    decode_message,
    encode,
    other_protocol,
    payload_bytes,
)
from echo.wire.messages import (
    LEARNER_ID,
    Asset,
    AssetRequest,
    Goodbye,
    Greet,
    Greeted,
    Hello,
    Message,
    Probe,
    ProbeAck,
    Refuse,
    Welcome,
)
from echo.wire.seals import Channel, SealKeys, channel_of

STEP_S = 10.0
"""Longest wait for an answer, seconds."""
NUM_PINGS = 4
"""Number of empty probes; the time of the fastest probe is the round-trip time."""
FIRST_PROBE_BYTES, MAX_PROBE_BYTES = 64 << 10, 8 << 20
"""Size of the first and of the largest probe, in bytes. At 1 Mbit/s the first probe takes half a
second. At 1 Gbit/s the largest probe takes 67 ms.
"""
LEAST_FILE_BYTES = 256 << 10
"""Size of the smallest file whose transfer is used to measure the rate."""
ENOUGH_S = 0.5
"""A probe that takes at least this many seconds is large enough to measure the rate."""
LONG_RTT_S = 0.4
"""The doctor warns if the round-trip time is longer than this number of seconds. Light in a fibre
to the other side of the Earth and back takes 0.2 s.
"""
SLOW_BYTES_PER_S = 1e6
"""The doctor warns if a rate is lower than this number of bytes per second. At this rate, the
weights of a model with 0.5 billion parameters in 16 bits take 17 minutes.
"""
LONG_SKEW_S = 1.0
"""The doctor warns if the clocks differ by more than this number of seconds plus the measurement
error.
"""

Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The results of testing one address. Results of steps that were not reached are None."""

    address: str
    node_id: str | None = None
    """The id of the node that answered: the learner or a relay."""
    rtt_s: float | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    welcome: Welcome | None = None
    """The learner's signed answer to this machine's Hello."""
    skew_s: float | None = None
    """How far the learner's clock is ahead of this machine's clock, seconds."""
    skew_error_s: float = 0.0
    """Largest error of `skew_s`, seconds: half of a round-trip time."""
    fault: EchoError | None = None
    """The error that ended the test early; None if the test was completed."""


class _Trial:
    """The exchange of messages over one dialled link."""

    def __init__(self, transport: Transport, address: str, fingerprint: bytes | None) -> None:
        self._transport, self._fingerprint = transport, fingerprint
        self._node_id = f"doctor-{secrets.token_hex(4)}"
        self._seal_keys = SealKeys(secrets.token_bytes(32))
        self._peer = ""
        self.report = LinkReport(without_key(address))
        self._address = address

    async def run(self) -> LinkReport:
        """Exchange the messages, and return the report. After a failure, the report is partial."""
        try:
            self._peer = self._transport.dial(self._address)
            await self._connect()
            await self._measure_uplink()
            await self._join()
        except EchoError as error:
            self.report = replace(self.report, fault=error)
        return self.report

    async def _connect(self) -> None:
        async with self._within("no node answered"):
            while not any(isinstance(event, Connected) for event in await self._events()):
                pass
        greet = Greet(node_id=self._node_id, role="relay", purpose="control")
        greeted, _, _ = await self._ask(greet, Greeted)
        self.report = replace(self.report, node_id=greeted.node_id)

    async def _measure_uplink(self) -> None:
        rtt_s = min([(await self._ask(Probe(), ProbeAck, b""))[2] for _ in range(NUM_PINGS)])
        self.report = replace(self.report, rtt_s=rtt_s)
        num_bytes = FIRST_PROBE_BYTES
        while True:
            _, _, took_s = await self._ask(Probe(), ProbeAck, bytes(num_bytes))
            self.report = replace(self.report, up_bytes_per_s=self._rate(num_bytes, took_s))
            if took_s >= ENOUGH_S or num_bytes >= MAX_PROBE_BYTES:
                return
            num_bytes = min(8 * num_bytes, MAX_PROBE_BYTES)

    def _rate(self, num_bytes: int, took_s: float) -> float:
        return num_bytes / max(took_s - (self.report.rtt_s or 0.0), 1e-6)

    async def _join(self) -> None:
        hello = Hello(
            node_id=self._node_id,
            role="relay",
            incarnation=secrets.token_hex(8),
            echo_version=__version__,
            advertise=None,
            digests={},
            seal_key=self._seal_keys.seal_key(),
            nonce=self._seal_keys.nonce(),
        )
        welcome, _, took_s = await self._ask(hello, Welcome, target=LEARNER_ID)
        answered_at = time.time() - took_s / 2
        fault = answer_fault(welcome, known=self._fingerprint)
        if fault is not None:
            raise RefusedError(fault[1])
        self.report = replace(self.report, welcome=welcome)
        if welcome.time_of_day:
            skew_s = welcome.time_of_day - answered_at
            self.report = replace(self.report, skew_s=skew_s, skew_error_s=took_s / 2)
        name = max(welcome.assets, key=lambda one: welcome.assets[one][1], default=None)
        if name is not None and welcome.assets[name][1] >= LEAST_FILE_BYTES:
            request = AssetRequest(name=name)
            _, payload, took_s = await self._ask(request, Asset, target=LEARNER_ID)
            rate = self._rate(payload_bytes(payload), took_s)
            self.report = replace(self.report, down_bytes_per_s=rate)
        channel_id = channel_of(
            hello=hash_hello(hello),
            nonce=welcome.nonce,
            learner_key=welcome.seal_key,
            run_id=welcome.run_id,
        )
        channel = Channel(self._seal_keys, welcome.seal_key, channel_id, is_learner=False)
        goodbye = Goodbye(reason="the doctor has looked")
        self._transport.send(
            self._peer,
            encode(goodbye, source=self._node_id, target=LEARNER_ID, channel=channel),
        )

    # --- messages --------------------------------------------------------------------------------

    async def _ask(
        self, message: Message, kind: type[Answer], *payload: bytes, target: str = ""
    ) -> tuple[Answer, list[Frame], float]:
        """Send a message; return the answer, its payload, and the seconds of waiting."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        frames = encode(message, payload, source=self._node_id, target=target)
        if not self._transport.send(self._peer, frames):
            raise TransportError(f"{self.report.address}: the link takes no message")
        name = type(message).__name__
        async with self._within(f"no answer to {name}"):
            while True:
                for answer, rest in await self._received():
                    if isinstance(answer, kind):
                        return answer, rest, loop.time() - began
                    if isinstance(answer, Refuse):
                        raise RefusedError(f"the learner refuses this node: {answer.detail}")

    async def _received(self) -> list[tuple[Message, list[Frame]]]:
        messages: list[tuple[Message, list[Frame]]] = []
        for event in await self._events():
            if isinstance(event, Received):
                envelope = decode_envelope(event.frames)
                fault = other_protocol(envelope)
                if fault is not None:
                    raise RefusedError(fault)
                messages.append((decode_message(envelope), list(event.frames[1:])))
        return messages

    async def _events(self) -> list[TransportEvent]:
        events = await self._transport.receive()
        for event in events:
            if isinstance(event, DialFailed | Disconnected):
                raise TransportError(event.reason)
        return events

    @asynccontextmanager
    async def _within(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(STEP_S):
                yield
        except TimeoutError as error:
            text = f"{self.report.address}: {what} in {format_duration(STEP_S)}"
            raise TransportError(text) from error


async def try_link(transport: Transport, address: str, *, fingerprint: bytes | None) -> LinkReport:
    """Try to reach the learner over one address; wait at most STEP_S for each answer.

    Args:
        transport: a started transport that has the run's keys.
        address: the address of the learner or of a relay, with its key.
        fingerprint: the fingerprint of the learner's signing key; None if it is not known.
    """
    return await _Trial(transport, address, fingerprint).run()


def check_link(report: LinkReport) -> Iterator[Finding]:
    """Convert the report of a test into findings."""
    name = "link"
    if report.node_id is None:
        yield Finding(
            "failed",
            name,
            str(report.fault),
            why="a node reaches the learner over this address",
            remedy="check that the learner runs, that the join string is the line in its "
            "keys/join, and that its firewall permits the port; a learner behind NAT needs a "
            "forwarded port and learner.advertise, or a relay that it dials",
        )
        return
    rtt_s, up, down = report.rtt_s or 0.0, report.up_bytes_per_s, report.down_bytes_per_s
    rates = [f"{format_bytes(up)}/s towards it"] if up is not None else []
    rates += [f"{format_bytes(down)}/s from it"] if down is not None else []
    text = ", ".join([f"{report.node_id} at {report.address}: {format_duration(rtt_s)}", *rates])
    slowest = min((rate for rate in (up, down) if rate is not None), default=SLOW_BYTES_PER_S)
    if rtt_s > LONG_RTT_S or slowest < SLOW_BYTES_PER_S:
        yield Finding(
            "warning",
            name,
            text,
            why="weights arrive late over a slow link, so rollouts are older",
            remedy='use profile = "wan", raise sync.publish_period, or put a relay near this node',
        )
    else:
        yield Finding("ok", name, text)
    welcome = report.welcome
    if report.fault is not None:
        yield Finding(
            "failed",
            "joining",
            str(report.fault),
            why="a node that joins would end with this error",
            remedy="install the learner's release of echo-rl, and copy its keys/join again",
        )
    elif welcome is not None:
        size = welcome.version_bytes
        takes = f", {format_duration(size / down)} over this link" if size and down else ""
        version = f"; a version has {format_bytes(size)}{takes}" if size else ""
        yield Finding("ok", "joining", f"run {welcome.run_id} would admit this node{version}")
    if report.skew_s is not None:
        yield from check_skew(report.skew_s, report.skew_error_s)


def check_skew(skew_s: float, error_s: float) -> Iterator[Finding]:
    """Check that the learner's clock and this machine's clock agree.

    Args:
        skew_s: how far the learner's clock is ahead of this machine's clock, seconds.
        error_s: the largest error of `skew_s`.
    """
    which = "behind" if skew_s < 0 else "ahead of"
    text = f"the learner's is {format_duration(abs(skew_s))} {which} this machine's, "
    text += f"to within {format_duration(error_s)}"
    if abs(skew_s) - error_s <= LONG_SKEW_S:
        yield Finding("ok", "clocks", text)
        return
    yield Finding(
        "warning",
        "clocks",
        text,
        why="no decision of a run depends on clocks, but the logs and metrics of both machines do "
        "not fit on one time axis, and a clock that is hours off fails TLS to hubs and trackers",
        remedy="compare `date -u` on both machines, and run timedatectl set-ntp true where it is "
        "wrong; a learner keeps the time that its clock had when it started",
    )


def route_to(address: str) -> tuple[str, str] | None:
    """Return the numeric addresses of this machine and of the host at both ends of the route.

    Return None if there is no route to `address`.
    """
    host, port = parse_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # makes the kernel choose a route; sends nothing
            return str(probe.getsockname()[0]), str(where[0])
    except OSError:
        return None


def check_nat(own: str, theirs: str, advertise: str | None) -> Iterator[Finding]:
    """Check whether this machine is behind NAT.

    Args:
        own: the address of this machine on the route to the learner.
        theirs: the address of the learner or relay. Both are numeric, without a port.
        advertise: the address at which other nodes fetch weights from this node; None if this node
            does not listen.
    """
    is_behind = ipaddress.ip_address(own).is_private and ipaddress.ip_address(theirs).is_global
    if not is_behind or advertise is None:
        kind = "behind NAT; it dials out only, which suffices" if is_behind else "no NAT is seen"
        yield Finding("ok", "NAT", f"{own}: {kind}")
        return
    host = parse_address(advertise)[0]
    try:
        is_reachable = ipaddress.ip_address(host).is_global
    except ValueError:
        is_reachable = True
    if is_reachable:
        yield Finding("ok", "NAT", f"{own}: behind NAT; others dial {advertise}")
        return
    yield Finding(
        "warning",
        "NAT",
        f"{own} is behind NAT, and others are told to dial {advertise}",
        why="other nodes cannot fetch weights from it, so each tries once in vain",
        remedy="forward the port and set the advertise key to the public address, or leave listen "
        "out",
    )
