"""Windows, patience and silence of a link, and what its rate is taken for."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.bounds import num_connections
from echo.core.errors import LocalProtocolError
from echo.core.tables import IMPOSSIBLE
from echo.weights import link as link_module
from echo.weights.link import (
    BUSY_S,
    LOOP_S,
    MAX_PATIENCE_S,
    MAX_WAITING_S,
    MAX_WINDOW_BYTES,
    TABLE,
    LinkEvent,
    LinkState,
    ParentLink,
    window_bytes,
)
from echo.weights.rates import (
    FIRST_BYTES,
    MAX_PROBE_BYTES,
    MAX_PROBES,
    MOST_BYTES_PER_S,
    UNANSWERED_S,
    UPLINK_SAMPLE_S,
    RateEstimate,
    UplinkEstimate,
    UplinkProbe,
    acknowledge,
)
from echo.wire.actions import Send
from echo.wire.messages import Probe, ProbeAck
from tests.roles.harness import message_of

CHUNK = 1 << 20
STALL_S = 2.0


def make(*, rtt_s: float | None = 0.04, first: int = 2 * CHUNK) -> ParentLink:
    link = ParentLink(first_window_bytes=first, stall_s=STALL_S)
    link.connect("p", rtt_s=rtt_s)
    link.has_spare = True
    return link


def take(link: ParentLink, *, now: float, num_bytes: int = CHUNK) -> tuple[int, int]:
    """Take a chunk that is written at once."""
    link.received(num_bytes, now=now)
    link.released(num_bytes, now=now)
    return link.took(num_bytes, chunk_bytes=CHUNK)


def pull(link: ParentLink, rate: float, *, num_chunks: int, at: float = 0.0) -> tuple[float, int]:
    """Take chunks at a rate; return (when the last came, credit given)."""
    credit = link.fetch(now=at)
    for _ in range(num_chunks):
        at += CHUNK / rate
        credit += take(link, now=at)[1]
    return at, credit


# --- states ---------------------------------------------------------------------------------------


def connect(link: ParentLink) -> None:
    """Let the event occur alone: with a parent, the link's `connect` would disconnect first."""
    if link.state is LinkState.ALONE:
        link.connect("q", rtt_s=0.1)
    else:
        link._move(LinkEvent.CONNECT)


EVENTS: dict[LinkEvent, Callable[[ParentLink], object]] = {
    LinkEvent.CONNECT: connect,
    LinkEvent.DISCONNECT: lambda link: link.connect(None, rtt_s=None),
    LinkEvent.SUBSCRIBE: lambda link: link.subscribe(now=1.0),
    LinkEvent.FETCH: lambda link: link.fetch(now=1.0),
    LinkEvent.MESSAGE: lambda link: link.on_message(),
    LinkEvent.LIVES: lambda link: link.lives(now=1.0),
    LinkEvent.WAITS: lambda link: link.waits(again_s=1.0, now=1.0),
    LinkEvent.COMPLETE: lambda link: link.complete(),
    LinkEvent.SILENCE: lambda link: be_silent(link, has_spare=False),
    LinkEvent.SILENCE_WITH_SPARE: lambda link: be_silent(link, has_spare=True),
}


def be_silent(link: ParentLink, *, has_spare: bool) -> None:
    """Let the parent be silent; a link whose parent is to be left is left, as its owner does."""
    link.has_spare = has_spare
    if link.silence(now=1.0):
        link.connect(None, rtt_s=None)


def link_in(state: LinkState) -> ParentLink:
    """Return a link that has come to a state over the shortest way from the start."""
    ways: dict[LinkState, tuple[LinkEvent, ...]] = {LinkState.ALONE: ()}
    while state not in ways:
        for known, way in list(ways.items()):
            for event, step in TABLE[known].items():
                ways.setdefault(step.then or known, (*way, event))
    link = ParentLink(first_window_bytes=2 * CHUNK, stall_s=STALL_S)
    for event in ways[state]:
        EVENTS[event](link)
    assert link.state is state
    return link


