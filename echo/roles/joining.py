"""A node's way in: hello, the settings and files that it inherits, hashes compared, ready.

Model, tokenizer, chat template, stop ids, task source and dataset are compared by hash. A node that
brings none of them inherits the files from the learner (configuration and tokenizer, never code
and never weights) and is right by construction.

Whatever is inherited is signed by the learner, and checked before any of it is used: a relay that
forwards it may be anybody with the run's secret. Files have a name out of a fixed table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.errors import RefusedError, RemoteProtocolError
from echo.core.metrics import Counters
from echo.core.price import Price
from echo.core.rollout import Lineage
from echo.core.units import one_line
from echo.roles.members import Member, Roster
from echo.weights.broadcast import Broadcast
from echo.weights.store import sign_welcome, welcome_fault
from echo.wire.actions import Action, Complaints, Note, Routes, Stop
from echo.wire.codec import Frame
from echo.wire.messages import (
    LEARNER_ID,
    Admitted,
    Asset,
    AssetRequest,
    Finish,
    Goodbye,
    Hello,
    Message,
    Ready,
    Refuse,
    Rehello,
    Welcome,
)

CODE = "task.code"
"""Among the inherited settings: hash and path of each module of the task on the learner."""
INHERITED_FILES = frozenset({
    "config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "chat_template.jinja",
})  # fmt: skip
"""The only names that a file may have which comes over the network: none that Python imports."""


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without paths on the learner's machine: a resume may be elsewhere."""
    if CODE not in settings:
        return settings
    return settings | {CODE: {name: code["hash"] for name, code in settings[CODE].items()}}


@dataclass(frozen=True, slots=True)
class Configure(Action):
    """Build task and engine from what the learner said, then call the session's `configured`."""

    settings: dict[str, Any]
    assets: dict[str, bytes]


