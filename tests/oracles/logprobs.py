"""Log-prob and entropy of the sampling distribution, one token and one vocabulary entry at a time.

logits -> banned ids out -> / temperature -> min-p -> top-k -> top-p -> the sampled token back in -> renormalise.
Sources: top-p arXiv:1904.09751 (the smallest set of mass >= p), min-p arXiv:2407.01082 (p_v >= min_p max p),
top-k arXiv:1805.04833.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Matrix = list[list[float]]


@dataclass(frozen=True)
class Filters:
    """The sampling distribution's settings."""

    temperature: float = 1.0
    banned: frozenset[int] = frozenset()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Token:
    """One token's answer.

    Attributes:
        logprob, entropy: -inf log-prob for a banned target.
        by_logit_logprob, by_logit_entropy: [V] derivatives by the raw logits, the support held fixed.
        margin: how close the nearest keep-or-drop decision was; float32 code may decide otherwise near 0.
    """

    logprob: float
    entropy: float
    by_logit_logprob: list[float]
    by_logit_entropy: list[float]
    margin: float


def token(logits: Sequence[float], target: int, filters: Filters) -> Token:
    """d log p_y / dz_v = [v = y] - p_v, dH / dz_v = -p_v (log p_v + H) on the support; z = logits / temperature."""
    temperature = filters.temperature or 1.0
    scaled = [logit / temperature for logit in logits]
    kept, margin = support(scaled, filters)
    if target not in filters.banned:
        kept = kept | {target}
    probability = _softmax(scaled, kept)
    entropy = 0.0
    for p in probability.values():
        entropy -= p * math.log(p) if p > 0 else 0.0
    by_logprob, by_entropy = [0.0] * len(logits), [0.0] * len(logits)
    for v, p in probability.items():
        by_logprob[v] = ((1.0 if v == target else 0.0) - p) / temperature
        by_entropy[v] = -p * (math.log(p) + entropy) / temperature if p > 0 else 0.0
    logprob = math.log(probability[target]) if target in probability else -math.inf
    return Token(logprob, entropy, by_logprob, by_entropy, margin)


def support(scaled: Sequence[float], filters: Filters) -> tuple[set[int], float]:
    """(ids that may be sampled, margin of the closest decision)."""
    kept = {v for v in range(len(scaled)) if v not in filters.banned}
    margin = math.inf
    likeliest = max(_softmax(scaled, kept).values())
    for v, p in _softmax(scaled, kept).items():
        if filters.min_p > 0:
            margin = min(margin, abs(p / likeliest - filters.min_p))
            if p < filters.min_p * likeliest:
                kept.discard(v)
    order = sorted(kept, key=lambda v: -scaled[v])
    if 0 < filters.top_k < len(order):
        margin = min(margin, scaled[order[filters.top_k - 1]] - scaled[order[filters.top_k]])
        order = order[: filters.top_k]
    if filters.top_p < 1:
        probability = _softmax(scaled, set(order))
        reached, total = [], 0.0
        for v in order:
            if reached and total >= filters.top_p:
                margin = min(margin, scaled[reached[-1]] - scaled[v])
                break
            reached.append(v)
            total += probability[v]
            margin = min(margin, abs(total - filters.top_p))
        order = reached
    return set(order), margin


def logits_of(hidden: Matrix, head: Matrix) -> Matrix:
    """[A, V] = hidden [A, D] times head [V, D] transposed."""
    return [[sum(h * w for h, w in zip(row, weights, strict=True)) for weights in head] for row in hidden]


def backward(hidden: Matrix, head: Matrix, by_logit: Matrix) -> tuple[Matrix, Matrix]:
    """Gradients by hidden [A, D] and head [V, D] of a sum whose derivative by the logits [A, V] is given."""
    by_hidden = [[0.0] * len(row) for row in hidden]
    by_head = [[0.0] * len(row) for row in head]
    for a, row in enumerate(hidden):
        for v, weights in enumerate(head):
            for d in range(len(row)):
                by_hidden[a][d] += by_logit[a][v] * weights[d]
                by_head[v][d] += by_logit[a][v] * row[d]
    return by_hidden, by_head


def _softmax(scaled: Sequence[float], kept: set[int]) -> dict[int, float]:
    top = max(scaled[v] for v in kept)
    total = sum(math.exp(scaled[v] - top) for v in sorted(kept))
    return {v: math.exp(scaled[v] - top) / total for v in sorted(kept)}
