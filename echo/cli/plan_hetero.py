"""`echo-rl plan --hetero`: divide the GPUs of one site between training and generation."""

from __future__ import annotations

import math

from echo.cli.plan_text import node_command
from echo.config.fleet_file import FleetRequest
from echo.core.errors import PlanError
from echo.core.units import format_duration
from echo.fleet.hetero import Cluster, HexJob, HexScheduler, Schedule


def assign_gpus(request: FleetRequest) -> Schedule:
    """Return the best division of the learner's GPUs and all offers' between the two jobs.

    Raises:
        PlanError: if the model fits nowhere for training, or nowhere for generation.
    """
    job = request.job_row
    counts: dict[str, int] = {request.learner.gpu: request.learner.num_gpus}
    for row in request.offers:
        counts[row.gpu] = counts.get(row.gpu, 0) + row.count * row.num_gpus
    scheduler = HexScheduler(
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


def assignment_text(request: FleetRequest, schedule: Schedule) -> str:
    """Return the division, and the commands for those parts of it that Echo can start."""
    lines = [
        f"{request.model.name}: {format_duration(schedule.step_s)} per step "
        f"(training {format_duration(schedule.train_s)}, generation "
        f"{format_duration(schedule.rollout_s)} with {format_duration(schedule.update_s)} for new "
        "weights); every rate is an estimate",
        "training:",
    ]
    lines += [
        f"  {stage.num_gpus} x {stage.gpu}: {stage.num_layers} layers, dp "
        f"{stage.data_parallel}, tp {stage.tensor_parallel}, pp {stage.pipeline_parallel}"
        for stage in schedule.training.stages
    ]
    lines += [f"  {_learner_command(request, schedule)}", "generation:"]
    shares = zip(schedule.rollouts.replicas, schedule.rollouts.rollouts, strict=True)
    for (replica, count), rollouts in shares:
        [(gpu, size)] = replica.gpus
        lines.append(
            f"  {count} x {size} {gpu}: {rollouts} rollouts per step, "
            f"{replica.tokens_per_s:.0f} tokens/s each; for each one"
        )
        lines.append(f"    {_worker_command(request, size)}")
    return "\n".join(lines)


def _learner_command(request: FleetRequest, schedule: Schedule) -> str:
    """Return how to start the training, as far as there is a learner that can do it."""
    num_gpus = sum(stage.num_gpus for stage in schedule.training.stages)
    if num_gpus > 1:
        return f"(no command: Echo's learner trains on one GPU so far, not on {num_gpus})"
    return node_command("learner", [f"learner.advertise={request.learner.address}"])


def _worker_command(request: FleetRequest, num_gpus: int) -> str:
    """Return the command of one worker that samples on so many GPUs."""
    sets = [f'worker.connect=["{request.learner.address}"]', "engine.kind=vllm"]
    if num_gpus > 1:
        sets.append(f"engine.options.tensor_parallel_size={num_gpus}")
    return node_command("worker", sets)
