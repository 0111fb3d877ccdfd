"""Memory budget of a role, and the settings that reduce it.

The sums are pure: the model's dimensions and the machine's memory are arguments, which functions
at the end read. Only settings that exist and do save memory are named, each with what it saves.
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
# of a few MiB are left out. tests/train/test_footprint.py holds them against the tensors of real
# steps, and bench/bench_memory.py against the memory of real processes.
#
# A step's own memory, beside the permanent one, differs from moment to moment: the head's logits
# come when all activations are there, and most gradients when these have gone. So a footprint has
# several moments, and counts the fullest one.


DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number, by type."""

_BYTES_PER_SAMPLED_TOKEN = 17  # a rollout's id (4), log-prob (4), version (8) and mask (1)
VOCAB_CHUNK = 8192
"""Columns of logits that exist at once; as in kernels/logprob.py, which loads torch."""
DRAWING_BYTES = 32
"""Of each row of the vocabulary while a rollout's token is drawn; as in engine/hf/engine.py, which
loads torch, too."""

MOMENT_BYTES: Mapping[str, float] = {"float32": 8, "8bit": 2 * (1 + 4 / 64), "offloaded": 8}
"""Bytes per trained parameter of AdamW's two moments, by optimizer.state: 8 bits each, with a scale
for every 64 of them."""


PROCESS_BYTES: Mapping[Role, int] = {
    "learner": 500_000_000,
    "worker": 500_000_000,
    "relay": 100_000_000,
}
"""Of each role's interpreter and libraries, before it has loaded anything; measured on a CPU."""

