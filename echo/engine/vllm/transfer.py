"""The backend through which vLLM updates the weights of its worker processes.

vLLM calls `start_weight_update`, `update_weights` and `finish_weight_update` in each of its worker
processes while generation is paused. If vLLM runs in our own process, the weights come from a
dictionary. Otherwise the weights come from a safetensors file in shared memory. Each tensor is
copied from its source directly to the device. vLLM fuses and shards tensors as its model requires.

The changes of a patch come from the same two sources and are sent to the device in a single copy.
On the device, the changes are scattered into their places in the parameters. The places are
computed when the first whole version is loaded, and again if vLLM moves a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from echo.engine.vllm.places import UnplacedError, load_changes, store_changes, trace_places

HANDED_OVER: dict[str, Any] = {}
"""Weights or changes for an engine in this process, by the key in its `TransferUpdate`."""


@dataclass
class TransferInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Arguments that set up the transfer. There are none, because the transfer needs no set-up."""


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The source of one version's weights or changes. Exactly one field is set."""

    key: str = ""
    """Key of the weights or changes in HANDED_OVER; "" if `path` is set."""
    path: str = ""
    """Path of a safetensors file with the weights or changes; "" if `key` is set."""


class TransferEngine(WeightTransferEngine[TransferInit, TransferUpdate]):  # type: ignore[misc]
    """Reloads the model layer by layer from weights on this machine."""

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate
    model: nn.Module
    _loaded = TransferUpdate()
    _places: Mapping[str, Tensor] = {}
    """Name of a checkpoint's tensor -> the piece of a parameter that the tensor fills."""
    _pointers: Sequence[int] = ()
    unplaced = "no version is loaded"
    """The reason why the model cannot take patches, or ""."""

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Do nothing: there is no connection to open."""

    def start_weight_update(self) -> None:
        """Replace the weights by placeholders before a whole version is loaded."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one version.

        The base class would also wait for an accelerator, even on a CPU.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TransferUpdate) -> None:
        """Load all tensors of a version, by their Hugging Face names."""
        self._loaded = update_info
        self.model.load_weights(_read(update_info))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        """Convert loaded layers to the kernels' layout, and find tensors' places."""
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)
        _repack_experts(self.model)
        pointers = [parameter.data_ptr() for parameter in self.model.parameters()]
        if pointers != self._pointers:  # vLLM keeps the addresses, for its CUDA graphs
            self._pointers = pointers
            self._find_places()

    def _find_places(self) -> None:
        self._places, self.unplaced = {}, ""
        try:
            self._places = trace_places(self.model, dict(_read(self._loaded)))
        except UnplacedError as error:
            self.unplaced = str(error)

    def patch_weights(self, update_info: TransferUpdate) -> None:
        """Scatter the changed elements into their places."""
        key, path = update_info.key, update_info.path
        store_changes(HANDED_OVER[key] if key else load_changes(Path(path)), self._places)

    def shutdown(self) -> None:
        """Do nothing: there is no connection to close."""


class WorkerExtension:
    """Methods that vLLM adds to its workers, called from outside the worker's process."""

    weight_transfer_engine: TransferEngine

    def find_placement_fault(self) -> str:
        """Return the reason why this worker cannot take patches, or ""."""
        return self.weight_transfer_engine.unplaced

    def patch_weights(self, update_info: dict[str, Any]) -> None:
        """Scatter the changes of a patch into the model. Generation is paused."""
        self.weight_transfer_engine.patch_weights(TransferUpdate(**update_info))


def _read(update_info: TransferUpdate) -> Iterator[tuple[str, Tensor]]:
    if update_info.key:
        yield from HANDED_OVER[update_info.key].items()
        return
    with safe_open(update_info.path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 -- not a dict
            yield name, file.get_tensor(name)


def _repack_tied_heads(model: nn.Module) -> None:
    """Repack a tied head, because vLLM 0.32 on a CPU does not repack it.

    On a CPU, vLLM keeps a packed copy of each linear layer's weights. It repacks the copy when the
    layer receives weights. A head tied to the embedding receives no weights itself, so its packed
    copy would keep the old weights.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            method: Any = module.quant_method
            method.process_weights_after_loading(module)


def _repack_experts(model: nn.Module) -> None:
    """Repack reloaded experts, because vLLM 0.32 on a CPU does not repack them.

    vLLM's CPU kernel for experts needs the weights in its own order. vLLM reorders the weights only
    when it starts.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        if hasattr(experts, "isa"):  # only CPU kernels have it
            experts.process_weights_after_loading(module)
