"""Every policy loss by the name that the field gives it.

The losses stand by family: ppo_losses.py and token_losses.py (a ratio per token), gspo.py (per
rollout), gepo.py (per group); what they see and return is in loss.py, masks that any of them can
wear in corrections.py.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from echo.algo.corrections import MaskedLoss, RolloutMasks
from echo.algo.gepo import GepoLoss
from echo.algo.gspo import GspoLoss
from echo.algo.loss import Loss
from echo.algo.ppo_losses import DapoLoss, DecoupledPpoLoss, DrGrpoLoss, GrpoLoss
from echo.algo.token_losses import CispoLoss, DppoTvLoss, M2poLoss, SapoLoss
from echo.errors import ConfigError

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

MASK_OPTIONS = tuple(field.name for field in dataclasses.fields(RolloutMasks))


def make_loss(kind: str, **options: Any) -> Loss:
    """Return the loss registered as `kind`, set up with `options`.

    Args:
        kind: its name.
        options: fields of the loss, and of `RolloutMasks` for masks around it.

    Raises:
        ConfigError: if there is no such loss (the nearest name is given), it has no such option, or
            an option is unusable.
    """
    if kind not in LOSSES:
        nearest = difflib.get_close_matches(kind, LOSSES, n=1, cutoff=0.0)
        raise ConfigError(
            f"loss.kind = {kind!r}: no such loss; did you mean {nearest[0]!r}? "
            f"Known: {', '.join(sorted(LOSSES))}"
        )
    masks, own = split_options(options)
    known = option_names(kind)
    for name in own:
        if name not in known:
            raise ConfigError(
                f"loss.{name} has no effect with loss.kind = {kind!r}, which takes "
                f"{', '.join(known)}"
            )
    return with_masks(LOSSES[kind](**own), masks)


def option_names(kind: str) -> tuple[str, ...]:
    """Return the options of a registered loss, in order."""
    loss: Any = LOSSES[kind]
    return tuple(field.name for field in dataclasses.fields(loss))


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the masks and those of the loss."""
    masks = {name: value for name, value in options.items() if name in MASK_OPTIONS}
    return masks, {name: value for name, value in options.items() if name not in MASK_OPTIONS}


def with_masks(loss: Loss, options: Mapping[str, Any]) -> Loss:
    """Return `loss` behind the masks that `options` switch on, or itself."""
    masks = RolloutMasks(**options)
    return loss if masks.is_off else MaskedLoss(loss=loss, masks=masks)
