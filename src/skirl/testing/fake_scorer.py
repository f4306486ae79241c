"""A scorer without processes, for tests of whatever consumes scores."""

from collections.abc import Callable

from skirl.records import Group, Rollout, Score, ScoredGroup, ScoreFailure

__all__ = ["FakeScorer"]


class FakeScorer:
    """A ``Scorer`` that calls a plain function in the same process, one rollout after another."""

    def __init__(self, function: Callable[[Rollout], float | ScoreFailure]) -> None:
        """Args: function: the score of a rollout, or why it has none; its part is named "fake"."""
        self._function = function
        self.closed = False

    async def score(self, group: Group) -> ScoredGroup:
        """One score a rollout, in order."""
        return ScoredGroup(group, tuple(self._score(rollout) for rollout in group.rollouts))

    def _score(self, rollout: Rollout) -> Score:
        value = self._function(rollout)
        return Score(None, failure=value) if isinstance(value, ScoreFailure) else Score(value, {"fake": value})

    def close(self) -> None:
        """Notes that it was called."""
        self.closed = True
