"""Everything in the driver's process: no Ray, no other rank; for debuggers, notebooks and tests."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from skirl.records import CommitReport, Plan, Ratio, RewardText, Role, Sampling, ScoreFailure, UpdateReport
from skirl.runtime.worker import Worker
from skirl.runtime.workers import ThreadedEngine, commit_metrics, merge_sequences, merge_updates

__all__ = ["LocalWorkers"]


class LocalWorkers:
    """One worker that runs plans made for any number of ranks, one rank after another."""

    def __init__(self, worker: Worker, *, num_ranks: int, batch_size: int) -> None:
        self._worker, self._num_ranks = worker, num_ranks
        self._engines = [ThreadedEngine(worker.generate, batch_size)]
        self._scoring = threading.Lock()

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
        return merge_sequences(plan, [self._worker.logprobs(plan, role, range(plan.num_ranks), sampling)])

    def values(self, plan: Plan) -> list[np.ndarray]:
        """The critic's, per sequence [T] float32."""
        return merge_sequences(plan, [self._worker.values(plan)])

    def update(self, plan: Plan, consumed_prompts: int, roles: Sequence[Role] = ("policy",)) -> UpdateReport:
        """Runs the plan for each role, one after the other."""
        shares = self._worker.update(plan, consumed_prompts, roles)
        return merge_updates([shares], self._worker.policy_version())

    def evaluate(self, plan: Plan) -> Mapping[str, Ratio]:
        """The objective over a plan, without a gradient."""
        return self._worker.evaluate(plan)

    def reward_scores(self, name: str, texts: Sequence[RewardText]) -> list[float | ScoreFailure]:
        """Raw scores by a reward model in this process; one call at a time, whatever thread it comes from."""
        with self._scoring:
            return self._worker.reward_scores(name, texts)

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

    def export(self, directory: Path, role: Role = "policy") -> None:
        """A Hugging Face model directory."""
        self._worker.export(directory, role, write=True)

    def shutdown(self) -> None:
        """Nothing to give back."""
