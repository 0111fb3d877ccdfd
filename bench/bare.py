"""Run a program with a PyTorch that is older than Echo asks for: for machines lent as they are.

    python bench/bare.py bench/bench_learner.py step ...
    python bench/bare.py -m pytest ...

Before 2.12 `varlen_attn` took as many heads of keys as of queries; here keys are repeated then,
which costs some percent.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.attention import varlen


def repeat_keys() -> None:
    """Let `varlen_attn` take fewer heads of keys than of queries, where it does not yet."""
    attend: Any = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(attend).parameters:
        return

    def repeated(
        query: Tensor, key: Tensor, value: Tensor, *segments: Any, enable_gqa: bool, **options: Any
    ) -> Any:
        if enable_gqa:
            times = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
        return attend(query, key, value, *segments, **options)

    vars(varlen)["varlen_attn"] = repeated


def main() -> None:
    """Run what the command line names, as Python itself would."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(f"usage: bare.py PROGRAM [ARGUMENT ...]\n\n{__doc__}")
        sys.exit(len(sys.argv) < 2)
    repeat_keys()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
