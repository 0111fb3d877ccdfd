"""Token sets on the wire: what they cost, what becomes of too many, what is refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import RemoteProtocolError
from echo.core.token_sets import (
    MAX_LACKING_IDS,
    MAX_SET_IDS,
    TOO_LARGE,
    TokenSets,
    all_but,
    join_sets,
)
from echo.wire import token_sets as codec_of_sets
from echo.wire.codec import decode_group, encode_group
from echo.wire.token_sets import decode_sets, encode_all_sets, encode_sets
from tests.core.groups import make_group, make_rollout
from tests.wire.sets import is_same_sets, make_sets, token_sets


@given(st.data(), st.integers(1, 5), st.booleans())
def test_sets_survive_the_wire(data: st.DataObject, num_tokens: int, with_logprobs: bool) -> None:
    sets = data.draw(token_sets(num_tokens, with_logprobs=with_logprobs))
    block = memoryview(encode_sets(sets))
    found = decode_sets(block, num_tokens=num_tokens, with_logprobs=with_logprobs)
    assert is_same_sets(found, sets)


def test_a_dense_set_costs_a_byte_for_each_id_and_a_sparse_one_two() -> None:
    dense = make_sets(list(range(0, 4096, 8)))
    sparse = make_sets(list(range(0, 512 * 300, 300)))
    assert len(encode_sets(dense)) == 2 + 512
    assert len(encode_sets(sparse)) == 2 + 1 + 511 * 2
    assert len(encode_sets(make_sets(0, 0, 0))) == 3


def test_a_likely_set_costs_two_more_bytes_for_each_id_and_is_rounded_to_nearest() -> None:
    sets = make_sets([3, 9], logprobs=[-0.3333333, -2.7182818])
    block = encode_sets(sets)
    assert len(block) == 1 + 2 + 4
    found = decode_sets(memoryview(block), num_tokens=1, with_logprobs=True)
    assert found is not None
    assert found.logprobs is not None
    assert found.logprobs == pytest.approx([-0.3333333, -2.7182818], rel=2**-8)
    assert found.logprobs.tolist() == [-0.333984375, -2.71875]


def test_a_set_that_lacks_the_stop_tokens_costs_little_and_holds_all_others() -> None:
    sets = all_but(np.array([9, 2, 9], np.int32), 3, of=5)
    assert len(encode_sets(sets)) == 3 * (3 + 2) + 2
    assert sets.includes(np.array([2, 3, 9, 2, 9], np.int32)).tolist() == [0, 1, 0, 1, 1]
    assert is_same_sets(sets.within(0), sets)
    assert all_but(np.array([2], np.int32), 9, of=2).num_tokens == 2
    assert not all_but(np.empty(0, np.int32), 2, of=2).lacks.any()


def test_a_group_without_sets_is_written_as_before() -> None:
    header, arrays = encode_group(make_group(make_rollout([(1, 1)] * 3)))
    assert b"set_bytes" in header
    assert len(arrays) == 4 + 3 * 17


def test_a_group_that_was_stored_before_sets_and_branches_were_known_is_read() -> None:
    group = make_group(make_rollout([(1, 1)] * 3))
    header, arrays = encode_group(group)
    fields = msgspec.msgpack.decode(header)
    assert (fields.pop("set_bytes"), fields.pop("num_branches")) == ([], [])
    [rollout] = decode_group(msgspec.msgpack.encode(fields), arrays).rollouts
    assert rollout.support is None
    assert not len(rollout.branches)


def test_the_largest_supports_are_left_out_where_a_message_would_not_hold_them() -> None:
    likely = make_sets([1], [2], [3], logprobs=[0.0, -1.0, -2.0])
    sets = make_sets(list(range(1000)), list(range(100)), [7])
    rollout = replace(make_rollout([(1, 1)] * 3), support=sets, likely=likely)
    [(whole, _)] = encode_all_sets([rollout], max_bytes=1 << 20)
    [(cut, kept)] = encode_all_sets([rollout], max_bytes=300)
    assert is_same_sets(decode_sets(memoryview(whole), num_tokens=3, with_logprobs=False), sets)
    found = decode_sets(memoryview(cut), num_tokens=3, with_logprobs=False)
    assert is_same_sets(found, make_sets(TOO_LARGE, list(range(100)), [7]))
    assert kept == encode_sets(likely)
    [(none, _)] = encode_all_sets([rollout], max_bytes=0)
    assert none == bytes([0, 0, 0])


def test_the_ids_of_a_rollout_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = make_sets([1, 2, 3], [4], [5, 6])
    rollout = replace(make_rollout([(1, 1)] * 3), support=sets)
    data = encode_sets(sets)
    monkeypatch.setattr(codec_of_sets, "MAX_IDS", 5)
    monkeypatch.setattr(codec_of_sets, "MAX_SET_IDS", 4)
    with pytest.raises(RemoteProtocolError, match="6 ids in all; at most 5"):
        decode_sets(memoryview(data), num_tokens=3, with_logprobs=False)
    [(cut, _)] = encode_all_sets([rollout], max_bytes=1 << 20)
    found = decode_sets(memoryview(cut), num_tokens=3, with_logprobs=False)
    assert is_same_sets(found, make_sets(TOO_LARGE, [4], [5, 6]))


def block(*numbers: int) -> bytes:
    return bytes(numbers)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (block(3, 1), "end early"),
        (block(2, 5, 5), "bytes where"),
        (block(0x80, 0x80, 0x80, 0x80, 0x80, 1), "too long"),
        (block(0x83, 0x80, 0x04), f"at most {MAX_SET_IDS + 1 + MAX_LACKING_IDS}"),
        (block(2, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F), "with id"),
        (block(3, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F), "with id"),
    ],
)
def test_malformed_sets_are_a_remote_error(data: bytes, match: str) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        decode_sets(memoryview(data), num_tokens=1, with_logprobs=False)


@given(st.binary(min_size=1, max_size=60), st.integers(1, 4), st.booleans())
def test_sets_of_arbitrary_bytes_are_a_remote_error_or_sets(
    data: bytes, num_tokens: int, with_logprobs: bool
) -> None:
    try:
        found = decode_sets(memoryview(data), num_tokens=num_tokens, with_logprobs=with_logprobs)
    except RemoteProtocolError:
        return
    assert found is not None
    assert found.num_tokens == num_tokens


@pytest.mark.parametrize(
    ("sizes", "ids", "match"),
    [
        ([2], [3, 3], "ascend"),
        ([2], [3, 1], "ascend"),
        ([1], [-1], "ascend"),
        ([2], [3], "come with 1"),
        ([MAX_SET_IDS + 1], [], "at most"),
        ([-2], [], "come with 0"),
        ([-2 - MAX_LACKING_IDS], [], "at most"),
    ],
)
def test_impossible_sets_are_refused(sizes: list[int], ids: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TokenSets(sizes=np.array(sizes, np.int32), ids=np.array(ids, np.int32))


def test_a_rollout_refuses_sets_of_other_tokens() -> None:
    with pytest.raises(ValueError, match="support is of 2 tokens"):
        replace(make_rollout([(1, 1)] * 3), support=make_sets([1], [2]))
    with pytest.raises(ValueError, match="expected 3 with"):
        replace(make_rollout([(1, 1)] * 3), likely=make_sets([1], [2], [3]))


def test_sets_are_cut_joined_and_searched() -> None:
    sets = make_sets([1, 4], 0, [0, 2], TOO_LARGE, [9])
    assert is_same_sets(join_sets([(sets[:2], 2), (sets[2:5], 3)]), sets)
    assert is_same_sets(join_sets([(None, 1), (make_sets([5]), 1)]), make_sets(0, [5]))
    assert join_sets([(None, 1), (None, 0)]) is None
    ids = np.array([4, 8, 3, 7, 9], np.int32)
    assert sets.includes(ids).tolist() == [True, True, False, True, True]
