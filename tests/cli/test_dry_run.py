from __future__ import annotations

import shutil
import socket
from pathlib import Path

import huggingface_hub
import pytest

from echo.cli.node import check_start, dry_run, main
from echo.config.fields import ROLES, Role
from echo.config.load import parse_config

ROOT = Path(__file__).parents[2]
ADDRESS = "tcp://10.0.0.1:7700"


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_one(tiny_model_dir: Path, role: Role) -> None:
    table = {
        "model": {"name": str(tiny_model_dir)},
        "worker": {"connect": ADDRESS, "device": "cpu"},
        "relay": {"connect": ADDRESS},
        "learner": {"device": "cpu"},
    }
    text = dry_run(parse_config(table, role=role), role)
    assert role in text
    assert "profile" in text
    assert "not known here" not in text


def test_a_worker_without_a_model_says_when_the_budget_is_known() -> None:
    config = parse_config({"worker": {"connect": ADDRESS}}, role="worker")
    assert "known once the learner has told" in dry_run(config, "worker")


def test_ranks_need_less_each(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\nname = "{tiny_model_dir}"\n[task]\nkind = "addition"\n'
        '[learner]\ndevice = "cpu"\nlisten = "tcp://127.0.0.1:0"\n'
    )
    told = []
    for rank in ("0", "1"):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", rank)
        assert main(["--role", "learner", "--dry-run", "--config", str(path)]) == 0
        told.append(capsys.readouterr().out)
    assert "memory: each of 2 ranks needs " in told[0]
    assert told[1] == ""


def hub_cache(directory: Path, model_dir: Path) -> Path:
    """Return a hub's cache that has config.json of org/model, and the first of two shards."""
    repository = directory / "hub" / "models--org--model"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    shutil.copy(model_dir / "config.json", snapshot)
    shutil.copy(model_dir / "model.safetensors", snapshot / "model-00001-of-00002.safetensors")
    return directory / "hub"


def test_a_model_in_the_hubs_cache_has_its_budget(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = hub_cache(tmp_path, tiny_model_dir)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    table = {"model": {"name": "org/model"}, "learner": {"device": "cpu"}}
    config = parse_config(table, role="learner")
    here = parse_config({**table, "model": {"name": str(tiny_model_dir)}}, role="learner")
    needs = "memory: learner needs "
    assert needs in dry_run(config, "learner")
    wanted = dry_run(here, "learner").partition(needs)[2].partition(",")[0].partition(" has")[0]
    assert needs + wanted in dry_run(config, "learner")


def test_of_a_model_on_the_hub_only_the_configuration_is_fetched(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def download(*arguments: str, **settings: str) -> str:
        calls.append((*arguments, settings))
        shutil.copy(tiny_model_dir / "config.json", tmp_path)
        return str(tmp_path / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    table = {"model": {"name": "org/model", "revision": "v2"}}
    text = dry_run(parse_config(table, role="learner"), "learner")
    assert "memory: learner needs " in text
    assert calls == [
        ("org/model", "config.json", {"revision": "v2"}),
    ]


def test_without_the_hub_the_file_to_fetch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*arguments: str, **settings: str) -> str:
        raise OSError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    table = {"model": {"name": "org/model"}}
    text = dry_run(parse_config(table, role="learner"), "learner")
    assert "memory budget: not known here: org/model is neither" in text
    assert "no connection); fetch the model's config.json" in text
    assert "--set model.name=D" in text


def test_everything_that_would_stop_the_start_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": ""}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {
            "model.name": "/nowhere",
            "learner.listen": f"tcp://127.0.0.1:{port}",
            "task.kind": "dataset",
            "task.options.path": f"{tmp_path}/train.jsonl",
            "task.options.heldout_path": f"{tmp_path}/none.jsonl",
        }
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        config_path = str(ROOT / "configs" / "quickstart.toml")
        code = main(["--role", "learner", "--dry-run", "--config", config_path, *sets])
    out, err = capsys.readouterr()
    assert code == 2
    assert "would start: a learner" in out
    assert "the start has 4 problems" in err
    assert "model.name = '/nowhere': no such directory" in err
    assert f"{tmp_path}/none.jsonl: cannot read the dataset" in err
    assert f"{tmp_path}/train.jsonl:1: malformed row" in err
    assert f"cannot listen on tcp://127.0.0.1:{port}" in err


@pytest.mark.parametrize("role", ROLES)
def test_what_is_free_and_there_is_no_problem(tmp_path: Path, role: Role) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "answer": "!"}\n')
    table = {
        "model": {"name": "x"},
        "task": {"kind": "dataset", "options": {"path": str(tmp_path / "rows.jsonl")}},
        "learner": {"listen": "tcp://127.0.0.1:0"},
        "relay": {"listen": "tcp://127.0.0.1:0", "connect": ADDRESS},
        "worker": {"listen": "tcp://127.0.0.1:0", "connect": ADDRESS},
        "agent": {"listen": "tcp://127.0.0.1:0"},
    }
    check_start(parse_config(table, role=role), role)
