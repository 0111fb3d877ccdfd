"""Set up a learner for a new run or a resume."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echo.algo.corrections import MaskedLoss, RolloutMasks
from echo.algo.loss import Loss, needs_of
from echo.algo.losses import EntropyBonusLoss, ReferenceKlLoss
from echo.config.checks import check_likely_ids, max_tree_tokens
from echo.config.layers import flatten
from echo.config.load import inherited_settings, resolved, save_resolved
from echo.config.losses import GrpoSection
from echo.config.memory.budget import (
    ASSUMED_PROMPT_TOKENS,
    CHECKPOINTING,
    Budget,
    memory_budget,
    read_machine,
)
from echo.config.memory.models import find_model, read_model_facts
from echo.config.schema import AgentSection, Config, RolloutSection, show
from echo.core.buffer import StalenessBuffer
from echo.core.errors import ConfigError, DataError, in_one
from echo.core.extras import command
from echo.core.monitoring.metrics import LearningCurve
from echo.core.paths import local_path
from echo.core.rollout import Lineage
from echo.core.units import format_bytes, listed
from echo.engine.engine import Engine
from echo.engine.hf.engine import TransformersEngine
from echo.engine.lora import (
    Lora,
    base_directory,
    base_name,
    base_settings,
    export_adapter,
    initial_adapter,
    load_adapter,
    make_lora,
)
from echo.engine.model import (
    build_shapes,
    context_window,
    free_gpu_bytes,
    import_architecture,
    load_towers,
    make_sampling,
    model_digests,
    names_on_disk,
    pick_device,
    resolve_model,
    set_num_threads,
    unrounded_names,
    vocab_size,
    with_cpu_dtype,
)
from echo.engine.weights import round_tensors, save_hf, torch_dtype
from echo.leases.book import LeaseBook
from echo.leases.run import LeaseSettings, RunState
from echo.net.curve import CurveKeys
from echo.net.transport import Transport, is_loopback
from echo.records.ledger import Ledger
from echo.roles.joining import EXPECTED, LIKELY_IDS, MAX_TREE_TOKENS, AdmissionSettings
from echo.roles.learner import Learner, LearnerSettings
from echo.runtime import node as wiring
from echo.runtime.access import write_access
from echo.runtime.episodes import code_settings, make_local_host, make_runner, turns_of
from echo.runtime.identity import (
    Identity,
    join_address,
    load_or_create_identity,
    load_or_create_keys,
    load_or_create_signing_key,
    write_join,
)
from echo.runtime.learner.batches.prompts import (
    PromptsAhead,
    PromptSource,
    note_origin,
    prompt_time,
)
from echo.runtime.learner.batches.rewards import LearnerRewards
from echo.runtime.learner.costs.activation import activation_settings
from echo.runtime.learner.evaluation_node import VERSION, EvaluationNode, HeldoutGroups
from echo.runtime.learner.follower import Follower
from echo.runtime.learner.node import LearnerNode, OpenedRun, RunSections
from echo.runtime.learner.report import Progress
from echo.runtime.learner.samples import Decode, SampleLog
from echo.runtime.learner.saving.checkpoint import Checkpoints
from echo.runtime.learner.saving.disk_limit import DiskLimit
from echo.runtime.learner.saving.resume import SavedRun, StartingPoint
from echo.runtime.learner.versions.evaluation import Evaluator, heldout_openings
from echo.runtime.learner.versions.publish import Images, Publication, Publisher, make_images
from echo.runtime.threads import Threads
from echo.tasks import tokenization
from echo.tasks.environment import Environment
from echo.tasks.rewards import ExampleCall, TaskHost
from echo.tasks.task import Example, Task, code_digest, load_task, task_digests
from echo.train.attribution import Attribution, RoundTrip, make_attribution, make_rescoring
from echo.train.batch import AdvantageSettings
from echo.train.custom_loss import load_loss
from echo.train.models.models import check_vocabularies
from echo.train.models.policy import (
    Compute,
    ModelSource,
    check_trainable,
    float32_attention,
    learner_compute,
)
from echo.train.optimizer import OptimizerSettings
from echo.train.ranks.rank_group import AnyTrainer, LeadTrainer, RankGroup, follow
from echo.train.ranks.sharding import Ranks
from echo.train.trainer import Trainer
from echo.weights.topology.sites import Site
from echo.wire.messages import LEARNER_ID

if TYPE_CHECKING:
    from echo.engine.weights import Weights

_log = logging.getLogger(__name__)

# --- The data plane of the learner: task, tokenizer and prompts of one model directory ---


@dataclass(frozen=True, slots=True)
class Data:
    """The task, tokenizer and prompts of a run, and the directory of its model."""

    model_dir: Path
    task: Task
    host: TaskHost
    """Runs the task's code in separate processes."""
    prompts: PromptSource
    text: tokenization.TextCodec
    digests: dict[str, str]
    lora: Lora | None = None
    """The adapter that is trained; None to train all weights."""

    @property
    def vocab_size(self) -> int:
        """Number of rows of the model's embedding. All token ids are below this number."""
        return vocab_size(self.model_dir)

    def read_assets(self) -> dict[str, bytes]:
        """Return the names and contents of the tokenizer's files that workers may inherit.

        Raises:
            DataError: if a file does not fit into a message.
        """
        files = tokenization.asset_files(self.model_dir)
        assets = {name: path.read_bytes() for name, path in files.items()}
        for name, data in assets.items():
            if len(data) > wiring.MAX_ASSET_BYTES:
                raise DataError(
                    f"{files[name]} has {format_bytes(len(data))}; files that workers inherit may "
                    f"have {format_bytes(wiring.MAX_ASSET_BYTES)}"
                )
        return assets


