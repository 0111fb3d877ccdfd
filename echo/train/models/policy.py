"""The policy being trained: a causal language model that scores completion tokens.

The policy may be any model of AutoModelForCausalLM, or the text model of a model that also reads
images. Its logits must be exactly hidden states times LM head, because log-probabilities are
computed from these two, without a [tokens, vocabulary] matrix (kernels/logprob.py). Models that
scale, cap or shift their logits are refused: the configuration is checked, and the logits of a few
tokens are compared with the product.

Rollouts go through the model in packed rows if the model keeps the rollouts of a row apart
(packing.py), otherwise in padded rows. The results are the same. In a packed row, rollouts with the
same prompt may share the prompt, which is then computed once.

Trained weights are float32. With a compute type of bfloat16 the model itself holds rounded copies
(masters.py), and hidden states and LM head are multiplied in bfloat16 with float32 sums, as a GPU's
tensor cores and the fused kernels require.

If several processes train the model, each process holds a shard (ranks/sharding.py), and all
processes make the same calls.

Dropout is switched off, so that learner and sampler with the same weights give the same
probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, masking_utils
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from echo.algo.batching import MicroBatch, Segments, TrainingRow, collate
from echo.algo.row_sizes import Fills, RowSizes
from echo.config.schema import LearnerSection, ModelSection, OptimizerSection
from echo.core.errors import ConfigError, DataError, EngineError
from echo.core.memory_sizes import VOCAB_CHUNK
from echo.core.rollout import Rollout
from echo.engine.lora import Lora, add_adapter
from echo.engine.model import (
    BUILDING,
    UNREADABLE,
    check_owners,
    check_weight_files,
    choose_attention,
    distinct_tensors,
    drop_towers,
    explain,
    lacking,
    load_directory,
    model_class,
    pick_device,
    pick_dtype,
    unrounded_names,
)
from echo.kernels.contract import BackendName, RatioClip
from echo.kernels.logprob import (
    EntropyMode,
    TokenLosses,
    linear_further_logprobs,
    linear_logprob,
    linear_policy_loss,
    linear_set_logprob,
    without_ids,
)
from echo.train.models import packing
from echo.train.models.activations import decoder_layers, enable_training
from echo.train.models.attention import LayerShape, choose_kernel, plain_kernel
from echo.train.models.compiling import MIN_STEPS, compile_layers
from echo.train.models.flops import model_flops
from echo.train.models.masters import Masters
from echo.train.models.rows import RowRules
from echo.train.models.tied_embedding import add_rows_in_place
from echo.train.optimizer import OptimizerState
from echo.train.ranks import sharded_model, sharding
from echo.train.ranks.sharding import ALONE, Ranks, ShardedModel
from echo.train.step import StepError

LOGIT_SETTINGS = {
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "lm_head_multiplier": 1.0,
}
"""Settings that change logits (Gemma, Granite, Cohere, Falcon-H1), each with the values that leave
logits unchanged.
"""


CompileLayers = Literal["auto"] | bool

FLASH = "flash_attention_2"
"""transformers' name of flash attention, which computes only in 16 bits."""


