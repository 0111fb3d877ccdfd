"""Waits for the device: none within a micro-batch, three in an update, and few operations.

Two ways to update wait more often, and are not counted. With `optimizer.state = "offloaded"`, each
tensor and its gradient come to the host and the tensor goes back: three copies that are waited for.
With `batch.minibatches_per_step` above 1, weights and moments are first copied into pageable memory
of the host, each shard with a wait.

Helpers come from test_trainer.py. A CPU plays a device that the host has to wait for: operations
that would read a value of a tensor are counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from echo.algo import batching
from echo.algo.loss import needs_of
from echo.algo.losses import EntropyBonusLoss, ReferenceKlLoss, make_loss
from echo.engine.lora import Lora
from echo.kernels import adamw_8bit, logprob
from echo.kernels.adamw_8bit import Update
from echo.train import optimizer
from echo.train.models import attention, packing
from echo.train.models.activations import checkpoint_offloaded
from echo.train.models.attention import VARLEN
from echo.train.models.masters import Masters
from echo.train.models.policy import ModelSource
from echo.train.step import StepError
from tests.train.test_compiled_layers import varlen_attn
from tests.train.test_likely_ids import likely_groups
from tests.train.test_trainer import assert_close, change_of, gradients, make_groups
from tests.train.test_trainer_losses import LOSSES, stale_groups
from tests.train.trainers import FAST, fast_trainer


@pytest.fixture
def waiting_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "host_waits", lambda _: True)


class Shapes(TorchDispatchMode):
    """Counts results that depend on a tensor's numbers, also where autograd's own code asks."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._counts = counts

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        if by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select"):
            self._counts[name] += 1
        return function(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts what takes numbers out of a tensor without an operation."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `new_tensor` copies a number to the device, and waits until it is there.
        if function.__name__ in ("cpu", "numpy", "tolist", "new_tensor"):
            self._counts[function.__name__] += 1
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts all operations."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._counts = counts

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "slice", "select", "expand", "unsqueeze", "squeeze",
    "detach", "alias", "as_strided", "permute", "split", "unbind", "lift_fresh", "reshape",
}  # fmt: skip
"""Operations that launch nothing."""
MAX_COPIES = 14
"""To the device, for a micro-batch: one for each of its tensors, from pinned memory."""
MAX_OF_A_LAYER = 180
"""Operations of a Qwen3 layer, not compiled, for a micro-batch forward and backward."""
MAX_OF_THE_REST = 260
"""Of embedding, head in torch's backend, loss and metrics."""
MAX_OF_AN_UPDATE = 20
ONE_UPDATE = {
    "tolist": 1,  # the loss, the metrics, and the mismatch of each group
    "_local_scalar_dense": 1,  # the norm; a GPU is waited for at the end of the update, too
}
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"loss": loss} for name, loss in LOSSES.items()},
    "entropy": {"loss": EntropyBonusLoss(loss=make_loss("gspo"), coef=0.01)},
    "reference": {"loss": ReferenceKlLoss(loss=make_loss("grpo"), coef=0.1)},
    "bfloat16": {"dtype": torch.bfloat16},
    "adapter": {"dtype": torch.bfloat16},
    "checkpointed": {"gradient_checkpointing": True},
    "padded": {"packs": False},
    "8bit": {"optimizer_state": "8bit"},
}


IN_EVERY_RUN = ("grpo", "m2po", "sapo", "bfloat16", "padded")


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[] if way in IN_EVERY_RUN else pytest.mark.matrix) for way in WAYS],
)
@pytest.mark.slow
def test_no_micro_batch_waits_and_an_update_three_times_at_most(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, waiting_device: None, way: str
) -> None:
    options = dict(WAYS[way])
    if way == "reference":
        options["reference"] = ModelSource(model_dir=tiny_model_dir)
    if way == "adapter":
        options["lora"] = Lora(base_dir=tiny_model_dir, rank=4, alpha=8)
    trainer = fast_trainer(tiny_model_dir, micro_batch_tokens=24, **options)
    groups = likely_groups(8) if needs_of(trainer.loss).likely_ids else make_groups(8)
    batch = trainer.prepare(groups)  # of numbers that no device has seen
    monkeypatch.setattr(trainer, "prepare", lambda _: batch)
    num_micro_batches = len(list(trainer.policy.micro_batches(batch.samples)))
    assert num_micro_batches > 2
    counts: Counter[str] = Counter()
    with Reads(counts), Shapes(counts):
        trainer.step(groups)
    if way == "8bit":
        counts["_local_scalar_dense"] -= 4  # numbers of the update, which the host computes
    assert counts == ONE_UPDATE


def test_scores_are_read_behind_the_pass(tiny_model_dir: Path, waiting_device: None) -> None:
    trainer = fast_trainer(tiny_model_dir, micro_batch_tokens=24)
    seen: list[str] = []

    class Order(Counter[str]):
        def __setitem__(self, name: str, count: int) -> None:
            seen.append(name)

    layer = trainer.policy.model.model.layers[0].mlp
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    with Reads(Order()):
        trainer.forward(make_groups(8))
    num_passes = seen.count("forward")
    assert num_passes > 2
    assert set(seen[:num_passes]) == {"forward"}
    assert "cpu" in seen[num_passes:]


