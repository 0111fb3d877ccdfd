"""The memory budget: arithmetic by hand, remedies that keep their word, what cannot be helped."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.config import memory
from echo.config.fields import Role
from echo.config.load import parse_config
from echo.config.memory import (
    Budget,
    Footprint,
    Machine,
    ModelFacts,
    memory_budget,
    read_machine,
    read_model_facts,
)
from echo.config.schema import Config
from echo.core.errors import DataError
from echo.kernels.logprob import linear_logprob

GIB = 2**30
QWEN3_600M = ModelFacts(
    num_params=596_049_920,
    num_layers=28,
    hidden_size=1024,
    intermediate_size=3072,
    vocab_size=151_936,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
)
TINY = ModelFacts(
    num_params=1000,
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    vocab_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)


def config_of(*overrides: str) -> Config:
    """Without checkpointing, unless it is among them."""
    return parse_config({}, ["learner.gradient_checkpointing=false", *overrides])


def budget_of(role: Role, host: int, gpu: int | None, *overrides: str) -> Budget:
    machine = Machine(host_bytes=host, gpu_bytes=gpu)
    return memory_budget(config_of(*overrides), role, QWEN3_600M, machine)


def sizes(budget: Budget) -> dict[str, int]:
    return {item.name: item.num_bytes for item in budget.items}


def test_an_adapter_by_hand() -> None:
    def items_of(role: Role, *overrides: str) -> dict[str, int]:
        overrides = ("model.dtype=float32", *overrides)
        return sizes(memory_budget(config_of(*overrides), role, TINY, Machine(host_bytes=GIB)))

    # Rank 2; each layer has q, k, v, o of 8x8, 8x4, 8x4, 8x8 and three of 8x16.
    num_trained = 2 * 2 * (16 + 12 + 12 + 16 + 3 * 24)
    found = items_of("learner", "lora.rank=2")
    assert found["base"] == 4 * 1000
    assert found["masters"] == found["gradients"] == 4 * num_trained
    assert found["Adam moments"] == 8 * num_trained
    assert found["3 versions"] == 3 * 4 * num_trained
    assert items_of("worker", "lora.rank=2")["weights"] == items_of("worker")["weights"]
    found = items_of("learner", "lora.rank=2", "lora.target_modules=['q_proj', 'v_proj']")
    assert found["masters"] == 4 * 2 * 2 * (16 + 12)
    assert "base" not in items_of("learner")
    found = items_of("learner", "lora.rank=2", "batch.minibatches_per_step=2")
    assert found["undo of a step"] == 12 * num_trained


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "per_param"),
    [
        ((), 1, 8),  # the moments, after the weights
        (("optimizer.state=8bit",), 1, 4),
        (("optimizer.state=offloaded",), 1, 4),  # the moments are where they are written from
        ((), 8, 2 * (4 + 8)),
        (("optimizer.state=offloaded",), 8, 2 * 4 + 8),
    ],
)
def test_a_checkpoint_comes_down_from_a_gpu(
    overrides: tuple[str, ...], num_ranks: int, per_param: int
) -> None:
    machine = Machine(host_bytes=64 * GIB, gpu_bytes=64 * GIB)
    config = config_of(*overrides)
    budget = memory_budget(config, "learner", QWEN3_600M, machine, num_ranks=num_ranks)
    [item] = [item for item in budget.items if item.name == "checkpoint under way"]
    assert (item.num_bytes, item.is_on_gpu) == (per_param * QWEN3_600M.num_params, False)
    assert "checkpoint under way" not in sizes(budget_of("learner", 64 * GIB, None))


def test_a_base_is_in_float32_before_it_is_rounded() -> None:
    large = replace(QWEN3_4B, num_params=14 * 10**9)
    overrides = ("lora.rank=8", "learner.gradient_checkpointing=true")

    def budget(*more: str) -> Budget:
        machine = Machine(host_bytes=200 * GIB, gpu_bytes=80 * 10**9)
        return memory_budget(config_of(*overrides, *more), "learner", large, machine)

    def on_gpu(budget: Budget) -> int:
        return sum(item.num_bytes for item in budget.items if item.is_on_gpu)

    assert not budget().fits
    assert "; set eval.interval_steps=0 (saves " in budget().line
    alone = budget("eval.interval_steps=0")
    assert alone.fits
    found = sizes(alone)
    assert found["base"] == 2 * large.num_params
    assert on_gpu(alone) - found["reserve"] == 4 * large.num_params
    # Where it is read to.
    assert sum(item.num_bytes for item in alone.items) - on_gpu(alone) == 4 * large.num_params
    both = budget("eval.interval_steps=0", "reference.kl_coef=0.1")
    assert on_gpu(both) - sizes(both)["reserve"] == 6 * large.num_params
    # By the end of which all weights of a model that is trained have their float32 masters anyway.
    name = "base before it is rounded"
    whole = sizes(budget_of("learner", 200 * GIB, 96 * GIB))
    assert not {name, "model while it is read"} & whole.keys()
    assert name not in sizes(budget_of("learner", 200 * GIB, None, "lora.rank=8"))


def test_the_learner_by_hand() -> None:
    config = config_of("learner.micro_batch_tokens=100", "sampling.max_completion_tokens=30")
    machine = Machine(host_bytes=GIB)
    budget = memory_budget(config, "learner", TINY, machine, prompt_tokens=10)
    # Per token and layer: 24x8 + (20x2 + 16x1)x4 + 16x16 = 672 bytes.
    assert sizes(budget) == {
        "masters": 4000,
        "gradients": 4000,
        "Adam moments": 8000,
        "activations": 2 * 672 * 100,
        # Three chunks of logits, states in float32 and their gradient; the gradient of the head.
        "one layer or head": 100 * (3 * 4 * 32 + 2 * 4 * 8) + 4 * 32 * 8,
        # Keys and values of one rollout, those of a layer twice; and what its token is drawn with.
        "evaluation": 4000 + 2 * 3 * 1 * 4 * 4 * 40 + 32 * 32,
        "3 versions": 3 * 2 * 1000,
    }
    assert budget.needed_bytes == sum(sizes(budget).values())
    assert budget.fits
    assert budget.remedies == ()


def test_bfloat16_halves_products_and_holds_weights_rounded() -> None:
    config = config_of("learner.micro_batch_tokens=100", "sampling.max_completion_tokens=30")
    on_gpu = Machine(host_bytes=GIB, gpu_bytes=GIB)
    found = sizes(memory_budget(config, "learner", TINY, on_gpu, prompt_tokens=10))
    # Per token and layer: 16x8 + (12x2 + 10x1)x4 + 8x16 = 392 bytes.
    assert found["activations"] == 2 * 392 * 100
    assert found["rounded weights"] == 2000
    # A chunk of logits in bfloat16; the states' gradient twice; the head's, and 32 rows of it more.
    assert found["one layer or head"] == 100 * (2 * 32 + 6 * 8) + 4 * 32 * 8 + 2 * 32 * 8
    on_host = ("3 versions", "checkpoint under way")
    taken = sum(size for name, size in found.items() if name not in (*on_host, "reserve"))
    assert found["reserve"] == pytest.approx(1.5e9 + 0.05 * taken, abs=1)
    exact = config_of(
        "learner.micro_batch_tokens=100",
        "sampling.max_completion_tokens=30",
        "learner.dtype=float32",
    )
    found = sizes(memory_budget(exact, "learner", TINY, on_gpu, prompt_tokens=10))
    assert found["activations"] == 2 * 672 * 100
    assert "rounded weights" not in found


def test_a_gpu_keeps_versions_where_deltas_are_made_and_there_is_room() -> None:
    def versions_of(gpu: int | None, *overrides: str) -> int:
        budget = budget_of("learner", 64 * GIB, gpu, *overrides)
        size = sizes(budget).get("2 versions beside the model", 0)
        assert budget.has_versions_on_gpu is (size > 0)
        assert ("the last version on the GPU" in budget.line) is (size > 0)
        return size

    size = 2 * 2 * QWEN3_600M.num_params
    assert versions_of(96 * GIB) == size
    assert versions_of(96 * GIB, "model.dtype=float32") == 2 * size
    assert versions_of(96 * GIB, "network.codec=full") == 0
    assert versions_of(None) == 0
    short = budget_of("learner", 64 * GIB, 96 * GIB).needed_bytes - size
    assert versions_of(short) == 0
    line = budget_of("learner", 64 * GIB, short).line
    assert "bfloat16 weights, float32 moments, the last version in host memory (largest" in line
    adapters = budget_of("learner", 64 * GIB, short, "lora.rank=8")
    assert adapters.has_versions_on_gpu


def test_moments_are_where_and_as_large_as_they_are_said_to_be() -> None:
    def moments_of(state: str) -> tuple[int, bool]:
        budget = budget_of("learner", 64 * GIB, 64 * GIB, f"optimizer.state={state}")
        (item,) = [item for item in budget.items if "moments" in item.name]
        return item.num_bytes, item.is_on_gpu

    size = 8 * QWEN3_600M.num_params
    assert moments_of("float32") == (size, True)
    assert moments_of("offloaded") == (size, False)
    assert moments_of("8bit") == (round(2.125 * QWEN3_600M.num_params), True)


def test_an_update_in_the_hosts_memory_has_room_for_the_largest_weight_and_its_gradient() -> None:
    def room(gpu: int | None, *overrides: str) -> list[tuple[int, bool]]:
        items = budget_of("learner", 64 * GIB, gpu, *overrides).items
        name = "largest weight in an update"
        return [(item.num_bytes, item.is_on_gpu) for item in items if item.name == name]

    embedding = 2 * 4 * 151_936 * 1024
    assert room(64 * GIB, "optimizer.state=offloaded") == [(embedding, False)]
    assert room(None, "optimizer.state=offloaded") == [(embedding, True)]  # the host's, too
    assert room(64 * GIB) == room(64 * GIB, "optimizer.state=offloaded", "lora.rank=8") == []


def test_a_reference_takes_its_weights() -> None:
    budgets = [
        budget_of("learner", 64 * GIB, None, *overrides)
        for overrides in ((), ("reference.kl_coef=0.1",))
    ]
    assert "reference" not in sizes(budgets[0])
    assert sizes(budgets[1])["reference"] == 4 * QWEN3_600M.num_params
    assert budgets[1].needed_bytes - budgets[0].needed_bytes == 4 * QWEN3_600M.num_params
    on_gpu = budget_of("learner", 64 * GIB, 64 * GIB, "reference.kl_coef=0.1", "lora.rank=8")
    assert sizes(on_gpu)["reference"] == sizes(on_gpu)["base"] == 2 * QWEN3_600M.num_params


@pytest.mark.parametrize(
    ("overrides", "gpu", "num_ranks", "width", "is_on_gpu"),
    [
        ((), 64 * GIB, 1, 2, True),
        ((), None, 1, 4, True),  # which is the host
        (("model.dtype=float32",), 64 * GIB, 1, 4, True),
        (("model.dtype=float32",), None, 1, 0, True),  # in the image itself
        ((), 64 * GIB, 8, 0, False),
        (("lora.rank=8",), 64 * GIB, 8, 2, False),  # the base
        (("eval.interval_steps=0",), 64 * GIB, 1, 0, True),
    ],
)
def test_the_evaluation_has_weights_where_no_image_can_be_them(
    overrides: tuple[str, ...], gpu: int | None, num_ranks: int, width: int, *, is_on_gpu: bool
) -> None:
    machine = Machine(host_bytes=64 * GIB, gpu_bytes=gpu)
    config = config_of(*overrides)
    budget = memory_budget(config, "learner", QWEN3_600M, machine, num_ranks=num_ranks)
    found = [item for item in budget.items if item.name == "evaluation"]
    is_alone = num_ranks == 1 and config.eval.interval_steps
    footprint = Footprint(
        config=config, facts=QWEN3_600M, prompt_tokens=512, has_gpu=gpu is not None
    )
    rollout = footprint.evaluated_rollout_bytes if is_alone else 0
    assert bool(rollout) is bool(is_alone)
    needed = width * QWEN3_600M.num_params + rollout
    assert [item.num_bytes for item in found] == [needed] * bool(needed)
    assert all(item.is_on_gpu is is_on_gpu for item in found)


def test_rollouts_of_the_evaluation_take_half_of_what_is_left() -> None:
    config = config_of("learner.micro_batch_tokens=100", "sampling.max_completion_tokens=30")

    def left_for_it(num_bytes: int) -> int:
        machine = Machine(host_bytes=num_bytes)
        return memory_budget(config, "learner", TINY, machine, prompt_tokens=10).evaluation_bytes

    budget = memory_budget(config, "learner", TINY, Machine(host_bytes=GIB), prompt_tokens=10)
    one = 2 * 3 * 1 * 4 * 4 * 40 + 32 * 32
    assert left_for_it(budget.needed_bytes) == left_for_it(1) == one
    assert left_for_it(budget.needed_bytes + 1000) == one + 500


def test_ranks_divide_what_is_not_for_the_moment() -> None:
    machine = Machine(host_bytes=64 * GIB, gpu_bytes=64 * GIB)
    held = ("reference.kl_coef=0.1", "metrics.attribution_steps=10")
    config = config_of("learner.gradient_checkpointing=true", *held)
    budget = memory_budget(config, "learner", QWEN3_600M, machine, num_ranks=8)
    found, size = sizes(budget), QWEN3_600M.num_params
    assert found["masters"] == found["gradients"] == found["reference"] == size // 2
    assert found["attribution"] == size // 2
    assert found["Adam moments"] == size
    assert "rounded weights" not in found
    # Embedding, a layer and the next, in bfloat16.
    layer = (size - 151_936 * 1024) // 28
    assert found["layers put together"] == 2 * (151_936 * 1024 + 2 * layer)
    assert budget.line.startswith("each of 8 ranks needs ")
    assert memory_budget(config, "worker", QWEN3_600M, machine, num_ranks=8).line == (
        memory_budget(config, "worker", QWEN3_600M, machine).line
    )


def test_checkpointing_keeps_inputs_and_one_layer() -> None:
    overrides = ["learner.micro_batch_tokens=100", "sampling.max_completion_tokens=30"]
    config = config_of(*overrides, "learner.gradient_checkpointing=true")
    machine = Machine(host_bytes=GIB)
    budget = memory_budget(config, "learner", TINY, machine, prompt_tokens=10)
    assert sizes(budget)["activations"] == 4 * 2 * 8 * 100
    head = 100 * (3 * 4 * 32 + 2 * 4 * 8)
    assert sizes(budget)["one layer or head"] == max(672 * 100, head) + 4 * 32 * 8
    assert (
        " with float32 weights, float32 moments and gradient checkpointing (largest" in budget.line
    )


def test_offloaded_inputs_are_on_the_host() -> None:
    overrides = ["learner.micro_batch_tokens=100", "sampling.max_completion_tokens=30"]
    config = config_of(*overrides, "learner.gradient_checkpointing=offload")
    facts = replace(TINY, num_layers=5)
    on_gpu = Machine(host_bytes=GIB, gpu_bytes=2 * GIB)
    budget = memory_budget(config, "learner", facts, on_gpu, prompt_tokens=10)
    assert sizes(budget)["activations"] == 2 * 2 * 8 * 100
    (inputs,) = [item for item in budget.items if item.name == "layer inputs"]
    assert (inputs.num_bytes, inputs.is_on_gpu) == (2 * 5 * 8 * 100, False)
    assert "the GPU and gradient checkpointing with offloaded inputs (largest" in budget.line


@pytest.mark.parametrize(("gib", "is_chosen"), [(16, True), (24, True), (96, False)])
def test_checkpointing_is_chosen_where_activations_would_not_fit(
    gib: int, *, is_chosen: bool
) -> None:
    budget = budget_of("learner", gib * GIB, None, "learner.gradient_checkpointing='auto'")
    told = budget_of(
        "learner", gib * GIB, None, f"learner.gradient_checkpointing={str(is_chosen).lower()}"
    )
    assert budget == told
    assert budget.gradient_checkpointing is is_chosen
    assert "learner.gradient_checkpointing" not in str(budget.remedies)


@pytest.mark.parametrize(("tokens", "real"), [(5, 40), (100, 100), (10**6, 2 * 3 * 40)])
def test_a_micro_batch_is_at_least_a_rollout_and_at_most_a_step(tokens: int, real: int) -> None:
    config = config_of(
        f"learner.micro_batch_tokens={tokens}",
        "sampling.max_completion_tokens=30",
        "batch.groups_per_step=2",
        "batch.group_size=3",
    )
    footprint = Footprint(config=config, facts=TINY, prompt_tokens=10)
    assert footprint.micro_batch_tokens == real


def test_the_worker_by_hand() -> None:
    config = config_of("sampling.max_completion_tokens=30")
    per_rollout = 2 * 2 * 1 * 4 * 4 * 40 + 4 * 32  # K and V, layers, heads, dim, bytes, tokens
    fixed = 4 * 1000 + 2 * 2 * 1000
    machine = Machine(host_bytes=fixed + 3 * per_rollout + 5)
    budget = memory_budget(config, "worker", TINY, machine, prompt_tokens=10)
    assert budget.max_concurrent_rollouts == 3
    assert budget.fits
    assert budget.needed_bytes == fixed + 3 * per_rollout


def test_the_relay_by_hand() -> None:
    config = config_of("sampling.max_completion_tokens=30")
    machine = Machine(host_bytes=GIB, gpu_bytes=1)
    budget = memory_budget(config, "relay", TINY, machine, prompt_tokens=10)
    assert sizes(budget) == {"2 versions": 2 * 2 * 1000, "groups under way": 64 * 8 * 40 * 17}
    assert budget.fits, "a relay does not use the GPU"


@pytest.mark.parametrize("gib", [16, 24, 40])
def test_the_advice_of_a_learner_is_enough(gib: int) -> None:
    budget = budget_of("learner", gib * GIB, None)
    assert not budget.fits
    assert f"has {gib} GiB with float32 weights, float32 moments; set " in budget.line
    advice = budget.line.partition("; set ")[2].partition(" (largest")[0]
    for alternative in advice.split(" or "):
        settings = [part.split(" (saves")[0] for part in alternative.split(" and ")]
        assert budget_of("learner", gib * GIB, None, *settings).fits, settings


@given(st.integers(10, 62))
def test_a_remedy_saves_what_it_says(gib: int) -> None:
    budget = budget_of("learner", gib * GIB, None)
    for remedy in budget.remedies:
        after = budget_of("learner", gib * GIB, None, remedy.setting)
        assert budget.needed_bytes - after.needed_bytes == remedy.saved_bytes > 0


QWEN3_4B = ModelFacts(
    num_params=4_022_468_096,
    num_layers=36,
    hidden_size=2560,
    intermediate_size=9728,
    vocab_size=151_936,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
EIGHT_THOUSAND = ("sampling.max_completion_tokens=7680", "learner.gradient_checkpointing=auto")
"""Rollouts of 8,192 tokens, in micro-batches of the default size."""


def test_qwen3_4b_fits_80_gb_as_the_dry_run_proposes() -> None:
    machine = Machine(host_bytes=200 * GIB, gpu_bytes=80 * 10**9)
    budget = memory_budget(config_of(*EIGHT_THOUSAND), "learner", QWEN3_4B, machine)
    assert not budget.fits
    ways = budget.line.partition("; set ")[2].partition(" (largest")[0].split(" or ")
    settings = [way.partition(" (saves")[0] for way in ways]
    assert settings == ["optimizer.state=8bit", "optimizer.state=offloaded"]
    for setting in settings:
        after = memory_budget(config_of(*EIGHT_THOUSAND, setting), "learner", QWEN3_4B, machine)
        assert after.fits
        assert after.gradient_checkpointing is not False
    on_two = memory_budget(config_of(*EIGHT_THOUSAND), "learner", QWEN3_4B, machine, num_ranks=2)
    assert on_two.fits


@pytest.mark.parametrize(
    ("tokens", "chosen", "words"),
    [
        (8192, True, "host memory and gradient checkpointing"),
        (16384, "offload", "host memory and gradient checkpointing with offloaded inputs"),
    ],
)
def test_qwen3_4b_fits_what_a_card_of_80_gb_has_free_with_float32_moments(
    tokens: int, chosen: bool | str, words: str
) -> None:
    machine = Machine(host_bytes=200 * GIB, gpu_bytes=83 * 10**9)
    overrides = (*EIGHT_THOUSAND, f"learner.micro_batch_tokens={tokens}")
    with_evaluation = memory_budget(config_of(*overrides), "learner", QWEN3_4B, machine)
    assert "; set eval.interval_steps=0 (saves 9.09 GiB) or " in with_evaluation.line
    config = config_of(*overrides, "eval.interval_steps=0")
    budget = memory_budget(config, "learner", QWEN3_4B, machine)
    assert budget.fits
    assert budget.gradient_checkpointing == chosen
    assert f"float32 moments, the last version in {words} (" in budget.line


def test_qwen3_600m_fits_24_gb_as_it_is() -> None:
    machine = Machine(host_bytes=64 * GIB, gpu_bytes=24 * 10**9)
    budget = memory_budget(config_of(*EIGHT_THOUSAND), "learner", QWEN3_600M, machine)
    assert budget.fits
    assert "moments, the last version on the GPU and gradient checkpointing (" in budget.line


def test_two_settings_are_proposed_where_one_is_not_enough() -> None:
    budget = budget_of("learner", 64 * GIB, 12 * GIB, "sampling.max_completion_tokens=15872")
    advice = budget.line.partition("; set ")[2].partition(" (largest")[0]
    assert " and " in advice
    for way in advice.split(" or "):
        settings = [part.split(" (saves")[0] for part in way.split(" and ")]
        assert len(settings) == 2
        overrides = ("sampling.max_completion_tokens=15872", *settings)
        assert budget_of("learner", 64 * GIB, 12 * GIB, *overrides).fits
        for one in settings:
            alone = ("sampling.max_completion_tokens=15872", one)
            assert not budget_of("learner", 64 * GIB, 12 * GIB, *alone).fits


def test_a_learner_that_nothing_helps() -> None:
    budget = budget_of("learner", 8 * GIB, None)
    assert not budget.fits
    assert "; even with " in budget.line
    assert "learner.gradient_checkpointing=true" in budget.line
    assert "optimizer.state=8bit" in budget.line
    assert "are missing: take a machine with more memory or a smaller model" in budget.line


def test_main_memory_beside_a_gpu_can_be_what_is_short() -> None:
    budget = budget_of("learner", 1 * GIB, 80 * GIB)
    assert not budget.fits
    assert budget.remedies == ()
    assert "learner needs 7.77 GiB, has 1 GiB with bfloat16 weights, float32 moments" in budget.line
    assert "; 6.77 GiB are missing: take a machine" in budget.line
    assert "(largest part: checkpoint under way" in budget.line
    worker = budget_of("worker", 1 * GIB, 80 * GIB)
    assert (worker.fits, worker.max_concurrent_rollouts) == (False, 0)


def test_a_worker_on_a_gpu_computes_in_bfloat16() -> None:
    on_gpu = budget_of("worker", 60 * GIB, 20 * GIB)
    on_cpu = budget_of("worker", 20 * GIB, None)
    assert sizes(on_cpu)["weights"] == 2 * sizes(on_gpu)["weights"]
    assert "in bfloat16" in on_gpu.line
    assert "in float32" in on_cpu.line


def test_a_worker_asked_for_too_much_is_told_how_much() -> None:
    budget = budget_of("worker", 16 * GIB, None, "worker.max_concurrent_rollouts=64")
    assert not budget.fits
    (remedy,) = budget.remedies
    assert f"; set {remedy.setting} (saves " in budget.line
    assert budget_of("worker", 16 * GIB, None, remedy.setting).fits


def test_a_worker_without_room_for_one_rollout() -> None:
    budget = budget_of("worker", 4 * GIB, None)
    assert (budget.fits, budget.max_concurrent_rollouts, budget.remedies) == (False, 0, ())
    assert "are missing: take a machine with more memory" in budget.line


@given(st.integers(5, 100))
def test_more_memory_never_holds_fewer_rollouts(gib: int) -> None:
    smaller = budget_of("worker", gib * GIB, None).max_concurrent_rollouts
    larger = budget_of("worker", (gib + 1) * GIB, None).max_concurrent_rollouts
    assert smaller is not None
    assert larger is not None
    assert larger >= smaller


def test_its_chunk_is_that_of_the_kernels() -> None:
    assert inspect.signature(linear_logprob).parameters["vocab_chunk"].default == memory.VOCAB_CHUNK


# --- what this machine and a model's files say ----------------------------------------------------


DIMENSIONS = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 192,
    "vocab_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def write_config(directory: Path, table: object) -> Path:
    (directory / "config.json").write_text(json.dumps(table), encoding="utf-8")
    return directory


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header: dict[str, Any] = {name: {"shape": shape} for name, shape in shapes.items()}
    header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_parameters_are_counted_in_the_files(tmp_path: Path) -> None:
    write_config(tmp_path, DIMENSIONS)
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": [3, 4], "b": [5]})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": []})
    facts = read_model_facts(tmp_path)
    assert facts.num_params == 12 + 5 + 1
    assert (facts.num_layers, facts.head_dim, facts.num_kv_heads) == (2, 16, 2)


def test_parameters_are_estimated_without_files(tmp_path: Path) -> None:
    # The quickstart's Qwen3: 100 736 with the four norms of queries and keys, 16 numbers each.
    assert read_model_facts(write_config(tmp_path, DIMENSIONS)).num_params == 100_736 - 64
    untied = {**DIMENSIONS, "tie_word_embeddings": False}
    assert read_model_facts(write_config(tmp_path, untied)).num_params == 100_736 - 64 + 32 * 64


def test_older_and_nested_configurations(tmp_path: Path) -> None:
    gpt2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 32}
    facts = read_model_facts(write_config(tmp_path, gpt2))
    assert (facts.head_dim, facts.num_kv_heads, facts.intermediate_size) == (16, 4, 256)
    nested = read_model_facts(write_config(tmp_path, {"text_config": DIMENSIONS}))
    assert nested.hidden_size == 64


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "num_hidden_layers = None is not a dimension"),
        ([1], "num_hidden_layers = None is not a dimension"),
        ({"text_config": [1]}, "num_hidden_layers = None is not a dimension"),
        ({**DIMENSIONS, "vocab_size": "32"}, "vocab_size = '32' is not a dimension"),
        ({**DIMENSIONS, "num_attention_heads": 0}, "num_attention_heads = 0 is not a dimension"),
    ],
)
def test_not_a_language_model(tmp_path: Path, table: object, message: str) -> None:
    with pytest.raises(DataError, match=f"config.json: {message}"):
        read_model_facts(write_config(tmp_path, table))


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json: no readable model configuration"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"config\.json: no readable model configuration"):
        read_model_facts(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\n",
        b"\x05" + bytes(7) + b"[1,2]",
        b"\x02" + bytes(7) + b"{",
        b"\x07" + bytes(7) + b'{"a":1}',
    ],
)
def test_a_damaged_weights_file(tmp_path: Path, content: bytes) -> None:
    write_config(tmp_path, DIMENSIONS)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"model\.safetensors: not a safetensors file"):
        read_model_facts(tmp_path)


def test_this_machine_has_memory() -> None:
    machine = read_machine(gpu_bytes=5)
    assert 2**20 < machine.host_bytes < 2**50
    assert machine.gpu_bytes == 5
