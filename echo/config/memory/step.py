"""Computes the memory of a training step from the model's dimensions and the settings.

The sums are for pre-norm decoders with gated MLPs and an attention that stores no score matrix.
Buffers of a few MiB are left out. tests/train/test_footprint.py compares the sums with the tensors
of real steps, and bench/bench_memory.py with the memory of real processes.

The memory changes during a step. The head's logits exist together with all activations. Most
gradients exist only after the activations have been freed. So the memory is computed at several
moments, and the largest sum counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from echo.config.schema import Config
from echo.core.memory_sizes import GROWN_BYTES, MIN_SAVED, SIZES_PER_OCTAVE, VOCAB_CHUNK

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""For each type of number, its size in bytes."""

NUM_ROW_SIZES = 16
"""Approximate number of different row sizes in a run on a CPU. Rows with few rollouts of very
unequal lengths have more sizes."""
FREED_BYTES = GROWN_BYTES // 4
"""Bytes that a process on a CPU has freed but not yet returned to the system: a quarter of the
growth after which it returns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The dimensions of a causal language model, from which its memory is computed."""

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
    """Whether rollouts can share their prompt in a packed row; False if unknown."""

    @property
    def num_outside_layers(self) -> int:
        """Number of parameters of the embedding and the head."""
        return self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The sizes of a step's largest micro-batch."""

    num_tokens: int
    """Number of tokens in the micro-batch: at least the tokens of one rollout, at most those of a
    step."""
    num_keys: int
    """Number of attention keys. The keys of a shared prompt count once per completion."""
    num_scored: int
    """Number of completion tokens, for which the head computes logits."""
    mask_bytes: int
    """Bytes of the attention masks, which all layers share. Masks exist if rollouts share a prompt
    on a CPU."""
    is_only: bool
    """Whether the step has only this micro-batch. Then no gradients exist before its backward
    pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFootprint:
    """Computes the bytes that a learner's step takes in the memory that holds the trained model."""

    config: Config
    facts: ModelFacts
    prompt_tokens: int
    """Assumed number of tokens of a prompt."""
    has_gpu: bool
    """Whether the model is on a GPU."""
    num_ranks: int
    """Number of processes over which the learner is sharded. All sizes are for the first
    process."""
    has_tensors_alone: bool
    """Whether to count only the tensors of a process on a CPU, without other memory."""
    tokens_in_a_pass: int | None
    """Number of tokens of the micro-batch; None for the largest possible micro-batch."""

    @property
    def rollout_tokens(self) -> int:
        """Number of tokens of a rollout's longest chain, including the prompt."""
        return self.prompt_tokens + self.config.max_chain_tokens

    @property
    def largest(self) -> _Pass:
        """Return the sizes of the largest micro-batch, with rollouts of full length."""
        batch, limit = self.config.batch, self.config.learner.micro_batch_tokens
        completion, size = self.config.max_chain_tokens, batch.group_size
        num_together = _rollouts_per_row(self.facts, self.config, prompt_tokens=self.prompt_tokens)
        copies = -(-size // num_together)  # of a group's prompt
        tokens = copies * self.prompt_tokens + size * completion
        keys = size * self.rollout_tokens + (copies * self.prompt_tokens if copies < size else 0)
        num_groups = batch.groups_per_step
        whole = num_groups * tokens
        num_tokens = self.tokens_in_a_pass or max(self.rollout_tokens, min(limit, whole))
        if not self.has_gpu and self.compute_bytes == 2 and num_tokens <= limit:
            # Rows are filled to one of a few sizes.
            step = max(1, (1 << num_tokens.bit_length() - 1) // SIZES_PER_OCTAVE[0])
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
            is_only=self.is_alone and whole <= limit and self.tokens_in_a_pass is None,
        )

    @property
    def num_trained(self) -> int:
        """Return the number of trained parameters: all parameters, or only the adapter's.

        A target module with an unknown name is assumed to be as large as the MLP's modules.
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

    def fullest_moment(self) -> dict[str, int]:
        """Return the step's bytes at the moment of their largest sum, without the model's bytes.

        The dict maps each item's name to its bytes.
        """
        moments = list(self._moments()) if self.is_alone else [self._moment_of_a_rank()]
        totals = [sum(moment.values()) for moment in moments]
        return moments[totals.index(max(totals))]

    def _moment_of_a_rank(self) -> dict[str, int]:
        """Return the largest bytes of a step of one of several processes, without the model's."""
        return {
            "gradients": self._gradient_bytes,
            "activations": self._activation_bytes(),
            "one layer or head": self._working_bytes_of_a_rank(),
        }

    def _moments(self) -> Iterator[dict[str, int]]:
        """Yield the step's bytes at several moments of a single process, without the model's bytes.

        Each dict maps an item's name to its bytes. One of these moments needs the most memory. The
        first micro-batch starts without gradients. When the backward pass reaches the last layer,
        the head's gradient exists. When the backward pass reaches the first layer, all gradients
        exist except the first layer's gradients. In later micro-batches, all gradients exist from
        the start.

        A tied head's gradient is kept in the compute type until the embedding's gradient exists.
        Then both gradients are added to the float32 gradient. In float32 on a CPU, a tied embedding
        adds single rows to the head's gradient. A process on a CPU keeps the memory of freed
        activations for a while, and reuses this memory for the first gradients of layers.
        """
        one = "one layer or head"
        now, width, facts = self.largest, self.compute_bytes, self.facts
        # Under an adapter neither head nor embedding has a gradient.
        outside = 0 if self.config.lora.rank else facts.vocab_size * facts.hidden_size
        all_of_them = self._gradient_bytes
        before = 0 if now.is_only else all_of_them
        kept = self._activation_bytes()
        forward, backward = self._head_bytes()
        waiting = width * outside
        made = 4 * outside if now.is_only else 0  # counted among the gradients once it exists
        # A float32 copy, which becomes the gradient or is added to it. A GPU adds without a copy.
        cast = 4 * outside if width == 2 and (now.is_only or self._keeps_freed) else 0
        final = (4 + width) * facts.hidden_size * now.num_tokens
        for head in (forward, backward + waiting):
            yield {"gradients": before, "activations": kept + final, one: head}
        waits = facts.is_tied and not self._adds_rows
        if not waits:
            before += made
            added = max(0, waiting + cast - made)
            yield {"gradients": before, "activations": kept, one: added}
            waiting = 0
        layer = self._layer_bytes(now) if self._has_checkpointing else 0
        layer += self._passing_bytes
        yield {"gradients": before, "activations": kept, one: layer + waiting}
        inner = all_of_them - 4 * (facts.num_outside_layers if outside else 0)
        first = (kept - now.mask_bytes) // facts.num_layers + now.mask_bytes
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
        added = 0 if self._adds_rows else max(0, added)
        yield {"gradients": all_of_them, "activations": held, one: added}

    @property
    def _adds_rows(self) -> bool:
        """Whether a tied embedding adds single rows to the head's gradient (tied_embedding.py)."""
        return self.facts.is_tied and self.compute_bytes == 4 and not self.has_gpu

    @property
    def freed_bytes(self) -> int:
        """Return the bytes that a process on a CPU has freed but not yet returned to the system."""
        return FREED_BYTES if self._keeps_freed and self.is_alone else 0

    @property
    def _keeps_freed(self) -> bool:
        """Whether to count freed memory that a CPU process has not yet returned to the system."""
        return not (self.has_gpu or self.has_tensors_alone)

    @property
    def _gradient_bytes(self) -> int:
        return -(-4 * self.num_trained // self.num_ranks)

    def _activation_bytes(self) -> int:
        """Return the bytes that one micro-batch keeps for its backward pass.

        With checkpointing, the micro-batch keeps the inputs of the layers. If the inputs are
        offloaded to the host, the GPU holds the inputs of only two successive layers.
        """
        if self.offloads_inputs:
            return min(2, self.facts.num_layers) * self.input_bytes // self.facts.num_layers
        if self._has_checkpointing:
            return self.input_bytes + self.largest.mask_bytes
        return self._layer_bytes(self.largest) * self.facts.num_layers + self.largest.mask_bytes

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of all layers."""
        facts = self.facts
        per_token = self.compute_bytes * facts.hidden_size * facts.num_layers
        return per_token * self.largest.num_tokens

    def _layer_bytes(self, now: _Pass) -> int:
        """Return the bytes of the tensors that autograd keeps for one layer.

        The tensors are these:

            each norm   its input in float32, its output, and the normalised value if its weight is
                        trained; norms of heads count like the other norms
            attention   queries, keys, values and the output, all in float32 on a CPU; on a CPU
                        also a copy of the output, on a GPU also the rotated query
            MLP         four tensors of its inner width
            adapter     the inputs of its small matrices
        """
        facts, width = self.facts, self.compute_bytes
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
        return per_token * now.num_tokens + 2 * attended * keys * now.num_keys

    @property
    def _passing_bytes(self) -> int:
        """Return the bytes that gradients take inside a layer during its backward pass.

        The result is the larger of two sizes: two tensors of the MLP's inner width, or the
        gradients of a norm. On a GPU the result is 0, because the gradients reuse the memory of the
        layer's activations.
        """
        if self.has_gpu:
            return 0
        facts, width = self.facts, self.compute_bytes
        per_token = max(2 * width * facts.intermediate_size, 16 * facts.hidden_size)
        return per_token * self.largest.num_tokens

    @property
    def code_bytes(self) -> int:
        """Bytes that a CPU keeps in caches to speed up bfloat16 products.

        Rows of tokens have a few different sizes (algo/row_sizes.py). For each size, the CPU keeps
        a copy of one layer's weights and of one chunk of the head's columns.
        """
        if not self._keeps_freed or self.compute_bytes != 2 or not self.is_alone:
            return 0
        columns = min(VOCAB_CHUNK, self.facts.vocab_size)
        num_copied = self._params_per_layer + columns * self.facts.hidden_size
        return NUM_ROW_SIZES * 2 * num_copied

    def _working_bytes_of_a_rank(self) -> int:
        """Return the largest number of bytes that a rank needs for a short time within a step.

        Three moments are compared. At the first moment, a layer is recomputed and its gradients
        exist. At the second, the head is computed. At the third, the gradients of embedding and
        head are gathered, after the activations and the gathered layers have been freed.
        """
        facts, width = self.facts, self.compute_bytes
        # Under an adapter neither of them has a gradient.
        num_outside = 0 if self.config.lora.rank else facts.num_outside_layers
        head = width * num_outside
        layer = (width + 4) * self._params_per_layer
        if self._has_checkpointing:
            layer += self._layer_bytes(self.largest) + head
        gathered = (width + 4) * num_outside - 2 * width * self._params_per_layer
        gathered -= self._activation_bytes()
        return max(layer, max(self._head_bytes()) + head, gathered)

    def _head_bytes(self) -> tuple[int, int]:
        """Return the bytes that log-probabilities need in the forward and in the backward pass.

        kernels/torch_kernels.py holds:

            both passes  the logits and the states
            forward      the exponentials of the logits; in bfloat16 a float32 chunk of the head
            backward     the float32 gradient of the states, and a float32 chunk of the head or of
                         the head's gradient; in bfloat16 two 16-bit copies of the logits

        On a GPU in bfloat16, kernels/triton_kernels.py needs the same number of bytes in both
        passes.
        """
        facts, rows = self.facts, self.largest.num_scored
        chunk, hidden = min(VOCAB_CHUNK, facts.vocab_size), facts.hidden_size
        if self.has_gpu and self.compute_bytes == 2:
            taken = rows * (2 * chunk + 6 * hidden) + 4 * chunk * hidden
            return taken, taken
        states = (4 + self.compute_bytes) * hidden * rows
        logits = 4 * chunk * rows
        again = 2 * logits if self.config.loss.entropy_coef else logits
        again += logits if self.compute_bytes == 2 else 0
        part = 4 * chunk * hidden
        forward = 2 * logits + states + (part if self.compute_bytes == 2 else 0)
        return forward, again + states + 4 * hidden * rows + part

    def unsharded_bytes(self) -> int:
        """Return the bytes of the weights that a rank gathers: embedding, head and two layers."""
        return self.compute_bytes * (self.facts.num_outside_layers + 2 * self._params_per_layer)

    @property
    def _params_per_layer(self) -> int:
        facts = self.facts
        return max(0, facts.num_params - facts.num_outside_layers) // facts.num_layers

    @property
    def is_alone(self) -> bool:
        """Whether the learner is a single process."""
        return self.num_ranks == 1

    @property
    def _has_checkpointing(self) -> bool:
        return self.config.learner.gradient_checkpointing in (True, "offload")

    @property
    def offloads_inputs(self) -> bool:
        """Whether the inputs of layers are kept in the host's memory."""
        return self.has_gpu and self.config.learner.gradient_checkpointing == "offload"

    @property
    def compute_bytes(self) -> int:
        """Bytes per number in the learner's matrix products; 4 for "auto"."""
        return DTYPE_BYTES.get(self.config.learner.dtype, 4)


def _rollouts_per_row(facts: ModelFacts, config: Config, *, prompt_tokens: int) -> int:
    """Return the number of rollouts that share their prompt in one row.

    The rollouts fill at most half of a micro-batch. If rollouts do not share prompts, or if sharing
    saves less than MIN_SAVED of the row's tokens, the number is 1. All completions are assumed to
    have the full length. For this length, sharing saves least.
    """
    completion = config.max_chain_tokens
    num_fitting = (config.learner.micro_batch_tokens // 2 - prompt_tokens) // completion
    number = max(1, min(config.batch.group_size, num_fitting))
    is_packed = config.model.attn_implementation in ("auto", "sdpa")
    apart = number * (prompt_tokens + completion)
    saves = prompt_tokens + number * completion <= (1.0 - MIN_SAVED) * apart
    return number if facts.shares_prompts and is_packed and saves else 1
