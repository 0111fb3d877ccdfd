"""Lists the names that other trainers give to settings, with Echo's names.

If an unknown key is a setting of another trainer, the error names Echo's key. `python
docs/reference_pages.py names` prints this table for docs/coming-from-other-frameworks.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

FRAMEWORKS = ("TRL", "verl", "prime-rl", "slime")

OTHER_NAMES: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "train_dataset",
        "train_files",
        "",
        "prompt_data",
        '`task.options.path` with `task.kind = "dataset"`',
    ),
    ("eval_dataset", "val_files", "", "eval_prompt_data", "`task.options.heldout_path`"),
    ("", "prompt_key", "", "input_key, label_key", "`task.options.columns`"),
    ("reward_funcs", "custom_reward_function.path", "", "custom_rm_path", "`task.options.reward`"),
    ("", "", "env.id", "", '`task.options.env` with `task.kind = "verifiers"`'),
    ("use_vllm", "rollout.name", "", "", "`engine.kind`"),
    (
        "num_generations",
        "rollout.n",
        "rollouts_per_example",
        "n_samples_per_prompt",
        "`batch.group_size`",
    ),
    (
        "",
        "train_batch_size (prompts)",
        "batch_size (rollouts)",
        "rollout_batch_size (prompts)",
        "`batch.groups_per_step` (prompts)",
    ),
    (
        "per_device_train_batch_size",
        "ppo_max_token_len_per_gpu",
        "micro_batch_size",
        "max_tokens_per_gpu",
        "`learner.micro_batch_tokens`",
    ),
    (
        "steps_per_generation",
        "ppo_mini_batch_size (prompts)",
        "",
        "num_steps_per_rollout",
        "`batch.minibatches_per_step` (how many)",
    ),
    (
        "",
        "filter_groups",
        "",
        "dynamic_sampling_filter_path",
        "`batch.keep_zero_variance` (off: such groups do not count)",
    ),
    ("", "max_num_gen_batches", "", "", "`batch.max_zero_signal_batches`"),
    (
        "max_completion_length",
        "max_response_length",
        "max_tokens",
        "rollout_max_response_len",
        "`sampling.max_completion_tokens`",
    ),
    ("temperature", "temperature", "temperature", "rollout_temperature", "`sampling.temperature`"),
    (
        "top_p, top_k, min_p",
        "top_p, top_k",
        "",
        "rollout_top_p, rollout_top_k",
        "`sampling.top_p`, `sampling.top_k`, `sampling.min_p`",
    ),
    ("", "", "max_off_policy_steps", "", "`sync.max_staleness` (bounds staleness itself)"),
    ("", "trigger_parameter_sync_step", "", "update_weights_interval", "`sync.publish_period`"),
    (
        "gradient_checkpointing",
        "enable_gradient_checkpointing",
        "model.ac",
        "recompute_granularity",
        "`learner.gradient_checkpointing`",
    ),
    ("learning_rate", "optim.lr", "optim.lr", "lr", "`optimizer.learning_rate`"),
    ("warmup_steps", "lr_warmup_steps", "", "lr_warmup_iters", "`optimizer.warmup_steps`"),
    (
        "lr_scheduler_type",
        "lr_scheduler_type",
        "scheduler.type",
        "lr_decay_style",
        "`optimizer.lr_schedule`",
    ),
    ("weight_decay", "weight_decay", "weight_decay", "weight_decay", "`optimizer.weight_decay`"),
    (
        "adam_beta1, adam_beta2",
        "betas",
        "betas1, betas2",
        "adam_beta1, adam_beta2",
        "`optimizer.betas`",
    ),
    ("max_grad_norm", "grad_clip", "max_norm", "clip_grad", "`optimizer.max_grad_norm`"),
    ("loss_type", "policy_loss.loss_mode", "loss.type", "advantage_estimator", "`loss.kind`"),
    (
        "epsilon, epsilon_high",
        "clip_ratio_low, clip_ratio_high",
        "",
        "eps_clip, eps_clip_high",
        "`loss.clip_low`, `loss.clip_high`",
    ),
    ("delta", "clip_ratio_c", "", "eps_clip_c", "`loss.dual_clip`"),
    ("", "loss_agg_mode", "", "", "`loss.aggregation`"),
    (
        "scale_rewards",
        "norm_adv_by_std_in_grpo",
        "",
        "disable_grpo_std_normalization",
        "`loss.normalize_by_std`",
    ),
    (
        "mask_truncated_completions",
        "overlong_buffer.len",
        "",
        "",
        "`loss.overlong_filter`, `loss.overlong_buffer_tokens`",
    ),
    (
        "vllm_importance_sampling_cap",
        "rollout_is_threshold",
        "",
        "tis_clip",
        '`loss.importance_cap` with `loss.kind = "decoupled_ppo"`',
    ),
    (
        "vllm_importance_sampling_mode",
        "rollout_is",
        "",
        "use_tis",
        '`loss.importance_weight` with `loss.kind = "decoupled_ppo"`',
    ),
    (
        "off_policy_mask_threshold",
        "rollout_token_veto_threshold",
        "token_mask_low",
        "",
        "`loss.opsm`, `loss.veto`",
    ),
    (
        "sapo_temperature_pos, sapo_temperature_neg",
        "",
        "",
        "",
        '`loss.tau_positive`, `loss.tau_negative` with `loss.kind = "sapo"`',
    ),
    ("", "entropy_coeff", "", "entropy_coef", "`loss.entropy_coef`"),
    ("beta", "kl_loss_coef", "", "kl_loss_coef", "`reference.kl_coef`"),
    ("", "kl_loss_type", "", "kl_loss_type", "`reference.kl_estimator`"),
    ("", "ref.model.path", "", "ref_load", "`reference.name`"),
    ("model", "model.path", "model.name", "hf_checkpoint", "`model.name`"),
    ("", "custom_chat_template", "", "", "`model.chat_template`"),
    (
        "chat_template_kwargs",
        "apply_chat_template_kwargs",
        "",
        "apply_chat_template_kwargs",
        "`model.chat_template_kwargs`, such as `{enable_thinking = false}`",
    ),
    ("seed", "seed", "", "seed", "`run.seed`"),
    ("lora_r", "lora_rank", "lora.rank", "", "`lora.rank`"),
    ("lora_alpha", "lora_alpha", "lora.alpha", "", "`lora.alpha`"),
    ("lora_target_modules", "target_modules", "lora.target_modules", "", "`lora.target_modules`"),
    ("output_dir", "default_local_dir", "output_dir", "save", "`run.dir`"),
    ("run_name", "experiment_name", "wandb.name", "wandb_group", "`run.name`"),
    ("max_steps", "total_training_steps", "max_steps", "num_rollout", "`run.max_steps`"),
    ("save_steps", "save_freq", "ckpt.interval", "save_interval", "`checkpoint.interval_steps`"),
    ("save_total_limit", "max_actor_ckpt_to_keep", "ckpt.keep_last", "", "`checkpoint.keep_last`"),
    ("eval_steps", "test_freq", "eval.interval", "eval_interval", "`eval.interval_steps`"),
    ("report_to", "trainer.logger", "wandb", "use_wandb", "`metrics.sinks`"),
    ("", "project_name", "wandb.project", "wandb_project", "`metrics.project`"),
)
"""One row per setting. A row has the names in each of FRAMEWORKS, with notes in parentheses, and
then Echo's name in Markdown."""

