"""`echo-rl node`: runs one learner, worker or relay."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from rich.console import Console

from echo.cli import interrupts
from echo.cli.interrupts import Interrupted
from echo.cli.output import (
    EXIT_CODES,
    LogFormatter,
    exit_code,
    fail,
    make_log,
    others_in_log,
    print_texts,
)
from echo.cli.parsers import node_parser
from echo.config.fields import Role, has_secret, override_of
from echo.config.load import (
    diff_configs,
    dry_run_text,
    has_own_model,
    keep_choices,
    load_config,
    load_resolved,
    parse_config,
    resolved,
    schema_help,
)
from echo.config.memory.budget import ASSUMED_PROMPT_TOKENS, Budget, memory_budget, read_machine
from echo.config.memory.models import check_unquantised, find_model, read_model_facts
from echo.config.schema import Config, show
from echo.core.errors import (
    ConfigError,
    DataError,
    EchoError,
    RolledBackError,
    StorageError,
    in_one,
)
from echo.core.extras import command, find_config
from echo.core.monitoring.metrics import LearningCurve
from echo.core.monitoring.status import RunStatus
from echo.core.paths import local_path
from echo.core.units import counted, format_duration
from echo.engine import allocator, hub
from echo.net.kernel import raise_descriptor_limit
from echo.net.listener import bound_socket
from echo.net.transport import is_loopback
from echo.records.ledger import has_begun
from echo.records.run_files import read_metrics, save_status
from echo.runtime import node
from echo.runtime.event_log import EventLog
from echo.runtime.identity import (
    ECHO_JOIN,
    Join,
    JoinSource,
    is_own_machine,
    join_address,
)
from echo.runtime.learner.samples import FILE_ONLY
from echo.runtime.learner.saving.resume import check_unused, find_divergence, finished_step
from echo.runtime.node import INTERRUPTED, Node
from echo.tasks.dataset import RowsTask
from echo.tasks.rows.files import is_local
from echo.tasks.task import Task, load_task
from echo.ui.live import LiveView
from echo.ui.report.figures import learning_curve
from echo.ui.report.run import read_run
from echo.ui.screen import MAX_NOTICES
from echo.ui.sinks import MetricsWriter, sinks_missing
from echo.ui.summary import as_text, summarise_run
from echo.ui.worker_status import StatusLine, WorkerStatus

if TYPE_CHECKING:
    from echo.runtime.worker.node import WorkerNode
    from echo.train.ranks.rank_group import RankGroup

# --- dry run --------------------------------------------------------------------------------------
#
# A dry run prints the settings, and what would stop the start in its first minute: a model,
# datasets or prompts that cannot be used, or addresses that are taken.


@dataclass(frozen=True, slots=True)
class StartCheck:
    """The result of the checks before a node starts."""

    problems: tuple[str, ...] = ()
    """Problems that would stop the node in its first minute."""
    preview: tuple[str, ...] = ()
    """Lines on the learner's training data: the data set, the first prompt and an example of a
    reward."""
    prompt_tokens: int = 0
    """Number of tokens of the longest prompt that was read; 0 if no prompt could be read."""


def dry_run(
    config: Config, role: Role, *, num_ranks: int = 1, check: StartCheck | None = None
) -> str:
    """Return the text that `--dry-run` prints: the settings and the required memory.

    Nothing is started, and at most the model's config.json is downloaded.

    Args:
        config: the configuration of the run.
        role: the role of this node.
        num_ranks: the number of the learner's processes.
        check: the result of `check_start`; None if nothing was checked.
    """
    check = check or StartCheck()
    notices: list[str] = []
    budget: Budget | None = None
    if config.model.name is None:
        notices.append("memory budget: known once the learner has told which model it trains")
    else:
        try:
            directory = hub.fetch_config(config.model)
            facts, machine = read_model_facts(directory), read_machine(_gpu_bytes(config, role))
            chosen, note = config, ""
            if role != "relay" and num_ranks == 1:
                from echo.engine.model import with_cpu_dtype  # a relay's machine has no torch

                own = config.learner if role == "learner" else config.worker
                section, note = with_cpu_dtype(own, directory)
                chosen = config.model_copy(update={role: section})
            budget = memory_budget(
                chosen,
                role,
                facts,
                machine,
                prompt_tokens=check.prompt_tokens or ASSUMED_PROMPT_TOKENS,
                num_ranks=num_ranks,
            )
            notices += [f"the {role} {note}"] if note else []
            notices += _attention_notice(config) if role == "learner" else []
        except (ConfigError, DataError) as error:
            known = "see the end" if str(error) in check.problems else error
            notices.append(f"memory budget: not known here: {known}")
    if (awaited := join_awaited(config, role)) is not None:
        notices.append(f"it waits for {awaited}, which the learner writes when it starts")
    return dry_run_text(
        config,
        role,
        would_start=not check.problems,
        budget=budget,
        notices=notices,
        preview=check.preview,
    )


def check_start(
    config: Config, role: Role, *, resume: bool = False, log_events: Path | None = None
) -> StartCheck:
    """Check the model, files, metric sinks and addresses that a node uses when it starts."""
    problems = []
    has_model = False
    try:
        if role == "worker":
            _gpu_bytes(config, role)  # raises if the device is not on this machine
        check_model(config, role)
        _check_files(config, role)
        has_model = True
    except EchoError as error:
        problems.append(str(error))
    data = _check_data(config, role, has_model=has_model)
    problems += [*data.problems, *map(str, _taken_addresses(config, role))]
    problems += _unwritable_places(config, role, log_events)
    if role == "learner":
        metrics = config.metrics
        has_prometheus = metrics.prometheus is not None
        problems += sinks_missing(metrics.sinks, has_prometheus=has_prometheus)
        try:
            if not resume:
                check_unused(config.run_dir)
        except EchoError as error:
            problems.append(str(error))
    try:
        if join_awaited(config, role) is None:
            check_join(config, role)
    except EchoError as error:
        problems.append(str(error))
    return replace(data, problems=tuple(problems))


def _unwritable_places(config: Config, role: Role, log_events: Path | None) -> Iterator[str]:
    """Yield an error for each required directory to which the node cannot write."""
    if why := find_write_fault(config.run_dir):
        remedy = "set run.dir to a directory that can be"
        yield f"run.dir = {show(config.run.dir)} cannot be written: {why}; {remedy}"
    store = config.network.store_dir
    if role != "learner" and store is not None and (why := find_write_fault(Path(store))):
        yield f"network.store_dir = {show(store)} cannot be written: {why}"
    if log_events is not None and (why := find_write_fault(log_events.parent, is_made=False)):
        yield f"--log-events: {log_events} cannot be written: {why}"


def find_write_fault(directory: Path, *, is_made: bool = True) -> str:
    """Return the reason why files cannot be written into a directory; "" if they can be written.

    Args:
        directory: the directory to write into.
        is_made: whether the node creates a missing directory with its parents when it starts.
    """
    place = directory.absolute()
    while is_made and not place.exists() and place != place.parent:
        place = place.parent
    if not place.exists():
        return os.strerror(errno.ENOENT)
    if not place.is_dir():
        return f"{place} is no directory"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place}: {os.strerror(errno.EACCES)}"


def _check_files(config: Config, role: Role) -> None:
    """Check whether a learner or worker can use its model. Download at most config.json.

    Raises:
        EchoError: the error that starting the node would raise.
    """
    model = config.model
    if role == "relay" or model.name is None or (role == "worker" and not has_own_model(config)):
        return
    model_dir = hub.fetch_config(model)
    # Imported here: a relay's machine has no torch.
    from echo.engine.model import has_all_weights, import_architecture

    import_architecture(model_dir)
    is_whole = local_path(model.name).is_dir() or has_all_weights(model_dir)
    if not is_whole:  # the start would download the missing files
        hub.ask(model.name, model.revision)
    if role == "learner":
        from echo.runtime.learner.setup import check_models

        check_models(config, model_dir, has_weights=is_whole)
    elif is_whole:
        from echo.runtime.worker.setup import check_own_model

        check_own_model(config, model_dir)


def check_model(config: Config, role: str) -> None:
    """Check the configured model directories without importing torch.

    Raises:
        DataError: if a model directory is missing, or holds a quantised model.
    """
    name, start = config.model.name, config.learner.init_from
    if name is not None and (role == "learner" or (role == "worker" and has_own_model(config))):
        find_model(name, config.model.revision)
    if role == "learner" and start is not None:
        check_unquantised(local_path(start))


def _check_data(config: Config, role: Role, *, has_model: bool) -> StartCheck:
    """Return the errors in a learner's task and data, and a preview.

    Other roles have no errors and no preview.
    """
    if role != "learner":
        return StartCheck()
    try:
        task = load_task(config.task.kind, config.task.options)
        parts = task.parts() or [task]
        problems = [problem for part in parts for problem in part.data_problems()]
        tables = [part for part in parts if isinstance(part, RowsTask)]
        paths = [path for table in tables for path in (table.path, table.heldout_path) if path]
        if problems or not has_model or not all(map(is_local, paths)):
            return StartCheck(tuple(problems))
        return _preview(config, task)
    except EchoError as error:
        return StartCheck((str(error),))


def _preview(config: Config, task: Task) -> StartCheck:
    """Return a preview of the learner's run, made with the learner's tokenizer.

    The preview is empty if the tokenizer is not on this machine.

    Raises:
        EchoError: if a prompt cannot be tokenized, or is too long for a completion to follow.
    """
    model_dir = hub.directory_here(config.model, hub.CONFIG, "tokenizer_config.json")
    if model_dir is None:
        return StartCheck()
    # Imported here: a relay's machine has no torch.
    from echo.runtime.learner.setup import load_prompts

    prompts, _ = load_prompts(config, model_dir, task)
    try:
        preview = prompts.preview(config.run.max_steps * config.batch.groups_per_step)
        return StartCheck(preview=tuple(preview), prompt_tokens=prompts.longest)
    finally:
        prompts.close()


def _taken_addresses(config: Config, role: str) -> list[EchoError]:
    """Return one error for each configured address at which the node cannot listen."""
    addresses = [getattr(config, role).listen]
    if role == "worker":
        addresses.append(config.agent.listen)
    if role == "learner":
        addresses.append(config.metrics.prometheus)
    errors = []
    for address in filter(None, addresses):
        try:
            asyncio.run(bound_socket(address, None)).close()
        except EchoError as error:
            errors.append(error)
    return errors


def _attention_notice(config: Config) -> list[str]:
    """Return a line that names the attention kernels of a learner on a GPU."""
    from echo.engine.model import pick_device, pick_dtype
    from echo.train.models.attention import PRODUCTS, candidates

    device = pick_device(config.learner.device)
    dtype = pick_dtype(config.learner.dtype, device)
    first, *others = candidates(device, dtype)
    if first is PRODUCTS or config.model.attn_implementation not in ("auto", "sdpa"):
        return []
    rest = "".join(f"; else by {kernel.name}" for kernel in others)
    trial = ", if a trial at the start gives right values and gradients" if others else ""
    return [f"attention of packed rows by {first.name}{trial}{rest}"]


def _gpu_bytes(config: Config, role: Role) -> int | None:
    """Return the free bytes of this role's GPU; None if the role uses the CPU."""
    if role == "relay":
        return None
    device = config.learner.device if role == "learner" else config.worker.device
    try:
        # Imported here: a relay's machine, where a dry run must work too, has no torch.
        from echo.engine.model import free_gpu_bytes
    except ImportError:
        return None
    return free_gpu_bytes(device)


