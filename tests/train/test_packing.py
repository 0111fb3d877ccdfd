"""Packed rows against padded ones, family by family, and the models that cannot have them.

Helpers come from test_trainer.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from echo.algo import batching, row_sizes
from echo.algo.batching import TrainingRow
from echo.algo.losses import EntropyBonusLoss, ReferenceKlLoss, make_loss
from echo.algo.row_sizes import filled_size
from echo.config.schema import LearnerSection, ModelSection, OptimizerSection
from echo.core.rollout import Group
from echo.engine.lora import Lora
from echo.train.models import attention, compiling, packing, policy
from echo.train.models.policy import ModelSource
from echo.train.trainer import Trainer
from tests.runtime.families import EXPERTS, FAMILIES, SMALL, save_family
from tests.train.test_trainer import change_of, make_group, make_groups, make_rollout
from tests.train.trainers import TWO_UPDATES, fast_trainer, policy_of

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3 with windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    )
}
"""Variants of families in the table, by label."""
PACKED = [*(name for name, family in FAMILIES.items() if not family.padded), *VARIANTS]
IN_EVERY_RUN = ("qwen3", "gemma3_text", "qwen3_moe")
LEAKING: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "qwen2_moe": (
        EXPERTS
        | {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "shared_expert_intermediate_size": 16,
        },
        "Qwen2MoeAttention says its sliding window in the mask only",
    ),
    "recurrent_gemma": (
        {"lru_width": 64, "attention_window_size": 5},
        # transformers 5.24 says of its layers what they are, before 5.24 only the probe tells.
        "a rollout changes by .*% when another one stands|layers of linear_attention carry one",
    ),
}
"""Further families that cannot have packed rows."""


def cases(names: Any, kept: tuple[str, ...]) -> list[Any]:
    marks = [pytest.mark.matrix, pytest.mark.slow]
    return [pytest.param(name, marks=[] if name in kept else marks) for name in names]


def save_packed(directory: Path, label: str) -> Path:
    """Write a model of a packed family or of a variant."""
    return save_family(directory, *VARIANTS.get(label, (label,)))


@pytest.fixture
def any_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share even the shortest prompts."""
    monkeypatch.setattr(batching, "MIN_SAVED", 0.0)


def stale_groups() -> list[Group]:
    """Lengths 3 to 16, one of them alone, and tokens that are masked."""
    groups = [make_group([1, 0, 0, 1], n) for n in range(5)]
    mask = [n % 3 > 0 for n in range(groups[1].rollouts[0].num_tokens)]
    groups[1] = change_of(groups[1], 0, completion_mask=torch.tensor(mask).numpy())
    return groups


def make_trainer(model_dir: Path, how: str, **options: Any) -> Trainer:
    loss = EntropyBonusLoss(loss=make_loss("gspo", clip_low=0.9, clip_high=9.0), coef=0.01)
    trainer = fast_trainer(model_dir, packs=how == "packed", **({"loss": loss} | options))
    assert f"is trained on {how} rows" in trainer.describe_rows()
    return trainer


