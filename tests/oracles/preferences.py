"""Losses of pairs and of labelled responses, one at a time; DPO's and KTO's derivatives are also worked out by hand."""

import math

from tests.oracles.autodiff import Number, log_one_minus_exp, log_sigmoid, sigmoid


def bradley_terry(chosen: Number, rejected: Number, margin: float) -> Number:
    """-log sigmoid(chosen - rejected - margin): arXiv:2203.02155 eq. 1, arXiv:2307.09288 eq. 2."""
    return -log_sigmoid(chosen - rejected - margin)


def dpo(chosen: Number, rejected: Number, beta: float, smoothing: float) -> Number:
    """-(1 - s) log sigmoid(h) - s log sigmoid(-h), h = beta (chosen - rejected) of log ratios to the reference.

    Source: Rafailov et al., arXiv:2305.18290, eq. 7; smoothing: Mitchell, "A note on DPO with noisy preferences", 2023.
    """
    h = (chosen - rejected) * beta
    return -(log_sigmoid(h) * (1 - smoothing)) - log_sigmoid(-h) * smoothing


def dpo_by_hand(chosen: float, rejected: float, beta: float, smoothing: float) -> tuple[float, float]:
    """(loss, its derivative by the chosen log ratio): beta (sigmoid(h) - (1 - s)); by the rejected one the negative."""
    h = beta * (chosen - rejected)
    loss = (1 - smoothing) * math.log1p(math.exp(-h)) + smoothing * math.log1p(math.exp(h))
    return loss, beta * (1 / (1 + math.exp(-h)) - (1 - smoothing))


def ipo(chosen: Number, rejected: Number, beta: float) -> Number:
    """(chosen - rejected - 1 / (2 beta))^2: Azar et al., arXiv:2310.12036, eq. 17."""
    gap = chosen - rejected - 1 / (2 * beta)
    return gap * gap


def kto(log_ratio: Number, desirable: bool, baseline: float, beta: float, weights: tuple[float, float]) -> Number:
    """lambda (1 - v): v = sigmoid(beta (log ratio - z0)) for desirable responses, of the negative for undesirable ones.

    1 - sigmoid(x) is sigmoid(-x), which keeps its digits.
    Source: Ethayarajh et al., arXiv:2402.01306, eq. 8; differs: z0 is taken as given.
    """
    gap = (log_ratio - baseline) * beta
    if desirable:
        return sigmoid(-gap) * weights[0]
    return sigmoid(gap) * weights[1]


def kto_by_hand(
    log_ratio: float, desirable: bool, baseline: float, beta: float, weights: tuple[float, float]
) -> tuple[float, float]:
    """(loss, derivative): the slope is -lambda_D beta v (1 - v), or +lambda_U beta v (1 - v)."""
    sign = 1.0 if desirable else -1.0
    factor = weights[0] if desirable else weights[1]
    value = 1 / (1 + math.exp(-sign * beta * (log_ratio - baseline)))
    return factor * (1 - value), -sign * factor * beta * value * (1 - value)


def simpo(chosen: Number, rejected: Number, beta: float, margin: float) -> Number:
    """-log sigmoid(beta chosen - beta rejected - margin) of mean log-probs: Meng et al., arXiv:2405.14734, eq. 6."""
    return -log_sigmoid(chosen * beta - rejected * beta - margin)


def orpo(chosen: Number, rejected: Number) -> Number:
    """-log sigmoid(log(odds of chosen / odds of rejected)), odds = p / (1 - p), p = exp(mean log-prob).

    Source: Hong et al., arXiv:2403.07691, eq. 4 and 7.
    """
    log_odds = [x - log_one_minus_exp(x) for x in (chosen, rejected)]
    return -log_sigmoid(log_odds[0] - log_odds[1])


def step_entropy(logit: Number, label: float) -> Number:
    """-(label log p + (1 - label) log(1 - p)), p = sigmoid(logit): arXiv:2305.20050 with soft labels."""
    return -(log_sigmoid(logit) * label) - log_sigmoid(-logit) * (1 - label)
