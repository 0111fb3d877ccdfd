"""The learner's door: who may come in, and what a node needs to know before it can.

node: Hello  ->  learner: Welcome, or Refuse, or nothing while another process bears that name
node: AssetRequest -> Asset        as often as it likes
node: Ready  ->  Admitted, or Refuse, or Rehello if the node is not (any more) known
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.errors import RemoteProtocolError
from echo.core.metrics import Counters
from echo.core.rollout import Lineage
from echo.protocol.joining import describe_assets, digest_mismatch
from echo.protocol.membership import Member, Roster
from echo.weights.store import sign_welcome
from echo.wire.actions import Action, Complaints, Note, Routes
from echo.wire.messages import (
    LEARNER_ID,
    Admitted,
    Asset,
    AssetRequest,
    Hello,
    Ready,
    Refuse,
    Rehello,
    Welcome,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """What a node must match to be admitted, and what it is told then."""

    run_id: str
    key: Ed25519PrivateKey = field(repr=False)
    """Signs what nodes inherit."""
    settings: dict[str, Any]
    """What workers inherit."""
    assets: dict[str, bytes]
    digests: dict[str, str]
    heartbeat_s: float
    dead_after_s: float


class Reception:
    """Admission of nodes to the learner's roster."""

    def __init__(
        self,
        settings: AdmissionSettings,
        *,
        lineages: tuple[Lineage, ...],
        roster: Roster,
        counters: Counters,
        routes: Routes,
        complaints: Complaints,
    ) -> None:
        """Open the door; roster and counters are the session's."""
        self.settings = settings
        self.lineages = lineages
        self.roster = roster
        self.counters = counters
        self._routes = routes
        self._complaints = complaints

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
        welcome = self._routes.to(source, self._welcome(message))
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
        notes = self._complaints.note(
            source, reason, f"refused node {source} ({reason}): {detail}", now=now
        )
        return [*notes, *self._routes.to(source, Refuse(reason=reason, detail=detail))]

    def on_asset_request(self, source: str, message: AssetRequest) -> list[Action]:
        """Send a file that Welcome named.

        Raises:
            RemoteProtocolError: if it did not.
        """
        data = self.settings.assets.get(message.name)
        if data is None:
            raise RemoteProtocolError(f"{source} asked for the unknown file {message.name!r}")
        return self._routes.to(source, Asset(name=message.name), data)

    def on_ready(self, source: str, message: Ready, *, now: float) -> tuple[list[Action], bool]:
        """Admit a node whose hashes are right; return also whether it was not a member before."""
        member = self.roster.nodes.get(source)
        if member is None or member.incarnation != message.incarnation:
            return self._routes.to(source, Rehello()), False
        fault = digest_mismatch(ours=message.digests, theirs=self.settings.digests)
        if fault is not None:
            del self.roster.nodes[source]
            return self._refuse(source, "digest_mismatch", fault, now), False
        was_member, member.is_member, member.heard_at = member.is_member, True, now
        actions = self._routes.to(source, Admitted(incarnation=message.incarnation))
        if not was_member:
            actions.append(Note("info", f"{member.role} {source} joined"))
        return actions, not was_member
