"""The messages that nodes exchange.

A message is sent as one header frame followed by raw payload frames (`wire/codec.py`). There are
three kinds:

* **Link messages** go between the two ends of one connection. They are the greeting, and the
  weights plane, where each node pulls from its parent (`weights/broadcast.py`).
* **Routed messages** go between a node and the learner, over any number of relays. A relay forwards
  them by the node id in the envelope and does not decode them. They are sealed from end to end
  (`wire/seals.py`), so that no relay can change, forge or replay them. Only the kinds in UNSEALED
  have no seal. The learner signs each Welcome, and each Refuse or Finish that answers a Hello.
  These messages contain the hash of the Hello. Files are compared with hashes in the Welcome. A
  forged Hello, AssetRequest or Rehello can only make a node join again.
* **Viewers' messages** go between a viewer, which is no node, and the learner (`roles/viewers.py`).

Senders and the kinds that they may send:

    any node  -> its parent    Greet, Probe, ProbeAck, Subscribe, Fetch, Credit
    parent    -> its child     Greeted, Probe, ProbeAck, Announce, Segment, Chunk, Waiting, Gone
    node      -> learner       Hello, AssetRequest, Ready, Heartbeat, Deliver, Partial, Failed,
                               Goodbye
    learner   -> node          Welcome, Asset, Admitted, Refuse, Rehello, TopologyPlan, Pulse,
                               Grant, Reclaim, Ack, Finish
    viewer    -> learner       Watch, Operation
    learner   -> viewer        Status, Outcome, Refuse

Every routed message may be lost, for example with a relay that dies. So some messages repeat a
state (Heartbeat, Pulse, TopologyPlan, Partial). The others are repeated until they are answered
(Hello, Ready, Deliver, Failed, Grant).
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
"""Bytes per element of each dtype that weights may have."""


class Form(msgspec.Struct, frozen=True, array_like=True):
    """The encoding in which a version is sent: the whole image, a keyframe or a delta."""

    kind: Literal["full", "keyframe", "delta"]
    """"full" (the image itself), "keyframe" (coded alone) or "delta" (coded against `base`)."""
    base: PolicyVersion | None = None

    def __str__(self) -> str:
        return self.kind if self.base is None else f"{self.kind} from {self.base}"


FULL = Form("full")


# --- link messages -------------------------------------------------------------------------------


OPEN_END = 1 << 40
"""Stands for the end of a range of chunks whose end is not known yet."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The base class of all messages; the tag on the wire is the name of the class.

    The types of the fields limit their values (`core/bounds.py`).
    """


class Greet(Message, frozen=True):
    """The first message on a link, with the dialling node's name and purpose."""

    node_id: NodeId
    role: Word
    purpose: Word
    """"control" (routed messages) or "weights" (the pull protocol)."""


class Greeted(Message, frozen=True):
    """The answer to Greet: the name of the node that was dialled."""

    node_id: NodeId
    role: Word


class Probe(Message, frozen=True):
    """Meaningless bytes, whose transfer measures the rate of a link (`weights/rates.py`)."""


class ProbeAck(Message, frozen=True):
    """The answer to a Probe, which confirms its arrival."""


class Subscribe(Message, frozen=True):
    """Child to parent: a request to announce versions that are newer than `newest`.

    The parent answers with Announce or Waiting.
    """

    newest: PolicyVersion | None


class EncodedVersionOffer(msgspec.Struct, frozen=True, array_like=True):
    """An encoded version (`weights/store/encoded.py`) that a parent has or is receiving."""

    version: PolicyVersion
    base: PolicyVersion | None
    """The version that the receiver must hold to decode the offered version; None for a keyframe.
    """
    num_bytes: Size
    """Size of the encoded version in bytes; an estimate until it is completely encoded."""


class Announce(Message, frozen=True):
    """Parent to child: the versions that the parent offers.

    The payload frame, if any, is the signed manifest of `version`. Then the whole image is
    available. Without a payload frame the version is still being encoded, or the parent is still
    receiving it as an encoded version.
    """

    version: PolicyVersion
    offers: Annotated[tuple[EncodedVersionOffer, ...], Meta(max_length=MAX_NODES)] = ()


