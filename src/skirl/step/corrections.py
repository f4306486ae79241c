"""The gap between engine and trainer, and tokens that clip-cov and kl-cov treat apart."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skirl.algorithms.corrections import icepop, sequence_is, sequence_mask, tis
from skirl.algorithms.kl import clamped
from skirl.algorithms.losses import clip_cov_selection, covariance, kl_cov_selection
from skirl.config.algorithms import Correction, PolicyLoss
from skirl.records import Plan, Ratio, TrainingSequence
from skirl.step.sequences import doubles

__all__ = ["CORRECTIONS", "SELECTIONS", "corrected", "with_selection"]

Corrected = tuple[Tensor, Tensor]

CORRECTIONS: Mapping[str, Callable[[Tensor, Any], Corrected]] = {
    "tis": lambda gap, how: tis(gap, low=how.low, high=how.high),
    "icepop": lambda gap, how: icepop(gap, low=how.low, high=how.high),
    "sequence_mask": lambda gap, how: sequence_mask(gap, low=how.low, high=how.high, cap=how.cap),
    "sequence_is": lambda gap, how: sequence_is(gap, cap=how.cap),
}
"""Kind -> (log pi_old(trainer) - log pi(engine) of a response [T], settings) -> (factors [T], cut or masked [T])."""


def corrected(
    sequences: Sequence[TrainingSequence], how: Correction
) -> tuple[list[TrainingSequence], dict[str, Ratio]]:
    """The sequences with factors for the policy loss, and metrics of them."""
    found: list[TrainingSequence] = []
    weight, cut, tokens = 0.0, 0, 0
    for sequence in sequences:
        assert sequence.old_logprobs is not None
        assert sequence.rollout_logprobs is not None
        gap = doubles(sequence.old_logprobs) - doubles(sequence.rollout_logprobs)
        factors, is_cut = CORRECTIONS[how.kind](gap, how)
        found.append(replace(sequence, corrections=factors.clone().numpy()))
        weight += float(clamped(gap).exp().sum())
        cut += int(is_cut.sum())
        tokens += len(gap)
    metrics = {
        "correction/weight_mean": Ratio(weight, tokens),
        "correction/cut_fraction": Ratio(cut, tokens),
    }
    return found, metrics


SELECTIONS: Mapping[str, Callable[[Tensor, Any, int], Tensor]] = {
    "clip_cov": lambda cov, how, seed: clip_cov_selection(
        cov, share=how.share, low=how.cov_low, high=how.cov_high, seed=seed
    ),
    "kl_cov": lambda cov, how, seed: kl_cov_selection(cov, share=how.share),
}
"""Kind of policy loss -> (covariance of each action token of an optimizer step [N], settings, seed) -> selected [N]."""


def with_selection(plan: Plan, loss: PolicyLoss, seed: int) -> Plan:
    """The plan with the tokens marked that clip-cov or kl-cov treats apart; as it is for any other loss.

    They are chosen over the action tokens of each optimizer step. A batch that is used several times keeps its choice.
    """
    if loss.kind not in SELECTIONS:
        return plan
    sequences = list(plan.sequences)
    for number, step in enumerate(plan.steps):
        members = sorted(i for rank in step.ranks for m in rank for i in m.sequences)
        if not members or sequences[members[0]].selected is not None:
            continue
        chosen = SELECTIONS[loss.kind](_covariance([sequences[i] for i in members]), loss, _seed(seed, plan, number))
        ends = np.cumsum([sequences[i].num_actions for i in members])[:-1]
        for i, selected in zip(members, np.split(chosen.numpy(), ends), strict=True):
            sequences[i] = replace(sequences[i], selected=selected)
    return replace(plan, sequences=tuple(sequences))


def _covariance(members: Sequence[TrainingSequence]) -> Tensor:
    logprobs = [s.old_logprobs for s in members if s.old_logprobs is not None]
    advantages = [s.advantages for s in members if s.advantages is not None]
    return covariance(torch.from_numpy(np.concatenate(logprobs)).double(), torch.from_numpy(np.concatenate(advantages)))


def _seed(seed: int, plan: Plan, number: int) -> int:
    """Of the choice in one optimizer step: by the run's seed and what the plan holds, so that a resumed run repeats."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{plan.hash}/{number}".encode()).digest()[:6])
