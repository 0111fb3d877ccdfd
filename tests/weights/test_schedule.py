"""Keyframes and deltas are made where they spare bytes, and the cheapest way is taken."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.rollout import PolicyVersion
from echo.weights.schedule import (
    MAX_STEPS,
    MIN_IMAGE_BYTES,
    RETRY_AFTER,
    FetchPath,
    FormSchedule,
    cheapest_paths,
)
from echo.wire.messages import FULL as IMAGE
from echo.wire.messages import Form, ItemId

FULL = 10_000_000


def v(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


class Learner:
    """Publishes versions as a plan says; nothing is ever forgotten."""

    def __init__(self, delta_bytes: int, keyframe_bytes: int = 2 * FULL // 3) -> None:
        self.plan = FormSchedule("auto")
        self.delta_bytes = delta_bytes
        self.keyframe_bytes = keyframe_bytes
        self.offers: dict[ItemId, int] = {}
        self.keyframes: list[int] = []
        self.deltas: list[int] = []

    def make(self, step: int, form: Form, num_bytes: int) -> None:
        self.offers[v(step), form] = num_bytes
        self.plan.made((v(step), form), num_bytes)

    def publish(self, step: int) -> None:
        form = self.plan.begin(FULL, has_base=step > 0)
        self.offers.pop((v(step - 1), IMAGE), None)
        self.make(step, IMAGE, FULL)
        if form == "delta":
            self.make(step, Form("delta", v(step - 1)), self.delta_bytes)
            self.deltas.append(step)
        if self.plan.is_keyframe_due(self.offers, v(step)):
            self.make(step, Form("keyframe"), self.keyframe_bytes)
            self.keyframes.append(step)

    def way_of_a_late_joiner(self, step: int) -> FetchPath:
        return cheapest_paths((), self.offers)[v(step)]


@pytest.mark.parametrize(
    ("ratio", "period"),
    [(116, MAX_STEPS), (37, 7), (10, 2), (2.8, 1)],
    ids=["lr 1e-6", "lr 5e-6", "large steps", "fp32"],
)
def test_keyframes_follow_the_size_of_the_deltas(ratio: float, period: int) -> None:
    learner = Learner(round(FULL / ratio))
    for step in range(40):
        learner.publish(step)
        path = learner.way_of_a_late_joiner(step)
        assert path.num_bytes <= 1.25 * learner.keyframe_bytes
        assert len(path.items) <= MAX_STEPS
    assert learner.keyframes == list(range(0, 40, period))


@pytest.mark.parametrize("share", [0.92, 1.0])
def test_keyframes_that_spare_nothing_are_made_once(share: float) -> None:
    learner = Learner(FULL // 100, keyframe_bytes=round(share * FULL))
    for step in range(40):
        learner.publish(step)
    assert learner.keyframes == [0]


def test_a_keyframe_shows_its_size_before_a_delta_is_compared_with_it() -> None:
    learner = Learner(round(0.7 * FULL))
    learner.plan.begin(FULL, has_base=False)
    learner.plan.made((v(0), Form("delta", v(-1))), learner.delta_bytes)
    assert learner.plan.begin(FULL, has_base=True) == "delta", "no keyframe is known to be smaller"
    learner.plan.made((v(0), Form("keyframe")), learner.keyframe_bytes)
    assert learner.plan.begin(FULL, has_base=True) == "keyframe"


def test_deltas_that_spare_little_are_tried_again_from_time_to_time() -> None:
    learner = Learner(FULL * 65 // 100)
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
    schedule.made((v(1), Form("delta", v(0))), FULL)
    assert schedule.begin(FULL, has_base=True) == "delta"
    assert not schedule.is_hopeless(FULL, FULL)
    assert FormSchedule("auto").is_hopeless(FULL, FULL)


VERSIONS = st.integers(0, 4).map(v)
SIZES = st.integers(0, 6)
FORMS = st.one_of(st.sampled_from([IMAGE, Form("keyframe")]), VERSIONS.map(partial(Form, "delta")))
OFFERS = st.dictionaries(st.tuples(VERSIONS, FORMS), SIZES, max_size=6)


def every_cost(
    held: set[PolicyVersion], offers: Mapping[ItemId, int], target: PolicyVersion
) -> list[tuple[int, int]]:
    """Return (bytes, steps) of all orders of all selections of offers that lead to the target."""
    forward = [
        each for each in offers.items() if (base := each[0][1].base) is None or base < each[0][0]
    ]
    return [
        (sum(size for _, size in path), length)
        for length in range(1, len(forward) + 1)
        for path in itertools.permutations(forward, length)
        if leads(held, [item for item, _ in path], target)
    ]


def leads(held: set[PolicyVersion], items: Sequence[ItemId], target: PolicyVersion) -> bool:
    base = items[0][1].base
    is_linked = all(b[1].base == a[0] for a, b in itertools.pairwise(items))
    return (base is None or base in held) and is_linked and items[-1][0] == target


@given(st.sets(VERSIONS, max_size=3), OFFERS, VERSIONS)
def test_no_way_is_cheaper(
    held: set[PolicyVersion], offers: dict[ItemId, int], target: PolicyVersion
) -> None:
    path = cheapest_paths(held, offers).get(target)
    costs = every_cost(held, offers, target)
    if target in held:
        assert path == (0, 0, ())
    elif path is None:
        assert costs == []
    else:
        assert leads(held, path.items, target)
        assert sum(offers[item] for item in path.items) == path.num_bytes
        assert (path.num_bytes, len(path.items)) == path[:2] == min(costs)
