"""Log-probabilities within sets of ids against a masked softmax in float64, and by enumeration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from echo.kernels import torch_kernels
from echo.kernels.contract import BackendName, Pairs
from echo.kernels.logprob import IdSets, linear_logprob, linear_pair_logits, linear_set_logprob
from tests.kernels.test_linear_logprob import (
    Case,
    LargestTensor,
    Results,
    make_case,
    max_error,
    relative_error,
)


def make_sets(case: Case, *, seed: int = 0, every: int = 4) -> tuple[IdSets, Tensor]:
    """Return sets of 1 to 9 ids, none for one row in `every`; and [N, V] whether an id counts."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, vocab = len(case.ids), len(case.weight)
    counts = torch.zeros(num_rows, vocab, dtype=torch.bool)
    for row in range(num_rows):
        size = int(torch.randint(1, min(9, vocab) + 1, (), generator=generator))
        counts[row, torch.randperm(vocab, generator=generator)[:size]] = True
        counts[row, case.ids[row]] = True
    beyond = torch.arange(num_rows) % every == every - 1
    within = (~beyond).nonzero()[:, 0]
    rows, ids = counts[within].nonzero().unbind(1)
    sets = IdSets(
        pairs=Pairs(rows, ids),
        sizes=counts[within].sum(1),
        own=(ids == case.ids[within][rows]).nonzero()[:, 0],
        within=within,
        beyond=beyond.nonzero()[:, 0],
    )
    counts[beyond] = True
    return sets, counts


def combine(case: Case, function: Any) -> Results:
    """Values and the gradients of a random combination of both outputs."""
    hidden, weight = (each.clone().requires_grad_() for each in (case.hidden, case.weight))
    logprobs, entropies = function(hidden, weight)
    generator = torch.Generator().manual_seed(99)
    coefficients = torch.randn(2, len(case.ids), generator=generator).to(logprobs)
    (coefficients[0] * logprobs + 0.3 * coefficients[1] * entropies).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return Results(logprobs.detach(), entropies.detach(), hidden.grad, weight.grad)


def set_results(
    case: Case, *, backend: BackendName = "torch", device: str = "cpu", **options: Any
) -> Results:
    sets, _ = make_sets(case, **options)
    case = Case(*(part.to(device) for part in case))
    moved = {name: getattr(sets, name).to(device) for name in ("sizes", "own", "within", "beyond")}
    pairs = Pairs(sets.pairs.rows.to(device), sets.pairs.ids.to(device))
    sets = replace(sets, pairs=pairs, **moved)
    found = combine(
        case,
        lambda hidden, weight: linear_set_logprob(
            hidden, weight, case.ids, sets, 0.8, entropy="grad", backend=backend, vocab_chunk=128
        ),
    )
    return Results(*(part.cpu() for part in found))


def masked_results(case: Case, **options: Any) -> Results:
    _, counts = make_sets(case, **options)

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = (hidden @ weight.T * 0.8).masked_fill(~counts, -torch.inf)
        logprobs = logits.log_softmax(1)
        plogp = logprobs.exp() * logprobs.masked_fill(~counts, 0.0)
        return logprobs.gather(1, case.ids[:, None])[:, 0], -plogp.sum(1)

    return combine(Case(case.hidden.double(), case.weight.double(), *case[2:]), function)


def check(
    case: Case, *, value_error: float = 3e-6, gradient_error: float = 1e-6, **options: Any
) -> None:
    how = {name: options.pop(name) for name in ("backend", "device") if name in options}
    actual, expected = set_results(case, **how, **options), masked_results(case, **options)
    assert actual.grad_hidden.dtype == actual.grad_weight.dtype == case.hidden.dtype
    assert max_error(actual.logprobs, expected.logprobs) < value_error
    assert max_error(actual.entropies, expected.entropies) < value_error
    assert relative_error(actual.grad_hidden, expected.grad_hidden) < gradient_error
    assert relative_error(actual.grad_weight, expected.grad_weight) < gradient_error


# Case, largest error of values, relative error of gradients, both against float64.
CASES: dict[str, tuple[Case, float, float]] = {
    "ragged": (make_case(), 3e-6, 1e-6),
    "one row": (make_case(rows=1), 3e-6, 1e-6),
    "small vocabulary": (make_case(vocab=5), 3e-6, 1e-6),
    "large logits": (make_case(gain=30.0), 4e-5, 1e-5),
    "shifted logits": (make_case(shift=-60.0), 4e-5, 1e-5),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_scored_on_its_set_and_a_row_without_one_on_everything(name: str) -> None:
    case, value_error, gradient_error = CASES[name]
    for every in (4, 1000):
        check(case, value_error=value_error, gradient_error=gradient_error, every=every)


def test_pairs_are_computed_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "PAIR_NUMBERS", 24 * 7)
    check(make_case())


