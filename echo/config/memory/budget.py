"""Compares the memory that a role needs with the machine's memory.

The budget is a pure function of a footprint and the machine's memory, which `read_machine` reads.
The budget suggests settings that save memory, each with the number of saved bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from echo.config.fields import Role
from echo.config.memory.footprint import Footprint, Item
from echo.config.memory.step import ModelFacts
from echo.config.schema import Config, show
from echo.core.units import format_bytes

ASSUMED_PROMPT_TOKENS = 512
"""Assumed number of tokens of the longest prompt, for a node that has not read the task's data."""
CHECKPOINTING: Mapping[bool | str, str] = {
    False: "",
    True: " and gradient checkpointing",
    "offload": " and gradient checkpointing with offloaded inputs",
}
"""Values of learner.gradient_checkpointing from fast to slow, with their text in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The memory that one process may use."""

    host_bytes: int
    """Available main memory, bytes."""
    gpu_bytes: int | None = None
    """Available memory of the model's GPU, bytes; None if the model runs on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A setting that saves memory, and the number of saved bytes."""

    setting: str
    """The setting as an argument of --set: section.key=value."""
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that a role needs, compared with the machine's memory."""

    fits: bool
    line: str
    """The budget as one line of text."""
    items: tuple[Item, ...]
    needed_bytes: int
    """Bytes needed in the memory that is too small. If all memories suffice, bytes needed in the
    memory that holds the model."""
    max_concurrent_rollouts: int | None = None
    """Number of rollouts that fit into a worker's memory; None for other roles."""
    gradient_checkpointing: bool | str = False
    """The learner's gradient checkpointing, set by the user or chosen by the budget."""
    recompute_above: int = 0
    """Number of tokens of the largest micro-batch whose activations fit into memory. With automatic
    gradient checkpointing, the learner recomputes the activations of larger micro-batches."""
    has_versions_on_gpu: bool = False
    """Whether a learner keeps the last version on its GPU."""
    evaluation_bytes: int = 0
    """Bytes that a single-process learner may use for rollouts of held-out prompts: half of the
    free memory, but at least the bytes of one rollout."""
    remedies: tuple[Saving, ...] = ()
    """Settings that save memory, the least harmful first. Empty if everything fits or if no setting
    helps."""


def memory_budget(
    config: Config,
    role: Role,
    model_facts: ModelFacts,
    machine: Machine,
    *,
    prompt_tokens: int = ASSUMED_PROMPT_TOKENS,
    num_ranks: int = 1,
) -> Budget:
    """Return the memory that `role` needs, and settings that reduce it.

    Settings are suggested if `machine` has too little memory. With several ranks, the budget is for
    one rank, and `machine` is the share of one rank.
    """
    footprint = Footprint(
        config=config,
        facts=model_facts,
        prompt_tokens=prompt_tokens,
        has_gpu=machine.gpu_bytes is not None,
        num_ranks=num_ranks if role == "learner" else 1,
    )
    if config.learner.dtype == "auto":
        dtype = "float32" if machine.gpu_bytes is None else "bfloat16"
        footprint = footprint.changed({"learner.dtype": dtype})
    may_choose = config.learner.gradient_checkpointing == "auto"
    if role == "learner":
        footprint = _first_that_fits(footprint, machine)
    if role == "worker":
        return _worker_budget(footprint, machine)
    if role == "relay":
        machine = replace(machine, gpu_bytes=None)  # a relay has no model
    items = footprint.learner_items() if role == "learner" else footprint.relay_items()
    memory, own = _decisive(items, machine), _memories(items, machine)[0]
    fits = memory.missing_bytes <= 0
    remedies: tuple[Saving, ...] = ()
    advice = ""
    if not fits and role == "learner" and memory == own:
        remedies, advice = _advise_learner(footprint, memory.missing_bytes)
    elif not fits:
        advice = _too_short(memory.missing_bytes)
    largest = max(memory.items, key=lambda item: item.num_bytes)
    return Budget(
        fits=fits,
        line=f"{_who(footprint, role)} needs {_needs_has(memory)}"
        f"{_chosen(footprint, role)}{advice} "
        f"(largest part: {largest.name}, {format_bytes(largest.num_bytes)})",
        items=items,
        needed_bytes=memory.needed_bytes,
        remedies=remedies,
        gradient_checkpointing=footprint.config.learner.gradient_checkpointing,
        recompute_above=_recompute_above(footprint, own)
        if may_choose and role == "learner" and footprint.config.learner.gradient_checkpointing
        else 0,
        has_versions_on_gpu=footprint.may_keep_versions and footprint.has_versions_on_gpu,
        evaluation_bytes=footprint.evaluated_rollout_bytes + max(0, -own.missing_bytes) // 2,
    )


