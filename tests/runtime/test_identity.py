from __future__ import annotations

import stat
from pathlib import Path
from typing import Literal

import pytest

from echo.config.load import parse_config
from echo.core.errors import ConfigError, StorageError
from echo.net.transport import with_key
from echo.roles.joining import fingerprint
from echo.runtime.identity import (
    Join,
    JoinSource,
    join_address,
    load_or_create_identity,
    load_or_create_keys,
    load_or_create_signing_key,
)


def test_a_run_keeps_its_id_and_key(tmp_path: Path) -> None:
    first = load_or_create_identity(tmp_path, run_name="toy")
    again = load_or_create_identity(tmp_path, run_name="toy")
    assert first.run_id.startswith("toy-")
    assert (again.run_id, again.public_key) == (first.run_id, first.public_key)
    assert len(first.public_key) == 32


def test_two_runs_of_one_name_differ(tmp_path: Path) -> None:
    first = load_or_create_identity(tmp_path / "a", run_name="toy")
    second = load_or_create_identity(tmp_path / "b", run_name="toy")
    assert first.run_id != second.run_id
    assert first.public_key != second.public_key


def test_nobody_else_reads_the_key(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path, run_name="toy")
    assert stat.S_IMODE((tmp_path / "keys" / "learner.key").stat().st_mode) == 0o600


def test_a_key_without_an_id_is_of_a_start_that_was_killed(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path, run_name="toy")
    (tmp_path / "run.json").unlink()
    again = load_or_create_identity(tmp_path, run_name="toy")
    assert load_or_create_identity(tmp_path, run_name="toy").public_key == again.public_key


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_a_damaged_id_is_named(tmp_path: Path, text: str) -> None:
    load_or_create_identity(tmp_path, run_name="toy")
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(StorageError, match=str(tmp_path)):
        load_or_create_identity(tmp_path, run_name="toy")


def test_a_lost_key_is_not_replaced(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path, run_name="toy")
    (tmp_path / "keys" / "learner.key").unlink()
    with pytest.raises(StorageError, match=r"learner\.key"):
        load_or_create_identity(tmp_path, run_name="toy")


def test_only_the_owner_may_look_into_the_directory_of_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    load_or_create_identity(tmp_path, run_name="toy")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    load_or_create_keys(tmp_path / "other")
    assert stat.S_IMODE((tmp_path / "other" / "keys").stat().st_mode) == 0o700


# --- joining --------------------------------------------------------------------------------------


LEARNER = Join(with_key("tcp://10.0.0.5:7700", b"k" * 32), b"a" * 16, b"f" * 16)
OTHER = Join(with_key("tcp://10.0.0.6:7700", b"o" * 32), b"b" * 16, b"g" * 16)


def make(
    *overrides: str,
    connect: list[str] | None = None,
    role: Literal["relay", "worker"] = "worker",
) -> JoinSource:
    table = {"run": {"dir": "no/such/directory"}, "worker": {"connect": connect or []}}
    config = parse_config(table, overrides)
    section = config.relay if role == "relay" else config.worker
    return JoinSource(role, section.connect, config.security, config.run_dir)


def test_an_address_goes_before_the_setting_and_that_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "join"
    path.write_text(f"{OTHER}\n")
    assert make().find() is None
    assert make(f"security.join={path}").find() == OTHER
    both = make(f"security.join={OTHER}", connect=["tcp://a:1", str(LEARNER)])
    assert both.find() == LEARNER
    assert make(f"security.join={OTHER}", role="relay").find() == OTHER


def test_nodes_on_the_learners_machine_find_the_run_directory(tmp_path: Path) -> None:
    own = f"run.dir={tmp_path}"
    assert make(own).find() is None
    (tmp_path / "run" / "keys").mkdir(parents=True)
    (tmp_path / "run" / "keys" / "join").write_text(f"{LEARNER}\n")
    assert make(own).find() == LEARNER
    assert make(own, f"security.join={OTHER}").find() == OTHER
    (tmp_path / "run" / "keys" / "join").write_text("torn")
    with pytest.raises(ConfigError, match=r"keys/join' is not a join string"):
        make(own).find()


@pytest.mark.parametrize("text", [None, b"nonsense", b"\xff"])
def test_a_file_without_a_join_string_is_named(tmp_path: Path, text: bytes | None) -> None:
    path = tmp_path / "join"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=f"security.join = '{path}'.*runs/NAME/keys/join"):
        make(f"security.join={path}").keys()


def test_who_names_no_address_dials_that_of_the_join_string() -> None:
    assert make(f"security.join={LEARNER}").addresses() == (LEARNER.address,)
    named = make(f"security.join={LEARNER}", connect=["tcp://relay:7701", str(LEARNER)])
    assert named.addresses() == ("tcp://relay:7701", LEARNER.address)
    assert make().addresses() == ()


def test_keys_follow_from_the_join_string() -> None:
    keys = make(f"security.join={LEARNER}", connect=["tcp://relay:7701"]).keys()
    assert keys is not None
    assert keys.server_keys("tcp://10.0.0.5:7700") == (b"k" * 32,)
    assert keys.server_keys("tcp://relay:7701") == (keys.relay_key, b"k" * 32)
    assert make("security.curve=false").keys() is None
    with pytest.raises(ConfigError, match="this relay has no join string"):
        make(role="relay").keys()


def test_whose_signature_counts(tmp_path: Path) -> None:
    remote, local = ["tcp://10.0.0.5:7700"], ["tcp://127.0.0.1:7700"]
    assert make(f"security.join={LEARNER}").fingerprint() == b"f" * 16
    plain = [f"run.dir={tmp_path}", "security.curve=false"]
    assert make(*plain, connect=local).fingerprint() is None
    key = load_or_create_signing_key(tmp_path / "run")
    expected = fingerprint(key.public_key().public_bytes_raw())
    assert make(*plain, connect=local).fingerprint() == expected
    # The run directory of another machine says nothing of the learner there.
    assert make(*plain, connect=remote).fingerprint() is None


def test_where_others_reach_the_learner() -> None:
    key = "#" + LEARNER.address.partition("#")[2]
    assert join_address(f"tcp://10.0.0.5:7700{key}", None) == "tcp://10.0.0.5:7700"
    assert join_address("tcp://0.0.0.0:7700", "tcp://gpu.example:1") == "tcp://gpu.example:1"
    guess = join_address(f"tcp://0.0.0.0:7700{key}", None)
    assert guess.startswith("tcp://")
    assert guess.endswith(":7700")
    assert "0.0.0.0" not in guess
