"""Policy losses: what holds for all of them, worked numbers, and the ends of the range."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skirl.algorithms import losses

CHECK = settings(deadline=None, max_examples=12, derandomize=True)


@dataclass
class Batch:
    """Action tokens of a micro-batch, with advantages that are equal in a sequence."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    segments: Tensor
    num_segments: int

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.old

    @property
    def selected(self) -> Tensor:
        return torch.zeros_like(self.advantages, dtype=torch.bool)

    def permuted(self, order: Tensor) -> "Batch":
        """Other order of the tokens, so also of the sequences."""
        parts = (part[order] for part in (self.logprobs.detach(), self.old, self.advantages, self.segments))
        logprobs, old, advantages, segments = parts
        return Batch(logprobs.requires_grad_(), old, advantages, segments, self.num_segments)


TOKEN_LOSSES: dict[str, Callable[[Batch], Tensor]] = {
    "ppo_clip": lambda b: losses.ppo_clip(b.log_ratio, b.advantages, low=0.2, high=0.28, dual=3.0),
    "cispo": lambda b: losses.cispo(b.logprobs, b.log_ratio, b.advantages, low=None, high=4.0),
    "cispo low": lambda b: losses.cispo(b.logprobs, b.log_ratio, b.advantages, low=0.5, high=0.5),
    "sapo": lambda b: losses.sapo(b.log_ratio, b.advantages, tau_positive=1.0, tau_negative=1.05),
    "clip_cov": lambda b: losses.clip_cov(b.log_ratio, b.advantages, b.selected, low=1.0, high=1.0),
    "kl_cov": lambda b: losses.kl_cov(b.log_ratio, b.advantages, ~b.selected, coef=1.0),
    "dppo tv": lambda b: losses.dppo(b.log_ratio, b.old, b.advantages, divergence="tv", threshold=0.15),
    "dppo kl": lambda b: losses.dppo(b.log_ratio, b.old, b.advantages, divergence="kl", threshold=0.05),
}
SEQUENCE_LOSSES: dict[str, Callable[[Batch], Tensor]] = {
    "gspo": lambda b: losses.gspo(
        b.log_ratio, b.advantages, b.segments, b.num_segments, low=0.1, high=0.1, token_level=False
    ),
    "gspo token": lambda b: losses.gspo(
        b.log_ratio, b.advantages, b.segments, b.num_segments, low=0.1, high=0.1, token_level=True
    ),
    "gmpo": lambda b: losses.gmpo(b.log_ratio, b.advantages, b.segments, b.num_segments, clip=0.4),
    "topr": lambda b: losses.topr(b.logprobs, b.log_ratio, b.advantages, b.segments, b.num_segments, cap=1.0),
}
ALL = TOKEN_LOSSES | SEQUENCE_LOSSES


