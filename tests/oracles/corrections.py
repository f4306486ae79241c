"""Corrections of the gap between engine and trainer, one response at a time: w_t = pi_old(trainer) / pi(engine).

Sources: truncated weights and IcePop, arXiv:2510.18855; sequence forms: practice of mixed engines.
"""

import math
from collections.abc import Sequence

BOUND = 20.0  # of log w inside exp

Corrected = tuple[list[float], list[bool]]
"""(factor of each token's policy loss, whether it was clipped or left out)."""


def weight(log_gap: float) -> float:
    """w of a token."""
    return math.exp(min(max(log_gap, -BOUND), BOUND))


def tis(log_gap: Sequence[float], low: float, high: float) -> Corrected:
    """w, or the bound that it has passed."""
    factors, cut = [], []
    for gap in log_gap:
        w = weight(gap)
        factors.append(min(max(w, low), high))
        cut.append(w < low or w > high)
    return factors, cut


def icepop(log_gap: Sequence[float], low: float, high: float) -> Corrected:
    """w inside [low, high], 0 outside."""
    factors, cut = [], []
    for gap in log_gap:
        w = weight(gap)
        cut.append(w < low or w > high)
        factors.append(0.0 if cut[-1] else w)
    return factors, cut


def sequence_mask(log_gap: Sequence[float], low: float, high: float, cap: float) -> Corrected:
    """All zeros unless (prod w)^(1/T) lies in [low, high]; then min(w, cap)."""
    if not log_gap:
        return [], []
    geometric = math.exp(math.fsum(min(max(gap, -BOUND), BOUND) for gap in log_gap) / len(log_gap))
    kept = low <= geometric <= high
    factors, cut = [], []
    for gap in log_gap:
        w = weight(gap)
        factors.append(min(w, cap) if kept else 0.0)
        cut.append(not kept or w > cap)
    return factors, cut


def sequence_is(log_gap: Sequence[float], cap: float) -> Corrected:
    """min(prod w, cap) for every token."""
    product = weight(math.fsum(log_gap))
    return [min(product, cap)] * len(log_gap), [product > cap] * len(log_gap)


def margin(log_gap: Sequence[float], bounds: Sequence[float]) -> float:
    """Distance, in logs, of every weight, their geometric mean and their product from the bounds."""
    whole = math.fsum(log_gap)
    logs = [*log_gap, whole, whole / max(1, len(log_gap))]
    return min((abs(x - math.log(b)) for x in logs for b in bounds if b > 0), default=1.0)
