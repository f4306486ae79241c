"""Everything in the driver's process: no Ray, no other rank; for debuggers, notebooks and tests."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from skirl.records import CommitReport, Plan, Ratio, Role, Sampling, UpdateReport
from skirl.runtime.worker import Worker
from skirl.runtime.workers import ThreadedEngine, commit_metrics, merge_logprobs

__all__ = ["LocalWorkers"]


class LocalWorkers:
    """One worker that runs plans made for any number of ranks, one rank after another."""

    def __init__(self, worker: Worker, *, num_ranks: int, batch_size: int) -> None:
        self._worker, self._num_ranks = worker, num_ranks
        self._engines = [ThreadedEngine(worker.generate, batch_size)]

    @property
    def engines(self) -> list[ThreadedEngine]:
        """One engine, in this process."""
        return self._engines

    @property
    def num_ranks(self) -> int:
        """Ranks a plan is made for."""
        return self._num_ranks

    def logprobs(self, plan: Plan, role: Role, sampling: Sampling | None = None) -> list[np.ndarray]:
        """Per sequence [T] float32."""
        return merge_logprobs(plan, [self._worker.logprobs(plan, role, range(plan.num_ranks), sampling)])

    def update(self, plan: Plan, consumed_prompts: int) -> UpdateReport:
        """Runs the plan."""
        return self._worker.update(plan, consumed_prompts)

    def commit(self, version: int) -> Mapping[str, Ratio]:
        """Brings the weights to the sampler."""
        self._worker.commit(version)
        return commit_metrics(CommitReport(version))

    def describe(self) -> str:
        """What the worker holds: the trainable parameters by role."""
        return self._worker.description

    def policy_version(self) -> int:
        """Updates done so far."""
        return self._worker.policy_version()

    def invalidate_caches(self) -> None:
        """The policy's own sampler keeps none between calls."""

    def send_all_weights(self) -> None:
        """The sampler reads the trainer's weights, or a copy that each commit makes whole."""
        self._worker.commit(self._worker.policy_version())

    def save(self, directory: Path) -> None:
        """Trainer state."""
        self._worker.save(directory)

    def load(self, directory: Path) -> None:
        """What ``save`` wrote."""
        self._worker.load(directory)

    def export(self, directory: Path) -> None:
        """A Hugging Face model directory."""
        self._worker.export(directory, write=True)

    def shutdown(self) -> None:
        """Nothing to give back."""
