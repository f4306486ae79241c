"""Weights for the gap between engine and trainer: float64, on the host, one response at a time.

Every function takes log_gap = log pi_old(trainer) - log pi(engine) of the response's action tokens, w = exp(log_gap),
and gives (factors, cut): what multiplies each token's loss, and which tokens were clipped or left out. Log gaps are
clamped to plus or minus ``LOG_RATIO_BOUND`` before exp, sums of them too.
"""

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from skirl.algorithms.kl import clamped

__all__ = ["icepop", "sequence_is", "sequence_mask", "tis"]

Weights = tuple[Float64[Tensor, "T"], Bool[Tensor, "T"]]
"""(factors, cut)."""


def tis(log_gap: Float64[Tensor, "T"], *, low: float, high: float) -> Weights:
    """Truncated importance weights: clip(w_t, low, high); low 0 truncates above only.

    Source: Yao et al. 2025, fengyao.notion.site/off-policy-rl (C = 2 there). Oracle: tests/oracles/corrections.py
    """
    weights = clamped(log_gap).exp()
    return weights.clamp(low, high), (weights < low) | (weights > high)


def icepop(log_gap: Float64[Tensor, "T"], *, low: float, high: float) -> Weights:
    """Tokens whose weight lies outside of a band are left out: w_t if low <= w_t <= high, else 0.

    Source: Ling team, arXiv:2510.18855 (Ring-1T), IcePop; [0.5, 5]. Oracle: tests/oracles/corrections.py
    """
    weights = clamped(log_gap).exp()
    kept = (weights >= low) & (weights <= high)
    return torch.where(kept, weights, 0.0), ~kept


def sequence_mask(log_gap: Float64[Tensor, "T"], *, low: float, high: float, cap: float) -> Weights:
    """A response is left out whole if the geometric mean of its weights lies outside of a band.

    min(w_t, cap) if low <= exp(mean_t log w_t) <= high, else 0

    Source: Li and Liu 2025, richardli.xyz/post/rl-collapse-part3 (geometric sequence masking).
        Oracle: tests/oracles/corrections.py
    """
    bounded = clamped(log_gap)
    if not log_gap.numel():
        return bounded, torch.zeros_like(bounded, dtype=torch.bool)
    typical = bounded.mean().exp()
    kept = ((typical >= low) & (typical <= high)).expand(bounded.shape)
    weights = bounded.exp()
    return torch.where(kept, weights.clamp(max=cap), 0.0), ~kept | (weights > cap)


def sequence_is(log_gap: Float64[Tensor, "T"], *, cap: float) -> Weights:
    """One truncated weight a response, the same at each of its tokens: min(prod_t w_t, cap).

    Source: Li and Liu 2025, richardli.xyz/post/rl-collapse-part3 and part 2 (Seq-TIS).
        Oracle: tests/oracles/corrections.py
    """
    weight = clamped(clamped(log_gap).sum()).exp().expand(log_gap.shape)
    return weight.clamp(max=cap), weight > cap
