"""The contract of engines as one suite: a test file inherits it and makes the engine.

Log-probabilities are compared with the learner's own model (transformers, float32, no cache, no
batch), so what is shown here is the agreement that training relies on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion, Engine, Request, Sampling, VersionError
from echo.engine.hf.batch import sampling_logprobs
from echo.engine.model import load_directory
from echo.engine.stop_strings import StopStrings
from echo.engine.weights import publish_image, tensors_from_image
from echo.weights.manifest import TensorSpec
from tests.engine.patches import patch_between
from tests.engine.watchers import STOPPED, watching

MakeTinyModel = Callable[..., Path]
MakeEngine = Callable[..., Engine]
Module = torch.nn.Module
Weights = Mapping[str, Tensor]
Image = tuple[tuple[TensorSpec, ...], bytearray]

EOS = 2
WITHIN_S = 240.0
"""Seconds for whatever is waited for, on a busy machine."""
SLOW = threading.Event()

"""Set while something is to happen to a generation; engines that run ahead of their callers heed it
with the help of their tests."""
LONG = 200
"""Tokens of a completion that must still be running when something happens to it."""
TOLERANCE = 1e-4
"""Nats between an engine's log-probability and the learner's, both in float32."""
V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))

SAMPLINGS = {
    "plain": Sampling(1.0, 1.0, 0, 16, (EOS,)),
    "temperature": Sampling(0.6, 1.0, 0, 16, (EOS,)),
    "top_k": Sampling(1.0, 1.0, 5, 16, (EOS,)),
    "top_p": Sampling(1.0, 0.7, 0, 16, (EOS,)),
    "min_p": Sampling(1.0, 1.0, 0, 16, (EOS,), min_p=0.2),
    "all": Sampling(1.5, 0.9, 12, 16, (EOS,), min_p=0.01),
    "greedy": Sampling(1.0, 1.0, 0, 16, (EOS,), greedy=True),
}
PLAIN = SAMPLINGS["plain"]
ENDLESS = Sampling(1.0, 1.0, 0, LONG, ())
LONGER = replace(ENDLESS, max_completion_tokens=2 * LONG)
"""For an engine that nobody can make slow, or to which much happens meanwhile."""


def request(prompt: Sequence[int], seed: int = 0, name: str = "r") -> Request:
    return Request(name, np.array(prompt, np.int32), seed)


def mixed_requests(num_rows: int) -> list[Request]:
    """Prompts of unequal length, each used four times."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 32, length) for length in rng.integers(1, 20, num_rows)]
    return [request(prompts[row // 4].tolist(), row, f"r{row}") for row in range(num_rows)]


def run(engine: Engine, requests: Sequence[Request], how: Sampling = PLAIN) -> list[Completion]:
    return engine.generate(requests, how)


@torch.no_grad()
def reference_distributions(
    model: Module, prompt: Request, completion: Completion, how: Sampling
) -> Tensor:
    """[T, V] by one full forward over prompt and completion: no cache, no padding, no batch."""
    ids = torch.tensor([*prompt.context_ids.tolist(), *completion.token_ids.tolist()])
    logits = model(input_ids=ids[None]).logits[0, len(prompt.context_ids) - 1 : -1]
    return sampling_logprobs(logits, how)


def reference_logprobs(
    model: Module, prompt: Request, completion: Completion, how: Sampling
) -> np.ndarray:
    """The log-probability of each sampled token."""
    drawn = torch.from_numpy(completion.token_ids).long()[:, None]
    return reference_distributions(model, prompt, completion, how).gather(1, drawn)[:, 0].numpy()


def assert_the_learners(
    completion: Completion,
    model: Module,
    prompt: Request,
    how: Sampling = PLAIN,
    part: slice = slice(None),
) -> None:
    """Check the log-probabilities of some tokens against a model's own."""
    expected = reference_logprobs(model, prompt, completion, how)[part]
    np.testing.assert_allclose(completion.logprobs[part], expected, atol=TOLERANCE)


def assert_supports(
    completion: Completion,
    model: Module,
    prompt: Request,
    how: Sampling,
    *,
    least_alike: float = 0.9,
    most_apart: int = 1,
) -> None:
    """Check the support of each token against a model's own.

    Rounding may move so many ids over the end of a set, and leaves so large a share alike.
    """
    support = completion.support
    assert support is not None
    assert support.num_tokens == len(completion.token_ids)
    assert support.includes(completion.token_ids).all()
    allowed = reference_distributions(model, prompt, completion, how).isfinite()
    sizes = allowed.sum(1).numpy()
    found = np.where(support.counts > 0, support.counts, allowed.shape[1])
    assert (found == sizes).mean() > least_alike
    assert abs(found - sizes).max() <= most_apart


def assert_likely(
    completion: Completion,
    model: Module,
    prompt: Request,
    how: Sampling,
    tolerance: float = TOLERANCE,
) -> int:
    """Check that the likely ids are a model's own, but for ids that rounding cannot tell apart.

    Return how many sampled tokens are not among theirs.
    """
    likely = completion.likely
    assert likely is not None
    assert likely.logprobs is not None
    expected = reference_distributions(model, prompt, completion, how)
    k = min(how.likely_ids, expected.shape[1])
    assert likely.sizes.tolist() == [k] * len(completion.token_ids)
    own = expected.gather(1, torch.from_numpy(likely.ids).long().view(-1, k))
    np.testing.assert_allclose(likely.logprobs, own.flatten(), atol=tolerance)
    ordered, most = own.sort(descending=True).values, expected.topk(k).values
    np.testing.assert_allclose(ordered, most, atol=tolerance)
    return int((~likely.includes(completion.token_ids)).sum())


def versions_of(completion: Completion) -> list[PolicyVersion]:
    """The version of each token."""
    return [PolicyVersion(*row) for row in completion.policy_versions.tolist()]


def assert_swapped(
    completion: Completion, prompt: Request, models: Sequence[Module], how: Sampling = ENDLESS
) -> int:
    """Check that each token is what the version it names would have sampled, v1's and then v2's.

    Return how many there are of the first: keys and values are of the same version, too.
    """
    versions = versions_of(completion)
    num_old = versions.count(V1)
    assert 0 < num_old < how.max_completion_tokens
    assert versions == [V1] * num_old + [V2] * (how.max_completion_tokens - num_old)
    assert_the_learners(completion, models[0], prompt, how, slice(num_old))
    assert_the_learners(completion, models[1], prompt, how, slice(num_old, None))
    return num_old


class Watched:
    """A generation in another thread that can be watched, told to stop and waited for.

    What somebody has waited for goes on slowly until its result is asked for: there is time to do
    something to it, also on a busy machine.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], how: Sampling = ENDLESS):
        self.num_tokens = 0
        self.stop = threading.Event()
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(
            engine.generate,
            requests,
            how,
            watching(should_stop=self.stop.is_set, on_tokens=self._count),
        )
        self._future.add_done_callback(lambda _: self._notify())

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _count(self, num_tokens: int) -> None:
        with self._changed:
            self.num_tokens += num_tokens
            self._changed.notify_all()
        if SLOW.is_set():
            self.stop.wait(0.05)

    def wait_for(self, num_tokens: int) -> None:
        """Return once so many tokens have come in all."""
        SLOW.clear()
        with self._changed:
            self._changed.wait_for(
                lambda: self.num_tokens >= num_tokens or self._future.done(), timeout=WITHIN_S
            )
            SLOW.set()
            assert not self._future.done(), self._future.result()
            assert self.num_tokens >= num_tokens, f"{self.num_tokens} tokens in {WITHIN_S:g} s"

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def result(self) -> list[Completion]:
        SLOW.clear()
        try:
            return self._future.result(timeout=WITHIN_S)
        finally:
            self._pool.shutdown()


class Torn(dict[str, Tensor]):
    """Weights of which the middle is gone once they have been read: to be checked, for instance."""

    def __init__(self, tensors: Weights, num_reads: int = 1) -> None:
        super().__init__(tensors)
        self.num_reads_left = num_reads

    def items(self):  # type: ignore[no-untyped-def]
        self.num_reads_left -= 1
        for number, item in enumerate(super().items()):
            if self.num_reads_left < 0 and number == len(self) // 2:
                raise OSError("the memory is gone")
            yield item


tied_first = pytest.mark.parametrize(
    "model_dirs",
    ["tied", pytest.param("untied", marks=pytest.mark.matrix)],
    indirect=True,
    scope="class",
)
"""Leaves a head of its own to --all, of whoever has sampled with one elsewhere."""


class Models:
    """Fixtures: two sets of weights for one model, as a directory, as a model, as tensors."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dirs(
        cls, request: pytest.FixtureRequest, make_tiny_model: MakeTinyModel
    ) -> list[Path]:
        """Two sets of weights for one model, with room for long completions."""
        is_tied = request.param == "tied"
        # Heads of 32: the smallest that vLLM samples with on a CPU.
        shape = {"tie_word_embeddings": is_tied, "max_position_embeddings": 512, "head_dim": 32}
        return [make_tiny_model(seed=seed, initializer_range=0.2, **shape) for seed in (0, 1)]

    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, model_dirs: list[Path]) -> list[Module]:
        torch.set_num_threads(1)
        return [AutoModelForCausalLM.from_pretrained(path).eval() for path in model_dirs]

    @pytest.fixture(scope="class")
    @classmethod
    def weights(cls, model_dirs: list[Path]) -> list[Weights]:
        """As they arrive at a worker: views of a version's image."""
        return [
            tensors_from_image(specs, memoryview(image).toreadonly())
            for specs, image in map(_published, model_dirs)
        ]

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls, model_dirs: list[Path]) -> list[Image]:
        """The images themselves."""
        return list(map(_published, model_dirs))


