"""Ranks: the processes of one learner. Rank 0 leads, and all other ranks follow its commands.

    rank 0       event loop, network, ledger, and in its trainer's thread a LeadTrainer
                     |  a command: (name, arguments), over the control group
    rank 1, 2..  follow(): a Trainer of its own, which carries out each command

Each use of the weights is a command, which all ranks carry out together. The leader sends the
command and then carries it out too. There are two process groups. In the control group, ranks wait
for the next command without a limit of time. All other communication uses the default group, where
no rank waits longer than COLLECTIVE_S.

A rank that fails ends the job. If the rank can, it writes the reason for its crash into the shared
store of torchrun. The leader reports the failed rank and the reason. The table lists the kinds of
failure, how the other ranks detect each kind, and whether the store has a reason:

    failure of the rank                   detected                           reason
    it raises an error                    at once (gloo) or by a SIGTERM     yes
    it is killed                          at once (gloo) or by a SIGTERM     no
    it hangs, or its machine is gone      after COLLECTIVE_S                 no

No state is saved after a failure, since no rank has the whole state. After a restart by torchrun
(`--max-restarts`) or by the user, the run continues from its last checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from echo.core.errors import ConfigError, EchoError, RankError, StorageError
from echo.core.rollout import Group
from echo.engine.weights import find_places
from echo.train.models.policy import Compute
from echo.train.ranks.sharded_images import FollowImages, LeadImages
from echo.train.ranks.sharding import COLLECTIVE_S, Ranks, is_loss
from echo.train.step import NonfiniteWeightsError, StepError, StepResult
from echo.train.trainer import Trainer
from echo.wire.codec import decode_group, encode_group

REASONS_S = 3.0
"""Longest wait, in seconds, for the crash reasons of other ranks after a failure."""
IDLE = timedelta(days=365)
"""Longest wait for a command. gloo requires a limit, so this limit is very long."""

# --- how the processes find each other ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The environment variables that torchrun gives to a process."""

    rank: int
    size: int
    local_rank: int
    """Number of this process on its machine, counted from 0."""
    prefix: str
    """Prefix of the processes' keys in the store; "" for no prefix. If the launcher's store
    outlives a restart, each start has its own prefix.
    """

    @staticmethod
    def of(environment: Mapping[str, str]) -> Launch:
        """Read the launch from torchrun's environment variables.

        Raises:
            ConfigError: if torchrun did not set the variables, or cannot restart this learner.
        """
        needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in needed if name not in environment]:
            raise ConfigError(
                f"WORLD_SIZE = {environment['WORLD_SIZE']} says that this is one of several "
                f"processes of a learner, and {', '.join(missing)} is not set: start them with "
                "torchrun, or unset WORLD_SIZE for a learner of one process"
            )
        prefix = ""
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # The launcher's store still has the addresses of an earlier start under the same names.
            prefix = f"life {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            has_restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            if has_restarts and environment.get("GROUP_WORLD_SIZE", "1") != "1":
                # Each machine counts its own restarts, so the machines would use different
                # prefixes.
                raise ConfigError(
                    "torchrun would restart several machines over a store with the addresses of "
                    "processes that are gone: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where "
                    "torchrun is started, or --max-restarts 0"
                )
        return Launch(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
            prefix=prefix,
        )


def join(launch: Launch, device_type: str) -> RankGroup:
    """Wait until all ranks have joined; return the group.

    Args:
        launch: the environment from torchrun.
        device_type: "cpu" or "cuda".

    Raises:
        ConfigError: if there is no GPU for this rank.
        RankError: if another rank does not join in time.
    """
    device = torch.device(device_type)
    if device_type == "cuda":
        if launch.local_rank >= (num_gpus := torch.cuda.device_count()):
            raise ConfigError(
                f"rank {launch.rank} would compute on GPU {launch.local_rank}, counted from 0, and "
                f"PyTorch finds {num_gpus} on this machine: set torchrun's --nproc-per-node to "
                f"{num_gpus}, or see what CUDA_VISIBLE_DEVICES leaves out"
            )
        device = torch.device("cuda", launch.local_rank)
        torch.cuda.set_device(device)
    try:
        store, _, _ = next(
            rendezvous("env://", launch.rank, launch.size, timeout=timedelta(seconds=300))
        )
        if launch.prefix:
            store = PrefixStore(launch.prefix, store)
        return form(store, launch.rank, launch.size, device)
    except RuntimeError as error:
        raise RankError(f"rank {launch.rank} has not found the others: {error}") from error


