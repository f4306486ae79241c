"""Objectives of pairs, single labelled responses, values and steps: their wiring, weights and metrics."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from skirl.config.offline import DPOLoss, IPOLoss, KTOLoss, ORPOLoss, RMConfig, SimPOLoss
from skirl.planning.schedule import make_plan
from skirl.records import Preference, Ratio, TrainingSequence
from skirl.tracking.metrics import spec_of
from skirl.training.objective import as_ratios, micro_batch_loss
from skirl.training.preference_objective import PreferenceObjective, RewardModelObjective
from skirl.training.rows import Streams, make_row
from skirl.training.value_objective import StepRewardObjective, ValueObjective

LENGTHS = (3, 1, 2, 5, 4, 4)
LOGPROBS = -torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.1
REFERENCE = LOGPROBS + 0.3 * torch.randn(LOGPROBS.shape, generator=torch.Generator().manual_seed(1)).double()
PARTS, REFERENCE_PARTS = (x.split(LENGTHS) for x in (LOGPROBS, REFERENCE))
SUMS = [float(p.sum() - r.sum()) for p, r in zip(PARTS, REFERENCE_PARTS, strict=True)]
MEANS = [float(p.mean() - r.mean()) for p, r in zip(PARTS, REFERENCE_PARTS, strict=True)]
PLAIN = [float(p.mean()) for p in PARTS]


def streams(count=6, **changes):
    """The weights that a plan of the sequence normaliser gives, all sequences in one micro-batch."""
    lengths = torch.tensor(LENGTHS)
    found = Streams(
        weights=(1 / (6 * lengths)).double().repeat_interleave(lengths),
        segments=torch.arange(6).repeat_interleave(lengths),
        sequence_weights=torch.full((6,), 1 / 6),
        reference_logprobs=REFERENCE,
        chosen=torch.arange(6) % 2 == 0,
        margins=torch.tensor([0.5, 9.0, 0.0, 9.0, 2.0, 9.0]).double(),
        baselines=torch.full((6,), 0.2).double(),
    )
    return replace(found, **changes)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_odds(mean):
    return mean - math.log1p(-math.exp(mean))


def dpo_pair(c, r):
    h = 0.5 * (SUMS[c] - SUMS[r])
    return -0.8 * math.log(sigmoid(h)) - 0.2 * math.log(sigmoid(-h))


PAIRED = {
    "dpo": (
        DPOLoss(kind="dpo", beta=0.5, label_smoothing=0.2),
        dpo_pair,
        [0.5 * x for x in SUMS],
    ),
    "ipo sum": (
        IPOLoss(kind="ipo", beta=0.5, reduction="sum"),
        lambda c, r: (SUMS[c] - SUMS[r] - 1) ** 2,
        [0.5 * x for x in SUMS],
    ),
    "ipo mean": (
        IPOLoss(kind="ipo", beta=0.5),
        lambda c, r: (MEANS[c] - MEANS[r] - 1) ** 2,
        [0.5 * x for x in MEANS],
    ),
    "simpo": (
        SimPOLoss(kind="simpo", beta=3.0, margin=0.4),
        lambda c, r: -math.log(sigmoid(3 * (PLAIN[c] - PLAIN[r]) - 0.4)),
        [3 * x for x in PLAIN],
    ),
    "orpo": (
        ORPOLoss(kind="orpo", coef=0.7),
        lambda c, r: -PLAIN[c] - 0.7 * math.log(sigmoid(log_odds(PLAIN[c]) - log_odds(PLAIN[r]))),
        PLAIN,
    ),
}


@pytest.mark.parametrize("name", PAIRED)
def test_the_weighted_sum_over_tokens_is_the_mean_over_pairs(name):
    loss, by_hand, rewards = PAIRED[name]
    total, sums = micro_batch_loss(PreferenceObjective(loss), (LOGPROBS, LOGPROBS, torch.zeros(0)), streams())
    pairs = [by_hand(2 * k, 2 * k + 1) for k in range(3)]
    assert float(total) == pytest.approx(np.mean(pairs), rel=1e-6)
    found = as_ratios(sums)
    assert found["dpo/loss"].numerator == pytest.approx(sum(pairs), rel=1e-6)
    margins = np.subtract(rewards[0::2], rewards[1::2])
    assert found["dpo/margin"].numerator == pytest.approx(margins.sum(), rel=1e-6)
    assert found["dpo/accuracy"] == Ratio(float((margins > 0).sum()), 3.0)
    assert found["dpo/chosen_reward"].numerator == pytest.approx(sum(rewards[0::2]), rel=1e-6)
    assert found["dpo/rejected_reward"].numerator == pytest.approx(sum(rewards[1::2]), rel=1e-6)
    assert {ratio.denominator for ratio in found.values()} == {3.0}
    assert all(spec_of(n) for n in found)


def test_kto_takes_single_responses():
    loss = KTOLoss(kind="kto", beta=0.5, desirable_weight=1.1, undesirable_weight=0.7)
    chosen = torch.tensor([True, True, True, False, True, False])
    total, sums = micro_batch_loss(
        PreferenceObjective(loss), (LOGPROBS, LOGPROBS, torch.zeros(0)), streams(chosen=chosen)
    )
    gains = [0.5 * (x - 0.2) for x in SUMS]
    each = [1.1 * sigmoid(-g) if c else 0.7 * sigmoid(g) for g, c in zip(gains, chosen.tolist(), strict=True)]
    assert float(total) == pytest.approx(np.mean(each), rel=1e-6)
    found = as_ratios(sums)
    assert found["dpo/chosen_reward"].denominator == 4
    assert found["dpo/rejected_reward"].denominator == 2
    assert found["dpo/loss"].denominator == 6
    assert "dpo/margin" not in found


@pytest.mark.parametrize("loss", ["sigmoid", "log_exp"])
def test_reward_models_score_the_last_token_of_each_response(loss):
    scores = torch.tensor([1.0, -0.5, 0.3, 0.9, 2.0, 2.5], dtype=torch.float64)
    one_each = streams(weights=torch.full((6,), 1 / 6), segments=torch.arange(6), reference_logprobs=None)
    objective = RewardModelObjective(RMConfig(loss=loss, centering=0.1))
    total, sums = micro_batch_loss(objective, (scores, scores, torch.zeros(0)), one_each)
    c, r, margins = scores[0::2].numpy(), scores[1::2].numpy(), np.array([0.5, 0.0, 2.0])
    pairs = np.log1p(np.exp(-(c - r - margins))) + 0.1 * (c + r) ** 2
    assert float(total) == pytest.approx(pairs.mean(), rel=1e-6)
    found = as_ratios(sums)
    assert found["rm/accuracy"] == Ratio(1.0, 3.0)
    assert found["rm/margin"].value == pytest.approx((c - r).mean(), rel=1e-6)
    assert found["rm/loss"].value == pytest.approx(pairs.mean(), rel=1e-6)
    assert all(spec_of(n) for n in found)


def test_critics():
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    given = Streams(
        weights=torch.tensor([0.5, 0.5, 0.0]),
        segments=torch.zeros(3, dtype=torch.long),
        sequence_weights=torch.ones(1),
        values=torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64),
        returns=torch.tensor([0.0, 3.0, 0.0], dtype=torch.float64),
    )
    loss, sums = micro_batch_loss(ValueObjective(0.2), (values, values, torch.zeros(0)), given)
    assert float(loss) == pytest.approx(0.5 * 0.5 + 0.5 * 0.5 * 1.8**2)
    found = as_ratios(sums)
    assert found["critic/value_mean"] == Ratio(3.0, 2.0)
    assert found["critic/loss"].value == pytest.approx(float(loss))
    assert found["critic/clip_fraction"] == Ratio(1.0, 2.0)
    assert all(spec_of(n) for n in found)


def test_steps_are_judged_right_where_logit_and_label_agree():
    logits = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    given = Streams(
        weights=torch.full((3,), 1 / 3),
        segments=torch.zeros(3, dtype=torch.long),
        sequence_weights=torch.ones(1),
        labels=torch.tensor([1.0, 0.0, 0.2], dtype=torch.float64),
    )
    loss, sums = micro_batch_loss(StepRewardObjective(), (logits, logits, torch.zeros(0)), given)
    wanted = [
        -math.log(sigmoid(2)),
        -math.log(sigmoid(1)),
        -0.2 * math.log(sigmoid(0.5)) - 0.8 * math.log(sigmoid(-0.5)),
    ]
    assert float(loss) == pytest.approx(np.mean(wanted), rel=1e-6)
    assert as_ratios(sums)["prm/accuracy"] == Ratio(2.0, 3.0)


# -------------------------------------------------------------------------------------------- dummies, empty responses
def compared(number, length, chosen):
    return TrainingSequence(
        f"s{number}",
        np.arange(length + 2),
        np.arange(2, length + 2),
        reference_logprobs=np.full(length, -1.0, dtype=np.float32),
        preference=Preference(chosen=chosen),
    )


@pytest.mark.parametrize("kind", ["dpo", "ipo", "kto", "simpo", "orpo"])
def test_dummies_and_empty_responses_give_finite_zeros(kind):
    """A log-prob of exactly 0 (p = 1) in the dummy is where orpo's odds have no bound."""
    classes = {"dpo": DPOLoss, "ipo": IPOLoss, "kto": KTOLoss, "simpo": SimPOLoss, "orpo": ORPOLoss}
    objective = PreferenceObjective(classes[kind](kind=kind))
    batch = [compared(0, 3, True), compared(1, 0, False)]
    plan = make_plan(batch, num_ranks=2, max_tokens=20, normalizer="sequence", unit_of=["a", "a"])
    rows = [make_row(plan, m, torch.device("cpu")) for rank in plan.steps[0].ranks for m in rank]
    assert sorted(len(row.targets) for row, _ in rows) == [2, 3]
    for row, given in rows:
        logprobs = torch.zeros(len(row.targets), requires_grad=True)
        loss, sums = micro_batch_loss(objective, (logprobs, logprobs, torch.zeros(0)), given)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprobs.grad).all()
        if float(given.weights.sum()) == 0 or kind != "kto":  # a pair needs both
            assert loss.detach() == 0
            assert not logprobs.grad.any()
            assert as_ratios(sums)["dpo/loss"] == Ratio(0.0, 0.0)
