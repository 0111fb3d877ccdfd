from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from echo.core.errors import DataError
from echo.engine.model import build_model, build_tokenizer, save_tiny_model
from echo.tasks.tokenization import (
    TextCodec,
    asset_files,
    decode,
    load_tokenizer,
    stop_ids,
    tokenizer_digests,
)

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role | length }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}{{ mark | default('=') }}{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    save_tiny_model(path, build_model(seed=0))
    return path


@pytest.fixture
def directory(plain: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(plain, tmp_path / "model"))


def text_of(ids: list[int]) -> str:
    return decode(build_tokenizer(), ids, [])


def codec(directory: Path, template: str | None = None, *stops: int, **arguments: Any) -> TextCodec:
    return TextCodec(load_tokenizer(directory, chat_template=template), list(stops), arguments)


USER = [{"role": "user", "content": "0"}]


def test_text_without_a_template_is_encoded_as_the_tokenizer_does(plain: Path) -> None:
    ids = codec(plain).encode_prompt("4+3=")
    assert (ids[0], text_of(ids[1:])) == (1, "4+3=")
    said = [{"role": "user", "content": "1+"}, {"role": "user", "content": "2="}]
    assert text_of(codec(plain, None, 0).encode_turn(said)) == "1+2="


def test_text_with_a_template_becomes_one_user_message(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    assert text_of(codec(directory).encode_prompt("1+1")) == "<bos>4:1+1;="  # one <bos>, its own
    messages = [{"role": "system", "content": "2"}, {"role": "user", "content": "1+1"}]
    ids = codec(directory, mark=">").encode_prompt(messages)
    assert text_of(ids) == "<bos>6:2;<bos>4:1+1;>"
    # One that is given replaces the directory's own.
    given = codec(directory, "{% for t in tools %}{{ t.n }}{% endfor %}=")
    assert text_of(given.encode_prompt("1", tools=[{"n": 4}, {"n": 2}])) == "42="


def test_what_cannot_be_encoded_is_explained(plain: Path) -> None:
    with pytest.raises(DataError, match=r"no chat template; set model\.chat_template"):
        codec(plain).encode_prompt(USER)
    failing = codec(plain, "{{ raise_exception('no roles') }}", mark=1)
    with pytest.raises(DataError, match=r"chat template failed: no roles.*'mark': 1"):
        failing.encode_prompt(USER)
    with pytest.raises(DataError, match="has no tokens"):
        codec(plain, "{# nothing #}").encode_prompt(USER)
    with pytest.raises(DataError, match=r"leaves out what the assistant says; .*chat_template"):
        codec(plain, "{{ messages[-1].content }}", 2).encode_turn(USER)


def test_tokens_that_the_model_does_not_know_are_refused(plain: Path) -> None:
    """They would end each worker that is asked to sample behind them."""
    tokenizer = load_tokenizer(plain)
    [_, token] = TextCodec(tokenizer, [], {}).encode_prompt("+")
    assert TextCodec(tokenizer, [], {}, token + 1).encode_prompt("+") == [1, token]
    text = TextCodec(tokenizer, [], {}, token)
    message = rf"the token '\+' has the id {token}, the model knows {token}: the tokenizer has"
    with pytest.raises(DataError, match=message):
        text.encode_prompt("+")
    with pytest.raises(DataError, match=message):
        text.encode_turn([{"role": "user", "content": "+"}])


def test_decoding_ends_at_the_first_stop_and_keeps_the_rest_as_sampled() -> None:
    tokenizer = build_tokenizer()
    texts = [decode(tokenizer, ids, [2]) for ids in ([3, 4, 2, 0, 0], [3, 0, 4], [3, 4], [])]
    assert texts == ["01", "0<pad>1", "01", ""]


@pytest.mark.parametrize(
    ("listed", "expected"), [(None, [2]), (5, [2, 5]), ([7, 2], [2, 7]), ("absent", [2])]
)
def test_stop_ids_join_tokenizer_and_generation_config(
    directory: Path, listed: object, expected: list[int]
) -> None:
    if listed != "absent":
        content = json.dumps({"eos_token_id": listed})
        (directory / "generation_config.json").write_text(content, encoding="utf-8")
    assert stop_ids(load_tokenizer(directory), directory) == expected


def test_digests_tell_what_differs_and_ignore_layout(plain: Path, directory: Path) -> None:
    before = tokenizer_digests(plain, {})

    def changed(arguments: dict[str, Any] | None = None, **options: Any) -> set[str]:
        now = tokenizer_digests(directory, arguments or {}, **options)
        return {name for name in before if now[name] != before[name]}

    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content, indent=7), encoding="utf-8")
    assert changed() == set()
    assert changed({"think": True}) == changed(chat_template=TEMPLATE) == {"chat_template"}
    (directory / "generation_config.json").write_text('{"eos_token_id": 9}', encoding="utf-8")
    assert changed() == {"stop_ids"}
    content["model"]["vocab"]["?"] = 28
    path.write_text(json.dumps(content), encoding="utf-8")
    assert changed() == {"stop_ids", "tokenizer"}


def test_assets_hold_neither_weights_nor_code(directory: Path) -> None:
    (directory / "modeling_evil.py").write_text("", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    names = asset_files(directory)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names.keys()
    assert "chat_template.jinja" in names
    assert not [name for name in names if name.endswith((".py", ".safetensors"))]
    assert names["config.json"] == directory / "config.json"


def test_a_missing_or_unusable_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: no such model directory"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(DataError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_bytes())
    content["model"] = {"type": "of another release"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=r"no tokenizer could be loaded: .*did not match any"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"no config\.json"):
        asset_files(tmp_path)


TURNS = (
    "{% for m in messages %}<bos>{{ m.role | length }}:{{ m.content }}<eos>;{% endfor %}"
    "{% if add_generation_prompt %}<bos>9:{% endif %}"
)


def test_a_turn_of_the_environment_continues_the_conversation(plain: Path) -> None:
    """What was sampled and what is said make the ids that the whole would have."""
    tokenizer = load_tokenizer(plain, chat_template=TURNS)
    stops = stop_ids(tokenizer, plain)
    prompt = TextCodec(tokenizer, [], {}).encode_prompt("1+1")
    sampled = [*tokenizer("=3", add_special_tokens=False)["input_ids"], stops[0]]
    said = [*USER, {"role": "tool", "content": "7"}]
    ids = TextCodec(tokenizer, stops, {}).encode_turn(said)
    conversation = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "=3"},
        *said,
    ]
    whole = TextCodec(tokenizer, [], {}).encode_prompt(conversation)
    assert [*prompt, *sampled, *ids] == whole
    assert text_of(ids) == ";<bos>4:0<eos>;<bos>4:7<eos>;<bos>9:"
    # A stop string has ended the turn: the policy has not sampled the stop token.
    assert TextCodec(tokenizer, stops, {}).encode_turn(said, is_closed=False) == [stops[0], *ids]
    # A template that closes turns without a stop token is kept whole.
    assert text_of(codec(plain, TEMPLATE, 2).encode_turn(USER)) == ";<bos>4:0;="
