"""Usefulness: the workers from whose groups something can be learned."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from echo.leases.usefulness import ALONE_S, AWAY_S, Usefulness

B = 4
MAX_BARREN = 20 * B


def make_usefulness() -> Usefulness:
    return Usefulness(max_zero_signal_groups=MAX_BARREN, groups_per_step=B)


def deliver_groups(
    counts: Usefulness,
    rates: Mapping[str, float],
    share: Callable[[str, int], float],
    *,
    num_groups: int,
    seed: int,
) -> list[tuple[int, str]]:
    """Deliver groups of workers with these speeds; return (group, text) of everything told.

    Args:
        counts: of whom.
        rates: groups per second by worker.
        share: (worker, group) -> probability that the group is useful.
        num_groups: delivered by all together.
        seed: of the chance.
    """
    chance, told = random.Random(seed), []
    for number in range(num_groups):
        present = {name: rate for name, rate in rates.items() if not counts.is_set_aside(name)}
        [name] = chance.choices([*present], [*present.values()])
        is_useful = chance.random() < share(name, number)
        texts = counts.delivered(name, is_useful=is_useful, now=number / 100)
        texts += counts.review(dict.fromkeys(rates, True), now=number / 100)
        told += [(number, text) for text in texts]
    return told


@pytest.mark.parametrize("attacker_rate", [0.3, 1.0, 50.0])
def test_a_worker_from_which_nothing_can_be_learned_is_set_aside(attacker_rate: float) -> None:
    counts = make_usefulness()
    rates = {"w1": 1.0, "w2": 0.5, "bad": attacker_rate}
    told = deliver_groups(
        counts, rates, lambda name, _: 0.0 if name == "bad" else 0.4, num_groups=4000, seed=1
    )
    texts = [text for _, text in told if "set aside for 10min" in text]
    assert len(texts) == 1
    assert texts[0].startswith("bad is set aside for 10min: something could be learned from 0 of")
    assert counts.is_set_aside("bad")
    assert not counts.is_set_aside("w1")
    assert not counts.is_set_aside("w2")


def test_it_gets_another_chance_and_is_judged_anew() -> None:
    counts = make_usefulness()
    rates = {"w1": 1.0, "bad": 9.0}
    deliver_groups(counts, rates, lambda name, _: 0.3 * (name == "w1"), num_groups=2000, seed=2)
    assert counts.is_set_aside("bad")
    assert counts.review(dict.fromkeys(rates, True), now=20 + AWAY_S) == [
        "bad is no longer set aside"
    ]
    assert not counts.is_set_aside("bad")
    assert counts.is_idle
    # It was mended meanwhile.
    assert deliver_groups(counts, rates, lambda name, _: 0.3, num_groups=2000, seed=3) == []


@pytest.mark.parametrize("seed", range(4))
def test_honest_workers_are_never_set_aside_whatever_the_share_and_its_course(seed: int) -> None:
    counts = make_usefulness()
    rates = {"fast": 10.0, "w1": 1.0, "w2": 0.5, "slow": 0.02}

    def share(name: str, number: int) -> float:
        if number < 300:
            return 0.0  # nothing is right yet
        return (0.01, 0.6, 0.1, 0.02)[number // 300 % 4]

    told = deliver_groups(counts, rates, share, num_groups=3000, seed=seed)
    # A second opinion may be asked for, which nobody is judged by.
    assert not [text for _, text in told if "something could be learned" in text]


def test_one_worker_does_not_end_the_run_between_useful_groups_of_others() -> None:
    counts, able = make_usefulness(), {"bad": True, "honest": True}
    for _ in range(MAX_BARREN):
        assert counts.is_idle
        counts.delivered("bad", is_useful=False, now=0.0)
    [text] = counts.review(able, now=0.0)
    assert text.startswith(f"bad is set aside until other workers have delivered {B} groups")
    assert counts.is_set_aside("bad")
    counts.delivered("bad", is_useful=False, now=0.0)  # it was under way
    assert counts.num_discounted == MAX_BARREN + 1
    for _ in range(B - 1):
        counts.delivered("honest", is_useful=False, now=0.0)
        assert counts.review(able, now=0.0) == []
    counts.delivered("honest", is_useful=True, now=0.0)
    assert not counts.is_set_aside("bad")
    assert counts.num_discounted == 0
    assert counts.is_idle


def test_where_the_others_agree_the_run_is_zero_signal() -> None:
    counts, able = make_usefulness(), {"fast": True, "slow": True}
    for _ in range(MAX_BARREN):
        counts.delivered("fast", is_useful=False, now=0.0)
    counts.review(able, now=0.0)
    assert counts.num_discounted == MAX_BARREN
    for _ in range(B):
        counts.delivered("slow", is_useful=False, now=0.0)
        counts.review(able, now=0.0)
    assert counts.num_discounted == 0
    assert not counts.is_set_aside("fast")
    assert counts.review(able, now=0.0) == []  # asked once
    # Equal workers are heard at the same time.
    counts = make_usefulness()
    for number in range(MAX_BARREN):
        counts.delivered([*able][number % 2], is_useful=False, now=0.0)
        assert counts.review(able, now=0.0) == []
    assert counts.num_discounted == 0


@pytest.mark.parametrize("without", [{}, {"w2": False}], ids=["gone", "stuck"])
def test_where_nobody_else_can_sample_a_worker_speaks_and_says_it_all_again(
    without: dict[str, bool],
) -> None:
    counts = make_usefulness()
    for _ in range(MAX_BARREN):
        counts.delivered("w1", is_useful=False, now=0.0)
    assert counts.review({"w1": True}, now=0.0) == []  # alone from the beginning
    assert counts.num_discounted == 0
    counts.review({"w1": True, "w2": True}, now=0.0)
    assert counts.is_set_aside("w1")
    counts.review({"w1": True} | without, now=1.0)
    counts.review({"w1": True, "w2": True}, now=30.0)  # a moment's absence is none
    counts.review({"w1": True} | without, now=31.0)
    counts.review({"w1": True} | without, now=30.0 + ALONE_S)
    assert counts.is_set_aside("w1")
    counts.review({"w1": True} | without, now=31.0 + ALONE_S)
    assert not counts.is_set_aside("w1")
    assert counts.num_discounted == MAX_BARREN
    for _ in range(MAX_BARREN):
        counts.delivered("w1", is_useful=False, now=100.0)
        assert counts.review({"w1": True} | without, now=100.0) == []
    assert counts.num_discounted == MAX_BARREN  # and as many count now


def test_who_was_set_aside_is_wanted_again_where_nobody_else_can_sample() -> None:
    counts, rates = make_usefulness(), {"w1": 1.0, "bad": 9.0}
    deliver_groups(counts, rates, lambda name, _: 0.3 * (name == "w1"), num_groups=2000, seed=2)
    assert counts.is_set_aside("bad")
    before = counts.num_discounted
    counts.delivered("bad", is_useful=False, now=20.0)
    assert counts.num_discounted == before + 1
    assert counts.review({"bad": True}, now=20.0) == []
    assert counts.review({"bad": True}, now=20.0 + ALONE_S) == ["bad is no longer set aside"]
