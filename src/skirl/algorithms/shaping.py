"""Changes to raw scores before any baseline: float64, pure. The order in which they are applied is the caller's."""

import torch
from jaxtyping import Bool, Float64, Real
from torch import Tensor

__all__ = ["clip_scores", "length_reward", "overlong_penalty", "truncated_scores"]


def clip_scores(scores: Float64[Tensor, "G"], *, low: float, high: float) -> Float64[Tensor, "G"]:
    """Raw scores, held inside [low, high]."""
    return scores.clamp(low, high)


def overlong_penalty(lengths: Real[Tensor, "G"], *, budget: int, buffer: int, penalty: float) -> Float64[Tensor, "G"]:
    """What a response that comes near its budget loses.

    penalty * clip((budget - buffer - length) / buffer, -1, 0):  0 up to budget - buffer, -penalty at budget and past it

    Args:
        lengths: action tokens of each response.
        budget: tokens that a response may have (L_max).
        buffer: its last tokens, over which the penalty grows (L_cache). 0 punishes from the budget on.
        penalty: full size, positive.

    Returns: values in [-penalty, 0], to be added to the scores.
    Source: Yu et al., arXiv:2503.14476 (DAPO), eq. 13. Oracle: tests/oracles/shaping.py
    """
    left = budget - buffer - lengths.double()
    if buffer <= 0:
        return torch.where(left <= 0, -penalty, torch.zeros_like(left))
    return penalty * (left / buffer).clamp(-1.0, 0.0)


def truncated_scores(
    scores: Float64[Tensor, "G"], cut: Bool[Tensor, "G"], *, factor: float | None, score: float | None
) -> Float64[Tensor, "G"]:
    """Scores of responses that the budget cut off: multiplied by ``factor``, or ``score`` whatever they were.

    Args:
        scores: raw.
        cut: the responses that were cut off.
        factor: in [0, 1]; None leaves them.
        score: None leaves them; where both are given this one counts.

    Source: ProRL (arXiv:2505.24864) and its second version: cut-off responses are punished.
        Oracle: tests/oracles/shaping.py
    """
    if factor is not None:
        scores = torch.where(cut, scores * factor, scores)
    if score is not None:
        scores = torch.where(cut, torch.full_like(scores, score), scores)
    return scores


def length_reward(lengths: Real[Tensor, "G"], right: Bool[Tensor, "G"], *, coef: float) -> Float64[Tensor, "G"]:
    """Reward for being shorter than the siblings.

    lam_i = 0.5 - (T_i - min T) / (max T - min T);  right: coef lam_i, wrong: coef min(0, lam_i);  0 where max T = min T

    Args:
        lengths: action tokens of each response of one prompt.
        right: which responses are right.
        coef: factor.

    Returns: values in [-coef / 2, coef / 2], to be added to the scores.
    Source: Kimi k1.5, arXiv:2501.12599, section 2.3.3. Oracle: tests/oracles/shaping.py
    """
    exact = lengths.double()
    if exact.numel() == 0 or float(exact.max()) == float(exact.min()):
        return torch.zeros_like(exact)
    lam = 0.5 - (exact - exact.min()) / (exact.max() - exact.min())
    return coef * torch.where(right, lam, lam.clamp(max=0.0))
