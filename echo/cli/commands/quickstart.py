"""`echo-rl quickstart`: four processes train a small model on this machine.

The learner, the relay and the two workers are ordinary `echo-rl node` processes. They communicate
only over sockets on loopback. This command makes the first model, starts the four processes, and
prints a summary of the run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from echo.cli import interrupts
from echo.cli.commands.node import read_run_file, report_finished, show_summary
from echo.cli.output import fail
from echo.cli.parsers import CONFIGS, MODEL_CONFIG, quickstart_parser
from echo.config.fields import override_of
from echo.config.layers import OVERRIDE
from echo.config.load import (
    diff_configs,
    load_config,
    load_resolved,
    save_resolved,
)
from echo.config.memory.models import find_model
from echo.config.schema import Config, VllmSection
from echo.core.errors import ConfigError, EchoError, nearest
from echo.core.extras import command, find_config, models_directory
from echo.core.units import one_line
from echo.net.transport import is_loopback
from echo.records.ledger import lock_run
from echo.runtime.identity import ECHO_JOIN, join_address, load_or_create_keys, write_join
from echo.runtime.learner.batches.waiting import FIRST_WORKER_S
from echo.tasks.builtin import AdditionTask, CountdownTask
from echo.tasks.task import GeneratedTask

TASKS: dict[str, type[GeneratedTask]] = {"addition": AdditionTask, "countdown": CountdownTask}
SMOLLM2 = "smollm2"
"""The value of `--model` for a model that this command makes. Every other value is a directory or a
hub id."""
GRACE_S = 15.0
"""Seconds from the learner's end to the first SIGTERM for workers and relay."""
STOP_S = 10.0
"""Seconds from the second SIGTERM to SIGKILL. A node ends at most interrupts.HURRY_S after its
second signal."""


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """A process of `echo-rl node` that the quickstart has started."""

    name: str
    process: subprocess.Popen[bytes]
    role: str = "worker"
    output: Path | None = None
    """The file for the process's standard output and standard error. None: the process writes to
    the output of this process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `echo-rl quickstart` and return its exit code."""
    arguments = quickstart_parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        if arguments.workers < 1:
            raise ConfigError(f"--workers {arguments.workers}: at least one worker must generate")
        if arguments.resume is not None:
            for option in ("task", "model"):
                if getattr(arguments, option) is not None:
                    raise ConfigError(
                        f"--{option} has no effect with --resume: the run has its own"
                    )
            config_path = arguments.resume / "config.json"
            if not config_path.exists():
                raise ConfigError(
                    f"--resume {arguments.resume}: no run is there ({config_path} does not exist); "
                    "name the directory of one, such as runs/quickstart"
                )
            config = read_run_file(config_path, arguments.set, "learner")
            check_addresses(config)
            check_place(arguments.resume, config)
            if report_finished(config):
                return 0
            with ExitStack() as held:
                free_ports_of(config_path, held)
                config = read_run_file(config_path, arguments.set, "learner")
                return run_nodes(config_path, config, arguments.set, arguments, console)
        if arguments.model is not None and arguments.task is not None:
            raise ConfigError(
                f"--task {arguments.task} is what the small model learns, and --model names "
                "another: leave one of the two out"
            )
        task = arguments.task or "addition"
        name = CONFIGS[task] if arguments.model is None else MODEL_CONFIG
        config_path = find_config(name)
        config = load_config(config_path, arguments.set, "learner")
        check_addresses(config)
        threads: list[str] = []  # for the small model one thread per node: more would only wait
        with interrupts.unwinding(), ExitStack() as held:
            small: SmallModel | None = None
            if arguments.model is not None:
                model = find_pretrained(arguments.model, console)
                threads = thread_settings(os.cpu_count() or 1, arguments.workers)
            else:
                small = SmallModel(task, for_vllm=config.engine.kind == "vllm")
                model = str(small.path)
            overrides = [
                override_of("model.name", model),
                *threads,
                *share_settings(config, arguments.workers),
                *arguments.set,
            ]
            config = load_config(config_path, overrides, "learner")
            overrides += free_settings(config, held)
            config = load_config(config_path, overrides, "learner")
            return run_nodes(config_path, config, overrides, arguments, console, small=small)
    except EchoError as error:
        return fail(error)


