"""The field's other names for this project's keys, and answers for those that have no counterpart.

An alias is accepted where peers put it (the top level, their sections, or the section that the key
has here) and always gives a notice, so that a file does not keep two languages by accident.
Sources: TRL, verl, prime-rl, AReaL, SkyRL, slime, OpenRLHF and torchforge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache

from echo.config.leaves import KeyPath, leaves

_USUAL_SECTIONS = frozenset(
    [
        "actor",
        "algo",
        "algorithm",
        "args",
        "async",
        "async_training",
        "ckpt",
        "config",
        "data",
        "generate",
        "generation",
        "grpo",
        "hyperparameters",
        "inference",
        "learner",
        "optim",
        "orchestrator",
        "policy_loss",
        "rl",
        "rollout",
        "rollout_correction",
        "rollouts",
        "scheduler",
        "train",
        "trainer",
        "training",
    ]
)
"""Where peers put their keys."""

_NAMES: Mapping[str, str] = {
    # batch
    "num_generations": "batch.group_size",
    "n_samples_per_prompt": "batch.group_size",
    "n_samples": "batch.group_size",
    "num_samples_per_prompt": "batch.group_size",
    "rollouts_per_example": "batch.group_size",
    "rollouts_per_prompt": "batch.group_size",
    "prompts_per_step": "batch.groups_per_step",
    "num_prompts_per_step": "batch.groups_per_step",
    "max_num_gen_batches": "batch.max_barren_batches",
    # sampling
    "max_new_tokens": "sampling.max_completion_tokens",
    "max_completion_length": "sampling.max_completion_tokens",
    "max_response_length": "sampling.max_completion_tokens",
    "max_tokens": "sampling.max_completion_tokens",
    # sync
    "max_off_policy_steps": "sync.max_staleness",
    "max_head_offpolicyness": "sync.max_staleness",
    "max_policy_age": "sync.max_staleness",
    "max_staleness_steps": "sync.max_staleness",
    "weight_sync_steps": "sync.publish_period",
    "update_weights_interval": "sync.publish_period",
    "publish_every": "sync.publish_period",
    # optimizer
    "lr": "optimizer.learning_rate",
    "num_warmup_steps": "optimizer.warmup_steps",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "warmup": "optimizer.warmup_steps",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.eps",
    "adam_epsilon": "optimizer.eps",
    "clip_grad": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "max_norm": "optimizer.max_grad_norm",
    # loss
    "epsilon": "loss.clip_low",
    "epsilon_low": "loss.clip_low",
    "eps_clip": "loss.clip_low",
    "clip_eps": "loss.clip_low",
    "clip_ratio_low": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "eps_clip_high": "loss.clip_high",
    "clip_ratio_high": "loss.clip_high",
    "clip_ratio_c": "loss.dual_clip",
    "eps_clip_c": "loss.dual_clip",
    "delta": "loss.dual_clip",
    "loss_type": "loss.kind",
    "loss_mode": "loss.kind",
    "loss_fn": "loss.kind",
    "policy_loss_type": "loss.kind",
    "loss_agg_mode": "loss.aggregation",
    "loss_reduction": "loss.aggregation",
    "scale_rewards": "loss.normalize_by_std",
    "rloo": "loss.leave_one_out",
    "overlong_buffer_len": "loss.overlong_buffer_tokens",
    "mask_truncated_completions": "loss.overlong_filter",
    "overlong_filtering": "loss.overlong_filter",
    "prox_logp_method": "loss.proximal",
    "rollout_is": "loss.importance_weight",
    "rollout_is_threshold": "loss.importance_cap",
    "tis_imp_ratio_cap": "loss.importance_cap",
    "tis_clip": "loss.importance_cap",
    "behave_imp_weight_cap": "loss.importance_cap",
    "vllm_importance_sampling_cap": "loss.importance_cap",
    "m2_threshold": "loss.max_second_moment",
    "sapo_temperature_pos": "loss.tau_positive",
    "sapo_temperature_neg": "loss.tau_negative",
    "cppo_beta": "loss.sampler_kl_coef",
    "kl_temp": "loss.gate_kl",
    "rollout_token_veto_threshold": "loss.veto",
    "token_veto_threshold": "loss.veto",
    "off_policy_mask_threshold": "loss.opsm",
    "opsm_delta": "loss.opsm",
    "norm_adv_by_std_in_grpo": "loss.normalize_by_std",
    # reference
    "beta": "reference.kl_coef",
    "kl_beta": "reference.kl_coef",
    "kl_loss_coef": "reference.kl_coef",
    "kl_ctl": "reference.kl_coef",
    "init_kl_coef": "reference.kl_coef",
    "kl_loss_type": "reference.kl_estimator",
    "ref_model": "reference.name",
    "ref_model_name_or_path": "reference.name",
    "ref_load": "reference.name",
    # model and learner
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "model_path": "model.name",
    "torch_dtype": "model.dtype",
    "attn": "model.attn_implementation",
    "enable_thinking": "model.chat_template_kwargs.enable_thinking",
    "max_tokens_per_gpu": "learner.micro_batch_tokens",
    "max_tokens_per_mb": "learner.micro_batch_tokens",
    # adapters
    "r": "lora.rank",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    # run
    "output_dir": "run.dir",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "total_steps": "run.max_steps",
    "total_training_steps": "run.max_steps",
    "num_steps": "run.max_steps",
    "seed": "run.seed",
    # checkpoint and eval
    "save_steps": "checkpoint.interval_steps",
    "save_interval": "checkpoint.interval_steps",
    "save_freq": "checkpoint.interval_steps",
    "save_total_limit": "checkpoint.keep_last",
    "max_ckpt_to_keep": "checkpoint.keep_last",
    "eval_steps": "eval.interval_steps",
    "eval_interval": "eval.interval_steps",
    "test_freq": "eval.interval_steps",
    # metrics
    "use_wandb": "metrics.wandb",
    "wandb_project": "metrics.wandb_project",
}
"""By the last word of the key."""

_PLACES: Mapping[str, str] = {
    "ckpt.interval": "checkpoint.interval_steps",
    "ckpt.interval_steps": "checkpoint.interval_steps",
    "checkpoint.interval": "checkpoint.interval_steps",
    "eval.interval": "eval.interval_steps",
    "eval.num_examples": "eval.num_prompts",
    "model.path": "model.name",
    "loss.clip": "loss.clip_low",
    "run.output_dir": "run.dir",
    "sampling.max_length": "sampling.max_completion_tokens",
    "wandb.name": "run.name",
    "wandb.project": "metrics.wandb_project",
    "wandb.enabled": "metrics.wandb",
}
"""By the whole dotted key, where its last word alone says too little."""

_BATCH_IN_TWO_KEYS = (
    "peers count it in prompts or in rollouts; say batch.groups_per_step (prompts per optimizer "
    "step) and batch.group_size (rollouts per prompt)"
)
_MICRO_BATCH = "learner.micro_batch_tokens bounds a micro-batch in tokens"
_LENGTH = "sampling.max_completion_tokens bounds completions; prompts keep their length"
_ZERO_VARIANCE = (
    "groups without a gradient do not count towards a step; batch.keep_zero_variance = true lets "
    "them count"
)
_ADVANTAGES = (
    "advantages are relative to their group; say loss.kind, and loss.normalize_by_std or "
    "loss.leave_one_out"
)
_NO_CRITIC = "there is no critic: advantages are relative to their group"
_MAX_STEPS = "say run.max_steps"
_FLAG = "it is a flag of the command line, --"

_WITHOUT_COUNTERPART: Mapping[str, str] = {
    "rollouts_per_step": _BATCH_IN_TWO_KEYS,
    "batch_size": _BATCH_IN_TWO_KEYS,
    "train_batch_size": _BATCH_IN_TWO_KEYS,
    "rollout_batch_size": _BATCH_IN_TWO_KEYS,
    "global_batch_size": _BATCH_IN_TWO_KEYS,
    "per_device_train_batch_size": _MICRO_BATCH,
    "micro_batch_size": _MICRO_BATCH,
    "gradient_accumulation_steps": "it follows from learner.micro_batch_tokens",
    "seq_len": _LENGTH,
    "max_model_len": _LENGTH,
    "betas": "write optimizer.beta1 and optimizer.beta2",
    "dynamic_sampling": _ZERO_VARIANCE,
    "filter_groups": _ZERO_VARIANCE,
    "filter_zero_std": _ZERO_VARIANCE,
    "adv_estimator": _ADVANTAGES,
    "advantage_estimator": _ADVANTAGES,
    "gamma": _NO_CRITIC,
    "lam": _NO_CRITIC,
    "gae_lambda": _NO_CRITIC,
    "critic": _NO_CRITIC,
    "use_tis": 'write loss.kind = "decoupled_ppo" with loss.importance_weight',
    "entropy_coef": "there is no bonus on entropy; entropy/mean is in the metrics",
    "entropy_coeff": "there is no bonus on entropy; entropy/mean is in the metrics",
    "clip_ratio": "write loss.clip_low and loss.clip_high",
    "trust_remote_code": "code that comes with a model is never run",
    "max_async_level": "bound staleness itself: sync.max_staleness",
    "num_epochs": _MAX_STEPS,
    "num_train_epochs": _MAX_STEPS,
    "total_epochs": _MAX_STEPS,
    "resume": f"{_FLAG}resume",
    "resume_from_checkpoint": f"{_FLAG}resume",
    "dry_run": f"{_FLAG}dry-run",
}


def resolve_alias(path: KeyPath) -> KeyPath | None:
    """Return the key that `path` is another name of, or None.

    Args:
        path: a key that the schema does not have.
    """
    target = _PLACES.get(".".join(path))
    if target is not None:
        return tuple(target.split("."))
    canonical = canonical_name(path[-1])
    if canonical is None:
        return None
    sections = _USUAL_SECTIONS | {canonical[0]}
    return canonical if all(part in sections for part in path[:-1]) else None


def canonical_name(word: str) -> KeyPath | None:
    """Return the one key that peers or this project call `word`, wherever it stands."""
    if word in _NAMES:
        return tuple(_NAMES[word].split("."))
    return _unambiguous_names().get(word)


def explain_missing(path: KeyPath) -> str | None:
    """Return what to do in place of a key of the field that this project does not have."""
    return next((_WITHOUT_COUNTERPART[part] for part in path if part in _WITHOUT_COUNTERPART), None)


@cache
def _unambiguous_names() -> Mapping[str, KeyPath]:
    """Return this project's keys whose last word occurs in one section only, by that word."""
    counts = Counter(path[-1] for path in leaves())
    return {path[-1]: path for path in leaves() if counts[path[-1]] == 1}
