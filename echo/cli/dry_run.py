"""`--dry-run`: what would start, whether its memory suffices, and every setting with its source."""

from __future__ import annotations

from pathlib import Path

from echo.config.describe import dry_run_text
from echo.config.machine import read_machine, read_model_facts
from echo.config.memory import Budget, memory_budget
from echo.config.schema import Config, Role
from echo.errors import DataError


def dry_run(config: Config, role: Role) -> str:
    """Return the text of a dry run; nothing is started, downloaded or written."""
    notices: list[str] = []
    budget: Budget | None = None
    if config.model.name is None:
        notices.append("memory budget: known once the learner has told which model it trains")
    else:
        try:
            facts = read_model_facts(Path(config.model.name).expanduser())
            budget = memory_budget(config, role, facts, read_machine(_gpu_bytes(config, role)))
        except DataError as error:
            notices.append(f"memory budget: not known here: {error}")
    return dry_run_text(config, role, budget=budget, notices=notices)


def _gpu_bytes(config: Config, role: Role) -> int | None:
    """Return the free bytes of the GPU that this role would use; None without one."""
    if role == "relay":
        return None
    device = config.learner.device if role == "learner" else config.worker.device
    try:
        # Imported here: a relay's machine, where a dry run must work too, has no torch.
        from echo.engine.device import free_gpu_bytes
    except ImportError:
        return None
    return free_gpu_bytes(device)
