"""`echo-rl eval MODEL|RUN[@STEP]`: scores a model or a checkpoint on held-out prompts.

Nothing is trained. The command only reads the run's files, so the run may still be under way. By
default the prompts, seeds, reward and sampling are those of the run's own evaluations. So a
checkpoint's scores can be compared with the scores in the run's metrics. The command line can
change the settings.

By default this machine samples the answers. With `--serve`, workers join this process and sample
the answers.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from echo.cli.commands.node import read_run_file, run_loop, run_node
from echo.cli.output import make_log, print_json, run_command
from echo.cli.parsers import eval_parser
from echo.config.fields import kind_of, override_of
from echo.config.load import parse_config
from echo.config.schema import Config
from echo.core.errors import ConfigError, DataError
from echo.core.monitoring.scores import Estimate
from echo.core.paths import local_path
from echo.core.rollout import PolicyVersion
from echo.core.units import counted, one_line
from echo.engine.model import (
    build_shapes,
    load_directory,
    unrounded_names,
    with_cpu_dtype,
)
from echo.engine.weights import round_tensors, torch_dtype
from echo.records.ledger import has_ledger
from echo.runtime.learner.saving.checkpoint import CheckpointInfo, find_checkpoint
from echo.runtime.learner.setup import Data, build_evaluation, build_evaluator, load_data
from echo.runtime.learner.versions.evaluation import EvalResult
from echo.runtime.worker.setup import import_engine, make_demand, make_engine
from echo.train.saved_state import load_weights

if TYPE_CHECKING:
    from rich.console import Console

    from echo.engine.weights import Weights
    from echo.runtime.learner.evaluation_node import EvaluationNode


@dataclass(frozen=True, slots=True)
class EvalTarget:
    """The model or the checkpoint to score."""

    name: str
    """Name in the output, such as "runs/quickstart, step 40"."""
    config: Config
    """The settings of the evaluation. Their section `sampling` says how the evaluation samples."""
    checkpoint: tuple[Path, CheckpointInfo] | None
    """Directory and metadata of the checkpoint; None for a model."""
    runs_dir: Path
    """Directory that holds the runs."""

    @property
    def version(self) -> PolicyVersion:
        if self.checkpoint is None:
            return PolicyVersion(1, 0)
        return PolicyVersion(self.checkpoint[1].lineage, self.checkpoint[1].step)

    def weights(self, data: Data) -> Weights:
        """Return the weights under their tensors' names, rounded as in a published version.

        Raises:
            DataError, StorageError: if the weights cannot be read.
        """
        dtype = self.config.model.dtype
        if self.checkpoint is None:
            if data.lora is not None:
                raise DataError(f"{self.name} has no checkpoint of an adapter yet to evaluate")
            directory = local_path(self.config.learner.init_from or data.model_dir)
            return load_directory(directory, dtype)
        model = None if data.lora is not None else build_shapes(data.model_dir)
        weights = load_weights(self.checkpoint[0])
        return round_tensors(weights, torch_dtype(dtype), unrounded_names(model))


def main(argv: Sequence[str] | None = None) -> int:
    """Score the model or checkpoint that the command line names; return the exit code."""
    return run_command(_run, eval_parser().parse_args(argv))


def _run(arguments: Namespace, console: Console) -> int:
    target = find_target(arguments)
    is_served = arguments.serve is not None
    log = make_log("eval", to_file=None, to_terminal=is_served or not arguments.json)
    if is_served:
        code, found = serve_target(target, log=log)
        if found is None:
            return code
        result, engine = found
    else:
        log.setLevel(logging.WARNING)
        result, engine = score_target(target, log=log), kind_of(target.config.engine)
    if arguments.json:
        report = score_report(target, result, engine=engine)
        print_json([msgspec.json.encode(report).decode()])
    else:
        for line in score_lines(target, result):
            console.print(line)
    if not result.has_figure:
        raise DataError(f"{target.name}: {result.describe(is_rate=result.is_rate)}")
    return 0


def find_target(arguments: Namespace) -> EvalTarget:
    """Return the model or checkpoint that the command line names, with the evaluation's settings.

    Raises:
        ConfigError: if a setting is wrong.
        DataError, StorageError: if the run has no such checkpoint.
    """
    name, at, which = arguments.target.rpartition("@")
    if not at or Path(arguments.target).exists():
        name, which = arguments.target, ""
    overrides = _overrides(arguments)
    run_dir = local_path(name)
    if not has_ledger(run_dir):  # its format does not matter: the weights are in a checkpoint
        if at and which:
            raise DataError(f"{name}: no run is in this directory, so it has no step {which}")
        overrides = [override_of("model.name", name), *overrides]
        if arguments.config is not None:
            config = read_run_file(arguments.config, overrides, "learner")
        elif arguments.task is None:
            raise ConfigError(
                f"{name} is no run, whose task would be evaluated: add --task KIND, or --config "
                "FILE with a [task]"
            )
        else:
            config = parse_config({}, overrides, "learner", source="this command")
        return EvalTarget(name, _as_evaluated(config, arguments), None, local_path(config.run.dir))
    if arguments.config is not None:
        raise ConfigError(f"--config has no use with the run {name}, which has its own settings")
    config = read_run_file(run_dir / "config.json", overrides, "learner")
    checkpoint = find_checkpoint(run_dir / "checkpoints", which)
    step = 0 if checkpoint is None else checkpoint[1].step
    label = f"{name}, step {step}"
    return EvalTarget(label, _as_evaluated(config, arguments), checkpoint, run_dir.parent)


def _overrides(arguments: Namespace) -> list[str]:
    found = ["eval.interval_steps=1"]  # the command evaluates, whether or not the run does
    if arguments.task is not None:
        found += ["task.options={}", override_of("task.kind", arguments.task)]
    if arguments.samples is not None:
        found.append(f"eval.num_samples={arguments.samples}")
    if arguments.prompts is not None:
        found.append(f"eval.num_prompts={arguments.prompts}")
    if arguments.serve is not None:
        found.append(override_of("learner.listen", arguments.serve))
    return [*found, *arguments.set]


def _as_evaluated(config: Config, arguments: Namespace) -> Config:
    """Return a copy of the configuration with the sampling settings of the run's evaluations.

    The copy has an advertised address only if --set gives one. The run's own address would lead
    workers to the run's learner.
    """
    changed: dict[str, Any] = {"sampling": config.evaluation_sampling}
    if not any(text.startswith("learner.advertise=") for text in arguments.set):
        changed["learner"] = config.learner.model_copy(update={"advertise": None})
    return config.model_copy(update=changed)


def score_target(target: EvalTarget, *, log: logging.Logger) -> EvalResult:
    """Sample the answers on this machine; return the target's scores."""
    config = target.config
    import_engine(config, log=log)
    data = load_data(config)
    engine = None
    try:
        base = data.model_dir if data.lora is None else data.lora.base_dir
        section, _ = with_cpu_dtype(config.worker, base)
        config = config.model_copy(update={"worker": section})
        longest = len(data.prompts.make(0).lease.prompt_ids)
        number = config.eval.num_prompts * config.eval.num_samples
        demand = make_demand(config, {"prompt_tokens": longest, "rollouts": number})
        engine = make_engine(config, data.model_dir, data.lora, demand)
        evaluator = build_evaluator(config, data, log=log, engine=engine)
        assert evaluator is not None
        result = evaluator.evaluate(target.version, target.weights(data))
        assert result is not None
        return result
    finally:
        if engine is not None:
            engine.close()
        data.host.close()
        data.prompts.close()