def load_data(config: Config) -> Data:
    """Load the task and the tokenizer, and check the task's prompts and reward."""
    model_dir = resolve_model(config.model.name or "", config.model.revision)
    # Load it before the node listens: strangers could use up the descriptors that this needs. Load
    # it before the tokenizer, too, whose library reports a fault of config.json less clearly.
    lora = learner_lora(config, model_dir)
    import_architecture(model_dir if lora is None else lora.base_dir)
    task = load_task(config.task.kind, config.task.options)
    prompts, text = load_prompts(config, model_dir, task)
    template: str | None = inherited_settings(config)["model.chat_template"]
    host = make_local_host(config.task, config.reward, task)
    if not isinstance(task, Environment):
        example = prompts.make(0).example
        call = ExampleCall.of(host, example, task.right_completion(example))
        if call.fault:
            _log.warning("%s", call.fault)
    return Data(
        model_dir,
        task,
        host,
        prompts,
        text,
        model_digests(config.model, model_dir, template) | task_digests(task),
        lora,
    )


def learner_lora(config: Config, model_dir: Path) -> Lora | None:
    """Return the adapter that a learner trains; None if the learner trains all weights."""
    base_dir = base_directory(model_dir, config.learner.init_from)
    return make_lora(config.lora, base_dir, num_versions=config.sync.max_staleness + 1)


def load_prompts(
    config: Config, model_dir: Path, task: Task
) -> tuple[PromptSource, tokenization.TextCodec]:
    """Check a task's prompts. Return the prompts and the codec of their tokens.

    Raises:
        DataError: if there is no tokenizer, if the tokenizer cannot encode a prompt, or if the task
            refuses a row that is too long for the model's window.
        ConfigError: if the first prompt leaves no space for a completion.
    """
    template: str | None = inherited_settings(config)["model.chat_template"]
    tokenizer = tokenization.load_tokenizer(model_dir, chat_template=template)
    text = tokenization.TextCodec(
        tokenizer,
        tokenization.stop_ids(tokenizer, model_dir),
        config.model.chat_template_kwargs,
        vocab_size(model_dir),
        prompt_time(config.run_dir),
    )
    _warn_of_template(text, model_dir)
    prompts = PromptSource(
        task,
        text,
        seed=config.run.seed,
        hides_answers=config.reward.where == "learner",
        timeout_s=config.task.step_timeout_s,
    )
    window, max_new = context_window(model_dir), config.sampling.max_completion_tokens
    longest = window - max_new
    if longest > 0:
        prompts.examine(
            longest,
            f"the model's window holds {window} tokens, and sampling.max_completion_tokens takes "
            f"{max_new} of them; shorten the prompt or lower it",
        )
    prompts.check()
    if config.eval.interval_steps and prompts.sizes()["heldout"] == 0:
        raise DataError(
            f"the task {config.task.kind} has no held-out prompt to evaluate on: give it some "
            "(task.options.heldout_path of a dataset), or set eval.interval_steps = 0"
        )
    first = prompts.make(0)
    num_prompt_tokens = len(first.lease.prompt_ids)
    if num_prompt_tokens > longest:
        remedy = (
            f"lower it to at most {window - num_prompt_tokens}"
            if num_prompt_tokens < window
            else f"shorten the prompts ({first.example} is the first), or take another model"
        )
        raise ConfigError(
            f"the model's window holds {window} tokens; the first prompt has {num_prompt_tokens} "
            f"and sampling.max_completion_tokens = {max_new} does not fit beside it; {remedy}"
        )
    if num_prompt_tokens + max_new > tokenizer.model_max_length < window:
        _log.warning(
            "the tokenizer is made for %d tokens (model_max_length), the model's window holds %d: "
            "that one counts",
            tokenizer.model_max_length, window,
        )  # fmt: skip
    return prompts, text


def _warn_of_template(text: tokenization.TextCodec, model_dir: Path) -> None:
    for line in tokenization.describe_stops(text.tokenizer, model_dir):
        _log.warning("%s", line)
    if unused := text.unused_arguments():
        _log.warning(
            "model.chat_template_kwargs: the chat template does not mention %s: without effect",
            ", ".join(unused),
        )
    if text.reads_clock():
        _log.warning(
            "the chat template reads the clock; in all prompts of this run it is %s",
            f"{text.now:%c}",
        )


def expected_rollouts(config: Config, prompts: PromptSource) -> dict[str, int]:
    """Return the number and size of rollouts for which workers plan their memory.

    "rollouts" is the number of rollouts that the staleness bound allows at the same time.
    "prompt_tokens" is the length of the longest prompt seen.
    """
    # As many rollouts as the bound on staleness allows at once.
    num_groups = (config.sync.max_staleness + 1) * config.batch.groups_per_step
    return {
        "rollouts": num_groups * config.batch.group_size,
        "prompt_tokens": prompts.longest,
    }


# --- Set up the trainer: loss, reference policy, optimizer, precision ---


