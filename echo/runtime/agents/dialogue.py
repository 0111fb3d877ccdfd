"""Tokenize agents' calls, and keep sampled tokens as they were sampled.

An agent sends its whole context as text. Encoding this text again could give different tokens. For
example, "12" may have been sampled as "1", "2". The learner would then train on a context that the
sampler never had. So if the text begins with an earlier call's context and completion, that call's
tokens are used. Only the rest of the text is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from echo.core.errors import DataError
from echo.runtime.agents.turns import Ids, Turn
from echo.tasks.tokenization import MARK, TextCodec, unmarked


class Dialogue:
    """Converts the text of calls to tokens and back, for one model."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokenizer: Any = codec.tokenizer

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Render messages by the chat template, and return the text; see `TextCodec.render`.

        Raises:
            DataError: if there is no chat template, if the template does not support tools, or if
                the template fails.
        """
        if tools and "tools" not in str(self._tokenizer.chat_template):
            raise DataError(
                "the model's chat template knows no tools; describe them in a message, or set "
                "model.chat_template to one that does"
            )
        return self._codec.render(messages, tools)

    def other_arguments(self, arguments: Mapping[str, Any]) -> str:
        """Return the name of an argument whose value differs from the run's setting, or "".

        `arguments` are the arguments for the chat template in an agent's call. If several differ,
        the result is the first.
        """
        own = self._codec.chat_template_kwargs
        return next((name for name, value in arguments.items() if own.get(name) != value), "")

    def continue_text(
        self, text: str, known: Sequence[Turn], *, is_rendered: bool
    ) -> tuple[Ids, Turn | None]:
        """Return a text's tokens, and the earlier call that the text continues, or None.

        Args:
            text: the whole context.
            known: earlier calls of the session.
            is_rendered: whether a chat template wrote the text. If so, the text already has its
                special tokens, and the tokenizer adds none.

        Raises:
            DataError: if the text has no tokens, or has tokens outside the model's vocabulary.
        """
        whole = unmarked(text)
        # An agent that was not shown a stop string may send it, as its own text, or not.
        begun = [
            (text, call)
            for call in known
            for text in {call.text, call.shown_text}
            if whole.startswith(text)
        ]
        if not begun:
            encode = self._codec.encode_rendered if is_rendered else self._codec.encode_raw
            ids = encode(text)
            if not ids:
                raise DataError("the prompt has no tokens; a prompt needs at least one")
            return np.array(ids, np.int32), None
        beginning, call = max(begun, key=lambda found: len(found[0]))
        more = self._codec.encode_rendered(_after(text, len(beginning)))
        return np.concatenate([call.ids, np.array(more, np.int32)]), call

    def continue_ids(self, ids: Sequence[int], known: Sequence[Turn]) -> tuple[Ids, Turn | None]:
        """Return token ids as an array, and the earlier call that the ids continue, or None.

        Raises:
            DataError: if a token is outside the model's vocabulary.
        """
        context = np.array(self._codec.known(ids), np.int32)
        begun = [
            call
            for call in known
            if len(call.ids) <= len(context) and (call.ids == context[: len(call.ids)]).all()
        ]
        return context, max(begun, key=lambda call: len(call.ids), default=None)

    def text_of(self, ids: Iterable[int]) -> str:
        """Return tokens as text, including special tokens."""
        return self._codec.decode_all(ids)

    def answer_of(self, ids: Iterable[int]) -> str:
        """Return the tokens of a completion as text, without the stop token."""
        return self._codec.decode(ids)


def _after(text: str, length: int) -> str:
    """Return `text` without its first `length` characters.

    `render` inserts the character `MARK` into control tokens in messages. A `MARK` is not counted.
    """
    end = length
    while (num_marks := text.count(MARK, 0, end)) != end - length:
        end = length + num_marks
    return text[end:]
