"""Tokenization, with the files of a model's directory.

Learner and worker must tokenize alike. So the tokenizer's files, the chat template with its
arguments, and the ids that end a completion are hashed. The hashes are compared when a worker
joins.

**Control tokens.** Only the chat template may write control tokens. In a row, an environment's
reply or an agent's message, `<|im_end|>` is encoded as text. Otherwise a message could forge a
system turn. Before the messages are rendered, a `MARK` is inserted after the first character of
each control token in a message. The rendered text is split at the marks, and the pieces are encoded
separately. Messages of the assistant get no marks, since models write control tokens themselves.
Without a chat template, text is encoded unchanged, and control tokens in the text stay control
tokens.

**Beginnings.** If the last message is the assistant's, the template opens the assistant's turn. The
content of the message follows, and the policy continues it. The turn is not closed.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from echo.core.errors import DataError
from echo.tasks.messages import ROLES, fault_of_messages, plain_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG_FILES = ("config.json", "generation_config.json")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)

TEMPLATE_FILE = "chat_template.jinja"


_NEEDED_FILES = "the directory needs tokenizer.json and tokenizer_config.json beside config.json"


def load_tokenizer(
    directory: str | Path, *, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's directory, without running code from the directory.

    Args:
        directory: the model's directory.
        chat_template: a template to use instead of the tokenizer's own; "" for no template, None
            for the tokenizer's own.

    Raises:
        DataError: if the directory has no tokenizer that can be loaded.
    """
    # Imported here, since a relay imports this package and does not install transformers.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(_existing(directory)), local_files_only=True, trust_remote_code=False
        )
    except DataError:
        raise
    except Exception as error:  # the library raises any type at unreadable files
        raise DataError(
            f"{directory}: no tokenizer could be loaded: {' '.join(str(error).split())}; "
            f"{_NEEDED_FILES}"
        ) from error
    # Without tokenizer files transformers returns a tokenizer that has only special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise DataError(f"{directory}: there is no tokenizer; {_NEEDED_FILES}")
    if chat_template is not None:
        tokenizer.chat_template = chat_template or None
    if isinstance(tokenizer.chat_template, str):  # a byte order mark would begin each prompt
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


UNUSABLE = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
"""Errors that tokenizers and chat templates raise for messages that they do not support."""


_TIME_DIRECTIVES = [
    f"%{flag}{letter}" for flag in ("", "-") for letter in "aAbBcCdDeFGgHhIjmMnpRrSsTtUuVWwXxYyZz"
]
# transformers gives templates its own clock, and since 5.24 refuses a function in its place.
_CLOCK = (
    "{%- macro strftime_now(format) -%}{%- set made = namespace(text=format) -%}"
    "{%- for directive, text in _now.items() -%}"
    "{%- set made.text = made.text.replace(directive, text) -%}"
    "{%- endfor -%}{{- made.text -}}{%- endmacro -%}"
)
"""Jinja macro that replaces the clock of chat templates, and reads the time from `_now`."""


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any],
    *,
    opens_turn: bool = True,
    template: str | None = None,
) -> str:
    """Render messages by the chat template.

    Args:
        tokenizer: the tokenizer with the chat template.
        messages: the messages, which the template gets unchanged.
        chat_template_kwargs: further variables of the template.
        opens_turn: whether the text ends with the opening of the assistant's turn.
        template: a template to use instead of the tokenizer's own.

    Raises:
        DataError: if there is no chat template, or if the template fails.
    """
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise DataError(
            "the prompt is a list of messages but the tokenizer has no chat template; set "
            "model.chat_template to a Jinja file, or use a task with text prompts"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=opens_turn,
            chat_template=template,
            **chat_template_kwargs,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"the chat template failed: {error}; check model.chat_template and "
            f"model.chat_template_kwargs = {dict(chat_template_kwargs)}"
        ) from error
    return str(text)


TURN = "echo-turn-7f3a91"
"""A placeholder for the assistant's text in a rendered template."""


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, closing: str, stop_ids: Iterable[int]) -> int:
    """Return the number of characters in `closing` up to the end of the first stop token.

    `closing` is the text that closes a turn. The policy has sampled the stop token, so only the
    characters after this token must be added. Return 0 if `closing` has no stop token.
    """
    known = [token for token in stop_ids if token >= 0]
    stops = [str(tokenizer.decode([token], skip_special_tokens=False)) for token in known]
    ends = [closing.index(stop) + len(stop) for stop in stops if stop and stop in closing]
    return min(ends, default=0)


