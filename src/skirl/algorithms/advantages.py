"""Scores and rewards to advantages: float64, on the host, pure, no gradient."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import cast

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from skirl.errors import RewardError

__all__ = [
    "decoupled_norm",
    "discounted_returns",
    "gae",
    "group_mean",
    "group_norm",
    "leave_one_out",
    "max_rl",
    "optimal_baseline",
    "pass_at_k",
    "whiten",
    "whiten_scores",
]


def _without_spread(scores: Float64[Tensor, "G"], tolerance: float) -> bool:
    """Nothing to compare: fewer than two scores, or all equal up to rounding."""
    if scores.numel() < 2:
        return True
    scale = max(1.0, float(scores.abs().max()))
    return float(scores.max() - scores.min()) <= tolerance * scale


# ----------------------------------------------------------------------------------------------------- within one group
def group_norm(scores: Float64[Tensor, "G"], *, eps: float, ddof: int, tolerance: float) -> Float64[Tensor, "G"]:
    """Advantages normalised within one group.

    A_i = (R_i - mean(R)) / (std(R) + eps), with exact zeros where the scores are equal up to rounding.

    Args:
        scores: total score of each rollout of one prompt.
        eps: added to the standard deviation.
        ddof: 1 divides the variance by G - 1, 0 by G.
        tolerance: the group counts as equal where max - min <= tolerance * max(1, max|R|).

    Returns: advantage of each rollout, to be given to all of its action tokens.
    Source: Shao et al., arXiv:2402.03300, section 4.1.2 (outcome supervision). Oracle: tests/oracles/advantages.py
    """
    if _without_spread(scores, tolerance):
        return scores.new_zeros(scores.shape)
    centred = scores - scores.mean()
    return centred / (scores.std(correction=ddof) + eps)


def group_mean(scores: Float64[Tensor, "G"], *, tolerance: float) -> Float64[Tensor, "G"]:
    """Advantages centred within one group, not divided by the spread.

    A_i = R_i - mean(R), with exact zeros where the scores are equal up to rounding.

    Args: as for ``group_norm``.
    Source: Liu et al., arXiv:2503.20783 (Dr. GRPO), section 3.2. Oracle: tests/oracles/advantages.py
    """
    if _without_spread(scores, tolerance):
        return scores.new_zeros(scores.shape)
    return scores - scores.mean()


def leave_one_out(scores: Float64[Tensor, "G"], *, tolerance: float) -> Float64[Tensor, "G"]:
    """Advantages against the mean of the siblings.

    A_i = R_i - mean_{j != i} R_j = (R_i - mean(R)) G / (G - 1), with exact zeros where the scores are equal up to
    rounding.

    Args: as for ``group_norm``.
    Source: Ahmadian et al., arXiv:2402.14740 (RLOO), section 3.3. Oracle: tests/oracles/advantages.py
    """
    if _without_spread(scores, tolerance):
        return scores.new_zeros(scores.shape)
    return (scores - scores.mean()) * (scores.numel() / (scores.numel() - 1))


def max_rl(scores: Float64[Tensor, "G"], *, tolerance: float) -> Float64[Tensor, "G"]:
    """Advantages divided by the group's mean: the rarer success is, the more one counts.

    A_i = (R_i - mean(R)) / mean(R), with exact zeros where the scores are equal up to rounding, or all 0.
    With scores 0 and 1 its expectation is the gradient of the first G terms of log p = -sum_k (1 - p)^k / k.

    Args:
        scores: not below 0.
        tolerance: as for ``group_norm``.

    Raises: RewardError where a score is below 0: a mean of the wrong sign would turn every advantage round.
    Source: Tajwar et al., arXiv:2602.02710 (MaxRL), algorithm 1. Oracle: tests/oracles/advantages.py
    """
    if scores.numel() and float(scores.min()) < 0:
        raise RewardError(
            f"method.advantage max_rl divides by the mean score of a group and needs scores >= 0, got "
            f"{float(scores.min()):g}; shift the reward, take off penalties (method.shaping), or set "
            f"method.shaping.clip_range to [0, ...]"
        )
    if _without_spread(scores, tolerance):
        return scores.new_zeros(scores.shape)
    return (scores - scores.mean()) / scores.mean()


def pass_at_k(right: Bool[Tensor, "G"], *, k: int) -> Float64[Tensor, "G"]:
    """Advantages of responses for the chance that at least one of k is right.

    Of all subsets of k of the G responses a share p = 1 - C(G - c, k) / C(G, k) holds a right one, c of G being right;
    s = sqrt(p (1 - p)) is the spread of that outcome. A response gets the mean, over the subsets that it is in, of
    (outcome - p) / s:

    right: (1 - p) / s,    wrong: (1 - p - C(G - c - 1, k - 1) / C(G - 1, k - 1)) / s,    all 0 where s = 0

    Args:
        right: which responses of one prompt are right.
        k: size of the subsets, >= 1. A group smaller than k gives 0.

    Returns: advantages, whose sum is 0.
    Source: Chen et al., arXiv:2508.10751, section 2.4 (analytical derivation). Oracle: tests/oracles/advantages.py
    """
    size, num_right = right.numel(), int(right.sum())
    advantages = torch.zeros(right.shape, dtype=torch.float64, device=right.device)
    if k > size:
        return advantages
    fails = Fraction(math.comb(size - num_right, k), math.comb(size, k))
    if fails in (0, 1):
        return advantages
    spread = math.sqrt(fails * (1 - fails))
    fails_with_a_wrong_one = Fraction(math.comb(size - num_right - 1, k - 1), math.comb(size - 1, k - 1))
    of_right, of_wrong = float(fails) / spread, float(fails - fails_with_a_wrong_one) / spread
    return torch.where(right, advantages + of_right, advantages + of_wrong)


def optimal_baseline(
    scores: Float64[Tensor, "G"], lengths: Float64[Tensor, "G"], *, tolerance: float
) -> Float64[Tensor, "G"]:
    """Advantages against the baseline of least variance, a mean weighted by response length.

    A_i = R_i - sum_j T_j R_j / sum_j T_j, with exact zeros where the scores are equal up to rounding, or no response
    has an action token.

    Args:
        scores, tolerance: as for ``group_norm``.
        lengths: action tokens of each response, T_j.

    Source: Hao et al., arXiv:2505.23585 (OPO), the practical form. Oracle: tests/oracles/advantages.py
    """
    if _without_spread(scores, tolerance) or float(lengths.sum()) <= 0:
        return scores.new_zeros(scores.shape)
    return scores - (lengths * scores).sum() / lengths.sum()


def decoupled_norm(
    parts: Float64[Tensor, "G K"], weights: Float64[Tensor, "K"], *, eps: float, ddof: int, tolerance: float
) -> Float64[Tensor, "G"]:
    """Each score part normalised within the group, then a weighted sum: GDPO's step before its batch norm.

    A_i = sum_k w_k (R_ik - mean(R_k)) / (std(R_k) + eps)

    Args:
        parts: values of each rollout's score parts; NaN where a rollout has no such part. A part is normalised over the
            rollouts that have it and adds 0 to the others.
        weights: factor of each part's normalised values.
        eps, ddof, tolerance: as for ``group_norm``, applied to each part on its own.

    Source: Liu et al., arXiv:2601.05242 (GDPO), eq. 4 and 5. Oracle: tests/oracles/advantages.py
    """
    total = parts.new_zeros(parts.shape[0])
    for column, weight in zip(parts.T, weights, strict=True):
        present = ~column.isnan()
        normed = parts.new_zeros(parts.shape[0])
        normed[present] = group_norm(column[present], eps=eps, ddof=ddof, tolerance=tolerance)
        total = total + weight * normed
    return total


# -------------------------------------------------------------------------------------------------- within one response
def _backwards(values: Tensor) -> Iterator[float]:
    return reversed(cast(list[float], values.tolist()))  # pyright: ignore[reportUnknownMemberType]


def discounted_returns(rewards: Float64[Tensor, "T"], *, gamma: float) -> Float64[Tensor, "T"]:
    """Discounted sum of the rewards from each action token on.

    A_t = sum_{k >= t} gamma^(k - t) r_k

    Args:
        rewards: of each action token of one rollout: score at the last one, less KL where that is in the reward.
        gamma: discount an action token, in [0, 1].

    Source: Williams 1992 (REINFORCE); gamma 1 is arXiv:2501.03262 (REINFORCE++). Oracle: tests/oracles/advantages.py
    """
    total, backwards = 0.0, list[float]()
    for reward in _backwards(rewards):
        total = reward + gamma * total
        backwards.append(total)
    return rewards.new_tensor(backwards[::-1])


def gae(
    rewards: Float64[Tensor, "T"], values: Float64[Tensor, "T"], *, gamma: float, lam: float
) -> tuple[Float64[Tensor, "T"], Float64[Tensor, "T"]]:
    """Generalised advantage estimates over one rollout's action tokens.

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1}   (V = A = 0 past the last action token)

    Args:
        rewards: of each action token, KL-shaped already.
        values: the critic's at the state before each token.
        gamma, lam: in [0, 1], an action token.

    Returns: (advantages, returns), not whitened; returns = advantages + values. Tokens that the policy did not write
        are absent, so they neither decay nor earn.
    Source: Schulman et al., arXiv:1506.02438, eq. 16; differs: one episode, no bootstrap.
        Oracle: tests/oracles/advantages.py
    """
    advantage, next_value, backwards = 0.0, 0.0, list[float]()
    for reward, value in zip(_backwards(rewards), _backwards(values), strict=True):
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * advantage
        next_value = value
        backwards.append(advantage)
    advantages = rewards.new_tensor(backwards[::-1])
    return advantages, advantages + values


# ------------------------------------------------------------------------------------------------------- over the batch
def whiten(values: Float64[Tensor, "N"], *, eps: float = 1e-8) -> Float64[Tensor, "N"]:
    """Mean 0 and variance 1 over the action tokens of a batch.

    (x - mean(x)) / sqrt(var(x) + eps), with the population variance; exact zeros where all values are the same.

    Args:
        values: of all action tokens of the batch, over all ranks.
        eps: added to the variance.

    Source: PPO's advantage normalisation, arXiv:1707.06347 and the public code of arXiv:1909.08593; batch
        normalisation of arXiv:2501.03262. Oracle: tests/oracles/advantages.py
    """
    if _without_spread(values, 0.0):  # the rounding of a mean is not a signal
        return values.new_zeros(values.shape)
    centred = values - values.mean()
    return centred / (centred.square().mean() + eps).sqrt()


def whiten_scores(values: Float64[Tensor, "N"], *, eps: float, ddof: int) -> Float64[Tensor, "N"]:
    """GDPO's step over the responses of a batch: (x - mean(x)) / (std(x) + eps).

    Args:
        values: one of each response, the sums of ``decoupled_norm``.
        eps, ddof: as for ``group_norm``.

    Source: Liu et al., arXiv:2601.05242 (GDPO), eq. 6. Oracle: tests/oracles/advantages.py
    """
    return group_norm(values, eps=eps, ddof=ddof, tolerance=0.0)
