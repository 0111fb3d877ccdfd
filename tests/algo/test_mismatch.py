"""The ratio statistics against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo.algo.diagnostics import mismatch_metrics


def test_numbers_worked_out_by_hand() -> None:
    # Ratios 2 and 1/2: mean 5/4, ess = (5/2)^2 / (2 * 17/4), k3 = mean(1 - ln 2, -1/2 + ln 2).
    metrics = mismatch_metrics(torch.tensor([0.0, -math.log(2)]), torch.tensor([-math.log(2), 0.0]))
    assert metrics == pytest.approx(
        {"is_ratio/mean": 1.25, "is_ratio/max": 2.0, "ess": 25 / 34, "mismatch_kl": 0.25}
    )


def test_the_same_policy() -> None:
    logprobs = torch.tensor([-0.1, -3.0, -20.0])
    assert mismatch_metrics(logprobs.requires_grad_(), logprobs.detach()) == {
        "is_ratio/mean": 1.0,
        "is_ratio/max": 1.0,
        "ess": 1.0,
        "mismatch_kl": 0.0,
    }


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=20))
def test_bounds(pairs: list[tuple[float, float]]) -> None:
    learner, sampler = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    metrics = mismatch_metrics(learner, sampler)
    assert metrics["mismatch_kl"] >= 0.0
    assert 1.0 / len(pairs) <= metrics["ess"] * (1 + 1e-12)
    assert metrics["ess"] <= 1.0 + 1e-12
    assert metrics["is_ratio/mean"] <= metrics["is_ratio/max"] * (1 + 1e-12)
