"""Attribution of a mismatch to its causes, planted one at a time and all together.

Helpers come from test_trainer.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from echo.core.errors import StorageError
from echo.core.rollout import Group, PolicyVersion
from echo.engine.engine import Sampling
from echo.engine.hf.batch import sampling_logprobs
from echo.engine.model import EOS_ID, build_tokenizer
from echo.engine.weights import Weights
from echo.train.attribution import Attribution, MismatchProbe, RoundTrip, VersionRetention
from echo.train.models.policy import Policy, frozen_policy
from echo.train.models.rescoring import Rescorer, Rescoring
from echo.train.step import StepError, StepResult
from echo.train.trainer import Trainer
from tests.train.test_trainer import (
    MakeTrainer,
    change_of,
    make_group,
    make_groups,
    make_trainer,
    on_policy,
)
from tests.train.trainers import split

__all__ = ["make_trainer"]  # a fixture

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)
TEMPERATURE = 0.7

Measure = Callable[..., dict[str, float]]


def sampling(**changes: Any) -> Sampling:
    settings: dict[str, Any] = {
        "temperature": TEMPERATURE,
        "top_p": 1.0,
        "top_k": 0,
        "max_completion_tokens": 9,
        "stop_ids": (2,),
    }
    return Sampling(**(settings | changes))


def frozen(model_dir: Path, **options: Any) -> Policy:
    return frozen_policy(*split(model_dir, options))


@pytest.fixture
def measure(tiny_model_dir: Path, tmp_path: Path) -> Measure:
    def run(
        trainer: Trainer,
        groups: Sequence[Group],
        versions: dict[PolicyVersion, Weights | bytes],
        *,
        dtype: torch.dtype = torch.float32,
        keeps: Callable[[Sequence[int]], bool] = lambda _: True,
        num_rollouts: int = 100,
        **changes: Any,
    ) -> dict[str, float]:
        paths = {version: tmp_path / f"{version.step}" for version in versions}
        for version, weights in versions.items():
            data = weights if isinstance(weights, bytes) else save(dict(weights))
            paths[version].write_bytes(data)
        trainer.models.rescorer = Rescorer(
            *split(tiny_model_dir, {"micro_batch_tokens": 40, "vocab_chunk": 16}),
            Rescoring(sampling=sampling(**changes), published_dtype=dtype),
        )
        retention: Any = SimpleNamespace(find=paths.get, forget=paths.pop)
        round_trip: Any = SimpleNamespace(keeps=keeps)
        probe = MismatchProbe(retention, round_trip, num_rollouts=num_rollouts, seed=0)
        found = probe.measure(groups, trainer)
        return {name.removeprefix("attribution/"): value for name, value in found.items()}

    return run


def with_noise(groups: Sequence[Group], spread: float) -> list[Group]:
    chance = np.random.default_rng(0)

    def noisy(logprobs: np.ndarray) -> np.ndarray:
        return np.minimum(logprobs + spread * chance.normal(size=logprobs.shape), 0).astype("f4")

    return [
        dataclasses.replace(
            group,
            rollouts=tuple(
                dataclasses.replace(rollout, sampler_logprobs=noisy(rollout.sampler_logprobs))
                for rollout in group.rollouts
            ),
        )
        for group in groups
    ]


def cut(groups: Sequence[Group], model_dir: Path, weights: Weights, **changes: Any) -> list[Group]:
    """The same groups with the sampler's log-probs after min_p, top_k or top_p."""
    policy = frozen(model_dir)
    policy.load(weights)
    result = []
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            ids = torch.tensor([*group.prompt_ids, *rollout.token_ids])
            with torch.no_grad():
                logits = policy.model(input_ids=ids[None, :-1]).logits[0]
            logits = logits[len(group.prompt_ids) - 1 :]
            own = ids[len(group.prompt_ids) :, None]
            kept = sampling_logprobs(logits, sampling(**changes)).isfinite().scatter(1, own, True)
            logprobs = (logits / TEMPERATURE).masked_fill(~kept, -torch.inf).log_softmax(-1)
            sampler = logprobs.gather(1, own)[:, 0].numpy().astype(np.float32)
            group = change_of(group, index, sampler_logprobs=np.minimum(sampler, 0))
        result.append(group)
    return result


def fast(make_trainer: MakeTrainer) -> Trainer:
    return make_trainer(temperature=TEMPERATURE)


@pytest.mark.slow
def test_staleness_is_found(make_trainer: MakeTrainer, measure: Measure) -> None:
    trainer = fast(make_trainer)
    groups, then = on_policy(trainer, make_groups()), trainer.snapshot()
    for _ in range(3):
        trainer.step(groups)
    found = measure(trainer, groups, {V0: then})
    assert found["variance"] > 1e-5
    assert found["staleness"] == pytest.approx(1.0, abs=1e-2)
    assert found["numerics"] == pytest.approx(0.0, abs=1e-2)
    assert found["truncation"] == found["tokenisation"] == 0.0


