from __future__ import annotations

import pytest
from blake3 import blake3

from echo.core.errors import RemoteProtocolError
from echo.roles.joining import INHERITED_FILES, Assets, describe_assets, digest_mismatch
from echo.tasks.tokenization import CONFIG_FILES, TEMPLATE_FILE, TOKENIZER_FILES

FILES = {"config.json": b"{}", "tokenizer.json": b"[1, 2]"}


def test_equal_or_missing_hashes_agree() -> None:
    ours = {"model": "aa", "tokenizer": "", "task": "t"}
    theirs = {"model": "aa", "tokenizer": "bb", "dataset": "d"}
    assert digest_mismatch(ours=ours, theirs=theirs) is None
    assert digest_mismatch(ours={}, theirs=theirs) is None


def test_every_difference_is_named_with_both_values_and_a_remedy() -> None:
    fault = digest_mismatch(
        ours={"model": "a" * 64, "tokenizer": "t1", "task": "x"},
        theirs={"model": "b" * 64, "tokenizer": "t2", "task": "x"},
    )
    assert fault is not None
    assert f"model: this node has {'a' * 16}, the learner {'b' * 16}" in fault
    assert "tokenizer: this node has t1, the learner t2" in fault
    assert "task" not in fault.split(".")[0]
    assert "Give both the same files" in fault


def test_files_are_taken_if_they_are_the_ones_announced() -> None:
    described = describe_assets(FILES)
    assert described["config.json"] == (blake3(b"{}").hexdigest(), 2)
    assets = Assets(described, settings={"seed": 1})
    assert assets.missing == ["config.json", "tokenizer.json"]
    with pytest.raises(RemoteProtocolError, match=r"config\.json does not match"):
        assets.add("config.json", b"[]")
    with pytest.raises(RemoteProtocolError, match=r"config\.json does not match"):
        assets.add("config.json", b"{}}")
    for name, data in FILES.items():
        assets.add(name, data)
    assert (assets.missing, assets.files) == ([], FILES)


def test_the_learner_sends_no_other_names_than_a_node_takes() -> None:
    assert {*CONFIG_FILES, *TOKENIZER_FILES, TEMPLATE_FILE} == INHERITED_FILES


@pytest.mark.parametrize(
    "name",
    ["", "../x", "a/b", ".hidden", "a\\b", "/etc/passwd", "evil.py", "evil.so", "modeling_x.py",
     "model.safetensors", "sitecustomize.py", "CONFIG.JSON", "config.json "],
)  # fmt: skip
def test_a_file_has_a_known_name_and_cannot_be_written_anywhere_else(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="only files of a tokenizer"):
        Assets({name: ("00", 1)})
