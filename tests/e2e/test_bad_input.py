"""Bad input through the real command line: a message that helps, an exit code, in bounded time.

A message names the thing, its values and the remedy. Exit codes are those of echo/cli: 2 for
configuration, 3 for data, 4 for the network, 5 for a node that the learner refuses.
"""

from __future__ import annotations

import resource
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from echo.protocol.messages import PROTOCOL_VERSION
from tests.e2e.cluster import Cluster, NodeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIG, DATA, NETWORK, REFUSED = 2, 3, 4, 5


def check_failure(cluster: Cluster, node: NodeProcess, code: int, *parts: str) -> None:
    """Wait for a node to fail with this exit code and a message with all of these parts."""
    ended_with = cluster.wait_for_end(node)
    assert ended_with == code, f"{node.name} ended with {ended_with}\n{cluster.logs}"
    assert "Traceback" not in node.output
    for part in parts:
        assert part in node.output


# --- configuration -------------------------------------------------------------------------------


def test_a_missing_configuration(cluster: Cluster) -> None:
    node = cluster.start("learner", "--config", "nowhere.toml")

    check_failure(cluster, node, CONFIG, "nowhere.toml: cannot be read", "configs/ has examples")


def test_an_unreadable_configuration(cluster: Cluster) -> None:
    (cluster.directory / "binary.toml").write_bytes(b"[run]\nname = '\xff'\n")

    node = cluster.start("worker", "--config", "binary.toml")

    check_failure(cluster, node, CONFIG, "binary.toml", "UTF-8")


def test_all_errors_of_a_configuration_are_reported_at_once(cluster: Cluster) -> None:
    text = cluster.config_path.read_text()
    text = text.replace("max_steps = 10", 'max_steps = "ten"')
    text = text.replace("group_size = 4", "group_sise = 4\ngroup_size = 4")
    text = text.replace("publish_period = 1", "publish_period = 5")
    (cluster.directory / "wrong.toml").write_text(text)

    node = cluster.start("learner", "--config", "wrong.toml")

    check_failure(
        cluster,
        node,
        CONFIG,
        "wrong.toml",
        'run.max_steps = "ten"',
        "batch.group_sise = 4: unknown key; did you mean group_size?",
        "sync.publish_period = 5",
        "must be at most sync.max_staleness + 1 = 4",
    )


# --- the learner's surroundings ------------------------------------------------------------------


def test_a_missing_model_directory(cluster: Cluster) -> None:
    node = cluster.start("learner", settings={"model.name": "./no-model"})

    check_failure(cluster, node, DATA, "model.name = './no-model'", "no such directory")
    assert not (cluster.run_dir / "ledger.jsonl").exists()


def test_a_port_in_use(cluster: Cluster) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        learner = cluster.start("learner", settings={"learner.listen": address})
        relay = cluster.start("relay", settings={"relay.listen": address})

        for node in (learner, relay):
            check_failure(cluster, node, NETWORK, address, "already in use")
    assert not (cluster.run_dir / "ledger.jsonl").exists(), "a lineage was opened"


def test_a_malformed_dataset_row_is_named_by_file_and_line(cluster: Cluster) -> None:
    rows = ['{"question": "1+1?", "answer": "#### 2"}'] * 20
    rows[12] = '{"question": "1+2?"}'
    (cluster.directory / "train.jsonl").write_text("\n".join(rows) + "\n")

    node = cluster.start(
        "learner",
        settings={"task.kind": "gsm8k", "task.options": '{path = "train.jsonl"}'},
    )

    check_failure(cluster, node, DATA, "train.jsonl:13: malformed row", "`answer`")


CHAT_TASK = '''"""Prompts of which some are chat messages."""

from echo.tasks.task import Example, Task


class ChatTask(Task):
    """Text, but for one prompt in four."""

    def example(self, index: int, *, split: str) -> Example:
        prompt = [{"role": "user", "content": "1+1="}] if index % 4 == 3 else "1+1="
        return Example(index=index, split=split, prompt=prompt)

    def reward(self, example: Example, completion: str) -> float:
        return 0.0
'''


def test_messages_without_a_chat_template(cluster: Cluster) -> None:
    (cluster.directory / "chat.py").write_text(CHAT_TASK)

    node = cluster.start("learner", settings={"task.kind": "chat:ChatTask"})

    check_failure(
        cluster,
        node,
        DATA,
        "example 3",
        "the tokenizer has no chat template",
        "set model.chat_template to a Jinja file",
    )
    assert not (cluster.run_dir / "ledger.jsonl").exists()


