"""Watchers made of functions."""

from collections.abc import Callable
from typing import Any

from echo.engine.engine import Watcher


def watching(**calls: Callable[..., Any]) -> Watcher:
    """A watcher of an engine that does what the functions do, by the names of its methods."""
    watcher = Watcher()
    for name, call in calls.items():
        assert hasattr(watcher, name)
        setattr(watcher, name, call)
    return watcher


STOPPED = watching(should_stop=lambda: True)
