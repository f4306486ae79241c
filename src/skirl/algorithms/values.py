"""Losses of a critic's values, per action token."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["value_cut", "value_loss"]


def _errors(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Squared errors of the values and of the values held near the old ones."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return (values - returns).square(), (near - returns).square()


def value_loss(
    values: Float[Tensor, "A"], old_values: Float[Tensor, "A"], returns: Float[Tensor, "A"], *, clip: float | None
) -> Float[Tensor, "A"]:
    """Squared error of the values, which may gain nothing by leaving the old ones by more than ``clip``.

    0.5 max((V - ret)^2, (V_old + clip(V - V_old, -c, c) - ret)^2)

    Args:
        values: the critic's, with gradient.
        old_values: from before this batch's first update.
        returns: advantages + old values.
        clip: c; None is the plain squared error.

    Source: PPO's public code, arXiv:1707.06347; Ouyang et al., arXiv:2203.02155, appendix C.
        Oracle: tests/oracles/values.py
    """
    if clip is None:
        return 0.5 * (values - returns).square()
    plain, near = _errors(values, old_values, returns, clip)
    return 0.5 * torch.maximum(plain, near)


def value_cut(
    values: Float[Tensor, "A"], old_values: Float[Tensor, "A"], returns: Float[Tensor, "A"], *, clip: float | None
) -> Bool[Tensor, "A"]:
    """Tokens without gradient: the value has left the range around the old one, and the clipped error is the larger."""
    if clip is None:
        return torch.zeros_like(values, dtype=torch.bool)
    plain, near = _errors(values, old_values, returns, clip)
    return ((values - old_values).abs() > clip) & (near > plain)
