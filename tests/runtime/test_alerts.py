"""Alerts and rollbacks of a learner: each caused, sent, and bounded."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo.config.load import parse_config, resolved
from echo.core.monitoring.alerts import Alert
from echo.core.monitoring.metrics import Counters
from echo.core.rollout import Group
from echo.runtime.learner import alerts as module
from echo.runtime.learner.alerts import MAX_QUEUED, Alerts, post_json
from echo.runtime.learner.saving.resume import find_divergence
from echo.runtime.threads import ThreadPools
from echo.tasks.processes.main import CallAnswer
from echo.train.step import StepError
from tests.promises.conftest import MakeWorld
from tests.promises.world import StubHost, StubTrainer, World
from tests.runtime.test_no_probabilities import spoil_samples, spoil_weights

NO_SPACE = SimpleNamespace(free=2**20)


def told(world: World) -> list[str]:
    """Return what the learner has logged of alerts."""
    return [text for text in world.notes("learner") if text.startswith("alert ")]


def run_to_end(world: World) -> tuple[str, str]:
    world.run_until(lambda: world.end("learner"))
    found = world.end("learner")
    assert found is not None
    return found


# --- each condition, caused -----------------------------------------------------------------------


def test_an_entropy_below_its_floor_is_told_and_training_goes_on(make_world: MakeWorld) -> None:
    world = make_world(alerts={"min_entropy": 0.1})
    world.metrics_of = lambda step: {"entropy/mean": 0.3 / step}
    world.learner(run={"max_steps": 8})
    world.worker("w1")
    assert run_to_end(world) == ("finished", "")
    [line] = told(world)
    assert line.startswith("alert entropy: the median of entropy/mean in the last 5 steps")
    assert world.rows[-1]["count/alerts/entropy"] == 1


def test_a_collapse_of_the_reward_is_told(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reward(_: StubHost, call: Any) -> CallAnswer:
        return CallAnswer([1.0 if world.step < 10 else 0.0] * len(call.texts))

    world = make_world(alerts={"reward_drop": 0.4})
    monkeypatch.setattr(StubHost, "_answer", reward)
    world.learner(run={"max_steps": 15})
    world.worker("w1")
    assert run_to_end(world) == ("finished", "")
    [line] = told(world)
    assert re.match(r"alert reward: the mean reward of the last 10 steps is 0.\d, the best", line)


def test_a_stall_is_told_with_what_the_learner_waits_for(make_world: MakeWorld) -> None:
    world = make_world(alerts={"stall_s": 20.0})
    world.learner(run={"max_steps": 3})
    world.run(30.0)
    [line] = told(world)
    assert re.match(r"alert stall: no optimizer step for 2\d(\.\d)?s: waiting for .+", line)
    world.worker("w1")
    assert run_to_end(world) == ("finished", "")
    assert told(world)[1:] == [told(world)[1]]
    assert told(world)[1].startswith("alert stall cleared: step 1 was made after ")


def test_costs_and_a_full_disk_are_told(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: NO_SPACE)
    limits = {"max_cost_per_h": 1.0, "max_cost": 0.001, "min_free_disk_bytes": 2**30}
    world = make_world(alerts=limits)
    world.learner(learner={"price_per_h": 3.0})
    world.run(20.0)
    assert [line.partition(":")[0] for line in told(world)] == [
        "alert cost_per_h", "alert disk", "alert cost_total",
    ]  # fmt: skip


def test_a_step_that_is_not_finite_is_told_and_the_next_one_clears_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, failed = StubTrainer.step, list[int]()

    def fail_once(self: StubTrainer, groups: Sequence[Group]) -> Any:
        if self.step_count == 2 and not failed:
            failed.append(1)
            raise StepError("the loss is nan", reason="nonfinite_gradient")
        return step(self, groups)

    monkeypatch.setattr(StubTrainer, "step", fail_once)
    world = make_world(alerts={"on_divergence": "rollback"})
    world.learner(run={"max_steps": 5})
    world.worker("w1")
    assert run_to_end(world) == ("finished", "")
    assert told(world) == [
        "alert nonfinite: step 3 failed: the loss is nan",
        "alert nonfinite cleared: step 3 was made",
    ]
    assert not world.records("rollback")


# --- what a divergence does -----------------------------------------------------------------------


def test_a_divergence_ends_the_run_where_that_is_asked_for(make_world: MakeWorld) -> None:
    world = make_world(alerts={"min_ess": 0.5, "on_divergence": "stop"})
    world.metrics_of = lambda step: {"ess": 1.0 if step < 7 else 0.1}
    world.learner(run={"max_steps": 100})
    world.worker("w1")
    how, why = run_to_end(world)
    assert (how, world.step) == ("failed", 9)
    assert re.match(
        r"the run has diverged at step 9: the median of ess .*min_ess = 0.5; it is saved", why
    )
    assert world.records("checkpoint")[-1]["step"] == 9
    # A launcher that starts the learner again gets the same error, until a user resumes the run.
    ended = find_divergence(world.run_dir)
    assert ended is not None
    assert str(ended).startswith(why)
    assert "--resume does" in str(ended)
    latest = world.run_dir / "checkpoints" / "latest"
    newest = latest.read_text()
    latest.write_text("step_000008")
    assert find_divergence(world.run_dir) is None
    latest.write_text(newest)
    world.learner(run={"max_steps": 100})
    assert find_divergence(world.run_dir) is None


def test_a_rollback_resumes_before_the_trouble_in_a_new_lineage_and_is_audited(
    make_world: MakeWorld,
) -> None:
    world = make_world(
        alerts={"min_ess": 0.5, "on_divergence": "rollback", "max_rollbacks": 1},
        checkpoint={"interval_steps": 2, "keep_last": 4},
    )
    world.metrics_of = lambda step: {"ess": 1.0 if step < 7 else 0.1}
    world.learner(run={"max_steps": 100})
    world.worker("w1")
    how, why = run_to_end(world)
    assert how == "failed"
    assert why.startswith("rollback 1 of 1, from step 9 to the checkpoint of step 4, since the run")
    [record] = world.records("rollback")
    assert (record["step"], record["to_step"], record["number"]) == (9, 4, 1)
    assert world.is_alive("w1"), "nodes wait for the learner"
    world.metrics_of = lambda step: {"ess": 1.0}
    world.learner(run={"max_steps": 9})
    assert run_to_end(world) == ("finished", "")
    assert [each["fork_step"] for each in world.records("lineage")] == [0, 4]
    # A run that diverges again has no rollback left.
    world.metrics_of = lambda step: {"ess": 0.1}
    world.learner(run={"max_steps": 100})
    world.worker("w2")
    _, why = run_to_end(world)
    assert why.startswith("the run has diverged at step 14: ")
    assert len(world.records("rollback")) == 1


def test_weights_that_hold_nan_are_rolled_back(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_weights(monkeypatch, step=5)
    world = make_world(
        alerts={"on_divergence": "rollback"}, checkpoint={"interval_steps": 2, "keep_last": 2}
    )
    world.learner(run={"max_steps": 9})
    world.worker("w1")
    _, why = run_to_end(world)
    assert re.match(r"rollback 1 of 2, from step 6 to the checkpoint of step 4, since v6 of", why)
    assert told(world)[0].startswith("alert nonfinite: v6 of ")
    monkeypatch.undo()
    world.learner(run={"max_steps": 9})
    assert run_to_end(world) == ("finished", "")


def test_nan_before_the_first_checkpoint_begins_the_run_again(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_weights(monkeypatch, step=3)
    spoil_samples(monkeypatch, lambda engine, group: engine.installed.step >= 3)  # type: ignore[union-attr]
    world = make_world(alerts={"on_divergence": "rollback"}, checkpoint={"interval_steps": 100})
    world.learner(run={"max_steps": 6})
    world.worker("w1")
    _, why = run_to_end(world)
    assert "to the checkpoint of step 0, since v" in why


def test_without_a_checkpoint_before_the_trouble_the_run_ends(make_world: MakeWorld) -> None:
    world = make_world(
        alerts={"min_ess": 0.5, "on_divergence": "rollback"},
        checkpoint={"interval_steps": 1, "keep_last": 1},
    )
    world.metrics_of = lambda step: {"ess": 1.0 if step < 7 else 0.1}
    world.learner(run={"max_steps": 100})
    world.worker("w1")
    _, why = run_to_end(world)
    assert why.startswith("the run has diverged at step 9: ")
    assert world.notes_of("no checkpoint up to step 4 is kept")
    assert not world.records("rollback")


# --- command and webhook --------------------------------------------------------------------------


def make_alerts(run_dir: Path, **section: Any) -> Alerts:
    """Return alerts without a learner."""
    role: Any = SimpleNamespace(step=3, counters=Counters())
    progress: Any = SimpleNamespace(curves=SimpleNamespace(rewards=()))
    costs: Any = None
    stalls: Any = None
    return Alerts(
        parse_config({"alerts": section}).alerts, role, progress, costs, stalls,
        run_dir=run_dir, pool=ThreadPools().pool("alerts"), clock=lambda: 0.0,
        time_of_day=lambda: 12.5, log=logging.getLogger("test.alerts"),
    )  # fmt: skip


def send(alerts: Alerts, *found: Alert) -> None:
    """Raise alerts, and wait until they are sent."""

    async def main() -> None:
        task = asyncio.create_task(alerts.send())
        alerts._raise(list(found))
        await alerts.flush()
        task.cancel()

    asyncio.run(main())


STALL = Alert(kind="stall", step=3, text="no step for\x1b[31m w1")
CLEARED = Alert(kind="stall", step=4, text="cleared: a step", is_cleared=True)


def test_the_command_reads_the_alert_from_its_environment(tmp_path: Path) -> None:
    names = ("RUN", "KIND", "STATE", "STEP", "TEXT")
    line = "|".join(f"$ECHO_ALERT_{name}" for name in names)
    alerts = make_alerts(tmp_path, command=f'echo "{line}" >> {tmp_path}/out')
    send(alerts, STALL, CLEARED)
    assert (tmp_path / "out").read_text().splitlines() == [
        f"{tmp_path.name}|stall|raised|3|no step for\\x1b[31m w1",
        f"{tmp_path.name}|stall|cleared|4|cleared: a step",
    ]


def test_a_command_that_fails_or_hangs_is_named_and_the_next_alert_goes_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(make_alerts(tmp_path, command="echo no such channel; exit 3"), STALL)
    assert "alerts.command ended with code 3: no such channel" in caplog.text
    monkeypatch.setattr(module, "SEND_S", 0.2)
    hangs = f"[ $ECHO_ALERT_STATE = cleared ] && touch {tmp_path}/next || sleep 60"
    send(make_alerts(tmp_path, command=hangs), STALL, CLEARED)
    assert "was killed" in caplog.text


class Inbox(BaseHTTPRequestHandler):
    """Keeps what is posted, or refuses it."""

    bodies: list[dict[str, Any]]
    code: int

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def inbox() -> Iterator[tuple[type[Inbox], str]]:
    handler = type("OneInbox", (Inbox,), {"bodies": [], "code": 204})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}/T0K3N"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_webhook_gets_json_and_its_url_is_in_no_log_and_no_saved_settings(
    tmp_path: Path, inbox: tuple[type[Inbox], str], caplog: pytest.LogCaptureFixture
) -> None:
    handler, url = inbox
    alerts = make_alerts(tmp_path, webhook=url)
    send(alerts, STALL)
    text = f"{tmp_path.name}: alert stall raised at step 3: no step for\\x1b[31m w1"
    [body] = handler.bodies
    assert body == {
        "text": text, "run": tmp_path.name, "kind": "stall", "state": "raised", "step": 3,
        "at": 12.5,
    }  # fmt: skip
    handler.code = 404
    send(make_alerts(tmp_path, webhook=url), CLEARED)
    assert "alerts.webhook has not taken the alert stall: HTTP Error 404" in caplog.text
    send(make_alerts(tmp_path, webhook="http://127.0.0.1:9/T0K3N"), STALL)
    assert os_error(errno.ECONNREFUSED) in caplog.text
    assert "T0K3N" not in caplog.text
    config = parse_config({"alerts": {"webhook": url}})
    assert "T0K3N" not in json.dumps(resolved(config))


def os_error(number: int) -> str:
    return f"[Errno {number}]"


def test_a_url_that_is_none_is_a_fault_and_no_exception() -> None:
    assert post_json("http://[", b"{}")


def test_more_alerts_than_can_be_sent_are_counted_and_the_newest_kept(tmp_path: Path) -> None:
    alerts = make_alerts(tmp_path, command="true")
    asyncio.run(_overflow(alerts))
    counts = alerts._role.counters.as_dict()
    assert counts == {"alerts/stall": MAX_QUEUED + 2, "alerts/not_sent": 2}


async def _overflow(alerts: Alerts) -> None:
    alerts._raise([STALL] * (MAX_QUEUED + 2))
