"""Reward models without weights, for tests of whatever asks them."""

from collections.abc import Callable, Mapping, Sequence

from skirl.records import RewardText, ScoreFailure

__all__ = ["FakeRewardModels"]


class FakeRewardModels:
    """A ``RewardModels`` whose scores are plain functions; ``calls`` holds the texts of each call."""

    def __init__(self, functions: Mapping[str, Callable[[RewardText], float | ScoreFailure]]) -> None:
        """Args: functions: score of a text, by the name of the model."""
        self._functions = functions
        self.calls: list[tuple[str, tuple[RewardText, ...]]] = []

    def reward_scores(self, name: str, texts: Sequence[RewardText]) -> list[float | ScoreFailure]:
        """Scores in order."""
        self.calls.append((name, tuple(texts)))
        return [self._functions[name](text) for text in texts]
