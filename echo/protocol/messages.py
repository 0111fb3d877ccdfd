"""Every message that nodes exchange, and nothing else.

A message on the wire is one header frame followed by raw payload frames (`codec.py`). There are
two kinds:

* **Link messages** concern the two ends of one connection only: greeting, and the weights plane,
  which is pulled hop by hop (`broadcast.py`).
* **Routed messages** go between one node and the learner, however many relays lie between; a relay
  forwards them by the node id in the envelope and never looks inside.

Who may send what:

    any node  -> its parent    Greet, Subscribe, Fetch, Credit
    parent    -> its child     Greeted, Announce, Chunk, Waiting, Gone
    node      -> learner       Hello, AssetRequest, Ready, Heartbeat, Deliver, Failed, Goodbye
    learner   -> node          Welcome, Asset, Admitted, Refuse, Rehello, Plan, Pulse, Grant, Ack,
                               Finish

Every routed message may be lost (a relay can die with it), so each is either a repeated statement
of state (Heartbeat, Pulse, Plan) or repeated until answered (Hello, Ready, Deliver, Grant).
"""

from __future__ import annotations

from typing import Any

import msgspec

from echo.rollout import Lineage, PolicyVersion

PROTOCOL_VERSION = 1
"""Raised by every change that an older node would misunderstand."""

LEARNER_ID = "learner"
"""The node id of the learner; there is exactly one in a run."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; the tag is the class name."""


# --- link messages -------------------------------------------------------------------------------


class Greet(Message, frozen=True):
    """First message on a dialled link: who dials, and what the link is for."""

    node_id: str
    role: str
    purpose: str
    """"control" (routed messages) or "weights" (the pull protocol)."""


class Greeted(Message, frozen=True):
    """Answer to Greet: who was reached."""

    node_id: str
    role: str


class Subscribe(Message, frozen=True):
    """Child to parent: tell me of versions newer than this; answered by Announce or Waiting."""

    newest: PolicyVersion | None


class Announce(Message, frozen=True):
    """Parent to child: this version exists; the signed manifest is the payload frame."""

    version: PolicyVersion


class Fetch(Message, frozen=True):
    """Child to parent: send these chunks, in ascending order, up to the credit.

    Resuming after a cut and changing the parent are this same message with other ranges. It
    replaces any earlier Fetch of the child.
    """

    version: PolicyVersion
    ranges: tuple[tuple[int, int], ...]
    """Half-open [start, stop) runs of missing chunk indices, ascending."""
    credit_bytes: int


class Credit(Message, frozen=True):
    """Child to parent: that many more bytes may be sent."""

    version: PolicyVersion
    credit_bytes: int


class Chunk(Message, frozen=True):
    """Parent to child: one chunk; its bytes are the payload frame."""

    version: PolicyVersion
    index: int


class Waiting(Message, frozen=True):
    """Parent to child: I live, but what you want has not reached me yet."""

    version: PolicyVersion | None
    """The version of the chunk that is wanted; None if it is any newer version."""


class Gone(Message, frozen=True):
    """Parent to child: this version can no longer be had here."""

    version: PolicyVersion


# --- routed messages: joining --------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Ask to join, or to come back after a cut."""

    node_id: str
    role: str
    incarnation: str
    """Random, new for each start of the process: tells a return from a second node of that name."""
    echo_version: str
    advertise: str | None
    """Address at which this node serves weights to others; None if it cannot listen."""
    digests: dict[str, str]
    """Hashes of what the node already has (model, tokenizer, ...); empty if it inherits all."""


class Welcome(Message, frozen=True):
    """What a node needs to know before it can be admitted."""

    run_id: str
    incarnation: str
    """Echo of the Hello that is answered."""
    public_key: bytes
    """Ed25519 key that signs the manifests of this run."""
    lineages: tuple[Lineage, ...]
    settings: dict[str, Any]
    """Sampling, task, staleness bound, group size: what workers inherit."""
    assets: dict[str, tuple[str, int]]
    """File name -> (blake3 hex, bytes): tokenizer and model configuration, on request."""
    digests: dict[str, str]
    """The learner's own hashes; a node's must equal them where it has any."""
    heartbeat_s: float
    dead_after_s: float


