"""Every configuration key: its type, limits, default and meaning.

One file serves all roles. Each class is one section of the TOML; the text under a field is its
help, unit first. Keys ending in `_s` are durations and take text such as "30s", keys ending in
`_bytes` take text such as "8GiB". A key whose default is not written here has one per profile
(profiles.py). Rules that join several keys are in checks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from echo.config.fields import (
    Bytes,
    Device,
    DialAddress,
    DialAddresses,
    KillPoints,
    ListenAddress,
    Off,
    OptionalSeconds,
    RunName,
    Seconds,
    TaskKind,
)
from echo.config.losses import LossKind
from echo.config.profiles import preset_publish_period

Role = Literal["learner", "worker", "relay"]
ROLES: tuple[Role, ...] = ("learner", "worker", "relay")


class Section(BaseModel):
    """What all sections have in common: frozen, strict about types and unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    roles: ClassVar[tuple[Role, ...]] = ("learner",)
    """Which roles read this section."""


class RunSection(Section):
    """Which run this is and how long it lasts."""

    roles = ROLES
    name: RunName = "run"
    """Directory of this run inside `dir`."""
    dir: str = "runs"
    """Directory that holds the runs."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of prompt order, sampling and initialisation."""
    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps until the run is finished."""


class ModelSection(Section):
    """The policy that is trained."""

    roles = ("learner", "worker")
    name: str | None = Field(default=None, min_length=1)
    """Directory or hub id; a worker that leaves it out gets the model from the learner."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the published weights; the learner trains in float32."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention code of transformers."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the chat template, such as enable_thinking."""
    cache_dir: str | None = None
    """Directory for downloads from the hub, where HF_HOME is not wanted."""


class TaskSection(Section):
    """Where prompts and rewards come from."""

    roles = ("learner", "worker")
    kind: TaskKind = "addition"
    """A built-in task (addition, countdown, gsm8k) or the import path "package.module:Class"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the task's class."""
    reward_timeout_s: Seconds = Field(default=10.0, gt=0)
    """Seconds that one reward may take before its group is refused."""


class SamplingSection(Section):
    """How workers sample."""

    roles = ("learner", "worker")
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits; the learner applies it too. Evaluation adds a greedy score itself."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many most likely tokens; 0 is off."""
    max_completion_tokens: int = Field(ge=1)
    """Tokens per completion, the stop token included."""


class SyncSection(Section):
    """How far workers may lag behind the learner."""

    roles = ("learner", "worker")
    max_staleness: int = Field(ge=0)
    """Optimizer steps (inclusive) that a token may be old when it is trained on."""
    publish_period: Literal["auto"] | Annotated[int, Field(ge=1)]
    """Optimizer steps between publications; auto measures and follows training and broadcast."""

    @property
    def initial_publish_period(self) -> int:
        """The period before anything has been measured."""
        if self.publish_period == "auto":
            return preset_publish_period(self.max_staleness)
        return self.publish_period


class BatchSection(Section):
    """How much is trained on per optimizer step."""

    roles = ("learner", "worker")
    group_size: int = Field(ge=2)
    """Rollouts per prompt; the advantage compares them with each other, so at least two."""
    groups_per_step: int = Field(ge=1)
    """Groups (prompts) per optimizer step; rollouts per step = groups_per_step x group_size."""


