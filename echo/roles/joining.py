"""Admits nodes to the run. One table of states is for the node, one for the learner.

The node's end (`Joining.TABLE`):

    dialling --Linked--> joining --Welcome--> configuring --Built--> readying --Admitted--> admitted
                            ^                                           |                      |
                            +------------------ Rehello ----------------+----------------------+

From each of these states, `Lost` leads back to dialling. Refuse, Finish and `GaveUp` end the node.
If a node has already built its engine, a Welcome leads to readying. A second Welcome with other
keys means that the learner was restarted. In this case the node sends another Hello. A Welcome with
other settings ends the node.

The learner's end (`Admission.TABLE`), for each node:

    unknown --Hello--> known --Ready--> admitted

Goodbye, silence, wrong hashes and an internal error lead back to `unknown`. A Hello that a new
process sends under the name of a silent process leads to `known`. If a node sends messages about
work before its admission, the learner answers with Rehello.

An event is a message, or a fact that an end observes itself. The table's entry for the present
state and the event has the next state and a method to call. No other code changes the state.

Node and learner compare the hashes of model, tokenizer, chat template, stop ids, task source and
dataset. A node that lacks the model's configuration and tokenizer inherits these files from the
learner, so they have the learner's hashes. Code and weights are never inherited.

Any process with the run's secret may act as a relay. So the learner signs inherited files and
settings, and nodes verify the signature before use. A node gets the fingerprint of the learner's
key from the join string. Without encryption (`security.curve = false`) there is no fingerprint, and
a node can only check that one key has signed everything. A node refuses inherited files whose names
are not in INHERITED_FILES, because a file with another name could be code.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo.core.errors import EchoError, ForgedError, RefusedError, RemoteProtocolError
from echo.core.monitoring.metrics import Counters
from echo.core.price import Price
from echo.core.rollout import Lineage
from echo.core.units import one_line
from echo.roles.members import Member, Presence, Roster
from echo.roles.plans import Plans
from echo.weights.broadcast import Broadcast
from echo.wire.actions import Action, Note, PeerFaults, Routes, Stop
from echo.wire.codec import Envelope, Frame, open_seal
from echo.wire.messages import (
    LEARNER_ID,
    UNSEALED,
    Ack,
    Admitted,
    Asset,
    AssetRequest,
    Deliver,
    Failed,
    Finish,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Partial,
    Pulse,
    Ready,
    Reclaim,
    Refuse,
    Rehello,
    TopologyPlan,
    Welcome,
)
from echo.wire.seals import Channel, SealKeys, Seals, channel_of

WORK_OF_LEARNER = (TopologyPlan, Pulse, Grant, Reclaim, Ack)
"""The learner sends messages of these types to nodes. These messages are about work, not about
joining. The node's role handles them."""
WORK_OF_NODE = (Heartbeat, Deliver, Partial, Failed)
"""Nodes send messages of these types to the learner. The messages are about work, not about
joining."""

