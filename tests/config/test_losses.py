"""The options of each loss: the same names as in its class, passed on, refused without effect."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from echo.algo.loss import BatchScores, LossInputs
from echo.algo.losses import LOSSES, MASK_OPTIONS, make_loss, option_names
from echo.config import losses
from echo.config.load import parse_config, resolved
from echo.config.schema import LossSection
from echo.engine.custom_loss import load_loss
from echo.engine.trainer_batch import AdvantageSettings
from echo.errors import ConfigError


def options_of(*overrides: str) -> dict[str, Any]:
    config, _ = parse_config({}, overrides)
    return losses.loss_options(config.loss.model_dump(), max_completion_tokens=64)


def advantages_of(*overrides: str) -> AdvantageSettings:
    config, _ = parse_config({}, overrides)
    options = losses.advantage_options(config.loss.model_dump(), max_completion_tokens=64)
    return AdvantageSettings(**options)


def problems_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({}, overrides)
    return str(caught.value)


# ------------------------------------------------------------------------------- one set of names


def test_the_names_are_those_of_the_classes() -> None:
    assert list(losses.LOSS_OPTIONS) == list(LOSSES)
    for kind, names in losses.LOSS_OPTIONS.items():
        own = [name for name in option_names(kind) if name != "max_completion_tokens"]
        assert sorted(names) == sorted(own), kind
    assert losses.MASK_OPTIONS == MASK_OPTIONS


def test_every_key_of_the_section_is_read_by_somebody() -> None:
    read = {name for names in losses.LOSS_OPTIONS.values() for name in names}
    read |= {*losses.MASK_OPTIONS, *losses.ADVANTAGE_OPTIONS, "kind", "options"}
    assert set(LossSection.model_fields) == read
    fields = {field.name for field in dataclasses.fields(AdvantageSettings)}
    others = {"max_completion_tokens", "keep_zero_variance", "max_abs_reward"}
    assert fields == {*losses.ADVANTAGE_OPTIONS, *others}


def test_the_help_lists_every_loss() -> None:
    text = LossSection.model_fields["kind"].description or ""
    assert all(kind in text for kind in LOSSES)


@pytest.mark.parametrize("kind", LOSSES)
def test_unset_options_are_the_losss_own(kind: str) -> None:
    expected = {"max_completion_tokens": 64} if kind == "dr_grpo" else {}
    assert options_of(f"loss.kind={kind}") == expected
    load_loss(kind, options_of(f"loss.kind={kind}"))


# ------------------------------------------------------------------------- truncated sampling


def test_the_ranges_are_those_of_the_classes() -> None:
    for kind, options in losses.RANGE_DEFAULTS.items():
        fields: Any = LOSSES[kind]
        defaults = {field.name: field.default for field in dataclasses.fields(fields)}
        assert {name: defaults[name] for name in options} == dict(options), kind


RANGES = {
    "grpo": 0.8,
    "dapo": 0.8,
    "gspo": 0.98,
    "gepo": 0.8,
    "m2po": math.exp(-0.2),
    "dppo_tv": 0.8,
    "grpo geometric_low=0.99": 0.99,
    "grpo veto=0.95": 0.95,
    "grpo opsm=0.01": math.exp(-0.01),
    "gspo clip_low=0.1": 0.9,
    "gspo clip_low=false geometric_low=0.5": 0.5,
}


@pytest.mark.parametrize("text", RANGES)
def test_bad_rollouts_have_a_gradient_down_to_the_least_ratio(text: str) -> None:
    kind, *options = text.split()
    config, _ = parse_config({}, [f"loss.kind={kind}", *(f"loss.{option}" for option in options)])
    settings = config.loss.model_dump()
    least = max(losses.least_ratios(settings).values())
    assert least == pytest.approx(RANGES[text])
    loss = load_loss(kind, losses.loss_options(settings, max_completion_tokens=1))
    for ratio, has_gradient in ((least + 1e-3, True), (least - 1e-3, False)):
        learner = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
        advantages = torch.tensor([-1.0], dtype=torch.float64)
        inputs = LossInputs(
            learner_logprobs=learner,
            sampler_logprobs=torch.zeros_like(learner),
            advantages=advantages,
            completion_mask=torch.ones_like(learner, dtype=torch.bool),
            num_tokens=1,
            num_rollouts=1,
            proximal_logprobs=learner.detach(),
            log_expectation=torch.zeros_like(advantages),
            batch_scores=BatchScores(log_ratios=learner.detach()[0], advantages=advantages),
        )
        (gradient,) = torch.autograd.grad(loss(inputs).loss, learner)
        assert bool(gradient.any()) == has_gradient, ratio


@pytest.mark.parametrize("kind", ["cispo", "sapo", "decoupled_ppo", "mine:loss"])
def test_losses_that_keep_every_gradient_have_no_range(kind: str) -> None:
    config, _ = parse_config({}, [f"loss.kind={kind}"])
    assert max(losses.least_ratios(config.loss.model_dump()).values(), default=0.0) == 0.0


# --------------------------------------------------------------------------------------- values


def test_set_options_reach_the_loss() -> None:
    found = options_of("loss.kind=gepo", "loss.clip_low=false", "loss.gate_kl=0.002")
    assert found == {"clip_low": None, "gate_kl": 0.002}
    assert load_loss("gepo", found) == make_loss("gepo", clip_low=None, gate_kl=0.002)
    assert options_of("loss.veto=1e-4") == {"veto": 1e-4}
    assert options_of("loss.dual_clip=false") == {"dual_clip": None}


def test_a_loss_of_ones_own_takes_a_table() -> None:
    overrides = ["loss.kind=mine:loss", "loss.options.strength=2", "loss.opsm=1e-4"]
    assert options_of(*overrides) == {"strength": 2, "opsm": 1e-4}


@pytest.mark.parametrize(
    ("kind", "is_normalized"),
    [("grpo", True), ("gspo", True), ("gepo", False), ("dr_grpo", False), ("mine:loss", True)],
)
def test_advantages_are_scaled_as_the_paper_does_unless_told(
    kind: str, is_normalized: bool
) -> None:
    assert advantages_of(f"loss.kind={kind}").normalize_by_std is is_normalized
    opposite = advantages_of(
        f"loss.kind={kind}", f"loss.normalize_by_std={str(not is_normalized).lower()}"
    )
    assert opposite.normalize_by_std is not is_normalized


def test_the_other_settings_of_advantages() -> None:
    found = advantages_of("loss.leave_one_out=true", "loss.overlong_buffer_tokens=16")
    assert found == AdvantageSettings(
        leave_one_out=True, overlong_buffer_tokens=16, max_completion_tokens=64
    )


def test_a_saved_configuration_loads_again_with_another_loss() -> None:
    saved = resolved(parse_config({}, ["loss.clip_low=false", "loss.clip_high=0.4"])[0])
    config, _ = parse_config(saved, ["loss.kind=gspo"])
    assert (config.loss.kind, config.loss.clip_low, config.loss.clip_high) == ("gspo", False, 0.4)


# ------------------------------------------------------------------------------- without effect


@pytest.mark.parametrize(
    ("kind", "option", "why"),
    [
        ("gspo", "dual_clip=3", "gspo takes clip_low, clip_high"),
        ("gspo", "dual_clip=false", "gspo takes clip_low, clip_high"),
        ("grpo", "gate_kl=0.002", "grpo takes clip_low, clip_high, dual_clip, aggregation"),
        ("m2po", "clip_low=0.2", "m2po takes max_second_moment"),
        ("gepo", "veto=1e-4", "the expectation of gepo is over the complete group"),
        ("grpo", "options.x=1", "only a loss of your own reads [loss.options]"),
        ("mine:loss", "clip_low=0.2", "takes its options from [loss.options]"),
    ],
)
def test_an_option_without_effect_is_refused(kind: str, option: str, why: str) -> None:
    text = problems_of(f"loss.kind={kind}", f"loss.{option}")
    name = option.partition("=")[0]
    assert f"--set: loss.{name} = " in text
    assert f'has no effect with loss.kind = "{kind}": ' in text
    assert why in text


def test_a_loss_that_nobody_asked_for_says_where_it_is_from() -> None:
    """Across the internet lags are large, and the profile's loss is another than the usual."""
    text = problems_of("profile=wan", "loss.dual_clip=3")
    assert 'loss.kind = "gspo", the default of the profile wan: gspo takes clip_low' in text


@pytest.mark.parametrize("kind", sorted(LOSSES.keys() - {"decoupled_ppo"}))
def test_the_same_ratio_is_not_counted_twice(kind: str) -> None:
    text = problems_of(f"loss.kind={kind}", "loss.importance_cap=2")
    assert f"the ratio of {kind} is taken against the sampler already" in text
    assert 'would count it twice; use loss.kind = "decoupled_ppo"' in text


def test_the_overlong_buffer_fits_the_limit() -> None:
    small = "sampling.max_completion_tokens=64"
    parse_config({}, [small, "loss.overlong_buffer_tokens=64"])
    text = problems_of(small, "loss.overlong_buffer_tokens=65")
    assert "must be at most sampling.max_completion_tokens = 64" in text
