"""Waits for the device: none within a micro-batch, three in an update, and few operations.

Helpers come from test_trainer.py. A CPU plays a device that the host has to wait for: operations
that would read a value of a tensor are counted.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from echo.algo.losses import EntropyBonusLoss, ReferenceKlLoss, make_loss
from echo.engine.lora import Lora
from echo.kernels import logprob
from echo.train.models.masters import Masters
from echo.train.models.policy import ModelSource
from echo.train.step import StepError
from tests.train.test_trainer import assert_close, change_of, gradients, make_groups
from tests.train.test_trainer_losses import LOSSES, stale_groups
from tests.train.trainers import fast_trainer


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
    groups = make_groups(8)
    batch = trainer.prepare(groups)  # of numbers that no device has seen
    monkeypatch.setattr(trainer, "prepare", lambda _: batch)
    num_micro_batches = len(list(trainer.policy.micro_batches(batch.samples)))
    assert num_micro_batches > 2
    counts: Counter[str] = Counter()
    with Reads(counts), Shapes(counts):
        trainer.step(groups)
    if way == "8bit":
        counts["_local_scalar_dense"] -= 4  # numbers of the update, which the host computes
    if way == "padded":
        # transformers looks whether the positions of a row without a mask begin again in it.
        counts["_local_scalar_dense"] -= num_micro_batches
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