def test_an_unreachable_learner_is_given_up_after_a_visible_countdown(cluster: Cluster) -> None:
    settings = {"network.reconnect_for_s": 15}
    started_at = time.monotonic()
    nodes = [cluster.start(role, settings=settings) for role in ("relay", "worker")]

    for node in nodes:
        check_failure(
            cluster,
            node,
            NETWORK,
            f"no learner at {cluster.learner_address} yet; giving up in ",
            f"no learner reached at {cluster.learner_address} for 15 s",
            "check that it runs",
            "network.reconnect_for_s",
        )
    assert time.monotonic() - started_at > 15


# --- workers that do not fit ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def waiting(make_cluster: Callable[[], Cluster]) -> Cluster:
    """Return a cluster whose learner waits for workers."""
    cluster = make_cluster()
    learner = cluster.start("learner")
    cluster.wait_for(lambda: cluster.records("published"), "v0 is published", alive=learner)
    return cluster


def hashes_of(message: str, name: str) -> tuple[str, str]:
    """Return the two hashes that a refusal gives for `name`."""
    words = message.partition(f"{name}: this node has ")[2].split()
    return words[0].strip(",;."), words[3].strip(",;.")


def test_a_worker_with_a_model_of_another_vocabulary(waiting: Cluster, tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    from echo.engine.tiny_model import build_config, build_tokenizer

    config = build_config()
    config.vocab_size = 48
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)

    worker = waiting.start("worker", name="other-model", settings={"model.name": str(tmp_path)})

    check_failure(waiting, worker, REFUSED, "digest_mismatch", "Give both the same files")
    ours, theirs = hashes_of(worker.output, "model")
    assert ours != theirs
    assert len(ours) == len(theirs) == 16


def test_a_worker_with_another_tokenizer_is_refused_and_counted_and_the_run_goes_on(
    cluster: Cluster, tmp_path: Path, random_model: Path
) -> None:
    model = shutil.copytree(random_model, tmp_path / "model")
    text = (model / "tokenizer.json").read_text()
    swapped = text.replace('"7": 10', '"7": X').replace('"8": 11', '"8": 10')
    (model / "tokenizer.json").write_text(swapped.replace('"7": X', '"7": 11'))
    assert swapped != text
    learner = cluster.start("learner", settings={"run.max_steps": 2})

    worker = cluster.start("worker", name="other-tokenizer", settings={"model.name": str(model)})

    check_failure(cluster, worker, REFUSED, "digest_mismatch")
    ours, theirs = hashes_of(worker.output, "tokenizer")
    assert ours != theirs
    assert "model: this node has" not in worker.output
    cluster.finish(learner, cluster.start("worker", name="w1"))
    assert cluster.audit().num_steps == 2
    assert cluster.count("refused/digest_mismatch") == 1
    assert "other-tokenizer" in cluster.log("learner")


def test_a_worker_with_another_protocol_version(waiting: Cluster) -> None:
    worker = waiting.start("worker", "--protocol", "987", name="other-protocol")

    ours = f"protocol version {PROTOCOL_VERSION}"
    check_failure(waiting, worker, REFUSED, "987", ours, "install the same release")
    assert "987" in waiting.log("learner")


def test_a_worker_whose_settings_contradict_the_learner(waiting: Cluster) -> None:
    worker = waiting.start("worker", name="other-heat", settings={"sampling.temperature": 0.5})

    check_failure(
        waiting,
        worker,
        CONFIG,
        "sampling.temperature = 0.5 contradicts the learner, which uses 1.0",
        "remove it here",
    )


# --- trouble in mid-run --------------------------------------------------------------------------

WRONG_TASK = '''"""A reward function that fails for some prompts."""

from echo.tasks.task import Example, Task


class WrongTask(Task):
    """Raises for one prompt in five and returns NaN for another."""

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt=f"{index % 5}=")

    def reward(self, example: Example, completion: str) -> float:
        if example.prompt == "1=":
            raise KeyError("no such answer")
        return float("nan") if example.prompt == "3=" else completion.count("1") / 8
'''


