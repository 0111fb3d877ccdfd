"""What a worker is made of, and its few steps that need no node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from echo.core.errors import EngineError
from echo.engine.engine import Engine, Sampling
from echo.engine.weights import tensors_from_image
from echo.runtime.agents import AgentParts
from echo.runtime.episodes import EpisodePlayer
from echo.runtime.sampling import PartialRules
from echo.tasks.rewards import TaskHost
from echo.weights.store import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker is made of once it knows the run."""

    engine: Engine
    host: TaskHost
    """Where answers are judged."""
    player: EpisodePlayer | None
    """Plays the episodes of an environment; None where an answer is one turn."""
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text without stop and padding tokens."""
    sampling: Sampling
    group_size: int
    max_prompt_tokens: int
    """Longest prompt that leaves room for a completion in the model's window."""
    groups_per_batch: int
    """Groups that the engine holds at one time."""
    rules: PartialRules
    """What becomes of unfinished rollouts."""
    partials_path: Path
    """File in which they outlive the process."""
    agents: AgentParts | None
    """What outside agents get, where rollouts come from them."""
    digests: dict[str, str]
    read_local_image: Callable[[], bytearray | None]
    """Lays out the weights of the worker's own model directory as a version's image; slow."""


def install(engine: Engine, transfer: Transfer) -> str:
    """Load a version into the engine after checking its bytes once more; return their hash."""
    manifest = transfer.manifest
    digest = blake3(transfer.arena)
    if digest.digest() != manifest.image_hash:
        raise EngineError(
            f"{manifest.version}: the bytes in memory do not hash to what the learner signed; "
            "check this machine's memory"
        )
    image = memoryview(transfer.arena).toreadonly()
    engine.load(tensors_from_image(manifest.tensors, image), manifest.version)
    return digest.hexdigest()
