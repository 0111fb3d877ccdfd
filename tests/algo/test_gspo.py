"""GSPO against the design's vector and numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from echo.algo.losses import GspoLoss
from tests.algo.batches import counts, doubles, gradient, make_inputs

torch.set_num_threads(1)


def test_published_vector() -> None:
    """ALGORITHMS.md 1.9: s = [.980, 1.051, .819, 1.350], A = r - mean of [1, 0, 0, 1]."""
    learner = doubles([[-0.12], [-0.20], [-0.60], [-0.50]])
    sampler = doubles([[-0.10], [-0.25], [-0.40], [-0.80]])
    inputs = make_inputs(learner, sampler, doubles([0.5, -0.5, -0.5, 0.5]))
    output = GspoLoss(clip_low=0.2, clip_high=0.2)(inputs)
    assert output.loss.item() == pytest.approx(-0.0387746030, abs=1e-10)
    assert counts(output)["clip_ratio/high"] == 1


def test_the_ratio_is_the_rollouts_geometric_mean() -> None:
    """Ratios 4 and 1/2 and 1: s = 2^(1/3); each token has a third of its gradient."""
    inputs = make_inputs(doubles([[4.0, 0.5, 1.0]]).log(), torch.zeros(1, 3), doubles([1.0]))
    loss = GspoLoss(clip_low=0.5, clip_high=0.5)
    ratio = 2 ** (1 / 3)
    assert loss(inputs).loss.item() == pytest.approx(-ratio)
    assert gradient(loss, inputs).flatten().tolist() == pytest.approx([-ratio / 3] * 3)


def test_clips_count_the_tokens_of_their_rollouts() -> None:
    shift = math.log(1.1)
    learner = doubles([[shift, shift, 0.0], [-shift, 0.0, 0.0], [shift, shift, shift]])
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    inputs = make_inputs(learner, torch.zeros(3, 3), doubles([1.0, -1.0, -1.0]), mask)
    assert counts(GspoLoss()(inputs)) == {
        "clip_ratio/low": 1,
        "clip_ratio/high": 2,
        "clip_ratio/dual": 0,
        "clip_ratio/mean": 3,
    }
    assert not gradient(GspoLoss(), inputs)[:2].any()
    assert gradient(GspoLoss(), inputs)[2].any()
