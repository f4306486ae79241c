"""The ranks together, as the loop sees them: what local and Ray groups share."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from skirl.protocols import RolloutEngine, Trainer, WeightCommit
from skirl.records import CommitReport, Plan, Ratio, Request, Rollout, TensorSpec, UpdateReport, sum_ratios

if TYPE_CHECKING:
    from skirl.rollouts.engines.vllm import EngineSpec

__all__ = ["EngineSetup", "Workers", "commit_metrics", "merge_logprobs", "merge_reports"]


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


class Workers(Trainer, WeightCommit, Protocol):
    """All training ranks of a run, with the engines that sample in them."""

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


def merge_logprobs(plan: Plan, shares: Sequence[Mapping[int, np.ndarray]]) -> list[np.ndarray]:
    """Log-probs of every sequence, in the order of the plan."""
    found = {i: values for share in shares for i, values in share.items()}
    assert len(found) == len(plan.sequences), "every sequence is scored exactly once"
    return [found[i] for i in range(len(plan.sequences))]


class ThreadedEngine:
    """A rollout engine around a call that blocks, so that scoring goes on meanwhile.

    What it wraps has no scheduler: a batch's responses come together, when the last of them has ended.
    """

    def __init__(self, call: "GenerateCall", batch_size: int) -> None:
        self._call, self._batch_size = call, batch_size

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
        for rollout in await asyncio.to_thread(self._call, requests):
            yield rollout


class GenerateCall(Protocol):
    """A blocking generate."""

    def __call__(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout a request."""
        ...