class LossSection(Section):
    """The policy-gradient loss."""

    kind: LossKind = "grpo"
    """grpo, dr_grpo, dapo, gspo, gepo, cispo, decoupled_ppo, m2po, sapo, dppo_tv, or your own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a loss of your own, "package.module:function"."""
    normalize_by_std: bool | None = None
    """Divide advantages by their group's spread; unset: yes, but for dr_grpo, gepo, dppo_tv."""
    leave_one_out: bool = False
    """Leave a rollout's own reward out of the mean it is compared with."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Tokens before the limit over which rewards fall by up to 1; 0 is off."""
    overlong_filter: bool = False
    """Do not train on completions cut off at the limit."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | Off | None = None
    """Clip the ratio below 1 - clip_low; unset: 0.2 (gspo 3e-4, cispo 1); false is off."""
    clip_high: Annotated[float, Field(gt=0)] | Off | None = None
    """Clip above 1 + clip_high; unset: 0.28 (gepo 0.2, gspo 4e-4, cispo 4); false is off."""
    dual_clip: Annotated[float, Field(gt=1)] | Off | None = None
    """Bound on the ratio where the advantage is negative; unset: grpo 3, else off; false is off."""
    aggregation: Literal["token_mean", "sequence_mean"] | None = None
    """Mean over tokens, or over rollouts; unset: token_mean (sapo sequence_mean)."""
    scope: Literal["group", "micro_batch"] | None = None
    """gepo: over what the expectation is taken; unset: group."""
    gate_kl: float | None = Field(default=None, gt=0)
    """gepo: KL in nats per token below which a rollout's own ratio is used (GEPO+ has 0.002)."""
    refuse_mixtures: bool | None = None
    """gepo: leave out groups that several policy versions sampled; unset: no."""
    sampler_kl_coef: float | None = Field(default=None, ge=0)
    """gepo, dppo_tv: weight of the distance to the sampler; unset: 0."""
    proximal: Literal["recompute", "loglinear"] | None = None
    """decoupled_ppo: where the proximal policy comes from; unset: recompute."""
    importance_weight: Literal["token_tis", "sequence_tis", "token_mis", "sequence_mis"] | None = (
        None
    )
    """decoupled_ppo: how proximal / sampler is bounded; unset: token_tis."""
    importance_floor: float | None = Field(default=None, ge=0, le=1)
    """decoupled_ppo: ratio below which a masking weight drops; unset: 0."""
    importance_cap: float | None = Field(default=None, ge=1)
    """decoupled_ppo: ratio at which the weight is cut or drops; unset: 2."""
    max_second_moment: float | None = Field(default=None, ge=0)
    """m2po: bound on the mean squared log-ratio; unset: 0.04."""
    tau_positive: float | None = Field(default=None, gt=0)
    """sapo: how fast the gate closes for positive advantages; unset: 1."""
    tau_negative: float | None = Field(default=None, gt=0)
    """sapo: the same for negative ones; unset: 1.05."""
    max_probability_gap: float | None = Field(default=None, ge=0, le=1)
    """dppo_tv: largest change of a token's probability; unset: 0.2."""
    geometric_low: float | None = Field(default=None, ge=0, le=1)
    """Leave out rollouts with a geometric mean ratio below; drops nearly all under staleness."""
    geometric_high: float | None = Field(default=None, ge=1)
    """The same above."""
    veto: float | None = Field(default=None, ge=0, le=1)
    """Leave out rollouts with a token whose ratio is below; 1e-4 is usual."""
    opsm: float | None = Field(default=None, ge=0)
    """Leave out bad rollouts further off-policy than this, nats per token; 1e-4 is usual."""


