"""What samples without a score do to a run: dropped and counted, or the end of it. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from skirl.config.schema import RewardConfig
from skirl.errors import RewardError
from skirl.records import Score, ScoredGroup, ScoreFailure

__all__ = ["Dropped", "Kept", "apply_failures"]

DropReason = Literal["reward_failed", "sibling_failed"]


@dataclass(frozen=True, slots=True)
class Dropped:
    """One rollout that is not trained on, for the ledger.

    Attributes:
        prompt_id, sample_index: which rollout.
        reason: "reward_failed" (it has no score), or "sibling_failed" (its group was dropped whole).
    """

    prompt_id: str
    sample_index: int
    reason: DropReason


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of a step: groups in which every rollout has a score, and what was dropped."""

    groups: list[ScoredGroup]
    dropped: list[Dropped]


def apply_failures(scored: Sequence[ScoredGroup], config: RewardConfig) -> Kept:
    """Applies ``reward.on_failure`` and ``reward.max_failure_rate`` to the groups of one step.

    Returns:
        The groups without failed samples, in order; a group in which nothing is left is gone. Every rollout given is
        either in ``groups`` or in ``dropped``, once.

    Raises:
        RewardError: a sample failed and ``on_failure`` is "stop", or the share of failed samples of this step is above
            ``max_failure_rate``.
    """
    failed = [
        (f"{group.group.prompt.id}#{rollout.sample_index}", score.failure)
        for group in scored
        for rollout, score in zip(group.group.rollouts, group.scores, strict=True)
        if score.failure is not None
    ]
    num_samples = sum(len(group.scores) for group in scored)
    if failed and config.on_failure == "stop":
        raise RewardError(
            f"reward.on_failure is stop, and {len(failed)} of {num_samples} samples have no score.\n{_report(failed)}\n"
            "Fix the cause, or set reward.on_failure to drop_sample or drop_group."
        )
    if failed and len(failed) / num_samples > config.max_failure_rate:
        raise RewardError(
            f"{len(failed)} of {num_samples} samples of this step have no score: {len(failed) / num_samples:.1%}, "
            f"above reward.max_failure_rate = {config.max_failure_rate:g}.\n{_report(failed)}\n"
            "Fix the cause, or set reward.retries or a higher reward.max_failure_rate."
        )
    kept: list[ScoredGroup] = []
    dropped: list[Dropped] = []
    for group in scored:
        rest, gone = _split(group, drop_group=config.on_failure == "drop_group")
        dropped += gone
        if rest.scores:
            kept.append(rest)
    return Kept(kept, dropped)


def _split(group: ScoredGroup, *, drop_group: bool) -> tuple[ScoredGroup, list[Dropped]]:
    """What stays of one group, and what goes."""
    pairs = list(zip(group.group.rollouts, group.scores, strict=True))
    whole = drop_group and any(score.failure is not None for _, score in pairs)
    stay = [] if whole else [(rollout, score) for rollout, score in pairs if score.failure is None]
    gone = [
        Dropped(rollout.prompt_id, rollout.sample_index, "reward_failed" if score.failure else "sibling_failed")
        for rollout, score in pairs
        if whole or score.failure is not None
    ]
    if not gone:
        return group, gone
    rollouts = tuple(rollout for rollout, _ in stay)
    scores: tuple[Score, ...] = tuple(score for _, score in stay)
    return ScoredGroup(replace(group.group, rollouts=rollouts), scores), gone


def _report(failed: Sequence[tuple[str, ScoreFailure]]) -> str:
    """Counts by kind, and the commonest failure in full."""
    kinds = Counter(failure.kind for _, failure in failed)
    (kind, message), count = Counter((failure.kind, failure.message) for _, failure in failed).most_common(1)[0]
    name, example = next((name, f) for name, f in failed if (f.kind, f.message) == (kind, message))
    lines = [
        "Failures: " + ", ".join(f"{number} {kind}" for kind, number in kinds.most_common()) + ".",
        f"Commonest ({count} of {len(failed)}), for example sample {name}: {kind}: {message}",
    ]
    if example.detail:
        lines += ["  " + line for line in example.detail.splitlines()]
    return "\n".join(lines)
