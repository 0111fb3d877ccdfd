"""Computes the memory that each role needs from the model's dimensions and the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from echo.config.fields import Role
from echo.config.memory.step import DTYPE_BYTES, ModelFacts, StepFootprint
from echo.config.schema import Config
from echo.core.memory_sizes import SAMPLING_BYTES_PER_LOGIT
from echo.core.rollout import KEEP_VERSIONS, MAX_UNACKED_GROUPS
from echo.wire.codec import BYTES_PER_TOKEN

MOMENT_BYTES: Mapping[str, float] = {"float32": 8, "8bit": 2 * (1 + 4 / 64), "offloaded": 8}
"""Bytes of AdamW's two moments for each trained parameter. The keys are the values of
optimizer.state. With "8bit" a moment has 8 bits, and every 64 moments share a scale of 4 bytes."""


PROCESS_BYTES: Mapping[Role, int] = {
    "learner": 500_000_000,
    "worker": 500_000_000,
    "relay": 100_000_000,
}
"""For each role, the bytes of the interpreter and the libraries before a model is loaded. They were
measured on a CPU."""

_RESERVED_SHARE, _RESERVED_BYTES = 0.05, 1_500_000_000
"""GPU memory that is reserved for gaps between tensors, for libraries and for their workspaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A named entry of the memory budget."""

    name: str
    num_bytes: int
    is_on_gpu: bool
    """Whether the item is in the model's memory. For a model on a GPU, this is GPU memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Computes the memory that each role needs, in bytes."""

    config: Config
    facts: ModelFacts
    prompt_tokens: int
    """Assumed number of tokens of a prompt."""
    has_gpu: bool = False
    """Whether the model is on a GPU."""
    num_ranks: int = 1
    """Number of processes over which the learner is sharded. All sizes are for the first
    process."""
    has_versions_on_gpu: bool = True
    """Whether a learner keeps versions on its GPU. This applies only if `may_keep_versions` is
    True."""
    has_tensors_alone: bool = False
    """Whether to count only the tensors of a process on a CPU, without other memory."""
    tokens_in_a_pass: int | None = None
    """Number of tokens of the micro-batch; None for the largest possible micro-batch."""

    def changed(self, changes: Mapping[str, Any]) -> Footprint:
        """Return a copy of this footprint with changed settings.

        The settings are keyed by dotted key.
        """
        config = self.config
        for key, value in changes.items():
            name, _, field = key.partition(".")
            section = getattr(config, name).model_copy(update={field: value})
            config = config.model_copy(update={name: section})
        return replace(self, config=config)

    @property
    def _step(self) -> StepFootprint:
        return StepFootprint(
            config=self.config,
            facts=self.facts,
            prompt_tokens=self.prompt_tokens,
            has_gpu=self.has_gpu,
            num_ranks=self.num_ranks,
            has_tensors_alone=self.has_tensors_alone,
            tokens_in_a_pass=self.tokens_in_a_pass,
        )

    @property
    def rollout_tokens(self) -> int:
        """Number of tokens of the longest rollout, including its prompt."""
        return self._step.rollout_tokens

    @property
    def micro_batch_tokens(self) -> int:
        """Number of tokens in the largest micro-batch."""
        return self._step.largest.num_tokens

    def learner_items(self) -> tuple[Item, ...]:
        """Return what a learner keeps in memory: model, optimizer, a micro-batch and versions.

        Master weights and gradients are float32. A model that computes in bfloat16 also needs the
        weights rounded to bfloat16. Untrained weights (an adapter's base, a reference) exist only
        in bfloat16.

        The analysis of the mismatch (`metrics.attribution_steps`) needs another model in float32.
        Ranks shard all these models in float32, and round a layer to bfloat16 when they gather the
        layer.

        Evaluations sample held-out prompts, if possible with the weights of the stored version
        (runtime/learner/setup.py). Otherwise evaluations need a separate model, which ranks keep in
        the host's memory. The keys and values of only one rollout are counted, because evaluations
        adapt the number of concurrent rollouts to the free memory.

        A GPU with enough memory keeps the last version, and compares it with the next version
        during a step (engine/weights.py). If a step makes several updates, the learner first copies
        weights and moments to the host, so that a failed step can be undone.
        """
        beside = self._sizes_beside_model()
        versions = self._versions(KEEP_VERSIONS + 1)  # one more is being made
        if self.has_gpu and self._step.is_alone:  # in float32, before the others exist
            others = sum(beside.values()) + versions.num_bytes
            beside["model while it is read"] = max(0, 4 * self.facts.num_params - others)
        items = [
            Item(name=name, num_bytes=size, is_on_gpu=is_on_gpu)
            for group, is_on_gpu in ((self._sizes_with_model(), True), (beside, False))
            for name, size in group.items()
            if size
        ]
        return (*items, versions)

    @property
    def _moment_bytes(self) -> int:
        return round(MOMENT_BYTES[self.config.optimizer.state] * self._step.num_trained)

    @property
    def _offloads_moments(self) -> bool:
        return self.has_gpu and self.config.optimizer.state == "offloaded"

    @property
    def _staged_bytes(self) -> int:
        if self.config.optimizer.state != "offloaded":
            return 0
        return -(-8 * self._largest_trained // self.num_ranks)

    def _sizes_with_model(self) -> dict[str, int]:
        """Return the learner's items in the memory that holds the trained model: name and bytes.

        An item is 0 if it is not needed or is in another memory.
        """
        config, num_params, step = self.config, self.facts.num_params, self._step
        is_rounded = step.compute_bytes == 2
        frozen = num_params * (step.compute_bytes if step.is_alone else 4)
        divided = {
            "base": frozen if config.lora.rank else 0,
            "masters": 4 * step.num_trained,
            "Adam moments": 0 if self._offloads_moments else self._moment_bytes,
            # The reference is assumed to be as large as the trained model.
            "reference": frozen if config.reference.kl_coef else 0,
            "attribution": 4 * num_params if config.metrics.attribution_steps else 0,
        }
        sizes = {name: -(-size // self.num_ranks) for name, size in divided.items()} | {
            "rounded weights": 2 * step.num_trained if step.is_alone and is_rounded else 0,
            "layers put together": 0 if step.is_alone else step.unsharded_bytes(),
            "2 versions beside the model": 2 * self._bytes_per_version
            if self.has_versions_on_gpu and self.may_keep_versions
            else 0,
            "evaluation": self._evaluation_bytes if step.is_alone else 0,
            "products' code": step.code_bytes,
            "freed memory": step.freed_bytes,
            **step.fullest_moment(),
            "largest weight in an update": 0 if self._offloads_moments else self._staged_bytes,
        }
        if config.lora.rank and step.is_alone and is_rounded:
            # The base and the reference are each checked in float32 before they are rounded. The
            # base comes first, when only the memory for evaluations is in use besides; the
            # reference comes next.
            before = 4 * num_params + sizes["evaluation"]
            before += sizes["base"] if sizes["reference"] else 0
            sizes["base before it is rounded"] = max(0, before - sum(sizes.values()))
        if self.has_gpu:
            taken = sum(sizes.values())
            sizes["reserve"] = round(_RESERVED_SHARE * taken) + _RESERVED_BYTES
        return sizes

    def _sizes_beside_model(self) -> dict[str, int]:
        """Return the learner's items that are always in the host's memory: name and bytes.

        All ranks are assumed to be on one machine.
        """
        moments, master_bytes = self._moment_bytes, 4 * self._step.num_trained
        has_undo = self.config.batch.minibatches_per_step > 1
        return {
            "process": PROCESS_BYTES["learner"],
            "encoded versions": self._encoded_bytes,
            "offloaded moments": moments if self._offloads_moments else 0,
            "largest weight in an update": self._staged_bytes if self._offloads_moments else 0,
            "layer inputs": self._step.input_bytes if self._step.offloads_inputs else 0,
            "undo of a step": master_bytes + moments if has_undo else 0,
            "checkpoint under way": self._checkpoint_bytes(master_bytes, moments),
            "evaluation": 0 if self._step.is_alone else self._evaluation_bytes,
        }

    @property
    def may_keep_versions(self) -> bool:
        """Whether a learner can keep versions on its GPU and encode the next version there.

        The learner must have a single process and publish deltas.
        """
        return self.has_gpu and self._step.is_alone and self.config.network.codec != "full"

    def worker_items(self, dtype: str) -> tuple[Item, ...]:
        """Return the items that a worker keeps in memory before its first rollout."""
        num_bytes = DTYPE_BYTES[dtype] * self.facts.num_params
        return (
            Item(name="weights", num_bytes=num_bytes, is_on_gpu=True),
            *self._held_versions("worker"),
        )

    def relay_items(self) -> tuple[Item, ...]:
        """Return what a relay keeps in memory: process, versions and unacknowledged groups."""
        group_bytes = self.config.batch.group_size * self.rollout_tokens * BYTES_PER_TOKEN
        num_bytes = MAX_UNACKED_GROUPS * group_bytes
        return (
            *self._held_versions("relay"),
            Item(name="groups under way", num_bytes=num_bytes, is_on_gpu=False),
        )

    def bytes_per_rollout(self, dtype: str) -> int:
        """Return the bytes that a rollout of full length takes: keys, values and float32 logits."""
        facts = self.facts
        per_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * DTYPE_BYTES[dtype]
        return per_token * self.rollout_tokens + 4 * facts.vocab_size

    def _held_versions(self, role: Role) -> tuple[Item, ...]:
        """Return the items that both workers and relays keep in memory: process and versions."""
        sizes = {"process": PROCESS_BYTES[role], "encoded versions": self._encoded_bytes}
        items = [Item(name=name, num_bytes=size, is_on_gpu=False) for name, size in sizes.items()]
        return (self._versions(KEEP_VERSIONS), *(item for item in items if item.num_bytes))

    @property
    def _encoded_bytes(self) -> int:
        """Return the bytes of the deltas that a node keeps for nodes that join late.

        After some tens of versions, all deltas together are as large as a whole version. So the
        bytes of a whole version are counted.
        """
        return 0 if self.config.network.codec == "full" else self._bytes_per_version

    def _versions(self, num_versions: int) -> Item:
        num_bytes = num_versions * self._bytes_per_version
        return Item(name=f"{num_versions} versions", num_bytes=num_bytes, is_on_gpu=False)

    @property
    def _bytes_per_version(self) -> int:
        return DTYPE_BYTES[self.config.model.dtype] * self._step.num_trained

    def _checkpoint_bytes(self, weights: int, moments: int) -> int:
        """Return the host memory, in bytes, that is needed while a checkpoint is written.

        A single process first copies the weights from its GPU and writes them, and then the
        moments. Ranks copy weights and moments together, and need the same memory again to gather
        them.
        """
        if not self.has_gpu:
            return 0
        on_gpu = 0 if self.config.optimizer.state == "offloaded" else moments
        return max(weights, on_gpu) if self._step.is_alone else 2 * weights + moments + on_gpu

    @property
    def _largest_trained(self) -> int:
        """Return the number of parameters in the largest trained tensor. For an adapter, return 0.

        An adapter's tensors are too small to count.
        """
        facts = self.facts
        width = max(facts.vocab_size, facts.intermediate_size)
        return 0 if self.config.lora.rank else width * facts.hidden_size

    @property
    def evaluated_rollout_bytes(self) -> int:
        """Return the bytes that a learner needs to sample one rollout of a held-out prompt.

        The memory holds keys and values, and the numbers from which a token is drawn. While a
        layer's keys and values grow by a token, the old and the new tensors exist, so one more
        layer is counted. Without evaluations the result is 0. With several ranks the result is also
        0, because ranks use the host's free memory.
        """
        facts = self.facts
        if not (self._step.is_alone and self.config.eval.interval_steps):
            return 0
        per_layer = 2 * facts.num_kv_heads * facts.head_dim * self._evaluation_width
        per_token = (facts.num_layers + 1) * per_layer
        completion = self.config.evaluation_sampling.max_completion_tokens
        return (
            per_token * (self.prompt_tokens + completion)
            + SAMPLING_BYTES_PER_LOGIT * facts.vocab_size
        )

    @property
    def _evaluation_bytes(self) -> int:
        config, width = self.config, self._evaluation_width
        is_on_gpu = self.has_gpu and self._step.is_alone
        is_published = width == DTYPE_BYTES[config.model.dtype]
        is_in_place = is_published and not is_on_gpu and not config.lora.rank
        has_none = is_in_place or not config.eval.interval_steps
        weights = 0 if has_none else width * self.facts.num_params
        return weights + self.evaluated_rollout_bytes

    @property
    def _evaluation_width(self) -> int:
        as_trained = self._step.is_alone and not self.has_gpu
        return self._step.compute_bytes if as_trained else DTYPE_BYTES[self.config.model.dtype]
