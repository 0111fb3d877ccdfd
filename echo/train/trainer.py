"""Trainer: a policy, its optimizer, and the step that one batch of rollout groups makes.

Three operations are everything a program needs to train:

    forward_backward(batch, loss)   add the gradient of a batch to what is there
    forward(groups)                 log-probabilities, without gradient
    optim_step(settings)            clip what has added up, let AdamW apply it, begin anew

and `step` is these in a row: advantages per group, rollouts packed into micro-batches,
log-probabilities of the trained tokens at the sampling temperature, loss, gradients accumulated,
norm clipped, AdamW. Every loss is divided by counts of the whole batch, so how it was cut into
micro-batches does not matter, and rollouts whose advantage is 0 are left out of the forward and
backward pass exactly. A loss that needs more than that declares it (algo/loss.py), and gets it
here: rollouts without an advantage, whole groups in a micro-batch, the group's expectation, a first
pass over the batch, entropies, the proximal policy.

A step may make several updates: the groups are dealt into that many minibatches, each with counts
of its own. The proximal policy is the one at the start of the step. For the first update it is the
one that the gradient is taken at, and costs nothing; later ones take a pass before the first.

`step_count` grows by one with every batch consumed, so that each makes one policy version. Its
weights equal the previous ones if no rollout had an advantage (momentum and weight decay rest too).
A batch whose loss or gradient is not finite, or cannot be computed, makes no version: `step` raises
`StepError` and has changed nothing, also where updates had been made (weights and moments are kept
beside, in the host's memory, until the last one), and `find_faulty` says which groups are to blame.

Log-probabilities are those of the whole distribution at `temperature`. Sampling with top-p or top-k
has other ones: ratios then begin below 1, and the configuration refuses losses whose range ends
above that (config/losses.py).

Several processes may train one model (ranks/sharding.py): each has a trainer, and all make the same
calls with the same arguments. What they return is the same on each, and so is what they raise,
unless a process fails by itself, which ends the job. A process alone that runs out of memory in a
pass makes the pass again in smaller micro-batches, or refuses the batch; one of several fails.

Where adapters are trained there may be several, by name, on the one base in memory: `add_adapter`
adds one, and from `use` on everything here is about the adapter that it names. The model has a
place for one. What belongs to the others lies aside (weights, a gradient that waits for its
`optim_step`, moments, settings, counts), and `use` exchanges it. So no operation knows that there
are several, and neither do shards, masters, or compiled layers. They have one shape, and the rest
of the trainer in common: loss, temperature, advantages, reference.

`save_state` holds everything the next step depends on. A trainer that loads it continues bit by bit
on a CPU, on the same hardware and number of threads. On a GPU it continues from the same state and
rounds differently: sums in the backward of embeddings and attention have no fixed order there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.algo.batching import MicroBatch, TrainingRow
from echo.algo.diagnostics import Mismatch, mismatch_by_group, mismatch_sums
from echo.algo.loss import BatchScores, Loss, LossInputs, LossNeeds, needs_of
from echo.algo.losses import ClippedTokenLoss
from echo.core.errors import ConfigError, DataError, EngineError
from echo.core.rollout import Group
from echo.core.units import format_bytes
from echo.engine import allocator
from echo.engine.lora import NAME, draw_adapter
from echo.engine.weights import find_nonfinite
from echo.kernels.logprob import EntropyMode, TokenLosses
from echo.train.batch import AdvantageSettings, StepBatch, find_refusal, prepare_batch
from echo.train.findings import (
    ENTROPY,
    LOSS,
    NUM_TOKENS,
    Sums,
    gather_groups,
    gather_passes,
    pass_metrics,
)
from echo.train.optimizer import KINDS, STEP, AdamW, OptimizerSettings
from echo.train.policy import Compute, ModelSource, Policy
from echo.train.ranks import sharding
from echo.train.rescoring import Rescorer, Rescoring, read_version
from echo.train.saved_state import TRAINER_FILE, find_adapters, load, save
from echo.train.speed import Speedometer
from echo.train.step import (
    MemoryShortageError,
    NonfiniteWeightsError,
    StepError,
    StepResult,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Aside:
    """What belongs to an adapter that is not in use."""

    weights: dict[str, Tensor]
    """This rank's part of each, by name, float32."""
    gradients: dict[str, Tensor]
    """Those that have added up, as they were on the parameters."""
    optimizer: AdamW
    """With its moments; it steps what is in the model."""
    settings: OptimizerSettings
    step_count: int
    num_skipped_nonfinite: int


_Undo = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Weights and moments as they were before a step of several updates, in the host's memory."""


# --- trainer --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scored:
    """What the model says of a micro-batch; N tokens are scored."""

    logprobs: Tensor
    """[B, T] nats, with gradient if `tokens` has none."""
    entropies: Tensor
    """[N] nats."""
    tokens: TokenLosses | None = None
    """With gradient, where the loss is computed along with them."""

    @property
    def no_loss(self) -> Tensor:
        """0, with a gradient of 0: a backward that is made for the sake of other ranks."""
        return 0.0 * (self.logprobs if self.tokens is None else self.tokens.losses).sum()


