"""Bounds of messages: sizes, lengths, and ranges of values.

Sender and receiver check the same numbers. The sender checks in `codec.encode`, the receiver in the
decoder, before it uses a message. The ranges are wide enough for every honest node of any run.
Other values would cost the receiver too much memory or time, or give an infinite result. Ranges
with both ends also exclude NaN and the infinities.

The contents of a `dict[str, Any]` (settings, examples) are bounded only by the size of the message.
"""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

from msgspec import Meta

# --- sizes ---------------------------------------------------------------------------------------

MAX_CHUNKS = 8
"""Chunks of weights in one message, each in a frame."""
MAX_FRAMES = 1 + MAX_CHUNKS
"""Frames of a message, its header included."""
MAX_HEADER_BYTES = 8 << 20
"""Size of the header frame. The largest headers are those of Grants and of a Welcome."""
MAX_LEASE_BYTES = 7 << 20
"""Size of one lease, with prompt and example, in a header."""
MAX_PAYLOAD_BYTES = 64 << 20
"""Size of all payload frames together: of an inherited file, a group, a manifest or chunks."""
MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES
"""Size of all frames together, and therefore of a single frame."""

# --- lengths of collections ----------------------------------------------------------------------

MAX_LEASES = 1 << 14
"""Leases in one message; no worker holds more."""
MAX_RANGES = 1 << 16
"""Ranges of chunks in one Fetch. A later Fetch requests further ranges."""
MAX_NODES = 1 << 10
"""Nodes in one field of a message: suspects, or the parents of a plan."""
MAX_NAMES = 1 << 10
"""Entries of a mapping by name: counters, hashes, settings."""
MAX_MEMBERS = 1 << 16
"""Rollouts of a group; the configuration has the same limit."""
MAX_TOKENS = 1 << 24
"""Tokens of a prompt or of a rollout; the configuration has the same limit."""

# --- texts ---------------------------------------------------------------------------------------

MAX_NODE_ID_LENGTH = 64

NodeId: TypeAlias = Annotated[str, Meta(max_length=MAX_NODE_ID_LENGTH)]
Word: TypeAlias = Annotated[str, Meta(max_length=128)]
"""A name, a reason, a state, a hash."""
Address: TypeAlias = Annotated[str, Meta(max_length=512)]
Line: TypeAlias = Annotated[str, Meta(max_length=1 << 17)]
"""A text for the operator, or names separated by commas."""
Key: TypeAlias = Annotated[bytes, Meta(max_length=64)]
"""A public key, or a signature."""

# --- numbers -------------------------------------------------------------------------------------

GroupId: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 48)]
Attempt: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 10)]
"""Index of a lease among its group's leases. A group is given up after some twenty leases."""
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]
Step: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
NumTokens: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 60)]
"""A number of events or bytes since the start of a process."""
Progress: TypeAlias = Annotated[int, Meta(ge=-1, le=1 << 48)]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 50)]
"""Size in bytes."""
Place: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40)]
"""Index of a chunk or segment, or a number of chunks or segments."""
Capacity: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LEASES)]
"""Number of groups that a worker can hold, or number of groups that it samples concurrently."""
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Period: TypeAlias = Annotated[float, Meta(ge=1e-3, le=1e9)]
"""Seconds between two periodic events."""
MIN_RATE, MAX_RATE = 1.0, 1e13
Rate: TypeAlias = Annotated[float, Meta(ge=MIN_RATE, le=MAX_RATE)]
"""Bytes per second of a link."""
Money: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Finite: TypeAlias = Annotated[float, Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]


def clamped_rate(bytes_per_s: float | None) -> float | None:
    """Return a measured rate, limited to the range of `Rate`."""
    return None if bytes_per_s is None else min(max(bytes_per_s, MIN_RATE), MAX_RATE)


# --- connections over a long link ----------------------------------------------------------------

MAX_CONNECTIONS = 8
"""Connections for the chunks of one parent. More did not increase the rate."""
ONE_CONNECTION_RTT_S = 0.045
"""Largest round-trip time at which one connection with a 4 MiB buffer reaches 500 Mbit/s."""
RTT_PER_CONNECTION_S = 0.012
"""Round-trip time above ONE_CONNECTION_RTT_S that adds one connection. A link of 100 ms gets 6
connections, which fill 1 Gbit/s. Fewer do not fill such a link, and 8 make it drop packets.
"""


def num_connections(rtt_s: float, *, most: int = MAX_CONNECTIONS) -> int:
    """Return the number of connections for this round-trip time, at most `most`."""
    more = math.ceil((rtt_s - ONE_CONNECTION_RTT_S) / RTT_PER_CONNECTION_S)
    return min(most, max(1, 1 + more))
