"""The kernel for the attention of packed rows. It is chosen once, when a model is loaded.

    PRODUCTS   scaled dot products of each run of equal segments, on a CPU or in float32
    FA3, FA4   FlashAttention 3 or 4 under torch's varlen operator, if its package is installed
    DENSE      cuDNN's dense products for long segments, the varlen operator for the others
    VARLEN     torch's varlen operator, which is FlashAttention 2

A packed row has several segments, which must not attend to each other. On a GPU that computes in 16
bits, `choose_kernel` tries the fastest kernel first. A trial computes two segments in one row, and
each segment alone, with the head sizes and the window of the model's own layers. Values and
gradients must be equal. If a kernel fails, a notice is logged and the next kernel is tried. All
ranks use the same kernel, because the plan of micro-batches depends on the kernel (rows.py). So a
kernel that fails on one rank is used on no rank.

cuDNN is faster than FlashAttention 2 only for long segments on GPUs of capability 9. cuDNN makes
and keeps a plan for each length. A plan takes up to hundreds of milliseconds. So segments of
LONG_TOKENS and more are copied into contiguous tensors. Their lengths are rounded up to multiples
of PLAN_TOKENS, so few plans are needed. For shorter segments, cuDNN saves less time than its
launches cost. torch's operator that passes cumulative lengths to cuDNN is not used, because it
makes a plan in every call.

FlashAttention 3 and 4 replace the flash kernels of the whole process, including evaluations.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from echo.algo.row_sizes import LONG_TOKENS, PLAN_TOKENS
from echo.train.ranks.sharding import ALONE, Ranks

MAX_DENSE_WIDTH = 128
"""Largest width of an attention head that cuDNN's dense products support."""

TRIED_LENGTHS = (300, 170)
"""Lengths of the two segments in a trial, in tokens."""
MAX_ERROR = 0.03
"""Largest relative error of values and gradients in a trial. Rounding to 16 bits causes an error of
about .005.
"""

FA3_MODULE = "flash_attn_interface"
FA4_MODULES = ("flash_attn.cute.interface", "vllm.vllm_flash_attn.cute.interface")
"""Modules that may contain FlashAttention 4: in its own package, and in vLLM's wheel for CUDA."""
FA4_ADAPTER = "echo.train.models.flash_attention_4"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel for the attention of packed rows."""

    name: str
    """Name of the kernel in messages."""
    is_varlen: bool = True
    """Whether the kernel is torch's varlen operator, which takes cumulative lengths."""
    implementation: str | None = None
    """torch's name of the implementation to activate; None for torch's default implementation."""
    long_from: int | None = None
    """Smallest number of tokens of a segment that dense products compute; None if dense products
    compute no segment.
    """
    slowdown: float = 1.0
    """How many times as long attention takes in packed rows without dense products as in padded
    rows.
    """


