"""GSM8K rows from the file to the ledger, on the tiny model: nothing is learned, all is exact."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from echo.core.rollout import Group
from echo.leases.scheduler import StoreGroup
from echo.sim.network import Network
from echo.tasks.builtin import Gsm8kTask
from echo.tasks.rewards import Limits, PoolHost
from echo.tasks.tokenization import decode, load_tokenizer, stop_ids
from tests.runtime.harness import Run, running

pytest.importorskip("math_verify")

PUBLISHED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"

# Written for this test. The small numbers are what a random model says now and then.
OWN = [
    {
        "question": f"Ann has {n} pens and gives {n - k} away. How many has she left?",
        "answer": f"She has {n} - {n - k} = <<{n}-{n - k}={k}>>{k} pens left.\n#### {k}",
    }
    for n, k in ((9, 5), (12, 3), (8, 7), (20, 1), (6, 2), (11, 9), (15, 4), (30, 6))
]


def published_rows() -> list[dict[str, str]]:
    path = PUBLISHED / "train.jsonl"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(next(file)) for _ in range(8)]


@pytest.fixture
def long_model(tmp_path: Path, model_dir: Path) -> Path:
    """The tiny model with a window in which such prompts have room."""
    path = tmp_path / "long-model"
    shutil.copytree(model_dir, path)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = 2048
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.slow
@pytest.mark.matrix
def test_rows_are_sampled_scored_and_trained_on(tmp_path: Path, long_model: Path) -> None:
    rows = [*OWN, *published_rows()]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = {"path": str(path), "heldout_path": str(path)}
    run = Run(tmp_path, long_model, Network())
    groups: list[Group] = []

    async def scenario() -> None:
        learner = await run.learner(
            run={"max_steps": 3},
            task={"kind": "gsm8k", "options": options},
            sampling={"max_completion_tokens": 12},
            batch={"group_size": 8},
            reward={"max_concurrent": 2},
            network={"lease_timeout_s": 60.0},
        )
        take_in = learner.take_in

        def note(action: StoreGroup) -> None:
            groups.append(action.group)
            take_in(action)

        learner.take_in = note  # type: ignore[method-assign]
        async with asyncio.timeout(90), running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"

    asyncio.run(scenario())
    task = Gsm8kTask(**options)
    tokenizer = load_tokenizer(long_model)
    stops = stop_ids(tokenizer, long_model)
    prompts = {str(task.example(i, split="train").prompt): i for i in range(len(rows))}
    by_prompt = {
        tuple(tokenizer(prompt)["input_ids"]): task.example(index, split="train")
        for prompt, index in prompts.items()
    }
    assert len(groups) >= 6
    for group in groups:
        example = by_prompt[tuple(group.prompt_ids.tolist())]
        texts = [decode(tokenizer, r.token_ids.tolist(), stops) for r in group.rollouts]
        assert group.rewards == [task.reward(example, text) for text in texts], texts
    assert any("eval/gsm8k/pass@1" in row for _, row in run.rows)


@pytest.mark.slow
def test_references_are_right_and_others_wrong_in_the_workers_process(tmp_path: Path) -> None:
    rows = [*OWN, *published_rows()]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = Gsm8kTask(path=str(path), heldout_path=str(path))
    limits = Limits(score_s=60.0, step_s=60.0, memory_bytes=2 << 30)
    host = PoolHost("gsm8k", {}, limits, max_concurrent=2)
    try:
        for index, row in enumerate(rows):
            example = task.example(index, split="train")
            wrong = f"#### {float(example.answer) + 1:g}"
            texts = [row["answer"], wrong, row["answer"].rpartition("####")[0] + wrong]
            rewards = list(host.score_all(example, texts))
            assert rewards == [1.0, 0.0, 0.0], example
    finally:
        host.close()
