"""Contract of a rollout engine: weights in, versioned tokens out.

An engine knows nothing of networks or rewards. Its methods may be called from several threads at
once: `load` from one while `generate` runs in another swaps the weights in flight, between two
tokens, and every token says which version sampled it.

An engine that holds several versions side by side (`num_versions`) swaps nothing: a call keeps the
version that it began with to its end, and `load` puts a new one beside it, from which calls sample
that begin afterwards. Neither waits for the other.

The engine's `kv_cache` decides about keys and values that the old weights computed: "recompute"
runs the unfinished sequences through the new weights once more, so that the next tokens are sampled
exactly as the new version would; it costs one prefill of all that is under way. "keep" goes on at
once with the old ones: the next tokens then come from a mixture of both versions. Their
log-probabilities are still the true ones of the sampling distribution, but no single version
reproduces them, so that the learner sees a log-ratio other than 0 even where it has not moved.
"""

from __future__ import annotations

import abc
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.weights.manifest import TensorSpec
from echo.weights.store.patches import Patch

if TYPE_CHECKING:
    from torch import Tensor


UNVERSIONED = PolicyVersion(0, 0)
"""Names the weights of an engine whose caller does not tell versions apart; lineages begin at 1."""

KvCache = Literal["recompute", "keep"]

FinishReason = Literal["stop", "length", "abort", "nonfinite"]