State = TypeVar("State", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Step(Generic[State]):
    """What an event does in one state: the next state, if it changes, and a method to call."""

    handle: Callable[..., list[Action]]
    then: State | None = None


Table = dict[State, dict[type, Step[State]]]
"""A table with the step for each pair of a state and a type of event."""


def _ignore(*_: object, **__: object) -> list[Action]:
    return []


IGNORED: Step[Any] = Step(_ignore)


def _each(events: Iterable[type], step: Step[Any]) -> dict[type, Step[Any]]:
    return dict.fromkeys(events, step)


# --- Trust: what the learner of the run has signed ---

FINGERPRINT_BYTES = 16
"""Number of bytes in a fingerprint. Finding another key with the same 128 bits takes 2^128
attempts."""

# These contexts keep the hashes apart from a manifest's root, which the same key signs.
_FINGERPRINT = "echo-rl 2026-11 fingerprint of a learner's signing key"
_ANSWER = "echo-rl 2026-11 answer to a hello"
_HELLO = "echo-rl 2026-11 hello"

Answer = TypeVar("Answer", Welcome, Refuse, Finish)
"""The answers that the learner may give to a Hello. The learner signs each answer."""


def fingerprint(public_key: bytes) -> bytes:
    """Return the fingerprint of a public signing key."""
    return blake3(public_key, derive_key_context=_FINGERPRINT).digest(length=FINGERPRINT_BYTES)


def show_fingerprint(value: bytes) -> str:
    """Return a fingerprint as text, in the form that join strings use."""
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def sign_answer(answer: Answer, key: Ed25519PrivateKey) -> Answer:
    """Return a signed copy of an answer. The signature covers all other fields.

    The answer contains the hash of a Hello. So the answer is valid only for this Hello and its
    process.
    """
    arriving: Answer = _arriving(answer)
    return msgspec.structs.replace(arriving, signature=key.sign(_hash(arriving)))


def hash_hello(hello: Hello) -> bytes:
    """Return the hash by which an answer refers to this Hello."""
    body = msgspec.msgpack.encode(_arriving(hello))
    return blake3(body, derive_key_context=_HELLO).digest()


def _arriving(message: Any) -> Any:
    """Return a message as its receiver decodes it.

    In particular, a whole number in a float field becomes a float.
    """
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


def answer_fault(
    answer: Welcome | Refuse | Finish, *, known: bytes | None
) -> tuple[str, str] | None:
    """Return (reason, detail) if the signature of an answer is invalid. Otherwise return None.

    Args:
        answer: the answer as it arrived.
        known: the fingerprint of the learner's key; None to accept any key.
    """
    found = fingerprint(answer.public_key)
    if known is not None and found != known:
        return "wrong_signing_key", (
            f"the signing key has the fingerprint {show_fingerprint(found)}, this node's join "
            "string (or the run directory, where links are not encrypted) states "
            f"{show_fingerprint(known)}. Either the line in runs/NAME/keys/join on the learner's "
            "machine has changed since: copy it again. Or another process answers in the learner's "
            "name"
        )
    try:
        key = Ed25519PublicKey.from_public_bytes(answer.public_key)
        key.verify(answer.signature, _hash(answer))
    except (InvalidSignature, ValueError):
        what = "settings and files that this node is to take over"
        return "wrong_signature", (
            f"the learner's key has not signed {what if isinstance(answer, Welcome) else 'it'}: "
            "a process between the learner and this node has changed or forged them"
        )
    return None


def _hash(answer: Welcome | Refuse | Finish) -> bytes:
    body = msgspec.msgpack.encode(msgspec.structs.replace(answer, signature=b""))
    return blake3(body, derive_key_context=_ANSWER).digest()


# --- The node's end ---


CODE = "task.code"
"""Key in the inherited settings. Its value has the hash and the path of each module of the
learner's task."""
LIKELY_IDS = "likely_ids"
"""Key in the inherited settings. Its value is a number of ids. With each token, workers send this
many of the most likely ids. The loss determines the number."""
MAX_TREE_TOKENS = "max_tree_tokens"
"""Key in the inherited settings. Its value is the largest number of tokens that all chains of an
agent's rollout may have together."""
EXPECTED = "expected"
"""Key in the inherited settings. Its value has the expected number of rollouts and the expected
prompt length."""
INHERITED_FILES = frozenset({
    "config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "chat_template.jinja",
})  # fmt: skip
"""The only names that inherited files may have. Python does not import files with these names."""


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Return those settings that must stay the same when a run is resumed.

    Paths and expected prompts are left out, because a resume may change them.
    """
    settings = {name: value for name, value in settings.items() if name != EXPECTED}
    if CODE not in settings:
        return settings
    return settings | {CODE: {name: code["hash"] for name, code in settings[CODE].items()}}


@dataclass(frozen=True, slots=True)
class Configure(Action):
    """Action: build task and engine from the learner's files and settings.

    Then report the hashes of the files of task and engine.
    """

    settings: dict[str, Any]
    assets: dict[str, bytes]


def digest_mismatch(*, ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Return text that names the hashes in which a node and the learner differ.

    If all hashes agree, return None. A file is compared only if both sides have the file. An empty
    hash means that a side lacks the file.
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
    """Return the hash and the size of each file that a worker may inherit.

    Welcome contains them.
    """
    return {name: (blake3(data).hexdigest(), len(data)) for name, data in files.items()}


class Assets:
    """The files and settings that a node inherits from the learner."""

    def __init__(
        self,
        expected: dict[str, tuple[str, int]] | None = None,
        *,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Expect the files in `expected`: each name has (BLAKE3 hash in hex, size in bytes)."""
        self.expected = expected or {}
        self.settings = settings or {}
        self.files: dict[str, bytes] = {}

    @property
    def missing(self) -> list[str]:
        """Names of the expected files that have not arrived yet."""
        return [name for name in self.expected if name not in self.files]

    def keep(self, former: Assets) -> None:
        """Take over those expected files that `former` has already received."""
        for name, data in former.files.items():
            if self.expected.get(name) == former.expected[name]:
                self.files[name] = data

    def add(self, name: str, data: bytes) -> None:
        """Check the size and the hash of a file that has arrived, and store the file.

        Raises:
            RemoteProtocolError: if size or hash differ from the announced values.
        """
        digest, num_bytes = self.expected[name]
        if len(data) != num_bytes or blake3(data).hexdigest() != digest:
            raise RemoteProtocolError(f"inherited file {name} does not match its announced hash")
        self.files[name] = data


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The settings that a node has from its own configuration when it joins."""

    node_id: str
    role: str
    incarnation: str
    addresses: tuple[str, ...]
    """The learner's addresses, in the order in which the node dials them."""
    advertise: str | None
    """Address at which this node serves weights; None if the node does not listen."""
    echo_version: str
    reconnect_for_s: float
    max_image_bytes: int
    digests: dict[str, str]
    """Hashes of the node's own files, under the files' names; empty if the node inherits all
    files."""
    seal_keys: SealKeys = field(repr=False)
    retry_s: float = 1.0
    heartbeat_s: float = 5.0
    """Seconds between heartbeats until a Welcome states the run's value."""
    dead_after_s: float = 45.0
    fingerprint: bytes | None = None
    """Fingerprint of the learner's signing key, from the join string; None if unknown."""
    region: str = ""
    price_per_gb: float = 0.0
    price: Price = field(default_factory=Price)


class NodeState(StrEnum):
    """The state of a node, from its first dial to its end."""

    DIALLING = "dialling"
    """The node has no link to the learner, or the other end has not sent its name yet."""
    JOINING = "joining"
    """The node repeats Hello until a Welcome arrives."""
    CONFIGURING = "configuring"
    """The node fetches files from the learner and then builds task and engine."""
    READYING = "readying"
    """The node repeats Ready until Admitted arrives."""
    ADMITTED = "admitted"
    STOPPED = "stopped"
    """The node has ended, and its process ends."""


@dataclass(frozen=True, slots=True)
class Linked:
    """Event: the other end of the control link has sent its name."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: the control link is lost.

    Until `retry_at`, the node waits for a link to the next address.
    """

    retry_at: float


@dataclass(frozen=True, slots=True)
class Built:
    """Event: task and engine are built. `digests` has the hashes of the files of both."""

    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class AnswerToAnother:
    """Event: a Welcome answers a different Hello, or an Admitted is for a different process."""


@dataclass(frozen=True, slots=True)
class AnotherChannel:
    """Event: a second Welcome arrived with different keys, because the learner was restarted."""


@dataclass(frozen=True, slots=True)
class UnfitWelcome:
    """Event: a Welcome arrived from a run that this node cannot join."""

    reason: str
    error: EchoError


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Event: this node cannot reach the learner, and further attempts would not help."""

    reason: str
    error: EchoError


class JoiningRole(Protocol):
    """The methods that `Joining` calls on the role of a node that joins."""

    def to_learner(self, message: Message, *payload: Frame) -> list[Action]:
        """Return the action that sends a message to the learner.

        Without a link, return no action.
        """

    def on_welcome(self, version_bytes: int, *, now: float) -> list[Action]:
        """Handle a Welcome.

        `version_bytes` is the number of bytes that are sent for a version of the weights.
        """

    def on_admitted(self, *, now: float) -> list[Action]:
        """Handle the news that this node is admitted. The news may arrive several times."""

    def on_work(self, message: Message, payload: list[Frame], now: float) -> list[Action]:
        """Handle a message about work from the learner, such as a Grant."""


class Joining:
    """The node's side of the admission: its state, and which messages it sends and expects."""

    def __init__(self, settings: NodeSettings, broadcast: Broadcast, role: JoiningRole) -> None:
        self.settings = settings
        self.broadcast = broadcast
        self.state = NodeState.DIALLING
        self.via = ""
        """Address and id of the node through which this node reaches the learner. Messages to the
        operator show it."""
        self.retry_at = 0.0
        self.run_id = ""
        self.lineages: tuple[Lineage, ...] = ()
        self.heartbeat_s = settings.heartbeat_s
        self.dead_after_s = settings.dead_after_s
        self.seals = Seals()
        self.hello = self._make_hello(b"")
        self.hello_hash = b""
        self._role = role
        self._learner_key = b""
        self._assets = Assets()
        self._digests: dict[str, str] | None = None
        self._is_building = False

    # --- events ----------------------------------------------------------------------------------

    def receive(self, message: Message, payload: list[Frame], *, now: float) -> list[Action]:
        """Handle a message from the learner. The effect depends on the present state.

        Raises:
            RemoteProtocolError: if the message is of a kind that learners never send, or if a file
                is not the file that was announced.
        """
        if type(message) not in self.TABLE[self.state]:
            raise RemoteProtocolError(f"{type(message).__name__} is not for a {self.settings.role}")
        return self._take(self._classify(message), payload, now)

    def forgery(self, message: Message) -> tuple[str, str] | None:
        """Return (reason, detail) if a Welcome is not signed by the learner. Otherwise return None.

        No field of a Welcome may be used before this check.
        """
        fault = None
        if isinstance(message, Welcome):
            fault = answer_fault(message, known=self.settings.fingerprint)
        return fault and (fault[0], f"the Welcome that came over {self.via}: {fault[1]}")

    def is_genuine(self, envelope: Envelope, message: Message, payload: list[Frame]) -> bool:
        """Return whether a message belongs to the present connection with the learner.

        Raises:
            ForgedError: if the message was forged, changed or replayed on the way.
        """
        match message:
            case Asset() | Rehello():
                return True
            case Welcome():
                return message.answers == self.hello_hash
            case Refuse() | Finish() if message.signature or isinstance(message, Refuse):
                return self._is_own_answer(message)
            case Finish():
                # A learner that has just welcomed this node has not ended. This may be the Finish
                # of its former process, held back by a relay.
                offered, seal = self.seals.offered, envelope.seal
                if offered is not None and seal is not None and seal.channel != offered.name:
                    return False
        return open_seal(self.seals, envelope, payload)

    def _is_own_answer(self, message: Refuse | Finish) -> bool:
        fault = answer_fault(message, known=self.settings.fingerprint)
        if fault is None and self._learner_key not in (b"", message.public_key):
            fault = "", "it is signed with another key than that of this node's run"
        if fault is not None:
            raise ForgedError(fault[1])
        is_joined = self.state in (NodeState.READYING, NodeState.ADMITTED)
        is_late = isinstance(message, Finish) and is_joined  # a sealed Finish
        return message.answers == self.hello_hash and not is_late

    def linked(self, *, now: float) -> list[Action]:
        """Send Hello over the control link, which was just established."""
        return self._take(Linked(), [], now)

    def lost(self, *, retry_at: float, now: float) -> list[Action]:
        """Record that the control link is lost.

        The node waits until `retry_at` for a link to the next address.
        """
        return self._take(Lost(retry_at), [], now)

    def configured(self, digests: dict[str, str], *, now: float) -> list[Action]:
        """Record that task and engine are built. `digests` has the hashes of the files of both."""
        return self._take(Built(digests), [], now)

    def give_up(self, reason: str, error: EchoError, *, now: float) -> list[Action]:
        """End the node, for the given reason and with the given error."""
        return self._take(GaveUp(reason, error), [], now)

    def _classify(self, message: Message) -> object:
        """Return the event that a message causes. Usually this is the message itself."""
        match message:
            case Welcome() | Admitted() if message.incarnation != self.settings.incarnation:
                return AnswerToAnother()
            case Welcome():
                return self._classify_welcome(message)
        return message

    def _classify_welcome(self, message: Welcome) -> object:
        if message.answers != self.hello_hash:
            return AnswerToAnother()
        mismatch = self._find_mismatch(message)
        if mismatch is not None:
            self._agree(message)  # so that the learner accepts the Goodbye
            return UnfitWelcome(mismatch[0], RefusedError(mismatch[1]))
        newest = self.seals.newest
        is_welcomed = self.state in (NodeState.CONFIGURING, NodeState.READYING)
        if is_welcomed and newest is not None and newest.channel != self._channel_of(message):
            return AnotherChannel()
        return message

    def _take(self, event: object, payload: list[Frame], now: float) -> list[Action]:
        """Do what the table says for an event in the present state.

        No other code changes the state.
        """
        step = self.TABLE[self.state][type(event)]
        if step.then is not None:
            self.state = step.then
        return step.handle(self, event, payload, now)

    # --- what is sent, and repeated --------------------------------------------------------------

    def repeat(self, now: float) -> list[Action]:
        """Send the message of the present state again, because the learner has not answered it."""
        self.retry_at = now + self.settings.retry_s
        match self.state:
            case NodeState.JOINING:
                return self._role.to_learner(self.hello)
            case NodeState.CONFIGURING if self._assets.missing:
                # One file at a time, with a late repeat: over a slow link a file takes a while.
                self.retry_at = now + self.dead_after_s / 2
                return self._role.to_learner(AssetRequest(name=self._assets.missing[0]))
            case NodeState.CONFIGURING:
                self.retry_at = now + self.heartbeat_s
                return self._role.to_learner(self.hello)
            case NodeState.READYING:
                incarnation = self.settings.incarnation
                return self._role.to_learner(
                    Ready(incarnation=incarnation, digests=self._digests or {})
                )
        return []

    def _make_hello(self, nonce: bytes) -> Hello:
        settings = self.settings
        return Hello(
            node_id=settings.node_id,
            role=settings.role,
            incarnation=settings.incarnation,
            echo_version=settings.echo_version,
            advertise=settings.advertise,
            digests=settings.digests,
            seal_key=settings.seal_keys.seal_key(),
            nonce=nonce,
            region=settings.region,
            price_per_gb=settings.price_per_gb,
            price=settings.price,
        )

    # --- the steps of the table ------------------------------------------------------------------

    def _begin(self, event: object, payload: list[Frame], now: float) -> list[Action]:
        self.hello = self._make_hello(self.settings.seal_keys.nonce())
        self.hello_hash = hash_hello(self.hello)
        return self.repeat(now)

    def _channel_of(self, message: Welcome) -> bytes:
        return channel_of(
            hello=message.answers,
            nonce=message.nonce,
            learner_key=message.seal_key,
            run_id=message.run_id,
        )

    def _agree(self, message: Welcome) -> None:
        """Adopt the keys in a signed Welcome. All later messages are sealed with them."""
        theirs, channel = message.seal_key, self._channel_of(message)
        made = Channel(self.settings.seal_keys, theirs, channel, is_learner=False)
        if made.is_possible:
            self.seals.offered = made

    def _on_lost(self, event: Lost, payload: list[Frame], now: float) -> list[Action]:
        self.retry_at = event.retry_at
        return []

    def _on_welcome(self, message: Welcome, payload: list[Frame], now: float) -> list[Action]:
        self.run_id, self._learner_key = message.run_id, message.public_key
        self._agree(message)
        self.lineages = message.lineages
        self.heartbeat_s, self.dead_after_s = message.heartbeat_s, message.dead_after_s
        if message.uplink_bytes_per_s:
            self.broadcast.uplink.show(message.uplink_bytes_per_s)
        self.broadcast.trust.set(
            public_key=message.public_key,
            run_id=message.run_id,
            max_image_bytes=self.settings.max_image_bytes,
        )
        return [
            *self._prepare(message, now),
            *self._role.on_welcome(message.version_bytes, now=now),
        ]

    def _prepare(self, message: Welcome, now: float) -> list[Action]:
        if self._digests is not None:
            return self.configured(self._digests, now=now)
        if not self._is_building:
            wanted = {} if self.settings.role == "relay" else message.assets
            former, self._assets = self._assets, Assets(wanted, settings=message.settings)
            self._assets.keep(former)
        return self.repeat(now) if self._assets.missing else self._configure(now)

    def _find_mismatch(self, message: Welcome) -> tuple[str, str] | None:
        """Return (reason, detail) if this node cannot accept a signed Welcome.

        Otherwise return None.
        """
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
        has_taken_them = self.settings.role != "relay" and (
            self.state is NodeState.CONFIGURING or self._is_building or self._digests is not None
        )
        if has_taken_them and old != new:
            keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            return (
                "settings_changed",
                f"the learner was resumed with other settings ({', '.join(keys)}); restart this "
                "node so that it takes them",
            )
        return None

    def _on_asset(self, message: Asset, payload: list[Frame], now: float) -> list[Action]:
        if message.name not in self._assets.missing or len(payload) != 1:
            return []
        self._assets.add(message.name, bytes(payload[0]))
        return self.repeat(now) if self._assets.missing else self._configure(now)

    def _configure(self, now: float) -> list[Action]:
        self.retry_at = now + self.heartbeat_s
        if self._is_building:
            return []
        self._is_building = True
        return [Configure(self._assets.settings, self._assets.files)]

    def _on_built(self, event: Built, payload: list[Frame], now: float) -> list[Action]:
        self._digests, self._is_building = event.digests, False
        return self.repeat(now) if self.state is NodeState.READYING else []

    def _on_admitted(self, message: Admitted, payload: list[Frame], now: float) -> list[Action]:
        return self._role.on_admitted(now=now)

    def _on_work(self, message: Message, payload: list[Frame], now: float) -> list[Action]:
        return self._role.on_work(message, payload, now)

    def _on_refuse(self, message: Refuse, payload: list[Frame], now: float) -> list[Action]:
        reason = one_line(message.reason)
        detail = f"the learner refused this node ({reason}): {one_line(message.detail)}"
        return [Stop(reason, RefusedError(detail))]

    def _on_finish(self, message: Finish, payload: list[Frame], now: float) -> list[Action]:
        # With a Goodbye the learner need not wait until this node counts as silent.
        return [
            *self._role.to_learner(Goodbye(reason=message.reason)),
            Stop(one_line(message.reason)),
        ]

    def _on_unfit_welcome(
        self, event: UnfitWelcome, payload: list[Frame], now: float
    ) -> list[Action]:
        goodbye = Goodbye(reason=str(event.error), has_failed=True)
        return [*self._role.to_learner(goodbye), Stop(event.reason, event.error)]

    def _on_gave_up(self, event: GaveUp, payload: list[Frame], now: float) -> list[Action]:
        return [Stop(event.reason, event.error)]

    # --- the table ------------------------------------------------------------------------------

    _ALWAYS: ClassVar[dict[type, Step[NodeState]]] = {
        # Work that was sent before the control link was lost may arrive in any state.
        **_each(WORK_OF_LEARNER, Step(_on_work)),
        Refuse: Step(_on_refuse, NodeState.STOPPED),
        Finish: Step(_on_finish, NodeState.STOPPED),
        GaveUp: Step(_on_gave_up, NodeState.STOPPED),
        Lost: Step(_on_lost, NodeState.DIALLING),
        AnswerToAnother: IGNORED,
    }
    TABLE: ClassVar[Table[NodeState]] = {
        NodeState.DIALLING: {
            **_ALWAYS,
            Linked: Step(_begin, NodeState.JOINING),
            # The engine whose building began before the link was lost.
            Built: Step(_on_built),
            **_each((Welcome, AnotherChannel, UnfitWelcome, Asset, Admitted, Rehello), IGNORED),
        },
        NodeState.JOINING: {
            **_ALWAYS,
            Welcome: Step(_on_welcome, NodeState.CONFIGURING),
            UnfitWelcome: Step(_on_unfit_welcome, NodeState.STOPPED),
            Built: Step(_on_built),
            **_each((AnotherChannel, Linked, Asset, Admitted, Rehello), IGNORED),
        },
        NodeState.CONFIGURING: {
            **_ALWAYS,
            Asset: Step(_on_asset),
            Built: Step(_on_built, NodeState.READYING),
            # Hello is repeated in this state, so that each side knows that the other is alive.
            AnotherChannel: Step(_begin, NodeState.JOINING),
            UnfitWelcome: Step(_on_unfit_welcome, NodeState.STOPPED),
            **_each((Linked, Welcome, Admitted, Rehello), IGNORED),
        },
        NodeState.READYING: {
            **_ALWAYS,
            Admitted: Step(_on_admitted, NodeState.ADMITTED),
            Rehello: Step(_begin, NodeState.JOINING),
            # The answer to an earlier Hello.
            AnotherChannel: Step(_begin, NodeState.JOINING),
            UnfitWelcome: Step(_on_unfit_welcome, NodeState.STOPPED),
            **_each((Linked, Welcome, Built, Asset), IGNORED),
        },
        NodeState.ADMITTED: {
            **_ALWAYS,
            Rehello: Step(_begin, NodeState.JOINING),
            **_each((Linked, Built, Welcome, AnotherChannel, UnfitWelcome), IGNORED),
            **_each((Asset, Admitted), IGNORED),
        },
        NodeState.STOPPED: {
            **_each(_ALWAYS, IGNORED),
            **_each((Linked, Built, Welcome, AnotherChannel, UnfitWelcome), IGNORED),
            **_each((Asset, Admitted, Rehello), IGNORED),
        },
    }
    """What each event does to a node, for each state of the node."""


# --- The learner's end ---


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """What the learner requires for admission, and what Welcome contains."""

    run_id: str
    key: Ed25519PrivateKey = field(repr=False)
    """The learner's key, which signs the files and settings that nodes inherit."""
    seal_keys: SealKeys = field(repr=False)
    settings: dict[str, Any]
    """The values of the settings that workers inherit, under the settings' names."""
    assets: dict[str, bytes]
    digests: dict[str, str]
    heartbeat_s: float
    dead_after_s: float
    time_of_day: Callable[[], float] = lambda: 0.0
    """Returns the present Unix time in seconds; 0 if it is unknown. The difference from `now` is
    not constant, because clocks are set and machines are suspended."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """Event: a new process sent a Hello under the name of a process that is silent."""

    hello: Hello
    old: Member


@dataclass(frozen=True, slots=True)
class NameHeld:
    """Event: a Hello arrived under a name that a different, recently active process holds."""


@dataclass(frozen=True, slots=True)
class RosterFull:
    """Event: a Hello arrived under a new name, but MAX_NODES nodes are already known."""


@dataclass(frozen=True, slots=True)
class HelloRefused:
    """Event: a Hello is refused, so the process that sent it must end."""

    reason: str
    detail: str
    hello_hash: bytes


@dataclass(frozen=True, slots=True)
class ReadyRefused:
    """Event: a Ready has hashes that differ from the learner's hashes. The node is refused."""

    reason: str
    detail: str
    hello_hash: bytes


@dataclass(frozen=True, slots=True)
class ReadyOfAnother:
    """Event: a process sent a Ready, but the Welcome went to a different process."""


@dataclass(frozen=True, slots=True)
class Silent:
    """Event: a node has sent no message for `dead_after_s`."""


@dataclass(frozen=True, slots=True)
class Expelled:
    """Event: an internal error occurred while a message from a node was handled."""


class AdmittingRole(Protocol):
    """The methods that `Admission` calls on the learner's role."""

    def drop(self, member: Member, *, now: float) -> list[Action]:
        """Take back all leases from a node that left or was replaced."""

    def on_work(
        self, member: Member, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        """Handle a heartbeat, a result or a Goodbye from a node."""


class Admission:
    """The learner's side of the admission. It decides which nodes are admitted."""

    def __init__(
        self,
        settings: AdmissionSettings,
        *,
        lineages: tuple[Lineage, ...],
        roster: Roster,
        counters: Counters,
        routes: Routes,
        peer_faults: PeerFaults,
        plans: Plans,
        role: AdmittingRole,
    ) -> None:
        self.settings = settings
        self.lineages = lineages
        self._assets = describe_assets(settings.assets)  # hashed only once
        self.roster = roster
        self.counters = counters
        self._routes = routes
        self._peer_faults = peer_faults
        self._plans = plans
        self._role = role

    # --- events ----------------------------------------------------------------------------------

    def receive(
        self, source: str, message: Message, payload: list[Frame], *, now: float
    ) -> list[Action]:
        """Handle a routed message from the node `source`.

        The effect depends on the node's presence.

        Raises:
            RemoteProtocolError: if the message is of a kind that nodes never send, or is invalid.
        """
        if type(message) not in self.TABLE[self._presence_of(source)]:
            raise RemoteProtocolError(
                f"{type(message).__name__} from {source} is not for the learner"
            )
        return self._take(source, self._classify(source, message, now), payload, now)

    def is_missing_hello(self, source: str, message: Message) -> bool:
        """Return whether a node must send Hello before the learner handles this message.

        The message has arrived on a new link. A known node must send Hello first over this link,
        but messages about joining need no earlier Hello.
        """
        is_joining = isinstance(message, Hello | Ready | AssetRequest)
        return source in self.roster.nodes and not is_joining

    def proves_name(self, source: str, message: Message) -> bool:
        """Return whether a message comes from the process that holds the name `source`.

        If no process holds the name, the result is True. Otherwise only a Ready or a Hello with the
        incarnation of the process that holds the name can prove the name. A Ready has a seal, which
        the caller has checked. A Hello has no seal, so a Hello proves the name only until the first
        sealed message of the process has arrived.
        """
        member = self.roster.nodes.get(source)
        match message:
            case Hello() if member is not None:
                is_joined = member.seals.confirmed is not None
                return message.incarnation == member.incarnation and not is_joined
            case Ready() if member is not None:
                return message.incarnation == member.incarnation
        return member is None

    def is_genuine(self, envelope: Envelope, message: Message, payload: Sequence[Frame]) -> bool:
        """Return whether a message is genuine and not an old message that was sent again.

        A genuine message comes from the process that holds the name of the message's source. If the
        message was sealed in an earlier channel, the result is False. Such a message may be honest
        and late.

        Raises:
            ForgedError: if the message was forged, changed or replayed on the way.
        """
        member = self.roster.nodes.get(envelope.source)
        if member is None or isinstance(message, UNSEALED):
            return True
        return open_seal(member.seals, envelope, payload)

    def has_joined(self, source: str) -> bool:
        """Return whether the node has sent at least one message that its present channel seals."""
        member = self.roster.nodes.get(source)
        return member is not None and member.seals.confirmed is not None

    def take_silent(self, *, now: float) -> list[Member]:
        """Remove and return the nodes that have been silent for `dead_after_s`."""
        silent = self.roster.take_silent(now=now)
        for member in silent:
            self._take(member.node_id, Silent(), [], now)
        return silent

    def expel(self, source: str, *, now: float) -> bool:
        """Remove a node after an internal error. Return whether the learner knew the node."""
        is_known = source in self.roster.nodes
        self._take(source, Expelled(), [], now)
        return is_known

    def _presence_of(self, source: str) -> Presence:
        member = self.roster.nodes.get(source)
        return Presence.UNKNOWN if member is None else member.presence

    def _classify(self, source: str, message: Message, now: float) -> object:
        """Return the event that a message causes. Usually this is the message itself."""
        match message:
            case Hello():
                return self._classify_hello(source, message, now)
            case Ready():
                return self._classify_ready(source, message)
        return message

    def _classify_hello(self, source: str, message: Hello, now: float) -> object:
        is_theirs = message.node_id == source and source != LEARNER_ID
        if not self.settings.seal_keys.code(message.seal_key, b"", True, ()):
            raise RemoteProtocolError(f"a Hello of {source!r} without a public key for seals")
        if not is_theirs or message.role not in ("worker", "relay"):
            raise RemoteProtocolError(
                f"a Hello of {message.role} {message.node_id!r} from {source!r}"
            )
        fault = digest_mismatch(ours=message.digests, theirs=self.settings.digests)
        if fault is not None:
            return HelloRefused("digest_mismatch", fault, hash_hello(message))
        match self.roster.claim(message, now=now):
            case "restarted":
                return Restarted(message, self.roster.nodes[source])
            case "wait":
                return NameHeld()
            case "full":
                return RosterFull()
            case "name_taken":
                detail = (
                    f"another process is already called {source!r}; give this one a name of its "
                    f"own with --set {message.role}.name=..."
                )
                return HelloRefused("name_taken", detail, hash_hello(message))
        return message

    def _classify_ready(self, source: str, message: Ready) -> object:
        member = self.roster.nodes.get(source)
        if member is None:
            return message
        if member.incarnation != message.incarnation:
            return ReadyOfAnother()
        fault = digest_mismatch(ours=message.digests, theirs=self.settings.digests)
        if fault is None:
            return message
        return ReadyRefused("digest_mismatch", fault, member.hello_hash)

    def _take(self, source: str, event: object, payload: list[Frame], now: float) -> list[Action]:
        """Do what the table says for an event. No other code changes the presence of a node."""
        step = self.TABLE[self._presence_of(source)][type(event)]
        member = self.roster.nodes.get(source)
        if step.then is not None:
            if isinstance(event, Hello):
                member = Member.of(event, now=now)
            elif isinstance(event, Restarted):
                member = Member.of(event.hello, now=now)
            assert member is not None, "the table moves no node without a Hello"
            self.roster.move(member, step.then)
        return step.handle(self, source, member, event, payload, now)

    # --- the steps of the table ------------------------------------------------------------------

    def _on_hello(
        self, source: str, member: Member, message: Hello, payload: list[Frame], now: float
    ) -> list[Action]:
        member.last_seen_at, member.node.advertise = now, message.advertise
        return self._routes.to(source, self._welcome(member, message, now))

    def _on_restarted(
        self, source: str, member: Member, event: Restarted, payload: list[Frame], now: float
    ) -> list[Action]:
        return [
            Note("warning", f"{source} was restarted; its leases are granted again"),
            *self._routes.to(source, self._welcome(member, event.hello, now)),
            *self._role.drop(event.old, now=now),
        ]

    def _welcome(self, member: Member, message: Hello, now: float) -> Welcome:
        settings, answers = self.settings, hash_hello(message)
        seal_key = settings.seal_keys.seal_key()
        if answers != member.hello_hash:
            member.hello_hash, member.nonce = answers, settings.seal_keys.nonce()
            channel = channel_of(
                hello=answers,
                nonce=member.nonce,
                learner_key=seal_key,
                run_id=settings.run_id,
            )
            theirs = message.seal_key
            member.seals.offered = Channel(settings.seal_keys, theirs, channel, is_learner=True)
        welcome = Welcome(
            run_id=settings.run_id,
            incarnation=message.incarnation,
            public_key=settings.key.public_key().public_bytes_raw(),
            lineages=self.lineages,
            settings=settings.settings,
            assets=self._assets,
            digests=settings.digests,
            heartbeat_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
            uplink_bytes_per_s=self.roster.uplinks.get(message.node_id),
            version_bytes=self._plans.version_bytes,
            time_of_day=settings.time_of_day(),
            answers=answers,
            seal_key=seal_key,
            nonce=member.nonce,
        )
        return sign_answer(welcome, settings.key)

    def _on_refused(
        self,
        source: str,
        member: Member | None,
        event: HelloRefused | ReadyRefused,
        payload: list[Frame],
        now: float,
    ) -> list[Action]:
        reason, detail = event.reason, event.detail
        self.counters.add(f"refused/{reason}")
        notes = self._peer_faults.note(
            source, reason, f"refused node {source} ({reason}): {detail}", now=now
        )
        refuse = Refuse(
            reason=reason,
            detail=detail,
            answers=event.hello_hash,
            public_key=self.settings.key.public_key().public_bytes_raw(),
        )
        return [*notes, *self._routes.to(source, sign_answer(refuse, self.settings.key))]

    def _on_full(
        self, source: str, member: None, event: RosterFull, payload: list[Frame], now: float
    ) -> list[Action]:
        """Ignore the Hello, and warn the operator at most once a minute."""
        self.counters.add("refused/too_many_nodes")
        text = (
            f"{source} cannot join: {len(self.roster.nodes)} nodes are known, the most that a "
            "learner keeps; if the fleet is smaller, nodes restart under new names: give each a "
            "name of its own (worker.name, relay.name). It joins once others have left, or have "
            f"been silent for network.dead_after_s = {self.settings.dead_after_s:g} s"
        )
        return self._peer_faults.note(LEARNER_ID, "too_many_nodes", text, now=now)

    def finish(self, message: Hello, reason: str) -> list[Action]:
        """Answer a Hello with a signed Finish. The run has ended, and `reason` says why."""
        finish = Finish(
            reason=reason,
            answers=hash_hello(message),
            public_key=self.settings.key.public_key().public_bytes_raw(),
        )
        return self._routes.to(message.node_id, sign_answer(finish, self.settings.key))

    def _on_dismissed(
        self,
        source: str,
        member: Member,
        event: ReadyRefused,
        payload: list[Frame],
        now: float,
    ) -> list[Action]:
        refusal = self._on_refused(source, member, event, payload, now)
        return [*refusal, *self._role.drop(member, now=now)]

    def _on_asset_request(
        self,
        source: str,
        member: Member | None,
        message: AssetRequest,
        payload: list[Frame],
        now: float,
    ) -> list[Action]:
        data = self.settings.assets.get(message.name)
        if data is None:
            raise RemoteProtocolError(f"{source} asked for the unknown file {message.name!r}")
        return self._routes.to(source, Asset(name=message.name), data)

    def _on_ready(
        self, source: str, member: Member, message: Ready, payload: list[Frame], now: float
    ) -> list[Action]:
        note = Note("info", f"{member.role} {source} joined")
        answer = self._on_ready_again(source, member, message, payload, now)
        return [*answer, note, *self._plans.replan(now)]

    def _on_ready_again(
        self, source: str, member: Member, message: Ready, payload: list[Frame], now: float
    ) -> list[Action]:
        member.last_seen_at = now
        return self._routes.to(source, Admitted(incarnation=message.incarnation))

    def _on_stranger(
        self, source: str, member: Member | None, event: object, payload: list[Frame], now: float
    ) -> list[Action]:
        return self._routes.to(source, Rehello())

    def _on_work(
        self, source: str, member: Member, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        return self._role.on_work(member, message, payload, now)

    # --- the table ------------------------------------------------------------------------------

    TABLE: ClassVar[Table[Presence]] = {
        Presence.UNKNOWN: {
            Hello: Step(_on_hello, Presence.KNOWN),
            HelloRefused: Step(_on_refused),
            RosterFull: Step(_on_full),
            AssetRequest: Step(_on_asset_request),
            **_each((Ready, *WORK_OF_NODE, Goodbye), Step(_on_stranger)),
            **_each((Restarted, NameHeld, ReadyRefused, ReadyOfAnother, Silent, Expelled), IGNORED),
        },
        Presence.KNOWN: {
            Hello: Step(_on_hello),
            Restarted: Step(_on_restarted, Presence.KNOWN),
            **_each((NameHeld, RosterFull), IGNORED),
            HelloRefused: Step(_on_refused),
            AssetRequest: Step(_on_asset_request),
            Ready: Step(_on_ready, Presence.ADMITTED),
            ReadyRefused: Step(_on_refused, Presence.UNKNOWN),
            **_each((ReadyOfAnother, *WORK_OF_NODE), Step(_on_stranger)),
            Goodbye: Step(_on_work, Presence.UNKNOWN),
            **_each((Silent, Expelled), Step(_ignore, Presence.UNKNOWN)),
        },
        Presence.ADMITTED: {
            Hello: Step(_on_hello),
            Restarted: Step(_on_restarted, Presence.KNOWN),
            **_each((NameHeld, RosterFull), IGNORED),
            HelloRefused: Step(_on_refused),
            AssetRequest: Step(_on_asset_request),
            Ready: Step(_on_ready_again),
            ReadyRefused: Step(_on_dismissed, Presence.UNKNOWN),
            ReadyOfAnother: Step(_on_stranger),
            **_each(WORK_OF_NODE, Step(_on_work)),
            Goodbye: Step(_on_work, Presence.UNKNOWN),
            **_each((Silent, Expelled), Step(_ignore, Presence.UNKNOWN)),
        },
    }
    """What each event does at the learner, for each presence of the node."""