def pass_of(trainer: Trainer, groups: list[Group]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of a batch, and then the metrics of its step."""
    loss = trainer.loss
    trainer.forward_backward(trainer.prepare(groups), loss)
    found = {
        name: tensor.grad.clone()
        for name, tensor in trainer.policy.parameters().items()
        if tensor.grad is not None
    }
    trainer.weights.drop_gradients()
    return found, trainer.step(groups).metrics


@pytest.mark.parametrize("family", cases(PACKED, IN_EVERY_RUN))
@pytest.mark.slow
def test_packed_rows_give_the_padded_rows_loss_gradient_and_metrics(
    family: str, tmp_path: Path, any_prompt: None
) -> None:
    """Also if rollouts share their prompts."""
    model_dir, groups = save_packed(tmp_path, family), stale_groups()
    padded = make_trainer(model_dir, "padded")
    scores = padded.forward(groups)
    expected_gradient, expected_metrics = pass_of(padded, groups)
    num_tokens = {}
    rounding = 5 if "gemma4" in family else 1
    for shares in (False, True):
        # Several rows.
        packed = make_trainer(model_dir, "packed", micro_batch_tokens=60, share_prompts=shares)
        assert packed.policy.is_packed
        assert packed.policy.can_share_prompts is shares
        for one, other in zip(packed.forward(groups), scores, strict=True):
            for row, expected in zip(one, other, strict=True):
                assert abs(row - expected).max() < 2e-6 * rounding
        gradient, metrics = pass_of(packed, groups)
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            if not name.startswith(("perf/", "time/")):
                assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
        expected_loss = expected_metrics["loss/policy"]
        assert metrics["loss/policy"] == pytest.approx(expected_loss, abs=1e-6)
        for name, tensor in expected_gradient.items():
            scale = max(float(tensor.abs().max()), 1e-3)
            difference = float((gradient[name] - tensor).abs().max())
            assert difference < 3e-6 * scale * rounding, name
        micro_batches = packed.policy.micro_batches(packed.prepare(groups).samples)
        num_tokens[shares] = sum(micro.input_ids.numel() for _, micro in micro_batches)
    assert num_tokens[True] < 0.8 * num_tokens[False]


def test_rows_without_positions_and_segments_would_be_wrong(tmp_path: Path) -> None:
    """The comparison above sees a leak: with one segment in place of several it fails."""
    model_dir, groups = save_packed(tmp_path, "qwen3"), stale_groups()
    packed, padded = (make_trainer(model_dir, how) for how in ("packed", "padded"))
    expected = padded.forward(groups)
    original = packing.arguments

    def as_one(segments: Any, kernel: Any) -> Any:
        whole = type(segments).of([sum(segments.lengths)])
        return original(whole, kernel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "arguments", as_one)
        found = packed.forward(groups)
    far = max(
        abs(row - other).max()
        for one, two in zip(found, expected, strict=True)
        for row, other in zip(one, two, strict=True)
    )
    assert far > 0.1


@pytest.mark.parametrize("loss", ["grpo", "gepo", "m2po", "decoupled_ppo"])
@pytest.mark.slow
def test_every_kind_of_loss_sees_the_same(tiny_model_dir: Path, loss: str) -> None:
    groups = stale_groups()[2:]
    options: dict[str, Any] = {"loss": make_loss(loss), "optimizer": TWO_UPDATES}
    found = make_trainer(tiny_model_dir, "packed", micro_batch_tokens=40, **options).step(groups)
    padded = make_trainer(tiny_model_dir, "padded", **options).step(groups)
    for name, value in padded.metrics.items():
        if not name.startswith(("perf/", "time/")):
            assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_whole_groups_and_the_longest_first(tiny_model_dir: Path) -> None:
    policy = policy_of(tiny_model_dir, micro_batch_tokens=30, share_prompts=False)
    trainer = make_trainer(tiny_model_dir, "packed")
    rows = trainer.prepare(stale_groups()).samples
    seen = []
    for indices, micro in policy.micro_batches(rows, whole_groups=True):
        assert micro.segments is not None
        assert micro.input_ids.shape == (1, sum(micro.segments.lengths))
        assert list(micro.segments.lengths) == sorted(micro.segments.lengths, reverse=True)
        assert micro.segments.ends.tolist()[-1] == micro.input_ids.shape[1]
        seen.append({rows[index].group_index for index in indices})
    assert sum(map(len, seen)) == len(set().union(*seen)) == 5


@pytest.mark.parametrize(
    ("num_prompt", "num_completion", "is_shared"),
    [(130, 20, True), (130, 400, False), (6, 3, True)],  # a fifth of the row or less, of any
)
def test_a_prompt_is_shared_where_that_saves_enough(
    tiny_model_dir: Path, num_prompt: int, num_completion: int, is_shared: bool
) -> None:
    policy = policy_of(tiny_model_dir)
    prompt = np.full(num_prompt, 5, np.int32)
    rollout = make_rollout([6] * num_completion, 1.0)
    rows = [TrainingRow(prompt_ids=prompt, rollout=rollout, advantage=1.0)] * 2
    [(_, micro)] = policy.micro_batches(rows)
    assert micro.segments is not None
    assert len(micro.segments.lengths) == (3 if is_shared else 2)


def test_each_group_shares_its_prompt_by_its_own_lengths(tiny_model_dir: Path) -> None:
    """Groups decide on their own, and rows that share no prompt are ordered by length."""
    policy = policy_of(tiny_model_dir)

    def group(num_prompt: int, *lengths: int) -> list[TrainingRow]:
        prompt = np.full(num_prompt, 5, np.int32)
        return [
            TrainingRow(prompt_ids=prompt, rollout=make_rollout([6] * each, 1.0), advantage=1.0)
            for each in lengths
        ]

    rows = [*group(4, 90, 60), *group(20, 9, 5, 9), *group(30, 64, 34)]
    [(indices, micro)] = policy.micro_batches(rows)
    assert indices == [2, 4, 3, 0, 5, 1, 6]
    assert micro.segments is not None
    assert micro.segments.lengths == (20, 8, 8, 4, 93, 93, 63, 63)
    assert micro.segments.prefixes == ((), *[((0, 20),)] * 3, *[()] * 4)


@pytest.mark.parametrize("rows", ["packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filled_rows_train_the_same(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: str
) -> None:
    """Filling tokens count in no metric."""
    monkeypatch.setattr(row_sizes, "SIZES_PER_OCTAVE", (1,))  # to the next power of two
    monkeypatch.setattr(row_sizes, "filled_size", partial(filled_size, per_octave=1))
    groups = stale_groups()
    monkeypatch.setattr(policy, "_fills", lambda _: "nothing")
    plain = make_trainer(tiny_model_dir, rows, dtype=dtype)
    monkeypatch.setattr(policy, "_fills", lambda _: "rows")
    filled = make_trainer(tiny_model_dir, rows, dtype=dtype)
    expected_gradient, expected = pass_of(plain, groups)
    samples = filled.prepare(groups).samples
    [(_, micro)] = filled.policy.micro_batches(samples, whole_groups=True)
    assert micro.num_filled > 10 or len(micro.input_ids) > len(samples)
    assert micro.input_ids.numel().bit_count() == 1
    gradient, metrics = pass_of(filled, groups)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for name, value in expected.items():
        if not name.startswith(("perf/", "time/")):
            assert metrics[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    speeds = [trainer.step(groups).speed for trainer in (filled, plain)]
    num_seen = [each["perf/scored_tokens_per_s"] / each["perf/tokens_per_s"] for each in speeds]
    assert num_seen[0] == pytest.approx(num_seen[1], rel=1e-12)
    if dtype == torch.float32:
        for name, tensor in expected_gradient.items():
            assert torch.allclose(gradient[name], tensor, atol=1e-6), name


@pytest.mark.parametrize("rows", ["packed", "padded"])
@pytest.mark.parametrize("whole_groups", [True, False])
def test_rows_of_ever_new_lengths_reach_the_model_in_few_shapes(
    tiny_model_dir: Path, rows: str, *, whole_groups: bool
) -> None:
    """Each new shape leaves code and buffers in memory."""
    trainer = make_trainer(tiny_model_dir, rows, dtype=torch.bfloat16, micro_batch_tokens=1000)
    generator = np.random.default_rng(0)
    shapes: set[torch.Size] = set()
    lengths = set()
    for _ in range(200):
        samples = [
            TrainingRow(
                prompt_ids=np.full(generator.integers(1, 30), 3, np.int32),
                rollout=make_rollout([3] * generator.integers(1, 60), 1.0),
                advantage=1.0,
                group_index=number // 4,
            )
            for number in range(generator.integers(1, 40))
        ]
        found = trainer.policy.micro_batches(samples, whole_groups=whole_groups)
        for indices, micro in found:
            shapes.add(micro.input_ids.shape)
            lengths.add(sum(samples[index].num_inputs for index in indices))
            assert rows == "packed" or micro.input_ids.shape[1] <= 128, "it has no more positions"
    # 16 from each power of two to the next, up to the bound, and fewer below 16 tokens.
    assert len({shape.numel() for shape in shapes}) <= 16 * 6 + 16
    assert len(lengths) > 200


def test_only_a_cpu_in_16_bits_fills_rows_and_attends_in_float32(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only there each new length leaves code and buffers in memory."""
    attended: list[torch.dtype] = []

    def watched(query: Tensor, *others: Any, **how: Any) -> Tensor:
        attended.append(query.dtype)
        return scaled_dot_product_attention(query, *others, **how)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    for dtype, fills in ((torch.float32, False), (torch.bfloat16, True)):
        trainer = make_trainer(tiny_model_dir, "packed", dtype=dtype)
        micro_batches = trainer.policy.micro_batches(trainer.prepare(stale_groups()).samples)
        assert any(micro.num_filled for _, micro in micro_batches) is fills
        trainer.step(stale_groups())
    assert set(attended) == {torch.float32}


def test_a_model_that_does_not_share_prompts_rightly_keeps_them_apart(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_the_left(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        size = query.shape[2]  # another alignment than the last key with the last query
        how |= {"attn_mask": None, "is_causal": True}
        return scaled_dot_product_attention(query, key[:, :, :size], value[:, :, :size], **how)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", at_the_left)
    policy = policy_of(tiny_model_dir)
    assert policy.is_packed
    assert not policy.can_share_prompts


def test_each_micro_batch_says_whether_it_is_computed_again(tiny_model_dir: Path) -> None:
    """It depends on the tokens of the micro-batch, and the numbers are the same."""
    groups = stale_groups()
    plain = make_trainer(tiny_model_dir, "packed", micro_batch_tokens=60)
    micro_batches = plain.policy.micro_batches(plain.prepare(groups).samples)
    sizes = [micro.input_ids.numel() for _, micro in micro_batches]
    bound = min(sizes)
    num_larger = sum(size > bound for size in sizes)
    assert 0 < num_larger < len(sizes)
    trainer = make_trainer(
        tiny_model_dir,
        "packed",
        micro_batch_tokens=60,
        gradient_checkpointing=True,
        recompute_above=bound,
    )
    assert trainer.describe_rows().endswith(f"in the backward pass of more than {bound} tokens")
    calls: list[int] = []
    layer = trainer.policy.model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    (gradient, _), (expected, _) = pass_of(trainer, groups), pass_of(plain, groups)
    assert len(calls) == 2 * (len(sizes) + num_larger)  # a pass, and the step
    for name, tensor in expected.items():
        assert torch.allclose(gradient[name], tensor, atol=3e-7), name


@pytest.mark.slow
def test_checkpointing_keeps_segments_apart_too(tiny_model_dir: Path) -> None:
    groups = stale_groups()
    plain, checkpointed = (
        pass_of(make_trainer(tiny_model_dir, "packed", gradient_checkpointing=value), groups)
        for value in (False, True)
    )
    for name, tensor in plain[0].items():
        assert torch.allclose(checkpointed[0][name], tensor, atol=3e-7), name


COMPILED: Mapping[str, Mapping[str, Any]] = {
    "packed": {},
    "padded": {},
    "checkpointed": {"gradient_checkpointing": True},
    "inputs offloaded": {"gradient_checkpointing": "offload"},
    "adapter": {"lora": {"rank": 4, "alpha": 8}},
    "reference": {"loss": ReferenceKlLoss(loss=make_loss("grpo"), coef=0.1)},
}
"""Options by the name of a way to train compiled layers."""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("way", COMPILED)
def test_compiled_layers_have_the_bits_of_others(
    way: str, make_tiny_model: Callable[..., Path]
) -> None:
    """Without the option, the compiler rounds less often, and differs by .03 nats and 3 %."""
    shape = {"num_hidden_layers": 3, "head_dim": 16, "initializer_range": 0.1}
    model_dir = make_tiny_model(**shape)
    options: dict[str, Any] = {"dtype": torch.bfloat16, **COMPILED[way]}
    if way == "reference":
        options["reference"] = ModelSource(model_dir=make_tiny_model(seed=1, **shape))
    if "lora" in options:
        options["lora"] = Lora(base_dir=model_dir, **options["lora"])
    rows = "padded" if way == "padded" else "packed"
    eager = make_trainer(model_dir, rows, **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = make_trainer(model_dir, rows, compile_layers=True, **options)
    for groups in (make_groups(6), make_groups(4)):  # rows of two lengths
        for one, other in zip(compiled.forward(groups), eager.forward(groups), strict=True):
            assert all(map(np.array_equal, one, other))
        (gradient, _), (wanted, _) = (pass_of(each, groups) for each in (compiled, eager))
        assert gradient.keys() == wanted.keys()
        differs = [name for name, tensor in wanted.items() if not gradient[name].equal(tensor)]
        assert not differs
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_layers_that_cannot_be_compiled_run_as_they_are(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("there is no C++ compiler\nat all")

    monkeypatch.setattr(compiling._OneNotice, "_is_logged", False)

    monkeypatch.setattr(
        torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=fail)
    )
    caplog.set_level("INFO")
    groups = stale_groups()
    torch._dynamo.reset()
    trainer = make_trainer(tiny_model_dir, "packed", compile_layers="auto")
    expected = make_trainer(tiny_model_dir, "packed").forward(groups)
    for one, other in zip(trainer.forward(groups), expected, strict=True):
        assert all(map(np.array_equal, one, other))
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 1
    assert told[0].startswith("layers cannot be compiled and run as they are: ")
    assert "no C++ compiler" in told[0]
    assert "\n" not in told[0]
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"no C\+\+ compiler"):
        make_trainer(tiny_model_dir, "packed", compile_layers=True).forward(groups)


@pytest.mark.parametrize(
    ("asked", "device", "num_steps", "compiles"),
    [
        ("auto", "cuda", 20, "auto"),
        ("auto", "cuda", 19, False),
        ("auto", "cpu", 1000, False),
        (True, "cpu", 1, True),
        (False, "cuda", 1000, False),
    ],
)
def test_layers_are_compiled_on_gpus_in_runs_that_are_long_enough(
    monkeypatch: pytest.MonkeyPatch,
    asked: Literal["auto"] | bool,
    device: str,
    num_steps: int,
    compiles: Literal["auto"] | bool,
) -> None:
    monkeypatch.setattr(policy, "pick_device", lambda _: device)
    monkeypatch.setattr(policy, "pick_dtype", lambda *_: torch.bfloat16)
    section = LearnerSection(compile_layers=asked)
    made = policy.learner_compute(
        section, ModelSection(name="m"), OptimizerSection(), seed=0, num_steps=num_steps
    )
    assert made.compile_layers == compiles


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("family", cases(LEAKING, ("recurrent_gemma",)))
def test_an_architecture_that_leaks_is_named_or_padded(family: str, tmp_path: Path) -> None:
    settings, why = LEAKING[family]
    config = AutoConfig.for_model(family, **{**SMALL, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    fault = packing.find_packing_fault(model, torch.float32, torch.float32, set())
    assert fault is not None
    assert re.search(why, fault)
    assert model.config._attn_implementation == "sdpa"


def test_products_in_16_bits_are_packed_too(tiny_model_dir: Path) -> None:
    policy = policy_of(tiny_model_dir, dtype=torch.bfloat16)
    assert policy.describe_rows() == "Qwen3ForCausalLM is trained on packed rows"


def test_policy_and_reference_share_their_rows(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter([None, "it leaks"])  # of the policy and of the reference
    find = packing.find_packing_fault
    monkeypatch.setattr(packing, "find_packing_fault", lambda *args: next(faults) or find(*args))
    loss = ReferenceKlLoss(loss=make_loss("grpo"), coef=0.1)
    reference = ModelSource(model_dir=tiny_model_dir)
    trainer = fast_trainer(tiny_model_dir, loss=loss, reference=reference)
    assert trainer.describe_rows() == (
        "Qwen3ForCausalLM is trained on padded rows: the reference shares them, and "
        "Qwen3ForCausalLM is trained on padded rows: it leaks"
    )
    assert trainer.step(stale_groups()).metrics["kl/reference"] == pytest.approx(0.0, abs=1e-9)


def test_a_model_that_leaks_is_trained_padded(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "find_packing_fault", lambda *_: "it leaks")
    rows = "Qwen3ForCausalLM is trained on padded rows: "
    assert policy_of(tiny_model_dir).describe_rows() == f"{rows}it leaks"
    eager = policy_of(tiny_model_dir, attn_implementation="eager")
    assert eager.describe_rows().startswith(f'{rows}model.attn_implementation = "eager"')
