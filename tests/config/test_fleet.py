"""Fleet files: the example loads, and every bad row is named with what to write instead."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from echo.config.fleet_file import override, parse_fleet, read_tables, split_override
from echo.core.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "configs" / "fleet-example.toml"

GOOD: dict[str, Any] = {
    "job": {
        "model": "Qwen3-0.6B",
        "groups_per_step": 8,
        "group_size": 8,
        "completion_tokens": 500,
        "max_completion_tokens": 1000,
        "max_staleness": 2,
    },
    "learner": {"gpu": "H100-SXM", "train_s": "30s", "price_per_h": 2.5, "uplink_mbit_per_s": 800},
    "regions": [{"name": "frankfurt", "mbit_per_s": 400}],
    "offers": [
        {
            "gpu": "RTX 4090",
            "region": "frankfurt",
            "count": 4,
            "price_per_h": 0.34,
            "down_mbit_per_s": 400,
            "up_mbit_per_s": 80,
            "tokens_per_s": 3000,
            "concurrency": 64,
        }
    ],
}


def changed(*edits: tuple[str, Any]) -> dict[str, Any]:
    """GOOD with values set at dotted places; the value `...` removes one."""
    table = copy.deepcopy(GOOD)
    for place, value in edits:
        *parents, last = place.split(".")
        here: Any = table
        for part in parents:
            here = here[int(part)] if part.isdigit() else here[part]
        if value is ...:
            del here[last]
        else:
            here[last] = value
    return table


def problems(*edits: tuple[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_fleet(changed(*edits))
    return str(caught.value)


def test_the_example_is_complete_and_may_stand_in_two_files(tmp_path: Path) -> None:
    request = parse_fleet(read_tables([EXAMPLE]))
    names = [offer.name for offer in request.fleet.offers]
    assert names == ["fra-4090", "ore-4090-spot", "ore-a100"]
    assert request.periods == (1, 2, 3, 4, 5, 6, 7)
    assert request.job.version_bytes == 800e6
    job, rest = EXAMPLE.read_text(encoding="utf-8").split("[learner]")
    (tmp_path / "job.toml").write_text(job)
    (tmp_path / "fleet.toml").write_text("[learner]" + rest)
    tables = read_tables([tmp_path / "fleet.toml", tmp_path / "job.toml"])
    assert parse_fleet(tables).job == request.job
    with pytest.raises(ConfigError, match=r"job.toml: \[job\] stands in another file, too"):
        read_tables([EXAMPLE, tmp_path / "job.toml"])


def test_units_become_bytes_and_seconds() -> None:
    request = parse_fleet(GOOD)
    [offer] = request.fleet.offers
    assert (offer.down_bytes_per_s, offer.up_bytes_per_s) == (50e6, 10e6)
    assert request.fleet.uplink_bytes_per_s == 100e6
    assert request.job.train_s == 30.0
    assert request.job.version_bytes == 2 * 0.60e9  # all weights in bfloat16
    assert request.notices == ()


def test_a_rate_that_is_not_given_is_estimated_and_said_so() -> None:
    left_out = ("offers.0.tokens_per_s", "offers.0.concurrency", "learner.train_s")
    request = parse_fleet(changed(*((place, ...) for place in left_out)))
    assert request.fleet.offers[0].tokens_per_s > 1000
    told = [notice.partition(":")[0] for notice in request.notices]
    assert told == ["RTX 4090 in frankfurt", "learner"]
    with pytest.raises(ConfigError, match="no node on offer can run the model"):
        parse_fleet(changed(*((place, ...) for place in left_out), ("job.model", "Qwen3-32B")))


def test_ones_own_machines_cost_nothing() -> None:
    request = parse_fleet(changed(("offers.0.price_per_h", 0)))
    assert request.fleet.offers[0].price_per_h == 0
    assert request.notices == ()


OWN_GPU = {"name": "X1", "tflops": 100, "gb_per_s": 1000, "memory_gib": 24}


def test_the_files_own_gpus_and_models_are_known() -> None:
    sizes = {"num_params": 1e9, "num_layers": 20, "hidden_size": 2048, "num_kv_heads": 8}
    table = changed(("offers.0.gpu", "X1"), ("job.model", "mine"))
    request = parse_fleet({**table, "gpus": [OWN_GPU], "models": [{"name": "mine", **sizes}]})
    assert request.model.num_params == 1e9
    assert request.fleet.offers[0].name == "X1"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("offers.0.price_per_h", -1.0, "offers[1] (RTX 4090, frankfurt): price_per_h = -1.0: must"),
        ("offers.0.price_per_h", ..., "price_per_h: missing ($ per hour for one node;"),
        ("offers.0.gpu", "RTX4900", '"RTX4900": unknown; did you mean "RTX 4090"?'),
        ("offers.0.gpu", "abacus", 'gpu = "abacus": unknown; known are T4, '),
        ("offers.0.region", "frankfort", '"frankfort": unknown; did you mean "frankfurt"?'),
        ("regions.0.mbit_per_s", ..., 'region "frankfurt" has no path from the learner'),
        ("regions", [], "there are no [[regions]]"),
        ("offers", [], "the fleet is empty; describe what can be rented"),
        ("offers", ..., "the fleet is empty"),
        ("job", ..., "[job] is missing"),
        ("job.modl", "x", "[job]: modl: unknown key; did you mean model?"),
        ("jobs", {}, "[jobs]: unknown table; did you mean job?"),
        ("job.model", "Qwen3-5B", '[job]: model = "Qwen3-5B": unknown; did you mean "Qwen3-'),
        ("job.publish_period", 4, "publish_period = 4 with max_staleness = 2"),
        ("job.publish_period", 0, "publish_period = 0: must be"),
        ("job.completion_tokens", 2000, "cannot exceed max_completion_tokens = 1000"),
        ("job.budget_per_h", 0.2, "budget_per_h = 0.2 does not pay for a single node"),
        ("job.useful_share", 0, "useful_share = 0: must be greater than 0"),
        ("learner.train_s", "30m", 'train_s = "30m": must be "30m" is not a duration'),
        ("learner", [], "learner must be written [learner], one table"),
        ("offers", {}, "offers must be written [[offers]], a list of tables"),
        ("offers.0.concurrency", ..., "tokens_per_s and concurrency were measured together"),
    ],
)
def test_each_problem_names_its_row(place: str, value: Any, message: str) -> None:
    assert message in problems((place, value))


def test_rows_that_are_wrong_are_compared_with_the_others_all_the_same() -> None:
    text = problems(
        ("offers.0.price_per_h", -1),
        ("offers.0.gpu", "RTX 40900"),
        ("offers.0.region", "mars"),
        ("job.groups_per_step", 0),
        ("job.model", "none"),
        ("job.publish_period", 20),
        ("learner.price_per_h", ...),
        ("learner.gpu", "H1000-SXM"),
    )
    assert text.startswith("the fleet has 8 problems")
    for part in (
        "price_per_h = -1", 'gpu = "RTX 40900"', 'region = "mars"', "groups_per_step = 0",
        'model = "none"', "publish_period = 20", "price_per_h: missing", 'gpu = "H1000-SXM"',
    ):  # fmt: skip
        assert part in text


def test_a_bad_row_is_known_by_its_name() -> None:
    edits = (("offers.0.gpu", "X1"), ("gpus", [OWN_GPU | {"tflops": -1}]))
    assert problems(*edits, ("regions.0.mbit_per_s", -1)).startswith("the fleet has 2 problems")


@pytest.mark.parametrize("name", [..., 3, ["frankfurt"]])
def test_a_region_without_a_name_is_a_problem_like_others(name: object) -> None:
    text = problems(("regions.0.name", name), ("job.model", "Qwen3-0.6"))
    assert "regions[1]" in text
    assert "did you mean" in text, "the model, too"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("offers.count=3", r"offers\.count: .* is a list; write offers\.NAME\.count=3"),
        ("regions.paris.latency_s=1", "no row of .* called 'paris'"),
        ("learner.gpu.name=x", "no row of .* called 'gpu'"),
        ("sim.rent.x=1", r"sim must be written \[sim\]"),
        ("job.margin=1", r"job must be written \[job\]"),
    ],
)
def test_an_override_of_what_is_not_there_says_so(text: str, message: str) -> None:
    tables = changed(("sim", 3), *([("job", 3)] if text.startswith("job") else []))
    with pytest.raises(ConfigError, match=message):
        override(tables, *split_override(text))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    with pytest.raises(ConfigError, match=r"one\.toml: cannot be read"):
        read_tables([EXAMPLE, path])
    for text in ("[job", f"a = {'[' * 5000}", f"a = {'9' * 5000}"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"one\.toml: not valid TOML"):
            read_tables([EXAMPLE, path])
    with pytest.raises(ConfigError) as caught:  # of all files at once
        read_tables([path, tmp_path / "two.toml", EXAMPLE, EXAMPLE])
    for text in ("one.toml: not", "two.toml: cannot", "example.toml: [job] stands in another"):
        assert text in str(caught.value)


def test_names_must_differ() -> None:
    text = problems(("offers", GOOD["offers"] * 2), ("regions", GOOD["regions"] * 2))
    assert 'a second region called "frankfurt"' in text
    assert "offers[2] (RTX 4090, frankfurt): a second offer of" in text
    # Offers of one kind in two regions need names for their nodes.
    regions = [*GOOD["regions"], {"name": "oregon", "mbit_per_s": 400}]
    offers = [*GOOD["offers"], GOOD["offers"][0] | {"region": "oregon"}]
    text = problems(("regions", regions), ("offers", offers))
    assert "a second offer of nodes called RTX-4090; give each a name of its own" in text
    offers[1]["name"] = "oregon"
    assert len(parse_fleet(changed(("regions", regions), ("offers", offers))).offers) == 2
