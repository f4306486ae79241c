"""Between scores and plan: scored groups become training sequences with every stream that the method needs.

scored groups -> failures dropped -> reference and old log-probs -> (KL off the score) -> advantages -> sequences
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from skirl.algorithms.advantages import group_mean, group_norm
from skirl.algorithms.kl import kl_k1, kl_k2, kl_k3
from skirl.config.method import GroupNorm, KLConfig, MethodConfig
from skirl.planning.schedule import make_plan
from skirl.protocols import Trainer
from skirl.records import Plan, Prompt, Rollout, ScoredGroup, TrainingSequence

__all__ = ["Batch", "Method", "probe_sequence", "score_one", "supervised_sequence"]

KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


@dataclass(frozen=True)
class Batch:
    """What a step trains on: one sequence a kept rollout, and the group (prompt id) of each."""

    sequences: tuple[TrainingSequence, ...]
    group_of: tuple[str, ...]


class Method:
    """The algorithm's host side: log-probs that it needs beforehand, and advantages.

    Args:
        config: the complete method.
        placeholder_id: token id of audio placeholders; None for text models.
        max_scoring_tokens: cap of a micro-batch in passes without gradient.
    """

    def __init__(self, config: MethodConfig, *, placeholder_id: int | None, max_scoring_tokens: int) -> None:
        self.config = config
        self._placeholder_id, self._max_scoring_tokens = placeholder_id, max_scoring_tokens

    def prepare(self, kept: Sequence[ScoredGroup], trainer: Trainer) -> Batch:
        """Training sequences of groups in which every rollout has a score."""
        pairs = [(g, r) for g in kept for r in g.group.rollouts]
        sequences = [rollout_sequence(g.group.prompt, r, self._placeholder_id) for g, r in pairs]
        if self.config.kl is not None:
            sequences = self._with_logprobs(sequences, trainer, "reference_logprobs")
        if self.config.epochs * self.config.mini_batches > 1:
            sequences = self._with_logprobs(sequences, trainer, "old_logprobs")
        done: list[TrainingSequence] = []
        for group in kept:
            members = sequences[len(done) : len(done) + len(group.scores)]
            advantages = self._advantages(group, members)
            done += [replace(s, advantages=np.full(s.num_actions, a)) for s, a in zip(members, advantages, strict=True)]
        return Batch(tuple(done), tuple(g.group.prompt.id for g, _ in pairs))

    def plan(self, batch: Batch, *, num_ranks: int, max_tokens: int) -> Plan:
        """The schedule of a batch under this method's normaliser."""
        normalizer = self.config.normalizer
        return make_plan(
            batch.sequences,
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            normalizer=normalizer.kind,
            constant_length=normalizer.length if normalizer.kind == "constant" else None,
            mini_batches=self.config.mini_batches,
            group_of=batch.group_of,
            epochs=self.config.epochs,
        )

    def _with_logprobs(
        self, sequences: list[TrainingSequence], trainer: Trainer, stream: str
    ) -> list[TrainingSequence]:
        plan = make_plan(
            sequences, num_ranks=trainer.num_ranks, max_tokens=self._max_scoring_tokens, normalizer="token"
        )
        found = trainer.logprobs(plan, "reference" if stream == "reference_logprobs" else "policy")
        return [replace(s, **{stream: values}) for s, values in zip(sequences, found, strict=True)]

    def _advantages(self, group: ScoredGroup, sequences: Sequence[TrainingSequence]) -> list[float]:
        scores = [float("nan") if s.total is None else s.total for s in group.scores]
        if self.config.kl is not None and self.config.kl.where == "reward":
            scores = [r - kl_penalty(s, self.config.kl) for r, s in zip(scores, sequences, strict=True)]
        values = torch.tensor(scores, dtype=torch.float64)
        how = self.config.advantage
        if isinstance(how, GroupNorm):
            return group_norm(values, eps=how.eps, ddof=how.ddof, tolerance=how.tolerance).tolist()
        return group_mean(values, tolerance=how.tolerance).tolist()


def probe_sequence(prompt: Prompt, target: Sequence[int], placeholder_id: int | None) -> TrainingSequence:
    """A sequence to compare two copies of a model on: the answer, or the end of the prompt where there is none."""
    sequence = supervised_sequence(prompt, target, placeholder_id)
    if target:
        return sequence
    last = np.arange(max(1, len(prompt.input_ids) - 8), len(prompt.input_ids))
    return replace(sequence, action_positions=last)


def score_one(trainer: Trainer, sequence: TrainingSequence) -> np.ndarray:
    """[T] log-probs of one sequence by the trainer's current weights."""
    plan = make_plan([sequence], num_ranks=trainer.num_ranks, max_tokens=sequence.num_tokens, normalizer="token")
    return trainer.logprobs(plan, "policy")[0]


def kl_penalty(sequence: TrainingSequence, config: KLConfig) -> float:
    """coef * sum over the response of k(policy when sampled, reference), for KL in the reward; float64."""
    assert sequence.rollout_logprobs is not None
    assert sequence.reference_logprobs is not None
    policy = torch.from_numpy(sequence.rollout_logprobs).double()
    reference = torch.from_numpy(sequence.reference_logprobs).double()
    return config.coef * float(KL_ESTIMATORS[config.estimator](policy, reference).sum())


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
