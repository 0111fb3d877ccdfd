"""Describes what a worker is doing. The text is for the operators of the worker and the learner."""

from __future__ import annotations

from echo.fleet.explain import SERVING_AGENTS
from echo.leases.worker.held import GroupState, HeldLeases
from echo.roles.members import IDLE
from echo.roles.worker.departure import Departure
from echo.roles.worker.sampling import EngineCalls


def describe_activity(calls: EngineCalls | None, held: HeldLeases, departure: Departure) -> str:
    """Return text that says what a worker is doing, or what it waits for.

    Args:
        calls: the calls of the worker's engine; None until the engine is built.
        held: the leases of the worker.
        departure: whether and when the worker leaves.
    """
    if departure.is_releasing:
        return "releasing"
    if calls is None:
        return "starting"
    if calls.engine.sampler == "agents":
        return SERVING_AGENTS
    if calls.is_sampling:
        return "sampling"
    if held.of(GroupState.SCORING):
        return "scoring"
    versions = calls.versions
    if versions.installing is not None:
        return f"installing {versions.installing}"
    if departure.standby_since is not None:
        return "standing by"
    if versions.installed is None:
        return "waiting for weights"
    if held.awaiting(versions.installed):
        return "waiting for newer weights"
    return "waiting for acks" if len(held.outbox) else IDLE