def _published(path: Path) -> Image:
    return publish_image(load_directory(path, "float32"), "float32")


class PatchContract(Models):
    """Inherit it and give the fixture `make_engine`: (model directory, **settings) -> engine."""

    @pytest.fixture(scope="class")
    @classmethod
    def shared_engine(cls, make_engine: MakeEngine, model_dirs: list[Path]) -> Iterator[Engine]:
        engine = make_engine(model_dirs[0])
        yield engine
        engine.close()

    @pytest.fixture
    def engine(self, shared_engine: Engine, weights: list[Weights]) -> Engine:
        """An engine that samples from the first weights, called v1."""
        shared_engine.load(weights[0], V1)
        return shared_engine

    @pytest.mark.slow
    def test_a_patch_is_written_while_tokens_come(
        self, engine: Engine, models: list[Module], images: list[Image]
    ) -> None:
        (specs, old), (_, new) = images
        image = memoryview(bytearray(old))
        patch = patch_between(specs, old, new, base=V1, version=V2)
        engine.load(tensors_from_image(specs, image.toreadonly()), V1)
        assert engine.takes_patches
        prompt = request([1, 5, 6])
        watched = Watched(engine, [prompt])
        watched.wait_for(40)
        engine.patch(patch, image, specs)
        assert engine.installed == V2
        assert image == new
        [completion] = watched.result()
        assert assert_swapped(completion, prompt, models) >= 40


