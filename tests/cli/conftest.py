from __future__ import annotations

from pathlib import Path

import pytest

from echo.engine.model import build_model, save_tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model with its tokenizer."""
    path = tmp_path_factory.mktemp("cli") / "model"
    save_tiny_model(path, build_model(seed=0))
    return path
