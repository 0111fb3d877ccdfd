"""One outbound link of a node, to the learner's side or to a parent for the weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Uplink:
    """One outbound link."""

    address: str
    peer: str = ""
    node_id: str = ""
    """Who answered; empty until Greeted."""
    dialled_at: float = 0.0
    greeted_at: float = 0.0
    """When Greet was sent."""
    rtt_s: float | None = None
    """From Greet to Greeted; None until then."""
