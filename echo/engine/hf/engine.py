"""Engine that samples with a transformers model, wherever torch runs.

The engine takes the directory of any causal language model. The weights come through `load`.
Shapes: B rows in the batch, U distinct prompts, L longest prompt, V vocabulary.

A call of `generate` is divided into batches that fit the memory budget. In a batch, every distinct
prompt runs through the model once. The prompt's keys and values are then copied for each rollout of
the group. All rows then advance together, one token at a time. Prompts of unequal length are padded
on the left. Prompts of equal length need no mask. Ended rows are dropped as soon as a quarter of
the batch has ended, so ended rows cost at most a constant factor.

New weights are installed between two tokens, by the thread that generates. If the model computes on
the CPU in the published dtype, nothing is copied. The parameters are then views of the version's
image, which holds the bytes of all tensors. So a patch of the image also changes the model.
Otherwise the parameters are copies, and the engine writes the words that a patch has changed into
these copies, too.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from echo.core.errors import EngineError
from echo.core.memory_sizes import SAMPLING_BYTES_PER_LOGIT
from echo.core.rollout import PolicyVersion
from echo.core.units import format_bytes
from echo.engine.engine import (
    UNVERSIONED,
    UNWATCHED,
    Completion,
    Concurrency,
    Engine,
    InstalledVersion,
    KvCache,
    Request,
    Sampling,
    Watcher,
    describe_error,
    is_out_of_memory,
)
from echo.engine.hf.batch import StaticBatch, bar_stops, draw_tokens, most_likely
from echo.engine.lora import Lora, build_adapted
from echo.engine.model import (
    build_meta_model,
    check_weights,
    free_bytes,
    head_widths,
    layer_configs,
    set_num_threads,
    weight_bytes,
)
from echo.engine.weights import scatter, torch_dtype
from echo.weights.manifest import TensorSpec
from echo.weights.store.patches import Patch

# --- mailbox --------------------------------------------------------------------------------------


Job = Callable[[], None]


class Mailbox:
    """Passes jobs to the thread that holds the mailbox open."""

    def __init__(self) -> None:
        self._owner = threading.Lock()
        self._lock = threading.Lock()
        self._is_open = False
        self._jobs: list[tuple[Job, Future[None]]] = []

    def do(self, job: Job) -> None:
        """Run `job` in the thread that holds the mailbox open, and wait for the job.

        If no thread holds the mailbox open, run the job in the calling thread. An exception of the
        job is raised here.
        """
        with self._lock:
            if not self._is_open:
                job()
                return
            done: Future[None] = Future()
            self._jobs.append((job, done))
        done.result()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the mailbox open during the block, which must call `empty` regularly.

        One thread holds the mailbox at a time; other threads wait.
        """
        with self._owner:
            with self._lock:
                self._is_open = True
            try:
                yield
            finally:
                with self._lock:
                    self._is_open = False
                    self._do_all()

    def empty(self) -> bool:
        """Run the jobs that have arrived. Return whether there were any jobs."""
        if not self._jobs:
            return False
        with self._lock:
            self._do_all()
        return True

    def _do_all(self) -> None:
        for job, done in self._jobs:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 -- raised in the thread that called `do`
                done.set_exception(error)
            else:
                done.set_result(None)
        self._jobs.clear()


