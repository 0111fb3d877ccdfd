"""Contract of a rollout engine: weights in, versioned tokens out.

An engine has no network and computes no rewards. Several threads may call its methods at once. If a
thread calls `load` while another thread runs `generate`, the weights are swapped in flight, between
two tokens. A completion records the version that sampled each of its tokens.

An engine that holds several versions side by side (`num_versions`) does not swap weights in flight.
Each call of `generate` samples all of its tokens from one version. `load` adds a version. Calls of
`generate` that begin later sample from the added version. `generate` never waits for `load`. `load`
waits for running calls only if these calls use every version that `load` could unload.

After a swap, the engine's `kv_cache` setting decides what happens to the keys and values that the
old weights computed. "recompute" runs the unfinished sequences through the new weights, so the next
tokens have exactly the new version's distribution. The cost is one prefill of all unfinished
sequences. "keep" continues at once with the old keys and values, so the next tokens come from a
mixture of both versions. The log-probabilities of these tokens still belong to the distribution
that the tokens were sampled from. But no single version reproduces these log-probabilities. So the
learner computes a log-ratio other than 0 for these tokens, even with the newest version's weights.
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
from echo.core.token_sets import TokenSets, all_but
from echo.engine.stop_strings import StopStrings
from echo.weights.manifest import TensorSpec
from echo.weights.store.patches import Patch

if TYPE_CHECKING:
    from torch import Tensor


UNVERSIONED = PolicyVersion(0, 0)
"""The version that weights get if `load` receives no version. Real lineages begin at 1."""

KvCache = Literal["recompute", "keep"]

FinishReason = Literal["stop", "length", "abort", "nonfinite"]


MIN_TEMPERATURE = 0.01
"""Lowest temperature allowed. vLLM would raise a lower temperature to this value. The learner would
not, so the log-probabilities of the two would differ.
"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled. All requests of a call have the same settings."""

    temperature: float
    """Number that the logits are divided by; at least MIN_TEMPERATURE."""
    top_p: float
    """Keep the smallest set of most likely tokens whose probabilities add up to this number or
    more; 1 keeps all tokens.
    """
    top_k: int
    """Keep this number of most likely tokens, and all tokens that tie with the last of these. top_k
    is applied before top_p; 0 keeps all tokens.
    """
    max_completion_tokens: int
    """Number of tokens after which a completion ends with "length", at least 1."""
    stop_ids: tuple[int, ...]
    """Token ids that end a completion with "stop"; the id is part of the completion."""
    greedy: bool = False
    """Whether to take the most likely token, and ignore temperature, min_p, top_k and top_p."""
    min_p: float = 0.0
    """Keep the tokens with at least this share of the most likely token's probability. min_p is
    applied before top_k; 0 keeps all tokens.
    """
    likely_ids: int = 0
    """Number of most likely ids that are recorded for each token, with log-probabilities; 0 for
    none.
    """
    min_tokens: int = 0
    """Least number of tokens of a completion. Before this number is reached, no stop id can be
    drawn, and stop strings are ignored.
    """
    stop: StopStrings | None = None
    """Texts that end a completion; None if there are no such texts."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": (
                self.temperature >= MIN_TEMPERATURE,
                f"at least {MIN_TEMPERATURE}; for the most likely token use greedy",
            ),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "at least 0 (0 = off)"),
            "min_p": (0 <= self.min_p <= 1, "at least 0 (0 = off) and at most 1"),
            "max_completion_tokens": (self.max_completion_tokens >= 1, "at least 1"),
            "min_tokens": (self.min_tokens >= 0, "at least 0 (0 = off)"),
        }
        for name, (is_valid, rule) in checks.items():
            if not is_valid:
                raise ValueError(f"sampling.{name} is {getattr(self, name)}, must be {rule}")

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p exclude tokens.

        If so, each completion contains the support of each of its tokens.
        """
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def has_support(self) -> bool:
        """Whether each completion contains the support of each token."""
        return self.truncates or (not self.greedy and self.min_tokens > 0)

    def num_barred(self, num_tokens: int) -> int:
        """Return how many of the next tokens cannot be stop ids.

        `num_tokens` is the number of tokens that the completion already has.
        """
        return max(0, self.min_tokens - num_tokens) if self.stop_ids else 0

    def barred_support(self, num_sampled: int, num_tokens: int) -> TokenSets:
        """Return the supports of the next tokens, for settings that do not truncate.

        A token that cannot be a stop id (`num_barred`) has all other ids as its support. The other
        tokens may be any id, so no support is recorded for them.

        Args:
            num_sampled: number of tokens of the completion that were sampled before.
            num_tokens: number of tokens whose supports are returned.
        """
        ids = np.array(self.stop_ids, np.int32)
        return all_but(ids, self.num_barred(num_sampled), of=num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The expected sizes of rollouts. Real rollouts may be longer than expected."""

    num_rollouts: int
    prompt_tokens: int
    """Number of tokens of the longest expected prompt."""
    rollout_tokens: int
    """Number of tokens of the longest expected rollout, prompt included."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request to sample one completion."""

    request_id: str
    prompt_ids: npt.NDArray[np.int32]
    """[P] token ids of the prompt, at least one."""
    seed: int
    """Seed of this request's random choices. Other requests of the batch do not affect these
    choices.
    """
    prefix_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """[K] tokens that an earlier call sampled. The new call continues the completion after these
    tokens. They count towards the token limit and are not returned again. The request needs a new
    seed: the old seed would repeat the random choices of the first tokens.
    """
    turn_start: int = 0
    """Number of tokens of the prefix before the present turn of an episode. Stop strings and
    `min_tokens` apply only to the tokens of the present turn.
    """

    @property
    def turn_ids(self) -> npt.NDArray[np.int32]:
        """The tokens of the prefix that belong to the present turn."""
        return self.prefix_ids[self.turn_start :]

    @property
    def context_ids(self) -> npt.NDArray[np.int32]:
        """[P + K] the tokens before the first new token: the prompt and the prefix."""
        if not len(self.prefix_ids):
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, self.prefix_ids])

    def check(self, *, window: int | None, vocab_size: int, max_completion_tokens: int) -> None:
        """Raise if no engine can sample this request.

        Args:
            window: longest sequence of the model in tokens; None if the model has no limit.
            vocab_size: number of token ids of the model; every id must be below it.
            max_completion_tokens: the limit of the sampling settings; the prefix counts towards it.

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
    """The completion sampled for one request."""

    request_id: str
    token_ids: npt.NDArray[np.int32]
    """[T] sampled ids, a stop id included; empty only after an abort."""
    logprobs: npt.NDArray[np.float32]
    """[T] natural log-probability of each id under the distribution that it was sampled from. This
    is the renormalised distribution after min_tokens, temperature, min_p, top_k and top_p. Under
    greedy sampling, the log-probabilities are those of the plain softmax (temperature 1).
    """
    finish_reason: FinishReason
    """Why the completion ended:

        "stop"        a stop id or a stop string
        "length"      the limit, or the end of the model's window
        "abort"       the caller stopped the call
        "nonfinite"   the logits give no probabilities, for example after an overflow

    The last log-probability of a "nonfinite" completion is NaN or infinite. Such a completion must
    not be trained on.
    """
    policy_versions: npt.NDArray[np.int32]
    """[T, 2] (lineage, step) of the weights that sampled each token."""
    support: TokenSets | None = None
    """For each token, the ids that could have been drawn; None if `Sampling.has_support` is false.
    """
    likely: TokenSets | None = None
    """The most likely ids of each token, with log-probabilities; None if `Sampling.likely_ids` is
    0.
    """


def describe_nonfinite(completion: Completion) -> str:
    """Return the error text for a "nonfinite" completion, with the place and the likely causes."""
    version = PolicyVersion(*completion.policy_versions[-1].tolist())
    under = "" if version == UNVERSIONED else f" under {version}"
    return (
        f"the model gave a log-probability of {completion.logprobs[-1]:g} at token "
        f"{len(completion.token_ids) - 1} of request {completion.request_id}{under}: the weights "
        "hold NaN, it overflows in the engine's dtype, or this device computes wrongly"
    )


class Watcher:
    """Callbacks by which `generate` reports progress and asks whether to stop.

    The methods of this base class ignore the reports and never stop a call.
    """

    def should_stop(self) -> bool:
        """Return whether `generate` shall stop.

        `generate` then returns unfinished completions with "abort". The engine calls this method
        several times a second.
        """
        return False

    def on_tokens(self, number: int) -> None:
        """Receive the number of tokens sampled since the previous call.

        The engine calls this several times a second.
        """

    def on_progress(self, number: int) -> None:
        """Receive the number of work steps since the previous call that sampled no token.

        For example, each layer of a long prefill is a work step.
        """

    def on_completion(self, completion: Completion) -> None:
        """Receive a completion that was not aborted.

        The engine calls this method in the thread that called `generate`. `generate` also returns
        the completion at its end.
        """


UNWATCHED = Watcher()
"""A watcher that ignores progress and never stops a call."""


class Engine(abc.ABC):
    """An engine that samples completions from a causal language model."""

    takes_patches = False
    """Whether `patch` is supported."""
    is_continuous = False
    """Whether the requests of a call join the running batch. Otherwise a call of `generate` waits
    for the end of the previous call.
    """
    window: int | None = None
    """Longest sequence, prompt and completion together, in tokens; None if there is no limit."""
    num_versions = 1
    """How many of the newest versions stay loaded for sampling. If the number is 1, a running call
    of `generate` switches to each version that is loaded.
    """

    @property
    @abc.abstractmethod
    def installed(self) -> PolicyVersion | None:
        """The version that new calls sample from; None before the first `load`."""

    @abc.abstractmethod
    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion = UNVERSIONED) -> None:
        """Install all weights of a version, also while `generate` runs.

        After the call, an engine with one version samples the next token from the new weights. An
        engine with several versions samples later calls from the new version. If no further version
        fits, the engine first waits until an older version is unused.

        Args:
            tensors: the weights by name; of tied tensors only one, under any of its names. The
                engine may use the memory of the tensors until the next version is installed, so the
                caller must not change that memory.
            version: the version of these weights.

        Raises:
            EngineError: if the weights do not fit this model, or the engine cannot install them.
                The engine then continues with the previous version.
        """

    def patch(self, patch: Patch, image: memoryview, specs: Sequence[TensorSpec]) -> None:
        """Patch the installed version, also while `generate` runs.

        Supported only if `takes_patches` is true. Sampling pauses while the changed words are
        written.

        Args:
            patch: the changes from the installed version to the new version.
            image: the writable memory of the tensors of the last `load`, to which the patch is
                written.
            specs: the place of each tensor in the image.

        Raises:
            EngineError: if the patch fails. The engine then samples from the previous version, and
                the image is unchanged.
        """
        raise EngineError("this engine takes whole versions only")

    @abc.abstractmethod
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        watcher: Watcher = UNWATCHED,
        *,
        version: PolicyVersion | None = None,
    ) -> list[Completion]:
        """Sample one completion for each request.

        Return the completions in the order of the requests.

        Args:
            requests: any number. If memory cannot hold all requests at once, they run in batches.
                If memory runs out during a batch, the engine makes this batch and all later batches
                smaller.
            sampling: settings of all requests.
            watcher: receives progress and decides whether to stop.
            version: the version to sample from; None for the newest. An engine that holds several
                versions keeps this version loaded during the call. An engine that holds one version
                checks `version` only at the start of the call. A later `load` swaps the weights in
                flight. So a caller that needs one version throughout must not load another version
                during the call.

        Raises:
            EngineError: if a prompt does not fit the model (raised before any work), or if memory
                cannot hold even one rollout.
            VersionError: if the version is not installed (raised before any work).
        """

    def holding(self, version: PolicyVersion) -> AbstractContextManager[object]:
        """Keep a version loaded for calls of `generate` in the `with` block.

        Raises:
            VersionError: on entry, if the version is not installed.
        """
        return nullcontext()

    @abc.abstractmethod
    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return how many rollouts of this size fit into memory at once. The result is at least 1.

        Raises:
            EngineError: if memory cannot hold even one rollout. The message has the sizes.
        """

    def rollouts_in_memory(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return how many rollouts fit into memory if no setting limits their number.

        Raises:
            EngineError: for the same reason as in `max_concurrent_rollouts`.
        """
        return self.max_concurrent_rollouts(prompt_tokens, completion_tokens)

    def take_counts(self) -> dict[str, int]:
        """Return counts of events since the last call, by metric name ("engine/...")."""
        return {}

    def can_sample(self) -> bool:
        """Return whether the engine can still sample after a call raised an error."""
        request = Request("-1.probe", prompt_ids=np.zeros(1, np.int32), seed=0)
        try:
            self.generate([request], Sampling(1.0, 1.0, 0, 1, ()))
        except Exception:  # noqa: BLE001 -- an engine raises anything
            return False
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """Release memory and processes. The engine cannot be used afterwards."""


# --- concurrency ----------------------------------------------------------------------------------
# An engine estimates the memory of a rollout before it begins. The estimate is too low if other
# programs use the same memory, or if kernels allocate more than expected. So running out of memory
# does not end the engine. The running rollouts continue or start again, half of them at a time, and
# that half becomes the limit. The engine raises an error, with the numbers, only if a single
# rollout does not fit.


log = logging.getLogger(__name__)

COUNT = "engine/out_of_memory"
"""Name of the metric that counts out-of-memory failures."""

_SIGNS = ("memoryerror", "out of memory", "can't allocate memory", "alloc_failed", "bad_alloc")
"""Lower-case texts by which an out-of-memory message of any library is recognised."""


def describe_error(error: BaseException) -> str:
    """Return the class name of an error and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def is_out_of_memory(what: BaseException | str) -> bool:
    """Return whether an error or its description reports that memory ran out."""
    text = what if isinstance(what, str) else f"{type(what).__name__}: {what}"
    return any(sign in text.lower() for sign in _SIGNS)


class Concurrency:
    """An engine's limit on concurrent rollouts. The limit is halved each time memory runs out."""

    def __init__(self) -> None:
        self.limit: int | None = None
        """Largest number of concurrent rollouts; None until memory first runs out."""
        self._num_failures = self._num_reported = 0

    def bounded(self, number: int) -> int:
        """Return `number`, but not more than the limit."""
        return number if self.limit is None else min(number, self.limit)

    def halve(self, num_rollouts: int, *, why: str, numbers: str) -> None:
        """Lower the limit to half of `num_rollouts` after memory ran out, and log a warning.

        Raises:
            EngineError: if memory ran out with a single rollout.
        """
        self._num_failures += 1
        num_rollouts = self.bounded(num_rollouts)
        if num_rollouts <= 1:
            raise EngineError(
                f"out of memory with a single running rollout: {why}; {numbers}. Lower "
                "sampling.max_completion_tokens on the learner, use a smaller worker.dtype, end "
                "what else uses this memory, or give this worker a machine with more"
            )
        self.limit = num_rollouts // 2
        log.warning(
            "out of memory with %d running rollouts (%s; %s); from now on at most %d run",
            num_rollouts,
            why,
            numbers,
            self.limit,
        )

    def take_counts(self) -> dict[str, int]:
        """Return how often memory ran out since the last call."""
        number = self._num_failures  # read once: the engine's thread may increase it meanwhile
        number, self._num_reported = number - self._num_reported, number
        return {COUNT: number} if number else {}


# --- one version at a time ------------------------------------------------------------------------


class VersionError(EngineError):
    """A request names a version that is not installed."""


class InstalledVersion:
    """The installed version of an engine that holds only one version. Thread-safe."""

    def __init__(self) -> None:
        self._swap = threading.Lock()
        self._installed: PolicyVersion | None = None

    @property
    def installed(self) -> PolicyVersion | None:
        """The installed version; None before the first `swap` ends."""
        return self._installed

    def close(self) -> None:
        self._installed = None

    @contextmanager
    def swap(self, version: PolicyVersion) -> Iterator[None]:
        """Hold the lock for swaps while the block installs `version`.

        After the block the version is recorded. If the block raises, the previous version stays
        recorded.
        """
        with self._swap:
            yield
            self._installed = version

    @contextmanager
    def request(self, version: PolicyVersion | None) -> Iterator[None]:
        """Check that a requested version is installed, or any version if `version` is None.

        Raises:
            EngineError: if no version is installed.
            VersionError: if the installed version is not `version`.
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
#     load v4:   [v1] [v2] [v3] [  ]  ->  [v1] [v2] [v3] [v4]    v1 stays until its slot is needed
#     load v5:   [v1] [v2] [v3] [v4]  ->  [v5] [v2] [v3] [v4]    v1 is unloaded, if no call has it
# There is one slot more than `num_versions`, so the engine can test a new version while calls
# sample from all the others.


@dataclass(slots=True, eq=False)
class VersionSlot:
    """A loaded version, and the number of calls that use it."""

    serial: int
    """Unique number of this load. Loading the same version again gives a new number."""
    version: PolicyVersion
    num_calls: int = 0
    """Number of running calls that sample from the version."""


class VersionSlots:
    """The loaded versions, and the number of calls that use each version. Thread-safe."""

    def __init__(self, num_slots: int) -> None:
        """Start with space for `num_slots` versions, at least 2."""
        self._changed = threading.Condition()
        self._num_slots = num_slots
        self._serials = itertools.count(1)
        self._slots: tuple[VersionSlot, ...] = ()
        """The slots of loaded versions, in the order in which they were loaded."""
        self._is_loading = False

    @property
    def installed(self) -> PolicyVersion | None:
        """The version that new calls sample from; None before the first `load` ends."""
        slots = self._slots
        return slots[-1].version if slots else None

    def close(self) -> None:
        with self._changed:
            self._slots = ()
            self._changed.notify_all()

    @contextmanager
    def load(self, version: PolicyVersion) -> Iterator[tuple[VersionSlot, VersionSlot | None]]:
        """Yield a slot for `version`, and the slot to unload, or None if no slot must be unloaded.

        The caller's `with` block loads `version` into the new slot. If a slot to unload is yielded,
        the block also unloads the version in it. If a slot is free, no slot to unload is yielded.
        Otherwise the slot to unload is the oldest slot that no call uses, but never the newest
        slot. If calls use all of the older slots, `load` waits until one of them is unused. If the
        block raises, the new slot is discarded.
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
        """Yield the slot of `version`, and keep it loaded during the block.

        If `version` is None, yield the newest slot.

        Raises:
            EngineError: if no version is loaded.
            VersionError: if `version` is not loaded.
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
