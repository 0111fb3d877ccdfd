"""`echo-rl plan` from file to table, JSON and plot, and what it says where there is no plan."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from echo.cli.commands.plan import (
    _learner_commands,
    _signed,
    _worker_settings,
    main,
    selection_text,
    to_json,
)
from echo.cli.parsers import node_parser
from echo.config.fleet_file import parse_fleet, read_files
from echo.config.load import load_config, parse_config
from echo.fleet.hetero import Division, RolloutPlan
from echo.fleet.overlap import Resource

EXAMPLE = Path(__file__).parents[2] / "configs" / "fleet-example.toml"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The example's plan: its directory and what was printed."""
    out = tmp_path_factory.mktemp("plan")
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.setenv("COLUMNS", "120")
        assert main([str(EXAMPLE), "--for", "skypilot", "--out", str(out)]) == 0
    return out, text.getvalue()


@pytest.mark.slow
def test_the_plan_is_printed_with_its_figures(planned: tuple[Path, str]) -> None:
    _, text = planned
    for words in ("fra-4090", "learner waits", "binding", "feasible S", "cost per step", "$/h"):
        assert words in text
    assert "the proven optimum" in text
    assert "another fleet may be up to 0.42% cheaper" in selection_text(0.0042)
    assert "10 fra-4090" not in text  # that is the plot's way to say it
    assert "note: learner: 75.6 s per step is an estimate" in text


def test_the_json_holds_the_plan_and_the_plot_is_a_png(planned: tuple[Path, str]) -> None:
    out, _ = planned
    record = json.loads((out / "plan.json").read_text())
    rent = {row["offer"]: row["count"] for row in record["rent"]}
    assert sum(rent.values()) >= 1
    assert record["outcome"]["prediction"]["idle_share"] < 0.02
    assert record["outcome"]["rate"] >= record["required_overlapping"] * 1.1
    assert len(record["front"]) >= 3
    assert (out / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "plan.png").stat().st_size > 10_000


def test_filters_name_what_a_machine_needs(planned: tuple[Path, str]) -> None:
    _, text = planned
    [line] = [line for line in text.splitlines() if "gpu_name=RTX_4090" in line]
    terms = dict(re.findall(r"(\w+)>?=(\S+)", line.partition("#")[0].strip(" '")))
    # (2 x 4.02e9 + 8492 x 147 456 + 2 GiB) / 0.9 = 12.7 GB.
    assert terms["gpu_ram"] == "13"
    assert {"driver_version", "disk_space", "cpu_ram", "inet_down"} <= terms.keys()


def test_the_commands_are_ones_that_a_node_takes(planned: tuple[Path, str]) -> None:
    _, text = planned
    commands = [shlex.split(line) for line in text.splitlines() if "bin/echo-node" in line]
    roles = [command[command.index("--role") + 1] for command in commands]
    assert roles[:2] == ["learner", "relay"]
    # One for each offer, whose machines differ in their number.
    assert roles.count("worker") == 1
    assert "on each of 10 machines, NUMBER from 1 to 10:" in text
    base = tomllib.loads((EXAMPLE.parent / "wan.toml").read_text())
    for command, role in zip(commands, roles, strict=True):
        sets = [command[i + 1] for i, part in enumerate(command) if part == "--set"]
        config = parse_config(base, sets, role)  # refuses what is no setting
        # What the run's own activation goes by is what the plan went by.
        if role == "learner":
            assert config.learner.price_per_h == 2.69
            assert config.network.price_per_gb == 0.02
            assert config.activation.budget_per_h == 10.0
        else:
            assert config.network.region == "frankfurt"
        if role == "relay":
            assert config.relay.price_per_h == 0.03
        if role == "worker":
            assert (config.worker.price_per_h, config.worker.price_per_gb) == (0.34, 0.005)
            assert config.engine.kind == "vllm"  # the engine whose rates the plan estimates


def test_a_file_for_the_place_of_renting_starts_workers_with_vllm(
    planned: tuple[Path, str],
) -> None:
    out, text = planned
    assert f"wrote {out / 'worker-fra-4090.skypilot.yaml'}, which starts workers" in text
    task = yaml.safe_load((out / "worker-fra-4090.skypilot.yaml").read_text())
    assert (task["num_nodes"], task["resources"]["use_spot"]) == (10, False)
    line = task["run"].partition("bin/echo-node ")[2].replace("\\\n", "")
    words = shlex.split(line)
    arguments = node_parser().parse_args(words)
    config = load_config(EXAMPLE.parents[1] / arguments.config, arguments.set, arguments.role)
    assert config.engine.kind == "vllm"


def test_a_worker_on_several_gpus_divides_the_model_among_them(tmp_path: Path) -> None:
    path = changed_example(tmp_path, ('region = "frankfurt"', 'region = "frankfurt"\nnum_gpus = 2'))
    request = parse_fleet(read_files([Path(path)]))
    settings = _worker_settings(request, request.offers[0], "w")
    assert "engine.options.tensor_parallel_size=2" in settings


