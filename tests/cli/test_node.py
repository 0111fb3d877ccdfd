from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import echo.engine.model  # noqa: F401 -- torch, or whichever dry run comes first is charged with it
from echo.cli.commands import node as node_module
from echo.cli.commands import quickstart
from echo.cli.commands.node import configuration_of, main, run_rank, show_status, start_again
from echo.cli.output import make_log
from echo.cli.parsers import node_parser
from echo.config.load import load_config, save_resolved
from echo.core.errors import ConfigError, DivergedError
from echo.core.monitoring.metrics import WorkerView
from echo.net.curve import CurveKeys, KeyPair
from echo.net.transport import with_key, without_key
from echo.net.zmq import ZmqTransport
from echo.runtime.identity import Join
from echo.ui.worker_status import StatusLine
from tests.records.rows import write_ledger
from tests.ui.terminals import Terminal

JOIN = f"tcp://127.0.0.1:9#{'k' * 43}.{'s' * 22}.{'f' * 22}"


@pytest.fixture(autouse=True)
def _no_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHO_JOIN", raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    # By its form a path: the hub is not asked for it.
    path.write_text(
        f'[run]\ndir = "{tmp_path}"\n[model]\nname = "./nowhere"\n[worker]\nconnect = "tcp://a:1"\n'
    )
    return path


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--role", "worker", "--resume"], "--resume is for the learner; a worker"),
        (["--role", "relay", "--resume-or-begin"], "--resume-or-begin is for the learner; a relay"),
        (["--role", "relay", "--init-from", "x"], "--init-from is for the learner; a relay"),
        (["--role", "worker", "--no-report"], "--no-report is for the learner; a worker"),
        (["--role", "learner", "--yes"], "--yes accepts changes to a run that is resumed"),
        (["--role", "learner"], "gsm8k.toml is one to start from.\n"),
        (["--role", "worker"], "start from. Without one a worker needs the run's ECHO_JOIN"),
        (["--role", "learner", "--config", "missing.toml"], "missing.toml: cannot be read"),
    ],
)
def test_a_wrong_line_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert complaint in capsys.readouterr().err


def test_a_missing_model_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run("--role", "learner", "--config", config, "--set", "ui.live=off")
    assert code == 3
    err = capsys.readouterr().err
    assert err.startswith("error: model.name = './nowhere': no such directory")
    assert not (config.parent / "run").exists()


def test_weights_may_lie_in_a_directory_whose_name_is_a_number(config: Path) -> None:
    line = ["--role", "learner", "--config", str(config), "--init-from", "100"]
    assert configuration_of(node_parser().parse_args(line)).learner.init_from == "100"


def test_a_directory_that_is_no_model_is_named(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--role", "learner", "--config", config, "--set", f"model.name={config.parent}"]
    assert run(*line) == 3
    assert f"{config.parent} has no config.json; name the dir" in capsys.readouterr().err


def test_one_gpu_for_several_processes_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = load_config(config, ["learner.device=cuda:1"])
    with pytest.raises(ConfigError, match='"cuda:1" names one GPU for 2 processes'):
        run_rank(given, resume=False, has_report=False)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        (f"model.name={'x' * 5000}", "cannot be looked at: File name too long"),
        ("model.name=~nobody-of-this-name/x", "no such directory (looked at "),
        (
            "model.name=a\u202e",
            "no directory or cached model here, and that is no id of a model on the hub",
        ),
        ("learner.listen=tcp://" + "a" * 64 + ":1", "check the host and the port"),
    ],
)
def test_a_name_that_leads_nowhere_is_told(
    config: Path, capsys: pytest.CaptureFixture[str], override: str, complaint: str
) -> None:
    line = ["--role", "learner", "--config", config, "--dry-run", "--set", "task.kind=addition"]
    line += ["--set", "learner.listen=tcp://127.0.0.1:0", "--set", override]
    assert run(*line) == 2
    out, err = capsys.readouterr()
    assert complaint in out + err


