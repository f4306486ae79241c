"""One step's prompts to scored groups: sampled and scored together, counted in the ledger, failures settled."""

import time
from collections import defaultdict
from collections.abc import Sequence

from skirl.config.schema import RewardConfig
from skirl.errors import RewardError
from skirl.protocols import Collected, Record
from skirl.records import Prompt, Rollout, Sampling
from skirl.rewards.policy import apply_failures
from skirl.rollouts.router import Router
from skirl.tracking.ledger import Ledger, rollout_key
from skirl.tracking.tracker import Tracker

__all__ = ["StepCollector"]


class StepCollector:
    """Samples ``group_size`` responses a prompt, scores them, and drops what has no score by the run's rules."""

    def __init__(
        self,
        router: Router,
        ledger: Ledger,
        tracker: Tracker,
        reward: RewardConfig,
        *,
        record: Record,
        sampling: Sampling,
        group_size: int,
    ) -> None:
        self._record = record
        self._router, self._ledger, self._tracker, self._reward = router, ledger, tracker, reward
        self._sampling, self._group_size = sampling, group_size

    def __call__(self, step: int, prompts: Sequence[Prompt]) -> Collected:
        """Raises RewardError where more failed than the run allows, or nothing is left."""
        start = time.perf_counter()
        self._ledger.issue(rollout_key(step, p.id, i) for p in prompts for i in range(self._group_size))
        with self._tracker.phase("sample", total=len(prompts) * self._group_size, unit="rollouts") as bar:

            def advance(rollout: Rollout) -> None:
                bar.advance(tokens=len(rollout.response_ids))

            scored = self._router.collect(f"step {step}", prompts, self._sampling, self._group_size, advance)
        try:
            kept = apply_failures(scored, self._reward)
        except RewardError:
            self._record(step + 1, scored, ())  # what was sampled is there to look at
            raise
        lost: dict[str, list[str]] = defaultdict(list)
        for gone in kept.dropped:
            lost[gone.reason].append(rollout_key(step, gone.prompt_id, gone.sample_index))
        for reason, keys in lost.items():
            self._ledger.dropped(keys, reason)
        if not kept.groups:
            raise RewardError(f"step {step}: no rollout has a score, so there is nothing to train on")
        return Collected(step, scored, kept.groups, time.perf_counter() - start)
