"""Warm-up of a tiny model by supervised training on demonstrations.

The model is trained for a few hundred steps on a task's demonstrations and then measured on
held-out prompts. The result depends on the machine's arithmetic, so the model is accepted only if
its pass rate is in the recipe's range. Otherwise the next attempt has the next seed, and more or
fewer steps. An accepted model is stored under a hash of all its inputs.

The caller passes the task, since this layer may not import tasks. `Demonstrator` has the methods of
a task that a warm-up calls; `echo.tasks.task.GeneratedTask` implements them.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from blake3 import blake3
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from echo.core.errors import ConfigError, EngineError, StorageError
from echo.engine.engine import Completion, Request, Sampling
from echo.engine.hf.engine import TransformersEngine
from echo.engine.model import (
    CHARACTERS,
    EOS_ID,
    HEAD_DIM,
    PAD_ID,
    build_model,
    build_tokenizer,
    save_tiny_model,
    shape,
)
from echo.records.files import sync_path

FORMAT = 1
"""Version of the code below. Raise the number with each change that changes the resulting model."""

IGNORED = -100
"""Label of tokens that `cross_entropy` ignores."""

MAX_ATTEMPTS = 3
"""Number of attempts after which a warm-up fails. If three attempts fail, the recipe does not fit
the machine's arithmetic, and further attempts would only take time.
"""

STEPS_FACTOR = 1.2
"""Factor by which the number of steps grows after an attempt whose pass rate was too low."""

NUM_PROGRESS_PROMPTS = 128
"""Number of prompts for the pass rate during the training, whose standard error is at most 0.044.
"""

NUM_FINAL_PROMPTS = 512
"""Number of prompts for the pass rate that decides whether the model is accepted. Its standard
error is at most 0.022.
"""

PROGRESS_PERIOD = 50
"""Number of steps between two measurements of the pass rate."""

NUM_HASHED = 256
"""Number of demonstrations and of held-out examples that a model's hash covers."""


class WarmupView(Protocol):
    """A view that shows the progress of a warm-up."""

    def show(self, step: int, num_steps: int, loss: float, pass_rate: float | None) -> None:
        """Show a step and its loss; `pass_rate` is None before the first measurement."""


class Demonstrator(Protocol):
    """The methods of a task that a warm-up calls."""

    max_completion_tokens: int

    def demonstration(self, rng: random.Random) -> tuple[str, str]:
        """Draw a training prompt and a completion to imitate."""

    def example(self, index: int, *, split: str) -> Any:
        """Return example `index` of a split, with the key `prompt`."""

    def reward(self, example: Any, completion: str) -> float:
        """Return 1 if the completion answers the example correctly, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupRecipe:
    """All settings of a warm-up, except the seed."""

    num_steps: int
    min_pass_rate: float
    max_pass_rate: float
    batch_size: int = 24
    """Number of demonstrations in a step."""
    learning_rate: float = 3e-3
    num_warmup_steps: int = 50
    decay_share: float = 0.3
    """Share of the warm-up's steps, at its end, over which the learning rate falls to zero."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of a step; steps count from 1.

        The rate rises, then stays constant, and finally falls.
        """
        rising = step / self.num_warmup_steps
        falling = (num_steps - step + 1) / (self.decay_share * num_steps)
        return self.learning_rate * min(1.0, rising, falling)


@dataclass(frozen=True, slots=True)
class WarmModel:
    """A warmed-up model on disk, and its pass rates."""

    path: Path
    """The model's Hugging Face directory."""
    pass_rate_sampled: float
    """Share of held-out prompts that the model answers correctly at temperature 1."""
    pass_rate_greedy: float
    """Share of held-out prompts that the model answers correctly by greedy sampling."""


