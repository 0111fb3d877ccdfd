"""The options of each loss: the same names as in its class, passed on, refused without effect."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from echo.algo.corrections import MaskedLoss, RolloutMasks
from echo.algo.loss import BatchScores, LossInputs
from echo.algo.losses import LOSSES, EntropyBonusLoss, make_loss
from echo.config import losses
from echo.config.fields import OWN_KIND
from echo.config.load import parse_config, resolved
from echo.core.errors import ConfigError
from echo.runtime.learner.setup import build_loss


def section_of(*overrides: str) -> losses.LossSection:
    return parse_config({}, overrides).loss


@pytest.mark.parametrize("kind", LOSSES)
def test_names_and_defaults_are_those_of_the_losses(kind: str) -> None:
    fields: Any = LOSSES[kind]
    own = {field.name: field.default for field in dataclasses.fields(fields)}
    own.pop("max_completion_tokens", None)
    assert section_of(f"loss.kind={kind}").own_options() == own


def test_there_is_a_class_for_each_loss_and_one_for_those_of_ones_own() -> None:
    assert list(losses.LOSSES) == [*LOSSES, OWN_KIND]
    masks = {field.name for field in dataclasses.fields(RolloutMasks)}
    for kind, section in losses.LOSSES.items():
        has_masks = masks & section.model_fields.keys()
        assert has_masks == (set() if kind == "gepo" else masks), "gepo's groups are complete"


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
    config = parse_config({}, [f"loss.kind={kind}", *(f"loss.{option}" for option in options)])
    least = max(config.loss.least_ratios().values())
    assert least == pytest.approx(RANGES[text])
    loss = build_loss(config)
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


@pytest.mark.parametrize("kind", ["cispo", "oapl", "sapo", "decoupled_ppo", "mine:loss"])
def test_losses_that_keep_every_gradient_have_no_range(kind: str) -> None:
    least = section_of(f"loss.kind={kind}").least_ratios()
    assert max(least.values(), default=0.0) == 0.0


def test_set_options_reach_the_loss() -> None:
    config = parse_config({}, ["loss.kind=gepo", "loss.clip_low=false", "loss.gate_kl=0.002"])
    assert build_loss(config) == make_loss("gepo", clip_low=None, gate_kl=0.002)
    config = parse_config({}, ["loss.veto=1e-4"])
    masks = RolloutMasks(veto=1e-4)
    assert build_loss(config) == MaskedLoss(loss=make_loss("grpo"), masks=masks)
    config = parse_config({}, ["loss.entropy_coef=0.01"])
    assert build_loss(config) == EntropyBonusLoss(loss=make_loss("grpo"), coef=0.01)
    assert section_of("loss.dual_clip=false").own_options()["dual_clip"] is None
    config = parse_config({}, ["loss.kind=oapl", "loss.beta=0.1", "loss.baseline_beta=2"])
    assert build_loss(config) == make_loss("oapl", beta=0.1)
    assert config.loss.value_beta == 2
    assert section_of().value_beta is None
    config = parse_config({}, ["loss.kind=gspo", "loss.score_centering=32"])
    assert build_loss(config) == make_loss("gspo", score_centering=32)
    section = section_of("loss.kind=mine:loss", "loss.options.strength=2", "loss.opsm=1e-4")
    assert (section.own_options(), section.masks()["opsm"]) == ({"strength": 2}, 1e-4)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *(("grpo", f"clip_low={value}") for value in ("1.5", "nan", "0")),
        *(("grpo", f"clip_high={value}") for value in ("-0.1", "inf")),
        *(("grpo", f"geometric_high={value}") for value in ("0.9", "inf")),
        *(("grpo", option) for option in ("aggregation=sum", "entropy_coef=-0.1", "dual_clip=inf")),
        *(("grpo", option) for option in ("geometric_low=1.1", "veto=-0.1", "opsm=nan")),
        ("gspo", "clip_low=2.0"),
        *(("gepo", option) for option in ("gate_kl=-1.0", "sampler_kl_coef=nan")),
        *(("oapl", option) for option in ("beta=0", "baseline_beta=0", "leave_one_out=true")),
        ("oapl", "normalize_by_std=true"),
        *(("cispo", f"score_centering={value}") for value in ("-1", "1025")),
        ("cispo", "clip_high=-1.0"),
        ("sapo", "tau_negative=0.0"),
        ("m2po", "max_second_moment=-0.1"),
        *(("dppo_tv", option) for option in ("max_probability_gap=1.1", "sampler_kl_coef=-1")),
        *(("decoupled_ppo", option) for option in ("proximal=old", "importance_cap=0.5")),
    ],
)
def test_a_value_out_of_range_is_named(kind: str, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"loss\.{option.partition('=')[0]} = .*: must be"):
        parse_config({}, [f"loss.kind={kind}", f"loss.{option}"])


@pytest.mark.parametrize("options", [("dual_clip=1.2",), ("clip_high=false",)])
def test_a_second_bound_lies_beyond_the_first(options: tuple[str, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"loss\.dual_clip = .*: must be above 1 \+ loss.clip_high"
    ):
        parse_config({}, [f"loss.{option}" for option in options])
    apart = parse_config({}, ["loss.dual_clip=false", "loss.clip_high=false"])
    assert build_loss(apart) == make_loss("grpo", dual_clip=None, clip_high=None)


@pytest.mark.parametrize(
    ("kind", "is_normalized"),
    [("grpo", True), ("gspo", True), ("gepo", False), ("dr_grpo", False), ("mine:loss", True)],
)
def test_advantages_are_scaled_as_the_paper_does_unless_told(
    kind: str, is_normalized: bool
) -> None:
    assert section_of(f"loss.kind={kind}").normalize_by_std is is_normalized
    opposite = f"loss.normalize_by_std={str(not is_normalized).lower()}"
    assert section_of(f"loss.kind={kind}", opposite).normalize_by_std is not is_normalized


def test_what_a_saved_run_did_not_choose_follows_the_loss() -> None:
    saved = resolved(parse_config({}, ["loss.clip_low=false", "loss.kind=grpo"]))
    config = parse_config(saved, ["loss.kind=gspo"], is_saved=True)
    expected = {"clip_low": None, "clip_high": 0.05, "score_centering": 0}
    assert config.loss.own_options() == expected


@pytest.mark.parametrize(
    ("kind", "option", "why"),
    [
        ("gspo", "dual_clip=3", "it belongs to grpo, dr_grpo, dapo, decoupled_ppo"),
        ("gspo", "dual_clip=false", '"gspo" has '),
        ("grpo", "gate_kl=0.002", "it belongs to gepo"),
        ("m2po", "clip_low=0.2", "it belongs to grpo, "),
        ("gepo", "veto=1e-4", "it belongs to grpo, "),
        ("grpo", "options.x=1", "it belongs to package.module:function"),
        ("mine:loss", "clip_low=0.2", "it belongs to grpo, "),
        # Across the internet lags are large, and the profile's loss is another than the usual.
        ("", "dual_clip=3", '"gspo", the default of the profile wan: it belongs to grpo'),
    ],
)
def test_a_key_of_another_loss_is_unknown(kind: str, option: str, why: str) -> None:
    chosen = f"loss.kind={kind}" if kind else "profile=wan"
    with pytest.raises(ConfigError) as caught:
        parse_config({}, [chosen, f"loss.{option}"])
    text = str(caught.value)
    assert f"--set: loss.{option.partition('=')[0]} = " in text
    assert f'unknown key with loss.kind = "{kind or "gspo"}"' in text
    assert why in text
