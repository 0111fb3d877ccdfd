from __future__ import annotations

import pytest

from echo.core.metrics import CostView, NodeView
from echo.ui import live


def test_staleness_bins_mark_the_bound_and_keep_every_token() -> None:
    assert live.staleness_bins({0: 5, 1: 3}, 3, 8) == [
        ("0", 5, False),
        ("1", 3, False),
        ("2", 0, False),
        ("3", 0, True),
    ]
    grouped = live.staleness_bins(dict.fromkeys(range(12), 1), 11, 4)
    assert grouped == [("0-2", 3, False), ("3-5", 3, False), ("6-8", 3, False), ("9-11", 3, True)]


def test_tokens_beyond_the_bound_get_a_bin_of_their_own() -> None:
    assert live.staleness_bins({1: 4, 5: 1}, 1, 8)[-1] == (">1", 1, False)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (999.9, "1k"), (12345, "12.3k"), (4.56e6, "4.56M"), (2e10, "20G")],
)
def test_short_count(value: float, text: str) -> None:
    assert live.short_count(value) == text


def test_node_table_shows_every_column_where_there_is_room(make_snapshot) -> None:
    rows = [row.plain for row in live.node_table(make_snapshot().nodes, 100, 9)]
    assert rows[0].split() == [
        "node", "role", "version", "stale", "tok/s", "bytes/s", "leases", "state", "parent", "seen",
    ]  # fmt: skip
    assert rows[3].split() == [
        "w2", "worker", "v6", "1", "1.23k", "2", "KiB", "5", "generating", "r1", "0:00",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows[1:]] == ["learner", "r1", "w2", "w10"]


def test_node_table_drops_the_least_telling_columns_first(make_snapshot) -> None:
    heading = live.node_table(make_snapshot().nodes, 45, 9)[0].plain.split()
    assert "seen" not in heading
    assert {"node", "version", "state"} <= set(heading)


def test_node_table_keeps_nodes_in_trouble_and_sums_up_the_rest() -> None:
    nodes = [NodeView(node_id=f"w{i}", role="worker", state="generating") for i in range(30)]
    nodes[20] = NodeView(node_id="w20", role="worker", state="lost")
    rows = [row.plain.strip() for row in live.node_table(nodes, 100, 5)]
    assert len(rows) == 5
    assert [row.split()[0] for row in rows[1:4]] == ["w0", "w1", "w20"]
    assert rows[4] == "and 27 more: 27 generating"


def test_rewards_that_failed_stand_before_the_pass_rates(make_snapshot) -> None:
    snapshot = make_snapshot(eval_errors={5: 12})
    title, *_ = live.reward_chart(snapshot, 100, 8)
    assert "12 rewards failed   held-out ● 0.61" in title.plain


def test_long_waits_wrap_and_end_visibly_cut(make_snapshot) -> None:
    snapshot = make_snapshot(waiting_for="12 groups; " + "9 on w3, which waits for v17 " * 9)
    rows = live.status(snapshot, 60, num_wait_rows=2)
    assert len(rows) == 4
    assert rows[2].plain.startswith("learner  idle 12% (run 25%)   waits for 12 groups; 9 on")
    assert rows[3].plain.rstrip().endswith("...")


COST = CostView(
    per_h=16.2,
    total=3.456,
    per_million_tokens=1.25,
    standby_per_h=14.0,
    unconfirmed_per_h=0.0,
    budget_per_run=20.0,
    num_active=1,
    num_standby=2,
    decision="fewer or cheaper workers are enough: 1 of 3 workers active",
)


def test_costs_have_a_row_and_the_last_decision_another(make_snapshot) -> None:
    without = live.status(make_snapshot(), 120, num_wait_rows=1)
    rows = live.status(make_snapshot(cost=COST), 140, num_wait_rows=1)
    assert [row.plain.rstrip() for row in rows[len(without) :]] == [
        "cost     $16.20/h   $3.46 so far of $20.00   $1.25 per million tokens   "
        "1 active, 2 on standby   $14.00/h for machines on standby",
        "         fewer or cheaper workers are enough: 1 of 3 workers active",
    ]


def test_in_a_narrow_view_what_it_costs_goes_first(make_snapshot) -> None:
    row = live.status(make_snapshot(cost=COST), 60, num_wait_rows=1)[-2]
    assert row.plain.rstrip() == "cost     $16.20/h   $3.46 so far of $20.00"
