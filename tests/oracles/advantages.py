"""Group advantages in exact rational arithmetic: the scores are floats, everything after them is a fraction."""

from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

DIGITS = 60  # of the square root and the last division


def group_mean(scores: Sequence[float], *, tolerance: float) -> list[float]:
    """R_i - mean(R).

    Source: Liu et al., arXiv:2503.20783, section 3.2.
    """
    if _all_equal(scores, tolerance):
        return [0.0] * len(scores)
    return [float(deviation) for deviation in _deviations(scores)]


def group_norm(scores: Sequence[float], *, eps: float, ddof: int, tolerance: float) -> list[float]:
    """(R_i - mean(R)) / (std(R) + eps), with std^2 = sum (R_i - mean)^2 / (G - ddof).

    Source: Shao et al., arXiv:2402.03300, section 4.1.2. The paper has no eps and does not say which ddof.
    """
    if _all_equal(scores, tolerance):
        return [0.0] * len(scores)
    deviations = _deviations(scores)
    with localcontext() as context:
        context.prec = DIGITS
        divisor = _std(deviations, ddof) + Decimal(eps)
        return [float(_decimal(deviation) / divisor) for deviation in deviations]


def std(scores: Sequence[float], *, ddof: int) -> float:
    """Standard deviation; used to state how far rounding can move a float64 answer."""
    with localcontext() as context:
        context.prec = DIGITS
        return float(_std(_deviations(scores), ddof))


def tolerance_margin(scores: Sequence[float], tolerance: float) -> float:
    """Relative distance of the group's spread from the border between "equal" and "different"."""
    spread, bound = _spread_and_bound(scores, tolerance)
    return float(abs(spread - bound) / max(spread, bound)) if max(spread, bound) else 1.0


def _all_equal(scores: Sequence[float], tolerance: float) -> bool:
    spread, bound = _spread_and_bound(scores, tolerance)
    return len(scores) == 1 or spread <= bound


def _spread_and_bound(scores: Sequence[float], tolerance: float) -> tuple[Fraction, Fraction]:
    exact = [Fraction(score) for score in scores]
    size = max([Fraction(1), *(abs(score) for score in exact)])
    return max(exact) - min(exact), Fraction(tolerance) * size


def _deviations(scores: Sequence[float]) -> list[Fraction]:
    mean = Fraction(0)
    for score in scores:
        mean += Fraction(score) / len(scores)
    return [Fraction(score) - mean for score in scores]


def _std(deviations: Sequence[Fraction], ddof: int) -> Decimal:
    total = Fraction(0)
    for deviation in deviations:
        total += deviation * deviation
    return _decimal(total / (len(deviations) - ddof)).sqrt()


def _decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)
