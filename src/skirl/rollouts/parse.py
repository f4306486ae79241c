"""Rollouts as rewards and evaluation see them: the family's parser applied to the raw text."""

from collections.abc import Callable

from skirl.models.family import Family
from skirl.records import Group, RewardSample

__all__ = ["sample_maker"]


def sample_maker(family: Family, *, forced: bool) -> Callable[[Group], list[RewardSample]]:
    """A function from a group to its samples, in order.

    Args: forced: the prompt fixes the language, so the answer holds no tag.
    """

    def to_samples(group: Group) -> list[RewardSample]:
        prompt = group.prompt
        language = prompt.language if forced else None
        answers = [family.parse(r.text, forced_language=language) for r in group.rollouts]
        return [
            RewardSample(
                id=prompt.id,
                index=rollout.sample_index,
                text=rollout.text,
                transcript=answer.transcript,
                language=answer.language,
                response_ids=tuple(rollout.response_ids.tolist()),
                finish_reason=rollout.finish_reason,
                reference=prompt.reference,
                reference_language=prompt.language,
                seconds=prompt.seconds,
                row=prompt.row,
                messages=() if prompt.media else tuple(prompt.row.get("messages") or ()),
                num_turns=max(len(rollout.turn_ends), 1),
            )
            for rollout, answer in zip(group.rollouts, answers, strict=True)
        ]

    return to_samples
