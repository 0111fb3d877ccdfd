"""The state of a trainer on disk.

    weights.safetensors     float32 weights, tied tensors once
    optimizer.safetensors   "<parameter>/exp_avg", "<parameter>/step", ... (optimizer.py)
    trainer.json            counters, and the state of torch's random generators as hex

Several ranks write sharded files instead of the first two files, with the same tensor names
(ranks/sharded_state.py). Any number of ranks can continue from either form.

If there are several adapters, each adapter has these files in a directory named after the adapter.
A trainer of one adapter can continue from such a directory too.

The caller makes the directory under another name and renames it at the end, so an incomplete state
is never taken for a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from echo.core.errors import StorageError
from echo.engine.weights import write_tensors
from echo.train.ranks import sharded_state
from echo.train.ranks.sharding import ALONE, Ranks

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_FILE = "trainer.json"

COUNTERS = ("step_count", "num_skipped_nonfinite")


def save(
    directory: Path,
    *,
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    counters: Mapping[str, int],
    device: torch.device,
    ranks: Ranks = ALONE,
) -> None:
    """Write the state of a trainer and of torch's random generators.

    Args:
        directory: an existing directory.
        weights: weights by name, sharded if there are several ranks.
        moments: moments, named as by `AdamW.tensors`; sharded if there are several ranks.
        counters: counters by name.
        device: device that the trainer computes on.
        ranks: the ranks that call this together.

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
        if ranks.is_alone:
            write_tensors(
                directory / WEIGHTS_FILE, {n: t.detach().contiguous() for n, t in weights.items()}
            )
            write_tensors(
                directory / OPTIMIZER_FILE, {n: t.contiguous() for n, t in moments.items()}
            )
        else:
            sharded_state.write_cut(directory, {**weights, **moments}, ranks)
        if ranks.rank == 0:
            (directory / TRAINER_FILE).write_text(json.dumps(record, indent=1))
    except OSError as error:
        raise StorageError(f"{directory}: cannot write the trainer's state: {error}") from error


def load(
    directory: Path, device: torch.device, *, own: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    """Return the weights, moments and counters that `save` wrote.

    The function also restores torch's random generators.

    Args:
        directory: a directory written by any number of ranks.
        device: device that the trainer computes on.
        own: this rank's sharded weights, to shard the state in the same way; None for a whole
            state.

    Raises:
        StorageError: if a file is missing or damaged.
        DataError: if `own` is given, and the state belongs to another model.
    """
    try:
        record = json.loads((directory / TRAINER_FILE).read_text())
        generators = {
            name: torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
            for name, state in record["generators"].items()
        }
        if own is not None:
            weights, moments = sharded_state.read_cut(directory, own)
        elif next(directory.glob(sharded_state.PATTERN), None) is not None:
            weights, moments = sharded_state.read_whole(directory)
        else:
            weights = load_file(directory / WEIGHTS_FILE)
            moments = load_file(directory / OPTIMIZER_FILE)
        counters = {name: int(record["counters"][name]) for name in COUNTERS}
        torch.set_rng_state(generators["cpu"])
        if device.type == "cuda" and "cuda" in generators:
            torch.cuda.set_rng_state(generators["cuda"], device)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{directory}: cannot read the trainer's state: {error!r}") from error
    return weights, moments, counters


def load_weights(directory: Path) -> dict[str, Tensor]:
    """Return the whole weights that `save` wrote, without moments, on the CPU.

    Raises:
        StorageError: if a file is missing or damaged.
    """
    try:
        if next(directory.glob(sharded_state.PATTERN), None) is not None:
            return sharded_state.read_whole(directory)[0]
        return load_file(directory / WEIGHTS_FILE)
    except (OSError, SafetensorError, ValueError) as error:
        raise StorageError(f"{directory}: cannot read its weights: {error!r}") from error


def find_adapters(directory: Path) -> tuple[str, ...]:
    """Return the sorted names of the adapters that have a directory in a saved state.

    A state without several adapters has no such directories.
    """
    if (directory / TRAINER_FILE).exists():
        return ()
    return tuple(sorted(path.parent.name for path in directory.glob(f"*/{TRAINER_FILE}")))
