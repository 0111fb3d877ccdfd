"""The trainer as the configuration describes it, at the start and after a resume."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from echo.algo.losses import ReferenceKlLoss
from echo.config.load import (
    apply_inherited,
    inherited_settings,
    keep_choices,
    load_resolved,
    parse_config,
)
from echo.config.memory.budget import Machine
from echo.config.memory.footprint import Footprint
from echo.config.memory.models import read_model_facts
from echo.config.schema import Config
from echo.core.errors import ConfigError, DataError
from echo.core.rollout import Lineage
from echo.engine import model
from echo.engine.engine import Request
from echo.engine.lora import Lora, base_settings, export_adapter, initial_adapter
from echo.engine.model import build_model, make_sampling, save_tiny_model
from echo.engine.weights import publish_image, tensors_from_image
from echo.runtime.learner import setup
from echo.runtime.learner.saving.resume import StartingPoint
from echo.runtime.learner.setup import (
    build_loss,
    build_trainer,
    learner_lora,
    load_data,
    load_prompts,
)
from echo.runtime.worker.setup import worker_lora
from echo.tasks.task import load_task
from echo.train.trainer import Trainer
from tests.engine.lora_models import adapted_policy, published
from tests.runtime.harness import Play, Run, running
from tests.train.test_trainer import make_group

ENGINE = "TransformersEngine"
START = StartingPoint(lineages=(Lineage(1, 0),))


def make_config(model_dir: Path, **sections: dict[str, Any]) -> Config:
    table = {
        "model": {"name": str(model_dir)},
        "learner": {"device": "cpu", "num_threads": 1},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
        **sections,
    }
    return parse_config(table, role="learner")


EQUAL = make_group([1, 1], 1)


def trainer_for(
    config: Config, model_dir: Path, start: StartingPoint, lora: Lora | None = None
) -> Trainer:
    """The trainer of one process."""
    trainer = build_trainer(config, model_dir, start, lora)
    assert isinstance(trainer, Trainer)
    return trainer


@pytest.fixture
def own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Returns the import path of a loss of the user's that needs this number of likely ids."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def write(likely: int) -> str:
        name = f"needy_{likely}"
        (tmp_path / f"{name}.py").write_text(NEEDY.replace("{}", str(likely)))
        importlib.invalidate_caches()
        return f"{name}:centered"

    return write


def pull(trainer: Trainer) -> float:
    """The mean penalty of a step."""
    return trainer.step([make_group([1, 0], 2), make_group([1, 1], 1)]).metrics["kl/reference"]


def test_checkpointing_follows_the_memory_unless_it_is_told(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(directory: Path, num_bytes: int, **learner: Any) -> object:
        monkeypatch.setattr(setup, "read_machine", lambda *_: Machine(host_bytes=num_bytes))
        config = make_config(directory, learner={"device": "cpu", **learner})
        budget = setup.budget_here(config, directory)
        return setup.with_checkpointing(config, budget).learner.gradient_checkpointing

    assert chosen(model_dir, 2**40) is False
    assert chosen(model_dir, 2**20) is True
    assert chosen(model_dir, 2**20, gradient_checkpointing=False) is False
    assert chosen(tmp_path, 2**20) is False, "no dimensions to go by"


def test_checkpointing_is_needless_where_memory_would_hold_the_activations(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data: Any = SimpleNamespace(model_dir=model_dir, lora=None, prompts=SimpleNamespace(longest=8))

    def is_needless(num_bytes: int, checkpointing: bool | str) -> bool:
        monkeypatch.setattr(setup, "read_machine", lambda *_: Machine(host_bytes=num_bytes))
        learner = {"device": "cpu", "gradient_checkpointing": checkpointing}
        config = make_config(model_dir, learner=learner)
        return setup.is_recomputing(config, data, setup.budget_here(config, model_dir))

    assert is_needless(2**40, True)
    assert not is_needless(2**20, True)
    assert not is_needless(2**40, False)
    assert not is_needless(2**40, "auto"), "chosen by the memory"


def test_the_first_prompts_are_looked_at_beside_the_window(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"

    def load(*lengths: int, max_new: int, **options: Any) -> list[int]:
        rows = [{"prompt": "1" * length, "answer": "1"} for length in lengths]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"path": str(path), "heldout_path": str(path), **options}
        config = make_config(
            model_dir,
            task={"kind": "dataset", "options": given},
            sampling={"max_completion_tokens": max_new},
            run={"dir": str(tmp_path)},
        )
        task = load_task(config.task.kind, config.task.options)
        prompts, _ = load_prompts(config, model_dir, task)
        size = prompts.sizes()["train"] or 0
        return sorted(len(prompts.lease(number, 0).prompt_ids) for number in range(size))

    window = r"the model's window holds 128 tokens"
    assert load(100, 10, max_new=20) == [11, 101]
    with pytest.raises(
        DataError, match=rf"rows\.jsonl:2: its prompt has 121 tokens.*108.*{window}"
    ):
        load(10, 120, 10, max_new=20)
    assert load(10, 120, 10, max_new=20, skip_bad=True) == [11, 11]
    assert "left out 1 of 3 train rows (task.options.skip_bad)" in caplog.text
    with pytest.raises(ConfigError, match=rf"{window}; the first prompt has 11 .* at most 117"):
        load(10, max_new=128)
    with pytest.raises(ConfigError, match=r"shorten the prompts \(.*rows\.jsonl:1 is the first\)"):
        load(130, max_new=128)


def test_a_tokenizer_made_for_less_than_the_window_is_told(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = shutil.copytree(model_dir, tmp_path / "model")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"model_max_length": 24}))
    for max_new, lines in ((8, 0), (64, 1)):
        config = make_config(directory, sampling={"max_completion_tokens": max_new})
        load_prompts(config, directory, load_task("addition", {}))
        assert (
            caplog.text.count("made for 24 tokens (model_max_length), the model's window") == lines
        )


def test_a_directory_without_a_tokenizer_is_named(model_dir: Path, tmp_path: Path) -> None:
    bare = shutil.ignore_patterns("tokenizer*")
    directory = shutil.copytree(model_dir, tmp_path / "model", ignore=bare)
    with pytest.raises(DataError, match="model: there is no tokenizer; the directory needs token"):
        load_prompts(make_config(directory), directory, load_task("addition", {}))


def test_the_start_says_that_a_reward_gives_nothing(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "given.py").write_text(
        "def forgetful(completion, answer):\n    float(completion == answer)\n"
        "def good(completion, answer):\n    return float(completion == answer)\n"
    )
    for name in ("good", "forgetful"):
        reward = f"{tmp_path / 'given.py'}:{name}"
        options = {"path": str(path), "heldout_path": str(path), "reward": reward}
        config = make_config(
            model_dir,
            task={"kind": "dataset", "options": options},
            sampling={"max_completion_tokens": 8},
        )
        load_data(config).host.close()
        told = "rows.jsonl:1: the reward gives None for its own answer and for an empty one"
        assert (told in caplog.text) is (name == "forgetful")


def test_offloading_needs_a_gpu(model_dir: Path) -> None:
    config = make_config(model_dir, learner={"device": "cpu", "gradient_checkpointing": "offload"})
    with pytest.raises(ConfigError, match=r"computes on the CPU: set .*checkpointing = true"):
        build_trainer(config, model_dir, START)


def test_there_is_no_reference_and_one_update_unless_more_is_asked_for(model_dir: Path) -> None:
    config = make_config(model_dir, batch={"minibatches_per_step": 2})
    assert not isinstance(build_loss(config), ReferenceKlLoss)
    trainer = trainer_for(config, model_dir, START)
    assert trainer.models.reference is None
    groups = [make_group([1, 0], 2), make_group([0, 1], 1)]
    assert "kl/reference" not in trainer.step(groups).metrics
    moments = trainer.adapters.progress.optimizer.tensors()
    assert {int(part) for name, part in moments.items() if name.endswith("/step")} == {2}
    assert trainer.refusal(EQUAL) == "zero_variance"


NEEDY = """
from echo.algo.loss import LossNeeds

