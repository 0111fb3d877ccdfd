"""Tokenization exactly as the model's directory says.

Learner and worker must agree on every byte of this: the tokenizer's files, the chat template with
its arguments, and the ids that end a completion are hashed, and compared when a worker joins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from echo.core.errors import DataError

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


def load_tokenizer(
    directory: str | Path, *, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory; never runs code from it.

    Raises:
        DataError: if there is none that loads.
    """
    # Imported here, as a relay imports this package and installs no transformers.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(_existing(directory)), local_files_only=True, trust_remote_code=False
        )
    except DataError:
        raise
    except Exception as error:  # the tokenizer's library raises anything at what it cannot read
        raise DataError(
            f"{directory}: no tokenizer could be loaded: {error}; the directory needs "
            "tokenizer.json and tokenizer_config.json beside config.json"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


UNUSABLE = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
"""What tokenizers and chat templates raise on messages that they were not made for."""


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any],
    *,
    opens_turn: bool = True,
) -> str:
    """Return messages as text, with the opening of the assistant's turn unless told otherwise.

    Raises:
        DataError: if there is no chat template, or it fails.
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
            **chat_template_kwargs,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"the chat template failed: {error}; check model.chat_template and "
            f"model.chat_template_kwargs = {dict(chat_template_kwargs)}"
        ) from error
    return str(text)


TURN = "echo-turn-7f3a91"
"""Stands for what the policy said where a conversation is rendered around it."""


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, closing: str, stop_ids: Iterable[int]) -> int:
    """Return how many characters of a turn's closing the sampled stop token stands for."""
    stops = [str(tokenizer.decode([token], skip_special_tokens=False)) for token in stop_ids]
    ends = [closing.index(stop) + len(stop) for stop in stops if stop and stop in closing]
    return min(ends, default=0)


def stop_ids(tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> list[int]:
    """Return the token ids that end a completion, sorted.

    They are the tokenizer's end-of-sequence token and those of generation_config.json, where
    chat models keep their end of turn.
    """
    found = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    path = Path(directory) / "generation_config.json"
    if path.is_file():
        listed = _read_json(path).get("eos_token_id")
        if listed is not None:
            found.update(int(token) for token in (listed if isinstance(listed, list) else [listed]))
    return sorted(found)


def decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int], stop_ids: Iterable[int]
) -> str:
    """Return the text of a completion up to its first stop token, which is left out.

    Everything before it is kept as sampled, other special tokens included: dropping a sampled
    <pad> from the middle of an answer could make a wrong one right.
    """
    stops = frozenset(stop_ids)
    kept: list[int] = []
    for token in token_ids:
        if int(token) in stops:
            break
        kept.append(int(token))
    text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


@dataclass(frozen=True, slots=True)
class TextCodec:
    """Text to tokens and back, for the completions of one model."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]
    """The ids that end a completion."""
    chat_template_kwargs: Mapping[str, Any]
    """Arguments of the chat template."""
    vocab_size: int = 1 << 31
    """The model knows the ids below it."""

    def encode_prompt(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Turn a prompt into token ids.

        Where the tokenizer has a chat template, messages go through it with the opening of the
        assistant's turn, and text becomes one user message. Without a template, text is encoded as
        it stands, with the special tokens that the tokenizer itself adds.

        Raises:
            DataError: for messages without a template, a template that fails, an empty result, or
                tokens that the model does not know.
        """
        if self.tokenizer.chat_template is None and isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            told = {"tools": [dict(tool) for tool in tools]} if tools else {}
            kwargs = {**self.chat_template_kwargs, **told}
            text = render_messages(self.tokenizer, messages, kwargs)
            # The template has written the special tokens; adding them again would double <bos>.
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise DataError(f"the prompt {prompt!r} has no tokens; a prompt needs at least one")
        return self._known(ids)

    def encode_turn(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Turn what an environment says after a turn of the policy into token ids.

        They follow the sampled tokens of that turn, which end with a stop token and are never
        encoded again; the last of them open the policy's next turn. With a chat template they are
        what it writes between the end of one assistant's turn and the beginning of the next.
        Without one they are the messages' contents as they stand.

        Raises:
            DataError: if the template fails, or leaves out or changes what the policy said, or for
                tokens that the model does not know.
        """
        tokenizer, kwargs = self.tokenizer, self.chat_template_kwargs
        if tokenizer.chat_template is None:
            text = "".join(str(message["content"]) for message in messages)
        else:
            before: list[Mapping[str, Any]] = [
                {"role": "user", "content": "-"},
                {"role": "assistant", "content": TURN},
            ]
            whole = render_messages(tokenizer, [*before, *messages], kwargs)
            _, found, text = whole.partition(TURN)
            if not found:
                raise DataError(
                    "the chat template leaves out what the assistant says; an environment of "
                    "several turns needs one that keeps it: set model.chat_template"
                )
            alone = render_messages(tokenizer, before, kwargs, opens_turn=False)
            closing = alone.partition(TURN)[2]
            text = text[_end_of_turn(tokenizer, closing, self.stop_ids) :]
        return self._known(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _known(self, ids: Iterable[int]) -> list[int]:
        """Return token ids, all of them the model's: an engine can go on with no others."""
        found = [int(token) for token in ids]
        if (highest := max(found, default=0)) >= self.vocab_size:
            raise DataError(
                f"the token {self.tokenizer.decode([highest])!r} has the id {highest}, the model "
                f"knows {self.vocab_size}: the tokenizer has tokens that were never added to it"
            )
        return found

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of a completion up to its first stop token."""
        return decode(self.tokenizer, token_ids, self.stop_ids)


def tokenizer_digests(
    directory: str | Path,
    chat_template_kwargs: Mapping[str, Any],
    *,
    chat_template: str | None = None,
) -> dict[str, str]:
    """Hash all that turns text into ids and back, to compare it between nodes.

    JSON files are hashed by content, not by layout, and without the chat template that some of
    them hold: it has a hash of its own, with the arguments it is called with.

    Returns:
        "tokenizer", "chat_template" and "stop_ids", each a BLAKE3 hash in hexadecimal.
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
    """List what a worker without a model directory needs, by name: never weights, never code.

    Raises:
        DataError: if there is no config.json.
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
"""Keys of JSON files with which a model asks for code of its own to be run."""


def without_code(name: str, data: bytes) -> bytes:
    """Return a file that came over the network without what names code to run.

    Nothing here would run it (`trust_remote_code` is false wherever a model is loaded), and nothing
    in an inherited file shall be able to change that.

    Raises:
        DataError: if it is not JSON although its name says so.
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
    """Return parsed JSON without the keys that name code to run, at any depth."""
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