def form(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    *,
    collective_s: float = COLLECTIVE_S,
) -> RankGroup:
    """Make the process groups of the ranks that share a store."""
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=collective_s),
    )
    return RankGroup(
        Ranks.of_process_group(device.type),
        device,
        CrashReasons(PrefixStore("crash reasons", store), rank, size),
        control=dist.new_group(backend="gloo", timeout=IDLE),
    )


# --- why ranks ended ------------------------------------------------------------------------------


class CrashReasons:
    """The crash reasons of all ranks, kept in the ranks' shared store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Keep the shared store, this rank's number and the number of ranks.

        The store must add a prefix to each key, so that no other user has the same keys.
        """
        self._store, self._rank = store, rank
        self._others = [other for other in range(size) if other != rank]

    def leave(self, reason: str) -> None:
        """Write the reason why this rank ends. "" means that this rank has not failed."""
        with suppress(RuntimeError):  # the store may be gone with the rank that held it
            self._store.set(f"reason of {self._rank}", reason)
            self._store.add(f"has ended: {self._rank}", 1)

    def wait_for_others(self, seconds: float) -> bool:
        """Wait up to `seconds` until all other ranks have ended; return whether all have ended.

        Raises:
            RuntimeError: if the process that held the store has ended.
        """
        give_up_at = time.monotonic() + seconds
        while not all(map(self._has_ended, self._others)):
            if time.monotonic() > give_up_at:
                return False
            time.sleep(0.01)
        return True

    def explain(self) -> str:
        """Return a text that names the failed ranks and their reasons.

        The method waits up to REASONS_S for the reasons.
        """
        try:
            self.wait_for_others(REASONS_S)
            found, missing = [], []
            for rank in self._others:
                if not self._has_ended(rank):
                    missing.append(f"rank {rank}")
                elif reason := self._store.get(f"reason of {rank}").decode():
                    found.append(f"rank {rank}: {reason}")
        except RuntimeError:
            return "the store through which the ranks know of each other is gone"
        if missing and not found:
            found.append(
                f"{', '.join(missing)} left no reason: killed, stopped, hanging or cut off"
            )
        return "; ".join(found) or "all of them have lost each other"

    def _has_ended(self, rank: int) -> bool:
        return bool(self._store.add(f"has ended: {rank}", 0))


# --- commands -------------------------------------------------------------------------------------


class RankCommand(msgspec.Struct, frozen=True):
    """A command that all ranks carry out together."""

    name: str
    """"build", "write_rows" (write this rank's rows of an image), "stop", or the name of a method
    of the trainer.
    """
    path: str | None = None
    """Path of the command's checkpoint, version or directory; None for a command that needs no
    path.
    """
    groups: tuple[tuple[bytes, bytes], ...] = ()
    """The groups of the command, encoded as in messages."""
    dtype: str = ""
    """For "build": dtype of published weights."""

    @property
    def batch(self) -> list[Group]:
        """Return the groups of the command, decoded."""
        return [decode_group(header, arrays) for header, arrays in self.groups]


_decoder = msgspec.msgpack.Decoder(RankCommand)

AGREED: dict[str, tuple[type[EchoError], ...]] = {
    "step": (StepError,),
    "find_faulty": (StepError,),
    "forward": (StepError,),
    "rescore": (StepError, StorageError),
    "save_state": (NonfiniteWeightsError, StorageError),
}
"""Command name -> errors that the command may raise on all ranks together. All errors that are not
listed are failures of one rank.
"""


