"""Activations of a model's layers: recomputation, offloading, and return of freed memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from echo.engine import allocator


def decoder_layers(model: Any) -> list[Any]:
    """Return the model's layers that support recomputation of activations."""
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def enable_training(model: Any, *, is_on_cpu: bool, gradient_checkpointing: bool | str) -> None:
    """Configure the activations of a model's layers, and switch off dropout.

    Args:
        model: a model of transformers. If `gradient_checkpointing` is not False, its layers must
            support checkpointing.
        is_on_cpu: whether the model is on the CPU. If so, freed memory is returned to the system.
        gradient_checkpointing: False to keep all activations; True to recompute them in the
            backward pass; "offload" to recompute them, and to move the layers' inputs to the host.
    """
    if is_on_cpu:
        hook = partial(_give_back_beside, allocator.Trimmer())
        for layer in decoder_layers(model):
            layer.register_forward_hook(hook)
    if not gradient_checkpointing:
        model.eval()  # switches dropout off; gradients are computed nevertheless
        return
    # transformers 5 renamed this method between releases.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()
    if gradient_checkpointing == "offload":
        for layer in decoder_layers(model):
            # transformers itself has just set this attribute.
            layer._gradient_checkpointing_func = checkpoint_offloaded  # noqa: SLF001


def checkpoint_offloaded(layer: Callable[..., Any], *inputs: Any) -> Any:
    """Compute a layer with checkpointing, and keep the inputs of the layer on the host.

    The inputs stay on the host until the backward pass.
    """
    with saved_tensors_hooks(begin_to_offload, begin_to_restore):
        return checkpoint(layer, *inputs, use_reentrant=False)


def begin_to_offload(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Begin to copy a tensor to the host.

    Unlike torch's own hook, this function does not wait for the device.
    """
    kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    kept.copy_(tensor, non_blocking=True)
    return tensor.device, kept


def begin_to_restore(offloaded: tuple[torch.device, Tensor]) -> Tensor:
    """Begin to copy a tensor back to its device.

    The copy runs on the stream that copied the tensor to the host.
    """
    device, kept = offloaded
    return kept.to(device, non_blocking=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _give_back_beside(trim: Callable[[], None], layer: Any, inputs: Any, output: Any) -> None:
    """Return freed memory to the system, once after a layer's forward and once before its backward.

    If gradients are off, the function has no effect.
    """
    states = output[0] if isinstance(output, tuple) else output
    if states.requires_grad:
        trim()
        states.register_hook(lambda _: trim())