def centered(inputs):
    raise NotImplementedError

centered.needs = LossNeeds(likely_ids={})
"""
TRUNCATED = {"top_p": (0.9, 1), "top_k": (5, 0), "min_p": (0.1, 0), "min_tokens": (2, 0)}


@pytest.mark.parametrize("key", TRUNCATED)
def test_a_loss_of_the_users_that_needs_likely_ids_refuses_truncated_sampling(
    key: str, model_dir: Path, own_loss: Callable[[int], str]
) -> None:
    """The code tells what the loss needs, so the configuration alone is not refused."""
    value, off = TRUNCATED[key]
    loss = {"kind": own_loss(8)}
    config = make_config(model_dir, loss=loss, sampling={key: value})
    said = (
        rf"^sampling\.{key} = {value}: truncates .* loss\.kind = \"needy_8:centered\" .* {off}, or"
    )
    with pytest.raises(ConfigError, match=said):
        build_trainer(config, model_dir, START)
    with pytest.raises(ConfigError, match=said):
        setup.check_models(config, model_dir)
    setup.check_models(make_config(model_dir, loss=loss), model_dir)


def test_the_likely_ids_of_a_loss_of_the_users_have_to_fit_into_a_message(
    model_dir: Path, own_loss: Callable[[int], str]
) -> None:
    def check(likely: int, tokens: int, size: int) -> None:
        config = make_config(
            model_dir,
            loss={"kind": own_loss(likely)},
            sampling={"max_completion_tokens": tokens},
            batch={"group_size": size},
        )
        setup.check_models(config, model_dir)

    # The same limits as in tests/config/test_checks.py, where score centering needs the ids.
    check(32, 3554, 100)
    with pytest.raises(ConfigError, match=r"32 likely ids .*loss\.kind.*at most 3554 tokens"):
        check(32, 3555, 100)
    check(1024, 4096, 2)
    with pytest.raises(
        ConfigError, match=r"1024 of each token \(loss\.kind\).*at most 4096 tokens"
    ):
        check(1024, 4097, 2)
    with pytest.raises(ConfigError, match=r"^loss\.kind = .*needs 1025 likely ids.*at most 1024"):
        check(1025, 16, 2)


def test_a_loss_of_the_users_tells_how_large_the_rollouts_of_agents_may_become(
    model_dir: Path, tmp_path: Path, own_loss: Callable[[int], str]
) -> None:
    config = make_config(
        model_dir,
        loss={"kind": own_loss(1024)},
        agent={"listen": "tcp://127.0.0.1:0", "max_session_tokens": 1000},
        learner={"micro_batch_tokens": 16384},
        batch={"group_size": 2},
    )
    data: Any = SimpleNamespace(lora=None, vocab_size=10, digests={}, read_assets=dict)
    identity: Any = SimpleNamespace(run_id="run", key=None)
    settings = setup.learner_settings(config, data, identity, "", run_dir=tmp_path, expected={})
    assert settings.admission.settings["likely_ids"] == 1024
    assert settings.leases.max_tree_tokens == settings.admission.settings["max_tree_tokens"] == 4096


@pytest.mark.slow
def test_the_reference_is_frozen_at_the_start_also_after_a_resume(
    model_dir: Path, tmp_path: Path
) -> None:
    config = make_config(model_dir, reference={"kl_coef": 0.1})
    trainer = trainer_for(config, model_dir, START)
    assert trainer.refusal(EQUAL) is None, "there is a pull without an advantage, too"
    assert trainer.models.reference is not None
    assert trainer.models.reference.parameters() == {}
    before = {name: tensor.clone() for name, tensor in trainer.models.reference.tensors().items()}
    assert pull(trainer) == pytest.approx(0.0, abs=1e-9)
    assert pull(trainer) > 1e-5
    assert all(torch.equal(t, before[n]) for n, t in trainer.models.reference.tensors().items())
    trainer.save_state(tmp_path)
    expected = pull(trainer)
    resumed = StartingPoint(lineages=(Lineage(1, 0),), step=2, checkpoint=tmp_path)
    assert pull(trainer_for(config, model_dir, resumed)) == expected


@pytest.mark.slow
def test_another_start_is_another_reference(model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_tiny_model(other, build_model(seed=3))
    # From the other weights, pulled to those of the start: nothing yet.
    config = make_config(model_dir, reference={"kl_coef": 0.1}, learner={"init_from": str(other)})
    assert pull(trainer_for(config, model_dir, START)) == pytest.approx(0.0, abs=1e-9)
    # From the model's own weights, pulled to the others.
    config = make_config(model_dir, reference={"kl_coef": 0.1, "name": str(other)})
    assert pull(trainer_for(config, model_dir, START)) > 1e-3


def test_a_reference_with_another_vocabulary_is_refused(
    model_dir: Path, make_tiny_model: Any
) -> None:
    other = make_tiny_model(vocab_size=48)
    config = make_config(model_dir, reference={"kl_coef": 0.1, "name": str(other)})
    with pytest.raises(DataError, match="48 token ids, the one being trained 32"):
        build_trainer(config, model_dir, START)


# --- adapters -------------------------------------------------------------------------------------


MakeTinyModel = Callable[..., Path]


def learner_config(model_dir: Path, run_dir: Path, **learner: str) -> Config:
    (run_dir / "run").mkdir(parents=True, exist_ok=True)
    sections: dict[str, dict[str, Any]] = {"run": {"dir": str(run_dir)}, "lora": {"rank": 4}}
    return make_config(
        model_dir, learner={"device": "cpu", "num_threads": 1, **learner}, **sections
    )


def told(config: Config, *, is_resumed: bool = False) -> dict[str, Any]:
    """What the learner of this configuration tells its workers."""
    lora = learner_lora(config, Path(str(config.model.name)))
    assert lora is not None
    given = config.learner.init_from
    base = base_settings(config.model, lora, given, config.run_dir, is_resumed=is_resumed)
    return inherited_settings(config) | base


def find(settings: dict[str, Any], *overrides: str) -> Path:
    """The base that a worker with these settings of its own finds."""
    worker = parse_config({"worker": {"connect": "tcp://a:1"}}, overrides, "worker")
    lora = worker_lora(apply_inherited(worker, settings), settings)
    assert lora is not None
    assert (lora.rank, lora.alpha) == (4, 8)
    return lora.base_dir


def test_without_a_rank_there_is_no_adapter(tiny_model_dir: Path) -> None:
    config = make_config(tiny_model_dir)
    assert learner_lora(config, tiny_model_dir) is None
    assert worker_lora(config, {}) is None


@pytest.mark.slow
def test_a_worker_takes_its_own_copy_or_the_learners_directory(
    make_tiny_model: MakeTinyModel, tmp_path: Path
) -> None:
    ours, copy, other = make_tiny_model(), make_tiny_model(), make_tiny_model(seed=1)
    settings = told(learner_config(ours, tmp_path))
    assert json.loads(json.dumps(settings)) == settings
    assert find(settings) == ours
    assert find(settings, f"model.name={copy}") == copy
    assert find(settings, f"model.name={other}") == ours, "its own has another hash"
    # A whole model to start from becomes the base.
    config = learner_config(ours, tmp_path / "other", init_from=str(other))
    lora = learner_lora(config, ours)
    assert lora is not None
    assert lora.base_dir == other
    assert find(told(config), f"model.name={ours}") == other


def test_a_worker_without_the_base_is_told_what_to_do(
    make_tiny_model: MakeTinyModel, tmp_path: Path
) -> None:
    settings = told(learner_config(make_tiny_model(), tmp_path))
    settings["base.name"] = "/nowhere/base"
    other = make_tiny_model(seed=1)
    with pytest.raises(ConfigError, match="copy that directory here and set model") as caught:
        find(settings, f"model.name={other}")
    assert f"{other}: other weights than the learner's base" in str(caught.value)
    assert "no such directory" in str(caught.value)


@pytest.mark.slow
def test_an_adapter_to_start_from_is_trained_on(
    make_tiny_model: MakeTinyModel, tmp_path: Path
) -> None:
    model, adapter = make_tiny_model(), tmp_path / "adapter"
    policy, lora = adapted_policy(model)
    export_adapter(adapter, {}, published(policy), lora, base_name=str(model))
    config = learner_config(model, tmp_path, init_from=str(adapter))
    kept = config.sync.max_staleness + 1
    assert learner_lora(config, model) == dataclasses.replace(lora, num_versions=kept)
    trainer = trainer_for(config, model, START, lora)
    expected = published(policy)
    assert all(torch.equal(t, expected[name]) for name, t in trainer.snapshot().items())

    plain = parse_config({}, [f"learner.init_from={adapter}", f"model.name={model}"], "learner")
    with pytest.raises(ConfigError, match="holds an adapter and no whole model: set lora"):
        initial_adapter(plain.lora, plain.learner.init_from)


def test_a_resumed_run_refuses_another_base_and_says_how_to_mend_a_record_that_is_none(
    make_tiny_model: MakeTinyModel, tmp_path: Path
) -> None:
    config, path = learner_config(make_tiny_model(), tmp_path), tmp_path / "run" / "base.json"
    before = told(config)
    told(learner_config(make_tiny_model(), tmp_path), is_resumed=True)  # the same, elsewhere
    other = learner_config(make_tiny_model(seed=1), tmp_path)
    with pytest.raises(DataError, match="not those that this run's adapter was trained on"):
        told(other, is_resumed=True)
    for damage in (None, "", "{", "[]", "{}"):
        path.unlink() if damage is None else path.write_text(damage)
        with pytest.raises(DataError, match=r"base\.json does not say which .* restore") as caught:
            told(config, is_resumed=True)
        path.write_text(str(caught.value).partition("write this line into it: ")[2])
        assert told(config, is_resumed=True) == before


@pytest.mark.slow
def test_the_reference_of_an_adapter_is_the_base(tiny_model_dir: Path) -> None:
    config = make_config(tiny_model_dir, lora={"rank": 4}, reference={"kl_coef": 0.1})
    trainer = trainer_for(config, tiny_model_dir, START, learner_lora(config, tiny_model_dir))
    pulls = [pull(trainer) for _ in range(3)]
    assert pulls[0] == pytest.approx(0.0, abs=1e-7)
    assert pulls[2] > 1e-6


def test_ranks_with_other_settings_are_told_which(model_dir: Path) -> None:
    configs = [
        make_config(model_dir, learner={"device": "cpu", "micro_batch_tokens": size})
        for size in (512, 512, 256)
    ]
    told: list[bytes] = []

    def gather(own: bytes) -> list[bytes]:
        told.append(own)
        return told

    ranks: Any = SimpleNamespace(gather=gather)
    for config in configs[:2]:
        setup.check_alike(config, ranks)
    said = "rank 2 was .* than rank 0: learner.micro_batch_tokens = 256 and not 512; all processes"
    with pytest.raises(ConfigError, match=said):
        setup.check_alike(configs[2], ranks)


def test_ranks_wait_for_one_whose_model_is_under_way(model_dir: Path) -> None:
    """In the group without a limit of time, and before they meet in any other."""
    rank_group = Mock()
    rank_group.ranks.gather.side_effect = InterruptedError
    with pytest.raises(InterruptedError):
        setup.make_trainer(make_config(model_dir), model_dir, None, rank_group=rank_group)
    assert [name for name, *_ in rank_group.mock_calls] == ["wait_for_all", "ranks.gather"]


def test_ranks_reckon_with_the_prompts_that_the_first_one_has_read(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reckon(*_: Any, prompt_tokens: int) -> None:
        raise InterruptedError(prompt_tokens)

    monkeypatch.setattr(setup, "budget_here", reckon)
    monkeypatch.setattr(setup, "check_alike", lambda *_: None)
    rank_group = Mock()
    rank_group.ranks.gather.side_effect = lambda own: [(40).to_bytes(8, "little"), own]
    with pytest.raises(InterruptedError, match="40"):
        setup.make_trainer(make_config(model_dir), model_dir, None, rank_group=rank_group)


def given(model_dir: Path) -> Any:
    """Return what an evaluation asks of a run's data."""
    return SimpleNamespace(model_dir=model_dir, lora=None)


