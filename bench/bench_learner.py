"""Time the learner's step on random weights of a model's real shape, beside a plain one.

    step      the trainer on packed rows, where long prompts are shared, on packed rows with each
              rollout apart, and on padded rows; the same step written plainly with transformers;
              and TRL's own loss with its own optimizer, if TRL is installed; in turns in one
              process: tokens per second and per CPU second, model FLOPs utilization, seconds by
              part, peak memory
    profile   where the time of the trainer's step on packed rows goes on a CPU, by kind of work
    exact     log-probabilities of packed and of padded rows against padded rows in float32,
              family by family
    balance   share of all ranks' time that is used, by way of making micro-batches; a calculation
    memory    what --dry-run reckons with, beside what a step takes of a GPU, or without one beside
              what torch's tracker counts of the step on tensors without memory (fake_step.py)
    publish   the same step alone and with a version published after each, as a run does: made while
              the step waits, brought from a GPU, coded and hashed beside the next one; and the host
              memory of each process. By itself one process; several where torchrun starts them

Weights are random, so nothing is downloaded. Lengths: `lognormal` has completions of 1 000 tokens
in the mean after prompts of --prompt-tokens, `full` fills each micro-batch with one rollout,
`countdown` is the second small task with its demonstrations.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from learner.fake_step import peak_bytes
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from echo.algo.balance import balanced_rounds
from echo.algo.batching import pack_micro_batches
from echo.algo.losses import GrpoLoss
from echo.config.load import parse_config
from echo.config.memory import Footprint, ModelFacts
from echo.core.errors import EchoError
from echo.core.rollout import Group, PolicyVersion, Rollout
from echo.engine.lora import Lora
from echo.engine.model import build_tokenizer
from echo.engine.weights import VersionImages, save_safetensors
from echo.runtime.learner.publish import Coder, Images, Publication, make_publication
from echo.tasks.task import load_task
from echo.train.batch import AdvantageSettings
from echo.train.optimizer import KINDS
from echo.train.policy import Compute, ModelSource
from echo.train.ranks import AnyTrainer, Crew, Launch, LeadTrainer, follow, join
from echo.train.trainer import OptimizerSettings, Trainer
from echo.weights.delta import block_bytes_of
from echo.weights.store import Transfer

GROUP_SIZE = 8
PROMPT_TOKENS = 200
BETAS = (0.9, 0.95)


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
WINDOW = {"sliding_window": 5}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": WINDOW,
    "phi3": WINDOW,
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo3": WINDOW | MIXED,
    "gemma3_text": WINDOW | MIXED | {"query_pre_attn_scalar": 16},
    "qwen3_moe": EXPERTS,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=PARTS, default="step")
    parser.add_argument("--model", choices=MODELS, default="Qwen3-0.6B")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step, about")
    parser.add_argument(
        "--lengths", choices=("lognormal", "full", "countdown"), default="lognormal"
    )
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=["packed", "padded", "plain"],
        help="what is timed, in turns",
    )
    parser.add_argument(
        "--checkpointing", nargs="?", const=True, default=False, choices=("offload",)
    )
    parser.add_argument(
        "--last-version",
        choices=("gpu", "host"),
        default="gpu",
        help="where `publish` keeps it, if the weights are on a GPU",
    )
    parser.add_argument("--optimizer", nargs="+", choices=KINDS, default=["float32"])
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter; 0: all weights")
    parser.add_argument("--layers", type=int, help="of the model in memory; all unless given")
    parser.add_argument("--compile", action="store_true", help="the trainer's decoder layers")
    parser.add_argument("--liger", nargs="*", choices=LIGER_PARTS, default=(), help="on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=5, help="timed ones, after two")
    parser.add_argument("--rows", type=int, default=512, help="of balance")
    parser.add_argument("--ranks", type=int, help="of balance, 8, and of memory, 1")
    parser.add_argument("--threads", type=int, default=0, help="of torch on a CPU; 0 for all cores")
    arguments = harness.parse(parser, model="tiny", tokens=1024, micro_batches=2, steps=2)
    transformers_logging.set_verbosity_error()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.dtype = arguments.dtype or ("bfloat16" if "cuda" in arguments.device else "float32")
    arguments.ranks = arguments.ranks or {"balance": 8}.get(arguments.part, 1)
    peers = PEERS & set(arguments.ways) if arguments.part == "step" else set()
    if arguments.lora and (arguments.part == "memory" or peers):
        parser.error(f"memory and {', '.join(sorted(PEERS))} are of all weights, without --lora")
    if arguments.liger:
        use_liger(arguments.liger)
    rows = PARTS[arguments.part](arguments)
    if int(os.environ.get("RANK", 0)):
        return
    for row in rows:
        print("  ".join(f"{key} {_shown(value)}" for key, value in row.items()), flush=True)
    settings = vars(arguments) | device_of(arguments.device) | versions_of_peers(arguments)
    result = {"settings": settings, "rows": rows}
    print(harness.save(result_name(arguments, rows), result))
    if any("failed" in row and row.get("way") not in PEERS for row in rows):
        raise SystemExit(1)


def result_name(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """Return the name of the result, in which are the options that have results of their own."""
    if arguments.part == "memory":
        return f"learner_memory_{arguments.model}_{arguments.tokens}x{arguments.ranks}".lower()
    if arguments.part == "publish":
        place = "_host" if arguments.last_version == "host" else ""
        place = "_sharded" if "RANK" in os.environ and rows[0]["ranks"] == 1 else place
        return f"learner_publish_{arguments.model}_{rows[0]['ranks']}ranks{place}".lower()
    if arguments.part == "balance":
        return f"learner_balance_{arguments.rows}x{arguments.tokens}"
    if arguments.part == "exact":
        return "learner_exact"
    name = f"learner_{arguments.part}_{arguments.model}_{arguments.lengths}".lower()
    others = {
        f"p{arguments.prompt_tokens}": arguments.prompt_tokens != PROMPT_TOKENS,
        "checkpointed": arguments.checkpointing is True,
        "offloaded": arguments.checkpointing == "offload",
        f"lora{arguments.lora}": arguments.lora > 0,
        "compiled": arguments.compile,
        "liger": bool(arguments.liger),
        "trl": "trl" in arguments.ways,
    }
    return "_".join([name, *(other for other, is_on in others.items() if is_on)])


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def device_of(device: str) -> dict[str, Any]:
    if "cuda" not in device:
        return {"num_threads": torch.get_num_threads()}
    return {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}


def versions_of_peers(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the versions of what this measurement alone needs."""
    used = {
        "trl": "trl" in arguments.ways,
        "liger-kernel": bool(arguments.liger),
        "torchao": "8bit" in arguments.optimizer,
    }
    return {name: metadata.version(name) for name, is_used in used.items() if is_used}


