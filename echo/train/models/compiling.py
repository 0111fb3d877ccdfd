"""Decoder layers compiled by torch: fewer kernels and less memory traffic between products.

Layers are compiled, not the model: all layers of a kind share their graphs, and so do rows of all
lengths. A compiled layer rounds wherever the uncompiled layer does. So on a CPU the compiled and
the uncompiled model nearly always have the same log-probabilities and gradients bit by bit; on a
GPU a norm sums in another order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from echo.core.extras import models_directory

RECOMPILE_LIMIT = 64
"""Largest number of graphs of one layer's code. torch's own limit is 8 and counts the graphs of all
models in the process; beyond it layers run uncompiled. A run with a reference policy or an adapter
exceeds torch's limit.
"""
MIN_STEPS = 20
"""Smallest number of steps in a run for which compiling saves more time than it costs."""

_log = logging.getLogger(__name__)


def compile_layers(layers: Sequence[Any], *, must: bool) -> None:
    """Have torch compile layers when they first run; attention is not compiled.

    Args:
        layers: decoder layers of one model.
        must: whether a layer that cannot be compiled is an error; otherwise it runs uncompiled,
            with one notice.
    """
    # The cache lies beside the warmed-up models, where it outlives temporary files.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(models_directory().with_name("compiled")))
    import torch._dynamo

    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT  # noqa: SLF001 -- no other way
    torch._dynamo.config.suppress_errors = not must  # noqa: SLF001
    if not must:
        logging.getLogger("torch._dynamo.convert_frame").addFilter(_OneNotice())
    for layer in layers:
        layer.compile(dynamic=True, options={"emulate_precision_casts": True})
    _log.info(
        "layers are compiled: the first step may take half a minute longer, a few seconds where "
        "this was compiled before (learner.compile_layers)"
    )


class _OneNotice(logging.Filter):
    """Replaces torch's traces by a single line, which says that layers cannot be compiled."""

    _is_logged = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if not _OneNotice._is_logged:
            _OneNotice._is_logged = True
            error = record.exc_info[1] if record.exc_info else record.getMessage()
            reason = " ".join(str(error).split("\n")[:2])
            _log.warning("layers cannot be compiled and run as they are: %s", reason)
        return False
