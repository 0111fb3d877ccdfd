from __future__ import annotations

import random

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import RemoteProtocolError
from echo.weights import cipher
from echo.weights.cipher import Encrypted, SentChunks, check_key, crypt, hash_key

KEY = bytes(range(32))
TEXT = random.Random(0).randbytes(5000)


def crypted(index: int, text: bytes, key: bytes = KEY) -> bytes:
    out = bytearray(len(text))
    crypt(key, index, text, memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1024, 5000])
def test_a_chunk_is_that_of_aes_gcm_without_its_tag(size: int) -> None:
    text = TEXT[:size]
    for index in (0, 1, 1 << 40):
        sealed = AESGCM(KEY).encrypt(index.to_bytes(12, "big"), text, None)
        assert crypted(index, text) == sealed[:size]
        assert crypted(index, crypted(index, text)) == text
    in_place = bytearray(text)
    crypt(KEY, 3, memoryview(in_place), memoryview(in_place))
    assert in_place == crypted(3, text)


@given(
    chunk_bytes=st.integers(1, 700),
    first=st.integers(0, 1 << 30),
    span=st.tuples(st.integers(0, 4999), st.integers(0, 5000)),
)
def test_any_run_of_bytes_is_decrypted_on_its_own(
    chunk_bytes: int, first: int, span: tuple[int, int]
) -> None:
    chunks = [TEXT[at : at + chunk_bytes] for at in range(0, len(TEXT), chunk_bytes)]
    sent = b"".join(crypted(number, chunk) for number, chunk in enumerate(chunks, first))
    start, stop = span
    where, offset = divmod(start, chunk_bytes)
    run = Encrypted(KEY, first + where, offset, chunk_bytes)
    assert run.decrypt(memoryview(sent)[start:stop]) == TEXT[start:stop]


def test_a_key_is_the_one_committed_to() -> None:
    check_key(KEY, hash_key(KEY))
    check_key(b"", b"")
    for key, committed in ((KEY, b""), (b"", hash_key(KEY)), (KEY[:-1], hash_key(KEY[:-1]))):
        with pytest.raises(RemoteProtocolError, match="not the one which the learner drew"):
            check_key(key, committed)


def test_what_was_sent_of_late_is_kept_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cipher, "SENT_BYTES", 30)
    sent = SentChunks()
    for index in (1, 2, 3, 3, 4):
        sent.add(KEY, index, bytes(10))
    assert [sent.get(KEY, index) is not None for index in range(6)] == [
        False, False, True, True, True, False,
    ]  # fmt: skip
    assert sent.get(bytes(32), 3) is None, "of another form"
