"""The messages that nodes exchange.

A message is sent as one header frame followed by raw payload frames (`wire/codec.py`). There are
two kinds:

* **Link messages** go between the two ends of one connection: the greeting, and the weights plane,
  where each node pulls from its parent (`weights/broadcast.py`).
* **Routed messages** go between a node and the learner, over any number of relays. A relay forwards
  them by the node id in the envelope and does not decode them. They are sealed from end to end
  (`wire/seals.py`), so that no relay can change, forge or replay them. Exceptions are the kinds in
  UNSEALED. A Welcome, and a Refuse or Finish that answers a Hello, are signed by the learner and
  name the Hello. Files are compared with hashes in the Welcome. A forged Hello, AssetRequest or
  Rehello can only make a node join again.

Senders and the kinds that they may send:

    any node  -> its parent    Greet, Probe, ProbeAck, Subscribe, Fetch, Credit
    parent    -> its child     Greeted, Probe, ProbeAck, Announce, Segment, Chunk, Waiting, Gone
    node      -> learner       Hello, AssetRequest, Ready, Heartbeat, Deliver, Partial, Failed,
                               Goodbye
    learner   -> node          Welcome, Asset, Admitted, Refuse, Rehello, TopologyPlan, Pulse,
                               Grant, Ack, Finish

Every routed message may be lost, for example with a relay that dies. So each message either repeats
a state (Heartbeat, Pulse, TopologyPlan, Partial) or is repeated until it is answered (Hello, Ready,
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
"""Bytes per element of each dtype that weights may have."""


class Form(msgspec.Struct, frozen=True, array_like=True):
    """The encoding in which a version is sent."""

    kind: Literal["full", "keyframe", "delta"]
    """"full" (the image itself), "keyframe" (coded alone) or "delta" (coded against `base`)."""
    base: PolicyVersion | None = None

    def __str__(self) -> str:
        return self.kind if self.base is None else f"{self.kind} from {self.base}"


FULL = Form("full")


# --- link messages -------------------------------------------------------------------------------


OPEN_END = 1 << 40
"""The end of a range of chunks whose end is not known yet."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; the tag is the class name. Fields have ranges (`core/bounds.py`)."""


class Greet(Message, frozen=True):
    """First message on a link, from the node that dialled it: its name and the link's purpose."""

    node_id: NodeId
    role: Word
    purpose: Word
    """"control" (routed messages) or "weights" (the pull protocol)."""


class Greeted(Message, frozen=True):
    """Answer to Greet: the name of the node that was reached."""

    node_id: NodeId
    role: Word


class Probe(Message, frozen=True):
    """Zero bytes that measure the rate of a link (`weights/link.py`)."""


class ProbeAck(Message, frozen=True):
    """Confirms that a Probe has arrived."""


class Subscribe(Message, frozen=True):
    """Child to parent: announce versions newer than this; answered by Announce or Waiting."""

    newest: PolicyVersion | None


class EncodedVersionOffer(msgspec.Struct, frozen=True, array_like=True):
    """An encoded version (`weights/store/encoded.py`) that a parent has or is fetching."""

    version: PolicyVersion
    base: PolicyVersion | None
    """The version that the receiver must hold; None for a keyframe."""
    num_bytes: Size
    """Its size; an estimate while it is still being coded."""


class Announce(Message, frozen=True):
    """Parent to child: the versions that this node offers.

    The payload frame, if there is one, is the signed manifest of `version`, whose whole image is
    available. Without it, the version is still being coded, or is arriving as an encoded version.
    """

    version: PolicyVersion
    offers: Annotated[tuple[EncodedVersionOffer, ...], Meta(max_length=MAX_NODES)] = ()


class Fetch(Message, frozen=True):
    """Child to parent: send these chunks in ascending order, up to the credit.

    After a lost connection or a change of parent a child sends the same message with other ranges.
    A Fetch replaces every earlier Fetch over this link.
    """

    version: PolicyVersion
    ranges: Annotated[tuple[tuple[Place, Place], ...], Meta(max_length=MAX_RANGES)]
    """Half-open ranges [start, stop) of missing chunks, ascending. If the last range stops at
    OPEN_END, it includes chunks that are coded later."""
    credit_bytes: Size
    form: Form = FULL
    num_segments: Place = 0
    """Number of segments of the encoded version that the child has; the parent sends the others."""


