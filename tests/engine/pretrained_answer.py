"""One question that the pretrained model answers in every engine, with its own end of turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from echo.engine.engine import Engine, Request, Sampling
from echo.engine.model import load_directory
from echo.tasks.tokenization import TextCodec, load_tokenizer, stop_ids


def assert_answers(engine: Engine, model_dir: Path) -> None:
    """Install the weights, ask, and compare the likeliest answer; close the engine."""
    tokenizer = load_tokenizer(model_dir)
    text = TextCodec(tokenizer, stop_ids(tokenizer, model_dir), {})
    # The answer's first word is given: of two that are nearly as likely, rounding decides.
    begun = text.encode_prompt("What is the capital of France?") + tokenizer.encode("The")
    prompt = np.array(begun, np.int32)
    sampling = Sampling(1.0, 1.0, 0, 16, tuple(text.stop_ids), greedy=True)
    try:
        engine.load(load_directory(model_dir, "bfloat16"))
        [completion] = engine.generate([Request("0", prompt, seed=0)], sampling)
    finally:
        engine.close()
    assert text.decode(completion.token_ids.tolist()) == " capital of France is Paris."
    assert completion.finish_reason == "stop"
