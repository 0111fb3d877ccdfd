from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from echo.cli import interrupts, parsers
from echo.cli.commands import quickstart
from echo.cli.commands.node import configuration_of
from echo.cli.commands.quickstart import (
    OWN_ADDRESSES,
    TASKS,
    NodeProcess,
    free_ports_of,
    free_settings,
    join_environment,
    main,
    next_commands,
    pass_on,
    share_settings,
    stop,
    thread_settings,
    wait_for,
)
from echo.cli.parsers import CONFIGS, MODEL_CONFIG, node_parser
from echo.config.fields import override_of
from echo.config.load import (
    diff_configs,
    load_config,
    load_resolved,
    parse_config,
    save_resolved,
)
from echo.config.schema import VllmSection
from echo.core.errors import EngineError
from echo.core.extras import find_config
from echo.engine import model
from echo.net.listener import bound_socket, listen_on
from echo.records.ledger import lock_run
from echo.runtime.identity import Join
from echo.runtime.learner.batches.waiting import FIRST_WORKER_S

PATIENT = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: sys.exit(7))
print(flush=True)
time.sleep(60)
"""


def start(name: str, program: str) -> NodeProcess:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    return NodeProcess(name, process)


def test_no_worker_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workers", "0"]) == 2
    assert "--workers 0" in capsys.readouterr().err


def test_a_directory_without_a_run_cannot_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--resume", str(tmp_path / "none")]) == 2
    assert "none: no run is there" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--task", "addition"], ["--model", "smollm2"]])
def test_what_a_run_has_is_not_asked_for_again(
    capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    assert main(["--resume", "runs/x", *option]) == 2
    assert f"{option[0]} has no effect with --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override",
    [
        "learner.listen=tcp://127.0.0.1:7900",
        "learner.advertise=tcp://10.0.0.5:7900",
        "relay.listen=tcp://127.0.0.1:7901",
        "relay.connect=tcp://127.0.0.1:7900",
        "worker.connect=tcp://127.0.0.1:7901",
    ],
)
def test_addresses_are_refused_since_it_joins_its_processes_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    config = tmp_path / "config.json"
    save_resolved(parse_config({"model": {"name": "x"}}, role="learner"), config)
    for line in ([], ["--resume", str(tmp_path)]):
        assert main([*line, "--set", override]) == 2
        said = capsys.readouterr().err
        assert f"--set {override.partition('=')[0]}: the quickstart joins its processes" in said


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("bound", [0, 3])
def test_every_task_has_its_configuration_and_other_things_to_try(task: str, bound: int) -> None:
    path = find_config(CONFIGS[task])
    config = load_config(path, ["model.name=x", f"sync.max_staleness={bound}"], "learner")
    assert config.task.kind == task
    assert config.network.reconnect_for_s >= 300  # a slow machine's learner imports for minutes
    first, second, third = next_commands(config)
    *_, override = shlex.split(first, comments=True)
    assert f"--task {task} " in first
    assert load_config(path, [override]).sync.max_staleness != bound
    assert f"--task {task}" not in second
    assert f"--config {config.run_dir}/config.json --dry-run" in third


def test_suggested_commands_quote_a_directory_with_a_space(tmp_path: Path) -> None:
    overrides = ["model.name=x", f"run.dir={tmp_path}/my runs", "run.name=a"]
    config = load_config(find_config("quickstart.toml"), overrides, "learner")
    saved = config.run_dir / "config.json"
    assert str(saved) in shlex.split(next_commands(config)[2], comments=True)
    saved.parent.mkdir(parents=True)
    saved.touch()
    console = Console(record=True, width=80, stderr=True)
    quickstart.report_failure(130, [], {}, config.run_dir, console)
    assert shlex.split(console.export_text())[-1] == str(config.run_dir)


def test_two_quickstarts_started_at_once_share_neither_name_nor_ports(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with socket.socket() as taken, ExitStack() as held:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        table = {
            "run": {"dir": str(tmp_path)},
            "learner": {"listen": f"tcp://127.0.0.1:{port}"},
            "model": {"name": "x"},
        }
        config = parse_config(table, role="learner")
        first, second = (
            parse_config(table, free_settings(config, held), "learner") for _ in range(2)
        )
        assert [first.run.name, second.run.name] == ["run-2", "run-3"]
        ports = {port, *(o.listen for c in (first, second) for o in (c.learner, c.relay))}
        assert len(ports) == 5
        assert first.relay.connect == (first.learner.listen,)
        assert first.worker.connect[0] == first.relay.listen
        # The node can listen at the port that is held for it.
        bound = asyncio.run(bound_socket(first.learner.listen, None))
        listen_on(bound)
        with socket.create_connection(bound.getsockname(), timeout=5):
            bound.close()


def begun_run(run_dir: Path, *, listen: str) -> Path:
    """Return the config.json of a run that a quickstart has begun at two neighbouring ports."""
    host, _, port = listen.rpartition(":")
    down = f"{host}:{int(port) + 1}"
    table = {
        "run": {"dir": str(run_dir.parent), "name": run_dir.name},
        "model": {"name": "x"},
        "learner": {"listen": listen, "dtype": "bfloat16"},
        "relay": {"connect": [listen], "listen": down},
        "worker": {"connect": [down]},
    }
    run_dir.mkdir()
    save_resolved(parse_config(table, role="learner"), run_dir / "config.json")
    return run_dir / "config.json"


def test_a_resumed_run_takes_other_ports_where_its_own_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken, ExitStack() as held:
        taken.bind(("127.0.0.1", 0))
        path = begun_run(tmp_path / "run", listen=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        before = load_resolved(path)
        free_ports_of(path, held)
        after = load_resolved(path)
        assert after.learner.listen != before.learner.listen
        assert after.relay.connect == (after.learner.listen,)
        assert after.worker.connect == (after.relay.listen,)
        assert {change.key for change in diff_configs(before, after)} <= {*OWN_ADDRESSES}
        # The learner accepts it as the run's own.
        configuration_of(
            node_parser().parse_args(["--role", "learner", "--config", str(path), "--resume"])
        )
        assert capsys.readouterr().err == ""
        free_ports_of(path, held)  # by now all four are held
        assert load_resolved(path).learner.listen != after.learner.listen


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_a_resumed_run_keeps_ports_that_are_free_and_addresses_of_a_fleet(
    tmp_path: Path, host: str
) -> None:
    with socket.socket() as one, ExitStack() as held:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        if host == "127.0.0.1":
            one.close()
        path = begun_run(tmp_path / "run", listen=f"tcp://{host}:{port}")
        before = load_resolved(path)
        free_ports_of(path, held)
        assert load_resolved(path).learner == before.learner


def test_a_run_under_way_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = begun_run(tmp_path / "run", listen="tcp://127.0.0.1:7700")
    before = path.read_bytes()
    lock = lock_run(path.parent)
    try:
        assert main(["--resume", str(path.parent)]) == 1
    finally:
        os.close(lock)
    assert f"is in use by another learner; stop it first (process {os.getpid()})" in (
        capsys.readouterr().err
    )
    assert path.read_bytes() == before


def test_a_run_that_was_moved_is_not_taken_for_the_run_that_is_in_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "run_nodes", lambda *_, **__: 0)
    path = begun_run(tmp_path / "run", listen="tcp://127.0.0.1:7700")
    assert main(["--resume", str(path.parent)]) == 0
    moved = path.parent.rename(tmp_path / "moved")
    assert main(["--resume", str(moved)]) == 2
    assert (
        f"moved: run.dir and run.name place the run in {tmp_path / 'run'};"
        in capsys.readouterr().err
    )


def test_a_run_whose_name_is_a_number_keeps_it(tmp_path: Path) -> None:
    table = {"run": {"dir": str(tmp_path), "name": "2026"}}
    with ExitStack() as held:
        overrides = free_settings(parse_config(table), held)
    assert parse_config({}, overrides).run.name == "2026"


def test_a_pretrained_model_is_given_no_task_of_the_small_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", "smollm2", "--task", "countdown"]) == 2
    assert "--task countdown is what the small model learns" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["./no/model", "/no/model", "a/b/c"])
def test_a_path_without_a_model_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--model", name]) == 3
    assert f"model.name = '{name}': no such directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "learner", "worker"),
    [(1, 2, 1, 1), (2, 2, 1, 1), (4, 2, 2, 1), (8, 2, 4, 2), (9, 2, 4, 2), (8, 1, 4, 4)],
)
def test_the_cores_are_divided_among_the_processes_of_a_pretrained_model(
    num_cores: int, num_workers: int, learner: int, worker: int
) -> None:
    overrides = thread_settings(num_cores, num_workers)
    config = load_config(find_config(MODEL_CONFIG), ["model.name=x", *overrides], "learner")
    assert (config.learner.num_threads, config.worker.num_threads) == (learner, worker)


@pytest.mark.parametrize(
    ("device", "settings", "num_workers", "share"),
    [
        ("cuda", ["engine.kind=vllm"], 2, 0.3),
        ("cuda", ["engine.kind=vllm"], 7, 0.0857),
        ("cuda", ["engine.kind=vllm", "engine.options.gpu_memory_utilization=0.1"], 2, None),
        ("cuda", ["engine.kind=vllm", "engine.options.kv_cache_memory_bytes=99"], 2, None),
        ("cuda", [], 2, None),
        ("cpu", ["engine.kind=vllm"], 2, None),
    ],
)
def test_a_gpu_is_divided_among_the_workers_of_vllm(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    settings: list[str],
    num_workers: int,
    share: float | None,
) -> None:
    monkeypatch.setattr(model, "pick_device", lambda _: device)
    path = find_config(CONFIGS["addition"])
    settings = ["model.name=x", *settings]
    overrides = share_settings(load_config(path, settings, "learner"), num_workers)
    assert bool(overrides) == (share is not None)
    if share is not None:
        engine = load_config(path, [*settings, *overrides], "learner").engine
        assert isinstance(engine, VllmSection)
        assert engine.options == {"gpu_memory_utilization": share}


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm"])
def test_a_misspelt_model_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--model", name]) == 2
    assert "did you mean smollm2?" in capsys.readouterr().err


def test_a_run_of_a_pretrained_model_is_told_other_things_to_try() -> None:
    path = find_config(MODEL_CONFIG)
    config = load_config(path, ["model.name=my model"], "learner")
    first, second, _ = next_commands(config)
    parts = shlex.split(first, comments=True)
    assert parts[parts.index("--model") + 1] == "my model"
    assert load_config(path, [parts[-1]]).sync.max_staleness != config.sync.max_staleness
    assert "--task" not in first + second


def test_nodes_join_by_their_environment(tmp_path: Path) -> None:
    table = {"run": {"dir": str(tmp_path)}, "model": {"name": "x"}}
    config = parse_config(table, role="learner")
    environment = join_environment(config)
    join = Join.parse(environment["ECHO_JOIN"])
    assert join.address.startswith("tcp://127.0.0.1:7700#")
    assert join_environment(config) == environment
    plain = parse_config(table, ["security.curve=false"], role="learner")
    assert join_environment(plain) == {}


def test_nodes_end_by_themselves_are_asked_and_then_made_to() -> None:
    done, asked = start("done", "print()"), start("asked", PATIENT)
    stop([done], grace_s=60.0)
    stop([asked], grace_s=0.1)
    assert (done.process.returncode, asked.process.returncode) == (0, 7)


SAVING = """
import signal, sys, time
def again(*_):
    sys.exit(9)