class Credit(Message, frozen=True):
    """Child to parent: bytes received so far, and how many more may be sent."""

    version: PolicyVersion
    credit_bytes: Size
    form: Form = FULL
    taken_bytes: Size = 0
    """Bytes received since the last Credit; they show the rate of the uplink."""


class Segment(Message, frozen=True):
    """Parent to child: the next part of an encoded version's table; the payload is signed."""

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
    """Parent to child: this node is alive, but has not received the wanted chunk yet."""

    version: PolicyVersion | None
    """The version of the wanted chunk; None if the child waits for any newer version."""
    form: Form = FULL
    again_s: Seconds = 0.0
    """Seconds within which this message is repeated; 0 for no limit."""


class Gone(Message, frozen=True):
    """Parent to child: this version is no longer available here in this form."""

    version: PolicyVersion
    form: Form = FULL


Names = Annotated[dict[Word, Word], Meta(max_length=MAX_NAMES)]
Counts = Annotated[dict[Word, Count], Meta(max_length=MAX_NAMES)]
FileSize = Annotated[int, Meta(ge=0, le=MAX_PAYLOAD_BYTES)]

PROTOCOL_VERSION = 13
"""Raised by every change that older nodes would misunderstand."""

LEARNER_ID = "learner"
"""The node id of the learner; a run has exactly one."""


# --- routed messages: joining --------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Requests to join, or to rejoin after a lost connection."""

    node_id: NodeId
    role: Word
    incarnation: Word
    """Random for each process: distinguishes a return from a second node of the same name."""
    echo_version: Word
    advertise: Address | None
    """Address at which this node serves weights; None if it cannot listen."""
    digests: Names
    """Hashes of the node's own files (model, tokenizer, ...); empty if it inherits all."""
    seal_key: Key
    """Public key of the node's process, for seals."""
    nonce: Key
    """Random for each joining."""
    region: Word = ""
    price_per_gb: Money = 0.0
    """Price of 1e9 bytes that leave the node's region, $."""
    price: Price = Price()


class Welcome(Message, frozen=True):
    """The data that a node needs before it can be admitted."""

    run_id: Word
    incarnation: Word
    """Copied from the Hello that is answered."""
    public_key: Key
    """The Ed25519 key that signs this message and the manifests of this run."""
    lineages: Annotated[tuple[Lineage, ...], Meta(max_length=MAX_LEASES)]
    settings: Annotated[dict[Word, Any], Meta(max_length=MAX_NAMES)]
    """The settings that workers inherit: sampling, task, staleness bound, group size."""
    assets: Annotated[dict[Word, tuple[Word, FileSize]], Meta(max_length=MAX_NAMES)]
    """File name -> (BLAKE3 in hex, bytes) of the files that a node may request."""
    digests: Names
    """The learner's hashes; the node's own hashes must be equal."""
    heartbeat_s: Period
    dead_after_s: Period
    uplink_bytes_per_s: Rate | None = None
    """The node's total uplink, as last reported in this run before a restart."""
    version_bytes: Size = 0
    """Transfer size of the newest version; 0 before the first version."""
    answers: Key = b""
    """The hash of the Hello that is answered."""
    seal_key: Key = b""
    """Public key of the learner's process, for seals."""
    nonce: Key = b""
    """Random for each channel."""
    signature: Key = b""
    """Signature of all other fields (`roles/joining.py`), so that no relay can change one."""


class AssetRequest(Message, frozen=True):
    """Requests a file that Welcome names."""

    name: Word


class Asset(Message, frozen=True):
    """A file, in the payload frame."""

    name: Word


class Ready(Message, frozen=True):
    """The node has built its task and engine, and asks to be admitted with these hashes."""

    incarnation: Word
    digests: Names


class Admitted(Message, frozen=True):
    """The node is admitted: it may send heartbeats, and leases follow."""

    incarnation: Word


class Refuse(Message, frozen=True):
    """The node cannot join, and retrying will not help."""

    reason: Word
    """Short name for counters, such as "protocol_version" or "digest_mismatch"."""
    detail: Line
    """Both values and the remedy, for the operator."""
    answers: Key = b""
    """This field and the next two are as in Welcome."""
    public_key: Key = b""
    signature: Key = b""


