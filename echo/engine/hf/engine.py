"""Sample with a transformers model: the engine that runs wherever torch does.

Any causal language model directory with a config.json; the weights may come through `load` alone.
Shapes: B rows in the batch, U distinct prompts, L longest prompt, V vocabulary.

A call of `generate` is cut into batches that fit the memory budget. In a batch every distinct
prompt runs through the model once, its keys and values are repeated for the rollouts of its group,
and all rows then advance together, one token at a time. Prompts of unequal length are padded on the
left; where all are equal no mask is made at all. Rows that have ended are cut out of the batch
whenever they are a quarter of it, so that in all they cost at most a constant factor.

New weights are installed between two tokens, by the thread that generates. On a CPU that computes
in the dtype that is published nothing is copied: the parameters are views of the version's image,
and what a patch changes of the image it changes of the model. Elsewhere the words that changed are
scattered into the parameters.
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
from echo.core.rollout import PolicyVersion
from echo.core.units import format_bytes
from echo.engine.engine import (
    NOBODY,
    UNVERSIONED,
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
from echo.engine.hf.batch import StaticBatch, draw_tokens
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
    """Jobs for the thread that holds it open; where no thread does, they are done at once."""

    def __init__(self) -> None:
        """Start closed."""
        self._owner = threading.Lock()
        self._lock = threading.Lock()
        self._is_open = False
        self._jobs: list[tuple[Job, Future[None]]] = []

    def do(self, job: Job) -> None:
        """Return when `job` has been done, by the thread that holds the mailbox open or this one.

        An exception of the job is raised here.
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
        """Promise to call `empty` again and again; one thread at a time, the others wait."""
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
        """Do what has come in; return whether there was anything."""
        if not self._jobs:
            return False
        with self._lock:
            self._do_all()
        return True

    def _do_all(self) -> None:
        for job, done in self._jobs:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 -- belongs to the thread that asked
                done.set_exception(error)
            else:
                done.set_result(None)
        self._jobs.clear()


SAMPLING_BYTES_PER_LOGIT = 32
"""Logits, their float32 copy, log-probabilities, probabilities and the float64 sum, with room."""


