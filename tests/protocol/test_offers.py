"""Which item is fetched next, and when a newer version pre-empts the one on its way."""

from __future__ import annotations

from typing import Any

import pytest
from tests.protocol.encoded_versions import IMAGE_BYTES, described, encoded_of, form_on, v, weights

from echo.core.errors import RemoteProtocolError
from echo.weights.receiver import MAX_OFFERS, MAX_REFUSED, Offers
from echo.weights.store import ItemStore, Transfer
from echo.wire.messages import FULL, Announce, EncodedVersionOffer, Form, ItemId

ANCHOR = Form("keyframe")


def make(*held: int) -> Offers:
    """Return what a node without offers knows, which holds some versions whole."""
    store = ItemStore(keep_versions=9)
    for step in held:
        signed, manifest = described(step)
        has_chunk = bytearray(b"\1") * manifest.num_chunks
        image = memoryview(weights(step))
        store.images[v(step)] = Transfer(signed, manifest, image, has_chunk, len(has_chunk))
    return Offers(store)


def hear(
    offers: Offers,
    *encoded_versions: tuple[int, int | None, int],
    full: int | None = None,
    peer: str = "p",
) -> None:
    """Announce encoded versions (step, step of the base, bytes), and one image."""
    message = Announce(
        version=v(max([full or 0, *(step for step, _, _ in encoded_versions)])),
        offers=tuple(
            EncodedVersionOffer(v(step), None if base is None else v(base), size)
            for step, base, size in encoded_versions
        ),
    )
    offers.hear(peer, message, None if full is None else described(full)[1])


def begin(offers: Offers, step: int, *, share: float) -> ItemId:
    """Let a share of an image be held; return it as what is being fetched."""
    offers._store.begin_image(*described(step))
    image = offers._store.images[v(step)]
    for index in range(int(share * image.num_chunks)):
        image.mark(index)
    return v(step), FULL


@pytest.mark.parametrize(
    ("held", "encoded_versions", "full", "step"),
    [
        ((), [], 3, (v(3), FULL)),
        ((), [(3, None, 100)], 3, (v(3), ANCHOR)),
        ((2,), [(3, 2, 10), (3, None, 100)], 3, (v(3), form_on(2))),
        ((1,), [(3, 2, 10), (2, 1, 10), (3, None, 100)], 3, (v(2), form_on(1))),
        ((1,), [(3, 2, 10), (2, 1, 10), (3, 1, 15)], 3, (v(3), form_on(1))),
        ((), [(3, 2, 10), (2, None, 80), (3, None, 100)], 3, (v(2), ANCHOR)),
        ((1,), [(3, 2, 10)], 3, (v(3), FULL)),
        ((3,), [(3, 2, 10)], 3, None),
        ((4,), [(3, 2, 10)], 3, None),
    ],
)
def test_the_first_step_of_the_cheapest_path(
    held: tuple[int, ...], encoded_versions: Any, full: int | None, step: ItemId | None
) -> None:
    offers = make(*held)
    hear(offers, *encoded_versions, full=full)
    assert offers.next_step(None) == step


def test_what_several_parents_have_is_put_together() -> None:
    offers = make(1)
    hear(offers, (2, 1, 10), peer="p")
    hear(offers, (3, 2, 10), peer="q")
    assert offers.next_step(None) == (v(2), form_on(1))
    offers.forget("p")
    assert offers.next_step(None) is None
    hear(offers, (2, 1, 10), peer="r")
    offers.withdraw("r", (v(2), form_on(1)))
    offers.withdraw("nobody", (v(2), form_on(1)))
    assert offers.next_step(None) is None


def test_the_newest_that_can_be_reached_is_the_target() -> None:
    offers = make(1)
    hear(offers, (2, 1, 10), (9, 8, 10), (4, 3, 10))
    assert offers.newest == v(9)
    assert offers.next_step(None) == (v(2), form_on(1))


