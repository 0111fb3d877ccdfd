"""Models of random weights, and trainers of them."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from echo.algo.losses import GrpoLoss
from echo.core.rollout import Group
from echo.engine.lora import Lora
from echo.engine.weights import save_safetensors
from echo.train.batch import AdvantageSettings
from echo.train.models.policy import Compute, ModelSource
from echo.train.optimizer import OptimizerSettings
from echo.train.ranks.rank_group import RankGroup
from echo.train.ranks.sharding import ALONE
from echo.train.trainer import Trainer

BETAS = (0.9, 0.95)
Step = Callable[[list[Group]], dict[str, float]]
"""Takes a step on groups, and returns its speed."""


def qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, **changes: Any
) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        **changes,
    }


TINY = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
MODELS: Mapping[str, dict[str, Any]] = {
    "tiny": {"model_type": "qwen3", **TINY},
    "small": qwen3(512, 1536, 4, 8, vocab_size=2048, num_key_value_heads=4, head_dim=64),
    "medium": qwen3(512, 1536, 8, 8, vocab_size=32768),
    "Qwen3-0.6B": qwen3(1024, 3072, 28, 16),
    "Qwen3-1.7B": qwen3(2048, 6144, 28, 16),
    "Qwen3-4B": qwen3(2560, 9728, 36, 32),
    "Qwen3-8B": qwen3(4096, 12288, 36, 32, tie_word_embeddings=False),
}


class RandomWeights(Mapping[str, Tensor]):
    """Weights of a model by name, drawn when they are asked for."""

    def __init__(self, config: Any, device: str) -> None:
        """Take the shapes of a model on no device."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        names: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), name)
        kept = set(names.values())
        state = model.state_dict().items()
        self._shapes = {name: tensor.shape for name, tensor in state if name in kept}
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        """Draw a tensor: norms at 1, others as models begin."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        return torch.randn(shape, device=self._device) * 0.02

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._shapes)

    def __len__(self) -> int:
        """Count them."""
        return len(self._shapes)

    @property
    def num_params(self) -> int:
        """Their numbers."""
        return sum(shape.numel() for shape in self._shapes.values())


def settings_of(model: str) -> dict[str, Any]:
    """Return the configuration of one of MODELS, or of a directory of Hugging Face's format."""
    if model in MODELS:
        return dict(MODELS[model])
    settings: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    return settings


def known_model(model: str) -> str:
    """Return an option that names a model.

    Raises:
        argparse.ArgumentTypeError: if there is none.
    """
    if model in MODELS or (Path(model) / "config.json").is_file():
        return model
    raise argparse.ArgumentTypeError(
        f"{model} is none of {', '.join(MODELS)}, and no directory with a config.json"
    )


def vocab_size_of(model: str) -> int:
    settings = settings_of(model)
    size: int = settings.get("text_config", settings)["vocab_size"]
    return size


def config_in(directory: str, model: str) -> Any:
    settings = settings_of(model)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.save_pretrained(directory)
    return config


def make_trainer(
    arguments: argparse.Namespace,
    packing: str,
    rank_group: RankGroup | None,
    *,
    state: str = "",
    share_prompts: bool = False,
) -> Trainer:
    """Return a trainer of random weights, the same ones on all ranks."""
    with tempfile.TemporaryDirectory() as directory:
        config = config_in(directory, arguments.model)
        device = torch.device(arguments.device) if rank_group is None else rank_group.device
        weights = RandomWeights(config, str(device))
        return Trainer(
            source_of(arguments, Path(directory), weights),
            Compute(
                device=device,
                ranks=ALONE if rank_group is None else rank_group.ranks,
                dtype=getattr(torch, arguments.dtype),
                micro_batch_tokens=arguments.tokens,
                packs=packing == "packed",
                share_prompts=share_prompts,
                gradient_checkpointing=arguments.checkpointing,
                compile_layers=arguments.compile,
                optimizer_state=state or arguments.optimizer[0],  # type: ignore[arg-type]
            ),
            loss=GrpoLoss(),
            optimizer=OptimizerSettings(learning_rate=1e-6, warmup_steps=0, betas=BETAS),
            advantages=AdvantageSettings(),
        )


def source_of(
    arguments: argparse.Namespace, directory: Path, weights: RandomWeights
) -> ModelSource:
    """Return the model of a directory with these weights; beside them an adapter, if it has one."""
    if not arguments.lora:
        return ModelSource(model_dir=directory, tensors=weights)
    # A base is read from files.
    save_safetensors(directory, {name: weights[name].bfloat16() for name in weights})
    lora = Lora(base_dir=directory, rank=arguments.lora, alpha=2 * arguments.lora)
    return ModelSource(model_dir=directory, lora=lora)


def trainer_step(arguments: argparse.Namespace, packing: str, **options: Any) -> Step:
    """Return a step of the trainer; it tells its own speed."""
    trainer = make_trainer(arguments, packing, None, **options)
    print(trainer.describe_rows(), flush=True)
    return lambda groups: trainer.step(groups).speed
