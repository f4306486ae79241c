"""The optimizer's parameter groups, and the learning rate as a function of consumed prompts."""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skirl.config.schema import OptimConfig, ScheduleConfig
from skirl.errors import ConfigError
from skirl.training.backends.model import TrainedModel

__all__ = ["FiniteGuard", "Together", "learning_rate", "make_optimizer", "muon_matrices", "set_rates"]

log = logging.getLogger(__name__)

Named = Sequence[tuple[str, nn.Parameter]]
Module = nn.Module | TrainedModel


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


def set_rates(groups: Iterable[dict[str, Any]], optim: OptimConfig, rate: float) -> None:
    """Every group follows one schedule: ``rate`` is that of ``optim.lr``, and Muon's is scaled by its own peak."""
    for group in groups:
        peak = optim.muon.lr if optim.muon is not None and group.get("by_muon") else optim.lr
        group["lr"] = rate if peak == optim.lr else rate * (peak / optim.lr)


# ----------------------------------------------------------------------------------------------------------- optimizers
def make_optimizer(model: Module, named: Named, optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    """AdamW, or Muon for the matrices of hidden layers beside it.

    Args:
        model: which parameter is what.
        named: what the optimizer steps, under the names that ``model.named_parameters`` gives: the parameters
            themselves or masters of them. Those without ``requires_grad`` are left out.

    Raises: ConfigError: Muon is asked for, and no matrix of a hidden layer is trained.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    if optim.muon is None:
        return _adamw(trained, optim, fused=fused)
    chosen = muon_matrices(model)
    matrices = [(name, p) for name, p in trained if name in chosen]
    rest = [(name, p) for name, p in trained if name not in chosen]
    if not matrices:
        raise ConfigError("trainer.optim.muon is set, but no matrix of a hidden layer is trained; leave it out")
    log.info("Muon steps %d matrices: %s", len(matrices), ", ".join(name for name, _ in matrices))
    muon = optim.muon
    by_muon = torch.optim.Muon(
        [p for _, p in matrices],
        lr=muon.lr,
        momentum=muon.momentum,
        weight_decay=muon.weight_decay,
        ns_steps=muon.steps,
    )
    by_muon.param_groups[0]["by_muon"] = True
    return Together(*([_adamw(rest, optim, fused=fused)] if rest else []), by_muon)


def muon_matrices(model: Module) -> frozenset[str]:
    """Names of the matrices of hidden layers: no embeddings, no head (tied or not), no vectors in another shape."""
    outside = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    matrices = [(n, p) for n, p in model.named_parameters() if p.ndim == 2 and min(p.shape) > 1]
    heads = {n for n, _ in matrices if any(part.endswith("head") for part in n.split("."))}
    return frozenset(n for n, p in matrices if id(p) not in outside and n not in heads)


def _adamw(trained: Named, optim: OptimConfig, *, fused: bool) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only (biases, norms and other vectors are left out)."""
    groups = [
        {"params": [p for _, p in trained if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused
    )


class Together(torch.optim.Optimizer):
    """Several optimizers as one: groups and state are held here, and shared with the parts, which only step."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of each part."""
        self._share()  # a backend may have put other groups in place
        for part in self._parts:
            part.step()

    def _share(self) -> None:
        start = 0
        for part in self._parts:
            end = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:end], self.state
            start = end


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
