"""Weights of tokens: three normalisers are three ways to fill them in, and every loss is sum(weight * token loss)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from skirl.errors import ConfigError

__all__ = ["token_weights"]


def token_weights(
    num_actions: Sequence[int], normalizer: Literal["token", "sequence", "constant"], constant_length: int | None
) -> list[np.ndarray]:
    """Per sequence [T] float64 loss weights of one optimizer step.

    token 1 / (all action tokens); sequence 1 / (S T_i); constant 1 / (S L), with S the sequences that have an action
    token. The counts are those of the whole optimizer step, over all ranks and micro-batches.

    Source: arXiv:2503.14476 eq. 12 (token), arXiv:2402.03300 eq. 3 (sequence), arXiv:2503.20783 (constant).
    """
    tokens = sum(num_actions)
    filled = sum(n > 0 for n in num_actions)
    if normalizer == "token":
        return [np.full(n, 1.0 / tokens if tokens else 0.0) for n in num_actions]
    if normalizer == "sequence":
        return [np.full(n, 1.0 / (filled * n) if n else 0.0) for n in num_actions]
    if not constant_length:
        raise ConfigError("method.normalizer.kind is constant, which needs method.normalizer.length")
    return [np.full(n, 1.0 / (filled * constant_length) if filled else 0.0) for n in num_actions]
