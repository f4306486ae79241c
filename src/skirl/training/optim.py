"""AdamW's parameter groups, and the learning rate as a function of consumed prompts."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from skirl.config.schema import OptimConfig, ScheduleConfig

__all__ = ["FiniteGuard", "adamw", "learning_rate"]


def learning_rate(optim: OptimConfig, consumed: int, total: int) -> float:
    """Rate of the optimizer steps that bring the run to ``consumed`` of ``total`` prompts."""
    schedule: ScheduleConfig = optim.schedule
    done = min(1.0, consumed / total)
    if done < schedule.warmup:
        return optim.lr * done / schedule.warmup
    if schedule.kind == "constant":
        return optim.lr
    rest = (done - schedule.warmup) / (1.0 - schedule.warmup)
    shape = 1.0 - rest if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * rest))
    return optim.lr * (schedule.final + (1.0 - schedule.final) * shape)


def adamw(named: Iterable[tuple[str, nn.Parameter]], optim: OptimConfig, *, fused: bool) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only (biases, norms and other vectors are left out)."""
    trained = [(name, p) for name, p in named if p.requires_grad]
    groups = [
        {"params": [p for _, p in trained if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused
    )


class FiniteGuard:
    """Notices a gradient that is not finite as it is made, before any backend reduces or applies it.

    One sum a gradient: times 0 it is 0, or NaN if an element was NaN or infinite.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._trace = torch.zeros((), device=device)
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        self._trace.add_(gradient.detach().sum().float() * 0.0)

    def take(self) -> Tensor:
        """1.0 if something was not finite since the last call, else 0.0; a tensor, so that ranks can add theirs."""
        bad = (~torch.isfinite(self._trace)).float()
        self._trace.zero_()
        return bad