class Fetch(Message, frozen=True):
    """Child to parent: a request for these chunks in ascending order.

    The parent sends them up to the credit in bytes. A child sends a Fetch with the ranges that are
    still missing after a lost connection or a change of parent. A Fetch replaces every earlier
    Fetch over this link.
    """

    version: PolicyVersion
    ranges: Annotated[tuple[tuple[Place, Place], ...], Meta(max_length=MAX_RANGES)]
    """Half-open ranges [start, stop) of missing chunks, ascending. If the last range stops at
    OPEN_END, it includes chunks that are coded later."""
    credit_bytes: Size
    form: Form = FULL
    num_segments: Place = 0
    """Number of the encoded version's segments that the child has; the parent sends the others."""


class Credit(Message, frozen=True):
    """Child to parent: how many bytes have arrived, and how many more the parent may send."""

    version: PolicyVersion
    credit_bytes: Size
    form: Form = FULL
    taken_bytes: Size = 0
    """Number of bytes received since the last Credit. From this number the parent estimates the
    rate of its uplink."""


class Segment(Message, frozen=True):
    """Parent to child: the next part of an encoded version's table of chunks.

    The payload frame has the segment, signed by the learner.
    """

    version: PolicyVersion
    form: Form
    index: Place


class Chunk(Message, frozen=True):
    """Parent to child: one or more chunks, each in its own payload frame (`weights/cipher.py`)."""

    version: PolicyVersion
    index: Place
    form: Form = FULL
    others: Annotated[tuple[Place, ...], Meta(max_length=MAX_CHUNKS - 1)] = ()
    """Indices of the further chunks, in the order of their frames."""


class Waiting(Message, frozen=True):
    """Parent to child: the parent is alive, but has not received the wanted chunk itself."""

    version: PolicyVersion | None
    """The version of the wanted chunk; None if the child waits for any newer version."""
    form: Form = FULL
    again_s: Seconds = 0.0
    """Seconds within which the parent repeats this message; 0 if the parent sets no limit."""


class Gone(Message, frozen=True):
    """Parent to child: the parent no longer has this version in this form."""

    version: PolicyVersion
    form: Form = FULL


Names = Annotated[dict[Word, Word], Meta(max_length=MAX_NAMES)]
Counts = Annotated[dict[Word, Count], Meta(max_length=MAX_NAMES)]
TimeOfDay = Annotated[float, Meta(ge=0, le=1e11)]
FileSize = Annotated[int, Meta(ge=0, le=MAX_PAYLOAD_BYTES)]

PROTOCOL_VERSION = 16
"""Version of the protocol; it is raised by every change that older nodes would misunderstand."""

LEARNER_ID = "learner"
"""The node id of the learner; a run has exactly one."""


# --- routed messages: joining --------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Node to learner: asks to join, or to rejoin after a lost connection."""

    node_id: NodeId
    role: Word
    incarnation: Word
    """Random name of the process, which distinguishes a node that returns from a second node of the
    same name.
    """
    echo_version: Word
    advertise: Address | None
    """Address at which this node serves weights; None if it does not listen."""
    digests: Names
    """Hashes of the node's own files (model, tokenizer, ...); empty if it gets all files from the
    learner."""
    seal_key: Key
    """The public key of the node's process, used for seals."""
    nonce: Key
    """Random bytes, new for each time the node joins."""
    region: Word = ""
    price_per_gb: Money = 0.0
    """Price of 1e9 bytes that leave the node's region, in $."""
    price: Price = Price()


class Welcome(Message, frozen=True):
    """The learner's answer to a Hello: what the node needs before it can be admitted."""

    run_id: Word
    incarnation: Word
    """The incarnation in the Hello that this message answers."""
    public_key: Key
    """The Ed25519 key with which the learner signs this message and the manifests of this run."""
    lineages: Annotated[tuple[Lineage, ...], Meta(max_length=MAX_LEASES)]
    settings: Annotated[dict[Word, Any], Meta(max_length=MAX_NAMES)]
    """The settings that workers inherit: sampling, task, staleness bound, group size."""
    assets: Annotated[dict[Word, tuple[Word, FileSize]], Meta(max_length=MAX_NAMES)]
    """File name -> (BLAKE3 in hex, bytes) of the files that a node may request."""
    digests: Names
    """The hashes of the learner's files; the node's own hashes must be equal."""
    heartbeat_s: Period
    dead_after_s: Period
    uplink_bytes_per_s: Rate | None = None
    """The rate of the node's uplink, from the node's last report in this run before it restarted.
    """
    version_bytes: Size = 0
    """Transfer size of the newest version in bytes; 0 before the first version."""
    time_of_day: TimeOfDay = 0.0
    """The learner's time of day, seconds since 1970; 0 if unknown."""
    answers: Key = b""
    """The hash of the Hello that this message answers."""
    seal_key: Key = b""
    """The public key of the learner's process, used for seals."""
    nonce: Key = b""
    """Random bytes, new for each channel."""
    signature: Key = b""
    """The learner's signature of all other fields (`roles/joining.py`), so that no relay can change
    a field."""


