"""Draw tokens from logits, reproducibly for each row.

Shapes: B rows, V vocabulary.

Each draw consumes one uniform number that depends on nothing but the row's seed and the token's
position, and inverts the cumulative distribution at it. So a request's choices do not depend on its
batch-mates, and a vocabulary of 150,000 costs no more random numbers than one of 32. What remains
is floating point: a matrix product may round differently in a batch of another size, which moves
probabilities by some 1e-7 and so changes a choice about once in a million tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.engine.engine import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform_at(seeds: npt.NDArray[np.uint64], step: int) -> npt.NDArray[np.float64]:
    """Return one uniform number in [0, 1) for each seed, at position `step` of its stream.

    SplitMix64 (Steele, Lea and Flood, 2014) as a counter-based generator. The seeds are mixed
    first, so that neighbouring seeds do not share a stream shifted by a step.

    Args:
        seeds: [B].
        step: at least 0.

    Returns:
        [B], multiples of 2**-52.
    """
    offset = np.uint64((step + 1) * int(_GOLDEN) & 0xFFFFFFFFFFFFFFFF)
    bits = _mix(_mix(seeds + _GOLDEN) + offset)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sampling_logprobs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probabilities of the distribution that `sampling` draws from.

    Temperature first, then top_k, then top_p, renormalised at the end; when greedy, the plain
    softmax. Tokens that tie with the last one kept by top_k are kept too.

    Args:
        logits: [B, V] float32.
        sampling: how tokens are drawn.

    Returns:
        [B, V] float32, -inf where a token cannot be drawn.
    """
    if sampling.greedy:
        return logits.log_softmax(-1)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        beyond = before >= sampling.top_p
        beyond[:, 0] = False  # the most likely token always stays, whatever rounding says
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits.log_softmax(-1)


def draw_tokens(
    logits: Tensor, sampling: Sampling, uniforms: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits: [B, V] in any floating-point dtype.
        sampling: how.
        uniforms: [B] in [0, 1); not used when greedy.

    Returns:
        Token ids [B] int64 and their log-probabilities [B] float32.
    """
    logprobs = sampling_logprobs(logits.float(), sampling)
    if sampling.greedy:
        token_ids = logprobs.argmax(-1, keepdim=True)
    else:
        # In float64, so that the sum over a large vocabulary rounds away no small probability.
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        target = torch.from_numpy(uniforms).to(logits.device)[:, None] * cumulative[:, -1:]
        # "right" never lands on a token of probability 0: its sum equals the one before it.
        token_ids = torch.searchsorted(cumulative, target, right=True)
        token_ids.clamp_(max=logits.shape[-1] - 1)  # reached by NaN only; the caller refuses it
    return token_ids[:, 0], logprobs.gather(-1, token_ids)[:, 0]


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