class OptimizerSection(Section):
    """The optimizer."""

    kind: Literal["adamw"] = "adamw"
    """adamw: Adam with decoupled weight decay."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Step size after the warm-up, constant."""
    warmup_steps: int = Field(default=10, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of the update."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm to which the gradient is clipped."""


class LearnerSection(Section):
    """The one process that trains."""

    listen: ListenAddress = "tcp://127.0.0.1:7700"
    """Address to listen on; relays and workers connect to it."""
    advertise: DialAddress | None = None
    """Address that others are told to dial, where it differs from `listen`."""
    device: Device = "auto"
    """Where to train: auto, cpu, cuda or cuda:N."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0 takes all cores."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens, padding included, per forward and backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    vocab_chunk: int = Field(default=8192, ge=1)
    """Vocabulary entries whose logits exist at one time."""
    init_from: str | None = None
    """Directory with weights to start a new run from, in place of those of model.name."""


class WorkerSection(Section):
    """A process that generates rollouts."""

    roles = ("worker",)
    connect: DialAddresses = ()
    """Addresses of relays or the learner, tried in order."""
    listen: ListenAddress | None = None
    """Address on which to serve weights to other workers; left out, it serves none."""
    advertise: DialAddress | None = None
    """Address that others are told to dial, where it differs from `listen`."""
    name: str | None = Field(default=None, min_length=1)
    """Name in logs and the live view; left out, one is made from the host's."""
    device: Device = "auto"
    """Where to generate: auto, cpu, cuda or cuda:N."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0 takes all cores."""
    memory_budget_bytes: Bytes | None = Field(default=None, gt=0)
    """Bytes for weights and KV cache; left out, what the device has free."""
    max_concurrent_rollouts: int | None = Field(default=None, ge=1)
    """Rollouts generated at one time; left out, as many as the memory holds."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type to compute in; auto is bfloat16 on a GPU and float32 on a CPU."""


class RelaySection(Section):
    """A process that forwards weights down and rollouts up; no GPU, no torch."""

    roles = ("relay",)
    connect: DialAddresses = ()
    """Addresses of the learner or other relays, tried in order."""
    listen: ListenAddress = "tcp://127.0.0.1:7701"
    """Address to listen on; workers connect to it."""
    advertise: DialAddress | None = None
    """Address that others are told to dial, where it differs from `listen`."""
    name: str | None = Field(default=None, min_length=1)
    """Name in logs and the live view; left out, one is made from the host's."""


class CheckpointSection(Section):
    """When the learner saves its whole state."""

    interval_steps: int = Field(ge=1)
    """Optimizer steps between checkpoints; one is always made at the end."""
    interval_s: OptionalSeconds = Field(gt=0)
    """Seconds after which one is made even so; false is off."""
    keep_last: int = Field(default=3, ge=1)
    """Checkpoints kept; at least one, or nothing could be resumed."""


class EvalSection(Section):
    """The held-out evaluation."""

    interval_steps: int = Field(default=20, ge=0)
    """Optimizer steps between evaluations; 0 is never."""
    num_prompts: int = Field(default=256, ge=1)
    """Held-out prompts per evaluation."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seed of the choice of prompts and of sampling."""


class NetworkSection(Section):
    """Patience, and bounds on what is under way between processes."""

    roles = ROLES
    heartbeat_s: Seconds = Field(gt=0)
    """Seconds between heartbeats."""
    dead_after_s: Seconds = Field(gt=0)
    """Seconds of silence after which a peer counts as dead."""
    lease_timeout_s: Seconds = Field(gt=0)
    """Seconds without progress after which a group is given to another worker."""
    reconnect_for_s: Seconds = Field(gt=0)
    """Seconds to keep trying to reach a parent before giving up."""
    chunk_bytes: Bytes = Field(default=2**20, ge=2**10, le=2**24)
    """Bytes per chunk of weights on the wire."""
    window_bytes: Bytes = Field(default=8 * 2**20, ge=2**11)
    """Bytes that a child may have asked for and not yet received."""
    keep_versions: int = Field(default=2, ge=2)
    """Versions of the weights kept: the newest and the ones to fall back on."""
    max_unacked_groups: int = Field(default=64, ge=1)
    """Finished groups that a worker or relay holds until the learner has them on disk."""


class LimitsSection(Section):
    """Bounds on disk use."""

    spool_bytes: Bytes = Field(default=8 * 2**30, ge=2**20)
    """Bytes of rollouts kept in the run directory."""
    min_free_disk_bytes: Bytes = Field(default=256 * 2**20, ge=0)
    """Bytes that must stay free; below, no checkpoint is written and the one before stays."""


class MetricsSection(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard files into the run directory."""
    wandb: bool = False
    """Log to Weights & Biases; WANDB_MODE=offline keeps it on this disk."""
    wandb_project: str = Field(default="echo", min_length=1)
    """Project on Weights & Biases."""


class UiSection(Section):
    """What is shown while it runs."""

    roles = ROLES
    live: Literal["auto", "on", "off"] = "auto"
    """Live view; auto shows it on a terminal and writes plain lines elsewhere."""
    refresh_per_s: float = Field(default=4.0, gt=0, le=30)
    """Redraws per second."""


class FaultsSection(Section):
    """Faults on purpose, for tests."""

    roles = ROLES
    kill_at: KillPoints = ()
    """Points "event:step" at which the process kills itself, such as "published:7"."""


class Config(Section):
    """The whole configuration: one attribute per section of the file."""

    roles = ROLES
    profile: Literal["lan", "wan"]
    """Which defaults: lan (one building) or wan (across the internet)."""
    run: RunSection
    model: ModelSection
    task: TaskSection
    sampling: SamplingSection
    sync: SyncSection
    batch: BatchSection
    loss: LossSection
    optimizer: OptimizerSection
    learner: LearnerSection
    worker: WorkerSection
    relay: RelaySection
    checkpoint: CheckpointSection
    eval: EvalSection
    network: NetworkSection
    limits: LimitsSection
    metrics: MetricsSection
    ui: UiSection
    faults: FaultsSection

    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def sources(self) -> Mapping[str, str]:
        """Where each value came from, by dotted key: a file, --set, a profile or the default."""
        return self._sources

    def with_sources(self, sources: Mapping[str, str]) -> Config:
        """Return the same configuration that knows where its values came from."""
        copy = self.model_copy()
        copy._sources = dict(sources)  # noqa: SLF001, its own class
        return copy

    @property
    def run_dir(self) -> Path:
        """The directory of this run."""
        return Path(self.run.dir) / self.run.name
