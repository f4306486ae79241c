"""Shaping, corrections and the KL controller: worked numbers and the ends of the range."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.algorithms.corrections import icepop, sequence_is, sequence_mask, tis
from skirl.algorithms.kl import adapted_coef, kl_k3
from skirl.algorithms.shaping import clip_scores, length_reward, overlong_penalty, truncated_scores

CHECK = settings(deadline=None, max_examples=25, derandomize=True)
gaps = st.lists(st.one_of(st.floats(-1, 1), st.sampled_from((math.inf, -math.inf, 50.0, -50.0))), max_size=10)


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestShaping:
    def test_scores_are_held_inside_a_range(self):
        assert clip_scores(float64([-2.0, 0.5, 1e6]), low=-1.0, high=1.0).tolist() == [-1.0, 0.5, 1.0]

    def test_the_overlong_penalty_grows_in_the_buffer(self):
        """DAPO's: nothing up to 16, half way at 18, whole at 20 and past it."""
        lengths = torch.tensor([0, 16, 18, 20, 25])
        got = overlong_penalty(lengths, budget=20, buffer=4, penalty=0.5)
        assert got.tolist() == [0.0, 0.0, -0.25, -0.5, -0.5]

    def test_a_buffer_smaller_than_a_token_punishes_the_whole_budget(self):
        assert overlong_penalty(float64([3.0, 4.0]), budget=4, buffer=0, penalty=1.0).tolist() == [0.0, -1.0]

    def test_cut_off_responses_are_worth_a_share_or_a_fixed_score(self):
        scores, cut = float64([1.0, 1.0, -1.0]), torch.tensor([False, True, True])
        assert truncated_scores(scores, cut, factor=0.25, score=None).tolist() == [1.0, 0.25, -0.25]
        assert truncated_scores(scores, cut, factor=None, score=-0.5).tolist() == [1.0, -0.5, -0.5]
        assert truncated_scores(scores, cut, factor=None, score=None).tolist() == [1.0, 1.0, -1.0]
        assert truncated_scores(float64([math.nan]), torch.tensor([True]), factor=None, score=0.0).tolist() == [0.0]

    def test_short_right_answers_gain_and_long_ones_lose(self):
        lengths, right = torch.tensor([10, 20, 30, 10]), torch.tensor([True, True, True, False])
        assert length_reward(lengths, right, coef=2.0).tolist() == [1.0, 0.0, -1.0, 0.0]

    def test_equal_lengths_and_empty_groups_get_no_length_reward(self):
        assert length_reward(torch.tensor([5, 5]), torch.tensor([True, False]), coef=1.0).tolist() == [0.0, 0.0]
        assert length_reward(torch.tensor([], dtype=torch.int64), torch.tensor([]).bool(), coef=1.0).shape == (0,)


class TestCorrections:
    def test_token_weights_are_truncated(self):
        gap = float64([1.0, 3.0, 0.25]).log()
        factors, cut = tis(gap, low=0.5, high=2.0)
        torch.testing.assert_close(factors, float64([1.0, 2.0, 0.5]))
        assert cut.tolist() == [False, True, True]

    def test_tokens_outside_of_the_band_are_left_out(self):
        factors, cut = icepop(float64([1.0, 6.0, 0.25]).log(), low=0.5, high=5.0)
        torch.testing.assert_close(factors, float64([1.0, 0.0, 0.0]))
        assert cut.tolist() == [False, True, True]

    def test_a_response_stays_by_its_geometric_mean(self):
        inside = float64([4.0, 0.25]).log()  # geometric mean 1
        factors, cut = sequence_mask(inside, low=0.99, high=1.01, cap=2.0)
        torch.testing.assert_close(factors, float64([2.0, 0.25]))
        assert cut.tolist() == [True, False]
        factors, cut = sequence_mask(float64([1.0, 1.1]).log(), low=0.99, high=1.01, cap=2.0)
        assert factors.tolist() == [0.0, 0.0]
        assert cut.tolist() == [True, True]

    def test_a_response_has_one_weight(self):
        factors, cut = sequence_is(float64([1.5, 0.5]).log(), cap=2.0)
        torch.testing.assert_close(factors, float64([0.75, 0.75]))
        assert cut.tolist() == [False, False]
        factors, cut = sequence_is(float64([1.5, 1.5]).log(), cap=2.0)
        assert factors.tolist() == [2.0, 2.0]
        assert cut.tolist() == [True, True]

    @CHECK
    @given(gaps)
    def test_any_gap_gives_finite_weights(self, gap: list[float]):
        for factors, cut in (
            tis(float64(gap), low=0.0, high=2.0),
            icepop(float64(gap), low=0.5, high=5.0),
            sequence_mask(float64(gap), low=0.99, high=1.01, cap=2.0),
            sequence_is(float64(gap), cap=2.0),
        ):
            assert factors.shape == cut.shape == (len(gap),)
            assert factors.dtype == torch.float64
            assert ((factors >= 0) & (factors <= 5)).all()

    @CHECK
    @given(st.integers(0, 5))
    def test_no_gap_changes_nothing(self, length: int):
        gap = torch.zeros(length, dtype=torch.float64)
        for factors, cut in (
            tis(gap, low=0.5, high=2.0),
            icepop(gap, low=0.5, high=5.0),
            sequence_mask(gap, low=0.99, high=1.01, cap=2.0),
            sequence_is(gap, cap=2.0),
        ):
            assert factors.tolist() == [1.0] * length
            assert not cut.any()


class TestKL:
    @CHECK
    @given(st.floats(-200, 0), st.floats(-200, 0))
    def test_k3_is_never_negative(self, policy: float, reference: float):
        assert kl_k3(float64([policy]), float64([reference])).item() >= 0.0

    @pytest.mark.parametrize(("kl", "factor"), [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (0.0, 0.98), (math.inf, 1.02)])
    def test_the_controller_moves_towards_the_target(self, kl: float, factor: float):
        """A tenth of the horizon, and at most a fifth of the error."""
        got = adapted_coef(0.05, kl, target=6.0, horizon=1000, num_responses=100)
        assert got == pytest.approx(0.05 * factor)
