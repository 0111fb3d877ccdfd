"""Workers that do not belong and task code that fails: each is named, and the run goes on.

One run for all of them. Its task is an environment whose every second group cannot be used; four
workers whom the learner refuses come before the one that it trains with.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from echo.wire.messages import PROTOCOL_VERSION
from tests.e2e.audit import Audit
from tests.e2e.cluster import Cluster, NodeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIG, REFUSED = 2, 5
"""Exit codes, as in echo/cli: for a configuration, and for a node that the learner refuses."""

TASK = '''"""An environment that never ends by itself, and much that is wrong."""

from echo.tasks.environment import Environment
from echo.tasks.task import Example


class Wrong(Environment):
    """Says the same for ever; of five groups, three are of no use.

    One raises, one is worth NaN, and the prompt of one exceeds the model's window of 128 tokens.
    Example 35, beyond those that are looked at before the run begins, wants a chat template.
    """

    max_turns = 2

    def example(self, index: int, *, split: str) -> Example:
        text = "7" * 124 + "=" if index % 5 == 4 else f"{index % 5}="
        prompt = [{"role": "user", "content": text}] if index == 35 else text
        return Example(index=index, split=split, prompt=prompt)

    def begin(self, example: Example) -> list[str]:
        return [example.prompt]

    def reply(self, state: list[str], text: str) -> str:
        state.append(text)
        return "7="

    def outcome(self, state: list[str]) -> float:
        prompt, *turns = state
        if prompt == "1=":
            raise KeyError("no such answer")
        if prompt == "3=":
            return float("nan")
        return sum(character.isdigit() for text in turns for character in text) / 8
'''
MAX_STEPS = 5


@dataclass
class Run:
    """A finished run, and the workers that it was without."""

    cluster: Cluster
    refused: dict[str, NodeProcess]
    audit: Audit

    def check_refusal(self, name: str, code: int, *parts: str) -> str:
        """Check how a worker ended, and that it said all of these; return what it said."""
        node = self.refused[name]
        assert node.process.returncode == code, node.output
        assert "Traceback" not in node.output
        assert [part for part in parts if part not in node.output] == [], node.output
        return node.output

    def discarded(self, reason: str) -> set[int]:
        """Return the groups that ended with this reason; none may have been accepted."""
        records = self.cluster.records("discarded")
        groups = {record["group"] for record in records if record["reason"] == reason}
        assert not groups & self.audit.accepted.keys()
        return groups


def save_other_vocabulary(directory: Path) -> str:
    """Write a model with more token ids than the learner's; return its directory."""
    from transformers import Qwen3ForCausalLM

    from echo.engine.model import build_config, build_tokenizer

    config = build_config()
    config.vocab_size = 48
    Qwen3ForCausalLM(config).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return str(directory)


def save_other_tokenizer(directory: Path, model: Path) -> str:
    """Write the learner's model with two digits swapped; return its directory."""
    path = shutil.copytree(model, directory) / "tokenizer.json"
    text = path.read_text()
    swapped = text.replace('"7": 10', '"7": X').replace('"8": 11', '"8": 10')
    assert swapped != text
    path.write_text(swapped.replace('"7": X', '"7": 11'))
    return str(directory)


@pytest.fixture(scope="module")
def run(make_cluster: Callable[[], Cluster], model_dir: Path) -> Run:
    """Return the run, which has made its steps though all this came in its way."""
    cluster = make_cluster()
    (cluster.directory / "wrong.py").write_text(TASK)
    cluster.settings = {
        "task.kind": "wrong:Wrong",
        "sampling.max_completion_tokens": 20,
        "sampling.top_k": 4,
        "run.max_steps": MAX_STEPS,
    }
    learner = cluster.start("learner")
    vocabulary = save_other_vocabulary(cluster.directory / "vocabulary")
    tokenizer = save_other_tokenizer(cluster.directory / "tokenizer", model_dir)
    refused = [
        cluster.start("worker", name="vocabulary", settings={"model.name": vocabulary}),
        cluster.start("worker", name="tokenizer", settings={"model.name": tokenizer}),
        cluster.start("worker", "--protocol", "987", name="protocol"),
        cluster.start("worker", name="heat", settings={"sampling.temperature": 0.5}),
    ]
    for node in refused:
        cluster.wait_for_end(node)
    assert learner.is_running
    cluster.finish(learner, cluster.start("worker", name="w1"))
    return Run(cluster, {node.name: node for node in refused}, cluster.audit())


