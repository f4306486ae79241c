"""Samples and groups made by hand: to test a reward file without a model, and for our own tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from skirl.records import FinishReason, Group, Prompt, RewardSample, Rollout, Sampling

__all__ = ["make_group", "make_sample", "to_samples"]


def make_sample(
    transcript: str,
    reference: str | None = None,
    *,
    language: str | None = "English",
    reference_language: str | None = "English",
    seconds: float = 2.0,
    finish_reason: FinishReason = "stop",
    row: Mapping[str, Any] | None = None,
    sample_id: str = "made/0",
    index: int = 0,
    messages: Sequence[Mapping[str, str]] = (),
    num_turns: int = 1,
    scores: Mapping[str, float] | None = None,
) -> RewardSample:
    """What a reward function sees, with everything but the texts filled in.

    Args:
        transcript: the parsed answer; the raw text is the same.
        reference: the reference text.
        language, reference_language: the tag that the policy wrote, and the right one.
        seconds: audio length.
        finish_reason: how the response ended.
        row: further columns of the data row.
        sample_id, index: the sample's key.
        messages: chat turns before the response.
        num_turns: turns of the response.
        scores: what services and reward models gave.
    """
    return RewardSample(
        id=sample_id,
        index=index,
        text=transcript,
        transcript=transcript,
        language=language,
        response_ids=tuple(transcript.encode()),
        finish_reason=finish_reason,
        reference=reference,
        reference_language=reference_language,
        seconds=seconds,
        row={"text": reference, **(row or {})},
        messages=tuple(messages),
        num_turns=num_turns,
        scores=dict(scores or {}),
    )


def make_group(
    texts: Sequence[str],
    reference: str | None = None,
    *,
    prompt_id: str = "made/0",
    row: Mapping[str, Any] | None = None,
    num_turns: int = 1,
) -> Group:
    """A group of rollouts with the given texts; ids and log-probs are of no meaning.

    Args:
        texts: the responses. reference: the reference text. prompt_id: the group's key.
        row: further columns of the data row.
        num_turns: turns of each response, of one token each.
    """
    row = {"text": reference, "language": "English", **(row or {})}
    prompt = Prompt(prompt_id, "made", (1,), (1,), (), reference, "English", None, row, 2.0)
    zeros = np.zeros(num_turns, dtype=np.int64)
    ends = tuple(range(1, num_turns + 1))
    rollouts = tuple(
        Rollout(prompt_id, index, zeros, zeros, zeros.astype(np.float32), zeros, "stop", text, ends)
        for index, text in enumerate(texts)
    )
    return Group(prompt, rollouts, Sampling())


def to_samples(group: Group) -> list[RewardSample]:
    """Samples of a group whose texts carry no tags."""
    return [
        make_sample(
            rollout.text,
            group.prompt.reference,
            finish_reason=rollout.finish_reason,
            seconds=group.prompt.seconds,
            row=group.prompt.row,
            sample_id=group.prompt.id,
            index=rollout.sample_index,
            messages=group.prompt.row.get("messages", ()),
            num_turns=len(rollout.turn_ends),
        )
        for rollout in group.rollouts
    ]
