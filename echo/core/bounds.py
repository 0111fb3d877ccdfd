"""Defines the bounds of messages: sizes, lengths and ranges of values.

Sender and receiver check the same bounds. The sender checks a message in `codec.encode`, and the
receiver in the decoder, before the message is used. The ranges are wide enough for every honest
node. Other values could cost the receiver too much memory or time, or give an infinite result.
Ranges with a lower and an upper end also exclude NaN and the infinities.

Only the message size bounds the contents of a `dict[str, Any]` (settings, examples).
"""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

from msgspec import Meta

# --- sizes ---------------------------------------------------------------------------------------

MAX_CHUNKS = 8
"""Largest number of chunks of weights in one message. Each chunk is one frame."""
MAX_FRAMES = 1 + MAX_CHUNKS
"""Largest number of frames in a message, including the header."""
MAX_HEADER_BYTES = 8 << 20
"""Largest size of the header frame. Grants and Welcome have the largest headers."""
MAX_LEASE_BYTES = 7 << 20
"""Largest size of one lease in a header, including prompt and example."""
MAX_PAYLOAD_BYTES = 64 << 20
"""Largest size of all payload frames together. The payload is an inherited file, a group, a
manifest or chunks."""
MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES
"""Largest size of all frames together, and therefore of a single frame."""

# --- lengths of collections ----------------------------------------------------------------------

MAX_LEASES = 1 << 14
"""Largest number of leases in one message, and of leases that one worker holds."""
MAX_RANGES = 1 << 16
"""Largest number of chunk ranges in one Fetch. If more ranges are needed, a later Fetch requests
them."""
MAX_NODES = 1 << 10
"""Largest number of nodes in one field of a message, such as the parents of a plan."""
MAX_NAMES = 1 << 10
"""Largest number of entries in a mapping whose keys are names, such as counters or settings."""
MAX_MEMBERS = 1 << 16
"""Largest number of rollouts in a group. The configuration has the same limit."""
MAX_TOKENS = 1 << 24
"""Largest number of tokens in a prompt or a rollout. The configuration has the same limit."""

# --- texts ---------------------------------------------------------------------------------------

MAX_NAME_LENGTH = 64
"""Largest number of characters in the name of a node, a run or a region. A node's name is in the
header of each of its messages, and in a column on the screen."""
MAX_REASON_LENGTH = 500
"""Largest number of characters of a reason that a node states: why it leaves, why a group has no
result, or why an engine refuses a version. A reason is a sentence. A longer text is cut, because it
comes from the code of tasks and engines."""
MAX_TRACEBACK_LENGTH = 2000
"""Largest number of characters of a traceback. Of a longer traceback, the end is kept, because it
has the error and the line."""

NodeId: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
Word: TypeAlias = Annotated[str, Meta(max_length=128)]
"""A short text, such as a name, a reason, a state or a hash."""
Address: TypeAlias = Annotated[str, Meta(max_length=512)]
Line: TypeAlias = Annotated[str, Meta(max_length=1 << 17)]
"""A text for the operator, or names separated by commas."""
Key: TypeAlias = Annotated[bytes, Meta(max_length=64)]
"""A public key, or a signature."""

# --- numbers -------------------------------------------------------------------------------------

GroupId: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 48)]
Attempt: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 10)]
"""Position of a lease among all leases of its group. A group ends untrained after some twenty
leases."""
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
"""Number of groups that a worker can hold, or that a worker can sample concurrently."""
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Period: TypeAlias = Annotated[float, Meta(ge=1e-3, le=1e9)]
"""Seconds between two periodic events."""
MIN_RATE, MAX_RATE = 1.0, 1e13
"""Lowest and highest rate of a link, in bytes per second. A rate of 0 would make times infinite. No
link reaches the upper bound, 80 Tbit/s."""
Rate: TypeAlias = Annotated[float, Meta(ge=MIN_RATE, le=MAX_RATE)]
"""Rate of a link, in bytes per second."""
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Money: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Finite: TypeAlias = Annotated[float, Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]


def clamped_rate(bytes_per_s: float | None) -> float | None:
    """Return a measured rate, clamped to the range of `Rate`."""
    return None if bytes_per_s is None else min(max(bytes_per_s, MIN_RATE), MAX_RATE)


# --- connections over a long link ----------------------------------------------------------------

MAX_CONNECTIONS = 8
"""Largest number of connections to one parent for chunks. More connections did not increase the
rate."""
ONE_CONNECTION_RTT_S = 0.045
"""Largest round-trip time, in seconds, at which one connection with a 4 MiB buffer reaches 500
Mbit/s."""
RTT_PER_CONNECTION_S = 0.012
"""Above ONE_CONNECTION_RTT_S, each such increase of the round-trip time, in seconds, adds one
connection. So a link with 100 ms gets 6 connections, which fill 1 Gbit/s. Fewer connections do not
fill the link. With 8 connections the link drops packets."""


def num_connections(rtt_s: float, *, most: int = MAX_CONNECTIONS) -> int:
    """Return how many connections a link with this round-trip time needs, but at most `most`."""
    more = math.ceil((rtt_s - ONE_CONNECTION_RTT_S) / RTT_PER_CONNECTION_S)
    return min(most, max(1, 1 + more))