PRODUCTS = Kernel(name="scaled dot products", is_varlen=False)
VARLEN = Kernel(name="FlashAttention 2")
FA3 = Kernel(name="FlashAttention 3", implementation="FA3")
FA4 = Kernel(name="FlashAttention 4", implementation="FA4")
DENSE = Kernel(
    name=f"cuDNN for segments of {LONG_TOKENS} tokens and more, FlashAttention 2 for others",
    long_from=LONG_TOKENS,
    slowdown=1.8,  # 16 segments of 1 024 tokens on an H200
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Sizes of the attention of one layer of a model."""

    num_heads: int
    num_key_heads: int
    width: int
    """Width of a query and of a key."""
    value_width: int
    window: int | None = None
    """Largest number of tokens that a token attends to, including itself; None for no limit."""

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> LayerShape:
        """Return a layer's sizes from query, key and value, each [1, heads, tokens, width]."""
        return LayerShape(
            num_heads=query.shape[1],
            num_key_heads=key.shape[1],
            width=query.shape[3],
            value_width=value.shape[3],
            window=window,
        )


def is_dense(width: int, value_width: int, window: int | None) -> bool:
    """Return whether cuDNN's dense products can compute the long segments of a layer.

    `window` is the layer's `LayerShape.window`.
    """
    return window is None and all(n <= MAX_DENSE_WIDTH and n % 8 == 0 for n in (width, value_width))


@dataclass(slots=True, kw_only=True, eq=False)
class LongSegments:
    """Long segments at the start of a packed row, and the arguments for all other segments.

    A compiled layer has no guards on these fields, so its graph does not depend on the lengths.
    """

    lengths: tuple[int, ...]
    """Number of tokens of each long segment."""
    others: tuple[Tensor, Tensor, int, int] | None
    """The arguments `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` of
    `packed_attention` for all other segments; None if all segments are long.
    """
    keys: Tensor | None
    """[K] int64: for all other segments, the places of their keys in the row. None if no prompt is
    shared.
    """


# --- choice ---------------------------------------------------------------------------------------


def plain_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return the default kernel: VARLEN on a GPU in 16 bits, PRODUCTS elsewhere."""
    return VARLEN if device.type == "cuda" and dtype.itemsize < 4 else PRODUCTS


def candidates(device: torch.device | str, dtype: torch.dtype) -> list[Kernel]:
    """Return the kernels that the device and the installed packages allow, the fastest first.

    The function imports no package and does not use the device.
    """
    plain = plain_kernel(torch.device(device), dtype)
    if plain is PRODUCTS:
        return [plain]
    major, _ = torch.cuda.get_device_capability(device)
    found = []
    if major == 9 and is_installed(FA3_MODULE):
        found.append(FA3)
    if major in (9, 10) and any(map(is_installed, FA4_MODULES)):
        found.append(FA4)
    return [*found, *([DENSE] if major == 9 else []), plain]


def is_installed(module: str) -> bool:
    """Return whether a module is installed, without importing the module."""
    top, *path = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not path:
        return spec is not None
    places = [Path(place).joinpath(*path) for place in spec.submodule_search_locations or ()]
    return any(place.with_suffix(".py").exists() for place in places)


@cache
def choose_kernel(
    device: torch.device, dtype: torch.dtype, shapes: frozenset[LayerShape], ranks: Ranks = ALONE
) -> Kernel:
    """Activate and return the fastest kernel that is correct for these layers on all ranks.

    Args:
        device: the device that computes.
        dtype: the type of products.
        shapes: sizes of the attention of the model's layers.
        ranks: the ranks that train the model. All ranks call this function together.
    """
    own = candidates(device, dtype)
    names = ranks.gather("\n".join(kernel.name for kernel in own).encode())
    *tried, plain = [
        kernel for kernel in own if all(kernel.name in each.decode().split("\n") for each in names)
    ]
    for kernel in tried:
        fault = ranks.first_fault(find_kernel_fault(kernel, device, dtype, shapes))
        if fault is None:
            return kernel
        deactivate(kernel)  # it may have failed on another rank only
        _log.warning("attention by %s was tried and is not used: %s", kernel.name, fault)
    return plain


def find_kernel_fault(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, shapes: Iterable[LayerShape]
) -> str | None:
    """Activate and try a kernel; return the reason if the kernel fails, else None.

    A failing kernel is deactivated again.
    """
    try:
        activate(kernel)
        for shape in shapes:
            if kernel.long_from is None or is_dense(shape.width, shape.value_width, shape.window):
                _try(kernel, device, dtype, shape)
    except Exception as error:  # noqa: BLE001 -- a package that compiles kernels may raise anything
        deactivate(kernel)
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


def activate(kernel: Kernel) -> None:
    """Switch torch's varlen operator to the kernel's `implementation`, if the kernel names one."""
    if kernel.implementation == "FA4":
        # Imported here: torch may remove this prototype module.
        from torch.nn.attention import _fa4

        register = partial(_fa4.register_flash_attention_fa4, FA4_ADAPTER)
        torch_attention.register_flash_attention_impl("FA4", register_fn=register)
    if kernel.implementation is not None:
        torch_attention.activate_flash_attention_impl(kernel.implementation)


def deactivate(kernel: Kernel) -> None:
    """Switch torch's varlen operator back to FlashAttention 2."""
    if kernel.implementation is not None:
        torch_attention.restore_flash_attention_impl()


def import_fa4() -> ModuleType:
    """Import and return FlashAttention 4 from its own package, otherwise from vLLM's package.

    Raises:
        ImportError: if neither package is installed.
    """
    for name in filter(is_installed, FA4_MODULES):
        return importlib.import_module(name)
    raise ImportError(f"none of {', '.join(FA4_MODULES)} is installed")


def _try(kernel: Kernel, device: torch.device, dtype: torch.dtype, shape: LayerShape) -> None:
    """Check that two segments in one row get the same values as each segment alone.

    Raises:
        RuntimeError: if values or gradients differ, or dense products are not computed by cuDNN.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = (
        (shape.num_heads, shape.width),
        (shape.num_key_heads, shape.width),
        (shape.num_key_heads, shape.value_width),
    )
    exact = [
        torch.randn(1, heads, sum(TRIED_LENGTHS), width, generator=generator).to(dtype)
        for heads, width in sizes
    ]
    given = [x.to(device).requires_grad_() for x in exact]
    exact = [x.to(device, torch.float32).requires_grad_() for x in exact]
    window = None if shape.window is None else min(shape.window, TRIED_LENGTHS[1] // 2)
    query, key, value = given
    if kernel.long_from is None:
        ends = torch.tensor([0, TRIED_LENGTHS[0], sum(TRIED_LENGTHS)], dtype=torch.int32)
        segments = ends.to(device), ends.to(device), max(TRIED_LENGTHS), max(TRIED_LENGTHS)
        found = attend_varlen(query, key, value, segments, None, None, window)
    else:
        _check_cudnn(query, key, value)
        long = LongSegments(lengths=TRIED_LENGTHS, others=None, keys=None)
        found = attend_long(query, key, value, long, None)
    alone = zip(*(x.split(TRIED_LENGTHS, 2) for x in exact), strict=True)
    expected = torch.cat([attend_alone(q, k, v, None, window) for q, k, v in alone], 1)
    weights = torch.randn(expected.shape, generator=generator).to(device)
    pairs = zip(
        (found.detach(), *torch.autograd.grad((found.float() * weights).sum(), given)),
        (expected.detach(), *torch.autograd.grad((expected * weights).sum(), exact)),
        strict=True,
    )
    error = max(float((one.float() - other).norm() / other.norm()) for one, other in pairs)
    if not error < MAX_ERROR:
        raise RuntimeError(f"its values or gradients are wrong by {error:.0%}")


def _check_cudnn(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.is_cuda:
        is_grouped = query.shape[1] != key.shape[1]
        choice = torch._fused_sdp_choice(  # noqa: SLF001 -- no public function tells it
            query, key, value, is_causal=True, enable_gqa=is_grouped
        )
        if choice != SDPBackend.CUDNN_ATTENTION.value:
            raise RuntimeError(f"torch takes {SDPBackend(choice).name} for dense products")


# --- attention ------------------------------------------------------------------------------------


Masks = dict[tuple[int, int, int | None], Tensor]
"""Masks of a row by (number of queries, number of keys, window), shared by all layers."""


def attend_alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    masks: Masks | None = None,
) -> Tensor:
    """Return the attention within n segments of equal length, as [n, length, H, Dv].

    The queries are [n, H, length, D]: H heads of width D. If a segment has more keys than queries,
    the queries belong to the last keys. If `masks` lacks the mask for these lengths, the function
    adds the mask.
    """
    dtype = query.dtype
    if query.device.type == "cpu" and dtype.itemsize < 4:
        # In 16 bits a CPU would compile and keep code for each new length, and would be slower.
        query, key, value = query.float(), key.float(), value.float()
    length, num_keys, mask = query.shape[2], key.shape[2], None
    if num_keys > length or (window is not None and length > window):
        masks = {} if masks is None else masks
        wanted = length, num_keys, window
        if wanted not in masks:
            masks[wanted] = _mask(query, *wanted)
        mask = masks[wanted]
    attended = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)


def _mask(query: Tensor, length: int, num_keys: int, window: int | None) -> Tensor:
    """Return the mask to add to scores, [length, num_keys]: 0 for seen keys, otherwise -inf."""
    age = torch.arange(num_keys - length, num_keys, device=query.device)[:, None]
    age = age - torch.arange(num_keys, device=query.device)
    is_seen = (age >= 0) & (age < (num_keys if window is None else window))
    return query.new_zeros(length, num_keys).masked_fill_(~is_seen, -torch.inf)


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[Tensor | None, Tensor | None, int | None, int | None],
    segment_keys: Tensor | None,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute, by the varlen operator, the attention within a row's segments, [1, L, H, Dv].

    Args:
        query: [1, H, L, D], L queries with H heads of width D.
        key: [1, Hkv, K, D], K keys with Hkv heads.
        value: [1, Hkv, K, Dv], with values of width Dv.
        segments: the arguments `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`
            of `packed_attention`, in this order.
        segment_keys: places of the segments' keys in `key`; None if the segments' keys are exactly
            `key`, in order.
        scaling: factor of the scores; None for 1 / sqrt(D).
        window: largest number of tokens that a token attends to, including itself; None for no
            limit.
    """
    # Under autocast, norms and rotation return query and key in float32; the kernel takes one type.
    query, key = query.to(value.dtype), key.to(value.dtype)
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if segment_keys is not None:
        keys, values = keys.index_select(0, segment_keys), values.index_select(0, segment_keys)
    # If there are more keys than queries, the kernel aligns the queries with the last keys.
    attended = varlen_attn(
        query[0].transpose(0, 1),
        keys,
        values,
        *segments,  # type: ignore[arg-type]
        scale=scaling,
        # Numbers of tokens before and after; transformers' window counts the token itself as well.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor), "nothing else was asked for"
    return attended[None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_long(
    query: Tensor, key: Tensor, value: Tensor, long: LongSegments, scaling: float | None
) -> Tensor:
    """Return the attention within the segments of a row, [1, L, H, Dv].

    Dense products compute each of the long segments at the start of the row. The varlen operator
    computes all other segments together. This function is not compiled, because each new set of
    lengths would need a new graph.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    parts = list(_attend_each(query, key, value, long.lengths, scaling))
    if long.others is not None:
        start = sum(long.lengths)
        if long.keys is None:
            key, value = key[:, :, start:], value[:, :, start:]
        others = query[:, :, start:], key, value
        parts.append(attend_varlen(*others, long.others, long.keys, scaling, None))
    return torch.cat(parts, 1)


def _attend_each(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float | None
) -> Iterator[Tensor]:
    """Yield the attention within each segment at the start of a row, [1, length, H, Dv].

    Each segment is copied, because cuDNN keeps plans by sizes and strides, and a view would have
    the strides of the row.
    """
    start = 0
    for length in lengths:
        more = -length % PLAN_TOKENS
        q, k, v = (
            pad(x[:, :, start : start + length], (0, 0, 0, more)).contiguous()
            for x in (query, key, value)
        )
        attended = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        yield attended[:, :, :length].transpose(1, 2)
        start += length
