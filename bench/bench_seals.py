"""Cost of seals: CPU seconds and bytes of each routed message, with a seal and without one.

One process makes a message at its sender and takes it at its receiver, as roles do: encode, decode
the envelope, open the seal, decode the message. Each is done with a channel and without one in
turns, so that a change of the machine's speed hits both; what a row says are CPU seconds of the
process, medians of the rounds. `joining` is what a channel costs once, at both ends together.

    python bench/bench_seals.py
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import numpy as np

from echo.core.rollout import Group, PolicyVersion, Rollout
from echo.wire.codec import decode_envelope, decode_message, encode, encode_group, open_seal
from echo.wire.messages import (
    LEARNER_ID,
    Ack,
    Deliver,
    Grant,
    Heartbeat,
    Lease,
    LeaseState,
    Message,
    NodeStats,
)
from echo.wire.seals import Channel, SealKeys, Seals, channel_of

NODE = "worker-1"
ROUND_S = 0.2
"""Seconds of one round of one kind."""
GROUPS = {"20 kB": (8, 147), "2 MB": (16, 7710)}
"""Rollouts of a group and tokens of each; a token has 17 bytes."""

Frames = list[Any]


def group_frames(num_rollouts: int, num_tokens: int) -> Frames:
    """Return the payload of a delivered group."""
    chance = np.random.default_rng(0)
    rollout = Rollout(
        token_ids=chance.integers(0, 150_000, num_tokens, dtype=np.int32),
        sampler_logprobs=-chance.random(num_tokens, dtype=np.float32),
        policy_versions=np.tile(np.array([1, 0], np.int32), (num_tokens, 1)),
        completion_mask=np.ones(num_tokens, np.bool_),
        reward=1.0,
        finish_reason="stop",
    )
    group = Group(
        group_id=0,
        attempt=0,
        worker_id=NODE,
        prompt_ids=np.arange(64, dtype=np.int32),
        rollouts=(rollout,) * num_rollouts,
    )
    return list(encode_group(group))


def messages() -> Iterator[tuple[str, Message, Frames, bool]]:
    """Yield each message with its name, its payload, and whether it goes to the learner."""
    version = PolicyVersion(1, 5)
    states = tuple(LeaseState(number, 0, 100) for number in range(4))
    heartbeat = Heartbeat(installed=version, capacity=4, leases=states, stats=NodeStats())
    lease = Lease(
        group_id=7,
        attempt=0,
        seed=1 << 40,
        prompt_ids=tuple(range(1000, 1300)),
        example={"prompt": "What is the sum of all even numbers below 100?", "answer": "2450"},
    )
    yield "heartbeat", heartbeat, [], True
    yield "acknowledgement", Ack(group_id=7, attempt=0, outcome="accepted"), [], False
    yield "lease of 300 tokens", Grant(leases=(lease,)), [], False
    for size, shape in GROUPS.items():
        yield f"group of {size}", Deliver(group_id=7, attempt=0), group_frames(*shape), True


def make_pair() -> tuple[Channel, Channel]:
    """Return the node's and the learner's end of one channel."""
    node, learner = SealKeys(b"a node's"), SealKeys(b"the learner's")
    nonce, key = learner.nonce(), learner.seal_key()
    channel = channel_of(hello=node.nonce() * 2, nonce=nonce, learner_key=key, run_id="run")
    ends = (
        Channel(node, key, channel, is_learner=False),
        Channel(learner, node.seal_key(), channel, is_learner=True),
    )
    assert all(end.is_possible for end in ends)
    return ends


def passing(message: Message, payload: Frames, *, is_up: bool, sealed: bool) -> Callable[[], int]:
    """Return a function that has one message pass, and returns its bytes."""
    node, learner = make_pair()
    sender, receiver = (node, learner) if is_up else (learner, node)
    source, target = (NODE, LEARNER_ID) if is_up else (LEARNER_ID, NODE)
    seals = Seals(confirmed=receiver)

    def once() -> int:
        channel = sender if sealed else None
        frames = encode(message, payload, source=source, target=target, channel=channel)
        envelope = decode_envelope(frames)
        if sealed:
            assert open_seal(seals, envelope, frames[1:])
        decode_message(envelope)
        return sum(len(frame) for frame in frames)

    return once


def seconds_of(function: Callable[[], Any]) -> float:
    """Return the CPU seconds of one call, of as many as a round takes."""
    began_at, give_up_at = time.process_time(), time.monotonic() + ROUND_S
    for number in itertools.count(1):
        function()
        if time.monotonic() >= give_up_at:
            return (time.process_time() - began_at) / number
    raise AssertionError


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return a row of each message."""
    rows = []
    for name, message, payload, is_up in messages():
        kinds = {
            sealed: passing(message, payload, is_up=is_up, sealed=sealed)
            for sealed in (False, True)
        }
        figures: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for sealed, function in kinds.items():
                figures[sealed].append(seconds_of(function))
        plain_s, sealed_s = (statistics.median(figures[sealed]) for sealed in (False, True))
        num_plain, num_sealed = kinds[False](), kinds[True]()
        row = {
            "message": name,
            "num_bytes": num_plain,
            "seal_bytes": num_sealed - num_plain,
            "plain_cpu_s": plain_s,
            "sealed_cpu_s": sealed_s,
            "seal_cpu_s": statistics.median(
                after - before for before, after in zip(figures[False], figures[True], strict=True)
            ),
        }
        rows.append(row)
        print(
            f"{name:>20}: {num_plain:>9} bytes and {row['seal_bytes']} of the seal; "
            f"{plain_s * 1e6:8.1f} us without, {sealed_s * 1e6:8.1f} us with it",
            flush=True,
        )
    return rows


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = harness.parse(parser, rounds=3)
    began_in = harness.environment()
    rows = measure(arguments.rounds)
    joining_s = statistics.median(seconds_of(make_pair) for _ in range(arguments.rounds))
    print(f"{'joining':>20}: {joining_s * 1e6:.1f} us at both ends together")
    result = {"load_average_before": began_in["load_average"], "rows": rows}
    print(harness.save("seals", {**result, "joining_cpu_s": joining_s}))


if __name__ == "__main__":
    main()
