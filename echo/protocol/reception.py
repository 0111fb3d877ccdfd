"""The learner's door: who may come in, and what a node needs to know before it can.

node: Hello  ->  learner: Welcome, or Refuse, or nothing while another process bears that name
node: AssetRequest -> Asset        as often as it likes
node: Ready  ->  Admitted, or Refuse, or Rehello if the node is not (any more) known
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.errors import RemoteProtocolError
from echo.core.metrics import Counters
from echo.core.rollout import Lineage
from echo.protocol.joining import describe_assets, digest_mismatch
from echo.protocol.membership import Member, Roster
from echo.weights.store import sign_welcome
from echo.wire.actions import Action, Note
from echo.wire.codec import Frame
from echo.wire.messages import (
    LEARNER_ID,
    Admitted,
    Asset,
    AssetRequest,
    Hello,
    Message,
    Ready,
    Refuse,
    Rehello,
    Welcome,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """What the learner's session is told by the configuration."""

    run_id: str
    key: Ed25519PrivateKey = field(repr=False)
    """Signs what nodes inherit."""
    advertise: str
    """Address that other nodes may dial; empty for "as you reached it"."""
    max_staleness: int
    groups_per_step: int
    group_size: int
    max_completion_tokens: int
    """Tokens of a rollout, masked ones included."""
    vocab_size: int
    heartbeat_s: float
    dead_after_s: float
    settings: dict[str, Any]
    """What workers inherit."""
    assets: dict[str, bytes]
    digests: dict[str, str]
    prompts_are_free: bool = False
    """Whether rollouts may be of other prompts than their leases', as those of agents are."""
    trims_stale: bool = False
    """Whether a group with some tokens beyond the bound is masked there, or refused."""
    chunk_bytes: int = 1 << 20
    region: str = ""
    price_per_gb: float = 0.0
    uplink_bytes_per_s: float | None = None
    """What to take its uplink for until transfers have shown it; None for a usual one."""
    hedge_factor: float | None = None
    """How many times sooner a copy must be expected (`leases/dispatch.py`); None for no copies."""
    exact_version: bool = False
    """Whether each group is sampled by one version alone: its worker's, when it was granted."""


class SendTo(Protocol):
    """How a message finds its way to a node."""

    def __call__(self, node_id: str, message: Message, *payload: Frame) -> list[Action]:
        """Return the Send of a message to a node, or nothing if no link leads to it."""


class Complain(Protocol):
    """What the operator is told of a peer, once a minute for each reason."""

    def __call__(self, source: str, reason: str, text: str, now: float) -> list[Action]:
        """Return the Note, or nothing if it was said a moment ago."""


class Reception:
    """Admission of nodes to the learner's roster."""

    def __init__(
        self,
        settings: LearnerSettings,
        *,
        lineages: tuple[Lineage, ...],
        roster: Roster,
        counters: Counters,
        send: SendTo,
        complain: Complain,
    ) -> None:
        """Open the door; roster and counters are the session's."""
        self.settings = settings
        self.lineages = lineages
        self.roster = roster
        self.counters = counters
        self._to = send
        self._complain = complain

    def on_hello(
        self, source: str, message: Hello, *, now: float
    ) -> tuple[list[Action], Member | None]:
        """Answer a Hello; return also the member whose place the node takes, if any.

        Raises:
            RemoteProtocolError: if the node is not who it says.
        """
        if (
            message.node_id != source
            or source == LEARNER_ID
            or message.role not in ("worker", "relay")
        ):
            raise RemoteProtocolError(
                f"a Hello of {message.role} {message.node_id!r} from {source!r}"
            )
        fault = digest_mismatch(ours=message.digests, theirs=self.settings.digests)
        if fault is not None:
            return self._refuse(source, "digest_mismatch", fault, now), None
        old = self.roster.nodes.get(source)
        outcome = self.roster.hello(message, now=now)
        if outcome == "wait":
            return [], None
        if outcome == "name_taken":
            detail = (
                f"another process is already called {source!r}; give this one a name of its own "
                f"with --set {message.role}.name=..."
            )
            return self._refuse(source, "name_taken", detail, now), None
        welcome = self._to(source, self._welcome(message))
        if outcome == "again" or old is None:
            return welcome, None
        note = Note("warning", f"{source} was restarted; its leases are granted again")
        return [note, *welcome], old

    def _welcome(self, message: Hello) -> Welcome:
        settings = self.settings
        welcome = Welcome(
            run_id=settings.run_id,
            incarnation=message.incarnation,
            public_key=settings.key.public_key().public_bytes_raw(),
            lineages=self.lineages,
            settings=settings.settings,
            assets=describe_assets(settings.assets),
            digests=settings.digests,
            heartbeat_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
        )
        return sign_welcome(welcome, settings.key)

    def _refuse(self, source: str, reason: str, detail: str, now: float) -> list[Action]:
        self.counters.add(f"refused/{reason}")
        notes = self._complain(source, reason, f"refused node {source} ({reason}): {detail}", now)
        return [*notes, *self._to(source, Refuse(reason=reason, detail=detail))]

    def on_asset_request(self, source: str, message: AssetRequest) -> list[Action]:
        """Send a file that Welcome named.

        Raises:
            RemoteProtocolError: if it did not.
        """
        data = self.settings.assets.get(message.name)
        if data is None:
            raise RemoteProtocolError(f"{source} asked for the unknown file {message.name!r}")
        return self._to(source, Asset(name=message.name), data)

    def on_ready(self, source: str, message: Ready, *, now: float) -> tuple[list[Action], bool]:
        """Admit a node whose hashes are right; return also whether it was not a member before."""
        member = self.roster.nodes.get(source)
        if member is None or member.incarnation != message.incarnation:
            return self._to(source, Rehello()), False
        fault = digest_mismatch(ours=message.digests, theirs=self.settings.digests)
        if fault is not None:
            del self.roster.nodes[source]
            return self._refuse(source, "digest_mismatch", fault, now), False
        was_member, member.is_member, member.heard_at = member.is_member, True, now
        actions = self._to(source, Admitted(incarnation=message.incarnation))
        if not was_member:
            actions.append(Note("info", f"{member.role} {source} joined"))
        return actions, not was_member
