"""The ranks together, as the loop sees them: what local and Ray groups share."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from skirl.protocols import RolloutEngine, Trainer, WeightCommit
from skirl.records import Plan, Request, Rollout, UpdateReport, sum_ratios

__all__ = ["Workers", "merge_logprobs", "merge_reports"]


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

    def shutdown(self) -> None:
        """Ends the processes and gives everything back; harmless to repeat."""
        ...


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
    """A rollout engine around a call that blocks, so that scoring goes on meanwhile."""

    def __init__(self, call: "GenerateCall", batch_size: int) -> None:
        self._call, self._batch_size = call, batch_size

    @property
    def batch_size(self) -> int:
        """Responses it wants at once."""
        return self._batch_size

    async def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout a request, in order."""
        return await asyncio.to_thread(self._call, requests)


class GenerateCall(Protocol):
    """A blocking generate."""

    def __call__(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout a request."""
        ...
