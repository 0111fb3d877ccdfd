"""Syntax trees of Python text, from one thread at a time."""

from __future__ import annotations

import ast
import threading
from typing import Literal

# Before Python 3.11.8, two threads in `ast.parse` shared a counter, and either could fail with
# "AST constructor recursion depth mismatch" (https://github.com/python/cpython/issues/106905).
_PARSING = threading.Lock()


def parse(source: str | bytes, *, mode: Literal["exec", "eval"] = "exec") -> ast.AST:
    """Return the syntax tree of `source`.

    Raises:
        SyntaxError, ValueError, RecursionError: as `ast.parse` does.
    """
    with _PARSING:
        return ast.parse(source, mode=mode)
