"""Several ranks train as one process does, over gloo; what they do stands in rank_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo.core.errors import ConfigError
from echo.engine.weights import INDEX_FILE
from echo.train.models.attention import DENSE, FA4
from echo.train.ranks import rank_group, sharded_images
from echo.train.ranks.rank_group import CrashReasons, Launch, LeadTrainer, RankCommand, join
from echo.train.ranks.sharded_images import LocalRank, address_of
from echo.train.ranks.sharding import ALONE
from echo.weights.delta import WordBytes, code_block
from echo.weights.manifest import hash_chunks
from tests.runtime.families import SMALL, save_family
from tests.train import rank_cases
from tests.train.forked_ranks import run_on_ranks
from tests.train.rank_cases import make_trainer
from tests.train.test_trainer_losses import LOSSES

TOLD = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
CASES = "tests.train.rank_cases"
A_STEP = 3e-4
"""Largest change of a weight in a step."""

DEATHS = {
    "killed": "with save_state: rank {} left no reason: killed",
    "has no memory": "with step: rank {}: step: OutOfMemoryError: CUDA out of memory",
    "stopped": "with step: rank {} left no reason: killed, stopped",
    "hangs": "with rescore: rank {} left no reason: killed, stopped, hanging",
}
"""Ways in which a rank fails, and the leader's error."""

MORE_VARIANTS = ("lora", "supports", "untied", "few rows", "shared prompts")

PUBLICATIONS: dict[str, dict[str, bool]] = {
    "published here": {"far": False},
    "published from afar": {"far": True},
    "published for another": {"far": False, "helper_dies": True},
}

pytestmark = pytest.mark.slow

Answers = dict[str, Any]
Cases = dict[str, tuple[str, int, dict[str, Any]]]
"""Case of rank_cases.py, number of ranks, and options, by name."""


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.matrix)])
def answers(
    request: pytest.FixtureRequest,
    make_tiny_model: Callable[..., Path],
    tiny_model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Answers:
    """The answers of all cases on this number of ranks, in one run, since imports take most
    time.
    """
    size: int = request.param
    tiny, other = str(tiny_model_dir), str(make_tiny_model(seed=1))
    untied = str(make_tiny_model(seed=2, tie_word_embeddings=False))
    asked: Cases = {
        "losses": ("every_loss", size, {"model_dir": tiny, "reference_dir": other}),
        "variants": ("variants", size, {"model_dir": tiny, "untied_dir": untied}),
        "trouble": ("trouble", size, {"model_dir": tiny}),
        "bfloat16": ("in_bfloat16", size, {"model_dir": tiny}),
        "kernel": ("kernel", size, {}),
    }
    adapters = {"model_dir": tiny, "directory": str(tmp_path_factory.mktemp("adapters"))}
    asked["adapters"] = ("adapters", size, adapters)
    led = tmp_path_factory.mktemp("led")
    asked["led"] = ("lead", size, {"model_dir": tiny, "directory": str(led)})
    large = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 8}
    models = tmp_path_factory.mktemp("models")
    reading_options = {
        "sources": model_sources(models, tiny_model_dir, Path(other)),
        "large_dir": str(make_tiny_model(**large)),
    }
    asked["read"] = ("read_models", size, reading_options)
    for kind, trouble in PUBLICATIONS.items():
        asked[kind] = ("publish", size, {"model_dir": tiny, **trouble})
    asked["rows"] = ("lose_rows", size, {"model_dir": tiny})
    for how in DEATHS:
        asked[how] = ("lose_one", size, {"model_dir": tiny, "how": how})
    states, answers = state_cases(size, tiny, tmp_path_factory)
    asked |= states
    answers["led to"] = led
    found = run_on_ranks(
        [(f"{CASES}:{name}", ranks, options) for name, ranks, options in asked.values()],
        tmp_path_factory.mktemp("ranks"),
    )
    named = dict(zip(asked, found, strict=True))
    for name, answer in named.items():
        answers[name] = answer if name in {*DEATHS, "rows"} else answer.value
    return answers


