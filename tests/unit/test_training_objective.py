"""The objective: token losses and sums against loops written by hand, in float64."""

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from skirl.algorithms import losses
from skirl.config.algorithms import CISPO, DPPO, GMPO, GSPO, SAPO, TOPR, ClipCov, KLCov, PolicyLoss, PPOClip
from skirl.config.offline import PreferenceLoss
from skirl.records import Ratio, Sampling, sum_ratios
from skirl.training.objective import (
    DistillationObjective,
    PolicyObjective,
    SupervisedObjective,
    as_ratios,
    micro_batch_loss,
)
from skirl.training.policy_losses import POLICY_LOSSES
from skirl.training.preference_objective import PREFERENCE_LOSSES
from skirl.training.rows import Streams
from tests.oracles import kl as kl_oracle
from tests.oracles import losses as loss_oracle

LOW, HIGH = 0.2, 0.28
NUM = 60


@pytest.fixture
def data():
    """Streams whose ratios fall on both sides of both clips, for both signs of the advantage."""
    random = np.random.default_rng(0)
    now = -3 + random.standard_normal(NUM)
    return {
        "now": now,
        "old": now + 0.5 * random.standard_normal(NUM) - np.where(random.random(NUM) < 0.1, 1.5, 0.0),
        "rollout": now + 0.1 * random.standard_normal(NUM),
        "reference": now + 0.7 * random.standard_normal(NUM),
        "entropy": 2 + random.random(NUM),
        "advantages": random.standard_normal(NUM),
        "weights": random.random(NUM) / NUM,
    }


def tensors(data, members=slice(None), **changes):
    """(log-probs, entropy, streams), float64, the first two with gradient; two sequences."""
    t = {name: torch.from_numpy(values[members].copy()) for name, values in data.items()}
    count = len(t["now"])
    streams = Streams(
        weights=t["weights"],
        segments=torch.arange(count) * 2 // count,
        sequence_weights=torch.tensor([0.5, 0.5]),
        advantages=t["advantages"],
        old_logprobs=t["old"],
        rollout_logprobs=t["rollout"],
        reference_logprobs=t["reference"],
        kl_coef=0.3,
    )
    return t["now"].requires_grad_(), t["entropy"].requires_grad_(), replace(streams, **changes)


def by_hand(data, objective, kl_coef=0.3, with_old=True):
    """(losses, their derivatives by the log-prob) one token at a time."""
    clip = objective.loss
    losses, slopes = [], []
    for i in range(NUM):
        log_ratio = data["now"][i] - data["old"][i] if with_old else 0.0
        loss, slope = loss_oracle.ppo_clip(log_ratio, data["advantages"][i], clip.low, clip.high, clip.dual)
        if kl_coef:
            value, by_now = kl_oracle.ESTIMATORS[objective.kl_estimator](data["now"][i], data["reference"][i])
            loss += kl_coef * value
            slope += kl_coef * by_now
        losses.append(loss - objective.entropy_coef * data["entropy"][i])
        slopes.append(slope)
    return losses, slopes


def ppo(dual=None, **changes):
    return PolicyObjective(Sampling(), PPOClip(low=LOW, high=HIGH, dual=dual), **changes)


