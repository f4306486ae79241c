"""KL estimators at one sampled token, with their derivatives written down by hand.

With q the policy, p the reference and r = p(y)/q(y): k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r.
Source: J. Schulman, "Approximating KL Divergence", 2020; k3 is eq. 4 of arXiv:2402.03300.
"""

import math
from collections.abc import Callable

BOUND = 20.0  # of log r in k3


def k1(policy: float, reference: float) -> tuple[float, float]:
    """(k1, its derivative by the policy's log-prob)."""
    log_r = reference - policy
    return -log_r, 1.0


def k2(policy: float, reference: float) -> tuple[float, float]:
    """(k2, its derivative by the policy's log-prob)."""
    log_r = reference - policy
    return 0.5 * log_r**2, -log_r


def k3(policy: float, reference: float) -> tuple[float, float]:
    """(k3, its derivative by the policy's log-prob); constant where log r leaves its bound."""
    log_r = reference - policy
    clamped = min(log_r, BOUND)
    inside = log_r <= BOUND
    return math.expm1(clamped) - clamped, 1.0 - math.exp(clamped) if inside else 0.0


ESTIMATORS: dict[str, Callable[[float, float], tuple[float, float]]] = {"k1": k1, "k2": k2, "k3": k3}


def divergence(policy: list[float], reference: list[float]) -> float:
    """KL(policy || reference) of two whole distributions, summed over the vocabulary."""
    total = 0.0
    for q, p in zip(policy, reference, strict=True):
        total += q * (math.log(q) - math.log(p))
    return total


def adapted_coef(coef: float, kl: float, *, target: float, horizon: int, num_responses: int) -> float:
    """beta (1 + K e), e = clip((KL - target) / target, -0.2, 0.2), with K = responses / horizon.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2.
    """
    error = (kl - target) / target
    if error > 0.2:
        error = 0.2
    if error < -0.2:
        error = -0.2
    return coef * (1 + error * num_responses / horizon)
