from __future__ import annotations

import msgspec
import pytest

from echo.protocol.actions import Send
from echo.protocol.messages import Probe, ProbeAck
from echo.protocol.probing import PROBE_CHUNK_BYTES, Probing
from echo.protocol.rates import PROBE_BYTES, PROBE_S
from echo.rollout import PolicyVersion
from tests.protocol.harness import make_broadcast, make_version, message_of

V1 = PolicyVersion(1, 1)


def make_probing(*, can_serve: bool = True, num_bytes: int = 1 << 30) -> Probing:
    broadcast = make_broadcast("w1")
    signed, manifest, image = make_version(1, 1)
    broadcast.publish(signed, manifest, image, now=0.0)
    # Only the size matters, and a version of 1 GiB would take long to make.
    msgspec.structs.force_setattr(broadcast.store[V1].manifest, "num_bytes", num_bytes)
    return Probing(broadcast, can_serve=can_serve)


def run_link(probing: Probing, rate: float, *, rtt_s: float = 0.04) -> tuple[int, float]:
    """Carry the probe over a link; return (bytes sent, longest time in its queue)."""
    queue = [(0.0, action) for action in probing.begin("up", V1, now=0.0)]
    num_bytes, free_at, longest_s = 0, 0.0, 0.0
    while queue:
        at, action = queue.pop(0)
        assert isinstance(action, Send)
        assert action.peer == "up"
        free_at = max(at, free_at) + PROBE_CHUNK_BYTES / rate
        longest_s = max(longest_s, free_at - at)
        num_bytes += len(action.frames[1])
        answer = ProbeAck(index=message_of(action.frames).index)
        now = free_at + rtt_s
        queue += [(now, each) for each in probing.receive("up", answer, is_parent=True, now=now)]
    return num_bytes, longest_s


@pytest.mark.parametrize("rate", [2.5e5, 5e5, 2e6, 2.5e7, 1e8])
def test_a_bounded_probe_tells_the_rate_and_does_not_fill_the_queue(rate: float) -> None:
    probing = make_probing()
    num_bytes, longest_s = run_link(probing, rate)
    assert num_bytes <= min(PROBE_BYTES, rate * PROBE_S + 16 * PROBE_CHUNK_BYTES)
    assert longest_s < 8 * PROBE_CHUNK_BYTES / rate + 0.5
    # It is too short to show all of a fast one; transfers raise it.
    assert probing._broadcast.uplink_bytes_per_s == pytest.approx(min(rate, 2e7), rel=0.35)
    for now in (9.0, 12.0):
        assert probing.begin("up", V1, now=now)
        assert probing.begin("up", V1, now=now + 1.0) == []
    assert probing.begin("up", V1, now=99.0) == []


def test_strangers_tell_nothing() -> None:
    probing = make_probing()
    probing.begin("up", V1, now=0.0)
    for number in range(20):
        message = ProbeAck(index=number)
        probing.receive("x", message, is_parent=False, now=0.05 * number)
    assert probing._broadcast.uplink_bytes_per_s is None


def test_what_comes_when_the_probe_is_over_tells_nothing() -> None:
    probing = make_probing()
    probing.begin("up", V1, now=0.0)
    for number in range(4):
        now = PROBE_S + 0.5 + 0.5 * number
        message = ProbeAck(index=number)
        assert probing.receive("up", message, is_parent=True, now=now) == []
    assert probing._broadcast.uplink_bytes_per_s is None


def test_an_uplink_that_transfers_have_shown_is_not_probed_again() -> None:
    probing = make_probing()
    probing._broadcast._serving.rate.is_measured = True
    assert probing.begin("up", V1, now=0.0) == []


def test_there_is_no_probe_where_it_would_not_pay() -> None:
    assert make_probing(can_serve=False).begin("up", V1, now=0.0) == []
    assert make_probing(num_bytes=1 << 20).begin("up", V1, now=0.0) == []
    assert make_probing().begin("", V1, now=0.0) == []


def test_a_probe_of_another_node_is_acknowledged() -> None:
    [answer] = make_probing().receive("down", Probe(index=7), is_parent=False, now=0.0)
    assert answer.peer == "down"
    assert message_of(answer.frames) == ProbeAck(index=7)