OBJECTIVES = {
    "clip": (ppo(), 0.0),
    "dual clip": (ppo(2.0), 0.0),
    "k2": (ppo(2.0, kl_estimator="k2"), 0.3),
    "k3": (ppo(kl_estimator="k3"), 0.3),
    "entropy": (ppo(entropy_coef=0.05), 0.0),
    "all": (ppo(2.0, kl_estimator="k3", entropy_coef=0.05), 0.3),
}
"""Objective, and the factor of the KL that comes with the streams."""


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_equal_a_loop(data, name):
    objective, kl_coef = OBJECTIVES[name]
    losses, slopes = by_hand(data, objective, kl_coef)
    logprobs, entropy, streams = tensors(data, kl_coef=kl_coef)
    got, _ = objective(logprobs, entropy, streams)
    (streams.weights * got).sum().backward()
    np.testing.assert_allclose(got.detach(), losses, rtol=1e-12)
    np.testing.assert_allclose(logprobs.grad, data["weights"] * slopes, rtol=1e-10, atol=1e-16)
    bonus = torch.zeros(NUM) if entropy.grad is None else entropy.grad
    np.testing.assert_allclose(bonus, -objective.entropy_coef * data["weights"], rtol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_differ_where_the_terms_differ(data, name):
    """So that the test above can fail."""
    others = [by_hand(data, *o)[0] for key, o in OBJECTIVES.items() if key != name]
    assert all(np.abs(np.subtract(by_hand(data, *OBJECTIVES[name])[0], other)).max() > 1e-3 for other in others)


def test_without_old_logprobs_it_is_the_plain_policy_gradient(data):
    objective = OBJECTIVES["dual clip"][0]
    logprobs, entropy, streams = tensors(data, old_logprobs=None, kl_coef=0.0)
    losses, sums = objective(logprobs, entropy, streams)
    (streams.weights * losses).sum().backward()
    np.testing.assert_allclose(losses.detach(), -data["advantages"], rtol=1e-12)
    np.testing.assert_allclose(logprobs.grad, -data["weights"] * data["advantages"], rtol=1e-12)
    ratios = as_ratios(sums)
    assert ratios["policy/ratio_mean"].value == 1
    assert ratios["policy/clip_fraction"].value == 0

    same, entropy, streams = tensors(data, kl_coef=0.0)
    other, _ = objective(same, entropy, replace(streams, old_logprobs=same.detach().clone()))
    (streams.weights * other).sum().backward()
    assert torch.equal(losses, other)
    assert torch.equal(logprobs.grad, same.grad)


# ---------------------------------------------------------------------------------------------------- every policy loss
VARIANTS = get_args(get_args(PolicyLoss)[0])


def variant(cls):
    return cls(kind=cls.model_fields["kind"].annotation.__args__[0])


def test_every_variant_of_the_config_has_a_function():
    assert set(POLICY_LOSSES) == {variant(cls).kind for cls in VARIANTS}
    assert set(PREFERENCE_LOSSES) == {variant(cls).kind for cls in get_args(get_args(PreferenceLoss)[0])}


@pytest.mark.parametrize("cls", VARIANTS, ids=lambda cls: cls.__name__)
def test_on_the_old_policy_every_loss_is_the_plain_policy_gradient(data, cls):
    """Under the sequence normaliser and one advantage a sequence; so the wiring gets no argument wrong."""
    objective = PolicyObjective(Sampling(), variant(cls))
    data["weights"][:] = 1 / NUM
    data["advantages"] = np.repeat([1.5, -0.5], NUM // 2)
    now, entropy, streams = tensors(data, old_logprobs=None, kl_coef=0.0, selected=torch.zeros(NUM, dtype=torch.bool))
    losses, _ = objective(now, entropy, streams)
    (streams.weights * losses).sum().backward()
    np.testing.assert_allclose(now.grad, -data["weights"] * data["advantages"], rtol=1e-6)


SET = {
    PPOClip: {"low": 0.1, "high": 0.3, "dual": 2.0},
    GSPO: {"low": 0.01, "high": 0.03, "token_level": True},
    CISPO: {"low": 0.1, "high": 0.3},
    SAPO: {"tau_positive": 2.0, "tau_negative": 3.0},
    GMPO: {"clip": 0.1},
    TOPR: {"cap": 0.7},
    ClipCov: {"low": 0.1, "high": 0.3},
    KLCov: {"coef": 0.7},
    DPPO: {"divergence": "kl", "threshold": 0.02},
}
"""Every setting of the device side, away from its default and from the others."""


def called_by_hand(cls, t, segments, picked):
    log_ratio, advantages, now = t["now"] - t["old"], t["advantages"], t["now"]
    return {
        PPOClip: lambda **how: losses.ppo_clip(log_ratio, advantages, **how),
        GSPO: lambda **how: losses.gspo(log_ratio, advantages, *segments, **how),
        CISPO: lambda **how: losses.cispo(now, log_ratio, advantages, **how),
        SAPO: lambda **how: losses.sapo(log_ratio, advantages, **how),
        GMPO: lambda **how: losses.gmpo(log_ratio, advantages, *segments, **how),
        TOPR: lambda **how: losses.topr(now, log_ratio, advantages, *segments, **how),
        ClipCov: lambda **how: losses.clip_cov(log_ratio, advantages, picked, **how),
        KLCov: lambda **how: losses.kl_cov(log_ratio, advantages, picked, **how),
        DPPO: lambda **how: losses.dppo(log_ratio, t["old"], advantages, **how),
    }[cls](**SET[cls])


@pytest.mark.parametrize("cls", VARIANTS, ids=lambda cls: cls.__name__)
def test_losses_are_those_of_the_functions(data, cls):
    t = {name: torch.from_numpy(values) for name, values in data.items()}
    picked = torch.arange(NUM) % 5 == 0
    wanted = called_by_hand(cls, t, (torch.arange(NUM) * 2 // NUM, 2), picked)
    kind = variant(cls).kind
    assert set(SET[cls]) == set(cls.model_fields) - {"kind", "share", "cov_low", "cov_high"}
    got, _ = PolicyObjective(Sampling(), cls(kind=kind, **SET[cls]))(*tensors(data, kl_coef=0.0, selected=picked))
    np.testing.assert_allclose(got.detach(), wanted, rtol=1e-12)
    plain, _ = PolicyObjective(Sampling(), variant(cls))(*tensors(data, kl_coef=0.0, selected=picked))
    assert (got - plain).abs().max() > 1e-4  # so that a setting that is not passed on shows


def test_corrections_weigh_the_policy_loss_alone(data):
    objective = OBJECTIVES["all"][0]
    factors = torch.where(torch.arange(NUM) % 3 == 0, 0.0, 1.7).double()
    now, entropy, streams = tensors(data, corrections=factors)
    got, _ = objective(now, entropy, streams)
    whole, _ = objective(*tensors(data))
    rest, _ = objective(*tensors(data, corrections=torch.zeros(NUM, dtype=torch.float64)))
    np.testing.assert_allclose(got.detach(), (factors * (whole - rest) + rest).detach(), rtol=1e-10, atol=1e-12)


def test_a_token_left_out_by_its_correction_may_be_anything(data):
    data["old"][4] = -math.inf
    factors = torch.ones(NUM, dtype=torch.float64)
    factors[4] = 0.0
    now, entropy, streams = tensors(data, corrections=factors, kl_coef=0.0)
    got, _ = OBJECTIVES["clip"][0](now, entropy, streams)
    (streams.weights * got).sum().backward()
    assert got[4] == 0
    assert torch.isfinite(now.grad).all()


# -------------------------------------------------------------------------------------------------------------- metrics
def test_sums_equal_a_loop(data):
    objective = OBJECTIVES["k3"][0]
    unused = np.arange(NUM) % 7 == 0
    data["weights"][unused] = 0.0
    _, sums = objective(*tensors(data))
    ratios = as_ratios(sums)
    wanted = dict.fromkeys(ratios, 0.0)
    for i in np.flatnonzero(~unused):
        log_ratio = data["now"][i] - data["old"][i]
        wanted["policy/ratio_mean"] += math.exp(log_ratio)
        wanted["policy/ratio_rollout_mean"] += math.exp(data["now"][i] - data["rollout"][i])
        wanted["policy/clip_fraction"] += loss_oracle.is_clipped(log_ratio, data["advantages"][i], LOW, HIGH)
        wanted["policy/entropy"] += data["entropy"][i]
        wanted["policy/kl_rollout"] += kl_oracle.k3(data["rollout"][i], data["now"][i])[0]
        wanted["policy/kl_reference"] += kl_oracle.k3(data["now"][i], data["reference"][i])[0]
    assert 5 < wanted["policy/clip_fraction"] < NUM - 5
    for name, ratio in ratios.items():
        assert ratio.numerator == pytest.approx(wanted[name], rel=1e-10), name
        assert ratio.denominator == NUM - unused.sum()


def test_metrics_of_unequal_micro_batches_are_those_of_one(data):
    objective = OBJECTIVES["all"][0]
    whole = as_ratios(objective(*tensors(data))[1])
    parts = [as_ratios(objective(*tensors(data, m))[1]) for m in (slice(0, 3), slice(3, 40), slice(40, NUM))]
    added = sum_ratios(parts)
    assert added.keys() == whole.keys()
    for name in whole:
        assert added[name].value == pytest.approx(whole[name].value, rel=1e-12), name
    means = np.mean([p["policy/clip_fraction"].value for p in parts])
    assert abs(means - whole["policy/clip_fraction"].value) > 1e-3  # a mean of means is something else


def test_unused_tokens_may_hold_anything(data):
    """A token of weight 0 adds nothing to metrics or loss, even where its values are not finite."""
    data["weights"][5] = 0.0
    objective = OBJECTIVES["all"][0]
    now, entropy, streams = tensors(data)
    clean, clean_sums = micro_batch_loss(objective, (now, entropy, torch.zeros(0)), streams)
    data["rollout"][5] = data["entropy"][5] = data["reference"][5] = np.nan
    now, entropy, streams = tensors(data)
    dirty, dirty_sums = micro_batch_loss(objective, (now, entropy, torch.zeros(0)), streams)
    assert dirty == clean
    assert as_ratios(dirty_sums) == as_ratios(clean_sums)


def test_far_ratios_stay_finite(data):
    data["old"] = data["now"] - 200.0
    logprobs, entropy, streams = tensors(data)
    losses, sums = OBJECTIVES["all"][0](logprobs, entropy, streams)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(ratio.value) for ratio in as_ratios(sums).values())


def test_auxiliary_losses_of_sequences_are_weighed_and_counted_by_sequence(data):
    """12 sequences in the step, 2 of them here: their metric is a mean over sequences, not over tokens."""
    now, entropy, streams = tensors(data, sequence_weights=torch.tensor([1 / 12, 1 / 12]))
    auxiliary = torch.tensor([3.0, 5.0], requires_grad=True)
    plain, _ = micro_batch_loss(OBJECTIVES["all"][0], (now, entropy, torch.zeros(0)), streams)
    loss, sums = micro_batch_loss(OBJECTIVES["all"][0], (now, entropy, auxiliary), streams)
    assert float((loss - plain).detach()) == pytest.approx(8 / 12, rel=1e-6)
    loss.backward()
    assert auxiliary.grad.tolist() == pytest.approx([1 / 12, 1 / 12])
    assert as_ratios(sums)["policy/router_balance"] == Ratio(8.0, 2.0)
    dummy = replace(streams, sequence_weights=torch.zeros(2), weights=torch.zeros(NUM))
    loss, sums = micro_batch_loss(OBJECTIVES["all"][0], (now, entropy, auxiliary), dummy)
    assert loss.detach() == 0
    assert set(as_ratios(sums).values()) == {Ratio(0.0, 0.0)}


# --------------------------------------------------------------------------------------------------- supervised and kd
def test_supervised_loss_is_the_negative_log_prob(data):
    logprobs, entropy, streams = tensors(data)
    losses, sums = SupervisedObjective()(logprobs, entropy, streams)
    (streams.weights * losses).sum().backward()
    np.testing.assert_allclose(losses.detach(), -data["now"])
    np.testing.assert_allclose(logprobs.grad, -data["weights"])
    assert entropy.grad is None
    assert as_ratios(sums)["sft/loss"].numerator == pytest.approx(-data["now"].sum())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_distillation_mixes_both_terms(data, share):
    logprobs, divergence, streams = tensors(data)
    losses, sums = DistillationObjective(share)(logprobs, divergence, streams)
    wanted = (1 - share) * -data["now"] + share * data["entropy"]
    np.testing.assert_allclose(losses.detach(), wanted, rtol=1e-12)
    found = {name: ratio.value for name, ratio in as_ratios(sums).items()}
    assert found == pytest.approx(
        {"kd/loss": wanted.mean(), "kd/divergence": data["entropy"].mean(), "kd/cross_entropy": -data["now"].mean()}
    )
    (streams.weights * losses).sum().backward()
    assert (logprobs.grad is None) == (share == 1.0)
    assert (divergence.grad is None) == (share == 0.0)
