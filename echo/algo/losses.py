"""Every policy loss by the name that the field gives it.

The losses stand by family: ppo_losses.py and token_losses.py (a ratio per token), gspo.py (per
rollout), gepo.py (per group); what they see and return is in loss.py, masks that any of them can
wear in corrections.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from echo.algo.gepo import GepoLoss
from echo.algo.gspo import GspoLoss
from echo.algo.loss import Loss
from echo.algo.ppo_losses import DapoLoss, DecoupledPpoLoss, DrGrpoLoss, GrpoLoss
from echo.algo.token_losses import CispoLoss, DppoTvLoss, M2poLoss, SapoLoss

LOSSES: Mapping[str, Callable[..., Loss]] = {
    "grpo": GrpoLoss,
    "dr_grpo": DrGrpoLoss,
    "dapo": DapoLoss,
    "gspo": GspoLoss,
    "gepo": GepoLoss,
    "cispo": CispoLoss,
    "decoupled_ppo": DecoupledPpoLoss,
    "m2po": M2poLoss,
    "sapo": SapoLoss,
    "dppo_tv": DppoTvLoss,
}
"""Every loss by its name in the field; keyword options are its fields."""


def make_loss(kind: str, **options: Any) -> Loss:
    """Return the loss called `kind`; options are its fields."""
    return LOSSES[kind](**options)