ELSEWHERE: dict[str, str] = {
    "max_new_tokens": "did you mean sampling.max_completion_tokens?",
    "eos_token_id": "the model's generation_config.json lists the tokens that end a turn",
    "bf16": "did you mean model.dtype (published weights) or learner.dtype (arithmetic)?",
    "fp16": "did you mean model.dtype (published weights) or learner.dtype (arithmetic)?",
    "batch_size": "did you mean batch.groups_per_step, which counts prompts?",
    "resume_from_checkpoint": "--resume on the command line goes on with a run",
    "resume": "--resume on the command line goes on with a run",
    "trust_remote_code": "Echo never runs code that comes with a model",
    "stop": "did you mean sampling.stop?",
    "stop_strings": "did you mean sampling.stop?",
    "min_new_tokens": "did you mean sampling.min_tokens?",
    "stop_sequences": "did you mean sampling.stop?",
    "repetition_penalty": "Echo has no penalty on repetitions: it would change the distribution "
    "that the learner scores",
    "gradient_accumulation_steps": "it follows from learner.micro_batch_tokens",
    "max_model_len": "it follows from the prompt and sampling.max_completion_tokens",
    "max_prompt_length": "it follows from the model's window and sampling.max_completion_tokens",
    "reward_weights": "one function returns the reward; add up several rewards in it",
    "num_train_epochs": "each batch is trained on once; set run.max_steps",
    "num_iterations": "each batch is trained on once; batch.minibatches_per_step divides it",
    "ppo_epochs": "each batch is trained on once; batch.minibatches_per_step divides it",
    "gamma": "Echo has no critic: advantages are relative to the group",
    "lam": "Echo has no critic: advantages are relative to the group",
    "critic": "Echo has no critic: advantages are relative to the group",
}
"""Hints for names that have no row in the table. Other programs use these names, or Echo lacks the
setting."""


