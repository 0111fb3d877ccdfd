"""A program outside, with its own loop and its own rewards, trains a policy through real nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.cluster import Cluster

# In one process tests/runtime/test_agent_http.py shows it, with the agent of the documentation.
pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

AGENT = '''"""Ask four times, and be rewarded for digits; told nothing but an address and a token.

The second call goes on from the first. The third has a history with the answers cut short, and the
fourth goes on from the first again, at the same time as the third.
"""

import http.client
import json
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

endpoint = json.load(open(sys.argv[1]))


def post(path, body, session=""):
    headers = {"Authorization": f"Bearer {endpoint['token']}", "X-Echo-Session": session}
    data = json.dumps(body).encode()
    request = urllib.request.Request(endpoint["url"] + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read() or "null")


def play(episode):
    name, prompt = episode["session"], episode["prompt"]

    def ask(prompt):
        answer = post("/v1/completions", {"prompt": prompt, "max_tokens": 6}, name)
        return answer["choices"][0]["text"]

    first = ask(prompt)
    second = ask(prompt + first + "=")
    with ThreadPoolExecutor(2) as both:
        others = list(both.map(ask, (prompt + first[:1] + "=" + second[:1], prompt + first + "+")))
    reward = sum(map(str.isdigit, "".join([first, second, *others]))) / 24
    sys.stdout.write(json.dumps([name, reward]) + "\\n")
    post(f"/v1/echo/sessions/{name}/reward", {"reward": reward})


def work(_):
    try:
        while True:
            episode = post("/v1/echo/sessions", {"wait_s": 5})
            if episode is not None:
                play(episode)
    except (urllib.error.URLError, ConnectionError, http.client.HTTPException) as error:
        sys.stderr.write(f"the run is over: {error}\\n")


with ThreadPoolExecutor(8) as pool:
    list(pool.map(work, range(8)))
'''
MAX_STEPS = 12


def test_a_program_outside_trains_a_policy(cluster: Cluster, tmp_path: Path) -> None:
    cluster.settings = {
        "run.max_steps": MAX_STEPS,
        "agent.max_session_tokens": 40,
        "agent.listen": "tcp://127.0.0.1:0",
        "optimizer.learning_rate": 1e-2,
    }
    learner = cluster.start("learner")
    worker = cluster.start("worker", name="w1")
    endpoint = cluster.run_dir / "workers" / "w1" / "endpoint.json"
    cluster.wait_for(endpoint.exists, "the endpoint is up", alive=worker)
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    with (tmp_path / "agent.out").open("w+") as output:
        agent = subprocess.Popen(
            [sys.executable, str(script), str(endpoint)],
            env={k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            cluster.finish(learner, worker)
            _, complaints = agent.communicate(timeout=60)
            assert agent.returncode == 0, complaints
        finally:
            agent.kill()
    result = cluster.audit()
    assert result.num_steps == MAX_STEPS
    given = [json.loads(line)[1] for line in (tmp_path / "agent.out").read_text().splitlines()]
    booked = [reward for record in cluster.records("accepted") for reward in record["rewards"]]
    assert booked, "no group was accepted"
    assert set(booked) <= set(given), "rewards that no agent has given"
    rows = [row for row in cluster.metrics() if "reward/mean" in row]
    told = [row for row in rows if "agents/chains" in row]  # steps may be shorter than heartbeats
    # At least the cut history and the call at the same time begin chains, unless answers are short.
    assert 2 < mean(row["agents/chains"] for row in told) <= 4
    assert {row["agents/trained_share"] for row in told} == {1}
    rewards = [row["reward/mean"] for row in rows]
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.1, rewards
