from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import ForgedError, RemoteProtocolError
from echo.wire.codec import decode_envelope, encode, forwarded, open_seal
from echo.wire.messages import LEARNER_ID, UNSEALED, Ack, Message, Rehello
from echo.wire.seals import WINDOW, Channel, SealKeys, Seals, channel_of

NODE, LEARNER = SealKeys(b"node"), SealKeys(b"learner")
ACK = Ack(group_id=7, attempt=0, outcome="accepted")
payloads = st.lists(st.binary(max_size=40), max_size=3)


def ends(nonce: bytes = b"1", *, hello: bytes = b"hello") -> tuple[Channel, Channel]:
    """Return one channel at the node's end and at the learner's."""
    channel = channel_of(hello=hello, nonce=nonce, learner_key=LEARNER.seal_key(), run_id="run")
    return (
        Channel(NODE, LEARNER.seal_key(), channel, is_learner=False),
        Channel(LEARNER, NODE.seal_key(), channel, is_learner=True),
    )


def down(channel: Channel, message: Message = ACK, payload: Any = ()) -> list[Any]:
    """Return a message of the learner's to the node."""
    return encode(message, payload, source=LEARNER_ID, target="w1", channel=channel)


def is_opened(channel: Channel, frames: list[Any]) -> bool:
    return open_seal(Seals(confirmed=channel), decode_envelope(frames), frames[1:])


def test_both_ends_have_the_same_keys_and_nobody_else_has() -> None:
    node, learner = ends()
    assert is_opened(node, down(learner))
    other = Channel(SealKeys(b"relay"), LEARNER.seal_key(), node.channel, is_learner=False)
    with pytest.raises(ForgedError):
        is_opened(other, down(learner))
    for nonce, hello in ((b"2", b"hello"), (b"1", b"another")):
        assert not is_opened(ends(nonce, hello=hello)[0], down(learner))


@given(payloads, st.data())
def test_whatever_is_changed_on_the_way_is_found(payload: list[bytes], data: Any) -> None:
    node, learner = ends()
    frames = down(learner, payload=payload)
    number = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[number] or b"x")
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    changed = [*frames[:number], bytes(frame), *frames[number + 1 :]]
    try:
        envelope = decode_envelope(changed)
        is_same = msgspec.structs.replace(envelope, protocol=0, num_hops=0) == (
            msgspec.structs.replace(decode_envelope(frames), protocol=0, num_hops=0)
        )
        # What a relay has to change is not sealed.
        assert is_opened(node, changed) <= (is_same and number == 0)
    except RemoteProtocolError:
        pass


@given(payloads, payloads)
def test_frames_cannot_be_moved_cut_or_joined(first: list[bytes], second: list[bytes]) -> None:
    node, learner = ends()
    frames = down(learner, payload=first)
    if first != second:
        with pytest.raises(ForgedError):
            is_opened(node, [frames[0], *second])
    assert is_opened(node, frames)


@given(st.lists(st.sampled_from([0, 1, 2, 3, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])))
def test_each_message_counts_once_and_not_long_after_later_ones(order: list[int]) -> None:
    node, learner = ends()
    opened: set[int] = set()
    for number in order:
        learner.num_sent = number
        frames = down(learner)
        if number in opened or number + WINDOW <= max(opened, default=0):
            with pytest.raises(ForgedError, match="replayed"):
                is_opened(node, frames)
        else:
            assert is_opened(node, frames)
            opened.add(number)


def test_a_node_is_not_told_what_it_has_said_itself() -> None:
    node, _ = ends()
    said = encode(ACK, source=LEARNER_ID, target="w1", channel=node)
    with pytest.raises(ForgedError):
        is_opened(node, said)


def test_no_message_is_taken_for_one_to_another_node() -> None:
    node, learner = ends()
    frames = down(learner)
    envelope = msgspec.structs.replace(decode_envelope(frames), target="w2")
    with pytest.raises(ForgedError):
        open_seal(Seals(confirmed=node), envelope, frames[1:])


def test_a_relay_passes_a_seal_on() -> None:
    node, learner = ends()
    frames = down(learner, payload=[b"abc"])
    assert is_opened(node, forwarded(decode_envelope(frames), frames[1:]))


def test_what_must_be_sealed_and_is_not_is_forged_and_what_need_not_bears_none() -> None:
    node, learner = ends()
    with pytest.raises(ForgedError, match="no seal"):
        is_opened(node, encode(ACK, source=LEARNER_ID, target="w1"))
    assert Rehello in UNSEALED
    assert decode_envelope(down(learner, Rehello())).seal is None


def test_a_channel_is_followed_by_another_once_a_message_of_it_has_come() -> None:
    (old, sender), (new, next_sender) = ends(), ends(b"2")
    seals = Seals(confirmed=old)
    seals.offered = new
    assert (seals.newest, seals.proven) == (new, old)

    def opens(channel: Channel) -> bool:
        frames = down(channel)
        return open_seal(seals, decode_envelope(frames), frames[1:])

    assert opens(sender)
    assert opens(next_sender)
    assert (seals.newest, seals.proven) == (new, new)
    assert not opens(sender)


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(32), bytes(64)])
def test_a_key_that_is_none_makes_no_channel(key: bytes) -> None:
    """Nor does a point of small order, with which anybody knows the secret."""
    channel = Channel(NODE, key, bytes(32), is_learner=False)
    assert not channel.is_possible


def test_a_nonce_never_comes_again() -> None:
    keys = SealKeys(b"x")
    assert len({keys.nonce() for _ in range(100)}) == 100
