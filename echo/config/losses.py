"""Which options each policy loss takes, without the losses themselves: a relay has no torch.

A test holds these names to the fields of the classes in echo/algo. An option that is not set is
left to its loss, whose defaults are its paper's unless it says otherwise.

Truncated sampling. With top-p or top-k a worker's log-probabilities are of the distribution that
is left, the learner's of the whole one, so a token's ratio of learner to sampler is Z, the
probability that was left, even on-policy: between top_p and 1 with top-p, anything up to 1 with
top-k. A loss whose range of ratios ends above that learns nothing from rollouts with a negative
advantage, or leaves all rollouts out. `least_ratios` says where the ranges end.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

_CLIPS = ("clip_low", "clip_high")
CLIP_OPTIONS = (*_CLIPS, "dual_clip")
"""Bounds on a ratio, which `false` switches off."""
LOSS_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "grpo": (*_CLIPS, "dual_clip", "aggregation"),
    "dr_grpo": (*_CLIPS, "dual_clip"),
    "dapo": (*_CLIPS, "dual_clip", "aggregation"),
    "gspo": _CLIPS,
    "gepo": (*_CLIPS, "gate_kl", "sampler_kl_coef"),
    "cispo": _CLIPS,
    "decoupled_ppo": (
        *_CLIPS,
        "dual_clip",
        "proximal",
        "importance_weight",
        "importance_cap",
    ),
    "m2po": ("max_second_moment",),
    "sapo": ("tau_positive", "tau_negative", "aggregation"),
    "dppo_tv": ("max_probability_gap", "sampler_kl_coef"),
}
"""By the loss's name; keys of [loss] that it reads."""

MASK_OPTIONS = ("geometric_low", "geometric_high", "veto", "opsm")
"""Keys that leave rollouts out, for any loss that is not defined over complete groups."""

ADVANTAGE_OPTIONS = (
    "normalize_by_std",
    "leave_one_out",
    "overlong_buffer_tokens",
    "overlong_filter",
)
"""Keys that every loss has: how rewards become advantages."""

WITHOUT_STD = frozenset({"dr_grpo", "gepo", "dppo_tv"})
"""Losses whose papers do not divide advantages by the standard deviation."""

RANGE_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "grpo": {"clip_low": 0.2},
    "dr_grpo": {"clip_low": 0.2},
    "dapo": {"clip_low": 0.2},
    "gspo": {"clip_low": 0.02},
    "gepo": {"clip_low": 0.2},
    "decoupled_ppo": {"clip_low": 0.2},
    "m2po": {"max_second_moment": 0.04},
    "dppo_tv": {"max_probability_gap": 0.2},
}
"""Options that end a loss's range of ratios below 1, with what they are when unset. A test holds
them to the classes. cispo and sapo bound a weight, and keep the gradient of every token."""

_LEAST_RATIO: Mapping[str, Callable[[float], float]] = {
    "clip_low": lambda width: 1 - width,
    "max_probability_gap": lambda gap: 1 - gap,  # of a token that the sampler was sure of
    "max_second_moment": lambda moment: math.exp(-math.sqrt(moment)),
    "geometric_low": lambda ratio: ratio,
    "veto": lambda ratio: ratio,
    "opsm": lambda nats: math.exp(-nats),
}
"""The ratio at which an option ends the range, where it is that of every token."""

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_custom(kind: str) -> bool:
    """Return whether `kind` is the import path of a loss of the user's own."""
    return ":" in kind


def refusal_of(kind: str, option: str) -> str | None:
    """Return why a loss cannot use an option, or None if it reads it.

    Args:
        kind: a name of LOSS_OPTIONS or an import path.
        option: a key of [loss].
    """
    if option == "kind" or option in ADVANTAGE_OPTIONS:
        return None
    if option in MASK_OPTIONS:
        if kind != "gepo":
            return None
        return (
            "it leaves single rollouts out, and the expectation of gepo is over the complete group"
        )
    if option == "options":
        return None if is_custom(kind) else "only a loss of your own reads [loss.options]"
    if is_custom(kind):
        return "a loss of your own takes its options from [loss.options]"
    if option in LOSS_OPTIONS[kind]:
        return None
    if option.startswith("importance_"):
        return (
            f"the ratio of {kind} is taken against the sampler already, so a truncated importance "
            'weight would count it twice; use loss.kind = "decoupled_ppo", whose ratio starts at a '
            "recomputed proximal policy"
        )
    return f"{kind} takes {', '.join(LOSS_OPTIONS[kind])}"


def least_ratios(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return, by option, the ratio below which a loss learns nothing from a bad rollout's tokens.

    Args:
        settings: the section [loss], checked; what it would not read counts for nothing.
    """
    options = {
        **RANGE_DEFAULTS.get(settings["kind"], {}),
        **dict.fromkeys(MASK_OPTIONS),
    }
    if settings["kind"] == "decoupled_ppo" and settings["proximal"] != "loglinear":
        del options["clip_low"]  # of the learner to itself: 1
    values = {
        name: default if settings[name] is None else settings[name]
        for name, default in options.items()
    }
    return {
        name: _LEAST_RATIO[name](value)
        for name, value in values.items()
        if name in _LEAST_RATIO and value is not None and value is not False
    }


def loss_options(settings: Mapping[str, Any], *, max_completion_tokens: int) -> dict[str, Any]:
    """Return the keyword options of the loss: what is set, with `false` as None.

    Args:
        settings: the section [loss], checked.
        max_completion_tokens: of [sampling].
    """
    kind = settings["kind"]
    names = MASK_OPTIONS if is_custom(kind) else (*LOSS_OPTIONS[kind], *MASK_OPTIONS)
    options = {name: settings[name] for name in names if settings[name] is not None}
    for name in CLIP_OPTIONS:
        if options.get(name) is False:
            options[name] = None
    if kind == "dr_grpo":
        options["max_completion_tokens"] = max_completion_tokens
    return {**options, **settings["options"]}


def advantage_options(settings: Mapping[str, Any], *, max_completion_tokens: int) -> dict[str, Any]:
    """Return how rewards become advantages, as keyword options.

    Args:
        settings: the section [loss], checked.
        max_completion_tokens: of [sampling].
    """
    options = {name: settings[name] for name in ADVANTAGE_OPTIONS}
    if options["normalize_by_std"] is None:
        options["normalize_by_std"] = settings["kind"] not in WITHOUT_STD
    return options | {"max_completion_tokens": max_completion_tokens}


def _check_loss_kind(kind: str) -> str:
    if kind in LOSS_OPTIONS or _IMPORT_PATH.fullmatch(kind):
        return kind
    near = difflib.get_close_matches(kind, LOSS_OPTIONS, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    raise ValueError(
        f'"{kind}" is not a loss{hint} Write one of {", ".join(LOSS_OPTIONS)}, or the import path '
        'of your own, "package.module:function"'
    )


LossKind = Annotated[str, AfterValidator(_check_loss_kind)]
"""A registered loss's name or the import path of a function."""
