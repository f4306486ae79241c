"""Advantages in exact rational arithmetic: the inputs are floats, everything after them is a fraction."""

import itertools
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


def leave_one_out(scores: Sequence[float], *, tolerance: float) -> list[float]:
    """R_i minus the mean of the others.

    Source: Ahmadian et al., arXiv:2402.14740, section 3 (RLOO).
    """
    if _all_equal(scores, tolerance):
        return [0.0] * len(scores)
    exact = [Fraction(score) for score in scores]
    result = []
    for i, own in enumerate(exact):
        others = [score for j, score in enumerate(exact) if j != i]
        result.append(float(own - sum(others, Fraction(0)) / len(others)))
    return result


def max_rl(scores: Sequence[float], *, tolerance: float) -> list[float]:
    """(R_i - mean) / mean of scores >= 0; 0 where the mean is.

    Source: arXiv:2602.02710.
    """
    mean = sum((Fraction(score) for score in scores), Fraction(0)) / len(scores)
    if _all_equal(scores, tolerance) or mean == 0:
        return [0.0] * len(scores)
    return [float(deviation / mean) for deviation in _deviations(scores)]


def pass_at_k(right: Sequence[bool], *, k: int) -> list[float]:
    """By listing every choice of k responses: a choice is worth 1 if one of it is right.

    The choices' worths are normalised (population std); a response's advantage is the mean over the choices that it is
    in. 0 where all choices are worth the same. Source: Chen et al., arXiv:2508.10751, section 2.
    """
    choices = list(itertools.combinations(range(len(right)), k))
    worths = [1.0 if any(right[i] for i in choice) else 0.0 for choice in choices]
    normed = group_norm(worths, eps=0.0, ddof=0, tolerance=0.0)
    result = []
    for i in range(len(right)):
        mine = [Fraction(a) for a, choice in zip(normed, choices, strict=True) if i in choice]
        result.append(float(sum(mine, Fraction(0)) / len(mine)))
    return result


def optimal_baseline(scores: Sequence[float], lengths: Sequence[int], *, tolerance: float) -> list[float]:
    """R_i - sum_j T_j R_j / sum_j T_j.

    Source: Hao et al., arXiv:2505.23585 (OPO).
    """
    if _all_equal(scores, tolerance):
        return [0.0] * len(scores)
    above = sum((length * Fraction(score) for score, length in zip(scores, lengths, strict=True)), Fraction(0))
    return [float(Fraction(score) - above / sum(lengths)) for score in scores]


def decoupled_norm(
    parts: Sequence[Sequence[float]], weights: Sequence[float], *, eps: float, ddof: int, tolerance: float
) -> list[float]:
    """sum_k w_k group_norm(part k of the group); a part that no response has counts 0.

    Source: GDPO, arXiv:2601.05242.
    """
    result = [0.0] * len(parts)
    for k, weight in enumerate(weights):
        column = [row[k] for row in parts]
        if all(value != value for value in column):  # NaN throughout
            continue
        normed = group_norm(column, eps=eps, ddof=ddof, tolerance=tolerance)
        result = [a + weight * b for a, b in zip(result, normed, strict=True)]
    return result


def whiten_scores(values: Sequence[float], *, eps: float, ddof: int) -> list[float]:
    """(x - mean) / (std + eps) over the batch; 0 where a std of ddof needs more values than there are.

    Source: GDPO, arXiv:2601.05242, the batch step.
    """
    if len(values) <= ddof or len(set(values)) == 1:
        return [0.0] * len(values)
    return group_norm(values, eps=eps, ddof=ddof, tolerance=0.0)


def whiten(values: Sequence[float], *, eps: float) -> list[float]:
    """(x - mean) / sqrt(var + eps), var over all N."""
    if not values:
        return []
    deviations = _deviations(values)
    with localcontext() as context:
        context.prec = DIGITS
        variance = _decimal(sum((d * d for d in deviations), Fraction(0)) / len(values))
        divisor = (variance + Decimal(eps)).sqrt()
        return [float(_decimal(deviation) / divisor) for deviation in deviations]


def discounted_returns(rewards: Sequence[float], *, gamma: float) -> list[float]:
    """A_t = sum_{k >= t} gamma^(k - t) r_k, each from its definition."""
    result = []
    for t in range(len(rewards)):
        result.append(
            float(sum((Fraction(gamma) ** (k - t) * Fraction(rewards[k]) for k in range(t, len(rewards))), Fraction(0)))
        )
    return result


def gae(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """(A, A + V): A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, 0 after the end.

    Source: Schulman et al., arXiv:1506.02438, eq. 16, each from its definition.
    """
    exact = [Fraction(value) for value in values] + [Fraction(0)]
    deltas = [Fraction(r) + Fraction(gamma) * exact[t + 1] - exact[t] for t, r in enumerate(rewards)]
    factor = Fraction(gamma) * Fraction(lam)
    advantages = [
        sum((factor**steps * delta for steps, delta in enumerate(deltas[t:])), Fraction(0)) for t in range(len(deltas))
    ]
    return [float(a) for a in advantages], [float(a + v) for a, v in zip(advantages, exact[:-1], strict=True)]


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
