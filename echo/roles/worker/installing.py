"""Decides which version the engine of a worker installs next, and which version samples a group.

The newest complete version is installed in flight: rollouts continue, and each token records the
version that sampled it. If the engine refuses a version, the previous version stays in use. If no
newer version arrives within INSTALL_AGAIN_S, the refused version is tried again.

In two cases the engine must first become empty (`EngineVersions.is_held`):

* `stale_tokens = "drop"`: tokens of older weights are dropped, so running calls are recalled.
* `one_version` is set, and the engine can hold only one version: the running groups are finished
  first.

An engine may hold several versions at once (adapters in vLLM). Then each call names a version to
sample with. A new group gets the newest version. A continued group gets the version with which it
began, so a group never mixes versions. If this version is too old to be trained on or has left the
engine, the group is sampled from the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo.core.bounds import MAX_REASON_LENGTH
from echo.core.errors import EngineError
from echo.core.rollout import Lineage, PolicyVersion, is_surviving
from echo.core.units import one_line
from echo.leases.worker.held import PartialGroup
from echo.roles.worker.engine_facts import EngineFacts
from echo.wire.actions import Action

INSTALL_AGAIN_S = 30.0
"""A refused version is tried again after this many seconds, if it is still the newest version.

Without another attempt a run could stop. If all workers refuse the newest version and their
installed versions are too old to train on, the learner cannot publish a newer version.
"""


@dataclass(frozen=True, slots=True)
class Install(Action):
    """Action: load `version` into the engine."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class VersionInstalled:
    """Event: `version` was installed, so the engine now samples with it."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class InstallFailed:
    """Event: the engine has refused a version and keeps the earlier version."""

    version: PolicyVersion
    error: EngineError


@dataclass(frozen=True, slots=True)
class InstallMissed:
    """Event: a version was dropped before it could be installed. A different version follows."""


@dataclass(frozen=True, slots=True)
class EngineDamaged:
    """Event: sampling must stop, because the memory of the installed version is damaged."""


InstallEvent = VersionInstalled | InstallFailed | InstallMissed | EngineDamaged


@dataclass(frozen=True, slots=True)
class LearnerProgress:
    """How far the learner has progressed, according to its messages."""

    step: int
    """Number of completed optimizer steps."""
    lineages: tuple[Lineage, ...]
    """The run's lineages, oldest first. Each resume begins a new lineage."""


class EngineVersions:
    """Decides which version the engine installs next, and which version samples a group."""

    def __init__(self, engine: EngineFacts) -> None:
        """Start with an engine that has no version installed."""
        self.installed: PolicyVersion | None = None
        """The version that samples new groups; None if there is none."""
        self.installing: PolicyVersion | None = None
        """The version that is being installed; None if no installation is running."""
        self.refusal: tuple[PolicyVersion, str] | None = None
        """The version that the engine refused last, and its error. None if a later installation
        succeeded."""
        self.again_at = math.inf
        """Time from which the refused version may be tried again. Infinite if no version was
        refused."""
        self.is_held = False
        """Whether the engine must not begin groups until newer weights are installed."""
        self.has_several = engine.num_versions > 1
        self.waits_for_whole = not self.has_several and engine.rules.one_version
        """Whether newer weights are installed only when the groups in the engine have finished."""
        is_dropping = engine.rules.stale_tokens == "drop" and engine.sampler == "engine"
        self._is_emptied = self.waits_for_whole or (is_dropping and not self.has_several)
        self._max_age = engine.rules.max_age
        self._max_kept = engine.num_versions
        self._kept: tuple[PolicyVersion, ...] = ()
        """The versions that the engine holds, in the order in which they were installed."""

    def choose(self, newest: PolicyVersion | None, *, is_sampling: bool) -> PolicyVersion | None:
        """Return the version to install now, and record that its installation has started.

        If there is no newer version, or if the engine must first become empty, the result is None.

        Args:
            newest: the newest complete version.
            is_sampling: whether a call of the engine is running.
        """
        if self.installing is not None:
            return None
        self.is_held = False
        if newest is None or (self.installed is not None and newest <= self.installed):
            return None
        if self.again_at < math.inf and self.refusal is not None and newest == self.refusal[0]:
            return None
        self.is_held = self._is_emptied
        if self.is_held and is_sampling:
            return None
        self.installing, self.again_at = newest, math.inf
        return newest

    def handle(self, event: InstallEvent, *, now: float) -> None:
        """Record how an installation ended, or that the installed version is damaged."""
        match event:
            case VersionInstalled(version):
                self.installing = self.refusal = None
                self.installed = version
                self._kept = (*self._kept, version)[-self._max_kept :]
            case InstallFailed(version, error):
                self.installing = None
                self.refusal = version, one_line(str(error))[:MAX_REASON_LENGTH]
                self.again_at = now + INSTALL_AGAIN_S
            case InstallMissed():
                self.installing = None
            case EngineDamaged():
                self.installed = None  # until a version has been received and installed again

    def on_lost(self, version: PolicyVersion | None) -> None:
        """Record that the engine no longer holds a version."""
        self._kept = tuple(kept for kept in self._kept if kept != version)

    def expire(self, *, now: float) -> None:
        """If `again_at` has passed, allow the engine to try the refused version again."""
        if now >= self.again_at:
            self.again_at = math.inf

    def usable(self, learner: LearnerProgress) -> tuple[PolicyVersion, ...]:
        """Return those versions in the engine that may sample groups.

        They are the newest version, and older versions whose tokens may still be trained on.
        """
        newest = self.installed
        if newest is None:
            return ()
        oldest_step = max(learner.step, newest.step) - self._max_age
        return tuple(
            version
            for version in self._kept
            if version == newest
            or (version.step >= oldest_step and is_surviving(version, learner.lineages))
        )

    def sampler_of(self, group: PartialGroup, learner: LearnerProgress) -> PolicyVersion | None:
        """Return the version that must sample a group.

        If every installed version may sample the group, return None.
        """
        if not self.has_several:
            return self.installed if self.waits_for_whole else None
        begun = {version for member in group.members for version in member.versions}
        min_version = group.lease.min_version
        for version in begun.intersection(self.usable(learner)) if len(begun) == 1 else ():
            if min_version is None or version >= min_version:
                return version
        return self.installed
