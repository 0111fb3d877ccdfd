"""Every message that nodes exchange, and nothing else.

A message on the wire is one header frame followed by raw payload frames (`wire/codec.py`). There
are two kinds:

* **Link messages** concern the two ends of one connection only: greeting, and the weights plane,
  which is pulled hop by hop (`weights/broadcast.py`).
* **Routed messages** go between one node and the learner, however many relays lie between; a relay
  forwards them by the node id in the envelope and never looks inside. They are sealed from end to
  end (`wire/seals.py`), so that no relay can change, forge or replay one, except for the kinds in
  UNSEALED: a Welcome, and a Refuse or Finish in answer to a Hello, are signed by the learner and
  name the Hello that they answer; files are compared with hashes in the Welcome; and a forged
  Hello, AssetRequest or Rehello makes a node join again at most.

Senders and the kinds that they may send:

    any node  -> its parent    Greet, Probe, ProbeAck, Subscribe, Fetch, Credit
    parent    -> its child     Greeted, Probe, ProbeAck, Announce, Segment, Chunk, Waiting, Gone
    node      -> learner       Hello, AssetRequest, Ready, Heartbeat, Deliver, Partial, Failed,
                               Goodbye
    learner   -> node          Welcome, Asset, Admitted, Refuse, Rehello, TopologyPlan, Pulse,
                               Grant, Ack, Finish

Every routed message may be lost (a relay can die with it), so each is either a repeated statement
of state (Heartbeat, Pulse, TopologyPlan, Partial) or repeated until answered (Hello, Ready,
Deliver, Failed, Grant).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from echo.core.bounds import (
    MAX_CHUNKS,
    MAX_LEASES,
    MAX_NAMES,
    MAX_NODES,
    MAX_PAYLOAD_BYTES,
    MAX_RANGES,
    MAX_TOKENS,
    Address,
    Attempt,
    Capacity,
    Count,
    GroupId,
    Key,
    Line,
    Money,
    NodeId,
    Period,
    Place,
    Progress,
    Rate,
    Seconds,
    Seed,
    Size,
    Step,
    TokenId,
    Word,
)
from echo.core.price import Price
from echo.core.rollout import Lineage, PolicyVersion

ITEM_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8,
    "int8": 1, "uint8": 1, "bool": 1, "int16": 2, "int32": 4, "int64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes per element of every dtype that may travel."""


class Form(msgspec.Struct, frozen=True, array_like=True):
    """How a version travels."""

    kind: Literal["full", "keyframe", "delta"]
    """"full" (the image itself), "keyframe" (coded alone) or "delta" (coded against `base`)."""
    base: PolicyVersion | None = None

    def __str__(self) -> str:
        return self.kind if self.base is None else f"{self.kind} from {self.base}"


FULL = Form("full")


# --- link messages -------------------------------------------------------------------------------


OPEN_END = 1 << 40
"""Where a run of places stops whose end is not known yet."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; the tag is the class name. Fields have ranges (`core/bounds.py`)."""


class Greet(Message, frozen=True):
    """First message on a dialled link: who dials, and what the link is for."""

    node_id: NodeId
    role: Word
    purpose: Word
    """"control" (routed messages) or "weights" (the pull protocol)."""


class Greeted(Message, frozen=True):
    """Answer to Greet: who was reached."""

    node_id: NodeId
    role: Word


class Probe(Message, frozen=True):
    """Bytes of nothing, to see how fast they come through (`weights/link.py`)."""


class ProbeAck(Message, frozen=True):
    """They have come."""


class Subscribe(Message, frozen=True):
    """Child to parent: tell me of versions newer than this; answered by Announce or Waiting."""

    newest: PolicyVersion | None


class EncodedVersionOffer(msgspec.Struct, frozen=True, array_like=True):
    """One encoded version (`weights/encoded.py`) that a parent has, or is getting."""

    version: PolicyVersion
    base: PolicyVersion | None
    """What the receiver must hold; None for a keyframe."""
    num_bytes: Size
    """Its size, or what it is expected to be while it is still being coded."""


class Announce(Message, frozen=True):
    """Parent to child: what can be had here.

    The payload frame, if there is one, is the signed manifest of `version`, whose image can be had
    in full. Without it the version is still being coded or is on its way, as an encoded version.
    """

    version: PolicyVersion
    offers: Annotated[tuple[EncodedVersionOffer, ...], Meta(max_length=MAX_NODES)] = ()


