from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import replace

from echo.core.bounds import MAX_HEADER_BYTES, MAX_NAME_LENGTH
from echo.core.errors import RemoteProtocolError
from echo.core.reward_parts import PartedReward
from echo.core.rollout import NO_OPINION, Group, PolicyVersion, Rollout
from echo.wire import messages
from echo.wire.codec import (
    MAX_HOPS,
    decode_envelope,
    decode_group,
    decode_message,
    encode,
    encode_group,
    forwarded,
    other_protocol,
)
from tests.core.groups import make_group, make_rollout
from tests.wire.schema import instances
from tests.wire.sets import is_same_sets, token_sets

fast = settings(suppress_health_check=[HealthCheck.too_slow])

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
KINDS = list(messages.AnyMessage.__args__)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_message_survives_the_wire(kind: Any) -> None:
    @given(
        message=instances(kind),
        target=st.just("") | NAMES,
        payload=st.lists(st.binary(), max_size=3),
    )
    def survives(message: Any, target: str, payload: list[bytes]) -> None:
        frames = encode(message, payload, source="w1", target=target)
        envelope = decode_envelope([memoryview(bytes(frame)) for frame in frames])
        assert (envelope.source, envelope.target) == ("w1", target)
        assert decode_message(envelope) == message
        assert frames[1:] == payload

    survives()


def test_payload_frames_are_not_copied() -> None:
    chunk = bytearray(b"weights")
    frames = encode(messages.Finish(reason=""), [memoryview(chunk)], source="a")
    chunk[0:1] = b"W"
    assert bytes(frames[1]) == b"Weights"


def read(frames: list[bytes]) -> None:
    """Read a message all the way; anything but RemoteProtocolError is a bug."""
    with suppress(RemoteProtocolError):
        decode_message(decode_envelope(frames))


@fast
@given(st.lists(st.binary(max_size=80), max_size=3))
def test_bytes_that_mean_nothing_are_a_remote_error(frames: list[bytes]) -> None:
    read(list(frames))


@pytest.mark.slow
@fast
@given(instances(messages.Welcome), st.data())
def test_a_damaged_message_is_a_remote_error_or_another_message(message: Any, data: Any) -> None:
    frame = bytearray(encode(message, source="w1", target="learner")[0])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    read([bytes(frame[: data.draw(st.integers(0, len(frame)))])])
    read([bytes(frame)])


def envelope_of(body: bytes, protocol: int = messages.PROTOCOL_VERSION) -> list[bytes]:
    pack = msgspec.msgpack.encode
    return [b"\x94" + pack(protocol) + pack("w1") + pack("") + body]


def test_nesting_without_end_is_a_remote_error() -> None:
    nested = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(RemoteProtocolError, match="a header that is not an envelope"):
        decode_envelope(envelope_of(nested))
    with pytest.raises(RemoteProtocolError, match="malformed group header"):
        decode_group(b"\x81\xa1x" + nested, b"")


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([], "without a header frame"),
        ([b"\0" * (MAX_HEADER_BYTES + 1)], f"at most {MAX_HEADER_BYTES}"),
        ([b"\xc1"], "not an envelope"),
        ([msgspec.msgpack.encode([1, "", "learner", {}])], r"length >= 1 - at `\$\[1\]`"),
        (
            [msgspec.msgpack.encode([1, "a", "b" * (MAX_NAME_LENGTH + 1), {}])],
            r"length <= 64 - at `\$\[2\]`",
        ),
        ([b"\x94\x01\xa2\xff\xfe\xa0\x80"], "not an envelope"),
    ],
)
def test_a_bad_header_is_named(frames: list[bytes], match: str) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        decode_envelope(frames)


VERSION = PolicyVersion(1, 2)
FETCH = messages.Fetch(version=VERSION, ranges=((0, 2),), credit_bytes=1)