@pytest.mark.parametrize("event", LinkEvent)
@pytest.mark.parametrize("state", LinkState)
def test_an_event_leads_to_what_the_table_says(state: LinkState, event: LinkEvent) -> None:
    link = link_in(state)
    step = TABLE[state][event]
    if step is IMPOSSIBLE:
        with pytest.raises(LocalProtocolError, match=f"^{event} of a link that is {state}$"):
            EVENTS[event](link)
    else:
        EVENTS[event](link)
    assert link.state is (step.then or state)
    link.validate()
    is_awaiting = link.awaits_answer or link.awaits_chunks
    assert (link.deadline(CHUNK) is not None) == is_awaiting
    assert is_awaiting == (link.state not in (LinkState.ALONE, LinkState.IDLE))


def test_the_table_is_total_and_from_each_state_leads_to_each() -> None:
    assert set(TABLE) == set(LinkState)
    assert all(set(row) == set(LinkEvent) for row in TABLE.values())
    for state in LinkState:
        reached = {state}
        for _ in LinkState:
            reached |= {step.then or each for each in reached for step in TABLE[each].values()}
        assert reached == set(LinkState)


def test_the_drawing_in_the_docstring_is_the_table() -> None:
    """The words above the drawing name `disconnect` and the events that cannot happen."""
    drawn, state = set(), ""
    block = (link_module.__doc__ or "").split("**States**")[1].split("**Credit")[0]
    for line in block.splitlines():
        state = (re.match(r" {4}(\w+)", line) or [state, state])[1]
        drawn |= {(state, event, then) for event, then in re.findall(r"--(\w+)--> (\w+)", line)}
    steps = {(state, event): step for state in LinkState for event, step in TABLE[state].items()}
    moves = {(*pair, step.then) for pair, step in steps.items() if step.then is not None}
    with_parent = set(LinkState) - {LinkState.ALONE}
    left = {(state, LinkEvent.DISCONNECT, LinkState.ALONE) for state in with_parent}
    assert left <= moves
    assert drawn == moves - left
    assert {pair for pair, step in steps.items() if step is IMPOSSIBLE} == {
        *((state, LinkEvent.CONNECT) for state in with_parent),
        (LinkState.ALONE, LinkEvent.SUBSCRIBE),
        (LinkState.ALONE, LinkEvent.FETCH),
    }


def test_a_link_in_disorder_is_found() -> None:
    link = make()
    link.validate()
    link.peer = None
    with pytest.raises(AssertionError, match="idle with the parent None"):
        link.validate()


# --- windows and patience -------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e6, 3e8, 3e9])
@pytest.mark.parametrize("rtt_s", [0.001, 0.1])
def test_the_window_grows_to_one_and_a_half_products_and_two_chunks_a_connection(
    rate: float, rtt_s: float
) -> None:
    link = make(rtt_s=rtt_s)
    _, credit = pull(link, rate, num_chunks=1000)
    at_the_ends = 2 * CHUNK * num_connections(rtt_s)
    wanted = min(1.5 * rate * (rtt_s + LOOP_S) + at_the_ends, MAX_WINDOW_BYTES)
    assert link.window == pytest.approx(wanted, rel=0.01)
    # All that has come and the window: nothing more is under way.
    assert credit + link.unspent_bytes == 1000 * CHUNK + link.window


def test_the_window_shrinks_with_the_rate() -> None:
    """What is asked for ahead lies in the queue of a slow uplink, before all that comes later."""
    link = make(first=100 * CHUNK)
    at, credit = pull(link, 1e6, num_chunks=400)
    assert link.window == pytest.approx(1.5e6 * (0.04 + LOOP_S) + 2 * CHUNK, rel=0.01)
    assert credit + link.unspent_bytes == 400 * CHUNK + link.window
    pull(link, 1e8, num_chunks=1000, at=at)
    assert link.window == pytest.approx(1.5e8 * (0.04 + LOOP_S) + 2 * CHUNK, rel=0.01)


