"""Coded blocks: whatever went in comes out, whatever else comes in is refused."""

from __future__ import annotations

import concurrent.futures
import contextlib
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import LocalProtocolError, RemoteProtocolError
from echo.weights import delta as blocks_module
from echo.weights.delta import (
    CHANGES,
    DIFFERENCE,
    PLANES,
    RAW,
    UNCHANGED,
    XOR,
    WordBytes,
    decode_block,
    encode_block,
    word_bytes_of,
)
from echo.weights.manifest import TensorSpec

WORD_BYTES: st.SearchStrategy[WordBytes] = st.sampled_from((1, 2, 4))


def decoded(coded: bytes, base: bytes | None, size: int) -> bytes:
    out = bytearray(b"\xa5" * size)
    decode_block(memoryview(coded), None if base is None else memoryview(base), memoryview(out))
    return bytes(out)


def coded(base: bytes | None, new: bytes, word_bytes: WordBytes) -> bytes:
    view = None if base is None else memoryview(base)
    return encode_block(view, memoryview(new), word_bytes=word_bytes)


def weights(num_weights: int, seed: int = 0) -> npt.NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    return generator.standard_normal(num_weights, dtype=np.float32) * np.float32(0.02)


def bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[bytes, bytes, WordBytes]:
    """Draw a block and its base: a share of the words changes, mostly by little, or runs do."""
    word_bytes = draw(WORD_BYTES)
    size = draw(st.integers(0, 5000))
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    base = generator.integers(0, 256, size, dtype=np.uint8)
    if draw(st.booleans()):
        base[:] = base & 3
    words = base[: size // word_bytes * word_bytes].copy().view(f"<u{word_bytes}")
    share = draw(st.sampled_from([0, 0.001, 0.01, 0.1, 0.3, 1]))
    is_changed = generator.random(words.size) < share
    if draw(st.booleans()):
        is_changed = np.sort(is_changed)
    largest = draw(st.sampled_from([1, 7, 8, 300, 2**31 - 1]))
    steps = generator.integers(-largest, largest + 1, words.size)
    words[is_changed] += steps[is_changed].astype(words.dtype)
    tail = generator.integers(0, 256, size % word_bytes, dtype=np.uint8)
    return base.tobytes(), words.tobytes() + tail.tobytes(), word_bytes


@given(blocks())
@pytest.mark.slow
def test_a_block_comes_back_bit_for_bit(drawn: tuple[bytes, bytes, WordBytes]) -> None:
    base, new, word_bytes = drawn
    delta = coded(base, new, word_bytes)
    assert decoded(delta, base, len(new)) == new
    assert len(delta) <= len(new) + 1
    assert coded(base, new, word_bytes) == delta
    alone = coded(None, new, word_bytes)
    assert decoded(alone, None, len(new)) == new
    assert len(alone) <= len(new) + 1


@pytest.mark.parametrize("word_bytes", [2, 4])
def test_special_values_survive(word_bytes: WordBytes) -> None:
    """Every pair of NaNs with payloads, infinities, zeros of both signs, subnormals, extremes."""
    short = [0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 1, 0x8001, 0x7F7F, 0xFF7F, 0x7C00]
    patterns = [value << 8 * (word_bytes - 2) | value & 0xFF for value in short]
    pairs = [(old, new) for old in patterns for new in patterns]
    calm = [(7, 7)] * 10 * len(pairs)
    for chosen in (pairs, pairs + calm):
        old, new = (np.array(side, f"<u{word_bytes}") for side in zip(*chosen, strict=True))
        delta = coded(old.tobytes(), new.tobytes(), word_bytes)
        assert decoded(delta, old.tobytes(), new.nbytes) == new.tobytes()


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
def test_an_unchanged_block_is_one_byte(word_bytes: WordBytes) -> None:
    block = bytes(range(256)) * 40 + b"abc"
    assert coded(block, block, word_bytes) == bytes([UNCHANGED])
    assert coded(b"", b"", word_bytes) == bytes([UNCHANGED])
    assert decoded(bytes([UNCHANGED]), block, len(block)) == block


def test_a_block_of_several_pieces_with_a_rest_comes_back() -> None:
    generator = np.random.default_rng(0)
    base = np.zeros((3 << 20) + 11, np.uint8)
    new = base.copy()
    new[: 3 << 20] = generator.random(3 << 20) < 0.03
    for word_bytes in (1, 2, 4):
        delta = coded(base.tobytes(), new.tobytes(), word_bytes)
        assert decoded(delta, base.tobytes(), new.size) == new.tobytes()


def small_step(
    num_weights: int, learning_rate: float, word_bytes: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the bit patterns of weights before and after a step like those of Adam."""
    old = weights(num_weights)
    step = weights(num_weights, seed=1) * np.float32(15 * learning_rate)
    if word_bytes == 4:
        return old.view(np.uint32), (old + step).view(np.uint32)
    return bf16(old), bf16(old + step)


@pytest.mark.parametrize(
    ("learning_rate", "word_bytes", "codec", "ratio"),
    [
        (1e-6, 2, CHANGES, 90),
        (1e-5, 2, CHANGES, 20),
        (1e-3, 2, DIFFERENCE, 2),
        (1e-6, 4, DIFFERENCE, 2.6),
    ],
)
def test_the_codec_follows_the_share_and_the_size_of_steps(
    learning_rate: float, word_bytes: WordBytes, codec: int, ratio: float
) -> None:
    base, new = small_step(1 << 18, learning_rate, word_bytes)
    delta = coded(base.tobytes(), new.tobytes(), word_bytes)
    assert delta[0] == codec
    assert new.nbytes / len(delta) > ratio
    assert decoded(delta, base.tobytes(), new.nbytes) == new.tobytes()


@pytest.mark.parametrize("first", [0, 1000, 100_000])
def test_a_few_rows_that_changed_all_over_cost_as_if_they_were_alone(first: int) -> None:
    base, new = small_step(1 << 17, 1e-6, 4)
    rows = slice(first, first + 4000)
    new[: rows.start], new[rows.stop :] = base[: rows.start], base[rows.stop :]
    delta = coded(base.tobytes(), new.tobytes(), 4)
    alone = coded(base[rows].tobytes(), new[rows].tobytes(), 4)
    assert len(delta) <= 1.04 * len(alone) + 100
    assert decoded(delta, base.tobytes(), new.nbytes) == new.tobytes()


def test_weights_of_another_model_are_sent_as_if_there_were_no_base() -> None:
    base, new = bf16(weights(1 << 17)), bf16(weights(1 << 17, seed=5))
    delta = coded(base.tobytes(), new.tobytes(), 2)
    assert delta[0] == PLANES
    assert new.nbytes / len(delta) > 1.4


def test_flipped_bits_are_sent_as_xor() -> None:
    """Where a word is no number, its neighbours in value are not what a small change makes."""
    generator = np.random.default_rng(0)
    base = generator.integers(0, 256, 1 << 17, dtype=np.uint8)
    new = base ^ np.uint8(0x80) * (generator.random(base.size) < 0.4) ^ np.uint8(0x11)
    delta = coded(base.tobytes(), new.tobytes(), 1)
    assert delta[0] == XOR
    assert new.nbytes / len(delta) > 5


def test_noise_stays_as_it_is() -> None:
    generator = np.random.default_rng(0)
    base, new = generator.bytes(70_000), generator.bytes(70_000)
    assert coded(base, new, 1)[0] == coded(None, new, 1)[0] == RAW


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.15, 0.25, 0.4, 0.7])
@pytest.mark.parametrize("largest", [1, 3, 40, 3000])
@pytest.mark.parametrize("word_bytes", [2, 4])
def test_the_choice_is_close_to_the_shortest(
    share: float, largest: int, word_bytes: WordBytes
) -> None:
    generator = np.random.default_rng(3)
    base = small_step(1 << 17, 1e-6, word_bytes)[0]
    new = base.copy()
    is_changed = generator.random(base.size) < share
    new[is_changed] += generator.integers(1, largest + 1, base.size)[is_changed].astype(base.dtype)
    sizes = [sum(map(len, coder(base, new))) for coder in blocks_module.CODERS.values()]
    chosen = len(coded(base.tobytes(), new.tobytes(), word_bytes))
    assert chosen <= 1.04 * min(*sizes, new.nbytes) + 100


def test_threads_that_code_different_blocks_do_not_disturb_each_other() -> None:
    base, new = small_step(1 << 18, 1e-6, 2)
    old_bytes, new_bytes, size = base.tobytes(), new.tobytes(), 1 << 14
    starts = range(0, len(new_bytes), size)

    def there(start: int) -> bytes:
        return coded(old_bytes[start : start + size], new_bytes[start : start + size], 2)

    def back(start: int, delta: bytes) -> bytes:
        return decoded(delta, old_bytes[start : start + size], size)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        deltas = list(pool.map(there, starts))
        assert deltas == [there(start) for start in starts]
        assert b"".join(pool.map(back, starts, deltas)) == new_bytes


def test_a_base_of_another_length_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="a base of 3 bytes for a block of 4"):
        coded(b"abc", b"abcd", 1)


@pytest.mark.parametrize("codec", [UNCHANGED, CHANGES, DIFFERENCE, XOR])
@pytest.mark.parametrize("base", [None, bytes(9)])
def test_a_difference_without_its_base_is_refused(codec: int, base: bytes | None) -> None:
    with pytest.raises(RemoteProtocolError, match="base of its own length"):
        decoded(bytes([codec, 2]), base, 10)


@given(st.binary(max_size=300), st.integers(0, 3000))
def test_noise_from_the_network_is_refused_or_decoded(noise: bytes, size: int) -> None:
    for base in (None, bytes(size)):
        with contextlib.suppress(RemoteProtocolError):
            decoded(noise, base, size)


@given(blocks(), st.data())
def test_a_damaged_block_is_refused_or_decoded(
    drawn: tuple[bytes, bytes, WordBytes], data: st.DataObject
) -> None:
    base, new, word_bytes = drawn
    old = base if data.draw(st.booleans()) else None
    damaged = bytearray(coded(old, new, word_bytes))
    match data.draw(st.sampled_from(["change", "cut", "extend", "other length"])):
        case "change":
            for _ in range(data.draw(st.integers(1, 4))):
                place = data.draw(st.integers(0, min(40, len(damaged) - 1)))
                damaged[place] = data.draw(st.integers(0, 255))
            size = len(new)
        case "cut":
            del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
            size = len(new)
            with pytest.raises(RemoteProtocolError):
                decoded(bytes(damaged), old, size)
            return
        case "extend":
            with pytest.raises(RemoteProtocolError, match="left over"):
                decoded(bytes(damaged) + b"\0", old, len(new))
            return
        case _:
            size = data.draw(st.integers(0, 6000))
    with contextlib.suppress(RemoteProtocolError):
        decoded(bytes(damaged), old if old is None else bytes(size), size)


def forged(counts: tuple[int, int, int], *streams: bytes) -> bytes:
    head = bytes([CHANGES, 2]) + b"".join(count.to_bytes(4, "little") for count in counts)
    return head + b"".join(len(stream).to_bytes(4, "little") + stream for stream in streams)


@pytest.mark.parametrize(
    ("coded_block", "complaint"),
    [
        (b"", "ends too early"),
        (b"\x09", "unknown codec 9"),
        (bytes([PLANES, 3]), "words of 3 bytes"),
        (bytes([RAW]) + bytes(99), "ends too early"),
        (forged((51, 51, 0)), "more changes than words"),
        (forged((1, 2**32 - 1, 0)), "more changes than words"),
        (forged((1, 1, 2)), "more changes than words"),
        (forged((2, 2, 0), b"\x31\x00", b"\x00"), "lie outside"),
        (forged((2, 2, 0), b"\x01\xff", b"\x00"), "lie outside"),
        (forged((1, 1, 0), b"\x01", b"\x0f"), "escapes do not fit"),
        (forged((1, 1, 1), b"\x01", b"\x00", b"\x00", b"\x00"), "escapes do not fit"),
        (forged((1, 1, 0), b"\x01\x02"), "longer than promised"),
        (forged((3, 3, 0), b"\x01\x02"), "no zstd frame"),
    ],
)
def test_a_forged_block_is_refused_with_its_reason(coded_block: bytes, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        decoded(coded_block, bytes(100), 100)


@pytest.mark.parametrize(("claim", "window_log"), [(2**20, 31), (2**40, 31), (2**40, 10)])
def test_a_frame_that_claims_much_memory_gets_none(claim: int, window_log: int) -> None:
    # Frame header: magic, descriptor (8 bytes of content size, a window is given), window.
    frame = b"\x28\xb5\x2f\xfd" + bytes([0xC0, window_log - 10 << 3]) + claim.to_bytes(8, "little")
    block = bytes([PLANES, 1]) + len(frame).to_bytes(4, "little") + frame
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError, match="promised size"):
        decoded(block, None, 2**20)
    assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    tracemalloc.stop()


TENSORS = [
    TensorSpec("a", "bfloat16", (50,), 0, 100),
    TensorSpec("nothing", "float32", (0,), 112, 0),
    TensorSpec("b", "float32", (25,), 112, 100),
    TensorSpec("c", "int64", (50,), 224, 400),
    TensorSpec("d", "float16", (100,), 624, 200),
]


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 100, 2),
        (0, 200, 2),  # 100 bytes of bf16 against 88 of fp32
        (0, 212, 4),  # a tie
        (50, 212, 4),
        (99, 111, 2),
        (100, 112, 1),  # padding
        (112, 113, 4),
        (150, 620, 1),
        (600, 824, 2),
        (700, 710, 2),
        (824, 900, 1),
        (0, 824, 1),
    ],
)
def test_the_majority_of_bytes_decides(start: int, stop: int, expected: int) -> None:
    assert word_bytes_of(TENSORS, start, stop) == expected


def test_an_image_without_tensors_is_bytes() -> None:
    assert word_bytes_of([], 0, 10) == 1
    assert word_bytes_of(TENSORS[2:], 0, 50) == 1