class Rehello(Message, frozen=True):
    """The learner, which was restarted, does not know this node: it must send Hello again."""


class Finish(Message, frozen=True):
    """The run has ended: exit cleanly. It is signed if it answers a Hello, else sealed."""

    reason: Line
    answers: Key = b""
    """This field and the next two are as in Welcome; all are empty if the message is sealed."""
    public_key: Key = b""
    signature: Key = b""


class Goodbye(Message, frozen=True):
    """The node leaves; its leases may be granted again at once."""

    reason: Line
    has_failed: bool = False
    """Whether the node ends with an error, which is the reason."""
    is_released: bool = False
    """Whether its machine was released, so that it costs nothing any longer."""


# --- routed messages: work -----------------------------------------------------------------------


Parents = Annotated[tuple[tuple[NodeId, Address], ...], Meta(max_length=MAX_NODES)]


class TopologyPlan(Message, frozen=True):
    """The parents from which a node gets weights, in order of preference, the learner last."""

    epoch: Count
    parents: Parents
    """(Node id, address) of each parent. An empty address means the address that this node dialled
    itself. Without parents the node is on standby and needs no weights.
    """

    @property
    def is_standby(self) -> bool:
        """Whether the node is on standby: it fetches no weights and gets no leases."""
        return not self.parents

    @property
    def first_parent(self) -> str:
        """The id of the preferred parent, or "-" as in `NodeStats.parent`."""
        return self.parents[0][0] if self.parents else "-"


class LeaseState(Message, frozen=True, array_like=True, tag=False):
    """The state of a lease in a worker's heartbeat."""

    group_id: GroupId
    attempt: Attempt
    num_tokens: Progress
    """Tokens sampled plus rewards and tool results received for the lease; an increase renews the
    lease. 0 before the group has begun; -1 from its end until the learner acknowledges it.
    """
    is_waiting: bool = False
    """Whether the group waits to begin or continue; then progress of running groups renews it."""
    running_s: Seconds = 0.0
    """Seconds since the worker began or continued the group; 0 while it waits."""


class NodeStats(Message, frozen=True, tag=False):
    """The statistics that a node reports with each heartbeat."""

    state: Word = "idle"
    tokens_sampled: Count = 0
    """Completion tokens sampled since the process started."""
    bytes_received: Count = 0
    """Weight bytes received since the process started."""
    bytes_sent: Count = 0
    """Weight bytes sent to children since the process started."""
    parent: Line = "-"
    """Node id of the present parent."""
    suspects: Annotated[tuple[NodeId, ...], Meta(max_length=MAX_NODES)] = ()
    """Nodes that recently sent it chunks with wrong hashes."""
    uplink_bytes_per_s: Rate | None = None
    downlink_bytes_per_s: Rate | None = None
    """The rates of its links, measured by transfers; None before a measurement."""
    rtt_s: Seconds | None = None
    """Round-trip time to its parent."""
    fetching: PolicyVersion | None = None
    num_chunks_held: Place = 0
    num_chunks: Place = 0
    refused: Counts = msgspec.field(default_factory=dict)
    refused_version: PolicyVersion | None = None
    """The version that the engine refused last; None after a later installation."""
    refusal: Line = ""
    """Why the engine refused it."""
    partials: Counts = msgspec.field(default_factory=dict)
    """Counters of unfinished rollouts since the process started, by name."""
    num_places: Capacity = 0
    """Groups that a worker samples concurrently; its other groups wait. 0 for all of them."""
    engine: Word = ""
    """Kind and data type of a worker's engine; workers with equal engines are compared."""


class Heartbeat(Message, frozen=True):
    """The state of a node; each Heartbeat replaces the previous one."""

    installed: PolicyVersion | None
    """The newest version that the engine samples from; for a relay, that it has completely."""
    capacity: Capacity
    """Groups that the worker can hold, running and waiting; 0 for a relay."""
    leases: Annotated[tuple[LeaseState, ...], Meta(max_length=MAX_LEASES)]
    """The worker's leases: running, waiting, or delivered and not acknowledged."""
    stats: NodeStats