class Fetch(Message, frozen=True):
    """Child to parent: send these chunks, in ascending order, up to the credit.

    Resuming after a cut and changing the parent are this same message with other ranges. It
    replaces any earlier Fetch over this link.
    """

    version: PolicyVersion
    ranges: Annotated[tuple[tuple[Place, Place], ...], Meta(max_length=MAX_RANGES)]
    """Half-open [start, stop) runs of missing chunks, ascending. A last run that stops at OPEN_END
    goes on with chunks yet to be coded."""
    credit_bytes: Size
    form: Form = FULL
    num_segments: Place = 0
    """Segments of the encoded version that the child has; it is sent those that follow."""


class Credit(Message, frozen=True):
    """Child to parent: bytes received so far, and how many more may be sent."""

    version: PolicyVersion
    credit_bytes: Size
    form: Form = FULL
    taken_bytes: Size = 0
    """Since the last Credit; they show the rate of the uplink."""


class Segment(Message, frozen=True):
    """Parent to child: the next part of an encoded version's table, signed, as the payload."""

    version: PolicyVersion
    form: Form
    index: Place


class Chunk(Message, frozen=True):
    """Parent to child: a chunk, or some; the bytes of each are a frame (`weights/cipher.py`)."""

    version: PolicyVersion
    index: Place
    form: Form = FULL
    others: Annotated[tuple[Place, ...], Meta(max_length=MAX_CHUNKS - 1)] = ()
    """Of the chunks that come with it, in the order of their frames."""


class Waiting(Message, frozen=True):
    """Parent to child: I live, but what you want has not reached me yet."""

    version: PolicyVersion | None
    """The version of the chunk that is wanted; None if it is any newer version."""
    form: Form = FULL
    again_s: Seconds = 0.0
    """Within how long I say so again, seconds; 0: no limit."""


class Gone(Message, frozen=True):
    """Parent to child: this version, in this form, can no longer be had here."""

    version: PolicyVersion
    form: Form = FULL


Names = Annotated[dict[Word, Word], Meta(max_length=MAX_NAMES)]
Counts = Annotated[dict[Word, Count], Meta(max_length=MAX_NAMES)]
FileSize = Annotated[int, Meta(ge=0, le=MAX_PAYLOAD_BYTES)]

PROTOCOL_VERSION = 13
"""Raised by every change that an older node would misunderstand."""

LEARNER_ID = "learner"
"""The node id of the learner; there is exactly one in a run."""


# --- routed messages: joining --------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Ask to join, or to come back after a cut."""

    node_id: NodeId
    role: Word
    incarnation: Word
    """Random, new for each start of the process: tells a return from a second node of that name."""
    echo_version: Word
    advertise: Address | None
    """Address at which this node serves weights to others; None if it cannot listen."""
    digests: Names
    """Hashes of what the node already has (model, tokenizer, ...); empty if it inherits all."""
    seal_key: Key
    """Public key of the process, for seals."""
    nonce: Key
    """New with each joining."""
    region: Word = ""
    price_per_gb: Money = 0.0
    """Of 1e9 bytes that leave the node's region."""
    price: Price = Price()


class Welcome(Message, frozen=True):
    """Facts that a node needs before it can be admitted."""

    run_id: Word
    incarnation: Word
    """Echo of the Hello that is answered."""
    public_key: Key
    """Ed25519 key that signs this message and the manifests of this run."""
    lineages: Annotated[tuple[Lineage, ...], Meta(max_length=MAX_LEASES)]
    settings: Annotated[dict[Word, Any], Meta(max_length=MAX_NAMES)]
    """Sampling, task, staleness bound, group size: what workers inherit."""
    assets: Annotated[dict[Word, tuple[Word, FileSize]], Meta(max_length=MAX_NAMES)]
    """File name -> (blake3 hex, bytes): tokenizer and model configuration, on request."""
    digests: Names
    """The learner's own hashes; a node's must equal them where it has any."""
    heartbeat_s: Period
    dead_after_s: Period
    uplink_bytes_per_s: Rate | None = None
    """Uplink of the node in all, as last reported in this run before a restart."""
    version_bytes: Size = 0
    """Size of the newest version on the wire; 0 before the first."""
    answers: Key = b""
    """Hash of the Hello that is answered."""
    seal_key: Key = b""
    """Public key of the learner's process, for seals."""
    nonce: Key = b""
    """New with each channel."""
    signature: Key = b""
    """Of all other fields (`roles/joining.py`), so that no relay on the way can change one."""


class AssetRequest(Message, frozen=True):
    """Ask for one of the files named in Welcome."""

    name: Word


class Asset(Message, frozen=True):
    """One file; its bytes are the payload frame."""

    name: Word


class Ready(Message, frozen=True):
    """The node has built its task and engine: compare these hashes and admit it."""

    incarnation: Word
    digests: Names


class Admitted(Message, frozen=True):
    """The node is in; heartbeats may start and leases follow."""

    incarnation: Word


