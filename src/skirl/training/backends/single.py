"""Plain PyTorch in one process. Runs a plan made for several ranks one rank after another: the gradient is the same."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from skirl.config.schema import OptimConfig
from skirl.errors import TrainingDiverged
from skirl.models.policy import Policy
from skirl.records import OptimizerStep, Plan, Ratio, UpdateReport, sum_ratios
from skirl.training.objective import Objective, as_ratios
from skirl.training.optim import FiniteGuard, adamw, learning_rate
from skirl.training.rows import make_row

__all__ = ["SingleBackend", "run_steps", "scoring_pass"]


class SingleBackend:
    """Trains a policy in this process.

    Weights in bfloat16 have float32 masters, which the optimizer steps; float32 weights are stepped themselves.

    Args:
        total_prompts: prompts of the whole run, for the learning-rate schedule.
    """

    def __init__(self, policy: Policy, objective: Objective, optim: OptimConfig, total_prompts: int) -> None:
        self.policy, self.policy_version = policy, 0
        self._objective, self._optim, self._total_prompts = objective, optim, total_prompts
        named = [(n, p) for n, p in policy.named_parameters() if p.requires_grad]
        self._trained = [p for _, p in named]
        half = any(p.dtype != torch.float32 for p in self._trained)
        self._masters = [nn.Parameter(p.detach().float().clone()) for p in self._trained] if half else self._trained
        pairs = [(name, master) for (name, _), master in zip(named, self._masters, strict=True)]
        self._optimizer = adamw(pairs, optim, fused=policy.device.type != "cpu")
        self._guard = FiniteGuard(self._trained, policy.device)

    def update(self, plan: Plan, consumed_prompts: int) -> UpdateReport:
        """Runs every optimizer step of the plan."""
        rate = learning_rate(self._optim, consumed_prompts, self._total_prompts)
        report = run_steps(plan, rate, self._accumulate, self._step)
        self.policy_version += 1
        return replace(report, policy_version=self.policy_version)

    def _accumulate(self, plan: Plan, step: OptimizerStep) -> tuple[float, dict[str, Ratio]]:
        total, metrics = 0.0, []
        for micro_batch in (m for rank in step.ranks for m in rank if m.sequences):
            row, streams = make_row(plan, micro_batch, self.policy.device)
            logprobs, entropy = self.policy(row, self._objective.sampling)
            token_losses, sums = self._objective(logprobs, entropy, streams)
            loss = (streams.weights * token_losses).sum()
            loss.backward()
            total += loss.item()
            metrics.append(as_ratios(sums, len(row.targets)))
        return total, sum_ratios(metrics)

    def _step(self, rate: float, loss: float, number: int) -> float:
        bad = bool(self._guard.take()) or loss != loss or abs(loss) == float("inf")
        if bad:
            self.policy.zero_grad(set_to_none=True)
            raise TrainingDiverged(
                f"optimizer step {number} after version {self.policy_version}: loss {loss} or a gradient is not "
                "finite; weights and optimizer are as before the step. Lower trainer.optim.lr, or look at the rewards "
                "and advantages of this step in rollouts/"
            )
        for master, parameter in zip(self._masters, self._trained, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        limit = self._optim.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self._masters, float("inf") if limit is None else limit)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._masters is not self._trained:
            with torch.no_grad():
                for master, parameter in zip(self._masters, self._trained, strict=True):
                    parameter.copy_(master)
            self.policy.zero_grad(set_to_none=True)
        return norm.item()

    @torch.no_grad()
    def logprobs(self, plan: Plan) -> dict[int, Tensor]:
        """Log-probs of the action tokens of every sequence, by its index in the plan; no gradient."""
        return scoring_pass(self.policy, self._objective, plan, range(plan.num_ranks))

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under the names of the Hugging Face model."""
        for name, parameter in self.policy.named_model_parameters():
            yield name, parameter.detach()

    def save(self, directory: Path) -> None:
        """Weights, masters, optimizer, version."""
        state = {
            "policy": self.policy.state_dict(),
            "masters": [m.detach() for m in self._masters] if self._masters is not self._trained else None,
            "optimizer": self._optimizer.state_dict(),
            "policy_version": self.policy_version,
        }
        torch.save(state, directory / "single.pt")

    def load(self, directory: Path) -> None:
        """What ``save`` wrote."""
        state = torch.load(directory / "single.pt", map_location=self.policy.device, weights_only=True)
        self.policy.load_state_dict(state["policy"])
        if state["masters"] is not None:
            with torch.no_grad():
                for master, saved in zip(self._masters, state["masters"], strict=True):
                    master.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.policy_version = state["policy_version"]


def run_steps(
    plan: Plan,
    rate: float,
    accumulate: Callable[[Plan, OptimizerStep], tuple[float, dict[str, Ratio]]],
    step: Callable[[float, float, int], float],
) -> UpdateReport:
    """Every optimizer step of a plan, the same way for every backend; the report's version is left to the caller.

    Args:
        accumulate: gradients of one step; returns its loss and metrics.
        step: (learning rate, loss, number of the step) moves the weights; returns the gradient norm before clipping.
    """
    start = time.perf_counter()
    losses: list[float] = []
    norms: list[float] = []
    metrics: list[dict[str, Ratio]] = []
    for number, optimizer_step in enumerate(plan.steps):
        if optimizer_step.is_empty:
            continue  # fewer groups than mini-batches: nothing to learn, and momentum must not act alone
        loss, sums = accumulate(plan, optimizer_step)
        norms.append(step(rate, loss, number))
        losses.append(loss)
        metrics.append(sums)
    seconds = time.perf_counter() - start
    return UpdateReport(0, tuple(losses), tuple(norms), (rate,) * len(losses), sum_ratios(metrics), seconds)


@torch.no_grad()
def scoring_pass(policy: nn.Module, objective: Objective, plan: Plan, ranks: Iterable[int]) -> dict[int, Tensor]:
    """Log-probs of the action tokens by sequence index, over the micro-batches of the given ranks, dummies included.

    Args: policy: the policy, or the backend's wrapper around it, called as ``policy(row, sampling)``.
    """
    device = next(policy.parameters()).device
    found: dict[int, Tensor] = {}
    mine = list(ranks)
    for micro_batch in (m for step in plan.steps for r in mine for m in step.ranks[r]):
        row, _ = make_row(plan, micro_batch, device)
        logprobs, _ = policy(row, objective.sampling)
        counts = [plan.sequences[i].num_actions for i in micro_batch.sequences]
        pieces = logprobs.float().cpu().split(counts) if counts else []
        found.update(zip(micro_batch.sequences, pieces, strict=True))
    return found