ASSUMED_PROMPT_TOKENS = 512
"""Of the longest prompt, for a node that has not read the task's data."""
MIN_SAVED = 0.2
"""Share of their tokens that rollouts must save to share a prompt; as in algo/batching.py."""
SIZES_PER_OCTAVE = 16
"""Sizes of filled rows between a number of tokens and its double; as there."""
PACKED: Mapping[str, bool] = {
    "llama": False, "qwen2": False, "qwen3": True, "mistral": False, "phi3": False,
    "smollm3": False, "gemma3": True, "gemma3_text": True, "gemma4": True, "gemma4_text": True,
    "olmo3": True, "qwen3_moe": True,
    "mixtral": False, "deepseek_v3": True, "glm4_moe": True, "qwen2_5_vl": False, "qwen3_vl": True,
    "mistral3": False, "smolvlm": False,
}  # fmt: skip
"""Families whose rollouts may share a row and a prompt (docs/models.md), by model_type; and whether
they normalise the queries and keys of each head. Of others that is unknown: more is counted."""
CHECKPOINTING: Mapping[bool | str, str] = {
    False: "",
    True: " and gradient checkpointing",
    "offload": " and gradient checkpointing with offloaded inputs",
}
"""Values of learner.gradient_checkpointing once it is chosen, the quicker first, in words."""
FREED_BYTES = 64 << 20
"""That a process on a CPU has freed and not yet returned: a quarter of what it grows by until then
(GROWN_BYTES in engine/allocator.py, which is on a floor above)."""
_RESERVED_SHARE, _RESERVED_BYTES = 0.05, 1_500_000_000
"""Of a GPU: what lies between tensors, and libraries with their workspaces."""


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
    is_tied: bool = True
    """Whether the head is the embedding."""
    has_head_norms: bool = True
    """Whether it normalises the queries and keys of each head; True where that is unknown."""
    shares_prompts: bool = False
    """Whether rollouts of one prompt share it in a packed row; False where that is unknown."""

    @property
    def num_outside_layers(self) -> int:
        """Parameters of the embedding and the head."""
        return self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that takes memory."""

    name: str
    num_bytes: int
    is_on_gpu: bool
    """Whether it lies beside the model on its accelerator, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The largest micro-batch."""

    num_tokens: int
    """That go through the model; at least one rollout, at most a whole step."""
    num_keys: int
    """That they attend to: those of a shared prompt count once for each of its completions."""
    num_scored: int
    """Tokens that the head is asked for: completion tokens."""
    mask_bytes: int
    """Mask of the keys that each token sees, in each layer, where they share a prompt on a CPU."""
    is_only: bool
    """Whether it is the whole step, so that no gradient is there before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Sizes in bytes, per role."""

    config: Config
    facts: ModelFacts
    prompt_tokens: int
    """Tokens that a prompt is assumed to have."""
    has_gpu: bool = False
    """Whether the model lies on one."""
    num_ranks: int = 1
    """Processes that the learner is cut up over; the sizes are those of the first of them."""
    has_versions_on_gpu: bool = True
    """Whether a learner that may keep versions on its GPU does."""
    has_tensors_alone: bool = False
    """Whether what a process on a CPU keeps beside its tensors is left out."""
    tokens_in_a_pass: int | None = None
    """Of the micro-batch that is looked at; None for the largest that there can be."""

    def changed(self, changes: Mapping[str, Any]) -> Footprint:
        """Return the footprint with other settings, by dotted key."""
        config = self.config
        for key, value in changes.items():
            name, _, field = key.partition(".")
            section = getattr(config, name).model_copy(update={field: value})
            config = config.model_copy(update={name: section})
        return replace(self, config=config)

    @property
    def rollout_tokens(self) -> int:
        """Tokens of the longest rollout, its prompt included."""
        return self.prompt_tokens + self.config.sampling.max_completion_tokens

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens really in one pass."""
        return self._pass.num_tokens

    @property
    def _pass(self) -> _Pass:
        """Return the largest micro-batch, of rollouts that are all of full length."""
        batch, limit = self.config.batch, self.config.learner.micro_batch_tokens
        completion, size = self.config.sampling.max_completion_tokens, batch.group_size
        num_together = self._num_together
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

    @property
    def _num_together(self) -> int:
        """Rollouts that share a prompt in a row: 1 where that is not done, or saves too little.

        Half a micro-batch holds them. Shorter completions save more, so they share as well.
        """
        config, prompt = self.config, self.prompt_tokens
        completion = config.sampling.max_completion_tokens
        room = (config.learner.micro_batch_tokens // 2 - prompt) // completion
        number = max(1, min(config.batch.group_size, room))
        is_packed = config.model.attn_implementation in ("auto", "sdpa")
        apart = number * self.rollout_tokens
        saves = prompt + number * completion <= (1.0 - MIN_SAVED) * apart
        return number if self.facts.shares_prompts and is_packed and saves else 1

    def learner_items(self) -> tuple[Item, ...]:
        """Return what training takes: the model, its optimizer, a micro-batch, the versions.

        Masters and gradients are float32. A model that computes in bfloat16 has the rounded weights
        besides, and what is not trained (the base of an adapter, a reference) in bfloat16 alone.
        Attribution scores with a float32 model. Ranks divide all of these, in float32, and round
        what they put together instead. Held-out prompts are sampled with a model of their own where
        a version's image cannot be it (runtime/learner/setup.py), by ranks in the host's memory. Of
        its keys and values those of one rollout are reckoned: more at a time take of what is left.
        A GPU that has the room keeps the last version, and compares the next one with it beside a
        step (engine/weights.py).
        Before a step of several updates weights and moments are copied to the host, so that a step
        that fails changes nothing.
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
        """Of the largest weight and its gradient, on the way to an update and back."""
        if self.config.optimizer.state != "offloaded":
            return 0
        return -(-8 * self._largest_trained // self.num_ranks)

    def _sizes_with_model(self) -> dict[str, int]:
        """Return what lies where the model is trained, 0 for what does not."""
        config, num_params, num_trained = self.config, self.facts.num_params, self._num_trained
        is_rounded = self._compute_bytes == 2
        frozen = num_params * (self._compute_bytes if self._is_alone else 4)
        divided = {
            "base": frozen if config.lora.rank else 0,
            "masters": 4 * num_trained,
            "Adam moments": 0 if self._offloads_moments else self._moment_bytes,
            # Taken to be as large as the model that is trained.
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
            # Each is tried in float32: first the base, when nothing else is there but what is
            # evaluated with, and then the reference.
            before = 4 * num_params + sizes["evaluation"]
            before += sizes["base"] if sizes["reference"] else 0
            sizes["base before it is rounded"] = max(0, before - sum(sizes.values()))
        if self.has_gpu:
            taken = sum(sizes.values())
            sizes["reserve"] = round(_RESERVED_SHARE * taken) + _RESERVED_BYTES
        return sizes

    def _sizes_beside_model(self) -> dict[str, int]:
        """Return what lies in the host's memory; all ranks are taken to be on one machine."""
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
        """Whether a learner has a use for versions on its GPU."""
        return self.has_gpu and self._is_alone and self.config.network.codec != "full"

    def worker_items(self, dtype: str) -> tuple[Item, ...]:
        """Return what a worker takes before its first rollout."""
        num_bytes = DTYPE_BYTES[dtype] * self.facts.num_params
        return (
            Item(name="weights", num_bytes=num_bytes, is_on_gpu=True),
            *self._held_versions("worker"),
        )

    def relay_items(self) -> tuple[Item, ...]:
        """Return what a relay takes: the versions, and groups that wait to be acknowledged."""
        group_bytes = self.config.batch.group_size * self.rollout_tokens * _BYTES_PER_SAMPLED_TOKEN
        num_bytes = MAX_UNACKED_GROUPS * group_bytes
        return (
            *self._held_versions("relay"),
            Item(name="groups under way", num_bytes=num_bytes, is_on_gpu=False),
        )

    def bytes_per_rollout(self, dtype: str) -> int:
        """Return keys and values of one rollout of full length, and its row of float32 logits."""
        facts = self.facts
        per_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * DTYPE_BYTES[dtype]
        return per_token * self.rollout_tokens + 4 * facts.vocab_size

    def _held_versions(self, role: Role) -> tuple[Item, ...]:
        """Return what a node that receives versions holds besides its model."""
        sizes = {"process": PROCESS_BYTES[role], "encoded versions": self._encoded_bytes}
        items = [Item(name=name, num_bytes=size, is_on_gpu=False) for name, size in sizes.items()]
        return (self._versions(KEEP_VERSIONS), *(item for item in items if item.num_bytes))

    @property
    def _encoded_bytes(self) -> int:
        """Bytes of the deltas that a node keeps for late joiners, after some tens of versions."""
        return 0 if self.config.network.codec == "full" else self._bytes_per_version

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

    def _checkpoint_bytes(self, weights: int, moments: int) -> int:
        """Bytes of a checkpoint that are in the host's memory while it is written.

        A process alone brings the weights down from its GPU for the first file, and then the
        moments. Ranks bring down both, and put them together once more.
        """
        if not self.has_gpu:
            return 0
        on_gpu = 0 if self.config.optimizer.state == "offloaded" else moments
        return max(weights, on_gpu) if self._is_alone else 2 * weights + moments + on_gpu

    @property
    def _largest_trained(self) -> int:
        """Parameters of the largest tensor that is trained; of an adapter's none is large."""
        facts = self.facts
        width = max(facts.vocab_size, facts.intermediate_size)
        return 0 if self.config.lora.rank else width * facts.hidden_size

    @property
    def evaluated_rollout_bytes(self) -> int:
        """Bytes of keys and values of a held-out rollout that a process alone samples.

        As the engine reckons them: a layer's are there twice while they grow by a token. None where
        nothing is evaluated, and none of several ranks, which take of what the host has free.
        """
        facts = self.facts
        if not (self._is_alone and self.config.eval.interval_steps):
            return 0
        per_layer = 2 * facts.num_kv_heads * facts.head_dim * self._evaluation_width
        per_token = (facts.num_layers + 1) * per_layer
        return per_token * self.rollout_tokens + DRAWING_BYTES * facts.vocab_size

    @property
    def _evaluation_bytes(self) -> int:
        """Bytes that held-out prompts are sampled with, beside all versions: weights, a rollout."""
        config, width = self.config, self._evaluation_width
        is_on_gpu = self.has_gpu and self._is_alone
        is_published = width == DTYPE_BYTES[config.model.dtype]
        is_in_place = is_published and not is_on_gpu and not config.lora.rank
        has_none = is_in_place or not config.eval.interval_steps
        weights = 0 if has_none else width * self.facts.num_params
        return weights + self.evaluated_rollout_bytes

    @property
    def _evaluation_width(self) -> int:
        """Bytes per number of the model that held-out prompts are sampled with."""
        as_trained = self._is_alone and not self.has_gpu
        return self._compute_bytes if as_trained else DTYPE_BYTES[self.config.model.dtype]

    def _fullest_moment(self) -> dict[str, int]:
        """Return what there is beside the model when that is most."""
        moments = list(self._moments())
        totals = [sum(moment.values()) for moment in moments]
        return moments[totals.index(max(totals))]

    def _moments(self) -> Iterator[dict[str, int]]:
        """Yield what there is beside the model at those moments of a step that may be the fullest.

        A micro-batch after the first finds all gradients. The first one finds none, and those of
        the other layers when it comes to the first layer. The head's gradient is there when the
        last layer's backward begins. That of a tied one waits for the embedding's, in the type of
        the products, and then both are added to the float32 one. On a CPU freed activations stay
        with the process until it grows again, and the first gradients of layers find a place there.
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
        # In float32, to become the gradient or to be added to it; a GPU adds without.
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
        """Whether what has been freed is counted: a CPU's process keeps it, for a while."""
        return not (self.has_gpu or self.has_tensors_alone)

    @property
    def _gradient_bytes(self) -> int:
        return -(-4 * self._num_trained // self.num_ranks)

    def _activation_bytes(self) -> int:
        """Return the bytes of the tensors kept for one micro-batch's backward pass.

        With checkpointing they are the layers' inputs; of offloaded ones that of a layer and of the
        next one.
        """
        if self._offloads_inputs:
            return min(2, self.facts.num_layers) * self._input_bytes // self.facts.num_layers
        if self._has_checkpointing:
            return self._input_bytes
        return self._layer_bytes(self._pass) * self.facts.num_layers

    @property
    def _input_bytes(self) -> int:
        """Bytes of what goes into all layers."""
        facts = self.facts
        per_token = self._compute_bytes * facts.hidden_size * facts.num_layers
        return per_token * self._pass.num_tokens

    def _layer_bytes(self, now: _Pass) -> int:
        """Return what autograd keeps of a layer.

        Of each number of the hidden state, two times: the input of a norm in float32, what it
        normalises it to if its own weight is trained, and its output. Queries, keys, values and
        what attention makes of them, in float32 on a CPU; that once more as the input of a product,
        and on a GPU, where it is no other tensor, the rotated query. Norms of heads likewise. Four
        of the MLP's middle. The small matrices of an adapter have inputs of their own.
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
        """Bytes of gradients inside of a layer: two of the MLP's middle, or those of a norm.

        On a GPU they were not seen: they come to lie where the layer's activations have been.
        """
        if self.has_gpu:
            return 0
        facts, width = self.facts, self._compute_bytes
        per_token = max(2 * width * facts.intermediate_size, 16 * facts.hidden_size)
        return per_token * self._pass.num_tokens

    @property
    def _code_bytes(self) -> int:
        """Bytes that a CPU keeps of bfloat16 products for row sizes, those of an octave.

        They are a layer's weights once more for each size.
        """
        if not self._keeps_freed or self._compute_bytes != 2 or not self._is_alone:
            return 0
        return SIZES_PER_OCTAVE * 2 * self._params_per_layer

    def _working_bytes_of_a_rank(self) -> int:
        """Return the most that is there for a moment only.

        A layer that is computed again, with its gradients; or the head; or what has come together
        of the gradients of embedding and head, which are no one layer's: by then no activation is
        there any more, and no layer is put together.
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
        """Return what log-probabilities take, forward and backward.

        In kernels/torch_kernels.py: logits, their exponentials and the product of both; states and
        their gradient in float32, and a chunk of the head's gradient. On a GPU in bfloat16,
        kernels/triton_kernels.py takes as much both times.
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
        """Return what is whole on a rank: embedding and head, one layer, and the next one."""
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
        """Bytes per number of the learner's matrix products; auto counts as float32."""
        return DTYPE_BYTES.get(self.config.learner.dtype, 4)


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
    """A setting that saves memory."""

    setting: str
    """As for --set: section.key=value."""
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Needs of a role against the machine's memory."""

    fits: bool
    line: str
    """The whole budget in one line of text."""
    items: tuple[Item, ...]
    needed_bytes: int
    """In the memory that is short, or else in the one that the model lies in."""
    max_concurrent_rollouts: int | None = None
    """Contents of a worker's memory; None for other roles."""
    gradient_checkpointing: bool | str = False
    """A learner's handling of activations, as set or as they fit."""
    recompute_above: int = 0
    """Tokens of the largest micro-batch whose activations fit, where a learner that may choose
    computes those of larger ones again."""
    has_versions_on_gpu: bool = False
    """Whether a learner keeps the last version on its GPU, where there is room for it."""
    evaluation_bytes: int = 0
    """Memory for held-out rollouts under way beside a learner that is one process: half of what all
    else leaves, and what one of them takes in any case."""
    remedies: tuple[Saving, ...] = ()
    """Settings that save by themselves, the milder first; empty if it fits or nothing helps."""


def memory_budget(
    config: Config,
    role: Role,
    model_facts: ModelFacts,
    machine: Machine,
    *,
    prompt_tokens: int = ASSUMED_PROMPT_TOKENS,
    num_ranks: int = 1,
) -> Budget:
    """Return what `role` needs on `machine`, and which settings help if it does not fit.

    Of several ranks of a learner each needs as much, and `machine` is what one of them has.
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
    """Return a learner's footprint with what it may choose by itself, the quicker first.

    Versions in host memory cost a step nothing, and computing activations again a third of it.
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
    """Return the tokens of the largest micro-batch that need not be computed again.

    Its activations take half of what is left at most: the evaluation takes the other half.

    Args:
        footprint: of a learner with gradient checkpointing.
        own: the memory that the model lies in, with what such a learner takes.
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
    """Return the settings, given or chosen, that decide a learner's memory."""
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
    """Return settings that may save memory, the milder first.

    Settings that change no number of the run come before those that do, or that slow each step.
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
    """Return the remedies in order, and the first of them that together are enough, in words.

    A remedy without which the later ones are enough is left out. If all are too little, say so.
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
    """Return a value as --set takes it from a shell, without quotes."""
    return value if isinstance(value, str) else show(value)


def _model_bytes(footprint: Footprint) -> int:
    """Return the learner's bytes that lie beside the model, which its settings can change.

    On a CPU the versions lie there too; none of those settings changes them.
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
    """One memory of the machine and what is to lie in it."""

    items: tuple[Item, ...]
    available_bytes: int

    @property
    def needed_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def missing_bytes(self) -> int:
        """The bytes that are missing; negative if memory is left."""
        return self.needed_bytes - self.available_bytes


def _decisive(items: Iterable[Item], machine: Machine) -> _Memory:
    """Return the memory that decides: the model's, unless main memory beside it is short.

    The memory beside a GPU holds versions of the weights, and no setting makes those smaller.
    """
    own, *others = _memories(items, machine)
    return next((memory for memory in others if memory.missing_bytes > 0), own)


def _memories(items: Iterable[Item], machine: Machine) -> list[_Memory]:
    """Return each memory of the machine, the one that the model lies in first."""
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
    """Return the directory that a key names; None if that is the id of a model on the hub.

    Raises:
        ConfigError: if a revision is asked of a directory.
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
    """Refuse a model whose weights are quantised: no optimizer step fits into their few values.

    Raises:
        DataError: naming the method, or a tensor of such weights where config.json says nothing.
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

    Parameters are counted in the safetensors files, or, where those are absent, estimated from
    the dimensions.

    Raises:
        DataError: if config.json is missing, damaged or of no causal language model.
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
    """Return the memory that this process may still take.

    Args:
        gpu_bytes: free bytes of the GPU that the model will run on; None on a CPU.
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
    """Return the parameters in the directory's safetensors files, 0 unless all of them are there.

    In the hub's cache some may be missing, or still on their way.
    """
    paths = sorted(directory.glob("*.safetensors"))
    totals = [re.search(r"-of-(\d+)\.safetensors$", path.name) for path in paths]
    if any(total is not None and int(total[1]) != len(paths) for total in totals):
        return 0
    return sum(_count_in_file(path) for path in paths)


def _count_in_file(path: Path) -> int:
    """Add up the shapes in one file's header."""
    return sum(math.prod(entry["shape"]) for entry in _read_header(path).values())


def _read_header(path: Path) -> dict[str, Any]:
    """Return shape and dtype of each tensor of a file: 8 bytes of length, then JSON.

    Raises:
        DataError: if it is no safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # A header that a cut off file does not hold is not read either.
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
    """Estimate the parameters of a decoder with gated MLPs and without biases."""
    hidden, head_dim = facts["hidden_size"], facts["head_dim"]
    attention = 2 * hidden * head_dim * (facts["num_heads"] + facts["num_kv_heads"])
    mlp = 3 * hidden * facts["intermediate_size"]
    embeddings = facts["vocab_size"] * hidden * (1 if is_tied else 2)
    return facts["num_layers"] * (attention + mlp + 2 * hidden) + hidden + embeddings
