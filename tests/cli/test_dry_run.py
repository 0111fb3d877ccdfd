from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from echo.cli.commands import node as node_module
from echo.cli.commands.node import check_start, dry_run, main
from echo.config.fields import ROLES, Role
from echo.config.load import parse_config
from echo.config.memory.footprint import Footprint
from echo.config.memory.models import read_model_facts
from echo.core.units import format_bytes
from echo.engine import model as engine_model
from echo.engine.model import build_tokenizer
from tests.records.rows import write_ledger
from tests.runtime.families import SMALL

ROOT = Path(__file__).parents[2]
ADDRESS = "tcp://10.0.0.1:7700"


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_one(model_dir: Path, role: Role) -> None:
    table = {
        "model": {"name": str(model_dir)},
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
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\nname = "{model_dir}"\n[sampling]\nmax_completion_tokens = 16\n'
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


def test_the_type_that_this_cpu_is_faster_at_is_told_and_counted(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"model": {"name": str(model_dir)}, "learner": {"device": "cpu"}}
    config = parse_config(table, role="learner")
    assert "with float32 weights" in dry_run(config, "learner")
    monkeypatch.setattr(engine_model, "MIN_PRODUCT", 0)
    monkeypatch.setattr(engine_model, "MIN_GAIN", 0.0)
    text = dry_run(config, "learner")
    assert "with bfloat16 weights" in text
    assert "notice: the learner computes in bfloat16, in which this CPU multiplies" in text
    assert "notice: the worker computes in bfloat16" in dry_run(parse_config(table), "worker")


def test_the_attention_that_a_gpu_would_have_is_told(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table: dict[str, Any] = {"model": {"name": str(model_dir)}, "learner": {"device": "cpu"}}
    told = "notice: attention of packed rows by cuDNN for segments of 4096 tokens and more, "
    assert "attention of packed rows" not in dry_run(parse_config(table), "learner")
    monkeypatch.setattr(engine_model, "pick_device", lambda _: "cuda")
    monkeypatch.setattr(engine_model, "free_gpu_bytes", lambda _: 80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    text = dry_run(parse_config(table), "learner")
    assert f"{told}FlashAttention 2 for others, if a trial" in text
    assert "gradients; else by FlashAttention 2\n" in text
    assert "attention of packed rows" not in dry_run(parse_config(table), "worker")
    table["model"]["attn_implementation"] = "eager"
    assert "attention of packed rows" not in dry_run(parse_config(table), "learner")


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
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = hub_cache(tmp_path, model_dir)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    table = {"model": {"name": "org/model"}, "learner": {"device": "cpu"}}
    config = parse_config(table, role="learner")
    here = parse_config({**table, "model": {"name": str(model_dir)}}, role="learner")
    needs = "memory: learner needs "
    assert needs in dry_run(config, "learner")
    wanted = dry_run(here, "learner").partition(needs)[2].partition(",")[0].partition(" has")[0]
    assert needs + wanted in dry_run(config, "learner")


def test_of_a_model_on_the_hub_only_the_configuration_is_fetched(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def download(*arguments: str, **settings: str) -> str:
        calls.append((*arguments, settings))
        shutil.copy(model_dir / "config.json", tmp_path)
        return str(tmp_path / "config.json")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", calls.append)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    table = {"model": {"name": "org/model", "revision": "v2"}}
    text = dry_run(parse_config(table, role="learner"), "learner")
    assert "memory: learner needs " in text
    assert calls == [
        "https://huggingface.co/org/model/resolve/v2/config.json",
        ("org/model", "config.json", {"revision": "v2"}),
    ]


def hub_error(kind: str) -> Exception:
    """Return an error as the hub's library raises it, with a text of its own of several lines."""
    errors = huggingface_hub.errors
    kinds = {"unreachable": errors.HfHubHTTPError.__bases__[0]}
    found: type[Exception] = kinds.get(kind) or getattr(errors, kind)
    if not issubclass(found, errors.HfHubHTTPError):
        return found("[Errno -2] Name or service not known\nMore of it")
    response: Any = SimpleNamespace(headers={}, request=None, status_code=404)
    return found("404 Client Error.\nMore of it", response=response)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("org/model", "unreachable", "cannot be reached ([Errno -2] Name or service not known)"),
        ("org/model", "OfflineModeIsEnabled", "HF_HUB_OFFLINE says not to ask the hub; unset it"),
        ("org/model", "RepositoryNotFoundError", "the hub has no such model, or it is not pub"),
        ("org/model", "GatedRepoError", "accepted its terms: do so at https://huggingface.co/org"),
        ("org/model", "RevisionNotFoundError", 'no revision "v2" of it; https://huggingface.co/o'),
        ("org/model", "RemoteEntryNotFoundError", "the hub has no config.json of it"),
        ("a b", "unreachable", "that is no id of a model on the hub either; check its spelling"),
    ],
)
def test_what_the_hub_does_not_give_is_told_in_our_words(
    monkeypatch: pytest.MonkeyPatch, name: str, error: str, said: str
) -> None:
    def ask(url: str) -> None:
        raise hub_error(error)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    table = {"model": {"name": name, "revision": "v2"}}
    text = dry_run(parse_config(table, role="learner"), "learner")
    [notice] = [line for line in text.splitlines() if line.startswith("notice: ")]
    here = "notice: memory budget: not known here: model.name = "
    assert notice.startswith(f'{here}"{name}": no directory or cached model here, and ')
    assert said in notice
    assert "Client Error" not in text
    assert "More of it" not in text


def test_a_first_prompt_that_does_not_fit_is_told_before_the_start(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "run.dir": tmp_path,
        "model.name": model_dir,
        "learner.device": "cpu",
        "learner.listen": "tcp://127.0.0.1:0",
        "task.kind": "addition",
        "sampling.max_completion_tokens": 8192,
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    config_path = str(ROOT / "configs" / "wan.toml")
    assert main(["--role", "learner", "--dry-run", "--config", config_path, *sets]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("would not start, see the end: a learner of ")
    assert "the first prompt has " in err
    assert "max_completion_tokens = 8192 does not fit beside it; lower it to at most " in err


def test_everything_that_would_stop_the_start_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": ""}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {
            "run.dir": tmp_path,
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
    assert "would not start, see the end: a learner" in out
    assert "the start has 4 problems" in err
    assert "model.name = '/nowhere': no such directory" in err
    assert f"{tmp_path}/none.jsonl: cannot read the dataset" in err
    assert f"{tmp_path}/train.jsonl:1: malformed row" in err
    assert f"cannot listen on tcp://127.0.0.1:{port}" in err


def test_a_run_that_lives_there_and_a_sink_that_is_missing_are_found_without_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ledger(tmp_path / "old", [{"kind": "lineage", "lineage": 1, "fork_step": 0}])
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = {
        "run.dir": tmp_path,
        "run.name": "old",
        "model.name": tmp_path,
        "learner.listen": "tcp://127.0.0.1:0",
        "metrics.sinks": '["wandb"]',
    }
    line = ["--role", "learner", "--config", str(ROOT / "configs" / "quickstart.toml")]
    line += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    assert main([*line, "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert 'metrics.sinks = "wandb" needs wandb, which' in err
    assert f"{tmp_path}/old holds a run already; continue it with --resume" in err
    # The start writes no log, and names none as if it had.
    monkeypatch.setattr(node_module, "check_model", lambda *_: None)
    assert main(line) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/old holds a run already")
    assert not (tmp_path / "old" / "logs").exists()


@pytest.mark.parametrize("role", ROLES)
def test_what_is_free_and_there_is_no_problem(tmp_path: Path, model_dir: Path, role: Role) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1", "answer": "1"}\n')
    options = {"path": str(path), "heldout_path": str(path)}
    table: dict[str, Any] = {
        "model": {"name": str(model_dir)},
        "task": {"kind": "dataset", "options": options},
        "sampling": {"max_completion_tokens": 16},
        "learner": {"listen": "tcp://127.0.0.1:0"},
        "relay": {"listen": "tcp://127.0.0.1:0", "connect": ADDRESS},
        "worker": {"listen": "tcp://127.0.0.1:0", "connect": ADDRESS},
        "agent": {"listen": "tcp://127.0.0.1:0"},
    }
    table["security"] = {"curve": False}
    assert not check_start(parse_config(table, role=role), role).problems


def test_a_learners_dry_run_shows_what_the_run_begins_with(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(4)]
    for name in ("train", "heldout"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps(row) + "\n" for row in rows[: 3 if name == "heldout" else 4])
        )
    settings = {
        "run.dir": tmp_path,
        "run.max_steps": 5,
        "batch.groups_per_step": 4,
        "model.name": model_dir,
        "learner.device": "cpu",
        "learner.listen": "tcp://127.0.0.1:0",
        "task.kind": "dataset",
        "task.options.path": tmp_path / "train.jsonl",
        "task.options.heldout_path": tmp_path / "heldout.jsonl",
        "sampling.max_completion_tokens": 8,
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    config_path = str(ROOT / "configs" / "quickstart.toml")
    assert main(["--role", "learner", "--dry-run", "--config", config_path, *sets]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "examples: 4 to train on, 3 held out" in lines
    assert (
        "prompts: the run takes 20, 5 times each example, and more where a group does not count"
        in lines
    )
    place = next(n for n, line in enumerate(lines) if line.startswith("first prompt: "))
    number = int(lines[place].partition("train.jsonl:")[2].partition(",")[0]) - 1
    assert lines[place].endswith(" tokens:")
    assert lines[place + 1].endswith(f"{number}+1=")
    assert lines[place + 2].startswith("reward on ")
    assert lines[place + 2].endswith(f": 1 for '{number + 1}', 0 for ''")


def test_the_memory_of_a_learner_is_that_of_its_own_prompts(
    model_dir: Path, tmp_path: Path
) -> None:
    """Of all rows the longest, though the first 32 that are drawn may not be among them."""
    path = tmp_path / "rows.jsonl"
    needed = {}
    for longest in (2, 90):
        lengths = [2] * 200 + [longest] + [2] * 200
        rows = [{"prompt": "1" * length, "answer": "1"} for length in lengths]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"path": str(path), "heldout_path": str(path)}
        table = {
            "model": {"name": str(model_dir)},
            "run": {"dir": str(tmp_path)},
            "task": {"kind": "dataset", "options": options},
            "learner": {"listen": "tcp://127.0.0.1:0", "device": "cpu"},
            "sampling": {"max_completion_tokens": 16},
            "batch": {"groups_per_step": 512},
        }
        config = parse_config(table, role="learner")
        check = check_start(config, "learner")
        assert check.prompt_tokens == longest + 1, "with the token that begins a text"
        for number, found in ((longest + 1, check), (512, None)):
            text = dry_run(config, "learner", check=found)
            needed[number] = text.partition("memory: learner needs ")[2].partition(",")[0]
    facts = read_model_facts(model_dir)
    for number, said in needed.items():
        footprint = Footprint(config=config, facts=facts, prompt_tokens=number)
        assert said == format_bytes(sum(item.num_bytes for item in footprint.learner_items()))
    assert len(set(needed.values())) == 3


def problems_of(tmp_path: Path, model_dir: Path, **sections: Any) -> tuple[str, ...]:
    build_tokenizer().save_pretrained(model_dir)
    table = {
        "model": {"name": str(model_dir)},
        "run": {"dir": str(tmp_path / "runs")},
        "learner": {"listen": "tcp://127.0.0.1:0", "device": "cpu", **sections.pop("learner", {})},
        "sampling": {"max_completion_tokens": 16},
    }
    for name in ("model", "run"):
        table[name] |= sections.pop(name, {})
    return check_start(parse_config({**table, **sections}, role="learner"), "learner").problems


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"lora": {"rank": 4, "target_modules": ["q_projection"]}}, "target_modules: .*q_project"),
        ({"lora": {"rank": 4, "target_modules": ["lm_head"]}}, "lora.target_modules"),
        ({"model": {"attn_implementation": "flash_attention_2"}}, "computes in 16 bits only"),
        ({"reference": {"kl_coef": 0.1, "name": "OTHER"}}, "the reference model has 48 token ids"),
        ({"reference": {"kl_coef": 0.1, "name": "/none"}}, "reference.name = '/none': no such dir"),
        ({"learner": {"init_from": "/none"}}, "/none: the weights model.safetensors are missing"),
    ],
)
def test_what_the_trainer_refuses_of_a_model_is_found_by_its_configuration(
    tmp_path: Path, make_tiny_model: Any, sections: dict[str, Any], complaint: str
) -> None:
    if sections.get("reference", {}).get("name") == "OTHER":
        sections["reference"]["name"] = str(make_tiny_model(vocab_size=48))
    model_dir = tmp_path / "model"
    shutil.copytree(make_tiny_model(), model_dir)
    assert not problems_of(tmp_path, model_dir)
    [found] = problems_of(tmp_path, model_dir, **sections)
    assert re.search(complaint, found), found


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def keep_one(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        save_file({"model.norm.weight": file.get_tensor("model.norm.weight")}, path)


def change_names(path: Path, rename: Callable[[str], str]) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {rename(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path)


def rename(path: Path) -> None:
    """Call the keys' norms of attention as a layer of another family would."""
    change_names(
        path,
        lambda name: name.replace("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.sinks"),
    )


def name_otherwise(path: Path) -> None:
    change_names(path, lambda name: f"other.{name}")


def split(path: Path) -> None:
    path.rename(path.with_name("model-00001-of-00001.safetensors"))


def garble_index(path: Path) -> None:
    path.with_name("model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')


def write_text(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (Path.unlink, "the weights model.safetensors are missing"),
        (cut, "model.safetensors: the file is cut off; copy or download it again"),
        (keep_one, "the weights lack .*'model.embed_tokens.weight', 'model.layers.0."),
        (rename, "weights model.layers.0.self_attn.sinks belong to layers .*Qwen3ForCausalLM"),
        (name_otherwise, "the weights lack .*'model.embed_tokens.weight', 'model.layers.0."),
        (split, r"weights model.safetensors are missing .*whole directory again, with .*index"),
        (garble_index, "index.json: not an index of weights: TypeError.*copy or download it again"),
        (write_text, "not a safetensors file, or cut off .*; copy or download it again"),
    ],
    ids=["missing", "cut", "incomplete", "stray", "others", "split", "index", "text"],
)
@pytest.mark.parametrize("key", ["model.name", "reference.name", "learner.init_from"])
def test_weights_that_do_not_load_are_found_by_their_headers(
    tmp_path: Path, make_tiny_model: Any, key: str, damage: Callable[[Path], None], complaint: str
) -> None:
    whole, damaged = make_tiny_model(), tmp_path / "damaged"
    shutil.copytree(whole, damaged)
    damage(damaged / "model.safetensors")
    shutil.copytree(whole, tmp_path / "model")
    sections: dict[str, Any] = {}
    if key == "learner.init_from":
        sections["learner"] = {"init_from": str(damaged)}
    elif key == "reference.name":
        sections["reference"] = {"kl_coef": 0.1, "name": str(damaged)}
    model_dir = damaged if key == "model.name" else tmp_path / "model"
    [found] = problems_of(tmp_path, model_dir, **sections)
    assert re.search(complaint, found), found


def test_weights_of_another_shape_are_named_before_they_are_read(
    tmp_path: Path, make_tiny_model: Any
) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(make_tiny_model(), model_dir)
    fields = json.loads((model_dir / "config.json").read_text())
    wider = fields | {"intermediate_size": 2 * fields["intermediate_size"]}
    (model_dir / "config.json").write_text(json.dumps(wider))
    [found] = problems_of(tmp_path, model_dir)
    assert "weights of the wrong shape: model.layers.0.mlp.down_proj.weight [" in found
    assert "config.json and weights must come from the same model" in found


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"loss": {"kind": "no_such_module:f"}}, "importing 'no_such_module' failed"),
        ({"loss": {"kind": "echo.algo.losses:nothing"}}, "has no function 'nothing'"),
        ({"run": {"dir": "/proc/version/runs"}}, "cannot be written: /proc/version is no direct"),
    ],
)
def test_settings_that_the_start_refuses_are_found(
    tmp_path: Path, make_tiny_model: Any, sections: dict[str, Any], complaint: str
) -> None:
    shutil.copytree(make_tiny_model(), tmp_path / "model")
    [found] = problems_of(tmp_path, tmp_path / "model", **sections)
    assert complaint in found


