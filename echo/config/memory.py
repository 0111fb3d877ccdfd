"""The memory that a role needs, compared with the machine's, and settings that reduce it.

The sums are pure functions of the model's dimensions and the machine's memory; functions at the end
of the module read these. Only settings that do save memory are suggested, each with the number of
bytes that it saves.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from echo.config.fields import UNREADABLE, Role
from echo.config.schema import Config, show
from echo.core.errors import ConfigError, DataError
from echo.core.paths import local_path
from echo.core.rollout import KEEP_VERSIONS, MAX_UNACKED_GROUPS
from echo.core.units import format_bytes

# --- footprint ------------------------------------------------------------------------------------
#
# Sums for pre-norm decoders with gated MLPs whose attention never stores its score matrix; buffers
# of a few MiB are left out. tests/train/test_footprint.py compares the sums with the tensors of
# real steps, and bench/bench_memory.py with the memory of real processes.
#
# The memory of a step itself, besides the permanent memory, differs from moment to moment: the
# head's logits exist together with all activations, but most gradients exist only after the
# activations have been freed. So a footprint has several moments, and counts the one with the most
# bytes.


DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number, by type."""

_BYTES_PER_SAMPLED_TOKEN = 17  # a rollout's id (4), log-prob (4), version (8) and mask (1)
VOCAB_CHUNK = 8192
"""Columns of logits that exist at once; as in kernels/logprob.py, which loads torch."""
DRAWING_BYTES = 32
"""Bytes per entry of the vocabulary while a rollout's token is drawn; as in engine/hf/engine.py,
which loads torch, too.
"""

MOMENT_BYTES: Mapping[str, float] = {"float32": 8, "8bit": 2 * (1 + 4 / 64), "offloaded": 8}
"""Bytes per trained parameter of AdamW's two moments, by optimizer.state: 8 bits each, with a scale
for every 64 of them."""


PROCESS_BYTES: Mapping[Role, int] = {
    "learner": 500_000_000,
    "worker": 500_000_000,
    "relay": 100_000_000,
}
"""Bytes of each role's interpreter and libraries before it loads a model; measured on a CPU."""