# --- what is trained on ---------------------------------------------------------------------------


def rollout(token_ids: Sequence[int], reward: float, rng: random.Random) -> Rollout:
    size = len(token_ids)
    logprobs = [-rng.expovariate(1.0) for _ in range(size)]
    return Rollout(
        token_ids=np.array(token_ids, dtype=np.int32),
        sampler_logprobs=np.array(logprobs, dtype=np.float32),
        policy_versions=np.tile(np.array([1, 0], dtype=np.int32), (size, 1)),
        completion_mask=np.ones(size, dtype=np.bool_),
        reward=reward,
        finish_reason="stop",
    )


def make_groups(arguments: argparse.Namespace, vocab_size: int, seed: int = 0) -> list[Group]:
    """Return about as many tokens as the micro-batches hold; half of each group is right."""
    rng = random.Random(seed)
    draw = countdown(rng) if arguments.lengths == "countdown" else noise(arguments, vocab_size, rng)
    groups: list[Group] = []
    left = arguments.tokens * arguments.micro_batches
    while True:
        prompt, completions = next(draw)
        left -= sum(len(prompt) + len(ids) - 1 for ids in completions)
        if left < 0 and groups:
            return groups
        groups.append(
            Group(
                group_id=len(groups),
                attempt=0,
                worker_id="bench",
                prompt_ids=np.array(prompt, dtype=np.int32),
                rollouts=tuple(
                    rollout(ids, float(n % 2), rng) for n, ids in enumerate(completions)
                ),
            )
        )


Drawn = Iterator[tuple[list[int], list[list[int]]]]