@pytest.mark.slow
def test_rows_without_a_gradient_change_nothing_where_they_stay(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that the host would wait for computes them; others drop them."""
    groups = stale_groups(tiny_model_dir)
    options = {"loss": make_loss("grpo", clip_low=0.01, clip_high=0.01)}
    dropped = gradients(fast_trainer(tiny_model_dir, **options), groups)
    monkeypatch.setattr(logprob, "host_waits", lambda _: True)
    assert_close(gradients(fast_trainer(tiny_model_dir, **options), groups), dropped)


def test_ids_of_another_vocabulary_are_found_on_the_host(
    tiny_model_dir: Path, waiting_device: None
) -> None:
    """On a GPU they would end the process."""
    trainer = fast_trainer(tiny_model_dir)
    [group] = make_groups(1)
    strange = np.full(group.rollouts[1].num_tokens, 32, np.int32)
    with pytest.raises(StepError, match=r"token ids span 1\.\.32, outside .* vocabulary of 32"):
        trainer.forward([change_of(group, 1, token_ids=strange)])


def num_launched(operations: Counter[str]) -> int:
    return sum(count for name, count in operations.items() if name not in VIEWS)


@pytest.mark.slow
def test_launches_and_copies_of_a_micro_batch_and_of_an_update_are_bounded(
    make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of packed rows as on a GPU, in 16 bits. More groups or tensors add nothing to them."""
    given, moved = packing.arguments, Counter[str]()
    monkeypatch.setattr(batching, "_moved", lambda tensor, _: moved.update(["copies"]) or tensor)
    in_passes: dict[int, float] = {}
    in_updates: list[int] = []
    for num_layers in (2, 3):
        model_dir = make_tiny_model(num_hidden_layers=num_layers)
        trainer = fast_trainer(model_dir, dtype=torch.bfloat16, micro_batch_tokens=24)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "varlen_attn", varlen_attn)
            patch.setattr(packing, "arguments", lambda segments, _: given(segments, VARLEN))
            batch = trainer.prepare(make_groups(8))
            number = len(list(trainer.policy.micro_batches(batch.samples)))
            moved.clear()
            operations: Counter[str] = Counter()
            with Operations(operations):
                trainer.forward_backward(batch, trainer.loss)
        assert moved["copies"] <= MAX_COPIES * number
        in_passes[num_layers] = num_launched(operations) / number
        operations = Counter()
        with Operations(operations):
            trainer.optim_step(FAST)
        in_updates.append(num_launched(operations))
    of_a_layer = in_passes[3] - in_passes[2]
    assert of_a_layer <= MAX_OF_A_LAYER
    assert in_passes[2] - 2 * of_a_layer <= MAX_OF_THE_REST
    assert max(in_updates) <= MAX_OF_AN_UPDATE, in_updates


@pytest.mark.slow
def test_an_update_of_8_bit_moments_launches_one_kernel_a_tensor(
    make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. More tensors launch nothing else."""
    launched: list[torch.Size] = []

    def launch(weights: Tensor, *_: Any, **__: Any) -> None:
        launched.append(weights.shape)

    kernels = SimpleNamespace(launch_update=launch)
    monkeypatch.setitem(sys.modules, "echo.kernels.triton_adamw_8bit", kernels)
    update = partial(adamw_8bit.update_weights, backend="triton")
    monkeypatch.setattr(optimizer, "update_weights", update)
    numbers = Counter[str]()
    with Operations(numbers):
        Update.of(1, learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.0, epsilon=1e-8)
    clipped = replace(FAST, max_grad_norm=1e-6)
    others: list[int] = []
    for num_layers in (2, 3):
        model_dir = make_tiny_model(num_hidden_layers=num_layers)
        trainer = fast_trainer(model_dir, optimizer_state="8bit")
        for _ in range(2):  # the first makes the tables of codes
            trainer.forward_backward(trainer.prepare(make_groups(2)), trainer.loss)
            launched.clear()
            operations: Counter[str] = Counter()
            with Operations(operations):
                trainer.optim_step(clipped)
        assert len(launched) == 7 * num_layers + 1  # and the embedding
        others.append(num_launched(operations) - num_launched(numbers))
    assert others[0] == others[1] <= MAX_OF_AN_UPDATE, operations


def test_masters_are_rounded_by_one_operation() -> None:
    """With the bytes that one copy of each parameter gives."""
    model = torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(20)))
    masters = Masters(model, torch.bfloat16)
    pairs = [(weight, masters.of(weight)) for weight in model.parameters()]
    with torch.no_grad():
        for _, master in pairs:
            master.add_(torch.randn(master.shape))
    operations: Counter[str] = Counter()
    with Operations(operations):
        masters.round()
    assert operations == {"_foreach_copy_": 1}
    assert all(torch.equal(weight, master.to(torch.bfloat16)) for weight, master in pairs)


def test_offloaded_inputs_are_copied_without_a_wait() -> None:
    """Torch's own hook would wait in each layer until the device has computed its input."""
    is_waited_for: list[bool] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function.overloadpacket.__name__ == "copy_":
                is_waited_for.append(len(args) < 3 or not args[2])
            return function(*args, **(kwargs or {}))

    layer = torch.nn.Linear(3, 3)
    inputs = torch.ones(2, 3, requires_grad=True)
    with Copies():  # type: ignore[no-untyped-call] # torch's
        checkpoint_offloaded(layer, inputs).sum().backward()
    assert is_waited_for == [False]
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, layer.weight.sum(0).expand(2, 3))
