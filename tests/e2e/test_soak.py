"""The short form of the nightly soak, and what counts there as growth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.soak import Samples, soak

MIB = 1 << 20


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_minute_of_deaths_breaks_no_promise(tmp_path: Path) -> None:
    assert soak(tmp_path, minutes=1, seed=1) == []


def test_what_grows_until_the_end_is_told_and_what_settles_is_not() -> None:
    grows, settles = Samples(), Samples()
    for second in range(400):
        grows.add(300 * MIB + second * MIB // 4, 40 + second // 10)
        settles.add(min(300, 200 + second) * MIB, min(60, 40 + second))
    assert settles.problems() == []
    memory, descriptors = grows.problems()
    assert memory.startswith("memory grew from ")
    assert descriptors.startswith("open descriptors grew from 5")
