"""Value, reward-model and preference losses: worked numbers, symmetries and the ends of the range."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.algorithms.preferences import bradley_terry, dpo, ipo, kto, log_exp, orpo, simpo, step_entropy
from skirl.algorithms.values import value_cut, value_loss

CHECK = settings(deadline=None, max_examples=25, derandomize=True)
scores = st.floats(-30, 30, width=32)
LOG2 = math.log(2.0)


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


class TestValues:
    def test_worked_losses(self):
        """The second value left the range by 1 and stands better than its clipped self: the clipped error counts."""
        values, old, returns = of(1.0, 2.0, 2.0), of(1.0, 0.8, 0.8), of(3.0, 2.0, 0.0)
        got = value_loss(values, old, returns, clip=0.2)
        torch.testing.assert_close(got, of(2.0, 0.5, 2.0))
        assert value_cut(values, old, returns, clip=0.2).tolist() == [False, True, False]

    def test_without_a_clip_it_is_the_squared_error(self):
        values, old, returns = of(1.0, 9.0), of(0.0, 0.0), of(3.0, 9.0)
        assert value_loss(values, old, returns, clip=None).tolist() == [2.0, 0.0]
        assert value_cut(values, old, returns, clip=None).tolist() == [False, False]

    @CHECK
    @given(st.lists(st.tuples(scores, scores, scores), min_size=1, max_size=8))
    def test_a_cut_value_has_no_gradient_and_the_others_have(self, rows: list[tuple[float, float, float]]):
        values, old, returns = (of(*column) for column in zip(*rows, strict=True))
        values.requires_grad_()
        got = value_loss(values, old, returns, clip=0.2)
        (grad,) = torch.autograd.grad(got.sum(), values)
        cut = value_cut(values, old, returns, clip=0.2)
        assert (got >= 0.5 * (values - returns).square() - 1e-6).all()
        assert (grad[cut] == 0).all()
        assert torch.equal(grad != 0, ~cut & (values != returns))


class TestRewardModels:
    def test_equal_scores_are_a_coin_flip(self):
        assert bradley_terry(of(1.0), of(1.0), of(0.0)).item() == pytest.approx(LOG2)

    @CHECK
    @given(scores, scores, st.floats(0, 3, width=32))
    def test_both_forms_are_one_function(self, chosen: float, rejected: float, margin: float):
        inputs = of(chosen), of(rejected), of(margin)
        torch.testing.assert_close(bradley_terry(*inputs), log_exp(*inputs), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(bradley_terry(*inputs), bradley_terry(of(chosen - margin), of(rejected), of(0.0)))

    @pytest.mark.parametrize("loss", [bradley_terry, log_exp])
    @pytest.mark.parametrize("gap", [1e6, -1e6])
    def test_scores_of_a_million(self, loss, gap: float):
        chosen = of(gap).requires_grad_()
        got = loss(chosen, of(0.0), of(0.0))
        (grad,) = torch.autograd.grad(got.sum(), chosen)
        assert got.item() == (0.0 if gap > 0 else 1e6)
        assert grad.item() == (0.0 if gap > 0 else -1.0)

    def test_steps_with_soft_labels(self):
        got = step_entropy(of(0.0, 2.0, 1e4), of(0.3, 1.0, 1.0))
        torch.testing.assert_close(got, of(LOG2, math.log1p(math.exp(-2.0)), 0.0))


class TestPreferences:
    def test_no_difference_is_a_coin_flip(self):
        for smoothing in (0.0, 0.3):
            assert dpo(of(0.5), of(0.5), beta=0.1, label_smoothing=smoothing).item() == pytest.approx(LOG2)

    @CHECK
    @given(scores, scores, st.floats(0.01, 0.49))
    def test_smoothing_mixes_both_labels(self, chosen: float, rejected: float, smoothing: float):
        got = dpo(of(chosen), of(rejected), beta=0.1, label_smoothing=smoothing)
        right = dpo(of(chosen), of(rejected), beta=0.1, label_smoothing=0.0)
        wrong = dpo(of(rejected), of(chosen), beta=0.1, label_smoothing=0.0)
        torch.testing.assert_close(got, (1 - smoothing) * right + smoothing * wrong, rtol=1e-5, atol=1e-6)

    def test_an_impossible_response_gives_a_defined_loss(self):
        assert dpo(of(0.0), of(-math.inf), beta=0.1, label_smoothing=0.0).item() == 0.0
        assert orpo(of(-1.0), of(-math.inf)).item() == 0.0

    def test_ipo_is_least_at_its_target(self):
        assert ipo(of(5.0, 0.0), of(0.0, 0.0), beta=0.1).tolist() == [0.0, 25.0]

    def test_kto_of_worked_responses(self):
        """beta (r - z) = 0.2 log 3, so the sigmoids are those of odds 3^0.2."""
        odds = 3**0.2
        got = kto(
            of(math.log(3) + 1.0, math.log(3) + 1.0),
            torch.tensor([True, False]),
            of(1.0, 1.0),
            beta=0.2,
            desirable_weight=2.0,
            undesirable_weight=1.0,
        )
        torch.testing.assert_close(got, of(2.0 / (1 + odds), odds / (1 + odds)))

    def test_kto_passes_no_gradient_to_its_baseline(self):
        log_ratios, baselines = of(0.3, -0.2).requires_grad_(), of(0.1, 0.1).requires_grad_()
        weights = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
        kto(log_ratios, torch.tensor([True, False]), baselines, **weights).sum().backward()
        assert baselines.grad is None
        assert log_ratios.grad is not None
        assert log_ratios.grad[0] < 0 < log_ratios.grad[1]

    def test_simpo_needs_its_margin(self):
        assert simpo(of(-0.5), of(-1.0), beta=2.0, margin=1.0).item() == pytest.approx(LOG2)

    @CHECK
    @given(st.floats(1e-6, 1 - 1e-3), st.floats(1e-6, 1 - 1e-3))
    def test_orpo_is_the_odds_ratio(self, chosen: float, rejected: float):
        ratio = chosen / (1 - chosen) * (1 - rejected) / rejected
        got = orpo(*torch.tensor([[chosen], [rejected]], dtype=torch.float64).log())
        assert got.item() == pytest.approx(math.log1p(1 / ratio), rel=1e-9)

    @pytest.mark.parametrize("chosen", [0.0, -1e-8, -1e-3, -100.0])
    @pytest.mark.parametrize("rejected", [0.0, -1e-8, -1e-3, -100.0])
    def test_orpo_at_the_ends_of_probability(self, chosen: float, rejected: float):
        inputs = of(chosen).requires_grad_(), of(rejected).requires_grad_()
        got = orpo(*inputs)
        assert torch.isfinite(got).all()
        assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(got.sum(), inputs))
        assert got.item() == pytest.approx(LOG2) if chosen == rejected else got.item() >= 0