class Refuse(Message, frozen=True):
    """The node cannot join and retrying will not help."""

    reason: Word
    """Short name that is counted, for example "protocol_version", "digest_mismatch"."""
    detail: Line
    """Both values and the remedy, for the operator."""
    answers: Key = b""
    """As in Welcome; so are the next two."""
    public_key: Key = b""
    signature: Key = b""


class Rehello(Message, frozen=True):
    """The learner does not know this node (it was restarted): say Hello again."""


class Finish(Message, frozen=True):
    """The run has ended: exit cleanly. It is sealed, or signed where it answers a Hello."""

    reason: Line
    answers: Key = b""
    """As in Welcome; so are the next two. All are empty where it is sealed."""
    public_key: Key = b""
    signature: Key = b""


class Goodbye(Message, frozen=True):
    """The node leaves; its leases may be issued again at once."""

    reason: Line
    has_failed: bool = False
    """Whether an error has ended it, which is the reason."""
    is_released: bool = False
    """Whether its machine has been given back: it no longer costs anything."""


# --- routed messages: work -----------------------------------------------------------------------


Parents = Annotated[tuple[tuple[NodeId, Address], ...], Meta(max_length=MAX_NODES)]


class TopologyPlan(Message, frozen=True):
    """Where to get weights from: parents in order of preference, the learner last."""

    epoch: Count
    parents: Parents
    """(Node id, address) of each; an empty address means: as this node reached it itself. None at
    all: the node stands by, and needs no weights."""

    @property
    def is_standby(self) -> bool:
        """Whether the node is to fetch nothing for now; it will be given no leases either."""
        return not self.parents

    @property
    def first_parent(self) -> str:
        """The preferred parent, in the form of `NodeStats.parent`."""
        return self.parents[0][0] if self.parents else "-"


class LeaseState(Message, frozen=True, array_like=True, tag=False):
    """One lease in a worker's heartbeat."""

    group_id: GroupId
    attempt: Attempt
    num_tokens: Progress
    """Tokens sampled, and rewards and answers of tools received, for it so far: its growth renews
    the lease. 0 where nothing was begun, -1 once it is done and not yet acknowledged."""
    is_waiting: bool = False
    """Whether it waits to be begun or continued: it shares the progress of those that run."""
    running_s: Seconds = 0.0
    """Seconds since the worker began or continued it; 0 while it waits."""


class NodeStats(Message, frozen=True, tag=False):
    """Facts that a node reports about itself with each heartbeat."""

    state: Word = "idle"
    tokens_sampled: Count = 0
    """Completion tokens sampled since the process started."""
    bytes_received: Count = 0
    """Weight bytes received since the process started."""
    bytes_sent: Count = 0
    """Weight bytes sent to children since the process started."""
    parent: Line = "-"
    """Node id of the parent in use."""
    suspects: Annotated[tuple[NodeId, ...], Meta(max_length=MAX_NODES)] = ()
    """Nodes that sent it chunks with wrong hashes, lately."""
    uplink_bytes_per_s: Rate | None = None
    downlink_bytes_per_s: Rate | None = None
    """Rates of its links that its transfers have shown; None while they have shown nothing."""
    rtt_s: Seconds | None = None
    """Round trip to its parent."""
    fetching: PolicyVersion | None = None
    num_chunks_held: Place = 0
    num_chunks: Place = 0
    refused: Counts = msgspec.field(default_factory=dict)
    refused_version: PolicyVersion | None = None
    """The version that the engine refused last; None once it has installed one since."""
    refusal: Line = ""
    """Why."""
    partials: Counts = msgspec.field(default_factory=dict)
    """Counts of what became of unfinished rollouts since the process started, by name."""
    num_places: Capacity = 0
    """Groups that a worker samples concurrently; others wait there. 0: all that it can hold."""
    engine: Word = ""
    """Kind and data type of a worker's engine; workers of the same are compared."""


class Heartbeat(Message, frozen=True):
    """A node's whole state as far as the learner cares; each one replaces the last."""

    installed: PolicyVersion | None
    """Newest version that the engine samples from (a relay: that it holds whole)."""
    capacity: Capacity
    """Groups that the worker can hold at once, running and waiting; 0 for a relay."""
    leases: Annotated[tuple[LeaseState, ...], Meta(max_length=MAX_LEASES)]
    """Leases running, waiting or delivered but not acknowledged."""
    stats: NodeStats


class Pulse(Message, frozen=True):
    """The learner's answer to a heartbeat: it lives, and this is its step."""

    step: Step
    newest: PolicyVersion | None