@st.composite
def batches(draw: st.DrawFn, spread: float = 0.5) -> Batch:
    """Sequences of 0 to 5 tokens; ``spread`` is that of the log ratio."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old = -3.0 * torch.rand(len(segments), generator=random) - 0.01
    step = spread * torch.randn(len(segments), generator=random)
    advantages = torch.randn(len(lengths), generator=random)[segments]
    return Batch((old + step).clamp(max=0.0).requires_grad_(), old, advantages, segments, len(lengths))


def gradient(loss: Callable[[Batch], Tensor], batch: Batch, weights: Tensor) -> Tensor:
    (got,) = torch.autograd.grad((weights * loss(batch)).sum(), batch.logprobs)
    return got


def mean_of_sequences(batch: Batch) -> Tensor:
    counts = batch.segments.bincount(minlength=batch.num_segments)
    return 1.0 / counts[batch.segments]


class TestEveryLoss:
    @pytest.mark.parametrize("name", ALL)
    @CHECK
    @given(batches(spread=0.0))
    def test_ratio_1_is_the_plain_policy_gradient(self, name: str, batch: Batch):
        weights = mean_of_sequences(batch)
        expected = -weights * batch.advantages
        torch.testing.assert_close(gradient(ALL[name], batch, weights), expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("name", TOKEN_LOSSES)
    @CHECK
    @given(batches(spread=0.0), st.integers(0, 2**16))
    def test_ratio_1_is_the_plain_policy_gradient_under_any_weights(self, name: str, batch: Batch, seed: int):
        weights = torch.rand(len(batch.segments), generator=torch.Generator().manual_seed(seed))
        expected = -weights * batch.advantages
        torch.testing.assert_close(gradient(ALL[name], batch, weights), expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("name", ALL)
    @CHECK
    @given(batches(), st.integers(0, 2**16))
    def test_the_order_of_the_tokens_does_not_matter(self, name: str, batch: Batch, seed: int):
        order = torch.randperm(len(batch.segments), generator=torch.Generator().manual_seed(seed))
        other, weights = batch.permuted(order), mean_of_sequences(batch)
        torch.testing.assert_close(ALL[name](other), ALL[name](batch)[order], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(
            gradient(ALL[name], other, weights[order]), gradient(ALL[name], batch, weights)[order], rtol=1e-6, atol=1e-7
        )

    @pytest.mark.parametrize("name", ALL)
    @pytest.mark.parametrize("step", [math.inf, -math.inf, 1e4, -1e4])
    @pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
    def test_any_ratio_gives_a_finite_loss_and_gradient(self, name: str, step: float, advantage: float):
        """The old policy, not the new one, is at the end of the range."""
        logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
        old = torch.tensor([-1.0 - step, -1.0])
        batch = Batch(logprobs, old, torch.full((2,), advantage), torch.tensor([0, 0]), 1)
        got = ALL[name](batch)
        assert torch.isfinite(got).all()
        assert torch.isfinite(gradient(ALL[name], batch, torch.ones(2))).all()

    @pytest.mark.parametrize("name", ALL)
    def test_a_position_of_nan_stays_alone(self, name: str):
        """A dummy sequence may hold anything; where() leaves it out, also of the gradient."""
        logprobs = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
        old, advantages = torch.tensor([-1.05, math.nan, -1.95]), torch.tensor([1.0, 0.0, -1.0])
        batch = Batch(logprobs, old, advantages, torch.tensor([0, 1, 2]), 3)
        used = torch.tensor([True, False, True])
        torch.where(used, ALL[name](batch), 0.0).sum().backward()
        assert logprobs.grad is not None
        assert torch.isfinite(logprobs.grad[used]).all()
        assert logprobs.grad[used].abs().min() > 0

    @pytest.mark.parametrize("name", ALL)
    def test_a_micro_batch_without_tokens(self, name: str):
        nothing = torch.zeros(0)
        batch = Batch(nothing.clone().requires_grad_(), nothing, nothing, torch.zeros(0, dtype=torch.int64), 2)
        assert ALL[name](batch).shape == (0,)

    @pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo token", "gmpo", "dppo tv", "dppo kl"])
    @CHECK
    @given(batches())
    def test_a_cut_token_has_no_gradient_and_the_others_have(self, name: str, batch: Batch):
        b = batch
        where = (b.log_ratio, b.advantages)
        cut = {
            "ppo_clip": lambda: losses.ppo_clip_mask(*where, low=0.2, high=0.28),
            "gspo": lambda: losses.gspo_cut(*where, b.segments, b.num_segments, low=0.1, high=0.1, token_level=False),
            "gspo token": lambda: losses.gspo_cut(
                *where, b.segments, b.num_segments, low=0.1, high=0.1, token_level=True
            ),
            "gmpo": lambda: losses.gmpo_cut(*where, b.segments, b.num_segments, clip=0.4),
            "dppo tv": lambda: losses.dppo_cut(b.log_ratio, b.old, b.advantages, divergence="tv", threshold=0.15),
            "dppo kl": lambda: losses.dppo_cut(b.log_ratio, b.old, b.advantages, divergence="kl", threshold=0.05),
        }[name]()
        assert not cut.requires_grad
        dead = gradient(ALL[name], batch, torch.ones(len(b.segments))) == 0
        dual = (name == "ppo_clip") & (b.advantages < 0) & (b.log_ratio > math.log(3))  # not counted as clipped
        assert torch.equal(dead & (b.advantages != 0) & ~dual, cut & (b.advantages != 0))


class TestSegments:
    def test_sums_and_means_with_an_empty_sequence(self):
        values, segments = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([2, 0, 2])
        assert losses.segment_sum(values, segments, 3).tolist() == [5.0, 0.0, 3.0]
        assert losses.segment_mean(values, segments, 3).tolist() == [5.0, 0.0, 1.5]

    def test_long_sequences_are_summed_in_float64(self):
        values = torch.full((1 << 17,), 0.1)
        got = losses.segment_mean(values, torch.zeros(len(values), dtype=torch.int64), 1)
        assert got.item() == pytest.approx(values[0].item(), rel=1e-7)


class TestSequences:
    def test_gspo_takes_the_geometric_mean(self):
        log_ratio, segments = torch.tensor([0.3, 0.1, -0.5]), torch.tensor([0, 0, 1])
        got = losses.gspo(log_ratio, torch.tensor([1.0, 1.0, 2.0]), segments, 2, low=0.5, high=0.1, token_level=False)
        torch.testing.assert_close(got, torch.tensor([-1.1, -1.1, -2.0 * math.exp(-0.5)]))

    @CHECK
    @given(batches())
    def test_gspo_has_the_same_gradient_in_token_form(self, batch: Batch):
        weights = mean_of_sequences(batch)
        whole, token = (gradient(SEQUENCE_LOSSES[name], batch, weights) for name in ("gspo", "gspo token"))
        torch.testing.assert_close(whole, token, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize(
        ("advantage", "expected"),
        [(1.0, -math.exp((0.4 - 1.0) / 2)), (-1.0, math.exp((1.0 - 0.4) / 2))],  # above for A > 0, below for A < 0
    )
    def test_gmpo_clips_the_side_that_the_advantage_pushes_to(self, advantage: float, expected: float):
        log_ratio = torch.tensor([1.0, -1.0], requires_grad=True)
        got = losses.gmpo(log_ratio, torch.full((2,), advantage), torch.tensor([0, 0]), 1, clip=0.4)
        torch.testing.assert_close(got, torch.full((2,), expected))
        (grad,) = torch.autograd.grad(got.mean(), log_ratio)
        kept = 1 if advantage > 0 else 0
        assert grad[1 - kept] == 0
        torch.testing.assert_close(grad[kept].item(), expected / 2)  # that of the geometric mean

    def test_topr_truncates_the_ratio_of_the_whole_negative_response(self):
        logprobs = torch.tensor([-1.0, -2.0, -1.0, -1.0])
        log_ratio = torch.tensor([0.5, -1.5, 1.0, -0.5])
        advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0])
        got = losses.topr(logprobs, log_ratio, advantages, torch.tensor([0, 0, 1, 1]), 2, cap=1.0)
        torch.testing.assert_close(got, torch.tensor([-math.exp(-1.0), -2 * math.exp(-1.0), -1.0, -1.0]))
        positive = losses.topr(logprobs, log_ratio, -advantages, torch.tensor([0, 0, 1, 1]), 2, cap=1.0)
        torch.testing.assert_close(positive, -logprobs)


class TestTokens:
    def test_cispo_clips_the_weight_and_keeps_the_gradient(self):
        logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
        log_ratio = torch.tensor([3.0, 0.5, 0.2]).log()
        got = losses.cispo(logprobs, log_ratio, torch.ones(3), low=0.5, high=1.0)
        torch.testing.assert_close(got, torch.tensor([2.0, 0.5, 0.5]))
        (grad,) = torch.autograd.grad(got.sum(), logprobs)
        torch.testing.assert_close(grad, torch.tensor([-2.0, -0.5, -0.5]))
        assert losses.cispo_cut(logprobs, log_ratio, torch.ones(3), low=0.6, high=1.0).tolist() == [True, False, True]
        assert losses.cispo_cut(logprobs, log_ratio, torch.ones(3), low=None, high=1.0).tolist() == [True, False, False]

    def test_sapo_at_worked_ratios(self):
        got = losses.sapo(
            torch.tensor([0.0, math.log(2.0)]), torch.tensor([1.0, -1.0]), tau_positive=1.0, tau_negative=2.0
        )
        torch.testing.assert_close(got, torch.tensor([-2.0, 2.0 / (1 + math.exp(-2.0))]))

    def test_dppo_asks_the_divergence_not_the_ratio(self):
        """A rare token may double; a likely one that falls from 0.9 to 0.6 has moved 0.3."""
        old, new = torch.tensor([0.001, 0.9, 0.9]).log(), torch.tensor([0.002, 0.6, 0.6]).log()
        advantages = torch.tensor([1.0, -1.0, 1.0])
        cut = losses.dppo_cut(new - old, old, advantages, divergence="tv", threshold=0.15)
        assert cut.tolist() == [False, True, False]  # the third is on its way back
        got = losses.dppo(new - old, old, advantages, divergence="tv", threshold=0.15)
        torch.testing.assert_close(got, torch.tensor([-2.0, 0.0, -2 / 3]))

    @pytest.mark.parametrize(("old", "new"), [(0.9, 0.6), (0.3, 0.5), (1 - 1e-6, 0.5), (0.5, 1 - 1e-6)])
    def test_dppo_measures_the_kl_of_two_outcomes(self, old: float, new: float):
        kl = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
        logs = torch.tensor([old], dtype=torch.float64).log(), torch.tensor([new], dtype=torch.float64).log()
        advantages = torch.tensor([1.0 if new > old else -1.0], dtype=torch.float64)
        for share, expected in ((0.999, True), (1.001, False)):
            cut = losses.dppo_cut(logs[1] - logs[0], logs[0], advantages, divergence="kl", threshold=share * kl)
            assert cut.tolist() == [expected]

    @pytest.mark.parametrize("divergence", ["tv", "kl"])
    @pytest.mark.parametrize("old", [0.0, -math.inf, -1e-9])
    @pytest.mark.parametrize("step", [0.0, math.inf, -math.inf, 1e-9])
    def test_dppo_at_the_ends_of_probability(self, divergence, old: float, step: float):
        got = losses.dppo(
            torch.tensor([step]), torch.tensor([old]), torch.tensor([1.0]), divergence=divergence, threshold=0.1
        )
        assert torch.isfinite(got).all()

    def test_dppo_cuts_a_token_that_was_certain(self):
        certain, less, worse = torch.zeros(1), torch.tensor([-1.0]), -torch.ones(1)
        for divergence, distance in (("kl", 1.0), ("tv", 1 - math.exp(-1.0))):
            for share, expected in ((0.99, True), (1.01, False)):
                cut = losses.dppo_cut(less, certain, worse, divergence=divergence, threshold=share * distance)
                assert cut.tolist() == [expected]

    def test_dppo_knows_that_no_token_is_more_than_certain(self):
        even = torch.tensor([0.5]).log()
        cut = losses.dppo_cut(torch.tensor([20.0]), even, torch.ones(1), divergence="tv", threshold=0.51)
        assert cut.tolist() == [False]


class TestCovariance:
    def test_worked_values(self):
        logprobs, advantages = torch.tensor([-1.0, -3.0]).double(), torch.tensor([2.0, 0.0]).double()
        assert losses.covariance(logprobs, advantages).tolist() == [1.0, 1.0]
        assert losses.covariance(logprobs[:0], advantages[:0]).shape == (0,)

    @CHECK
    @given(st.integers(0, 60), st.floats(0.01, 0.99), st.integers(0, 2**31))
    def test_clip_cov_draws_its_share_among_the_candidates(self, size: int, share: float, seed: int):
        cov = torch.linspace(-1.0, 6.0, size, dtype=torch.float64)
        picked = losses.clip_cov_selection(cov, share=share, low=1.0, high=5.0, seed=seed)
        again = losses.clip_cov_selection(cov, share=share, low=1.0, high=5.0, seed=seed)
        candidates = (cov > 1.0) & (cov < 5.0)
        assert torch.equal(picked, again)
        assert not (picked & ~candidates).any()
        assert picked.sum() == min(max(1, math.floor(share * size)), int(candidates.sum()))

    def test_clip_cov_draws_other_tokens_with_another_seed(self):
        cov = torch.full((1000,), 2.0, dtype=torch.float64)
        one, two = (losses.clip_cov_selection(cov, share=0.1, low=1.0, high=5.0, seed=seed) for seed in (1, 2))
        assert one.sum() == two.sum() == 100
        assert not torch.equal(one, two)

    def test_kl_cov_takes_the_highest(self):
        cov = torch.tensor([0.0, 3.0, -1.0, 3.0, 2.0]).double()
        assert losses.kl_cov_selection(cov, share=0.5).tolist() == [False, True, False, True, False]
        assert losses.kl_cov_selection(cov, share=0.01).tolist() == [False, True, False, False, False]
        assert losses.kl_cov_selection(cov[:0], share=0.5).shape == (0,)

    def test_clip_cov_keeps_the_value_and_cuts_the_gradient(self):
        log_ratio = torch.tensor([0.1, 0.1], requires_grad=True)
        got = losses.clip_cov(log_ratio, torch.ones(2), torch.tensor([True, False]), low=1.0, high=1.0)
        assert got[0] == got[1]
        (grad,) = torch.autograd.grad(got.sum(), log_ratio)
        assert grad[0] == 0
        assert grad[1] == got[1]

    def test_kl_cov_pays_on_the_selected_tokens_only(self):
        log_ratio = torch.tensor([0.5, 0.5])
        got = losses.kl_cov(log_ratio, torch.ones(2), torch.tensor([True, False]), coef=2.0)
        ratio = math.exp(0.5)
        torch.testing.assert_close(got, torch.tensor([-ratio + 2.0 * (ratio - 1.5), -ratio]))
