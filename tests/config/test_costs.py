"""Prices, budgets and terms: what contradicts itself names its keys."""

from __future__ import annotations

import pytest

from echo.config.load import parse_config
from echo.core.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["worker.price_per_h=-0.1"], "worker.price_per_h"),
        (["worker.price_per_gb=-1"], "worker.price_per_gb"),
        (["relay.price_per_h=-1"], "relay.price_per_h"),
        (["learner.price_per_h=-1"], "learner.price_per_h"),
        (["worker.losses_per_h=-1"], "worker.losses_per_h"),
        (["worker.losses_per_h=0.2"], "worker.price_per_h, which is missing"),
        (["activation.budget_per_h=0"], "activation.budget_per_h"),
        (["activation.budget_per_run=-5"], "activation.budget_per_run"),
        (["activation.margin=-0.1"], "activation.margin"),
        (["activation.mode=off", "activation.budget_per_h=2"], 'activation.mode = "off"'),
        (["sync.mode=pull", "activation.budget_per_h=2"], "sync.mode"),
    ],
)
def test_what_contradicts_itself_is_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({}, overrides)
    assert complaint in str(caught.value)


def test_free_and_unknown_are_two_things() -> None:
    assert parse_config({}, ["worker.price_per_h=0"]).worker.price_per_h == 0.0
    assert parse_config({}).worker.price_per_h is None
