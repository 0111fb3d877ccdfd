"""Shares of a variance in a mismatch: by hand, and that they are complete."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.train.attribution import split_variance

VALUES = st.lists(st.floats(-5, 5), min_size=6, max_size=6).map(np.array)


def test_by_hand() -> None:
    """Sum (0, 2, 4): mean 2, variance 8/3; cov with (0, 1, 2) 4/3, with (0, 1, 2) again 4/3."""
    found = split_variance({"a": np.array([0.0, 1, 2]), "b": np.array([0.0, 1, 2])})
    assert found == pytest.approx({"variance": 8 / 3, "a": 0.5, "b": 0.5})
    found = split_variance({"a": np.array([0.0, 2, 4]), "b": np.array([7.0, 7, 7])})
    assert found == pytest.approx({"variance": 8 / 3, "a": 1.0, "b": 0.0})


def test_parts_that_work_against_each_other() -> None:
    found = split_variance({"a": np.array([0.0, 2, 4]), "b": np.array([0.0, -1, -2])})
    assert found == pytest.approx({"variance": 2 / 3, "a": 2.0, "b": -1.0})


def test_without_variance_there_is_nothing_to_share() -> None:
    assert split_variance({"a": np.ones(3), "b": np.ones(3)}) == {"variance": 0.0}


@given(VALUES, VALUES, VALUES)
def test_the_shares_add_up(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    found = split_variance({"a": a, "b": b, "c": c})
    variance = found.pop("variance")
    assert variance == pytest.approx(float(np.var(a + b + c)), abs=1e-9)
    if found and variance > 1e-6:
        assert sum(found.values()) == pytest.approx(1.0)