class AssetRequest(Message, frozen=True):
    """Node to learner: asks for a file that the Welcome names."""

    name: Word


class Asset(Message, frozen=True):
    """Learner to node: a requested file, in the payload frame."""

    name: Word


class Ready(Message, frozen=True):
    """Node to learner: task and engine are built, and have these hashes.

    The node asks for admission.
    """

    incarnation: Word
    digests: Names


class Admitted(Message, frozen=True):
    """Learner to node: the node is admitted and may send heartbeats; leases follow."""

    incarnation: Word


class Refuse(Message, frozen=True):
    """Learner to node: the node cannot join, and a retry would not help."""

    reason: Word
    """A short name for counters, such as "protocol_version" or "digest_mismatch"."""
    detail: Line
    """Text for the operator: the values that differ, and the remedy."""
    answers: Key = b""
    """`answers`, `public_key` and `signature` have the same meaning as in Welcome."""
    public_key: Key = b""
    signature: Key = b""


class Rehello(Message, frozen=True):
    """Learner to node: send a Hello again, because the learner does not know the node.

    This happens after the learner has restarted.
    """


class Finish(Message, frozen=True):
    """Learner to node: the run has ended, so the node must exit cleanly.

    The message is signed if it answers a Hello. Otherwise it is sealed.
    """

    reason: Line
    answers: Key = b""
    """`answers`, `public_key` and `signature` have the same meaning as in Welcome. In a sealed
    message they are empty."""
    public_key: Key = b""
    signature: Key = b""


class Goodbye(Message, frozen=True):
    """Node to learner: the node leaves, so its leases may be granted to others at once."""

    reason: Line
    has_failed: bool = False
    """Whether the node ends with an error; `reason` then has the error's text."""
    is_released: bool = False
    """Whether the node's machine was given back, so that it costs nothing from now on."""


# --- routed messages: work -----------------------------------------------------------------------


Parents = Annotated[tuple[tuple[NodeId, Address], ...], Meta(max_length=MAX_NODES)]


class TopologyPlan(Message, frozen=True):
    """Learner to node: the parents from which to get weights, the preferred parent first.

    The learner is the last of these parents.
    """

    epoch: Count
    parents: Parents
    """(Node id, address) of each parent. If the address is empty, the node uses the address that it
    has dialled already. Without parents the node is on standby and needs no weights."""

    @property
    def is_standby(self) -> bool:
        """Whether the node is on standby, without weights and leases."""
        return not self.parents

    @property
    def first_parent(self) -> str:
        """The node id of the preferred parent; "-" without parents, as in `NodeStats.parent`."""
        return self.parents[0][0] if self.parents else "-"


class LeaseState(Message, frozen=True, array_like=True, tag=False):
    """The state of one lease, as a worker's heartbeat reports it."""

    group_id: GroupId
    attempt: Attempt
    num_tokens: Progress
    """Progress of the lease: the number of tokens sampled, rewards received and tool results
    received.

    An increase renews the lease. The number is 0 before the group has begun. From the group's end
    until the learner acknowledges the group, it is -1.
    """
    is_waiting: bool = False
    """Whether the group waits to begin or to continue. If it waits, the lease is renewed by the
    progress of the worker's running groups."""
    running_s: Seconds = 0.0
    """Seconds since the worker began or continued the group; 0 while it waits."""