def build_trainer(
    config: Config,
    model_dir: Path,
    start: StartingPoint,
    lora: Lora | None = None,
    rank_group: RankGroup | None = None,
    *,
    budget: Budget | None = None,
    prompt_tokens: int = 0,
) -> AnyTrainer:
    """Build the trainer in the state of the starting point.

    Args:
        config: the run's configuration.
        model_dir: the directory of the model.
        start: the state from which the run begins or continues.
        lora: the adapter that is trained; None to train all weights.
        rank_group: the processes of the learner; None for a single process.
        budget: memory budget of a single process; None if it was not computed.
        prompt_tokens: tokens of the longest prompt; 0 if unknown.

    Raises:
        RankError: if one of several processes cannot build its trainer.
    """
    if rank_group is None:
        return make_trainer(
            config,
            model_dir,
            start.checkpoint,
            lora,
            budget=budget,
            prompt_tokens=prompt_tokens,
        )
    build = partial(
        make_trainer,
        config,
        model_dir,
        lora=lora,
        rank_group=rank_group,
        prompt_tokens=prompt_tokens,
    )
    return LeadTrainer(rank_group, build, start.checkpoint, published_dtype=config.model.dtype)


def follow_leader(config: Config, rank_group: RankGroup, log: logging.Logger) -> None:
    """Run a learner's process whose rank is above 0, until rank 0 ends the run.

    Raises:
        RankError: if this process fails, or loses its connection to the other processes.
    """

    def build(checkpoint: Path | None) -> Trainer:
        model_dir = resolve_model(config.model.name or "", config.model.revision)
        lora = learner_lora(config, model_dir)
        return make_trainer(config, model_dir, checkpoint, lora, rank_group)

    follow(rank_group, build, log)


def make_trainer(
    config: Config,
    model_dir: Path,
    checkpoint: Path | None,
    lora: Lora | None = None,
    rank_group: RankGroup | None = None,
    *,
    budget: Budget | None = None,
    prompt_tokens: int = 0,
) -> Trainer:
    """Return this process's trainer. If `checkpoint` is given, load its state.

    The other arguments are those of `build_trainer`. With several processes, all use the largest
    `prompt_tokens` of any process.

    Raises:
        ConfigError: if the processes of the learner were started with different settings.
    """
    if rank_group is not None:
        # On another machine the model may still be on its way from the hub.
        rank_group.wait_for_all()
        check_alike(config, rank_group.ranks)
        lengths = rank_group.ranks.gather(prompt_tokens.to_bytes(8, "little"))
        prompt_tokens = max(int.from_bytes(each, "little") for each in lengths)
    if budget is None:
        base_dir = model_dir if lora is None else lora.base_dir
        budget = budget_here(config, base_dir, rank_group, prompt_tokens=prompt_tokens)
    recompute_above = 0 if budget is None else budget.recompute_above
    if rank_group is not None:
        limits = rank_group.ranks.gather(recompute_above.to_bytes(8, "little"))
        recompute_above = min(int.from_bytes(each, "little") for each in limits)
    config = with_checkpointing(config, budget, rank_group)
    set_num_threads(config.learner.num_threads)
    source = ModelSource(model_dir=model_dir, lora=lora)
    if checkpoint is None:
        check_models(config, model_dir)
        source = initial_model(config, model_dir, lora)
    compute = replace(_compute(config), recompute_above=recompute_above)
    if rank_group is not None:
        compute = replace(compute, device=rank_group.device, ranks=rank_group.ranks)
    trainer = Trainer(
        source,
        compute,
        loss=checked_loss(config),
        optimizer=_optimizer_settings(config),
        temperature=config.sampling.temperature,
        advantages=_advantage_settings(config),
        scales_by_ess=config.optimizer.scale_by_ess,
        reference=find_reference(config, model_dir, lora),
        rescoring=(
            make_rescoring(config.sampling, config.model.dtype)
            if config.metrics.attribution_steps
            else None
        ),
    )
    if checkpoint is not None:
        trainer.load_state(checkpoint)
    return trainer


def _optimizer_settings(config: Config) -> OptimizerSettings:
    optimizer = config.optimizer
    return OptimizerSettings(
        learning_rate=optimizer.learning_rate,
        warmup_steps=optimizer.warmup_steps,
        lr_schedule=optimizer.lr_schedule,
        num_steps=config.run.max_steps,
        weight_decay=optimizer.weight_decay,
        betas=optimizer.betas,
        max_grad_norm=optimizer.max_grad_norm,
        minibatches_per_step=config.batch.minibatches_per_step,
    )


def _advantage_settings(config: Config) -> AdvantageSettings:
    loss = config.loss
    return AdvantageSettings(
        normalize_by_std=loss.normalize_by_std,
        leave_one_out=loss.leave_one_out,
        max_completion_tokens=config.sampling.max_completion_tokens,
        overlong_buffer_tokens=loss.overlong_buffer_tokens,
        overlong_filter=loss.overlong_filter,
        value_beta=loss.value_beta,
        keep_zero_variance=config.batch.keep_zero_variance,
        max_abs_reward=config.task.max_reward,
        needs_support=config.needs_support,
    )


def _compute(config: Config) -> Compute:
    return learner_compute(
        config.learner,
        config.model,
        config.optimizer,
        seed=config.run.seed,
        num_steps=config.run.max_steps,
    )


def check_alike(config: Config, ranks: Ranks) -> None:
    """Raise an error on all ranks if a rank's settings differ from rank 0's.

    Ranks with different settings would make different steps.

    Raises:
        ConfigError: if settings differ. The message names the rank and the keys.
    """
    own = {".".join(path): value for path, value in flatten(resolved(config))}
    first, *others = map(json.loads, ranks.gather(json.dumps(own).encode()))
    for rank, other in enumerate(others, 1):
        keys = sorted(k for k in first.keys() | other.keys() if other.get(k) != first.get(k))
        if keys:
            apart = [f"{key} = {other.get(key)!r} and not {first.get(key)!r}" for key in keys]
            raise ConfigError(
                f"rank {rank} was started with other settings than rank 0: {listed(apart)}; "
                "all processes of a learner need the same file and the same options"
            )


