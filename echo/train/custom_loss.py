"""Loads a policy loss by its name or its import path.

A custom loss is a function of `LossInputs` and keyword options that returns a `LossOutput`:

    def my_loss(inputs: LossInputs, *, strength: float = 1.0) -> LossOutput: ...

The function gets whole rollouts. It declares further needs by an attribute: `my_loss.needs =
LossNeeds(whole_groups=True)` (algo/loss.py). The function must divide by the counts of the whole
batch, which `inputs` contains. Otherwise the gradient would depend on the division into
micro-batches.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echo.algo.loss import Loss, LossNeeds, LossOutput
from echo.algo.losses import CustomLoss, make_loss
from echo.core.errors import ConfigError


def load_loss(kind: str, options: Mapping[str, Any]) -> Loss:
    """Return the loss called `kind`, without masks.

    Args:
        kind: a name of `LOSSES`, or "package.module:function". Modules are also searched for in the
            current directory.
        options: the fields of the named loss, or the keyword arguments of the function.

    Raises:
        ConfigError: if the function does not exist or rejects these options.
    """
    if ":" not in kind:
        return make_loss(kind, **options)
    module_name, _, name = kind.partition(":")
    function = _find_function(kind, module_name, name)
    _check_options(kind, function, options)
    needs: object = getattr(function, "needs", LossNeeds())
    if not isinstance(needs, LossNeeds):
        raise ConfigError(
            f"loss.kind = {kind!r}: its attribute needs is {needs!r}, expected "
            "echo.algo.loss.LossNeeds(...)"
        )
    return CustomLoss(kind=kind, function=function, options=options, needs=needs)


def _find_function(kind: str, module_name: str, name: str) -> Callable[..., LossOutput]:
    directory = str(Path.cwd())
    if directory not in sys.path:
        # It stays in sys.path, since the user's module may import its neighbours later.
        sys.path.insert(0, directory)
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"loss.kind = {kind!r}: importing {module_name!r} failed (the current directory "
            f"{directory} is searched too): {type(error).__name__}: {error}"
        ) from error
    function: object = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"loss.kind = {kind!r}: {module_name} has no function {name!r}")
    return function


def _check_options(
    kind: str, function: Callable[..., LossOutput], options: Mapping[str, Any]
) -> None:
    try:
        inspect.signature(function).bind(None, **options)
    except (TypeError, ValueError) as error:  # ValueError: the callable is not written in Python
        raise ConfigError(
            f"loss.kind = {kind!r} is called as function(inputs, **options) with the options "
            f"{sorted(options)} of [loss.options]: {error}"
        ) from error
