"""Defines the price of a machine. A node states this price when it joins."""

from __future__ import annotations

import msgspec

from echo.core.bounds import Money


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """The price of a machine. By default no price is stated."""

    per_h: Money | None = None
    """$ per hour from joining until the machine is given back; None if no price is stated."""
    per_gb: Money = 0.0
    """$ per 1e9 bytes in and out of the machine."""
    losses_per_h: Money = 0.0
    """Expected number of preemptions per hour. It applies to spot machines like this machine."""

    def __post_init__(self) -> None:
        """Refuse prices outside the allowed range. Prices may come from peers."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1e9:
                raise ValueError(f"price.{name} is {value}, must be between 0 and 1e9")
