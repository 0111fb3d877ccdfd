"""AdamW with its moments in float32, in 8 bits, and in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echo.algo.losses import make_loss
from echo.core.errors import DataError
from echo.kernels.adamw_8bit import BLOCK
from echo.train.optimizer import KINDS, AdamW, OptimizerState
from echo.train.trainer import Trainer
from tests.train import rank_cases
from tests.train.forked_ranks import run_on_ranks
from tests.train.test_trainer import make_groups
from tests.train.trainers import fast_trainer

SHAPES = {"matrix": (6, 2 * BLOCK), "experts": (2, 3, BLOCK), "odd": (5, 7), "norm": (BLOCK,)}
STEP = {"learning_rate": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.01}

Shards = dict[str, torch.nn.Parameter]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_shards() -> Shards:
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES | {"empty": (0, BLOCK)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def take_steps(optimizer: AdamW, shards: Shards, first: int, last: int) -> None:
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        for shard in shards.values():
            shard.grad = torch.randn(shard.shape, generator=generator)
        optimizer.step(**STEP)  # type: ignore[arg-type]


def farthest(one: Shards, other: Shards) -> float:
    """How far two sets of weights are apart, in learning rates."""
    pairs = [(one[name].detach(), other[name].detach()) for name in SHAPES]
    return max(float((a - b).abs().max()) for a, b in pairs) / 1e-2


def continued(kind: OptimizerState, made_by: OptimizerState) -> tuple[Shards, Shards]:
    """Return weights after 10 steps of one optimizer, and after 5 steps each of two."""
    whole, cut = make_shards(), make_shards()
    optimizer = KINDS[made_by](whole)
    take_steps(optimizer, whole, 0, 5)
    state = {name: value.clone() for name, value in optimizer.tensors().items()}
    state["empty/step"] = torch.tensor(5.0)  # of a rank that has rows of it
    for name, shard in cut.items():
        shard.data.copy_(whole[name])
    take_steps(optimizer, whole, 5, 10)
    resumed = KINDS[kind](cut)
    resumed.load(state)
    take_steps(resumed, cut, 5, 10)
    return whole, cut


# ------------------------------------------------------------------------------------- the numbers


def test_all_kinds_do_what_torchs_adamw_does() -> None:
    wanted = make_shards()
    named = [wanted[name] for name in SHAPES]
    theirs = torch.optim.AdamW(named, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    for number in range(10):
        generator = torch.Generator().manual_seed(number)
        for shard in wanted.values():
            shard.grad = torch.randn(shard.shape, generator=generator)
        theirs.step()
    for kind in ("float32", "offloaded"):
        shards = make_shards()
        take_steps(KINDS[kind](shards), shards, 0, 10)
        assert farthest(shards, wanted) == 0


@pytest.mark.slow
def test_moments_of_8_bits_are_near_those_of_32() -> None:
    exact, coded = make_shards(), make_shards()
    take_steps(KINDS["float32"](exact), exact, 0, 10)
    take_steps(KINDS["8bit"](coded), coded, 0, 10)
    assert 0 < farthest(coded, exact) < 0.5  # of the ten that ten steps go
    for name in ("odd", "norm"):  # have no rows of blocks
        assert torch.allclose(coded[name], exact[name], rtol=0, atol=1e-6)


def test_a_weight_without_a_gradient_rests() -> None:
    shards = make_shards()
    before = shards["odd"].detach().clone()
    optimizer = AdamW(shards)
    shards["norm"].grad = torch.ones(BLOCK)
    optimizer.step(**STEP)  # type: ignore[arg-type]
    assert torch.equal(shards["odd"], before)
    assert float(optimizer.tensors()["odd/step"]) == 0
    assert float(optimizer.tensors()["norm/step"]) == 1


def moments_of(kind: OptimizerState, shards: Shards) -> dict[str, Tensor]:
    """The state of an optimizer of these shards that continues another one's."""
    theirs = {name: torch.nn.Parameter(torch.zeros(shard.shape)) for name, shard in shards.items()}
    first = AdamW(theirs)
    take_steps(first, theirs, 0, 1)
    optimizer = KINDS[kind](shards)
    optimizer.load(first.tensors())
    return optimizer.tensors()


def num_bytes(moments: dict[str, Tensor], device: str) -> int:
    return sum(value.nbytes for value in moments.values() if value.device.type == device)


def test_moments_lie_where_they_are_said_to() -> None:
    numbers = sum(shard.numel() for shard in make_shards().values())
    meta = {name: torch.nn.Parameter(shard.to("meta")) for name, shard in make_shards().items()}
    assert 8 * numbers <= num_bytes(moments_of("float32", meta), "meta") < 8.1 * numbers
    offloaded = moments_of("offloaded", meta)
    assert num_bytes(offloaded, "meta") == 0
    assert 8 * numbers <= num_bytes(offloaded, "cpu") < 8.1 * numbers


