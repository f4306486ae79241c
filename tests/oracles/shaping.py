"""Shaping of scores, one response at a time, in exact fractions of the numbers that came in."""

from collections.abc import Sequence
from fractions import Fraction


def clip_scores(scores: Sequence[float], low: float, high: float) -> list[float]:
    """Each score, or the bound that it has passed."""
    result = []
    for score in scores:
        if score < low:
            result.append(low)
        elif score > high:
            result.append(high)
        else:
            result.append(score)
    return result


def overlong_penalty(lengths: Sequence[int], budget: int, buffer: int, penalty: float) -> list[float]:
    """Times ``penalty``: 0 up to budget - buffer, ((budget - buffer) - length) / buffer up to the budget, then -1.

    Source: Yu et al. (DAPO), arXiv:2503.14476, eq. 13.
    """
    result = []
    for length in lengths:
        if length <= budget - buffer:
            share = Fraction(0)
        elif length <= budget:
            share = Fraction((budget - buffer) - length, buffer)
        else:
            share = Fraction(-1)
        result.append(float(share * Fraction(penalty)))
    return result


def truncated_scores(
    scores: Sequence[float], cut: Sequence[bool], factor: float | None, score: float | None
) -> list[float]:
    """Of cut-off responses: the score times a factor, or a fixed score; others keep theirs.

    Source: ProRL, arXiv:2505.24864.
    """
    result = []
    for own, is_cut in zip(scores, cut, strict=True):
        if not is_cut:
            result.append(own)
        elif score is not None:
            result.append(score)
        else:
            result.append(own * factor if factor is not None else own)
    return result


def length_reward(lengths: Sequence[int], right: Sequence[bool], coef: float) -> list[float]:
    """lambda = 0.5 - (length - min) / (max - min); right responses get lambda, wrong ones min(0, lambda); times coef.

    0 where all are equally long. Source: Kimi k1.5, arXiv:2501.12599, section 2.3.3.
    """
    shortest, longest = min(lengths), max(lengths)
    result = []
    for length, is_right in zip(lengths, right, strict=True):
        if shortest == longest:
            result.append(0.0)
            continue
        own = Fraction(1, 2) - Fraction(length - shortest, longest - shortest)
        result.append(float((own if is_right else min(Fraction(0), own)) * Fraction(coef)))
    return result
