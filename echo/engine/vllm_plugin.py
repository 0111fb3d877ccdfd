"""What vLLM finds of ours by entry point, in each of its processes.

The group is `vllm.general_plugins` in pyproject.toml. Nothing is imported from vLLM until it asks.
"""

from __future__ import annotations

from echo.engine.vllm_last_words import listen

BACKEND = "echo"
"""The name under which vLLM knows our way of handing weights over."""


def register() -> None:
    """Make the weight transfer backend known, and hear of deaths; may be called more than once."""
    listen()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    # vLLM offers no question for it, and refuses a second registration.
    if BACKEND not in Factory._registry:  # noqa: SLF001
        Factory.register_engine(BACKEND, "echo.engine.vllm_transfer", "HandoverEngine")
