"""The size of everything that one configuration makes with one model: pure arithmetic.

Activations are an estimate for pre-norm decoders with gated MLPs whose attention never stores its
score matrix; buffers of a few MiB are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from echo.config.schema import Config
from echo.core.rollout import KEEP_VERSIONS

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number, by type."""

_BYTES_PER_SAMPLED_TOKEN = 17  # a rollout's id (4), log-prob (4), version (8) and mask (1)
VOCAB_CHUNK = 8192
"""Columns of logits that exist at one time; as in kernels/logprob.py, which loads torch."""
MAX_UNACKED_GROUPS = 64
"""Groups that a relay holds until the learner has them; as in protocol/delivery.py."""
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
    has_gpu: bool = False
    """Whether the model lies on one."""

    def with_learner(self, changes: Mapping[str, Any]) -> Footprint:
        """Return the footprint with settings of [learner] changed."""
        learner = self.config.learner.model_copy(update=changes)
        changed = self.config.model_copy(update={"learner": learner})
        return replace(self, config=changed)

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
        """Return what training takes: 16 bytes per trained parameter, a micro-batch, the versions.

        Under an adapter the base takes 4 bytes per parameter more, and is in no version.
        A reference model and the one that attribution scores with take 4 bytes more each, the
        copies that bfloat16 products read 2. A GPU keeps the last version to find what changed
        (engine/version_images.py).
        """
        num_params, num_trained = self.facts.num_params, self._num_trained
        base = Item(name="base", num_bytes=4 * num_params, is_on_gpu=True)
        copies = Item(name="bfloat16 copies", num_bytes=2 * num_params, is_on_gpu=True)
        scorer = Item(name="attribution", num_bytes=4 * num_params, is_on_gpu=True)
        # Taken to be as large as the model that is trained.
        reference = Item(name="reference", num_bytes=4 * num_params, is_on_gpu=True)
        last_version = Item(name="last version", num_bytes=self._bytes_per_version, is_on_gpu=True)
        return (
            *([base] if self.config.lora.rank else []),
            Item(name="masters", num_bytes=4 * num_trained, is_on_gpu=True),
            Item(name="gradients", num_bytes=4 * num_trained, is_on_gpu=True),
            Item(name="Adam moments", num_bytes=8 * num_trained, is_on_gpu=True),
            *([copies] if self._compute_bytes < 4 else []),
            *([reference] if self.config.reference.kl_coef else []),
            *([scorer] if self.config.metrics.attribution_steps else []),
            *([last_version] if self.has_gpu and self.config.network.codec != "full" else []),
            Item(name="activations", num_bytes=self._activation_bytes(), is_on_gpu=True),
            Item(name="log-prob chunk", num_bytes=self._logprob_bytes(), is_on_gpu=True),
            self._versions(KEEP_VERSIONS + 1),  # one more is being made
        )

    def worker_items(self, dtype: str) -> tuple[Item, ...]:
        """Return what a worker takes before its first rollout."""
        num_bytes = DTYPE_BYTES[dtype] * self.facts.num_params
        return (
            Item(name="weights", num_bytes=num_bytes, is_on_gpu=True),
            self._versions(KEEP_VERSIONS),
        )

    def relay_items(self) -> tuple[Item, ...]:
        """Return what a relay takes: the versions, and groups that wait to be acknowledged."""
        group_bytes = self.config.batch.group_size * self.rollout_tokens * _BYTES_PER_SAMPLED_TOKEN
        num_bytes = MAX_UNACKED_GROUPS * group_bytes
        return (
            self._versions(KEEP_VERSIONS),
            Item(name="groups under way", num_bytes=num_bytes, is_on_gpu=False),
        )

    def bytes_per_rollout(self, dtype: str) -> int:
        """Return keys and values of one rollout of full length, and its row of float32 logits."""
        facts = self.facts
        per_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * DTYPE_BYTES[dtype]
        return per_token * self.rollout_tokens + 4 * facts.vocab_size

    def _versions(self, num_versions: int) -> Item:
        num_bytes = num_versions * self._bytes_per_version
        return Item(name=f"{num_versions} versions", num_bytes=num_bytes, is_on_gpu=False)

    @property
    def _bytes_per_version(self) -> int:
        return DTYPE_BYTES[self.config.model.dtype] * self._num_trained

    @property
    def _num_trained(self) -> int:
        """Parameters that are trained and published: all, or those of the adapter.

        Target modules other than the usual seven are taken for as large as the largest of those.
        """
        facts, lora = self.facts, self.config.lora
        if not lora.rank:
            return facts.num_params
        heads, kv_heads = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
        mlp = facts.hidden_size + facts.intermediate_size
        sizes = {
            **dict.fromkeys(("q_proj", "o_proj"), facts.hidden_size + heads),
            **dict.fromkeys(("k_proj", "v_proj"), facts.hidden_size + kv_heads),
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), mlp),
        }
        names = sizes if lora.target_modules == ("all-linear",) else lora.target_modules
        return lora.rank * facts.num_layers * sum(sizes.get(name, mlp) for name in names)

    def _activation_bytes(self) -> int:
        """Return the bytes of the tensors kept for one micro-batch's backward pass.

        Per token and layer: two norms and two residuals (6 x hidden), in float32; queries before
        and after norm and rotation and the attention's output (3 x heads), keys and values (4 x kv
        heads), and the gated MLP (4 x intermediate), in the type of the matrix products. With
        checkpointing only each layer's input is kept, and one layer at a time in full.
        """
        facts = self.facts
        products = (
            3 * facts.num_heads + 4 * facts.num_kv_heads
        ) * facts.head_dim + 4 * facts.intermediate_size
        per_layer = 4 * 6 * facts.hidden_size + self._compute_bytes * products
        if self.config.learner.gradient_checkpointing:
            per_token = 4 * facts.num_layers * facts.hidden_size + per_layer
        else:
            per_token = facts.num_layers * per_layer
        return per_token * self.micro_batch_tokens

    @property
    def _compute_bytes(self) -> int:
        """Bytes per number of the learner's matrix products; auto counts as float32."""
        return DTYPE_BYTES.get(self.config.learner.dtype, 4)

    def _logprob_bytes(self) -> int:
        chunk = min(VOCAB_CHUNK, self.facts.vocab_size)
        return 4 * _LOGPROB_CHUNK_COPIES * self.micro_batch_tokens * chunk
