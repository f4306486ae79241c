"""The objective: token losses and sums against loops written by hand, in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from skirl.records import Sampling, sum_ratios
from skirl.training.objective import PolicyObjective, SupervisedObjective, as_ratios
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
    """(log-probs, entropy, streams), float64, the first two with gradient."""
    t = {name: torch.from_numpy(values[members].copy()) for name, values in data.items()}
    streams = Streams(
        weights=t["weights"],
        advantages=t["advantages"],
        old_logprobs=t["old"],
        rollout_logprobs=t["rollout"],
        reference_logprobs=t["reference"],
    )
    return t["now"].requires_grad_(), t["entropy"].requires_grad_(), replace(streams, **changes)


def by_hand(data, objective, with_old=True):
    """(losses, their derivatives by the log-prob) one token at a time."""
    losses, slopes = [], []
    for i in range(NUM):
        log_ratio = data["now"][i] - data["old"][i] if with_old else 0.0
        loss, slope = loss_oracle.ppo_clip(
            log_ratio, data["advantages"][i], objective.clip_low, objective.clip_high, objective.clip_dual
        )
        if objective.kl_coef:
            value, by_now = kl_oracle.ESTIMATORS[objective.kl_estimator](data["now"][i], data["reference"][i])
            loss += objective.kl_coef * value
            slope += objective.kl_coef * by_now
        losses.append(loss - objective.entropy_coef * data["entropy"][i])
        slopes.append(slope)
    return losses, slopes


OBJECTIVES = {
    "clip": PolicyObjective(Sampling(), LOW, HIGH, None),
    "dual clip": PolicyObjective(Sampling(), LOW, HIGH, 2.0),
    "k2": PolicyObjective(Sampling(), LOW, HIGH, 2.0, kl_coef=0.3, kl_estimator="k2"),
    "k3": PolicyObjective(Sampling(), LOW, HIGH, None, kl_coef=0.3, kl_estimator="k3"),
    "entropy": PolicyObjective(Sampling(), LOW, HIGH, None, entropy_coef=0.05),
    "all": PolicyObjective(Sampling(), LOW, HIGH, 2.0, kl_coef=0.3, kl_estimator="k3", entropy_coef=0.05),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_equal_a_loop(data, name):
    objective = OBJECTIVES[name]
    losses, slopes = by_hand(data, objective)
    logprobs, entropy, streams = tensors(data)
    got, _ = objective(logprobs, entropy, streams)
    (streams.weights * got).sum().backward()
    np.testing.assert_allclose(got.detach(), losses, rtol=1e-12)
    np.testing.assert_allclose(logprobs.grad, data["weights"] * slopes, rtol=1e-10, atol=1e-16)
    bonus = torch.zeros(NUM) if entropy.grad is None else entropy.grad
    np.testing.assert_allclose(bonus, -objective.entropy_coef * data["weights"], rtol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_differ_where_the_terms_differ(data, name):
    """So that the test above can fail."""
    others = [by_hand(data, o)[0] for key, o in OBJECTIVES.items() if key != name]
    assert all(np.abs(np.subtract(by_hand(data, OBJECTIVES[name])[0], other)).max() > 1e-3 for other in others)


def test_without_old_logprobs_it_is_the_plain_policy_gradient(data):
    logprobs, entropy, streams = tensors(data, old_logprobs=None)
    losses, sums = OBJECTIVES["dual clip"](logprobs, entropy, streams)
    (streams.weights * losses).sum().backward()
    np.testing.assert_allclose(losses.detach(), -data["advantages"], rtol=1e-12)
    np.testing.assert_allclose(logprobs.grad, -data["weights"] * data["advantages"], rtol=1e-12)
    assert float(sums["policy/ratio_mean"]) == NUM
    assert float(sums["policy/clip_fraction"]) == 0

    same, entropy, streams = tensors(data)
    other, _ = OBJECTIVES["dual clip"](same, entropy, replace(streams, old_logprobs=same.detach().clone()))
    (streams.weights * other).sum().backward()
    assert torch.equal(losses, other)
    assert torch.equal(logprobs.grad, same.grad)


def test_sums_equal_a_loop(data):
    objective = OBJECTIVES["k3"]
    unused = np.arange(NUM) % 7 == 0
    data["weights"][unused] = 0.0
    _, sums = objective(*tensors(data))
    ratios = as_ratios(sums, NUM)
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
        assert ratio.denominator == NUM


def test_metrics_of_unequal_micro_batches_are_those_of_one(data):
    objective = OBJECTIVES["all"]
    whole = as_ratios(objective(*tensors(data))[1], NUM)
    parts = []
    for members in (slice(0, 3), slice(3, 40), slice(40, NUM)):
        logprobs, entropy, streams = tensors(data, members)
        parts.append(as_ratios(objective(logprobs, entropy, streams)[1], len(logprobs)))
    added = sum_ratios(parts)
    assert added.keys() == whole.keys()
    for name in whole:
        assert added[name].value == pytest.approx(whole[name].value, rel=1e-12), name
    means = np.mean([p["policy/clip_fraction"].value for p in parts])
    assert abs(means - whole["policy/clip_fraction"].value) > 1e-3  # a mean of means is something else


def test_unused_tokens_may_hold_anything(data):
    """A token of weight 0 adds nothing to metrics, even where its values are not finite."""
    data["weights"][5] = 0.0
    objective = OBJECTIVES["k3"]
    clean = objective(*tensors(data))[1]
    data["rollout"][5] = data["entropy"][5] = np.nan
    dirty = objective(*tensors(data))[1]
    assert torch.isfinite(dirty["policy/kl_rollout"])
    assert float(dirty["policy/kl_rollout"]) <= float(clean["policy/kl_rollout"])


def test_far_ratios_stay_finite(data):
    data["old"] = data["now"] - 200.0
    logprobs, entropy, streams = tensors(data)
    losses, sums = OBJECTIVES["all"](logprobs, entropy, streams)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(value) for value in sums.values())


def test_supervised_loss_is_the_negative_log_prob(data):
    logprobs, entropy, streams = tensors(data)
    losses, sums = SupervisedObjective()(logprobs, entropy, streams)
    (streams.weights * losses).sum().backward()
    np.testing.assert_allclose(losses.detach(), -data["now"])
    np.testing.assert_allclose(logprobs.grad, -data["weights"])
    assert entropy.grad is None
    assert float(sums["sft/loss"]) == pytest.approx(-data["now"].sum())
