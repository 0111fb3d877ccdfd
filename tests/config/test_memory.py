"""The memory budget: arithmetic by hand, remedies that keep their word, what cannot be helped."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo.algo import row_sizes
from echo.config.fields import Role
from echo.config.load import parse_config
from echo.config.memory import step
from echo.config.memory.budget import Budget, Machine, memory_budget, read_machine
from echo.config.memory.models import find_model, read_model_facts
from echo.config.memory.step import ModelFacts
from echo.config.schema import Config
from echo.core.errors import DataError

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
SHORT = ("learner.micro_batch_tokens=100", "sampling.max_completion_tokens=30")
"""For sums by hand: with prompts of 10 tokens, rollouts of 40."""


def config_of(*overrides: str) -> Config:
    """Without checkpointing, unless it is among them."""
    return parse_config({}, ["learner.gradient_checkpointing=false", *overrides])


def budget_of(role: Role, host: int, gpu: int | None, *overrides: str) -> Budget:
    machine = Machine(host_bytes=host, gpu_bytes=gpu)
    return memory_budget(config_of(*overrides), role, QWEN3_600M, machine)


def tiny_budget(
    role: Role, *overrides: str, gpu: int | None = None, host: int = GIB, num_ranks: int = 1
) -> Budget:
    """The budget of a model whose sums can be done by hand."""
    machine, config = Machine(host_bytes=host, gpu_bytes=gpu), config_of(*SHORT, *overrides)
    return memory_budget(config, role, TINY, machine, prompt_tokens=10, num_ranks=num_ranks)


def sizes(budget: Budget) -> dict[str, int]:
    return {item.name: item.num_bytes for item in budget.items}


# Per token and layer: 24x8 + (20x2 + 16x1)x4 + 16x16 = 672 bytes; 16x8 + (12x2 + 10x1)x4 + 8x16 =
# 392 in bfloat16 on a GPU. Each model has more than one micro-batch in a step.
HEAD = 100 * (2 * 4 * 32 + 2 * 4 * 8)
"""Two chunks of logits, and states twice."""
LAST_NORM = 8 * 8 * 100
"""What is kept of it, in float32."""
ROLLOUT = 2 * 3 * 1 * 4 * 40
"""Keys and values of one rollout, those of a layer twice, by bytes per number."""
DRAWN = 32 * 32
"""What its token is drawn with."""


def test_the_learner_by_hand() -> None:
    budget = tiny_budget("learner")
    assert sizes(budget) == {
        "masters": 4000,
        "gradients": 4000,
        "Adam moments": 8000,
        "activations": 2 * 672 * 100 + LAST_NORM,
        "freed memory": 64 << 20,
        "one layer or head": HEAD,
        "evaluation": 4000 + 4 * ROLLOUT + DRAWN,
        "3 versions": 3 * 2 * 1000,
        "process": 500_000_000,
        "encoded versions": 2000,
    }
    assert budget.needed_bytes == sum(sizes(budget).values())
    assert (budget.fits, budget.remedies) == (True, ())


def test_bfloat16_halves_products_and_holds_weights_rounded() -> None:
    found = sizes(tiny_budget("learner", gpu=GIB))
    assert found["activations"] == 2 * 392 * 100 + 6 * 8 * 100
    assert found["rounded weights"] == 2000
    # A chunk of logits in bfloat16; the states' gradient twice; the head's, and 32 rows of it more.
    assert found["one layer or head"] == 100 * (2 * 32 + 6 * 8) + 4 * 32 * 8 + 2 * 32 * 8
    on_host = ("3 versions", "checkpoint under way", "process", "encoded versions")
    taken = sum(size for name, size in found.items() if name not in (*on_host, "reserve"))
    assert found["reserve"] == pytest.approx(1.5e9 + 0.05 * taken, abs=1)
    found = sizes(tiny_budget("learner", "learner.dtype=float32", gpu=GIB))
    assert found["activations"] == 2 * 672 * 100 + LAST_NORM
    assert "rounded weights" not in found


def test_an_adapter_by_hand() -> None:
    # Rank 2; each layer has q, k, v, o of 8x8, 8x4, 8x4, 8x8 and three of 8x16.
    num_trained = 2 * 2 * (16 + 12 + 12 + 16 + 3 * 24)
    lora = ("model.dtype=float32", "lora.rank=2")
    found = sizes(tiny_budget("learner", *lora))
    assert found["base"] == 4 * 1000
    assert found["masters"] == found["gradients"] == 4 * num_trained
    assert found["Adam moments"] == 8 * num_trained
    assert found["3 versions"] == 3 * 4 * num_trained
    found = sizes(tiny_budget("learner", *lora, "lora.target_modules=['q_proj', 'v_proj']"))
    assert found["masters"] == 4 * 2 * 2 * (16 + 12)
    found = sizes(tiny_budget("learner", *lora, "batch.minibatches_per_step=2"))
    assert found["undo of a step"] == 12 * num_trained
    assert sizes(tiny_budget("worker", *lora))["weights"] == 4 * 1000


OFFLOADED = "optimizer.state=offloaded"
ITEMS = [
    # Overrides, a GPU?, ranks; an item, its bytes, on the GPU?
    ("", True, 1, "checkpoint under way", 8000, False),  # the moments, after the weights
    ("optimizer.state=8bit", True, 1, "checkpoint under way", 4000, False),
    (OFFLOADED, True, 1, "checkpoint under way", 4000, False),  # moments are where they are written
    ("", True, 8, "checkpoint under way", 2 * (4000 + 8000), False),
    (OFFLOADED, True, 8, "checkpoint under way", 2 * 4000 + 8000, False),
    ("", False, 1, "checkpoint under way", 0, False),
    ("", True, 1, "Adam moments", 8000, True),
    ("optimizer.state=8bit", True, 1, "Adam moments", 2125, True),
    (OFFLOADED, True, 1, "offloaded moments", 8000, False),
    (OFFLOADED, True, 1, "Adam moments", 0, True),
    (OFFLOADED, True, 1, "largest weight in an update", 2 * 4 * 32 * 8, False),
    (OFFLOADED, False, 1, "largest weight in an update", 2 * 4 * 32 * 8, True),  # the host's, too
    (f"{OFFLOADED} lora.rank=8", True, 1, "largest weight in an update", 0, False),
    ("", True, 1, "largest weight in an update", 0, False),
    ("reference.kl_coef=0.1", False, 1, "reference", 4000, True),
    ("reference.kl_coef=0.1 lora.rank=8", True, 1, "reference", 2000, True),
    ("", False, 1, "reference", 0, True),
    ("reference.kl_coef=0.1 lora.rank=8", True, 1, "base", 2000, True),
    ("", True, 1, "base", 0, True),
    # The evaluation has weights where no image can be them.
    ("", True, 1, "evaluation", 2000 + 2 * ROLLOUT + DRAWN, True),
    ("", False, 1, "evaluation", 4000 + 4 * ROLLOUT + DRAWN, True),
    ("learner.dtype=bfloat16", False, 1, "evaluation", 2 * ROLLOUT + DRAWN, True),
    ("model.dtype=float32", True, 1, "evaluation", 4000 + 4 * ROLLOUT + DRAWN, True),
    ("model.dtype=float32", False, 1, "evaluation", 4 * ROLLOUT + DRAWN, True),
    ("", True, 8, "evaluation", 0, False),
    ("lora.rank=8", True, 8, "evaluation", 2000, False),
    ("eval.interval_steps=0", True, 1, "evaluation", 0, True),
    # A GPU keeps versions where deltas are made.
    ("", True, 1, "2 versions beside the model", 2 * 2000, True),
    ("model.dtype=float32", True, 1, "2 versions beside the model", 2 * 4000, True),
    ("network.codec=full", True, 1, "2 versions beside the model", 0, True),
    ("", False, 1, "2 versions beside the model", 0, True),
]


@pytest.mark.parametrize("case", ITEMS)
def test_what_is_held_where(case: tuple[str, bool, int, str, int, bool]) -> None:
    overrides, has_gpu, num_ranks, name, num_bytes, is_on_gpu = case
    gpu = 64 * GIB if has_gpu else None
    budget = tiny_budget("learner", *overrides.split(), gpu=gpu, num_ranks=num_ranks)
    found = [(item.num_bytes, item.is_on_gpu) for item in budget.items if item.name == name]
    assert found == ([(num_bytes, is_on_gpu)] if num_bytes else [])


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


def test_rollouts_of_the_evaluation_take_half_of_what_is_left() -> None:
    needed = tiny_budget("learner").needed_bytes
    for host, half in ((1, 0), (needed, 0), (needed + 1000, 500)):
        assert tiny_budget("learner", host=host).evaluation_bytes == 4 * ROLLOUT + DRAWN + half


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


def test_checkpointing_keeps_inputs_and_one_layer_and_offloaded_ones_are_on_the_host() -> None:
    budget = tiny_budget("learner", "learner.gradient_checkpointing=true")
    # The fullest moment is the last layer's backward: beside the inputs of all of them what one
    # keeps, and two times its MLP's middle. The head's gradient is among the gradients.
    assert sizes(budget)["activations"] == 4 * 2 * 8 * 100
    assert sizes(budget)["one layer or head"] == (672 + 2 * 4 * 16) * 100
    assert ", float32 moments and gradient checkpointing (largest" in budget.line
    config = config_of(*SHORT, "learner.gradient_checkpointing=offload")
    machine = Machine(host_bytes=GIB, gpu_bytes=2 * GIB)
    budget = memory_budget(config, "learner", replace(TINY, num_layers=5), machine)
    tokens = 512 + 30  # at least one rollout
    assert sizes(budget)["activations"] == 2 * 2 * 8 * tokens
    (inputs,) = [item for item in budget.items if item.name == "layer inputs"]
    assert (inputs.num_bytes, inputs.is_on_gpu) == (2 * 5 * 8 * tokens, False)
    assert "the GPU and gradient checkpointing with offloaded inputs (largest" in budget.line


@pytest.mark.parametrize(("tokens", "real"), [(5, 40), (100, 100), (10**6, 2 * 3 * 40)])
def test_a_micro_batch_is_at_least_a_rollout_and_at_most_a_step(tokens: int, real: int) -> None:
    overrides = ("batch.groups_per_step=2", "batch.group_size=3", "eval.interval_steps=0")
    budget = tiny_budget("learner", *overrides, f"learner.micro_batch_tokens={tokens}")
    assert sizes(budget)["activations"] == (2 * 672 + 8 * 8) * real
    # Nor are there gradients while all of its activations are, if there is one alone.
    assert ("gradients" in sizes(budget)) is (tokens < 10**6)


def test_the_longest_rollout_of_agents_is_a_conversation() -> None:
    agents = ("agent.listen=tcp://127.0.0.1:0", "agent.max_session_tokens=500")
    budget = tiny_budget("learner", *agents, "learner.micro_batch_tokens=5")
    assert sizes(budget)["activations"] == (2 * 672 + 8 * 8) * (10 + 500)


def test_worker_and_relay_by_hand() -> None:
    per_rollout = 2 * 2 * 1 * 4 * 4 * 40 + 4 * 32  # K and V, layers, heads, dim, bytes, tokens
    fixed = 4 * 1000 + 3 * 2 * 1000 + 500_000_000  # what is encoded is an image's worth
    for spare, num_rollouts in ((5, 3), (0, 3), (-1, 2)):
        budget = tiny_budget("worker", host=fixed + 3 * per_rollout + spare)
        assert (budget.fits, budget.max_concurrent_rollouts) == (True, num_rollouts)
        assert budget.needed_bytes == fixed + num_rollouts * per_rollout
    on_gpu = tiny_budget("worker", gpu=GIB)
    assert (sizes(budget)["weights"], sizes(on_gpu)["weights"]) == (4000, 2000)
    assert "in float32" in budget.line
    assert "in bfloat16" in on_gpu.line
    relay = tiny_budget("relay", gpu=1)
    assert sizes(relay) == {
        "2 versions": 2 * 2 * 1000,
        "process": 100_000_000,
        "encoded versions": 2000,
        "groups under way": 64 * 8 * 40 * 17,
    }
    assert "encoded versions" not in sizes(tiny_budget("relay", "network.codec=full"))
    assert relay.fits, "a relay does not use the GPU"


SHARED = ModelFacts(
    num_params=1_000_000,
    num_layers=2,
    hidden_size=64,
    intermediate_size=160,
    vocab_size=4096,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    has_head_norms=False,
    shares_prompts=True,
)


def budget_of_a_pass(facts: ModelFacts, *overrides: str) -> dict[str, int]:
    """Of 2 groups of 4 rollouts, prompts of 60 tokens and completions of 30, on a CPU."""
    sizes_of_step = ("batch.groups_per_step=2", "batch.group_size=4", "eval.interval_steps=0")
    config = config_of(*sizes_of_step, "sampling.max_completion_tokens=30", *overrides)
    machine = Machine(host_bytes=GIB)
    return sizes(memory_budget(config, "learner", facts, machine, prompt_tokens=60))


def test_rollouts_that_share_a_prompt_by_hand() -> None:
    # Tokens: 2 x (60 + 4 x 30), of 32-bit numbers; keys: 2 x (60 + 4 x 90). In each layer 24 bytes
    # for each number of the hidden state, 12 of the queries, 16 of the MLP's middle; 8 for each of
    # the keys. Layers share a mask for each rollout, since all may be of different length.
    masks = (2 * 4 + 1) * 4 * 30 * 90
    layer = 360 * (24 * 64 + 12 * 96 + 16 * 160) + 840 * 8 * 32
    assert budget_of_a_pass(SHARED)["activations"] == 2 * layer + masks + 360 * 8 * 64
    # With a prompt each, 720 tokens attend to themselves.
    layer = 720 * (24 * 64 + 12 * 96 + 16 * 160 + 8 * 32)
    apart = replace(SHARED, shares_prompts=False)
    assert budget_of_a_pass(apart)["activations"] == 2 * layer + 720 * 8 * 64
    eager = "model.attn_implementation=eager"
    assert budget_of_a_pass(SHARED, eager) == budget_of_a_pass(apart, eager)
    # Those that save less than a fifth do not share, and neither do those that half a micro-batch
    # does not hold beside another.
    for setting in ("sampling.max_completion_tokens=170", "learner.micro_batch_tokens=220"):
        assert budget_of_a_pass(SHARED, setting) == budget_of_a_pass(apart, setting)


def test_bfloat16_on_a_cpu_by_hand() -> None:
    """Attention is in float32, a row filled to one of a few sizes, and products leave code."""
    found = budget_of_a_pass(SHARED, "learner.dtype=bfloat16")
    tokens, masks = 368, (2 * 4 + 1) * 4 * 30 * 90  # 360, filled to a multiple of 256 / 16
    keys = -(-tokens * 840 // 360)
    layer = tokens * (16 * 64 + 10 * 96 + 8 * 160) + keys * 8 * 32
    assert found["activations"] == 2 * layer + masks + tokens * 6 * 64
    # Of the 240 completion tokens: logits, twice more in 16 bits, states in both types, and their
    # gradient; of the head a chunk's gradient, and its own.
    head = 240 * (2 * 4 * 4096 + 10 * 64) + 4 * 4096 * 64
    assert found["one layer or head"] == head + 2 * 4096 * 64
    assert found["products' code"] == 16 * 2 * ((1_000_000 - 4096 * 64) // 2 + 4096 * 64)
    # What an adapter does not train: norms, so what they normalise is not kept.
    found = budget_of_a_pass(SHARED, "learner.dtype=bfloat16", "lora.rank=4")
    layer = tokens * (12 * 64 + 10 * 96 + 2 * (4 * 160 + 7 * 4)) + keys * 8 * 32
    assert found["activations"] == 2 * layer + masks + tokens * 6 * 64


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tokens", "tied", "untied"),
    [
        # Bytes of a weight of the embedding, beside float32 gradients: the gradient of the head or
        # of an embedding of its own, with a float32 copy to be added to what is there. In float32 a
        # tied embedding adds rows alone.
        ("float32", 16384, 0, 0),
        ("float32", 60, 4, 4),
        ("bfloat16", 16384, 2, 2),
        ("bfloat16", 60, 6, 6),
    ],
)
def test_gradients_of_a_large_vocabulary_are_the_fullest_moment(
    dtype: str, tokens: int, tied: int, untied: int, *, is_tied: bool
) -> None:
    num_outside = 200_000 * 64
    facts = replace(
        SHARED, vocab_size=200_000, num_params=20 * 10**6 + num_outside, is_tied=is_tied
    )
    facts = facts if is_tied else replace(facts, num_params=facts.num_params + num_outside)
    step = ("batch.groups_per_step=1", "batch.group_size=2")
    settings = (f"learner.dtype={dtype}", f"learner.micro_batch_tokens={tokens}", *step)
    found = budget_of_a_pass(facts, *settings)
    assert found["gradients"] == 4 * facts.num_params
    expected = (tied if is_tied else untied) * num_outside
    # Beside a gradient that waits, the head's backward takes a little.
    assert found.get("one layer or head", 0) == pytest.approx(expected, abs=num_outside / 2)


GPU_PEAKS = [
    # Model, tokens, checkpointing, optimizer.state: GB that were allocated and reserved.
    ("0.6b", 8192, True, "float32", 12.12550912, 12.46756864, 1.142),
    ("0.6b", 8192, True, "8bit", 8.64141056, 10.169090048, 1.039),
    ("0.6b", 8192, True, "offloaded", 7.35998208, 7.658799104, 1.206),
    ("0.6b", 16384, False, "float32", 46.492870656, None, None),
    ("4b", 8192, True, "8bit", 53.244879872, None, None),
]


@pytest.mark.parametrize("case", GPU_PEAKS)
def test_peaks_that_were_measured_on_a_gpu(case: tuple[Any, ...]) -> None:
    """On an H200 in bfloat16, with prompts of 200 tokens; what tensors took is without reserve."""
    model, tokens, has_checkpointing, state, allocated, reserved, most = case
    settings = (
        "learner.dtype=bfloat16",
        f"learner.gradient_checkpointing={str(has_checkpointing).lower()}",
        f"learner.micro_batch_tokens={tokens}",
        f"sampling.max_completion_tokens={tokens - 200}",
        f"optimizer.state={state}",
        "network.codec=full",
        "eval.interval_steps=0",
    )
    facts = {"0.6b": QWEN3_600M, "4b": QWEN3_4B}[model]
    machine = Machine(host_bytes=200 * GIB, gpu_bytes=140 * 10**9)
    budget = memory_budget(config_of(*settings), "learner", facts, machine, prompt_tokens=200)
    on_gpu = sum(item.num_bytes for item in budget.items if item.is_on_gpu) / 1e9
    assert on_gpu - sizes(budget)["reserve"] / 1e9 == pytest.approx(allocated, rel=0.015)
    if reserved:
        assert 1.0 < on_gpu / reserved < most


# --- advice ---------------------------------------------------------------------------------------


EIGHT_THOUSAND = ("sampling.max_completion_tokens=7680", "learner.gradient_checkpointing=auto")
"""Rollouts of 8,192 tokens, in micro-batches of the default size."""


@pytest.mark.parametrize(
    ("facts", "host", "gpu", "overrides", "num_settings"),
    [
        (QWEN3_600M, 16 * GIB, None, (), 3),
        (QWEN3_600M, 24 * GIB, None, (), 1),
        (QWEN3_600M, 40 * GIB, None, (), 1),
        (QWEN3_600M, 64 * GIB, 12 * GIB, ("sampling.max_completion_tokens=15872",), 3),
        (QWEN3_4B, 200 * GIB, 80 * 10**9, EIGHT_THOUSAND, 2),
    ],
)
def test_the_advice_of_a_learner_is_enough_and_the_least(
    facts: ModelFacts, host: int, gpu: int | None, overrides: tuple[str, ...], num_settings: int
) -> None:
    def budget(*settings: str) -> Budget:
        machine = Machine(host_bytes=host, gpu_bytes=gpu)
        return memory_budget(config_of(*overrides, *settings), "learner", facts, machine)

    before = budget()
    assert not before.fits
    advice = before.line.partition("; set ")[2].partition(" (largest")[0]
    settings = [part.split(" (saves")[0] for part in advice.split(" and ")]
    assert len(settings) == num_settings
    assert budget(*settings).fits
    assert not any(budget(*set(settings) - {one}).fits for one in settings)
    remedies = [remedy.setting for remedy in before.remedies]
    assert sorted(settings, key=remedies.index) == settings, "the milder first"
    for remedy in before.remedies:
        after = budget(remedy.setting)
        # What is chosen by itself takes room that was saved.
        if "auto" not in str(overrides):
            assert before.needed_bytes - after.needed_bytes == remedy.saved_bytes > 0


@pytest.mark.parametrize(("gib", "is_chosen"), [(16, True), (24, True), (96, False)])
def test_checkpointing_is_chosen_where_activations_would_not_fit(
    gib: int, *, is_chosen: bool
) -> None:
    budget = budget_of("learner", gib * GIB, None, "learner.gradient_checkpointing='auto'")
    told = f"learner.gradient_checkpointing={str(is_chosen).lower()}"
    assert replace(budget, recompute_above=0) == budget_of("learner", gib * GIB, None, told)
    assert budget.gradient_checkpointing is is_chosen
    assert "learner.gradient_checkpointing" not in str(budget.remedies)


@pytest.mark.parametrize("gpu", [None, 16 * 10**9])
def test_small_micro_batches_are_not_computed_again(gpu: int | None) -> None:
    """What they take is half of what is left beside a step that computes its layers again."""
    host = 18 * GIB if gpu is None else 64 * GIB
    overrides = ("learner.gradient_checkpointing='auto'", "optimizer.state=8bit")
    auto = budget_of("learner", host, gpu, *overrides, "eval.interval_steps=0")
    assert auto.gradient_checkpointing is True
    told = ("optimizer.state=8bit", "eval.interval_steps=0")
    again = budget_of("learner", host, gpu, *told, "learner.gradient_checkpointing=true")
    assert again.recompute_above == 0, "a user's word holds for every micro-batch"
    left = (host if gpu is None else gpu) - auto.needed_bytes

    def plain(tokens: int) -> int:
        """With no more in a micro-batch, and no longer rollouts."""
        short = f"sampling.max_completion_tokens={tokens - 512}"
        more = ("batch.groups_per_step=1", "batch.group_size=2", "learner.micro_batch_tokens=1")
        return budget_of("learner", host, gpu, *told, short, *more).needed_bytes

    assert 513 < auto.recompute_above < 16384
    limit = auto.needed_bytes + left // 2
    place = "GPU" if auto.has_versions_on_gpu else "host memory"
    assert gpu is None or place == "GPU"
    assert plain(auto.recompute_above) <= limit < plain(auto.recompute_above + 1)
    assert budget_of("learner", 2**45, None, *overrides).recompute_above == 0, "none has to be"


@pytest.mark.parametrize(
    ("facts", "gb", "overrides", "num_ranks", "chosen", "place"),
    [
        (QWEN3_4B, 83, "eval.interval_steps=0 learner.micro_batch_tokens=8192", 1, True, "host"),
        (QWEN3_4B, 83, "eval.interval_steps=0", 1, "offload", "host"),
        (QWEN3_4B, 80, "optimizer.state=8bit", 1, True, "host"),
        (QWEN3_4B, 80, "", 2, True, None),
        (QWEN3_600M, 24, "", 1, True, "GPU"),
        (QWEN3_600M, 24, "lora.rank=8", 1, True, "GPU"),
    ],
)
def test_what_fits_a_card(
    facts: ModelFacts,
    gb: int,
    overrides: str,
    num_ranks: int,
    chosen: bool | str,
    place: str | None,
) -> None:
    machine = Machine(host_bytes=200 * GIB, gpu_bytes=gb * 10**9)
    config = config_of(*EIGHT_THOUSAND, *overrides.split())
    budget = memory_budget(config, "learner", facts, machine, num_ranks=num_ranks)
    assert (budget.fits, budget.gradient_checkpointing) == (True, chosen)
    assert budget.has_versions_on_gpu is (place == "GPU")
    places = {None: "moments and", "host": "in host memory", "GPU": "last version on the GPU"}
    assert f"{places[place]} " in budget.line


def test_a_machine_that_nothing_helps() -> None:
    learner = budget_of("learner", 8 * GIB, None)
    assert not learner.fits
    for part in ("; even with ", "learner.gradient_checkpointing=true", "optimizer.state=8bit",
                 "are missing: take a machine with more memory or a smaller model"):  # fmt: skip
        assert part in learner.line
    beside = budget_of("learner", 1 * GIB, 80 * GIB)  # main memory beside a GPU is what is short
    assert (beside.fits, beside.remedies) == (False, ())
    assert "learner needs 9.35 GiB, has 1 GiB with bfloat16 weights, float32 moments" in beside.line
    assert "; 8.35 GiB are missing: take a machine" in beside.line
    assert "(largest part: checkpoint under way" in beside.line
    for gpu in (None, 80 * GIB):
        worker = budget_of("worker", 1 * GIB, gpu)
        assert (worker.fits, worker.max_concurrent_rollouts, worker.remedies) == (False, 0, ())
        assert "are missing: take a machine with more memory" in worker.line


def test_a_worker_asked_for_too_much_is_told_how_much() -> None:
    budget = budget_of("worker", 16 * GIB, None, "worker.max_concurrent_rollouts=64")
    assert not budget.fits
    (remedy,) = budget.remedies
    assert f"; set {remedy.setting} (saves " in budget.line
    assert budget_of("worker", 16 * GIB, None, remedy.setting).fits


@pytest.mark.parametrize(("num_groups", "mean"), [(4, 20), (8, 150), (4, 300)])
def test_rows_of_a_run_come_in_about_as_many_sizes_as_are_counted(
    num_groups: int, mean: int
) -> None:
    rng, sizes = random.Random(0), row_sizes.RowSizes(fills="rows")
    found = set()
    for _ in range(200):
        completions = (round(mean * rng.lognormvariate(-0.3, 0.8)) for _ in range(8 * num_groups))
        prompts = (rng.randrange(60, 200) for _ in range(num_groups))
        found.add(sizes.packed(sum(completions) + sum(prompts), max_tokens=16384))
    assert step.NUM_ROW_SIZES / 4 < len(found) < step.NUM_ROW_SIZES * 3 / 2


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


def encoded(**changes: object) -> bytes:
    """config.json of a model with these dimensions, but for the changes."""
    return json.dumps(DIMENSIONS | changes).encode()


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header: dict[str, Any] = {
        name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()
    }
    header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_parameters_are_counted_in_the_files_or_estimated(tmp_path: Path) -> None:
    def read(table: dict[str, Any]) -> ModelFacts:
        (tmp_path / "config.json").write_text(json.dumps(table), encoding="utf-8")
        return read_model_facts(tmp_path)

    # The quickstart's Qwen3: 100 736 with the four norms of queries and keys, 16 numbers each.
    assert read(DIMENSIONS).num_params == 100_736 - 64
    assert read(DIMENSIONS | {"tie_word_embeddings": False}).num_params == 100_736 - 64 + 32 * 64
    assert read({"text_config": DIMENSIONS}).hidden_size == 64
    older = read({"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 32})
    assert (older.head_dim, older.num_kv_heads, older.intermediate_size) == (16, 4, 256)
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": [3, 4], "b": [5]})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": []})
    facts = read(DIMENSIONS)
    assert facts.num_params == 12 + 5 + 1
    assert (facts.num_layers, facts.head_dim, facts.num_kv_heads) == (2, 16, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.json", b"", "no readable model configuration"),
        ("config.json", b"{", "no readable model configuration"),
        ("config.json", b"{}", "num_hidden_layers = None is not a dimension"),
        ("config.json", b"[1]", "num_hidden_layers = None is not a dimension"),
        ("config.json", b'{"text_config": [1]}', "num_hidden_layers = None is not a dimension"),
        ("config.json", encoded(vocab_size="32"), "vocab_size = '32' is not a dimension"),
        ("config.json", encoded(num_attention_heads=0), "num_attention_heads = 0 is not a dim"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "not a safetensors"),
        ("model.safetensors", b"\x05" + bytes(7) + b"[1,2]", "not a safetensors file"),
        ("model.safetensors", b"\x02" + bytes(7) + b"{", "not a safetensors file"),
        ("model.safetensors", b"\x07" + bytes(7) + b'{"a":1}', "not a safetensors file"),
    ],
)
def test_what_is_no_language_model_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    if name == "model.safetensors":
        (tmp_path / "config.json").write_bytes(encoded())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name.replace('other', 'config')}: {message}"):
        read_model_facts(tmp_path)


@pytest.mark.parametrize(
    ("fields", "dtypes", "why"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {}, r"says that .* quantised \(fp8\)"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, {}, "quantised .bitsandbytes"),
        ({"quantization_config": {"bits": 4}}, {}, r"quantised \(quantization_config\)"),
        ({"compression_config": {"format": "int"}}, {}, r"quantised \(compression_config\)"),
        (
            {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, {},
            r"quantised \(mxfp4\)",
        ),
        ({}, {"a.weight": "F8_E4M3"}, r"model\.safetensors holds the weights a\.weight .* F8_E4M3"),
        ({}, {"a.weight": "I8"}, "quantised, as I8"),
        ({}, {"norm.weight": "F32", "a.qweight": "I32"}, r"the weights a\.qweight"),
        ({}, {"a_blocks": "U8"}, "the weights a_blocks"),
        ({"quantization_config": None}, {"a.weight": "BF16", "a.bias": "U8", "ids": "I64"}, ""),
    ],
)  # fmt: skip
def test_quantised_models_are_refused_with_the_method(
    tmp_path: Path, fields: dict[str, Any], dtypes: dict[str, str], why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    header = {
        name: {"dtype": dtype, "shape": [2, 2], "data_offsets": [0, 0]}
        for name, dtype in dtypes.items()
    }
    data = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    if not why:
        assert find_model(str(tmp_path)) == tmp_path
        return
    with pytest.raises(DataError, match=why + ".* name the model that it was made from"):
        find_model(str(tmp_path))


def test_this_machine_has_memory() -> None:
    machine = read_machine(gpu_bytes=5)
    assert 2**20 < machine.host_bytes < 2**50
    assert machine.gpu_bytes == 5
