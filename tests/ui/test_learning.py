"""What a summary tells of how a run learned, and that it tells nothing that was not measured."""

from __future__ import annotations

from typing import Any

from echo.ui.summary import as_text, learning_facts, summarise


def facts(*rows: dict[str, Any], num_last: int = 2) -> dict[str, str]:
    return dict(learning_facts(rows, num_last=num_last))


def test_nothing_measured_is_nothing_told() -> None:
    assert facts({"reward/mean": 0.5}) == {}


def test_groups_and_ratios_are_those_of_the_end() -> None:
    start = {"groups/useful": 1.0, "groups/all_right": 0.0, "groups/all_wrong": 0.0, "ess": 0.5}
    end = {"groups/useful": 0.6, "groups/all_right": 0.3, "groups/all_wrong": 0.1, "ess": 0.98}
    end |= {"mismatch_kl": 0.0012, "clip_ratio/mean": 0.034}
    found = facts(start, end, end)
    assert found["useful groups"] == "60% in the last 2 steps (30% all right, 10% all wrong)"
    assert found["off-policy"] == "ess 0.98, mismatch KL 0.0012, clipped 3.4% in the last 2 steps"


def measured(variance: float, **shares: float) -> dict[str, float]:
    causes = {"staleness": 0.0, "numerics": 0.0, "truncation": 0.0, "tokenisation": 0.0} | shares
    return {"attribution/variance": variance} | {f"attribution/{k}": v for k, v in causes.items()}


def test_causes_weigh_as_much_as_the_variance_they_explain() -> None:
    found = facts(
        measured(0.03, staleness=1.0),
        {"reward/mean": 0.5},
        measured(0.01, staleness=0.2, numerics=0.8),
        {"attribution/variance": 0.0},
    )
    assert found["mismatch"] == (
        "80% staleness, 20% numerics, 0% truncation, 0% tokenisation "
        "(variance 0.02 nats^2, 3 measurements)"
    )


def test_versions_that_were_gone_are_told() -> None:
    skipped = {"attribution/skipped": 0.25}
    assert facts(measured(0.03, staleness=1.0) | skipped)["mismatch"].endswith(
        "1 measurements); 25% of the tokens skipped, their versions are gone"
    )
    # All of them: there is nothing to divide, and that is said.
    assert facts({"attribution/skipped": 1.0, "attribution/tokens": 0.0})["mismatch"] == (
        "100% of the tokens skipped, their versions are gone"
    )


def test_a_bound_that_moved() -> None:
    rows = [{"staleness/bound": bound} for bound in (6, 4, 5)]
    assert facts(*rows)["staleness bound"] == "4 to 6, 5 in the end (causes in the ledger)"
    assert facts(rows[0], rows[0]) == {}


def test_reference() -> None:
    assert facts({"kl/reference": 0.02})["reference"] == "0.02 nats per token away"


def test_rollouts_that_were_continued_and_the_bias_in_their_lengths() -> None:
    lengths = {"lengths/trained/mean": 100, "lengths/trained/p90": 200,
               "lengths/sampled/mean": 120, "lengths/sampled/p90": 300}  # fmt: skip
    row = {
        "count/partials/resumed": 42, "partials/mean_age": 1.26, "partials/wasted_ratio": 0.015,
        "count/partials/handed_over": 3, **lengths,
    }  # fmt: skip
    found = facts({**row, "lengths/bias": -0.3}, {**row, "lengths/bias": -0.1})
    assert found["continued"] == (
        "42 times a group was continued, 1.3 steps old on average; 1.5% of the tokens not trained "
        "on; 3 handed over"
    )
    assert found["lengths"] == (
        "trained 100 tokens (p90 200), sampled 120 (p90 300), bias -20.0% over the run"
    )
    assert "lengths" not in facts({**lengths, "lengths/bias": 0.0})


def test_a_summary_shows_them(make_run: Any) -> None:
    run_dir = make_run()
    assert "useful groups" not in as_text(summarise(run_dir))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step":11,"time":1011,"reward/mean":0.5,"groups/useful":0.25,'
            '"groups/all_right":0.75,"groups/all_wrong":0.0}\n'
        )
    lines = as_text(summarise(run_dir), width=200).splitlines()
    [line] = [line for line in lines if line.startswith("useful groups")]
    assert line.split(maxsplit=2)[2].strip() == (
        "25% in the last 5 steps (75% all right, 0% all wrong)"
    )
