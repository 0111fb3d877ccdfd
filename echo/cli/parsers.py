"""Parses the command lines of all commands, without any installed package.

So `--help` and `--version` work at once, even in a fresh clone. The command's module is imported
only after its command line has been parsed without an error.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from pathlib import Path

from echo.core.extras import ROLES, version
from echo.core.paths import MAX_FILE_NAME_BYTES

CONFIGS = {"addition": "quickstart.toml", "countdown": "countdown.toml"}
"""Tasks that the quickstart's small model can learn, and the name of each task's configuration
file."""
MODEL_CONFIG = "word-problems.toml"
"""Name of the quickstart's configuration file for training a pretrained model."""
EXIT_CODES_HELP = (
    "Exit codes: 0 done; 1 failed, or a simulation did not finish; 2 wrong command line or "
    "configuration; 3 unusable data or model; 4 the network failed, or no node answered; 5 refused "
    "by the learner; 6 rolled back, to be resumed; 130, 143 and 129 interrupted by Ctrl-C, SIGTERM "
    "and a closed terminal: a learner has saved its run, a worker has handed over what it had "
    "begun."
)
"""The exit codes of all commands, as help text; docs/operations.md has them as a table."""


RECIPES = ("shell", "systemd", "slurm", "kubernetes", "skypilot", "vast", "runpod")
"""The values of `echo-rl plan --for`. They equal KINDS in echo/fleet/recipes.py, which this module
does not import."""


def _parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"echo-rl {command}", description=description, epilog=epilog
    )
    parser.add_argument("--version", action="version", version=version())
    return parser


def _text(argument: str) -> str:
    """Return the argument; refuse an argument that is not valid UTF-8.

    Python decodes invalid bytes to lone surrogates.
    """
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{argument!r} is not UTF-8 text") from error
    return argument


def _path(argument: str) -> Path:
    """Return the argument as a path; refuse a file name that is too long."""
    path = Path(argument)
    if any(len(os.fsencode(part)) > MAX_FILE_NAME_BYTES for part in path.parts):
        raise argparse.ArgumentTypeError(
            f"a name of more than {MAX_FILE_NAME_BYTES} bytes, which no disk takes"
        )
    return path


def _add_list(parser: argparse.ArgumentParser, option: str, metavar: str, text: str) -> None:
    """Add an option that may be repeated; its values are collected in a list."""
    parser.add_argument(
        option,
        type=_text,
        action="append",
        default=[],
        metavar=metavar,
        help=f"{text}; may be repeated",
    )


def _add_set(parser: argparse.ArgumentParser) -> None:
    _add_list(parser, "--set", "SECTION.KEY=VALUE", "override one key of the configuration")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=_path, metavar="RUN", help="the run's directory")


def node_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl node`."""
    parser = _parser(
        "node",
        "Run one node of a run: the learner, a worker or a relay.",
        f"The keys of the configuration: echo-rl node --role ROLE --help-config. {EXIT_CODES_HELP}",
    )
    parser.add_argument("--role", choices=ROLES, required=True, help="what this node does")
    parser.add_argument(
        "--config",
        type=_path,
        metavar="FILE",
        help="TOML file, the same for all roles, or a run's config.json; not needed by a worker or "
        "relay that has the run's join string in the environment variable ECHO_JOIN",
    )
    _add_set(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would start, its memory budget and every setting, then stop",
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in its directory from the newest checkpoint (learner)",
    )
    start.add_argument(
        "--resume-or-begin",
        action="store_true",
        help="--resume if the run has begun, else begin it: for launchers that start the same "
        "command again, such as torchrun (learner)",
    )
    start.add_argument(
        "--init-from",
        metavar="DIR",
        help="start a new run from the weights in this Hugging Face directory (learner)",
    )
    parser.add_argument(
        "--yes", action="store_true", help="with --resume: accept changes that are not safe"
    )
    parser.add_argument(
        "--no-report", action="store_true", help="leave out the summary at the end (learner)"
    )
    parser.add_argument(
        "--log-events",
        type=_path,
        metavar="FILE",
        help="append each event of this node, and the actions that follow, to this file as JSON "
        "lines",
    )
    parser.add_argument("--help-config", action="store_true", help="print every configuration key")
    return parser


def doctor_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl doctor`."""
    parser = _parser(
        "doctor",
        "Check whether this machine can run a node, and what would make it slow.",
        "Without --config, --connect and ECHO_JOIN only the machine is checked. Exit codes: 0 no "
        "check failed, though some may warn; 1 a check failed; 2 wrong command line.",
    )
    parser.add_argument(
        "--role",
        choices=ROLES,
        help="role of the node to check (default: learner with --config alone, else worker)",
    )
    parser.add_argument(
        "--config", type=_path, metavar="FILE", help="check what a node with this file would need"
    )
    parser.add_argument(
        "--connect",
        metavar="JOIN",
        type=_text,
        help="try to reach the learner of this join string (default: that of ECHO_JOIN)",
    )
    _add_set(parser)
    parser.add_argument(
        "--engine", action="store_true", help="load model.name into the engine, and sample from it"
    )
    parser.add_argument("--json", action="store_true", help="print each finding as a JSON line")
    return parser


def plan_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl plan`."""
    parser = _parser(
        "plan",
        "Say what to rent for a run, what it costs and how to start it.",
        f"A file to start from: configs/fleet-example.toml. {EXIT_CODES_HELP}",
    )
    parser.add_argument(
        "files", nargs="*", type=_path, metavar="FILE", help="TOML: the fleet and the job"
    )
    parser.add_argument(
        "--from",
        dest="run",
        type=_path,
        metavar="RUN",
        help="take rates and times from what this run recorded; without FILE, show them",
    )
    parser.add_argument(
        "--hetero",
        action="store_true",
        help="divide all GPUs of the file, in one site, between training and generation",
    )
    parser.add_argument(
        "--for",
        dest="kind",
        choices=RECIPES,
        help="also write a file for each offer that starts its workers there",
    )
    parser.add_argument(
        "--image",
        type=_text,
        metavar="NAME",
        help="the container image of workers, which configs/Containerfile builds",
    )
    _add_output(parser, out=Path("build") / "plan", files="plan.json and plan.png")
    return parser