@dataclass(slots=True, eq=False)
class RankGroup:
    """This rank's view of all ranks of a learner."""

    ranks: Ranks
    """The ranks in the default process group."""
    device: torch.device
    """Device of this rank."""
    reasons: CrashReasons
    control: dist.ProcessGroup | None
    """The process group for commands; None for a single process."""
    _is_broken: bool = False

    def send(self, command: RankCommand) -> None:
        """Send the next command to all other ranks. Only the leader calls this method."""
        data = np.frombuffer(msgspec.msgpack.encode(command), dtype=np.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=0, group=self.control)
        dist.broadcast(torch.from_numpy(data.copy()), src=0, group=self.control)

    def receive(self) -> RankCommand:
        """Wait for the leader's next command. All ranks except the leader call this method."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self.control)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.control)
        return _decoder.decode(data.numpy().data)

    def wait_for_all(self) -> None:
        """Wait, without a time limit, until all ranks have called this method."""
        dist.barrier(group=self.control)

    @contextmanager
    def together(self, command: RankCommand) -> Iterator[None]:
        """Send a command to all other ranks. The `with` block carries out the leader's own part.

        Raises:
            RankError: if another rank has failed.
        """
        if self._is_broken:
            raise RankError(f"the learner's processes cannot go on with {command.name}")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the current device is a setting of the thread
        try:
            self.send(command)
            self.ranks.add_up(0.0)  # finds a missing rank before the command begins
            yield
        except AGREED.get(command.name, ()):
            raise
        except BaseException as error:
            self._is_broken = True
            if isinstance(error, torch.OutOfMemoryError):
                raise RankError(f"rank 0: {_describe_failure(command, error)}") from error
            if not is_loss(error):
                raise
            raise self.lost(command, error) from error

    def lost(self, command: RankCommand, error: BaseException) -> RankError:
        """Return the error for a command that another rank did not carry out.

        The error names the failed ranks and their reasons.
        """
        self._is_broken = True
        return RankError(
            f"the learner's processes cannot go on with {command.name}: {self.reasons.explain()} "
            f"({_first_line(error)})"
        )

    def dismiss(self) -> None:
        """Send "stop" to the other ranks if no rank has failed. This is the leader's last call."""
        if not self._is_broken:
            with suppress(RuntimeError):
                self.send(RankCommand("stop"))
                self.reasons.wait_for_others(10.0)  # their store may end with this process
        self.leave()

    def leave(self) -> None:
        """Leave the process groups of the ranks."""
        self.reasons.leave("")
        if not self._is_broken:
            dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    # gloo appends advice for its developers.
    line = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
    return line[:300] or type(error).__name__


def _describe_failure(command: RankCommand, error: BaseException) -> str:
    text = f"{command.name}: {type(error).__name__}: {_first_line(error)}"
    if isinstance(error, torch.OutOfMemoryError):
        text += "; lower learner.micro_batch_tokens, or set learner.gradient_checkpointing = true"
    return text


# --- the leader -----------------------------------------------------------------------------------


Build = Callable[[Path | None], Trainer]
"""A function that makes the trainer of a rank, from the path of a checkpoint or None for a new
start.
"""


