"""Saving and loading a trainer's state: everything that its next step depends on.

On the same CPU and number of threads, a trainer continues from a state bit by bit. On a GPU, a
trainer continues from the same state but rounds differently, because sums in the backward of
embeddings and attention have no fixed order.

Files and their formats: saved_state.py.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from echo.core.errors import DataError
from echo.engine.weights import find_nonfinite
from echo.train.adapters import Adapters
from echo.train.models.policy import Policy
from echo.train.ranks import sharding
from echo.train.saved_state import TRAINER_FILE, find_adapters, load, save
from echo.train.step import NonfiniteWeightsError
from echo.train.weights import TrainedWeights


class TrainerState:
    """Writes and reads a trainer's weights, moments and counts."""

    def __init__(self, policy: Policy, weights: TrainedWeights, adapters: Adapters) -> None:
        self._policy = policy
        self._weights = weights
        self._adapters = adapters
        self._device = policy.compute.device
        self._ranks = policy.compute.ranks

    def save(self, directory: Path) -> None:
        """Write the state into an existing directory, without gradients.

        If there are several adapters, the state has a directory for each adapter.

        Raises:
            NonfiniteWeightsError: if weights contain NaN or infinity.
            StorageError: if a file cannot be written.
        """
        if len(self._adapters.names) < 2:
            self._save_one(directory)
            return

        def save_adapter(name: str) -> None:
            if self._ranks.rank == 0:
                with suppress(OSError):  # then `_save_one` fails, on all ranks
                    (directory / name).mkdir(exist_ok=True)
            self._save_one(directory / name)

        self._adapters.for_each(save_adapter)

    def load(self, directory: Path) -> None:
        """Continue from a state that `save` wrote, perhaps on a different number of ranks.

        Raises:
            StorageError: if the files are missing or damaged.
            DataError: if the state belongs to another model, or its adapters differ from the
                trainer's adapters.
        """
        found, names = find_adapters(directory), self._adapters.names
        if not found and len(names) > 1 and (directory / TRAINER_FILE).exists():
            raise DataError(
                f"{directory} holds the state of one adapter, and this trainer has "
                f"{', '.join(names)}: load it before adapters.add()"
            )
        if not found:
            self._load_one(directory)
            return
        if found != names:
            raise DataError(
                f"{directory} holds the adapters {', '.join(found)}, and this trainer has "
                f"{', '.join(names) or 'none'}: make them the same with adapters.add(), or "
                "load the directory of one into a trainer of one adapter"
            )
        self._adapters.for_each(lambda name: self._load_one(directory / name))

    def _save_one(self, directory: Path) -> None:
        weights = self._policy.tensors()
        own = find_nonfinite({name: sharding.local(part) for name, part in weights.items()})
        gathered = self._ranks.gather("\n".join(own).encode())
        names = sorted({name for each in gathered for name in each.decode().split("\n") if name})
        if names:
            raise NonfiniteWeightsError(names, num_tensors=len(weights))
        progress = self._adapters.progress
        save(
            directory,
            weights=weights,
            moments=self._weights.cut_as_parameters(progress.optimizer.tensors()),
            device=self._device,
            counters={
                "step_count": progress.step_count,
                "num_skipped_nonfinite": progress.num_skipped_nonfinite,
            },
            ranks=self._ranks,
        )

    def _load_one(self, directory: Path) -> None:
        own = self._policy.tensors()
        self._weights.wait_for_copies()
        if self._ranks.is_alone:
            weights, moments, counters = load(directory, self._device)
            self._policy.load(weights)
        else:
            weights, moments, counters = load(directory, self._device, own=own)
            for name, tensor in own.items():
                sharding.copy_local(tensor, weights[name])
        progress = self._adapters.progress
        progress.optimizer.load(moments)
        progress.step_count = counters["step_count"]
        progress.num_skipped_nonfinite = counters["num_skipped_nonfinite"]
