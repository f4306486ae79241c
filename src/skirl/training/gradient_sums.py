"""Gradients of micro-batches, added up in float32 beside weights of fewer bits.

take: gradients of the weights -> sums    give: sums -> gradients of what is stepped
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["GradientSums"]


class GradientSums:
    """A sum in bfloat16 stands still once what is added is below 1/256 of it.

    Args: parameters: the weights; those in float32 keep their own gradients, which autograd adds up.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: list[Tensor | None] = [None] * len(self._parameters)

    @torch.no_grad()
    def take(self) -> None:
        """Adds what a backward pass left, and frees it."""
        for number, parameter in enumerate(self._parameters):
            gradient, known = parameter.grad, self._sums[number]
            if gradient is None or gradient.dtype == torch.float32:
                continue
            self._sums[number] = gradient.float() if known is None else known.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def give(self, to: Sequence[nn.Parameter]) -> None:
        """Makes the sums the gradients of these, in their type, and forgets them.

        Args: to: one for each parameter, in the same order: masters, or the weights themselves.
        """
        for number, (target, found) in enumerate(zip(to, self._sums, strict=True)):
            if found is not None:
                target.grad = found.to(target.dtype)
                self._sums[number] = None
