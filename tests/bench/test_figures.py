"""Figures that judge results: intervals, theory of a topology, aims; by hand."""

from __future__ import annotations

import math

import pytest
from broadcast.figures import FIGURES
from broadcast.lab import Topology


@pytest.mark.slow
def test_the_interval_is_students() -> None:
    """Five values of deviation .01: t(4, .975) = 2.776."""
    from learning.report import interval  # which takes longer than most tests

    mean, half_width = interval([0.02, 0.02, 0.03, 0.01, 0.02])
    assert mean == pytest.approx(0.02)
    assert half_width == pytest.approx(2.776 * math.sqrt(0.00005) / math.sqrt(5), rel=1e-3)
    assert interval([0.0]) == (0.0, math.inf)


@pytest.mark.parametrize(
    ("differences", "agrees"),
    [
        ([0.0, 0.01, -0.01, 0.005, -0.005], True),
        ([0.06, 0.05, 0.06, 0.05, 0.06], False),
        ([0.1, -0.1, 0.1, -0.1, 0.0], False),
    ],
)
def test_only_a_narrow_interval_around_nothing_is_agreement(
    differences: list[float], agrees: bool
) -> None:
    from bench_modes import compare

    base = [{"sampled": 0.8, "greedy": 0.9}] * 5
    moved = [{"sampled": 0.8 + d, "greedy": 0.9} for d in differences]
    found = compare({"colocated": base, "pull": moved, "push_pull": base})
    assert found["pull/sampled"]["agrees"] is agrees
    assert found["pull/greedy"]["agrees"]
    assert found["push_pull/sampled"]["mean"] == 0.0


def test_theory_is_that_of_the_links() -> None:
    seconds = {
        text: Topology.parse(text).theory_s(1000, 10, 100.0, 0.5)
        for text in ("star:4", "chain:1", "chain:4", "tree:6:2")
    }
    assert seconds["star:4"] == 40.5
    assert seconds["chain:1"] == 10.5
    assert seconds["chain:4"] == pytest.approx(10 + 3 * 0.1 + 4 * 0.5)
    assert seconds["tree:6:2"] == pytest.approx(20 + 1 * 0.2 + 2 * 0.5)


def test_a_verdict_knows_which_way_is_better() -> None:
    stall, chain = FIGURES["stall"], FIGURES["sixteen"]
    assert stall.verdict({"killed": 0.6, "black-holed": 0.7}) == {
        "killed": "missed",
        "black-holed": "aim",
    }
    assert chain.verdict({"x star": 11.0}) == {"x star": "met"}