class EngineContract(PatchContract):
    """The whole of it, inherited likewise."""

    @pytest.mark.parametrize("how", SAMPLINGS.values(), ids=SAMPLINGS.keys())
    def test_logprobs_are_the_learners(
        self, engine: Engine, models: list[Module], how: Sampling
    ) -> None:
        requests = mixed_requests(16)
        for prompt, completion in zip(requests, run(engine, requests, how), strict=True):
            assert completion.request_id == prompt.request_id
            assert completion.token_ids.dtype == np.int32
            assert completion.logprobs.dtype == np.float32
            assert_the_learners(completion, models[0], prompt, how)
            assert (completion.support is not None) == how.has_support
            if how.has_support:
                assert_supports(completion, models[0], prompt, how)

    @pytest.mark.parametrize("likely_ids", [3, 40])
    def test_the_likely_ids_are_the_samplers(
        self, engine: Engine, models: list[Module], likely_ids: int
    ) -> None:
        """40 are more than there are; a sampled token that is none of them is not among them."""
        how = replace(SAMPLINGS["temperature"], likely_ids=likely_ids)
        num_beyond = 0
        requests = mixed_requests(8)
        for prompt, completion in zip(requests, run(engine, requests, how), strict=True):
            num_beyond += assert_likely(completion, models[0], prompt, how)
        assert (num_beyond > 0) == (likely_ids == 3)

    def test_the_seed_decides(self, engine: Engine) -> None:
        requests = [
            request([1, 5, 6], seed, str(i)) for i, seed in enumerate((11, 12, 11, -1, 2**63))
        ]
        first, second, third, negative, large = run(engine, requests, replace(PLAIN, stop_ids=()))
        assert first.token_ids.tolist() == third.token_ids.tolist()
        others = [second, negative, large]
        assert len({tuple(c.token_ids.tolist()) for c in (first, *others)}) == 4
        alone = run(engine, requests[1:2], replace(PLAIN, stop_ids=()))[0]
        assert alone.token_ids.tolist() == second.token_ids.tolist()

    def test_greedy_is_the_most_likely_token(self, engine: Engine, models: list[Module]) -> None:
        [completion] = run(engine, [request([1, 5, 6])], SAMPLINGS["greedy"])
        tokens = completion.token_ids.tolist()
        with torch.no_grad():
            logits = models[0](input_ids=torch.tensor([[1, 5, 6, *tokens]])).logits[0, 2:-1]
        assert tokens == logits.argmax(-1).tolist()

    def test_completions_end_at_a_stop_id_or_the_limit(self, engine: Engine) -> None:
        how = replace(PLAIN, stop_ids=(EOS, 9, 30), max_completion_tokens=12)
        reasons = set()
        for completion in run(engine, mixed_requests(48), how):
            ids = completion.token_ids.tolist()
            reasons.add(completion.finish_reason)
            assert not {EOS, 9, 30} & set(ids[:-1])
            if completion.finish_reason == "stop":
                assert ids[-1] in (EOS, 9, 30)
            else:
                assert (completion.finish_reason, len(ids)) == ("length", 12)
        assert reasons == {"stop", "length"}

    @pytest.mark.parametrize("how", ["plain", "top_p"])
    def test_no_stop_id_is_drawn_before_min_tokens(
        self, engine: Engine, models: list[Module], how: str
    ) -> None:
        """Also not by a request that goes on after tokens of the same turn."""
        stops = (EOS, 9, 30, 31)
        sampling = replace(SAMPLINGS[how], stop_ids=stops, max_completion_tokens=24, min_tokens=8)
        requests = [
            replace(each, prefix_ids=np.array([4, 7, 8, 3, 5], np.int32), turn_start=2)
            if number % 2
            else each
            for number, each in enumerate(mixed_requests(24))
        ]
        lengths = set()
        for prompt, completion in zip(requests, run(engine, requests, sampling), strict=True):
            num_barred = 8 - len(prompt.turn_ids)
            ids = completion.token_ids.tolist()
            assert not {*stops} & {*ids[:num_barred], *ids[:-1]}
            lengths.add(len(ids) - num_barred)
            begun = slice(num_barred)
            barred = replace(sampling, stop_ids=())
            # Every set records what could be drawn, by its ids or by the ids that it lacks.
            assert completion.support is not None
            assert completion.support.includes(completion.token_ids).all()
            assert (completion.support.counts[begun] > 0).all()
            with torch.no_grad():
                context = [*prompt.context_ids.tolist(), *ids]
                logits = models[0](input_ids=torch.tensor([context])).logits[0]
                logits = logits[len(prompt.context_ids) - 1 : -1][begun]
                logits[:, list(stops)] = -torch.inf
                expected = sampling_logprobs(logits, barred).gather(
                    1, torch.tensor(ids[begun])[:, None]
                )
            np.testing.assert_allclose(
                completion.logprobs[begun], expected[:, 0].numpy(), atol=TOLERANCE
            )
        assert 1 in lengths  # some end at once where they may
        greedy = run(engine, requests, replace(sampling, greedy=True))
        assert min(len(each.token_ids) for each in greedy[::2]) > 8

    def test_a_stop_string_ends_a_completion_and_stays_in_it(self, engine: Engine) -> None:
        """In whichever tokens it is, and only in those of the same turn."""
        spelled = {5: "a", 6: "b", 7: "ab", 8: "xa", 9: "bx"}
        stop = StopStrings(("ab",), lambda ids: "".join(spelled.get(token, ".") for token in ids))
        how = replace(PLAIN, stop_ids=(), max_completion_tokens=40, stop=stop)
        requests = [
            replace(each, prefix_ids=np.array([7, 7, 4, 5], np.int32), turn_start=1 + number % 4)
            if number % 2
            else each
            for number, each in enumerate(mixed_requests(64))
        ]
        last = set()
        for prompt, completion in zip(requests, run(engine, requests, how), strict=True):
            ids = completion.token_ids.tolist()
            before = stop.decode(prompt.turn_ids.tolist()).count("ab")
            counts = [
                stop.decode([*prompt.turn_ids.tolist(), *ids[:n]]).count("ab") - before
                for n in range(len(ids) + 1)
            ]
            assert counts[:-1] == [0] * len(ids)
            assert (completion.finish_reason == "stop") == (counts[-1] == 1)
            assert len(completion.logprobs) == len(completion.policy_versions) == len(ids)
            last.add(ids[-1] if counts[-1] else None)
        assert last >= {None, 6, 7}
        later = run(engine, requests[:1], replace(how, min_tokens=39))
        assert len(later[0].token_ids) >= 40

    def test_the_models_window_is_a_limit(self, engine: Engine) -> None:
        assert engine.window == 512
        few, many = (engine.max_concurrent_rollouts(16, n) for n in (480, 16))
        assert 1 <= few <= many
        prompt = request([1] + [5] * 499)
        completion = run(engine, [prompt], ENDLESS)[0]
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 12)

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([], "request r: the prompt is empty"),
            ([1] * 512, "the prompt has 512 tokens, the model's window 512"),
            ([1, 32], "token ids from 1 to 32, the model a vocabulary of 32"),
            ([-1], "token ids from -1 to -1"),
        ],
    )
    def test_prompts_that_do_not_fit_are_refused(
        self, engine: Engine, prompt: list[int], message: str
    ) -> None:
        with pytest.raises(EngineError, match=message):
            run(engine, [request([1, 5], name="good"), request(prompt)])
        assert engine.can_sample()
        assert run(engine, []) == []

    def test_abort_returns_what_was_sampled(self, engine: Engine, models: list[Module]) -> None:
        requests = [request([1, 5, 6], seed, f"r{seed}") for seed in range(4)]
        watched = Watched(engine, requests)
        watched.wait_for(40)
        watched.stop.set()
        completions = watched.result()
        assert [c.request_id for c in completions] == [r.request_id for r in requests]
        assert {c.finish_reason for c in completions} == {"abort"}
        assert sum(len(c.token_ids) for c in completions) >= 40
        for prompt, completion in zip(requests, completions, strict=True):
            assert len(completion.token_ids) == len(completion.logprobs) < LONG
            assert completion.policy_versions.shape == (len(completion.token_ids), 2)
            assert_the_learners(completion, models[0], prompt, ENDLESS)
        at_once = engine.generate(mixed_requests(8), ENDLESS, STOPPED)
        assert {c.finish_reason for c in at_once} == {"abort"}
        assert sum(len(c.token_ids) for c in at_once) < 8 * LONG

    def test_a_prefix_is_continued(self, engine: Engine, models: list[Module]) -> None:
        how = replace(PLAIN, stop_ids=(), max_completion_tokens=10)
        begun = Request("r", np.array([1, 5], np.int32), 3, np.array([7, 8, 9], np.int32))
        completion = run(engine, [begun], how)[0]
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 7)
        assert_the_learners(completion, models[0], begun, how)
        full = replace(begun, prefix_ids=np.full(10, 5, np.int32))
        with pytest.raises(EngineError, match="10 tokens were sampled before and 10 are allowed"):
            run(engine, [full], how)

    def test_a_stopped_rollout_goes_on_under_other_weights(
        self, engine: Engine, models: list[Module], weights: list[Weights]
    ) -> None:
        """Segments of two versions join into one rollout, each token exact under its own."""
        requests = [request([1, 5, *range(3, 4 + n)], n, f"r{n}") for n in range(3)]
        watched = Watched(engine, requests)
        watched.wait_for(60)
        watched.stop.set()
        begun = watched.result()
        engine.load(weights[1], V2)
        how = replace(ENDLESS, max_completion_tokens=max(len(c.token_ids) for c in begun) + 20)
        resumed = [
            replace(prompt, prefix_ids=first.token_ids, seed=prompt.seed + 100)
            for prompt, first in zip(requests, begun, strict=True)
        ]
        for prompt, first, second in zip(requests, begun, run(engine, resumed, how), strict=True):
            joined: dict[str, Any] = {
                name: np.concatenate([getattr(first, name), getattr(second, name)])
                for name in ("token_ids", "logprobs", "policy_versions")
            }
            assert_swapped(replace(second, **joined), prompt, models, how)

    def test_a_completion_is_told_while_others_go_on(self, engine: Engine) -> None:
        stop, told = threading.Event(), []

        def tell(completion: Completion) -> None:
            told.append(completion)
            stop.set()

        short = Request("short", np.array([1, 5], np.int32), 3, np.full(LONG - 4, 7, np.int32))
        completions = engine.generate(
            [request([1, 5, 6], 1, "long"), short],
            ENDLESS,
            watching(should_stop=stop.is_set, on_completion=tell),
        )
        assert [completion.request_id for completion in told] == ["short"]
        assert told[0].token_ids.tolist() == completions[1].token_ids.tolist()
        assert [c.finish_reason for c in completions] == ["abort", "length"]
        assert 4 <= len(completions[0].token_ids) < LONG

    @pytest.mark.slow
    def test_weights_are_swapped_while_tokens_come(
        self, engine: Engine, models: list[Module], weights: list[Weights]
    ) -> None:
        requests = [request([1, 5, 6, *range(3, 3 + n)], n, f"r{n}") for n in range(4)]
        watched = Watched(engine, requests)
        watched.wait_for(60)
        engine.load(weights[1], V2)
        assert engine.installed == V2
        for prompt, completion in zip(requests, watched.result(), strict=True):
            assert completion.finish_reason == "length"
            assert_swapped(completion, prompt, models)

    def test_wrong_weights_leave_the_version_before(
        self, engine: Engine, models: list[Module], weights: list[Weights]
    ) -> None:
        name = "model.norm.weight"
        missing = {key: value for key, value in weights[1].items() if key != name}
        wrong = {**weights[1], name: torch.ones(3)}
        for tensors, message in [(missing, f"missing: {name}"), (wrong, "wrong shape")]:
            with pytest.raises(EngineError, match=message):
                engine.load(tensors, V2)
            assert engine.installed == V1
            [completion] = run(engine, [request([1, 5, 6])])
            assert set(versions_of(completion)) == {V1}
            assert_the_learners(completion, models[0], request([1, 5, 6]))

    def test_versions_are_honoured_or_refused(self, engine: Engine) -> None:
        ask = partial(engine.generate, [request([1])], PLAIN)
        assert set(versions_of(ask(version=V1)[0])) == {V1}
        with pytest.raises(VersionError, match="v2 is wanted, v1 is installed"):
            ask(version=V2)

    def test_calls_from_several_threads_get_their_own(
        self, engine: Engine, models: list[Module]
    ) -> None:
        batches = [[request([1, n], n, f"{n}.{i}") for i in range(3)] for n in range(3, 7)]
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda batch: run(engine, batch), batches))
        for batch, completions in zip(batches, results, strict=True):
            for prompt, completion in zip(batch, completions, strict=True):
                assert completion.request_id == prompt.request_id
                assert_the_learners(completion, models[0], prompt, PLAIN)