# --- process of a node ----------------------------------------------------------------------------


SAME_SIGNAL_S = 1.0
"""After a signal is counted, further signals are ignored for this many seconds.

Otherwise one Ctrl-C could count twice: the terminal sends the signal to the node and to a launcher,
and the launcher forwards it.
"""


class NodeSignals:
    """Drains a node at the first signal and stops the node at the second signal.

    The third signal kills the process. A signal within SAME_SIGNAL_S of a counted signal is
    ignored.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._counted_at = -math.inf
        self.received: list[int] = []

    def receive(self, number: int) -> None:
        """Drain the node, stop the node or kill the process.

        The number of earlier signals decides.
        """
        if number == signal.SIGHUP:
            interrupts.leave_terminal()
            if self.received:
                return  # a terminal that closes sends it more than once
        now = time.monotonic()
        if now - self._counted_at < SAME_SIGNAL_S:
            return
        self._counted_at = now
        self.received.append(number)
        code = interrupts.signal_exit_code(number)
        if len(self.received) == 1:
            self._node.interrupt()
        elif len(self.received) == 2:
            self._node.log.warning("stopping at once: what is unfinished is given up")
            interrupts.hurry(code)
            self._node.stop(INTERRUPTED)
        else:
            os._exit(code)


async def run_node(node: Node, event_log: EventLog | None = None) -> str:
    """Run a node until it ends or a signal ends it. Return the reason for the end.

    NodeSignals handles the signals. The node's events are written to `event_log`, which is closed
    when the node ends.

    Raises:
        EchoError: if the node cannot continue.
        Interrupted: if a signal has ended the node.
    """
    node.event_log = event_log
    if event_log is not None:
        node.at_release.append(event_log.close)
    signals = NodeSignals(node)
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]  # under nohup
    for number in before:
        loop.add_signal_handler(number, signals.receive, number)
    try:
        reason = await node.run()
    finally:
        # With the node's handlers no signal could stop the process while threads of the node still
        # work.
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    if signals.received and reason == INTERRUPTED:
        raise Interrupted(signals.received[0])
    return reason


def run_loop(main_coroutine: Coroutine[Any, Any, str], log: logging.Logger) -> int:
    """Run a node's coroutine on uvloop, log why the node ended, and return the exit code."""
    allocator.tune(os.environ)
    raise_descriptor_limit()
    try:
        reason = uvloop.run(main_coroutine)
    except EchoError as error:
        log.error("%s", error)  # noqa: TRY400 - the message is for the user, the trace is not
        return exit_code(error)
    except Interrupted as interrupted:
        log.info("ended: %s", INTERRUPTED)
        return interrupted.exit_code
    log.info("ended: %s", reason)
    return 0


