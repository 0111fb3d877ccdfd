"""A worker's parts from what it inherits: its own code only, and the learner's model."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from echo.config.load import inherited_settings, parse_config
from echo.core.errors import ConfigError, StorageError
from echo.core.memory_sizes import SAMPLING_BYTES_PER_LOGIT
from echo.engine import model
from echo.engine.model import write_model_files
from echo.runtime.episodes import code_settings
from echo.runtime.learner.setup import expected_rollouts
from echo.runtime.worker import setup
from echo.runtime.worker.setup import build_parts, make_demand, own_model
from echo.tasks.tokenization import asset_files
from echo.weights.manifest import hash_image
from tests.runtime.harness import Play, Run, running

EVIL = b"""
from pathlib import Path

Path(__file__).with_name("was_run").touch()


def correct(completion):
    return 1.0
"""


def inherited(model_dir: Path, **task: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return what a learner with this task and model sends."""
    config = parse_config({"model": {"name": str(model_dir)}, "task": task})
    assets = {name: path.read_bytes() for name, path in asset_files(model_dir).items()}
    return inherited_settings(config) | code_settings(config.task, config.reward), assets


def test_code_that_is_not_the_learners_is_not_imported_and_nothing_is_written(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rewards.py"
    path.write_text("def correct(completion):\n    return 1.0\n")
    options = {"reward": "rewards.py:correct"}
    settings, assets = inherited(model_dir, kind="dataset", options=options)
    config, node_dir = parse_config({}), tmp_path / "w1"

    path.write_bytes(EVIL)
    with pytest.raises(ConfigError, match="another one than the learner's"):
        build_parts(config, node_dir, settings, assets)
    path.unlink()
    with pytest.raises(ConfigError, match=f"copy {path} from the learner's machine to {path}"):
        build_parts(config, node_dir, settings, assets)
    assert not node_dir.exists()
    assert not list(tmp_path.rglob("was_run"))


def test_a_worker_that_runs_no_task_code_needs_none() -> None:
    table = {"task": {"kind": "dataset", "options": {"reward": "nowhere.py:f"}}}
    at_learner = {**table, "reward": {"where": "learner"}}
    here, there = parse_config(table), parse_config(at_learner)
    assert code_settings(here.task, here.reward) == {"task.code": {}}
    assert code_settings(there.task, there.reward) == {}


# --- model ----------------------------------------------------------------------------------------


def test_a_model_of_the_shared_file_is_the_learners_unless_it_is_here_or_set_here(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def resolve(name: str, *_: object) -> Path:
        asked.append(name)
        return Path(name)

    monkeypatch.setattr(setup, "resolve_model", resolve)
    hub_id = {"model": {"name": "Qwen/Qwen3-0.6B"}}
    for table in (hub_id, {"model": {"name": "/no/such/model"}}, {}):
        assert own_model(parse_config(table, source="two-machines.toml")) is None
    assert not asked, "the hub was not asked"
    here = {"model": {"name": str(model_dir)}}
    assert own_model(parse_config(here, source="two-machines.toml")) == model_dir
    assert own_model(parse_config(hub_id, ["model.name=my/copy"])) == Path("my/copy")


def test_the_longest_prompt_is_what_the_window_or_the_memory_leaves(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, assets = inherited(model_dir, kind="addition")
    settings["sampling.max_completion_tokens"] = 6
    config_json = json.loads(assets["config.json"]) | {"max_position_embeddings": 2048}
    assets["config.json"] = json.dumps(config_json).encode()

    def bound() -> tuple[int, str]:
        parts = build_parts(parse_config({}), tmp_path / "w1", settings, assets)
        parts.engine.close()
        return parts.max_prompt_tokens, parts.prompt_bound

    assert bound() == (2042, "the model's window")
    weights, one_token = 100_736 * 4, 2 * 3 * 2 * 16 * 4
    budget = weights + SAMPLING_BYTES_PER_LOGIT * 32 + one_token * (1200 + 6)
    monkeypatch.setattr("echo.engine.hf.engine.free_bytes", lambda device: 2 * budget)
    assert bound() == (1200, "this worker's memory")


@pytest.mark.parametrize(
    ("table", "demand"),
    [
        ({}, (96, 120, 376)),
        ({"worker": {"max_concurrent_rollouts": 16}}, (16, 120, 376)),
        ({"agent": {"listen": "tcp://127.0.0.1:0", "max_session_tokens": 900}}, (96, 120, 900)),
    ],
)
def test_memory_is_planned_for_the_rollouts_that_the_learner_expects(
    table: dict[str, Any], demand: tuple[int, int, int]
) -> None:
    learner = {"batch": {"groups_per_step": 4, "group_size": 8}, "sync": {"max_staleness": 2}}
    prompts: Any = SimpleNamespace(longest=60)
    expected = expected_rollouts(parse_config(learner), prompts)
    config = parse_config({"sampling": {"max_completion_tokens": 256}, **table})
    found = make_demand(config, expected)
    assert (found.num_rollouts, found.prompt_tokens, found.rollout_tokens) == demand
    # One of an older release says nothing of it.
    assert make_demand(config, {}).prompt_tokens == 1024


def test_a_worker_computes_in_the_type_that_its_cpu_multiplies_faster(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, assets = inherited(model_dir, kind="addition")
    engine = Mock()
    monkeypatch.setattr(setup, "TransformersEngine", engine)
    monkeypatch.setattr(setup, "longest_prompt", lambda *_: 1)
    engine.return_value.window = None
    engine.return_value.max_concurrent_rollouts.return_value = 8
    engine.return_value.rollouts_in_memory.return_value = 8
    notes = [build_parts(parse_config({}), tmp_path / "w1", settings, assets).note]
    monkeypatch.setattr(model, "MIN_PRODUCT", 0)
    monkeypatch.setattr(model, "MIN_GAIN", 0.0)
    notes += [build_parts(parse_config({}), tmp_path / "w1", settings, assets).note]
    assert [call.kwargs["dtype"] for call in engine.call_args_list] == ["float32", "bfloat16"]
    assert [note.partition(",")[0] for note in notes] == ["", "computes in bfloat16"]


def test_inherited_files_cannot_ask_for_code(model_dir: Path, tmp_path: Path) -> None:
    settings, assets = inherited(model_dir, kind="addition")
    loader = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    asking = {
        "auto_map": loader,
        "trust_remote_code": True,
        "parts": {"auto_map": loader, "kept": 1},
    }
    for name in ("config.json", "tokenizer_config.json"):
        assets[name] = json.dumps(json.loads(assets[name]) | asking).encode()

    parts = build_parts(parse_config({}), tmp_path / "w1", settings, assets)

    parts.engine.close()
    for name in ("config.json", "tokenizer_config.json"):
        text = (tmp_path / "w1" / "model" / name).read_text()
        assert "auto_map" not in text
        assert "trust_remote_code" not in text
        assert json.loads(text)["parts"] == {"kept": 1}


def test_a_disk_that_takes_no_inherited_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"what this worker inherits: .*file.*; free disk space"):
        write_model_files(tmp_path / "file" / "model", {"config.json": b"{}"})


@pytest.mark.slow
def test_the_workers_own_weights_are_hashed_beside_the_loop(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed_in: list[str] = []

    def noted(image: bytearray, chunk_bytes: int) -> bytes:
        hashed_in.append(threading.current_thread().name)
        return hash_image(image, chunk_bytes)

    monkeypatch.setattr(setup, "hash_image", noted)

    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 1})
        worker = await run.worker("w1", model={"name": str(run.model_dir)})
        async with running(learner, worker) as (learning, _):
            assert await learning == "finished"

    play(scenario)
    [name] = hashed_in
    assert name.startswith("engine")