class EngineLifeContract(Models):
    """The same for what needs an engine of its own: of some there can be only one in a process."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "is_patch", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["load", "patch"]
    )
    def test_a_kept_cache_mixes_both_versions(
        self,
        make_engine: MakeEngine,
        model_dirs: list[Path],
        models: list[Module],
        images: list[Image],
        weights: list[Weights],
        is_patch: bool,
    ) -> None:
        (specs, old), (_, new) = images
        image = memoryview(bytearray(old))
        engine = make_engine(model_dirs[0], kv_cache="keep")
        try:
            engine.load(tensors_from_image(specs, image.toreadonly()), V1)
            prompts = [request([1, 5, 6 + n], n, str(n)) for n in range(3)]
            watched = Watched(engine, prompts)
            watched.wait_for(40)
            if is_patch:
                engine.patch(patch_between(specs, old, new, base=V1, version=V2), image, specs)
            else:
                engine.load(weights[1], V2)
            first_new = []
            for prompt, completion in zip(prompts, watched.result(), strict=True):
                num_old = versions_of(completion).count(V1)
                assert 0 < num_old < LONG
                assert_the_learners(completion, models[0], prompt, ENDLESS, slice(num_old))
                from_old, from_new = (
                    np.abs(completion.logprobs - reference_logprobs(m, prompt, completion, ENDLESS))
                    for m in models[:2]
                )
                assert from_new[num_old:].mean() > 0.01
                first_new.append(from_old[num_old])
            assert max(first_new) > 1e-3, "the first token of the new version is of the old weights"
            # A request that begins afterwards sees nothing of the old version.
            [fresh] = run(engine, prompts[:1])
            assert_the_learners(fresh, models[1], prompts[0], PLAIN)
        finally:
            engine.close()

    def test_before_weights_and_after_close_nothing_is_generated(
        self, make_engine: MakeEngine, model_dirs: list[Path], weights: list[Weights]
    ) -> None:
        engine = make_engine(model_dirs[0])
        assert engine.installed is None
        with pytest.raises(EngineError, match="no weights are loaded"):
            run(engine, [request([1])])
        engine.load(weights[0], V1)
        engine.close()
        assert not engine.can_sample()
        with pytest.raises(EngineError, match="no weights are loaded"):
            run(engine, [request([1])])
