"""A worker leaves by itself, and its machine is given back."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from echo.config.load import parse_config
from echo.roles.learner import GrantsStopped
from echo.roles.members import RunEnded
from echo.roles.worker.departure import ReleaseTerms
from echo.runtime.worker.release import release, terms_of
from tests.promises.conftest import MakeWorld

LOG = logging.getLogger("test.retirement")
AT_ONCE = ReleaseTerms(standby_s=0.0, learner_gone_s=0.0)


def run_release(command: str, *, timeout_s: float = 30.0) -> bool:
    return asyncio.run(release(command, reason="enough", timeout_s=timeout_s, log=LOG))


def test_a_command_confirms_by_its_success_and_what_it_says_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    began = time.monotonic()
    assert run_release('echo "gone: $ECHO_RELEASE_REASON"; echo and more >&2; sleep 40 &')
    assert time.monotonic() - began < 30, "what it leaves in the background is not waited for"
    assert "on_release: gone: enough" in caplog.text
    assert "on_release: and more" in caplog.text
    assert not run_release("exit 3")
    assert "ended with code 3" in caplog.text
    assert "may go on billing" in caplog.text


def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    assert not run_release(f"(sleep 60; touch {tmp_path}/late) & sleep 60", timeout_s=0.3)
    assert time.monotonic() - began < 30
    assert "was killed" in caplog.text


def test_a_command_that_cannot_be_started_leaves_the_machine_to_the_operator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full() -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert not run_release("true")
    assert "on_release could not be started" in caplog.text
    assert "No usable temporary directory found: the machine may go on billing" in caplog.text


@pytest.mark.parametrize(("after_s", "gone_s"), [(60, 60), (1, 10), (7200, 300)])
def test_a_short_silence_is_no_reason_and_giving_up_comes_later(after_s: int, gone_s: int) -> None:
    config = parse_config({}, [f"worker.release_after_s={after_s}"])
    assert terms_of(config.worker, config.network) == ReleaseTerms(
        standby_s=after_s, learner_gone_s=gone_s
    )


# --- on virtual time, with a command that takes half a second -------------------------------------


class Machines:
    """What release commands have done, and which of them fail."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: list[str] = []

    async def release(self, command: str, *, reason: str, log: logging.Logger) -> bool:
        self.begun.append(command)
        await asyncio.sleep(0.5)
        self.done.append(command)
        return command != "fail"


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    made = Machines()
    monkeypatch.setattr("echo.runtime.worker.release.release", made.release)
    return made


LEAVES = {"release_after_s": 3600.0, "on_release": "w1"}
OVER = "the run is finished", ""


@pytest.mark.slow
def test_a_worker_on_standby_gives_its_machine_back_and_costs_while_that_is_not_confirmed(
    make_world: MakeWorld, machines: Machines
) -> None:
    world = make_world(train_s=1.0, sync={"max_staleness": 6})
    world.learner()
    activation = world.node("learner").costs.activation
    activation.settings = replace(activation.settings, min_dwell_s=0.5)
    world.worker("w1", worker={"price_per_h": 0.2})
    terms = {"release_after_s": 3.0, "on_release": "fail"}
    world.worker("w2", worker={"price_per_h": 5.0, **terms})
    world.run_until(lambda: world.end("w2"))
    assert "on standby for" in (world.end("w2") or ("",))[0]
    assert machines.done == ["fail"]
    world.run(2.0)
    assert world.rows[-1]["cost/per_hour"] == pytest.approx(0.2 + 5.0)
    assert world.rows[-1]["cost/unconfirmed_per_hour"] == 5.0
    assert world.is_alive("w1")


@pytest.mark.parametrize("what", ["run ends before", "run ends within", "interrupt"])
def test_a_machine_is_given_back_once_whatever_comes_in_between(
    make_world: MakeWorld, machines: Machines, what: str
) -> None:
    world = make_world()
    world.learner()
    world.report("learner", GrantsStopped())
    world.worker("w1", worker=LEAVES)
    worker = world.node("w1")
    if what == "run ends before":
        worker.role.departure.finish = lambda **_: []
    world.run_until(lambda: worker.role.is_admitted)
    worker.role.departure.terms = AT_ONCE
    world.run_until(lambda: worker.role.is_leaving)
    if what != "run ends before":
        world.run_until(lambda: machines.begun)
    if what == "interrupt":
        world.interrupt("w1")
    else:
        world.report("learner", RunEnded("the run is finished"))
    world.run_until(lambda: world.end("w1"))
    assert world.end("w1") == (("interrupted", "") if what == "interrupt" else OVER)
    assert machines.begun == machines.done == ["w1"]


def test_the_machine_is_given_back_at_the_end_of_the_run_and_not_after_an_interrupt(
    make_world: MakeWorld, machines: Machines
) -> None:
    world = make_world()
    for name in ("stopped", "w1"):
        world.worker(name, worker={"on_release": name})
    world.interrupt("stopped")
    world.run_until(lambda: world.end("stopped"))
    assert world.end("stopped") == ("interrupted", "")
    world.learner(run={"max_steps": 1})
    world.run_until(lambda: world.end("w1"))
    assert (world.end("w1"), machines.done) == (OVER, ["w1"])


def test_a_worker_without_its_learner_gives_its_machine_back(
    make_world: MakeWorld, machines: Machines
) -> None:
    world = make_world()
    world.worker("w1", worker={"release_after_s": 10.0, "on_release": "w1"})
    world.run_until(lambda: world.end("w1"))
    assert 10.0 <= world.now < 12.0
    assert "without the learner for" in (world.end("w1") or ("",))[0]
    assert machines.done == ["w1"]