class Pulse(Message, frozen=True):
    """The learner's answer to a heartbeat: it is alive, and at this step."""

    step: Step
    newest: PolicyVersion | None


class Lease(Message, frozen=True, tag=False):
    """A prompt group that is granted to a worker."""

    group_id: GroupId
    attempt: Attempt
    seed: Seed
    prompt_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]
    example: Annotated[dict[Word, Any], Meta(max_length=MAX_NAMES)]
    """The task's example (prompt, answer, info), since a worker has no dataset."""
    min_version: PolicyVersion | None = None
    """The oldest version that may sample it; rollouts of older versions would arrive too stale. A
    worker with an older version waits for a while, and then gives the lease back."""


class Grant(Message, frozen=True):
    """Leases for a worker; it ignores a lease that it already has.

    The payload frame, if there is one, has the tokens that other workers have sampled for each
    lease, to be continued (`encode_continuations` in `leases/partials.py`).
    """

    leases: Annotated[tuple[Lease, ...], Meta(max_length=MAX_LEASES)]


class Reclaim(Message, frozen=True):
    """Requests the return of leases whose groups have not begun, for another worker.

    A heartbeat that no longer lists a lease confirms its return. Until then the lease belongs to
    this worker.
    """

    leases: Annotated[tuple[tuple[GroupId, Attempt], ...], Meta(max_length=MAX_LEASES)]
    is_begun_too: bool = False
    """Whether unfinished groups must be returned too, with the tokens sampled for them."""


class Deliver(Message, frozen=True):
    """A finished group; header and arrays are the two payload frames (`codec.encode_group`)."""

    group_id: GroupId
    attempt: Attempt
    seconds: Seconds = 0.0
    """Seconds from the group's start on the worker to its end, rewards included."""


class Partial(Message, frozen=True):
    """The tokens sampled for a lease so far, in case this worker does not finish it.

    The payload frame is made by `encode_members` (`leases/partials.py`). Each Partial replaces the
    previous one.
    """

    group_id: GroupId
    attempt: Attempt


BAD_LOGPROBS = "bad_logprobs"
"""The reason if a worker gives a group up, or the learner refuses it, because log-probabilities are
NaN, infinite or positive."""


ENGINE_ERROR = "engine_error"
"""The reason if a worker gives up a group whose sampling raised, or returns it because its engine
no longer samples.
"""


REASONS = frozenset(
    {
        # The learner refuses a group.
        "malformed", "mislabelled", "unknown_group", "not_leased", "another_prompt",
        "bad_token_ids", "group_size", "mixed_versions", "too_long", BAD_LOGPROBS,
        "no_trainable_token", "abandoned_version", "version_from_the_future", "stale",
        # A worker gives a group up.
        "prompt_too_long", "group_too_large", ENGINE_ERROR, "reward_error", "reward_too_large",
        "reward_timeout", "reward_memory", "reward_lost", "reward_retries", "agent_error",
        "agent_failed", "agent_timeout", "version_not_installed",
        # The learner ends a group itself: it teaches nothing, no step can be made with it, or it
        # cannot be sampled or is not needed.
        "zero_variance", "no_opinion", "all_masked", "lost_member",
        "step_error", "nonfinite_gradient", "out_of_memory", "bad_group",
        "prompt_error", "lost", "attempts_exhausted", "run_finished",
    }
)  # fmt: skip
"""Reasons why a group was not trained on. Counters are named by these only, never by other words of
a peer.
"""


def known_reason(reason: str) -> str:
    """Return a peer's reason if it is in REASONS, else "other"."""
    return reason if reason in REASONS else "other"


class Failed(Message, frozen=True):
    """Reports a group that the worker could not finish, and could not in another attempt."""

    group_id: GroupId
    attempt: Attempt
    reason: Word
    detail: Line
    is_elsewhere: bool = False
    """Whether another worker can finish it; then it is granted again."""
    traceback: Line = ""
    """The traceback of the task's code, if it raised."""


class Ack(Message, frozen=True):
    """The learner has the group, or the record of its end, on its disk: the worker may drop it."""

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
"""Routed messages without a seal: they are signed, compared with signed hashes, or harmless."""


ItemId = tuple[PolicyVersion, Form]
