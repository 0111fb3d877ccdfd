"""Fixtures shared by all tests: a model small enough to run anywhere, in a real one's format."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

pytest_plugins = ["tests.cpu_time", "tests.other_warnings"]

EXIT_TIMEOUT_S = 120

# What is imported and collected stays: to look for garbage in it takes a fifth of the time.
gc.disable()

# Tests run beside each other, and so does what they start: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test fetches a model: without a network each question to the hub is asked again for 20 s.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Each run tries other examples; the seed in its head makes it try the same ones again.
hypothesis.settings.register_profile("ordinary", deadline=None, max_examples=20)
hypothesis.settings.register_profile("all", deadline=None, max_examples=300)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what CONTRIBUTING tells of: `--all`; and what `tests/promises/plants.py` tells of."""
    parser.addoption("--all", action="store_true", help="run the long matrices and plants, too")
    parser.addoption("--plant", help="break the product as this promise's plant says")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples hypothesis tries, and which: the same ones in every process."""
    hypothesis.settings.load_profile("all" if config.getoption("--all") else "ordinary")
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 32))


def pytest_report_header(config: pytest.Config) -> str:
    """Tell how to try the same examples again."""
    return f"examples: --hypothesis-seed={config.option.hypothesis_seed}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Tell it once more beside what failed."""
    if terminalreporter.getreports("failed"):
        terminalreporter.write_line(pytest_report_header(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `--all` runs."""
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("matrix")]
        if left_out:
            items[:] = [item for item in items if item not in left_out]
            config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Spare every full collection of garbage what has been imported, which takes half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Show what keeps Python from its end, and fail, where a test left a thread that never ends.

    No limit of a test holds after the last one, and Python joins the threads of every pool. Those
    of pytest-xdist have to wait for the slowest, which then ends them.
    """
    if hasattr(config, "workerinput") or sys.__stderr__ is None:
        return
    faulthandler.dump_traceback_later(EXIT_TIMEOUT_S, exit=True, file=sys.__stderr__)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the quickstart's model with random weights and its tokenizer; do not write to it."""
    from echo.engine.model import build_model, save_tiny_model

    directory = tmp_path_factory.mktemp("models") / "random"
    save_tiny_model(directory, build_model(seed=0))
    return directory


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a small Qwen3 checkpoint (config.json, safetensors).

    Without arguments it is the 100,736-parameter model of the quickstart: vocabulary 32, tied
    embeddings, token ids <pad> 0, <bos> 1, <eos> 2. Keyword arguments override Qwen3Config fields;
    `seed` fixes the weights. torch is imported only when a test asks for a model.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def make(*, seed: int = 0, **overrides: object) -> Path:
        settings: dict[str, Any] = {
            "vocab_size": 32,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "initializer_range": 0.04,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **overrides,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(Qwen3Config(**settings))
        directory = tmp_path_factory.mktemp("tiny_model")
        model.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(make_tiny_model: Callable[..., Path]) -> Path:
    """Return the directory of the tiny quickstart-sized Qwen3; treat it as read-only."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Path:
    """Return the directory of a pretrained model of 135M parameters; treat it as read-only.

    `--all` makes it, as the quickstart does, which downloads 93 MB and takes half a minute. Other
    runs take it where it has been made.
    """
    from echo.core.errors import EchoError
    from echo.core.extras import models_directory
    from echo.engine.pretrained import NAME, make_smollm2

    directory = models_directory().absolute()
    if not (pytestconfig.getoption("--all") or (directory / NAME).is_dir()):
        pytest.skip("SmolLM2 has not been made here: --all or the quickstart's --model smollm2 do")
    try:
        return make_smollm2(directory, show=print)
    except EchoError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Undo what a command that ran in this process did to the loggers."""
    names = ["", *logging.root.manager.loggerDict]
    loggers = [logging.getLogger(name) for name in names if not name or name.startswith("echo")]
    before = [(log, log.handlers[:], log.propagate, log.level) for log in loggers]
    yield
    after = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    before += [
        (log, [], True, 0) for log in after if log.name.startswith("echo") and log not in loggers
    ]
    for log, handlers, propagate, level in before:
        for handler in log.handlers:
            if handler not in handlers and log is not logging.root:
                handler.close()
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)