class TransformersEngine(Engine):
    """An engine that samples from a Hugging Face causal language model on one device.

    Args:
        model_dir: directory with config.json; weights in it are not read.
        device: "cpu", "cuda" or another torch device.
        dtype: the dtype to compute in: "float32", "bfloat16" or "float16".
        rollout_bytes: memory for rollouts, in bytes; one rollout is always allowed. If None,
            weights and rollouts together take half of the memory that is free now.
        is_beside: whether another thread computes on the same device at the same time. On a GPU the
            engine then uses its own CUDA stream. In a shared stream, each token would wait for all
            kernels of the other thread.
        attn_implementation: name of the attention implementation in transformers; "auto" is sdpa if
            supported.
        num_threads: CPU threads of one operation; 0 keeps torch's setting.
        kv_cache: what happens to cached keys and values when weights change between two tokens.
        lora: the base model, which replaces `model_dir`, and the shape of the adapters that `load`
            takes. None if `load` takes all weights.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        rollout_bytes: int | None = None,
        is_beside: bool = False,
        attn_implementation: str = "auto",
        num_threads: int = 0,
        kv_cache: KvCache = "recompute",
        lora: Lora | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._num_threads = num_threads
        self._recomputes = kv_cache == "recompute"
        self._installed = InstalledVersion()
        self._mailbox = Mailbox()
        self._concurrency = Concurrency()
        self._version = UNVERSIONED
        self._tensors: Mapping[str, Tensor] | None = None
        self._is_view = False
        """Whether the parameters share the memory of `_tensors`."""
        self.takes_patches = lora is None
        self._adapter: dict[str, Tensor] | None = None
        if lora is None:
            self.model = build_meta_model(model_dir, torch_dtype(dtype), attn_implementation)
        else:
            self.model, self._adapter = build_adapted(lora, torch_dtype(dtype), attn_implementation)
        self.model.to(self._device)
        self._forward_arguments = frozenset(inspect.signature(self.model.forward).parameters)
        head = self.model.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(_in_one_piece)
        self._stream: torch.cuda.Stream | None = None
        if is_beside and self._device.type == "cuda":
            # Sampling kernels are short, so they go before the other thread's.
            self._stream = torch.cuda.Stream(self._device, priority=-1)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._least_rollouts = 0 if rollout_bytes is None else 1
        self._budget_bytes = (
            free_bytes(self._device) // 2
            if rollout_bytes is None
            else self._weight_bytes() + rollout_bytes
        )
        text_config = self.model.config.get_text_config()
        self._vocab_size = int(text_config.vocab_size)
        window = getattr(text_config, "max_position_embeddings", None)
        self.window = int(window) if window is not None else None
        self._kv_bytes_per_token = _kv_bytes_per_token(text_config, torch_dtype(dtype))

    @property
    def installed(self) -> PolicyVersion | None:
        return self._installed.installed

    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion = UNVERSIONED) -> None:
        """Install all weights of a version between two tokens; see `Engine.load`.

        Of tied tensors, pass only one, under any of its names. If the installation fails half way,
        the engine installs the previous version again.
        """
        check_weights(self._loadable(), tensors)
        with self._installed.swap(version), self._in_stream():
            self._mailbox.do(lambda: self._install(tensors, version))

    def _in_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _loadable(self) -> Mapping[str, Tensor]:
        return self.model.state_dict() if self._adapter is None else self._adapter

    def _install(self, tensors: Mapping[str, Tensor], version: PolicyVersion) -> None:
        try:
            self._copy(tensors)
        except Exception as error:  # PyTorch, and the memory behind the tensors, raise anything
            self._roll_back(version, describe_error(error))
            raise EngineError(
                f"{version} could not be copied in: {describe_error(error)}; rolled back, version: "
                f"{self._installed.installed or 'none'}"
            ) from error
        self._tensors, self._version = tensors, version

    def _roll_back(self, version: PolicyVersion, why: str) -> None:
        """Install the previous version again, if there is one.

        Raise an EngineError if this fails.
        """
        if self._tensors is None:
            return
        try:
            self._copy(self._tensors)
        except Exception as error:  # as above
            before = self._installed.installed
            self._installed.close()
            raise EngineError(
                f"{version} could not be copied in ({why}), nor {before} again "
                f"({describe_error(error)}): the weights are neither, and nothing is sampled from "
                "them; check this machine's memory, and restart the worker"
            ) from error

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Use the tensors as parameters if all dtypes and devices are right.

        Otherwise copy them.
        """
        if self._adapter is not None:
            for name, tensor in tensors.items():
                self._adapter[name].copy_(tensor)
            return
        model, was_view = self.model, self._is_view
        places = dict(model.named_buffers()) | dict(model.named_parameters(remove_duplicate=False))
        self._is_view = all(
            (tensor.dtype, tensor.device) == (places[name].dtype, places[name].device)
            for name, tensor in tensors.items()
        )
        for name, tensor in tensors.items():
            if self._is_view:
                places[name].data = tensor
                continue
            if was_view:  # the caller's memory, which must not be written
                places[name].data = torch.empty_like(places[name])
            places[name].copy_(tensor)

    def patch(self, patch: Patch, image: memoryview, specs: Sequence[TensorSpec]) -> None:
        """Write the changed words into the image.

        The parameters change between two tokens. If the parameters are views of the image, one
        write changes both.
        """
        with self._installed.swap(patch.version):
            if not self._is_view:
                with self._whole_or_not_at_all(patch, image):
                    patch.write(image)
            self._mailbox.do(lambda: self._patch(patch, image, specs))

    def _patch(self, patch: Patch, image: memoryview, specs: Sequence[TensorSpec]) -> None:
        with self._whole_or_not_at_all(patch, image):
            if self._is_view:
                patch.write(image)
            else:
                scatter(patch, image, specs, self._loadable())
        self._version = patch.version

    @contextmanager
    def _whole_or_not_at_all(self, patch: Patch, image: memoryview) -> Iterator[None]:
        """Undo the patch in image and parameters if the block raises."""
        try:
            yield
        except Exception as error:  # PyTorch, and the memory behind the tensors, raise anything
            patch.take_back(image)
            if not self._is_view:
                self._roll_back(patch.version, describe_error(error))
            raise EngineError(
                f"{patch.version} could not be written in place: {describe_error(error)}; rolled "
                f"back, version: {self._installed.installed or 'none'}"
            ) from error

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        watcher: Watcher = UNWATCHED,
        *,
        version: PolicyVersion | None = None,
    ) -> list[Completion]:
        """Sample a completion for each request; see `Engine.generate`.

        A completion also ends with "length" at the end of the model's window.
        """
        with self._installed.request(version), self._in_stream(), self._mailbox.opened():
            return self._generate(requests, sampling, watcher)

    def _generate(
        self, requests: Sequence[Request], sampling: Sampling, watcher: Watcher
    ) -> list[Completion]:
        if not requests:
            return []
        for request in requests:
            request.check(
                window=self.window,
                vocab_size=self._vocab_size,
                max_completion_tokens=sampling.max_completion_tokens,
            )
        # torch keeps this setting per thread, and another thread may have built the engine.
        set_num_threads(self._num_threads)
        max_tokens = sampling.max_completion_tokens
        self.max_concurrent_rollouts(max(len(r.prompt_ids) for r in requests), max_tokens)
        # Rows that continue a completion have longer contexts; the other rows are padded to them.
        padded = max(len(request.context_ids) for request in requests)
        completions: list[Completion] = []
        while len(completions) < len(requests):
            batch_size = max(1, self._num_rollouts(padded, max_tokens))
            start = len(completions)
            batch = StaticBatch(requests[start : start + batch_size], sampling, self.window)
            self._run_in_parts(batch, watcher)
            completions.extend(batch.completions())
        return completions

    def _run_in_parts(self, batch: StaticBatch, watcher: Watcher) -> None:
        """Run a batch. If memory runs out, run its remaining rows in batches of half the size."""
        waiting = [batch]
        while waiting:
            batch = waiting.pop()
            max_rows = self._concurrency.bounded(batch.num_rows)
            if max_rows < batch.num_rows:
                waiting += reversed(batch.parts(max_rows))
                continue
            failure = ""
            try:
                self._run(batch, watcher)
            except (RuntimeError, MemoryError) as error:  # PyTorch raises a RuntimeError
                if not is_out_of_memory(error):
                    raise
                failure = describe_error(error)
            if failure:  # after the handler: inside it, the traceback keeps the tensors alive
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()
                longest = int(batch.lengths.max())
                numbers = self._numbers(longest, batch.max_tokens)
                self._concurrency.halve(batch.num_rows, why=failure, numbers=numbers)
                waiting.append(batch)

    def _numbers(self, prompt_tokens: int, completion_tokens: int) -> str:
        weights, one = self._needs(prompt_tokens, completion_tokens)
        return (
            f"the weights take {format_bytes(weights)}, one rollout of {prompt_tokens} + "
            f"{completion_tokens} tokens at least {format_bytes(one)}, the budget is "
            f"{format_bytes(self._budget_bytes)}, free are "
            f"{format_bytes(free_bytes(self._device))}"
        )

    def _needs(self, prompt_tokens: int, completion_tokens: int) -> tuple[int, int]:
        one = (
            self._kv_bytes_per_token * (prompt_tokens + completion_tokens)
            + SAMPLING_BYTES_PER_LOGIT * self._vocab_size
        )
        return self._weight_bytes(), one

    def _weight_bytes(self) -> int:
        return weight_bytes(self.model.state_dict())

    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return how many rollouts fit into memory beside the weights.

        Raise EngineError if none fits.
        """
        number = self._num_rollouts(prompt_tokens, completion_tokens)
        if number < 1:
            weights, one = self._needs(prompt_tokens, completion_tokens)
            raise EngineError(
                f"the memory budget of {self._budget_bytes} bytes does not hold the weights "
                f"({weights}) and one rollout of {prompt_tokens} + {completion_tokens} tokens "
                f"({one}); lower sampling.max_completion_tokens or take a machine with "
                "more memory"
            )
        return number

    def _num_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        weights, one = self._needs(prompt_tokens, completion_tokens)
        number = max(self._least_rollouts, (self._budget_bytes - weights) // one)
        return self._concurrency.bounded(int(number))

    def take_counts(self) -> dict[str, int]:
        """Return how often memory ran out since the last call, by metric name."""
        return self._concurrency.take_counts()

    def close(self) -> None:
        """Drop the model's weights."""
        self._installed.close()
        self._tensors = None
        self.model.to("meta")

    @torch.inference_mode()
    def _run(self, batch: StaticBatch, watcher: Watcher) -> None:
        if watcher.should_stop():
            return
        logits, cache = self._begin(batch, watcher)
        mask = batch.final_mask()  # the model gets one more column at each step
        mask = mask.to(self._device) if mask is not None else None
        for step in range(batch.num_tokens, batch.max_tokens):
            logits = bar_stops(logits, batch.sampling, batch.is_barred(step))
            tokens, logprobs, supports = draw_tokens(logits, batch.sampling, batch.uniforms(step))
            new = tokens.cpu().numpy(), logprobs.cpu().numpy()
            watcher.on_tokens(batch.num_running)
            if batch.sampling.likely_ids:
                likely = most_likely(logits, batch.sampling)
                batch.note_likely(step, *(each.cpu().numpy() for each in likely))
            for row in batch.append(step, *new, self._version, supports):
                watcher.on_completion(batch.completion(row))
            if batch.is_done or watcher.should_stop():
                return
            has_swapped = self._mailbox.empty()
            if self.installed is None:
                raise EngineError(
                    "the weights are gone: a swap failed half way, or the engine was closed; "
                    "restart the worker"
                )
            kept = batch.compact()
            if kept is not None:
                index = torch.from_numpy(kept).to(self._device)
                mask = mask[index] if mask is not None else None
                tokens = tokens[index]
                _keep_rows(cache, index)
            if has_swapped and self._recomputes:
                logits, cache = self._begin(batch, watcher)
                continue
            positions = torch.from_numpy(batch.lengths + step)[:, None]
            shown = mask[:, : batch.prompt_length + step + 1] if mask is not None else None
            logits = self._forward(tokens[:, None], shown, positions, cache)

    def _begin(self, batch: StaticBatch, watcher: Watcher) -> tuple[Tensor, DynamicCache]:
        """Run the model over the present tokens of all rows (the prefill).

        On a busy CPU this may take a minute, and no token is sampled in this time. Leases expire
        without progress. So the engine reports each layer as progress.

        Returns:
            The logits [B, V] of each row's next token, and the keys and values of the tokens before
            that token.
        """
        with self._reporting_layers(watcher):
            return self._read(batch)

    @contextmanager
    def _reporting_layers(self, watcher: Watcher) -> Iterator[None]:
        lists = [each for each in self.model.modules() if isinstance(each, torch.nn.ModuleList)]
        layers = max(lists, key=len, default=())
        hooks = [layer.register_forward_hook(lambda *_: watcher.on_progress(1)) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _read(self, batch: StaticBatch) -> tuple[Tensor, DynamicCache]:
        cache = DynamicCache(config=self.model.config)
        if batch.num_tokens:
            contexts, shown = batch.contexts()
            return self._forward(contexts, shown, _positions(shown, contexts.shape), cache), cache
        ids, shown, repeat = batch.prompts()
        logits = self._forward(ids, shown, _positions(shown, ids.shape), cache)
        if not torch.equal(repeat, torch.arange(len(ids))):
            repeat = repeat.to(self._device)
            _keep_rows(cache, repeat)
            logits = logits[repeat]
        return logits, cache

    def _forward(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Run the model over new tokens. Return each row's logits after its last token, [B, V]."""
        # transformers 5.24 renames this argument, and warns about the old name.
        cache_name = "cache" if "cache" in self._forward_arguments else "past_key_values"
        arguments: dict[str, Any] = {
            "input_ids": ids.to(self._device),
            cache_name: cache,
            "use_cache": True,
        }
        if mask is not None:
            arguments["attention_mask"] = mask.to(self._device)
        # Models with relative positions take no ids; older models compute all logits.
        if "position_ids" in self._forward_arguments:
            arguments["position_ids"] = positions.to(self._device)
        if "logits_to_keep" in self._forward_arguments:
            arguments["logits_to_keep"] = 1
        logits: Tensor = self.model(**arguments).logits[:, -1]
        return logits


def _positions(mask: Tensor | None, shape: torch.Size) -> Tensor:
    """Return position ids [U, L]: 0 at the first real token of each row."""
    if mask is None:
        return torch.arange(shape[1]).expand(shape)
    return (mask.cumsum(-1) - 1).clamp_(min=0)


def _in_one_piece(head: torch.nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the head's input as contiguous tensors.

    transformers passes a slice of all tokens' states, and torch multiplies a slice row by row. In
    16 bits on a CPU, torch also copies the head's whole weight for each row.
    """
    return tuple(part.contiguous() for part in states)


def _keep_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Reorder the rows of a cache. The new row i is the present row `rows[i]`.

    An index may occur several times in `rows`, [B]. The cache's method for beam search is used,
    because its `batch_select_indices` leaves out the states of convolutions and of linear
    attention.
    """
    cache.reorder_cache(rows)  # type: ignore[arg-type]  # annotated LongTensor; takes int64


def _kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers.

    The largest layer counts twice, because its cache exists in two copies while it grows by a
    token.
    """
    widths = []
    for layer in layer_configs(config):
        num_heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        widths.append(num_heads * sum(head_widths(layer)))
    return int((sum(widths) + max(widths)) * dtype.itemsize)
