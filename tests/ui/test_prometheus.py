"""The endpoint for Prometheus, and the dashboard that reads it."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

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
