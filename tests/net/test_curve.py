from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import ConfigError, StorageError
from echo.net.curve import CurveKeys, KeyPair
from echo.net.transport import parse_key, with_key, without_key
from echo.roles.joining import fingerprint
from echo.runtime.identity import Join, load_or_create_identity, load_or_create_keys, write_join

LEARNER, RELAY = "tcp://10.0.0.5:7700", "tcp://10.0.0.6:7701"
SECRET, PRINT = bytes(range(16)), bytes(range(16, 32))


def join(address: str = LEARNER, key: bytes = b"k" * 32) -> Join:
    return Join(with_key(address, key), SECRET, PRINT)


def of_node(role: str, how: Join, *more: str) -> CurveKeys:
    return CurveKeys.of_node(role, how.secret, *more, how.address)


@given(*(st.binary(min_size=size, max_size=size) for size in (32, 16, 16)))
def test_a_join_string_says_all_that_went_into_it(key: bytes, secret: bytes, mark: bytes) -> None:
    made = Join(with_key("tcp://[::1]:7700", key), secret, mark)
    read = Join.parse(f" {made}\n")
    assert read == made
    assert (read.secret, parse_key(read.address), read.fingerprint) == (secret, key, mark)
    assert without_key(str(made)) == "tcp://[::1]:7700"


@pytest.mark.parametrize(
    "text",
    ["", LEARNER, f"{LEARNER}#abc.def", str(join())[:-1], str(join()) + "x", join().address,
     str(join()).rpartition(".")[0],
     str(join()).replace("7700", "77000")],
)  # fmt: skip
def test_what_is_no_join_string_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ECHO_JOIN is not a join string.*keys/join") as caught:
        Join.parse(text, source="ECHO_JOIN")
    secret = text.rpartition(".")[2]
    assert len(secret) < 20 or secret not in str(caught.value)


def test_no_secret_is_shown() -> None:
    keys = of_node("relay", join())
    for item in (join(), keys, keys.server):
        assert repr(SECRET) not in repr(item)
        assert repr(keys.client.secret) not in repr(item)
        assert repr(keys.server.secret) not in repr(item)


def test_all_of_a_run_dial_with_one_key_and_others_with_another() -> None:
    learner = CurveKeys.of_learner(KeyPair.of(b"s" * 32), SECRET)
    worker, relay = (of_node(role, join()) for role in ("worker", "relay"))
    assert learner.client == worker.client == relay.client
    stranger = CurveKeys.of_node("worker", bytes(16), join().address)
    assert stranger.client.public != worker.client.public


def test_server_keys_differ_but_for_those_of_relays() -> None:
    workers = {of_node("worker", join()).server.public for _ in range(3)}
    relays = {of_node("relay", join()).server.public for _ in range(3)}
    assert len(workers) == 3
    assert relays == {of_node("worker", join()).relay_key}
    assert not workers & relays


def test_which_key_an_address_has() -> None:
    keys = of_node("worker", join(key=b"k" * 32), with_key(RELAY, b"r" * 32), RELAY)
    relay = keys.relay_key
    assert keys.server_keys(LEARNER) == (b"k" * 32,)
    assert keys.server_keys(with_key(LEARNER, b"x" * 32)) == (b"x" * 32,)
    assert keys.server_keys(RELAY) == (b"r" * 32,)
    # An unknown place: the one that listens on this port under another name, then a relay.
    assert keys.server_keys("tcp://host:7700") == (b"k" * 32, relay, b"r" * 32)
    assert keys.server_keys("tcp://host:7777")[0] == relay
    assert CurveKeys.of_learner(KeyPair.of(bytes(32)), SECRET).known == {}


def test_a_run_keeps_its_keys_and_its_join_string(tmp_path: Path) -> None:
    keys, secret = load_or_create_keys(tmp_path)
    assert load_or_create_keys(tmp_path) == (keys, secret)
    assert load_or_create_keys(tmp_path / "other")[0].server != keys.server
    written = write_join(tmp_path, LEARNER, keys, secret)
    path = tmp_path / "keys" / "join"
    signer = load_or_create_identity(tmp_path, run_name="run")
    assert (
        Join.parse(path.read_text())
        == written
        == Join(with_key(LEARNER, keys.server.public), secret, fingerprint(signer.public_key))
    )
    for file in (tmp_path / "keys").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_damaged_key_is_named_with_what_depends_on_it(tmp_path: Path) -> None:
    load_or_create_keys(tmp_path)
    (tmp_path / "keys" / "server.key").write_bytes(b"short")
    with pytest.raises(StorageError, match=r"server\.key holds 5 bytes instead of 32.*join string"):
        load_or_create_keys(tmp_path)
    (tmp_path / "keys" / "server.key").unlink()
    (tmp_path / "keys" / "server.key").mkdir()
    with pytest.raises(StorageError, match=r"cannot read or make .*server\.key"):
        load_or_create_keys(tmp_path)
