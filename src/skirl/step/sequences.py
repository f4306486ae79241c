"""Prompts and responses as training sequences: token ids, action tokens, clips."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from skirl.planning.schedule import scoring_plan
from skirl.protocols import Trainer
from skirl.records import Prompt, Rollout, TrainingSequence

__all__ = ["doubles", "probe_sequence", "rollout_sequence", "score_one", "supervised_sequence", "value_one"]


def doubles(values: npt.ArrayLike) -> torch.Tensor:
    """A copy in float64: what comes from another process may be read-only, which torch cannot share."""
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def probe_sequence(prompt: Prompt, target: Sequence[int], placeholder_id: int | None) -> TrainingSequence:
    """A sequence to compare two copies of a model on: the answer, or the end of the prompt where there is none."""
    sequence = supervised_sequence(prompt, target, placeholder_id)
    if target:
        return sequence
    last = np.arange(max(1, len(prompt.input_ids) - 8), len(prompt.input_ids))
    return replace(sequence, action_positions=last)


def score_one(trainer: Trainer, sequence: TrainingSequence) -> np.ndarray:
    """[T] log-probs of one sequence by the trainer's current weights."""
    plan = scoring_plan([sequence], num_ranks=trainer.num_ranks, max_tokens=sequence.num_tokens)
    return trainer.logprobs(plan, "policy")[0]


def value_one(trainer: Trainer, sequence: TrainingSequence) -> np.ndarray:
    """[T] the critic's values of one sequence by its current weights."""
    plan = scoring_plan([sequence], num_ranks=trainer.num_ranks, max_tokens=sequence.num_tokens)
    return trainer.values(plan)[0]


def rollout_sequence(prompt: Prompt, rollout: Rollout, placeholder_id: int | None) -> TrainingSequence:
    """A rollout as a sequence whose action tokens are its response."""
    ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    return TrainingSequence(
        id=f"{rollout.prompt_id}#{rollout.sample_index}",
        input_ids=ids,
        action_positions=np.arange(len(rollout.prompt_ids), len(ids)),
        media=prompt.media,
        media_spans=_runs(rollout.prompt_ids, placeholder_id),
        rollout_logprobs=rollout.logprobs,
    )


def supervised_sequence(prompt: Prompt, target: Sequence[int], placeholder_id: int | None) -> TrainingSequence:
    """A prompt and its answer, end token included, as a sequence whose action tokens are the answer."""
    prompt_ids = np.asarray(prompt.input_ids, dtype=np.int64)
    ids = np.concatenate([prompt_ids, np.asarray(target, dtype=np.int64)])
    return TrainingSequence(
        id=prompt.id,
        input_ids=ids,
        action_positions=np.arange(len(prompt_ids), len(ids)),
        media=prompt.media,
        media_spans=_runs(prompt_ids, placeholder_id),
    )


def _runs(prompt_ids: np.ndarray, placeholder_id: int | None) -> tuple[tuple[int, int], ...]:
    """(start, length) of each run of placeholders; only the prompt is searched."""
    if placeholder_id is None:
        return ()
    inside = np.concatenate([[0], (prompt_ids == placeholder_id).astype(np.int8), [0]])
    edges = np.flatnonzero(np.diff(inside))
    return tuple((int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True))
