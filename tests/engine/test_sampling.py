"""Statistical tests have a fixed seed; their thresholds leave a chance of about 1e-4 over seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from echo.engine.engine import Sampling
from echo.engine.hf.batch import draw_tokens, sampling_logprobs, uniform_at

NUM_DRAWS = 20_000
LOGITS = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5


def sampling(**settings: object) -> Sampling:
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_completion_tokens": 1}
    return Sampling(**{**values, "stop_ids": (), **settings})  # type: ignore[arg-type]


SAMPLINGS = [
    sampling(),
    sampling(temperature=0.7),
    sampling(temperature=1.8),
    sampling(top_k=4),
    sampling(top_p=0.8),
    sampling(temperature=1.3, top_k=8, top_p=0.9),
]


def reference_probabilities(logits: torch.Tensor, sampling: Sampling) -> list[float]:
    """The definition, token by token, in Python numbers."""
    weights = (logits.double() / sampling.temperature).exp().tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: sampling.top_k or None]
    total = sum(weights[token] for token in kept)
    nucleus: list[int] = []
    reached = 0.0
    for token in kept:
        if nucleus and reached >= sampling.top_p:
            break
        nucleus.append(token)
        reached += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    return [weights[t] / total if t in nucleus else 0.0 for t in range(len(weights))]


@pytest.mark.parametrize("how", SAMPLINGS)
def test_logprobs_are_those_of_the_definition(how: Sampling) -> None:
    actual = sampling_logprobs(LOGITS[None], how)[0].exp()
    assert actual.tolist() == pytest.approx(reference_probabilities(LOGITS, how), abs=1e-6)


@pytest.mark.parametrize("how", SAMPLINGS)
def test_frequencies_follow_the_logprobs(how: Sampling) -> None:
    seeds = np.arange(NUM_DRAWS, dtype=np.uint64)
    logits = LOGITS.expand(NUM_DRAWS, -1)
    tokens, logprobs = draw_tokens(logits, how, uniform_at(seeds, 5))
    expected = np.array(reference_probabilities(LOGITS, how)) * NUM_DRAWS
    observed = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    result = stats.chisquare(observed[possible], expected[possible])
    assert result.pvalue > 1e-4
    every = sampling_logprobs(LOGITS[None], how)[0]
    assert torch.equal(logprobs, every[tokens])


def test_greedy_takes_the_most_likely_token_and_reports_the_plain_softmax() -> None:
    how = sampling(greedy=True, temperature=0.1, top_k=1)
    tokens, logprobs = draw_tokens(LOGITS[None], how, np.array([0.999]))
    assert tokens.item() == LOGITS.argmax()
    assert logprobs.item() == pytest.approx(LOGITS.log_softmax(-1).max().item())


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-52])
def test_an_impossible_token_is_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    tokens, logprobs = draw_tokens(logits, sampling(), np.array([uniform]))
    assert tokens.item() in (1, 3)
    assert logprobs.item() == pytest.approx(np.log(0.5))


def test_a_tiny_nucleus_still_holds_the_most_likely_token() -> None:
    logprobs = sampling_logprobs(LOGITS[None], sampling(top_p=1e-9))[0]
    assert logprobs.isfinite().nonzero().flatten().tolist() == [LOGITS.argmax().item()]
    assert logprobs.max().item() == 0


def test_a_large_vocabulary_keeps_its_improbable_tail() -> None:
    num_tokens = 150_000
    logits = torch.zeros(1, num_tokens)
    tokens, _ = draw_tokens(logits, sampling(), np.array([1 - 2.0**-52]))
    assert tokens.item() == num_tokens - 1
    tokens, _ = draw_tokens(logits, sampling(), np.array([0.5 / num_tokens]))
    assert tokens.item() == 0


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), st.integers(0, 10**6))
def test_a_number_depends_on_its_own_seed_and_step_only(seeds: list[int], step: int) -> None:
    together = uniform_at(np.array(seeds, np.uint64), step)
    alone = [uniform_at(np.array([seed], np.uint64), step)[0] for seed in seeds]
    assert together.tolist() == alone
    assert all(0 <= number < 1 for number in alone)


def test_numbers_are_uniform_over_seeds_and_over_steps_and_unrelated() -> None:
    across_seeds = uniform_at(np.arange(NUM_DRAWS, dtype=np.uint64), 0)
    across_steps = np.array([uniform_at(np.array([7], np.uint64), i)[0] for i in range(5000)])
    for numbers in (across_seeds, across_steps):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 4 / np.sqrt(len(numbers))
    shifted = uniform_at(np.arange(NUM_DRAWS, dtype=np.uint64), 1)
    assert not np.intersect1d(across_seeds, shifted).size
