"""Advantages: what holds for all scores, worked numbers, and the ends of the range."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.algorithms.advantages import (
    decoupled_norm,
    discounted_returns,
    gae,
    group_mean,
    group_norm,
    leave_one_out,
    max_rl,
    optimal_baseline,
    pass_at_k,
    whiten,
    whiten_scores,
)
from skirl.errors import RewardError

CHECK = settings(deadline=None, max_examples=25, derandomize=True)
TOLERANCE = 1e-8
scores_of_any_size = st.lists(st.floats(-1e6, 1e6, width=32), max_size=12)
rewards_and_values = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), max_size=12)


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def norm(scores: torch.Tensor) -> torch.Tensor:
    return group_norm(scores, eps=1e-6, ddof=1, tolerance=TOLERANCE)


def mean(scores: torch.Tensor) -> torch.Tensor:
    return group_mean(scores, tolerance=TOLERANCE)


def siblings(scores: torch.Tensor) -> torch.Tensor:
    return leave_one_out(scores, tolerance=TOLERANCE)


def ratio_to_mean(scores: torch.Tensor) -> torch.Tensor:
    return max_rl(scores, tolerance=TOLERANCE)


def even_lengths(scores: torch.Tensor) -> torch.Tensor:
    return optimal_baseline(scores, torch.full_like(scores, 7.0), tolerance=TOLERANCE)


def two_parts(scores: torch.Tensor) -> torch.Tensor:
    parts = torch.stack([scores, scores.flip(0)], 1)
    return decoupled_norm(parts, float64([1.0, 0.5]), eps=1e-6, ddof=1, tolerance=TOLERANCE)


OF_A_GROUP = [norm, mean, siblings, ratio_to_mean, even_lengths, two_parts]


class TestWithinAGroup:
    @pytest.mark.parametrize("advantage", OF_A_GROUP)
    @CHECK
    @given(scores_of_any_size)
    def test_they_sum_to_zero(self, advantage, scores: list[float]):
        given_scores = float64(scores).abs()
        got = advantage(given_scores)
        assert got.dtype == torch.float64
        scale = max(1.0, *given_scores.tolist(), *got.abs().tolist()) if scores else 1.0
        assert abs(got.sum().item()) <= 1e-11 * scale

    @pytest.mark.parametrize("advantage", OF_A_GROUP)
    @pytest.mark.parametrize("scores", [[0.7] * 8, [0.1 + 0.2, 0.3], [1e6] * 4, [0.0, 0.0, 0.0], [3.0], []])
    def test_equal_scores_and_groups_of_one_give_exactly_zero(self, advantage, scores: list[float]):
        assert advantage(float64(scores)).tolist() == [0.0] * len(scores)

    @pytest.mark.parametrize("advantage", OF_A_GROUP)
    def test_the_scores_are_left_as_they_are(self, advantage):
        scores = float64([0.0, 1.0, 0.25])
        advantage(scores)
        assert scores.tolist() == [0.0, 1.0, 0.25]

    @CHECK
    @given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
    def test_leave_one_out_is_the_difference_to_the_other_scores(self, scores: list[float]):
        got = siblings(float64(scores))
        if max(scores) - min(scores) > 1e-6:
            for i, score in enumerate(scores):
                others = scores[:i] + scores[i + 1 :]
                assert got[i].item() == pytest.approx(score - sum(others) / len(others), abs=1e-12)

    def test_leave_one_out_of_worked_scores(self):
        torch.testing.assert_close(siblings(float64([3.0, 0.0, 0.0, 1.0])), float64([8 / 3, -4 / 3, -4 / 3, 0.0]))

    def test_max_rl_of_worked_scores(self):
        assert ratio_to_mean(float64([1.0, 0.0, 0.0, 0.0])).tolist() == [3.0, -1.0, -1.0, -1.0]

    def test_max_rl_refuses_scores_below_zero(self):
        with pytest.raises(RewardError, match=r"needs scores >= 0, got -0\.5"):
            ratio_to_mean(float64([1.0, -0.5]))

    def test_optimal_baseline_of_worked_scores(self):
        """Baseline (10 x 1 + 30 x 0) / 40."""
        got = optimal_baseline(float64([1.0, 0.0]), float64([10.0, 30.0]), tolerance=TOLERANCE)
        assert got.tolist() == [0.75, -0.25]

    @CHECK
    @given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 500)), min_size=2, max_size=8))
    def test_optimal_baseline_balances_over_tokens(self, rows: list[tuple[float, int]]):
        scores, lengths = float64([row[0] for row in rows]), float64([float(row[1]) for row in rows])
        got = optimal_baseline(scores, lengths, tolerance=TOLERANCE)
        assert (lengths * got).sum().item() == pytest.approx(0.0, abs=1e-7)

    def test_optimal_baseline_without_any_token(self):
        assert optimal_baseline(float64([1.0, 0.0]), float64([0.0, 0.0]), tolerance=TOLERANCE).tolist() == [0.0, 0.0]


class TestPassAtK:
    @pytest.mark.parametrize(
        ("size", "num_right", "k"), [(4, 1, 2), (8, 3, 4), (6, 5, 1), (7, 2, 3), (5, 5, 2), (5, 0, 2)]
    )
    def test_it_is_the_mean_over_the_subsets_that_a_response_is_in(self, size: int, num_right: int, k: int):
        right = [i < num_right for i in range(size)]
        outcomes = {chosen: float(any(right[i] for i in chosen)) for chosen in combinations(range(size), k)}
        p = sum(outcomes.values()) / len(outcomes)
        spread = math.sqrt(p * (1 - p))
        got = pass_at_k(torch.tensor(right), k=k)
        for i in range(size):
            mine = [outcome for chosen, outcome in outcomes.items() if i in chosen]
            expected = (sum(mine) / len(mine) - p) / spread if spread > 0 else 0.0
            assert got[i].item() == pytest.approx(expected, abs=1e-12)

    @CHECK
    @given(st.lists(st.booleans(), max_size=64), st.integers(1, 70))
    def test_they_sum_to_zero(self, right: list[bool], k: int):
        got = pass_at_k(torch.tensor(right, dtype=torch.bool), k=k)
        assert got.dtype == torch.float64
        assert torch.isfinite(got).all()
        assert abs(got.sum().item()) <= 1e-10 * max(1.0, *got.abs().tolist(), 0.0)

    @CHECK
    @given(st.lists(st.booleans(), min_size=2, max_size=16))
    def test_k_1_is_the_normalised_score(self, right: list[bool]):
        exact = group_norm(torch.tensor(right).double(), eps=0.0, ddof=0, tolerance=0.0)
        torch.testing.assert_close(pass_at_k(torch.tensor(right), k=1), exact, rtol=1e-12, atol=1e-12)

    def test_a_group_that_lost_siblings_gives_zero(self):
        assert pass_at_k(torch.tensor([True, False]), k=4).tolist() == [0.0, 0.0]


class TestDecoupledNorm:
    def test_combinations_that_a_sum_cannot_tell_apart(self):
        """Sums (2, 1) in both groups: the second group's extra point comes with a second part."""
        weights = float64([1.0, 1.0])
        one = decoupled_norm(float64([[1.0, 1.0], [0.0, 1.0]]), weights, eps=0.0, ddof=1, tolerance=TOLERANCE)
        two = decoupled_norm(float64([[1.0, 1.0], [0.0, 0.0]]), weights, eps=0.0, ddof=1, tolerance=TOLERANCE)
        torch.testing.assert_close(one, float64([0.5**0.5, -(0.5**0.5)]))
        torch.testing.assert_close(two, float64([2**0.5, -(2**0.5)]))

    def test_a_part_that_nobody_has_counts_nothing(self):
        parts = float64([[1.0, math.nan], [0.0, math.nan]])
        got = decoupled_norm(parts, float64([2.0, 3.0]), eps=0.0, ddof=0, tolerance=TOLERANCE)
        assert got.tolist() == [2.0, -2.0]

    def test_a_part_that_some_have_is_normalised_among_them(self):
        parts = float64([[math.nan], [4.0], [2.0], [math.nan]])
        got = decoupled_norm(parts, float64([1.0]), eps=0.0, ddof=0, tolerance=TOLERANCE)
        assert got.tolist() == [0.0, 1.0, -1.0, 0.0]

    def test_a_part_without_spread_adds_exactly_zero(self):
        parts = float64([[0.7, 1.0], [0.1 * 7, 0.0]])
        got = decoupled_norm(parts, float64([1e9, 1.0]), eps=0.0, ddof=0, tolerance=TOLERANCE)
        assert got.tolist() == [1.0, -1.0]


