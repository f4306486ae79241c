"""The ranks together, as the loop sees them: what local and Ray groups share."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from skirl.protocols import RewardModels, RolloutEngine, Trainer, WeightCommit
from skirl.records import CommitReport, Plan, Ratio, Request, Role, Rollout, TensorSpec, UpdateReport, sum_ratios
from skirl.runtime.threads import in_thread

if TYPE_CHECKING:
    from skirl.rollouts.engines.vllm import EngineSpec

__all__ = [
    "EngineSetup",
    "Workers",
    "commit_metrics",
    "merge_reports",
    "merge_sequences",
    "merge_updates",
]


@dataclass(frozen=True)
class EngineSetup:
    """What the engines of a run are made from.

    Attributes:
        spec: of each engine. expected: what a whole commit must bring, by the checkpoint's own headers.
        sleep_level: of engines on shared GPUs while the trainer works.
    """

    spec: "EngineSpec"
    expected: tuple[TensorSpec, ...]
    sleep_level: Literal[1, 2]


class Workers(Trainer, RewardModels, WeightCommit, Protocol):
    """All processes of a run: training ranks, the engines that sample in them or beside them, reward models."""

    @property
    def engines(self) -> Sequence[RolloutEngine]:
        """All hold the weights that were committed last."""
        ...

    def describe(self) -> str:
        """What each rank holds: the trainable parameters by role."""
        ...

    def policy_version(self) -> int:
        """Updates done so far."""
        ...

    def invalidate_caches(self) -> None:
        """Every engine drops what it computed with the weights that it holds."""
        ...

    def send_all_weights(self) -> None:
        """Brings all weights to every engine once more, frozen ones too."""
        ...

    def shutdown(self) -> None:
        """Ends the processes and gives everything back; harmless to repeat."""
        ...


def commit_metrics(report: CommitReport) -> dict[str, Ratio]:
    """commit/* of one weight commit; without bytes where engine and trainer share the weights."""
    metrics = {"commit/version": Ratio(report.version, 1)}
    if report.transport != "none":
        metrics["commit/bytes"] = Ratio(report.num_bytes, 1)
        metrics["commit/gb_per_s"] = Ratio(report.num_bytes / 1e9, report.seconds)
    return metrics


def merge_reports(reports: Sequence[UpdateReport]) -> UpdateReport:
    """Ranks' shares of one update: losses and sums add up, norms and rates are equal, the slowest time counts."""
    first = reports[0]
    losses = tuple(sum(parts) for parts in zip(*(r.losses for r in reports), strict=True))
    return UpdateReport(
        policy_version=first.policy_version,
        losses=losses,
        grad_norms=first.grad_norms,
        learning_rates=first.learning_rates,
        metrics=sum_ratios([r.metrics for r in reports]),
        seconds=max(r.seconds for r in reports),
    )


def merge_updates(shares: Sequence[Mapping[Role, UpdateReport]], version: int) -> UpdateReport:
    """Shares of one update, by role and rank, as one report: the policy's, with the critic's among the metrics.

    Args: version: the policy's; it counts where the policy was not trained.
    """
    by_role: dict[Role, list[UpdateReport]] = {}
    for share in shares:
        for role, report in share.items():
            by_role.setdefault(role, []).append(report)
    merged = {role: merge_reports(reports) for role, reports in by_role.items()}
    policy, critic = merged.get("policy"), merged.get("critic")
    if policy is None:
        policy = UpdateReport(version, (), (), (), {}, 0.0)
    if critic is None:
        return policy
    return replace(
        policy,
        metrics=sum_ratios([policy.metrics, _critic_metrics(critic)]),
        seconds=max(policy.seconds, critic.seconds),
    )


def _critic_metrics(report: UpdateReport) -> dict[str, Ratio]:
    """critic/* of one update. What every model in training reports under policy/* is left to the policy."""
    own = {name: ratio for name, ratio in report.metrics.items() if name.startswith("critic/")}
    if not report.losses:  # a plan without an optimizer step
        return own
    return {
        **own,
        "critic/grad_norm": Ratio(max(report.grad_norms), 1),
        "critic/lr": Ratio(report.learning_rates[-1], 1),
    }


def merge_sequences(plan: Plan, shares: Sequence[Mapping[int, np.ndarray]]) -> list[np.ndarray]:
    """Log-probs or values of every sequence, in the order of the plan."""
    found = {i: values for share in shares for i, values in share.items()}
    assert len(found) == len(plan.sequences), "every sequence is scored exactly once"
    return [found[i] for i in range(len(plan.sequences))]


class ThreadedEngine:
    """A rollout engine around a call that blocks, so that scoring goes on meanwhile.

    What it wraps has no scheduler: a batch's responses come together, when the last of them has ended.

    Args:
        remote: the call waits for another process, so that one that is given up is left alone. Else it computes here,
            and the event loop waits for its end: a thread must not compute while the interpreter ends.
    """

    def __init__(self, call: "GenerateCall", batch_size: int, *, remote: bool = False) -> None:
        self._call, self._batch_size, self._remote = call, batch_size, remote

    @property
    def batch_size(self) -> int:
        """Responses it wants in one call."""
        return self._batch_size

    @property
    def max_in_flight(self) -> int | None:
        """One call at a time."""
        return None

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Rollout]:
        """One rollout a request, in order. A call that is given up still runs to its end, in its thread."""
        call = in_thread if self._remote else asyncio.to_thread
        for rollout in await call(lambda: self._call(requests)):
            yield rollout


class GenerateCall(Protocol):
    """A blocking generate."""

    def __call__(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout a request."""
        ...
