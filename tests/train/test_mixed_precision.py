"""Computing in bfloat16 beside float32 weights, and losses fused with the log-probabilities.

Helpers come from test_trainer.py. The same under Triton: tests/kernels/triton_cases.py.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo.algo.corrections import MaskedLoss, RolloutMasks
from echo.algo.loss import Loss, LossInputs, LossOutput
from echo.algo.losses import make_loss
from echo.engine.lora import Lora
from echo.train.models.masters import Masters
from echo.train.trainer import Trainer
from tests.train.test_trainer import assert_close, gradients, make_groups
from tests.train.test_trainer_losses import stale_groups
from tests.train.trainers import fast_trainer

FUSED: dict[str, Loss] = {
    "grpo": make_loss("grpo"),
    "sequence_mean": make_loss("grpo", aggregation="sequence_mean"),
    "dapo": make_loss("dapo"),
    "dr_grpo": make_loss("dr_grpo", max_completion_tokens=9),
}


def make_trainer(model_dir: Path, loss: Loss, **options: Any) -> Trainer:
    return fast_trainer(model_dir, loss=loss, **options)


def unfused(loss: Loss) -> Loss:
    """The same loss behind a function, which no kernel can fuse."""

    def plain(inputs: LossInputs) -> LossOutput:
        return loss(inputs)

    return plain


def cosine(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    flat = [torch.cat([tensor.flatten() for tensor in part.values()]) for part in (one, other)]
    return float(torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0))


# ------------------------------------------------------------------------------------ fused losses


@pytest.mark.parametrize(
    "name", ["grpo", "sequence_mean", pytest.param("dapo", marks=pytest.mark.matrix), "dr_grpo"]
)
@pytest.mark.slow
def test_a_fused_loss_has_the_gradient_and_the_metrics_of_the_plain_one(
    name: str, tiny_model_dir: Path
) -> None:
    groups = stale_groups(tiny_model_dir)
    loss = FUSED[name]
    options = {"micro_batch_tokens": 60}
    fused = make_trainer(tiny_model_dir, loss, **options)
    plain = make_trainer(tiny_model_dir, unfused(loss), **options)
    assert_close(gradients(fused, groups), gradients(plain, groups))
    found = make_trainer(tiny_model_dir, loss).step(groups).metrics
    expected = make_trainer(tiny_model_dir, unfused(loss)).step(groups).metrics
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert found["clip_ratio/mean"] > 0


@pytest.mark.slow
def test_the_fused_operation_is_used_where_the_loss_has_that_form(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("logprobs", "token_losses"):
        original = getattr(make_trainer(tiny_model_dir, FUSED["grpo"]).policy.__class__, name)

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(f"echo.train.models.policy.Policy.{name}", counted)
    make_trainer(tiny_model_dir, FUSED["grpo"]).step(make_groups())
    assert calls == ["token_losses"]
    calls.clear()
    # Without a bound, with masks around it, or of another kind: log-probabilities first.
    for loss in (
        make_loss("grpo", clip_low=None),
        MaskedLoss(loss=make_loss("grpo"), masks=RolloutMasks(veto=0.1)),
        make_loss("gspo"),
    ):
        make_trainer(tiny_model_dir, loss).step(make_groups())
    assert calls == ["logprobs"] * 3


# --------------------------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("kind", ["grpo", "gepo"])
@pytest.mark.slow
def test_bfloat16_gives_nearly_the_same_gradient_in_float32(
    kind: str, tiny_model_dir: Path
) -> None:
    groups = stale_groups(tiny_model_dir)
    exact = gradients(make_trainer(tiny_model_dir, make_loss(kind)), groups)
    mixed = gradients(make_trainer(tiny_model_dir, make_loss(kind), dtype=torch.bfloat16), groups)
    assert {tensor.dtype for tensor in mixed.values()} == {torch.float32}
    assert 0.99 < cosine(exact, mixed) < 1.0 - 1e-9


def test_the_model_holds_its_masters_rounded(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model_dir, FUSED["grpo"], dtype=torch.bfloat16)
    own = dict(trainer.policy.model.named_parameters())

    def is_rounded() -> bool:
        pairs = [(own[name], tensor) for name, tensor in trainer.tensors().items()]
        return all(torch.equal(weight, master.to(torch.bfloat16)) for weight, master in pairs)

    assert {weight.dtype for weight in own.values()} == {torch.bfloat16}
    trainer.save_state(tmp_path)
    before = {name: weight.detach().clone() for name, weight in own.items()}
    for _ in range(3):
        trainer.step(make_groups())
        assert is_rounded()
    exact = [*trainer.snapshot().values(), *trainer.adapters.progress.optimizer.tensors().values()]
    assert {tensor.dtype for tensor in exact} == {torch.float32}
    assert not all(torch.equal(weight, before[name]) for name, weight in own.items())
    trainer.load_state(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in own.items())
    trainer.step(make_groups())
    undo = trainer.weights.back_up(trainer.adapters.progress.optimizer)
    trainer.step(make_groups())
    trainer.weights.restore(undo, trainer.adapters.progress.optimizer)
    assert is_rounded()


def test_it_scores_as_the_model_of_a_published_version_does(
    tiny_model_dir: Path,
) -> None:
    """Its weights have the same bits; only its attention is computed in float32 on a CPU."""
    trainer = make_trainer(tiny_model_dir, FUSED["grpo"], dtype=torch.bfloat16)
    trainer.step(make_groups())
    published = {
        name: tensor.detach().to(torch.bfloat16) for name, tensor in trainer.tensors().items()
    }
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16).eval()
    model.load_state_dict(published, strict=False)
    [group] = make_groups(1)
    [(_, micro)] = trainer.policy.micro_batches(trainer.prepare([group]).samples[:1])
    rollout, before = group.rollouts[0], len(group.prompt_ids) - 1
    ids = torch.tensor([*group.prompt_ids, *rollout.token_ids])[None, :-1]
    with torch.no_grad():
        wanted = model.base_model(ids, use_cache=False).last_hidden_state[0, before:].float()
        found = trainer.policy.predictors(micro)[0].float()
    assert float((found - wanted).norm() / wanted.norm()) < 0.01
    own = trainer.policy.model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in published.items())


def test_gradients_of_micro_batches_add_up_in_float32(tiny_model_dir: Path) -> None:
    trainer = make_trainer(tiny_model_dir, make_loss("grpo"), dtype=torch.bfloat16)
    batch = trainer.prepare(make_groups())
    for number in range(1, 4):
        trainer.forward_backward(batch, make_loss("grpo"))
        gradients = {name: tensor.grad for name, tensor in trainer.policy.parameters().items()}
        assert all(weight.grad is None for weight in trainer.policy.model.parameters())
        if number == 1:
            once = {name: grad.clone() for name, grad in gradients.items() if grad is not None}
    assert once.keys() == gradients.keys()
    # In bfloat16 three times a number is seldom exact.
    for name, grad in gradients.items():
        assert grad is not None
        assert grad.dtype == torch.float32
        assert torch.allclose(grad, 3 * once[name], rtol=1e-6)


def test_nothing_is_left_of_a_gradient_for_which_there_was_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def to(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = torch.nn.Linear(2, 1, bias=False)
    masters = Masters(model, torch.bfloat16)
    output = model(torch.ones(1, 2, dtype=torch.bfloat16)).sum()
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "to", to)
        with pytest.raises(torch.OutOfMemoryError):
            output.backward()
    assert model.weight.grad is None
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    gradient = masters.of(model.weight).grad
    assert gradient is not None
    assert gradient.tolist() == [[1.0, 1.0]]


def test_masters_go_with_their_model() -> None:
    """Otherwise a GPU would have no memory for the next model."""
    model = torch.nn.Linear(2, 1, bias=False)
    masters = Masters(model, torch.bfloat16)
    gone = [weakref.ref(tensor) for tensor in (model.weight, masters.of(model.weight))]
    del model, masters
    assert [each() for each in gone] == [None, None]


def test_what_is_not_trained_has_no_master(tiny_model_dir: Path) -> None:
    adapter = Lora(base_dir=tiny_model_dir, rank=4, alpha=8)
    trainer = make_trainer(tiny_model_dir, FUSED["grpo"], dtype=torch.bfloat16, lora=adapter)
    trainer.step(make_groups())
    assert all("lora" in name for name in trainer.tensors())
    assert {tensor.dtype for tensor in trainer.tensors().values()} == {torch.float32}
    base = [p for n, p in trainer.policy.model.named_parameters() if "lora" not in n]
    assert {weight.dtype for weight in base} == {torch.bfloat16}


def test_gradient_checkpointing_recomputes_in_the_same_type(tiny_model_dir: Path) -> None:
    groups = make_groups()
    plain = make_trainer(tiny_model_dir, FUSED["grpo"], dtype=torch.bfloat16)
    checkpointed = make_trainer(
        tiny_model_dir, FUSED["grpo"], dtype=torch.bfloat16, gradient_checkpointing=True
    )
    assert_close(gradients(checkpointed, groups), gradients(plain, groups))