def test_the_evaluation_computes_in_what_is_published_on_a_gpu_and_as_the_learner_on_a_cpu(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Mock()
    monkeypatch.setattr(setup, "TransformersEngine", engine)
    for device, dtype in (("cuda", "float32"), ("cpu", "float32"), ("cpu", "bfloat16")):
        monkeypatch.setattr(setup, "pick_device", lambda _, device=device: device)
        config = make_config(model_dir, learner={"dtype": dtype})
        setup.evaluation_engine(config, given(model_dir), None, None)
    built = [(call.kwargs["device"], call.kwargs["dtype"]) for call in engine.call_args_list]
    assert built == [("cuda", "bfloat16"), ("cpu", "float32"), ("cpu", "bfloat16")]


@pytest.mark.slow
def test_what_the_first_start_chooses_is_written_into_the_run(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model, "MIN_PRODUCT", 0)
    monkeypatch.setattr(model, "MIN_GAIN", 0.0)  # whatever this machine is better at
    trainer, engine = (Mock(side_effect=getattr(setup, name)) for name in ("Trainer", ENGINE))
    monkeypatch.setattr(setup, "Trainer", trainer)
    monkeypatch.setattr(setup, ENGINE, engine)

    async def scenario(run: Run) -> None:
        with caplog.at_level("INFO"):
            async with running(await run.learner()):
                pass
        saved = load_resolved(run.run_dir / "config.json")
        assert saved.learner.dtype == "bfloat16"
        again = keep_choices(saved, run.config("learner"))
        assert again.learner.dtype == "bfloat16"
        assert keep_choices(saved, run.config("learner", learner={"dtype": "float32"})) != again

    play(scenario)
    assert trainer.call_args.args[1].dtype == torch.bfloat16
    assert engine.call_args.kwargs["dtype"] == "bfloat16"
    assert caplog.text.count("computes in bfloat16, in which this CPU multiplies 64 x 192") == 1


@pytest.mark.slow
def test_the_memory_is_divided_before_anything_is_built(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: dict[str, Mock] = {}
    for name in ("TransformersEngine", "Trainer", "make_images"):
        built[name] = Mock(side_effect=getattr(setup, name))
        monkeypatch.setattr(setup, name, built[name])
    budget_here, lengths = setup.budget_here, []

    def told(config: Config, model_dir: Path, *, prompt_tokens: int) -> Any:
        assert not built["TransformersEngine"].called, "which takes of what is free"
        lengths.append(prompt_tokens)
        budget = budget_here(config, model_dir, prompt_tokens=prompt_tokens)
        assert budget is not None
        return dataclasses.replace(
            budget,
            gradient_checkpointing=True,
            recompute_above=77,
            has_versions_on_gpu=False,
            evaluation_bytes=12_345,
        )

    monkeypatch.setattr(setup, "budget_here", told)

    async def scenario(run: Run) -> None:
        async with running(await run.learner()):
            pass

    play(scenario)
    (longest,) = lengths
    assert 0 < longest < 32, "an addition, in place of what is assumed without data"
    engine = built["TransformersEngine"].call_args.kwargs
    assert (engine["rollout_bytes"], engine["is_beside"]) == (12_345, True)
    compute = built["Trainer"].call_args.args[1]
    assert (compute.gradient_checkpointing, compute.recompute_above) == (True, 77)
    assert built["make_images"].call_args.kwargs["fits_on_gpu"] is False


def test_a_rollout_of_the_evaluation_is_reckoned_as_its_engine_does(model_dir: Path) -> None:
    config = make_config(model_dir, learner={"device": "cpu"})
    engine = setup.evaluation_engine(config, given(model_dir), None, None)
    _, one = engine._needs(10, config.sampling.max_completion_tokens)
    footprint = Footprint(config=config, facts=read_model_facts(model_dir), prompt_tokens=10)
    assert footprint.evaluated_rollout_bytes == one


def test_what_is_free_to_ranks_is_without_the_evaluation(model_dir: Path) -> None:
    """Which the first of them has built before their trainers."""
    rank_group: Any = SimpleNamespace(ranks=SimpleNamespace(size=2))
    config = make_config(model_dir, lora={"rank": 4})
    names = [
        {item.name for item in budget.items}
        for budget in (setup.budget_here(config, model_dir, each) for each in (None, rank_group))
        if budget is not None
    ]
    assert ["evaluation" in each for each in names] == [True, False]


def test_the_evaluation_of_several_ranks_has_no_weights_of_its_own(model_dir: Path) -> None:
    config = make_config(model_dir)
    weights = build_model(seed=1).state_dict()
    specs, image = publish_image(weights, config.model.dtype)
    engine = setup.evaluation_engine(config, given(model_dir), None, Mock())
    engine.load(tensors_from_image(specs, memoryview(image).toreadonly()))
    start = np.frombuffer(image, np.uint8).ctypes.data
    parameters = list(engine.model.parameters())
    assert all(start <= each.data_ptr() < start + len(image) for each in parameters)
    sampling = make_sampling(config.sampling, None)
    request = Request("eval.0", np.array([1, 4], np.int32), seed=0)
    [found] = engine.generate([request], dataclasses.replace(sampling, max_completion_tokens=2))
    assert len(found.token_ids) == 2


@pytest.mark.parametrize(
    ("sections", "is_eager"),
    [
        ({}, False),
        ({"sync": {"eager": True}}, True),
        # A batch that stops early is to have more groups than it waits for.
        ({"rollout": {"over_submission": 2.0}}, True),
    ],
)
def test_groups_are_granted_just_in_time_unless_more_are_wanted(
    sections: dict[str, Any], is_eager: bool
) -> None:
    settings = setup.lease_settings(parse_config(sections), vocab_size=10, max_tree_tokens=None)
    assert settings.is_eager is is_eager
