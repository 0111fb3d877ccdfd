"""The learner's step as others write it: plainly with transformers, and by TRL."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo.algo.batching import pack_micro_batches
from echo.core.rollout import Group, Rollout
from echo.engine.model import build_tokenizer
from learner.models import BETAS, Step, config_in

LIGER_PARTS = ("rope", "rms_norm", "swiglu")


Rows = list[tuple[Group, Rollout]]


def step_of(
    arguments: argparse.Namespace,
    backward: Callable[[Rows, int], None],
    update: Callable[[], None],
) -> Step:
    """Return a step that goes over micro-batches of rows, and then updates the weights.

    Args:
        arguments: of the benchmark.
        backward: adds the gradients of a micro-batch of rows, given the tokens of all of them.
        update: clips, makes the optimizer's step, and forgets the gradients.
    """

    def step(groups: list[Group]) -> dict[str, float]:
        began_at = time.perf_counter()
        rows = [(group, member) for group in groups for member in group.rollouts]
        lengths = [len(group.prompt_ids) + member.num_tokens for group, member in rows]
        total = sum(member.num_tokens for _, member in rows)
        for indices in pack_micro_batches(lengths, max_tokens=arguments.tokens):
            backward([rows[index] for index in indices], total)
        update()
        if "cuda" in arguments.device:
            torch.cuda.synchronize()
        step_s = time.perf_counter() - began_at
        return {"perf/tokens_per_s": (sum(lengths) - len(rows)) / step_s}

    return step


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

    def backward(rows: Rows, total: int) -> None:
        width = max(len(group.prompt_ids) + member.num_tokens for group, member in rows)
        ids = torch.zeros((len(rows), width), dtype=torch.int64)
        sampled = torch.zeros((len(rows), width - 1))
        weight = torch.zeros((len(rows), width - 1))
        for row, (group, member) in enumerate(rows):
            first = len(group.prompt_ids)
            end = first + member.num_tokens
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

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step_of(arguments, backward, update)


def trl_step(arguments: argparse.Namespace) -> Step:
    """Return the same step by TRL's GRPOTrainer: its loss, its backward, its clip, its optimizer.

    It is given rows in place of those that it would sample, of similar length together as `plain`
    has them, and so many at once as micro-batches hold.
    """
    trainer = trl_trainer(arguments)
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    model.train()

    def backward(rows: Rows, total: int) -> None:
        num_items = torch.tensor(total, device=arguments.device)
        batch = {**trl_batch(rows, arguments.device), "num_items_in_batch": num_items}
        trainer.accelerator.backward(trainer.compute_loss(model, batch))

    def update() -> None:
        trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step_of(arguments, backward, update)


def trl_trainer(arguments: argparse.Namespace) -> Any:
    """Return TRL's trainer of a model of random weights."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as directory:
        config = config_in(directory, arguments.model)
        return GRPOTrainer(
            model=AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"),
            reward_funcs=lambda **_: [],
            args=GRPOConfig(
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
            ),
            train_dataset=Dataset(
                InMemoryTable.from_pydict({"prompt": ["1 + 1"]}), fingerprint="of nothing"
            ),
            processing_class=build_tokenizer(),
        )


def trl_batch(rows: Rows, device: str) -> dict[str, Tensor]:
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
