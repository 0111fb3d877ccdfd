"""The messages that nodes exchange.

A message is sent as one header frame followed by raw payload frames (`wire/codec.py`). There are
three kinds:

* **Link messages** go between the two ends of one connection: greetings, and messages of the
  weights plane, in which each node pulls weights from its parent (`weights/broadcast.py`).
* **Routed messages** go between a node and the learner, over any number of relays. Relays forward
  routed messages by the node id in the envelope, without decoding. A seal from end to end
  (`wire/seals.py`) prevents relays from changing, forging or replaying messages. The kinds in
  UNSEALED need no seal. If a Welcome, Refuse or Finish answers a Hello, the learner signs this
  answer, which contains the hash of the Hello. The node compares the files that it receives (Asset)
  with hashes in the Welcome. A forged Hello, AssetRequest or Rehello can only make a node join
  again.
* **Viewers' messages** go between a viewer and the learner (`roles/viewers.py`). A viewer is not a
  node.

Senders and the kinds that they may send:

    any node  -> its parent    Greet, Probe, ProbeAck, Subscribe, Fetch, Credit
    parent    -> its child     Greeted, Probe, ProbeAck, Announce, Segment, Chunk, Waiting, Gone
    node      -> learner       Hello, AssetRequest, Ready, Heartbeat, Deliver, Partial, Failed,
                               Goodbye
    learner   -> node          Welcome, Asset, Admitted, Refuse, Rehello, TopologyPlan, Pulse,
                               Grant, Reclaim, Ack, Finish
    viewer    -> learner       Watch, Operation
    learner   -> viewer        Status, Outcome, Refuse

Every routed message may be lost, for example when a relay dies. So some messages are sent
periodically and contain a whole state (Heartbeat, Pulse, TopologyPlan, Partial). Other messages are
repeated until they are answered (Hello, Ready, Deliver, Failed, Grant).
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
    Share,
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
    """The encoding in which a version is sent: as a whole image, a keyframe or a delta."""

    kind: Literal["full", "keyframe", "delta"]
    """"full" (the image itself), "keyframe" (coded alone) or "delta" (coded against `base`)."""
    base: PolicyVersion | None = None

    def __str__(self) -> str:
        return self.kind if self.base is None else f"{self.kind} from {self.base}"


FULL = Form("full")


# --- link messages -------------------------------------------------------------------------------


OPEN_END = 1 << 40
"""End of a range of chunks whose real end is not known yet."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The base class of all messages; the tag on the wire is the name of the class.

    The field types limit the values (`core/bounds.py`).
    """


class Greet(Message, frozen=True):
    """The first message on a link: the dialling node's name and purpose."""

    node_id: NodeId
    role: Word
    purpose: Word
    """"control" (routed messages) or "weights" (the pull protocol)."""


class Greeted(Message, frozen=True):
    """The answer to Greet: the name of the node that was dialled."""

    node_id: NodeId
    role: Word


class Probe(Message, frozen=True):
    """Bytes without meaning, sent to measure the rate of a link (`weights/rates.py`)."""


class ProbeAck(Message, frozen=True):
    """The answer to a Probe, which confirms its arrival."""


class Subscribe(Message, frozen=True):
    """Child to parent: requests an Announce of versions newer than `newest`.

    The parent answers with Announce or Waiting.
    """

    newest: PolicyVersion | None


class EncodedVersionOffer(msgspec.Struct, frozen=True, array_like=True):
    """An encoded version (`weights/store/encoded.py`) that a parent has or is receiving."""

    version: PolicyVersion
    base: PolicyVersion | None
    """The version needed to decode the offered version; None for a keyframe."""
    num_bytes: Size
    """Size of the encoded version in bytes; an estimate until the version is completely encoded."""


class Announce(Message, frozen=True):
    """Parent to child: the versions that the parent offers.

    If the whole image of `version` is available, the payload frame is the version's signed
    manifest. Otherwise there is no payload frame: the version is still being encoded, or the parent
    is receiving an encoded version.
    """

    version: PolicyVersion
    offers: Annotated[tuple[EncodedVersionOffer, ...], Meta(max_length=MAX_NODES)] = ()