T = TypeVar("T")

MakeRound = Callable[[Sequence[int], MicroBatch], StepError | None]
"""Puts a micro-batch through the model, of these rows, or of none where it only keeps step."""

FATAL_ERRORS = (ConfigError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""What no group is to blame for: settings, a machine that is too small, a device that failed."""


def _by_group(scored: _Scored, micro: MicroBatch, *, num_groups: int) -> Tensor:
    """Return the sums of `mismatch_by_group` of a micro-batch."""
    rows = micro.scored.div(micro.token_ids.shape[1], rounding_mode="floor")
    return mismatch_by_group(
        micro.pick(scored.logprobs),
        micro.pick(micro.sampler_logprobs),
        scored.entropies,
        group_of=micro.group_index.index_select(0, rows),
        num_groups=num_groups,
    )


@contextmanager
def _blaming_the_batch() -> Iterator[None]:
    """Turn what a computation on a batch raises into a `StepError`, unless it is fatal."""
    try:
        yield
    except StepError:
        raise
    except DataError as error:
        raise StepError(str(error), reason="bad_group") from error
    except FATAL_ERRORS:
        raise
    except Exception as error:
        # Whatever it is, a loss of the user's included, it happens before anything changes.
        text = f"the step raised {type(error).__name__}: {error}"
        raise StepError(text, reason="step_error") from error


def _no_adapters(name: str) -> ConfigError:
    """Return the error for an adapter that a trainer of all weights is asked for."""
    return ConfigError(
        f"adapter {name!r}: this trainer trains all weights; one whose ModelSource has a lora "
        "trains adapters"
    )


class Trainer:
    """A policy, its optimizer, and the step that joins them."""

    def __init__(
        self,
        source: ModelSource,
        compute: Compute,
        *,
        loss: Loss,
        optimizer: OptimizerSettings,
        temperature: float = 1.0,
        advantages: AdvantageSettings | None = None,
        reference: ModelSource | None = None,
        rescoring: Rescoring | None = None,
    ) -> None:
        """Load the model and start its optimizer.

        Args:
            source: the model to train; with an adapter, that alone is trained, as "default".
            compute: where and how; what is trained, gradients, and log-probabilities are float32
                whatever its type.
            loss: the policy loss of a step, for example from `make_loss`.
            optimizer: its settings in a step.
            temperature: of sampling, > 0.
            advantages: how rewards become advantages; None takes the defaults.
            reference: the frozen policy that the loss pulls towards, if it does; in no state.
            rescoring: what `rescore` is asked for, if it is.

        Raises:
            DataError: if the model cannot be loaded.
            EngineError: if it cannot be trained here.
        """
        if not 0.0 < temperature < math.inf:
            raise ValueError(f"temperature = {temperature}: must be positive and finite")
        self.device = compute.device
        is_on_gpu = self.device.type == "cuda"
        # Its few kernels go before those of the step that wait.
        self.copy_stream = torch.cuda.Stream(self.device, priority=-1) if is_on_gpu else None
        """On which others copy the weights beside the next gradient: what changes them waits for
        it. None on a CPU, where a copy is over when it has been made."""
        torch.manual_seed(compute.seed)
        self._policy = Policy(source, compute)
        self._loss = loss
        self._advantages = advantages or AdvantageSettings()
        self._settings = optimizer
        self._inv_temperature = 1.0 / temperature
        self._ranks = compute.ranks
        self._parameters = self._policy.parameters()
        self._shards = {
            name: sharding.local_parameter(tensor) for name, tensor in self._parameters.items()
        }
        """What this rank has of each parameter, in the same memory; all of it, if it is alone."""
        self._adapter = None if source.lora is None else NAME
        self._aside: dict[str, _Aside] = {}
        self._reference = self._load_reference(reference)
        self._rescorer = None if rescoring is None else Rescorer(source, compute, rescoring)
        with self._memory_of_adamw():
            self._optimizer = KINDS[compute.optimizer_state](self._shards)
        self._speed = Speedometer(self._policy.flops, compute)
        self._notices: list[str] = []
        self._by_group: dict[int, Mismatch] = {}
        """Of the groups of the step that is made."""
        self._num_skipped_nonfinite = self._step_count = 0

    @property
    def _needs(self) -> LossNeeds:
        """What the step's own loss declares."""
        return needs_of(self._loss)

    @property
    def compute(self) -> Compute:
        """Where and how it computes; micro-batches may have become smaller than they were."""
        return self._policy.compute

    @property
    def _policies(self) -> list[Policy]:
        """Every model that a micro-batch goes through."""
        policies = [self._policy]
        if self._reference is not None:
            policies.append(self._reference)
        if self._rescorer is not None:
            policies.append(self._rescorer.policy)
        return policies

    def _load_reference(self, reference: ModelSource | None) -> Policy | None:
        """Return the reference policy if the loss needs one.

        Raises:
            ValueError: if it needs one and there is none.
            DataError: if it has another vocabulary than the policy.
        """
        if not self._needs.reference_logprobs:
            return None
        if reference is None:
            raise ValueError("the loss pulls towards a reference policy, and none is given")
        compute = replace(self.compute, gradient_checkpointing=False)
        policy = Policy(reference, compute, is_frozen=True)
        check_vocabularies(reference.model_dir, policy.vocab_size, self._policy.vocab_size)
        if policy.is_packed != self._policy.is_packed:  # both see the same micro-batches
            for one, other in ((policy, self._policy), (self._policy, policy)):
                one.pad_rows(f"the reference shares them, and {other.describe_rows()}")
        if not policy.can_share_prompts:
            self._policy.can_share_prompts = False
        return policy

    # --- adapters by name ------------------------------------------------------------------------

    @property
    def adapter(self) -> str | None:
        """Name of the adapter in use; None where all weights are trained."""
        return self._adapter

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of all adapters, sorted."""
        return () if self._adapter is None else tuple(sorted({self._adapter, *self._aside}))

    def add_adapter(
        self,
        name: str,
        *,
        optimizer: OptimizerSettings,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add an adapter on the same base, of the same shape; `use` begins with it.

        Args:
            name: of letters, digits, "_", "-" and "."; its state has a directory of this name.
            optimizer: its settings in a step.
            tensors: that it starts from, whole; None for one that changes nothing yet.

        Raises:
            ConfigError: if there is such an adapter already, or none can be.
            DataError: if the tensors are those of an adapter of another shape.
            EngineError: if there is no room for its moments.
        """
        if self._adapter is None:
            raise _no_adapters(name)
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ConfigError(
                f'adapter {name!r}: a name is of letters, digits, "_", "-" and ".", and begins '
                "with none of the last two"
            )
        if name in self.adapters:
            raise ConfigError(
                f"adapter {name!r}: there is one already; use() it, or take another name"
            )
        own = self._policy.tensors()
        if tensors is None:
            shapes = {key: tensor.shape for key, tensor in own.items()}
            tensors = draw_adapter(shapes, seed=self.compute.seed + len(self.adapters))
        try:
            self._policy.check(tensors)
        except DataError as error:
            raise DataError(
                f"adapter {name!r}: {error}; the adapters of a trainer have one shape, which its "
                "ModelSource.lora says: another shape needs another trainer"
            ) from error
        weights = {key: torch.empty_like(shard.detach()) for key, shard in self._shards.items()}
        for key, part in weights.items():
            sharding.copy_local(sharding.like(part, own[key]), tensors[key])
        with self._memory_of_adamw():
            moments = KINDS[self.compute.optimizer_state](self._shards)
        self._aside[name] = _Aside(
            weights=weights,
            gradients={},
            optimizer=moments,
            settings=optimizer,
            step_count=0,
            num_skipped_nonfinite=0,
        )

    @torch.no_grad()
    def use(self, name: str) -> None:
        """Go on with an adapter: until the next call all else is about this one.

        A gradient that waits for `optim_step` waits on, for the time when its adapter is in use.

        Raises:
            ConfigError: if there is none of this name.
        """
        if name == self._adapter:
            return
        if self._adapter is None:
            raise _no_adapters(name)
        if name not in self._aside:
            raise ConfigError(
                f"adapter {name!r}: this trainer has {', '.join(self.adapters)}; add_adapter() "
                "adds another one"
            )
        own = _Aside(
            weights={key: shard.detach().clone() for key, shard in self._shards.items()},
            gradients={
                key: tensor.grad
                for key, tensor in self._parameters.items()
                if tensor.grad is not None
            },
            optimizer=self._optimizer,
            settings=self._settings,
            step_count=self._step_count,
            num_skipped_nonfinite=self._num_skipped_nonfinite,
        )
        other = self._aside.pop(name)
        self._aside[self._adapter] = own
        self._adapter = name
        self._wait_for_copies()
        for key, shard in self._shards.items():
            shard.copy_(other.weights[key])
            self._parameters[key].grad = other.gradients.get(key)
        self._policy.round()
        self._optimizer, self._settings = other.optimizer, other.settings
        self._step_count = other.step_count
        self._num_skipped_nonfinite = other.num_skipped_nonfinite

    def _check_gradient_is_here(self) -> None:
        """Refuse to update an adapter that has no gradient while another one's waits.

        Raises:
            ConfigError: naming those that have one.
        """
        waiting = sorted(name for name, aside in self._aside.items() if aside.gradients)
        if waiting and all(tensor.grad is None for tensor in self._parameters.values()):
            raise ConfigError(
                f"optim_step: the adapter in use, {self._adapter!r}, has no gradient, and one of "
                f"{', '.join(waiting)} waits: use() that one before"
            )

    def _with_each_adapter(self, act: Callable[[str], None]) -> None:
        """Call a function with the name of each adapter while it is in use."""
        before = self._adapter
        assert before is not None, "it is asked of several"
        try:
            for name in self.adapters:
                self.use(name)
                act(name)
        finally:
            self.use(before)

    # --- the three operations --------------------------------------------------------------------

    def forward_backward(self, batch: StepBatch, loss: Loss) -> Sums:
        """Add the gradient of a batch to that of the calls since the last `optim_step`.

        Args:
            batch: what to train on, with the counts that the loss divides by.
            loss: any; it gets what it declares to need, rollouts left out of `batch` excepted.

        Returns:
            What the pass found (train/findings.py), the loss as "loss/policy".

        Raises:
            StepError: if it cannot be computed; the gradient of earlier calls is gone too.
        """
        has_gradient = any(tensor.grad is not None for tensor in self._parameters.values())
        try:
            return self._in_memory(
                batch.samples,
                partial(self._accumulate_gradients, batch, loss),
                can_begin_again=not has_gradient,
            )
        except BaseException:
            self._drop_gradients()
            raise

    @torch.no_grad()
    def forward(self, groups: Sequence[Group]) -> list[list[npt.NDArray[np.float32]]]:
        """Return this policy's log-probability of every completion token, masked ones included.

        Returns:
            For each group and rollout, [T] nats at the sampling temperature.

        Raises:
            StepError: if the memory does not hold one of them.
        """
        return self._score_groups(groups, self._policy, self._own_logprobs)

    @torch.no_grad()
    def rescore(
        self, groups: Sequence[Group], version: Path | None
    ) -> list[list[npt.NDArray[np.float32]]]:
        """Return what published weights say of every completion token.

        Args:
            groups: any, with tokens of any version.
            version: the safetensors file of the weights; None for those that these would be
                published as.

        Returns:
            For each group and rollout, [T, 2] nats: log-probabilities at the sampling temperature,
            and the log of the mass that top_k and top_p leave.

        Raises:
            StorageError: if the file cannot be read.
            StepError: if the memory does not hold one of them.
        """
        assert self._rescorer is not None, "it takes a model of its own, and none was asked for"
        if version is None:
            self._rescorer.take(self._policy.tensors())
        else:
            self._rescorer.policy.load(read_version(version, self._ranks))
        return self._score_groups(groups, self._rescorer.policy, self._rescorer.score)

    def _score_groups(
        self, groups: Sequence[Group], policy: Policy, score: Callable[[MicroBatch], Tensor]
    ) -> list[list[npt.NDArray[np.float32]]]:
        """Return the scores of each group and rollout; arguments as for `_score_rows`."""
        rows = [
            TrainingRow(prompt_ids=group.prompt_ids, rollout=rollout, advantage=0.0)
            for group in groups
            for rollout in group.rollouts
        ]
        scores = iter(self._in_memory(rows, partial(self._score_rows, rows, policy, score)))
        return [[next(scores) for _ in group.rollouts] for group in groups]

    def optim_step(self, settings: OptimizerSettings) -> float:
        """Clip the gradient that has added up, apply it, and begin anew.

        Args:
            settings: of this update; its learning rate is that of the step under way.

        Returns:
            The norm of the gradient before it was clipped.

        Raises:
            StepError: if it is not finite; it is dropped, and nothing else has changed.
            ConfigError: if there is none, and another adapter has one; nothing has changed.
            EngineError: if the memory is too small for AdamW; weights may have changed, so there is
                nothing to go on with but the last checkpoint.
        """
        self._check_gradient_is_here()
        try:
            norm = self._finite_grad_norm()
            for name, shard in self._shards.items():
                gradient = self._parameters[name].grad
                shard.grad = None if gradient is None else sharding.local(gradient)
            torch.nn.utils.clip_grads_with_norm_(
                list(self._shards.values()),
                settings.max_grad_norm,
                torch.full((), norm, device=self.device),  # a copy of it would wait for a GPU
            )
            self._wait_for_copies()
            with self._memory_of_adamw():
                self._optimizer.step(
                    learning_rate=settings.learning_rate_at(self._step_count + 1),
                    betas=settings.betas,
                    weight_decay=settings.weight_decay,
                )
            self._policy.round()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # or its time counts as another part's
        finally:
            self._drop_gradients()
        return norm

    def _wait_for_copies(self) -> None:
        """Have the device change the weights after they have been copied."""
        if self.copy_stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.copy_stream)

    @contextmanager
    def _memory_of_adamw(self) -> Iterator[None]:
        """Say what AdamW takes where there is no room for it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            num_trained = sum(shard.numel() for shard in self._shards.values())
            raise EngineError(
                f'AdamW with optimizer.state = "{self.compute.optimizer_state}" ran out of memory '
                f"beside {format_bytes(8 * num_trained)} of weights and gradients: --dry-run tells "
                "what is needed, and which setting makes it less"
            ) from error

    def _drop_gradients(self) -> None:
        for tensor in (*self._parameters.values(), *self._shards.values()):
            tensor.grad = None
        if self.device.type == "cpu":
            allocator.give_back()  # with the activations, which have other sizes in each step

    # --- a step ----------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Batches consumed so far: the step of the policy version that these weights are."""
        return self._step_count

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Train on one batch of groups.

        Args:
            groups: at least one, each with two or more rollouts.

        Raises:
            StepError: if the batch cannot be trained on; nothing was changed.
        """
        self._speed.begin()
        self._by_group = {}
        try:
            metrics = self._train(groups)
        except StepError as error:
            self._num_skipped_nonfinite += error.reason == "nonfinite_gradient"
            raise
        metrics["lr"] = self._settings.learning_rate_at(self._step_count + 1)
        metrics["optimizer/skipped_nonfinite"] = self._num_skipped_nonfinite
        self._step_count += 1
        notices, self._notices = tuple(self._notices), []
        return StepResult(
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            speed=self._speed.metrics(),
            notices=notices,
            by_group=self._by_group,
        )

    def find_faulty(self, groups: Sequence[Group]) -> dict[int, str]:
        """Return the groups of a batch that `step` refused that fail alone too: id -> reason.

        It takes one more pass over them, and changes nothing.
        """
        found: dict[int, str] = {}
        for group in groups:
            try:
                batch = self._prepare([group])
                if batch.samples:
                    self._take_gradient(batch)
                    self._finite_grad_norm()
            except StepError as error:
                found[group.group_id] = error.reason
            finally:
                self._drop_gradients()
        return found

    def refusal(self, group: Group) -> str | None:
        """Return why a group should not count towards a step, or None (train/batch.py).

        It only reads what never changes, so other threads may ask while a step is made.
        """
        return find_refusal(
            group,
            settings=self._advantages,
            needs=self._needs,
            vocab_size=self._policy.vocab_size,
        )

    def describe_rows(self) -> str:
        """Say in one sentence how rollouts go through the model, and why."""
        return self._policy.describe_rows()

    # --- weights and state -----------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by name, tied ones once, not copied: the next step changes them.

        Each of several ranks has its part of them (ranks/sharding.py).
        """
        return self._policy.tensors()

    @property
    def unrounded(self) -> frozenset[str]:
        """Names of tensors that are published in their own dtype."""
        return self._policy.unrounded

    def snapshot(self) -> dict[str, Tensor]:
        """Return a copy of the weights on the CPU by name, tied ones once; of a process alone."""
        return {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors().items()
        }

    def save_state(self, directory: Path) -> None:
        """Write everything the next step depends on into an existing directory.

        Several adapters are all written; a gradient that waits is not.

        Raises:
            NonfiniteWeightsError: if the weights of one hold NaN or infinity.
            StorageError: if it cannot be written.
        """
        if not self._aside:
            self._save(directory)
            return

        def save_adapter(name: str) -> None:
            if self._ranks.rank == 0:
                with suppress(OSError):  # of which the files tell, on all ranks
                    (directory / name).mkdir(exist_ok=True)
            self._save(directory / name)

        self._with_each_adapter(save_adapter)

    def _save(self, directory: Path) -> None:
        """Write the state of what is in the model."""
        weights = self._policy.tensors()
        own = find_nonfinite({name: sharding.local(part) for name, part in weights.items()})
        told = self._ranks.gather("\n".join(own).encode())
        names = sorted({name for each in told for name in each.decode().split("\n") if name})
        if names:
            raise NonfiniteWeightsError(names, num_tensors=len(weights))
        moments = self._optimizer.tensors()
        save(
            directory,
            weights=weights,
            moments={name: self._as_cut(name, part) for name, part in moments.items()},
            device=self.device,
            counters={
                "step_count": self._step_count,
                "num_skipped_nonfinite": self._num_skipped_nonfinite,
            },
            ranks=self._ranks,
        )

    def _as_cut(self, name: str, part: Tensor) -> Tensor:
        """Return this rank's rows of an optimizer's tensor as a part of the whole one."""
        parameter, _, kind = name.rpartition("/")
        return part if kind == STEP else sharding.like(part, self._parameters[parameter])

    def load_state(self, directory: Path) -> None:
        """Continue where `save_state` left off, on however many ranks.

        Raises:
            StorageError: if the files are missing or damaged.
            DataError: if they belong to another model, or to other adapters than there are here.
        """
        found = find_adapters(directory)
        if not found and self._aside and (directory / TRAINER_FILE).exists():
            raise DataError(
                f"{directory} holds the state of one adapter, and this trainer has "
                f"{', '.join(self.adapters)}: load it before add_adapter()"
            )
        if not found:
            self._load(directory)
            return
        if found != self.adapters:
            raise DataError(
                f"{directory} holds the adapters {', '.join(found)}, and this trainer has "
                f"{', '.join(self.adapters) or 'none'}: make them the same with add_adapter(), or "
                "load the directory of one into a trainer of one adapter"
            )
        self._with_each_adapter(lambda name: self._load(directory / name))

    def _load(self, directory: Path) -> None:
        """Read the state of what is in the model."""
        own = self._policy.tensors()
        self._wait_for_copies()
        if self._ranks.is_alone:
            weights, moments, counters = load(directory, self.device)
            self._policy.load(weights)
        else:
            weights, moments, counters = load(directory, self.device, own=own)
            for name, tensor in own.items():
                sharding.copy_local(tensor, weights[name])
        self._optimizer.load(moments)
        self._step_count = counters["step_count"]
        self._num_skipped_nonfinite = counters["num_skipped_nonfinite"]

    # --- parts of a step -------------------------------------------------------------------------

    def _train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make the updates of one batch; return the metrics. `grad_norm` only if there was one.

        Raises:
            StepError: if one of them cannot be made; weights and moments are as before.
        """
        whole = self._prepare(groups)
        batches = self._with_proximal_logprobs(self._minibatches(groups, whole))
        if not batches:
            return whole.metrics | {"loss/policy": 0.0}
        undo = self._keep() if len(batches) > 1 else None
        passes, norms = [], []
        try:
            for batch in batches:
                with self._speed.part("forward_backward"):
                    passes.append(self._take_gradient(batch))
                with self._speed.part("optimizer"):
                    norms.append(self.optim_step(self._settings))
        except BaseException:
            if undo is not None:
                self._put_back(undo)
            raise
        return whole.metrics | pass_metrics(passes) | {"grad_norm": sum(norms) / len(norms)}

    def _prepare(self, groups: Sequence[Group]) -> StepBatch:
        with _blaming_the_batch():  # all ranks find the same
            return prepare_batch(
                groups,
                settings=self._advantages,
                needs=self._needs,
                vocab_size=self._policy.vocab_size,
            )

    def _minibatches(self, groups: Sequence[Group], whole: StepBatch) -> list[StepBatch]:
        """Return what each update trains on; without any where nothing has a gradient.

        Groups come in the order of their arrival, the quick ones first, so they are dealt.
        """
        count = min(self._settings.minibatches_per_step, len(groups))
        batches = [whole]
        if count > 1:
            batches = [self._prepare(groups[first::count]) for first in range(count)]
        return [batch for batch in batches if batch.samples]

    def _with_proximal_logprobs(self, batches: Sequence[StepBatch]) -> list[StepBatch]:
        """Return the batches; all but the first with the scores of the policy as it is now."""
        if not self._needs.proximal_logprobs:
            return list(batches)
        later = []
        for batch in batches[1:]:
            rows = batch.samples
            make = partial(self._score_rows, rows, self._policy, self._own_logprobs)
            scores = self._in_memory(rows, make)
            scored = [
                replace(row, proximal_logprobs=score)
                for row, score in zip(rows, scores, strict=True)
            ]
            later.append(replace(batch, samples=scored))
        return [*batches[:1], *later]

    def _take_smaller_micro_batches(
        self, rows: Sequence[TrainingRow], shortage: MemoryShortageError
    ) -> None:
        """Halve the budget below what the memory did not hold, and note it.

        Raises:
            StepError: if that was what cannot be cut.
        """
        num_tokens = shortage.num_tokens
        size = sum(row.num_inputs for row in rows)
        what = (
            f"step {self._step_count + 1}, {len(rows)} rollouts of {size} tokens, ran out of "
            f"memory with {num_tokens} tokens in a micro-batch"
        )
        if shortage.num_rows == 1 or num_tokens > self.compute.micro_batch_tokens:
            text = (
                f"{what}, which cannot be cut: set learner.gradient_checkpointing = true, or lower "
                f"sampling.max_completion_tokens ({shortage})"
            )
            raise StepError(text, reason="out_of_memory")
        smaller = num_tokens // 2
        for policy in self._policies:
            policy.compute = replace(policy.compute, micro_batch_tokens=smaller)
        self._speed.micro_batch_tokens = smaller
        self._notices.append(
            f"{what}; it goes on with learner.micro_batch_tokens = {smaller}: set that, or "
            f"learner.gradient_checkpointing = true, before the next start ({shortage})"
        )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # others may have the memory that nothing lies in

    def _take_gradient(self, batch: StepBatch) -> Sums:
        """Add the gradient of a batch under the step's own loss.

        Raises:
            StepError: if there is none, or the loss is not finite.
        """
        found = self.forward_backward(batch, self._loss)
        if not math.isfinite(found[LOSS]):
            self._drop_gradients()
            raise StepError(f"the loss is {found[LOSS]:g}", reason="nonfinite_gradient")
        return found

    def _finite_grad_norm(self) -> float:
        gradients = [tensor.grad for tensor in self._parameters.values() if tensor.grad is not None]
        norm = sharding.norm_over(self._ranks, [sharding.local(each) for each in gradients])
        if not math.isfinite(norm):
            text = f"the norm of the gradient is {norm:g}"
            raise StepError(text, reason="nonfinite_gradient")
        return norm

    def _keep(self) -> _Undo:
        kept = [
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            for tensors in (self._shards, self._optimizer.tensors())
        ]
        return kept[0], kept[1]

    @torch.no_grad()
    def _put_back(self, undo: _Undo) -> None:
        weights, moments = undo
        for name, shard in self._shards.items():
            shard.copy_(weights[name])
        self._policy.round()
        self._optimizer.load(moments)

    # --- parts of a pass -------------------------------------------------------------------------
    #
    # Where there are several ranks all of them make a pass together, in rounds of a micro-batch
    # each: what is called within a round is called by all of them, as often and in the same order,
    # whatever becomes of one's own micro-batch.

    def _in_memory(
        self, rows: Sequence[TrainingRow], make: Callable[[], T], *, can_begin_again: bool = True
    ) -> T:
        """Make a pass; a process alone that lacks memory makes it again in smaller micro-batches.

        Args:
            rows: that go through the model.
            make: the pass.
            can_begin_again: whether it may be made again without its caller.

        Raises:
            StepError: if it cannot be made, or not again.
        """
        # What happens to one of several ranks alone is no batch's fault, and ends the job.
        blaming = _blaming_the_batch if self._ranks.is_alone else nullcontext
        while True:
            try:
                with blaming():
                    return make()
            except MemoryShortageError as error:
                shortage = error
            self._take_smaller_micro_batches(rows, shortage)
            if not can_begin_again:
                text = "the gradients of earlier calls were lost when the memory ran out"
                raise StepError(text, reason="out_of_memory")

    def _make_rounds(
        self, micro_batches: Iterable[tuple[Sequence[int], MicroBatch]], make: MakeRound
    ) -> None:
        """Make the rounds of a pass, and find out what all ranks have to know of it.

        Args:
            micro_batches: of this rank, on the CPU.
            make: makes a round, and returns what it has failed with if that is this rank's affair
                alone.

        Raises:
            MemoryShortageError: if the memory of a process alone was too small.
            StepError: on all ranks, if `make` returned one on any.
            torch.OutOfMemoryError: if the memory of one of several ranks was too small.
        """
        ranks, failure = self._ranks, None
        for indices, micro in micro_batches:
            try:
                failure = make(indices, micro.to(self.device)) or failure
                continue
            except torch.OutOfMemoryError as error:
                if not ranks.is_alone:
                    raise
                shortage = MemoryShortageError(
                    str(error).partition("\n")[0],
                    num_rows=len(indices),
                    num_tokens=micro.input_ids.numel(),
                )
            raise shortage  # here the error is gone, and with it what its frames held
        ranks.raise_together(failure)

    def _accumulate_gradients(self, batch: StepBatch, loss: Loss) -> Sums:
        """Run forward and backward over the micro-batches of a batch."""
        if not batch.samples:
            return {LOSS: 0.0}
        needs = needs_of(loss)
        scores = self._score_batch(batch.samples, needs) if needs.batch_scores else None
        found: list[dict[str, Tensor]] = []
        by_group: list[Tensor] = []
        passed: list[tuple[list[tuple[int, int]], int]] = []
        has_failed = False

        def make_round(indices: Sequence[int], micro: MicroBatch) -> StepError | None:
            nonlocal has_failed
            failure: StepError | None = None
            objective: Tensor | None = None
            scored = self._scored(micro, loss)
            reference = self._reference_logprobs(micro)
            if indices and not has_failed:
                try:
                    with _blaming_the_batch():
                        objective, part = self._part(scored, micro, reference, batch, loss, scores)
                    found.append(part)
                    by_group.append(_by_group(scored, micro, num_groups=len(batch.group_ids)))
                except StepError as error:
                    if self._ranks.is_alone:
                        raise
                    has_failed, failure = True, error
            objective = scored.no_loss if objective is None else objective
            objective.backward()
            rows = [batch.samples[index] for index in indices]
            passed.append((micro.spans(rows), sum(row.num_trained for row in rows)))
            return failure

        micro_batches = self._policy.micro_batches(batch.samples, whole_groups=needs.whole_groups)
        try:
            self._make_rounds(self._speed.packing(micro_batches), make_round)
        except MemoryShortageError:
            self._drop_gradients()
            raise
        for spans, num_scored in passed:
            self._speed.passed(spans, num_scored, is_packed=self._policy.is_packed)
        sums = gather_groups(by_group, self._ranks)
        self._by_group |= {
            group_id: Mismatch(*row) for group_id, row in zip(batch.group_ids, sums, strict=False)
        }
        return gather_passes(found, self._ranks)

    def _logprobs(self, micro: MicroBatch, *, entropy: EntropyMode) -> tuple[Tensor, Tensor]:
        return self._policy.logprobs(micro, inv_temperature=self._inv_temperature, entropy=entropy)

    def _own_logprobs(self, micro: MicroBatch) -> Tensor:
        return self._logprobs(micro, entropy="none")[0]

    def _scored(self, micro: MicroBatch, loss: Loss) -> _Scored:
        """Put a micro-batch through the model, as the loss needs it."""
        if not isinstance(loss, ClippedTokenLoss) or loss.fused_clip is None:
            has_bonus = needs_of(loss).entropies
            logprobs, entropies = self._logprobs(micro, entropy="grad" if has_bonus else "value")
            return _Scored(logprobs=logprobs, entropies=entropies)
        tokens = self._policy.token_losses(
            micro, clip=loss.fused_clip, inv_temperature=self._inv_temperature
        )
        return _Scored(logprobs=tokens.logprobs, entropies=tokens.entropies, tokens=tokens)

    def _part(
        self,
        scored: _Scored,
        micro: MicroBatch,
        reference: Tensor | None,
        batch: StepBatch,
        loss: Loss,
        scores: BatchScores | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch, with gradient, and what was found, by name."""
        inputs = self._loss_inputs(micro, scored.logprobs, batch, loss, scores)
        inputs = replace(inputs, reference_logprobs=reference)
        if scored.tokens is not None:
            assert isinstance(loss, ClippedTokenLoss)
            output = loss.from_tokens(scored.tokens.losses, scored.tokens.ratios, inputs)
        else:
            if needs_of(loss).entropies:
                inputs = replace(inputs, entropies=micro.spread(scored.entropies))
            output = loss(inputs)
        learner = micro.pick(scored.logprobs.detach())
        return output.loss, {
            LOSS: output.loss.detach(),
            NUM_TOKENS: torch.full((), len(learner), device=self.device),
            ENTROPY: scored.entropies.detach().sum(dtype=torch.float64),
            **mismatch_sums(learner, micro.pick(micro.sampler_logprobs)),
            **output.token_counts,
        }

    def _loss_inputs(
        self,
        micro: MicroBatch,
        logprobs: Tensor,
        batch: StepBatch,
        loss: Loss,
        scores: BatchScores | None,
    ) -> LossInputs:
        needs = needs_of(loss)
        proximal = micro.proximal_logprobs
        if needs.proximal_logprobs and proximal is None:
            proximal = logprobs.detach()
        return LossInputs(
            learner_logprobs=logprobs,
            sampler_logprobs=micro.sampler_logprobs,
            advantages=micro.advantages,
            completion_mask=micro.completion_mask,
            num_tokens=batch.num_tokens,
            num_rollouts=batch.num_rollouts,
            group_index=micro.group_index,
            proximal_logprobs=proximal,
            staleness=self._step_count - micro.version_steps,
            log_expectation=micro.log_expectations if needs.group_expectation else None,
            batch_scores=scores,
        )

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        logprobs, _ = self._reference.logprobs(
            micro, inv_temperature=self._inv_temperature, entropy="none"
        )
        return logprobs

    @torch.no_grad()
    def _score_batch(self, samples: Sequence[TrainingRow], needs: LossNeeds) -> BatchScores:
        """Return every trained token's log-ratio and advantage, by a pass without gradient."""
        log_ratios = [torch.empty(0, device=self.device)]
        advantages = [torch.empty(0, device=self.device)]

        def make_round(indices: Sequence[int], micro: MicroBatch) -> None:
            logprobs, _ = self._logprobs(micro, entropy="none")
            if indices:
                log_ratios.append(micro.pick(logprobs - micro.sampler_logprobs))
                advantages.append(micro.pick(micro.advantages[:, None].expand_as(logprobs)))

        micro_batches = self._policy.micro_batches(samples, whole_groups=needs.whole_groups)
        self._make_rounds(micro_batches, make_round)
        own = {"log_ratios": torch.cat(log_ratios), "advantages": torch.cat(advantages)}
        parts = self._ranks.gather_tensors(own)
        return BatchScores(
            **{name: torch.cat([part[name] for part in parts]).to(self.device) for name in own}
        )

    @torch.no_grad()
    def _score_rows(
        self,
        rows: Sequence[TrainingRow],
        policy: Policy,
        score: Callable[[MicroBatch], Tensor],
    ) -> list[npt.NDArray[np.float32]]:
        """Return [T, ...] scores of every token of each row, by a pass without gradient.

        Args:
            rows: any.
            policy: that they go through.
            score: returns the scores of a micro-batch, [B, T, ...].
        """
        own: dict[str, Tensor] = {}

        def make_round(indices: Sequence[int], micro: MicroBatch) -> None:
            for index, values in zip(indices, score(micro).cpu(), strict=False):
                own[str(index)] = values[: rows[index].rollout.num_tokens].clone()

        self._make_rounds(policy.micro_batches(rows, score_all=True), make_round)
        parts = self._ranks.gather_tensors(own)
        scores = {name: values.numpy() for part in parts for name, values in part.items()}
        return [scores[str(index)] for index in range(len(rows))]


def check_vocabularies(reference_dir: Path, num_reference: int, num_own: int) -> None:
    """Refuse a reference model that knows other token ids than the policy.

    Raises:
        DataError: with the number of each.
    """
    if num_reference != num_own:
        raise DataError(
            f"{reference_dir}: the reference model has {num_reference} token ids, the one being "
            f"trained {num_own}; their tokenizers differ"
        )