NO_ROW = TrainingRow(
    # Its last token is not an input. A row of one input token would make compiled layers compile
    # again.
    prompt_ids=np.zeros(2, np.int32),
    rollout=Rollout(
        token_ids=np.zeros(1, np.int32),
        sampler_logprobs=np.zeros(1, np.float32),
        policy_versions=np.zeros((1, 2), np.int32),
        completion_mask=np.ones(1, np.bool_),
        reward=0.0,
        finish_reason="stop",
    ),
    advantage=0.0,
)
"""The row that a rank puts through the model if it has no micro-batch while other ranks compute."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelSource:
    """The model to load, and its weights."""

    model_dir: Path
    """Hugging Face directory; config.json is enough if `tensors` is given."""
    tensors: Mapping[str, Tensor] | None = None
    """Name -> weight. These weights replace the directory's weights; tied tensors occur once. If
    `lora` is set, these are the adapter's weights, and None starts an adapter that leaves the
    output unchanged.
    """
    weights_dir: Path | None = None
    """Directory of weights that replace the weights in `model_dir`."""
    lora: Lora | None = None
    """The adapter to train; None to train all weights. The adapter's base directory replaces
    `model_dir`, and `Policy.tensors`, `Policy.parameters` and `Policy.load` cover only the adapter.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The device, precision and batch size of a policy's forward and backward passes."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    """dtype of matrix products and activations, float32 or bfloat16."""
    attn_implementation: str = "auto"
    """transformers' name of the attention code; "auto" is sdpa if the model supports it."""
    backend: BackendName = "auto"
    """Backend of the log-probabilities (kernels/logprob.py)."""
    micro_batch_tokens: int = 16384
    """Largest number of tokens that go through the model at once, including padding."""
    packs: Literal["auto"] | bool = True
    """Whether to pack several rollouts into a row, if the model keeps them apart. "auto" pads rows
    instead if padding is cheaper (rows.py).
    """
    share_prompts: bool = True
    """Whether rollouts of one prompt share the prompt in a packed row, if sharing saves enough
    tokens.
    """
    vocab_chunk: int = VOCAB_CHUNK
    """Number of columns of logits that are computed at a time."""
    gradient_checkpointing: bool | str = False
    """Whether to save memory by recomputing activations in the backward pass. "offload" also keeps
    the inputs of layers in the host's memory until the backward pass.
    """
    recompute_above: int = 0
    """If a micro-batch has at most this number of tokens, its activations are kept instead of
    recomputed.
    """
    compile_layers: CompileLayers = False
    """Whether torch compiles each decoder layer (compiling.py); "auto" compiles the layers that
    torch can compile.
    """
    optimizer_state: OptimizerState = "float32"
    """Form of the optimizer's moments (optimizer.py)."""
    seed: int = 0
    """Seed of torch's global generator, for models that draw random numbers."""
    ranks: Ranks = ALONE
    """The processes (ranks) that train the model together; `ALONE` for a single process."""


def learner_compute(
    section: LearnerSection,
    model: ModelSection,
    optimizer: OptimizerSection,
    *,
    seed: int,
    num_steps: int,
) -> Compute:
    """Return the settings of the learner's models.

    `gradient_checkpointing = "auto"` becomes False. A caller that can estimate memory replaces
    "auto" first.
    """
    device = pick_device(section.device)
    checkpointing = section.gradient_checkpointing
    if checkpointing == "auto":
        checkpointing = False
    if checkpointing == "offload" and device == "cpu":
        raise ConfigError(
            'learner.gradient_checkpointing = "offload" moves what a GPU holds to the host, and '
            "this learner computes on the CPU: set learner.gradient_checkpointing = true"
        )
    compiles = section.compile_layers
    if compiles == "auto" and (device == "cpu" or num_steps < MIN_STEPS):
        compiles = False
    return Compute(
        device=torch.device(device),
        dtype=pick_dtype(section.dtype, device),
        attn_implementation=model.attn_implementation,
        micro_batch_tokens=section.micro_batch_tokens,
        packs="auto",
        gradient_checkpointing=checkpointing,
        compile_layers=compiles,
        optimizer_state=optimizer.state,
        seed=seed,
    )