@pytest.mark.parametrize("rtt_s", [None, 0.04])
def test_without_a_rate_or_a_round_trip_the_window_stays(rtt_s: float | None) -> None:
    link = make(rtt_s=rtt_s)
    pull(link, 1e8, num_chunks=1000 if rtt_s is None else 3)
    assert link.window == 2 * CHUNK


def test_credit_is_given_every_quarter_of_the_window() -> None:
    link = make(rtt_s=None, first=16 * CHUNK)
    link.fetch(now=0.0)
    given = [take(link, now=0.1) for _ in range(12)]
    assert given == [(0, 0), (0, 0), (0, 0), (4 * CHUNK, 4 * CHUNK)] * 3


def test_another_parent_begins_with_the_first_window() -> None:
    link = make()
    pull(link, 3e8, num_chunks=500)
    assert link.window > 16 * CHUNK
    assert link.longest_gap_s > 0.0
    link.connect("q", rtt_s=0.1)
    assert link.fetch(now=0.0) == 2 * CHUNK
    assert link.rate.bytes_per_s is None
    assert link.longest_gap_s == 0.0


def test_patience_doubles_with_each_parent_that_was_left_until_one_shows_a_rate() -> None:
    link = make()
    for patience_s in (2.0, 4.0, 8.0, 16.0, 32.0, MAX_PATIENCE_S, MAX_PATIENCE_S):
        assert link.patience_s(CHUNK) == patience_s
        link.fetch(now=0.0)
        assert link.silence(now=0.0), "the parent is left"
        link.connect("q", rtt_s=0.1)
    pull(link, 1e9, num_chunks=200)
    link.connect("q", rtt_s=0.1)
    assert link.patience_s(CHUNK) == 2.0


@pytest.mark.parametrize(
    ("rate", "rtt_s", "patience_s"),
    [
        (1e9, 0.001, BUSY_S),
        (1e9, 0.4, 1.6),
        (CHUNK / 2, 0.1, 8.0),
        (100.0, 0.1, MAX_PATIENCE_S),
        (1e9, None, STALL_S),
    ],
)
def test_patience(rate: float, rtt_s: float | None, patience_s: float) -> None:
    link = make(rtt_s=rtt_s)
    assert link.patience_s(CHUNK) == STALL_S
    at, _ = pull(link, rate, num_chunks=2000)
    assert link.patience_s(CHUNK) == pytest.approx(patience_s, rel=0.01)
    assert link.deadline(CHUNK) == at + link.patience_s(CHUNK)


@pytest.mark.parametrize(
    ("again_s", "patience_s"),
    [(1.6, 2.1), (1e9, MAX_WAITING_S + 0.5), (0.0, 0.5)],
)
def test_a_parent_that_waits_has_the_time_that_it_says_within_reason(
    again_s: float, patience_s: float
) -> None:
    link = make()
    at, _ = pull(link, 1e9, num_chunks=200)
    link.has_spare = True
    link.waits(again_s=again_s, now=at)
    assert link.state is LinkState.WAITING
    assert link.patience_s(CHUNK) == pytest.approx(patience_s)
    link.lives(now=at)
    assert link.patience_s(CHUNK) == BUSY_S, "it has sent something"


def test_only_one_with_a_spare_is_left_at_once_and_not_before_the_first_chunk() -> None:
    link = make()
    at, _ = pull(link, 1e9, num_chunks=200)
    assert link.patience_s(CHUNK) == BUSY_S
    link.has_spare = False
    assert link.patience_s(CHUNK) == STALL_S
    link.has_spare = True
    link.fetch(now=at)
    assert link.patience_s(CHUNK) == STALL_S
    link.lives(now=at + 0.1)
    assert link.patience_s(CHUNK) == BUSY_S


