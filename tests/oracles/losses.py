"""Clipped policy loss of one token, with its derivative by cases.

L_CLIP = min(r A, clip(r, 1 - low, 1 + high) A); for A < 0 with dual clip max(L_CLIP, c A); the loss is -L.
Source: arXiv:1707.06347 eq. 7; low != high: arXiv:2503.14476 eq. 10; dual clip: arXiv:1912.09729.
"""

import math

BOUND = 20.0  # of the log ratio inside exp


def ppo_clip(log_ratio: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """(loss, its derivative by the log ratio)."""
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


def is_clipped(log_ratio: float, advantage: float, low: float, high: float) -> bool:
    """Whether the clip, not the dual clip, has cut this token's gradient."""
    ratio = math.exp(min(max(log_ratio, -BOUND), BOUND))
    return (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)


def kink_margin(log_ratio: float, low: float, high: float, dual: float | None) -> float:
    """Distance of the log ratio from the nearest point where the derivative jumps."""
    kinks = [math.log(1 - low), math.log(1 + high), -BOUND, BOUND]
    if dual is not None:
        kinks.append(math.log(dual))
    return min(abs(log_ratio - kink) for kink in kinks)
