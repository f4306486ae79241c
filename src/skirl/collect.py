"""One step's groups: prompts taken, sampled and scored together, counted in the ledger, failures settled.

take prompts -> sample and score -> drop what has no score -> (drop groups without signal, and go on with new prompts)
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from skirl.config.algorithms import DynamicSamplingConfig, MeanRange, Spread
from skirl.config.rewards import RewardConfig
from skirl.errors import RewardError
from skirl.protocols import Collected, PromptSource, Record
from skirl.records import Prompt, Ratio, Rollout, Sampling, ScoredGroup
from skirl.rewards.combine import without_spread
from skirl.rewards.policy import apply_failures
from skirl.rollouts.router import Router
from skirl.tracking.ledger import Ledger, rollout_key
from skirl.tracking.tracker import Tracker

__all__ = ["StepCollector", "has_signal"]


@dataclass
class _Step:
    """What a step has so far. Prompt ids are unique in it."""

    scored: list[ScoredGroup] = field(default_factory=list[ScoredGroup])
    kept: list[ScoredGroup] = field(default_factory=list[ScoredGroup])
    seen: set[str] = field(default_factory=set[str])
    rounds: int = 0
    without_signal: int = 0
    reward_wait_s: float = 0.0


class StepCollector:
    """Samples ``group_size`` responses a prompt, scores them, and drops what has no score by the run's rules.

    With dynamic sampling, groups without signal are dropped too, and each further round takes exactly as many prompts
    as groups are missing: none that was accepted is ever left over.
    """

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
        dynamic: DynamicSamplingConfig | None = None,
        reward_metrics: Callable[[], Mapping[str, Ratio]] = dict,
    ) -> None:
        self._record, self._reward_metrics = record, reward_metrics
        self._router, self._ledger, self._tracker, self._reward = router, ledger, tracker, reward
        self._sampling, self._group_size, self._dynamic = sampling, group_size, dynamic

    def __call__(self, step: int, source: PromptSource, num_groups: int) -> Collected:
        """Raises RewardError where more failed than the run allows, or nothing is left."""
        start = time.perf_counter()
        found = _Step()
        while found.rounds < (1 if self._dynamic is None else self._dynamic.max_rounds):
            prompts = _told_apart(source.take(num_groups - len(found.kept)), found)
            new = self._sample(step, found, prompts)
            found.rounds += 1
            found.scored += new
            self._settle(step, found, {p.id for p in prompts})
            if len(found.kept) == num_groups:
                break
        if not found.kept:
            self._record(step + 1, found.scored, ())
            raise RewardError(self._nothing_left(step, found))
        seconds = time.perf_counter() - start
        metrics = {"time/reward_wait_s": Ratio(found.reward_wait_s, 1), **self._reward_metrics()}
        return Collected(step, found.scored, found.kept, seconds, found.rounds, found.without_signal, metrics)

    def _sample(self, step: int, found: _Step, prompts: Sequence[Prompt]) -> list[ScoredGroup]:
        last = time.perf_counter()
        self._ledger.issue(rollout_key(step, p.id, i) for p in prompts for i in range(self._group_size))
        with self._tracker.phase("sample", total=len(prompts) * self._group_size, unit="rollouts") as bar:

            def advance(rollout: Rollout) -> None:
                nonlocal last
                last = time.perf_counter()
                bar.advance(tokens=len(rollout.response_ids))

            key = f"step {step}" if found.rounds == 0 else f"step {step} round {found.rounds}"
            scored = self._router.collect(key, prompts, self._sampling, self._group_size, advance)
        found.reward_wait_s += time.perf_counter() - last
        return scored

    def _settle(self, step: int, found: _Step, new: set[str]) -> None:
        """Of the groups that are new: what is dropped, with the reason, and what is kept.

        The share of failures is judged over all of the step, so that a late round of few groups does not end the run.
        """
        try:
            settled = apply_failures(found.scored, self._reward)
        except RewardError:
            self._record(step + 1, found.scored, ())  # what was sampled is there to look at
            raise
        lost: dict[str, list[str]] = defaultdict(list)
        for gone in settled.dropped:
            if gone.prompt_id in new:
                lost[gone.reason].append(rollout_key(step, gone.prompt_id, gone.sample_index))
        for group in settled.groups:
            if group.group.prompt.id not in new:
                continue
            if self._dynamic is None or has_signal(group, self._dynamic.keep):
                found.kept.append(group)
                continue
            found.without_signal += 1
            lost["no_signal"] += _keys(step, group.group.rollouts)
        for reason, keys in lost.items():
            self._ledger.dropped(keys, reason)

    def _nothing_left(self, step: int, found: _Step) -> str:
        if not found.without_signal:
            return f"step {step}: no rollout has a score, so there is nothing to train on"
        assert self._dynamic is not None
        means = [np.mean(_totals(g)) for g in found.scored if _totals(g)]
        rule = self._dynamic.keep
        return (
            f"step {step}: in {found.rounds} rounds (method.dynamic_sampling.max_rounds) of {len(found.scored)} groups "
            f"in all, none has signal by method.dynamic_sampling.keep = {rule.kind} ({_said(rule)}); the groups' mean "
            f"scores go from {min(means):g} to {max(means):g}. The prompts are too easy or too hard for this policy, "
            "or the rule does not fit the reward: raise max_rounds, mix in other prompts, or change the rule."
        )


def has_signal(group: ScoredGroup, rule: MeanRange | Spread) -> bool:
    """Whether a group is trained on under dynamic sampling, by its raw scores.

    mean_range: low < mean < high; spread: the standard deviation (1/G) is above min_std, and the scores are not equal
    up to rounding.
    """
    totals = _totals(group)
    scores = np.asarray(totals, dtype=np.float64)
    if isinstance(rule, MeanRange):
        return bool(rule.low < scores.mean() < rule.high)
    return not without_spread(totals) and bool(scores.std() > rule.min_std)


def _totals(group: ScoredGroup) -> list[float]:
    return [s.total for s in group.scores if s.total is not None]


def _said(rule: MeanRange | Spread) -> str:
    return f"{rule.low:g} to {rule.high:g}" if isinstance(rule, MeanRange) else f"min_std {rule.min_std:g}"


def _keys(step: int, rollouts: Iterable[Rollout]) -> list[str]:
    return [rollout_key(step, r.prompt_id, r.sample_index) for r in rollouts]


def _told_apart(prompts: Sequence[Prompt], found: _Step) -> list[Prompt]:
    """Prompts under ids that are unique in the step: one that comes back in a later round, because the data's end was
    reached, is another group with seeds of its own.
    """
    result: list[Prompt] = []
    for prompt in prompts:
        again = prompt.id in found.seen
        result.append(replace(prompt, id=f"{prompt.id} (round {found.rounds + 1})") if again else prompt)
        found.seen.add(prompt.id)
    return result
