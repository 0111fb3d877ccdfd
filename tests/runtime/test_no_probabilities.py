"""A model that gives no probabilities: the group ends, the worker lives, the learner looks why."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from echo.core.rollout import Group, PolicyVersion
from echo.engine.engine import UNWATCHED, Completion, Request, Sampling, Watcher
from echo.train.step import StepError
from tests.promises.conftest import MakeWorld
from tests.promises.world import StubEngine, StubTrainer, World

FEW = {"batch": {"max_zero_signal_batches": 3}}
"""Six groups in a row of which nothing can be learned end the run."""


def spoil_samples(
    patch: pytest.MonkeyPatch,
    is_spoilt: Callable[[StubEngine, int], bool],
    reason: Any = "nonfinite",
) -> None:
    """Have engines give NaN for a group; with another reason they do not notice, or do not say."""
    generate = StubEngine.generate

    def spoilt(
        self: StubEngine,
        requests: Sequence[Request],
        sampling: Sampling,
        watcher: Watcher = UNWATCHED,
        **_: Any,
    ) -> list[Completion]:
        found = []
        for request in requests:
            if not is_spoilt(self, int(request.request_id.split(".")[0])):
                found += generate(self, [request], sampling, watcher)
                continue
            assert self.installed is not None
            version = np.array([[self.installed.lineage, self.installed.step]], np.int32)
            ids, nan = np.array([3], np.int32), np.array([np.nan], np.float32)
            found.append(Completion(request.request_id, ids, nan, reason, version))
            watcher.on_completion(found[-1])
        return found

    patch.setattr(StubEngine, "generate", spoilt)


def spoil_weights(patch: pytest.MonkeyPatch, *, step: int) -> None:
    """Have the weights hold NaN from a step on."""
    tensors = StubTrainer.tensors

    def spoilt(self: StubTrainer) -> dict[str, torch.Tensor]:
        factor = torch.nan if self.step_count >= step else 1.0
        return {name: tensor * factor for name, tensor in tensors(self).items()}

    patch.setattr(StubTrainer, "tensors", spoilt)


def failure(world: World) -> str:
    """Let the learner come to its end; return why it has failed."""
    world.run_until(lambda: world.end("learner"))
    how, why = world.end("learner") or ("", "")
    assert how == "failed"
    return why


def test_a_group_ends_with_its_reason_after_one_attempt_and_its_worker_goes_on(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_samples(monkeypatch, lambda engine, group: group == 1)
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 3)
    assert world.is_alive("w1")
    assert world.ends_of(1) == ["bad_logprobs"]
    assert [r["attempt"] for r in world.records("granted") if r["group"] == 1] == [0]
    assert any(
        re.search(r"group 1 failed on w1: bad_logprobs: the model gave .* nan .* under v0: ", note)
        for note in world.notes("learner")
    )
    looked = [note for note in world.notes("learner") if "the weights of v" in note]
    assert looked == [looked[0]]
    assert "are finite: the fault is in the worker that cannot sample" in looked[0]
    world.audit()


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["nonfinite", "length"])
def test_a_worker_that_samples_nothing_else_is_set_aside_and_the_others_go_on(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Also where it does not say so itself, and its results are refused."""
    world = make_world(**FEW)
    bad: list[StubEngine] = []
    spoil_samples(monkeypatch, lambda engine, group: engine in bad, reason)
    world.learner()
    world.worker("w1")
    bad.append(world._process("w1").engine)  # type: ignore[arg-type]
    world.worker("w2")
    world.run_until(lambda: any("w1 is set aside" in note for note in world.notes("learner")))
    before = world.step
    world.run_until(lambda: world.step >= before + 5)
    assert world.is_alive("w1")
    world.audit()


@pytest.mark.parametrize("reason", ["nonfinite", "length"])
def test_a_run_whose_workers_sample_nothing_else_ends_and_says_so(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    spoil_samples(monkeypatch, lambda engine, group: True, reason)
    world = make_world(**FEW)
    world.learner()
    world.worker("w1")
    why = failure(world)
    assert re.match(r"6 of the last 6 groups could not be finished \(6 bad_logprobs\)", why)
    last = {
        "nonfinite": "the model gave a log-probability of nan",
        "length": "its result was refused",
    }
    assert re.search(rf"The last one, group \d+ on w1: {last[reason]}", why)


EARLIER = "v2 is the newest version that has sampled a whole group.*Write the name of a checkpoint"
OTHER = r"start from other weights \(model\.name, learner\.init_from\)$"


@pytest.mark.parametrize(
    ("step", "is_refused", "advice"), [(3, False, EARLIER), (3, True, EARLIER), (0, False, OTHER)]
)
def test_weights_that_hold_nan_end_the_run_with_their_version_and_are_not_saved(
    make_world: MakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    is_refused: bool,
    advice: str,
) -> None:
    """Whether engines sample from them in vain, or do not take them."""
    spoil_weights(monkeypatch, step=step)
    bad = PolicyVersion(1, step)
    spoil_samples(monkeypatch, lambda engine, group: (engine.installed or bad) >= bad)
    world = make_world(checkpoint={"interval_steps": 100})
    world.learner()
    world.worker("w1")
    for refused in range(3, 9) if is_refused else ():
        world.refuse_version("w1", refused)
    why = failure(world)
    assert re.search(r"^v\d of .* has NaN or infinity in 1 of 1 tensors, such as w: nothing", why)
    assert re.search(advice, why, re.DOTALL)
    assert not world.records("checkpoint")


@pytest.mark.parametrize("max_steps", [1000, 3])
def test_a_checkpoint_that_is_due_where_weights_hold_nan_is_not_written_and_ends_the_run(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, max_steps: int
) -> None:
    """Also where that step is the last one."""
    spoil_weights(monkeypatch, step=3)
    world = make_world(checkpoint={"interval_steps": 1})
    world.learner(run={"max_steps": max_steps})
    world.worker("w1")
    why = failure(world)
    assert re.search(r"^v3 of .* has NaN or infinity in 1 of 1 tensors, such as w: nothing", why)
    assert [row["step"] for row in world.records("checkpoint")] == [1, 2]
    assert world.step == 3
    monkeypatch.undo()
    world.learner(run={"max_steps": 5})
    world.worker("w2")
    world.run_until(lambda: world.end("learner") == ("finished", ""))


def test_steps_that_fail_for_weights_that_hold_nan_say_so(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as where memory of the learner's is damaged after its last version was published."""
    step = StubTrainer.step

    def fail(self: StubTrainer, groups: Sequence[Group]) -> Any:
        if self.step_count < 3:
            return step(self, groups)
        self._weights = self._weights * np.nan
        raise StepError("the loss is nan", reason="nonfinite_gradient")

    monkeypatch.setattr(StubTrainer, "step", fail)
    world = make_world()
    world.learner()
    world.worker("w1")
    why = failure(world)
    assert re.search(r"^v3 of .* has NaN or infinity in 1 of 1 tensors", why)
    assert world.records("checkpoint")[-1]["step"] == 2