def with_checkpointing(
    config: Config, budget: Budget | None, rank_group: RankGroup | None = None
) -> Config:
    """Choose a value for `gradient_checkpointing = "auto"`, and return the configuration.

    Gradient checkpointing is off for a model with unknown dimensions. If the processes of the
    learner need different values, all use the value that saves the most memory.
    """
    if config.learner.gradient_checkpointing != "auto":
        return config
    chosen = False if budget is None else budget.gradient_checkpointing
    if rank_group is not None:
        choices = tuple(CHECKPOINTING)
        chosen = choices[max(rank_group.ranks.gather(bytes([choices.index(chosen)])))[0]]
    changed = {"gradient_checkpointing": chosen}
    return config.model_copy(update={"learner": config.learner.model_copy(update=changed)})


def is_recomputing(config: Config, data: Data, budget: Budget | None) -> bool:
    """Return whether activations are recomputed although memory could hold them."""
    if budget is None or config.learner.gradient_checkpointing not in (True, "offload"):
        return False
    section = config.learner.model_copy(update={"gradient_checkpointing": False})
    plain = config.model_copy(update={"learner": section})
    base_dir = data.model_dir if data.lora is None else data.lora.base_dir
    other = budget_here(plain, base_dir, prompt_tokens=data.prompts.longest)
    return other is not None and other.fits


def budget_here(
    config: Config, model_dir: Path, rank_group: RankGroup | None = None, *, prompt_tokens: int = 0
) -> Budget | None:
    """Return this process's memory budget; None for a model with unknown dimensions.

    `prompt_tokens` is the length of the longest prompt; 0 if unknown. With several processes, the
    budget reserves no memory for evaluation.
    """
    if rank_group is not None:
        off = config.eval.model_copy(update={"interval_steps": 0})
        config = config.model_copy(update={"eval": off})
    try:
        facts = read_model_facts(model_dir)
    except DataError:
        return None
    machine = read_machine(free_gpu_bytes(config.learner.device))
    num_ranks = 1 if rank_group is None else rank_group.ranks.size
    return memory_budget(
        config,
        "learner",
        facts,
        machine,
        prompt_tokens=prompt_tokens or ASSUMED_PROMPT_TOKENS,
        num_ranks=num_ranks,
    )


def check_models(config: Config, model_dir: Path, *, has_weights: bool = True) -> None:
    """Check that the trainer of a new run can be built, without reading weights.

    Args:
        config: the run's configuration.
        model_dir: directory with the model's config.json.
        has_weights: whether the directory also has the model's weights.

    Raises:
        EchoError: the error that `make_trainer` would raise.
    """
    checked_loss(config)
    lora, compute = learner_lora(config, model_dir), _compute(config)
    source = initial_model(config, model_dir, lora)
    base_dir = model_dir if lora is None else lora.base_dir
    weights = source.weights_dir or (base_dir if has_weights else None)
    num_ids = check_trainable(source, compute, weights=weights)
    name = config.reference.name if config.reference.kl_coef else None
    if name is not None and (other := find_model(name, key="reference.name")) is not None:
        reference = ModelSource(model_dir=other)
        check_vocabularies(other, check_trainable(reference, compute, weights=other), num_ids)


def initial_model(config: Config, model_dir: Path, lora: Lora | None) -> ModelSource:
    """Return the source of a run's initial weights. The source of a new adapter has no tensors."""
    given = config.learner.init_from
    adapter = initial_adapter(config.lora, given)
    return ModelSource(
        model_dir=model_dir,
        tensors=None if adapter is None else load_adapter(adapter),
        weights_dir=local_path(given) if given is not None and lora is None else None,
        lora=lora,
    )


def build_loss(config: Config) -> Loss:
    """Return the policy loss, with the configured masks, entropy bonus and KL."""
    section, reference = config.loss, config.reference
    options = section.own_options()
    if section.kind == "dr_grpo":
        options["max_completion_tokens"] = config.sampling.max_completion_tokens
    loss = load_loss(section.kind, options)
    masks = RolloutMasks(**section.masks())
    if not masks.is_off:
        loss = MaskedLoss(loss=loss, masks=masks)
    if section.entropy_coef:
        loss = EntropyBonusLoss(loss=loss, coef=section.entropy_coef)
    if not reference.kl_coef:
        return loss
    return ReferenceKlLoss(
        loss=loss,
        coef=reference.kl_coef,
        estimator=reference.kl_estimator,
    )


def checked_loss(config: Config) -> Loss:
    """Return the policy loss. Workers can send the likely ids that it needs.

    The configuration checks this for Echo's own losses. The needs of a custom loss are in its code.

    Raises:
        ConfigError: if sampling is truncated, or the likely ids do not fit into a message.
    """
    loss = build_loss(config)
    problems = check_likely_ids(config, needs_of(loss).likely_ids, "loss.kind")
    lines = [
        f"{section}.{name} = {show(getattr(getattr(config, section), name))}: {problem.text}"
        for problem in problems
        for section, name in problem.paths[:1]
    ]
    if lines:
        raise ConfigError(in_one("configuration", lines))
    return loss


def find_reference(config: Config, model_dir: Path, lora: Lora | None) -> ModelSource | None:
    """Return the source of the reference policy's weights; None if the loss has no reference KL.

    `reference.name` names a model. If this name is not set, the reference is the run's initial
    weights, also after a resume.
    """
    section = config.reference
    if not section.kl_coef:
        return None
    if section.name is None:
        return initial_model(config, model_dir, lora)
    return ModelSource(model_dir=resolve_model(section.name, key="reference.name"))


