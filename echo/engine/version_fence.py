"""The fence between a swap of weights and requests that insist on a version.

A request may ask for at least, or for exactly, some version. It is honoured or refused, never
served by another: while requests that want exactly the installed version run, a swap waits; while
a swap waits, no more of them begin.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion


class VersionError(EngineError):
    """A request wants a version that is not installed."""


class VersionFence:
    """Which version is installed, and who may change or rely on it; for use by many threads."""

    def __init__(self) -> None:
        """Start with nothing installed."""
        self._changed = threading.Condition()
        self._installed: PolicyVersion | None = None
        self._is_swapping = False
        self._num_exact = 0

    @property
    def installed(self) -> PolicyVersion | None:
        """The version that samples; None before the first one."""
        return self._installed

    def close(self) -> None:
        """Have nothing installed any more."""
        self._installed = None

    @contextmanager
    def swap(self, version: PolicyVersion) -> Iterator[None]:
        """Hold the fence while `version` is installed; it counts unless the body raises."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_swapping)
            self._is_swapping = True
            self._changed.wait_for(lambda: not self._num_exact)
        try:
            yield
            self._installed = version
        finally:
            with self._changed:
                self._is_swapping = False
                self._changed.notify_all()

    @contextmanager
    def request(
        self, min_version: PolicyVersion | None, exact_version: PolicyVersion | None
    ) -> Iterator[None]:
        """Hold the fence, where an exact version is wanted, while a request runs.

        Raises:
            EngineError: if nothing is installed at all.
            VersionError: if another version is installed than is wanted.
        """
        with self._changed:
            if exact_version is not None or min_version is not None:
                self._changed.wait_for(lambda: not self._is_swapping)
            self._check(min_version, exact_version)
            self._num_exact += exact_version is not None
        try:
            yield
        finally:
            with self._changed:
                self._num_exact -= exact_version is not None
                self._changed.notify_all()

    def _check(
        self, min_version: PolicyVersion | None, exact_version: PolicyVersion | None
    ) -> None:
        installed = self._installed
        if installed is None:
            raise EngineError("no weights are loaded; call load() before generate()")
        if exact_version is not None and installed != exact_version:
            raise VersionError(f"exactly {exact_version} is wanted, {installed} is installed")
        if min_version is not None and installed < min_version:
            raise VersionError(f"at least {min_version} is wanted, {installed} is installed")