def test_a_revision_of_a_directory_is_refused_however_it_is_written(
    tmp_path: Path, make_tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(make_tiny_model(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    [found] = problems_of(tmp_path, Path("model"), model={"revision": "main"})
    assert "model.revision = 'main' has no effect on the local directory model" in found


@pytest.mark.parametrize(
    ("role", "setting", "complaint"),
    [
        ("worker", {"network": {"store_dir": "/proc/version"}}, "/proc/version is no directory"),
        ("relay", {"network": {"store_dir": "/proc/version"}}, "network.store_dir = "),
        ("worker", {"worker": {"device": "cuda:99"}}, "device = 'cuda:99': PyTorch"),
    ],
)
def test_what_other_roles_cannot_start_with_is_found(
    tmp_path: Path, role: Role, setting: dict[str, Any], complaint: str
) -> None:
    table: dict[str, Any] = {
        "run": {"dir": str(tmp_path)},
        "security": {"curve": False},
        "relay": {"listen": "tcp://127.0.0.1:0", "connect": ADDRESS},
        "worker": {"connect": ADDRESS},
    }
    assert not check_start(parse_config(table, role=role), role).problems
    for section, keys in setting.items():
        table[section] = table.get(section, {}) | keys
    [found] = check_start(parse_config(table, role=role), role).problems
    assert complaint in found


def test_an_event_log_that_cannot_be_written_is_found(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--role", "learner", "--dry-run", "--config", str(ROOT / "configs" / "quickstart.toml")]
    for setting in (f"model.name={model_dir}", f"run.dir={tmp_path}", "learner.device=cpu"):
        line += ["--set", setting]
    line += ["--set", "learner.listen=tcp://127.0.0.1:0"]
    assert main([*line, "--log-events", str(tmp_path / "none" / "events")]) == 2
    assert "none/events cannot be written: No such file or dir" in capsys.readouterr().err
    assert main([*line, "--log-events", str(tmp_path / "events")]) == 0


@pytest.mark.parametrize(
    ("model_type", "settings", "complaint"),
    [
        ("gemma2", {"head_dim": 8}, r"final_logit_softcapping = 30\.0"),
        ("granite", {"logits_scaling": 8.0}, r"logits_scaling = 8\.0"),
        ("phi", {}, "LM head with a bias"),
        ("t5", {}, "no causal language model"),
        ("gpt_oss", {}, 'set model.attn_implementation = "auto"'),
        ("qwen3", {"hidden_size": "big"}, "'hidden_size' expected int, got str"),
        ("qwen3", {"num_attention_heads": 0}, "ZeroDivisionError: "),
        ("qwen3", {"hidden_act": "no such one"}, "KeyError: 'no such one'"),
    ],
)
def test_a_model_that_cannot_be_trained_is_found_by_its_configuration(
    tmp_path: Path, model_type: str, settings: dict[str, Any], complaint: str
) -> None:
    sizes = {} if model_type == "t5" else {**SMALL, **settings}
    text = json.dumps({"model_type": model_type, **sizes})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(text)
    options = {"attn_implementation": "sdpa"} if model_type == "gpt_oss" else {}
    found, *_ = problems_of(tmp_path, tmp_path / "model", model=options)
    assert re.search(complaint, found), found


def remove_tokenizer(path: Path) -> None:
    path.with_name("tokenizer.json").unlink()


def garble_config(path: Path) -> None:
    path.with_name("config.json").write_text('{"model_type": ')


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (cut, "model.safetensors: the file is cut off; copy or download it again"),
        (keep_one, "the weights lack .*'model.embed_tokens.weight', 'model.layers.0."),
        (split, "copy or download the whole directory again, with model.safetensors.index.json"),
        (rename, "weights model.layers.0.self_attn.sinks belong to layers .*Qwen3ForCausalLM"),
        (remove_tokenizer, "no tokenizer could be loaded: .*; the directory needs tokenizer.json"),
        (garble_config, "no causal language model can be built from its config.json"),
    ],
)
@pytest.mark.parametrize("role", ["learner", "worker"])
def test_a_damaged_model_is_refused_by_the_dry_run_and_before_a_start_in_one_line(
    tmp_path: Path,
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    role: Role,
    damage: Callable[[Path], None],
    complaint: str,
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(model_dir, damaged)
    damage(damaged / "model.safetensors")
    settings = {
        "run.dir": tmp_path / "runs",
        "model.name": damaged,
        "learner.device": "cpu",
        "learner.listen": "tcp://127.0.0.1:0",
        "worker.device": "cpu",
        "network.reconnect_for_s": "2s",
        "security.curve": "false",
    }
    line = ["--role", role, "--config", str(ROOT / "configs" / "quickstart.toml")]
    line += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    assert main([*line, "--dry-run"]) == 2
    [told] = capsys.readouterr().err.splitlines()
    assert re.search(complaint, told), told
    assert main(line) == 3, "before it dials or listens"
    err = capsys.readouterr().err
    [said] = [text for text in err.splitlines() if str(damaged) in text]
    assert re.search(complaint, said), said


def test_a_worker_may_have_a_model_without_its_weights(tmp_path: Path, model_dir: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    table = {
        "model": {"name": str(tmp_path / "model")},
        "worker": {"connect": ADDRESS, "device": "cpu"},
        "security": {"curve": False},
    }
    assert not check_start(parse_config(table, role="worker"), "worker").problems


@pytest.mark.parametrize("role", ["learner", "worker"])
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("org/model", "HF_HUB_OFFLINE says not to ask the hub; unset it, or set model.name to a d"),
        ("gpt99", "no directory or cached model here"),
        ("a b", "that is no id of a model on the hub either; check its spelling"),
        ("/nowhere", "no such directory"),
    ],
)
def test_a_model_that_cannot_be_had_is_a_problem_of_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    role: Role,
    name: str,
    complaint: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = ["--role", role, "--config", str(ROOT / "configs" / "quickstart.toml")]
    for setting in (
        *(f"model.name={name}", f"run.dir={tmp_path}", "learner.device=cpu", "worker.device=cpu"),
        *("learner.listen=tcp://127.0.0.1:0", "security.curve=false"),
    ):
        line += ["--set", setting]
    assert main([*line, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("would not start, see the end")
    assert "notice: memory budget: not known here: see the end" in out
    [told] = err.splitlines()
    assert complaint in told
    assert main(line) == 3
    [said] = [text for text in capsys.readouterr().err.splitlines() if "model.name" in text]
    assert said.partition("model.name")[2] == told.partition("model.name")[2]


def test_weights_that_the_cache_lacks_have_to_be_on_a_hub_that_can_be_asked(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = hub_cache(tmp_path, model_dir)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", asked.append)
    learner = {"listen": "tcp://127.0.0.1:0", "device": "cpu"}
    table = {"model": {"name": "org/model"}, "learner": learner, "run": {"dir": str(tmp_path)}}
    config = parse_config(table, role="learner")
    assert not check_start(config, "learner").problems
    assert asked == ["https://huggingface.co/org/model/resolve/main/config.json"]
    for path in cache.rglob("model-*.safetensors"):
        path.rename(path.with_name("model.safetensors"))
    build_tokenizer().save_pretrained(next(cache.rglob("config.json")).parent)
    check_start(config, "learner")
    assert len(asked) == 1, "all of it is here"