def digest_mismatch(*, ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Return what differs between a node's hashes and the learner's, or None.

    Only what both sides have is compared; an empty hash means "does not have it".
    """
    faults = [
        f"{name}: this node has {value[:16]}, the learner {theirs[name][:16]}"
        for name, value in sorted(ours.items())
        if value and theirs.get(name) and theirs[name] != value
    ]
    if not faults:
        return None
    return (
        f"{'; '.join(faults)}. Give both the same files, or leave model and task out of the node's "
        "configuration so that it inherits the learner's"
    )


def describe_assets(files: dict[str, bytes]) -> dict[str, tuple[str, int]]:
    """Return what Welcome says of the files that a worker may inherit: hash and size by name."""
    return {name: (blake3(data).hexdigest(), len(data)) for name, data in files.items()}


class Assets:
    """Files being inherited from the learner."""

    def __init__(
        self,
        expected: dict[str, tuple[str, int]] | None = None,
        *,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Expect these files: name -> (blake3 hex, bytes)."""
        self.expected = expected or {}
        self.settings = settings or {}
        self.files: dict[str, bytes] = {}
        for name in self.expected:
            if name not in INHERITED_FILES:
                raise RemoteProtocolError(
                    f"an inherited file with the name {name!r}; only files of a tokenizer, a "
                    "model's configuration and a chat template are taken"
                )

    @property
    def missing(self) -> list[str]:
        """Names still to be fetched."""
        return [name for name in self.expected if name not in self.files]

    def add(self, name: str, data: bytes) -> None:
        """Take a file that has arrived.

        Raises:
            RemoteProtocolError: if it is not the file that was announced.
        """
        digest, num_bytes = self.expected[name]
        if len(data) != num_bytes or blake3(data).hexdigest() != digest:
            raise RemoteProtocolError(f"inherited file {name} does not match its announced hash")
        self.files[name] = data


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What a node is told by its own configuration."""

    node_id: str
    role: str
    incarnation: str
    addresses: tuple[str, ...]
    """Where to look for the learner, in order."""
    advertise: str | None
    """Where this node serves weights to others; None if it does not listen."""
    echo_version: str
    reconnect_for_s: float
    max_image_bytes: int
    digests: dict[str, str]
    """Hashes of what the node has before it hears from the learner; empty if it inherits all."""
    retry_s: float = 1.0
    heartbeat_s: float = 5.0
    """Until Welcome says otherwise."""
    dead_after_s: float = 45.0
    fingerprint: bytes | None = None
    """Of the learner's signing key, from the join string; None where nothing has told it."""
    sockets_per_link: int = 1
    """Parallel connections to each parent."""
    region: str = ""
    price_per_gb: float = 0.0
    price: Price = field(default_factory=Price)


def describe_failure(settings: NodeSettings, addresses: Sequence[str], *, run_id: str) -> str:
    """Return what to tell the operator when no learner could be reached.

    Args:
        settings: the node's.
        addresses: where it tried.
        run_id: of the run whose learner it has lost; empty if it never reached one.
    """
    since = f"run {run_id} was last heard of" if run_id else f"this {settings.role} started"
    return (
        f"no learner reached at {', '.join(addresses)} for {settings.reconnect_for_s:.0f} s, since "
        f"{since}; check that it runs, that its port is open, and the addresses under "
        f"[{settings.role}] connect; network.reconnect_for_s sets how long to try"
    )


class Joining:
    """The states of a node between dialling and membership (`roles/node.py` has the picture)."""

    def __init__(
        self,
        settings: NodeSettings,
        broadcast: Broadcast,
        *,
        send: Callable[[Message], list[Action]],
    ) -> None:
        """Start dialling.

        Args:
            settings: the node's own.
            broadcast: is told whose manifests to trust.
            send: returns the Send of a message to the learner.
        """
        self.settings = settings
        self.broadcast = broadcast
        self.state = "dialling"
        self.via = ""
        """Who the learner is reached through, for the operator."""
        self.retry_at = 0.0
        self.run_id = ""
        self.lineages: tuple[Lineage, ...] = ()
        self.heartbeat_s = settings.heartbeat_s
        self.dead_after_s = settings.dead_after_s
        self._send = send
        self._learner_key = b""
        self._assets = Assets()
        self._digests: dict[str, str] | None = None
        self._is_building = False

    def begin(self, now: float) -> list[Action]:
        """Say hello: the link stands, or the learner has forgotten this node."""
        self.state = "joining"
        return self.repeat(now)

    def repeat(self, now: float) -> list[Action]:
        """Send what the present state waits to have answered."""
        self.retry_at = now + self.settings.retry_s
        match self.state:
            case "joining":
                return self._send(self._hello())
            case "configuring" if self._assets.missing:
                # One at a time, and not again soon: over a thin link a file takes a while.
                self.retry_at = now + self.dead_after_s / 2
                return self._send(AssetRequest(name=self._assets.missing[0]))
            case "configuring":
                self.retry_at = now + self.heartbeat_s
                return self._send(self._hello())
            case "readying":
                incarnation = self.settings.incarnation
                return self._send(Ready(incarnation=incarnation, digests=self._digests or {}))
        return []

    def _hello(self) -> Hello:
        settings = self.settings
        return Hello(
            node_id=settings.node_id,
            role=settings.role,
            incarnation=settings.incarnation,
            echo_version=settings.echo_version,
            advertise=settings.advertise,
            digests=settings.digests,
            region=settings.region,
            price_per_gb=settings.price_per_gb,
            price=settings.price,
        )

    def receive(
        self,
        message: Welcome | Asset | Rehello | Refuse | Finish,
        payload: list[Frame],
        *,
        now: float,
    ) -> list[Action]:
        """Handle an answer of the learner.

        Raises:
            RemoteProtocolError: if a file has an unsafe name or is not the one announced.
        """
        match message:
            case Welcome():
                return self._on_welcome(message, now)
            case Asset():
                return self._on_asset(message, payload, now)
            case Rehello():
                return self.begin(now) if self.state in ("readying", "admitted") else []
            case Finish():
                # The goodbye spares the learner from waiting for this node to fall silent.
                return [*self._send(Goodbye(reason=message.reason)), Stop(one_line(message.reason))]
            case Refuse():
                reason = one_line(message.reason)
                detail = f"the learner refused this node ({reason}): {one_line(message.detail)}"
                return [Stop(reason, RefusedError(detail))]

    def _on_welcome(self, message: Welcome, now: float) -> list[Action]:
        if self.state != "joining" or message.incarnation != self.settings.incarnation:
            return []
        # First of all: nothing in it may be believed before.
        fault = welcome_fault(message, known=self.settings.fingerprint)
        if fault is not None:
            reason, detail = fault
            return [Stop(reason, RefusedError(f"the Welcome that came over {self.via}: {detail}"))]
        fault = self._find_fault(message)
        if fault is not None:
            reason, detail = fault
            return [Stop(reason, RefusedError(detail))]
        self.run_id, self._learner_key = message.run_id, message.public_key
        self.lineages = message.lineages
        self.heartbeat_s, self.dead_after_s = message.heartbeat_s, message.dead_after_s
        self.broadcast.trust(
            public_key=message.public_key,
            run_id=message.run_id,
            max_image_bytes=self.settings.max_image_bytes,
        )
        if self._digests is not None:
            self.state = "readying"
            return self.repeat(now)
        if not self._is_building:
            wanted = {} if self.settings.role == "relay" else message.assets
            self._assets = Assets(wanted, settings=message.settings)
        self.state = "configuring"
        return self.repeat(now) if self._assets.missing else self._configure(now)

    def _find_fault(self, message: Welcome) -> tuple[str, str] | None:
        """Return why this node cannot join this learner, as (reason, detail), or None."""
        if self.run_id and (message.run_id, message.public_key) != (self.run_id, self._learner_key):
            return (
                "another_run",
                f"this node belongs to run {self.run_id}, the learner now runs {message.run_id}; "
                "restart the node to join it",
            )
        fault = digest_mismatch(ours=self.settings.digests, theirs=message.digests)
        if fault is not None:
            return "digest_mismatch", fault
        unknown = sorted(message.assets.keys() - INHERITED_FILES)
        if unknown:
            return (
                "unknown_file",
                f"the learner offers the files {unknown}; this node takes those of a tokenizer, a "
                "model's configuration and a chat template only. Install the same release of "
                "echo-rl on both",
            )
        old, new = _comparable(self._assets.settings), _comparable(message.settings)
        # A relay inherits nothing.
        is_built = self.settings.role != "relay" and (
            self._is_building or self._digests is not None
        )
        if is_built and old != new:
            keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            return (
                "settings_changed",
                f"the learner was resumed with other settings ({', '.join(keys)}); restart this "
                "node so that it takes them",
            )
        return None

    def _on_asset(self, message: Asset, payload: list[Frame], now: float) -> list[Action]:
        is_wanted = self.state == "configuring" and message.name in self._assets.missing
        if not is_wanted or len(payload) != 1:
            return []
        self._assets.add(message.name, bytes(payload[0]))
        return self.repeat(now) if self._assets.missing else self._configure(now)

    def _configure(self, now: float) -> list[Action]:
        """Have task and engine built, once."""
        self.retry_at = now + self.heartbeat_s
        if self._is_building:
            return []
        self._is_building = True
        return [Configure(self._assets.settings, self._assets.files)]

    def configured(self, digests: dict[str, str], *, now: float) -> list[Action]:
        """Note that task and engine are built, with these hashes."""
        self._digests, self._is_building = digests, False
        if self.state != "configuring":
            return []
        self.state = "readying"
        return self.repeat(now)

    def is_expected(self, message: Admitted) -> bool:
        """Return whether an Admitted answers this node's Ready."""
        return self.state == "readying" and message.incarnation == self.settings.incarnation


# --- The learner's door: who may come in, and what a node needs to know before it can ---
#
# node: Hello  ->  learner: Welcome, or Refuse, or nothing while another process bears that name
# node: AssetRequest -> Asset        as often as it likes
# node: Ready  ->  Admitted, or Refuse, or Rehello if the node is not (any more) known


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


class Admission:
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
