"""Divergence of a student from its teacher at one token, over the whole vocabulary, with its derivatives by hand.

forward_kl sum_v q_v log(q_v / p_v), reverse_kl sum_v p_v log(p_v / q_v), q the teacher, p the student, both softmax of
logits / temperature; times temperature^2 (Hinton et al., arXiv:1503.02531, section 2).
"""

import math
from collections.abc import Sequence

from tests.oracles.logprobs import Matrix


def log_softmax(logits: Sequence[float]) -> list[float]:
    """Log-probs."""
    top = max(logits)
    total = math.log(math.fsum(math.exp(z - top) for z in logits)) + top
    return [z - total for z in logits]


def divergence(
    student: Sequence[float], teacher: Sequence[float], direction: str, temperature: float
) -> tuple[float, list[float]]:
    """(divergence, its derivative by each student logit).

    forward d/dz_v = (p_v - q_v) / temperature; reverse d/dz_v = p_v (log(p_v / q_v) - KL) / temperature.
    """
    log_p = log_softmax([z / temperature for z in student])
    log_q = log_softmax([z / temperature for z in teacher])
    gaps = [a - b for a, b in zip(log_p, log_q, strict=True)]
    if direction == "forward_kl":
        value = math.fsum(-math.exp(b) * gap for b, gap in zip(log_q, gaps, strict=True))
        slopes = [math.exp(a) - math.exp(b) for a, b in zip(log_p, log_q, strict=True)]
    else:
        value = math.fsum(math.exp(a) * gap for a, gap in zip(log_p, gaps, strict=True))
        slopes = [math.exp(a) * (gap - value) for a, gap in zip(log_p, gaps, strict=True)]
    return value * temperature**2, [slope * temperature for slope in slopes]


def logprob(student: Sequence[float], target: int) -> tuple[float, list[float]]:
    """(log p of the target at temperature 1, its derivative by each logit)."""
    log_p = log_softmax(student)
    return log_p[target], [(1.0 if v == target else 0.0) - math.exp(x) for v, x in enumerate(log_p)]


def weighted(rows: Sequence[Sequence[float]], factors: Sequence[float]) -> Matrix:
    """Each row times its factor."""
    return [[factor * x for x in row] for row, factor in zip(rows, factors, strict=True)]