class Policy:
    """A causal language model that scores completion tokens, trained or frozen."""

    def __init__(self, source: ModelSource, compute: Compute, *, is_frozen: bool = False) -> None:
        """Build the model, load its weights, and check that the model can be trained.

        Args:
            source: the model and the weights to load.
            compute: settings of the model's computations.
            is_frozen: whether the model only scores and is never trained.

        Raises:
            DataError: if the directory or the tensors do not form a complete model.
            EngineError: if the model cannot be trained here.
        """
        _check_types(compute)
        lora = source.lora
        # transformers' progress bars would be drawn across the live view.
        transformers_logging.disable_progress_bar()
        self.compute = compute
        self.device = compute.device
        model_dir = source.model_dir if lora is None else lora.base_dir
        is_given = lora is None and (source.tensors is not None or source.weights_dir is not None)
        self.model = _build(model_dir, compute, has_weights=not is_given)
        self._attention: str = self.model.config.get_text_config()._attn_implementation  # noqa: SLF001
        """transformers' name of the attention of padded rows."""
        self._adapter = None if lora is None else add_adapter(self.model, lora)
        self._masters: Masters | None = None
        self.unrounded = unrounded_names(self.model)
        self._backbone = self.model.base_model
        head = _head_weight(self.model)
        self.vocab_size = int(head.shape[0])
        """Number of rows of the LM head; token ids are below this number."""
        if is_frozen:
            self.model.requires_grad_(False)
        elif self._adapter is not None:
            for tensor in self._adapter.values():
                tensor.requires_grad_()
        self.flops = model_flops(self.model, head)
        self._root = None if compute.ranks.is_alone else self._shard(compute.ranks)
        self._fill(source, model_dir)
        self._kernel = plain_kernel(self.device, compute.dtype)
        """The kernel that computes the attention of packed rows."""
        self.padded_because = self._choose_rows()
        self._sizes = RowSizes(fills=_fills(compute), window=_num_positions(self.model))
        self.can_share_prompts = (
            self.is_packed
            and compute.share_prompts
            and self._compute(packing.can_share_prompts, self.model, compute.dtype)
        )
        """Whether rollouts in a packed row may share a prompt."""
        _check_layers(self.model, compute)
        enable_training(
            self.model,
            is_on_cpu=self.device.type == "cpu",
            gradient_checkpointing=compute.gradient_checkpointing,
        )
        self._check_and_round()
        if self._root is None and self._masters is None and self.device.type == "cpu":
            add_rows_in_place(self.model)
        if compute.compile_layers and (layers := decoder_layers(self.model)):
            compile_layers(layers, must=compute.compile_layers is True)

    def _fill(self, source: ModelSource, model_dir: Path) -> None:
        if self._root is not None and (source.tensors is None or self._adapter is not None):
            sharded_model.read(source.weights_dir or model_dir, model_dir, self.model)
        elif source.weights_dir is not None:
            self.load(load_directory(source.weights_dir, "float32"))
        if source.tensors is not None:
            self.load(source.tensors)

    def _check_and_round(self) -> None:
        """Check the model's logits. If the model computes in 16 bits, also round its weights.

        If possible, the logits are checked in float32, because rounding to 16 bits may hide a
        difference.
        """
        compute = self.compute
        has_one_type = compute.attn_implementation == FLASH or self._root is not None
        if not has_one_type:
            self._check_logits(torch.float32)
        if self._root is None and compute.dtype != torch.float32:
            self._masters = Masters(self.model, compute.dtype)
        if has_one_type:
            self._check_logits(compute.dtype)

    def _shard(self, ranks: Ranks) -> ShardedModel:
        """Shard the model and return the root. Sharding replaces the parameter objects."""
        names = {id(tensor): name for name, tensor in self.model.named_parameters()}
        root = sharding.shard(self.model, ranks, self.compute.dtype)
        if self._adapter is not None:
            own = dict(self.model.named_parameters())
            self._adapter = {name: own[names[id(old)]] for name, old in self._adapter.items()}
        return root

    @property
    def _head(self) -> Tensor:
        """Return the LM head's weight.

        In a sharded model, the weight is complete only within `_compute`.
        """
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def is_packed(self) -> bool:
        """Whether a row can have several rollouts."""
        return self.padded_because is None

    def describe_rows(self) -> str:
        """Return a sentence that says whether rows are packed or padded, and why."""
        rows = "packed rows" if self.is_packed else f"padded rows: {self.padded_because}"
        if self.is_packed and self.compute.packs == "auto":
            rows += ", or on padded ones where a batch costs less so"
        if self.is_packed and self._kernel.is_varlen:
            rows += f"; attention by {self._kernel.name}"
        again = "; layers are computed again in the backward pass"
        if self.compute.recompute_above:
            again += f" of more than {self.compute.recompute_above} tokens"
        again = again if self.compute.gradient_checkpointing else ""
        name = type(self.model).__name__
        eager = ""
        if self.compute.attn_implementation == "auto" and self._attention == "eager":
            eager = f"transformers' sdpa cannot compute {name}, eager attention takes its place; "
        return f"{eager}{name} is trained on {rows}{again}"

    def pad_rows(self, why: str) -> None:
        """Change to padded rows; `describe_rows` then names `why` as the reason."""
        if self.is_packed:
            self.model.set_attn_implementation(self._attention)
            self.padded_because = why
            self.can_share_prompts = False

    def micro_batches(
        self,
        rows: Sequence[TrainingRow],
        *,
        whole_groups: bool = False,
        score_all: bool = False,
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yield this rank's micro-batches on the CPU, with the indices of their rows.

        All ranks get the same number of micro-batches. A rank without enough rows gets
        micro-batches of `NO_ROW`, without indices. Such micro-batches must also go through the
        model. Their results are ignored.

        Args:
            rows: any number, in any order.
            whole_groups: whether to keep the rows of a group in one micro-batch.
            score_all: whether to score all completion tokens, or only the trained tokens.

        Raises:
            StepError: before the first yield, if a row has a token id outside the vocabulary.
        """
        self._check_ids(rows)
        max_tokens = self.compute.micro_batch_tokens
        plan = self._row_rules().plan(
            rows,
            max_tokens=max_tokens,
            group_index=[row.group_index for row in rows] if whole_groups else None,
        )
        for indices in plan.bins:
            batch = collate(
                [rows[index] for index in indices] or [NO_ROW],
                score_all=score_all,
                is_packed=plan.is_packed,
                shares_tokens=plan.shares_tokens,
                units=[plan.units[index] for index in indices] or None,
                row_sizes=self._sizes,
                max_tokens=max_tokens,
            )
            yield indices, batch

    def _row_rules(self) -> RowRules:
        return RowRules(
            flops=self.flops,
            kernel=self._kernel,
            sizes=self._sizes,
            device_type=self.device.type,
            ranks=self.compute.ranks,
            can_pack=self.is_packed,
            can_pad=self.compute.packs == "auto",
            can_share_prompts=self.can_share_prompts,
        )

    def _check_ids(self, rows: Sequence[TrainingRow]) -> None:
        """Raise an error if a row has an id outside the vocabulary.

        On a GPU, looking up such an id ends the process.
        """
        if not rows:
            return
        ids = np.concatenate(
            [part for row in rows for part in (row.prompt_ids, row.rollout.token_ids)]
        )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise StepError(
                f"token ids span {ids.min()}..{ids.max()}, outside the model's vocabulary of "
                f"{self.vocab_size}: they are of another tokenizer",
                reason="bad_group",
            )

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by name, without copying them.

        Tied tensors are returned once. For an adapter, only the adapter's tensors are returned.
        """
        named = distinct_tensors(self.model) if self._adapter is None else dict(self._adapter)
        if self._masters is None:
            return named
        return {name: self._masters.of(tensor) for name, tensor in named.items()}

    def parameters(self) -> dict[str, Tensor]:
        """Return the trained tensors by name, in float32, without copying them.

        Tied tensors are returned once. After changing the tensors, call `round`.
        """
        return {name: tensor for name, tensor in self.tensors().items() if tensor.requires_grad}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite all weights in place; with an adapter, overwrite only the adapter's weights.

        Raises:
            DataError: if a name or a shape differs from the model's. Then no weight is changed.
        """
        self.check(tensors)
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                sharding.copy_local(tensor, tensors[name])
        self.round()

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise an error if `load` cannot take these tensors.

        Raises:
            DataError: if a name or a shape differs from the model's.
        """
        own = self.tensors()
        names = own.keys() if self._adapter is not None else self.model.state_dict().keys()
        if missing := sorted(own.keys() - tensors.keys()):
            raise DataError(f"weights lack {len(missing)} of the model's tensors: {missing[:5]}")
        if unknown := sorted(tensors.keys() - names):
            raise DataError(f"weights hold {len(unknown)} unknown tensors: {unknown[:5]}")
        for name, tensor in own.items():
            if tensors[name].shape != tensor.shape:
                raise DataError(
                    f"weight {name} has shape {list(tensors[name].shape)}, the model expects "
                    f"{list(tensor.shape)}: these weights belong to another model"
                )

    def round(self) -> None:
        """Round the master weights into the model, if the model computes in 16 bits."""
        if self._masters is not None:
            self._masters.round()

    def logprobs(
        self, batch: MicroBatch, *, inv_temperature: float, entropy: EntropyMode = "value"
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the scored tokens of a micro-batch.

        Args:
            batch: the micro-batch, on this policy's device.
            inv_temperature: 1 / sampling temperature.
            entropy: whether to compute entropies, and whether with a gradient.

        Returns:
            [B, T] log-probabilities in nats with gradient, 0 where masked. Then the [N] entropies
            in nats at the N scored tokens, or an empty tensor if `entropy` is "none". A token with
            a support (the ids that it was drawn from) is scored on the support alone.
        """
        logprobs, entropies = self._compute(self._scores, batch, inv_temperature, entropy)
        logprobs = batch.spread(logprobs)
        return logprobs, logprobs.new_empty(0) if entropies is None else entropies

    def _scores(
        self, batch: MicroBatch, inv_temperature: float, entropy: EntropyMode
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities and the entropies of the scored tokens, [N] nats each.

        If `entropy` is "none", None is returned instead of the entropies.
        """
        states, head = self.predictors(batch)
        token_ids, compute = batch.pick(batch.token_ids), self.compute
        settings: dict[str, Any] = {
            "entropy": entropy,
            "vocab_chunk": compute.vocab_chunk,
            "backend": compute.backend,
        }
        scores = (
            linear_logprob(states, head, token_ids, inv_temperature, **settings)
            if batch.supports is None
            else linear_set_logprob(
                states, head, token_ids, batch.supports, inv_temperature, **settings
            )
        )
        if batch.lacking is None:
            return scores
        return without_ids(
            states,
            head,
            token_ids,
            *scores,
            batch.lacking,
            inv_temperature,
            has_entropy_gradient=entropy == "grad",
            backend=compute.backend,
        )

    def further_logprobs(
        self, batch: MicroBatch, *, inv_temperature: float, entropy: EntropyMode = "value"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of `logprobs`, and log-probabilities of the likely ids.

        Args:
            batch: the micro-batch, on this policy's device, with M likely ids.
            inv_temperature: 1 / sampling temperature.
            entropy: "value" or "grad".

        Returns:
            [B, T] log-probabilities, [N] entropies, and the [M] log-probabilities of the likely
            ids, with gradient.
        """
        logprobs, entropies, further = self._compute(
            self._further_scores, batch, inv_temperature, entropy
        )
        return batch.spread(logprobs), entropies, further

    def _further_scores(
        self, batch: MicroBatch, inv_temperature: float, entropy: EntropyMode
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        states, head = self.predictors(batch)
        assert batch.likely is not None
        return linear_further_logprobs(
            states,
            head,
            batch.pick(batch.token_ids),
            batch.likely.ids,
            inv_temperature,
            entropy=entropy,
            vocab_chunk=self.compute.vocab_chunk,
            backend=self.compute.backend,
        )

    def token_losses(
        self, batch: MicroBatch, *, clip: RatioClip, inv_temperature: float
    ) -> TokenLosses:
        """Return the clipped loss and log-probability of each token, from one fused operation.

        Args:
            batch: the micro-batch, on this policy's device.
            clip: the range of the ratio.
            inv_temperature: 1 / sampling temperature.

        Returns:
            Losses with gradient, log-probabilities and ratios, [B, T] each, 0 where masked. Then
            the [N] entropies of the scored tokens.
        """
        losses, logprobs, ratios, entropies = self._compute(
            self._losses, batch, clip, inv_temperature
        )
        return TokenLosses(
            losses=batch.spread(losses),
            logprobs=batch.spread(logprobs.detach()),
            ratios=batch.spread(ratios),
            entropies=entropies,
        )

    def _losses(
        self, batch: MicroBatch, clip: RatioClip, inv_temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return losses, log-probabilities, ratios and entropies of the scored tokens, [N] each."""
        states, head = self.predictors(batch)
        tokens = linear_policy_loss(
            states,
            head,
            batch.pick(batch.token_ids),
            batch.pick(batch.sampler_logprobs),
            batch.pick(batch.advantages[:, None].expand_as(batch.token_ids)),
            inv_temperature,
            clip=clip,
            vocab_chunk=self.compute.vocab_chunk,
            backend=self.compute.backend,
        )
        return tokens.losses, tokens.logprobs, tokens.ratios, tokens.entropies

    def _compute(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that computes with the model.

        All ranks call this method together. A sharded model computes only within this call.
        """
        if self._root is None:
            return compute(*arguments)
        return sharding.call(self._root, compute, *arguments)

    def from_predictors(
        self, batch: MicroBatch, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Call `compute` with hidden states and LM head (`predictors`); return the result.

        During the call, the LM head is complete.
        """
        found: tuple[Tensor] = self._compute(lambda: (compute(*self.predictors(batch)),))
        return found[0]

    def predictors(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the hidden states [N, D] that predict scored tokens, and the LM head [V, D]."""
        dtype = self.compute.dtype
        states = self._states(batch.input_ids, batch.segments, dtype).flatten(0, 1)
        states = states.index_select(0, batch.pick(batch.predictors))
        return states.to(dtype), self._head.to(dtype)

    def _states(self, input_ids: Tensor, segments: Segments | None, dtype: torch.dtype) -> Tensor:
        # Rows are padded on the right, so causal attention is correct without a mask, which would
        # be slower. Packed rows have arguments that keep their segments apart.
        if self.compute.gradient_checkpointing:
            recomputes = input_ids.numel() > self.compute.recompute_above
            if recomputes != self.model.training:  # layers recompute only in training mode
                self.model.train(recomputes)
        with _positions_unchecked():
            output = self._backbone(
                input_ids=input_ids, use_cache=False, **self._row_arguments(segments, dtype)
            )
        states: Tensor = output.last_hidden_state
        return states

    def _row_arguments(self, segments: Segments | None, dtype: torch.dtype) -> dict[str, Any]:
        if segments is None:
            return {}
        is_own = dtype == self.compute.dtype
        kernel = self._kernel if is_own else plain_kernel(self.device, dtype)
        return packing.arguments(segments, kernel)

    def _choose_rows(self) -> str | None:
        """Switch to packed rows; return the reason if the model cannot take packed rows."""
        if not self.compute.packs:
            return "it was asked for"
        attention = self.compute.attn_implementation
        if attention not in ("auto", "sdpa"):
            return f'model.attn_implementation = "{attention}" has attention of its own'
        self.model.eval()
        dtype = self.compute.dtype
        own_dtype = torch.float32 if self._root is None else dtype
        shapes: set[LayerShape] = set()
        with torch.no_grad():
            fault: str | None
            fault = self._compute(packing.find_packing_fault, self.model, own_dtype, dtype, shapes)
        ranks = self.compute.ranks
        fault = ranks.first_fault(fault)
        if fault is None:
            self._kernel = choose_kernel(self.device, dtype, frozenset(shapes), ranks)
        else:
            self.model.set_attn_implementation(self._attention)  # it may be another rank's fault
        return fault

    def _check_logits(self, dtype: torch.dtype) -> None:
        """Raise an error if the logits of a few tokens differ from hidden states times LM head."""
        try:
            with torch.no_grad():
                expected, logits = self._compute(self._logits_in_two_ways, dtype)
        except AttributeError as error:  # a part that `drop_towers` has removed is missing
            raise EngineError(
                f"{type(self.model).__name__} cannot be trained on text alone ({error}); "
                "docs/models.md lists families that can"
            ) from error
        if not bool(logits.isfinite().all()):
            raise EngineError(
                f"the weights of {type(self.model).__name__} hold NaN or infinity: its logits are "
                "not finite; get its files again, or start from others (model.name, "
                "learner.init_from)"
            )
        if logits.shape != expected.shape or not torch.allclose(
            logits, expected, rtol=1e-3, atol=1e-4
        ):
            raise EngineError(
                f"{type(self.model).__name__} computes its logits in another way than hidden "
                "states times LM head, or from tokens that come later; such models cannot be "
                "trained here"
            )

    def _logits_in_two_ways(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        input_ids = torch.arange(min(self.vocab_size, 8), device=self.device)[None]
        segments = Segments.of(input_ids.shape[1:]).to(self.device) if self.is_packed else None
        states = self._states(input_ids, segments, dtype)
        if segments is None and dtype == torch.float32:  # in 16 bits, rounding depends on lengths
            first = self._states(input_ids[:, : input_ids.shape[1] // 2], None, dtype)
            states = torch.cat([first, states[:, first.shape[1] :]], 1)
        given = self._row_arguments(segments, dtype)
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False, **given).logits
        return torch.nn.functional.linear(states, self._head), logits


def float32_attention(attn_implementation: str) -> str:
    """Return the given `attn_implementation`, or "auto" if it cannot compute in float32."""
    return "auto" if attn_implementation == FLASH else attn_implementation


def frozen_policy(source: ModelSource, compute: Compute) -> Policy:
    """Return a frozen model that scores in float32. The caller must then load its weights.

    The model is sharded if `compute` has several ranks. Flash attention is replaced, because it
    cannot compute in float32.

    Raises:
        DataError: if the source does not form a complete model.
    """
    compute = replace(
        compute,
        dtype=torch.float32,
        attn_implementation=float32_attention(compute.attn_implementation),
        gradient_checkpointing=False,
        compile_layers=False,
    )
    return Policy(source, compute, is_frozen=True)


@contextmanager
def _positions_unchecked() -> Iterator[None]:
    """Switch off transformers' check for positions that restart within a padded row.

    Here positions never restart, and the check would make the host wait for a GPU.
    """
    find = getattr(masking_utils, "find_packed_sequence_indices", None)
    if find is None:  # another release of transformers
        yield
        return
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def _build(model_dir: Path, compute: Compute, *, has_weights: bool) -> Any:
    """Build the float32 model on its device.

    A model that will be sharded is built on the CPU without weights, where it takes no memory.
    """
    device = compute.device
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "trust_remote_code": False,
    }
    try:
        config = AutoConfig.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
        class_ = model_class(config)
        options["attn_implementation"] = choose_attention(config, compute.attn_implementation)
        _refuse_changed_logits(config)  # before a large model is read
        _switch_off_dropout(config)
        if not compute.ranks.is_alone:
            with BUILDING, no_init_weights():
                model: Any = drop_towers(class_.from_config(config, **options))
            model.tie_weights()
            return model
        if not has_weights:
            with BUILDING, device:
                return drop_towers(class_.from_config(config, **options))
        with BUILDING:
            loaded: Any = class_.from_pretrained(
                model_dir, config=config, local_files_only=True, output_loading_info=True, **options
            )
    except (*UNREADABLE, SafetensorError) as error:
        raise DataError(
            f"{model_dir}: cannot load it as a causal language model: {explain(error)}"
        ) from error
    model, report = loaded
    if report["missing_keys"]:
        raise lacking(model_dir, report["missing_keys"])
    check_owners(model_dir, report["unexpected_keys"], model)
    return drop_towers(model).to(device)


def check_trainable(source: ModelSource, compute: Compute, *, weights: Path | None = None) -> int:
    """Check that a model can be trained, without reading weights; return the vocabulary size.

    Args:
        source: the model to load.
        compute: the settings of the model's computations.
        weights: directory of weights whose files to check; None to check no files.

    Raises:
        EchoError: the error that `Policy` would raise, except errors from the values of weights.
    """
    _check_types(compute)
    alone = replace(compute, device=torch.device("meta"), ranks=ALONE)
    lora = source.lora
    model_dir = source.model_dir if lora is None else lora.base_dir
    model = _build(model_dir, alone, has_weights=False)
    _check_layers(model, compute)
    num_ids = int(_head_weight(model).shape[0])
    if weights is not None:
        check_weight_files(weights, model)
    if lora is not None:
        add_adapter(model, lora)
    return num_ids


def _fills(compute: Compute) -> Fills:
    """Return the value for `RowSizes.fills` that suits this device."""
    if compute.dtype == torch.float32:
        return "nothing"
    return "rows" if compute.device.type == "cpu" else "widths"


def _num_positions(model: Any) -> int | None:
    found: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found


def _check_types(compute: Compute) -> None:
    if compute.attn_implementation == FLASH and compute.dtype == torch.float32:
        raise EngineError(
            f'model.attn_implementation = "{FLASH}" computes in 16 bits only, and the learner in '
            'float32: set learner.dtype = "bfloat16", or model.attn_implementation = "auto"'
        )


def _check_layers(model: Any, compute: Compute) -> None:
    """Raise an error if the layers cannot do what `compute` requires.

    The requirements are recomputation, offloading and compilation.
    """
    name, checkpointing = type(model).__name__, compute.gradient_checkpointing
    if checkpointing and not model.supports_gradient_checkpointing:
        raise EngineError(
            f"{name} cannot recompute activations: set learner.gradient_checkpointing = false"
        )
    remedies = {
        "learner.gradient_checkpointing = true": checkpointing == "offload",
        "learner.compile_layers = false": compute.compile_layers is True,
    }
    for remedy in [remedy for remedy, is_asked_for in remedies.items() if is_asked_for]:
        if not decoder_layers(model):
            raise EngineError(f"{name} has no decoder layers of transformers' kind: set {remedy}")


def _switch_off_dropout(config: Any) -> None:
    for settings in {id(part): part for part in (config, config.get_text_config())}.values():
        for key, value in settings.to_dict().items():
            if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                setattr(settings, key, 0.0)


def _refuse_changed_logits(config: Any) -> None:
    for key, neutral in LOGIT_SETTINGS.items():
        value = getattr(config.get_text_config(), key, neutral)
        if value is not None and value != neutral:
            raise EngineError(
                f"{config.model_type} model with {key} = {value}: models that scale or cap their "
                "logits cannot be trained here, because log-probabilities are computed from "
                "hidden states and LM head alone; docs/models.md lists families that can"
            )


def _head_weight(model: Any) -> Tensor:
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        raise EngineError(
            f"{type(model).__name__} has no LM head apart from its backbone, and cannot be trained "
            "here; docs/models.md lists families that can"
        )
    if getattr(head, "bias", None) is not None:
        raise EngineError(
            f"{type(model).__name__} has an LM head with a bias, and cannot be trained here; "
            "docs/models.md lists families that can"
        )
    weight: Tensor = head.weight
    return weight