def test_bfloat16_weights_are_summed_in_float32() -> None:
    case = make_case(rows=200, dtype=torch.bfloat16)
    check(case, gradient_error=5e-3)


def test_a_token_that_was_the_only_one_has_log_probability_0_and_no_gradient() -> None:
    hidden, weight = torch.randn(2, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    sets = IdSets(
        pairs=Pairs(torch.arange(2), torch.tensor([4, 6])),
        sizes=torch.ones(2, dtype=torch.int64),
        own=torch.arange(2),
        within=torch.arange(2),
        beyond=torch.empty(0, dtype=torch.int64),
    )
    logprobs, entropies = linear_set_logprob(
        hidden, weight, torch.tensor([4, 6]), sets, entropy="grad"
    )
    assert entropies is not None
    (logprobs + entropies).sum().backward()
    assert logprobs.tolist() == entropies.tolist() == [0.0, 0.0]
    for leaf in (hidden, weight):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_the_expected_ratio_is_1_and_the_expected_score_0_within_the_set() -> None:
    """By enumeration: the sampler's set and distribution, the learner's scores in it.

    Scored on the whole vocabulary the expected ratio is the learner's mass in the set.
    """
    vocab, kept = 6, torch.tensor([1, 2, 5])
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    sampler = torch.randn(vocab, generator=generator, dtype=torch.float64)[kept].softmax(0)
    states = hidden.expand(3, -1)
    sets = IdSets(
        pairs=Pairs(torch.arange(3).repeat_interleave(3), kept.repeat(3)),
        sizes=torch.full((3,), 3),
        own=torch.arange(3) * 4,
        within=torch.arange(3),
        beyond=torch.empty(0, dtype=torch.int64),
    )
    logprobs, _ = linear_set_logprob(states, weight, kept, sets)
    whole, _ = linear_logprob(states, weight, kept)
    ratios = (logprobs.detach() - sampler.log()).exp()
    assert float((sampler * ratios).sum()) == pytest.approx(1.0, abs=1e-12)
    mass = float((hidden @ weight.detach().T).softmax(1)[0, kept].sum())
    assert float((sampler * (whole.detach() - sampler.log()).exp()).sum()) == pytest.approx(
        mass, abs=1e-12
    )
    (score,) = torch.autograd.grad((logprobs.exp().detach() * logprobs).sum(), weight)
    assert float(score.abs().max()) < 1e-12


def test_the_log_probability_of_another_id_follows_from_pair_logits() -> None:
    case = make_case(rows=3, dtype=torch.float64)
    others = torch.tensor([7, 9, 7])
    rows = torch.tensor([0, 0, 1, 1, 2, 2])
    ids = torch.stack([case.ids, others], 1).flatten()
    logits = linear_pair_logits(case.hidden, case.weight, Pairs(rows, ids), case.inv_temperature)
    own, _ = linear_logprob(case.hidden, case.weight, case.ids, case.inv_temperature)
    other, _ = linear_logprob(case.hidden, case.weight, others, case.inv_temperature)
    found = own + logits[1::2] - logits[::2]
    assert torch.allclose(found, other, atol=1e-12)


def test_neither_logits_of_the_vocabulary_nor_a_pass_over_the_head_are_computed() -> None:
    rows, vocab, width = 300, 4000, 8
    case = make_case(rows, width, vocab)
    sets, _ = make_sets(case, every=1000)
    hidden = case.hidden.clone().requires_grad_()
    with LargestTensor() as ours:
        logprobs, _ = linear_set_logprob(hidden, case.weight, case.ids, sets, entropy="value")
        logprobs.sum().backward()
    num_ids = int(sets.sizes.sum())
    assert ours.num_elements <= num_ids * width < rows * vocab / 50


def test_an_id_outside_of_the_vocabulary_is_refused() -> None:
    case = make_case(rows=2, vocab=11)
    pairs = Pairs(torch.tensor([0, 1]), torch.tensor([3, 11]))
    with pytest.raises(ValueError, match=r"span 3\.\.11, but the LM head has 11 rows"):
        linear_pair_logits(case.hidden, case.weight, pairs)
