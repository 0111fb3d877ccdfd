"""Whether a role fits into its machine's memory, and which settings help if it does not.

Pure: the model's dimensions and the machine's memory are arguments (machine.py reads them). Only
settings that exist and do save memory are named, each with the bytes it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from echo.config.footprint import Footprint, Item, ModelFacts
from echo.config.leaves import show
from echo.config.schema import Config
from echo.config.section import Role
from echo.core.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The memory that one process may use."""

    host_bytes: int
    """Available main memory, bytes."""
    gpu_bytes: int | None = None
    """Available memory of the GPU that the model runs on, bytes; None if it runs on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A setting that saves memory."""

    setting: str
    """As for --set: section.key=value."""
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a role needs against what there is."""

    role: Role
    fits: bool
    line: str
    """All of it in one line of text."""
    items: tuple[Item, ...] = ()
    """Empty if the model's dimensions are not known."""
    needed_bytes: int = 0
    """In the memory that is short, or else in the one that the model lies in."""
    available_bytes: int
    """There."""
    max_concurrent_rollouts: int | None = None
    """What a worker's memory holds; None for other roles and where it is not known."""
    remedies: tuple[Remedy, ...] = ()
    """The largest saving first; empty if it fits or nothing helps."""


def memory_budget(
    config: Config,
    role: Role,
    model_facts: ModelFacts | None,
    machine: Machine,
    *,
    prompt_tokens: int = 512,
) -> Budget:
    """Return what `role` needs on `machine`, and which settings help if it does not fit.

    Args:
        config: the settings.
        role: learner, worker or relay.
        model_facts: the model's dimensions, or None where they are known only after joining.
        machine: what there is.
        prompt_tokens: tokens that a prompt is assumed to have.
    """
    if model_facts is None:
        has = format_bytes(machine.host_bytes)
        line = f"{role}: its need follows from the model, which is not known here; has {has}"
        return Budget(role=role, fits=True, line=line, available_bytes=machine.host_bytes)
    footprint = Footprint(
        config=config,
        facts=model_facts,
        prompt_tokens=prompt_tokens,
        has_gpu=machine.gpu_bytes is not None,
    )
    if config.learner.dtype == "auto":
        dtype = "float32" if machine.gpu_bytes is None else "bfloat16"
        footprint = footprint.with_learner({"dtype": dtype})
    if role == "worker":
        return _worker_budget(footprint, machine)
    if role == "relay":
        machine = replace(machine, gpu_bytes=None)  # it holds bytes, no model
    items = footprint.learner_items() if role == "learner" else footprint.relay_items()
    memory = _decisive(items, machine)
    fits = memory.missing_bytes <= 0
    remedies: tuple[Remedy, ...] = ()
    advice = ""
    if not fits and role == "learner" and memory == _memories(items, machine)[0]:
        remedies, advice = _advise_learner(footprint, memory.missing_bytes)
    elif not fits:
        advice = _too_short(memory.missing_bytes)
    largest = max(memory.items, key=lambda item: item.num_bytes)
    return Budget(
        role=role,
        fits=fits,
        line=f"{role} needs {_needs_has(memory)}{advice} "
        f"(largest part: {largest.name}, {format_bytes(largest.num_bytes)})",
        items=items,
        needed_bytes=memory.needed_bytes,
        available_bytes=memory.available_bytes,
        remedies=remedies,
    )


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
    remedies: tuple[Remedy, ...] = ()
    advice = ""
    if wanted > capacity:
        advice = _too_short(memory.missing_bytes)
    if wanted > capacity > 0:
        saved = (wanted - capacity) * per_rollout
        remedies = (
            Remedy(setting=f"worker.max_concurrent_rollouts={capacity}", saved_bytes=saved),
        )
        advice = f"; set {_join(remedies, 'or')}"
    return Budget(
        role="worker",
        fits=wanted <= capacity,
        line=f"worker with {wanted} concurrent rollouts needs {_needs_has(memory)}{advice} "
        f"({format_bytes(per_rollout)} per rollout in {dtype})",
        items=items,
        needed_bytes=memory.needed_bytes,
        available_bytes=memory.available_bytes,
        max_concurrent_rollouts=capacity,
        remedies=remedies,
    )


def _learner_changes(footprint: Footprint, available: int) -> dict[str, Any]:
    """Return settings of [learner] that may save memory, each enough alone if it can be."""
    tokens = footprint.micro_batch_tokens
    while tokens // 2 >= footprint.rollout_tokens:
        tokens //= 2
        if _model_bytes(footprint.with_learner({"micro_batch_tokens": tokens})) <= available:
            break
    return {"micro_batch_tokens": tokens, "gradient_checkpointing": True}


def _advise_learner(footprint: Footprint, missing: int) -> tuple[tuple[Remedy, ...], str]:
    """Return the remedies and what to say: those that are enough alone, else all of them."""
    now = _model_bytes(footprint)
    changes = _learner_changes(footprint, now - missing)
    saved = {
        key: now - _model_bytes(footprint.with_learner({key: value}))
        for key, value in changes.items()
    }
    remedies = tuple(
        Remedy(setting=f"learner.{key}={show(changes[key])}", saved_bytes=saved[key])
        for key in sorted(saved, key=lambda key: -saved[key])
        if saved[key] > 0
    )
    enough = [remedy for remedy in remedies if remedy.saved_bytes >= missing]
    if enough:
        return remedies, f"; set {_join(enough, 'or')}"
    still_missing = missing - (now - _model_bytes(footprint.with_learner(changes)))
    if still_missing <= 0:
        return remedies, f"; set {_join(remedies, 'and')}"
    even_with = f"; even with {_join(remedies, 'and')}" if remedies else ""
    return remedies, even_with + _too_short(still_missing)


def _model_bytes(footprint: Footprint) -> int:
    """Return the learner's bytes that lie beside the model, which its settings can change.

    On a CPU the versions lie there too; no setting of [learner] changes those.
    """
    return sum(item.num_bytes for item in footprint.learner_items() if item.is_on_gpu)


def _needs_has(memory: _Memory) -> str:
    return f"{format_bytes(memory.needed_bytes)}, has {format_bytes(memory.available_bytes)}"


def _join(remedies: Sequence[Remedy], word: str) -> str:
    return f" {word} ".join(
        f"{remedy.setting} (saves {format_bytes(remedy.saved_bytes)})" for remedy in remedies
    )


def _too_short(missing: int) -> str:
    return (
        f"; {format_bytes(missing)} are missing: take a machine with more memory or a smaller model"
    )


@dataclass(frozen=True, slots=True)
class _Memory:
    """One memory of the machine and what is to lie in it."""

    items: tuple[Item, ...]
    available_bytes: int

    @property
    def needed_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def missing_bytes(self) -> int:
        """Negative if there is room left."""
        return self.needed_bytes - self.available_bytes


def _decisive(items: Iterable[Item], machine: Machine) -> _Memory:
    """Return the memory that decides: the model's, unless main memory beside it is short.

    What lies beside a GPU is versions of the weights, and no setting makes those smaller.
    """
    own, *others = _memories(items, machine)
    return next((memory for memory in others if memory.missing_bytes > 0), own)


def _memories(items: Iterable[Item], machine: Machine) -> list[_Memory]:
    """Return each memory of the machine, the one that the model lies in first."""
    items = tuple(items)
    if machine.gpu_bytes is None:
        return [_Memory(items, machine.host_bytes)]
    return [
        _Memory(tuple(item for item in items if item.is_on_gpu), machine.gpu_bytes),
        _Memory(tuple(item for item in items if not item.is_on_gpu), machine.host_bytes),
    ]