# --- control tokens -------------------------------------------------------------------------------


MARK = "\ufdd0"
"""A character, never assigned by Unicode, that is inserted into control tokens in messages."""

_WRITTEN_AS_CONTROL = re.compile(r"<[|\uff5c].+[|\uff5c]>", re.DOTALL)
"""Matches text in the form of a control token. The form is needed because some tokenizers do not
flag their control tokens as `special`.
"""

_TEMPLATED = re.compile(
    r"(?:<s>|<bos>|<\|begin_of_text\|>)?\s*"
    r"(?:<\|(?:im_start|start_header_id|system|user|assistant|start)\|>|<start_of_turn>|\[INST\]"
    r"|<\uff5cUser\uff5c>)"
)
"""Matches the beginnings of prompts that common chat templates have rendered."""


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the tokens that structure a conversation, by the tokens' texts.

    Tokens such as `<think>` are left out.
    """
    return {
        token.content: token_id
        for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if len(token.content) > 1
        if token.special or _WRITTEN_AS_CONTROL.fullmatch(token.content)
    }


def unmarked(text: str) -> str:
    """Return rendered text without marks, for a user to read."""
    return text.replace(MARK, "")


# --- the end of a turn ----------------------------------------------------------------------------


def stop_ids(tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> list[int]:
    """Return the ids of the tokens that end a completion, sorted.

    These are the tokenizer's end-of-sequence token, the ids in generation_config.json, and the
    control token that ends a turn in the chat template. Chat models declare their end of turn in
    generation_config.json. Ids outside the model's vocabulary are left out.
    """
    found = _declared_stop_ids(tokenizer, directory)
    if (ending := _template_stop(tokenizer, found)) is not None:
        found.add(ending)
    limit = _vocab_size(directory)
    return sorted(token for token in found if 0 <= token < limit)


def describe_stops(tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> list[str]:
    """Return a line for the user about each oddity of the stop tokens."""
    declared = _declared_stop_ids(tokenizer, directory)
    ending = _template_stop(tokenizer, declared)
    lines, limit = [], _vocab_size(directory)
    closing = _closing(tokenizer)
    if ending is None and closing is not None and not _end_of_turn(tokenizer, closing, declared):
        ends = f"{closing!r}, which is no control token" if closing else "nothing but white space"
        lines.append(
            f"the chat template ends turns with {ends}: only the model's own stop tokens end an "
            "answer"
        )
    if ending is not None:
        known = sorted(token for token in declared if token >= 0)
        own = ", ".join(repr(tokenizer.decode([token])) for token in known) or "none"
        lines.append(
            f"the chat template ends turns with {tokenizer.decode([ending])!r}, which is now a "
            f"stop token, too (of the model: {own})"
        )
    if unknown := sorted(token for token in declared if not 0 <= token < limit):
        lines.append(
            f"the stop tokens {unknown} are not among the model's {limit} ids, so end nothing; see "
            "eos_token_id in generation_config.json and eos_token in tokenizer_config.json"
        )
    if not stop_ids(tokenizer, directory):
        lines.append(
            "no stop token: every answer runs to sampling.max_completion_tokens; name one as "
            "eos_token_id in the model's generation_config.json"
        )
    return lines


def _declared_stop_ids(tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> set[int]:
    found = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    paths = [Path(directory) / name for name in ("generation_config.json", "config.json")]
    if paths[0].is_file():
        return found | _listed_stop_ids(paths[0])
    # Like transformers without generation_config.json. The id in config.json may be a mere default
    # of the model type, so the tokenizer's comes first.
    return found or (_listed_stop_ids(paths[1]) if paths[1].is_file() else set())


def _listed_stop_ids(path: Path) -> set[int]:
    listed = _read_json(path).get("eos_token_id")
    tokens = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise DataError(
            f"{path}: eos_token_id = {json.dumps(listed)}: must be the id of a token, or a list of "
            "ids"
        )
    return set(tokens)


def _template_stop(tokenizer: PreTrainedTokenizerBase, declared: Iterable[int]) -> int | None:
    """Return the id of the control token that ends a turn in the chat template.

    Return None if there is no such token, or if a declared stop token already ends the turn.
    """
    closing, known = _closing(tokenizer) or "", control_tokens(tokenizer)
    if _end_of_turn(tokenizer, closing, declared):
        return None
    found = max((token for token in known if closing.startswith(token)), key=len, default=None)
    return None if found is None else known[found]


def _closing(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the text that the chat template writes after the assistant's text.

    White space around the text is removed. Return None if there is no template, or if the template
    leaves out the assistant's text.
    """
    if tokenizer.chat_template is None:
        return None
    turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": TURN}]
    try:
        text = render_messages(tokenizer, turns, {}, opens_turn=False)
    except (DataError, *UNUSABLE):
        return None  # it needs other messages or arguments
    return text.rpartition(TURN)[2].strip() if TURN in text else None