def test_a_number_of_processes_is_one(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert run("--role", "learner", "--config", config, "--dry-run") == 2
    assert "WORLD_SIZE = 'many' in the environment is no number" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["relay.listen", "learner.listen", "agent.listen"])
def test_a_port_in_use_is_named_before_anything_is_touched(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("ECHO_JOIN", JOIN)
    model = config.parent / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    role = key.partition(".")[0].replace("agent", "worker")
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        code = run("--role", role, "--config", config, "--set", f"model.name={model}",
                   "--set", f"{key}={address}")  # fmt: skip
    said = capsys.readouterr().err
    assert code == 4, said
    assert f"cannot listen on {address}: " in said
    assert "already in use: another process listens there; stop it or choose another port" in said
    assert not (config.parent / "run").exists()


def test_a_dry_run_starts_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(config.parent.iterdir())
    line = ["--role", "worker", "--config", config, "--dry-run"]
    assert run(*line, "--set", "security.curve=false") == 0
    assert "tcp://a:1" in capsys.readouterr().out
    assert list(config.parent.iterdir()) == before


def test_there_must_be_something_to_resume(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--role", "learner", "--config", config, "--resume") == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_a_resume_prints_the_difference_and_refuses_what_is_not_safe(
    config: Path, capsys: pytest.CaptureFixture[str], model_dir: Path
) -> None:
    run_dir = config.parent / "run"
    run_dir.mkdir()
    save_resolved(load_config(config, [], "learner"), run_dir / "config.json")
    changes = ["--set", "run.max_steps=7", "--set", "batch.group_size=3"]
    assert run("--role", "learner", "--config", config, "--resume", *changes) == 2
    err = capsys.readouterr().err
    assert "safe   run.max_steps: 100 -> 7" in err
    assert "UNSAFE batch.group_size: 8 -> 3" in err
    assert "the change of batch.group_size is not safe" in err
    # What the directory says of itself is a configuration too.
    own = run_dir / "config.json"
    assert json.loads(own.read_text())["run"]["max_steps"] == 100
    free = ["--set", "learner.listen=tcp://127.0.0.1:0", "--set", f"model.name={model_dir}"]
    free += ["--set", "sampling.max_completion_tokens=16"]
    assert run("--role", "learner", "--config", own, "--dry-run", *free) == 0


def test_a_resume_keeps_the_type_that_the_first_start_has_chosen(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = config.parent / "run"
    run_dir.mkdir()
    save_resolved(
        load_config(config, ["learner.dtype=bfloat16"], "learner"), run_dir / "config.json"
    )
    line = ["--role", "learner", "--config", str(config), "--resume"]
    kept = configuration_of(node_parser().parse_args(line))
    assert kept.learner.dtype == "bfloat16"
    assert "learner.dtype" not in capsys.readouterr().err
    told = configuration_of(node_parser().parse_args([*line, "--set", "learner.dtype=float32"]))
    assert told.learner.dtype == "float32"
    assert "safe   learner.dtype" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["node", "quickstart"])
def test_a_run_that_is_finished_says_so_before_anything_is_made(
    config: Path,
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load_config(config, ["run.max_steps=4"], "learner")
    run_dir = loaded.run_dir
    for name in ("final", "checkpoints"):
        (run_dir / name).mkdir(parents=True)
    save_resolved(loaded, run_dir / "config.json")
    (run_dir / "checkpoints" / "latest").write_text("step_000004\n")
    write_ledger(run_dir, [{"kind": "lineage", "lineage": 1, "fork_step": 0}])

    def resume(*changes: str) -> int:
        if command == "quickstart":
            return quickstart.main(["--resume", str(run_dir), *changes])
        return run("--role", "learner", "--config", run_dir / "config.json", "--resume", *changes)

    monkeypatch.setattr(quickstart, "run_nodes", lambda *_: 7)
    monkeypatch.setattr(node_module, "check_model", lambda *_: 1 / 0)
    began = pytest.raises(ZeroDivisionError) if command == "node" else nullcontext()
    with began:
        assert resume() == 7
    write_ledger(run_dir, [{"kind": "finished", "step": 4}])
    assert resume() == 0
    assert "the run is finished: it has made 4 steps, run.max_steps = 4; its weights are in" in (
        capsys.readouterr().out
    )
    with began:
        assert resume("--set", "run.max_steps=5") == 7


def test_a_run_that_breaks_a_rule_of_today_is_resumed_with_the_remedy(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = config.parent / "run"
    run_dir.mkdir()
    save_resolved(load_config(config, []), run_dir / "config.json")
    saved = json.loads((run_dir / "config.json").read_text())
    saved["model"]["name"] = None  # a learner needs it
    (run_dir / "config.json").write_text(json.dumps(saved))
    remedy = ["--set", "model.name=model"]
    # Another change, which is refused, shows that it came to the comparison.
    unsafe = ["--set", "batch.group_size=3"]
    assert run("--role", "learner", "--config", config, "--resume", *remedy, *unsafe) == 2
    err = capsys.readouterr().err
    assert "model.name" in err
    assert "batch.group_size is not safe" in err


def test_a_worker_without_a_join_string_is_told_where_it_is(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--role", "worker", "--config", config) == 2
    err = capsys.readouterr().err
    assert "this worker has no join string, and links are encrypted" in err
    assert "runs/NAME/keys/join on the learner's machine" in err
    assert "ECHO_JOIN" in err
    assert "security.join" in err


def test_beside_its_learner_a_worker_needs_neither_address_nor_join_string(
    config: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--role", "worker", "--config", config, "--dry-run"]
    line += ["--set", "worker.connect=[]", "--set", f"model.name={model_dir}"]
    assert run(*line) == 2
    assert "in its directory, neither is needed once it has started" in capsys.readouterr().err
    keys = config.parent / "run" / "keys"
    keys.mkdir(parents=True)
    (keys / "join").write_text(JOIN)
    assert run(*line) == 0
    out = capsys.readouterr().out
    assert "would start: a worker that connects to the address of its join string" in out
    assert "s" * 22 not in out


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "none"])
def test_a_worker_started_before_its_learner_waits_for_the_join_string(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    join = config.parent / "run" / "keys" / "join"
    line = ["--role", "worker", "--config", config, "--set", "network.reconnect_for_s=0.2"]
    connect = "[]" if address == "none" else address
    line += ["--set", f"worker.connect={connect}", "--set", "worker.name=early"]
    looks: list[float] = []

    def start_learner(seconds: float) -> None:
        looks.append(seconds)
        join.parent.mkdir(parents=True)
        join.write_text(JOIN)

    monkeypatch.setattr(time, "sleep", start_learner)
    assert run(*line) == 4
    told = f"waiting for {join}, which the learner writes when it starts; on another machine set"
    err = capsys.readouterr().err
    assert told in err
    assert "no learner reached" in err
    assert len(looks) == 1


def test_the_wait_for_a_join_string_ends(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--config", config, "--set", "network.reconnect_for_s=0.01"]
    line += ["--set", "relay.listen=tcp://127.0.0.1:0"]
    assert run("--role", "relay", *line, "--set", "relay.connect=tcp://127.0.0.1:9") == 2
    assert "waiting for" in (err := capsys.readouterr().err)
    join = config.parent / "run" / "keys" / "join"
    assert f"no learner has written {join} in 10ms: start it with the same run.dir" in err
    assert not (config.parent / "run").exists()
    # Another machine has no file to wait for, and a dry run tells at once.
    assert run("--role", "worker", *line) == 2
    assert run("--role", "relay", *line, "--set", "relay.connect=[]", "--dry-run") == 2
    assert "waiting for" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("worker.connect=tcp://10.0.0.9:1", "this worker has no join string, and links"),
        ("security.join=/nowhere/join", "security.join = '/nowhere/join': cannot be read"),
        ("security.join={parent}", "cannot be read: [Errno 21] Is a directory"),
        ("security.join={parent}/run.toml", "run.toml' is not a join string; expected tcp://"),
    ],
)
def test_a_join_string_that_is_none_is_told_by_a_dry_run_and_before_a_start(
    config: Path, capsys: pytest.CaptureFixture[str], settings: str, said: str
) -> None:
    line = ["--role", "worker", "--config", config]
    line += ["--set", settings.format(parent=config.parent)]
    assert run(*line, "--dry-run") == 2
    out, err = capsys.readouterr()
    assert out.startswith("would not start")
    assert said in err
    assert run(*line) == 2
    assert said in capsys.readouterr().err
    assert not (config.parent / "run").exists()  # not even a log, and no engine was loaded


def test_a_dry_run_says_that_a_learners_join_string_is_awaited(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--role", "relay", "--config", config, "--dry-run"]
    line += ["--set", "relay.listen=tcp://127.0.0.1:0", "--set", "relay.connect=tcp://127.0.0.1:9"]
    assert run(*line) == 0
    join = config.parent / "run" / "keys" / "join"
    assert f"notice: it waits for {join}, which the learner writes" in capsys.readouterr().out


def test_a_damaged_join_string_is_not_repeated(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO_JOIN", JOIN[:-1])
    assert run("--role", "worker", "--config", config) == 2
    err = capsys.readouterr().err
    assert "ECHO_JOIN is not a join string" in err
    assert "ssss" not in err


def test_a_join_string_is_all_that_a_worker_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHO_JOIN", JOIN)
    quick = ["--set", "network.reconnect_for_s=0.2", "--set", "worker.name=lonely"]
    assert run("--role", "worker", *quick, "--dry-run") == 0
    assert run("--role", "worker", *quick) == 4
    printed = "".join(capsys.readouterr())
    assert "no learner reached" in printed
    # In a directory of its own, not in that of some run on this machine.
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["lonely"]
    log = (tmp_path / "runs" / "lonely" / "logs" / "lonely.log").read_text()
    for text in (printed, log):
        assert "s" * 22 not in text
    # A learner invites, it does not join.
    assert run("--role", "learner") == 2


@contextmanager
def listening() -> Iterator[str]:
    """Let a learner's transport listen in another thread; give its address, without the key."""
    loop, address = asyncio.new_event_loop(), Future[str]()

    async def serve() -> None:
        keys = CurveKeys.of_learner(KeyPair.of(b"k" * 32), b"s" * 16)
        transport = ZmqTransport("tcp://127.0.0.1:0", keys=keys)
        await transport.start()
        address.set_result(without_key(str(transport.listen_address)))
        await done.wait()
        await transport.close()

    done = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield address.result(timeout=30)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "secret", "cause"),
    [
        (b"k", b"x", "refuses this node: it has another secret than the join string says"),
        (b"x", b"s", "has another key than the address or the join string says"),
    ],
    ids=["secret", "key"],
)
def test_a_node_with_a_wrong_join_string_is_refused_after_three_tries(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    key: bytes,
    secret: bytes,
    cause: str,
) -> None:
    with listening() as address:
        join = Join(with_key(address, KeyPair.of(key * 32).public), secret * 16, b"f" * 16)
        monkeypatch.setenv("ECHO_JOIN", str(join))
        code = run("--role", "relay", "--config", config, "--set", "relay.name=stranger",
                   "--set", "relay.listen=tcp://127.0.0.1:0")  # fmt: skip
    error = capsys.readouterr().err
    assert code == 5, error
    assert f"{address} {cause}" in error
    assert "(tried 3 times)" in error


def test_warnings_of_the_transport_are_in_the_nodes_log(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    make_log("talkative", to_file=path, to_terminal=False)
    logging.getLogger("echo.net.zmq").warning("refused")
    logging.getLogger("echo.net.zmq").info("next attempt")
    assert path.read_text().split()[1:] == ["WARNING", "refused"]


def test_a_worker_that_finds_nobody_gives_up(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run("--role", "worker", "--config", config, "--set", "worker.connect=tcp://127.0.0.1:9",
               "--set", "network.reconnect_for_s=0.2", "--set", "worker.name=lonely",
               "--set", "security.curve=false")  # fmt: skip
    assert code == 4
    assert "network.reconnect_for_s sets how long to try" in capsys.readouterr().err
    assert "no learner reached" in (config.parent / "run" / "logs" / "lonely.log").read_text()


def test_the_files_of_a_worker_go_with_a_name_that_was_drawn(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["--role", "worker", "--set", "network.reconnect_for_s=0.1"]
    own = ["--config", config, "--set", "worker.connect=tcp://127.0.0.1:9",
           "--set", "security.curve=false"]  # fmt: skip
    assert run(*line, *own) == run(*line, *own, "--set", "worker.name=given") == 4
    run_dir = config.parent / "run"
    assert [path.name for path in (run_dir / "workers").iterdir()] == ["given"]
    assert len(list((run_dir / "logs").iterdir())) == 2
    monkeypatch.chdir(config.parent)
    monkeypatch.setenv("ECHO_JOIN", JOIN)
    assert run(*line) == 4
    assert len(list(Path("runs").glob("worker-*/logs/worker-*.log"))) == 1
    assert list(Path("runs").glob("*/workers/*")) == []


def test_a_worker_shows_its_status_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(node_module, "REFRESH_S", 0.0)
    terminal: Any = Terminal()
    asked = iter(range(3))

    class Worker:
        now = 0.0

        def view(self) -> WorkerView:
            if next(asked) == 2:
                raise asyncio.CancelledError
            return WorkerView(version="v3", num_tokens=0, num_groups=7, activity="sampling")

    worker: Any = Worker()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(show_status(worker, StatusLine(terminal), logging.getLogger("test.status")))
    assert terminal.text().count("v3  0 tokens/s  7 groups delivered  sampling") == 2
    assert terminal.text().endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("options", "restarts", "code"),
    [
        (["--resume-or-begin"], "0", 1),
        (["--resume-or-begin"], "2", 1),
        (["--resume"], "2", 1),
        (["--resume"], "0", 7),
        ([], "2", 7),
    ],
)
def test_a_launcher_does_not_continue_a_run_that_has_diverged(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    restarts: str,
    code: int,
) -> None:
    ended = DivergedError("the run has diverged", good_step=3)
    monkeypatch.setattr(node_module, "configuration_of", lambda _: load_config(config))
    monkeypatch.setattr(node_module, "has_begun", lambda _: True)
    monkeypatch.setattr(node_module, "find_divergence", lambda _: ended)
    monkeypatch.setattr(node_module, "run_role", lambda *_, **__: 7)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    assert run("--role", "learner", "--config", config, *options) == code
    assert ("error: the run has diverged" in capsys.readouterr().err) == (code == 1)


def test_a_learner_that_starts_again_keeps_its_options_and_resumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {
        "--config": "run.toml", "--set": "run.name=a b", "--init-from": "w", "--log-events": "e",
        "--yes": None, "--no-report": None,
    }  # fmt: skip
    left_out = {
        "--help",
        "--version",
        "--role",
        "--dry-run",
        "--help-config",
        "--resume",
        "--resume-or-begin",
    }
    known = {action.option_strings[-1] for action in node_parser()._actions}
    assert known == options.keys() | left_out, "line_of_resume has to know every option"
    line = [part for pair in options.items() for part in pair if part is not None]
    started: list[Any] = []
    monkeypatch.setattr("os.execv", lambda *arguments: started.append(arguments))
    monkeypatch.setattr("sys.orig_argv", ["python3", "-m", "echo.cli.main", "node", *line])
    monkeypatch.setattr("sys.argv", ["main.py", "node", *line])
    start_again(node_parser().parse_args(["--role", "learner", *line]))
    [(_, command)] = started
    assert command[:4] == ["python3", "-m", "echo.cli.main", "node"]
    parsed = node_parser().parse_args(command[4:])
    assert parsed.resume
    assert parsed.set == ["run.name=a b", "learner.init_from=w"]
    assert (str(parsed.config), str(parsed.log_events)) == ("run.toml", "e")
    assert parsed.yes
    assert parsed.no_report
