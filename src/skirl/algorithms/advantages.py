"""Scores of a group to advantages: float64, on the host, pure."""

from jaxtyping import Float64
from torch import Tensor

__all__ = ["group_mean", "group_norm"]


def _without_spread(scores: Float64[Tensor, "G"], tolerance: float) -> bool:
    scale = max(1.0, float(scores.abs().max()))
    return float(scores.max() - scores.min()) <= tolerance * scale


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
    if scores.numel() < 2 or _without_spread(scores, tolerance):
        return scores.new_zeros(scores.shape)
    centred = scores - scores.mean()
    return centred / (scores.std(correction=ddof) + eps)


def group_mean(scores: Float64[Tensor, "G"], *, tolerance: float) -> Float64[Tensor, "G"]:
    """Advantages centred within one group, not divided by the spread.

    A_i = R_i - mean(R), with exact zeros where the scores are equal up to rounding.

    Args: as for ``group_norm``.
    Source: Liu et al., arXiv:2503.20783 (Dr. GRPO), section 3.2. Oracle: tests/oracles/advantages.py
    """
    if scores.numel() < 2 or _without_spread(scores, tolerance):
        return scores.new_zeros(scores.shape)
    return scores - scores.mean()