def sim_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl sim`."""
    parser = _parser(
        "sim",
        "Simulate a run on virtual time with the code of real runs, and print how fast it is.",
        "A file to start from: configs/scenario-example.toml; a fleet file is a scenario. "
        f"{EXIT_CODES_HELP}",
    )
    parser.add_argument(
        "files", nargs="*", type=_path, metavar="SCENARIO", help="TOML: fleet, job and faults"
    )
    _add_list(
        parser,
        "--set",
        "KEY=VALUE",
        "override table.key=value or list.name.key=value, such as job.max_staleness=4",
    )
    parser.add_argument(
        "--plan",
        type=_path,
        metavar="PLAN",
        help="rent the nodes of this plan.json of `echo-rl plan`, and take its publish period",
    )
    text = "simulate each value of a key, or of several keys each combination"
    _add_list(parser, "--sweep", "KEY=V1,V2,...", text)
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="with --sweep: simulate each with N seeds"
    )
    out = Path("build") / "sim"
    _add_output(parser, out=out, files="sim.json, metrics.jsonl and sim.png")
    return parser


def quickstart_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl quickstart`."""
    parser = _parser(
        "quickstart",
        "Train a small model with a learner, a relay and two workers on this machine.",
        EXIT_CODES_HELP,
    )
    parser.add_argument(
        "--task", choices=CONFIGS, help="what the small model learns (default: addition)"
    )
    parser.add_argument(
        "--model",
        type=_text,
        metavar="NAME",
        help="train a pretrained model on word problems in place of the small one: smollm2 "
        "(downloads 93 MB once), a directory, or an id on the Hugging Face hub",
    )
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="worker processes (default: 2)"
    )
    parser.add_argument(
        "--resume", type=_path, metavar="DIR", help="continue a run, for example runs/quickstart"
    )
    _add_set(parser)
    return parser


_RUN = (
    "the run's directory, or a copy of its file keys/view or keys/operate from the learner's "
    "machine"
)


def status_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl status`."""
    parser = _parser(
        "status",
        "Print the status of a run: the learner's answer, or else the status that was saved last.",
        EXIT_CODES_HELP,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("run", type=_text, metavar="RUN", help=_RUN)
    return parser


def top_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl top`."""
    parser = _parser(
        "top",
        "Watch a run from anywhere, and operate it. Keys are shown on the screen.",
        EXIT_CODES_HELP,
    )
    parser.add_argument("run", type=_text, metavar="RUN", help=_RUN)
    return parser


ACTS_HELP = """\
acts:
  pause RUN            grant no more groups; those that workers have go on, and nothing is lost
  resume RUN           grant groups again
  drain NODE RUN       let a node finish the groups that it has, and leave
  standby NODE RUN     give a worker no leases and no weights, until `resume NODE RUN`
  resume NODE RUN      give a worker leases again, as far as it is needed
  set KEY VALUE RUN    sync.max_staleness (for new leases, up to its value at the start),
                       activation.budget_per_run; until the learner restarts
  stop RUN             end the step, save the run and stop; continue with --resume
"""


def ctl_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl ctl`."""
    parser = _parser(
        "ctl",
        "Operate a run from anywhere. The learner answers and records each act.",
        f"{ACTS_HELP}\n{textwrap.fill(EXIT_CODES_HELP, 100)}",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    acts = ("pause", "resume", "drain", "standby", "set", "stop")
    parser.add_argument("act", choices=acts, metavar="ACT", help=", ".join(acts))
    parser.add_argument(
        "words", type=_text, nargs="+", metavar="[WORD ...] RUN", help=f"see below; RUN is {_RUN}"
    )
    return parser


def ledger_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl ledger`."""
    parser = _parser(
        "ledger",
        "Print what happened to every group of a run, oldest first: the lines of JSON as they were "
        "written. The run may be under way.",
        EXIT_CODES_HELP,
    )
    _add_run(parser)
    return parser


def explain_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl explain`."""
    parser = _parser(
        "explain",
        "Say what the learner and the workers of a run waited for, why, and which setting would "
        "help. The run may be under way, finished or crashed.",
        EXIT_CODES_HELP,
    )
    _add_run(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per stall")
    return parser


def rollouts_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl rollouts`."""
    parser = _parser(
        "rollouts",
        "Show the rollouts of a run: prompt, completion, reward, worker, versions, staleness and "
        "end. The run may be under way, finished or crashed. Without options: the newest rollouts.",
        EXIT_CODES_HELP,
    )
    _add_run(parser)
    parser.add_argument("--step", type=int, metavar="N", help="rollouts that step N trained on")
    parser.add_argument("--group", type=int, metavar="G", help="rollouts of group G")
    parser.add_argument(
        "--grep", type=_text, metavar="TEXT", help="rollouts with TEXT in prompt or completion"
    )
    order = parser.add_mutually_exclusive_group()
    for name, which in (
        ("best", "the K rollouts of highest reward"),
        ("worst", "the K rollouts of lowest reward"),
        ("random", "K rollouts at random"),
    ):
        order.add_argument(f"--{name}", type=int, metavar="K", help=which)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object per line")
    form.add_argument("--parquet", type=_path, metavar="FILE", help="write a Parquet file")
    return parser


def eval_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl eval`."""
    parser = _parser(
        "eval",
        "Score a model, or a checkpoint of a run, on held-out prompts: on this machine, or on "
        "workers that join it. A run is scored on its own task, prompts and sampling; it may be "
        "under way.",
        EXIT_CODES_HELP,
    )
    parser.add_argument(
        "target",
        type=_text,
        metavar="MODEL|RUN[@STEP]",
        help="a model (directory or hub id), or the directory of a run: its newest checkpoint, "
        "that of a step, or @best",
    )
    parser.add_argument("--task", type=_text, metavar="KIND", help="another task, as task.kind")
    parser.add_argument(
        "--config", type=_path, metavar="FILE", help="TOML with the settings for a model"
    )
    parser.add_argument(
        "--samples", type=int, metavar="K", help="answers to each prompt, as eval.num_samples"
    )
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="held-out prompts, as eval.num_prompts"
    )
    parser.add_argument(
        "--serve",
        type=_text,
        metavar="ADDRESS",
        help="have workers sample the answers that join at this address, such as "
        "tcp://0.0.0.0:7700, as they join a run; the join string is in eval/keys/join beside the "
        "runs",
    )
    _add_set(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def report_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `echo-rl report`."""
    parser = _parser(
        "report",
        "Write a report of a run: one self-contained HTML file, and its figures as PNG files. "
        "The run may be under way, finished or crashed.",
        EXIT_CODES_HELP,
    )
    _add_run(parser)
    parser.add_argument(
        "--compare",
        type=_path,
        nargs="+",
        default=[],
        metavar="OTHER",
        help="directories of other runs: draw a line for each run, and list what differs",
    )
    parser.add_argument(
        "--trace",
        type=_text,
        metavar="STEPS",
        help="also write trace.json, for https://ui.perfetto.dev, of these steps, such as 10-20, "
        "or of `all`",
    )
    parser.add_argument(
        "--out", type=_path, metavar="DIR", help="where the files go (default: RUN/report)"
    )
    return parser


def _add_output(parser: argparse.ArgumentParser, *, out: Path, files: str) -> None:
    parser.add_argument(
        "--out", type=_path, default=out, metavar="DIR", help=f"where {files} go (default: {out})"
    )
