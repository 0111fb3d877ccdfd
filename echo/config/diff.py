"""What a changed configuration does to a run that is resumed.

Safe: everything stored, and every rollout already sampled, still means the same; only what comes
next changes. Unsafe: it does not, or other processes that were not restarted would disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo.config.leaves import kinds_of, leaves, show
from echo.config.load import resolved
from echo.config.schema import Config

_OTHER_RUN = "the run lives in that directory; start a new run with --init-from instead"
_OTHER_PROMPTS = "buffered groups and the position in the data belong to the old prompts"
_OTHER_SAMPLING = "buffered rollouts carry log-probs of the old distribution"
_OTHER_COUNTS = "the ledger and the admission of groups count in the old number"
_OLD_ADDRESS = "relays and workers that were not restarted dial the old address"
_OTHER_SECURITY = "relays and workers that were not restarted could not connect any more"
_OTHER_MODEL = "the checkpoint holds weights of the old model; start a new run with --init-from"

_UNSAFE: Mapping[str, str] = {
    "run.name": _OTHER_RUN,
    "run.dir": _OTHER_RUN,
    "run.seed": "the order of prompts follows from it: some would be drawn twice, others never",
    "model.name": _OTHER_MODEL,
    "model.revision": _OTHER_MODEL,
    "model.dtype": "workers that were not restarted hold versions in the old type",
    "model.chat_template": _OTHER_PROMPTS,
    "model.chat_template_kwargs": _OTHER_PROMPTS,
    "task.kind": _OTHER_PROMPTS,
    "task.options": _OTHER_PROMPTS,
    "sampling.temperature": _OTHER_SAMPLING,
    "sampling.top_p": _OTHER_SAMPLING,
    "sampling.top_k": _OTHER_SAMPLING,
    "batch.group_size": _OTHER_COUNTS + "; buffered groups have the old size",
    "batch.groups_per_step": _OTHER_COUNTS,
    "lora": _OTHER_MODEL,
    "learner.listen": _OLD_ADDRESS,
    "learner.advertise": _OLD_ADDRESS,
    "security.curve": _OTHER_SECURITY,
    "learner.init_from": "a resumed run takes its weights from its checkpoint",
}
"""Why, by dotted key or section."""

_SAFE: Mapping[str, str] = {
    "profile": "the values that change with it are listed on their own lines",
    "run.max_steps": "only moves the end of the run",
    "model.attn_implementation": "the same function, rounded differently",
    "task.reward_timeout_s": "holds for groups leased from now on",
    "task.step_timeout_s": "holds for groups leased from now on",
    "task.max_reward": "holds for groups that arrive from now on",
    "task.max_turns": "holds for groups leased from now on",
    "reward": "who judges, not how; workers are told when they join",
    "sampling.max_completion_tokens": "holds for groups leased from now on",
    "sync.mode": "the bound and the period that go with it are listed on their own lines",
    "sync.max_staleness": "every group is checked against it when it is consumed",
    "sync.adaptive": "gates the leases granted from now on",
    "sync.min_staleness": "gates the leases granted from now on",
    "sync.publish_period": "holds from the next publication on",
    "batch.keep_zero_variance": "holds for groups that arrive from now on",
    "batch.max_zero_signal_batches": "only when a run without gradients ends",
    "loss": "computed anew for every batch",
    "reference": "computed anew for every batch",
    "optimizer": "holds from the next step on; the moments are kept",
    "learner": "how the learner computes, not what",
    "leases": "holds for groups leased from now on",
    "activation": "decides from now on; what was spent before counts towards the budget of the run",
    "worker": "read by workers when they start",
    "agent": "read by workers when they start",
    "rollout": "holds for workers that join from now on; others are told by a restart",
    "engine": "read by workers when they start",
    "relay": "read by relays when they start",
    "checkpoint": "holds from the next checkpoint on",
    "eval": "compare evaluations on the same prompts only",
    "network": "holds for what is sent from now on",
    "security": "read by relays and workers when they start",
    "limits": "a bound on disk use",
    "metrics": "only what is measured, and where it goes",
    "ui": "only what is shown",
}
"""Why, by dotted key or section; a key of its own goes before its section."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that differs."""

    key: str
    old: Any
    new: Any
    is_safe: bool
    why: str

    def __str__(self) -> str:
        label = "safe" if self.is_safe else "UNSAFE"
        return f"{label:6} {self.key}: {show(self.old)} -> {show(self.new)} ({self.why})"


def diff_configs(old: Config, new: Config) -> list[Change]:
    """Return the settings that differ, in the order of the schema."""
    before, after = resolved(old), resolved(new)
    changes = []
    for path, leaf in {**leaves(kinds_of(old)), **leaves(kinds_of(new))}.items():
        was, now = _at(before, path), _at(after, path)
        if was != now:
            is_safe, why = classify(leaf.key)
            changes.append(Change(leaf.key, was, now, is_safe, why))
    return changes


def classify(key: str) -> tuple[bool, str]:
    """Return whether changing `key` is safe when a run is resumed, and why."""
    section = key.split(".")[0]
    if key in _UNSAFE or section in _UNSAFE:
        return False, _UNSAFE.get(key) or _UNSAFE[section]
    return True, _SAFE[key] if key in _SAFE else _SAFE[section]


def _at(table: Any, path: tuple[str, ...]) -> Any:
    """Return the value of a key; None for one that the chosen kind of its section has not."""
    for part in path:
        table = table.get(part)
    return table
