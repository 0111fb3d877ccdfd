"""Which group is granted next, where the prompts of some cannot be had."""

from __future__ import annotations

from collections.abc import Callable

from echo.core.errors import DataError

MAX_UNUSABLE = 1000
"""Prompts in a row that cannot be turned into tokens, after which the run ends."""


def first_usable(
    candidate: Callable[[], int],
    try_prompt: Callable[[int], object],
    leave_out: Callable[[int, str], None],
) -> int:
    """Return the first candidate whose prompt can be had.

    Args:
        candidate: the next group that might be granted.
        try_prompt: raises DataError where there is no prompt of a group.
        leave_out: told of each such group, and why.

    Raises:
        DataError: if there are too many in a row.
    """
    for _ in range(MAX_UNUSABLE):
        group_id = candidate()
        try:
            try_prompt(group_id)
        except DataError as error:
            leave_out(group_id, str(error))
        else:
            return group_id
    raise DataError(f"{MAX_UNUSABLE} prompts in a row cannot be used; the warnings above say why")
