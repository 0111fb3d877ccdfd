"""Decoder layers compiled by torch: fewer kernels and less memory traffic between products.

Layers and not the model: those of a kind share their graphs, whatever their number, and rows of any
length share them, too. Each rounding stands where the uncompiled layer has it, so log-probabilities
and gradients are nearly always those of the uncompiled model bit by bit on a CPU; on a GPU a norm
sums in another order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from echo.core.extras import models_directory

RECOMPILE_LIMIT = 64
"""Graphs of one layer's code. torch's own limit of 8 counts those of all models of the process, and
behind it layers run uncompiled: a reference policy or an adapter reach it."""
MIN_STEPS = 20
"""Steps of a run from which compiling by default pays for the wait before the first one."""

_log = logging.getLogger(__name__)


def compile_layers(layers: Sequence[Any], *, must: bool) -> None:
    """Have layers compiled when they first run; attention stays as it is.

    Args:
        layers: decoder layers of one model.
        must: whether a layer that cannot be compiled ends the step; else it runs as it is, with one
            notice.
    """
    # Beside the made models, where it outlives the machine's temporary files.
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
    """Says in one line, once, that layers cannot be compiled, in place of torch's traces."""

    _is_told = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if not _OneNotice._is_told:
            _OneNotice._is_told = True
            error = record.exc_info[1] if record.exc_info else record.getMessage()
            reason = " ".join(str(error).split("\n")[:2])
            _log.warning("layers cannot be compiled and run as they are: %s", reason)
        return False
