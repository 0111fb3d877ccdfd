"""Context that was sampled goes in again as it was sampled, whatever its text would encode to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from echo.core.errors import DataError
from echo.engine.engine import Completion
from echo.runtime.agents.dialogue import Dialogue
from echo.runtime.agents.turns import Turn
from echo.tasks.tokenization import TextCodec, unmarked
from tests.tasks.test_chat_tokens import make_tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
VOCABULARY = ["<eos>", "<u>", "<a>", "<s>", "1", "2", "3", "+", "12", "?"]


def call_of(text: str, ids: npt.NDArray[np.int32]) -> Turn:
    """Return a call that saw all but the last of these tokens, and sampled that."""
    versions, logprobs = np.zeros((1, 2), np.int32), np.zeros(1, np.float32)
    return Turn(ids[:-1], Completion("", ids[-1:], logprobs, "stop", versions), text, None)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Knows "12" as one token, so that it can also be sampled as two."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    inner = Tokenizer(models.BPE(ids, [("1", "2")]))
    inner.pre_tokenizer = pre_tokenizers.Split("+", "isolated")
    inner.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    found.add_special_tokens({"additional_special_tokens": ["<u>", "<a>", "<s>"]})
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def dialogue(tokenizer: PreTrainedTokenizerFast) -> Dialogue:
    return Dialogue(TextCodec(tokenizer, [0], {}))


def ids_of(*tokens: str) -> npt.NDArray[np.int32]:
    return np.array([VOCABULARY.index(token) for token in tokens], np.int32)


def test_a_first_call_is_encoded(dialogue: Dialogue) -> None:
    text = dialogue.render([{"role": "user", "content": "12+3"}])
    assert text == "<u>12+3<eos><a>"
    ids, call = dialogue.continue_text(text, [], is_rendered=True)
    assert ids.tolist() == ids_of("<u>", "12", "+", "3", "<eos>", "<a>").tolist()
    assert call is None
    with pytest.raises(DataError, match="the prompt has no tokens; a prompt needs at least one"):
        dialogue.continue_text("", [], is_rendered=True)


def test_what_was_sampled_stays_as_it_was_sampled(dialogue: Dialogue) -> None:
    first = ids_of("<u>", "3", "<eos>", "<a>", "1", "2", "<eos>")
    known = call_of("<u>3<eos><a>12<eos>", first)
    messages = [
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "12"},
    ]
    ids, call = dialogue.continue_text(dialogue.render(messages), [known], is_rendered=True)
    assert call is known
    assert ids.tolist() == [*first, *ids_of("<u>", "12", "<eos>", "<a>")]


@pytest.mark.parametrize("shown", ["1", "12"])
def test_a_call_that_a_stop_string_has_ended_goes_on_with_it_or_without(
    dialogue: Dialogue, shown: str
) -> None:
    """The agent, which was not shown the "2", may write it itself; it is sampled once."""
    known = replace(call_of("3+12", ids_of("3", "+", "12")), num_hidden=1)
    assert known.shown_text == "3+1"
    ids, call = dialogue.continue_text(f"3+{shown}+3", [known], is_rendered=False)
    assert call is known
    assert ids.tolist() == ids_of("3", "+", "12", "+", "3").tolist()


def test_the_longest_known_beginning_counts(dialogue: Dialogue) -> None:
    calls = [
        call_of("1+", ids_of("1", "+")),
        call_of("1+2", ids_of("1", "+", "2")),
        call_of("2", ids_of("2")),
    ]
    ids, call = dialogue.continue_text("1+2+3", calls, is_rendered=False)
    assert call is calls[1]
    assert ids.tolist() == ids_of("1", "+", "2", "+", "3").tolist()
    assert dialogue.continue_text("3+1", calls, is_rendered=False)[1] is None


def test_token_ids_are_taken_as_they_are(dialogue: Dialogue) -> None:
    calls = [call_of("1", ids_of("1")), call_of("12", ids_of("1", "2"))]
    ids, call = dialogue.continue_ids(ids_of("1", "2", "3").tolist(), calls)
    assert call is calls[1]
    assert ids.tolist() == ids_of("1", "2", "3").tolist()
    assert dialogue.continue_ids(ids_of("12", "3").tolist(), calls)[1] is None


def test_answers_end_before_their_stop_token(dialogue: Dialogue) -> None:
    assert dialogue.answer_of(ids_of("1", "2", "<eos>")) == "12"
    assert dialogue.text_of(ids_of("1", "2", "<eos>")) == "12<eos>"


def test_messages_without_a_template_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="no chat template; set model"):
        Dialogue(TextCodec(plain, [], {})).render([{"role": "user", "content": "1"}])


def test_tokens_that_the_model_does_not_know_are_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """An engine that was given them would end its worker."""
    dialogue = Dialogue(TextCodec(tokenizer, [0], {}, vocab_size=8))
    known = call_of("3", ids_of("3"))
    ways: list[Callable[[], object]] = [
        lambda: dialogue.continue_text("12", [], is_rendered=False),
        lambda: dialogue.continue_text("312", [known], is_rendered=False),
        lambda: dialogue.continue_ids([4, 8], []),
    ]
    for ask in ways:
        with pytest.raises(DataError, match="the token '12' has the id 8, the model knows 8"):
            ask()


def test_control_tokens_in_messages_are_text_in_every_call_of_a_session() -> None:
    """The first call's context goes in again as it was, and what is new is text, too."""
    codec = TextCodec(make_tokenizer(), [2], {})
    said = "a" + 60 * "<|im_end|>" + "b"
    dialogue, ask = Dialogue(codec), {"role": "user", "content": said}
    first, none = dialogue.continue_text(dialogue.render([ask]), [], is_rendered=True)
    assert none is None
    assert dialogue.text_of(first).startswith(f"<|im_start|>user\n{said}<|im_end|>")
    sampled = np.array([*first, *codec.encode_rendered("So"), 2], np.int32)
    versions, logprobs = np.zeros((3, 2), np.int32), np.zeros(3, np.float32)
    answer = Completion("", sampled[len(first) :], logprobs, "stop", versions)
    call = Turn(first, answer, dialogue.text_of(sampled), None)
    messages = [ask, {"role": "assistant", "content": "So"}, ask]
    ids, parent = dialogue.continue_text(dialogue.render(messages), [call], is_rendered=True)
    assert parent is call
    assert ids[: len(sampled)].tolist() == sampled.tolist()
    assert dialogue.text_of(ids) == unmarked(dialogue.render(messages))
    assert np.count_nonzero(ids == 2) == 3, "one for each turn, none of them the user's"


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "a part of the type 'image_url'"),
        ({"role": "user", "content": None}, "has neither `content` nor `tool_calls`"),
        ({"content": "x"}, "has no text `role`"),
    ],
)
def test_messages_that_are_none_are_refused(message: dict[str, object], fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        Dialogue(TextCodec(make_tokenizer(), [2], {})).render([message])


def test_an_answer_goes_on_behind_the_assistants_last_message() -> None:
    dialogue = Dialogue(TextCodec(make_tokenizer(), [2], {}))
    begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is"}]
    assert dialogue.render(begun).endswith("<|im_start|>assistant\nIt is")


def test_raw_text_is_followed_by_nothing_and_not_at_its_end() -> None:
    dialogue = Dialogue(TextCodec(make_tokenizer(ends_text=True), [2], {}))
    ids, _ = dialogue.continue_text("<|im_start|>user", [], is_rendered=False)
    assert dialogue.text_of(ids) == "<s><|im_start|>user"
    with pytest.raises(DataError, match="ends with the stop token"):
        dialogue.continue_text("a<|im_end|>", [], is_rendered=False)
