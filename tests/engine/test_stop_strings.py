"""Stop strings in tokens that hold parts of characters, and the settings that engines get."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from echo.config.load import parse_config
from echo.engine.model import make_sampling
from echo.engine.stop_strings import StopStrings
from echo.tasks.tokenization import TextCodec
from tests.tasks.test_chat_tokens import make_tokenizer


@pytest.fixture(scope="module")
def text() -> TextCodec:
    """A codec with a token for each byte."""
    tokenizer = make_tokenizer()
    return TextCodec(tokenizer, [2, -1, 1 << 20], {}, vocab_size=len(tokenizer))


def end_of(stop: StopStrings, ids: Sequence[int]) -> int | None:
    """Return the number of tokens after which a completion ends; None if it does not."""
    return next((n for n in range(1, len(ids) + 1) if stop.are_complete(ids[:n])), None)


@pytest.mark.parametrize(
    ("texts", "said", "end"),
    [
        (("</a>",), "x</a>y", "x</a>"),
        (("é!",), "né!", "né!"),
        (("é",), "e\u0301 é", "e\u0301 é"),
        (("日本",), "日日本語", "日日本"),
        (("\n\n",), "a\nb\n\nc", "a\nb\n\n"),
        (("END", "\n"), "E\nND END", "E\n"),
        ((" ", "q"), "ab cq", "ab "),
        (("aa",), "abab", None),
    ],
)
def test_an_answer_ends_with_the_byte_that_completes_a_stop_string(
    text: TextCodec, texts: tuple[str, ...], said: str, end: str | None
) -> None:
    stop = StopStrings(texts, text.decode_all)
    found = end_of(stop, text.encode_rendered(said))
    assert found == (None if end is None else len(end.encode()))
    assert stop == StopStrings(texts, str), "calls with the same texts are sampled together"


@pytest.mark.parametrize(
    ("texts", "tokens", "kept"),
    [
        (("\n",), ["a", "\n\n"], "a"),
        (("Obs", "\nObs"), ["a", "\n", "Obs"], "a"),
        (("ab", "b"), ["ab", "x", "a", "b."], "abx"),
        (("ab",), ["ab", "x", "c", "ab"], "abxc"),  # as min_tokens has let the first one pass
        (("b",), ["a", "c"], None),
    ],
)
def test_a_stop_string_begins_at_the_first_place_that_its_last_token_completes(
    texts: tuple[str, ...], tokens: list[str], kept: str | None
) -> None:
    stop = StopStrings(texts, lambda ids: "".join(tokens[index] for index in ids))
    assert stop.begin(range(len(tokens))) == (None if kept is None else len(kept))
    assert stop.are_complete(range(len(tokens))) is (kept is not None)


def test_engines_get_the_stop_ids_that_the_model_has(text: TextCodec) -> None:
    section = parse_config({"sampling": {"stop": "###", "min_tokens": 3}}).sampling
    sampling = make_sampling(section, text)
    assert (sampling.stop_ids, sampling.min_tokens) == ((2,), 3)
    assert sampling.stop is not None
    assert sampling.stop.texts == ("###",)
    assert make_sampling(section, None).stop is None
    assert sampling.barred_support(1, 4).lacks.tolist() == [True, True, False, False]