# --- Open a run: its ledger, its trainer, and its role ---
#
# All of it is opened before anything is written: a run that cannot begin leaves no trace.


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Inputs for the start of a learner, in addition to its configuration."""

    follower: Follower
    log: logging.Logger
    resume: bool = False
    earlier: LearningCurve | None = None
    """The learning curve before the resume, for the display; None for a new run."""
    threads: Threads | None = None
    rank_group: RankGroup | None = None
    """All processes of the learner; None for a single process. This process is rank 0."""


@dataclass(frozen=True, slots=True)
class RunParts:
    """Builds the parts of a run from its configuration, its data and the memory budget."""

    config: Config
    data: Data
    options: Options
    identity: Identity
    advertise: str
    """Address at which workers reach the learner; "" if none is known."""
    budget: Budget | None
    """Memory budget of a single process; None with several processes or unknown model dimensions.

    Without a budget, the GPU keeps the last version while memory suffices.
    """

    def open(self, evaluator: Evaluator | None) -> OpenedRun:
        """Open the ledger, build the trainer and the role, and write the new lineage to the ledger.

        Raises:
            EchoError: if the run cannot begin. Nothing has then been written.
        """
        config, data, options = self.config, self.data, self.options
        now = asyncio.get_running_loop().time()
        with ExitStack() as on_failure:
            ledger = Ledger(config.run_dir, spool_bytes=config.limits.spool_bytes)
            on_failure.callback(ledger.close)
            saved = SavedRun(ledger, self._checkpoints(now))
            start = saved.find_start(
                self.identity,
                max_staleness=config.sync.max_staleness,
                trims_stale=config.trims_stale,
                resume=options.resume,
                log=options.log,
            )
            trainer = self._trainer(start)
            attribution = self._attribution(trainer)
            buffer = self._buffer(start, trainer)
            prompts = self._prompts(start)
            role = self._role(start, buffer, prompts, now)
            save_resolved(config, config.run_dir / "config.json")
            saved.enter(start)
            on_failure.pop_all()
        scores_here = config.reward.where == "learner"
        return OpenedRun(
            ledger=ledger,
            checkpoints=saved.checkpoints,
            disk_limit=DiskLimit(
                ledger,
                saved.checkpoints,
                max_bytes=config.limits.run_dir_bytes,
                log=options.log,
            ),
            activation=activation_settings(
                config.activation, config.sync, config.batch, config.sampling
            ),
            progress=Progress(
                staleness_tokens=start.staleness_tokens,
                now=now,
                step=start.step,
                earlier=options.earlier,
            ),
            trainer=trainer,
            attribution=attribution,
            publisher=self._publisher(trainer, attribution),
            buffer=buffer,
            role=role,
            prompts=prompts,
            rewards=LearnerRewards(data.host, prompts, data.text) if scores_here else None,
            # Chat templates put stop tokens into prompts, and turns end with them.
            samples=sample_log(config, options, data.text.decode_all),
            evaluator=evaluator,
            export=partial(export_directory, config, data),
            is_recomputing=is_recomputing(config, data, self.budget),
        )

    def _trainer(self, start: StartingPoint) -> AnyTrainer:
        data, options = self.data, self.options
        trainer = build_trainer(
            self.config,
            data.model_dir,
            start,
            data.lora,
            options.rank_group,
            budget=self.budget,
            prompt_tokens=data.prompts.longest,
        )
        options.log.info("%s", trainer.describe_rows())
        return trainer

    def _attribution(self, trainer: AnyTrainer) -> Attribution | None:
        config = self.config
        if not config.metrics.attribution_steps:
            return None
        template: str | None = inherited_settings(config)["model.chat_template"]
        return make_attribution(
            trainer,
            RoundTrip(self.data.model_dir, template),
            config.run_dir / "versions",
            interval_steps=config.metrics.attribution_steps,
            max_staleness=config.sync.max_staleness,
            seed=config.run.seed,
        )

    def _publisher(self, trainer: AnyTrainer, attribution: Attribution | None) -> Publisher:
        images: Images
        if isinstance(trainer, LeadTrainer):
            images = trainer.images
        else:
            fits = self.budget is None or self.budget.has_versions_on_gpu
            images = make_images(
                self.config.model.dtype,
                self.config.network,
                trainer.unrounded,
                fits_on_gpu=fits,
                copy_stream=trainer.weights.copy_stream,
            )
        return Publisher(
            self.identity,
            encrypts=self.config.security.curve,
            chunk_bytes=self.config.network.chunk_bytes,
            images=images,
            attribution=attribution,
        )

    def _checkpoints(self, now: float) -> Checkpoints:
        config, section = self.config, self.config.checkpoint
        return Checkpoints(
            config.run_dir / "checkpoints",
            run_id=self.identity.run_id,
            interval_steps=section.interval_steps,
            interval_s=section.interval_s,
            keep_last=section.keep_last,
            min_free_bytes=config.limits.min_free_disk_bytes,
            now=now,
        )

    def _buffer(self, start: StartingPoint, trainer: AnyTrainer) -> StalenessBuffer:
        """Return the buffer with the starting point's groups.

        Groups that the trainer refuses are added to `start.ends` with the reason.
        """
        buffer = StalenessBuffer(
            max_staleness=self.config.sync.max_staleness,
            lineages=start.lineages,
            trims_stale=self.config.trims_stale,
        )
        for group in start.buffered:
            reason = trainer.refusal(group)
            if reason is None:
                buffer.put(group)
            else:
                # It was accepted under another configuration, for another loss.
                start.ends[group.group_id] = reason
        return buffer

    def _prompts(self, start: StartingPoint) -> PromptsAhead:
        config = self.config
        return PromptsAhead(
            self.data.prompts,
            num_out=(config.sync.max_staleness + 1) * config.batch.groups_per_step,
            first=start.next_group_id,
            again=start.open_attempts,
        )

    def _role(
        self, start: StartingPoint, buffer: StalenessBuffer, prompts: PromptsAhead, now: float
    ) -> Learner:
        network = self.config.network
        leases = LeaseBook(timeout_s=network.lease_timeout_s)
        start.enter_leases(leases, now=now)
        settings = learner_settings(
            self.config,
            self.data,
            self.identity,
            self.advertise,
            run_dir=self.config.run_dir,
            expected=expected_rollouts(self.config, self.data.prompts),
            is_resumed=len(start.lineages) > 1,
        )
        role = Learner(
            replace(settings, uplinks=start.uplinks),
            RunState(
                leases=leases,
                lineages=start.lineages,
                step=start.step,
                next_group_id=start.next_group_id,
                finished=start.finished,
            ),
            # Each version is made in the memory of the version before the last.
            broadcast=wiring.make_broadcast(LEARNER_ID, network, keep_versions=1),
            buffer=buffer,
            prompts=prompts,
        )
        for reason in start.ends.values():
            role.counters.add(f"discarded/{reason}")
        role.counters.add("tokens/too_old", start.num_too_old_tokens)
        return role


def learner_settings(
    config: Config,
    data: Data,
    identity: Identity,
    advertise: str,
    *,
    run_dir: Path,
    expected: Mapping[str, int],
    is_resumed: bool = False,
) -> LearnerSettings:
    """Return the settings of the learner's role.

    Args:
        config: the configuration, with the settings that workers inherit.
        data: the task, tokenizer and model.
        identity: the id and the signing key.
        advertise: address at which nodes reach the learner; "" if none is known.
        run_dir: directory that records the base model of an adapter.
        expected: the number and length of rollouts, from which workers plan their memory.
        is_resumed: whether the base model was recorded before.

    Raises:
        DataError: if an adapter's base model is missing or changed, or a file is too large to send.
    """
    likely = needs_of(build_loss(config)).likely_ids
    network, tree, base = config.network, max_tree_tokens(config, likely), {}
    if data.lora is not None:
        base = base_settings(
            config.model, data.lora, config.learner.init_from, run_dir, is_resumed=is_resumed
        )
    return LearnerSettings(
        admission=AdmissionSettings(
            run_id=identity.run_id,
            key=identity.key,
            seal_keys=wiring.new_seal_keys(),
            settings=inherited_settings(config)
            | base
            | code_settings(config.task, config.reward)
            | {LIKELY_IDS: likely}
            | ({} if tree is None else {MAX_TREE_TOKENS: tree})
            | {EXPECTED: dict(expected)},
            assets=data.read_assets(),
            digests=data.digests,
            heartbeat_s=network.heartbeat_s,
            dead_after_s=network.dead_after_s,
            time_of_day=time.time,
        ),
        leases=lease_settings(config, vocab_size=data.vocab_size, max_tree_tokens=tree),
        site=Site(
            LEARNER_ID,
            "learner",
            advertise,
            region=network.region,
            price_per_gb=network.price_per_gb,
        ),
        chunk_bytes=network.chunk_bytes,
    )


def lease_settings(
    config: Config, *, vocab_size: int, max_tree_tokens: int | None
) -> LeaseSettings:
    """Return the learner's settings for leases and groups."""
    batch = config.batch
    return LeaseSettings(
        max_staleness=config.sync.max_staleness,
        groups_per_step=batch.groups_per_step,
        group_size=batch.group_size,
        max_completion_tokens=config.max_chain_tokens,
        vocab_size=vocab_size,
        heartbeat_s=config.network.heartbeat_s,
        max_zero_signal_groups=batch.groups_per_step * batch.max_zero_signal_batches,
        prompts_are_free=config.agent.listen is not None,
        max_tree_tokens=max_tree_tokens,
        trims_stale=config.trims_stale,
        hedge_factor=config.leases.hedge_factor or None,
        # A batch that stops early needs more groups under way than it waits for.
        is_eager=config.sync.eager or config.rollout.over_submission > 1,
        exact_version=config.rollout.exact_version,
    )


