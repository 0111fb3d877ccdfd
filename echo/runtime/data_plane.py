"""The data plane as the learner holds it: task, tokenizer and prompts of one model directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo.config.load import inherited_settings
from echo.config.schema import Config
from echo.core.errors import ConfigError, DataError
from echo.core.units import format_bytes
from echo.engine.lora import Lora, learner_lora
from echo.engine.model import context_window, model_digests, resolve_model
from echo.runtime import wiring
from echo.runtime.prompts import PromptSource
from echo.runtime.task_setup import make_task_host
from echo.tasks import tokenization
from echo.tasks.environment import Environment
from echo.tasks.rewards import TaskHost
from echo.tasks.task import Example, Task, load_task, task_digests


@dataclass(frozen=True, slots=True)
class Data:
    """What rollouts are made from and judged by."""

    model_dir: Path
    task: Task
    host: TaskHost
    """Where its code runs."""
    prompts: PromptSource
    tokenizer: Any
    decode: Callable[[Sequence[int]], str]
    stop_ids: list[int]
    digests: dict[str, str]
    lora: Lora | None = None
    """The adapter that is trained in place of all weights."""

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding: token ids are below it."""
        fields = json.loads((self.model_dir / "config.json").read_text(encoding="utf-8"))
        return int({**fields, **fields.get("text_config", {})}["vocab_size"])

    def read_assets(self) -> dict[str, bytes]:
        """Return the files that workers may inherit.

        Raises:
            DataError: if one does not fit into a message.
        """
        files = tokenization.asset_files(self.model_dir)
        assets = {name: path.read_bytes() for name, path in files.items()}
        for name, data in assets.items():
            if len(data) > wiring.MAX_ASSET_BYTES:
                raise DataError(
                    f"{files[name]} has {format_bytes(len(data))}; files that workers inherit may "
                    f"have {format_bytes(wiring.MAX_ASSET_BYTES)}"
                )
        return assets


def load_data(config: Config) -> Data:
    """Load task and tokenizer, and check that they go together."""
    model = config.model
    model_dir = resolve_model(model.name or "", model.revision)
    settings = inherited_settings(config)
    template: str | None = settings["model.chat_template"]
    tokenizer = tokenization.load_tokenizer(model_dir, chat_template=template)
    stop_ids = tokenization.stop_ids(tokenizer, model_dir)
    task = load_task(config.task.kind, config.task.options)

    def encode(example: Example) -> list[int]:
        return tokenization.encode_prompt(
            tokenizer,
            example.prompt,
            chat_template_kwargs=config.model.chat_template_kwargs,
            tools=task.tools(example) if isinstance(task, Environment) else (),
        )

    prompts = PromptSource(
        task,
        encode=encode,
        seed=config.run.seed,
        num_examples=task.num_examples(split="train"),
        hides_answers=config.reward.where == "learner",
    )
    prompts.check()
    _check_window(config, model_dir, prompts)
    return Data(
        model_dir,
        task,
        make_task_host(config, task),
        prompts,
        tokenizer,
        lambda ids: tokenization.decode(tokenizer, ids, stop_ids),
        stop_ids,
        model_digests(config, model_dir, template) | task_digests(task),
        learner_lora(config, model_dir),
    )


def _check_window(config: Config, model_dir: Path, prompts: PromptSource) -> None:
    """Refuse a run whose first prompt leaves no room for a completion."""
    window, max_new = context_window(model_dir), config.sampling.max_completion_tokens
    num_prompt_tokens = len(prompts.lease(0, 0).prompt_ids)
    if num_prompt_tokens + max_new > window:
        raise ConfigError(
            f"the model's window holds {window} tokens; the first prompt has {num_prompt_tokens} "
            f"and sampling.max_completion_tokens = {max_new} does not fit beside it; lower it to "
            f"at most {max(1, window - num_prompt_tokens)}"
        )
