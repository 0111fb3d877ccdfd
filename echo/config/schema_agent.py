"""The section on outside agents; as in schema.py, the text under a field is its help."""

from __future__ import annotations

from pydantic import Field

from echo.config.fields import ListenAddress, Seconds
from echo.config.section import Inherited, Section


class AgentSection(Section):
    """Programs outside that sample through workers and are trained; needs the extra agents."""

    roles = ("learner", "worker")
    listen: Inherited[ListenAddress | None] = None
    """Each worker's address for agents, such as tcp://127.0.0.1:0; unset: no agents."""
    max_session_tokens: Inherited[int] = Field(default=4096, ge=2, le=2**24)
    """Tokens of one session's longest conversation, everything in it."""
    session_timeout_s: Seconds = Field(default=600.0, gt=0)
    """Seconds without a call after which a session is over and another agent gets its episode."""