def _first_that_fits(footprint: Footprint, machine: Machine) -> Footprint:
    """Return the learner's footprint with the fastest settings that fit into memory.

    Versions are moved to host memory first, which does not slow a step. If this does not suffice
    and gradient checkpointing is automatic, activations are recomputed, which slows a step by a
    third. If no settings fit, return the footprint that needs the least memory.
    """
    chosen = footprint.config.learner.gradient_checkpointing
    choices = tuple(CHECKPOINTING)[: 3 if footprint.has_gpu else 2]
    ways = [
        replace(
            footprint.changed({"learner.gradient_checkpointing": choice}),
            has_versions_on_gpu=is_on_gpu,
        )
        for choice in (choices if chosen == "auto" else (chosen,))
        for is_on_gpu in (True, False)
    ]
    return next(
        (way for way in ways if _memories(way.learner_items(), machine)[0].missing_bytes <= 0),
        ways[-1],
    )


def _recompute_above(footprint: Footprint, own: _Memory) -> int:
    """Return the number of tokens in the largest micro-batch whose activations fit into memory.

    The learner recomputes the activations of larger micro-batches. Kept activations get at most
    half of the free memory. The evaluation gets the other half.

    Args:
        footprint: the footprint of a learner with gradient checkpointing.
        own: the memory that holds the model, with the learner's items in this memory.
    """
    limit = own.needed_bytes + max(0, -own.missing_bytes) // 2
    plain = footprint.changed({"learner.gradient_checkpointing": False})

    def is_too_large(tokens: int) -> bool:
        items = replace(plain, tokens_in_a_pass=tokens).learner_items()
        has_gpu = footprint.has_gpu
        return sum(item.num_bytes for item in items if item.is_on_gpu or not has_gpu) > limit

    return bisect_left(range(footprint.micro_batch_tokens + 1), 1, 1, key=is_too_large) - 1


def _who(footprint: Footprint, role: Role) -> str:
    return role if footprint.num_ranks == 1 else f"each of {footprint.num_ranks} ranks"


def _chosen(footprint: Footprint, role: Role) -> str:
    if role != "learner":
        return ""
    config = footprint.config
    parts = f" with {config.learner.dtype} weights, {config.optimizer.state} moments"
    if footprint.may_keep_versions:
        place = "on the GPU" if footprint.has_versions_on_gpu else "in host memory"
        parts += f", the last version {place}"
    return parts + CHECKPOINTING[config.learner.gradient_checkpointing]


def _worker_budget(footprint: Footprint, machine: Machine) -> Budget:
    worker = footprint.config.worker
    dtype = worker.dtype
    if dtype == "auto":
        dtype = "float32" if machine.gpu_bytes is None else "bfloat16"
    items = footprint.worker_items(dtype)
    per_rollout = footprint.bytes_per_rollout(dtype)
    before = _decisive(items, machine)
    capacity = max(0, -before.missing_bytes) // per_rollout
    wanted = worker.max_concurrent_rollouts or max(1, capacity)
    items = (*items, Item(name="KV cache", num_bytes=wanted * per_rollout, is_on_gpu=True))
    memory = _decisive(items, machine)
    remedies: tuple[Saving, ...] = ()
    advice = ""
    if wanted > capacity:
        advice = _too_short(memory.missing_bytes)
    if wanted > capacity > 0:
        saved = (wanted - capacity) * per_rollout
        remedies = (
            Saving(setting=f"worker.max_concurrent_rollouts={capacity}", saved_bytes=saved),
        )
        advice = f"; set {_join(remedies, 'or')}"
    return Budget(
        fits=wanted <= capacity,
        line=f"worker with {wanted} concurrent rollouts needs {_needs_has(memory)}{advice} "
        f"({format_bytes(per_rollout)} per rollout in {dtype})",
        items=items,
        needed_bytes=memory.needed_bytes,
        max_concurrent_rollouts=capacity,
        remedies=remedies,
    )