async def build_learner(config: Config, options: Options) -> LearnerNode:
    """Return a listening learner that is ready to run.

    Raises:
        EchoError: if the learner cannot start. The message is for the user.
    """
    data, log = load_data(config), options.log
    keys, secret = load_or_create_keys(config.run_dir) if config.security.curve else (None, b"")
    # Bind before more is written: if the port is taken, no lineage must be opened.
    transport = await wiring.start_transport(
        config.network, config.learner.listen, keys, listens_later=True
    )
    wiring.warn_of_kernel(config.learner.listen, profile=config.profile, log=log)
    try:
        if keys is not None:
            advertise = config.learner.advertise
            address = invite(config.run_dir, keys, secret, transport, advertise=advertise, log=log)
            write_access(config.run_dir, address, keys)
        node = assemble_learner(config, data, transport, options)
        if data.text.now is not None:
            note_origin(
                config.run_dir,
                data.text.now,
                chat_template=data.digests["chat_template"],
                code=code_digest(config.task.kind, config.task.options),
                log=log,
            )
        # Listen only once the run's files are open: strangers could use up the file descriptors.
        transport.listen()
    except BaseException:
        await transport.close()
        raise
    return node


def invite(
    run_dir: Path,
    keys: CurveKeys,
    secret: bytes,
    transport: Transport,
    *,
    advertise: str | None,
    log: logging.Logger,
) -> str:
    """Write the join string into `run_dir`. Return the address at which nodes reach the learner.

    The join string is secret, so only the path of its file is logged.

    Raises:
        StorageError: if the file cannot be written.
    """
    address = join_address(str(transport.listen_address), advertise)
    write_join(run_dir, address, keys, secret)
    log.info(
        "%s join with the line in %s: ECHO_JOIN=THAT_LINE %s --role worker",
        "others on this machine" if is_loopback(address) else "others",
        run_dir / "keys" / "join",
        command("node", elsewhere=True),
    )
    return address