class Lease(Message, frozen=True, tag=False):
    """One prompt group granted to a worker."""

    group_id: GroupId
    attempt: Attempt
    seed: Seed
    prompt_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]
    example: Annotated[dict[Word, Any], Meta(max_length=MAX_NAMES)]
    """The task's example (prompt, answer, info): a worker needs no dataset."""
    min_version: PolicyVersion | None = None
    """The oldest version to sample it under: what older ones make comes too late to be trained on.
    A worker that holds an older one waits for a while, and then gives the lease back."""


class Grant(Message, frozen=True):
    """Leases for a worker; one that it already has is ignored.

    The payload frame, if there is one, is what others have sampled for each of them, to be
    continued (`encode_continuations` of `leases/partials.py`).
    """

    leases: Annotated[tuple[Lease, ...], Meta(max_length=MAX_LEASES)]


class Reclaim(Message, frozen=True):
    """Leases that another worker could begin: give them up, unless their groups were begun.

    The next heartbeat that does not list one of them confirms that it was given up. Until then it
    is this worker's.
    """

    leases: Annotated[tuple[tuple[GroupId, Attempt], ...], Meta(max_length=MAX_LEASES)]
    is_begun_too: bool = False
    """Whether unfinished groups are given up as well, with what was sampled for them."""


class Deliver(Message, frozen=True):
    """A finished group; header and arrays are the two payload frames (`codec.encode_group`)."""

    group_id: GroupId
    attempt: Attempt
    seconds: Seconds = 0.0
    """From its start on the worker to its end, rewards included."""


class Partial(Message, frozen=True):
    """Tokens sampled for a lease so far, in case this worker does not finish it.

    The payload frame is made by `encode_members` (`leases/partials.py`). Each replaces the last.
    """

    group_id: GroupId
    attempt: Attempt


BAD_LOGPROBS = "bad_logprobs"
"""Reason for which a worker gives a group up, or the learner refuses it: log-probabilities that are
NaN, infinite or positive."""


ENGINE_ERROR = "engine_error"
"""Reason for which a worker gives up a group whose sampling raised, or returns it because its
engine no longer samples.
"""


REASONS = frozenset(
    {
        # why the learner refuses a group
        "malformed", "mislabelled", "unknown_group", "not_leased", "another_prompt",
        "bad_token_ids", "group_size", "mixed_versions", "too_long", BAD_LOGPROBS,
        "no_trainable_token", "abandoned_version", "version_from_the_future", "stale",
        # why a worker gives one up
        "prompt_too_long", "group_too_large", ENGINE_ERROR, "reward_error", "reward_too_large",
        "reward_timeout", "reward_memory", "reward_lost", "reward_retries", "agent_error",
        "agent_failed", "agent_timeout", "version_not_installed",
        # why the learner ends one itself: nothing could be learned from it, no step be made with
        # it, or it cannot be had or is not needed
        "zero_variance", "no_opinion", "all_masked", "lost_member",
        "step_error", "nonfinite_gradient", "out_of_memory", "bad_group",
        "prompt_error", "lost", "attempts_exhausted", "run_finished",
    }
)  # fmt: skip
"""Why a group was not trained on; they name counters, and no other word of a peer's does."""


def known_reason(reason: str) -> str:
    """Return a peer's reason, or "other" if it is none that nodes of this version have."""
    return reason if reason in REASONS else "other"


class Failed(Message, frozen=True):
    """A group that could not be finished for a reason that repeating will not mend."""

    group_id: GroupId
    attempt: Attempt
    reason: Word
    detail: Line
    is_elsewhere: bool = False
    """Whether it can be finished all the same, by another worker: it is granted again."""
    traceback: Line = ""
    """Of the task's code, where that raised."""


class Ack(Message, frozen=True):
    """The learner has the group's end, or the group itself, on its disk: forget it."""

    group_id: GroupId
    attempt: Attempt
    outcome: Word
    """"accepted", "duplicate" or "refused"."""
    reason: Word = ""


LINK_MESSAGES = (
    Greet
    | Greeted
    | Probe
    | ProbeAck
    | Subscribe
    | Announce
    | Fetch
    | Credit
    | Segment
    | Chunk
    | Waiting
    | Gone
)
ROUTED_MESSAGES = (
    Hello
    | Welcome
    | AssetRequest
    | Asset
    | Ready
    | Admitted
    | Refuse
    | Rehello
    | Finish
    | Goodbye
    | TopologyPlan
    | Heartbeat
    | Pulse
    | Grant
    | Reclaim
    | Deliver
    | Partial
    | Failed
    | Ack
)
AnyMessage = LINK_MESSAGES | ROUTED_MESSAGES
UNSEALED = (Hello, Welcome, AssetRequest, Asset, Refuse, Rehello)
"""Routed messages that are signed, or compared with what is, or harmless."""


ItemId = tuple[PolicyVersion, Form]
