"""Adapters by name on one base: each is trained as by a trainer of its own."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echo.algo.losses import GrpoLoss
from echo.core.errors import ConfigError, DataError, StorageError
from echo.core.rollout import PolicyVersion
from echo.engine.lora import Lora
from echo.engine.weights import VersionImages, publish_image
from echo.train.optimizer import OptimizerSettings
from echo.train.trainer import Trainer
from tests.train.test_trainer import LateStream, equal, make_groups
from tests.train.trainers import FAST, trainer_of

CODE = OptimizerSettings(
    learning_rate=1e-2, warmup_steps=4, betas=(0.8, 0.9), weight_decay=0.1, minibatches_per_step=2
)
"""Settings of the second adapter."""
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "rounded": {
        "dtype": torch.bfloat16,
        "optimizer_state": "offloaded",
        "gradient_checkpointing": True,
    },
}


def make_trainer(base_dir: Path, **options: Any) -> Trainer:
    settings = {"loss": GrpoLoss(), "optimizer": FAST, **options}
    return trainer_of(base_dir, lora=Lora(base_dir=base_dir, rank=4, alpha=8), **settings)


def make_two(base_dir: Path, **options: Any) -> Trainer:
    trainer = make_trainer(base_dir, **options)
    trainer.adapters.add("code", optimizer=CODE)
    return trainer


def tensors_of(trainer: Trainer, name: str) -> dict[str, Tensor]:
    trainer.adapters.use(name)
    return trainer.snapshot()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_in_turns_they_end_where_two_trainers_end(tiny_model_dir: Path, way: str) -> None:
    both = make_two(tiny_model_dir, **WAYS[way])
    start = tensors_of(both, "code")
    alone = {
        "default": make_trainer(tiny_model_dir, **WAYS[way]),
        "code": make_trainer(tiny_model_dir, tensors=start, optimizer=CODE, **WAYS[way]),
    }
    for seed, name in enumerate(["default", "code", "code", "default", "code"]):
        both.adapters.use(name)
        groups = make_groups(5, seed=seed)
        assert both.step(groups) == alone[name].step(groups)
        assert both.step_count == alone[name].step_count
    for name, trainer in alone.items():
        assert equal(tensors_of(both, name), trainer.snapshot()), name
        for one, other in zip(both.forward(groups), trainer.forward(groups), strict=True):
            assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.slow
def test_a_gradient_waits_for_the_update_of_its_adapter(tiny_model_dir: Path) -> None:
    both = make_two(tiny_model_dir)
    start = tensors_of(both, "code")
    alone = {
        "default": make_trainer(tiny_model_dir),
        "code": make_trainer(tiny_model_dir, tensors=start),
    }
    add_up = [("default", 0), ("code", 1), ("default", 2), ("code", 3)]
    for name, seed in add_up:
        both.adapters.use(name)
        if seed == 1:
            with pytest.raises(ConfigError, match=r"'code', has no .* one of default waits: use"):
                both.optim_step(FAST)
            assert equal(both.snapshot(), start)
        for trainer in (both, alone[name]):
            batch = trainer.prepare(make_groups(seed=seed))
            trainer.forward_backward(batch, GrpoLoss())
    for name, settings in (("default", FAST), ("code", CODE)):
        both.adapters.use(name)
        assert both.optim_step(settings) == alone[name].optim_step(settings) > 0
    for name, trainer in alone.items():
        assert equal(tensors_of(both, name), trainer.snapshot()), name
        assert all(tensor.grad is None for tensor in both.weights.parameters.values())


@pytest.mark.slow
def test_the_base_is_in_memory_once_and_stays(tiny_model_dir: Path) -> None:
    trainer = make_trainer(tiny_model_dir)
    places = {name: tensor.data_ptr() for name, tensor in trainer.policy.model.named_parameters()}
    base = {
        name: tensor.detach().clone()
        for name, tensor in trainer.policy.model.named_parameters()
        if ".lora_" not in name
    }
    flops = trainer.policy.flops
    trainer.adapters.add("code", optimizer=FAST)
    for name in ("code", "default", "code"):
        trainer.adapters.use(name)
        trainer.step(make_groups(1))
    own = dict(trainer.policy.model.named_parameters())
    assert {name: tensor.data_ptr() for name, tensor in own.items()} == places
    assert all(torch.equal(own[name], tensor) for name, tensor in base.items())
    assert trainer.policy.flops == flops


@pytest.mark.slow
def test_a_new_one_changes_nothing_yet_and_draws_nothing_of_the_others(
    tiny_model_dir: Path,
) -> None:
    trainer = make_trainer(tiny_model_dir)
    first, drawn = trainer.snapshot(), torch.get_rng_state()
    start = trainer.forward(make_groups(1))
    for name in ("code", "math"):
        trainer.adapters.add(name, optimizer=FAST)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (trainer.adapters.in_use, trainer.adapters.names) == (
        "default",
        ("code", "default", "math"),
    )
    assert equal(trainer.snapshot(), first)
    code, math_ = tensors_of(trainer, "code"), tensors_of(trainer, "math")
    np.testing.assert_array_equal(trainer.forward(make_groups(1))[0][0], start[0][0])
    for name, tensor in code.items():
        if ".lora_B." in name:
            assert not tensor.any()
            continue
        # Even, as peft draws it, up to one over the root of the inputs.
        largest = 1 / math.sqrt(tensor.shape[1])
        for other in (tensor, first[name]):
            assert 0.9 * largest < float(other.abs().max()) <= largest
        assert not torch.equal(tensor, first[name])
        assert not torch.equal(tensor, math_[name])


@pytest.mark.slow
def test_the_state_holds_all_of_them(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = make_two(tiny_model_dir)
    for name in ("default", "code", "code"):
        trainer.adapters.use(name)
        trainer.step(make_groups())
    trainer.save_state(tmp_path)
    assert trainer.adapters.in_use == "code"
    resumed = make_two(tiny_model_dir, seed=5)
    resumed.load_state(tmp_path)
    assert resumed.adapters.in_use == "default"
    # One by itself goes on, too, from files as one alone writes them.
    single = make_trainer(tiny_model_dir, optimizer=CODE, seed=6)
    single.load_state(tmp_path / "code")
    alone = tmp_path / "alone"
    alone.mkdir()
    single.save_state(alone)
    for path in (tmp_path / "code").iterdir():
        assert (alone / path.name).read_bytes() == path.read_bytes(), path.name
    for name, num_steps in (("default", 1), ("code", 2)):
        for one in (trainer, resumed):
            one.adapters.use(name)
            assert one.step_count == num_steps
        expected = trainer.step(make_groups(seed=1))
        assert resumed.step(make_groups(seed=1)) == expected
        assert equal(resumed.snapshot(), trainer.snapshot())
    assert single.step(make_groups(seed=1)) == expected
    assert equal(single.snapshot(), trainer.snapshot())


@pytest.mark.slow
def test_a_state_of_others_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for directory, trainer in (
        (one, make_trainer(tiny_model_dir)),
        (two, make_two(tiny_model_dir)),
    ):
        directory.mkdir()
        trainer.save_state(directory)
    with pytest.raises(DataError, match=r"default: load it before adapters\.add\(\)"):
        trainer.load_state(one)
    single = make_trainer(tiny_model_dir)
    with pytest.raises(DataError, match=r"holds the adapters code, default, .* has default: make"):
        single.load_state(two)
    whole = trainer_of(tiny_model_dir, loss=GrpoLoss(), optimizer=FAST)
    with pytest.raises(DataError, match="this trainer has none: make"):
        whole.load_state(two)
    (two / "code" / "weights.safetensors").unlink()
    with pytest.raises(StorageError, match="two/code: cannot read"):
        trainer.load_state(two)
    with pytest.raises(StorageError, match="nowhere: cannot read"):
        trainer.load_state(tmp_path / "nowhere")
    assert trainer.adapters.in_use == "default"


def test_what_cannot_be_is_refused(tiny_model_dir: Path) -> None:
    trainer = make_two(tiny_model_dir)
    with pytest.raises(ConfigError, match=r"'cod': .* has code, default; adapters.add\(\) adds"):
        trainer.adapters.use("cod")
    for name, complaint in (
        ("code", "'code': there is one already"),
        ("default", "'default': there is one already"),
        ("", "is of letters, digits"),
        ("../code", "is of letters, digits"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            trainer.adapters.add(name, optimizer=FAST)
    assert (trainer.adapters.in_use, trainer.adapters.names) == ("default", ("code", "default"))


def test_all_weights_have_no_adapters(tiny_model_dir: Path) -> None:
    trainer = trainer_of(tiny_model_dir, loss=GrpoLoss(), optimizer=FAST)
    assert (trainer.adapters.in_use, trainer.adapters.names) == (None, ())
    for act in (trainer.adapters.use, lambda name: trainer.adapters.add(name, optimizer=FAST)):
        with pytest.raises(ConfigError, match="trains all weights; one whose ModelSource has"):
            act("code")


def test_one_of_another_shape_is_refused(tiny_model_dir: Path) -> None:
    trainer = make_trainer(tiny_model_dir)
    own = trainer.snapshot()
    wider = {name: torch.cat([tensor, tensor]) for name, tensor in own.items()}
    for tensors, complaint in (
        (wider, r"adapter 'code': .* has shape \[8, .* another shape needs another trainer"),
        (dict(list(own.items())[2:]), "adapter 'code': weights lack 2"),
    ):
        with pytest.raises(DataError, match=complaint):
            trainer.adapters.add("code", optimizer=FAST, tensors=tensors)
    assert trainer.adapters.names == ("default",)
    given = {name: tensor + 1 for name, tensor in own.items()}
    trainer.adapters.add("code", optimizer=FAST, tensors=given)
    assert equal(tensors_of(trainer, "code"), given)
    assert equal(tensors_of(trainer, "default"), own)


def test_a_version_that_comes_down_late_is_of_the_adapter_then_in_use(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, stream = make_two(tiny_model_dir), LateStream(monkeypatch)
    trainer.weights.copy_stream = stream  # type: ignore[assignment]
    images = VersionImages("bfloat16", block_bytes=1 << 16, copy_stream=stream)  # type: ignore[arg-type]
    _, before = publish_image(trainer.tensors(), "bfloat16")
    made = images.make(trainer.tensors(), PolicyVersion(1, 0))
    trainer.adapters.use("code")
    stream.run()  # at last, had nobody waited for it
    assert made.memory == before
    assert publish_image(trainer.tensors(), "bfloat16")[1] != before


@pytest.mark.slow
def test_a_step_that_fails_is_the_affair_of_its_adapter(tiny_model_dir: Path) -> None:
    trainer = make_two(tiny_model_dir)
    trainer.forward_backward(trainer.prepare(make_groups(1)), GrpoLoss())
    trainer.adapters.use("code")
    before = trainer.snapshot()

    def nan(inputs: Any) -> Any:
        output = GrpoLoss()(inputs)
        return dataclasses.replace(output, loss=output.loss * math.nan)

    trainer.loss = nan
    with pytest.raises(DataError, match="the loss is nan"):
        trainer.step(make_groups())
    assert equal(trainer.snapshot(), before)
    trainer.loss = GrpoLoss()
    trainer.adapters.use("default")
    assert trainer.optim_step(FAST) > 0
    assert trainer.step(make_groups()).metrics["optimizer/skipped_nonfinite"] == 0
    trainer.adapters.use("code")
    assert trainer.step(make_groups()).metrics["optimizer/skipped_nonfinite"] == 1