class Fetch(Message, frozen=True):
    """Child to parent: requests chunks in ascending order.

    The parent sends chunks up to the credit in bytes. After a lost connection or a change of
    parent, a child sends a Fetch with the ranges that are still missing. A Fetch replaces all
    earlier Fetches over this link.
    """

    version: PolicyVersion
    ranges: Annotated[tuple[tuple[Place, Place], ...], Meta(max_length=MAX_RANGES)]
    """Half-open ranges [start, stop) of missing chunks, ascending. If the last range ends at
    OPEN_END, it includes chunks that will be coded later.
    """
    credit_bytes: Size
    form: Form = FULL
    num_segments: Place = 0
    """Number of the encoded version's segments that the child has. The parent sends the segments
    after these.
    """


class Credit(Message, frozen=True):
    """Child to parent: how many bytes have arrived, and how many more the parent may send."""

    version: PolicyVersion
    credit_bytes: Size
    form: Form = FULL
    taken_bytes: Size = 0
    """Number of bytes received since the last Credit. The parent estimates its uplink's rate from
    these numbers.
    """


class Segment(Message, frozen=True):
    """Parent to child: the signed table of the next segment of an encoded version.

    The payload frame has the table, signed by the learner.
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
    """Indices of all chunks after the first chunk, in the order of their frames."""


class Waiting(Message, frozen=True):
    """Parent to child: the parent is alive, but lacks the chunk that the child wants."""

    version: PolicyVersion | None
    """The version of the wanted chunk; None if the child waits for any version that is newer than
    the version in its Subscribe.
    """
    form: Form = FULL
    again_s: Seconds = 0.0
    """Seconds within which the parent repeats this message; 0 for no limit."""


class Gone(Message, frozen=True):
    """Parent to child: the parent no longer has this version in this form."""

    version: PolicyVersion
    form: Form = FULL


Names = Annotated[dict[Word, Word], Meta(max_length=MAX_NAMES)]
Counts = Annotated[dict[Word, Count], Meta(max_length=MAX_NAMES)]
TimeOfDay = Annotated[float, Meta(ge=0, le=1e11)]
FileSize = Annotated[int, Meta(ge=0, le=MAX_PAYLOAD_BYTES)]

PROTOCOL_VERSION = 16
"""Version of the protocol. Raise the number with every change that older nodes would misunderstand.
"""

LEARNER_ID = "learner"
"""The node id of the learner."""


# --- routed messages: joining --------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Node to learner: asks to join, or to rejoin after a lost connection."""

    node_id: NodeId
    role: Word
    incarnation: Word
    """Random name of the process. It distinguishes a returning node from a second node of the same
    name.
    """
    echo_version: Word
    advertise: Address | None
    """Address at which this node serves weights; None for a node that does not listen."""
    digests: Names
    """Hashes of the node's own files (model, tokenizer, ...); empty if the learner sends all files.
    """
    seal_key: Key
    """The public key of the node's process, used for seals."""
    nonce: Key
    """Random bytes, new at each joining."""
    region: Word = ""
    price_per_gb: Money = 0.0
    """Price of 1e9 bytes that leave the node's region, in $."""
    price: Price = Price()


class Welcome(Message, frozen=True):
    """The learner's answer to a Hello: keys, settings and files that the node needs to join."""

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
    """The hashes of the learner's files. The hashes of the node's own files must equal these
    hashes.
    """
    heartbeat_s: Period
    dead_after_s: Period
    uplink_bytes_per_s: Rate | None = None
    """The rate of the node's uplink that the node reported before its restart; None if it reported
    none.
    """
    version_bytes: Size = 0
    """Transfer size of the newest version in bytes; 0 before the first version."""
    time_of_day: TimeOfDay = 0.0
    """The learner's time of day, seconds since 1970; 0 if the time is unknown."""
    answers: Key = b""
    """The hash of the Hello that this message answers."""
    seal_key: Key = b""
    """The public key of the learner's process, used for seals."""
    nonce: Key = b""
    """Random bytes, new for each channel."""
    signature: Key = b""
    """The learner's signature of all other fields (`roles/joining.py`)."""


class AssetRequest(Message, frozen=True):
    """Node to learner: requests a file that the Welcome names."""

    name: Word


class Asset(Message, frozen=True):
    """Learner to node: a requested file, in the payload frame."""

    name: Word


class Ready(Message, frozen=True):
    """Node to learner: task and engine are ready, so the node asks for admission."""

    incarnation: Word
    digests: Names