@pytest.mark.parametrize(
    "encoded_versions",
    [
        [(5, 5, 1)],
        [(5, 6, 1), (6, 5, 1)],
        [(5, 9, -3)],
        [(0, None, 1)],
        [(2, 1, 1), (4, 2, 1)],
    ],
)
def test_circles_and_ways_back_lead_nowhere(encoded_versions: Any) -> None:
    """A step below the newest version that is held would be taken again and again."""
    offers = make(3)
    hear(offers, *encoded_versions)
    assert offers.next_step(None) is None
    assert offers.next_step((v(3), ANCHOR)) == (v(3), ANCHOR)


def test_no_way_leads_over_an_image_that_is_too_old() -> None:
    """Its manifest has been forgotten."""
    offers = make(3)
    hear(offers, full=2, peer="p")
    hear(offers, (5, 2, 10), peer="q")
    assert offers.next_step(None) is None


def test_a_negative_size_is_none() -> None:
    offers = make(1)
    hear(offers, (2, 1, -(1 << 60)))
    assert offers.num_bytes((v(2), form_on(1))) == 0
    assert offers.next_step(None) == (v(2), form_on(1))


def test_too_many_offers_leave_everything_as_it_was() -> None:
    offers = make(1)
    hear(offers, (2, 1, 10))
    with pytest.raises(RemoteProtocolError, match="1001 encoded versions"):
        hear(offers, *((step, None, 1) for step in range(MAX_OFFERS + 1)))
    assert offers.next_step(None) == (v(2), form_on(1))


def test_what_was_refused_is_not_tried_again() -> None:
    offers = make(1)
    hear(offers, (2, 1, 10), full=2)
    offers.refuse((v(2), form_on(1)))
    assert offers.next_step(None) == (v(2), FULL)
    for step in range(MAX_REFUSED):
        offers.refuse((v(step), ANCHOR))
    assert offers.next_step(None) == (v(2), form_on(1))


def test_what_is_held_of_an_item_costs_nothing() -> None:
    offers = make()
    hear(offers, (1, None, IMAGE_BYTES // 2), full=1)
    assert offers.next_step(None) == (v(1), ANCHOR)
    begin(offers, 1, share=0.75)
    assert offers.next_step(None) == (v(1), FULL)


# --- pre-emption ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "is_left"), [(0.0, True), (0.45, True), (0.55, False)])
def test_a_newer_image_pre_empts_one_of_which_less_than_half_has_come(
    share: float, is_left: bool
) -> None:
    offers = make()
    hear(offers, full=1)
    current = begin(offers, 1, share=share)
    hear(offers, full=2)
    assert offers.next_step(current) == ((v(2), FULL) if is_left else current)
    assert offers.has_preempted == is_left


def test_but_not_twice_in_a_row() -> None:
    offers = make()
    current = begin(offers, 1, share=0.1)
    hear(offers, full=2)
    offers.has_preempted = True
    assert offers.next_step(current) == current


def test_and_not_where_going_on_is_cheaper() -> None:
    offers = make()
    current = begin(offers, 1, share=0.4)
    hear(offers, (2, 1, IMAGE_BYTES // 10), full=2)
    # 0.6 of an image and a tenth, against a whole one.
    assert offers.next_step(current) == current
    hear(offers, (2, 1, IMAGE_BYTES // 2), full=2)
    assert offers.next_step(current) == (v(2), FULL)


def test_what_is_on_its_way_is_kept_while_there_is_nothing_newer() -> None:
    offers = make()
    current = begin(offers, 2, share=0.0)
    assert offers.next_step(current) == current
    hear(offers, full=2)
    assert offers.next_step(current) == current
    assert not offers.has_preempted


def test_what_is_not_here_any_more_may_always_be_left() -> None:
    offers = make()
    hear(offers, full=2)
    offers.has_preempted = True
    assert offers.next_step((v(1), FULL)) == (v(2), FULL)


def test_an_encoded_that_is_half_here_is_finished() -> None:
    offers = make(1)
    encoded = offers._store.encoded_versions[v(2), form_on(1)] = encoded_of(2, 1, num_pieces=1)
    encoded.expected_bytes = 10_000
    hear(offers, (2, 1, 10_000), (3, 2, 10), (3, 1, 10))
    assert offers.next_step((v(2), form_on(1))) == (v(2), form_on(1))
