"""Advantages, KL estimators and policy losses against slow oracles: values, gradients, and what holds for all input."""

import math
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skirl.algorithms.advantages import group_mean, group_norm
from skirl.algorithms.kl import kl_k1, kl_k2, kl_k3
from skirl.algorithms.losses import ppo_clip, ppo_clip_mask
from tests.oracles import advantages as oracle_advantages
from tests.oracles import kl as oracle_kl
from tests.oracles import losses as oracle_losses

TOLERANCE = 1e-8
EPS64 = torch.finfo(torch.float64).eps
ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
DTYPES = (torch.float32, torch.float64)
CHECK = settings(deadline=None, max_examples=60, derandomize=True)

floats = partial(st.floats, allow_nan=False, allow_infinity=False)
floats32 = partial(floats, width=32)
graded = floats(-2, 2)
right_or_wrong = st.sampled_from((0.0, 1.0))
large = st.builds(lambda whole, part: whole * 1e6 + part, st.integers(-1, 1), graded)
score_lists = st.one_of(*(st.lists(kind, min_size=1, max_size=16) for kind in (graded, right_or_wrong, large)))
score_pairs = st.one_of(*(st.lists(kind, min_size=2, max_size=16) for kind in (graded, right_or_wrong, large)))
ddofs = st.integers(0, 1)
log_ratios = st.one_of(floats32(-0.625, 0.625), floats32(-25, 25), st.sampled_from((-23.0, -20.5, 20.5, 23.0)))
advantage_values = floats32(-4, 4, allow_subnormal=False)
token_lists = st.lists(st.tuples(log_ratios, advantage_values), min_size=1, max_size=12)
distances = st.one_of(  # subnormal differences, below 1e-38, are flushed
    floats32(-25, 25, allow_subnormal=False),
    floats32(-(2.0**-7), 2.0**-7, allow_subnormal=False),
)
clips = st.sampled_from(((0.2, 0.2), (0.2, 0.28), (0.1, 0.5), (0.9, 3.5)))
duals = st.sampled_from((None, 1.5, 3.0))


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(got: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    torch.testing.assert_close(got, expected, rtol=error, atol=error)


def rounding(scores: list[float]) -> float:
    """How far float64 can be off: a mean of G scores of size m is good to a few eps m."""
    return 8 * EPS64 * max(1.0, *(abs(score) for score in scores))


class TestGroupAdvantages:
    @CHECK
    @given(score_lists, st.sampled_from((0.0, 1e-6, 1e-4)), ddofs)
    def test_group_norm_equals_the_oracle(self, scores: list[float], eps: float, ddof: int):
        assume(oracle_advantages.tolerance_margin(scores, TOLERANCE) > 1e-6)
        expected = oracle_advantages.group_norm(scores, eps=eps, ddof=ddof, tolerance=TOLERANCE)
        got = group_norm(float64(scores), eps=eps, ddof=ddof, tolerance=TOLERANCE)
        std = oracle_advantages.std(scores, ddof=ddof) if any(expected) else 1.0
        bound = 1e-13 + 4 * math.sqrt(len(scores)) * rounding(scores) / std
        torch.testing.assert_close(got, float64(expected), rtol=0, atol=bound)
        assert abs(float(got.sum())) <= len(scores) * bound

    @CHECK
    @given(score_lists)
    def test_group_mean_equals_the_oracle(self, scores: list[float]):
        assume(oracle_advantages.tolerance_margin(scores, TOLERANCE) > 1e-6)
        expected = oracle_advantages.group_mean(scores, tolerance=TOLERANCE)
        got = group_mean(float64(scores), tolerance=TOLERANCE)
        torch.testing.assert_close(got, float64(expected), rtol=0, atol=rounding(scores))
        assert abs(float(got.sum())) <= len(scores) * rounding(scores)

    @pytest.mark.parametrize(
        "scores",
        [
            [0.1 + 0.2, 0.3],
            [0.3, 0.1 + 0.2, 0.3, 0.3, 0.6 - 0.3],
            [0.7] * 8,
            [0.1] * 10,
            [1e6 + 1e-3, 1e6],  # equal to 1e-9 of their size
            [-1e6, -1e6 - 1e-3, -1e6],
            [5e-324, 0.0],
            [0.0, -0.0],
            [0.4],
            [1e6],
        ],
    )
    @pytest.mark.parametrize("ddof", [0, 1])
    def test_scores_equal_up_to_rounding_give_exactly_zero(self, scores: list[float], ddof: int):
        zeros = torch.zeros(len(scores), dtype=torch.float64)
        assert torch.equal(group_norm(float64(scores), eps=0.0, ddof=ddof, tolerance=TOLERANCE), zeros)
        assert torch.equal(group_mean(float64(scores), tolerance=TOLERANCE), zeros)

    @CHECK
    @given(graded, st.integers(1, 16), ddofs)
    def test_any_repeated_score_gives_exactly_zero(self, score: float, size: int, ddof: int):
        scores = float64([score] * size)
        assert not group_norm(scores, eps=1e-6, ddof=ddof, tolerance=TOLERANCE).any()
        assert not group_mean(scores, tolerance=TOLERANCE).any()

    def test_the_spread_is_compared_with_the_size_of_the_scores_or_1(self):
        assert group_mean(float64([0.0, 0.9e-8]), tolerance=1e-8).tolist() == [0.0, 0.0]
        assert group_mean(float64([0.0, 1.1e-8]), tolerance=1e-8).tolist() == [-0.55e-8, 0.55e-8]
        assert group_mean(float64([1000.0, 1000.0 + 0.9e-5]), tolerance=1e-8).tolist() == [0.0, 0.0]
        assert group_mean(float64([1000.0, 1000.0 + 1.1e-5]), tolerance=1e-8).abs().min() > 0
        assert group_mean(float64([-1000.0, -1000.0 - 0.9e-5]), tolerance=1e-8).tolist() == [0.0, 0.0]
        assert group_mean(float64([0.0, 5e-324]), tolerance=0.0).abs().max() >= 0  # no division, no NaN

    @pytest.mark.parametrize(
        ("scores", "eps", "ddof", "expected"),
        [
            ([1.0, 0.0, 0.0, 1.0], 0.0, 0, [1.0, -1.0, -1.0, 1.0]),
            ([1.0, 0.0, 0.0, 1.0], 0.0, 1, [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5]),
            ([1.0, 0.0, 0.0, 0.0], 0.0, 0, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
            ([2.0, 4.0], 0.5, 0, [-1 / 1.5, 1 / 1.5]),
            ([1e6, 1e6 + 1], 0.0, 1, [-(0.5**0.5), 0.5**0.5]),
        ],
    )
    def test_worked_examples(self, scores: list[float], eps: float, ddof: int, expected: list[float]):
        got = group_norm(float64(scores), eps=eps, ddof=ddof, tolerance=TOLERANCE)
        torch.testing.assert_close(got, float64(expected), rtol=1e-14, atol=0)

    @CHECK
    @given(score_pairs, st.randoms(use_true_random=False), ddofs)
    def test_siblings_may_come_in_any_order(self, scores: list[float], random: Random, ddof: int):
        assume(oracle_advantages.tolerance_margin(scores, TOLERANCE) > 1e-6)
        order = list(range(len(scores)))
        random.shuffle(order)
        straight = group_norm(float64(scores), eps=1e-6, ddof=ddof, tolerance=TOLERANCE)
        shuffled = group_norm(float64([scores[i] for i in order]), eps=1e-6, ddof=ddof, tolerance=TOLERANCE)
        std = oracle_advantages.std(scores, ddof=ddof) or 1.0
        bound = 1e-13 + 8 * math.sqrt(len(scores)) * rounding(scores) / std
        torch.testing.assert_close(shuffled, straight[order], rtol=0, atol=bound)

    @CHECK
    @given(score_pairs)
    def test_the_scores_stay_as_they_were(self, scores: list[float]):
        given_scores = float64(scores)
        group_norm(given_scores, eps=1e-6, ddof=1, tolerance=TOLERANCE)
        group_mean(given_scores, tolerance=TOLERANCE)
        assert torch.equal(given_scores, float64(scores))


class TestKL:
    @pytest.mark.parametrize("name", ["k1", "k2", "k3"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @CHECK
    @given(pairs=st.lists(st.tuples(*[floats32(-30, 0)] * 2), min_size=1, max_size=8))
    def test_value_and_gradient_equal_the_oracle(self, name: str, dtype: torch.dtype, pairs: list[tuple[float, float]]):
        assume(all(abs(abs(policy - reference) - oracle_kl.BOUND) > 1e-3 for policy, reference in pairs))
        policy = torch.tensor([pair[0] for pair in pairs], dtype=dtype, requires_grad=True)
        reference = torch.tensor([pair[1] for pair in pairs], dtype=dtype)
        got = ESTIMATORS[name](policy, reference)
        (slope,) = torch.autograd.grad(got.sum(), policy)
        expected = [oracle_kl.ESTIMATORS[name](*pair) for pair in pairs]
        # float32: the difference of two log-probs of size 30 is good to 2e-6, which exp turns into a relative error.
        error = 1e-5 if got.dtype == torch.float32 else 1e-12
        assert_close(got.double(), float64([value for value, _ in expected]), error)
        assert_close(slope.double(), float64([derivative for _, derivative in expected]), error)

    @CHECK
    @given(st.lists(distances, min_size=1, max_size=16), st.sampled_from(DTYPES))
    def test_k2_and_k3_are_never_negative(self, far: list[float], dtype: torch.dtype):
        policy = torch.tensor(far, dtype=dtype)
        assert (kl_k2(policy, torch.zeros_like(policy)) >= 0).all()
        assert (kl_k3(policy, torch.zeros_like(policy)) >= 0).all()

    @pytest.mark.parametrize("distance", [1e-3, -1e-3, 1e-4, -1e-4])
    def test_k3_of_close_log_probs_keeps_its_digits_in_float32(self, distance: float):
        got = kl_k3(torch.tensor([distance]), torch.zeros(1)).item()
        expected, _ = oracle_kl.k3(torch.tensor(distance).item(), 0.0)
        # expm1(d) and d are each rounded at size |d|; k3 is about d^2 / 2.
        assert got == pytest.approx(expected, abs=2 * torch.finfo(torch.float32).eps * abs(distance))

    def test_k3_at_log_2(self):
        d = math.log(2)
        assert kl_k3(float64([d]), float64([0.0])).item() == pytest.approx(-0.5 + d, rel=1e-6)
        assert kl_k3(float64([-d]), float64([0.0])).item() == pytest.approx(1 - d, rel=1e-6)

    def test_k3_of_far_tokens_is_finite(self):
        policy = torch.tensor([-200.0, 0.0], requires_grad=True)
        kl = kl_k3(policy, torch.tensor([0.0, -200.0]))
        kl.sum().backward()
        assert torch.isfinite(kl).all()
        assert kl[0].item() == pytest.approx(math.exp(20), rel=1e-5)
        assert kl[1].item() == pytest.approx(199, rel=1e-5)  # a policy far above the reference is still pulled back
        assert policy.grad is not None
        assert policy.grad.tolist() == [0.0, 1.0]

    @CHECK
    @given(st.lists(st.tuples(*[floats(-3, 3)] * 2), min_size=2, max_size=6))
    def test_expectations_over_the_vocabulary(self, logits: list[tuple[float, float]]):
        """E_q[k1] = E_q[k3] = KL(q || p); E_q[grad k2] = grad KL(q || p); E_q[grad k3] = grad KL(p || q)."""
        theta = float64([pair[0] for pair in logits]).requires_grad_()
        log_q = torch.log_softmax(theta, 0)
        log_p = torch.log_softmax(float64([pair[1] for pair in logits]), 0)
        q, p = log_q.exp(), log_p.exp()
        exact = oracle_kl.divergence(q.tolist(), p.tolist())
        for estimator in (kl_k1, kl_k3):
            assert (q * estimator(log_q, log_p)).sum().item() == pytest.approx(exact, rel=1e-5, abs=1e-6)

        def gradient(value: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(value, theta, retain_graph=True)[0]

        def expected_gradient(estimator) -> torch.Tensor:
            return gradient((q.detach() * estimator(log_q, log_p)).sum())

        assert_close(expected_gradient(kl_k2), gradient((q * (log_q - log_p)).sum()), 1e-5)
        assert_close(expected_gradient(kl_k3), gradient((p * (log_p - log_q)).sum()), 1e-5)
        assert_close(expected_gradient(kl_k1), torch.zeros_like(theta), 1e-5)


class TestPPOClip:
    @CHECK
    @given(token_lists, clips, duals, st.sampled_from(DTYPES))
    def test_value_and_gradient_equal_the_oracle(self, tokens, clip, dual: float | None, dtype: torch.dtype):
        low, high = clip
        log_ratio = torch.tensor([token[0] for token in tokens], dtype=dtype, requires_grad=True)
        advantages = torch.tensor([token[1] for token in tokens], dtype=dtype)
        got = ppo_clip(log_ratio, advantages, low=low, high=high, dual=dual)
        (slope,) = torch.autograd.grad(got.sum(), log_ratio)
        expected = [oracle_losses.ppo_clip(ratio, advantage, low, high, dual) for ratio, advantage in tokens]
        # float32: exp of a log ratio of size 20 has a relative error of 20 eps.
        error = 1e-5 if got.dtype == torch.float32 else 1e-12
        assert_close(got.double(), float64([value for value, _ in expected]), error)
        smooth = [oracle_losses.kink_margin(token[0], low, high, dual) > 1e-5 for token in tokens]
        derivatives = float64([derivative for _, derivative in expected])
        assert_close(slope.double()[smooth], derivatives[smooth], error)

    @pytest.mark.parametrize(
        ("ratio", "advantage", "dual", "loss", "slope"),
        [
            (1.0, 2.0, None, -2.0, -2.0),
            (1.0, -2.0, None, 2.0, 2.0),
            (1.25, 2.0, None, -2.5, -2.5),
            (1.5, 2.0, None, -2.56, 0.0),  # above 1.28: no more to gain
            (0.5, 2.0, None, -1.0, -1.0),  # a good token that became rarer is pulled back in full
            (0.5, -2.0, None, 1.6, 0.0),  # below 0.8: no more to gain
            (1.5, -2.0, None, 3.0, 3.0),  # a bad token that became likelier is pushed down in full
            (5.0, -2.0, None, 10.0, 10.0),
            (5.0, -2.0, 3.0, 6.0, 0.0),  # dual clip
            (2.5, -2.0, 3.0, 5.0, 5.0),
            (5.0, 2.0, 3.0, -2.56, 0.0),  # dual clip is for bad tokens only
        ],
    )
    def test_worked_examples(self, ratio: float, advantage: float, dual: float | None, loss: float, slope: float):
        log_ratio = float64([math.log(ratio)]).requires_grad_()
        got = ppo_clip(log_ratio, float64([advantage]), low=0.2, high=0.28, dual=dual)
        got.sum().backward()
        assert got.item() == pytest.approx(loss, rel=1e-6)
        assert log_ratio.grad is not None
        assert log_ratio.grad.item() == pytest.approx(slope, rel=1e-6)

    @CHECK
    @given(st.lists(st.tuples(floats32(-30, 0), advantage_values), min_size=1), clips, duals)
    def test_ratio_1_is_the_plain_policy_gradient(self, tokens, clip, dual: float | None):
        logprobs = torch.tensor([token[0] for token in tokens], requires_grad=True)
        advantages = torch.tensor([token[1] for token in tokens])
        loss = ppo_clip(logprobs - logprobs.detach(), advantages, low=clip[0], high=clip[1], dual=dual)
        loss.sum().backward()
        assert torch.equal(loss, -advantages)
        assert logprobs.grad is not None
        assert torch.equal(logprobs.grad, -advantages)

    @CHECK
    @given(token_lists, clips, st.sampled_from((1.5, 3.0)))
    def test_dual_clip_bounds_the_loss_of_bad_tokens_and_leaves_good_ones(self, tokens, clip, dual: float):
        log_ratio = torch.tensor([token[0] for token in tokens])
        advantages = torch.tensor([token[1] for token in tokens])
        bounded = ppo_clip(log_ratio, advantages, low=clip[0], high=clip[1], dual=dual)
        plain = ppo_clip(log_ratio, advantages, low=clip[0], high=clip[1], dual=None)
        bad = advantages < 0
        assert (bounded[bad] <= dual * advantages[bad].abs() * (1 + 1e-6)).all()
        assert (bounded <= plain).all()
        assert torch.equal(bounded[~bad], plain[~bad])
        below = bad & (log_ratio.double().exp() < dual * (1 - 1e-6))
        assert torch.equal(bounded[below], plain[below])

    @CHECK
    @given(token_lists, clips)
    def test_clip_mask_marks_the_tokens_without_gradient(self, tokens, clip):
        low, high = clip
        tokens = [token for token in tokens if oracle_losses.kink_margin(token[0], low, high, None) > 1e-5]
        log_ratio = torch.tensor([token[0] for token in tokens], requires_grad=True)
        advantages = torch.tensor([token[1] for token in tokens])
        mask = ppo_clip_mask(log_ratio, advantages, low=low, high=high)
        assert mask.tolist() == [oracle_losses.is_clipped(ratio, advantage, low, high) for ratio, advantage in tokens]
        ppo_clip(log_ratio, advantages, low=low, high=high, dual=None).sum().backward()
        inside = (log_ratio.detach().abs() < oracle_losses.BOUND) & (advantages.abs() > 1e-20)
        assert log_ratio.grad is not None
        assert torch.equal(log_ratio.grad[inside] == 0, mask[inside])

    def test_extreme_log_ratios_stay_finite(self):
        log_ratio = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
        loss = ppo_clip(log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), low=0.2, high=0.2, dual=None)
        loss.sum().backward()
        assert torch.isfinite(loss).all()
        assert log_ratio.grad is not None
        assert torch.isfinite(log_ratio.grad).all()


class TestSplitInvariance:
    @CHECK
    @given(token_lists, st.data())
    def test_a_weighted_sum_is_the_same_over_every_partition(self, tokens, data: st.DataObject):
        """sum(weight x loss) in parts, gradients accumulated: the same as in one piece, for any partition."""
        size = len(tokens)
        weights = float64(data.draw(st.lists(floats(0, 1), min_size=size, max_size=size)))
        part_of = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        tokens = [(max(-3.0, min(3.0, log_ratio)), advantage) for log_ratio, advantage in tokens]
        theta = float64([token[0] for token in tokens])
        advantages = float64([token[1] for token in tokens])
        scale = float64([1.0]).requires_grad_()  # one parameter shared by all tokens, as a model's are

        def total(index: list[int]) -> torch.Tensor:
            policy = theta[index] * scale
            loss = ppo_clip(policy, advantages[index], low=0.2, high=0.28, dual=3.0)
            loss = loss + 0.04 * kl_k3(policy, torch.zeros_like(policy))
            return (weights[index] * loss).sum()

        whole = total(list(range(size)))
        (expected,) = torch.autograd.grad(whole, scale)
        parts = [total([i for i in range(size) if part_of[i] == part]) for part in range(4)]
        for part in parts:
            part.backward()
        assert_close(torch.stack(parts).detach().sum(), whole.detach(), 1e-12)
        assert scale.grad is not None
        assert_close(scale.grad, expected, 1e-12)