class Admitted(Message, frozen=True):
    """Learner to node: the node is admitted, may send heartbeats, and will get leases."""

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
    """Learner to node: requests a Hello, because the learner does not know the node.

    A learner that has restarted sends this message.
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
    """Node to learner: the node leaves, so its leases may be granted to other nodes at once."""

    reason: Line
    has_failed: bool = False
    """Whether the node ends with an error. If so, `reason` has the error's text."""
    is_released: bool = False
    """Whether the node's machine was released, so that it costs no money from now on."""


# --- routed messages: work -----------------------------------------------------------------------


Parents = Annotated[tuple[tuple[NodeId, Address], ...], Meta(max_length=MAX_NODES)]


class TopologyPlan(Message, frozen=True):
    """Learner to node: the node's parents, in order of preference; the learner is the last."""

    epoch: Count
    parents: Parents
    """(Node id, address) of each parent. An empty address means an address that the node has
    dialled already. Without parents the node is on standby and needs no weights.
    """

    @property
    def is_standby(self) -> bool:
        """Whether the node is on standby, without weights and leases."""
        return not self.parents

    @property
    def first_parent(self) -> str:
        """The node id of the preferred parent; "-" without parents, as in `NodeStats.parent`."""
        return self.parents[0][0] if self.parents else "-"


class LeaseState(Message, frozen=True, array_like=True, tag=False):
    """The state of one lease in a worker's heartbeat."""

    group_id: GroupId
    attempt: Attempt
    num_tokens: Progress
    """Progress of the lease: the sum of the numbers of sampled tokens, received rewards and
    received tool results.

    An increase renews the lease. 0 before the group begins; -1 from the group's end until the
    learner's acknowledgement.
    """
    is_waiting: bool = False
    """Whether the group waits to begin or to continue. If it does, the progress of the worker's
    running groups renews the lease.
    """
    running_s: Seconds = 0.0
    """Seconds since the worker began or continued the group; 0 while the group waits."""


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
    """Node id of the present parent; "-" if the node has no parent."""
    suspects: Annotated[tuple[NodeId, ...], Meta(max_length=MAX_NODES)] = ()
    """Ids of nodes that recently sent chunks with wrong hashes to this node."""
    uplink_bytes_per_s: Rate | None = None
    downlink_bytes_per_s: Rate | None = None
    """`uplink_bytes_per_s` and this field are rates that were measured during transfers; None
    before a measurement.
    """
    rtt_s: Seconds | None = None
    """Round-trip time to the node's parent, seconds; None before a measurement."""
    fetching: PolicyVersion | None = None
    num_chunks_held: Place = 0
    num_chunks: Place = 0
    refused: Counts = msgspec.field(default_factory=dict)
    refused_version: PolicyVersion | None = None
    """The version that the engine refused last; None if the engine has installed a version since.
    """
    refusal: Line = ""
    """Why the engine refused `refused_version`."""
    partials: Counts = msgspec.field(default_factory=dict)
    """Name -> counter of unfinished rollouts since the process started."""
    num_places: Capacity = 0
    """Number of groups that a worker samples at the same time. The worker's other groups wait
    meanwhile. If the number is 0, no group waits.
    """
    num_fit: Capacity = 0
    """Number of groups that fit into a worker's memory at the same time; 0 if the number is
    unknown.
    """
    scaling: Share | None = None
    """How a worker engine's tokens per second grow with the number of its rollouts; None before a
    measurement. They are proportional to that number to the power of `scaling`: at 1, twice the
    rollouts make twice the tokens per second; at 0, they make no more.
    """
    groups: Counts = msgspec.field(default_factory=dict)
    """Number of the worker's groups by state: sampling, rewards, weights (waiting for a newer
    version), queued, delivered.
    """
    engine: Word = ""
    """Kind and data type of a worker's engine. Compare results only between equal engines."""


class Heartbeat(Message, frozen=True):
    """Node to learner: the node's state, which replaces the state in earlier heartbeats."""

    installed: PolicyVersion | None
    """The newest version from which the engine samples. For a relay, the relay's newest complete
    version.
    """
    capacity: Capacity
    """Number of groups that the worker can hold, including groups that wait; 0 for a relay."""
    leases: Annotated[tuple[LeaseState, ...], Meta(max_length=MAX_LEASES)]
    """The worker's leases, from their grant to the acknowledgement of the delivered group."""
    stats: NodeStats


class Pulse(Message, frozen=True):
    """The learner's answer to a Heartbeat: the learner is alive, and has made `step` steps."""

    step: Step
    newest: PolicyVersion | None


