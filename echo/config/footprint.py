"""The size of everything that one configuration makes with one model: pure arithmetic.

Activations are an estimate for pre-norm decoders with gated MLPs whose attention never stores its
score matrix; buffers of a few MiB are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo.config.schema import Config

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number, by type."""

_BYTES_PER_SAMPLED_TOKEN = 17  # a rollout's id (4), log-prob (4), version (8) and mask (1)
_LOGPROB_CHUNK_COPIES = 2  # logits of a vocabulary chunk, and their gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The dimensions of a causal language model that its memory follows from."""

    num_params: int
    """Parameters, tied ones once."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that takes memory."""

    name: str
    num_bytes: int
    is_on_gpu: bool
    """Whether it lies beside the model on its accelerator, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Sizes in bytes, per role."""

    config: Config
    facts: ModelFacts
    prompt_tokens: int
    """Tokens that a prompt is assumed to have."""

    def with_learner(self, changes: Mapping[str, Any]) -> Footprint:
        """Return the footprint with settings of [learner] changed."""
        learner = self.config.learner.model_copy(update=changes)
        changed = self.config.model_copy(update={"learner": learner})
        return Footprint(config=changed, facts=self.facts, prompt_tokens=self.prompt_tokens)

    @property
    def rollout_tokens(self) -> int:
        """Tokens of the longest rollout, its prompt included."""
        return self.prompt_tokens + self.config.sampling.max_completion_tokens

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens really in one pass: at least one rollout, at most a whole step."""
        batch = self.config.batch
        whole_step = batch.groups_per_step * batch.group_size * self.rollout_tokens
        return max(self.rollout_tokens, min(self.config.learner.micro_batch_tokens, whole_step))

    def learner_items(self) -> tuple[Item, ...]:
        """Return what training takes: 16 bytes per parameter, a micro-batch, the versions."""
        num_params = self.facts.num_params
        return (
            Item(name="masters", num_bytes=4 * num_params, is_on_gpu=True),
            Item(name="gradients", num_bytes=4 * num_params, is_on_gpu=True),
            Item(name="Adam moments", num_bytes=8 * num_params, is_on_gpu=True),
            Item(name="activations", num_bytes=self._activation_bytes(), is_on_gpu=True),
            Item(name="log-prob chunk", num_bytes=self._logprob_bytes(), is_on_gpu=True),
            self._versions(self.config.network.keep_versions + 1),  # one more is being made
        )

    def worker_items(self, dtype: str) -> tuple[Item, ...]:
        """Return what a worker takes before its first rollout."""
        num_bytes = DTYPE_BYTES[dtype] * self.facts.num_params
        return (
            Item(name="weights", num_bytes=num_bytes, is_on_gpu=True),
            self._versions(self.config.network.keep_versions),
        )

    def relay_items(self) -> tuple[Item, ...]:
        """Return what a relay takes: the versions, and groups that wait to be acknowledged."""
        group_bytes = self.config.batch.group_size * self.rollout_tokens * _BYTES_PER_SAMPLED_TOKEN
        num_bytes = self.config.network.max_unacked_groups * group_bytes
        return (
            self._versions(self.config.network.keep_versions),
            Item(name="groups under way", num_bytes=num_bytes, is_on_gpu=False),
        )

    def bytes_per_rollout(self, dtype: str) -> int:
        """Return keys and values of one rollout of full length, and its row of float32 logits."""
        facts = self.facts
        per_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * DTYPE_BYTES[dtype]
        return per_token * self.rollout_tokens + 4 * facts.vocab_size

    def _versions(self, num_versions: int) -> Item:
        num_bytes = num_versions * DTYPE_BYTES[self.config.model.dtype] * self.facts.num_params
        return Item(name=f"{num_versions} versions", num_bytes=num_bytes, is_on_gpu=False)

    def _activation_bytes(self) -> int:
        """Return the bytes of the float32 tensors kept for one micro-batch's backward pass.

        Per token and layer: two norms and two residuals (6 x hidden), queries before and after
        norm and rotation and the attention's output (3 x heads), keys and values (4 x kv heads),
        and the gated MLP (4 x intermediate). With checkpointing only each layer's input is kept,
        and one layer at a time in full.
        """
        facts = self.facts
        per_layer = (
            6 * facts.hidden_size
            + (3 * facts.num_heads + 4 * facts.num_kv_heads) * facts.head_dim
            + 4 * facts.intermediate_size
        )
        if self.config.learner.gradient_checkpointing:
            per_token = facts.num_layers * facts.hidden_size + per_layer
        else:
            per_token = facts.num_layers * per_layer
        return 4 * per_token * self.micro_batch_tokens

    def _logprob_bytes(self) -> int:
        chunk = min(self.config.learner.vocab_chunk, self.facts.vocab_size)
        return 4 * _LOGPROB_CHUNK_COPIES * self.micro_batch_tokens * chunk