def test_one_that_starves_at_times_is_given_longer() -> None:
    link = make()
    link.fetch(now=0.0)
    at = 5.0  # for the first chunk everybody waits
    for _ in range(200):
        take(link, now=(at := at + 0.01))
    assert link.patience_s(CHUNK) == BUSY_S
    take(link, now=(at := at + 0.45))
    assert link.patience_s(CHUNK) == pytest.approx(1.35)
    for _ in range(200):
        take(link, now=(at := at + 0.01))
    assert link.patience_s(CHUNK) == BUSY_S


def test_what_the_parent_itself_waits_for_is_no_gap() -> None:
    link = make()
    link.fetch(now=0.0)
    take(link, now=0.1)
    link.rate.pause()  # as a Waiting does
    take(link, now=3.0)
    assert link.longest_gap_s == 0.0


def test_long_links_get_more_connections() -> None:
    rtts = (0.0005, 0.04, 0.06, 0.1, 0.3)
    assert [num_connections(rtt_s) for rtt_s in rtts] == [1, 1, 3, 6, 8]
    assert num_connections(0.3, most=1) == 1


# --- rates ----------------------------------------------------------------------------------------

MIB = 1 << 20


def feed(rate: RateEstimate, num_chunks: int, *, every_s: float, start: float = 0.0) -> float:
    now = start
    for _ in range(num_chunks):
        rate.add(MIB, now=now)
        now += every_s
    return now


def test_a_burst_of_one_chunk_is_no_estimate() -> None:
    rate = RateEstimate()
    for second in range(20):
        rate.add(MIB, now=float(second))
        rate.pause()
    assert rate.bytes_per_s is None


def test_the_rate_is_that_of_busy_time_only() -> None:
    rate = RateEstimate()
    now = feed(rate, 20, every_s=0.1)
    for _ in range(5):
        rate.pause()
        now = feed(rate, 20, every_s=0.1, start=now + 100)
    assert rate.bytes_per_s == pytest.approx(10 * MIB)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(-1, 5), st.booleans())))
def test_whatever_the_clock_does_the_estimate_is_bounded(
    events: list[tuple[int, float, bool]],
) -> None:
    rate, now = RateEstimate(), 0.0
    for num_bytes, step_s, does_pause in events:
        now += step_s
        rate.add(num_bytes, now=now)
        if does_pause:
            rate.pause()
    assert rate.bytes_per_s is None or 0 <= rate.bytes_per_s <= MOST_BYTES_PER_S


def send_for_20_s(rate: UplinkEstimate, per_s: float, *, is_limit: bool, start: float) -> float:
    """Have a MiB acknowledged so often for 20 s; return when that ends."""
    for count in range(int(20 * per_s)):
        rate.add(MIB, now=start + count / per_s)
        rate.wait(0.0 if is_limit else 1.0, now=start + count / per_s)
    rate.pause()
    return start + 20


def test_what_an_uplink_has_shown_is_not_forgotten_while_it_could_send_more() -> None:
    rate = UplinkEstimate()
    now = send_for_20_s(rate, 10, is_limit=False, start=0.0)
    assert rate.bytes_per_s == pytest.approx(10 * MIB)
    now = send_for_20_s(rate, 5, is_limit=False, start=now)
    assert rate.bytes_per_s == pytest.approx(10 * MIB)
    now = send_for_20_s(rate, 20, is_limit=False, start=now)
    assert rate.bytes_per_s == pytest.approx(20 * MIB, rel=0.02)
    now = send_for_20_s(rate, 5, is_limit=True, start=now)
    send_for_20_s(rate, 5, is_limit=True, start=now)
    assert rate.bytes_per_s == pytest.approx(5 * MIB, rel=0.01)


def limited(rate: UplinkEstimate, per_s: float, *, start: float) -> float:
    """Have one sample come in which the uplink was the limit; return when that ends."""
    for count in range(int(UPLINK_SAMPLE_S[1] * per_s) + 1):
        rate.add(MIB, now=start + count / per_s)
        rate.wait(0.0, now=start + count / per_s)
    return start + UPLINK_SAMPLE_S[1]