class LeadTrainer:
    """The learner's trainer on rank 0. All ranks carry out each call together."""

    def __init__(
        self, rank_group: RankGroup, build: Build, checkpoint: Path | None, *, published_dtype: str
    ) -> None:
        """Have all ranks build their trainers and load the checkpoint.

        Args:
            rank_group: the ranks.
            build: a function that makes this rank's trainer.
            checkpoint: directory of the checkpoint to continue from; None for a new start.
            published_dtype: type that published weights are rounded to.

        Raises:
            RankError: if another rank cannot build a trainer.
            EchoError: the error that `build` raises on this rank.
        """
        self._rank_group = rank_group
        path = None if checkpoint is None else str(checkpoint.absolute())
        with rank_group.together(RankCommand("build", path, dtype=published_dtype)):
            self._trainer = build(checkpoint)
            rank_group.ranks.add_up(0.0)  # waits for all trainers
            places = find_places(self.tensors(), published_dtype, self.unrounded)
            write_rows = RankCommand("write_rows")
            self.images = LeadImages(
                rank_group.ranks,
                places,
                self._trainer.weights.copy_stream,
                together=lambda: rank_group.together(write_rows),
                lost=lambda error: rank_group.lost(write_rows, error),
            )
            """Makes the images of versions."""

    @property
    def compute(self) -> Compute:
        """Settings of this rank's computations, with the present limit of a micro-batch."""
        return self._trainer.compute

    @property
    def step_count(self) -> int:
        """Number of batches that the training has consumed."""
        return self._trainer.step_count

    def refusal(self, group: Group) -> str | None:
        """Return why a group should not count; see `Trainer.refusal`. Only this rank computes."""
        return self._trainer.refusal(group)

    def describe_rows(self) -> str:
        """Return a sentence that says whether rows are packed, and how many processes train."""
        return f"{self._trainer.describe_rows()}, by {self._rank_group.ranks.size} processes"

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Train on one batch of groups on all ranks; see `Trainer.step`."""
        with self._rank_group.together(_with_groups("step", groups)):
            return self._trainer.step(groups)

    def find_faulty(self, groups: Sequence[Group]) -> dict[int, str]:
        """Return the faulty groups of a refused batch; see `Trainer.find_faulty`."""
        with self._rank_group.together(_with_groups("find_faulty", groups)):
            return self._trainer.find_faulty(groups)

    def forward(self, groups: Sequence[Group]) -> list[list[npt.NDArray[np.float32]]]:
        """Return log-probabilities of completion tokens; see `Trainer.forward`."""
        with self._rank_group.together(_with_groups("forward", groups)):
            return self._trainer.forward(groups)

    def rescore(
        self, groups: Sequence[Group], version: Path | None
    ) -> list[list[npt.NDArray[np.float32]]]:
        """Return scores under published weights; see `Trainer.rescore`.

        `version` must be on a disk that all ranks share.
        """
        path = None if version is None else str(version.absolute())
        with self._rank_group.together(_with_groups("rescore", groups, path)):
            return self._trainer.rescore(groups, version)

    @property
    def unrounded(self) -> frozenset[str]:
        """Names of the tensors that are published without rounding, in their own dtype."""
        return self._trainer.unrounded

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of the weights by name; see `Trainer.tensors`."""
        return self._trainer.tensors()

    def save_state(self, directory: Path) -> None:
        """Write the state of all ranks; see `Trainer.save_state`.

        `directory` must be on a disk that all ranks share.
        """
        with self._rank_group.together(RankCommand("save_state", str(directory.absolute()))):
            self._trainer.save_state(directory)


AnyTrainer = Trainer | LeadTrainer
"""The type of a learner's trainer, in one process or in several."""


def _with_groups(name: str, groups: Sequence[Group], path: str | None = None) -> RankCommand:
    return RankCommand(name, path, groups=tuple(encode_group(group) for group in groups))


# --- the others -----------------------------------------------------------------------------------


def follow(rank_group: RankGroup, build: Build, log: logging.Logger) -> None:
    """Carry out the leader's commands until the command "stop".

    Raises:
        RankError: if this rank fails, or other ranks have ended.
    """
    command = RankCommand("start")
    try:
        command = rank_group.receive()
        if command.name == "build":
            rank_group.ranks.add_up(0.0)
            trainer = build(None if command.path is None else Path(command.path))
            rank_group.ranks.add_up(0.0)
            places = find_places(trainer.tensors(), command.dtype, trainer.unrounded)
            images = FollowImages(
                rank_group.ranks, places, trainer.tensors(), trainer.weights.copy_stream
            )
            while (command := rank_group.receive()).name != "stop":
                images.check()
                rank_group.ranks.add_up(0.0)
                _carry_out(trainer, images, command, log)
    except BaseException as error:
        if not is_loss(error):
            rank_group.reasons.leave(_describe_failure(command, error))
            raise
        rank_group.reasons.leave("")  # another rank has failed
        raise RankError(
            f"rank {rank_group.ranks.rank} has lost the others at {command.name}: "
            f"{_first_line(error)}"
        ) from error
    rank_group.leave()


def _carry_out(
    trainer: Trainer, images: FollowImages, command: RankCommand, log: logging.Logger
) -> None:
    """Carry out a command.

    An error on all ranks is only logged, since the leader handles the error.
    """
    path = None if command.path is None else Path(command.path)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: trainer.step(command.batch),
        "find_faulty": lambda: trainer.find_faulty(command.batch),
        "forward": lambda: trainer.forward(command.batch),
        "rescore": lambda: trainer.rescore(command.batch, path),
        "write_rows": lambda: images.write(trainer.tensors()),
        "save_state": lambda: trainer.save_state(path or Path()),
    }
    try:
        calls[command.name]()
    except AGREED.get(command.name, ()) as error:
        log.info("%s: %s", command.name, error)