class Lease(Message, frozen=True, tag=False):
    """A lease: a group of rollouts of one prompt, granted to a worker."""

    group_id: GroupId
    attempt: Attempt
    seed: Seed
    prompt_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]
    example: Annotated[dict[Word, Any], Meta(max_length=MAX_NAMES)]
    """The task's example (prompt, answer, info), because a worker has no dataset."""
    min_version: PolicyVersion | None = None
    """The oldest version that may sample the group; rollouts of older versions would be too stale.
    A worker with an older version waits for a while, and then returns the lease.
    """
    is_greedy: bool = False
    """Whether rollouts always take the most likely token, for evaluations."""


class Grant(Message, frozen=True):
    """Learner to worker: grants leases. The worker ignores leases that it already has.

    Other workers may have sampled tokens for a lease. If they have, this worker continues from
    their tokens, which are in the payload frame (`encode_continuations` in `leases/partials.py`).
    If no lease has such tokens, there is no payload frame.
    """

    leases: Annotated[tuple[Lease, ...], Meta(max_length=MAX_LEASES)]


class Reclaim(Message, frozen=True):
    """Learner to worker: requests the return of leases whose groups have not begun.

    The learner wants to grant these leases to another worker. A lease belongs to this worker until
    a heartbeat of this worker no longer lists the lease.
    """

    leases: Annotated[tuple[tuple[GroupId, Attempt], ...], Meta(max_length=MAX_LEASES)]
    is_begun_too: bool = False
    """Whether the worker must also return groups that have begun, with their sampled tokens."""


class Deliver(Message, frozen=True):
    """Worker to learner: a finished group, in two payload frames (`codec.encode_group`)."""

    group_id: GroupId
    attempt: Attempt
    seconds: Seconds = 0.0
    """Seconds from the start to the end of the group on the worker, including the time for rewards.
    """


class Partial(Message, frozen=True):
    """Worker to learner: the tokens sampled for a lease so far.

    If this worker does not finish the group, another worker continues from these tokens, which are
    in the payload frame (`encode_members` in `leases/partials.py`). Each Partial replaces the
    Partial before.
    """

    group_id: GroupId
    attempt: Attempt


BAD_LOGPROBS = "bad_logprobs"
"""Reason for a failed or refused group: log-probabilities are NaN, infinite or positive."""


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
"""Reasons why a group was not trained on. Each reason is the name of a counter. If a peer gives
another reason, the group counts as "other".
"""


def known_reason(reason: str) -> str:
    """Return a peer's reason if REASONS has the reason, otherwise "other"."""
    return reason if reason in REASONS else "other"


class Failed(Message, frozen=True):
    """Worker to learner: the worker cannot finish a group, and a retry would not help."""

    group_id: GroupId
    attempt: Attempt
    reason: Word
    detail: Line
    is_elsewhere: bool = False
    """Whether a different worker could finish the group. If so, the learner grants the group again.
    """
    traceback: Line = ""
    """The traceback, if the task's code raised an error."""


class Ack(Message, frozen=True):
    """Learner to worker: the learner has stored the group, or the record of the group's end.

    The worker may now drop the group.
    """

    group_id: GroupId
    attempt: Attempt
    outcome: Word
    """The outcome for the delivered group: "accepted", "duplicate" or "refused"."""
    reason: Word = ""


# --- messages of viewers -------------------------------------------------------------------------


Act = Literal["pause", "resume", "drain", "standby", "set", "stop"]
"""The acts that an operator can order. The help of `echo-rl ctl` explains each act."""


class Watch(Message, frozen=True):
    """Viewer to learner: requests the next status of the run."""


class Status(Message, frozen=True):
    """Learner to viewer: the status of the run, as JSON in the payload frame."""

    may_operate: bool
    """Whether the viewer's key allows operations."""


class Operation(Message, frozen=True):
    """Operator to learner: requests an operation.

    `act` names a target state, so an Operation may be repeated.
    """

    number: Count
    """The operator's number for this operation; the Outcome has the same number."""
    act: Act
    subject: Word = ""
    """The name of a node, the key of a setting, or empty for the whole run."""
    value: Word = ""
    """The value of a setting."""
    by: Word = ""
    """The operator's name, as stated by the operator."""


class Outcome(Message, frozen=True):
    """Learner to operator: the outcome of an operation."""

    number: Count
    is_done: bool
    text: Line
    """A description of the result, or the reason why the operation was not carried out."""


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
"""Routed messages without a seal. The module's docstring has the reasons."""


ItemId = tuple[PolicyVersion, Form]