def _learner_changes(footprint: Footprint, available: int) -> list[tuple[str, Any]]:
    """Return settings that may save memory, as (key, value).

    Settings that do the least harm come first. The first settings change neither the results nor
    the speed of the run.
    """
    tokens = footprint.micro_batch_tokens
    while tokens // 2 >= footprint.rollout_tokens:
        tokens //= 2
        if _model_bytes(footprint.changed({"learner.micro_batch_tokens": tokens})) <= available:
            break
    return [
        ("learner.micro_batch_tokens", tokens),
        ("eval.interval_steps", 0),
        ("learner.gradient_checkpointing", True),
        *([("learner.gradient_checkpointing", "offload")] if footprint.has_gpu else []),
        ("optimizer.state", "8bit"),
        ("optimizer.state", "offloaded"),
    ]


def _advise_learner(footprint: Footprint, missing: int) -> tuple[tuple[Saving, ...], str]:
    """Return all remedies in order, and a text that says which remedies to use together.

    Remedies are chosen in order until they suffice. Then redundant remedies are removed. If all
    remedies together do not suffice, the text says so.
    """
    now = _model_bytes(footprint)

    def saved(changes: Mapping[str, Any]) -> int:
        return now - _model_bytes(footprint.changed(changes))

    savings = {
        each: Saving(setting=f"{each[0]}={_bare(each[1])}", saved_bytes=saved_bytes)
        for each in _learner_changes(footprint, now - missing)
        if (saved_bytes := saved(dict([each]))) > 0
    }
    chosen: dict[str, Any] = {}
    for key, value in savings:
        more = {**chosen, key: value}
        if saved(chosen) < missing and saved(more) > saved(chosen):
            chosen = more
    for key in tuple(chosen):
        fewer = {each: value for each, value in chosen.items() if each != key}
        if saved(fewer) >= missing:
            chosen = fewer
    remedies = tuple(savings.values())
    words = _join([savings[each] for each in chosen.items()], "and")
    if saved(chosen) >= missing:
        return remedies, f"; set {words}"
    even_with = f"; even with {words}" if words else ""
    return remedies, even_with + _too_short(missing - saved(chosen))


def _bare(value: Any) -> str:
    """Return a setting's value as text for --set in a shell, without quotes."""
    return value if isinstance(value, str) else show(value)


def _model_bytes(footprint: Footprint) -> int:
    """Return the bytes of the items that are in the model's memory and depend on settings.

    On a CPU, the same memory also holds the versions. They are not counted, because their
    size is fixed.
    """
    return sum(item.num_bytes for item in footprint.learner_items() if item.is_on_gpu)


def _needs_has(memory: _Memory) -> str:
    return f"{format_bytes(memory.needed_bytes)}, has {format_bytes(memory.available_bytes)}"


def _join(remedies: Sequence[Saving], word: str) -> str:
    return f" {word} ".join(
        f"{remedy.setting} (saves {format_bytes(remedy.saved_bytes)})" for remedy in remedies
    )


def _too_short(missing: int) -> str:
    return (
        f"; {format_bytes(missing)} are missing: take a machine with more memory or a smaller model"
    )


@dataclass(frozen=True, slots=True)
class _Memory:
    items: tuple[Item, ...]
    available_bytes: int

    @property
    def needed_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def missing_bytes(self) -> int:
        """The needed bytes minus the available bytes. It is negative if memory is left."""
        return self.needed_bytes - self.available_bytes


def _decisive(items: Iterable[Item], machine: Machine) -> _Memory:
    """Return the memory that decides whether all items fit into the machine.

    If the model is on a GPU and main memory is too small, return main memory. In this case settings
    cannot help, because no setting changes the size of the versions in main memory. Otherwise
    return the memory that holds the model.
    """
    own, *others = _memories(items, machine)
    return next((memory for memory in others if memory.missing_bytes > 0), own)


def _memories(items: Iterable[Item], machine: Machine) -> list[_Memory]:
    """Return the machine's memories, each with its items.

    The memory that holds the model comes first.
    """
    items = tuple(items)
    if machine.gpu_bytes is None:
        return [_Memory(items, machine.host_bytes)]
    return [
        _Memory(tuple(item for item in items if item.is_on_gpu), machine.gpu_bytes),
        _Memory(tuple(item for item in items if not item.is_on_gpu), machine.host_bytes),
    ]


def read_machine(gpu_bytes: int | None = None) -> Machine:
    """Return the memory that is available to this process.

    Args:
        gpu_bytes: free bytes of the model's GPU; None if the model runs on the CPU.
    """
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")  # psutil knows no limit of a container
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists():
        text = limit.read_text(encoding="ascii").strip()
        if text != "max":
            in_use = int(used.read_text(encoding="ascii"))
            available = min(available, max(0, int(text) - in_use))
    return Machine(host_bytes=available, gpu_bytes=gpu_bytes)
