"""Workers whose samples are not what they state, and honest ones that differ."""

from __future__ import annotations

import random

import pytest

from echo.leases.mismatch import FLOOR, TIMES, WINDOW, Mismatches, Sampled, level

USUAL = 0.002


def trained(
    mismatches: Mismatches,
    name: str,
    kl: float,
    *,
    number: int = WINDOW,
    engine: str = "transformers float32",
    staleness: float = 0.0,
) -> None:
    for _ in range(number):
        mismatches.trained(Sampled(name, staleness, kl), engine=engine)


def judged(kl: float, *, usual: float = USUAL, num_equals: int = 2, number: int = WINDOW) -> bool:
    """Return whether a worker with this mismatch stands out among its equals."""
    mismatches = Mismatches()
    for index in range(num_equals):
        trained(mismatches, f"w{index}", usual)
    trained(mismatches, "other", kl, number=number)
    found = mismatches.find_outliers()
    assert {*found} <= {"other"}
    return bool(found)


def test_who_has_five_times_the_mismatch_of_its_equals_stands_out() -> None:
    assert judged(TIMES * USUAL)
    assert not judged(TIMES * USUAL * 0.99)
    assert judged(5.0)
    assert not judged(USUAL / 100)


def test_below_the_floor_nobody_does() -> None:
    assert not judged(FLOOR, usual=1e-9)
    assert judged(1.01 * FLOOR, usual=1e-9)
    assert judged(1.0, usual=0.0)


def test_not_with_fewer_groups_or_without_two_equals() -> None:
    assert not judged(5.0, number=WINDOW - 1)
    assert not judged(5.0, num_equals=1)
    assert not judged(5.0, num_equals=0)


def test_who_is_told_begins_anew() -> None:
    mismatches = Mismatches()
    for name in ("a", "b", "liar"):
        trained(mismatches, name, 5.0 if name == "liar" else USUAL)
    [text] = mismatches.find_outliers().values()
    assert "differ from the learner's by 5 nats per token" in text
    assert "equal workers have 0.002" in text
    assert mismatches.find_outliers() == {}
    trained(mismatches, "liar", 5.0, number=WINDOW - 1)
    assert mismatches.find_outliers() == {}
    trained(mismatches, "liar", 5.0, number=1)
    assert {*mismatches.find_outliers()} == {"liar"}


def test_another_engine_or_data_type_is_no_equal() -> None:
    mismatches = Mismatches()
    for name in ("a", "b", "c"):
        trained(mismatches, name, 1e-5)
    trained(mismatches, "coarse", 0.02, engine="transformers bfloat16")
    trained(mismatches, "other", 0.02, engine="vllm float32")
    assert mismatches.find_outliers() == {}
    for name in ("d", "e"):
        trained(mismatches, name, 0.001, engine="transformers bfloat16")
    assert {*mismatches.find_outliers()} == {"coarse"}


def test_older_weights_are_compared_with_weights_as_old() -> None:
    def found(equals_are_as_old: bool) -> set[str]:
        mismatches = Mismatches()
        for name in ("a", "b"):
            trained(mismatches, name, USUAL)
            if equals_are_as_old:
                trained(mismatches, name, USUAL, staleness=6.0, number=WINDOW // 2)
        trained(mismatches, "far", 20 * USUAL, staleness=6.0)
        return {*mismatches.find_outliers()}

    assert found(equals_are_as_old=False) == set()
    assert found(equals_are_as_old=True) == {"far"}
    assert level(0.0) == level(0.1) != level(1.0) != level(2.0)


@pytest.mark.parametrize("seed", range(5))
def test_honest_workers_with_rare_large_differences_stay(seed: int) -> None:
    """The estimate is exponential in a token's difference: some groups have a thousand times."""
    chance, mismatches = random.Random(seed), Mismatches()
    for _ in range(4 * WINDOW):
        for name in ("a", "b", "c", "d"):
            kl = USUAL * chance.lognormvariate(0.0, 1.0)
            kl *= 1000 if chance.random() < (0.2 if name == "a" else 0.02) else 1
            trained(mismatches, name, kl, number=1, staleness=chance.randrange(3))
        assert mismatches.find_outliers() == {}
