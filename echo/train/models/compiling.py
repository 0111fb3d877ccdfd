"""Compilation of decoder layers by torch.

Compiled layers need fewer kernels and less memory traffic than uncompiled layers.

Each layer is compiled by itself, and not the model as a whole. So all layers of a kind, and rows of
all lengths, share one graph. A compiled layer rounds at the same places as an uncompiled layer. So
on a CPU, results are nearly always equal bit by bit. On a GPU, the norm of a compiled layer adds
its terms in another order, so results differ by rounding.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from echo.core.errors import EngineError
from echo.core.extras import models_directory

RECOMPILE_LIMIT = 64
"""Largest number of graphs of one layer's code. If a layer needs more graphs, layers run
uncompiled. torch's own limit of 8 is too small, because it counts the graphs of all models in the
process.
"""
MIN_STEPS = 20
"""Smallest number of steps in a run for which compiling saves more time than it costs."""

_log = logging.getLogger(__name__)


def compile_layers(layers: Sequence[Any], *, must: bool) -> None:
    """Have torch compile these layers, without their attention, at each layer's first run.

    Args:
        layers: decoder layers of one model.
        must: whether a layer that cannot be compiled is an error, here or at its first run.
            Otherwise the layer runs uncompiled, with one notice.

    Raises:
        EngineError: if `must`, and peft adapts the weights of experts. Such layers cannot be
            compiled.
    """
    if any(type(part).__name__ == "ParamWrapper" for layer in layers for part in layer.modules()):
        # Python code of peft runs in the middle of such a layer: one layer would take some 60
        # graphs, and more for each further length of rows.
        reason = "peft adapts the weights of their experts"
        if must:
            raise EngineError(
                f"layers cannot be compiled, because {reason}: set learner.compile_layers = false, "
                "or leave the experts out of lora.target_modules"
            )
        _OneNotice.give(reason)
        return
    _keep_compiled()
    import torch._dynamo

    settings = torch._dynamo.config  # noqa: SLF001 -- no other way
    settings.recompile_limit = RECOMPILE_LIMIT
    settings.suppress_errors = not must
    settings.fail_on_recompile_limit_hit = must
    if not must:
        logging.getLogger("torch._dynamo.convert_frame").addFilter(_OneNotice())
    for layer in layers:
        layer.compile(dynamic=True, options={"emulate_precision_casts": True})
    _log.info(
        "layers are compiled when they first run: the first step takes some 20 to 30 s longer, or "
        "3 to 6 s if the same layers were compiled here before (learner.compile_layers)"
    )


def _keep_compiled() -> None:
    """Set torch's cache directory to a permanent directory.

    Processes may share this directory. If the directory cannot be written, torch keeps its default
    directory. A directory that the user has chosen is kept, too.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name, place = "TORCHINDUCTOR_CACHE_DIR", models_directory().with_name("compiled").absolute()
    with suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
    # torch has set the variable to its default when it was imported.
    is_chosen = os.environ.get(name, default_cache_dir()) != default_cache_dir()
    if not is_chosen and os.access(place, os.W_OK):
        os.environ[name] = str(place)


class _OneNotice(logging.Filter):
    """Replaces torch's long log of a failed compilation by one line, once per process."""

    _is_logged = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if not self._is_logged:
            error = record.exc_info[1] if record.exc_info else record.getMessage()
            self.give(" ".join(str(error).split("\n")[:2]))
        return False

    @classmethod
    def give(cls, reason: str) -> None:
        """Log why layers run uncompiled, once per process."""
        if not cls._is_logged:
            cls._is_logged = True
            _log.warning("layers cannot be compiled and run as they are: %s", reason)