class TestWithinAResponse:
    def test_worked_returns(self):
        assert discounted_returns(float64([1.0, 0.0, 4.0]), gamma=0.5).tolist() == [2.0, 2.0, 4.0]

    def test_worked_gae(self):
        """delta = (0.5 - 1 + 0, 2 - 1); A_0 = -0.5 + 0.25 x 1."""
        advantages, returns = gae(float64([0.0, 2.0]), float64([1.0, 1.0]), gamma=0.5, lam=0.5)
        assert advantages.tolist() == [-0.25, 1.0]
        assert returns.tolist() == [0.75, 2.0]

    @CHECK
    @given(rewards_and_values, st.floats(0, 1))
    def test_lam_1_is_monte_carlo(self, rows: list[tuple[float, float]], gamma: float):
        rewards, values = float64([row[0] for row in rows]), float64([row[1] for row in rows])
        advantages, returns = gae(rewards, values, gamma=gamma, lam=1.0)
        expected = discounted_returns(rewards, gamma=gamma)
        torch.testing.assert_close(returns, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(advantages, expected - values, rtol=1e-12, atol=1e-12)

    @CHECK
    @given(rewards_and_values, st.floats(0, 1))
    def test_lam_0_is_the_temporal_difference(self, rows: list[tuple[float, float]], gamma: float):
        rewards, values = float64([row[0] for row in rows]), float64([row[1] for row in rows])
        advantages, _ = gae(rewards, values, gamma=gamma, lam=0.0)
        following = torch.cat([values[1:], float64([0.0])]) if rows else values
        torch.testing.assert_close(advantages, rewards + gamma * following - values, rtol=1e-12, atol=1e-12)

    @CHECK
    @given(st.lists(st.floats(-5, 5), max_size=20))
    def test_gamma_1_sums_what_is_to_come(self, rewards: list[float]):
        expected = float64(rewards).flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(discounted_returns(float64(rewards), gamma=1.0), expected)

    def test_an_empty_response(self):
        assert discounted_returns(float64([]), gamma=0.9).shape == (0,)
        assert [part.shape for part in gae(float64([]), float64([]), gamma=1.0, lam=0.95)] == [(0,), (0,)]


class TestOverTheBatch:
    @CHECK
    @given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=30))
    def test_whitened_values_have_mean_0_and_variance_1(self, values: list[float]):
        got = whiten(float64(values))
        assert got.mean().item() == pytest.approx(0.0, abs=1e-6)
        variance = float64(values).var(correction=0).item()
        assert got.var(correction=0).item() == pytest.approx(variance / (variance + 1e-8), abs=1e-6)

    @pytest.mark.parametrize("values", [[], [3.0], [0.1] * 3, [1e6 + 0.1] * 7])
    def test_the_same_value_everywhere_gives_exactly_zero(self, values: list[float]):
        assert whiten(float64(values)).tolist() == [0.0] * len(values)
        assert whiten_scores(float64(values), eps=0.0, ddof=1).tolist() == [0.0] * len(values)

    def test_scores_are_divided_by_their_deviation(self):
        torch.testing.assert_close(
            whiten_scores(float64([1.0, 3.0]), eps=0.5, ddof=1), float64([-1.0, 1.0]) / (2**0.5 + 0.5)
        )
