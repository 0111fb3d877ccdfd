"""The trainer as the configuration describes it, at the start and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echo.algo.losses import ReferenceKlLoss
from echo.config.load import parse_config
from echo.config.schema import Config
from echo.core.errors import DataError
from echo.core.rollout import Lineage
from echo.engine.model import build_model, save_tiny_model
from echo.runtime.learner.resume import StartingPoint
from echo.runtime.learner.setup import build_loss, build_trainer
from echo.train.trainer import Trainer
from tests.engine.test_trainer import make_group

START = StartingPoint(lineages=(Lineage(1, 0),))


def make_config(model_dir: Path, **sections: dict[str, Any]) -> Config:
    table = {
        "model": {"name": str(model_dir)},
        "learner": {"device": "cpu", "num_threads": 1},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
        **sections,
    }
    return parse_config(table, role="learner")


def pull(trainer: Trainer) -> float:
    """The mean penalty of a step."""
    return trainer.step([make_group([1, 0], 2), make_group([1, 1], 1)]).metrics["kl/reference"]


def test_there_is_no_reference_unless_it_is_asked_for(model_dir: Path) -> None:
    config = make_config(model_dir)
    assert not isinstance(build_loss(config), ReferenceKlLoss)
    trainer = build_trainer(config, model_dir, START)
    assert trainer._reference is None
    assert "kl/reference" not in trainer.step([make_group([1, 0], 2)]).metrics


def test_the_reference_stays_at_the_start_also_after_a_resume(
    model_dir: Path, tmp_path: Path
) -> None:
    config = make_config(model_dir, reference={"kl_coef": 0.1})
    trainer = build_trainer(config, model_dir, START)
    assert pull(trainer) == pytest.approx(0.0, abs=1e-9)
    moved = pull(trainer)
    assert moved > 1e-5
    trainer.save_state(tmp_path)
    expected = pull(trainer)
    resumed = StartingPoint(lineages=(Lineage(1, 0),), step=2, checkpoint=tmp_path)
    assert pull(build_trainer(config, model_dir, resumed)) == expected


def test_another_start_is_another_reference(model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_tiny_model(other, build_model(seed=3))
    # From the other weights, pulled to those of the start: nothing yet.
    config = make_config(model_dir, reference={"kl_coef": 0.1}, learner={"init_from": str(other)})
    assert pull(build_trainer(config, model_dir, START)) == pytest.approx(0.0, abs=1e-9)
    # From the model's own weights, pulled to the others.
    config = make_config(model_dir, reference={"kl_coef": 0.1, "name": str(other)})
    assert pull(build_trainer(config, model_dir, START)) > 1e-3


def test_it_is_frozen(model_dir: Path) -> None:
    config = make_config(model_dir, reference={"kl_coef": 0.1})
    trainer = build_trainer(config, model_dir, START)
    assert trainer._reference is not None
    before = {n: t.clone() for n, t in trainer._reference.tensors().items()}
    pull(trainer)
    assert trainer._reference.parameters() == {}
    assert all(torch.equal(t, before[n]) for n, t in trainer._reference.tensors().items())


def test_groups_without_an_advantage_count_where_there_is_a_pull(model_dir: Path) -> None:
    equal = make_group([1, 1], 1)
    plain = build_trainer(make_config(model_dir), model_dir, START)
    assert plain.refusal(equal) == "zero_variance"
    config = make_config(model_dir, reference={"kl_coef": 0.1})
    assert build_trainer(config, model_dir, START).refusal(equal) is None


def test_a_reference_with_another_vocabulary_is_refused(
    model_dir: Path, make_tiny_model: Any
) -> None:
    other = make_tiny_model(vocab_size=48)
    config = make_config(model_dir, reference={"kl_coef": 0.1, "name": str(other)})
    with pytest.raises(DataError, match="48 token ids, the one being trained 32"):
        build_trainer(config, model_dir, START)
