"""`echo-rl rollouts` on a run directory with a real ledger, group file and tokenizer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from echo.cli.commands.rollouts import decoder_of, main
from echo.core.reward_parts import PartedReward
from echo.core.rollout import Group, Rollout, trim_stale
from echo.engine.model import build_tokenizer
from echo.records import ledger as ledger_module
from echo.records.ledger import GROUPS, Began, Ledger
from echo.tasks.tokenization import UNKNOWN
from echo.ui.report.run import read_run
from echo.wire.codec import encode_group

V3, V4 = [1, 3], [1, 4]


def make_group(group_id: int, prompt: str, answers: dict[str, float]) -> Group:
    """Return a group in which the first two tokens are of v3 and the others of v4."""
    tokenizer = build_tokenizer()
    rollouts = []
    for answer, reward in answers.items():
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        size = len(ids)
        rollouts.append(
            Rollout(
                token_ids=np.array(ids, np.int32),
                sampler_logprobs=np.full(size, -1.0, np.float32),
                policy_versions=np.array([V3] * 2 + [V4] * (size - 2), np.int32),
                completion_mask=np.ones(size, np.bool_),
                reward=reward,
                finish_reason="stop",
            )
        )
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return Group(
        group_id=group_id,
        attempt=0,
        worker_id="w1",
        prompt_ids=np.array(ids, np.int32),
        rollouts=tuple(rollouts),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two groups: step 6 has trained the first one."""
    ledger = Ledger(tmp_path, spool_bytes=1 << 20)
    ledger.append(Began(lineage=1, fork_step=0))
    groups = [
        make_group(0, "12+34=", {"0046": 1.0, "0047": 0.0}),
        make_group(
            1, "56+78=", {"0134": PartedReward({"right": 1.0, "length": -0.25}), "0135": 0.25}
        ),
    ]
    for group in groups:
        ledger.store(group, *encode_group(group))
    ledger.commit()
    ledger.trained(groups[:1], lineage=1, consumed_at=5)
    ledger.close()
    build_tokenizer().save_pretrained(tmp_path / "final")
    return tmp_path


def rows(capsys: pytest.CaptureFixture[str], *words: str | Path) -> list[dict[str, object]]:
    assert main([*map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_parts_of_a_reward_are_shown_beside_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--group", "1", "--best", "1"]) == 0
    told = capsys.readouterr().out
    assert "reward 0.75 = right 1 + length -0.25 (group 0.5)" in told
    [best, other] = rows(capsys, run, "--group", "1")
    assert best["reward_parts"] == [
        {"name": "right", "value": 1.0},
        {"name": "length", "value": -0.25},
    ]
    assert other["reward_parts"] == []


def test_a_rollout_is_shown_with_all_that_is_known_of_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--step", "6", "--best", "1"]) == 0
    told = capsys.readouterr().out
    header = (
        "group 0.0  trained in step 6  reward 1 (group 0.5)  w1  v3 2 tokens, v4 2 tokens  "
        "staleness 1-2  ended by stop"
    )
    assert told.splitlines()[:3] == [header, "  12+34=", "    0046"]


def test_tokens_that_were_masked_as_too_old_have_no_staleness(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path, spool_bytes=1 << 20)
    ledger.append(Began(lineage=1, fork_step=0))
    group = make_group(0, "12+34=", {"0046": 1.0, "0047": 0.0})
    ledger.store(group, *encode_group(group))
    trimmed = trim_stale(group, step=5, max_staleness=1)  # without the tokens of v3
    assert trimmed is not None
    ledger.trained([trimmed], lineage=1, consumed_at=5)
    ledger.close()
    build_tokenizer().save_pretrained(tmp_path / "final")
    assert [(row["staleness_min"], row["staleness_max"]) for row in rows(capsys, tmp_path)] == [
        (1, 1),
        (1, 1),
    ]


def test_without_options_the_newest_are_shown_and_their_number(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run)]) == 0
    told = capsys.readouterr().out
    assert told.index("56+78=") < told.index("12+34=")
    assert told.count("56+78=") == 1, "once for the rollouts of its group"
    assert "not trained yet" in told
    assert "the newest 4 rollouts of 2 accepted groups" in told


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["--group", "1"], ["0134", "0135"]),
        (["--grep", "34"], ["0046", "0047", "0134"]),
        (["--worst", "2"], ["0047", "0135"]),
        (["--best", "9"], ["0046", "0134", "0135", "0047"]),
        (["--group", "0", "--grep", "47"], ["0047"]),
    ],
)
def test_choices(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], completions: list[str]
) -> None:
    assert [row["completion"] for row in rows(capsys, run, *words)] == completions