ASSUMED_PROMPT_TOKENS = 512
"""Assumed length of the longest prompt, for a node that has not read the task's data."""
MIN_SAVED = 0.2
"""Rollouts share a prompt if this saves at least this share of their tokens (algo/batching.py)."""
SIZES_PER_OCTAVE = 16
"""Row sizes between a number of tokens and its double; as in algo/batching.py."""
PACKED: Mapping[str, bool] = {
    "llama": False, "qwen2": False, "qwen3": True, "mistral": False, "phi3": False,
    "smollm3": False, "gemma3": True, "gemma3_text": True, "gemma4": True, "gemma4_text": True,
    "olmo3": True, "qwen3_moe": True,
    "mixtral": False, "deepseek_v3": True, "glm4_moe": True, "qwen2_5_vl": False, "qwen3_vl": True,
    "mistral3": False, "smolvlm": False,
}  # fmt: skip
"""Families whose rollouts may share a row and a prompt (docs/models.md), by model_type; the value
is whether they normalise the queries and keys of each head. For other families both are unknown, so
the larger need is counted.
"""
CHECKPOINTING: Mapping[bool | str, str] = {
    False: "",
    True: " and gradient checkpointing",
    "offload": " and gradient checkpointing with offloaded inputs",
}
"""Values of learner.gradient_checkpointing, the fastest first, with their words in messages."""
FREED_BYTES = 64 << 20
"""Bytes that a process on a CPU has freed and not yet returned: a quarter of GROWN_BYTES in
engine/allocator.py, a higher layer that cannot be imported here.
"""
_RESERVED_SHARE, _RESERVED_BYTES = 0.05, 1_500_000_000
"""GPU memory that is reserved for gaps between tensors, and for libraries and their workspaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The dimensions of a causal language model that determine its memory."""

    num_params: int
    """Number of parameters; tied parameters count once."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool = True
    """Whether the head shares its weights with the embedding."""
    has_head_norms: bool = True
    """Whether the model normalises the queries and keys of each head; True if unknown."""
    shares_prompts: bool = False
    """Whether rollouts with the same prompt share it in a packed row; False if unknown."""

    @property
    def num_outside_layers(self) -> int:
        """Number of parameters of the embedding and the head."""
        return self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A named entry of the memory budget."""

    name: str
    num_bytes: int
    is_on_gpu: bool
    """Whether the bytes are in the model's memory: the GPU's, if the model runs on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The sizes of the largest micro-batch, which determine the memory of a step."""

    num_tokens: int
    """Tokens that go through the model: at least one rollout, at most a whole step."""
    num_keys: int
    """Keys that the tokens attend to; the keys of a shared prompt count once per completion."""
    num_scored: int
    """Tokens for which the head computes logits: the completion tokens."""
    mask_bytes: int
    """Bytes of the attention mask per layer, if rollouts share a prompt on a CPU."""
    is_only: bool
    """Whether this micro-batch is the whole step, so that no gradients exist before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Computes the memory, in bytes, that each role needs with a configuration and a model."""

    config: Config
    facts: ModelFacts
    prompt_tokens: int
    """Assumed number of tokens of a prompt."""
    has_gpu: bool = False
    """Whether the model is on a GPU."""
    num_ranks: int = 1
    """Number of processes over which the learner is sharded; the sizes are those of the first
    process."""
    has_versions_on_gpu: bool = True
    """Whether a learner keeps versions on its GPU, if `may_keep_versions`."""
    has_tensors_alone: bool = False
    """Whether to count only the tensors of a process on a CPU, without its other memory."""
    tokens_in_a_pass: int | None = None
    """Tokens of the micro-batch to budget for; None for the largest possible one."""

    def changed(self, changes: Mapping[str, Any]) -> Footprint:
        """Return a copy of this footprint with other settings, given by dotted key."""
        config = self.config
        for key, value in changes.items():
            name, _, field = key.partition(".")
            section = getattr(config, name).model_copy(update={field: value})
            config = config.model_copy(update={name: section})
        return replace(self, config=config)

    @property
    def rollout_tokens(self) -> int:
        """Number of tokens of the longest rollout, its prompt included."""
        return self.prompt_tokens + self.config.sampling.max_completion_tokens

    @property
    def micro_batch_tokens(self) -> int:
        """Number of tokens in the largest micro-batch."""
        return self._pass.num_tokens

    @property
    def _pass(self) -> _Pass:
        """The sizes of the largest micro-batch, with rollouts of full length."""
        batch, limit = self.config.batch, self.config.learner.micro_batch_tokens
        completion, size = self.config.sampling.max_completion_tokens, batch.group_size
        num_together = _rollouts_per_row(self.facts, self.config, prompt_tokens=self.prompt_tokens)
        copies = -(-size // num_together)  # of a group's prompt
        tokens = copies * self.prompt_tokens + size * completion
        keys = size * self.rollout_tokens + (copies * self.prompt_tokens if copies < size else 0)
        num_groups = batch.groups_per_step
        whole = num_groups * tokens
        num_tokens = self.tokens_in_a_pass or max(self.rollout_tokens, min(limit, whole))
        if not self.has_gpu and self._compute_bytes == 2 and num_tokens <= limit:
            # Filled to one of a few sizes.
            step = max(1, (1 << num_tokens.bit_length() - 1) // SIZES_PER_OCTAVE)
            num_tokens = min(limit, -(-num_tokens // step) * step)
        num_scored = min(num_tokens, num_groups * size * completion)
        mask_bytes = 0
        if copies < size and not self.has_gpu:  # every rollout has another length
            mask_bytes = 4 * (num_scored // completion + 1) * completion * self.rollout_tokens
        return _Pass(
            num_tokens=num_tokens,
            num_keys=-(-num_tokens * keys // tokens),
            num_scored=num_scored,
            mask_bytes=mask_bytes,
            is_only=self._is_alone and whole <= limit and self.tokens_in_a_pass is None,
        )

    def learner_items(self) -> tuple[Item, ...]:
        """Return what a learner needs memory for: model, optimizer, a micro-batch, versions.

        Masters and gradients are float32. A model that computes in bfloat16 also has the rounded
        weights; its untrained weights (the base of an adapter, a reference) exist in bfloat16 only.
        For the attribution of a mismatch the learner scores with a float32 model. Ranks shard all
        of these models in float32, and round a layer to bfloat16 when they gather it. Held-out
        prompts are sampled with a separate model if a version's image cannot serve as one
        (runtime/learner/setup.py); ranks keep it in the host's memory. The keys and values of one
        rollout are budgeted; more rollouts run if memory is left. A GPU with enough memory keeps
        the last version and compares the next one with it during a step (engine/weights.py). Before
        a step of several updates weights and moments are copied to the host, so that a step that
        fails changes nothing.
        """
        beside = self._sizes_beside_model()
        versions = self._versions(KEEP_VERSIONS + 1)  # one more is being made
        if self.has_gpu and self._is_alone:  # in float32, before all of these
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
        return round(MOMENT_BYTES[self.config.optimizer.state] * self._num_trained)

    @property
    def _offloads_moments(self) -> bool:
        return self.has_gpu and self.config.optimizer.state == "offloaded"

    @property
    def _staged_bytes(self) -> int:
        """Bytes of the largest weight and its gradient while they are moved for an update."""
        if self.config.optimizer.state != "offloaded":
            return 0
        return -(-8 * self._largest_trained // self.num_ranks)

    def _sizes_with_model(self) -> dict[str, int]:
        """Return the bytes that a learner needs in the memory of the trained model, by name.

        An entry is 0 if its bytes are not needed, or are in other memory.
        """
        config, num_params, num_trained = self.config, self.facts.num_params, self._num_trained
        is_rounded = self._compute_bytes == 2
        frozen = num_params * (self._compute_bytes if self._is_alone else 4)
        divided = {
            "base": frozen if config.lora.rank else 0,
            "masters": 4 * num_trained,
            "Adam moments": 0 if self._offloads_moments else self._moment_bytes,
            # The reference is assumed to be as large as the trained model.
            "reference": frozen if config.reference.kl_coef else 0,
            "attribution": 4 * num_params if config.metrics.attribution_steps else 0,
        }
        sizes = {name: -(-size // self.num_ranks) for name, size in divided.items()} | {
            "rounded weights": 2 * num_trained if self._is_alone and is_rounded else 0,
            "layers put together": 0 if self._is_alone else self._unsharded_bytes(),
            "2 versions beside the model": 2 * self._bytes_per_version
            if self.has_versions_on_gpu and self.may_keep_versions
            else 0,
            "evaluation": self._evaluation_bytes if self._is_alone else 0,
            "products' code": self._code_bytes,
            "freed memory": FREED_BYTES if self._keeps_freed and self._is_alone else 0,
            **self._fullest_moment(),
            "largest weight in an update": 0 if self._offloads_moments else self._staged_bytes,
        }
        if config.lora.rank and self._is_alone and is_rounded:
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
        """Return the bytes that a learner needs in the host's memory, by name.

        All ranks are on one machine.
        """
        moments, master_bytes = self._moment_bytes, 4 * self._num_trained
        has_undo = self.config.batch.minibatches_per_step > 1
        return {
            "process": PROCESS_BYTES["learner"],
            "encoded versions": self._encoded_bytes,
            "offloaded moments": moments if self._offloads_moments else 0,
            "largest weight in an update": self._staged_bytes if self._offloads_moments else 0,
            "layer inputs": self._input_bytes if self._offloads_inputs else 0,
            "undo of a step": master_bytes + moments if has_undo else 0,
            "checkpoint under way": self._checkpoint_bytes(master_bytes, moments),
            "evaluation": 0 if self._is_alone else self._evaluation_bytes,
        }

    @property
    def may_keep_versions(self) -> bool:
        """Whether a learner can keep versions on its GPU and encode the next one from them.

        Only a learner of a single process can, and only if it publishes deltas.
        """
        return self.has_gpu and self._is_alone and self.config.network.codec != "full"

    def worker_items(self, dtype: str) -> tuple[Item, ...]:
        """Return what a worker needs memory for before its first rollout."""
        num_bytes = DTYPE_BYTES[dtype] * self.facts.num_params
        return (
            Item(name="weights", num_bytes=num_bytes, is_on_gpu=True),
            *self._held_versions("worker"),
        )

    def relay_items(self) -> tuple[Item, ...]:
        """Return what a relay needs memory for: versions, and groups not yet acknowledged."""
        group_bytes = self.config.batch.group_size * self.rollout_tokens * _BYTES_PER_SAMPLED_TOKEN
        num_bytes = MAX_UNACKED_GROUPS * group_bytes
        return (
            *self._held_versions("relay"),
            Item(name="groups under way", num_bytes=num_bytes, is_on_gpu=False),
        )

    def bytes_per_rollout(self, dtype: str) -> int:
        """Return the bytes of a full-length rollout's keys and values and its float32 logits."""
        facts = self.facts
        per_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * DTYPE_BYTES[dtype]
        return per_token * self.rollout_tokens + 4 * facts.vocab_size

    def _held_versions(self, role: Role) -> tuple[Item, ...]:
        """Return what a worker or relay needs memory for besides a model: process and versions."""
        sizes = {"process": PROCESS_BYTES[role], "encoded versions": self._encoded_bytes}
        items = [Item(name=name, num_bytes=size, is_on_gpu=False) for name, size in sizes.items()]
        return (self._versions(KEEP_VERSIONS), *(item for item in items if item.num_bytes))

    @property
    def _encoded_bytes(self) -> int:
        """Bytes of the deltas that a node keeps for nodes that join late.

        After some tens of versions they are as large as a whole version.
        """
        return 0 if self.config.network.codec == "full" else self._bytes_per_version

    def _versions(self, num_versions: int) -> Item:
        num_bytes = num_versions * self._bytes_per_version
        return Item(name=f"{num_versions} versions", num_bytes=num_bytes, is_on_gpu=False)

    @property
    def _bytes_per_version(self) -> int:
        return DTYPE_BYTES[self.config.model.dtype] * self._num_trained

    @property
    def _num_trained(self) -> int:
        """Number of parameters that are trained and published: all, or the adapter's.

        A target module that is not one of the usual seven counts as large as the largest of the
        seven.
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

    def _checkpoint_bytes(self, weights: int, moments: int) -> int:
        """Bytes of a checkpoint that are in the host's memory while it is written.

        A single process copies the weights from its GPU for the first file, and then the moments.
        Ranks copy both, and need the same memory again to gather them.
        """
        if not self.has_gpu:
            return 0
        on_gpu = 0 if self.config.optimizer.state == "offloaded" else moments
        return max(weights, on_gpu) if self._is_alone else 2 * weights + moments + on_gpu

    @property
    def _largest_trained(self) -> int:
        """Number of parameters of the largest trained tensor; 0 with an adapter.

        All tensors of an adapter are small.
        """
        facts = self.facts
        width = max(facts.vocab_size, facts.intermediate_size)
        return 0 if self.config.lora.rank else width * facts.hidden_size

    @property
    def evaluated_rollout_bytes(self) -> int:
        """Bytes that one rollout of a held-out prompt takes in a learner of one process.

        These are the keys and values, which exist twice for one layer while they grow by a token.
        The result is 0 without evaluations, and for several ranks, which use the host's free
        memory.
        """
        facts = self.facts
        if not (self._is_alone and self.config.eval.interval_steps):
            return 0
        per_layer = 2 * facts.num_kv_heads * facts.head_dim * self._evaluation_width
        per_token = (facts.num_layers + 1) * per_layer
        return per_token * self.rollout_tokens + DRAWING_BYTES * facts.vocab_size

    @property
    def _evaluation_bytes(self) -> int:
        """Bytes for sampling held-out prompts, besides versions: weights and one rollout."""
        config, width = self.config, self._evaluation_width
        is_on_gpu = self.has_gpu and self._is_alone
        is_published = width == DTYPE_BYTES[config.model.dtype]
        is_in_place = is_published and not is_on_gpu and not config.lora.rank
        has_none = is_in_place or not config.eval.interval_steps
        weights = 0 if has_none else width * self.facts.num_params
        return weights + self.evaluated_rollout_bytes

    @property
    def _evaluation_width(self) -> int:
        """Bytes per weight of the model that samples held-out prompts."""
        as_trained = self._is_alone and not self.has_gpu
        return self._compute_bytes if as_trained else DTYPE_BYTES[self.config.model.dtype]

    def _fullest_moment(self) -> dict[str, int]:
        """Return the bytes that a step needs besides the model when it needs the most, by name."""
        moments = list(self._moments())
        totals = [sum(moment.values()) for moment in moments]
        return moments[totals.index(max(totals))]

    def _moments(self) -> Iterator[dict[str, int]]:
        """Yield the bytes that a step needs besides the model at several moments, by name.

        One of these moments needs the most memory. During a micro-batch after the first, all
        gradients exist. During the first micro-batch, no gradients exist at the start, and all
        except the first layer's exist when the backward pass reaches that layer. The head's
        gradient exists when the backward pass of the last layer begins. The gradient of a tied head
        is kept in the type of the products until the embedding's exists; then both are added to the
        float32 gradient. On a CPU the process keeps freed activations until it grows again, and
        reuses their memory for the first gradients of layers.
        """
        one = "one layer or head"
        if not self._is_alone:
            yield {
                "gradients": self._gradient_bytes,
                "activations": self._activation_bytes(),
                one: self._working_bytes_of_a_rank(),
            }
            return
        now, width, facts = self._pass, self._compute_bytes, self.facts
        # Under an adapter neither head nor embedding has a gradient.
        outside = 0 if self.config.lora.rank else facts.vocab_size * facts.hidden_size
        all_of_them = self._gradient_bytes
        before = 0 if now.is_only else all_of_them
        kept = self._activation_bytes()
        forward, backward = self._head_bytes()
        waiting = width * outside
        made = 4 * outside if now.is_only else 0  # which then counts among the gradients
        # A float32 copy, which becomes the gradient or is added to it; a GPU adds without a copy.
        cast = 4 * outside if width == 2 and (now.is_only or self._keeps_freed) else 0
        final = (4 + width) * facts.hidden_size * now.num_tokens
        for head in (forward, backward + waiting):
            yield {"gradients": before, "activations": kept + final, one: head}
        if not facts.is_tied:
            before += made
            added = max(0, waiting + cast - made)
            yield {"gradients": before, "activations": kept, one: added}
            waiting = 0
        layer = self._layer_bytes(now) if self._has_checkpointing else 0
        layer += self._passing_bytes
        yield {"gradients": before, "activations": kept, one: layer + waiting}
        inner = all_of_them - 4 * (facts.num_outside_layers if outside else 0)
        first = kept // facts.num_layers
        there = before + inner if now.is_only else before
        yield {"gradients": there, "activations": first, one: layer + waiting}
        if self.config.reference.kl_coef:
            unkept = width * (4 * facts.intermediate_size + 2 * facts.hidden_size) * now.num_tokens
            yield {"gradients": before, "activations": kept, one: unkept}
        held = 0
        if self._keeps_freed:
            held = layer if self._has_checkpointing else kept + layer
            if now.is_only and not self._has_checkpointing:
                held -= min(held, inner)
        both = width * outside * (2 if facts.is_tied else 1)
        added = max(both, width * outside + cast) - made
        added = max(0, added)
        yield {"gradients": all_of_them, "activations": held, one: added}

    @property
    def _keeps_freed(self) -> bool:
        """Whether to count freed memory, which a process on a CPU keeps for a while."""
        return not (self.has_gpu or self.has_tensors_alone)

    @property
    def _gradient_bytes(self) -> int:
        return -(-4 * self._num_trained // self.num_ranks)

    def _activation_bytes(self) -> int:
        """Return the bytes of the tensors that one micro-batch keeps for its backward pass.

        With checkpointing these are the inputs of the layers; if the inputs are offloaded, only
        those of one layer and of the next.
        """
        if self._offloads_inputs:
            return min(2, self.facts.num_layers) * self._input_bytes // self.facts.num_layers
        if self._has_checkpointing:
            return self._input_bytes
        return self._layer_bytes(self._pass) * self.facts.num_layers

    @property
    def _input_bytes(self) -> int:
        """Bytes of the inputs of all layers."""
        facts = self.facts
        per_token = self._compute_bytes * facts.hidden_size * facts.num_layers
        return per_token * self._pass.num_tokens

    def _layer_bytes(self, now: _Pass) -> int:
        """Return the bytes of the tensors that autograd keeps for one layer.

        For each of the layer's two norms: its input in float32, the normalised value if the norm's
        weight is trained, and its output. For attention: queries, keys, values and the output, in
        float32 on a CPU; the output again as the input of a product; and on a GPU the rotated
        query. Norms of heads count like the other norms. For the MLP: four tensors of its inner
        width. The small matrices of an adapter have their own inputs.
        """
        facts, width = self.facts, self._compute_bytes
        rank = self.config.lora.rank
        normalised = 4 + (0 if rank else width)
        attended = 2 if self.has_gpu and width == 2 else 4
        queries = facts.num_heads * facts.head_dim
        keys = facts.num_kv_heads * facts.head_dim
        per_token = 2 * (normalised + width) * facts.hidden_size
        per_token += (2 * attended + width) * queries
        if facts.has_head_norms:
            per_token += normalised * (queries + keys)
        per_token += width * (4 * facts.intermediate_size + 7 * rank)
        return per_token * now.num_tokens + 2 * attended * keys * now.num_keys + now.mask_bytes

    @property
    def _passing_bytes(self) -> int:
        """Bytes of the gradients that exist inside a layer during its backward pass.

        They are two tensors of the MLP's inner width, or the gradients of a norm if those are
        larger. On a GPU measurements did not show these bytes: they reuse the memory of the layer's
        activations.
        """
        if self.has_gpu:
            return 0
        facts, width = self.facts, self._compute_bytes
        per_token = max(2 * width * facts.intermediate_size, 16 * facts.hidden_size)
        return per_token * self._pass.num_tokens

    @property
    def _code_bytes(self) -> int:
        """Bytes that a CPU caches for bfloat16 products.

        The cache has a copy of a layer's weights for each of the SIZES_PER_OCTAVE row sizes.
        """
        if not self._keeps_freed or self._compute_bytes != 2 or not self._is_alone:
            return 0
        return SIZES_PER_OCTAVE * 2 * self._params_per_layer

    def _working_bytes_of_a_rank(self) -> int:
        """Return the bytes that a rank needs for a moment only, at the worst moment.

        The candidates are a layer that is computed again, with its gradients; the head; and the
        gathered gradients of embedding and head, which belong to no layer. When the latter are
        gathered, activations are freed already and no layer is gathered.
        """
        facts, width = self.facts, self._compute_bytes
        # Under an adapter neither of them has a gradient.
        num_outside = 0 if self.config.lora.rank else facts.num_outside_layers
        head = width * num_outside
        layer = (width + 4) * self._params_per_layer
        if self._has_checkpointing:
            layer += self._layer_bytes(self._pass) + head
        gathered = (width + 4) * num_outside - 2 * width * self._params_per_layer
        gathered -= self._activation_bytes()
        return max(layer, max(self._head_bytes()) + head, gathered)

    def _head_bytes(self) -> tuple[int, int]:
        """Return the bytes that the log-probabilities need in the forward and in the backward pass.

        kernels/torch_kernels.py needs logits, their exponentials and the product of both; states
        and their gradient in float32; and a chunk of the head's gradient. On a GPU in bfloat16,
        kernels/triton_kernels.py needs the same number of bytes in both passes.
        """
        facts, rows = self.facts, self._pass.num_scored
        chunk, hidden = min(VOCAB_CHUNK, facts.vocab_size), facts.hidden_size
        if self.has_gpu and self._compute_bytes == 2:
            taken = rows * (2 * chunk + 6 * hidden) + 4 * chunk * hidden
            return taken, taken
        states = (4 + self._compute_bytes) * hidden * rows
        logits = 4 * chunk * rows
        again = 2 * logits if self.config.loss.entropy_coef else logits
        return 3 * logits + states, again + states + 4 * hidden * rows + 4 * chunk * hidden

    def _unsharded_bytes(self) -> int:
        """Return the bytes of the weights that a rank has gathered.

        These weights are the embedding, the head and two layers.
        """
        return self._compute_bytes * (self.facts.num_outside_layers + 2 * self._params_per_layer)

    @property
    def _params_per_layer(self) -> int:
        facts = self.facts
        return max(0, facts.num_params - facts.num_outside_layers) // facts.num_layers

    @property
    def _is_alone(self) -> bool:
        return self.num_ranks == 1

    @property
    def _has_checkpointing(self) -> bool:
        return self.config.learner.gradient_checkpointing in (True, "offload")

    @property
    def _offloads_inputs(self) -> bool:
        return self.has_gpu and self.config.learner.gradient_checkpointing == "offload"

    @property
    def _compute_bytes(self) -> int:
        """Bytes of each number in the learner's matrix products; "auto" counts as float32."""
        return DTYPE_BYTES.get(self.config.learner.dtype, 4)


def _rollouts_per_row(facts: ModelFacts, config: Config, *, prompt_tokens: int) -> int:
    """Return the number of rollouts that share their prompt in one row.

    These rollouts fill at most half of a micro-batch. The number is 1 if rollouts do not share
    prompts, or if sharing saves too little. It is computed for completions of full length: shorter
    completions save more, so they share their prompts whenever these do.
    """
    completion = config.sampling.max_completion_tokens
    room = (config.learner.micro_batch_tokens // 2 - prompt_tokens) // completion
    number = max(1, min(config.batch.group_size, room))
    is_packed = config.model.attn_implementation in ("auto", "sdpa")
    apart = number * (prompt_tokens + completion)
    saves = prompt_tokens + number * completion <= (1.0 - MIN_SAVED) * apart
    return number if facts.shares_prompts and is_packed and saves else 1


# --- budget ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The memory that one process may use."""

    host_bytes: int
    """Available main memory, bytes."""
    gpu_bytes: int | None = None
    """Available memory of the GPU that the model runs on, bytes; None if it runs on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A setting that would save memory, and the number of bytes that it would save."""

    setting: str
    """The setting as an argument of --set: section.key=value."""
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that a role needs, compared with the memory of the machine."""

    fits: bool
    line: str
    """The budget as one line of text."""
    items: tuple[Item, ...]
    needed_bytes: int
    """Bytes needed in the memory that is too small; if none is, bytes needed in the model's memory.
    """
    max_concurrent_rollouts: int | None = None
    """Number of rollouts that fit into a worker's memory; None for other roles."""
    gradient_checkpointing: bool | str = False
    """The learner's gradient checkpointing, as the user set it or as the budget chose it."""
    recompute_above: int = 0
    """Number of tokens of the largest micro-batch whose activations fit. If gradient checkpointing
    is "auto", the learner recomputes the activations of larger micro-batches.
    """
    has_versions_on_gpu: bool = False
    """Whether a learner keeps the last version on its GPU, because the GPU has enough memory."""
    evaluation_bytes: int = 0
    """Bytes for concurrent rollouts of held-out prompts in a learner of a single process: half of
    the memory that is otherwise free, and at least the bytes of one rollout.
    """
    remedies: tuple[Saving, ...] = ()
    """Settings that each save memory, the mildest first; empty if everything fits or no setting
    helps."""


def memory_budget(
    config: Config,
    role: Role,
    model_facts: ModelFacts,
    machine: Machine,
    *,
    prompt_tokens: int = ASSUMED_PROMPT_TOKENS,
    num_ranks: int = 1,
) -> Budget:
    """Return the memory that `role` needs on `machine`, with settings that help if it is too much.

    With several ranks the budget is that of each rank, and `machine` is the share of one rank.
    """
    footprint = Footprint(
        config=config,
        facts=model_facts,
        prompt_tokens=prompt_tokens,
        has_gpu=machine.gpu_bytes is not None,
        num_ranks=num_ranks if role == "learner" else 1,
    )
    if config.learner.dtype == "auto":
        dtype = "float32" if machine.gpu_bytes is None else "bfloat16"
        footprint = footprint.changed({"learner.dtype": dtype})
    may_choose = config.learner.gradient_checkpointing == "auto"
    if role == "learner":
        footprint = _first_that_fits(footprint, machine)
    if role == "worker":
        return _worker_budget(footprint, machine)
    if role == "relay":
        machine = replace(machine, gpu_bytes=None)  # it holds bytes, no model
    items = footprint.learner_items() if role == "learner" else footprint.relay_items()
    memory, own = _decisive(items, machine), _memories(items, machine)[0]
    fits = memory.missing_bytes <= 0
    remedies: tuple[Saving, ...] = ()
    advice = ""
    if not fits and role == "learner" and memory == own:
        remedies, advice = _advise_learner(footprint, memory.missing_bytes)
    elif not fits:
        advice = _too_short(memory.missing_bytes)
    largest = max(memory.items, key=lambda item: item.num_bytes)
    return Budget(
        fits=fits,
        line=f"{_who(footprint, role)} needs {_needs_has(memory)}"
        f"{_chosen(footprint, role)}{advice} "
        f"(largest part: {largest.name}, {format_bytes(largest.num_bytes)})",
        items=items,
        needed_bytes=memory.needed_bytes,
        remedies=remedies,
        gradient_checkpointing=footprint.config.learner.gradient_checkpointing,
        recompute_above=_recompute_above(footprint, own)
        if may_choose and role == "learner" and footprint.config.learner.gradient_checkpointing
        else 0,
        has_versions_on_gpu=footprint.may_keep_versions and footprint.has_versions_on_gpu,
        evaluation_bytes=footprint.evaluated_rollout_bytes + max(0, -own.missing_bytes) // 2,
    )


def _first_that_fits(footprint: Footprint, machine: Machine) -> Footprint:
    """Return the footprint of the fastest choice of a learner's automatic settings that fits.

    If none fits, return the choice that needs the least memory.

    Versions in host memory do not slow a step; computing activations again slows it by a third.
    """
    told = footprint.config.learner.gradient_checkpointing
    choices = tuple(CHECKPOINTING)[: 3 if footprint.has_gpu else 2]
    ways = [
        replace(
            footprint.changed({"learner.gradient_checkpointing": choice}),
            has_versions_on_gpu=is_on_gpu,
        )
        for choice in (choices if told == "auto" else (told,))
        for is_on_gpu in (True, False)
    ]
    return next(
        (way for way in ways if _memories(way.learner_items(), machine)[0].missing_bytes <= 0),
        ways[-1],
    )


def _recompute_above(footprint: Footprint, own: _Memory) -> int:
    """Return how many tokens a micro-batch may have so that its activations fit.

    Activations of larger micro-batches are recomputed. Kept activations take at most half of the
    free memory; the evaluation takes the other half.

    Args:
        footprint: the footprint of a learner with gradient checkpointing.
        own: the model's memory, with the items of this learner.
    """
    limit = own.needed_bytes + max(0, -own.missing_bytes) // 2
    plain = footprint.changed({"learner.gradient_checkpointing": False})

    def is_too_large(tokens: int) -> bool:
        items = replace(plain, tokens_in_a_pass=tokens).learner_items()
        has_gpu = footprint.has_gpu
        return sum(item.num_bytes for item in items if item.is_on_gpu or not has_gpu) > limit

    return bisect_left(range(footprint.micro_batch_tokens + 1), 1, 1, key=is_too_large) - 1


def _who(footprint: Footprint, role: Role) -> str:
    return role if footprint.num_ranks == 1 else f"each of {footprint.num_ranks} ranks"


def _chosen(footprint: Footprint, role: Role) -> str:
    """Return text on the settings that decide a learner's memory; "" for other roles."""
    if role != "learner":
        return ""
    config = footprint.config
    parts = f" with {config.learner.dtype} weights, {config.optimizer.state} moments"
    if footprint.may_keep_versions:
        place = "on the GPU" if footprint.has_versions_on_gpu else "in host memory"
        parts += f", the last version {place}"
    return parts + CHECKPOINTING[config.learner.gradient_checkpointing]


def _worker_budget(footprint: Footprint, machine: Machine) -> Budget:
    worker = footprint.config.worker
    dtype = worker.dtype
    if dtype == "auto":
        dtype = "float32" if machine.gpu_bytes is None else "bfloat16"
    items = footprint.worker_items(dtype)
    per_rollout = footprint.bytes_per_rollout(dtype)
    before = _decisive(items, machine)
    capacity = max(0, -before.missing_bytes) // per_rollout
    wanted = worker.max_concurrent_rollouts or max(1, capacity)
    items = (*items, Item(name="KV cache", num_bytes=wanted * per_rollout, is_on_gpu=True))
    memory = _decisive(items, machine)
    remedies: tuple[Saving, ...] = ()
    advice = ""
    if wanted > capacity:
        advice = _too_short(memory.missing_bytes)
    if wanted > capacity > 0:
        saved = (wanted - capacity) * per_rollout
        remedies = (
            Saving(setting=f"worker.max_concurrent_rollouts={capacity}", saved_bytes=saved),
        )
        advice = f"; set {_join(remedies, 'or')}"
    return Budget(
        fits=wanted <= capacity,
        line=f"worker with {wanted} concurrent rollouts needs {_needs_has(memory)}{advice} "
        f"({format_bytes(per_rollout)} per rollout in {dtype})",
        items=items,
        needed_bytes=memory.needed_bytes,
        max_concurrent_rollouts=capacity,
        remedies=remedies,
    )


def _learner_changes(footprint: Footprint, available: int) -> list[tuple[str, Any]]:
    """Return settings, as pairs of key and value, that may save memory, the mildest first.

    Settings that leave the run's results and speed as they are come first.
    """
    tokens = footprint.micro_batch_tokens
    while tokens // 2 >= footprint.rollout_tokens:
        tokens //= 2
        if _model_bytes(footprint.changed({"learner.micro_batch_tokens": tokens})) <= available:
            break
    return [
        ("learner.micro_batch_tokens", tokens),
        ("eval.interval_steps", 0),
        ("learner.gradient_checkpointing", True),
        *([("learner.gradient_checkpointing", "offload")] if footprint.has_gpu else []),
        ("optimizer.state", "8bit"),
        ("optimizer.state", "offloaded"),
    ]


def _advise_learner(footprint: Footprint, missing: int) -> tuple[tuple[Saving, ...], str]:
    """Return all remedies in order, and text on the remedies to use together.

    Remedies are chosen in order until they suffice; a chosen remedy is then omitted if the others
    suffice without it. If all remedies together do not suffice, the text says so.
    """
    now = _model_bytes(footprint)

    def saved(changes: Mapping[str, Any]) -> int:
        return now - _model_bytes(footprint.changed(changes))

    savings = {
        each: Saving(setting=f"{each[0]}={_bare(each[1])}", saved_bytes=saved_bytes)
        for each in _learner_changes(footprint, now - missing)
        if (saved_bytes := saved(dict([each]))) > 0
    }
    chosen: dict[str, Any] = {}
    for key, value in savings:
        more = {**chosen, key: value}
        if saved(chosen) < missing and saved(more) > saved(chosen):
            chosen = more
    for key in tuple(chosen):
        fewer = {each: value for each, value in chosen.items() if each != key}
        if saved(fewer) >= missing:
            chosen = fewer
    remedies = tuple(savings.values())
    words = _join([savings[each] for each in chosen.items()], "and")
    if saved(chosen) >= missing:
        return remedies, f"; set {words}"
    even_with = f"; even with {words}" if words else ""
    return remedies, even_with + _too_short(missing - saved(chosen))


def _bare(value: Any) -> str:
    """Return a setting's value as text for --set in a shell, without quotes."""
    return value if isinstance(value, str) else show(value)


def _model_bytes(footprint: Footprint) -> int:
    """Return the bytes that a learner needs in the model's memory and that settings can change.

    On a CPU this memory also holds the versions, which no setting changes.
    """
    return sum(item.num_bytes for item in footprint.learner_items() if item.is_on_gpu)


def _needs_has(memory: _Memory) -> str:
    return f"{format_bytes(memory.needed_bytes)}, has {format_bytes(memory.available_bytes)}"


def _join(remedies: Sequence[Saving], word: str) -> str:
    return f" {word} ".join(
        f"{remedy.setting} (saves {format_bytes(remedy.saved_bytes)})" for remedy in remedies
    )


def _too_short(missing: int) -> str:
    return (
        f"; {format_bytes(missing)} are missing: take a machine with more memory or a smaller model"
    )


@dataclass(frozen=True, slots=True)
class _Memory:
    """One memory of the machine, the GPU's or the host's, with the items to be held there."""

    items: tuple[Item, ...]
    available_bytes: int

    @property
    def needed_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def missing_bytes(self) -> int:
        """Bytes needed minus bytes available; negative if memory is left."""
        return self.needed_bytes - self.available_bytes


def _decisive(items: Iterable[Item], machine: Machine) -> _Memory:
    """Return the memory that decides whether all items fit.

    This is the model's memory, unless the model is on a GPU and main memory is too small. Main
    memory holds versions of the weights, which no setting makes smaller.
    """
    own, *others = _memories(items, machine)
    return next((memory for memory in others if memory.missing_bytes > 0), own)


def _memories(items: Iterable[Item], machine: Machine) -> list[_Memory]:
    """Return each memory of the machine with the items in it, the model's memory first."""
    items = tuple(items)
    if machine.gpu_bytes is None:
        return [_Memory(items, machine.host_bytes)]
    return [
        _Memory(tuple(item for item in items if item.is_on_gpu), machine.gpu_bytes),
        _Memory(tuple(item for item in items if not item.is_on_gpu), machine.host_bytes),
    ]


# --- the machine and the model --------------------------------------------------------------------
#
# Nothing here imports torch: other processes have to free GPU memory.


_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def find_model(name: str, revision: str | None = None, *, key: str = "model.name") -> Path | None:
    """Return the model directory that a key names; None if the key names a model on the hub.

    Raises:
        ConfigError: if a revision is set for a directory.
        DataError: if there is no such directory, no model in it, or a quantised one.
    """
    path = local_path(name)
    try:
        has_model, is_directory = (path / "config.json").is_file(), path.is_dir()
    except OSError as error:
        raise DataError(f"{key} = {name!r}: cannot be looked at: {error.strerror}") from error
    if has_model:
        if revision is not None:
            raise ConfigError(
                f"model.revision = {revision!r} has no effect on the local directory {path}; "
                "remove it"
            )
        check_unquantised(path)
        return path
    if is_directory:
        raise DataError(
            f"{key} = {name!r}: {path.absolute()} has no config.json; name the directory of a "
            "Hugging Face model, with config.json, tokenizer and safetensors, or its id on the hub"
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"{key} = {name!r}: no such directory (looked at {path.absolute()})")
    return None


_QUANTISED_WEIGHT = re.compile(r"(weight|qweight|packed|blocks)$")


def check_unquantised(directory: Path) -> None:
    """Refuse a model whose weights are quantised, because training could not change them.

    Raises:
        DataError: if the weights are quantised. The text names the method, or one quantised tensor
            if config.json names no method.
    """
    try:
        table = json.loads((directory / "config.json").read_bytes())
    except (OSError, *UNREADABLE):
        table = {}  # what needs it says so
    tables = [table, table.get("text_config")] if isinstance(table, dict) else []
    found = ""
    for fields in tables:
        for key in ("quantization_config", "compression_config"):
            if isinstance(fields, dict) and (how := fields.get(key)):
                method = how.get("quant_method") if isinstance(how, dict) else None
                found = f"config.json says that its weights are quantised ({method or key})"
    for path in () if found else sorted(directory.glob("*.safetensors")):
        for name, entry in _read_header(path).items():
            kind = entry["dtype"]
            if kind not in _FLOATS and len(entry["shape"]) > 1 and _QUANTISED_WEIGHT.search(name):
                found = f"{path.name} holds the weights {name} quantised, as {kind}"
                break
    if found:
        raise DataError(
            f"{directory}: {found}, and such weights cannot be trained: name the model that it was "
            "made from, with weights in bfloat16, float16 or float32"
        )


def read_model_facts(directory: Path) -> ModelFacts:
    """Return the dimensions of the model in `directory` from its config.json.

    Parameters are counted in the safetensors files, or estimated from the dimensions if files are
    missing.

    Raises:
        DataError: if config.json is missing, is damaged or does not describe a causal language
            model.
    """
    path = directory / "config.json"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *UNREADABLE) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"{path}: no readable model configuration: {reason}") from error
    # A multimodal model keeps the dimensions of its language part one level down.
    dims = table.get("text_config", table) if isinstance(table, dict) else {}
    dims = dims if isinstance(dims, dict) else {}
    kinds = dims.get("layers_block_type")  # Nemotron-H's is no longer saved with their number
    num_kinds = len(kinds) if isinstance(kinds, list) else None
    facts = {
        "num_layers": _dimension(dims, path, "num_hidden_layers", "n_layer", default=num_kinds),
        "hidden_size": _dimension(dims, path, "hidden_size", "n_embd"),
        "vocab_size": _dimension(dims, path, "vocab_size"),
        "num_heads": _dimension(dims, path, "num_attention_heads", "n_head"),
    }
    hidden, heads = facts["hidden_size"], facts["num_heads"]
    facts["num_kv_heads"] = _dimension(dims, path, "num_key_value_heads", default=heads)
    facts["head_dim"] = _dimension(dims, path, "head_dim", default=max(1, hidden // heads))
    facts["intermediate_size"] = _dimension(dims, path, "intermediate_size", default=4 * hidden)
    is_tied = bool(dims.get("tie_word_embeddings", table.get("tie_word_embeddings", False)))
    num_params = _count_stored(directory) or _estimate_params(facts, is_tied=is_tied)
    model_type = table.get("model_type") if isinstance(table, dict) else None
    return ModelFacts(
        num_params=num_params,
        is_tied=is_tied,
        has_head_norms=PACKED.get(str(model_type), True),
        shares_prompts=str(model_type) in PACKED,
        **facts,
    )


def read_machine(gpu_bytes: int | None = None) -> Machine:
    """Return the memory, in bytes, that is available to this process.

    Args:
        gpu_bytes: free bytes of the GPU that the model will run on; None if it will run on the CPU.
    """
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")  # psutil knows no limit of a container
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists():
        text = limit.read_text(encoding="ascii").strip()
        if text != "max":
            in_use = int(used.read_text(encoding="ascii"))
            available = min(available, max(0, int(text) - in_use))
    return Machine(host_bytes=available, gpu_bytes=gpu_bytes)


def _dimension(dims: Mapping[str, Any], path: Path, *names: str, default: int | None = None) -> int:
    value = next((dims[name] for name in names if dims.get(name) is not None), default)
    if not isinstance(value, int) or value < 1:
        raise DataError(
            f"{path}: {names[0]} = {value!r} is not a dimension; this needs the configuration of "
            "a causal language model"
        )
    return value


def _count_stored(directory: Path) -> int:
    """Return the number of parameters in a directory's safetensors files; 0 if files are missing.

    In the hub's cache some files may be missing, or still being downloaded.
    """
    paths = sorted(directory.glob("*.safetensors"))
    totals = [re.search(r"-of-(\d+)\.safetensors$", path.name) for path in paths]
    if any(total is not None and int(total[1]) != len(paths) for total in totals):
        return 0
    return sum(_count_in_file(path) for path in paths)


def _count_in_file(path: Path) -> int:
    """Return the number of parameters in a safetensors file, from the shapes in its header."""
    return sum(math.prod(entry["shape"]) for entry in _read_header(path).values())


def _read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: the shape and dtype of each tensor.

    Raises:
        DataError: if the file is not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # No more bytes than the header can have are read, because a damaged file may state any
            # length.
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
        for entry in header.values():
            math.prod(entry["shape"])
            str(entry["dtype"])
        return dict(header)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a safetensors file, or cut off ({error}); copy or download it again"
        ) from error


def _estimate_params(facts: Mapping[str, int], *, is_tied: bool) -> int:
    """Return an estimate of the number of parameters of a decoder from its dimensions.

    The estimate assumes gated MLPs and no biases.
    """
    hidden, head_dim = facts["hidden_size"], facts["head_dim"]
    attention = 2 * hidden * head_dim * (facts["num_heads"] + facts["num_kv_heads"])
    mlp = 3 * hidden * facts["intermediate_size"]
    embeddings = facts["vocab_size"] * hidden * (1 if is_tied else 2)
    return facts["num_layers"] * (attention + mlp + 2 * hidden) + hidden + embeddings
