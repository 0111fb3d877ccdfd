"""B rows, P prompt tokens, T completion tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from echo.core.errors import DataError, EngineError
from echo.core.token_sets import MAX_SET_IDS, NOT_RECORDED, TOO_LARGE
from echo.engine.engine import Completion, Request, Sampling, describe_nonfinite
from echo.engine.hf import engine as hf_engine
from echo.engine.hf.batch import StaticBatch, draw_tokens, sampling_logprobs, uniform_at
from echo.engine.hf.engine import Mailbox, TransformersEngine
from echo.engine.model import load_directory
from tests.engine.engine_contract import (
    ENDLESS,
    EOS,
    LONG,
    PLAIN,
    V1,
    V2,
    V3,
    EngineContract,
    EngineLifeContract,
    Models,
    Module,
    PatchContract,
    Torn,
    Watched,
    Weights,
    assert_the_learners,
    request,
    run,
    tied_first,
    versions_of,
)
from tests.engine.test_engine import CPU, CUDA
from tests.engine.watchers import watching

MakeTinyModel = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path) -> TransformersEngine:
    return loaded(tiny_model_dir)


def loaded(directory: Path, **settings: object) -> TransformersEngine:
    engine = TransformersEngine(directory, **settings)  # type: ignore[arg-type]
    engine.load(load_directory(directory, "float32"))
    return engine


def sampling(**settings: object) -> Sampling:
    return replace(PLAIN, **settings)  # type: ignore[arg-type]


def equal_prompts(num_rows: int) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 32, (num_rows // 4, 9))
    return [request(prompts[row // 4].tolist(), row, f"r{row}") for row in range(num_rows)]


def unequal_prompts(num_rows: int) -> list[Request]:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 20, num_rows)
    return [
        request(rng.integers(3, 32, length).tolist(), row, f"r{row}")
        for row, length in enumerate(lengths)
    ]


def assert_same(first: Sequence[Completion], second: Sequence[Completion]) -> None:
    assert [c.request_id for c in first] == [c.request_id for c in second]
    for one, other in zip(first, second, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_model_with_learned_positions_agrees_too(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    requests = unequal_prompts(8)
    for prompt, completion in zip(requests, run(loaded(tmp_path), requests), strict=True):
        assert_the_learners(completion, model, prompt)


# --- memory ---------------------------------------------------------------------------------------


WEIGHTS = 100_736 * 4
ONE = 2 * 3 * 2 * 16 * 4 * (19 + 16) + 32 * 32
"""Of a rollout of 19 + 16 tokens: 2 layers and the one being grown."""


@pytest.mark.slow
def test_a_small_memory_budget_makes_batches_and_changes_nothing(
    engine: TransformersEngine, tiny_model_dir: Path
) -> None:
    small = loaded(tiny_model_dir, rollout_bytes=3 * ONE + ONE // 2)
    assert small.max_concurrent_rollouts(19, 16) == 3
    requests = unequal_prompts(10)
    assert_same(run(small, requests), run(engine, requests))
    # Beside a trainer it holds what it may have, and a rollout in any case.
    for rollout_bytes, number in ((3 * ONE + 1, 3), (ONE, 1), (1, 1)):
        beside = loaded(tiny_model_dir, rollout_bytes=rollout_bytes, is_beside=True)
        assert beside.max_concurrent_rollouts(19, 16) == number
    assert_same(run(beside, requests), run(engine, requests))


def test_what_is_continued_needs_no_more_memory_than_when_it_began(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a row that has nothing yet, which would pad it: then one goes after the other."""
    monkeypatch.setattr(hf_engine, "free_bytes", lambda _: 2 * (WEIGHTS + ONE))
    engine = loaded(tiny_model_dir)
    how = sampling(stop_ids=())
    fresh = request([1, *range(3, 21)])
    whole = run(engine, [fresh], how)[0]
    begun = Request("r", fresh.prompt_ids, 1, whole.token_ids[:9])
    found = run(engine, [fresh, begun], how)
    assert [len(completion.token_ids) for completion in found] == [16, 7]
    with pytest.raises(EngineError, match=r"one rollout of 20 \+ 16 tokens"):
        run(engine, [request([1] * 20)], how)
    monkeypatch.setattr(hf_engine, "free_bytes", lambda _: 1_000_000)
    with pytest.raises(EngineError, match=r"budget of 500000 bytes.*402944.*max_completion_tokens"):
        loaded(tiny_model_dir).max_concurrent_rollouts(100, 1000)


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_head_gets_no_slice(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, *, has_begun: bool
) -> None:
    """Of prompts, or of interrupted completions that go on: torch would repeat its weight."""
    linear, heads = functional.linear, []

    def watched(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(weight) == 32:
            heads.append((len(states), states.is_contiguous()))
        return linear(states, weight, bias)

    monkeypatch.setattr(functional, "linear", watched)
    prefixes = np.arange(3, 9 if has_begun else 3, dtype=np.int32)
    requests = [replace(each, prefix_ids=prefixes) for each in distinct_prompts(4)]
    run(loaded(tiny_model_dir), requests, sampling(stop_ids=()))
    assert heads[0] == (4, True)
    assert all(is_whole for _, is_whole in heads)


@pytest.mark.parametrize("num_begun", [0, 6])
def test_each_layer_shows_life_while_contexts_are_read(
    engine: TransformersEngine, num_begun: int
) -> None:
    """Or leases expire beside a call that takes a minute to its first token."""
    seen: list[str] = []
    watcher = watching(
        on_progress=lambda number: seen.append("layer"),
        on_tokens=lambda number: seen.append("token"),
    )
    prefixes = np.arange(3, 3 + num_begun, dtype=np.int32)
    requests = [replace(each, prefix_ids=prefixes) for each in distinct_prompts(4)]
    engine.generate(requests, sampling(stop_ids=()), watcher)
    num_layers = seen.index("token")
    assert seen[:num_layers] == ["layer"] * num_layers
    assert num_layers >= 2
    assert "layer" not in seen[num_layers:], "a token is a sign of life of its own"


class Memory:
    """Holds so many tokens' keys and values, and fails as a device does beyond."""

    num_tokens: int | None = None
    error: Exception = torch.OutOfMemoryError(CUDA)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory, forward = Memory(), TransformersEngine._forward

    def limited(engine: Any, ids: Any, mask: Any, positions: Any, cache: Any) -> Any:
        logits = forward(engine, ids, mask, positions, cache)
        if memory.num_tokens and len(ids) * cache.get_seq_length() > memory.num_tokens:
            raise memory.error
        return logits

    monkeypatch.setattr(TransformersEngine, "_forward", limited)
    return memory


@pytest.fixture
def own_engine(tiny_model_dir: Path) -> TransformersEngine:
    """One whose concurrency a test may lower."""
    return loaded(tiny_model_dir)


def distinct_prompts(num_rows: int) -> list[Request]:
    """Such that alone, before any token, exceed a small memory."""
    return [request([3 + row] * 12, row, f"r{row}") for row in range(num_rows)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_requests", "num_tokens", "limit"),
    [(equal_prompts, 75, 4), (unequal_prompts, 220, 8), (distinct_prompts, 75, 2)],
)
def test_no_token_is_lost_or_sampled_twice_where_memory_runs_out(
    own_engine: TransformersEngine,
    memory: Memory,
    caplog: pytest.LogCaptureFixture,
    make_requests: Callable[[int], list[Request]],
    num_tokens: int,
    limit: int,
) -> None:
    """It runs out at the prompts or in the middle; the same completions come, each told once."""
    requests, how = make_requests(16), sampling(stop_ids=(EOS, 9))
    expected = run(own_engine, requests, how)
    memory.num_tokens = num_tokens
    tokens: list[int] = []
    told: list[Completion] = []
    watcher = watching(on_tokens=tokens.append, on_completion=told.append)
    found = own_engine.generate(requests, how, watcher)
    assert_same(found, expected)
    assert sum(tokens) == sum(len(c.token_ids) for c in found)
    assert sorted(c.request_id for c in told) == sorted(r.request_id for r in requests)
    longest = max(len(request.prompt_ids) for request in requests)
    assert f"one rollout of {longest} + 16 tokens" in caplog.records[0].getMessage()
    # Fewer than the half of 16, where some had ended before it ran out.
    assert limit // 2 <= own_engine.max_concurrent_rollouts(9, 16) <= limit
    assert own_engine.take_counts()["engine/out_of_memory"] >= {8: 1, 4: 2, 2: 3}[limit]
    run(own_engine, requests, how)
    assert own_engine.take_counts() == {}, "the smaller concurrency was not kept"


def test_what_has_ended_takes_no_room_in_the_parts() -> None:
    batch = StaticBatch(equal_prompts(4), PLAIN, window=None)
    [ended] = batch.append(0, np.array([5, EOS, 5, 5]), np.zeros(4, np.float32), V1)
    assert ended == 1
    parts = batch.parts(2)
    assert [part.num_rows for part in parts] == [part.num_running for part in parts] == [2, 1]


def test_one_rollout_that_does_not_fit_ends_it_with_the_numbers(
    own_engine: TransformersEngine, memory: Memory
) -> None:
    memory.num_tokens, memory.error = 15, RuntimeError("a kernel failed")
    with pytest.raises(RuntimeError, match="a kernel failed"):  # which is not tried again
        run(own_engine, equal_prompts(16))
    assert own_engine.take_counts() == {}
    memory.error = RuntimeError(CPU)
    with pytest.raises(EngineError) as caught:
        run(own_engine, equal_prompts(16))
    for part in (
        "out of memory with a single running rollout",
        "can't allocate memory",
        "the weights take 394 KiB",
        "one rollout of 9 + 16 tokens at least",
        "the budget is",
        "free are",
        "Lower sampling.max_completion_tokens",
    ):
        assert part in str(caught.value)
    assert own_engine.take_counts() == {"engine/out_of_memory": 5}


def test_it_stops_when_told_to_though_parts_are_waiting(
    own_engine: TransformersEngine, memory: Memory
) -> None:
    memory.num_tokens = 75
    told: list[int] = []
    stopping = watching(should_stop=lambda: sum(told) > 100, on_tokens=told.append)
    found = own_engine.generate(equal_prompts(16), sampling(stop_ids=()), stopping)
    assert len(found) == 16
    assert {c.finish_reason for c in found} == {"length", "abort"}
    assert sum(len(c.token_ids) for c in found) == sum(told) < 120


# --- weights --------------------------------------------------------------------------------------


def test_a_tied_tensor_may_come_under_either_name(
    engine: TransformersEngine, own_engine: TransformersEngine, tiny_model_dir: Path
) -> None:
    tensors = load_directory(tiny_model_dir, "float32")
    expected = run(engine, equal_prompts(8))
    renamed = dict(tensors)
    renamed["lm_head.weight"] = renamed.pop("model.embed_tokens.weight")
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    for given_tensors in (renamed, both):
        own_engine.load(given_tensors)
        assert_same(run(own_engine, equal_prompts(8)), expected)
    with pytest.raises(EngineError, match=r"tied by config\.json but different: .*lm_head"):
        own_engine.load({**tensors, "lm_head.weight": torch.zeros(32, 64)})


def test_weights_that_do_not_fit_are_listed(
    own_engine: TransformersEngine, tiny_model_dir: Path, tmp_path: Path
) -> None:
    tensors = {name: t + 1 for name, t in load_directory(tiny_model_dir, "float32").items()}
    del tensors["model.norm.weight"]
    tensors["model.norm.wait"] = torch.ones(64)
    tensors["model.embed_tokens.weight"] = torch.ones(48, 64)
    with pytest.raises(EngineError) as error:
        own_engine.load(tensors)
    message = str(error.value)
    assert "missing: model.norm.weight;" in message
    assert "not in this model: model.norm.wait;" in message
    assert "of the wrong shape: model.embed_tokens.weight [48, 64] instead of [32, 64];" in message
    with pytest.raises(EngineError, match="and 19 more"):
        own_engine.load({})
    with pytest.raises(DataError, match="no causal language model can be built"):
        TransformersEngine(tmp_path)


def test_weights_are_cast_to_the_engines_dtype(
    engine: TransformersEngine, tiny_model_dir: Path
) -> None:
    narrow = loaded(tiny_model_dir, dtype="bfloat16")
    how = sampling(greedy=True, max_completion_tokens=1)
    first, second = (run(each, [request([1, 5, 6])], how)[0] for each in (narrow, engine))
    assert first.logprobs == pytest.approx(second.logprobs, abs=0.05)
    assert first.logprobs != second.logprobs


@pytest.mark.slow
def test_a_row_for_which_the_model_gives_no_probabilities_ends_alone(
    make_tiny_model: MakeTinyModel,
) -> None:
    """So is every row that has token 7, in its prompt or sampled."""
    directory = make_tiny_model(tie_word_embeddings=False)
    tensors = load_directory(directory, "float32")
    requests = [request([1, 5], seed, f"r{seed}") for seed in range(6)]
    how = sampling(max_completion_tokens=40, stop_ids=())
    sound = run(loaded(directory), requests, how)
    tensors["model.embed_tokens.weight"][7] = torch.nan
    engine = TransformersEngine(directory)
    engine.load(tensors, V1)
    told: list[Completion] = []
    ended = watching(on_completion=told.append)
    found = engine.generate([*requests, request([1, 7, 8], 0, "bad")], how, ended)
    assert sorted(completion.request_id for completion in told) == [
        "bad",
        *(f"r{n}" for n in range(6)),
    ]
    for one, before in zip(found, sound, strict=False):
        ids = before.token_ids.tolist()
        num_tokens = ids.index(7) + 1 if 7 in ids[:-1] else len(ids)
        assert one.token_ids[:num_tokens].tolist() == ids[:num_tokens]
        assert np.isfinite(one.logprobs[:num_tokens]).all()
        assert one.finish_reason == ("length" if num_tokens == len(ids) else "nonfinite")
        assert len(one.token_ids) == len(ids) or np.isnan(one.logprobs[num_tokens:]).all()
    assert {one.finish_reason for one in found[:-1]} == {"length", "nonfinite"}
    assert (found[-1].finish_reason, len(found[-1].token_ids)) == ("nonfinite", 1)
    text = "a log-probability of nan at token 0 of request bad under v1: the weights hold NaN"
    assert text in describe_nonfinite(found[-1])


@tied_first
class TestTransactions(Models):
    """A swap that fails half way leaves the version before, every bit of it."""

    @pytest.fixture
    def engine(self, model_dirs: list[Path], weights: list[Weights]) -> TransformersEngine:
        engine = TransformersEngine(model_dirs[0])
        engine.load(weights[0], V1)
        return engine

    def bits(self, engine: TransformersEngine) -> dict[str, bytes]:
        return {name: t.numpy().tobytes() for name, t in engine.model.state_dict().items()}

    def test_an_idle_engine_keeps_its_version(
        self, engine: TransformersEngine, model_dirs: list[Path], weights: list[Weights]
    ) -> None:
        before = self.bits(engine)
        message = r"v2 could not be copied in: OSError: the memory is gone; rolled back.*: v1"
        for _ in range(2):
            with pytest.raises(EngineError, match=message):
                engine.load(Torn(weights[1]), V2)
            assert self.bits(engine) == before
            assert engine.installed == V1
        engine.load(weights[1], V2)
        after = self.bits(engine)
        assert after != before
        with pytest.raises(EngineError, match="rolled back, version: v2"):
            engine.load(Torn(weights[0]), V3)
        assert self.bits(engine) == after
        first = TransformersEngine(model_dirs[0])
        with pytest.raises(EngineError, match="rolled back, version: none"):
            first.load(Torn(weights[0]), V1)
        with pytest.raises(EngineError, match="no weights are loaded"):
            run(first, [request([1])])

    @pytest.mark.slow
    def test_rollouts_under_way_go_on_with_it(
        self, engine: TransformersEngine, models: list[Module], weights: list[Weights]
    ) -> None:
        prompts = [request([1, 5, n], n, f"r{n}") for n in range(2)]
        watched = Watched(engine, prompts)
        watched.wait_for(30)
        with pytest.raises(EngineError, match="the memory is gone"):
            engine.load(Torn(weights[1]), V2)
        for prompt, completion in zip(prompts, watched.result(), strict=True):
            assert set(versions_of(completion)) == {V1}
            assert len(completion.token_ids) == LONG
            assert_the_learners(completion, models[0], prompt, ENDLESS)

    def test_where_the_version_before_is_gone_too_nothing_is_sampled_any_more(
        self, engine: TransformersEngine, weights: list[Weights]
    ) -> None:
        engine._tensors = Torn(weights[0], 0)
        watched = Watched(engine, [request([1, 5])])
        watched.wait_for(20)
        with pytest.raises(EngineError, match=r"v2 could not .* nor v1 again .* are neither"):
            engine.load(Torn(weights[1]), V2)
        with pytest.raises(EngineError, match="the weights are gone"):
            watched.result()
        with pytest.raises(EngineError, match="no weights are loaded"):
            run(engine, [request([1])])


class Made:
    @pytest.fixture(scope="class")
    @classmethod
    def make_engine(cls) -> Callable[..., TransformersEngine]:
        return TransformersEngine


@tied_first
class TestContract(Made, EngineContract):
    """The suite that every engine passes."""


untied_first = pytest.mark.parametrize(
    "model_dirs",
    ["untied", pytest.param("tied", marks=pytest.mark.matrix)],
    indirect=True,
    scope="class",
)


@untied_first
class TestUntied(Made, PatchContract):
    """A head of its own: sampled, and written in place."""


@untied_first
class TestLifeContract(Made, EngineLifeContract):
    """And loaded, by engines of their own."""


# --- the mailbox ----------------------------------------------------------------------------------


def test_the_holder_does_the_jobs_of_others_also_those_that_come_too_late() -> None:
    mailbox = Mailbox()
    done: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        with mailbox.opened():
            assert not mailbox.empty()
            asked = pool.submit(mailbox.do, lambda: done.append(threading.get_ident()))
            while not mailbox.empty():
                assert not asked.done()
        asked.result(timeout=120)
        with mailbox.opened():
            asked = pool.submit(mailbox.do, lambda: done.append(1))
        asked.result(timeout=120)
    assert done == [threading.get_ident(), 1]


# --- sampling -------------------------------------------------------------------------------------


NUM_DRAWS = 20_000
LOGITS = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5


def reference_probabilities(logits: torch.Tensor, how: Sampling) -> list[float]:
    """The definition, token by token, in Python numbers."""
    weights = (logits.double() / how.temperature).exp().tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    order = [token for token in order if weights[token] >= how.min_p * max(weights)]
    kept = order[: how.top_k or None]
    total = sum(weights[token] for token in kept)
    nucleus: list[int] = []
    reached = 0.0
    for token in kept:
        if nucleus and reached >= how.top_p:
            break
        nucleus.append(token)
        reached += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    return [weights[t] / total if t in nucleus else 0.0 for t in range(len(weights))]


@pytest.mark.parametrize(
    "how",
    [
        sampling(),
        sampling(temperature=0.7),
        sampling(temperature=1.8),
        sampling(top_k=4),
        sampling(top_p=0.8),
        sampling(min_p=0.3),
        sampling(temperature=1.3, top_k=8, top_p=0.9),
        sampling(temperature=1.3, min_p=0.1, top_k=8, top_p=0.9),
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_definition(how: Sampling) -> None:
    probabilities = reference_probabilities(LOGITS, how)
    every = sampling_logprobs(LOGITS[None], how)[0]
    assert every.exp().tolist() == pytest.approx(probabilities, abs=1e-6)
    seeds = np.arange(NUM_DRAWS, dtype=np.uint64)
    tokens, logprobs, supports = draw_tokens(
        LOGITS.expand(NUM_DRAWS, -1), how, uniform_at(seeds, 5)
    )
    assert torch.equal(logprobs, every[tokens])
    expected = np.array(probabilities) * NUM_DRAWS
    observed = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    assert observed[expected == 0].sum() == 0
    assert (supports is not None) == how.truncates
    if supports is not None:
        assert supports[:1].ids.tolist() == np.flatnonzero(expected).tolist()
        assert len(supports.ids) == NUM_DRAWS * np.count_nonzero(expected)
    possible = expected > 0
    deviations = (observed - expected)[possible] ** 2 / expected[possible]
    assert deviations.sum() < 37, "chi-square: once in 10,000 by chance"


def test_greedy_takes_the_most_likely_token_and_reports_the_plain_softmax() -> None:
    how = sampling(greedy=True, temperature=0.1, top_k=1)
    tokens, logprobs, supports = draw_tokens(LOGITS[None], how, np.array([0.999]))
    assert supports is None
    assert tokens.item() == LOGITS.argmax()
    assert logprobs.item() == pytest.approx(LOGITS.log_softmax(-1).max().item())


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-52])
def test_an_impossible_token_is_never_drawn_and_an_improbable_one_is(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    tokens, logprobs, _ = draw_tokens(logits, sampling(), np.array([uniform]))
    assert tokens.item() in (1, 3)
    assert logprobs.item() == pytest.approx(np.log(0.5))
    tokens, *_ = draw_tokens(torch.zeros(1, 150_000), sampling(), np.array([uniform]))
    assert tokens.item() == int(uniform * 150_000)


def test_a_support_of_all_ids_or_of_too_many_is_not_recorded() -> None:
    logits = torch.zeros(2, MAX_SET_IDS + 2)
    logits[1, 0] = 50.0
    _, _, supports = draw_tokens(logits, sampling(top_p=1 - 1e-7), np.array([0.5, 0.5]))
    assert supports is not None
    assert supports.sizes.tolist() == [TOO_LARGE, 1]
    _, _, supports = draw_tokens(logits[:, :9], sampling(top_k=9), np.array([0.5, 0.5]))
    assert supports is not None
    assert supports.sizes.tolist() == [NOT_RECORDED] * 2


def test_a_tiny_nucleus_still_holds_the_most_likely_token() -> None:
    logprobs = sampling_logprobs(LOGITS[None], sampling(top_p=1e-9))[0]
    assert logprobs.isfinite().nonzero().flatten().tolist() == [LOGITS.argmax().item()]
    assert logprobs.max().item() == 0


def test_numbers_are_uniform_over_seeds_and_over_steps_and_unrelated() -> None:
    across_seeds = uniform_at(np.arange(NUM_DRAWS, dtype=np.uint64), 0)
    across_steps = np.array([uniform_at(np.array([7], np.uint64), i)[0] for i in range(5000)])
    for numbers in (across_seeds, across_steps):
        number = len(numbers)
        # Kolmogorov and Smirnov's distance: further once in 10,000 by chance.
        assert np.abs(np.sort(numbers) - np.arange(number) / number).max() < 2.2 / number**0.5
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 4 / number**0.5
    shifted = uniform_at(np.arange(NUM_DRAWS, dtype=np.uint64), 1)
    assert not np.intersect1d(across_seeds, shifted).size
