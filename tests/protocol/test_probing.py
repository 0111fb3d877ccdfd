"""Before a node has served anybody, a message tells what its uplink carries."""

from __future__ import annotations

import pytest

from echo.weights.link import (
    FIRST_BYTES,
    MAX_PROBE_BYTES,
    MAX_PROBES,
    UplinkEstimate,
    UplinkProbe,
    acknowledge,
)
from echo.wire.actions import Send
from echo.wire.messages import Probe, ProbeAck
from tests.protocol.harness import message_of

GIB = 1 << 30


def make_probing() -> tuple[UplinkProbe, UplinkEstimate]:
    uplink = UplinkEstimate()
    return UplinkProbe(uplink, node_id="w1"), uplink


def run_link(probing: UplinkProbe, rate: float, *, rtt_s: float = 0.04) -> list[tuple[int, float]]:
    """Carry a probe over a link; return (bytes, seconds in its queue) of each message."""
    sent, now = [], 0.0
    actions = probing.begin("up", payload_bytes=GIB, now=now)
    while actions:
        (action,) = actions
        assert isinstance(action, Send)
        assert message_of(action.frames) == Probe()
        assert action.peer == "up"
        num_bytes = len(action.frames[1])
        sent.append((num_bytes, num_bytes / rate))
        now += num_bytes / rate + rtt_s
        actions = probing.acknowledged("up", now=now)
    return sent


@pytest.mark.parametrize("rate", [2.5e5, 5e5, 2e6, 2.5e7, 1e8])
def test_a_probe_tells_the_rate_and_does_not_block_the_link(rate: float) -> None:
    probing, uplink = make_probing()
    sent = run_link(probing, rate)
    assert max(num_bytes for num_bytes, _ in sent) <= MAX_PROBE_BYTES
    assert max(seconds for _, seconds in sent) <= max(1.1, FIRST_BYTES / rate)
    assert uplink.bytes_per_s is not None
    # It is too short to show all of a fast one; transfers raise it.
    assert min(0.8 * rate, 2e7) <= uplink.bytes_per_s <= rate


def test_it_is_repeated_a_few_times_one_after_the_other() -> None:
    probing, _ = make_probing()
    for _ in range(MAX_PROBES):
        assert probing.begin("up", payload_bytes=GIB, now=0.0)
        assert probing.begin("up", payload_bytes=GIB, now=1.0) == []
        assert probing.acknowledged("up", now=2.0) == []
    assert probing.begin("up", payload_bytes=GIB, now=9.0) == []


def test_a_link_that_was_lost_is_not_waited_for() -> None:
    probing, uplink = make_probing()
    assert probing.begin("up", payload_bytes=GIB, now=0.0)
    assert probing.begin("new", payload_bytes=GIB, now=5.0)
    assert probing.acknowledged("up", now=5.001) == []
    assert uplink.bytes_per_s is None
    probing.acknowledged("new", now=6.0)
    assert uplink.bytes_per_s == pytest.approx(FIRST_BYTES)


def test_answers_that_nobody_awaits_tell_nothing() -> None:
    probing, uplink = make_probing()
    assert probing.acknowledged("up", now=0.0) == []
    probing.begin("up", payload_bytes=GIB, now=0.0)
    probing.acknowledged("x", now=0.1)
    assert uplink.bytes_per_s is None


def test_there_is_no_probe_where_it_would_not_pay() -> None:
    probing, uplink = make_probing()
    assert probing.begin("up", payload_bytes=1 << 20, now=0.0) == []
    uplink.is_measured = True
    assert probing.begin("up", payload_bytes=GIB, now=0.0) == []


def test_a_probe_of_another_node_is_acknowledged() -> None:
    [answer] = acknowledge("down", source="w1")
    assert isinstance(answer, Send)
    assert answer.peer == "down"
    assert message_of(answer.frames) == ProbeAck()
