"""Weight transfer backend in vLLM's own update lifecycle.

vLLM calls `start_weight_update`, `update_weights` and `finish_weight_update` in each of its worker
processes while generation is paused. The weights are taken from a dictionary where vLLM runs in our
own process, and from a safetensors file (in shared memory) where it does not; from there each
tensor goes to the device directly, and vLLM fuses and shards what has to be.

The changes of a patch come in the same two ways, and are scattered into the places that were found
when the first version was loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from echo.engine.vllm.places import UnplacedError, load_changes, trace_places
from echo.engine.weights import TensorChange

HANDED_OVER: dict[str, Any] = {}
"""Weights or changes that are handed to an engine in this process, by a key that it is told.
"""


@dataclass
class TransferInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed beforehand."""


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The place of one version's weights: one of the two."""

    key: str = ""
    """In HANDED_OVER."""
    path: str = ""
    """A safetensors file."""


class TransferEngine(WeightTransferEngine[TransferInit, TransferUpdate]):  # type: ignore[misc]
    """Reloads the model layer by layer from weights that lie on this machine."""

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate
    model: nn.Module
    _loaded = TransferUpdate()
    """The version that is being loaded."""
    _places: Mapping[str, Tensor] = {}
    """Of the checkpoint's elements."""
    _pointers: Sequence[int] = ()
    """To the model's parameters when that was."""
    unplaced = "no version is loaded"
    """Why the model takes whole versions only; nothing if it takes patches."""

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Do nothing: there is no connection to open."""

    def start_weight_update(self) -> None:
        """Put placeholders where the weights were."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one version; the base class would wait for an accelerator, which may not exist."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TransferUpdate) -> None:
        """Load all tensors under their Hugging Face names."""
        self._loaded = update_info
        self.model.load_weights(_read(update_info))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        """Put the layers into the form that the kernels want."""
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)
        _repack_experts(self.model)
        pointers = [parameter.data_ptr() for parameter in self.model.parameters()]
        if pointers != self._pointers:  # vLLM keeps them, for its graphs
            self._pointers = pointers
            self._find_places()

    def _find_places(self) -> None:
        self._places, self.unplaced = {}, ""
        try:
            self._places = trace_places(self.model, dict(_read(self._loaded)))
        except UnplacedError as error:
            self.unplaced = str(error)

    @torch.no_grad()
    def patch_weights(self, update_info: TransferUpdate) -> None:
        """Scatter what has changed since the last version into its places."""
        key, path = update_info.key, update_info.path
        changes: Iterable[TensorChange] = HANDED_OVER[key] if key else load_changes(Path(path))
        for change in changes:
            change.store(self._places[change.name])

    def shutdown(self) -> None:
        """Do nothing: nothing is open."""


class WorkerExtension:
    """Methods of vLLM's worker that can be called from outside its process."""

    weight_transfer_engine: TransferEngine

    def why_unplaced(self) -> str:
        """Return why this worker takes whole versions only; nothing if it takes patches."""
        return self.weight_transfer_engine.unplaced

    def patch_weights(self, update_info: dict[str, Any]) -> None:
        """Scatter changes into the model; what is paused is the caller's business."""
        self.weight_transfer_engine.patch_weights(TransferUpdate(**update_info))


def _read(update_info: TransferUpdate) -> Iterator[tuple[str, Tensor]]:
    if update_info.key:
        yield from HANDED_OVER[update_info.key].items()
        return
    with safe_open(update_info.path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 -- not a dict
            yield name, file.get_tensor(name)


def _repack_tied_heads(model: nn.Module) -> None:
    """Pack the head again that vLLM 0.32 leaves behind on a CPU.

    There it keeps a packed copy of each linear layer's weights, made again when a layer receives
    weights. A head tied to the embedding receives none of its own: its copy would stay the old one.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            method: Any = module.quant_method
            method.process_weights_after_loading(module)


def _repack_experts(model: nn.Module) -> None:
    """Pack the experts again that vLLM 0.32 leaves as they came on a CPU.

    Its kernel for experts there reads them in an order of its own, into which vLLM brings them when
    it starts and never again.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        if hasattr(experts, "isa"):  # those for CPUs
            experts.process_weights_after_loading(module)
