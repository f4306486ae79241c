"""Plain PyTorch in one process. Runs a plan made for several ranks one rank after another: the gradient is the same."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from skirl.config.schema import EMAConfig, OffloadConfig, OptimConfig
from skirl.errors import CheckpointError, TrainingDiverged
from skirl.models.adapters import NamedWeight
from skirl.models.policy import PackedRow
from skirl.records import MicroBatch, OptimizerStep, Plan, Ratio, Sampling, TensorSpec, UpdateReport, sum_ratios
from skirl.training.backends.model import TrainedModel
from skirl.training.ema import MovingAverage
from skirl.training.gradient_sums import GradientSums
from skirl.training.objective import Objective, Sums, as_ratios, micro_batch_loss
from skirl.training.offload import Offload, held_bytes
from skirl.training.optim import FiniteGuard, learning_rate, make_optimizer, set_rates
from skirl.training.rows import make_row

__all__ = [
    "AWAY",
    "PackedCall",
    "SingleBackend",
    "StepTotals",
    "averaged",
    "evaluation_pass",
    "run_steps",
    "scoring_pass",
]

AWAY = "the trainer's state was given back: take_back() comes before this"


EMA_FILE = "single_ema.pt"


class PackedCall(Protocol):
    """A model, or a backend's wrapper around it."""

    def __call__(self, row: PackedRow, sampling: Sampling, /) -> tuple[Tensor, Tensor, Tensor]:
        """See ``TrainedModel``."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """At least one, which says where rows must lie."""
        ...


class SingleBackend:
    """Trains a model in this process.

    Weights in bfloat16 have float32 masters, which the optimizer steps; float32 weights are stepped themselves.

    Args:
        policy: what is trained: a policy, or another model called as one.
        total_prompts: prompts of the whole run, for the learning-rate schedule.
        offload: what ``give_back`` gives.
        ema: average of the trained weights that is kept beside them; None keeps none.
    """

    def __init__(
        self,
        policy: TrainedModel,
        objective: Objective,
        optim: OptimConfig,
        total_prompts: int,
        *,
        offload: OffloadConfig | None = None,
        ema: EMAConfig | None = None,
    ) -> None:
        self.policy, self.policy_version = policy, 0
        self._objective, self._optim, self._total_prompts = objective, optim, total_prompts
        named = [(n, p) for n, p in policy.named_parameters() if p.requires_grad]
        self._trained = [p for _, p in named]
        half = any(p.dtype != torch.float32 for p in self._trained)
        self._masters = [nn.Parameter(p.detach().float().clone()) for p in self._trained] if half else self._trained
        pairs = [(name, master) for (name, _), master in zip(named, self._masters, strict=True)]
        self._optimizer = make_optimizer(policy, pairs, optim, fused=policy.device.type != "cpu")
        self._average = None if ema is None else MovingAverage(self._masters, ema)
        self._guard, self._sums = FiniteGuard(self._trained, policy.device), GradientSums(self._trained)
        self._tensors = dict(policy.named_model_tensors())
        self._has_adapters = bool(policy.adapter_weights())
        self._committed, self._exported = policy.committed_weights(), policy.exported_weights()
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
            self._sums.take()
            totals.add(loss, sums)
        self._sums.give(self._masters)
        return totals.on_host()

    def _step(self, rate: float, loss: float, number: int) -> float:
        bad = bool(self._guard.take()) or loss != loss or abs(loss) == float("inf")
        if bad:
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingDiverged(
                f"optimizer step {number} after version {self.policy_version}: loss {loss} or a gradient is not "
                "finite; weights and optimizer are as before the step. Lower trainer.optim.lr, or look at the rewards "
                "and advantages of this step in rollouts/"
            )
        limit = self._optim.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self._masters, float("inf") if limit is None else limit)
        set_rates(self._optimizer.param_groups, self._optim, rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._average is not None:
            self._average.follow(self._masters)
        if self._masters is not self._trained:
            with torch.no_grad():
                for master, parameter in zip(self._masters, self._trained, strict=True):
                    parameter.copy_(master)
        return norm.item()

    def logprobs(self, plan: Plan, sampling: Sampling | None = None) -> dict[int, Tensor]:
        """Log-probs of the action tokens of every sequence, by its index in the plan; no gradient.

        Args: sampling: the distribution; the objective's where not given.
        """
        return scoring_pass(self.policy, sampling or self._objective.sampling, plan, range(plan.num_ranks))

    def evaluate(self, plan: Plan) -> dict[str, Ratio]:
        """The objective over a plan without a gradient: its metrics, and "loss", (sum of the weighted losses, 1)."""
        loss, metrics = evaluation_pass(self.policy, self._objective, plan, range(plan.num_ranks))
        return {**metrics, "loss": Ratio(loss, 1.0)}

    # --------------------------------------------------------------------------------------------------------- weights
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the model, see ``PackedModel.committed_weights``."""
        return tuple(weight.spec for weight in self._committed.values())

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """These tensors, whole, on the device; the model's own memory where no adapter is added in."""
        yield {name: self._committed[name].value() for name in names}

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the policy's parameters under the names of the Hugging Face model, adapters added in."""
        yield from ((name, weight.value()) for name, weight in self._exported.items())

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Matrices of the adapters under peft's names; nothing where there are none."""
        yield from ((name, weight.value()) for name, weight in self.policy.adapter_weights().items())

    def ema_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As ``parameters``, with the averages in place of what is trained."""
        assert self._average is not None, "built without ema"
        assert not self._offload.is_away, AWAY
        held = {id(p): a for p, a in zip(self._trained, self._average.averages, strict=True)}
        yield from averaged(self._exported, lambda part: held.get(id(part)))

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
            "optimizer": state if self._average is None else [*state, *self._average.averages],
            "masters": [m.detach() for m in self._masters] if self._masters is not self._trained else [],
        }

    # ----------------------------------------------------------------------------------------------------- checkpoints
    def save(self, directory: Path) -> None:
        """Weights, masters, optimizer, version; and the average."""
        assert not self._offload.is_away, AWAY
        if self._average is not None:
            self._average.save(directory / EMA_FILE)
        state = {
            "policy": self._state_dict(),
            "masters": [m.detach() for m in self._masters] if self._masters is not self._trained else None,
            "optimizer": self._optimizer.state_dict(),
            "policy_version": self.policy_version,
        }
        torch.save(state, directory / "single.pt")

    def load(self, directory: Path) -> None:
        """What ``save`` wrote."""
        assert not self._offload.is_away, AWAY
        if self._average is not None:
            self._average.load(directory / EMA_FILE)
        state = torch.load(directory / "single.pt", map_location=self.policy.device, weights_only=True)
        wanted = self._state_dict().keys()
        if wanted != state["policy"].keys():
            odd = sorted(wanted ^ state["policy"].keys())
            raise CheckpointError(
                f"{directory} is of another model: {odd[0]} is in one and not in the other ({len(odd)} such names). "
                "Resume with the model section that it was saved with"
            )
        self.policy.load_state_dict(state["policy"], strict=not self._has_adapters)
        if state["masters"] is not None:
            with torch.no_grad():
                for master, saved in zip(self._masters, state["masters"], strict=True):
                    master.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.policy_version = state["policy_version"]

    def _state_dict(self) -> dict[str, Tensor]:
        state = self.policy.state_dict()
        if not self._has_adapters:
            return state
        return {name: state[name] for name, p in self.policy.named_parameters() if p.requires_grad}


class StepTotals:
    """Loss and metric sums of one optimizer step. They stay on the device until its last micro-batch is under way: to
    read one waits for all that the device has been given.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._sums: list[Sums] = []

    def add(self, loss: Tensor, sums: Sums) -> None:
        """One micro-batch; a dummy adds zeros."""
        self._losses.append(loss.detach())
        self._sums.append(sums)

    def on_host(self) -> tuple[float, dict[str, Ratio]]:
        """(sum of the losses, metrics), in the order of the micro-batches."""
        total = 0.0
        for loss in self._losses:  # not sum(), which rounds otherwise from Python 3.12 on
            total += loss.item()
        return total, sum_ratios([as_ratios(sums) for sums in self._sums])


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
def evaluation_pass(
    model: PackedCall, objective: Objective, plan: Plan, ranks: Iterable[int]
) -> tuple[float, dict[str, Ratio]]:
    """(sum of the weighted losses, metrics) of the micro-batches of the given ranks, dummies included."""
    device = next(model.parameters()).device
    mine, totals = list(ranks), StepTotals()
    for step in plan.steps:
        if step.is_empty:
            continue
        for micro_batch in (m for r in mine for m in step.ranks[r]):
            row, streams = make_row(plan, micro_batch, device)
            totals.add(*micro_batch_loss(objective, model(row, objective.sampling), streams))
    return totals.on_host()


@torch.no_grad()
def averaged(
    weights: Mapping[str, NamedWeight], average_of: Callable[[Tensor], Tensor | None]
) -> Iterator[tuple[str, Tensor]]:
    """Weights made of averages, in the type of the weights.

    Args: average_of: the average of a trained part, whole; None for what is not trained.
    """
    for name, weight in weights.items():
        parts: dict[str, Tensor] = {}
        for field in ("base", "a", "b"):
            part: Tensor | None = getattr(weight, field)
            average = None if part is None else average_of(part)
            if part is not None and average is not None:
                parts[field] = average.to(part.dtype)
        yield name, replace(weight, **parts).value()


@torch.no_grad()
def scoring_pass(policy: PackedCall, sampling: Sampling, plan: Plan, ranks: Iterable[int]) -> dict[int, Tensor]:
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
