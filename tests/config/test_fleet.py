"""Fleet files: the example loads, and every bad row is named with what to write instead."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.config.fleet_file import FleetRequest, parse_fleet, parse_scenario, read_files
from echo.config.fleet_schema import ScenarioFile, tables_of
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


def parsed(tables: dict[str, Any]) -> FleetRequest:
    return parse_fleet([("fleet.toml", tables)])


def problems(*edits: tuple[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(changed(*edits))
    return str(caught.value)


def test_the_example_is_complete_and_may_stand_in_two_files(tmp_path: Path) -> None:
    request = parse_fleet(read_files([EXAMPLE]))
    names = [offer.name for offer in request.fleet.offers]
    assert names == ["fra-4090", "ore-4090-spot", "ore-a100"]
    assert request.periods == (1, 2, 3, 4, 5, 6, 7)
    assert request.job.version_bytes == 800e6
    job, rest = EXAMPLE.read_text(encoding="utf-8").split("[learner]")
    (tmp_path / "job.toml").write_text(job)
    (tmp_path / "fleet.toml").write_text("[learner]" + rest)
    apart = parse_fleet(read_files([tmp_path / "fleet.toml", tmp_path / "job.toml"]))
    assert apart.job == request.job
    with pytest.raises(ConfigError, match=r"job.toml: \[job\] stands in another file, too"):
        parse_fleet(read_files([EXAMPLE, tmp_path / "job.toml"]))


def test_units_become_bytes_and_seconds() -> None:
    request = parsed(GOOD)
    [offer] = request.fleet.offers
    assert (offer.down_bytes_per_s, offer.up_bytes_per_s) == (50e6, 10e6)
    assert request.fleet.uplink_bytes_per_s == 100e6
    assert request.job.train_s == 30.0
    assert request.job.version_bytes == 2 * 0.60e9  # all weights in bfloat16
    assert request.notices == ()


def test_a_rate_that_is_not_given_is_estimated_and_said_so() -> None:
    left_out = ("offers.0.tokens_per_s", "offers.0.concurrency", "learner.train_s")
    request = parsed(changed(*((place, ...) for place in left_out)))
    assert request.fleet.offers[0].tokens_per_s > 1000
    told = [notice.partition(":")[0] for notice in request.notices]
    assert told == ["RTX 4090 in frankfurt", "learner"]
    with pytest.raises(ConfigError, match="no node on offer can run the model"):
        parsed(changed(*((place, ...) for place in left_out), ("job.model", "Qwen3-32B")))


def test_ones_own_machines_cost_nothing() -> None:
    request = parsed(changed(("offers.0.price_per_h", 0)))
    assert request.fleet.offers[0].price_per_h == 0
    assert request.notices == ()


OWN_GPU = {"name": "X1", "tflops": 100, "gb_per_s": 1000, "memory_gib": 24}


def test_the_files_own_gpus_and_models_are_known() -> None:
    sizes = {"num_params": 1e9, "num_layers": 20, "hidden_size": 2048, "num_kv_heads": 8}
    table = changed(("offers.0.gpu", "X1"), ("job.model", "mine"))
    request = parsed({**table, "gpus": [OWN_GPU], "models": [{"name": "mine", **sizes}]})
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
        ("offers", [], "fleet.toml: offers: the fleet is empty; describe what can be rented"),
        ("offers", ..., "the fleet is empty"),
        ("job", ..., "[job] is missing"),
        ("job.modl", "x", '[job]: modl = "x": unknown key; did you mean model?'),
        ("jobs", {}, "[jobs]: unknown table; did you mean job?"),
        ("sim", {"seed": 1}, "[sim]: only a scenario has this table, for `echo-rl sim`"),
        ("job.model", "Qwen3-5B", '[job]: model = "Qwen3-5B": unknown; did you mean "Qwen3-'),
        ("job.publish_period", 4, "publish_period = 4: must be at most max_staleness + 1 = 3"),
        ("job.publish_period", 0, "publish_period = 0: must be"),
        ("job.completion_tokens", 2000, "cannot exceed max_completion_tokens = 1000"),
        ("job.budget_per_h", 0.2, "budget_per_h = 0.2: does not pay for a single node"),
        ("job.useful_share", 0, "useful_share = 0: must be a number, above 0, at most 1 (Share of"),
        ("learner.train_s", "30m", 'train_s = "30m": "30m" is not a duration'),
        ("learner", [], "learner = []: must be written [learner], one table"),
        ("offers", {}, "offers = {}: must be written [[offers]], a list of tables"),
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


def test_a_value_that_is_wrong_in_itself_is_told_once() -> None:
    text = problems(("job.publish_period", 20.5))
    assert text.startswith('fleet.toml: [job]: publish_period = 20.5: must be "auto" or an integer')


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
        ("learner.gpu.name=x", r"learner\]: gpu\.name = \"x\": this key takes a plain value"),
        ("sim.rent.x=1", r"sim = 3: must be written \[sim\]"),
        ("job.margin=1", r"job = 3: must be written \[job\]"),
    ],
)
def test_an_override_of_what_is_not_there_says_so(text: str, message: str) -> None:
    tables = changed(("sim", 3), *([("job", 3)] if text.startswith("job") else []))
    with pytest.raises(ConfigError, match=message):
        parse_scenario([("a.toml", tables)], [("--set", text)])


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    with pytest.raises(ConfigError, match=r"one\.toml: cannot be read"):
        read_files([EXAMPLE, path])
    for text in ("[job", f"a = {'[' * 5000}", f"a = {'9' * 5000}"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"one\.toml: not valid TOML"):
            read_files([EXAMPLE, path])
    with pytest.raises(ConfigError) as caught:  # of all files at once
        read_files([path, tmp_path / "two.toml", EXAMPLE, EXAMPLE])
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
    assert len(parsed(changed(("regions", regions), ("offers", offers))).offers) == 2


# --- where a value is from ------------------------------------------------------------------------


def complaints(*files: tuple[str, dict[str, Any]], override: tuple[str, ...] = ()) -> list[str]:
    """The lines of the error that a scenario of these files is."""
    with pytest.raises(ConfigError) as caught:
        parse_scenario(files, [("--set", text) for text in override])
    return str(caught.value).splitlines()


def test_every_problem_names_the_file_or_the_option_that_set_the_value() -> None:
    fleet = {name: GOOD[name] for name in ("learner", "regions", "offers")}
    job = {"job": GOOD["job"] | {"group_size": 1}, "sim": {"seed": 0}}
    overrides = ("job.max_staleness=-1", "offers.frankfurt.count=0", "sim.num_stepz=3", "sim.x.y=1")
    found = complaints(("fleet.toml", fleet), ("job.toml", job), override=overrides)
    assert found[0] == "the scenario has 5 problems:"
    for line in (
        "  --set: [sim]: num_stepz = 3: unknown key; did you mean num_steps?",
        "  --set: [sim]: x.y = 1: this key takes a plain value, not a table",
        "  job.toml: [job]: group_size = 1: must be an integer, at least 2 (Rollouts per group)",
        "  --set: [job]: max_staleness = -1: must be an integer, at least 0 (Inclusive bound S on "
        "staleness, optimizer steps)",
        "  --set: offers[1] (RTX 4090, frankfurt): count = 0: must be an integer, at least 1, at "
        "most 100000 (Number of nodes on offer)",
    ):
        assert line in found


def test_a_fleets_problems_and_a_scenarios_are_found_in_one_pass() -> None:
    table = changed(
        ("job.model", "Qwen3-0.6"),
        ("learner", {}),
        ("sim", {"rent": {"RTX 4080": 1}, "speed_spread": 2}),
        ("faults", [{"at_s": 1, "kind": "kill", "target": "RTX-4090-5"}, 3]),
        ("prices", [{"offer": "H100", "at_s": "soon", "price_per_h": 1}]),
        ("activation", {"margin": -1}),
    )
    found = "\n".join(complaints(("all.toml", table)))
    for part in (
        '[job]: model = "Qwen3-0.6": unknown; did you mean "Qwen3-0.6B"?',
        "[learner]: gpu: missing (Name of the GPU)",
        '[sim]: rent.RTX 4080 = 1: unknown; did you mean "RTX 4090"?',
        "[sim]: speed_spread = 2: must be a number, at least 0, below 1",
        'faults[1]: target = "RTX-4090-5": unknown; did you mean "RTX 4090"?',
        "faults[2] = 3: must be a table of [[faults]]",
        'prices[1]: at_s = "soon": "soon" is not a duration',
        'prices[1]: offer = "H100": unknown; known are RTX 4090',
        "[activation]: margin = -1: must be a number, at least 0, at most 10",
    ):
        assert part in found, part


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("job.price_per_h=1", "did you mean learner.price_per_h or regions.NAME.relay.price_per_h"),
        ("groups_per_step=4", "did you mean job.groups_per_step?"),
        ("count=4", "did you mean offers.NAME.count?"),
        ("regions.frankfort.latency_s=1", "called 'frankfort'; did you mean 'frankfurt'?"),
        ("regions.frankfurt.relay=3", "relay = 3: must be a table with mbit_per_s, price_per_h, "),
        (
            "regions.frankfurt.relay.price_per_h=1",
            "--set: regions[1] (frankfurt): relay.mbit_per_s: missing",
        ),
        ("offers=3", "[[offers]] is a list; write offers.NAME=3"),
        ("job=3", "--set: job = 3: must be written [job], one table"),
        ("sim.rent.RTX 4090=-1", "rent.RTX 4090 = -1: must be greater than or equal to 0"),
        ("sim.rent=3", "rent = 3: must be a table"),
        (f"sim.seed={2**64}", "has more than 64 bits"),
        ("job.margin=inf", "margin = inf: must be a number, at least 0"),
        ("=", '"=" is not an override; write table.key=value or, for lists, list.name.key=value'),
    ],
)
def test_what_an_override_may_have_meant_is_said(override: str, message: str) -> None:
    assert message in "\n".join(complaints(("a.toml", GOOD), override=(override,)))


def test_an_override_changes_one_value_of_a_row_and_the_later_one_wins() -> None:
    overrides = [
        ("--set", "offers.RTX 4090.count=2"),
        ("--set", "offers.frankfurt={count=3, price_per_h=1}"),
        ("--sweep", "sim.rent.RTX 4090=1"),
        ("--set", "regions.frankfurt.latency_s=15ms"),
    ]
    file, request = parse_scenario([("a.toml", GOOD)], overrides)
    [offer], [region] = file.offers, file.regions
    assert (offer.count, offer.price_per_h, offer.tokens_per_s) == (3, 1, 3000)
    assert (file.sim.rent, region.latency_s) == ({"RTX 4090": 1}, 0.015)
    assert request.fleet.offers[0].count == 3
    two = changed(("offers", [GOOD["offers"][0] | {"name": name} for name in "ab"]))
    [found] = complaints(("a.toml", two), override=("offers.frankfurt.count=3",))
    assert "2 rows of [[offers]] are called 'frankfurt'; give each a name" in found


def test_activation_is_on_where_its_table_is_written() -> None:
    for more, mode in ((GOOD, "off"), (GOOD | {"activation": {}}, "on")):
        file, _ = parse_scenario([("a.toml", more)])
        assert file.activation.mode == mode


def test_nodes_that_cannot_run_the_model_cannot_be_asked_for() -> None:
    small = {**GOOD["offers"][0], "name": "small", "gpu": "T4"}
    del small["tokens_per_s"], small["concurrency"]
    table = changed(("job.model", "Qwen3-32B"), ("offers", [*GOOD["offers"], small]))
    parse_scenario([("a.toml", table)])
    table["faults"] = [{"at_s": 1, "kind": "kill", "target": "small-1"}]
    [found] = complaints(("a.toml", table))
    assert 'target = "small-1": unknown' in found


FULL = GOOD | {
    "sim": {"rent": {"RTX 4090": 2}},
    "faults": [{"at_s": 1, "kind": "kill", "target": "*"}],
    "prices": [{"offer": "RTX 4090", "at_s": 3, "price_per_h": 1}],
    "activation": {},
    "gpus": [OWN_GPU],
}
PLACES = [
    (name, *row, key)
    for name, (table, is_list) in tables_of(ScenarioFile).items()
    for row in ([(), (0,)] if is_list else [()])
    for key in (*table.model_fields, "other")
    if name in FULL and (row or not is_list)
]
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["RTX 4090", "frankfurt", "cut", "auto", "30s"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from([*PLACES, *((n,) for n in FULL)]), ANY_VALUE, max_size=4))
def test_no_value_does_anything_but_load_or_be_reported(values: dict[Any, Any]) -> None:
    table = copy.deepcopy(FULL)
    for place in sorted(values, key=len, reverse=True):
        here: Any = table
        for part in place[:-1]:
            here = here[part]
        here[place[-1]] = values[place]
    with suppress(ConfigError):
        parse_scenario([("a.toml", table)])
