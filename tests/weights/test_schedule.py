"""Keyframes and deltas are made where they spare bytes, and the cheapest way is taken."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.rollout import PolicyVersion
from echo.weights.schedule import (
    MAX_STEPS,
    MIN_IMAGE_BYTES,
    RETRY_AFTER,
    EncodedOffer,
    FormSchedule,
    cheapest_path,
    path_bytes,
)

FULL = 10_000_000


def v(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


class Learner:
    """Publishes versions as a plan says; nothing is ever forgotten."""

    def __init__(self, delta_bytes: int, keyframe_bytes: int = 2 * FULL // 3) -> None:
        self.plan = FormSchedule("auto")
        self.delta_bytes = delta_bytes
        self.keyframe_bytes = keyframe_bytes
        self.offers: list[EncodedOffer] = []
        self.keyframes: list[int] = []
        self.deltas: list[int] = []

    def make(self, offer: EncodedOffer) -> None:
        self.offers.append(offer)
        self.plan.made(offer)

    def publish(self, step: int) -> None:
        form = self.plan.begin(FULL, has_base=step > 0)
        self.offers = [offer for offer in self.offers if offer.kind != "full"]
        self.make(EncodedOffer(v(step), None, "full", FULL))
        if form == "delta":
            self.make(EncodedOffer(v(step), v(step - 1), "delta", self.delta_bytes))
            self.deltas.append(step)
        if self.plan.is_keyframe_due(self.offers, v(step)):
            self.make(EncodedOffer(v(step), None, "keyframe", self.keyframe_bytes))
            self.keyframes.append(step)

    def late_joiner_pays(self, step: int) -> int:
        path = cheapest_path((), self.offers, v(step))
        assert path is not None
        return path_bytes(path)


@pytest.mark.parametrize(
    ("ratio", "period"),
    [(116, MAX_STEPS), (37, 7), (10, 2), (2.8, 1)],
    ids=["lr 1e-6", "lr 5e-6", "large steps", "fp32"],
)
def test_keyframes_follow_the_size_of_the_deltas(ratio: float, period: int) -> None:
    learner = Learner(round(FULL / ratio))
    for step in range(40):
        learner.publish(step)
        assert learner.late_joiner_pays(step) <= 1.25 * learner.keyframe_bytes
        path = cheapest_path((), learner.offers, v(step))
        assert path is not None
        assert len(path) <= MAX_STEPS
    assert learner.keyframes == list(range(0, 40, period))


def test_keyframes_that_spare_nothing_are_made_once() -> None:
    learner = Learner(FULL // 100, keyframe_bytes=FULL)
    for step in range(40):
        learner.publish(step)
    assert learner.keyframes == [0]


def test_deltas_that_spare_little_are_tried_again_from_time_to_time() -> None:
    learner = Learner(FULL * 6 // 10)
    for step in range(20):
        learner.publish(step)
    assert learner.deltas == [1, 1 + RETRY_AFTER, 1 + 2 * RETRY_AFTER]
    learner.delta_bytes = FULL // 100
    for step in range(20, 30):
        learner.publish(step)
    assert learner.deltas[3:] == [25, 26, 27, 28, 29]


@pytest.mark.parametrize(
    ("codec", "image_bytes", "has_base", "form"),
    [
        ("full", FULL, True, "full"),
        ("auto", MIN_IMAGE_BYTES - 1, True, "full"),
        ("auto", MIN_IMAGE_BYTES, True, "delta"),
        ("auto", FULL, False, "keyframe"),
        ("delta", 1, True, "delta"),
        ("delta", 1, False, "keyframe"),
    ],
)
def test_the_codec_and_the_size_say_what_a_version_goes_out_as(
    codec: str, image_bytes: int, has_base: bool, form: str
) -> None:
    assert FormSchedule(codec).begin(image_bytes, has_base=has_base) == form


def test_deltas_that_were_asked_for_are_made_however_little_they_spare() -> None:
    schedule = FormSchedule("delta")
    schedule.begin(FULL, has_base=False)
    schedule.made(EncodedOffer(v(1), v(0), "delta", FULL))
    assert schedule.begin(FULL, has_base=True) == "delta"
    assert not schedule.is_hopeless(FULL, FULL)
    assert FormSchedule("auto").is_hopeless(FULL, FULL)


VERSIONS = st.integers(0, 4).map(v)
SIZES = st.integers(0, 6)
OFFERS = st.lists(
    st.one_of(
        st.builds(EncodedOffer, VERSIONS, st.none(), st.sampled_from(["full", "keyframe"]), SIZES),
        st.builds(EncodedOffer, VERSIONS, VERSIONS, st.just("delta"), SIZES),
    ),
    max_size=6,
)


def every_cost(
    held: set[PolicyVersion], offers: Sequence[EncodedOffer], target: PolicyVersion
) -> list[tuple[int, int]]:
    """Return (bytes, steps) of all orders of all selections of offers that lead to the target."""
    costs = []
    for length in range(1, len(offers) + 1):
        for path in itertools.permutations(offers, length):
            is_first_possible = path[0].base is None or path[0].base in held
            is_linked = all(b.base == a.version for a, b in itertools.pairwise(path))
            if is_first_possible and is_linked and path[-1].version == target:
                costs.append((path_bytes(path), length))
    return costs


@given(st.sets(VERSIONS, max_size=3), OFFERS, VERSIONS)
def test_no_way_is_cheaper(
    held: set[PolicyVersion], offers: list[EncodedOffer], target: PolicyVersion
) -> None:
    path = cheapest_path(held, offers, target)
    costs = every_cost(held, offers, target)
    if target in held:
        assert path == []
    elif path is None:
        assert costs == []
    else:
        assert path[0].base is None or path[0].base in held
        assert all(b.base == a.version for a, b in itertools.pairwise(path))
        assert path[-1].version == target
        assert (path_bytes(path), len(path)) == min(costs)