def _vocab_size(directory: str | Path) -> int:
    path = Path(directory) / "config.json"
    fields = _read_json(path) if path.is_file() else {}
    text_fields = fields.get("text_config")
    sizes = [
        table["vocab_size"]
        for table in (text_fields, fields)
        if isinstance(table, dict) and isinstance(table.get("vocab_size"), int)
    ]
    return sizes[0] if sizes else 1 << 31


UNKNOWN = "\ufffd"


def decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int], stop_ids: Iterable[int]
) -> str:
    """Return the text of a completion before its first stop token.

    Other special tokens in the completion are kept. If a sampled <pad> in the middle were dropped,
    a wrong answer could look right. For the same reason, an id that the tokenizer lacks becomes the
    replacement character. Models have such ids if their vocabulary is larger than the tokenizer's.
    """
    stops, num_known = frozenset(stop_ids), len(tokenizer)
    runs: list[list[int]] = [[]]
    for token in map(int, token_ids):
        if token in stops:
            break
        if token < num_known:
            runs[-1].append(token)
        else:
            runs.append([])
    keep = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return UNKNOWN.join(str(tokenizer.decode(run, **keep)) if run else "" for run in runs)


@dataclass(frozen=True)
class TextCodec:
    """Converts text to tokens and back, for one model."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]
    """The ids of the tokens that end a completion."""
    chat_template_kwargs: Mapping[str, Any]
    """Arguments of the chat template."""
    vocab_size: int = 1 << 31
    """Size of the model's vocabulary. The model has embeddings for the ids below this number."""
    now: datetime.datetime | None = None
    """The time that the chat template reads, so that a prompt does not change between two
    renderings; None for the present time."""

    def encode_prompt(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of a prompt.

        With a chat template, text becomes one user message, and the rendered messages end with the
        opening of the assistant's turn. Without a chat template, text is encoded unchanged, after
        the tokenizer's special tokens for the start of a text.

        Raises:
            DataError: if there are messages but no template, if the template fails, if the text is
                already rendered, if the result is empty, or if a token is outside the model's
                vocabulary.
        """
        if self.tokenizer.chat_template is None and isinstance(prompt, str):
            ids = self.encode_raw(prompt)
        else:
            if isinstance(prompt, str):
                self.check_text(prompt)
                prompt = [{"role": "user", "content": prompt}]
            ids = self.encode_rendered(self.render(prompt, tools))
        if not ids:
            raise DataError(f"the prompt {prompt!r} has no tokens; a prompt needs at least one")
        return ids

    def encode_raw(self, text: str) -> list[int]:
        """Return the token ids of a text, without the chat template.

        Control tokens in the text are encoded as such. Tokens that the tokenizer appends to a text
        are left out, since the policy continues the text.

        Raises:
            DataError: if the text ends with a stop token, or a token is outside the model's
                vocabulary.
        """
        whole = self.known(self.tokenizer(text)["input_ids"])
        self._refuse_ended(text)
        own = self.encode_rendered(text)
        ends = range(len(whole), len(own) - 1, -1) if own else ()
        is_end = (end for end in ends if whole[end - len(own) : end] == own)
        ids = whole[: next(is_end, len(whole))]
        has_bos = bool(own) and own[0] == self.tokenizer.bos_token_id
        return own if has_bos and ids == [own[0], *own] else ids  # the text has <bos> already

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a text that `render` returned.

        Control tokens with a `MARK` are encoded as text, without the mark.

        Raises:
            DataError: if a token is outside the model's vocabulary.
        """
        # The template has written the special tokens; the tokenizer would add a second <bos>.
        pieces = filter(None, text.split(MARK))
        encoded = (self.tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces)
        return self.known(token for ids in encoded for token in ids)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return messages as text, up to the place where the policy continues.

        Control tokens in the contents of messages have a `MARK`.

        Raises:
            DataError: if there is no template, the template fails, or an object is not a message.
        """
        if fault := fault_of_messages(messages):
            raise DataError(f"{fault}; messages are objects with the texts `role` and `content`")
        if not messages:
            raise DataError("the prompt is an empty list; it needs at least one message")
        *before, last = messages
        if last["role"] != "assistant":
            return self._render(messages, tools)
        if not before:
            raise DataError("its only message is the assistant's: put a user's message before it")
        return self._with_beginning(self._render(before, tools), last)

    def encode_turn(
        self, messages: Sequence[Mapping[str, Any]], *, is_closed: bool = True
    ) -> list[int]:
        """Return the token ids of an environment's reply to a turn of the policy.

        The caller appends these ids to the sampled tokens of the turn. The sampled tokens are never
        encoded again. If `is_closed`, the turn already ends with a stop token. Otherwise a stop
        string has ended the turn, so the reply begins with the stop token.

        With a chat template, the ids cover the text from the end of the assistant's turn to the
        opening of the next turn. Without a chat template, they are the ids of the unchanged
        contents of the messages.

        Raises:
            DataError: if the template fails, if the template leaves out or changes the policy's
                text, or if a token is outside the model's vocabulary.
        """
        if fault := fault_of_messages(messages):
            raise DataError(fault)
        if self.tokenizer.chat_template is None:
            text = "".join(plain_message(message)["content"] for message in messages)
            self._refuse_ended(text)
            return self.encode_rendered(text)
        before: list[Mapping[str, Any]] = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": TURN},
        ]
        is_begun = bool(messages) and messages[-1]["role"] == "assistant"
        whole = self._render([*before, *(messages[:-1] if is_begun else messages)])
        _, found, text = whole.partition(TURN)
        if not found:
            raise DataError(
                "the chat template leaves out what the assistant says; an environment of "
                "several turns needs one that keeps it: set model.chat_template"
            )
        alone = self._render(before, opens_turn=False)
        closing = alone.partition(TURN)[2]
        if is_closed:
            text = text[_end_of_turn(self.tokenizer, closing, self.stop_ids) :]
        return self.encode_rendered(self._with_beginning(text, messages[-1]) if is_begun else text)

    def control_token_in(self, text: str) -> str:
        """Return the first control token in a text, or ""."""
        found = self._control.search(text) if self._control else None
        return found[0] if found else ""

    def shows_tools(
        self, tools: Sequence[Mapping[str, Any]], prompt: str | Sequence[Mapping[str, Any]]
    ) -> bool:
        """Return whether the text of a rendered prompt depends on `tools`."""
        if self.tokenizer.chat_template is None:
            return False
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.render(turns, tools) != self.render(turns)

    def oddities(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Iterator[str]:
        """Yield a line for the user on each oddity of a rendered prompt."""
        if self.tokenizer.chat_template is None:
            return
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = unmarked(self.render(turns, tools))
        stops = [str(self.tokenizer.decode([token])) for token in self.stop_ids]
        ended = next((stop for stop in stops if stop and text.rstrip().endswith(stop)), "")
        if ended and turns[-1]["role"] != "assistant":
            yield (
                "the chat template does not open the assistant's turn: the prompt ends with "
                f"{ended!r}, a stop token; set model.chat_template to one with "
                "add_generation_prompt"
            )
        for number, turn in enumerate(turns, 1):
            plain = plain_message(turn)
            content = plain["content"].rpartition("</think>")[2].strip()
            forms = (content, json.dumps(content, ensure_ascii=False)[1:-1])
            lost = [] if any(form in text for form in forms) else ["content"]
            if plain.pop("tool_calls", None):
                try:
                    bare = self.render([*turns[: number - 1], plain, *turns[number:]], tools)
                    lost += ["`tool_calls`"] if text == unmarked(bare) else []
                except (DataError, *UNUSABLE):  # it needs a call before its result
                    pass
            for what in lost:
                yield (
                    f"the chat template leaves out the {what} of message {number} "
                    f"({turn['role']}): the policy does not see it; set model.chat_template to "
                    "one that writes it"
                )
            if turn["role"] not in ROLES:
                yield (
                    f"message {number} has the role {turn['role']!r}, which the chat template may "
                    f"not know; common are {', '.join(ROLES)}"
                )

    def unused_arguments(self) -> list[str]:
        """Return the names in chat_template_kwargs that the template does not use.

        Raises:
            DataError: if Echo itself passes an argument of this name to the template.
        """
        for name in ("messages", "add_generation_prompt", "continue_final_message"):
            if name in self.chat_template_kwargs:
                raise DataError(
                    f"model.chat_template_kwargs.{name}: Echo gives this to the template itself; "
                    "remove it"
                )
        template = str(self.tokenizer.chat_template)
        return [
            name
            for name in self.chat_template_kwargs
            if not re.search(rf"\b{re.escape(name)}\b", template)
        ]

    def reads_clock(self) -> bool:
        """Return whether the chat template's text depends on the present time."""
        return "strftime_now" in str(self.tokenizer.chat_template)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opens_turn: bool = True,
    ) -> str:
        kwargs = dict(self.chat_template_kwargs)
        if tools:
            kwargs["tools"] = [self._mark(tool) for tool in tools]
        template = None
        if self.now is not None and self.reads_clock():
            kwargs["_now"] = {each: self.now.strftime(each) for each in _TIME_DIRECTIVES}
            template = _CLOCK + self.tokenizer.get_chat_template(tools=kwargs.get("tools"))
        given = [self._as_given(plain_message(message)) for message in messages]
        return render_messages(
            self.tokenizer, given, kwargs, opens_turn=opens_turn, template=template
        )

    def _as_given(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        found = message if message["role"] == "assistant" else self._mark(message)
        if self._wants_parts:
            return {**found, "content": [{"type": "text", "text": found["content"]}]}
        return found

    def _mark(self, value: Any) -> Any:
        """Return `value` with a `MARK` in each control token of its texts."""
        match value:
            case str() if self._control:
                return self._control.sub(lambda found: found[0][0] + MARK + found[0][1:], value)
            case Mapping():
                return {self._mark(key): self._mark(item) for key, item in value.items()}
            case list() | tuple():
                return [self._mark(item) for item in value]
        return value

    def _with_beginning(self, opened: str, message: Mapping[str, Any]) -> str:
        """Return rendered text with the beginning of the assistant's answer appended.

        `opened` ends with the opening of the assistant's turn. `message` holds the beginning of the
        answer, which the policy continues.

        Raises:
            DataError: if the message has tool calls or reasoning.
        """
        if says := [key for key in ("tool_calls", "reasoning_content") if message.get(key)]:
            raise DataError(
                f"its last message is the assistant's and has `{says[0]}`, behind which its turn "
                "cannot go on; write the beginning as `content`, or add what is said to it"
            )
        begun = str(plain_message(message)["content"])
        if begun.startswith("<"):  # the template may open the turn with <think>
            sizes = range(len(begun), 0, -1)
            begun = begun[next((n for n in sizes if opened.endswith(begun[:n])), 0) :]
        return opened + begun

    def check_text(self, text: str) -> None:
        """Check a prompt that is text, without encoding it.

        Raises:
            DataError: if the text is already rendered and the chat template would render it a
                second time, or if there is no template and the text ends with a stop token.
        """
        if self.tokenizer.chat_template is None:
            self._refuse_ended(text)
        else:
            self._refuse_templated(text)

    def _refuse_templated(self, text: str) -> None:
        """Refuse text that a chat template has already rendered.

        Raises:
            DataError: if the text begins like a rendered prompt.
        """
        head = text.lstrip()[:256]
        own = self._control.match(head) if self._control else None
        found = own or _TEMPLATED.match(head)
        if found is not None:
            raise DataError(
                f"the text begins with {found[0]!r}, a control token: it has gone through a chat "
                "template, and would become a user message of the model's; set "
                'model.chat_template = "none", which sends text as it stands, or give messages'
            )

    def _refuse_ended(self, text: str) -> None:
        for token in self.stop_ids:
            stop = str(self.tokenizer.decode([token]))
            if stop.strip() and text.rstrip().endswith(stop):
                raise DataError(
                    f"the text ends with the stop token {stop!r}, behind which nothing is to be "
                    "said; remove it, or open the turn of the assistant behind it"
                )

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        tokens = sorted(control_tokens(self.tokenizer), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens))) if tokens else None

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template renders lists of parts, but drops contents that are text."""

        def writes(content: object) -> bool:
            turn = {"role": "user", "content": content}
            try:
                return TURN in render_messages(self.tokenizer, [turn], self.chat_template_kwargs)
            except (DataError, *UNUSABLE):
                return False

        return not writes(TURN) and writes([{"type": "text", "text": TURN}])

    def known(self, ids: Iterable[int]) -> list[int]:
        """Return token ids as integers, and check that the model has these ids.

        Raises:
            DataError: if an id is outside the model's vocabulary.
        """
        found = [int(token) for token in ids]
        if (highest := max(found, default=0)) >= self.vocab_size:
            raise DataError(
                f"the token {self.tokenizer.decode([highest])!r} has the id {highest}, the model "
                f"knows {self.vocab_size}: the tokenizer has tokens that were never added to it"
            )
        return found

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of a completion before its first stop token.

        See the function `decode` of this module.
        """
        return decode(self.tokenizer, token_ids, self.stop_ids)

    def decode_all(self, token_ids: Iterable[int]) -> str:
        """Return tokens as text, stop tokens included."""
        return decode(self.tokenizer, token_ids, ())