def test_only_several_low_samples_in_a_row_lower_an_uplink_and_to_the_best_of_them() -> None:
    rate = UplinkEstimate()
    now = limited(rate, 10, start=0.0)
    for per_s in (4, 6, 5):
        now = limited(rate, per_s, start=now)
        assert rate.bytes_per_s == pytest.approx(10 * MIB, rel=0.01)
    now = limited(rate, 10.1, start=now)
    for per_s in (4, 6, 5):
        now = limited(rate, per_s, start=now)
        assert rate.bytes_per_s == pytest.approx(10 * MIB, rel=0.03)
    limited(rate, 3, start=now)
    assert rate.bytes_per_s == pytest.approx(6 * MIB, rel=0.05)


@pytest.mark.parametrize("apart_s", [0.001, 0.0])
def test_what_was_sent_before_the_clock_began_does_not_count(apart_s: float) -> None:
    """Eight children say at the same time, or nearly so, what they have received in a second."""
    rate = UplinkEstimate()
    for version in range(10):
        for second in range(4):
            for child in range(8):
                now = 10.0 * version + second + 1.0 + child * apart_s
                rate.add(MIB, now=now, since=now - 1)
        rate.pause()
    assert rate.bytes_per_s == pytest.approx(8 * MIB, rel=0.02)


def test_an_uplink_shows_no_more_than_it_has_though_children_acknowledge_many_at_once() -> None:
    """Seven children with a share each of 5 MB/s say so at times of their own."""
    rate, rng = UplinkEstimate(), random.Random(3)
    share, now = 5e6 / 7, 0.0
    said = [(rng.random() * 0.7, 0) for _ in range(7)]
    best = 0.0
    while now < 120:
        now, child = min((at, child) for child, (at, _) in enumerate(said))
        lump = rng.choice((1, 2, 3)) * MIB // 4
        rate.add(lump, now=now)
        said[child] = (now + lump / share, lump)
        best = max(best, rate.bytes_per_s or 0.0)
    assert 4.7e6 < (rate.bytes_per_s or 0) < 5.4e6
    assert best < 5.6e6


def test_other_ways_of_sending_only_raise_it() -> None:
    rate = UplinkEstimate()
    rate.show(5.0)
    rate.show(3.0)
    assert rate.bytes_per_s == 5.0
    rate.show(7.0)
    assert rate.bytes_per_s == 7.0


def test_the_window_holds_what_is_under_way_and_grows_from_its_own_limit() -> None:
    first = 4 * MIB
    assert (
        window_bytes(125e6, 0.04, MIB, first=first) == int(1.5 * 125e6 * (0.04 + LOOP_S)) + 2 * MIB
    )
    assert window_bytes(None, 0.04, MIB, first=first) == first
    assert window_bytes(1e3, 0.001, MIB, first=first) == int(1.5e3 * (0.001 + LOOP_S)) + 2 * MIB
    assert window_bytes(1e10, 1.0, MIB, first=first) == 64 * MIB
    # A link of 1 Gbit/s and 100 ms: what a window lets through decides the next one.
    window = window_bytes(None, None, MIB, first=first)
    for _ in range(6):
        window = window_bytes(min(window / 0.1, 125e6), 0.1, MIB, first=first)
    assert window >= 1.3 * 12.5e6 + 2 * MIB


# --- probes ---------------------------------------------------------------------------------------

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


def test_no_other_is_asked_while_an_answer_may_still_come() -> None:
    probing, uplink = make_probing()
    assert probing.begin("slow", payload_bytes=GIB, now=0.0)
    assert probing.begin("other", payload_bytes=GIB, now=UNANSWERED_S - 0.1) == []
    probing.acknowledged("slow", now=UNANSWERED_S - 0.1)
    assert uplink.bytes_per_s is not None
    assert probing.begin("mute", payload_bytes=GIB, now=10.0)
    assert probing.begin("other", payload_bytes=GIB, now=10.0 + UNANSWERED_S)


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
