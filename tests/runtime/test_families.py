"""Every family of the table: the learner, the transformers engine, and back."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from echo.config.load import parse_config
from echo.config.memory.models import PACKED, read_model_facts
from echo.core.errors import ConfigError
from echo.engine.engine import Engine
from echo.engine.hf.engine import TransformersEngine
from echo.engine.lora import Lora, export_adapter
from echo.engine.model import (
    load_directory,
    load_towers,
    model_class,
    read_tensors,
    shapes_in,
)
from echo.engine.weights import save_safetensors, tensors_from_image
from echo.runtime.learner.setup import export_directory
from tests.runtime.families import (
    FAMILIES,
    IN_EVERY_RUN,
    make_trainer,
    publish,
    save_family,
    table,
    train_one_step,
)

torch.set_num_threads(1)

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def cases(kept: tuple[str, ...]) -> list[Any]:
    only_all = [pytest.mark.matrix]
    return [pytest.param(name, marks=[] if name in kept else only_all) for name in FAMILIES]


def assert_same_bits(engine: Engine, tensors: Mapping[str, Tensor]) -> None:
    assert isinstance(engine, TransformersEngine)
    own = engine.model.state_dict()
    for name, tensor in tensors.items():
        expected = tensor.to(own[name].dtype)
        assert torch.equal(own[name].view(torch.uint8), expected.view(torch.uint8)), name


def test_the_memory_budget_knows_which_families_share_a_row() -> None:
    assert set(PACKED) == {name for name, family in FAMILIES.items() if not family.padded}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(IN_EVERY_RUN))
def test_a_step_goes_to_the_transformers_engine_and_back(name: str, tmp_path: Path) -> None:
    family, model_dir = FAMILIES[name], save_family(tmp_path, name)
    trainer = make_trainer(name, model_dir)
    rows = f"padded rows: {family.padded}" if family.padded else "packed rows"
    assert trainer.describe_rows().endswith(f"is trained on {rows}")
    facts = read_model_facts(model_dir)  # for the memory budget, which has a table of its own
    assert facts.shares_prompts is not bool(family.padded)
    assert facts.has_head_norms or not any(".q_norm." in key for key in trainer.tensors())
    engine = TransformersEngine(model_dir)
    assert engine.takes_patches
    assert engine.model.config.get_text_config()._attn_implementation == family.attention
    is_told = "eager attention takes its place" in trainer.describe_rows()
    assert is_told == (family.attention == "eager")
    train_one_step(trainer, engine, check=assert_same_bits)
    # The same where the engine's weights are the memory of the image, and round what they compute.
    coarse = TransformersEngine(model_dir, dtype="bfloat16")
    train_one_step(trainer, coarse, check=assert_same_bits, tolerance=math.inf)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern")  # peft's, as ours does
@pytest.mark.parametrize("name", cases(IN_EVERY_RUN[:1]))
def test_an_adapter_goes_there_and_back(name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed: bin/echo-setup --extra lora")
    from peft import PeftModel

    family, model_dir = FAMILIES[name], save_family(tmp_path, name)
    lora = Lora(base_dir=model_dir, rank=4, alpha=8)
    if family.lora:
        with pytest.raises(ConfigError, match=family.lora):
            make_trainer(name, model_dir, lora)
        lora = replace(lora, target_modules=family.lora_targets)
    trainer = make_trainer(name, model_dir, lora)
    engine = TransformersEngine(model_dir, lora=lora)
    train_one_step(trainer, engine, dtype="float32")
    export_adapter(tmp_path / "final", {}, trainer.tensors(), lora, base_name=str(model_dir))
    whole = model_class(AutoConfig.from_pretrained(model_dir))
    base = whole.from_pretrained(model_dir, attn_implementation=family.attention)
    read = PeftModel.from_pretrained(base, tmp_path / "final").eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        theirs, ours = (
            each(input_ids=ids, use_cache=False).logits for each in (read, engine.model)
        )
    assert torch.allclose(theirs, ours, atol=1e-5)


@pytest.mark.parametrize("name", cases(IN_EVERY_RUN))
def test_files_are_read_under_the_names_of_memory_and_written_under_their_own(
    name: str, tmp_path: Path
) -> None:
    model_dir = save_family(tmp_path / "hub", name)
    trainer = make_trainer(name, model_dir)
    tensors = trainer.tensors()
    read = load_directory(model_dir, "bfloat16")
    assert read.keys() == tensors.keys()
    for key, tensor in read.items():
        assert torch.equal(tensor.float(), tensors[key].float()), key
    final = tmp_path / "final"
    data: Any = SimpleNamespace(model_dir=model_dir, lora=None)
    specs, image = publish(trainer, "bfloat16")
    published: Any = SimpleNamespace(tensors=lambda: tensors_from_image(specs, memoryview(image)))
    export_directory(parse_config({}), data, final, published)
    written = dict(read_tensors(final))
    for key, tensor in read_tensors(model_dir):
        assert torch.equal(written[key].float(), tensor), key
    assert written.keys() == shapes_in(model_dir).keys()
    joined = tmp_path / "joined"
    shutil.copytree(model_dir, joined, ignore=shutil.ignore_patterns("*.safetensors"))
    save_safetensors(joined, read)
    again = load_directory(joined, "bfloat16")
    assert all(torch.equal(tensor, read[key]) for key, tensor in again.items())
    assert again.keys() == read.keys()


def test_a_tower_is_neither_trained_nor_published_nor_sampled_with(tmp_path: Path) -> None:
    model_dir = save_family(tmp_path, "qwen2_5_vl")
    tower = load_towers(model_dir)
    assert all(name.startswith("model.visual.") for name in tower)
    assert tower
    engine = TransformersEngine(model_dir)
    for names in (
        make_trainer("qwen2_5_vl", model_dir).tensors(),
        load_directory(model_dir, "bfloat16"),
        engine.model.state_dict(),
    ):
        assert not names.keys() & tower.keys()
    assert not load_towers(save_family(tmp_path / "text", "qwen3"))


def test_experts_are_grouped_products_and_routers_have_no_loss_of_their_own(tmp_path: Path) -> None:
    model = make_trainer("qwen3_moe", save_family(tmp_path, "qwen3_moe")).policy.model
    assert model.config._experts_implementation == "grouped_mm"
    assert not model.config.output_router_logits


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), (
        "docs/models.md: replace its table with what `python -m tests.runtime.families` prints"
    )
