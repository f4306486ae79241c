"""Raw scores of a group to shaped ones, in the order that the recipe's section has: clip, truncation, overlong, length.

Turns keep their own rewards: what shaping changes of the total is paid at the last action token.
"""

import numpy as np
import torch

from skirl.algorithms.shaping import clip_scores, length_reward, overlong_penalty, truncated_scores
from skirl.config.algorithms import ShapingConfig
from skirl.errors import RewardError
from skirl.records import Doubles, ScoredGroup

__all__ = ["overlong_buffer", "raw_scores", "shaped_scores", "token_rewards"]


def raw_scores(group: ScoredGroup) -> Doubles:
    """[G] total scores; every rollout has one."""
    assert all(s.total is not None for s in group.scores), f"{group.group.prompt.id}: failures are settled before"
    return np.asarray([s.total for s in group.scores], dtype=np.float64)


def shaped_scores(group: ScoredGroup, config: ShapingConfig) -> Doubles:
    """[G] what each rollout is worth before any baseline."""
    raw = torch.from_numpy(raw_scores(group))
    lengths = torch.tensor([len(r.response_ids) for r in group.group.rollouts], dtype=torch.float64)
    scores = raw
    if config.clip_range is not None:
        scores = clip_scores(scores, low=config.clip_range[0], high=config.clip_range[1])
    if config.truncation is not None:
        cut = torch.tensor([r.finish_reason == "length" for r in group.group.rollouts])
        scores = truncated_scores(scores, cut, factor=config.truncation.factor, score=config.truncation.score)
    if config.overlong is not None:
        budget = group.group.sampling.max_new_tokens
        buffer = overlong_buffer(config.overlong.buffer_share, budget)
        scores = scores + overlong_penalty(lengths, budget=budget, buffer=buffer, penalty=config.overlong.penalty)
    if config.length is not None:
        right = raw >= config.length.threshold
        scores = scores + length_reward(lengths, right, coef=config.length.coef)
    return scores.numpy()


def overlong_buffer(share: float, budget: int) -> int:
    """Tokens over which the overlong penalty grows."""
    return round(share * budget)


def token_rewards(group: ScoredGroup, index: int, shaped: float, penalties: Doubles) -> Doubles:
    """[T] rewards of one rollout: r_t = - penalty_t, plus the score at the last action token.

    Where the reward function scored turns, each turn's value stands at the turn's last action token, and what shaping
    changed at the very last. A response without action tokens has no place for any.

    Raises: RewardError: the function scored another number of turns than the rollout has.
    """
    score, rollout = group.scores[index], group.group.rollouts[index]
    rewards = -penalties
    if not len(rewards):
        return rewards
    ends = rollout.turn_ends or (len(rollout.response_ids),)
    if score.turns and len(score.turns) != len(ends):
        raise RewardError(
            f"sample {rollout.prompt_id}#{rollout.sample_index} has {len(ends)} turns, but its reward names "
            f"{len(score.turns)} values (turns): return one for each turn."
        )
    for end, value in zip(ends, score.turns, strict=bool(score.turns)):
        rewards[max(end - 1, 0)] += value
    rewards[-1] += shaped - sum(score.turns)
    return rewards
