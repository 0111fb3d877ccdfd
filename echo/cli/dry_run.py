"""`--dry-run`: what would start, whether its memory suffices, and every setting with its source.

Then what would stop it in its first minute: datasets that cannot be read, addresses that are taken.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from echo.config.fields import Role
from echo.config.load import dry_run_text
from echo.config.memory import Budget, ModelFacts, memory_budget, read_machine, read_model_facts
from echo.config.schema import Config, ModelSection
from echo.core.errors import ConfigError, DataError, EchoError
from echo.core.extras import import_extra
from echo.net.zmq import bound_socket
from echo.tasks.task import load_task


def dry_run(config: Config, role: Role) -> str:
    """Return the text of a dry run; nothing is started, and of a model only config.json fetched."""
    notices: list[str] = []
    budget: Budget | None = None
    if config.model.name is None:
        notices.append("memory budget: known once the learner has told which model it trains")
    else:
        try:
            facts = _model_facts(config.model.name, config.model)
            budget = memory_budget(config, role, facts, read_machine(_gpu_bytes(config, role)))
        except (ConfigError, DataError) as error:
            notices.append(f"memory budget: not known here: {error}")
    return dry_run_text(config, role, budget=budget, notices=notices)


def check_start(config: Config, role: Role) -> None:
    """Check the files and addresses that a role needs to start, beside the model.

    Raises:
        ConfigError: listing everything that is wrong.
    """
    problems = [*_data_problems(config, role), *_port_problems(config, role)]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n  ".join([f"the start has {len(problems)} problems:", *problems]))


def _model_facts(name: str, model: ModelSection) -> ModelFacts:
    path = Path(name).expanduser()
    if path.is_dir() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return read_model_facts(path)
    hub = import_extra("huggingface_hub", extra="worker", wanted_by=f"reading {name} on the hub")
    found = hub.try_to_load_from_cache(name, "config.json", revision=model.revision)
    if not isinstance(found, str):
        try:
            found = hub.hf_hub_download(name, "config.json", revision=model.revision)
        except (OSError, ValueError) as error:  # what the hub raises is one of the two
            raise DataError(
                f"{name} is neither a directory here nor in the hub's cache, and the hub cannot "
                f"be asked ({type(error).__name__}: {str(error).splitlines()[0]}); fetch the "
                "model's config.json, a few kB, from its page into a directory D, and run this "
                "with --set model.name=D"
            ) from error
    return read_model_facts(Path(found).parent)


def _data_problems(config: Config, role: Role) -> list[str]:
    if role != "learner":
        return []
    try:
        task = load_task(config.task.kind, config.task.options)
    except EchoError as error:
        return [str(error)]
    return [problem for part in task.parts() or [task] for problem in part.data_problems()]


def _port_problems(config: Config, role: Role) -> list[str]:
    listens = {
        "learner": config.learner.listen,
        "relay": config.relay.listen,
        "worker": config.worker.listen,
    }
    addresses = [listens[role]]
    if role == "worker":
        addresses.append(config.agent.listen)
    problems = []
    for address in filter(None, addresses):
        try:
            asyncio.run(bound_socket(address, None)).close()
        except EchoError as error:
            problems.append(str(error))
    return problems


def _gpu_bytes(config: Config, role: Role) -> int | None:
    """Return the free bytes of the GPU that this role would use; None without one."""
    if role == "relay":
        return None
    device = config.learner.device if role == "learner" else config.worker.device
    try:
        # Imported here: a relay's machine, where a dry run must work too, has no torch.
        from echo.engine.model import free_gpu_bytes
    except ImportError:
        return None
    return free_gpu_bytes(device)