# --- learner --------------------------------------------------------------------------------------


ROLLED_BACK = EXIT_CODES[RolledBackError]
"""Exit code of a learner that must be started again with --resume."""
REFRESH_S = 1.0
"""Seconds between two updates of a worker's status line."""


class NoticeBoard(logging.Handler):
    """Keeps the newest MAX_NOTICES log lines for the live view."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.last = ""
        """The newest message without its time. The error that ends the command shows it."""
        self._num_unseen = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's text. Leave out the traceback, which only the log file gets."""
        if getattr(record, FILE_ONLY, False):
            return
        self.last = LogFormatter("%(message)s").format(record).partition("\n    Traceback (")[0]
        line = re.split(r"\n\s*Traceback \(", self.format(record), maxsplit=1)[0]
        self.lines = [*self.lines, line][-MAX_NOTICES:]
        self._num_unseen += 1

    def shown(self) -> None:
        """Mark all kept log lines as shown in the live view."""
        self._num_unseen = 0

    @property
    def unseen(self) -> list[str]:
        """The kept log lines that the live view has not shown, oldest first."""
        return self.lines[-self._num_unseen :] if self._num_unseen else []


def run_rank(
    config: Config, *, resume: bool, has_report: bool, log_events: Path | None = None
) -> int:
    """Run this process as one rank of a learner that torchrun started. Return its exit code.

    The process of rank 0 is the learner to which other nodes connect. The other processes follow
    its commands.

    Raises:
        EchoError: if the processes cannot connect to each other, or if two of them share a GPU.
    """
    device = config.learner.device
    if ":" in device:
        raise ConfigError(
            f'learner.device = "{device}" names one GPU for {_num_ranks()} processes, '
            'each of which takes that of its own number: set learner.device = "auto"'
        )
    # Imported here: a relay's machine has no torch.
    from echo.engine.model import pick_device
    from echo.runtime.learner.setup import follow_leader
    from echo.train.ranks.rank_group import Launch, join

    launch = Launch.of(os.environ)
    rank_group = join(launch, pick_device(device))
    if not launch.rank:
        code = run_learner(
            config,
            resume=resume,
            has_report=has_report,
            log_events=log_events,
            rank_group=rank_group,
        )
        rank_group.dismiss()
    else:
        # Only the process of rank 0 handles a signal: it saves, and then informs the other
        # processes.
        for number in interrupts.SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        name = f"learner.rank{launch.rank}"
        log = _node_log(config, name)
        code = 0
        try:
            follow_leader(config, rank_group, log)
        except EchoError as error:
            log.error("%s", error)  # noqa: TRY400 - the message is for the user
            code = exit_code(error)
    if code:
        # A thread may wait for a process that is gone.
        interrupts.hurry(code)
    return code