def assemble_learner(
    config: Config, data: Data, transport: Transport, options: Options
) -> LearnerNode:
    """Return a learner on a started transport. Raises the same errors as `build_learner`."""
    log, rank_group = options.log, options.rank_group
    budget = None
    if rank_group is None:  # computed from all free memory, before other parts take memory
        base_dir = data.model_dir if data.lora is None else data.lora.base_dir
        section, note = with_cpu_dtype(config.learner, base_dir)
        config = config.model_copy(update={"learner": section})
        if note:
            log.info("%s", note)
        budget = budget_here(config, base_dir, prompt_tokens=data.prompts.longest)
    # Before the run begins: if evaluation is not possible, the run leaves no trace.
    evaluator = build_evaluator(config, data, budget, log=log, rank_group=rank_group)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    identity = load_or_create_identity(config.run_dir, run_name=config.run.name)
    advertise = wiring.advertised(transport.listen_address, config.learner.advertise) or ""
    if not advertise:
        log.warning(
            "learner.listen is a wildcard and learner.advertise is not set: workers that reach "
            "this learner through a relay cannot find it when the relay dies"
        )
    parts = RunParts(config, data, options, identity, advertise, budget)
    node = LearnerNode(
        parts.open(evaluator), transport, run_sections(config), options.follower,
        threads=options.threads, log=log,
    )  # fmt: skip
    node.at_release += [data.host.close, data.prompts.close]
    return node


def run_sections(config: Config) -> RunSections:
    """Return the sections of the configuration that a learner's node reads."""
    return RunSections(
        run=config.run,
        run_dir=config.run_dir,
        model=config.model,
        task_kind=config.task.kind,
        sync=config.sync,
        batch=config.batch,
        learner=config.learner,
        network=config.network,
        evaluation=config.eval,
        keeps_best=config.checkpoint.keep_best,
        activation=config.activation,
        alerts=config.alerts,
    )


def sample_log(config: Config, options: Options, decode: Decode) -> SampleLog | None:
    """Return the writer of sample rollouts; None if metrics.samples is 0."""
    number = config.metrics.samples
    if not number:
        return None
    return SampleLog(number, options.follower, decode=decode, log=options.log)


def build_evaluator(
    config: Config,
    data: Data,
    budget: Budget | None = None,
    *,
    log: logging.Logger,
    rank_group: RankGroup | None = None,
    engine: Engine | None = None,
) -> Evaluator | None:
    """Return the evaluator that scores versions on held-out prompts; None if evaluation is off.

    Args:
        config: the run's configuration.
        data: the task, tokenizer and model.
        budget: bounds the evaluation's memory; None for half of the free memory.
        log: the log of the node.
        rank_group: the processes of the learner; None for a single process.
        engine: samples the answers; None to make an engine.

    Raises:
        DataError: if no held-out prompt fits into the model's window.
    """
    section = config.eval
    if not section.interval_steps:
        return None
    prompts = heldout_prompts(config, data, log=log)
    if engine is None:
        engine = evaluation_engine(config, data, budget, rank_group)
    return Evaluator(
        engine,
        data.host,
        prompts=prompts,
        text=data.text,
        sampling=make_sampling(config.evaluation_sampling, data.text),
        num_samples=section.num_samples,
        runner=make_runner(turns_of(config.task, data.task), data.host, engine, data.text),
    )


def heldout_prompts(
    config: Config, data: Data, *, log: logging.Logger
) -> list[tuple[Example, list[int]]]:
    """Return the held-out prompts that fit into the model's window, each with its token ids.

    Raises:
        DataError: if no prompt fits.
    """
    found = data.prompts.heldout(config.eval.num_prompts)
    max_new = config.evaluation_sampling.max_completion_tokens
    max_tokens = context_window(data.model_dir) - max_new
    prompts = [(example, ids) for example, ids in found if len(ids) <= max_tokens]
    if len(prompts) < len(found):
        log.warning(
            "%d of %d held-out prompts have more than %d tokens and are left out",
            len(found) - len(prompts), len(found), max_tokens,
        )  # fmt: skip
    if not prompts:
        raise DataError(
            f"the task {config.task.kind} has no held-out prompt of at most {max_tokens} tokens to "
            "evaluate on; give it some, or set eval.interval_steps=0"
        )
    return prompts


def spread_settings(config: Config, num_answers: int) -> Config:
    """Return the settings of an evaluation by workers. Each answer is a group of one rollout.

    All groups form one batch. An interrupted rollout is not continued by another worker, because
    its seed would change. No loss is computed, so workers send nothing that the run's loss needs.
    """
    return config.model_copy(
        update={
            "agent": AgentSection(),
            "loss": GrpoSection(kind="grpo"),
            "batch": config.batch.model_copy(
                update={"group_size": 1, "groups_per_step": num_answers}
            ),
            "rollout": RolloutSection(partial_ship_s=None),
            "sampling": config.evaluation_sampling,
            "sync": config.sync.model_copy(update={"eager": True}),
        }
    )