def hashes_of(message: str, name: str) -> tuple[str, str]:
    """Return the two hashes that a refusal gives for `name`."""
    words = message.partition(f"{name}: this node has ")[2].split()
    return words[0].strip(",;."), words[3].strip(",;.")


# --- workers that do not fit ---------------------------------------------------------------------


def test_the_run_goes_on_without_them(run: Run) -> None:
    assert run.audit.num_steps == MAX_STEPS
    assert {record["worker"] for record in run.cluster.records("granted")} == {"w1"}


def test_a_worker_with_a_model_of_another_vocabulary_is_refused_with_both_hashes(run: Run) -> None:
    said = run.check_refusal("vocabulary", REFUSED, "digest_mismatch", "Give both the same files")
    ours, theirs = hashes_of(said, "model")
    assert ours != theirs
    assert len(ours) == len(theirs) == 16


def test_a_worker_with_another_tokenizer_is_refused_for_that_alone(run: Run) -> None:
    said = run.check_refusal("tokenizer", REFUSED, "digest_mismatch")
    ours, theirs = hashes_of(said, "tokenizer")
    assert ours != theirs
    assert "model: this node has" not in said


def test_a_worker_with_another_protocol_is_refused_with_both_versions(run: Run) -> None:
    ours = f"protocol version {PROTOCOL_VERSION}"
    run.check_refusal("protocol", REFUSED, "987", ours, "install the same release")
    assert "987" in run.cluster.log("learner")


def test_a_worker_whose_settings_contradict_the_learner_ends_with_the_remedy(run: Run) -> None:
    contradiction = "sampling.temperature = 0.5 contradicts the learner, which uses 1.0"
    run.check_refusal("heat", CONFIG, contradiction, "remove it here")


def test_refusals_are_counted_and_logged(run: Run) -> None:
    assert run.cluster.count("refused/digest_mismatch") == 2
    for name in ("vocabulary", "tokenizer"):
        assert name in run.cluster.log("learner")


# --- task code that fails ------------------------------------------------------------------------


def test_a_reward_that_raises_or_is_nan_costs_its_group_only(run: Run) -> None:
    failed = run.discarded("reward_error")
    assert len(failed) >= 4
    # Of each worker and reason one line a minute is told, so of the others only that they ended.
    assert {group % 5 for group in failed} == {1, 3}
    assert run.cluster.count("discarded/reward_error") >= 4
    log = run.cluster.log("learner")
    assert "KeyError" in log
    assert "no such answer" in log


def test_prompts_without_room_are_counted_and_survived(run: Run) -> None:
    assert run.discarded("prompt_too_long") >= {4, 9}
    assert run.cluster.count("discarded/prompt_too_long") >= 2
    text = "the prompt has 126 tokens, the model's window leaves 108 beside 20 sampled ones"
    assert text in run.cluster.log("learner")


def test_a_prompt_that_cannot_be_had_is_left_out(run: Run) -> None:
    assert run.discarded("prompt_error") == {35}
    assert run.cluster.count("discarded/prompt_error") == 1
    text = "group 35 is left out: train example 35: the prompt is a list of messages but the"
    assert text in run.cluster.log("learner")


def test_environments_that_never_end_are_ended_and_counted(run: Run) -> None:
    counted = {name for row in run.cluster.metrics() for name, number in row.items() if number}
    assert {"env/turn_limit", "env/token_limit"} & counted
