"""`echo-plan --hetero`: divide the GPUs of one site between training and generation."""

from __future__ import annotations

import math
import shlex

from echo.config.fleet import Request
from echo.errors import PlanError
from echo.planner.hex import Schedule, Scheduler
from echo.planner.hex_train import Cluster, HexJob, StagePlan
from echo.units import format_duration


def assign_gpus(request: Request) -> Schedule:
    """Return the best division of the learner's GPUs and all offers' between the two jobs.

    Raises:
        PlanError: if the model fits nowhere for training, or nowhere for generation.
    """
    job = request.job_row
    counts: dict[str, int] = {request.learner.gpu: request.learner.num_gpus}
    for row in request.offers:
        counts[row.gpu] = counts.get(row.gpu, 0) + row.count * row.num_gpus
    scheduler = Scheduler(
        Cluster(gpus={name: request.gpus[name] for name in counts}, counts=counts),
        HexJob(
            model=request.model,
            rollouts_per_step=math.ceil(request.job.rollouts_per_step),
            prompt_tokens=job.prompt_tokens,
            completion_tokens=request.job.completion_tokens,
            max_tokens=job.prompt_tokens + request.job.max_completion_tokens,
        ),
    )
    schedule = scheduler.find()
    if math.isinf(schedule.step_s):
        listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        raise PlanError(
            f"{request.model.name} cannot be trained and sampled on {listed}: no division leaves "
            "enough memory on both sides; add GPUs, or larger ones, or choose a smaller model"
        )
    return schedule


def assignment_text(request: Request, schedule: Schedule) -> str:
    """Return the division and the commands that start it."""
    lines = [
        f"{request.model.name}: {format_duration(schedule.step_s)} per step "
        f"(training {format_duration(schedule.train_s)}, generation "
        f"{format_duration(schedule.rollout_s)} with {format_duration(schedule.update_s)} for new "
        "weights); every rate is an estimate",
        "training:",
    ]
    for number, stage in enumerate(schedule.training.stages):
        lines.append(
            f"  {stage.num_gpus} x {stage.gpu}: {stage.num_layers} layers, dp "
            f"{stage.data_parallel}, tp {stage.tensor_parallel}, pp {stage.pipeline_parallel}"
        )
        lines.append(f"    {_torchrun(request, schedule, number, stage)}")
    lines.append("generation:")
    shares = zip(schedule.rollouts.replicas, schedule.rollouts.rollouts, strict=True)
    for (replica, count), rollouts in shares:
        [(gpu, size)] = replica.gpus
        lines.append(
            f"  {count} x {size} {gpu}: {rollouts} rollouts per step, "
            f"{replica.tokens_per_s:.0f} tokens/s each"
        )
        lines.append(f"    {_vllm(request, size, count)}")
    return "\n".join(lines)


def _torchrun(request: Request, schedule: Schedule, number: int, stage: StagePlan) -> str:
    """Return the torchrun call on the machines of one type; pipelines meet at one address."""
    per_node = min(request.gpus[stage.gpu].num_per_node, stage.num_gpus)
    num_nodes = math.ceil(stage.num_gpus / per_node)
    before = sum(earlier.num_layers for earlier in schedule.training.stages[:number])
    command = shlex.join(
        [
            "torchrun",
            f"--nnodes={num_nodes}",
            f"--nproc-per-node={per_node}",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=LEARNER:29500",
            "TRAINER",  # the names that follow are Megatron-LM's
            f"--tensor-model-parallel-size={stage.tensor_parallel}",
            f"--pipeline-model-parallel-size={stage.pipeline_parallel}",
        ]
    )
    return f"{command}  # layers {before} to {before + stage.num_layers - 1}"


def _vllm(request: Request, tensor_parallel: int, num_replicas: int) -> str:
    """Return the vLLM call of one replica; `num_replicas` of them run."""
    longest = request.job_row.prompt_tokens + request.job.max_completion_tokens
    return shlex.join(
        [
            "vllm",
            "serve",
            request.model.name,
            f"--tensor-parallel-size={tensor_parallel}",
            f"--data-parallel-size={num_replicas}",
            f"--max-model-len={longest:.0f}",
            "--dtype=bfloat16",
        ]
    )