RECIPES = {
    # Demonstrations allow at most .47 (see echo.tasks.builtin). Below .28 the model has not learned
    # the format, and above .45 reinforcement learning has little to improve.
    "addition": WarmupRecipe(num_steps=450, min_pass_rate=0.28, max_pass_rate=0.45),
    "countdown": WarmupRecipe(num_steps=500, min_pass_rate=0.15, max_pass_rate=0.45),
}


def make_warm_model(
    task_name: str,
    directory: Path,
    *,
    task: Demonstrator,
    seed: int,
    head_dim: int = HEAD_DIM,
    view: WarmupView | None = None,
) -> WarmModel:
    """Return a warmed-up tiny model; make the model if `directory` lacks it.

    Args:
        task_name: "addition" or "countdown".
        directory: directory of warmed-up models, with one sub-directory for each recipe and seed.
        task: the task, as `load_task` builds it.
        seed: seed of the weights, the demonstrations and the measurement.
        head_dim: width of the model's attention heads.
        view: shows every step of a new warm-up; None for no view.

    Raises:
        ConfigError: if the task has no recipe.
        EngineError: if no attempt reaches the recipe's range of pass rates.
        StorageError: if the disk is full or not writable.
    """
    path = warm_model_path(task_name, directory, task=task, seed=seed, head_dim=head_dim)
    found = _read_result(path)
    if found is not None:
        return found
    with _one_thread():
        return _make(task_name, task, path, seed, head_dim, view)


def warm_model_path(
    task_name: str, directory: Path, *, task: Demonstrator, seed: int, head_dim: int = HEAD_DIM
) -> Path:
    """Return the path where `make_warm_model` puts the model.

    Raises:
        ConfigError: if the task has no recipe.
    """
    if task_name not in RECIPES:
        raise ConfigError(
            f"no warm-up for the task {task_name!r}; there is one for {', '.join(RECIPES)}. For "
            "other tasks set model.name to a model that can already answer"
        )
    return directory / f"{task_name}-{_recipe_hash(task_name, task, seed, head_dim)}"


def pass_rate(
    model: Qwen3ForCausalLM, task: Demonstrator, num_prompts: int, *, greedy: bool, seed: int
) -> float:
    """Return the share of `num_prompts` held-out prompts that the model answers correctly."""
    tokenizer = build_tokenizer()
    examples = [task.example(index, split="heldout") for index in range(num_prompts)]
    prompts = tokenizer([str(example.prompt) for example in examples])["input_ids"]
    requests = [
        Request(str(index), np.array(prompt, np.int32), seed=(seed << 32) + index)
        for index, prompt in enumerate(prompts)
    ]
    sampling = Sampling(1.0, 1.0, 0, task.max_completion_tokens, (EOS_ID,), greedy)
    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        engine = TransformersEngine(Path(directory))
    engine.load(dict(model.named_parameters()))
    completions = engine.generate(requests, sampling)
    texts = [_text_of(tokenizer, completion) for completion in completions]
    rewards = [task.reward(example, text) for example, text in zip(examples, texts, strict=True)]
    return sum(rewards) / len(rewards)


def _make(
    task_name: str,
    task: Demonstrator,
    path: Path,
    seed: int,
    head_dim: int,
    view: WarmupView | None,
) -> WarmModel:
    recipe = RECIPES[task_name]
    num_steps = recipe.num_steps
    rates = []
    for attempt in range(MAX_ATTEMPTS):
        model = build_model(seed=seed + attempt, head_dim=head_dim)
        _train(model, task, recipe, num_steps, seed + attempt, view)
        sampled = pass_rate(model, task, NUM_FINAL_PROMPTS, greedy=False, seed=seed)
        if recipe.min_pass_rate <= sampled <= recipe.max_pass_rate:
            greedy = pass_rate(model, task, NUM_FINAL_PROMPTS, greedy=True, seed=seed)
            return _write_result(path, model, WarmModel(path, sampled, greedy))
        rates.append(f"{sampled:.3f} after {num_steps} steps with seed {seed + attempt}")
        is_low = sampled < recipe.min_pass_rate
        num_steps = round(num_steps * (STEPS_FACTOR if is_low else 1 / STEPS_FACTOR))
    raise EngineError(
        f"the warm-up of {task_name} did not end in the range of pass rates "
        f"[{recipe.min_pass_rate}, {recipe.max_pass_rate}]: {'; '.join(rates)}; try another seed"
    )