def run_learner(
    config: Config,
    *,
    resume: bool,
    has_report: bool,
    log_events: Path | None = None,
    rank_group: RankGroup | None = None,
) -> int:
    """Run the learner with its live view and metric sinks; return the exit code."""
    run_dir = config.run_dir
    board = NoticeBoard()
    board.setFormatter(LogFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    log = _node_log(config, "learner", to_terminal=False)
    log.addHandler(board)
    event_log = open_event_log(log_events, log)
    console = Console(stderr=True)
    sinks, project = config.metrics.sinks, config.metrics.project
    shown = resolved(config)
    with (
        interrupts.unwinding(),
        MetricsWriter(
            run_dir,
            sinks=sinks,
            project=project,
            prometheus=config.metrics.prometheus,
            config=shown,
        ) as metrics,
        LiveView(console, mode=config.ui.live) as view,
    ):
        operator = Operator(run_dir, metrics, view, board)
        main = _run(
            config,
            resume=resume,
            operator=operator,
            event_log=event_log,
            log=log,
            rank_group=rank_group,
        )
        code = run_loop(main, log)
    if code == ROLLED_BACK:
        print(board.last, file=sys.stderr)
        return code
    if code and not interrupts.is_interruption(code):
        print(f"error: {board.last or 'see the log'}", file=sys.stderr)
        print(f"log: {run_dir / 'logs' / 'learner.log'}", file=sys.stderr)
        return code
    for line in board.unseen:
        # Lines that are logged after the view has ended, such as what Ctrl-C saved and how to
        # resume.
        print(line, file=sys.stderr)
    if not code and has_report and (run_dir / "final").exists():
        show_summary(run_dir, console)
    return code


def report_finished(config: Config) -> bool:
    """If a run has completed all `run.max_steps` steps, print a line and return True.

    Each process of a learner calls this function. Only the process of rank 0 prints.

    Raises:
        EchoError: if the run's ledger cannot be read.
    """
    run_dir, max_steps = config.run_dir, config.run.max_steps
    step = finished_step(run_dir)
    if step is None or step < max_steps:
        return False
    if _is_first_rank():
        made = f"it has made {counted(step, 'step')}, run.max_steps = {max_steps}"
        text = f"the run is finished: {made}; its weights are in {run_dir / 'final'}"
        print_texts([f"{text}; --set run.max_steps=... goes on"])
    return True


class Operator:
    """Passes the learner's metrics to the sinks, and the learner's status to the live view."""

    is_watching = True

    def __init__(
        self, run_dir: Path, metrics: MetricsWriter, view: LiveView, board: NoticeBoard
    ) -> None:
        """Pass metrics to `metrics`, and the status and log lines to `view`.

        The log lines are those of `board`. The status is also written into `run_dir`.
        """
        self.write_metrics = metrics.write
        self.write_samples = metrics.write_samples
        self._run_dir = run_dir
        self._view = view
        self._board = board
        self._can_save = True

    @property
    def notices(self) -> tuple[str, ...]:
        """The newest log lines, oldest first."""
        return tuple(self._board.lines)

    def show(self, status: RunStatus) -> None:
        """Draw the status and the newest log lines in the live view."""
        self._board.shown()
        self._view.update(status)

    def save(self, status: RunStatus) -> None:
        """Write the status into the run's directory; warn once if that fails."""
        try:
            save_status(self._run_dir, status)
        except StorageError as error:
            if self._can_save:
                self._can_save = False
                logging.getLogger("echo.learner").warning("%s", error)


async def _run(
    config: Config,
    *,
    resume: bool,
    operator: Operator,
    event_log: EventLog | None,
    log: logging.Logger,
    rank_group: RankGroup | None,
) -> str:
    # Imported here: a relay's machine has no torch.
    from echo.runtime.learner.setup import Options, build_learner

    options = Options(
        follower=operator,
        log=log,
        resume=resume,
        earlier=read_curve(config.run_dir, log) if resume else None,
        rank_group=rank_group,
    )
    node = await build_learner(config, options)
    if config.security.curve and sys.stderr.isatty():
        show_join(config.run_dir / "keys" / "join")
    return await run_node(node, event_log)


def read_curve(run_dir: Path, log: logging.Logger) -> LearningCurve | None:
    """Return the run's learning curve up to now.

    If the run's metrics cannot be read, log a warning and return None.
    """
    try:
        history = read_metrics(run_dir)
    except EchoError as error:
        log.warning("the view begins without the curve of the steps before: %s", error)
        return None
    rewards = {int(row["step"]): row["reward/mean"] for row in history.train}
    return LearningCurve(
        rewards={step: reward for step, reward in rewards.items() if reward is not None},
        evaluations=tuple((e.step, e.sampled, e.greedy) for e in history.evaluations),
        is_rate=history.evals_are_rates,
    )


def show_join(join_path: Path) -> None:
    """Print the command with which a worker on another machine joins the run.

    The command contains the run's secret. So it is printed only if standard error is a terminal.
    """
    join = Join.parse(join_path.read_text(encoding="utf-8"))
    if not is_loopback(join.address):
        line = f"ECHO_JOIN={join} {command('node', elsewhere=True)} --role worker"
        print(f"others join with:\n  {line}", file=sys.stderr)


def show_summary(run_dir: Path, console: Console, *, commands: list[str] | None = None) -> None:
    """Draw the run's learning curve to a file and print the run's summary.

    If the run has made no step, print one line instead.
    """
    if not read_metrics(run_dir).train:
        text = "no optimizer step was made, so there is nothing to sum up"
        console.file.write(f"{text}; why: {run_dir / 'logs'}\n")
        return
    learning_curve(read_run(run_dir), run_dir / "learning_curve.png")
    summary = summarise_run(run_dir, commands=commands)
    text = as_text(summary)
    on_screen = as_text(summary, width=min(console.width, 110)) if console.is_terminal else text
    console.file.write(on_screen + "\n")
    (run_dir / "summary.txt").write_text(text + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `echo-rl node` and return its exit code."""
    interrupts.end_with_parent()
    arguments = node_parser().parse_args(argv)
    if arguments.help_config:
        print_texts([schema_help(arguments.role)])
        return 0
    try:
        config = configuration_of(arguments)
        if _is_first_rank():
            for note in config.notes:
                print(f"note: {note}", file=sys.stderr)
        if arguments.dry_run:
            if _is_first_rank():
                _print_dry_run(arguments, config)
            return 0
        if arguments.role == "worker":
            # Not for a learner: its rows have few lengths, but more shapes are in use at once.
            allocator.bound_onednn(os.environ)
        check_ended(arguments, config)
        code = run_role(
            config,
            arguments.role,
            resume=_goes_on(arguments, config),
            has_report=not arguments.no_report,
            log_events=arguments.log_events,
        )
    except EchoError as error:
        return fail(error)  # the node has not begun, so no thread delays the end
    if code == ROLLED_BACK and _num_ranks() == 1:
        start_again(arguments)
    has_server = arguments.role == "learner" and bool(config.metrics.sinks or config.alerts.webhook)
    if interrupts.is_interruption(code) or has_server:
        # A thread may still load a model or make a step, and the library of a tracker or the thread
        # of a webhook waits for its server when the process ends. Everything is saved already, so
        # the process need not wait for them.
        interrupts.hurry(code)
    return code


def _print_dry_run(arguments: argparse.Namespace, config: Config) -> None:
    resume = _goes_on(arguments, config)
    check = check_start(config, arguments.role, resume=resume, log_events=arguments.log_events)
    print_texts([dry_run(config, arguments.role, num_ranks=_num_ranks(), check=check)])
    if check.problems:
        raise ConfigError(in_one("start", check.problems))


def start_again(arguments: argparse.Namespace) -> None:
    """After a rollback, replace this process by the same learner with --resume.

    The process id stays the same, so launchers and terminals do not see the process end.
    """
    own = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*own, "node", *line_of_resume(arguments)])


def line_of_resume(arguments: argparse.Namespace) -> list[str]:
    """Return the command-line arguments that resume the same learner's run."""
    sets = list(arguments.set)
    if arguments.init_from:
        sets.append(override_of("learner.init_from", arguments.init_from))
    line = ["--role", arguments.role, "--resume"]
    for option, value in (("--config", arguments.config), ("--log-events", arguments.log_events)):
        line += [] if value is None else [option, str(value)]
    for each in sets:
        line += ["--set", each]
    for option, is_given in (("--yes", arguments.yes), ("--no-report", arguments.no_report)):
        line += [option] if is_given else []
    return line


def configuration_of(arguments: argparse.Namespace) -> Config:
    """Return the configuration from the command line, the configuration file and ECHO_JOIN.

    Raises:
        ConfigError: if a value is wrong or missing; the text lists every error.
    """
    role, overrides = arguments.role, list(arguments.set)
    given = {
        "--resume": arguments.resume,
        "--resume-or-begin": arguments.resume_or_begin,
        "--init-from": arguments.init_from,
        "--no-report": arguments.no_report,
    }
    if role != "learner" and any(given.values()):
        option = next(name for name, value in given.items() if value)
        raise ConfigError(f"{option} is for the learner; a {role} joins whatever the learner runs")
    if arguments.yes and not (arguments.resume or arguments.resume_or_begin):
        raise ConfigError("--yes accepts changes to a run that is resumed; it needs --resume")
    if arguments.init_from:
        overrides.append(override_of("learner.init_from", arguments.init_from))
    join = os.environ.get(ECHO_JOIN) if role != "learner" else None
    config = find_config_of(
        role, arguments.config, overrides, join=join, patience=not arguments.dry_run
    )
    if _goes_on(arguments, config):
        saved = _saved_config(config.run_dir)
        config = keep_choices(saved, config)
        if _is_first_rank():
            _check_changes(saved, config, accept_unsafe=arguments.yes)
    return config


def find_config_of(
    role: Role, path: Path | None, overrides: Sequence[str], *, join: str | None, patience: bool
) -> Config:
    """Return a node's configuration from a file, a join string, or both.

    Args:
        role: the role of the node.
        path: the file of --config; None without this option.
        overrides: the texts of --set.
        join: the join string on the node's command line or in ECHO_JOIN; None without a join
            string.
        patience: whether to wait until a learner on this machine has written its join string.

    Raises:
        ConfigError: if a value is wrong or missing; the text lists every error.
    """
    overrides = list(overrides)
    if join:
        # The first override, so that a --set of the same key replaces it.
        overrides.insert(0, f"security.join={Join.parse(join, source=ECHO_JOIN)}")
    if path is not None:
        if role != "learner" and not join:
            overrides[:0] = find_own_join(path, overrides, role, patience=patience)
        return read_run_file(path, overrides, role)
    if join:
        # The files are named after the node, which learns the run's name only after it opened its
        # log.
        name = node.node_name(role, getattr(parse_config({}, overrides, role), role).name)
        names = {"run": {"name": name.replace("/", "-")}, role: {"name": name}}
        return parse_config(names, overrides, role, source=DRAWN_NAME)
    example = find_config("gsm8k.toml" if role == "learner" else "two-machines.toml")
    alone = "" if role == "learner" else f" Without one a {role} needs the run's {ECHO_JOIN}."
    raise ConfigError(f"--config FILE is missing; {example} is one to start from.{alone}")


DRAWN_NAME = "this node's name"
"""Source of the name that a node without a configuration file draws."""


def check_ended(arguments: argparse.Namespace, config: Config) -> None:
    """If the run has diverged, refuse a restart by a launcher. A user may still resume the run.

    Raises:
        DivergedError: if a divergence has ended the run. Only the process of rank 0 raises it.
        EchoError: if the run's ledger cannot be read.
    """
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    is_unasked = arguments.resume_or_begin or (arguments.resume and is_restart)
    if not (is_unasked and _is_first_rank() and has_begun(config.run_dir)):
        return
    ended = find_divergence(config.run_dir)
    if ended is not None:
        raise ended


def _goes_on(arguments: argparse.Namespace, config: Config) -> bool:
    return bool(arguments.resume or (arguments.resume_or_begin and has_begun(config.run_dir)))


POLL_S = 0.2
"""Seconds between two checks for a learner's join string."""


def find_own_join(path: Path, overrides: Sequence[str], role: str, *, patience: bool) -> list[str]:
    """Return a list with one override, which names the join string of a learner on this machine.

    The list is empty if the node already has a join string, if encryption is off, or if the node
    dials another machine.

    Args:
        path: the configuration file.
        overrides: the overrides of settings from the command line.
        role: the role of this node.
        patience: whether to wait until the learner has written its join string. The time limit is
            the same as for a learner on another machine.

    Raises:
        ConfigError: if the learner does not write its join string within the time limit.
    """
    try:
        config = read_run_file(path, overrides, None)
    except ConfigError:
        return []  # the start reports this error together with those of the role
    if _is_join_known(config, role) or not config.security.curve:
        return []
    own = _own_join(config)
    if patience and _is_own_learner(config, role):
        _wait_for(own, patience_s=config.network.reconnect_for_s)
    is_needed = own.exists() and not getattr(config, role).connect
    return [override_of("security.join", str(own))] if is_needed else []


def join_awaited(config: Config, role: str) -> Path | None:
    """Return the path of the join string if the node would wait for this file when it starts.

    A node waits if its learner runs on this machine and has not written a join string yet.
    Otherwise the result is None.
    """
    if role == "learner" or not config.security.curve or _is_join_known(config, role):
        return None
    own = _own_join(config)
    return own if _is_own_learner(config, role) and not own.exists() else None


def check_join(config: Config, role: str) -> None:
    """Check the join string of a relay or worker.

    Raises:
        ConfigError: if there is no join string, or if the join string cannot be read.
    """
    if role == "relay":
        JoinSource("relay", config.relay.connect, config.security, config.run_dir).keys()
    elif role == "worker":
        JoinSource("worker", config.worker.connect, config.security, config.run_dir).keys()


def _own_join(config: Config) -> Path:
    return config.run_dir / "keys" / "join"


def _is_join_known(config: Config, role: str) -> bool:
    """Return whether the settings contain a join string or name a file with a join string."""
    return config.security.join is not None or any(map(has_secret, _dialled(config, role)))


def _is_own_learner(config: Config, role: str) -> bool:
    return all(map(is_own_machine, _dialled(config, role)))


def _dialled(config: Config, role: str) -> Sequence[str]:
    """Return the addresses that a relay or worker dials; the default is the learner's address."""
    learner = config.learner
    return getattr(config, role).connect or (join_address(learner.listen, learner.advertise),)


def _wait_for(path: Path, *, patience_s: float) -> None:
    """Wait until a file exists; print the file's path once.

    Raises:
        ConfigError: if the file does not exist after `patience_s`.
    """
    give_up_at = time.monotonic() + patience_s
    has_printed = False
    while not path.exists():
        if time.monotonic() >= give_up_at:
            raise ConfigError(
                f"no learner has written {path} in {format_duration(patience_s)}: start it with "
                f"the same run.dir and run.name, or set {ECHO_JOIN} to its join string; "
                "network.reconnect_for_s sets how long to wait"
            )
        if not has_printed:
            has_printed = True
            text = f"waiting for {path}, which the learner writes when it starts"
            print(f"{text}; on another machine set {ECHO_JOIN} to its line", file=sys.stderr)
        time.sleep(POLL_S)


def read_run_file(path: Path, overrides: Sequence[str], role: Role | None) -> Config:
    """Read a configuration file: TOML that a user wrote, or a config.json that a run saved."""
    if path.suffix == ".json":
        return load_resolved(path, overrides, role)
    return load_config(path, overrides, role)


def _saved_config(run_dir: Path) -> Config:
    """Return the configuration that the run to be resumed has saved.

    Raises:
        ConfigError: if the run has no saved configuration.
    """
    path = run_dir / "config.json"
    if not path.exists():
        raise ConfigError(
            f"nothing to resume: {path} does not exist; leave --resume out to begin the run, or "
            "name its directory with --set run.dir=... and --set run.name=..."
        )
    # Loaded without a role: only the new configuration must obey a learner's rules, not one that an
    # older release saved.
    return load_resolved(path)


def _check_changes(saved: Config, config: Config, *, accept_unsafe: bool) -> None:
    """Print the settings that differ between the saved and the new configuration.

    Raises:
        ConfigError: if a change is unsafe for this run and `accept_unsafe` is False.
    """
    changes = diff_configs(saved, config)
    for change in changes:
        print(change, file=sys.stderr)
    unsafe = [change.key for change in changes if change.unsafe_reason]
    if unsafe and not accept_unsafe:
        raise ConfigError(
            f"the change of {', '.join(unsafe)} is not safe for this run; leave it as it was, "
            "start a new run with --init-from, or insist with --yes"
        )


def run_role(
    config: Config,
    role: str,
    *,
    resume: bool = False,
    has_report: bool = True,
    log_events: Path | None = None,
) -> int:
    """Run one node of this role until the node ends; return the exit code.

    Raises:
        EchoError: if the node cannot start. In this case no file has been written.
    """
    if resume and report_finished(config):
        return 0
    check_join(config, role)
    check_model(config, role)  # before slow imports
    if _is_first_rank():
        for error in _taken_addresses(config, role):
            raise error
    if role == "learner":
        if not resume and _is_first_rank():
            check_unused(config.run_dir)
        if _num_ranks() > 1:
            return run_rank(config, resume=resume, has_report=has_report, log_events=log_events)
        return run_learner(config, resume=resume, has_report=has_report, log_events=log_events)
    section = config.relay if role == "relay" else config.worker
    is_drawn = section.name is None or config.sources.get(f"{role}.name") == DRAWN_NAME
    name = node.node_name(role, section.name)
    config = config.model_copy(update={role: section.model_copy(update={"name": name})})
    log = _node_log(config, name)
    with others_in_log(log):
        event_log = open_event_log(log_events, log)
        try:
            return run_loop(_run_dialing(config, role, event_log, log), log)
        finally:
            if is_drawn:  # the next process draws another name, so would never read these files
                shutil.rmtree(node.worker_dir(config.run_dir, name), ignore_errors=True)


def _node_log(config: Config, name: str, *, to_terminal: bool = True) -> logging.Logger:
    path = config.run_dir / "logs" / f"{name}.log"
    is_json = config.ui.log_format == "json"
    return make_log(name, to_file=path, to_terminal=to_terminal, is_json=is_json)


def open_event_log(path: Path | None, log: logging.Logger) -> EventLog | None:
    """Return the event log that writes to the file of --log-events; None without a file.

    Raises:
        StorageError: if the file cannot be written.
    """
    return None if path is None else EventLog(path, log=log)


def _is_first_rank() -> bool:
    """Return whether this process has rank 0.

    Of a learner's processes, only rank 0 prints and listens.
    """
    return os.environ.get("RANK", "0") == "0"


def _num_ranks() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal():
        raise ConfigError(f"WORLD_SIZE = {text!r} in the environment is no number; unset it")
    return int(text)


async def _run_dialing(
    config: Config, role: str, event_log: EventLog | None, log: logging.Logger
) -> str:
    node: Node
    if role == "relay":
        from echo.runtime.relay import build_relay

        relay, network = config.relay, config.network
        join = JoinSource("relay", relay.connect, config.security, config.run_dir)
        node = await build_relay(relay, network, join, profile=config.profile, log=log)
    else:
        from echo.runtime.worker.setup import build_worker

        node = worker = await build_worker(config, log=log)
        for line in (line for line in log.handlers if isinstance(line, StatusLine)):
            node.spawn(show_status(worker, line, log), name="status")
    return await run_node(node, event_log)


async def show_status(worker: WorkerNode, line: StatusLine, log: logging.Logger) -> None:
    """Update a worker's status line every REFRESH_S until cancelled."""
    status = WorkerStatus(line, log)
    try:
        while True:
            await asyncio.sleep(REFRESH_S)
            status.report(worker.view(), now=worker.now)
    finally:
        line.show("")
