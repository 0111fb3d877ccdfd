from __future__ import annotations

from typing import Any

import pytest

from echo.engine.engine import Sampling

VALID: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "max_completion_tokens": 8,
    "stop_ids": (2,),
}


def test_valid_settings_are_accepted() -> None:
    assert Sampling(**VALID).greedy is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("max_completion_tokens", 0),
    ],
)
def test_impossible_settings_are_named_with_their_value(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"sampling\.{name} is {value}, must be"):
        Sampling(**{**VALID, name: value})
