"""What a run's metrics say about how it learned: which groups taught, and how far off-policy."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from echo.records.run_files import MetricsRow

CAUSES = ("staleness", "numerics", "truncation", "tokenisation")
"""Of the mismatch between sampler and learner, in the order in which they are told."""


def learning_facts(train: Sequence[MetricsRow], *, num_last: int) -> tuple[tuple[str, str], ...]:
    """Return (label, text) of what the run has measured; what it has not is left out.

    Args:
        train: rows of optimizer steps, by step.
        num_last: how many of the last steps stand for "in the end".
    """
    last = train[-num_last:]
    facts = [
        ("useful groups", _groups(last)),
        ("off-policy", _off_policy(last)),
        ("mismatch", _mismatch(train)),
        ("staleness bound", _bound(train)),
        ("reference", _reference(last)),
        ("cost", _cost(train)),
        ("continued", _continued(train[-1])),
        ("lengths", _lengths(train)),
    ]
    return tuple((label, text) for label, text in facts if text)


def _mean(rows: Sequence[MetricsRow], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return fmean(values) if values else None


def _groups(last: Sequence[MetricsRow]) -> str:
    useful = _mean(last, "groups/useful")
    right, wrong = _mean(last, "groups/all_right"), _mean(last, "groups/all_wrong")
    if useful is None or right is None or wrong is None:
        return ""
    return (
        f"{useful:.0%} in the last {len(last)} steps ({right:.0%} all right, {wrong:.0%} all wrong)"
    )


def _off_policy(last: Sequence[MetricsRow]) -> str:
    names = {"ess": "ess", "mismatch KL": "mismatch_kl", "clipped": "clip_ratio/mean"}
    values = {label: _mean(last, name) for label, name in names.items()}
    parts = [
        f"{label} {value:.1%}" if label == "clipped" else f"{label} {value:.3g}"
        for label, value in values.items()
        if value is not None
    ]
    return ", ".join(parts) + f" in the last {len(last)} steps" if parts else ""


def _mismatch(train: Sequence[MetricsRow]) -> str:
    """Each cause's part of the variance, summed over all measurements."""
    measured = [row for row in train if row.get("attribution/variance") is not None]
    shared = [row for row in measured if row.get(f"attribution/{CAUSES[0]}") is not None]
    total = sum(row["attribution/variance"] for row in shared)
    skipped = _mean(train, "attribution/skipped")
    gone = f"{skipped:.0%} of the tokens skipped, their versions are gone" if skipped else ""
    if not total:
        return gone
    shares = {
        cause: sum(row[f"attribution/{cause}"] * row["attribution/variance"] for row in shared)
        / total
        for cause in CAUSES
    }
    text = ", ".join(f"{share:.0%} {cause}" for cause, share in shares.items())
    text += f" (variance {total / len(shared):.3g} nats^2, {len(measured)} measurements)"
    return f"{text}; {gone}" if gone else text


def _bound(train: Sequence[MetricsRow]) -> str:
    bounds = [row["staleness/bound"] for row in train if "staleness/bound" in row]
    if not bounds or min(bounds) == max(bounds):
        return ""
    return f"{min(bounds):g} to {max(bounds):g}, {bounds[-1]:g} in the end (causes in the ledger)"


def _reference(last: Sequence[MetricsRow]) -> str:
    divergence = _mean(last, "kl/reference")
    return "" if divergence is None else f"{divergence:.3g} nats per token away"


def _cost(train: Sequence[MetricsRow]) -> str:
    """What it cost in all; a run that was resumed goes on counting."""
    rows = [row for row in train if row.get("cost/total") is not None]
    if not rows:
        return ""
    text = f"${rows[-1]['cost/total']:.2f}, ${rows[-1]['cost/per_hour']:.2f}/h in the end"
    per_token = rows[-1].get("cost/per_million_tokens")
    return text if per_token is None else f"{text}, ${per_token:.3g} per million accepted tokens"


def _continued(row: MetricsRow) -> str:
    """What became of the rollouts that did not end in the call of the engine that began them."""
    resumed = row.get("count/partials/resumed")
    age, wasted = row.get("partials/mean_age"), row.get("partials/wasted_ratio")
    if not resumed or age is None or wasted is None:
        return ""
    shipped = row.get("count/partials/handed_over", 0)
    return (
        f"{resumed:.0f} times a group was continued, {age:.1f} steps old on average; "
        f"{wasted:.1%} of the tokens not trained on; {shipped:.0f} handed over"
    )


def _lengths(train: Sequence[MetricsRow]) -> str:
    """Whether what is trained on is as long as what is sampled; only where it differs."""
    rows = [row for row in train if row.get("lengths/bias") is not None]
    if not rows or not rows[-1].get("count/partials/resumed"):
        return ""
    last = rows[-1]
    return (
        f"trained {last['lengths/trained/mean']:.0f} tokens (p90 {last['lengths/trained/p90']:.0f})"
        f", sampled {last['lengths/sampled/mean']:.0f} (p90 {last['lengths/sampled/p90']:.0f}), "
        f"bias {fmean(row['lengths/bias'] for row in rows):+.1%} over the run"
    )