async def build_evaluation(
    config: Config,
    data: Data,
    weights: Callable[[], Weights],
    directory: Path,
    *,
    log: logging.Logger,
) -> EvaluationNode:
    """Return the node of an evaluation by workers, which listens and is ready to run.

    Args:
        config: the settings, with `learner.listen`.
        data: the task, tokenizer and model.
        weights: slow function that returns the weights to evaluate, by name.
        directory: directory of the keys and the join string. Missing keys are created.
        log: the log of the node.

    Raises:
        EchoError: if the evaluation cannot start. The message is for the user.
    """
    listen, advertise = config.learner.listen, config.learner.advertise
    keys, secret = load_or_create_keys(directory) if config.security.curve else (None, b"")
    transport = await wiring.start_transport(config.network, listen, keys, listens_later=True)
    wiring.warn_of_kernel(listen, profile=config.profile, log=log)
    try:
        if keys is not None:
            invite(directory, keys, secret, transport, advertise=advertise, log=log)
        node = assemble_evaluation(config, data, transport, weights, directory, log=log)
        transport.listen()
    except BaseException:
        await transport.close()
        raise
    return node


def assemble_evaluation(
    config: Config,
    data: Data,
    transport: Transport,
    weights: Callable[[], Weights],
    directory: Path,
    *,
    log: logging.Logger,
) -> EvaluationNode:
    """Return an evaluation's node on a started transport.

    Raises the same errors as `build_evaluation`.
    """
    network, num_samples = config.network, config.eval.num_samples
    prompts = heldout_prompts(config, data, log=log)
    groups = HeldoutGroups(data.prompts, heldout_openings(prompts, num_samples))
    config = spread_settings(config, groups.num_groups)
    # The id is new, since a worker may still have the version of an earlier evaluation.
    run_id = f"{directory.name}-{secrets.token_hex(4)}"
    identity = Identity(run_id, load_or_create_signing_key(directory))
    advertise = wiring.advertised(transport.listen_address, config.learner.advertise) or ""
    longest = max(len(ids) for _, ids in prompts)
    role = Learner(
        learner_settings(
            config,
            data,
            identity,
            advertise,
            run_dir=directory,
            expected={"rollouts": groups.num_groups, "prompt_tokens": longest},
        ),
        RunState(
            leases=LeaseBook(timeout_s=network.lease_timeout_s),
            lineages=(Lineage(VERSION.lineage, VERSION.step),),
        ),
        broadcast=wiring.make_broadcast(LEARNER_ID, network, keep_versions=1),
        buffer=groups,
        prompts=groups,
    )
    model = None if data.lora is not None else build_shapes(data.model_dir)
    images = make_images(config.model.dtype, network, unrounded_names(model), fits_on_gpu=False)
    return EvaluationNode(
        role,
        transport,
        groups,
        Publisher(
            identity,
            encrypts=config.security.curve,
            chunk_bytes=network.chunk_bytes,
            images=images,
        ),
        weights=weights,
        host=data.host if config.reward.where == "learner" else None,
        text=data.text,
        codec=network.codec,
        reconnect_for_s=network.reconnect_for_s,
        log=log,
    )


def evaluation_engine(
    config: Config, data: Data, budget: Budget | None, rank_group: RankGroup | None
) -> TransformersEngine:
    """Return the engine that samples held-out prompts.

    A single process holds a second model for evaluation, on the device of the trainer. The second
    model has the published data type on a GPU, and the trainer's data type on a CPU. Rollouts take
    only the memory that the budget leaves for evaluation.

    With several ranks, an evaluation on rank 0's GPU would make all ranks wait, and the model may
    be too large for this GPU. So rank 0 samples on its CPU, in the published data type. Its
    evaluation model uses the memory of the version's image, without a copy (engine/hf). The memory
    budget (config/memory/) accounts for each case.
    """
    learner = config.learner
    device, num_threads = pick_device(learner.device), 0
    dtype = config.model.dtype
    if device == "cpu":
        dtype = "float32" if learner.dtype == "auto" else learner.dtype
    if rank_group is not None:
        device, dtype = "cpu", config.model.dtype
        # torchrun has limited each process to one thread.
        num_threads = learner.num_threads or max(1, (os.cpu_count() or 1) // 2)
    return TransformersEngine(
        data.model_dir,
        device=device,
        dtype=dtype,
        attn_implementation=float32_attention(config.model.attn_implementation),
        num_threads=num_threads,
        lora=data.lora,
        rollout_bytes=None if budget is None else budget.evaluation_bytes,
        is_beside=rank_group is None,
    )


def export_directory(config: Config, data: Data, directory: Path, publication: Publication) -> None:
    """Write a version into a directory that transformers or peft can load.

    Tensors are written without a copy, except stacked experts. The files hold each expert as a
    separate tensor, so stacked experts are copied.
    """
    assets, weights = tokenization.asset_files(data.model_dir), publication.tensors()
    if data.lora is not None:
        name = base_name(config.model, data.lora, config.learner.init_from)
        export_adapter(directory, assets, weights, data.lora, base_name=name)
        return
    start = local_path(config.learner.init_from or data.model_dir)
    model, dtype = build_shapes(data.model_dir), torch_dtype(config.model.dtype)
    towers = round_tensors(load_towers(start), dtype, unrounded_names(model))
    save_hf(directory, assets, names_on_disk(model, {**weights, **towers}))