def first(*_):
    signal.signal(signal.SIGTERM, again)
signal.signal(signal.SIGTERM, first)
print(flush=True)
while True:
    time.sleep(60)
"""


def test_a_node_that_has_saved_and_waits_is_told_to_stop_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts, "SAVE_S", 0.3)
    waiting, deaf = start("w1", SAVING), start("w2", SAVING.replace("again)", "first)"))
    stop([waiting], grace_s=0.01)
    assert waiting.process.poll() == 9
    monkeypatch.setattr(quickstart, "STOP_S", 0.1)
    stop([deaf], grace_s=0.01)
    assert deaf.process.poll() == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_ends_the_quickstart_ends_its_learner(number: int) -> None:
    learner, node = start("learner", PATIENT), start("w1", "import sys\nprint()\nsys.exit(3)")
    other = start("w2", PATIENT)
    node.process.wait()

    def terminate() -> None:
        while "w1 ended" not in console.export_text(clear=False):
            time.sleep(0.01)  # sooner it might end the tests
        os.kill(os.getpid(), number)

    began = time.monotonic()
    console = Console(record=True, width=80, quiet=False, stderr=True)
    threading.Thread(target=terminate, daemon=True).start()
    with interrupts.handled(lambda number: pass_on(number, learner)):
        assert wait_for(learner, [node, other], console) == 7
    assert time.monotonic() - began < 30
    assert "w1 ended with code 3" in console.export_text()
    stop([other], grace_s=0.1)


def test_a_learner_whose_workers_have_all_failed_is_ended(tmp_path: Path) -> None:
    output = tmp_path / "w1.stderr"
    # Square brackets are no markup of rich, which would leave them out or raise an error.
    output.write_text("Traceback\nValueError: [eval] has no key '[/x]'\n")
    learner, failing = start("learner", PATIENT), start("w1", "import sys\nprint()\nsys.exit(3)")
    node = replace(failing, output=output)
    console = Console(record=True, width=80, stderr=True)
    assert wait_for(learner, [node], console) == 7
    told = console.export_text()
    assert f"w1 ended with code 3: ValueError: [eval] has no key '[/x]'; see {tmp_path}" in told
    quickstart.report_failure(3, [node], {node: "w1 said [eval]"}, tmp_path / "[run]", console)
    assert "w1 said [eval]\n" in (told := console.export_text())
    assert "[run]/logs" in told.replace("\n", "")


class Small:
    """A small model that notes which nodes run when it is made, and then cannot be made."""

    def __init__(self, path: Path, nodes: list[str]) -> None:
        self.path = path
        self.nodes = nodes
        self.seen: list[str] = []

    def make(self, console: Console) -> None:
        self.seen = [*self.nodes]
        raise EngineError("no range of pass rates")


@pytest.mark.parametrize("exists", [False, True])
def test_the_others_start_while_the_small_model_is_made_and_end_if_it_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, exists: bool
) -> None:
    started: list[str] = []
    settings: dict[str, list[str]] = {}
    processes = []

    def start_node(
        name: str, role: str, config_path: Path, overrides: list[str], **_: object
    ) -> NodeProcess:
        started.append(name)
        settings[name] = overrides
        processes.append(start(name, PATIENT))
        return processes[-1]

    monkeypatch.setattr(quickstart, "start_node", start_node)
    small = Small(tmp_path / "model", started)
    if exists:
        small.path.mkdir()
    own = override_of("model.name", str(small.path))
    patience = ["network.reconnect_for_s=7"] if exists else []
    overrides = [own, f"run.dir={tmp_path}", "run.name=a", *patience]
    config_path = find_config("quickstart.toml")
    config = load_config(config_path, overrides, "learner")
    config.run_dir.mkdir()
    arguments = parsers.quickstart_parser().parse_args([])
    with pytest.raises(EngineError, match="no range"):
        quickstart.run_nodes(
            config_path,
            config,
            overrides,
            arguments,
            Console(quiet=True),
            small=small,  # type: ignore[arg-type]
        )
    assert small.seen == started == ["relay", "w1", "w2"]
    assert [own in each for each in settings.values()] == [exists] * 3
    # They wait for a learner that takes long to start, unless the user says how long.
    theirs = [load_config(config_path, settings[name], "worker") for name in ("w1", "w2")]
    patience_s = {each.network.reconnect_for_s for each in theirs}
    assert patience_s == {7.0 if exists else FIRST_WORKER_S}
    assert [each.process.poll() for each in processes] == [7, 7, 7]
    assert not config.run_dir.exists()