def tokenizer_digests(
    directory: str | Path,
    chat_template_kwargs: Mapping[str, Any],
    *,
    chat_template: str | None = None,
) -> dict[str, str]:
    """Return hashes of everything that determines tokenization.

    Nodes compare these hashes. JSON files are hashed by content, not by layout. A chat template in
    a JSON file is hashed separately, with its arguments.

    Returns:
        "tokenizer", "chat_template" and "stop_ids", each as a BLAKE3 hash in hexadecimal digits.
    """
    root = _existing(directory)
    files = blake3()
    for name in TOKENIZER_FILES:
        path = root / name
        if path.is_file():
            content = _canonical(path) if path.suffix == ".json" else path.read_bytes()
            files.update(f"{name}\0{len(content)}\0".encode())
            files.update(content)
    tokenizer = load_tokenizer(root, chat_template=chat_template)
    template = [tokenizer.chat_template, dict(chat_template_kwargs)]
    return {
        "tokenizer": files.hexdigest(),
        "chat_template": blake3(json.dumps(template, sort_keys=True).encode()).hexdigest(),
        "stop_ids": blake3(json.dumps(stop_ids(tokenizer, root)).encode()).hexdigest(),
    }


def asset_files(directory: str | Path) -> dict[str, Path]:
    """Return the files that a worker without a model directory needs, by name.

    No file has weights or code.

    Raises:
        DataError: if the directory has no config.json.
    """
    root = _existing(directory)
    found = {
        name: root / name
        for name in (*CONFIG_FILES, *TOKENIZER_FILES, TEMPLATE_FILE)
        if (root / name).is_file()
    }
    if "config.json" not in found:
        raise DataError(
            f"{root}: no config.json; model.name must be a Hugging Face model directory"
        )
    return found


