"""Estimators of KL(policy, reference) from the sampled token alone (Schulman, "Approximating KL divergence", 2020)."""

from jaxtyping import Float
from torch import Tensor

__all__ = ["KL_ESTIMATORS", "LOG_RATIO_BOUND", "adapted_coef", "clamped", "kl_k1", "kl_k2", "kl_k3"]

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped to plus or minus this before exp: e^20 is far outside of any clip range and finite."""


def clamped(log_ratio: Tensor) -> Tensor:
    """What exp may be taken of; without gradient where it was out of bounds."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_k1(policy_logprobs: Float[Tensor, "A"], reference_logprobs: Float[Tensor, "A"]) -> Float[Tensor, "A"]:
    """k1 = log pi - log pi_ref: unbiased, high variance; its expected gradient in a loss is zero."""
    return policy_logprobs - reference_logprobs


def kl_k2(policy_logprobs: Float[Tensor, "A"], reference_logprobs: Float[Tensor, "A"]) -> Float[Tensor, "A"]:
    """k2 = (log pi - log pi_ref)^2 / 2: on-policy its gradient is that of the reverse KL."""
    return 0.5 * (policy_logprobs - reference_logprobs).square()


def kl_k3(policy_logprobs: Float[Tensor, "A"], reference_logprobs: Float[Tensor, "A"]) -> Float[Tensor, "A"]:
    """k3 = exp(-d) - 1 + d with d = log pi - log pi_ref: unbiased, never negative (GRPO, arXiv:2402.03300, eq. 4)."""
    d = (policy_logprobs - reference_logprobs).clamp(min=-LOG_RATIO_BOUND)  # only there can exp overflow
    return (-d).expm1() + d  # expm1: exp(-d) - 1 has no digits left where d is small


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""By ``method.kl.estimator``."""


def adapted_coef(coef: float, kl: float, *, target: float, horizon: int, num_responses: int) -> float:
    """The KL factor after a step: raised where the KL is above its target, lowered below it.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)

    Args:
        coef: the factor that the step was made with.
        kl: KL per response of the step, nats: a ratio of sums over all ranks.
        target: KL per response to hold.
        horizon: responses over which the factor follows.
        num_responses: n, of the step.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2; K_beta = n / horizon, 0.1 there. Oracle: tests/oracles/kl.py
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * num_responses / horizon)
