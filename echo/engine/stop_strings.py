"""Stop strings: texts that end a completion, in any tokenization.

A stop string may end in the middle of a token, and it has many tokenizations. So the engine looks
for stop strings in decoded text. After each token that can end a stop string, the engine decodes
the last few tokens. The tokens of a found stop string stay in the completion as they were sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from echo.tasks.tokenization import UNKNOWN


@dataclass(frozen=True, slots=True)
class StopStrings:
    """The stop strings of a call of the engine: at least one stop string."""

    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str] = field(compare=False)
    """Function: token ids -> text, special tokens included."""
    _may_end: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)
    """Token id -> whether a stop string can end with this token."""

    @property
    def num_tokens(self) -> int:
        """Number of last tokens that `are_complete` needs.

        Each token has at least one byte, so a stop string has at most as many tokens as bytes. One
        more token is needed, since decoders treat the first token of a text differently.
        """
        return 1 + max(len(text.encode()) for text in self.texts)

    def are_complete(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string.

        Args:
            token_ids: the tokens of the completion so far, at least the last `num_tokens` of them.
        """
        if not self._can_end(token_ids[-1]):
            return False
        tail = token_ids[-self.num_tokens :]
        text, before = self.decode(tail), self.decode(tail[:-1])
        return any(text.count(stop) > before.count(stop) for stop in self.texts)

    def begin(self, token_ids: Sequence[int]) -> int | None:
        """Return the position, in characters, of the stop string that the last token completes.

        The token may complete several stop strings. For example, a token of two line ends completes
        a stop string of one line end twice. The position is then that of the first stop string. If
        the token completes no stop string, return None.
        """
        text, before = self.decode(token_ids), self.decode(token_ids[:-1])
        begins = []
        for stop in self.texts:
            number = before.count(stop) + 1
            parts = text.split(stop, number)
            if len(parts) > number:
                begins.append(len(text) - len(parts[number]) - len(stop))
        return min(begins, default=None)

    def _can_end(self, token: int) -> bool:
        known = self._may_end.get(token)
        if known is None:
            text = self.decode([token])
            # A token may be a part of a character, and decoders leave out a space at the beginning.
            known = UNKNOWN in text or any(
                stop[-1] in text or stop.endswith(" ") for stop in self.texts
            )
            self._may_end[token] = known
        return known
