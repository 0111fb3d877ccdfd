"""The memory that each role needs, computed from the model's dimensions and the settings.

Sums for pre-norm decoders with gated MLPs whose attention never stores its score matrix; buffers of
a few MiB are left out. tests/train/test_footprint.py compares the sums with the tensors of real
steps, and bench/bench_memory.py with the memory of real processes.

The memory of a step itself, besides the permanent memory, differs from moment to moment: the head's
logits exist together with all activations, but most gradients exist only after the activations have
been freed. So a footprint has several moments, and counts the one with the most bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from echo.config.fields import Role
from echo.config.schema import Config
from echo.core.rollout import KEEP_VERSIONS, MAX_UNACKED_GROUPS

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

MIN_SAVED = 0.2
"""Rollouts share a prompt if this saves at least this share of their tokens (algo/batching.py)."""
SIZES_PER_OCTAVE = 16
"""Row sizes between a number of tokens and its double; as in algo/batching.py."""
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
