"""Stop strings in vLLM's front end.

vLLM looks for stop strings while it turns tokens into text, but Echo runs vLLM without a tokenizer.
So Echo's own search replaces vLLM's. `announce_search` stores the stop strings of a request.
`search_stop_strings` makes vLLM's front end in this process use Echo's search for all requests with
stored stop strings. vLLM then ends such a request itself, after the token that completes a stop
string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from echo.engine.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class StopSearch:
    """The stop strings of one request, and the place where the search begins."""

    stop: StopStrings
    before: tuple[int, ...]
    """Tokens of the turn from earlier requests. Only the last `StopStrings.num_tokens` are needed.
    """
    num_barred: int
    """Number of tokens of this request after which the search begins."""


_ANNOUNCED: dict[str, StopSearch] = {}
"""Searches of requests that vLLM has not yet accepted, by id."""


def announce_search(request_id: str, search: StopSearch) -> None:
    """Have vLLM search the completion of a request for stop strings.

    The call must come before the request is submitted.
    """
    _ANNOUNCED[request_id] = search


def forget_search(request_id: str) -> None:
    """Remove the search of a request that vLLM may never have accepted."""
    _ANNOUNCED.pop(request_id, None)


class StopDetokenizer(IncrementalDetokenizer):
    """Keeps the tokens of a request, and ends the request after a stop string."""

    def __init__(self, search: StopSearch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._search = search

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Add tokens. Return a stop string if a token completes any stop string, else None."""
        search = self._search
        for token in new_token_ids:
            self.token_ids.append(token)
            if stop_terminated or len(self.token_ids) <= search.num_barred:
                continue
            sampled: Sequence[int] = self.token_ids[-search.stop.num_tokens :]
            if search.stop.are_complete([*search.before, *sampled]):
                return search.stop.texts[0]
        return None


def search_stop_strings() -> None:
    """Replace a method of vLLM, so that vLLM searches announced requests for stop strings.

    This changes vLLM's front end in the present process.
    """
    IncrementalDetokenizer.from_new_request = _create  # type: ignore[method-assign]


def _create(tokenizer: Any, request: EngineCoreRequest) -> IncrementalDetokenizer:
    search = _ANNOUNCED.pop(request.external_req_id or request.request_id, None)
    if search is not None:
        return StopDetokenizer(search)
    return IncrementalDetokenizer()  # type: ignore[no-untyped-call]
