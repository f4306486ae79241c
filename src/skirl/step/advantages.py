"""Scores to advantages, one group at a time, then over the batch: which function each kind of a recipe calls.

Two families. By token: rewards at tokens are summed backwards (with a critic: gae). By response: one number for each
response of a group, given to all of its action tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skirl.algorithms.advantages import (
    decoupled_norm,
    discounted_returns,
    gae,
    group_mean,
    group_norm,
    leave_one_out,
    max_rl,
    optimal_baseline,
    pass_at_k,
    whiten,
    whiten_scores,
)
from skirl.config.algorithms import Advantage
from skirl.errors import RewardError
from skirl.records import Doubles, ScoredGroup, TrainingSequence
from skirl.step.sequences import doubles
from skirl.step.shaping import token_rewards

__all__ = ["BY_RESPONSE", "BY_TOKEN", "Credit", "Member", "credits_of", "whitened"]


@dataclass(frozen=True)
class Member:
    """A group on its way to advantages.

    Attributes:
        group: every rollout has a score. sequences: theirs, with the critic's values where there is a critic.
        scores: [G] shaped. penalties: per sequence [T] what KL in the reward takes off each token; zeros without it.
    """

    group: ScoredGroup
    sequences: Sequence[TrainingSequence]
    scores: Doubles
    penalties: Sequence[Doubles]

    @property
    def penalised(self) -> Tensor:
        """[G] shaped scores without the sum of each response's penalties."""
        return torch.from_numpy(self.scores - np.asarray([p.sum() for p in self.penalties]))


class Credit(NamedTuple):
    """[T] of one sequence: advantages, not whitened, and what the critic is trained towards where there is one."""

    advantages: Doubles
    returns: Doubles | None = None


# ------------------------------------------------------------------------------------------------------------- by token
def _gae(rewards: Tensor, sequence: TrainingSequence, how: Any) -> Credit:
    assert sequence.values is not None
    advantages, returns = gae(rewards, doubles(sequence.values), gamma=how.gamma, lam=how.lam)
    return Credit(advantages.numpy(), returns.numpy())


def _reinforce(rewards: Tensor, sequence: TrainingSequence, how: Any) -> Credit:
    return Credit(discounted_returns(rewards, gamma=how.gamma).numpy())


def _reinforce_pp(rewards: Tensor, sequence: TrainingSequence, how: Any) -> Credit:
    return Credit(discounted_returns(rewards, gamma=1.0).numpy())


BY_TOKEN: Mapping[str, Callable[[Tensor, TrainingSequence, Any], Credit]] = {
    "gae": _gae,
    "reinforce": _reinforce,
    "reinforce_pp": _reinforce_pp,
}
"""Kind -> (rewards [T], sequence, settings) -> credit of that sequence."""


# ---------------------------------------------------------------------------------------------------------- by response
def _group_norm(member: Member, how: Any) -> Tensor:
    return group_norm(member.penalised, eps=how.eps, ddof=how.ddof, tolerance=how.tolerance)


def _group_mean(member: Member, how: Any) -> Tensor:
    return group_mean(member.penalised, tolerance=how.tolerance)


def _leave_one_out(member: Member, how: Any) -> Tensor:
    return leave_one_out(member.penalised, tolerance=how.tolerance)


def _optimal_baseline(member: Member, how: Any) -> Tensor:
    lengths = torch.tensor([s.num_actions for s in member.sequences], dtype=torch.float64)
    return optimal_baseline(member.penalised, lengths, tolerance=how.tolerance)


def _max_rl(member: Member, how: Any) -> Tensor:
    for rollout, score in zip(member.group.group.rollouts, member.scores, strict=True):
        if score < 0:
            raise RewardError(
                f"sample {rollout.prompt_id}#{rollout.sample_index} scored {score:g}, but method.advantage max_rl "
                "divides by the group's mean and needs scores >= 0: shift the reward, clip it "
                "(method.shaping.clip_range), or take another advantage."
            )
    return max_rl(member.penalised, tolerance=how.tolerance)


def _pass_at_k(member: Member, how: Any) -> Tensor:
    right = torch.from_numpy(member.scores >= how.threshold)
    if len(right) <= how.k:  # siblings were lost: a draw of k is the whole group, and adds nothing to tell apart
        return torch.zeros(len(right), dtype=torch.float64)
    return pass_at_k(right, k=how.k)


def _decoupled_norm(member: Member, how: Any) -> Tensor:
    """Parts that some sample of the group lacks count 0 there, as they weigh nothing in its totals."""
    scores = member.group.scores
    names = sorted(set.intersection(*({*s.parts} for s in scores)))
    if not names:
        return torch.zeros(len(scores), dtype=torch.float64)
    parts = torch.tensor([[s.parts[name] for name in names] for s in scores], dtype=torch.float64)
    weights = torch.tensor([how.weights.get(name, 1.0) for name in names], dtype=torch.float64)
    return decoupled_norm(parts, weights, eps=how.eps, ddof=how.ddof, tolerance=how.tolerance)


BY_RESPONSE: Mapping[str, Callable[[Member, Any], Tensor]] = {
    "reinforce_pp_baseline": _group_mean,
    "leave_one_out": _leave_one_out,
    "group_norm": _group_norm,
    "group_mean": _group_mean,
    "max_rl": _max_rl,
    "pass_at_k": _pass_at_k,
    "opo": _optimal_baseline,
    "gdpo": _decoupled_norm,
}
"""Kind -> (group, settings) -> advantage of each of its responses [G]."""


# -------------------------------------------------------------------------------------------------------------- a batch
def credits_of(members: Sequence[Member], how: Advantage) -> list[Credit]:
    """Credit of every sequence of the batch, in order; whitened where the kind says so."""
    if how.kind in BY_TOKEN:
        by_token = BY_TOKEN[how.kind]
        found = [
            by_token(torch.from_numpy(token_rewards(m.group, i, m.scores[i], m.penalties[i])), s, how)
            for m in members
            for i, s in enumerate(m.sequences)
        ]
    else:
        _refuse_turns(members, how.kind)
        values = torch.cat([BY_RESPONSE[how.kind](m, how) for m in members])
        if how.kind == "gdpo":
            values = whiten_scores(values, eps=how.eps, ddof=how.ddof)
        sequences = [s for m in members for s in m.sequences]
        found = [Credit(np.full(s.num_actions, a)) for s, a in zip(sequences, values.tolist(), strict=True)]
    return whitened(found) if _is_whitened(how) else found


def _is_whitened(how: Advantage) -> bool:
    return how.kind in ("reinforce_pp", "reinforce_pp_baseline") or (how.kind == "gae" and how.whiten)


def whitened(found: Sequence[Credit]) -> list[Credit]:
    """Advantages shifted and scaled over all action tokens of the batch; returns stay as they are."""
    ends = np.cumsum([len(c.advantages) for c in found])[:-1]
    tokens = whiten(torch.from_numpy(np.concatenate([c.advantages for c in found])))
    return [c._replace(advantages=a) for c, a in zip(found, np.split(tokens.numpy(), ends), strict=True)]


def _refuse_turns(members: Sequence[Member], kind: str) -> None:
    for member in members:
        for rollout, score in zip(member.group.group.rollouts, member.group.scores, strict=True):
            if score.turns:
                raise RewardError(
                    f"sample {rollout.prompt_id}#{rollout.sample_index} has a reward for each turn, but "
                    f"method.advantage {kind} compares whole responses of a group. A group's baseline over turns is "
                    "biased where the policy decides how many turns there are: return the sum of the turns, or set "
                    "method.advantage to gae, reinforce or reinforce_pp."
                )