def _train(
    model: Qwen3ForCausalLM,
    task: Demonstrator,
    recipe: WarmupRecipe,
    num_steps: int,
    seed: int,
    view: WarmupView | None,
) -> None:
    tokenizer, rng = build_tokenizer(), random.Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    rate: float | None = None
    for step in range(1, num_steps + 1):
        ids, labels = _demonstrations(task, tokenizer, rng, recipe.batch_size)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step, num_steps)
        optimizer.step()
        optimizer.zero_grad()
        if view is not None:
            if step % PROGRESS_PERIOD == 0:
                rate = pass_rate(model, task, NUM_PROGRESS_PROMPTS, greedy=False, seed=seed)
            view.show(step, num_steps, loss.item(), rate)


def _demonstrations(
    task: Demonstrator, tokenizer: PreTrainedTokenizerFast, rng: random.Random, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, [batch_size, longest]; prompts and padding have the label IGNORED."""
    pairs = [task.demonstration(rng) for _ in range(batch_size)]
    texts = tokenizer([prompt + completion for prompt, completion in pairs])["input_ids"]
    rows = [[*ids, EOS_ID] for ids in texts]
    ids = torch.full((batch_size, max(map(len, rows))), PAD_ID)
    labels = torch.full_like(ids, IGNORED)
    for number, (row, (prompt, _)) in enumerate(zip(rows, pairs, strict=True)):
        start = 1 + len(prompt)  # <bos>, then one token per character
        ids[number, : len(row)] = torch.tensor(row)
        labels[number, start : len(row)] = ids[number, start : len(row)]
    return ids, labels


def _text_of(tokenizer: PreTrainedTokenizerFast, completion: Completion) -> str:
    ids = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _recipe_hash(task_name: str, task: Demonstrator, seed: int, head_dim: int) -> str:
    """Return a hash of all that a model depends on, except packages and code."""
    rng = random.Random(seed)
    made_from = {
        "recipe": asdict(RECIPES[task_name]),
        "seed": seed,
        "demonstrations": [task.demonstration(rng) for _ in range(NUM_HASHED)],
        "heldout": [task.example(i, split="heldout").prompt for i in range(NUM_HASHED)],
        "shape": shape(head_dim),
        "characters": CHARACTERS,
        "format": FORMAT,
    }
    return blake3(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]


def _read_result(path: Path) -> WarmModel | None:
    try:
        rates = json.loads((path / "warmup.json").read_bytes())
    except OSError:  # no such directory; any other problem shows when the model is written
        return None
    return WarmModel(path, rates["pass_rate_sampled"], rates["pass_rate_greedy"])


def _write_result(path: Path, model: Qwen3ForCausalLM, result: WarmModel) -> WarmModel:
    """Write model and result to `path` by one rename, so that no incomplete model is visible."""
    rates = {
        "pass_rate_sampled": result.pass_rate_sampled,
        "pass_rate_greedy": result.pass_rate_greedy,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
        try:
            save_tiny_model(partial, model)
            (partial / "warmup.json").write_text(json.dumps(rates) + "\n", encoding="utf-8")
            partial.chmod(0o755)  # mkdtemp's directories are for one user only
            for file in (*partial.iterdir(), partial):
                sync_path(file)  # otherwise the name may reach the disk before the bytes
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        # Another process that warmed up the same recipe may have been first.
        found = _read_result(path)
        if found is not None:
            return found
        raise StorageError(f"{path}: the model could not be written: {error}") from error
    return result


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread, because with so small a model a second thread mostly waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
