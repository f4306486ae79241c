"""Policy losses of single tokens. No weights, no reduction, no metric names: the plan and the objective own those."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from skirl.algorithms.kl import LOG_RATIO_BOUND

__all__ = ["ppo_clip", "ppo_clip_mask"]


def ppo_clip(
    log_ratio: Float[Tensor, "A"], advantages: Float[Tensor, "A"], *, low: float, high: float, dual: float | None
) -> Float[Tensor, "A"]:
    """Clipped surrogate, as a loss.

    L = -min(r A, clip(r, 1 - low, 1 + high) A);  with dual clip, where A < 0:  L = min(L, -dual A)

    Args:
        log_ratio: log pi - log pi_old of each action token, with gradient; clamped before exp.
        advantages: no gradient.
        low, high: clip range of the ratio.
        dual: bound of the loss for negative advantages, > 1; None is off.

    Source: Schulman et al., arXiv:1707.06347, eq. 7; dual clip Ye et al., arXiv:1912.09729, eq. 5; separate high
        bound Yu et al., arXiv:2503.14476, eq. 10. Oracle: tests/oracles/losses.py
    """
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    if dual is not None:
        bounded = torch.maximum(surrogate, dual * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    return -surrogate


def ppo_clip_mask(
    log_ratio: Float[Tensor, "A"], advantages: Float[Tensor, "A"], *, low: float, high: float
) -> Bool[Tensor, "A"]:
    """Tokens whose gradient the clip cuts: above 1 + high with A > 0, below 1 - low with A < 0."""
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return ((ratio > 1.0 + high) & (advantages > 0)) | ((ratio < 1.0 - low) & (advantages < 0))