def state_cases(
    size: int, tiny: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Cases, Answers]:
    """Cases that save a state and load it on this and another number of ranks; and its
    directories.
    """
    asked: Cases = {}
    answers: Answers = {}
    kinds: dict[str, dict[str, Any]] = {
        "all": {"model_dir": tiny},
        "adapter": {"model_dir": tiny, "has_adapter": True},
    }
    for kind, options in kinds.items():
        directory = tmp_path_factory.mktemp(f"state_{kind}")
        for name in ("first", "second"):
            (directory / name).mkdir()
        first, second = str(directory / "first"), str(directory / "second")
        asked[f"save {kind}"] = ("save_and_go_on", size, {"directory": first, **options})
        reading = {"wanted": str(directory), **options}
        asked[f"same {kind}"] = ("load_and_go_on", size, {"directory": first, **reading})
        if kind == "all":
            onward = {"directory": first, "save_to": second, **reading}
            asked["other all"] = ("load_and_go_on", 5 - size, onward)
            one = tmp_path_factory.mktemp("state_of_one")
            (one / "first").mkdir()
            rank_cases.save_and_go_on(None, str(one / "first"), **options)
            older = {"directory": str(one / "first"), "wanted": str(one), **options}
            asked["of one"] = ("load_and_go_on", size, older)
        answers[f"directory {kind}"] = (directory, reading)
    return asked, answers


