"""A trainer's state on disk: tensors as safetensors, the rest as JSON.

weights.safetensors     float32 master weights, tied ones once
optimizer.safetensors   "<parameter>/exp_avg", "<parameter>/exp_avg_sq", "<parameter>/step"
trainer.json            counters, and the state of torch's random generators as hex

The caller makes the directory and renames it into place: half a state is never a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from echo.core.errors import DataError, StorageError
from echo.engine.weights import write_tensors

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_FILE = "trainer.json"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerState:
    """What a trainer continues from."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    counters: dict[str, int]


def save(
    directory: Path,
    *,
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    counters: Mapping[str, int],
    device: torch.device,
) -> None:
    """Write a trainer's state, with that of torch's random generators.

    Raises:
        StorageError: if a file cannot be written.
    """
    generators = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    record = {
        "counters": dict(counters),
        "generators": {name: bytes(state.numpy()).hex() for name, state in generators.items()},
    }
    try:
        write_tensors(
            directory / WEIGHTS_FILE, {n: t.detach().contiguous() for n, t in weights.items()}
        )
        write_tensors(directory / OPTIMIZER_FILE, {n: t.contiguous() for n, t in moments.items()})
        (directory / TRAINER_FILE).write_text(json.dumps(record, indent=1))
    except OSError as error:
        raise StorageError(f"{directory}: cannot write the trainer's state: {error}") from error


def load(directory: Path, device: torch.device) -> TrainerState:
    """Read what `save` wrote, and set torch's random generators.

    Raises:
        StorageError: if a file is missing or damaged.
    """
    try:
        record = json.loads((directory / TRAINER_FILE).read_text())
        generators = {
            name: torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
            for name, state in record["generators"].items()
        }
        state = TrainerState(
            weights=load_file(directory / WEIGHTS_FILE),
            moments=load_file(directory / OPTIMIZER_FILE),
            counters={name: int(count) for name, count in record["counters"].items()},
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{directory}: cannot read the trainer's state: {error!r}") from error
    torch.set_rng_state(generators["cpu"])
    if device.type == "cuda" and "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"], device)
    return state


def moments_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the optimizer's tensors as "<parameter>/<moment>"; none before the first update."""
    return {
        f"{name}/{moment}": value
        for name, parameter in parameters.items()
        for moment, value in optimizer.state.get(parameter, {}).items()
    }


def restore_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
) -> None:
    """Put back what `moments_of` returned.

    Raises:
        DataError: if a moment belongs to no parameter or has another shape.
    """
    restored: dict[Tensor, dict[str, Tensor]] = {}
    for key, value in moments.items():
        name, _, moment = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or (moment != "step" and value.shape != parameter.shape):
            raise DataError(
                f"optimizer state {key} of shape {list(value.shape)} fits no parameter of this "
                "model: it belongs to another one"
            )
        restored.setdefault(parameter, {})[moment] = value.to(parameter.device, copy=True)
    optimizer.state.clear()
    optimizer.state.update(restored)