def test_random_ones_are_some_of_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["completion"] for row in rows(capsys, run, "--random", "3")}
    assert len(found) == 3
    assert found < {"0046", "0047", "0134", "0135"}


def test_a_row_has_the_parts_of_each_version(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = rows(capsys, run)
    assert first["parts"] == [
        {"text": "00", "num_tokens": 2, "lineage": 1, "step": 3, "is_sampled": True},
        {"text": "46", "num_tokens": 2, "lineage": 1, "step": 4, "is_sampled": True},
    ]
    assert (first["staleness_min"], first["staleness_max"], first["step"]) == (1, 2, 6)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def __len__(self) -> int:
        return 256

    def decode(self, ids: list[int], **_: object) -> str:
        return bytes(ids).decode(errors="replace")


def test_a_character_that_two_versions_sampled_is_whole(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo.cli.commands.rollouts.load_tokenizer", lambda _: Bytes())
    group = make_group(2, "1", {"0046": 1.0, "0047": 0.0})
    ids = np.array([*"aé!".encode()], np.int32)  # é is a token of v3 and one of v4
    rollout = dataclasses.replace(group.rollouts[0], token_ids=ids)
    ledger = Ledger(run, spool_bytes=1 << 20)
    group = dataclasses.replace(group, rollouts=(rollout, group.rollouts[1]))
    ledger.store(group, *encode_group(group))
    ledger.commit()
    ledger.close()
    row, _ = rows(capsys, run, "--group", "2")
    assert row["completion"] == "aé!"
    assert [part["text"] for part in row["parts"]] == ["a", "é!"]  # type: ignore[attr-defined]


def test_an_id_that_the_tokenizer_lacks_is_seen(run: Path) -> None:
    tokenizer = build_tokenizer()
    ids = [*tokenizer("12", add_special_tokens=False)["input_ids"], len(tokenizer)]
    assert decoder_of(run)(ids) == f"12{UNKNOWN}", "as the reward gets it"


def test_chains_of_a_rollout_say_what_they_follow(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(2, "12+34=", {"0046915": 1.0, "0047": 0.0})
    branches = np.array([[4, 1], [6, -3]], np.int32)  # 00|46, 00|91 and 12+3|5
    rollout = dataclasses.replace(group.rollouts[0], branches=branches)
    group = dataclasses.replace(group, rollouts=(rollout, group.rollouts[1]))
    ledger = Ledger(run, spool_bytes=1 << 20)
    ledger.store(group, *encode_group(group))
    ledger.commit()
    ledger.close()
    assert main([str(run), "--group", "2"]) == 0
    header, *told = capsys.readouterr().out.splitlines()
    assert header.endswith("ended by stop  3 chains")
    assert told[:6] == [
        "  12+34=", "    0046", '    after "12+34=00":', "    91", '    after "12+3":', "    5"
    ]  # fmt: skip
    row, other = rows(capsys, run, "--group", "2")
    assert (row["branches"], other["branches"]) == ([[4, 1], [6, -3]], [])


def test_a_parquet_file_has_the_same_rows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    assert main([str(run), "--parquet", str(run / "rollouts.parquet")]) == 0
    capsys.readouterr()
    assert pq.read_table(run / "rollouts.parquet").to_pylist() == rows(capsys, run)
    assert main([str(run), "--parquet", str(run / "no" / "x.parquet")]) == 1
    assert "--parquet" in capsys.readouterr().err


class Hostile:
    """A tokenizer whose text rings, moves the cursor and breaks lines."""

    def __len__(self) -> int:
        return 1 << 20

    def decode(self, ids: list[int], **_: object) -> str:
        return "\x1b[2J\a\n\x9b2J\x7f\u202e\U000e0041x" if ids else ""


def test_text_of_a_model_reaches_no_terminal_unescaped(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo.cli.commands.rollouts.load_tokenizer", lambda _: Hostile())
    assert main([str(run), "--group", "0"]) == 0
    told = capsys.readouterr().out
    assert not {char for char in told if not char.isprintable()} - {"\n"}
    assert "  \\x1b[2J\\x07\n  \\x9b2J\\x7f\\u202e\\U000e0041x\n" in told
    assert main([str(run), "--group", "0", "--json"]) == 0
    told = capsys.readouterr().out
    assert not {char for char in told if not char.isprintable()} - {"\n"}
    assert json.loads(told.splitlines()[0])["prompt"] == Hostile().decode([1])


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        (["--best", "0"], "--best 0: must be at least 1", 2),
        (["--step", "7"], "it has groups 0 to 1 and steps 6 to 6", 3),
        (["--group", "2"], "no such rollouts", 3),
        (["--grep", "nothing"], "no rollout that is still kept has 'nothing' in it", 3),
    ],
)
def test_an_empty_choice_is_told(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str, code: int
) -> None:
    assert main([str(run), *words]) == code
    assert told in capsys.readouterr().err


def test_removed_rollouts_are_counted_with_the_cause(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "KEPT_BYTES", 0)
    ledger = Ledger(run, spool_bytes=1 << 20)
    ledger.free_unused(step=6)
    newer = make_group(2, "90+12=", {"0102": 1.0, "0103": 0.0})
    ledger.store(newer, *encode_group(newer))
    ledger.close()
    why = "were removed at step 6 (0 B of rollouts that no resume needs are kept)"
    assert main([str(run), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["group"] for line in out.splitlines()] == [2, 2]
    assert err == f"the rollouts of 2 of 3 groups {why}\n"
    assert main([str(run), "--step", "6"]) == 3
    assert f"the rollouts of 1 of 1 group {why}" in capsys.readouterr().err
    (run / "config.json").write_text("{}")
    told = read_run(run).decisions[-1].what
    assert told.startswith("removed files and checkpoints (1), ")
    assert told.endswith(" in all: 0 B of rollouts that no resume needs are kept")


def test_deleted_and_damaged_files_are_told_apart(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (run / GROUPS).iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\0")
    assert main([str(run), "--json"]) == 1
    assert "the BLAKE3 hash" in capsys.readouterr().err
    file.unlink()
    assert main([str(run)]) == 3
    assert "others have deleted the files of 2 such groups" in capsys.readouterr().err


def test_a_run_without_groups_and_one_without_a_tokenizer(
    run: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "final").rename(run / "elsewhere")
    settings = {"model": {"name": "nobody/has-this", "revision": None}}
    (run / "config.json").write_text(json.dumps(settings))
    assert main([str(run)]) == 3
    assert "'nobody/has-this' is not on this machine" in capsys.readouterr().err
    empty = tmp_path_factory.mktemp("empty")
    ledger = Ledger(empty, spool_bytes=1 << 20)
    ledger.append(Began(lineage=1, fork_step=0))
    ledger.close()
    build_tokenizer().save_pretrained(empty / "final")
    assert main([str(empty)]) == 3
    assert "no group has been accepted yet" in capsys.readouterr().err