def test_a_reward_that_raises_or_is_nan_costs_its_group_only(cluster: Cluster) -> None:
    (cluster.directory / "wrong.py").write_text(WRONG_TASK)
    cluster.settings["task.kind"] = "wrong:WrongTask"
    learner = cluster.start("learner", settings={"run.max_steps": 6})
    worker = cluster.start("worker", name="w1")

    cluster.finish(learner, worker)

    result = cluster.audit()
    assert result.num_steps == 6
    failed = {r["group"] for r in cluster.records("discarded") if r["reason"] == "reward_error"}
    assert len(failed) >= 4
    assert not failed & result.accepted.keys()
    assert cluster.count("discarded/reward_error") >= 4
    log = cluster.log("learner")
    assert "KeyError" in log
    assert "no such answer" in log
    # Of each worker and reason one line a minute is told, so of the others only that they ended.
    assert {group % 5 for group in failed} == {1, 3}


ENDLESS_TASK = '''"""An environment that never ends by itself, and prompts that are too long."""

from echo.tasks.environment import Environment
from echo.tasks.task import Example


class Endless(Environment):
    """Says the same for ever; two prompts in five exceed the model's window of 128 tokens.

    And one, beyond those that are looked at before the run begins, wants a chat template.
    """

    max_turns = 2

    def example(self, index: int, *, split: str) -> Example:
        text = "7" * (124 if index % 5 > 2 else 1) + "="
        prompt = [{"role": "user", "content": text}] if index == 35 else text
        return Example(index=index, split=split, prompt=prompt)

    def begin(self, example: Example) -> list[str]:
        return []

    def reply(self, state: list[str], text: str) -> str:
        state.append(text)
        return "7="

    def outcome(self, state: list[str]) -> float:
        return sum(character.isdigit() for text in state for character in text) / 8
'''


def test_environments_that_never_end_and_prompts_without_room_are_counted_and_survived(
    cluster: Cluster,
) -> None:
    (cluster.directory / "endless.py").write_text(ENDLESS_TASK)
    cluster.settings |= {
        "task.kind": "endless:Endless",
        "sampling.max_completion_tokens": 20,
        "sampling.top_k": 4,
    }
    learner = cluster.start("learner", settings={"run.max_steps": 8})
    worker = cluster.start("worker", name="w1")

    cluster.finish(learner, worker)

    result = cluster.audit()
    assert result.num_steps == 8
    too_long = {
        r["group"] for r in cluster.records("discarded") if r["reason"] == "prompt_too_long"
    }
    assert too_long >= {3, 4, 8, 9}
    assert not too_long & result.accepted.keys()
    assert cluster.count("discarded/prompt_too_long") >= 4
    log = cluster.log("learner")
    assert "the prompt has 126 tokens, the model's window leaves 108 beside 20 sampled ones" in log
    assert "group 35 is left out: example 35: the prompt is a list of messages but the" in log
    assert cluster.count("discarded/prompt_error") == 1
    counted = {name for row in cluster.metrics() for name, number in row.items() if number}
    assert {"env/turn_limit", "env/token_limit"} & counted


def test_a_full_disk_at_a_checkpoint_leaves_the_old_one_and_the_run(cluster: Cluster) -> None:
    """After the first checkpoint no file may grow beyond a size that checkpoints exceed."""
    saved_step = 3
    cluster.hold_from(4 * (saved_step + 1))
    learner = cluster.start("learner", settings={"run.max_steps": 12})
    worker = cluster.start("worker", name="w1")
    cluster.wait_for(lambda: cluster.records("checkpoint"), "a checkpoint", alive=learner)

    limit = 300_000
    resource.prlimit(learner.process.pid, resource.RLIMIT_FSIZE, (limit, limit))

    cluster.let_go()
    cluster.finish(learner, worker)
    assert cluster.audit().num_steps == 12
    checkpoints = cluster.run_dir / "checkpoints"
    assert (checkpoints / "latest").read_text().strip() == f"step_{saved_step:06d}"
    names = sorted(path.name for path in checkpoints.glob("*"))
    assert names == ["latest", f"step_{saved_step:06d}"]
    log = cluster.log("learner")
    assert "step_000012.tmp: cannot write the trainer's state" in log
    assert "File too large" in log
    assert "the checkpoint before stays the newest" in log

    # The old checkpoint is whole: the run goes on from it, this time with a disk that fills up
    # to the limit that the configuration sets.
    again = cluster.start(
        "learner",
        "--resume",
        settings={"run.max_steps": 13, "limits.min_free_disk_bytes": "1000000GiB"},
    )
    worker = cluster.start("worker", name="w2")
    cluster.finish(again, worker)
    result = cluster.audit()
    assert result.fork_steps[2] == saved_step
    assert result.num_steps == 13
    assert (checkpoints / "latest").read_text().strip() == f"step_{saved_step:06d}"
    log = cluster.log("learner")
    assert "limits.min_free_disk_bytes" in log
    assert "bytes free" in log
