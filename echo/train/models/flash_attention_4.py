"""FlashAttention 4, reduced to the return values that torch expects.

Some versions of FlashAttention 4 return more values than torch expects.
"""

from typing import Any

from echo.train.models.attention import import_fa4

_fa4: Any = import_fa4()


def _flash_attn_fwd(*args: Any, **options: Any) -> Any:
    return _fa4._flash_attn_fwd(*args, **options)[:2]  # noqa: SLF001 -- torch's own name for it


_flash_attn_bwd = _fa4._flash_attn_bwd  # noqa: SLF001
