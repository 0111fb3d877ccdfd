"""Files of a sharded state: each rank writes a file, and any number of ranks can read the files.

    shard-00001-model-00001-of-00001.safetensors    rank 0's rows, and tensors that are not sharded
    shard-00002-...                                 rank 1's rows

torch.distributed.checkpoint writes these safetensors files. A file's header has the place of each
piece in its tensor. The reader also takes files of whole tensors, so any number of processes can
read a state. A rank reads only its own rows.
"""

from __future__ import annotations

import json
import secrets
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from echo.core.errors import DataError, StorageError
from echo.train.optimizer import PARTS, SCALES, STEP
from echo.train.ranks import sharding
from echo.train.ranks.sharding import Ranks

PATTERN = "shard-*.safetensors"
"""Pattern of the names of a sharded state's files."""


Tensors = dict[str, Tensor]


def write_cut(directory: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write a state's tensors into sharded files. All ranks call this function together.

    Args:
        directory: an existing directory on a disk that all ranks share.
        tensors: this rank's tensors, sharded or whole. Whole tensors must be equal on all ranks.
        ranks: all ranks that train the model.

    Raises:
        StorageError: on all ranks, if a rank cannot write, or does not share the directory.
    """
    _check_shared(directory, ranks)
    writer = HuggingFaceStorageWriter(path=str(directory), save_distributed=True)
    with _named(f"{directory}: cannot write the trainer's state"):
        save({name: tensor.detach() for name, tensor in tensors.items()}, storage_writer=writer)


def _check_shared(directory: Path, ranks: Ranks) -> None:
    """Raise an error on all ranks if a rank cannot see rank 0's directory.

    Without this check, the saved state would lack the shards of this rank.
    """
    mark = directory / f"of-rank-0-{secrets.token_hex(8)}"
    own = json.dumps([mark.name, socket.gethostname()]).encode()
    if not ranks.rank:
        with suppress(OSError):  # the disk is full; the writer raises an error later
            mark.touch()
    others = [json.loads(each) for each in ranks.gather(own)]
    sees = (directory / others[0][0]).exists()
    answers = ranks.gather(b"sees" if sees else b"")
    blind = [f"rank {rank} on {others[rank][1]}" for rank, each in enumerate(answers) if not each]
    mark.unlink(missing_ok=True)
    if blind and answers[0]:
        raise StorageError(
            f"{directory} of rank 0 on {others[0][1]} is not there for {', '.join(blind)}: "
            "run.dir has to be on a disk that all machines of the learner share"
        )


def read_cut(directory: Path, own: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
    """Return this rank's weights, sharded like `own`, and this rank's parts of the moments.

    All ranks call this function together.

    Args:
        directory: a directory written by any number of ranks.
        own: this rank's weights, which are not changed.

    Raises:
        StorageError: if a file is missing or damaged.
        DataError: if the files belong to another model.
    """
    found = _find_tensors(directory)
    state: Tensors = {}
    for name, (shape, dtype) in found.items():
        parameter, _, part = name.rpartition("/")
        tensor = own.get(parameter if part in PARTS else name)
        if part == STEP and tensor is not None:
            state[name] = torch.zeros(shape)
            continue
        has_own_width = part.endswith(SCALES)
        if (
            tensor is None
            or tensor.shape[:1] != shape[:1]
            or (tensor.shape != shape and not has_own_width)
        ):
            raise DataError(
                f"{directory} holds {name} of shape {list(shape)}, which fits no tensor of this "
                "model: it belongs to another one"
            )
        rows = sharding.local(tensor)
        rows = rows.new_empty((*rows.shape[:1], *shape[1:]), dtype=dtype)
        state[name] = sharding.like(rows, tensor)
    if missing := sorted(own.keys() - found.keys()):
        raise DataError(f"{directory} lacks {len(missing)} of the model's tensors: {missing[:5]}")
    _read(directory, state)
    weights, moments = _divided(state)
    return weights, {name: sharding.local(tensor) for name, tensor in moments.items()}


def read_whole(directory: Path) -> tuple[Tensors, Tensors]:
    """Return the whole weights and moments of a sharded state, on the CPU.

    Only one process calls this function.

    Raises:
        StorageError: if a file is missing or damaged.
    """
    state = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in _find_tensors(directory).items()
    }
    _read(directory, state)
    return _divided(state)


def _divided(tensors: Tensors) -> tuple[Tensors, Tensors]:
    is_moment = {name: name.rpartition("/")[2] in PARTS for name in tensors}
    weights = {name: tensor for name, tensor in tensors.items() if not is_moment[name]}
    return weights, {name: tensor for name, tensor in tensors.items() if is_moment[name]}


def _find_tensors(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    with _named(f"{directory}: cannot read the trainer's state"):
        found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {
        name: (described.size, described.properties.dtype)
        for name, described in found.items()
        if isinstance(described, TensorStorageMetadata)
    }


def _read(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    with _named(f"{directory}: cannot read the trainer's state"):
        load(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_reader=HuggingFaceStorageReader(str(directory)),
            no_dist=not dist.is_initialized(),
        )


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Raise a `StorageError` in place of an error of torch's checkpoint code.

    The error's text begins with `what`.
    """
    try:
        with warnings.catch_warnings():
            # torch warns that there is only one process, which is intended here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except (CheckpointException, OSError, SafetensorError, ValueError, RuntimeError) as error:
        if sharding.is_loss(error):
            raise
        # A CheckpointException's text has a trace of each rank; its last line is the error.
        cause = str(error).strip().rpartition("\n")[2] or type(error).__name__
        raise StorageError(f"{what}: {cause}") from error