class TransformersEngine(Engine):
    """Sample from a Hugging Face causal language model on one device.

    Args:
        model_dir: directory with config.json; weights in it are not read.
        device: "cpu", "cuda" or another torch device.
        dtype: the dtype to compute in: "float32", "bfloat16" or "float16".
        rollout_bytes: memory for rollouts; it holds one in any case. None where no other estimate
            includes them: half of what is available now is for weights and rollouts then.
        is_beside: whether another thread computes on the same device meanwhile. On a GPU this goes
            on in a stream of its own then: in the other's, each token would wait for all that it
            has launched.
        attn_implementation: transformers' name of the attention; "auto" is sdpa where it can be.
        num_threads: CPU threads of one operation; 0 leaves torch's setting alone.
        kv_cache: what becomes of keys and values when weights are swapped in flight.
        lora: the adapter that `load` takes, and its base in place of `model_dir`; None where it
            takes all weights.
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
        """Whether the parameters are the memory of `_tensors`."""
        self.takes_patches = lora is None
        self._adapter: dict[str, Tensor] | None = None
        if lora is None:
            self._model = build_meta_model(model_dir, torch_dtype(dtype), attn_implementation)
        else:
            self._model, self._adapter = build_adapted(
                lora, torch_dtype(dtype), attn_implementation
            )
        self._model.to(self._device)
        self._forward_arguments = frozenset(inspect.signature(self._model.forward).parameters)
        head = self._model.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(_in_one_piece)
        self._stream: torch.cuda.Stream | None = None
        if is_beside and self._device.type == "cuda":
            # Its work is short, and goes first.
            self._stream = torch.cuda.Stream(self._device, priority=-1)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._least_rollouts = 0 if rollout_bytes is None else 1
        self._budget_bytes = (
            free_bytes(self._device) // 2
            if rollout_bytes is None
            else self._weight_bytes() + rollout_bytes
        )
        text_config = self._model.config.get_text_config()
        self._vocab_size = int(text_config.vocab_size)
        window = getattr(text_config, "max_position_embeddings", None)
        self.window = int(window) if window is not None else None
        self._kv_bytes_per_token = _kv_bytes_per_token(text_config, torch_dtype(dtype))

    @property
    def installed(self) -> PolicyVersion | None:
        return self._installed.installed

    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion = UNVERSIONED) -> None:
        """Copy weights in, between two tokens; a tied tensor is wanted once, under any name.

        Where that fails half way, what was overwritten is taken from the version before again,
        which is why the engine holds on to what it was given.
        """
        check_weights(self._loadable(), tensors)
        with self._installed.swap(version), self._in_stream():
            self._mailbox.do(lambda: self._install(tensors, version))

    def _in_stream(self) -> AbstractContextManager[object]:
        """Have a GPU do what the body launches beside others, if it is to."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _loadable(self) -> Mapping[str, Tensor]:
        return self._model.state_dict() if self._adapter is None else self._adapter

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
        """Copy the version before in again, every bit of it."""
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
                "them; check this machine's memory, and start the worker anew"
            ) from error

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors as the model's own where it computes in them as they are, or copy."""
        if self._adapter is not None:
            for name, tensor in tensors.items():
                self._adapter[name].copy_(tensor)
            return
        model, was_view = self._model, self._is_view
        places = dict(model.named_buffers()) | dict(model.named_parameters(remove_duplicate=False))
        self._is_view = all(
            (tensor.dtype, tensor.device) == (places[name].dtype, places[name].device)
            for name, tensor in tensors.items()
        )
        for name, tensor in tensors.items():
            if self._is_view:
                places[name].data = tensor
                continue
            if was_view:  # never written to: it is the caller's
                places[name].data = torch.empty_like(places[name])
            places[name].copy_(tensor)

    def patch(self, patch: Patch, image: memoryview, specs: Sequence[TensorSpec]) -> None:
        """Write what changed; between two tokens what is sampled from, and not the image if not."""
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
        """Have image and parameters as they were before the patch if the body fails."""
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
        watcher: Watcher = NOBODY,
        *,
        version: PolicyVersion | None = None,
    ) -> list[Completion]:
        """Sample a completion for each request; see `Engine.generate`.

        A completion also ends with "length" where the model's window does.
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
        # Each thread has its own setting, and this may not be the one that built the engine.
        set_num_threads(self._num_threads)
        max_tokens = sampling.max_completion_tokens
        self.max_concurrent_rollouts(max(len(r.prompt_ids) for r in requests), max_tokens)
        # Beside a row that has nothing yet, what is to be continued is padded; alone it is not.
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
        """Run a batch; where memory does not hold it, run the rest in ever smaller ones."""
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
            except (RuntimeError, MemoryError) as error:  # PyTorch's own is a RuntimeError
                if not is_out_of_memory(error):
                    raise
                failure = describe_error(error)
            if failure:  # outside of the handler, which keeps all tensors of the batch alive
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()
                longest = int(batch.lengths.max())
                numbers = self._numbers(longest, batch.max_tokens)
                self._concurrency.halve(batch.num_rows, why=failure, numbers=numbers)
                waiting.append(batch)

    def _numbers(self, prompt_tokens: int, completion_tokens: int) -> str:
        """Say what a rollout needs and what there is."""
        weights, one = self._needs(prompt_tokens, completion_tokens)
        return (
            f"the weights take {format_bytes(weights)}, one rollout of {prompt_tokens} + "
            f"{completion_tokens} tokens at least {format_bytes(one)}, the budget is "
            f"{format_bytes(self._budget_bytes)}, free are "
            f"{format_bytes(free_bytes(self._device))}"
        )

    def _needs(self, prompt_tokens: int, completion_tokens: int) -> tuple[int, int]:
        """Return the bytes of the weights and of one rollout."""
        one = (
            self._kv_bytes_per_token * (prompt_tokens + completion_tokens)
            + SAMPLING_BYTES_PER_LOGIT * self._vocab_size
        )
        return self._weight_bytes(), one

    def _weight_bytes(self) -> int:
        return weight_bytes(self._model.state_dict())

    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Divide what the weights leave of the memory budget by the need of one rollout."""
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
        """Return how many rollouts of this size memory holds at once; it may hold none."""
        weights, one = self._needs(prompt_tokens, completion_tokens)
        number = max(self._least_rollouts, (self._budget_bytes - weights) // one)
        return self._concurrency.bounded(int(number))

    def take_counts(self) -> dict[str, int]:
        """Return how often memory ran out since this was last asked."""
        return self._concurrency.take_counts()

    def close(self) -> None:
        """Drop the model."""
        self._installed.close()
        self._tensors = None
        self._model.to("meta")

    @torch.inference_mode()
    def _run(self, batch: StaticBatch, watcher: Watcher) -> None:
        """Advance a batch token by token until every row has ended or the watcher stops it."""
        if watcher.should_stop():
            return
        logits, cache = self._begin(batch, watcher)
        mask = batch.final_mask()  # each step shows the model one more column of it
        mask = mask.to(self._device) if mask is not None else None
        for step in range(batch.num_tokens, batch.max_tokens):
            tokens, logprobs = draw_tokens(logits, batch.sampling, batch.uniforms(step))
            new = tokens.cpu().numpy(), logprobs.cpu().numpy()
            watcher.on_tokens(batch.num_running)
            for row in batch.append(step, *new, self._version):
                watcher.on_completion(batch.completion(row))
            if batch.is_done or watcher.should_stop():
                return
            has_swapped = self._mailbox.empty()
            if self.installed is None:
                raise EngineError(
                    "the weights are gone: a swap failed half way, or the engine was closed; start "
                    "the worker anew"
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
        """Run all that the rows of a batch hold through the model.

        It may take a minute on a busy CPU, and no token comes before its end. So each layer is a
        sign of life: without any the leases would expire.

        Returns:
            The logits [B, V] of each row's next token, and the keys and values before it.
        """
        with self._telling_layers(watcher):
            return self._read(batch)

    @contextmanager
    def _telling_layers(self, watcher: Watcher) -> Iterator[None]:
        """Note a sign of life with each layer that has been run."""
        lists = [each for each in self._model.modules() if isinstance(each, torch.nn.ModuleList)]
        layers = max(lists, key=len, default=())
        hooks = [layer.register_forward_hook(lambda *_: watcher.on_progress(1)) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _read(self, batch: StaticBatch) -> tuple[Tensor, DynamicCache]:
        cache = DynamicCache(config=self._model.config)
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
        """Run the model over new tokens and return the logits [B, V] of the last of each row."""
        # transformers 5.24 renames it, and warns of the old name.
        cache_name = "cache" if "cache" in self._forward_arguments else "past_key_values"
        arguments: dict[str, Any] = {
            "input_ids": ids.to(self._device),
            cache_name: cache,
            "use_cache": True,
        }
        if mask is not None:
            arguments["attention_mask"] = mask.to(self._device)
        # Models with relative positions take no ids; older ones compute all logits.
        if "position_ids" in self._forward_arguments:
            arguments["position_ids"] = positions.to(self._device)
        if "logits_to_keep" in self._forward_arguments:
            arguments["logits_to_keep"] = 1
        logits: Tensor = self._model(**arguments).logits[:, -1]
        return logits


def _positions(mask: Tensor | None, shape: torch.Size) -> Tensor:
    """Return position ids [U, L]: 0 at the first real token of each row."""
    if mask is None:
        return torch.arange(shape[1]).expand(shape)
    return (mask.cumsum(-1) - 1).clamp_(min=0)


def _in_one_piece(head: torch.nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make the head's input contiguous: transformers cuts it out of the states of all tokens.

    torch multiplies the rows of a slice one by one, and in 16 bits on a CPU it copies the head's
    whole weight for each of them.
    """
    return tuple(part.contiguous() for part in states)


def _keep_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Have a cache hold these of its rows, [B] indices; a row may come several times.

    As a beam search does it: the other way of transformers leaves out the states of convolutions
    and of linear attention.
    """
    cache.reorder_cache(rows)  # type: ignore[arg-type]  # it says LongTensor, and means int64


def _kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token, with one layer counted twice.

    While a layer's cache grows by a token, old and new copy exist side by side.
    """
    widths = []
    for layer in layer_configs(config):
        num_heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        widths.append(num_heads * sum(head_widths(layer)))
    return int((sum(widths) + max(widths)) * dtype.itemsize)
