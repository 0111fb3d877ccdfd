"""Real vLLM whose steps take longer while something is to happen to a generation."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.engine.engine_contract import SLOW


@pytest.fixture(autouse=True, scope="module")
def _steps_that_can_be_slow() -> Iterator[None]:
    from vllm.v1.engine.llm_engine import LLMEngine

    step = LLMEngine.step

    def step_slowly(vllm):  # type: ignore[no-untyped-def]
        if SLOW.is_set():
            time.sleep(0.02)
        return step(vllm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLMEngine, "step", step_slowly)
        yield