@pytest.mark.slow
def test_spot_machines_state_their_losses(tmp_path: Path) -> None:
    fleet = tmp_path / "spot.toml"
    text = EXAMPLE.read_text().replace("count = 12", "count = 1")
    fleet.write_text(text.replace("price_per_h = 0.22", "price_per_h = 0.01"))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main([str(fleet), "--out", str(tmp_path)]) == 0
    [line, *_] = [line for line in output.getvalue().splitlines() if "ore-4090-spot-NUMBER" in line]
    assert "--set worker.losses_per_h=0.15" in line


def test_a_change_that_rounds_to_nothing_has_no_sign() -> None:
    changes = (-0.04, 0.04, -0.06, 0.3)
    assert [_signed(change, 1) for change in changes] == ["0.0", "0.0", "-0.1", "+0.3"]


def test_the_hetero_plan_prints_commands_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(EXAMPLE), "--hetero", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "no command" not in text
    commands = [line.strip() for line in text.splitlines() if "--role" in line]
    roles = []
    for command in commands:
        launcher, program, line = command.partition("bin/echo-node ")
        arguments = node_parser().parse_args(shlex.split(line))
        sets = [*arguments.set, "model.name=m"] if arguments.role == "learner" else arguments.set
        config = load_config(arguments.config, sets, arguments.role)
        assert config.engine.kind == "vllm" or arguments.role == "learner"
        assert program
        assert ("torchrun" in launcher) <= (arguments.role == "learner")
        roles.append(arguments.role)
    assert roles[0] == "learner"
    assert set(roles[1:]) == {"worker"}
    record = json.loads((tmp_path / "hetero.json").read_text())
    assert record["train_s"] > 0
    assert sum(record["rollouts"]["rollouts"]) == 640


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "bin/echo-node --role learner "),
        (8, "torchrun --nproc-per-node 8 --no-python bin/echo-node --role learner "),
        (
            16,
            "on each of 2 machines (docs/several-gpus.md)\n"
            "  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc-per-node 8 "
            "--rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 --no-python bin/echo-node ",
        ),
    ],
)
def test_the_learner_of_a_division_is_started_by_torchrun(number: int, text: str) -> None:
    division = Division(
        train_gpu="RTX 4090", num_train_gpus=number, rollouts=RolloutPlan(), train_s=1.0,
        rollout_s=1.0, update_s=0.0,
    )  # fmt: skip
    request = parse_fleet(read_files([EXAMPLE]))
    assert "\n".join(_learner_commands(request, division)).startswith(text)


def changed_example(tmp_path: Path, *edits: tuple[str, str]) -> str:
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "fleet.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_where_nothing_fits_the_smallest_change_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed_example(tmp_path, ("budget_per_h = 10.0", "budget_per_h = 3.0"))
    assert main([path, "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    said = re.search(r"fleet costs \$(\S+)/h, the budget is \$3.00/h", text)
    assert said is not None
    assert "what would make one sufficient, the smallest change first:" in text
    assert f"a budget of ${said[1]}/h in place of $3.00/h" in text
    # The budget that it names is one that suffices.
    budget = f"budget_per_h = {float(said[1]) + 0.01:.2f}"
    enough = changed_example(tmp_path, ("budget_per_h = 10.0", budget))
    assert not (tmp_path / "plan.json").exists()
    assert main([enough, "--out", str(tmp_path)]) == 0


def test_a_fleet_too_small_for_the_model_has_no_division(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed_example(
        tmp_path, ('model = "Qwen3-4B"', 'model = "Qwen3-32B"'), ('"A100-80GB"', '"H200"')
    )
    # Four H200 and a H100 cannot hold 32.8e9 x 16 bytes = 524 GB of training state and sample too.
    assert main([path, "--hetero", "--out", str(tmp_path)]) == 1
    assert "no division leaves enough memory on both sides" in capsys.readouterr().err


def test_bad_rows_end_with_the_code_of_a_wrong_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed_example(tmp_path, ('gpu = "RTX 4090"', 'gpu = "RTX 4900"'))
    assert main([path]) == 2
    text = capsys.readouterr().err
    assert 'offers[1] (fra-4090, RTX 4900, frankfurt): gpu = "RTX 4900"' in text
    assert text.count('did you mean "RTX 4090"?') == 2


def test_a_call_without_a_file_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "configs/fleet-example.toml is one to start from" in capsys.readouterr().err


def test_json_has_no_infinity_and_names_for_enums() -> None:
    assert to_json({"a": float("inf"), 1: (Resource.ROLLOUTS, 2.0)}) == {
        "a": None,
        "1": ["rollouts", 2.0],
    }
