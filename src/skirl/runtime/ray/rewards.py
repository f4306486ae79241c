"""Reward models on their ranks: each rank holds all of them, texts are dealt out, threads may call at once."""

import threading
from collections.abc import Sequence
from itertools import pairwise

from skirl.records import RewardText, ScoreFailure
from skirl.runtime.ray.ranks import Ranks

__all__ = ["RewardRanks", "deal"]

SMALLEST_SHARE = 4
"""Texts that one rank takes before another is asked: a call costs about as much as a short text."""


class RewardRanks:
    """The ranks of the role "reward". Each runs one call at a time, in the order of arrival."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._next, self._lock = ranks, 0, threading.Lock()

    def scores(self, name: str, texts: Sequence[RewardText]) -> list[float | ScoreFailure]:
        """Raw scores in order by the reward model of this name; blocks."""
        if not texts:
            return []
        shares = deal(texts, len(self._ranks.actors))
        with self._lock:
            first, self._next = self._next, self._next + len(shares)
        ranks = [(first + i) % len(self._ranks.actors) for i in range(len(shares))]
        dealt = dict(zip(ranks, shares, strict=True))
        found = self._ranks.call_some(
            f"scoring by the reward model {name}",
            ranks,
            lambda rank, actor: actor.reward_scores.remote(name, dealt[rank]),
        )
        return [score for share in found for score in share]


def deal(texts: Sequence[RewardText], num_ranks: int) -> list[Sequence[RewardText]]:
    """Contiguous shares of equal size, at most one a rank."""
    count = max(1, min(num_ranks, len(texts) // SMALLEST_SHARE))
    borders = [len(texts) * i // count for i in range(count + 1)]
    return [texts[a:b] for a, b in pairwise(borders)]