@pytest.mark.slow
def test_engine_numerics_and_rounded_weights_are_found(
    make_trainer: MakeTrainer, measure: Measure
) -> None:
    trainer = fast(make_trainer)
    groups = on_policy(trainer, make_groups())
    weights = trainer.snapshot()
    noisy = with_noise(groups, 0.1)
    found = measure(trainer, noisy, {V0: weights})
    assert found["variance"] == pytest.approx(0.01, rel=0.5)
    assert found["numerics"] == pytest.approx(1.0, abs=1e-6)
    # What publishing rounds off is no staleness, where the version is the present one.
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    found = measure(trainer, groups, {V0: rounded}, dtype=torch.bfloat16)
    assert found["variance"] < 1e-10
    assert (found["skipped"], found["tokens"]) == (0.0, sum(g.num_tokens for g in groups))
    found = measure(trainer, noisy, {V0: rounded}, dtype=torch.bfloat16)
    assert found["numerics"] == pytest.approx(1.0, abs=1e-6)
    assert found["staleness"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("changes", [{"top_k": 20, "top_p": 0.7}, {"min_p": 0.3}])
@pytest.mark.slow
def test_truncation_is_found(
    make_trainer: MakeTrainer, measure: Measure, tiny_model_dir: Path, changes: dict[str, float]
) -> None:
    trainer = fast(make_trainer)
    weights = trainer.snapshot()
    groups = cut(make_groups(), tiny_model_dir, weights, **changes)
    found = measure(trainer, groups, {V0: weights}, **changes)
    assert found["variance"] > 1e-4
    assert found["truncation"] == pytest.approx(1.0, abs=1e-4)
    assert found["numerics"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.slow
def test_causes_are_told_apart_when_they_come_together(
    make_trainer: MakeTrainer, measure: Measure, tiny_model_dir: Path
) -> None:
    trainer = fast(make_trainer)
    then = trainer.snapshot()
    groups = with_noise(cut(make_groups(), tiny_model_dir, then, top_k=8), 0.3)
    for _ in range(6):
        trainer.step(make_groups(seed=3))
    found = measure(trainer, groups, {V0: then}, top_k=8)
    shares = {name: found[name] for name in ("staleness", "truncation", "numerics", "tokenisation")}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(abs(shares[name]) > 0.02 for name in ("staleness", "truncation", "numerics"))


@pytest.mark.slow
def test_versions_that_are_gone_are_skipped_and_counted(
    make_trainer: MakeTrainer, measure: Measure
) -> None:
    trainer = fast(make_trainer)
    old, new = on_policy(trainer, [make_group([1, 0], 0), make_group([1, 0], 1)])
    newer = tuple(
        dataclasses.replace(
            rollout,
            policy_versions=np.tile(np.array([1, 1], dtype=np.int32), (rollout.num_tokens, 1)),
        )
        for rollout in new.rollouts
    )
    new = dataclasses.replace(new, rollouts=newer)
    # What is no safetensors file counts as gone, too.
    found = measure(trainer, [old, new], {V0: b"half a version", V1: trainer.snapshot()})
    assert found["tokens"] == new.num_tokens
    assert found["skipped"] == pytest.approx(old.num_tokens / (old.num_tokens + new.num_tokens))
    nothing = measure(trainer, [old, new], {})
    assert nothing == {"tokens": 0.0, "skipped": 1.0, "retokenised": 0.0}


def test_a_version_that_the_limit_of_the_disk_removed_is_gone(tmp_path: Path) -> None:
    (tmp_path / "v1_1.safetensors").write_bytes(b"weights")
    versions = VersionRetention(tmp_path, max_bytes=9, max_versions=1)
    path = versions.find(V1)
    assert path is not None
    path.unlink()
    assert versions.find(V1) is None
    assert versions.versions == []


@pytest.mark.slow
def test_the_sample_is_small_and_texts_that_encode_otherwise_are_counted(
    make_trainer: MakeTrainer, measure: Measure
) -> None:
    trainer = fast(make_trainer)
    groups = on_policy(trainer, make_groups(6))
    seen: list[Sequence[int]] = []

    def is_canonical(token_ids: Sequence[int]) -> bool:
        seen.append(token_ids)
        return len(seen) % 4 != 0

    found = measure(trainer, groups, {V0: trainer.snapshot()}, num_rollouts=8, keeps=is_canonical)
    assert len(seen) == 8
    assert found["retokenised"] == 0.25
    assert found["tokens"] == sum(map(len, seen))


def test_each_answer_of_a_conversation_must_encode_to_its_own_ids(model_dir: Path) -> None:
    text, tokenizer = RoundTrip(model_dir), build_tokenizer()
    answer = tokenizer("1+2", add_special_tokens=False)["input_ids"]
    drifted = [*answer, len(tokenizer)]  # the tokenizer lacks the last id
    assert text.keeps(answer)
    assert not text.keeps(drifted)
    assert text.keeps([*answer, EOS_ID, *answer, EOS_ID])
    assert not text.keeps([*answer, EOS_ID, *drifted, EOS_ID])


def test_a_step_is_made_without_a_measurement_that_fails() -> None:
    def measure(*_: object) -> dict[str, float]:
        raise StepError("too long", reason="out_of_memory")

    result = StepResult(metrics={"lr": 1.0}, notices=("slow",))
    trainer: Any = SimpleNamespace(step_count=4, step=lambda _: result)
    probe: Any = SimpleNamespace(measure=measure)
    retention: Any = SimpleNamespace()
    found = Attribution(trainer, probe, retention, interval_steps=2).step([])
    assert found.metrics == {"lr": 1.0}
    assert found.notices == ("no attribution at step 5: too long", "slow")


def test_a_version_that_cannot_be_kept_is_told_and_costs_no_step() -> None:
    def keep(*_: object) -> None:
        raise StorageError("the disk is full")

    trainer: Any = SimpleNamespace(step_count=1, step=lambda _: StepResult(metrics={}))
    retention: Any = SimpleNamespace(keep=keep)
    unused: Any = SimpleNamespace()
    attribution = Attribution(trainer, unused, retention, interval_steps=2)
    attribution.keep(unused, bytearray())
    assert attribution.step([]).notices == ("the disk is full",)
    assert attribution.step([]).notices == ()
