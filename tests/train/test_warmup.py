"""Warm-ups by shortened recipes with a wider range: the real ones take half a minute."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from echo.core.errors import ConfigError, EngineError, StorageError
from echo.tasks.builtin import AdditionTask, CountdownTask
from echo.tasks.tokenization import load_tokenizer
from echo.train.models import warmup
from echo.train.models.warmup import RECIPES, WarmModel, WarmupRecipe

pytestmark = pytest.mark.slow

SHORT = replace(
    RECIPES["addition"], num_steps=6, batch_size=16, min_pass_rate=0.0, max_pass_rate=1.0
)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SHORT)
    monkeypatch.setattr(warmup, "NUM_FINAL_PROMPTS", 8)
    monkeypatch.setattr(warmup, "NUM_PROGRESS_PROMPTS", 4)
    monkeypatch.setattr(warmup, "PROGRESS_PERIOD", 3)


def make_warm_model(name: str, directory: Path, **settings: Any) -> WarmModel:
    return warmup.make_warm_model(name, directory, **{"task": AdditionTask(), **settings})


class View:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int, float, float | None]] = []

    def show(self, step: int, num_steps: int, loss: float, pass_rate: float | None) -> None:
        self.seen.append((step, num_steps, loss, pass_rate))


def use(monkeypatch: pytest.MonkeyPatch, recipe: WarmupRecipe) -> None:
    monkeypatch.setitem(RECIPES, "addition", recipe)


def test_progress_is_told_and_the_result_is_found_again(tmp_path: Path) -> None:
    view = View()
    torch.set_num_threads(2)
    first = make_warm_model("addition", tmp_path, seed=0, view=view)
    seen = view.seen
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)  # tests that follow in this process count their CPU time
    assert [(step, total) for step, total, _, _ in seen] == [(i, 6) for i in range(1, 7)]
    assert seen[-1][2] < seen[0][2]
    assert [rate is None for *_, rate in seen] == [True, True, False, False, False, False]
    assert AutoModelForCausalLM.from_pretrained(first.path).num_parameters() == 100_736
    assert load_tokenizer(first.path).eos_token == "<eos>"
    assert make_warm_model("addition", tmp_path, seed=0, view=(again := View())) == first
    assert again.seen == [], "trained again"
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]
    # The same seed gives the same weights.
    other = make_warm_model("addition", tmp_path / "other", seed=0)
    weights = [(each.path / "model.safetensors").read_bytes() for each in (first, other)]
    assert weights[0] == weights[1]


class Reversed(AdditionTask):
    def draw(self, rng: random.Random) -> tuple[str, str]:
        prompt, demonstration = super().draw(rng)
        return prompt, demonstration[::-1]


def test_all_that_it_is_made_from_is_part_of_the_name_and_no_version_of_a_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def name(task: AdditionTask | None = None, seed: int = 0, head_dim: int = 16) -> str:
        return warmup._recipe_hash("addition", task or AdditionTask(), seed, head_dim)

    first = name()
    assert len({first, name(seed=1), name(Reversed()), name(head_dim=32)}) == 4
    monkeypatch.setattr("transformers.configuration_utils.__version__", "99.0")
    assert name() == first
    use(monkeypatch, replace(SHORT, learning_rate=1e-3))
    assert name() != first


@pytest.mark.parametrize(
    ("bounds", "totals"),
    [
        ((0.9, 1.0), {6, 7, 8}),
        pytest.param((-2.0, -1.0), {6, 5, 4}, marks=pytest.mark.matrix),
    ],
)
def test_out_of_range_is_tried_again_with_other_steps_and_then_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bounds: tuple[float, float],
    totals: set[int],
) -> None:
    use(monkeypatch, replace(SHORT, min_pass_rate=bounds[0], max_pass_rate=bounds[1]))
    view = View()
    with pytest.raises(EngineError, match=r"did not end in the range.*seed 7.*seed 8.*seed 9"):
        make_warm_model("addition", tmp_path, seed=7, view=view)
    assert {num_steps for _, num_steps, *_ in view.seen} == totals
    assert not list(tmp_path.iterdir())


def test_countdown_has_a_recipe_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "countdown", replace(SHORT, num_steps=1))
    assert make_warm_model(
        "countdown", tmp_path, task=CountdownTask(), seed=0
    ).path.name.startswith("countdown-")


def test_other_tasks_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gsm8k'; there is one for addition, countdown.*model"):
        make_warm_model("gsm8k", tmp_path, seed=0)


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, replace(SHORT, num_steps=1))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file.*could not be written"):
        make_warm_model("addition", tmp_path / "file" / "cache", seed=0)


def test_the_bytes_of_a_result_are_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure must not leave an empty warmup.json under the name of a whole model."""
    use(monkeypatch, replace(SHORT, num_steps=1))
    synced: list[str] = []

    def sync(path: Path) -> None:
        assert path.parent == tmp_path or path.parent.parent == tmp_path
        synced.append(path.name)

    monkeypatch.setattr(warmup, "sync_path", sync)
    made = make_warm_model("addition", tmp_path, seed=0)
    *files, directory = synced
    assert set(files) == {path.name for path in made.path.iterdir()} >= {"warmup.json"}
    assert directory.startswith(f"{made.path.name}."), "it had another name"


def test_the_learning_rate_rises_stays_and_falls() -> None:
    recipe = RECIPES["countdown"]
    rates = [recipe.learning_rate_at(step, 400) for step in (1, 50, 200, 281, 341, 400)]
    assert rates == pytest.approx([6e-5, 3e-3, 3e-3, 3e-3, 1.5e-3, 2.5e-5], rel=1e-3)
