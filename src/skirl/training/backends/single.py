"""Plain PyTorch in one process. Runs a plan made for several ranks one rank after another: the gradient is the same."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from skirl.config.schema import OffloadConfig, OptimConfig
from skirl.errors import TrainingDiverged
from skirl.models.policy import Policy
from skirl.records import MicroBatch, OptimizerStep, Plan, Ratio, Sampling, TensorSpec, UpdateReport, sum_ratios
from skirl.training.objective import Objective, Sums, as_ratios, micro_batch_loss
from skirl.training.offload import Offload, held_bytes
from skirl.training.optim import FiniteGuard, adamw, learning_rate
from skirl.training.rows import make_row

__all__ = ["AWAY", "SingleBackend", "StepTotals", "run_steps", "scoring_pass"]

AWAY = "the trainer's state was given back: take_back() comes before this"


class SingleBackend:
    """Trains a policy in this process.

    Weights in bfloat16 have float32 masters, which the optimizer steps; float32 weights are stepped themselves.

    Args:
        total_prompts: prompts of the whole run, for the learning-rate schedule.
        offload: what ``give_back`` gives.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        optim: OptimConfig,
        total_prompts: int,
        *,
        offload: OffloadConfig | None = None,
    ) -> None:
        self.policy, self.policy_version = policy, 0
        self._objective, self._optim, self._total_prompts = objective, optim, total_prompts
        named = [(n, p) for n, p in policy.named_parameters() if p.requires_grad]
        self._trained = [p for _, p in named]
        half = any(p.dtype != torch.float32 for p in self._trained)
        self._masters = [nn.Parameter(p.detach().float().clone()) for p in self._trained] if half else self._trained
        pairs = [(name, master) for (name, _), master in zip(named, self._masters, strict=True)]
        self._optimizer = adamw(pairs, optim, fused=policy.device.type != "cpu")
        self._guard = FiniteGuard(self._trained, policy.device)
        self._tensors = dict(policy.named_model_tensors())
        self._gives, self._offload = offload or OffloadConfig(), Offload(policy.device)

    def update(self, plan: Plan, consumed_prompts: int) -> UpdateReport:
        """Runs every optimizer step of the plan."""
        assert not self._offload.is_away, AWAY
        rate = learning_rate(self._optim, consumed_prompts, self._total_prompts)
        report = run_steps(plan, rate, self._accumulate, self._step)
        self.policy_version += 1
        return replace(report, policy_version=self.policy_version)

    def _accumulate(self, plan: Plan, step: OptimizerStep) -> tuple[float, dict[str, Ratio]]:
        totals = StepTotals()
        for micro_batch in (m for rank in step.ranks for m in rank if m.sequences):
            row, streams = make_row(plan, micro_batch, self.policy.device)
            loss, sums = micro_batch_loss(self._objective, self.policy(row, self._objective.sampling), streams)
            loss.backward()
            totals.add(loss, sums, len(row.targets))
        return totals.on_host()

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

    def logprobs(self, plan: Plan, sampling: Sampling | None = None) -> dict[int, Tensor]:
        """Log-probs of the action tokens of every sequence, by its index in the plan; no gradient.

        Args: sampling: the distribution; the objective's where not given.
        """
        return scoring_pass(self.policy, sampling or self._objective.sampling, plan, range(plan.num_ranks))

    # --------------------------------------------------------------------------------------------------------- weights
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the model, see ``Policy.tensor_specs``."""
        return self.policy.tensor_specs()

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """These tensors, whole, on the device; the model's own memory."""
        yield {name: self._tensors[name].detach() for name in names}

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the policy's parameters under the names of the Hugging Face model."""
        for name, _ in self.policy.named_model_parameters():
            with self.gathered([name]) as tensors:
                yield name, tensors[name]

    # ---------------------------------------------------------------------------------------------------------- memory
    def give_back(self) -> int:
        """Moves optimizer state and masters to the host and frees the gradients; weights stay. Returns bytes moved."""
        if self._gives.gradients:
            self.policy.zero_grad(set_to_none=True)
        states = self._state()
        return self._offload.give([*states["optimizer"], *states["masters"]] if self._gives.optimizer else ())

    def take_back(self) -> int:
        """Undoes ``give_back``, bit for bit. Returns bytes moved."""
        return self._offload.take()

    def state_bytes(self) -> dict[str, int]:
        """Device memory held now, by kind: weights, gradients, optimizer, masters."""
        return {kind: held_bytes(tensors, self.policy.device) for kind, tensors in self._state().items()}

    def _state(self) -> dict[str, list[Tensor]]:
        state = [t for values in self._optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        return {
            "weights": list(self._tensors.values()),
            "gradients": [p.grad for p in (*self._trained, *self._masters) if p.grad is not None],
            "optimizer": state,
            "masters": [m.detach() for m in self._masters] if self._masters is not self._trained else [],
        }

    # ----------------------------------------------------------------------------------------------------- checkpoints
    def save(self, directory: Path) -> None:
        """Weights, masters, optimizer, version."""
        assert not self._offload.is_away, AWAY
        state = {
            "policy": self.policy.state_dict(),
            "masters": [m.detach() for m in self._masters] if self._masters is not self._trained else None,
            "optimizer": self._optimizer.state_dict(),
            "policy_version": self.policy_version,
        }
        torch.save(state, directory / "single.pt")

    def load(self, directory: Path) -> None:
        """What ``save`` wrote."""
        assert not self._offload.is_away, AWAY
        state = torch.load(directory / "single.pt", map_location=self.policy.device, weights_only=True)
        self.policy.load_state_dict(state["policy"])
        if state["masters"] is not None:
            with torch.no_grad():
                for master, saved in zip(self._masters, state["masters"], strict=True):
                    master.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.policy_version = state["policy_version"]


class StepTotals:
    """Loss and metric sums of one optimizer step. They stay on the device until its last micro-batch is under way: to
    read one waits for all that the device has been given.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._sums: list[tuple[Sums, int]] = []

    def add(self, loss: Tensor, sums: Sums | None, num_actions: int) -> None:
        """One micro-batch. ``sums``: None for a dummy, which counts nowhere."""
        self._losses.append(loss.detach())
        if sums is not None:
            self._sums.append((sums, num_actions))

    def on_host(self) -> tuple[float, dict[str, Ratio]]:
        """(sum of the losses, metrics), in the order of the micro-batches."""
        total = 0.0
        for loss in self._losses:  # not sum(), which rounds otherwise from Python 3.12 on
            total += loss.item()
        return total, sum_ratios([as_ratios(sums, count) for sums, count in self._sums])


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
def scoring_pass(policy: nn.Module, sampling: Sampling, plan: Plan, ranks: Iterable[int]) -> dict[int, Tensor]:
    """Log-probs of the action tokens by sequence index, over the micro-batches of the given ranks, dummies included.

    Args: policy: the policy, or the backend's wrapper around it, called as ``policy(row, sampling)``.
    """
    device = next(policy.parameters()).device
    mine = list(ranks)
    scored: list[tuple[MicroBatch, Tensor]] = []
    for micro_batch in (m for step in plan.steps for r in mine for m in step.ranks[r]):
        row, _ = make_row(plan, micro_batch, device)
        scored.append((micro_batch, policy(row, sampling)[0]))
    found: dict[int, Tensor] = {}
    for micro_batch, logprobs in scored:  # fetched at the end: the device never waits for the host
        counts = [plan.sequences[i].num_actions for i in micro_batch.sequences]
        pieces = logprobs.float().cpu().split(counts) if counts else []
        found.update(zip(micro_batch.sequences, pieces, strict=True))
    return found