class AssetRequest(Message, frozen=True):
    """Ask for one of the files named in Welcome."""

    name: str


class Asset(Message, frozen=True):
    """One file; its bytes are the payload frame."""

    name: str


class Ready(Message, frozen=True):
    """The node has built its task and engine: compare these hashes and admit it."""

    incarnation: str
    digests: dict[str, str]


class Admitted(Message, frozen=True):
    """The node is in; heartbeats may start and leases follow."""

    incarnation: str


class Refuse(Message, frozen=True):
    """The node cannot join and retrying will not help."""

    reason: str
    """Short name that is counted, for example "protocol_version", "digest_mismatch"."""
    detail: str
    """Both values and the remedy, for the operator."""


class Rehello(Message, frozen=True):
    """The learner does not know this node (it was restarted): say Hello again."""


class Finish(Message, frozen=True):
    """The run is over: exit cleanly."""

    reason: str


class Goodbye(Message, frozen=True):
    """The node leaves on purpose; its leases may be issued again at once."""

    reason: str


# --- routed messages: work -----------------------------------------------------------------------


class Plan(Message, frozen=True):
    """Where to get weights from: parents in order of preference, the learner last."""

    epoch: int
    parents: tuple[tuple[str, str], ...]
    """(node id, address); an empty address means: as this node reached it itself."""


class LeaseState(Message, frozen=True, array_like=True, tag=False):
    """One lease in a worker's heartbeat."""

    group_id: int
    attempt: int
    num_tokens: int
    """Tokens sampled for it so far; progress renews the lease."""


class NodeStats(Message, frozen=True, tag=False):
    """What a node tells about itself with each heartbeat."""

    state: str = "idle"
    tokens_sampled: int = 0
    """Completion tokens sampled since the process started."""
    bytes_received: int = 0
    """Weight bytes received since the process started."""
    bytes_sent: int = 0
    """Weight bytes sent to children since the process started."""
    parent: str = "-"
    fetching: PolicyVersion | None = None
    num_chunks_held: int = 0
    num_chunks: int = 0
    refused: dict[str, int] = {}


class Heartbeat(Message, frozen=True):
    """A node's whole state as far as the learner cares; each one replaces the last."""

    installed: PolicyVersion | None
    """Newest version that the engine samples from (a relay: that it holds whole)."""
    capacity: int
    """Groups that the worker can hold at once, running and waiting; 0 for a relay."""
    leases: tuple[LeaseState, ...]
    """Leases running, waiting or delivered but not acknowledged."""
    stats: NodeStats


class Pulse(Message, frozen=True):
    """The learner's answer to a heartbeat: it lives, and this is its step."""

    step: int
    newest: PolicyVersion | None


class Lease(Message, frozen=True, tag=False):
    """One prompt group granted to a worker."""

    group_id: int
    attempt: int
    seed: int
    prompt_ids: tuple[int, ...]
    example: dict[str, Any]
    """The task's example (prompt, answer, info): a worker needs no dataset."""


class Grant(Message, frozen=True):
    """Leases for a worker; one that it already has is ignored."""

    leases: tuple[Lease, ...]


class Deliver(Message, frozen=True):
    """A finished group; header and arrays are the two payload frames (`codec.encode_group`)."""

    group_id: int
    attempt: int


class Failed(Message, frozen=True):
    """A group that could not be finished for a reason that repeating will not mend."""

    group_id: int
    attempt: int
    reason: str
    detail: str


class Ack(Message, frozen=True):
    """The learner has the group's end, or the group itself, on its disk: forget it."""

    group_id: int
    attempt: int
    outcome: str
    """"accepted", "duplicate" or "refused"."""
    reason: str = ""


LINK_MESSAGES = Greet | Greeted | Subscribe | Announce | Fetch | Credit | Chunk | Waiting | Gone
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
    | Plan
    | Heartbeat
    | Pulse
    | Grant
    | Deliver
    | Failed
    | Ack
)
AnyMessage = LINK_MESSAGES | ROUTED_MESSAGES
