"""Import packages that only some installations have, or say which extra brings them."""

from __future__ import annotations

import importlib
from types import ModuleType

from echo.errors import ConfigError


def import_extra(module: str, *, extra: str, wanted_by: str) -> ModuleType:
    """Import `module`, which the extra `extra` of this distribution installs.

    Args:
        module: dotted name of the module.
        extra: name of the extra, as in pyproject.toml.
        wanted_by: the setting or output that needs it, for the message.

    Raises:
        ConfigError: if it is missing or broken; names the cause and the remedy.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        cause = "is not installed" if is_missing else f"cannot be imported ({error})"
        raise ConfigError(
            f"{wanted_by} needs {package}, which {cause}; install it with "
            f"pip install 'echo-rl[{extra}]', or do without {wanted_by}"
        ) from error