_CODE_KEYS = frozenset({"auto_map", "trust_remote_code"})
"""Keys in a model's JSON files that ask to run the model's own code."""


def without_code(name: str, data: bytes) -> bytes:
    """Return a received file's content, without the keys that name code.

    Every model is loaded with `trust_remote_code=False`, so the keys have no effect. The keys are
    removed anyway, to guard against later mistakes in loading.

    Raises:
        DataError: if a file that may have such keys is not JSON.
    """
    if name not in (*CONFIG_FILES, "tokenizer_config.json"):
        return data
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}, as the learner sent it, is not readable as JSON") from error
    kept = drop_code(content)
    return data if kept == content else json.dumps(kept, ensure_ascii=False).encode()


def drop_code(value: Any) -> Any:
    """Return a parsed JSON value without the keys in `_CODE_KEYS`, at any depth."""
    if isinstance(value, dict):
        return {key: drop_code(item) for key, item in value.items() if key not in _CODE_KEYS}
    return [drop_code(item) for item in value] if isinstance(value, list) else value


def _existing(directory: str | Path) -> Path:
    path = Path(directory)
    if not path.is_dir():
        raise DataError(f"{path}: no such model directory")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: must hold a JSON object, not {type(content).__name__}")
    return content


def _canonical(path: Path) -> bytes:
    content = _read_json(path)
    content.pop("chat_template", None)
    if path.name == "tokenizer_config.json":
        content = drop_code(content)
    return json.dumps(content, sort_keys=True, ensure_ascii=False).encode()
