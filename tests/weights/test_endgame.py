"""Links that have all of their own chunks help the slowest one; nothing is lost by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from echo.core.rollout import PolicyVersion
from echo.weights.manifest import encode_signed
from echo.weights.receiver import VersionArrived
from echo.wire.actions import Send
from echo.wire.messages import Announce, Cancel, Chunk, Credit, Fetch, Waiting
from tests.roles.harness import CHUNK_BYTES, PUBLIC_KEY, make_broadcast, make_version, message_of

NUM_CHUNKS = 64
PACE_S = 0.05
"""Between two chunks of the quick parent; the slow one takes ten times as long."""


class TwoParents:
    """A node that has the even chunks of a version from "quick", and the odd ones from "slow"."""

    def __init__(self, num_chunks: int = NUM_CHUNKS) -> None:
        self.now = 0.0
        self.node = make_broadcast("n", stall_s=30.0)
        self.node.trust.set(public_key=PUBLIC_KEY, run_id="run", max_image_bytes=1 << 20)
        signed, self.manifest, self.image = make_version(1, 1, num_chunks=num_chunks)
        self.sent: list[tuple[str, Any]] = []
        self.arrived: list[PolicyVersion] = []
        self.perform(self.node.receiver.set_num_links(2, 2, now=0.0))
        for link, peer in enumerate(("quick", "slow")):
            self.perform(self.node.receiver.set_parent(peer, link=link, rtt_s=0.01, now=0.0))
            announce = Announce(version=self.manifest.version)
            self.perform(self.node.receive(peer, announce, [encode_signed(signed)], now=0.0))

    def perform(self, actions: Iterable[Any]) -> None:
        for action in actions:
            assert isinstance(action, Send | VersionArrived), action
            if isinstance(action, Send):
                self.sent.append((action.peer, message_of(action.frames)))
            else:
                self.arrived.append(action.version)

    def bring(self, peer: str, *indices: int) -> list[tuple[str, Any]]:
        """Have chunks come from a parent, one at a time; return what is said then."""
        told = len(self.sent)
        for index in indices:
            self.now += PACE_S if peer == "quick" else 10 * PACE_S
            data = bytes(self.image[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
            chunk = Chunk(version=self.manifest.version, index=index)
            self.perform(self.node.receive(peer, chunk, [data], now=self.now))
        return self.sent[told:]

    def helped(self) -> list[int]:
        """Bring all even chunks, and a few odd ones; return what "quick" is asked for then."""
        self.bring("slow", *range(1, 12, 2))
        return self.asked(self.bring("quick", *range(0, NUM_CHUNKS, 2)))

    def asked(self, said: list[tuple[str, Any]]) -> list[int]:
        """Return the odd chunks that "quick" is asked for last."""
        (fetch,) = [m for peer, m in said[-1:] if peer == "quick" and isinstance(m, Fetch)]
        assert fetch.is_help
        assert (fetch.link, fetch.num_links) == (1, 2)
        return [1 + 2 * place for start, stop in fetch.ranges for place in range(start, stop)]

    def missing(self) -> list[int]:
        has_chunk = self.node.store[self.manifest.version].has_chunk
        return [index for index in range(NUM_CHUNKS) if not has_chunk[index]]


def test_a_link_that_is_done_asks_for_the_last_chunks_of_the_slow_one() -> None:
    here = TwoParents()
    asked = here.helped()
    assert asked
    assert asked == here.missing()[-len(asked) :]
    assert len(asked) < len(here.missing())  # what the slow one has been asked for comes from it


def test_what_a_helper_brings_is_cancelled_and_more_is_asked_for_until_all_is_here() -> None:
    here = TwoParents()
    asked = here.helped()
    while asked:
        said = here.bring("quick", *asked)
        told = [(peer, m.chunks) for peer, m in said if isinstance(m, Cancel)]
        assert told == [("slow", (index,)) for index in asked]
        helps = [m for _, m in said if isinstance(m, Fetch)]
        asked = here.asked(said) if helps else []
    # The rest is on its way from the slow one.
    left = here.missing()
    assert 0 < len(left) <= 8
    here.bring("slow", *left)
    assert here.arrived == [here.manifest.version]
    assert here.node.receiver.num_duplicate_chunks == 0


def test_what_the_slow_one_brings_first_is_not_awaited_of_the_helper() -> None:
    here = TwoParents()
    asked = here.helped()
    said = here.bring("slow", *asked)
    assert ("quick", Cancel(version=here.manifest.version, chunks=(asked[0],))) in said
    # And then the helper asks for others.
    assert set(here.asked(said)) < set(here.missing())


@pytest.mark.parametrize("says_so", [True, False])
def test_a_helper_that_lacks_the_chunks_is_not_to_blame(*, says_so: bool) -> None:
    here = TwoParents()
    here.node.receiver.set_spare(0, is_ready=True)
    here.helped()
    waiting = Waiting(version=here.manifest.version, again_s=0.2)
    while here.missing():
        here.now += 40.0
        here.bring("slow", here.missing()[0])
        if says_so:
            here.perform(here.node.receive("quick", waiting, [], now=here.now))
        here.perform(here.node.expire(now=here.now))  # ParentFailed would be no Send
    assert here.arrived == [here.manifest.version]


def test_links_that_end_at_almost_the_same_time_ask_for_nothing_twice() -> None:
    here = TwoParents()
    for index in range(0, NUM_CHUNKS, 2):
        if index >= 20:
            here.bring("slow", index - 19)
            here.now -= 10 * PACE_S
        here.bring("quick", index)
    assert len(here.missing()) == 10
    assert not [m for _, m in here.sent if isinstance(m, Fetch) and m.is_help]


def test_a_chunk_that_has_come_twice_gives_its_credit_back() -> None:
    """Or each would take a part of the window for ever, and the link ends in silence."""
    here = TwoParents()
    said = here.bring("slow", 1, *[1] * 40)
    given = sum(m.credit_bytes for peer, m in said if peer == "slow" and isinstance(m, Credit))
    assert given >= 30 * CHUNK_BYTES


def test_a_link_that_is_late_by_little_of_the_time_is_not_helped() -> None:
    here = TwoParents()
    for index in range(0, NUM_CHUNKS, 2):
        if index >= 30:
            here.bring("slow", index - 29)
            here.now -= 10 * PACE_S
        here.now += 1.0
        here.bring("quick", index)
    # A dozen chunks are missing beyond what is under way, one a second: worth a request.
    assert [m for _, m in here.sent if isinstance(m, Fetch) and m.is_help]
    here = TwoParents()
    for index in range(0, NUM_CHUNKS, 2):
        if index >= 10:
            here.bring("slow", index - 9)
            here.now -= 10 * PACE_S
        here.now += 1.0
        here.bring("quick", index)
    # Three are: seconds too, but less than a tenth of the time.
    assert not [m for _, m in here.sent if isinstance(m, Fetch) and m.is_help]