def our_name(path: Sequence[str]) -> str | None:
    """Return a hint that names Echo's key for a key that other trainers have, but not Echo.

    If no trainer in the table has the key, return None.

    Args:
        path: the path of the unknown key. Only the path's last parts are compared with the table,
            so the key may be in any section.
    """
    text = next((text for name, text in ELSEWHERE.items() if name in path), None)
    if text is not None:
        return text
    found: dict[str, list[str]] = {}
    best = 0
    for framework, name, ours in translations():
        parts = name.split(".")
        if len(parts) >= max(best, 1) and list(path[-len(parts) :]) == parts:
            if len(parts) > best:
                found, best = {}, len(parts)
            found.setdefault(ours, []).append(f"{name} in {framework}")
    texts = (
        ours if ours.endswith(f".{path[-1]}") else f"{ours} ({whose[0]})"
        for ours, whose in found.items()
    )
    return f"did you mean {' or '.join(texts)}?" if found else None


def translations() -> Iterator[tuple[str, str, str]]:
    """Yield (framework, name, Echo's key) for each name in the table."""
    for *others, ours in OTHER_NAMES:
        keys = re.sub(r" \(.*\)|, such as .*|`", "", ours)
        for framework, cell in zip(FRAMEWORKS, others, strict=True):
            for name in re.sub(r" \(.*?\)", "", cell).split(", "):
                if name:
                    yield framework, name, _same_part(cell, name, keys)


def _same_part(cell: str, name: str, keys: str) -> str:
    """Return Echo's key that corresponds to `name`.

    `cell` lists the names that a framework has in one row of the table, and `keys` lists Echo's
    keys in this row. If the two lists have the same length, they correspond in order. Otherwise
    return all keys.
    """
    names, ours = cell.split(", "), keys.split(", ")
    return ours[names.index(name)] if len(names) == len(ours) and name in names else keys


def names_table() -> str:
    """Return the table of names as Markdown."""
    lines = [f"| {' | '.join(FRAMEWORKS)} | Echo |", "|---" * (len(FRAMEWORKS) + 1) + "|"]
    for *others, ours in OTHER_NAMES:
        cells = (re.sub(r"[^,() ]+(?![^(]*\))", r"`\g<0>`", cell) for cell in others)
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in (*cells, ours)) + "|")
    return "\n".join(lines) + "\n"