MIN_TEMPERATURE = 0.01
"""vLLM raises what is lower to this, and the learner would divide the logits by another number."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: the same for every request of a call."""

    temperature: float
    """Divides the logits; at least MIN_TEMPERATURE."""
    top_p: float
    """Keep the fewest most likely tokens that reach this probability; 1 keeps all."""
    top_k: int
    """Keep this many most likely tokens (more where they tie), before top_p; 0 keeps all."""
    max_completion_tokens: int
    """Tokens after which a completion ends with "length", at least 1."""
    stop_ids: tuple[int, ...]
    """Token ids that end a completion with "stop"; the id is part of the completion."""
    greedy: bool = False
    """Take the most likely token. Temperature, top_p and top_k then play no part."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": (
                self.temperature >= MIN_TEMPERATURE,
                f"at least {MIN_TEMPERATURE}; for the most likely token use greedy",
            ),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "at least 0 (0 = off)"),
            "max_completion_tokens": (self.max_completion_tokens >= 1, "at least 1"),
        }
        for name, (is_valid, rule) in checks.items():
            if not is_valid:
                raise ValueError(f"sampling.{name} is {getattr(self, name)}, must be {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The load that an engine is likely to get at once; more may come, and longer ones."""

    num_rollouts: int
    prompt_tokens: int
    """Of the longest prompt."""
    rollout_tokens: int
    """Of the longest rollout, its prompt included."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One completion to sample."""

    request_id: str
    prompt_ids: npt.NDArray[np.int32]
    """[P] token ids, at least one."""
    seed: int
    """Fixes the random choices of this request, whatever else is in the batch."""
    prefix_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """[K] tokens of the completion that were sampled before, to be continued; they count towards
    the limit and are not returned again. Continue with a new seed: the old one would repeat the
    random choices of the beginning."""

    @property
    def context_ids(self) -> npt.NDArray[np.int32]:
        """[P + K] all that the model sees before the first new token."""
        if not len(self.prefix_ids):
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, self.prefix_ids])

    def check(self, *, window: int | None, vocab_size: int, max_completion_tokens: int) -> None:
        """Refuse what no engine can sample.

        Args:
            window: longest sequence of the model in tokens; None if it has no limit.
            vocab_size: token ids lie below it.
            max_completion_tokens: of the sampling, prefix included.

        Raises:
            EngineError: naming the request and the numbers.
        """
        ids = self.context_ids
        where = f"request {self.request_id}"
        if not len(self.prompt_ids):
            raise EngineError(f"{where}: the prompt is empty")
        if len(self.prefix_ids) >= max_completion_tokens:
            raise EngineError(
                f"{where}: {len(self.prefix_ids)} tokens were sampled before and "
                f"{max_completion_tokens} are allowed, which leaves none to sample"
            )
        if window is not None and len(ids) >= window:
            raise EngineError(
                f"{where}: the prompt has {len(ids)} tokens, the model's window "
                f"{window}, which leaves no space for a completion; shorten the prompt"
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise EngineError(
                f"{where}: the prompt has token ids from {ids.min()} to {ids.max()}, the model a "
                f"vocabulary of {vocab_size}; tokenizer and model do not belong together"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The sample of one request."""

    request_id: str
    token_ids: npt.NDArray[np.int32]
    """[T] sampled ids, the stop token included; empty only after an abort."""
    logprobs: npt.NDArray[np.float32]
    """[T] natural log-probability of each id under the distribution it was drawn from: after
    temperature, top_k and top_p, renormalised. When greedy, under the plain softmax of the
    logits (temperature 1), since the choice itself was certain."""
    finish_reason: FinishReason
    """"stop" (a stop id), "length" (the limit, or the end of the model's window), "abort", or
    "nonfinite": the model gives no probabilities, as where it overflows. The last log-probability
    then is NaN or infinite, and no such completion may be trained on."""
    policy_versions: npt.NDArray[np.int32]
    """[T, 2] (lineage, step) of the weights that sampled each token."""


def describe_nonfinite(completion: Completion) -> str:
    """Say what is wrong with a completion that ended with "nonfinite"."""
    version = PolicyVersion(*completion.policy_versions[-1].tolist())
    under = "" if version == UNVERSIONED else f" under {version}"
    return (
        f"the model gave a log-probability of {completion.logprobs[-1]:g} at token "
        f"{len(completion.token_ids) - 1} of request {completion.request_id}{under}: the weights "
        "hold NaN, it overflows in the engine's dtype, or this device computes wrongly"
    )


class Watcher:
    """The caller of `generate` while it runs: told what has come, and asked whether to go on."""

    def should_stop(self) -> bool:
        """Return whether unfinished completions are to be returned as they are, as "abort".

        Asked again and again, several times a second.
        """
        return False

    def on_tokens(self, number: int) -> None:
        """Take note, as often, of how many tokens have come since the last time."""

    def on_progress(self, number: int) -> None:
        """Take note of signs of life while no token comes, as where long contexts are read."""

    def on_completion(self, completion: Completion) -> None:
        """Take a completion as soon as it has ended by itself, in the thread of the call.

        It is among those returned, too.
        """


NOBODY = Watcher()
"""Waits for the end."""


class Engine(abc.ABC):
    """Sample completions from a causal language model."""

    takes_patches = False
    """Whether weights can be changed in place, by `patch`."""
    is_continuous = False
    """Whether requests join those that already run; else calls of `generate` wait in line."""
    window: int | None = None
    """Longest sequence, prompt and completion together, in tokens; None if there is no limit."""
    num_versions = 1
    """Versions that calls may sample from concurrently, the newest ones; where it is 1, those under
    way go on under the next."""

    @property
    @abc.abstractmethod
    def installed(self) -> PolicyVersion | None:
        """The version that samples; None before the first `load`."""

    @abc.abstractmethod
    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion = UNVERSIONED) -> None:
        """Install weights, in flight if `generate` runs: all of them, or none.

        It returns when the next token will be sampled from them. Requests that asked for exactly
        the version before are finished first. Of several versions, calls that begin afterwards
        sample from it; it waits only while more than `num_versions` older ones are in use.

        Args:
            tensors: by name; tied ones once, under either name. The engine may use their memory as
                its own until the next version is installed, so it must stay as it is.
            version: what to call them.

        Raises:
            EngineError: if they do not fit this model, or the engine cannot take them over. It
                then samples from the version before, as if nothing had been asked.
        """

    def patch(self, patch: Patch, image: memoryview, specs: Sequence[TensorSpec]) -> None:
        """Install the version that a patch makes of the installed one, in flight like `load`.

        Only where `takes_patches`. The pause lasts as long as the changed words take to be written.

        Args:
            patch: what changes of the installed version.
            image: the memory under the tensors of the last `load`, writable; the patch is written
                to it.
            specs: what lies where in it.

        Raises:
            EngineError: if it fails; the engine then samples from the version before, and the
                image is as it was.
        """
        raise EngineError("this engine takes whole versions only")

    @abc.abstractmethod
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        watcher: Watcher = NOBODY,
        *,
        version: PolicyVersion | None = None,
    ) -> list[Completion]:
        """Sample one completion for each request, in their order.

        Args:
            requests: any number; they run in batches where memory does not hold all at once. Where
                it runs out all the same, the batches become smaller, and stay so.
            sampling: how.
            watcher: told what comes, and asked whether to stop.
            version: the version that samples; None for the newest. An engine that holds several
                keeps it loaded meanwhile. In one that holds a single version a `load` takes over
                in flight: a caller that wants one version only loads nothing meanwhile.

        Raises:
            EngineError: before any work if a prompt does not fit the model; and if memory does
                not hold even one rollout.
            VersionError: before any work if the version is not installed.
        """

    def holding(self, version: PolicyVersion) -> AbstractContextManager[object]:
        """Keep one of several versions loaded over several calls of `generate` that name it.

        Raises:
            VersionError: on entry, if the version is not installed.
        """
        return nullcontext()

    @abc.abstractmethod
    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return how many rollouts of this size memory holds at once, at least 1.

        Raises:
            EngineError: if not even one fits, with the numbers.
        """

    def take_counts(self) -> dict[str, int]:
        """Return what has happened since this was last asked, by name ("engine/...")."""
        return {}

    def can_sample(self) -> bool:
        """Return whether it still samples a token; to be asked where a call has raised."""
        request = Request("-1.probe", prompt_ids=np.zeros(1, np.int32), seed=0)
        try:
            self.generate([request], Sampling(1.0, 1.0, 0, 1, ()))
        except Exception:  # noqa: BLE001 -- an engine raises anything
            return False
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """Give back memory and processes; the engine cannot be used afterwards."""


# --- concurrency ----------------------------------------------------------------------------------
#
# What one rollout needs is estimated before it begins, and estimates are wrong where others use the
# same memory, or where kernels take more than they should. So running out of memory ends nothing by
# itself: running rollouts continue or start again, half of them at a time, and the limit stays at
# that half. Only where a single rollout does not fit the engine stops, with the numbers.


log = logging.getLogger(__name__)

COUNT = "engine/out_of_memory"
"""Under which it is counted, here and in metrics.jsonl."""

_SIGNS = ("memoryerror", "out of memory", "can't allocate memory", "alloc_failed", "bad_alloc")
"""How PyTorch, CUDA's libraries, Python and C++ say that memory has run out."""


def describe_error(error: BaseException) -> str:
    """Return the kind of an error and its first line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def is_out_of_memory(what: BaseException | str) -> bool:
    """Return whether an error, or what was told of one, says that memory has run out."""
    text = what if isinstance(what, str) else f"{type(what).__name__}: {what}"
    return any(sign in text.lower() for sign in _SIGNS)


class Concurrency:
    """The most concurrent rollouts that memory has been seen to hold, or may hold."""

    def __init__(self) -> None:
        """Start without a limit."""
        self.limit: int | None = None
        """Concurrent rollouts; None while memory has never run out."""
        self._num_failures = self._num_told = 0

    def bounded(self, number: int) -> int:
        """Return `number`, or the limit where that is lower."""
        return number if self.limit is None else min(number, self.limit)

    def halve(self, num_rollouts: int, *, why: str, numbers: str) -> None:
        """Lower the limit to half of what was too much.

        Raises:
            EngineError: if it was one alone.
        """
        self._num_failures += 1
        num_rollouts = self.bounded(num_rollouts)
        if num_rollouts <= 1:
            raise EngineError(
                f"out of memory with a single rollout under way: {why}; {numbers}. Lower "
                "sampling.max_completion_tokens on the learner, use a smaller worker.dtype, end "
                "what else uses this memory, or give this worker a machine with more"
            )
        self.limit = num_rollouts // 2
        log.warning(
            "out of memory with %d rollouts under way (%s; %s); from now on %d at one time",
            num_rollouts,
            why,
            numbers,
            self.limit,
        )

    def take_counts(self) -> dict[str, int]:
        """Return how often memory ran out since this was last asked."""
        number = self._num_failures  # which the engine's thread may raise just now
        number, self._num_told = number - self._num_told, number
        return {COUNT: number} if number else {}


# --- one version at a time ------------------------------------------------------------------------


class VersionError(EngineError):
    """A request wants a version that is not installed."""


class InstalledVersion:
    """The one version that is installed; for use by many threads."""

    def __init__(self) -> None:
        """Start with nothing installed."""
        self._swap = threading.Lock()
        self._installed: PolicyVersion | None = None

    @property
    def installed(self) -> PolicyVersion | None:
        """The version that samples; None before the first one."""
        return self._installed

    def close(self) -> None:
        self._installed = None

    @contextmanager
    def swap(self, version: PolicyVersion) -> Iterator[None]:
        """Let the body install `version`, one at a time; it counts unless the body raises."""
        with self._swap:
            yield
            self._installed = version

    @contextmanager
    def request(self, version: PolicyVersion | None) -> Iterator[None]:
        """Check the version that a request names.

        Raises:
            EngineError: if nothing is installed at all.
            VersionError: if another version is installed than is wanted.
        """
        _check(self._installed, version)
        yield


def _check(installed: PolicyVersion | None, wanted: PolicyVersion | None) -> None:
    if installed is None:
        raise EngineError("no weights are loaded; call load() before generate()")
    if wanted is not None and installed != wanted:
        raise VersionError(f"{wanted} is wanted, {installed} is installed")


# --- versions side by side ------------------------------------------------------------------------
#
#     load v4:   [v1] [v2] [v3] [  ]  ->  [v1] [v2] [v3] [v4]    v1 stays until its slot is wanted
#     load v5:   [v1] [v2] [v3] [v4]  ->  [v5] [v2] [v3] [v4]    v1 is unloaded, if no call has it
#
# One slot more than versions that may sample: so a new one is tried while all others are in use.


@dataclass(slots=True, eq=False)
class VersionSlot:
    """A version that is loaded beside others."""

    serial: int
    """Never used again, for the same version may be loaded twice: after a refusal, for instance."""
    version: PolicyVersion
    num_calls: int = 0
    """Calls that sample from it."""


class VersionSlots:
    """Which versions are loaded side by side, and which are in use; for use by many threads."""

    def __init__(self, num_slots: int) -> None:
        """Start with nothing loaded, and space for `num_versions`, at least 2."""
        self._changed = threading.Condition()
        self._num_slots = num_slots
        self._serials = itertools.count(1)
        self._slots: tuple[VersionSlot, ...] = ()
        """As they were loaded."""
        self._is_loading = False

    @property
    def installed(self) -> PolicyVersion | None:
        """The version of calls that begin now; None before the first one."""
        slots = self._slots
        return slots[-1].version if slots else None

    def close(self) -> None:
        with self._changed:
            self._slots = ()
            self._changed.notify_all()

    @contextmanager
    def load(self, version: PolicyVersion) -> Iterator[tuple[VersionSlot, VersionSlot | None]]:
        """Yield a slot for `version`, and the one to unload; the new one counts unless that raises.

        The oldest version that no call uses is unloaded, never the newest.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_loading)
            self._is_loading = True
        try:
            slot = VersionSlot(next(self._serials), version)
            yield slot, self._free_slot()
            with self._changed:
                self._slots = (*self._slots, slot)
        finally:
            with self._changed:
                self._is_loading = False
                self._changed.notify_all()

    def _free_slot(self) -> VersionSlot | None:
        with self._changed:
            while len(self._slots) == self._num_slots:
                for oldest in self._slots[:-1]:
                    if not oldest.num_calls:
                        self._slots = tuple(slot for slot in self._slots if slot is not oldest)
                        return oldest
                self._changed.wait()
            return None

    @contextmanager
    def request(self, version: PolicyVersion | None) -> Iterator[VersionSlot]:
        """Yield the slot of a version, or of the newest one, and keep it meanwhile.

        Raises:
            EngineError: if nothing is loaded at all.
            VersionError: if what is wanted is not loaded.
        """
        with self._changed:
            slot = self._find(version)
            slot.num_calls += 1
        try:
            yield slot
        finally:
            with self._changed:
                slot.num_calls -= 1
                self._changed.notify_all()

    def _find(self, version: PolicyVersion | None) -> VersionSlot:
        slots = [slot for slot in self._slots if slot.version == version] or self._slots
        _check(slots[-1].version if slots else None, version)
        return slots[-1]