def model_sources(directory: Path, tiny: Path, other: Path) -> dict[str, dict[str, str]]:
    """Return models whose files are hard for ranks to read."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    model.save_pretrained(directory / "cut", max_shard_size="80KB")
    assert (directory / "cut" / INDEX_FILE).exists()
    joined = AutoConfig.for_model("hrm_text", **SMALL)  # gate and up are rows of one tensor there
    AutoModelForCausalLM.from_config(joined).save_pretrained(directory / "joined")
    one = {"num_experts": 1, "num_experts_per_tok": 1}
    return {
        "several files in bfloat16": {"model_dir": str(directory / "cut")},
        "experts that are joined": {
            "model_dir": str(save_family(directory / "experts", "qwen3_moe"))
        },
        "more ranks than experts": {
            "model_dir": str(save_family(directory / "expert", "qwen3_moe", one))
        },
        "rows of one tensor that become several": {"model_dir": str(directory / "joined")},
        "a tower that is left out": {
            "model_dir": str(save_family(directory / "tower", "qwen2_5_vl"))
        },
        "weights from elsewhere": {"model_dir": str(tiny), "weights_dir": str(other)},
    }


def test_a_restart_of_several_machines_needs_a_store_of_its_own() -> None:
    told = {**TOLD, "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert Launch.of(told) == Launch(rank=3, size=4, local_rank=1, prefix="")
    shared = {**told, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}
    assert Launch.of(shared).prefix == "life 0"
    restarted = {**shared, "TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert Launch.of({**restarted, "GROUP_WORLD_SIZE": "1"}).prefix == "life 1"
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        Launch.of(restarted)


def test_what_torchrun_has_not_made_is_said() -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE = 4 .* RANK, MASTER_PORT is not"):
        Launch.of({"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"})


def test_a_rank_without_a_gpu_is_told_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launch = Launch.of({**TOLD, "LOCAL_RANK": "2"})
    with pytest.raises(ConfigError, match=r"rank 3 would .* on GPU 2, .* PyTorch finds 2"):
        join(launch, "cuda")


def test_a_rank_with_a_reason_is_to_blame_and_not_one_that_has_yet_to_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_group, "REASONS_S", 0.0)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined] # a star brings it there
    reasons = [CrashReasons(store, rank, 4) for rank in range(4)]
    missing = "left no reason: killed, stopped, hanging or cut off"
    assert reasons[0].explain() == f"rank 1, rank 2, rank 3 {missing}"
    reasons[1].leave("")
    assert reasons[0].explain() == f"rank 2, rank 3 {missing}"
    reasons[3].leave("step: ValueError")
    assert reasons[0].explain() == "rank 3: step: ValueError"
    assert not reasons[0].wait_for_others(0.0)
    reasons[2].leave("")
    assert reasons[0].wait_for_others(0.0)


def test_the_others_are_told_a_path_that_is_the_same_in_any_directory() -> None:
    told: list[RankCommand] = []
    rank_group: Any = SimpleNamespace(together=told.append)  # which is no context
    with pytest.raises(TypeError):
        LeadTrainer(rank_group, lambda _: make_trainer("", ALONE), Path("run"), published_dtype="")
    assert told[0].path == str(Path.cwd() / "run")


def assert_near(off: dict[str, float], weights: float = 0.01) -> None:
    """Assert small distances; weights may differ, as Adam steps by the rounding of a zero
    gradient.
    """
    assert off["weights"] < weights * A_STEP, off["weights"]
    assert off["loss/policy"] < 2e-7, off["loss/policy"]
    assert off.pop("update") < 1e-3, off
    far = {name: value for name, value in off.items() if value > 1e-6}
    assert far.keys() <= {"weights"}, far


@pytest.mark.parametrize("loss", [*LOSSES, *rank_cases.MORE_LOSSES, "reference"])
def test_ranks_make_the_step_of_one_process(loss: str, answers: Answers) -> None:
    assert_near(answers["losses"][loss])


@pytest.mark.parametrize("variant", [*rank_cases.VARIANTS, *MORE_VARIANTS])
def test_they_do_whatever_is_set(variant: str, answers: Answers) -> None:
    off = dict(answers["variants"][variant])
    if variant == "supports":  # within small sets many gradients are nearly zero
        assert off.pop("scores") < 1e-5
        assert_near(off, weights=0.05)
        return
    assert_near(off)


def test_they_take_several_adapters(answers: Answers) -> None:
    found = answers["adapters"]
    assert_near(found["code"])
    assert_near(found["default"])
    assert found["waited"] < 1e-6
    assert (found["default again"], found["code again"]) == ([True, 1], [True, 2])


def test_in_bfloat16_they_round_what_one_process_does(answers: Answers) -> None:
    assert_near(answers["bfloat16"])


def test_they_use_one_kernel_for_attention(answers: Answers) -> None:
    """Ranks with different kernels could plan different micro-batches, and wait for ever."""
    found = answers["kernel"]
    size = len(found["chosen"])
    assert found["chosen"] == [DENSE.name] * size
    assert found["tried"] == [f"{FA4.name}; {DENSE.name}"] * size
    assert found["deactivated"] == [FA4.name] * size
    fault = f"rank {size - 1}: it is wrong"
    notice = f"attention by {FA4.name} was tried and is not used: {fault}"
    assert found["told"] == [notice] * size


@pytest.mark.matrix
def test_they_do_with_compiled_layers_and_wait_for_one_that_is_late(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    compiled = (f"{CASES}:compiled", 2, {"model_dir": str(tiny_model_dir)})
    found, late = run_on_ranks([compiled, (f"{CASES}:be_late", 2, {})], tmp_path)
    assert_near(found.value)
    assert late.value == 2.0


@pytest.mark.matrix
def test_compiled_layers_of_ranks_have_the_bits_of_others(
    make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """With smaller weights, on one process, too, the last bit of a float32 may move a rounding to
    bfloat16, and gradients differ by .3 %.
    """
    model_dir = make_tiny_model(initializer_range=0.1)
    asked = (f"{CASES}:compiled_bits", 2, {"model_dir": str(model_dir)})
    [found] = run_on_ranks([asked], tmp_path)
    assert found.value == {"gradients": [True, True], "weights": [True, True]}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "raises 1",
            "step_error: rank {}: the step raised ValueError: this group is too much",
        ),
        (
            "raises 2",
            "step_error: rank {}: the step raised ValueError: this group is too much",
        ),
        ("nan 1", "nonfinite_gradient: the loss is nan"),
    ],
)
def test_what_fails_on_one_rank_is_skipped_by_all(kind: str, reason: str, answers: Answers) -> None:
    found = answers["trouble"][kind]
    assert len(set(found["reasons"])) == 1, "all ranks say the same"
    assert found["reasons"][0] in [reason.format(rank) for rank in range(3)]
    assert found["is_kept"]


def test_nothing_is_left_of_a_failure(answers: Answers) -> None:
    assert_near(answers["trouble"]["next"])
    assert answers["trouble"]["faulty"] == [3]


def test_a_state_is_refused_that_would_lie_on_several_disks_or_holds_nan_on_one_rank(
    answers: Answers,
) -> None:
    said = "HERE of rank 0 on THIS is not there for rank 1 on THIS"
    assert answers["trouble"]["apart"].startswith(said)
    assert answers["trouble"]["left"] == []
    assert set(answers["trouble"]["nan"]) == {"model.norm.weight"}, "on all ranks"


@pytest.mark.parametrize("kind", ["all", "adapter"])
def test_a_state_is_continued_by_any_number_of_ranks(kind: str, answers: Answers) -> None:
    directory, reading = answers[f"directory {kind}"]
    # By as many ranks bit by bit; by another number up to the order of sums.
    assert answers[f"same {kind}"] == {"step": 2.0, "then": 0.0, "after": 0.0}
    others = [rank_cases.load_and_go_on(None, str(directory / "first"), **reading)]
    if kind == "all":
        others += [answers["other all"], answers["of one"]]
        others.append(rank_cases.load_and_go_on(None, str(directory / "second"), **reading))
    for found in others:
        after = found.pop("after")
        assert found == {"step": 2.0, "then": 0.0}
        assert 0 <= after < 1e-3 * A_STEP


def test_the_first_rank_leads_the_others(
    answers: Answers, tiny_model_dir: Path, request: pytest.FixtureRequest
) -> None:
    led = answers["led"]
    assert led["reason"] == "bad_group"
    assert led["faulty"] == [7]
    assert led["step"] == 1
    assert led["held"] < 1 / (1 + last_rank(request)) + 0.01  # to score under other weights
    assert led["off"].pop("weights") < 0.01 * A_STEP
    assert all(far < 1e-6 for far in led["off"].values())
    trainer = make_trainer(str(tiny_model_dir), ALONE)
    trainer.load_state(answers["led to"])
    assert trainer.step_count == 1


def test_each_rank_reads_its_own_rows(answers: Answers, request: pytest.FixtureRequest) -> None:
    found = dict(answers["read"])
    shares = found.pop("shares")
    assert all(found.values()), found
    assert len(found) == 6
    # Its shard, a layer more, and what transformers has as Python objects.
    assert max(shares) < 1 / (1 + last_rank(request)) + 0.25, shares


@pytest.mark.parametrize("kind", PUBLICATIONS)
def test_versions_of_ranks_are_those_of_one_process(kind: str, answers: Answers) -> None:
    nums_sent, are_equal = zip(*answers[kind], strict=True)
    assert all(are_equal), are_equal
    assert nums_sent[1] == 2 * nums_sent[0] - 2 > 10  # a keyframe, and from the second on a delta


@pytest.mark.parametrize("how", DEATHS)
def test_a_rank_that_fails_ends_the_job_with_its_name(
    how: str, answers: Answers, request: pytest.FixtureRequest
) -> None:
    answer = answers[how]
    number = len(answer.errors)  # of those that ended badly, the last one is to blame
    assert number >= 1
    said = answer.found["says"]
    assert DEATHS[how].format(last_rank(request)) in said
    assert "cannot go on" in said
    assert ("lower learner.micro_batch_tokens" in said) == (how == "has no memory")
    # A collective's time, which is 5 s here, and what explaining takes.
    assert answer.found["after_s"] < 15


def test_a_rank_is_not_asked_for_what_it_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_images, "COLLECTIVE_S", 0.1)  # that nobody answers shows at once
    asking, asked = Pipe()
    image, base = memoryview(bytearray(b"new words")), memoryview(bytearray(b"old words"))
    rank = LocalRank(asking, {address_of(image): 1})
    block: tuple[int, int, WordBytes] = (0, len(image), 1)
    assert rank.code(image, base, [block]) == [code_block(base, image, block)]
    assert rank.hash(base, 4, range(3), b"") == hash_chunks(base, 4, range(3))
    assert not asked.poll()
    asked.close()
    assert rank.code(image, None, [block]) == [code_block(None, image, block)]


def test_rows_that_do_not_come_end_the_job_at_the_next_step(
    answers: Answers, request: pytest.FixtureRequest
) -> None:
    said = answers["rows"].found["says"]
    failure = "step: RankError: rows of a version: the copy has failed"
    assert f"cannot go on with step: rank {last_rank(request)}: {failure}" in said


def last_rank(request: pytest.FixtureRequest) -> int:
    size: int = request.node.callspec.params["answers"]
    return size - 1