def noise(arguments: argparse.Namespace, vocab_size: int, rng: random.Random) -> Drawn:
    """Yield prompts and completions of random tokens; of `full` ones two make a group."""
    limit = arguments.tokens - arguments.prompt_tokens + 1
    is_full = arguments.lengths == "full"
    scale = min(1.0, arguments.tokens / 8192)  # for a look at small budgets
    while True:
        lengths = [
            limit
            if is_full
            else max(1, min(limit, round(scale * 1000 * math.exp(rng.gauss(-0.405, 0.9)))))
            for _ in range(2 if is_full else GROUP_SIZE)
        ]
        prompt = [rng.randrange(vocab_size) for _ in range(arguments.prompt_tokens)]
        yield prompt, [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def countdown(rng: random.Random) -> Drawn:
    task: Any = load_task("countdown", {})
    tokenizer = build_tokenizer()
    while True:
        prompt, _ = task.demonstration(rng)
        texts = [task.demonstration(rng)[1] for _ in range(GROUP_SIZE)]
        ids = [[*tokenizer(text)["input_ids"][1:], 2] for text in texts]
        yield tokenizer(prompt)["input_ids"], ids


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


def config_in(directory: str, model: str) -> Any:
    settings = dict(MODELS[model])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.save_pretrained(directory)
    return config


# --- a step ---------------------------------------------------------------------------------------


Step = Callable[[list[Group]], dict[str, float]]


def trainer_step(arguments: argparse.Namespace, packing: str, **options: Any) -> Step:
    """Return a step of the trainer; it tells its own speed."""
    trainer = make_trainer(arguments, packing, None, **options)
    print(trainer.describe_rows(), flush=True)
    return lambda groups: trainer.step(groups).speed


def make_trainer(
    arguments: argparse.Namespace,
    packing: str,
    crew: Crew | None,
    *,
    state: str = "",
    share_prompts: bool = False,
) -> Trainer:
    """Return a trainer of random weights, the same ones on all ranks."""
    with tempfile.TemporaryDirectory() as directory:
        config = config_in(directory, arguments.model)
        device = torch.device(arguments.device) if crew is None else crew.device
        weights = RandomWeights(config, str(device))
        return Trainer(
            source_of(arguments, Path(directory), weights),
            Compute(
                device=device,
                ranks=None if crew is None else crew.ranks,
                dtype=getattr(torch, arguments.dtype),
                micro_batch_tokens=arguments.tokens,
                packing=packing,  # type: ignore[arg-type]
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


def plain_step(arguments: argparse.Namespace) -> Step:
    """Return the step as one would write it: padded rows, whole logits, autocast, fused AdamW."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    with tempfile.TemporaryDirectory() as directory:
        config = config_in(directory, arguments.model)
        with device:
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if arguments.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-6, betas=BETAS, weight_decay=0.0, fused=True
    )

    def step(groups: list[Group]) -> dict[str, float]:
        began_at = time.perf_counter()
        rows = [(group, member) for group in groups for member in group.rollouts]
        lengths = [len(group.prompt_ids) + member.num_tokens for group, member in rows]
        total = sum(member.num_tokens for _, member in rows)
        for indices in pack_micro_batches(lengths, max_tokens=arguments.tokens):
            width = max(lengths[index] for index in indices)
            ids = torch.zeros((len(indices), width), dtype=torch.int64)
            sampled = torch.zeros((len(indices), width - 1))
            weight = torch.zeros((len(indices), width - 1))
            for row, index in enumerate(indices):
                group, member = rows[index]
                first, end = len(group.prompt_ids), lengths[index]
                ids[row, :first] = torch.from_numpy(group.prompt_ids)
                ids[row, first:end] = torch.from_numpy(member.token_ids)
                sampled[row, first - 1 : end - 1] = torch.from_numpy(member.sampler_logprobs)
                weight[row, first - 1 : end - 1] = member.reward - 0.5
            ids, sampled, weight = ids.to(device), sampled.to(device), weight.to(device)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            logprobs = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
            ratio = torch.where(weight != 0, logprobs - sampled, 0.0).exp()
            clipped = torch.minimum(ratio * weight, ratio.clamp(0.8, 1.28) * weight)
            (-clipped.sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        step_s = time.perf_counter() - began_at
        return {"perf/tokens_per_s": (sum(lengths) - len(rows)) / step_s}

    return step


def trl_step(arguments: argparse.Namespace) -> Step:
    """Return the same step by TRL's GRPOTrainer: its loss, its backward, its clip, its optimizer.

    It is given rows in place of those that it would sample, of similar length together as `plain`
    has them, and so many at once as micro-batches hold.
    """
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as directory:
        config = config_in(directory, arguments.model)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        settings = GRPOConfig(
            output_dir=directory,
            report_to=[],
            use_cpu="cuda" not in arguments.device,
            bf16=arguments.dtype == "bfloat16",
            gradient_checkpointing=bool(arguments.checkpointing),
            num_generations=2,
            per_device_train_batch_size=2,
            max_completion_length=arguments.tokens,
            loss_type="dapo",  # divides by all tokens, as the others here
            epsilon_high=0.28,
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            optim="adamw_torch_fused",
        )
        trainer: Any = GRPOTrainer(
            model=model,
            reward_funcs=lambda **_: [],
            args=settings,
            train_dataset=Dataset(
                InMemoryTable.from_pydict({"prompt": ["1 + 1"]}), fingerprint="of nothing"
            ),
            processing_class=build_tokenizer(),
        )
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.current_gradient_accumulation_steps = settings.steps_per_generation
    model.train()

    def step(groups: list[Group]) -> dict[str, float]:
        began_at = time.perf_counter()
        rows = [(group, member) for group in groups for member in group.rollouts]
        lengths = [len(group.prompt_ids) + member.num_tokens for group, member in rows]
        total = torch.tensor(sum(member.num_tokens for _, member in rows), device=arguments.device)
        for indices in pack_micro_batches(lengths, max_tokens=arguments.tokens):
            batch = trl_batch([rows[index] for index in indices], arguments.device)
            loss = trainer.compute_loss(model, {**batch, "num_items_in_batch": total})
            trainer.accelerator.backward(loss)
        trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if "cuda" in arguments.device:
            torch.cuda.synchronize()
        step_s = time.perf_counter() - began_at
        return {"perf/tokens_per_s": (sum(lengths) - len(rows)) / step_s}

    return step


def trl_batch(rows: Sequence[tuple[Group, Rollout]], device: str) -> dict[str, Tensor]:
    """Return rows as TRL has them: prompts padded on the left, completions on the right."""
    prompt_width = max(len(group.prompt_ids) for group, _ in rows)
    width = max(member.num_tokens for _, member in rows)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    sizes = (prompt_width, prompt_width, width, width)
    batch = {
        name: torch.zeros((len(rows), size), dtype=torch.int64)
        for name, size in zip(names, sizes, strict=True)
    }
    sampled = torch.zeros((len(rows), width))
    for row, (group, member) in enumerate(rows):
        first, end = prompt_width - len(group.prompt_ids), member.num_tokens
        batch["prompt_ids"][row, first:] = torch.from_numpy(group.prompt_ids)
        batch["prompt_mask"][row, first:] = 1
        batch["completion_ids"][row, :end] = torch.from_numpy(member.token_ids)
        batch["completion_mask"][row, :end] = 1
        sampled[row, :end] = torch.from_numpy(member.sampler_logprobs)
    batch["old_per_token_logps"] = sampled
    batch["advantages"] = torch.tensor([member.reward - 0.5 for _, member in rows])
    return {name: tensor.to(device) for name, tensor in batch.items()}


def use_liger(parts: Sequence[str]) -> None:
    """Have Liger's kernels take the place of these parts of every Qwen3 that is built."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    chosen = {part: part in parts for part in LIGER_PARTS}
    apply_liger_kernel_to_qwen3(**chosen, cross_entropy=False, fused_linear_cross_entropy=False)


LIGER_PARTS = ("rope", "rms_norm", "swiglu")
PEERS = {"plain", "trl"}
WAYS: Mapping[str, Callable[[argparse.Namespace], Step]] = {
    "packed": lambda arguments: trainer_step(arguments, "packed", share_prompts=True),
    "apart": lambda arguments: trainer_step(arguments, "packed"),
    "padded": lambda arguments: trainer_step(arguments, "padded"),
    "plain": plain_step,
    "trl": trl_step,
}


def time_steps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time each way in turns, on a CPU; on a GPU, where two models may not fit, one by one.

    One that fails there is a row, and the others go on: whole logits may not fit where chunks do.
    """
    vocab_size = MODELS[arguments.model]["vocab_size"]
    batches = [make_groups(arguments, vocab_size, seed) for seed in range(2)]
    if "cuda" not in arguments.device:
        return _timed(arguments, {way: WAYS[way](arguments) for way in arguments.ways}, batches)
    rows: list[dict[str, Any]] = []
    for way in arguments.ways:
        failed = ""
        try:
            rows += _timed(arguments, {way: WAYS[way](arguments)}, batches)
        except (EchoError, RuntimeError) as error:  # out of memory is one of these
            failed = first_line(error)
        if failed:  # the error, whose frames hold the model, is gone
            rows.append({"way": way, "failed": failed})
        free_gpu()
    return rows


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def free_gpu() -> None:
    """Let go of the model that was; those of others are found by a collection alone."""
    gc.collect()
    torch.cuda.empty_cache()


def _timed(
    arguments: argparse.Namespace, steps: Mapping[str, Step], batches: Sequence[list[Group]]
) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, float]]] = {way: [] for way in steps}
    for number in range(2 + arguments.steps):
        groups = batches[number % len(batches)]
        num_tokens = sum(
            len(group.prompt_ids) + member.num_tokens - 1
            for group in groups
            for member in group.rollouts
        )
        for way, step in steps.items():
            if "cuda" in arguments.device:
                torch.cuda.reset_peak_memory_stats()
            cpu_at, began_at = time.process_time(), time.perf_counter()
            speed = dict(step(groups))
            speed["step_s"] = time.perf_counter() - began_at
            speed["rollout_tokens_per_s"] = num_tokens / speed["step_s"]
            speed["tokens_per_cpu_s"] = num_tokens / (time.process_time() - cpu_at)
            if "cuda" in arguments.device:
                speed["perf/peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            if number >= 2:
                found[way].append(speed)
    rows: list[dict[str, Any]] = []
    for way, speeds in found.items():
        row: dict[str, Any] = {"way": way, "num_steps": len(speeds)}
        for name in speeds[0]:
            row[name] = statistics.median(speed[name] for speed in speeds)
        rates = [speed["perf/tokens_per_s"] for speed in speeds]
        row["perf/tokens_per_s_spread"] = [min(rates), max(rates)]
        rows.append(row)
    return rows


# --- where a step's time goes ---------------------------------------------------------------------


KINDS_OF_WORK = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product",),
    "copies and gathers": ("aten::copy_", "aten::cat", "aten::index", "aten::embedding"),
    "elementwise and sums": ("aten::",),
    "autograd": ("",),
}
"""By how the names of operations begin; the first that fits."""


def profile_step(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Tell the share of each kind of operation in the time of a step; what is left is Python's."""
    vocab_size = MODELS[arguments.model]["vocab_size"]
    batches = [make_groups(arguments, vocab_size, seed) for seed in range(2)]
    step = trainer_step(arguments, "packed", share_prompts=True)
    for groups in batches:
        step(groups)
    began_at = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number in range(arguments.steps):
            step(batches[number % len(batches)])
        spent_s = time.perf_counter() - began_at
    seconds = dict.fromkeys([*KINDS_OF_WORK, "python and numpy"], 0.0)
    for event in profile.key_averages():
        kinds = KINDS_OF_WORK.items()
        kind = next(kind for kind, begins in kinds if event.key.startswith(begins))
        seconds[kind] += event.self_cpu_time_total / 1e6
    seconds["python and numpy"] = spent_s - sum(seconds.values())
    return [
        {"kind": kind, "ms_per_step": 1e3 * each / arguments.steps, "share": each / spent_s}
        for kind, each in seconds.items()
    ]


# --- exactness ------------------------------------------------------------------------------------


def compare_families(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Score random rollouts in packed and in padded rows, and once more in float32."""
    rng = random.Random(0)
    sizes = (16, 3, 40, 1, 23)
    groups = [
        Group(
            group_id=number,
            attempt=0,
            worker_id="bench",
            prompt_ids=np.array([1, *range(3, 4 + number)], dtype=np.int32),
            rollouts=tuple(
                rollout([rng.randrange(3, 32) for _ in range(size)], 0.0, rng) for _ in range(2)
            ),
        )
        for number, size in enumerate(sizes)
    ]
    rows: list[dict[str, Any]] = []
    for family, settings in FAMILIES.items():
        scores = {
            (packing, dtype): _scores(family, settings, packing, dtype, arguments.device, groups)
            for packing in ("packed", "padded")
            for dtype in {"float32", arguments.dtype}
        }
        truth = scores["padded", "float32"]
        row: dict[str, Any] = {"family": family}
        for (packing, dtype), values in sorted(scores.items()):
            difference = values - truth
            row[f"{packing} {dtype} rms"] = float(np.sqrt((difference**2).mean()))
            row[f"{packing} {dtype} max"] = float(np.abs(difference).max())
        rows.append(row)
    return rows


def _scores(
    family: str,
    settings: Mapping[str, Any],
    packing: str,
    dtype: str,
    device: str,
    groups: Sequence[Group],
) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**TINY, **settings})
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(directory)
        trainer = Trainer(
            ModelSource(model_dir=Path(directory)),
            Compute(
                device=torch.device(device),
                dtype=getattr(torch, dtype),
                packing=packing,  # type: ignore[arg-type]
            ),
            loss=GrpoLoss(),
            optimizer=OptimizerSettings(),
        )
        scores = trainer.forward(groups)
    return np.concatenate([row.astype(np.float64) for rows in scores for row in rows])


# --- publication ----------------------------------------------------------------------------------


CHUNK_BYTES = 1 << 20
STEPS_IN_A_ROW = 3


class MemoryWatch:
    """Most memory that processes of this machine had, private and in common, since it was asked."""

    def __init__(self, processes: Sequence[int]) -> None:
        """Watch from now on, in a thread."""
        self._paths = [Path(f"/proc/{process}/status") for process in processes]
        self._peaks = self._look()
        threading.Thread(target=self._watch, daemon=True).start()

    def take(self) -> list[dict[str, int]]:
        """Return bytes by process, and begin anew."""
        peaks, self._peaks = self._peaks, self._look()
        return peaks

    def _look(self) -> list[dict[str, int]]:
        found = []
        for path in self._paths:
            lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
            names = {"private": "RssAnon", "in_common": "RssShmem"}
            found.append({key: 1024 * int(lines[name].split()[0]) for key, name in names.items()})
        return found

    def _watch(self) -> None:
        while True:
            for peak, now in zip(self._peaks, self._look(), strict=True):
                for name, value in now.items():
                    peak[name] = max(peak[name], value)
            time.sleep(0.01)


class Publications:
    """Versions that nobody takes: made while the caller waits, coded and hashed beside it."""

    def __init__(self, trainer: AnyTrainer, images: Images) -> None:
        """Publish what a trainer has, in images that go with it."""
        self._trainer, self._images = trainer, images
        self._coder = Coder(Ed25519PrivateKey.generate(), encrypts=True, helpers=images.helpers)
        self._pool = ThreadPoolExecutor(1)
        self._held: Future[Transfer] | None = None
        parts = ("make", "arrive", "code", "seal", "wait")
        self.seconds: dict[str, list[float]] = {part: [] for part in parts}
        self.coded_bytes: list[int] = []

    def wait(self) -> Transfer | None:
        """Wait for the version before, which is then the base of the next."""
        began_at = time.perf_counter()
        base = None if self._held is None else self._held.result()
        self.seconds["wait"].append(time.perf_counter() - began_at)
        return base

    def publish(self) -> None:
        """Publish the present weights."""
        base = self.wait()
        began_at = time.perf_counter()
        made = make_publication(
            self._trainer.tensors(),
            PolicyVersion(1, self._trainer.step_count),
            run_id="bench",
            model_digest="",
            images=self._images,
            chunk_bytes=CHUNK_BYTES,
        )
        self.seconds["make"].append(time.perf_counter() - began_at)
        self._held = self._pool.submit(self._code, made, base)

    def _code(self, made: Publication, base: Transfer | None) -> Transfer:
        at = [time.perf_counter()]
        _ = made.image  # which comes from a GPU beside the step
        at.append(time.perf_counter())
        if base is not None:
            segments = self._coder.segments(made, base)
            self.coded_bytes.append(sum(len(segment.payload) for segment in segments))
        at.append(time.perf_counter())
        made = self._coder.seal(made)
        at.append(time.perf_counter())
        for part, (begin, end) in zip(("arrive", "code", "seal"), pairwise(at), strict=True):
            self.seconds[part].append(end - begin)
        number = made.manifest.num_chunks
        return Transfer(made.signed, made.manifest, made.image, bytearray(b"\1" * number), number)


def time_publication(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time steps alone and with a publication after each; on the ranks that torchrun starts."""
    crew, processes = None, [os.getpid()]
    if "RANK" in os.environ:
        crew = join(Launch.of(os.environ), torch.device(arguments.device).type)
        processes = [int(each) for each in crew.ranks.gather(str(os.getpid()).encode())]

    def build(checkpoint: Path | None) -> Trainer:
        return make_trainer(arguments, "auto", crew)

    if crew is None:
        alone = build(None)
        trainer: AnyTrainer = alone
        images: Images = VersionImages(
            "bfloat16",
            block_bytes=block_bytes_of(CHUNK_BYTES),
            is_on_device=False if arguments.last_version == "host" else None,
            copy_stream=alone.copy_stream,
        )
    elif crew.ranks.rank:
        follow(crew, build, logging.getLogger())
        return []
    else:
        trainer = LeadTrainer(crew, build, None, published_dtype="bfloat16")
        images = trainer.images
    publications, watch = Publications(trainer, images), MemoryWatch(processes)
    found, peaks = _in_turns(arguments, trainer, publications, watch)
    if crew is not None:
        crew.dismiss()
    image_bytes = 2 * sum(tensor.numel() for tensor in trainer.tensors().values())
    longer = [with_ / alone - 1 for alone, with_ in zip(*found.values(), strict=True)]
    row: dict[str, Any] = {"ranks": len(processes), "image_bytes": image_bytes}
    row |= {f"step_s_{way}": statistics.median(seconds) for way, seconds in found.items()}
    row |= {"longer_by": statistics.median(longer), "longer_by_spread": [min(longer), max(longer)]}
    for part, seconds in publications.seconds.items():
        row[f"{part}_s"] = statistics.median(seconds)
    row["coded_share"] = statistics.median(publications.coded_bytes) / image_bytes
    rows = [row]
    for rank in range(len(processes)):
        with_, alone = peaks["published"][rank], peaks["alone"][rank]
        rows.append(
            {
                "rank": rank,
                "in_common_of_image": with_["in_common"] / image_bytes,
                "private_more_of_image": (with_["private"] - alone["private"]) / image_bytes,
                "private_bytes": with_["private"],
            }
        )
    return rows


def _in_turns(
    arguments: argparse.Namespace,
    trainer: AnyTrainer,
    publications: Publications,
    watch: MemoryWatch,
) -> tuple[dict[str, list[float]], dict[str, list[dict[str, int]]]]:
    """Return seconds of a step, and the most memory of each process, both ways."""
    batches = [make_groups(arguments, MODELS[arguments.model]["vocab_size"], n) for n in range(2)]
    found: dict[str, list[float]] = {"alone": [], "published": []}
    peaks: dict[str, list[dict[str, int]]] = {}
    for number in range(1 + arguments.steps):
        for way, seconds in found.items():
            trainer.step(batches[0])
            if way == "published":  # whose coding is beside the first of those that are timed
                publications.publish()
            watch.take()
            began_at = time.perf_counter()
            for count in range(STEPS_IN_A_ROW):
                trainer.step(batches[count % len(batches)])
                if way == "published":
                    publications.publish()
            step_s = (time.perf_counter() - began_at) / STEPS_IN_A_ROW
            if way == "published":
                publications.wait()
            if number:
                seconds.append(step_s)
                taken = watch.take()
                peaks[way] = [
                    {name: max(peak[name], value) for name, value in now.items()}
                    for peak, now in zip(peaks.get(way, taken), taken, strict=True)
                ]
    return found, peaks


# --- balance --------------------------------------------------------------------------------------


def use_of_ranks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Count how much of all ranks' time is worked, where each round lasts as its heaviest bin."""
    linear, square = 6 * 3.6e9, 6 * 36 * 32 * 128  # of a model with 4e9 parameters

    def work(tokens: int) -> float:
        return linear * tokens + square * tokens * tokens

    shares: dict[str, list[float]] = {"padded and sorted": [], "equal work": []}
    for seed in range(20):
        rng = random.Random(seed)
        lengths = [
            arguments.prompt_tokens + max(1, min(7992, round(900 * math.exp(rng.gauss(0, 0.9)))))
            for _ in range(arguments.rows)
        ]
        works = [work(tokens) for tokens in lengths]
        padded = [
            len(rows) * works[rows[0]]
            for rows in pack_micro_batches(lengths, max_tokens=arguments.tokens)
        ]
        rounds = balanced_rounds(
            lengths, works, max_tokens=arguments.tokens, num_ranks=arguments.ranks
        )
        equal = [sum(works[index] for index in rows) for bins in rounds for rows in bins]
        for name, bins in (("padded and sorted", padded), ("equal work", equal)):
            bins.sort(reverse=True)
            spent = sum(
                max(bins[at : at + arguments.ranks]) for at in range(0, len(bins), arguments.ranks)
            )
            shares[name].append(sum(works) / (arguments.ranks * spent))
    return [
        {"way": name, "used": statistics.fmean(found), "least": min(found)}
        for name, found in shares.items()
    ]


# --- memory ---------------------------------------------------------------------------------------


def compare_memory(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Reckon the peak of a step beside what it is, by kind of optimizer."""
    settings = dict(MODELS[arguments.model])
    if arguments.layers:
        settings["num_hidden_layers"] = arguments.layers
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    is_measured = "cuda" in arguments.device
    if is_measured and (arguments.layers or arguments.ranks > 1):
        raise SystemExit("a whole model on one GPU is measured: leave out --layers and --ranks")
    rows: list[dict[str, Any]] = []
    for state in arguments.optimizer:
        weights = RandomWeights(config, "cpu")
        reckoned = budget_of(arguments, config, weights.num_params, state)
        row: dict[str, Any] = {"optimizer": state, "on_a_gpu_gb": reckoned.on_gpu / 1e9}
        if is_measured:
            row |= _measured(arguments, state)
            free_gpu()
            if "reserved_gb" in row:
                row["reckoned/reserved"] = row["on_a_gpu_gb"] / row["reserved_gb"]
        else:
            tracked = peak_bytes(
                config,
                weights,
                tokens=arguments.tokens,
                dtype=getattr(torch, arguments.dtype),
                state=state,
                has_checkpointing=arguments.checkpointing,
                num_ranks=arguments.ranks,
            )
            row |= {"reckoned_gb": reckoned.beside_model / 1e9, "tracked_gb": tracked / 1e9}
            row["reckoned/tracked"] = reckoned.beside_model / tracked
        rows.append(row)
    return rows


def _measured(arguments: argparse.Namespace, state: str) -> dict[str, Any]:
    """Return what the second step takes of a GPU, without the last version; or why it failed."""
    groups = make_groups(arguments, MODELS[arguments.model]["vocab_size"])
    try:
        step = trainer_step(arguments, "packed", state=state)
        step(groups)
        free_gpu()  # what the first step alone has needed, such as what is compiled
        torch.cuda.reset_peak_memory_stats()
        step(groups)
    except (EchoError, RuntimeError) as error:
        return {"failed": first_line(error)}
    return {
        "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
    }


class Reckoned(NamedTuple):
    """Bytes of a step."""

    beside_model: int
    """Where the model is, with the head of a CPU."""
    on_gpu: int
    """Of a GPU: with its own head, and a reserve."""


def budget_of(arguments: argparse.Namespace, config: Any, num_params: int, state: str) -> Reckoned:
    """Return what the memory budget says."""
    checkpointing = str(arguments.checkpointing).lower()
    footprint = Footprint(
        config=parse_config(
            {},
            [
                f"learner.dtype={arguments.dtype}",
                f"learner.gradient_checkpointing={checkpointing}",
                f"learner.micro_batch_tokens={arguments.tokens}",
                f"optimizer.state={state}",
                "network.codec=full",  # no version is kept
                "eval.interval_steps=0",
                f"sampling.max_completion_tokens={arguments.tokens - PROMPT_TOKENS}",
            ],
        ),
        facts=ModelFacts(
            num_params=num_params,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            is_tied=config.tie_word_embeddings,
        ),
        prompt_tokens=PROMPT_TOKENS,
        num_ranks=arguments.ranks,
    )

    def beside_model(footprint: Footprint) -> int:
        return sum(item.num_bytes for item in footprint.learner_items() if item.is_on_gpu)

    return Reckoned(beside_model(footprint), beside_model(replace(footprint, has_gpu=True)))


PARTS: Mapping[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "step": time_steps,
    "profile": profile_step,
    "exact": compare_families,
    "balance": use_of_ranks,
    "memory": compare_memory,
    "publish": time_publication,
}


if __name__ == "__main__":
    main()
