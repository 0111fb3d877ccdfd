"""Calls of outside agents as tokens: what was sampled before goes in again as it was sampled.

An agent sends text. Tokenising that anew could give other tokens than were sampled ("12" sampled
as "1", "2"), so the learner would train on a context that the sampler never saw. Where the text of
a call begins with what an earlier one saw and sampled, its tokens are taken, and only the rest is
encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from echo.core.errors import DataError
from echo.tasks.tokenization import decode, render_messages

Ids = npt.NDArray[np.int32]


class Known(Protocol):
    """An earlier call."""

    @property
    def text(self) -> str:
        """Context as it was sent or rendered, then the completion with its special tokens."""

    @property
    def ids(self) -> Ids:
        """The same as tokens."""


KnownT = TypeVar("KnownT", bound=Known)


class Dialogue:
    """Text to tokens and back, for one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_ids: Iterable[int],
        chat_template_kwargs: Mapping[str, Any],
    ) -> None:
        """Take transformers' tokenizer, what ends a completion, and the template's arguments."""
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._chat_template_kwargs = chat_template_kwargs

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return messages as text, with the opening of the assistant's turn.

        Args:
            messages: OpenAI's.
            tools: those that may be called, likewise.

        Raises:
            DataError: if there is no chat template, it knows no tools, or it fails.
        """
        kwargs = dict(self._chat_template_kwargs)
        if tools:
            if "tools" not in str(self._tokenizer.chat_template):
                raise DataError(
                    "the model's chat template knows no tools; describe them in a message, or set "
                    "model.chat_template to one that does"
                )
            kwargs["tools"] = [dict(tool) for tool in tools]
        return render_messages(self._tokenizer, messages, kwargs)

    def continue_text(
        self, text: str, known: Sequence[KnownT], *, is_rendered: bool
    ) -> tuple[Ids, KnownT | None]:
        """Return the tokens of a text, and the earlier call that it goes on from.

        Args:
            text: the whole context.
            known: earlier calls.
            is_rendered: whether a template wrote it, special tokens included.
        """
        begun = [call for call in known if text.startswith(call.text)]
        if not begun:
            ids = self._tokenizer(text, add_special_tokens=not is_rendered)["input_ids"]
            return np.array(ids, np.int32), None
        call = max(begun, key=lambda call: len(call.text))
        rest = text[len(call.text) :]
        more = self._tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else []
        return np.concatenate([call.ids, np.array(more, np.int32)]), call

    def continue_ids(
        self, ids: Sequence[int], known: Sequence[KnownT]
    ) -> tuple[Ids, KnownT | None]:
        """Return tokens as they are, and the earlier call that they go on from."""
        context = np.array(ids, np.int32)
        begun = [
            call
            for call in known
            if len(call.ids) <= len(context) and (call.ids == context[: len(call.ids)]).all()
        ]
        return context, max(begun, key=lambda call: len(call.ids), default=None)

    def text_of(self, ids: Iterable[int]) -> str:
        """Return tokens as text, special tokens included."""
        return decode(self._tokenizer, ids, ())

    def answer_of(self, ids: Iterable[int]) -> str:
        """Return a completion as text, without the token that ended it."""
        return decode(self._tokenizer, ids, self._stop_ids)