def serve_target(
    target: EvalTarget, *, log: logging.Logger
) -> tuple[int, tuple[EvalResult, str] | None]:
    """Let workers sample the answers; return the exit code and the result.

    The result has the scores and the kinds of the workers' engines. If the node fails, the result
    is None.
    """
    config = target.config
    data = load_data(config)
    nodes: list[EvaluationNode] = []

    async def serve() -> str:
        directory = target.runs_dir / "eval"
        weights = partial(target.weights, data)
        node = await build_evaluation(config, data, weights, directory, log=log)
        nodes.append(node)
        return await run_node(node)

    try:
        code = run_loop(serve(), log)
        if code:
            return code, None
        [node] = nodes
        return code, (node.result(target.version), ", ".join(sorted(node.engines)))
    finally:
        data.host.close()
        data.prompts.close()


def score_lines(target: EvalTarget, result: EvalResult) -> list[str]:
    """Return the scores as lines for the user."""
    config, scores = target.config, result.scores
    sampling = config.sampling
    mean = "mean" if scores.num_samples == 1 else f"mean (avg@{scores.num_samples})"
    rows: list[tuple[str, str]] = [(mean, str(scores.mean))]
    if result.is_rate:
        rows += [(f"pass@{k}", str(scores.pass_at(k))) for k in scores.ks]
    rows.append(("greedy", str(result.greedy_scores.mean)))
    rows += [(f"reward/{name}", f"{mean:.3f}") for name, mean in result.part_means.items()]
    width = max(len(name) for name, _ in rows)
    prompts = counted(len(scores.by_prompt), "held-out prompt")
    answers = counted(scores.num_samples, "sampled answer")
    how = [f"temperature {sampling.temperature:g}", f"top_p {sampling.top_p:g}"]
    how += [f"top_k {sampling.top_k}"] if sampling.top_k else []
    how += [f"min_p {sampling.min_p:g}"] if sampling.min_p else []
    how.append(f"at most {sampling.max_completion_tokens} tokens")
    lines = [
        f"{target.name}: {_task_name(config)}, {prompts}, {answers} to each "
        f"({', '.join(how)}), and a greedy one",
        *(f"  {name:<{width}}  {value}" for name, value in rows),
        "  [95 % confidence intervals, over prompts]",
    ]
    if result.num_unscored:
        lines.append(f"  no opinion on {result.num_unscored} of {result.num_rewards} answers")
    if result.num_reward_errors:
        lines.append(
            f"  {result.num_reward_errors} of {result.num_rewards} rewards failed and count as 0: "
            f"{result.error}"
        )
    return [one_line(line) for line in lines]  # a reward's error may contain a model's text


def score_report(target: EvalTarget, result: EvalResult, *, engine: str) -> dict[str, Any]:
    """Return the scores as a JSON object; `engine` names the engine that sampled the answers."""
    config, scores = target.config, result.scores
    return {
        "target": target.name,
        "step": None if target.checkpoint is None else result.version.step,
        "task": _task_name(config),
        "num_prompts": len(scores.by_prompt),
        "num_samples": scores.num_samples,
        "engine": engine,
        "sampling": config.sampling.model_dump(),
        "mean": _interval(scores.mean),
        "pass@k": {str(k): _interval(scores.pass_at(k)) for k in scores.ks}
        if result.is_rate
        else None,
        "greedy": _interval(result.greedy_scores.mean),
        "reward_parts": result.part_means,
        "num_reward_errors": result.num_reward_errors,
        "num_unscored": result.num_unscored,
    }


def _interval(estimate: Estimate) -> dict[str, float | None]:
    values = {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _task_name(config: Config) -> str:
    return config.task.kind.rpartition(":")[2]