class NodeStats(Message, frozen=True, tag=False):
    """The statistics that a node reports with each heartbeat."""

    state: Word = "idle"
    tokens_sampled: Count = 0
    """Number of completion tokens sampled since the process started."""
    bytes_received: Count = 0
    """Number of weight bytes received since the process started."""
    bytes_sent: Count = 0
    """Number of weight bytes sent to children since the process started."""
    parent: Line = "-"
    """Node id of the present parent; "-" without a parent."""
    suspects: Annotated[tuple[NodeId, ...], Meta(max_length=MAX_NODES)] = ()
    """Ids of nodes that recently sent this node chunks with wrong hashes."""
    uplink_bytes_per_s: Rate | None = None
    downlink_bytes_per_s: Rate | None = None
    """This field and the field before are the rates of the node's links, measured by transfers;
    None before a measurement.
    """
    rtt_s: Seconds | None = None
    """Round-trip time to the node's parent, seconds; None before a measurement."""
    fetching: PolicyVersion | None = None
    num_chunks_held: Place = 0
    num_chunks: Place = 0
    refused: Counts = msgspec.field(default_factory=dict)
    refused_version: PolicyVersion | None = None
    """The version that the engine refused last; None after a later installation."""
    refusal: Line = ""
    """Why the engine refused `refused_version`."""
    partials: Counts = msgspec.field(default_factory=dict)
    """Counters of unfinished rollouts since the process started, by name."""
    num_places: Capacity = 0
    """Number of groups that a worker samples at the same time, while its other groups wait; 0 if it
    samples all of them."""
    num_fit: Capacity = 0
    """Number of groups that a worker's memory holds at the same time, whatever its settings are; 0
    if unknown."""
    groups: Counts = msgspec.field(default_factory=dict)
    """State of a group -> number of the worker's groups in this state. The states are sampling,
    rewards, weights (waiting for a newer version), queued and delivered."""
    engine: Word = ""
    """Kind and data type of a worker's engine; results of workers with equal engines can be
    compared."""


class Heartbeat(Message, frozen=True):
    """Node to learner: the state of the node, which replaces the state before."""

    installed: PolicyVersion | None
    """The newest version from which the engine samples; for a relay, the newest version that it has
    completely."""
    capacity: Capacity
    """Number of groups that the worker can hold, running and waiting; 0 for a relay."""
    leases: Annotated[tuple[LeaseState, ...], Meta(max_length=MAX_LEASES)]
    """The worker's leases whose groups run, wait, or are delivered and not acknowledged yet."""
    stats: NodeStats


class Pulse(Message, frozen=True):
    """The learner's answer to a Heartbeat: it is alive, and has made `step` steps."""

    step: Step
    newest: PolicyVersion | None


class Lease(Message, frozen=True, tag=False):
    """A group of rollouts of one prompt, granted to a worker."""

    group_id: GroupId
    attempt: Attempt
    seed: Seed
    prompt_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]
    example: Annotated[dict[Word, Any], Meta(max_length=MAX_NAMES)]
    """The task's example (prompt, answer, info): a worker has no dataset."""
    min_version: PolicyVersion | None = None
    """The oldest version that may sample the group; rollouts of older versions would arrive too
    stale. A worker that has only an older version waits for a while, and then gives the lease back.
    """
    is_greedy: bool = False
    """Whether the rollouts take the most likely token each time, as an evaluation demands."""


class Grant(Message, frozen=True):
    """Learner to worker: leases; the worker ignores a lease that it already has.

    If there is a payload frame, it has tokens for each lease (`encode_continuations` in
    `leases/partials.py`). Other workers have sampled them, and this worker continues them.
    """

    leases: Annotated[tuple[Lease, ...], Meta(max_length=MAX_LEASES)]


class Reclaim(Message, frozen=True):
    """Learner to worker: give back these leases, whose groups have not begun.

    The learner wants to grant them to another worker. A heartbeat that no longer lists a lease
    confirms that it is given back. Until then the lease belongs to this worker.
    """

    leases: Annotated[tuple[tuple[GroupId, Attempt], ...], Meta(max_length=MAX_LEASES)]
    is_begun_too: bool = False
    """Whether groups that have begun must be given back too, with the tokens sampled for them."""


class Deliver(Message, frozen=True):
    """Worker to learner: a finished group, in two payload frames (`codec.encode_group`)."""

    group_id: GroupId
    attempt: Attempt
    seconds: Seconds = 0.0
    """Seconds from the start of the group on the worker to its end, rewards included."""