class WarmupBar:
    """The progress bar for the warm-up of the small model."""

    def __init__(self, bar: Progress) -> None:
        """Add a task to this progress bar; `show` sets the number of steps."""
        self._bar = bar
        self._job = bar.add_task("starting", total=None)

    def show(self, step: int, num_steps: int, loss: float, pass_rate: float | None) -> None:
        """Show the number of completed steps, the loss and the pass rate."""
        rate = "" if pass_rate is None else f", pass rate {pass_rate:.2f}"
        text = f"loss {loss:.2f}{rate}"
        self._bar.update(self._job, completed=step, total=num_steps, description=text)


class SmallModel:
    """The small model of a task; the first quickstart makes the model and warms it up."""

    def __init__(self, task_name: str, *, for_vllm: bool) -> None:
        """Choose the model for a task. For vLLM, choose wider attention heads."""
        from echo.engine.model import HEAD_DIM, VLLM_HEAD_DIM
        from echo.train.models.warmup import make_warm_model, warm_model_path

        made_from: Any = {
            "task": TASKS[task_name](),
            "seed": 0,
            "head_dim": VLLM_HEAD_DIM if for_vllm else HEAD_DIM,
        }
        directory = models_directory()
        self.path = warm_model_path(task_name, directory, **made_from)
        """Directory of the model, which `make` makes."""
        self._make = partial(make_warm_model, task_name, directory, **made_from)

    def make(self, console: Console) -> None:
        """If the model's directory is missing, make and warm up the model; print its pass rates.

        Raises:
            EchoError: if the model cannot be made or stored.
        """
        columns = (
            TextColumn("[bold]making the small model[/]"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps, {task.description}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            model = self._make(view=WarmupBar(bar))
        console.print(
            f"start: {model.path} answers {model.pass_rate_sampled:.0%} of held-out prompts right "
            f"(sampled), {model.pass_rate_greedy:.0%} greedily"
        )


def find_pretrained(name: str, console: Console) -> str:
    """Return the value of `model.name` for the option `--model NAME`.

    If the model `smollm2` is missing, make it.

    Raises:
        EchoError: if `name` is a path without a model, or if `smollm2` cannot be made.
    """
    if name != SMOLLM2:
        if find_model(name) is None and "/" not in name and nearest(name.lower(), [SMOLLM2]):
            raise ConfigError(f"--model {name}: no such directory; did you mean {SMOLLM2}?")
        from echo.engine.model import resolve_model

        resolve_model(name, key="--model")  # once here, so that not every process tries
        return name
    from echo.engine.pretrained import make_smollm2

    return str(make_smollm2(models_directory(), show=console.print))


def thread_settings(num_cores: int, num_workers: int) -> list[str]:
    """Return overrides that divide the cores between learner and workers.

    The learner gets half of the cores.
    """
    learner = max(1, num_cores // 2)
    worker = max(1, (num_cores - learner) // num_workers)
    return [f"learner.num_threads={learner}", f"worker.num_threads={worker}"]


SHARED_OUT = 0.6
"""Share of a GPU's memory for the vLLM engines of all workers together; the learner has the rest.
"""


def share_settings(config: Config, num_workers: int) -> list[str]:
    """Return the override that divides a GPU among the workers' vLLM engines.

    By default one vLLM engine takes most of a GPU, so a second worker's engine would not start. On
    a CPU the result is empty.
    """
    if not isinstance(config.engine, VllmSection):
        return []
    from echo.engine.model import pick_device

    is_set = config.engine.options.keys() & {"gpu_memory_utilization", "kv_cache_memory_bytes"}
    if is_set or not pick_device(config.worker.device).startswith("cuda"):
        return []
    return [f"engine.options.gpu_memory_utilization={SHARED_OUT / num_workers:.3g}"]


OWN_ADDRESSES = (
    "learner.listen",
    "learner.advertise",
    "relay.connect",
    "relay.listen",
    "worker.connect",
)
"""The settings for the addresses of the four processes."""


def check_addresses(config: Config) -> None:
    """Refuse addresses on the command line, because the quickstart chooses the addresses.

    Raises:
        ConfigError: if the command line sets an address.
    """
    given = [key for key in OWN_ADDRESSES if config.sources[key] == OVERRIDE]
    if given:
        raise ConfigError(
            f"--set {', '.join(given)}: the quickstart joins its processes itself, at free ports "
            f"of this machine; leave it out, or start each process with {command('node')} at "
            "addresses of your own (docs/two-machines.md)"
        )


def check_place(run_dir: Path, config: Config) -> None:
    """Refuse to resume a run whose configuration places it in another directory.

    Without this check, the command would resume a different run in that other directory, or write
    a new run's keys there.

    Raises:
        ConfigError: if the configuration's directory is not `run_dir`.
    """
    if config.run_dir.resolve() != run_dir.resolve():
        raise ConfigError(
            f"--resume {run_dir}: run.dir and run.name place the run in "
            f"{config.run_dir.absolute()}; move it back there, or start this command in the "
            "directory in which the run began"
        )


def free_settings(config: Config, held: ExitStack) -> list[str]:
    """Return overrides that set an unused run name, and ports that are free on this machine.

    Args:
        config: the configuration, with the name and the ports to try first.
        held: reserves the ports until this stack is closed, so that other programs cannot take
            them.
    """
    name, number = config.run.name, 1
    while not _claim(Path(config.run.dir) / name):
        number += 1
        name = f"{config.run.name}-{number}"
    return [override_of("run.name", name), *_free_addresses(config, held)]


def free_ports_of(path: Path, held: ExitStack) -> None:
    """In a run's config.json, replace the ports that other programs use.

    Afterwards the run can be resumed. Overrides are no alternative: the learner refuses a changed
    address as unsafe, because running nodes would dial the old address. The quickstart restarts all
    nodes, so the change is safe.

    Args:
        path: the run's config.json.
        held: reserves the ports until this stack is closed, so that other programs cannot take
            them.

    Raises:
        StorageError: if the run is under way.
    """
    os.close(lock_run(path.parent))
    config = load_resolved(path)
    up, down = config.learner.listen, config.relay.listen
    is_joined_here = {*config.relay.connect} <= {up} and {*config.worker.connect} <= {down}
    if not (is_joined_here and is_loopback(up) and is_loopback(down)):
        return  # begun by hand, perhaps with nodes on other machines
    changed = load_resolved(path, _free_addresses(config, held))
    if diff_configs(config, changed):
        save_resolved(changed, path)


def _free_addresses(config: Config, held: ExitStack) -> list[str]:
    """Return overrides that set addresses with free ports; `held` reserves the ports."""
    learner, relay = (
        held.enter_context(_held_port(_port_of(address)))
        for address in (config.learner.listen, config.relay.listen)
    )
    up, down = f"tcp://127.0.0.1:{learner}", f"tcp://127.0.0.1:{relay}"
    return [
        f"learner.listen={up}",
        f'relay.connect=["{up}"]',
        f"relay.listen={down}",
        f'worker.connect=["{down}"]',
    ]


def _claim(run_dir: Path) -> bool:
    """Create a run's directory; return False if the directory already exists."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_dir.mkdir()
    except FileExistsError:
        return False
    return True


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextmanager
def _held_port(wanted: int) -> Iterator[int]:
    """Reserve a loopback port within the `with` block; yield the port's number.

    The port is `wanted`, or another free port if `wanted` is in use. A node sets SO_REUSEADDR, so a
    node can bind the reserved port. Linux refuses the reserved port to programs without
    SO_REUSEADDR, such as another quickstart.
    """
    with socket.socket() as holder:
        try:
            holder.bind(("127.0.0.1", wanted))
        except OSError:
            holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform == "linux":
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            holder.close()
        yield port


def run_nodes(
    config_path: Path,
    config: Config,
    overrides: Sequence[str],
    arguments: argparse.Namespace,
    console: Console,
    *,
    small: SmallModel | None = None,
) -> int:
    """Start the four processes, wait for the learner, and print the summary.

    If `small` is not None, this model is made before the learner starts. Meanwhile the relay and
    the workers start. Their imports take about as long as making the model.
    """
    nodes: list[NodeProcess] = []
    learner: NodeProcess | None = None
    final = config.run_dir / "final"
    # The run's keys are made here, not by the learner, so that other nodes can start before it.
    environment = join_environment(config)
    names = {"relay": "relay"}
    names |= {f"w{number}": "worker" for number in range(1, arguments.workers + 1)}
    is_missing = small is not None and not small.path.exists()
    # Workers cannot load a model that does not exist yet, so they fetch it from the learner.
    not_theirs = [override_of("model.name", str(small.path))] if small and is_missing else []
    # They look for the learner as long as its process may take to start: making its model and its
    # imports take minutes on a busy machine. This command ends them when that process has ended.
    patience = f"network.reconnect_for_s={FIRST_WORKER_S:.0f}"
    shared = [patience, *(setting for setting in overrides if setting not in not_theirs)]
    with interrupts.handled(lambda number: pass_on(number, learner)):
        try:
            for name, role in names.items():
                own = [*shared, f"{role}.name={name}"]
                output = config.run_dir / "logs" / f"{name}.stderr"
                nodes.append(
                    start_node(name, role, config_path, own, environment=environment, output=output)
                )
            if small is not None:
                small.make(console)
            extra = ["--no-report", *(["--resume"] if arguments.resume is not None else [])]
            learner = start_node("learner", "learner", config_path, overrides, extra=extra)
            code = wait_for(learner, nodes, console)
            failed = {node: end for node in nodes if (end := describe_end(node))}
        finally:
            # After the last step every node ends by itself; otherwise they would wait for the
            # learner.
            with interrupts.handled(lambda _: None):
                started = [*([] if learner is None else [learner]), *nodes]
                stop(started, grace_s=GRACE_S if final.exists() else 0.0)
            if learner is None and small is not None:
                shutil.rmtree(config.run_dir, ignore_errors=True)  # only keys and logs are in it
    if code:
        return report_failure(code, nodes, failed, config.run_dir, console)
    show_summary(config.run_dir, console, commands=next_commands(config))
    return 0


def report_failure(
    code: int,
    nodes: Sequence[NodeProcess],
    failed: Mapping[NodeProcess, str],
    run_dir: Path,
    console: Console,
) -> int:
    """Print how the nodes ended; return this command's exit code.

    Args:
        code: exit code of the learner, which is not 0.
        nodes: the other nodes.
        failed: one text for each failed node, which describes the failure.
        run_dir: directory of the run.
        console: gets the text.
    """
    for end in failed.values():  # the learner's view has hidden earlier lines
        console.print(Text(end, "yellow"), soft_wrap=True)
    is_killed = code == 128 + signal.SIGKILL
    if not interrupts.is_interruption(code):
        how = "was killed" if is_killed else f"ended with code {code}"
        console.print(Text.assemble((f"the learner {how}", "red"), f"; its log: {run_dir}/logs"))
        if not is_killed:
            return code
    if (run_dir / "config.json").exists():
        line = f"{command('quickstart')} --resume {shlex.quote(str(run_dir))}"
        console.print(Text(f"stopped before the end; to go on: {line}"), soft_wrap=True)
    has_worker = any(node.role == "worker" and node not in failed for node in nodes)
    return code if has_worker else 1


def next_commands(config: Config) -> list[str]:
    """Return three commands that a user may try after the run, each with a comment."""
    quickstart, node = command("quickstart"), command("node")
    if config.task.kind in TASKS:
        what = f"--task {config.task.kind}"
        other = next(name for name in TASKS if name != config.task.kind)
        last = f"{quickstart} --task {other}   # another task"
    else:
        what = f"--model {shlex.quote(config.model.name or SMOLLM2)}"
        last = f"{quickstart}   # the small model, which takes half a minute"
    bound, why = (0, "on-policy") if config.sync.max_staleness else (3, "with older rollouts")
    saved = shlex.quote(str(config.run_dir / "config.json"))
    return [
        f"{quickstart} {what} --set sync.max_staleness={bound}   # {why}, to compare",
        last,
        f"{node} --role learner --config {saved} --dry-run   # all settings",
    ]


def join_environment(config: Config) -> dict[str, str]:
    """Return the environment variable ECHO_JOIN, which contains the run's join string.

    The join string is not put on a command line, where other users of the machine would see it.
    Without encryption the result is empty.
    """
    if not config.security.curve:
        return {}
    keys, secret = load_or_create_keys(config.run_dir)
    address = join_address(config.learner.listen, config.learner.advertise)
    return {ECHO_JOIN: str(write_join(config.run_dir, address, keys, secret))}


def start_node(
    name: str,
    role: str,
    config_path: Path,
    overrides: Sequence[str],
    *,
    extra: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
) -> NodeProcess:
    """Start the process of one node.

    If `output` is given, Ctrl-C in the terminal does not reach the process.
    """
    command = [sys.executable, "-m", "echo.cli.main", "node", "--role", role]
    command += ["--config", str(config_path)]
    command += [part for item in overrides for part in ("--set", item)]
    command += extra
    file: IO[bytes] | None = None
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        file = output.open("ab")
    # The process gets a session of its own. So Ctrl-C in the terminal reaches only the learner,
    # which drains. Meanwhile the workers finish their groups. This command ends them after the
    # learner.
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environment or {}), interrupts.STARTED_BY: str(os.getpid())},
        stdout=file,
        stderr=file,
        start_new_session=file is not None,
    )
    if file is not None:
        file.close()
    return NodeProcess(name, process, role, output)


def pass_on(number: int, learner: NodeProcess | None) -> None:
    """Forward a signal to the learner. If the learner has not started, exit."""
    if number == signal.SIGHUP:
        interrupts.leave_terminal()
    if learner is None:
        interrupts.announce(number)
        raise SystemExit(interrupts.signal_exit_code(number))
    # A terminal sends Ctrl-C to the learner as well; the learner counts the two signals as one.
    learner.process.send_signal(number)


def wait_for(learner: NodeProcess, nodes: Sequence[NodeProcess], console: Console) -> int:
    """Wait for the learner to end; return the learner's exit code.

    When all workers have failed, send SIGTERM to the learner, so that the learner saves and ends.
    Otherwise the learner would wait for new workers for hours.
    """
    reported: set[str] = set()
    workers = {node.name for node in nodes if node.role == "worker"}
    is_alone = False
    while (code := learner.process.poll()) is None:
        for node in nodes:
            if node.name not in reported and (end := describe_end(node)):
                reported.add(node.name)
                console.print(Text(end, "yellow"), soft_wrap=True)
        if not is_alone and workers <= reported:
            is_alone = True
            learner.process.terminate()
        time.sleep(0.1)
    return code if code >= 0 else interrupts.signal_exit_code(-code)


def describe_end(node: NodeProcess) -> str:
    """Return text that describes a node's failure and quotes the node's last line of output.

    The text is "" if the node still runs or has ended with exit code 0.
    """
    code = node.process.poll()
    if not code:
        return ""
    if node.output is None:
        return f"{node.name} ended with code {code}"
    lines = node.output.read_text(encoding="utf-8", errors="replace").splitlines()
    words = next((one_line(line.strip()) for line in reversed(lines) if line.strip()), "")
    return f"{node.name} ended with code {code}{words and ': '}{words}; see {node.output.parent}"


def stop(nodes: Sequence[NodeProcess], *, grace_s: float) -> None:
    """Wait for the nodes to end, then send SIGTERM twice, then SIGKILL.

    The nodes have `grace_s` to end by themselves. On the first SIGTERM a worker stops sampling and
    saves unfinished rollouts. On the second SIGTERM the worker ends its engine's process and its
    reward processes. SIGKILL would leave these processes running.
    """
    running = still_running(nodes, within_s=grace_s)
    for patience_s in (interrupts.SAVE_S, STOP_S):
        for node in running:
            node.process.terminate()
        running = still_running(running, within_s=patience_s)
    for node in running:
        node.process.kill()
        node.process.wait()


def still_running(nodes: Sequence[NodeProcess], *, within_s: float) -> list[NodeProcess]:
    """Wait at most `within_s` seconds for all nodes to end; return the nodes that still run."""
    give_up_at = time.monotonic() + within_s
    running = []
    for node in nodes:
        try:
            node.process.wait(timeout=max(0.01, give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            running.append(node)
    return running
