"""The support of each token, read from vLLM's log-probabilities.

With `logprobs_mode="processed_logprobs"` vLLM returns the K most likely ids of each token after
temperature, min_p, top_k and top_p. An id that could not be drawn has -inf. So if fewer than K ids
have a finite log-probability, these ids are the support. vLLM's own `return_sampling_mask` returns
the supports directly. But that option works only on GPUs, requires top_k in each request, and
refuses the greedy requests of evaluations.

vLLM would keep an object for each of the K log-probabilities until the request ends.
`collect_supports` makes vLLM keep only the ids of the supports.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
from vllm.logprobs import FlatLogprobs, SampleLogprobs
from vllm.v1.engine import logprobs as engine_logprobs

from echo.core.token_sets import NOT_RECORDED, TOO_LARGE, TokenSets


class SupportLogprobs(FlatLogprobs):
    """The log-probability and the support of each sampled token."""

    def __init__(self) -> None:
        super().__init__()
        self.supports: list[npt.NDArray[np.int32] | None] = []
        """For each token, the ids that could have been drawn; None if all ids in the token's row
        could have been drawn.
        """

    def append_fast(
        self,
        token_ids: list[int],
        logprobs: list[float],
        ranks: chain[int],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add a token's ids: the sampled id, then the likely ids, most likely first."""
        end = bisect_left(logprobs, True, lo=1, key=lambda logprob: logprob == -math.inf)
        is_whole = end == len(token_ids)
        self.supports.append(None if is_whole else np.array(sorted(token_ids[1:end]), np.int32))
        super().append_fast(token_ids[:1], logprobs[:1], ranks, decoded_tokens)


def collect_supports() -> None:
    """Replace a function of vLLM, so that vLLM collects supports if `flat_logprobs` is set.

    This changes vLLM's front end in the present process.
    """
    engine_logprobs.create_sample_logprobs = _create  # type: ignore[attr-defined]


def _create(flat_logprobs: bool) -> SampleLogprobs:
    return SupportLogprobs() if flat_logprobs else []


def supports_of(found: Sequence[npt.NDArray[np.int32] | None], *, is_every_id: bool) -> TokenSets:
    """Return the supports of a request's tokens from the collected ids.

    Args:
        found: `SupportLogprobs.supports` of the request.
        is_every_id: whether the log-probabilities of the whole vocabulary were requested.
    """
    whole = NOT_RECORDED if is_every_id else TOO_LARGE
    return TokenSets(
        sizes=np.array([whole if ids is None else len(ids) for ids in found], np.int32),
        ids=np.concatenate(
            [np.empty(0, np.int32), *(ids for ids in found if ids is not None)], dtype=np.int32
        ),
    )
