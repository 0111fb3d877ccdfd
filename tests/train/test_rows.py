"""Packed or padded: what costs less, by the tokens and the calls of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from echo.algo.batching import TrainingRow
from echo.algo.row_sizes import RowSizes
from echo.config.schema import LearnerSection, ModelSection, OptimizerSection
from echo.train.models.attention import DENSE, FA3, PRODUCTS, VARLEN, Kernel
from echo.train.models.flops import AttentionShape, ModelFlops
from echo.train.models.policy import learner_compute
from echo.train.models.rows import RowRules
from echo.train.ranks.sharding import ALONE, Ranks
from tests.train.test_packing import pass_of, stale_groups
from tests.train.test_trainer import make_rollout
from tests.train.trainers import fast_trainer, policy_of


def model(params_per_layer: int, num_layers: int, width: int) -> ModelFlops:
    body = params_per_layer * num_layers
    return ModelFlops(
        body=body, body_trained=body, head=10 * width, head_trained=10 * width,
        attention=(AttentionShape(width=width),) * num_layers,
    )  # fmt: skip


QUICKSTART = model(49_000, 4, 64)
SMOLLM2 = model(3_540_000, 30, 576)
QWEN3 = model(15_700_000, 28, 2048)
"""0.6B."""
RULES = RowRules(
    flops=SMOLLM2, kernel=PRODUCTS, sizes=RowSizes(), device_type="cpu", ranks=ALONE,
    can_pack=True, can_pad=True, can_share_prompts=False,
)  # fmt: skip


def rows_of(lengths: Sequence[int], num_prompt: int = 10, per_group: int = 8) -> list[TrainingRow]:
    prompts = [np.full(num_prompt, 3, np.int32) for _ in range(0, len(lengths), per_group)]
    return [
        TrainingRow(
            prompt_ids=prompts[number // per_group],
            rollout=make_rollout([4] * (length + 1 - num_prompt), 1.0),
            advantage=1.0,
            group_index=number // per_group,
        )
        for number, length in enumerate(lengths)
    ]


def is_packed(rows: list[TrainingRow], rules: RowRules, max_tokens: int = 16384) -> bool:
    return rules.plan(rows, max_tokens=max_tokens, group_index=None).is_packed


EQUAL = [36] * 256
NEARLY = [number % 31 + 30 for number in range(64)]
FEW = NEARLY[:16]
FAR = [20, 900] * 16


@pytest.mark.parametrize(
    ("flops", "lengths", "packs"),
    [
        (QUICKSTART, EQUAL, True),  # one call in either layout
        (QUICKSTART, FEW, False),  # 16 calls in each layer, to save a few small tokens
        (SMOLLM2, FEW, True),
        (QUICKSTART, NEARLY, True),  # 31 calls, to save four times as many
        (QUICKSTART, FAR, True),  # nearly half of padded rows would be padding
    ],
)
def test_a_cpu_weighs_padding_against_calls_of_attention(
    flops: ModelFlops, lengths: list[int], packs: bool
) -> None:
    assert is_packed(rows_of(lengths), replace(RULES, flops=flops)) is packs


@pytest.mark.parametrize(
    ("kernel", "lengths", "packs"),
    [
        (VARLEN, NEARLY, True),  # one call for all segments
        (FA3, [2048] * 8, True),
        (DENSE, [2048] * 8, False),  # cuDNN computes padded rows faster than varlen those segments
        (DENSE, [2048, 512, 700, 1500], True),
        (DENSE, [8192] * 2, True),
    ],
)
def test_a_gpu_weighs_padding_against_its_kernels(
    kernel: Kernel, lengths: list[int], packs: bool
) -> None:
    rules = replace(RULES, flops=QWEN3, kernel=kernel, device_type="cuda")
    assert is_packed(rows_of(lengths), rules) is packs


def test_the_architecture_and_the_caller_come_first() -> None:
    for lengths in (FEW, FAR):
        rows = rows_of(lengths)
        assert not is_packed(rows, replace(RULES, can_pack=False, can_pad=False))
        assert is_packed(rows, replace(RULES, flops=QUICKSTART, can_pad=False))


def test_a_shared_prompt_counts_once() -> None:
    rows = rows_of(NEARLY, num_prompt=28)
    rules = replace(RULES, flops=QUICKSTART)
    apart, shared = (
        replace(rules, can_share_prompts=shares).plan(rows, max_tokens=16384, group_index=None)
        for shares in (False, True)
    )
    assert shared.cost < apart.cost
    assert shared.is_packed
    assert len(set(shared.units)) == 8


@pytest.mark.parametrize("kernel", [PRODUCTS, DENSE])
@pytest.mark.parametrize("lengths", [NEARLY, EQUAL, FAR, [5000, 30, 4096, 6000, 20], [12]])
@pytest.mark.parametrize("can_pack", [True, False])
def test_ranks_choose_alike_and_each_row_is_in_one_micro_batch(
    can_pack: bool, lengths: list[int], kernel: Kernel
) -> None:
    rows = rows_of(lengths)
    plans = []
    for rank in range(3):
        ranks = Ranks(rank=rank, size=3, mesh=None)
        rules = replace(
            RULES, ranks=ranks, kernel=kernel, can_pack=can_pack, can_share_prompts=can_pack
        )
        plans.append(rules.plan(rows, max_tokens=700, group_index=None))
    assert len({(plan.is_packed, plan.cost, len(plan.bins)) for plan in plans}) == 1
    assert sorted(index for plan in plans for each in plan.bins for index in each) == [
        *range(len(rows))
    ]


def test_long_rows_that_share_no_prompt_come_first() -> None:
    rows = [*rows_of([60] * 4, num_prompt=50, per_group=4), *rows_of([4100, 90, 5000], per_group=1)]
    plans = [
        replace(RULES, kernel=kernel, can_share_prompts=True, can_pad=False).plan(
            rows, max_tokens=16384, group_index=None
        )
        for kernel in (PRODUCTS, DENSE)
    ]
    assert [plan.bins for plan in plans] == [[[0, 1, 2, 3, 6, 4, 5]], [[6, 4, 0, 1, 2, 3, 5]]]


@pytest.mark.slow
def test_a_batch_that_is_padded_has_the_same_gradient(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = stale_groups()
    found = {}
    for device, packs in (("cpu", False), ("cuda", True)):
        trainer = fast_trainer(tiny_model_dir, packs="auto", micro_batch_tokens=60)
        flops = replace(trainer.policy.flops, body=10**9 if packs else 1)
        monkeypatch.setattr(trainer.policy, "flops", flops)
        micro_batches = trainer.policy.micro_batches(trainer.prepare(groups).samples)
        assert all((micro.segments is not None) is packs for _, micro in micro_batches)
        found[device] = pass_of(trainer, groups)
    (gradient, metrics), (expected, wanted) = found.values()
    for name, tensor in expected.items():
        assert torch.allclose(gradient[name], tensor, atol=3e-7), name
    for name, value in wanted.items():
        if not name.startswith(("perf/", "time/")):
            assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


def test_a_run_leaves_the_choice_to_the_batch(tiny_model_dir: Path) -> None:
    made = learner_compute(
        LearnerSection(device="cpu"), ModelSection(name="m"), OptimizerSection(), seed=0,
        num_steps=3,
    )  # fmt: skip
    assert made.packs == "auto"
    assert policy_of(tiny_model_dir, packs="auto").describe_rows() == (
        "Qwen3ForCausalLM is trained on packed rows, or on padded ones where a batch costs less so"
    )
