"""Serves the newest value of each metric of a run to Prometheus, as gauges.

The metric `reward/mean` becomes the gauge `echo_reward_mean`. If the name of a metric contains a
task or a reason, this part of the name becomes a label. A table such as `workers/reward` becomes
one gauge with a label for the entry. Every gauge has the label `run`.

The library serves scrapes in its own threads, and the learner only replaces values in memory. So
the learner and the scrapes never wait for each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from echo.core.errors import ConfigError
from echo.core.extras import import_extra

LABELS = (
    (re.compile(r"eval/(?P<label>[^/]+)/(?P<rest>.+)"), "eval/", "task"),
    (re.compile(r"(?P<rest>reward)/(?P<label>[^/]+)/mean"), "", "part"),
    (re.compile(r"(?P<rest>count/(?:refused|discarded|dropped|steps_failed))/(?P<label>.+)"), "",
     "reason"),
    (re.compile(r"(?P<rest>groups/dropped|dropped)/(?P<label>.+)"), "", "reason"),
    (re.compile(r"(?P<rest>count/alerts)/(?P<label>.+)"), "", "kind"),
)  # fmt: skip
"""Rules for metrics with labels: (pattern that the metric's name matches, prefix of the gauge's
name, label)."""
PARTS = "reward/parts"
"""The gauge that has the values of all `reward/NAME/mean`. Its name must differ from the gauge of
`reward/mean`."""
TABLES = (
    ("workers/", "worker"), ("links/", "link"), ("cost/", "node"), ("staleness/", "staleness"),
)  # fmt: skip
"""Labels for metrics that are tables: (prefix of the table's name, label that tells its entries
apart)."""


def prometheus_client() -> Any:
    """Import and return the library.

    Raises:
        ConfigError: if the library is not installed.
    """
    return import_extra("prometheus_client", extra="prometheus", wanted_by="metrics.prometheus")


def gauge_of(metric: str) -> tuple[str, dict[str, str]]:
    """Return the name of the gauge for a metric, and the label that the metric's name contains."""
    labels: dict[str, str] = {}
    for pattern, prefix, label in LABELS:
        if (match := pattern.fullmatch(metric)) is not None:
            rest = PARTS if label == "part" else match["rest"]
            metric, labels = prefix + rest, {label: match["label"]}
            break
    return "echo_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric), labels


def label_of_table(metric: str) -> str:
    """Return the name of the label that tells the entries of a table apart."""
    return next((label for start, label in TABLES if metric.startswith(start)), "name")


class PrometheusEndpoint:
    """Serves the newest value of each metric at /metrics."""

    def __init__(self, address: str, *, run_name: str) -> None:
        """Listen at an address of the form "tcp://host:port".

        Raises:
            ConfigError: if the library is not installed, or the address cannot be used.
        """
        client = prometheus_client()
        self._gauge = client.metrics_core.GaugeMetricFamily
        self._run_name = run_name
        self._values: dict[str, Any] = {}
        """The newest value of each metric. The dict is replaced as a whole, because other threads
        read it."""
        registry = client.CollectorRegistry()
        registry.register(self)
        place = urlsplit(address)
        try:
            self._server, self._thread = client.start_http_server(
                place.port, place.hostname, registry=registry
            )
        except OSError as error:
            raise ConfigError(
                f'metrics.prometheus = "{address}": cannot listen there: {error.strerror}; choose '
                "another port"
            ) from error
        self.port: int = self._server.server_port

    def write(self, step: int, metrics: Mapping[str, Any], at: float) -> None:
        """Store the values that a row has. Metrics that the row lacks keep their values."""
        self._values = {**self._values, **metrics, "step": step, "time": at}

    def collect(self) -> Iterator[Any]:
        """Yield the gauges. The library calls this method at each scrape."""
        gauges: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for metric, value in self._values.items():
            name, labels = gauge_of(metric)
            entries = {"": value}
            if isinstance(value, Mapping):
                entries = dict(value)
            for key, number in entries.items():
                if not isinstance(number, int | float):
                    continue  # text
                more = {label_of_table(metric): str(key)} if isinstance(value, Mapping) else {}
                series = {"run": self._run_name, **labels, **more}
                gauges.setdefault(name, {})[tuple(series.items())] = number
        for name, found in gauges.items():
            names = [label for label, _ in next(iter(found))]
            gauge = self._gauge(name, "See docs/metrics.md.", labels=names)
            for labelled, number in found.items():
                gauge.add_metric([text for _, text in labelled], number)
            yield gauge

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
