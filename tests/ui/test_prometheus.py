"""The endpoint for Prometheus, and the dashboard that reads it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import pytest
from metrics_page import MEANINGS

from echo.core.errors import ConfigError
from echo.ui.prometheus import gauge_of
from echo.ui.sinks import Metric, MetricsWriter

ROOT = Path(__file__).resolve().parents[2]


def scrape(writer: MetricsWriter) -> list[str]:
    """Return the samples that a scrape reads."""
    assert writer.endpoint is not None
    url = f"http://127.0.0.1:{writer.endpoint.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_the_newest_value_of_each_metric_is_read_with_its_labels(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / 'r"1', prometheus="tcp://127.0.0.1:0") as writer:
        assert scrape(writer) == []
        tables: dict[str, Metric] = {
            "workers/reward": {"w1": 0.25, "w2": 1.0},
            "staleness/hist": {"0": 7},
        }
        writer.write(1, {"reward/mean": 0.1, "explain": {"cause": "slow link"}}, at=10.0)
        writer.write(2, {"reward/mean": 0.5, "reward/format/mean": 0.2, **tables}, at=20.0)
        writer.write(2, {"eval/gsm8k/pass@1": 0.75, "count/refused/stale": 3}, at=21.5)
        own = 'run="r\\"1"'
        assert set(scrape(writer)) == {
            f"echo_reward_mean{{{own}}} 0.5",
            f'echo_reward_parts{{part="format",{own}}} 0.2',
            f'echo_workers_reward{{{own},worker="w1"}} 0.25',
            f'echo_workers_reward{{{own},worker="w2"}} 1.0',
            f'echo_staleness_hist{{{own},staleness="0"}} 7.0',
            f'echo_eval_pass_1{{{own},task="gsm8k"}} 0.75',
            f'echo_count_refused{{reason="stale",{own}}} 3.0',
            f"echo_step{{{own}}} 2.0",
            f"echo_time{{{own}}} 21.5",
        }
        port = writer.endpoint.port if writer.endpoint else 0
        taken = f"metrics.prometheus = .tcp://127.0.0.1:{port}.: cannot listen there: Address"
        with pytest.raises(ConfigError, match=taken):
            MetricsWriter(tmp_path / "other", prometheus=f"tcp://127.0.0.1:{port}")
        assert not (tmp_path / "other").exists()


def test_the_dashboard_names_only_metrics_that_exist() -> None:
    known = {gauge_of(metric.replace("*", "x"))[0] for part in MEANINGS.values() for metric in part}
    starts = {name[:-1] for name in known if name.endswith("_x")}
    asked = re.findall(r"echo_\w+", (ROOT / "configs" / "grafana.json").read_text())
    assert len(set(asked)) > 20
    unknown = {name for name in asked if name not in known and not name.startswith(tuple(starts))}
    assert unknown == set()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    dashboard = json.loads((ROOT / "configs" / "grafana.json").read_text())
    queries = [
        target["expr"].replace("$run", ".*")
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    with MetricsWriter(tmp_path / "run", prometheus="tcp://127.0.0.1:0") as writer:
        assert writer.endpoint is not None
        writer.write(1, row_of_all_metrics(), at=time.time())
        job = {
            "job_name": "echo",
            "static_configs": [{"targets": [f"127.0.0.1:{writer.endpoint.port}"]}],
        }
        settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
        (tmp_path / "prometheus.yml").write_text(json.dumps(settings))
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{holder.getsockname()[1]}"
        command = [
            "prometheus", f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address={address}",
        ]  # fmt: skip
        with (tmp_path / "log").open("w") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            give_up_at = time.monotonic() + 60
            missing = queries
            while missing and time.monotonic() < give_up_at:
                time.sleep(0.5)
                missing = [query for query in missing if not answers(address, query)]
        finally:
            server.kill()
            server.wait()
    assert len(queries) > 20
    assert missing == []


def row_of_all_metrics() -> dict[str, Metric]:
    """Return a row with every metric that the documentation names; a table has one entry."""
    meanings = {name: text for part in MEANINGS.values() for name, text in part.items()}
    row: dict[str, Metric] = {}
    for name, meaning in meanings.items():
        value: Metric = {"x": 1.0} if "a table" in meaning else 1.0
        for each in re.findall(r"`(\w+)`", meaning) if name == "workers/*" else ["x"]:
            row[name.replace("*", each)] = value
    return row


def answers(address: str, query: str) -> bool:
    """Return whether Prometheus has a value for a query; False while it starts."""
    url = f"http://{address}/api/v1/query?{urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(json.load(answer)["data"]["result"])
    except (ConnectionError, urllib.error.URLError):
        return False