@pytest.mark.slow
def test_moments_of_8_bits_take_a_quarter() -> None:
    shards = {"matrix": torch.nn.Parameter(torch.zeros(64, 2 * BLOCK))}
    taken = num_bytes(moments_of("8bit", shards), "cpu")
    assert taken == pytest.approx(2.125 * 64 * 2 * BLOCK, abs=4)


# --------------------------------------------------------------------------------------- its state


@pytest.mark.parametrize("kind", ["float32", "offloaded"])
@pytest.mark.parametrize("made_by", ["float32", "offloaded"])
def test_a_state_is_continued_bit_by_bit(kind: OptimizerState, made_by: OptimizerState) -> None:
    whole, cut = continued(kind, made_by)
    assert farthest(whole, cut) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_state_of_8_bits_is_continued_by_all_kinds(kind: OptimizerState) -> None:
    whole, cut = continued(kind, "8bit")
    assert farthest(whole, cut) == 0 if kind == "8bit" else 0 < farthest(whole, cut) < 0.5
    whole, cut = continued("8bit", kind)
    assert farthest(whole, cut) < 0.5


def test_nothing_is_the_state_before_the_first_step() -> None:
    shards, fresh = make_shards(), make_shards()
    optimizer = AdamW(shards)
    assert optimizer.tensors() == {}
    take_steps(optimizer, shards, 0, 3)
    optimizer.load({})
    assert optimizer.tensors() == {}
    for name, shard in shards.items():
        shard.data.copy_(fresh[name])
    take_steps(optimizer, shards, 0, 2)
    take_steps(AdamW(fresh), fresh, 0, 2)
    assert farthest(shards, fresh) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"other/exp_avg": torch.zeros(3)},
        {"norm/exp_avg": torch.zeros(BLOCK + 1)},
        {"norm/momentum": torch.zeros(BLOCK)},
    ],
)
def test_the_state_of_another_model_is_refused(wrong: dict[str, Tensor]) -> None:
    with pytest.raises(DataError, match="fits no parameter of this model"):
        AdamW(make_shards()).load(wrong)


# ---------------------------------------------------------------------------------- in the trainer


def make_trainer(model_dir: Path, kind: OptimizerState) -> Trainer:
    return fast_trainer(model_dir, optimizer_state=kind, loss=make_loss("dapo"))


def learnt(trainer: Trainer, num_steps: int) -> float:
    """Gain of the good rollouts' log-probability over the bad ones', in nats per token."""
    groups = make_groups(6)

    def preference() -> float:
        total = 0.0
        for group, scores in zip(groups, trainer.forward(groups), strict=True):
            mean = sum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)
            for rollout, row in zip(group.rollouts, scores, strict=True):
                total += (rollout.reward - mean) * float(row.mean())
        return total

    before = preference()
    for _ in range(num_steps):
        trainer.step(groups)
    return preference() - before


@pytest.mark.slow
def test_8_bits_learn_what_32_do(tiny_model_dir: Path) -> None:
    exact = learnt(make_trainer(tiny_model_dir, "float32"), 8)
    assert exact > 0.1
    assert learnt(make_trainer(tiny_model_dir, "offloaded"), 8) == exact
    assert learnt(make_trainer(tiny_model_dir, "8bit"), 8) == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("kind", ["offloaded", "8bit"])
@pytest.mark.matrix
@pytest.mark.slow
def test_any_number_of_ranks_goes_on(
    kind: OptimizerState,
    tiny_model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    made: Callable[[str], Path] = tmp_path_factory.mktemp
    options = {"model_dir": str(tiny_model_dir), "optimizer_state": kind}
    (tmp_path / "first").mkdir()
    first = {"directory": str(tmp_path / "first"), **options}
    reading = {**first, "wanted": str(tmp_path)}
    saved, same, more = run_on_ranks(
        [
            ("tests.train.rank_cases:save_and_go_on", 2, first),
            ("tests.train.rank_cases:load_and_go_on", 2, reading),
            ("tests.train.rank_cases:load_and_go_on", 3, reading),
        ],
        made("ranks"),
    )
    assert not saved.errors
    assert same.value == {"step": 2.0, "then": 0.0, "after": 0.0}
    for found in (more.value, rank_cases.load_and_go_on(None, **reading)):
        after = found.pop("after")
        assert found == {"step": 2.0, "then": 0.0}
        assert 0 <= after < 0.05 * 3e-4


@pytest.mark.matrix
@pytest.mark.slow
def test_ranks_make_the_step_of_one_process_in_8_bits(tiny_model_dir: Path, tmp_path: Path) -> None:
    options = {"model_dir": str(tiny_model_dir)}
    [answer] = run_on_ranks([("tests.train.rank_cases:in_8_bits", 2, options)], tmp_path)
    first, second = answer.value
    assert first.pop("weights") < 0.01 * 3e-4
    # A rounding of the first gradient may have moved a moment to the next code.
    assert second.pop("weights") < 0.1 * 3e-4
    assert second.pop("scores") < 1e-5
    for off in (first, second):
        assert off.pop("update") < 1e-3
        assert max(off.values()) < 1e-6