@pytest.mark.parametrize(
    "message",
    [
        replace(FETCH, num_segments=-1),
        replace(FETCH, credit_bytes=-1),
        replace(FETCH, ranges=((-1, 2),)),
        messages.Chunk(version=VERSION, index=-1),
        messages.Credit(version=VERSION, credit_bytes=0, taken_bytes=-1),
        messages.Waiting(version=VERSION, again_s=math.nan),
        messages.Announce(
            version=VERSION, offers=(messages.EncodedVersionOffer(VERSION, None, -1),)
        ),
    ],
)
def test_a_number_that_cannot_be_is_refused_before_anybody_counts_with_it(message: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed message from w1"):
        decode_message(decode_envelope(encode(message, source="w1")))


def test_an_unknown_message_is_refused_with_its_sender() -> None:
    body = msgspec.msgpack.encode({"type": "Launch"})
    with pytest.raises(RemoteProtocolError, match=r"malformed message from w1.*Launch"):
        decode_message(decode_envelope(envelope_of(body)))


def test_another_protocol_version_is_seen_before_the_body_is_read() -> None:
    envelope = decode_envelope(envelope_of(msgspec.msgpack.encode({"type": "Launch"}), protocol=99))
    assert other_protocol(envelope) is not None
    with pytest.raises(RemoteProtocolError, match=r"w1 speaks protocol version 99, this node \d+;"):
        decode_message(envelope)
    assert other_protocol(decode_envelope(envelope_of(b"\x80"))) is None


# --- groups --------------------------------------------------------------------------------------


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    length = draw(st.integers(1, 6))
    int32 = st.integers(-(2**31), 2**31 - 1)
    return Rollout(
        token_ids=draw(hnp.arrays(np.int32, length, elements=int32)),
        sampler_logprobs=draw(hnp.arrays(np.float32, length, elements=st.floats(width=32))),
        policy_versions=draw(hnp.arrays(np.int32, (length, 2), elements=int32)),
        completion_mask=draw(hnp.arrays(np.bool_, length)),
        branches=np.array(
            [(start, -1) for start in range(1, draw(st.integers(1, length)))], np.int32
        ).reshape(-1, 2),
        support=draw(st.none() | token_sets(length, with_logprobs=False)),
        likely=draw(st.none() | token_sets(length, with_logprobs=True)),
        reward=draw(st.just(NO_OPINION) | st.floats(allow_nan=False, allow_infinity=False)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
    )


GROUPS = st.builds(
    Group,
    group_id=st.integers(0, 2**48),
    attempt=st.integers(0, 2**10),
    worker_id=NAMES,
    prompt_ids=hnp.arrays(np.int32, st.integers(1, 5), elements=st.integers(0, 99)),
    rollouts=st.lists(rollouts(), min_size=1, max_size=3).map(tuple),
)


def same(a: Group, b: Group) -> bool:
    plain = (a.group_id, a.attempt, a.worker_id) == (b.group_id, b.attempt, b.worker_id)
    pairs = list(zip(a.rollouts, b.rollouts, strict=True))
    return (
        plain
        and all(
            is_same_sets(x.support, y.support) and is_same_sets(x.likely, y.likely)
            for x, y in pairs
        )
        and a.prompt_ids.tobytes() == b.prompt_ids.tobytes()
        and all(
            getattr(x, name).tobytes() == getattr(y, name).tobytes()
            for x, y in pairs
            for name in (
                "token_ids",
                "sampler_logprobs",
                "policy_versions",
                "completion_mask",
                "branches",
            )
        )
        and np.array_equal(a.rewards, b.rewards, equal_nan=True)
        and [r.finish_reason for r in a.rollouts] == [r.finish_reason for r in b.rollouts]
    )


@pytest.mark.slow
@fast
@given(GROUPS)
def test_a_group_survives_bit_for_bit(group: Group) -> None:
    header, arrays = encode_group(group)
    assert same(decode_group(memoryview(header), memoryview(arrays)), group)


@pytest.mark.slow
@fast
@given(GROUPS, st.data())
def test_a_damaged_group_is_a_remote_error_or_another_group(group: Group, data: Any) -> None:
    frames = [bytearray(frame) for frame in encode_group(group)]
    for frame in frames:
        for _ in range(data.draw(st.integers(0, 3))):
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        damaged = decode_group(*frames)
    except RemoteProtocolError:
        return
    assert not any(np.isinf(damaged.rewards))


@fast
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_a_group_of_arbitrary_bytes_is_a_remote_error(header: bytes, arrays: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_group(header, arrays)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rewards": [float("nan")]}, r"Expected `float` .* at `\$.rewards"),
        ({"rewards": [float("inf")]}, r"Expected `float` .* at `\$.rewards"),
        ({"rewards": [1.0, 1.0]}, "disagree"),
        ({"num_tokens": []}, "disagree"),
        ({"num_tokens": [0]}, r"Expected `int` >= 1 - at `\$.num_tokens"),
        ({"num_tokens": [-1]}, r"Expected `int` >= 1 - at `\$.num_tokens"),
        ({"num_prompt_tokens": 0}, r"Expected `int` >= 1 - at `\$.num_prompt_tokens"),
        ({"num_tokens": [2**62]}, r"Expected `int` <= 16777216 - at `\$.num_tokens"),
        ({"num_tokens": [2**24]}, "bytes of arrays where its header needs"),
        ({"finish_reasons": ["eos"]}, "'eos'; use stop, length or abort"),
        ({"num_branches": [0, 0]}, "numbers of branches disagree"),
        ({"reward_parts": [{}, {}]}, "numbers of reward parts disagree"),
        ({"reward_parts": [{"a b": 1.0}]}, "a part is named .a b."),
        ({"reward_parts": [{"a": math.inf}]}, r"reward_parts"),
        ({"reward_parts": [{str(n): 0.0 for n in range(33)}]}, "length <= 32"),
        ({"num_branches": [1]}, "25 bytes of arrays|21 bytes of arrays where its header needs 29"),
    ],
)
def test_a_group_header_that_lies_is_refused(changes: dict[str, Any], match: str) -> None:
    header: dict[str, Any] = {
        "group_id": 3, "attempt": 0, "worker_id": "w1", "num_prompt_tokens": 1,
        "num_tokens": [1], "rewards": [1.0], "finish_reasons": ["stop"],
    }  # fmt: skip
    arrays = bytes(4 + 17)
    assert decode_group(msgspec.msgpack.encode(header), arrays).group_id == 3
    with pytest.raises(RemoteProtocolError, match=match):
        decode_group(msgspec.msgpack.encode(header | changes), arrays)


def test_a_message_that_goes_round_between_relays_is_stopped() -> None:
    frames = encode(messages.Finish(reason="over"), [b"payload"], source="w1", target="learner")
    for hop in range(MAX_HOPS):
        envelope = decode_envelope(frames)
        assert envelope.num_hops == hop
        frames = forwarded(envelope, frames[1:])
    assert decode_message(decode_envelope(frames)) == messages.Finish(reason="over")
    assert frames[1:] == [b"payload"]
    with pytest.raises(RemoteProtocolError, match=r"w1 to learner after 16 relays; check.*circle"):
        forwarded(decode_envelope(frames), frames[1:])


def test_the_parts_of_rewards_survive_the_wire() -> None:
    """A group without parts has the header that it had."""
    rollouts = [
        make_rollout([(1, 1)], reward=PartedReward({"right": 1.0, "length": -0.25})),
        make_rollout([(1, 1)], reward=0.5),
    ]
    header, arrays = encode_group(make_group(*rollouts))
    found = decode_group(header, arrays).rollouts
    parts = [dict(rollout.reward_parts) for rollout in found]
    assert parts == [{"right": 1.0, "length": -0.25}, {}]
    assert [rollout.reward for rollout in found] == [0.75, 0.5]
    assert type(rollouts[0].reward) is float, "parts are kept apart, and msgspec takes no others"
