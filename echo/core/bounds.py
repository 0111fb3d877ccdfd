"""Bounds of messages: sizes, lengths, and ranges of values.

Both ends use the same numbers: the sender checks them with `codec.encode`, the receiver with the
decoder, before it uses anything. The ranges are wide: they hold whatever an honest node of any run
can have to say, and nothing that costs the receiver memory, time or a finite result. A range that
also excludes NaN and the infinities has both ends.

The contents of a `dict[str, Any]` (settings, examples) are bounded by the size of the message
alone.
"""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

from msgspec import Meta

# --- sizes ---------------------------------------------------------------------------------------

MAX_CHUNKS = 8
"""Chunks of the weights in one message, a frame each."""
MAX_FRAMES = 1 + MAX_CHUNKS
"""Frames of a message, its header included."""
MAX_HEADER_BYTES = 8 << 20
"""Of the header frame; the largest honest ones are grants and a Welcome with its settings."""
MAX_LEASE_BYTES = 7 << 20
"""Prompt and example of one lease in it."""
MAX_PAYLOAD_BYTES = 64 << 20
"""Of the other frames together: a file that is inherited, a group, a manifest, a chunk."""
MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES
"""Of all frames together, and so of any one of them."""

# --- lengths of collections ----------------------------------------------------------------------

MAX_LEASES = 1 << 14
"""Leases in one message: no worker holds more."""
MAX_RANGES = 1 << 16
"""Runs of chunks in one Fetch; what lies behind them is asked for later."""
MAX_NODES = 1 << 10
"""Nodes that one message names in one place: suspects, the parents of a plan."""
MAX_NAMES = 1 << 10
"""Entries of a mapping from names: counters, hashes, settings."""
MAX_MEMBERS = 1 << 16
"""Rollouts of a group, as the configuration allows."""
MAX_TOKENS = 1 << 24
"""Tokens of a prompt or of a rollout, as the configuration allows."""

# --- texts ---------------------------------------------------------------------------------------

MAX_NODE_ID_LENGTH = 64

NodeId: TypeAlias = Annotated[str, Meta(max_length=MAX_NODE_ID_LENGTH)]
Word: TypeAlias = Annotated[str, Meta(max_length=128)]
"""A name, a reason, a state, a hash."""
Address: TypeAlias = Annotated[str, Meta(max_length=512)]
Line: TypeAlias = Annotated[str, Meta(max_length=1 << 17)]
"""A text for the operator, or names with commas between."""
Key: TypeAlias = Annotated[bytes, Meta(max_length=64)]
"""A public key, or a signature."""

# --- numbers -------------------------------------------------------------------------------------

GroupId: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 48)]
Attempt: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 10)]
"""Leases of one group so far; after some twenty it is given up."""
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]
Step: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
NumTokens: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 60)]
"""Of things that have happened since a process started; bytes too."""
Progress: TypeAlias = Annotated[int, Meta(ge=-1, le=1 << 48)]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 50)]
"""Bytes of one thing."""
Place: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40)]
"""Which chunk or segment, or how many."""
Capacity: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LEASES)]
"""Groups that a worker can hold, or samples concurrently."""
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Period: TypeAlias = Annotated[float, Meta(ge=1e-3, le=1e9)]
"""Seconds between two of something."""
MIN_RATE, MAX_RATE = 1.0, 1e13
Rate: TypeAlias = Annotated[float, Meta(ge=MIN_RATE, le=MAX_RATE)]
"""Bytes per second of a link."""
Money: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Finite: TypeAlias = Annotated[float, Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]


def clamped_rate(bytes_per_s: float | None) -> float | None:
    """Return a measured rate as it may be told to others."""
    return None if bytes_per_s is None else min(max(bytes_per_s, MIN_RATE), MAX_RATE)


# --- connections over a long link ----------------------------------------------------------------

MAX_CONNECTIONS = 8
"""Connections for the chunks of one parent; beyond, nothing was gained."""
ONE_CONNECTION_RTT_S = 0.045
"""Round trip up to which one connection with 4 MiB of buffer carries 500 Mbit/s."""
RTT_PER_CONNECTION_S = 0.012
"""One connection more for each so much beyond: 6 at 100 ms, which fill 1 Gbit/s. Fewer leave some
of it, and 8 push so much more than the link takes that it drops packets."""


def num_connections(rtt_s: float, *, most: int = MAX_CONNECTIONS) -> int:
    """Return how many connections to open over a link with this round trip, at most `most`."""
    more = math.ceil((rtt_s - ONE_CONNECTION_RTT_S) / RTT_PER_CONNECTION_S)
    return min(most, max(1, 1 + more))