class Partial(Message, frozen=True):
    """Worker to learner: the tokens sampled for a lease so far.

    If this worker does not finish the group, another worker continues from these tokens. The
    payload frame is made by `encode_members` (`leases/partials.py`). Each Partial replaces the one
    before.
    """

    group_id: GroupId
    attempt: Attempt


BAD_LOGPROBS = "bad_logprobs"
"""Reason to give up or refuse a group: log-probabilities are NaN, infinite or positive."""


ENGINE_ERROR = "engine_error"
"""Reason to give up or return a group: sampling raised an error, or the engine stopped."""


REASONS = frozenset(
    {
        # The learner refuses a group.
        "malformed", "mislabelled", "unknown_group", "not_leased", "another_prompt",
        "bad_token_ids", "group_size", "mixed_versions", "too_long", BAD_LOGPROBS,
        "no_trainable_token", "abandoned_version", "version_from_the_future", "stale",
        "bad_support",
        # A worker gives a group up.
        "prompt_too_long", "group_too_large", ENGINE_ERROR, "reward_error", "reward_too_large",
        "reward_timeout", "reward_memory", "reward_lost", "reward_retries", "agent_error",
        "agent_failed", "agent_timeout", "version_not_installed",
        # The learner ends a group itself: it teaches nothing, no step can be made with it, or it
        # cannot be sampled or is not needed.
        "zero_variance", "no_opinion", "all_masked", "lost_member", "no_support", "no_likely",
        "step_error", "nonfinite_gradient", "out_of_memory", "bad_group",
        "prompt_error", "lost", "attempts_exhausted", "run_finished",
    }
)  # fmt: skip
"""Reasons why a group was not trained on. Each of them is the name of a counter. If a peer states a
reason that is not listed here, the counter is "other"."""


def known_reason(reason: str) -> str:
    """Return a peer's reason if it is one of REASONS, otherwise "other"."""
    return reason if reason in REASONS else "other"


class Failed(Message, frozen=True):
    """Worker to learner: a group cannot be finished, and another attempt would not help."""

    group_id: GroupId
    attempt: Attempt
    reason: Word
    detail: Line
    is_elsewhere: bool = False
    """Whether another worker could finish the group; if so, the group is granted again."""
    traceback: Line = ""
    """The traceback of the task's code, if that code raised an error."""


class Ack(Message, frozen=True):
    """Learner to worker: the group, or the record of its end, is on the learner's disk.

    The worker may drop the group.
    """

    group_id: GroupId
    attempt: Attempt
    outcome: Word
    """What became of the delivered group: "accepted", "duplicate" or "refused"."""
    reason: Word = ""


# --- messages of viewers -------------------------------------------------------------------------


Act = Literal["pause", "resume", "drain", "standby", "set", "stop"]
"""The acts that an operator can order. The help of `echo-rl ctl` explains each act."""


class Watch(Message, frozen=True):
    """Viewer to learner: asks for the next status of the run, once."""


class Status(Message, frozen=True):
    """Learner to viewer: the status of the run, as JSON in the payload frame."""

    may_operate: bool
    """Whether the viewer's key allows operations."""


class Operation(Message, frozen=True):
    """Operator to learner: an act to carry out.

    An act names the state that shall be reached. So an Operation may be repeated.
    """

    number: Count
    """The operator's own number for this operation, which the Outcome repeats."""
    act: Act
    subject: Word = ""
    """The name of a node, or the key of a setting; empty for the run."""
    value: Word = ""
    """The value of a setting."""
    by: Word = ""
    """The operator's name, as the operator states it."""


class Outcome(Message, frozen=True):
    """Learner to operator: the outcome of an operation."""

    number: Count
    is_done: bool
    text: Line
    """What was done, or why nothing was done."""


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
VIEWER_MESSAGES = Watch | Status | Operation | Outcome
AnyMessage = LINK_MESSAGES | ROUTED_MESSAGES | VIEWER_MESSAGES
UNSEALED = (Hello, Welcome, AssetRequest, Asset, Refuse, Rehello)
"""Routed messages that have no seal: they are signed, are compared with signed hashes, or are
harmless."""


ItemId = tuple[PolicyVersion, Form]
