"""Policy losses of whole responses, one response at a time: a list of tokens in, the loss of each token out.

GSPO's gradient is also worked out by hand.
"""

import math
from collections.abc import Sequence

from tests.oracles.autodiff import Number, clip, exp, mean, smaller, stop, total

BOUND = 20.0


def geometric_mean(log_ratios: Sequence[Number]) -> Number:
    """s = exp(1/T sum_t log r_t): arXiv:2507.18071, eq. 7."""
    return exp(mean([clip(x, -BOUND, BOUND) for x in log_ratios]))


def gspo(log_ratios: Sequence[Number], advantages: Sequence[float], low: float, high: float) -> list[Number]:
    """-min(s A, clip(s, 1 - low, 1 + high) A), the same for each token; the advantage is the response's.

    Source: Zheng et al., arXiv:2507.18071, eq. 5.
    """
    if not log_ratios:
        return []
    ratio, advantage = geometric_mean(log_ratios), advantages[0]
    loss = -smaller(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    return [loss] * len(log_ratios)


def gspo_token(log_ratios: Sequence[Number], advantages: Sequence[float], low: float, high: float) -> list[Number]:
    """-min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t), s_t = sg(s) pi_t / sg(pi_t).

    Source: Zheng et al., arXiv:2507.18071, eq. 13 and 14.
    """
    if not log_ratios:
        return []
    ratio = stop(geometric_mean(log_ratios))
    losses: list[Number] = []
    for x, advantage in zip(log_ratios, advantages, strict=True):
        own = exp(x - stop(x)) * ratio
        losses.append(-smaller(own * advantage, clip(own, 1 - low, 1 + high) * advantage))
    return losses


def gspo_by_hand(
    log_ratios: Sequence[float], advantages: Sequence[float], low: float, high: float, *, token_level: bool
) -> list[tuple[float, float]]:
    """Of each token (loss, derivative of the SUM of all token losses by its log ratio).

    Where it is not clipped: T losses of -s A, each with derivative -s A / T by every token, so -s A; in the token form
    one loss of derivative -s A_t. Where it is clipped: 0.
    """
    if not log_ratios:
        return []
    ratio = math.exp(math.fsum(log_ratios) / len(log_ratios))
    result: list[tuple[float, float]] = []
    for advantage in advantages if token_level else [advantages[0]] * len(log_ratios):
        if advantage >= 0 and ratio > 1 + high:
            result.append((-(1 + high) * advantage, 0.0))
        elif advantage < 0 and ratio < 1 - low:
            result.append((-(1 - low) * advantage, 0.0))
        else:
            result.append((-ratio * advantage, -ratio * advantage))
    return result


def gspo_is_cut(log_ratios: Sequence[float], advantage: float, low: float, high: float) -> bool:
    """Whether a token of this advantage has lost its gradient."""
    ratio = math.exp(math.fsum(log_ratios) / len(log_ratios))
    return (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)


def gmpo(log_ratios: Sequence[Number], advantages: Sequence[float], bound: float) -> list[Number]:
    """-(prod_t |min(r_t^s, clip(r_t^s, e^-bound, e^bound))|^s)^(1/T) A, s = sign(A); the same for each token.

    Source: Zhao et al., arXiv:2507.20673 (token-level clipping).
    """
    if not log_ratios:
        return []
    advantage = advantages[0]
    sign = 1.0 if advantage > 0 else -1.0
    kept: list[Number] = []
    for x in log_ratios:
        powered = clip(x, -BOUND, BOUND) * sign  # log of r^s
        kept.append(smaller(powered, clip(powered, -bound, bound)) * sign)
    return [-(exp(mean(kept)) * advantage)] * len(log_ratios)


def gmpo_is_cut(log_ratio: float, advantage: float, bound: float) -> bool:
    """Whether the clip has cut this token's gradient."""
    return (advantage > 0 and log_ratio > bound) or (advantage < 0 and log_ratio < -bound)


def topr(
    logprobs: Sequence[Number], log_ratios: Sequence[Number], advantages: Sequence[float], cap: float
) -> list[Number]:
    """A >= 0: -A log pi_t; A < 0: -sg(min(prod_t r_t, cap)) A log pi_t.

    Source: Le Roux et al., arXiv:2503.14286 (cap 1, ratio of the whole trajectory).
    """
    log_product = stop(total(log_ratios)) if log_ratios else 0.0
    truncated = min(math.exp(min(log_product, BOUND)), cap)
    result: list[Number] = []
    for logprob, advantage in zip(logprobs, advantages, strict=True):
        weight = truncated if advantage < 0 else 1.0
        result.append(-(logprob * (weight * advantage)))
    return result
