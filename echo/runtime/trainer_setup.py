"""From the configuration to the learner's trainer: loss, reference policy, optimizer, precision."""

from __future__ import annotations

from pathlib import Path

from echo.algo.corrections import MaskedLoss, RolloutMasks
from echo.algo.loss import Loss
from echo.algo.losses import ReferenceKlLoss
from echo.config.schema import Config
from echo.engine.lora import Lora, initial_adapter, load_adapter
from echo.engine.model import (
    load_directory,
    pick_device,
    pick_dtype,
    resolve_model,
    set_num_threads,
)
from echo.engine.weights import Weights
from echo.runtime.recovery import StartingPoint
from echo.train.batch import AdvantageSettings
from echo.train.trainer import OptimizerSettings, ReferenceModel, Trainer, load_loss


def build_trainer(
    config: Config, model_dir: Path, start: StartingPoint, lora: Lora | None = None
) -> Trainer:
    """Return the trainer at the starting point, of all weights or of an adapter."""
    learner, optimizer, loss = config.learner, config.optimizer, config.loss
    max_tokens = config.sampling.max_completion_tokens
    set_num_threads(learner.num_threads)
    device = pick_device(learner.device)
    tensors = None
    if start.checkpoint is None:
        tensors = initial_weights(config, lora)
    trainer = Trainer(
        model_dir,
        loss=build_loss(config),
        optimizer=OptimizerSettings(
            learning_rate=optimizer.learning_rate,
            warmup_steps=optimizer.warmup_steps,
            weight_decay=optimizer.weight_decay,
            betas=optimizer.betas,
            max_grad_norm=optimizer.max_grad_norm,
        ),
        temperature=config.sampling.temperature,
        advantages=AdvantageSettings(
            normalize_by_std=loss.normalize_by_std,
            leave_one_out=loss.leave_one_out,
            max_completion_tokens=max_tokens,
            overlong_buffer_tokens=loss.overlong_buffer_tokens,
            overlong_filter=loss.overlong_filter,
            keep_zero_variance=config.batch.keep_zero_variance,
            max_abs_reward=config.task.max_reward,
        ),
        reference=find_reference(config, model_dir, lora),
        device=device,
        dtype=pick_dtype(learner.dtype, device),
        init_tensors=tensors,
        lora=lora,
        micro_batch_tokens=learner.micro_batch_tokens,
        gradient_checkpointing=learner.gradient_checkpointing,
        attn_implementation=config.model.attn_implementation,
        seed=config.run.seed,
    )
    if start.checkpoint is not None:
        trainer.load_state(start.checkpoint)
    return trainer


def initial_weights(config: Config, lora: Lora | None) -> Weights | None:
    """Return the weights that the run starts from, if they are not the model directory's.

    With `lora` they are those of an adapter, and None where it starts as nothing on its base.
    """
    adapter = initial_adapter(config)
    if adapter is not None:
        return load_adapter(adapter)
    if config.learner.init_from is None or lora is not None:
        return None
    return load_directory(Path(config.learner.init_from).expanduser(), "float32")


def build_loss(config: Config) -> Loss:
    """Return the policy loss, with the pull towards the reference if there is one."""
    section, reference = config.loss, config.reference
    options = section.own_options()
    if section.kind == "dr_grpo":
        options["max_completion_tokens"] = config.sampling.max_completion_tokens
    loss = load_loss(section.kind, options)
    masks = RolloutMasks(**section.masks())
    if not masks.is_off:
        loss = MaskedLoss(loss=loss, masks=masks)
    if not reference.kl_coef:
        return loss
    return ReferenceKlLoss(
        loss=loss,
        coef=reference.kl_coef,
        estimator=reference.kl_estimator,
    )


def find_reference(config: Config, model_dir: Path, lora: Lora | None) -> ReferenceModel | None:
    """Return where the reference policy comes from: the same after a resume as before."""
    section = config.reference
    if not section.kl_coef:
        return None
    if section.name is None:
        tensors = initial_weights(config, lora)
        return ReferenceModel(model_dir=model_dir, tensors=tensors, lora=lora)
    return ReferenceModel(model_dir=resolve_model(section.name))
