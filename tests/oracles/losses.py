"""Policy losses of one token: each formula as its paper has it, and PPO's and CISPO's derivatives by cases.

Names ending in _by_hand give (loss, derivative) worked out on paper; the others give the loss, to be derived by
``autodiff``. Losses of whole responses are in sequence_losses.py.
"""

import math
from collections.abc import Sequence

from tests.oracles.autodiff import Number, clip, exp, note, sigmoid, smaller, stop

BOUND = 20.0  # of the log ratio inside exp


def ratio_of(log_ratio: Number) -> Number:
    """pi / pi_old of one token."""
    return exp(clip(log_ratio, -BOUND, BOUND))


# ------------------------------------------------------------------------------------------------------------------ PPO
def ppo_clip(log_ratio: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """(loss, its derivative by the log ratio).

    L_CLIP = min(r A, clip(r, 1 - low, 1 + high) A); for A < 0 with dual clip max(L_CLIP, c A); the loss is -L.
    Source: arXiv:1707.06347 eq. 7; low != high: arXiv:2503.14476 eq. 10; dual clip: arXiv:1912.09729.
    """
    ratio = math.exp(min(max(log_ratio, -BOUND), BOUND))
    slope = ratio if abs(log_ratio) < BOUND else 0.0
    if advantage >= 0:
        if ratio > 1 + high:
            return -(1 + high) * advantage, 0.0
        return -ratio * advantage, -slope * advantage
    if ratio < 1 - low:
        return -(1 - low) * advantage, 0.0
    if dual is not None and ratio > dual:
        return -dual * advantage, 0.0
    return -ratio * advantage, -slope * advantage


def ppo_clip_formula(log_ratio: Number, advantage: float, low: float, high: float, dual: float | None) -> Number:
    """The same from the formula."""
    ratio = ratio_of(log_ratio)
    objective = smaller(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None:
        note(abs(ratio.value - dual))
    if dual is not None and advantage < 0 and objective.value < dual * advantage:
        return Number(-dual * advantage)
    return -objective


def is_clipped(log_ratio: float, advantage: float, low: float, high: float) -> bool:
    """Whether the clip, not the dual clip, has cut this token's gradient."""
    ratio = math.exp(min(max(log_ratio, -BOUND), BOUND))
    return (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)


def kink_margin(log_ratio: float, low: float, high: float, dual: float | None) -> float:
    """Distance of the log ratio from the nearest point where the derivative jumps."""
    kinks = [math.log(1 - low) if low < 1 else -math.inf, math.log(1 + high), -BOUND, BOUND]
    if dual is not None:
        kinks.append(math.log(dual))
    return min(abs(log_ratio - kink) for kink in kinks)


# ---------------------------------------------------------------------------------------------------------------- CISPO
def cispo(logprob: Number, log_ratio: Number, advantage: float, low: float | None, high: float) -> Number:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi; without ``low`` no lower bound.

    Source: MiniMax, arXiv:2506.13585, eq. 4 and 5.
    """
    weight = stop(clip(ratio_of(log_ratio), -1.0 if low is None else 1 - low, 1 + high))
    return -(logprob * (weight * advantage))


def cispo_by_hand(
    logprob: float, log_ratio: float, advantage: float, low: float | None, high: float
) -> tuple[float, float]:
    """(loss, derivative by log pi): linear in log pi, so that the slope is -weight A."""
    ratio = math.exp(min(max(log_ratio, -BOUND), BOUND))
    if ratio > 1 + high:
        weight = 1 + high
    elif low is not None and ratio < 1 - low:
        weight = 1 - low
    else:
        weight = ratio
    return -weight * advantage * logprob, -weight * advantage


def cispo_is_cut(log_ratio: float, low: float | None, high: float) -> bool:
    """Whether the weight is clipped."""
    ratio = math.exp(min(max(log_ratio, -BOUND), BOUND))
    return ratio > 1 + high or (low is not None and ratio < 1 - low)


# ----------------------------------------------------------------------------------------------------------------- SAPO
def sapo(log_ratio: Number, advantage: float, tau_positive: float, tau_negative: float) -> Number:
    """-f(r) A, f(r) = sigmoid(tau (r - 1)) 4 / tau.

    Source: arXiv:2511.20347; tau_positive for A > 0.
    """
    tau = tau_positive if advantage > 0 else tau_negative
    return -(sigmoid((ratio_of(log_ratio) - 1) * tau) * (4 / tau) * advantage)


# ------------------------------------------------------------------------------------------------- Clip-Cov and KL-Cov
def clip_cov(log_ratio: Number, advantage: float, selected: bool, low: float, high: float) -> Number:
    """PPO's clipped loss, of which selected tokens keep the value alone.

    Source: Cui et al., arXiv:2505.22617 (Clip-Cov).
    """
    loss = ppo_clip_formula(log_ratio, advantage, low, high, None)
    return Number(stop(loss)) if selected else loss


def kl_cov(log_ratio: Number, advantage: float, selected: bool, coef: float) -> Number:
    """-r A; of selected tokens also coef (r - 1 - log r), whose mean over the old policy is KL(old, policy).

    Source: Cui et al., arXiv:2505.22617 (KL-Cov); differs: the paper does not name the estimator.
    """
    ratio = ratio_of(log_ratio)
    loss = -(ratio * advantage)
    return loss + (ratio - 1 - clip(log_ratio, -BOUND, BOUND)) * coef if selected else loss


def covariance(logprobs: Sequence[float], advantages: Sequence[float]) -> list[float]:
    """(log pi_i - mean(log pi)) (A_i - mean(A)): arXiv:2505.22617."""
    if not logprobs:
        return []
    mean_logprob, mean_advantage = math.fsum(logprobs) / len(logprobs), math.fsum(advantages) / len(advantages)
    return [(x - mean_logprob) * (a - mean_advantage) for x, a in zip(logprobs, advantages, strict=True)]


def num_selected(share: float, size: int, num_candidates: int) -> int:
    """floor(share N), at least 1, at most the candidates."""
    return min(num_candidates, max(1, math.floor(share * size)))


# ----------------------------------------------------------------------------------------------------------------- DPPO
def dppo_divergence(log_ratio: float, old_logprob: float, divergence: str) -> float:
    """Between the two-outcome distributions (this token, any other) of the old policy and the policy.

    tv |p_old - p|, kl p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)).
    Source: Qi et al., arXiv:2602.04879 (Binary-TV and Binary-KL).
    """
    old, now = math.exp(old_logprob), math.exp(old_logprob + log_ratio)
    if divergence == "tv":
        return abs(old - now)
    return old * math.log(old / now) + (1 - old) * math.log((1 - old) / (1 - now))


def dppo_is_cut(log_ratio: float, old_logprob: float, advantage: float, divergence: str, threshold: float) -> bool:
    """The token moves where its advantage pushes it, and has left the trust region."""
    distance = dppo_divergence(log_ratio, old_logprob, divergence)
    note(abs(distance - threshold))
    away = (advantage > 0 and log_ratio > 0) or (advantage < 0 and log_ratio < 0)
    return away and distance > threshold


def dppo(log_ratio: Number, old_logprob: float, advantage: float, divergence: str, threshold: float) -> Number:
    """-M r A, with mask M = 0 for the tokens that are cut. Source: arXiv:2602.04879."""
    if dppo_is_cut(log_ratio.value, old_logprob, advantage, divergence, threshold):
        return Number(0.0)
    return -(ratio_of(log_ratio) * advantage)
