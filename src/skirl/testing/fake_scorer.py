"""A scorer without processes, for tests of whatever consumes scores."""

from collections.abc import Callable

from skirl.records import Group, Prompt, Rollout, Sampling, Score, ScoredGroup, ScoreFailure

__all__ = ["FakeScorer"]


class FakeScorer:
    """A ``Scorer`` that calls a plain function in the same process, once a rollout, as soon as it has ended."""

    def __init__(self, function: Callable[[Rollout], float | ScoreFailure]) -> None:
        """Args: function: the score of a rollout, or why it has none; its part is named "fake"."""
        self._function = function
        self._begun: dict[int, tuple[Rollout, Score]] = {}
        self.closed = False

    def begin(self, prompt: Prompt, rollout: Rollout, sampling: Sampling) -> None:
        """Scores the rollout and keeps the result until its group is scored."""
        if id(rollout) not in self._begun:
            self._begun[id(rollout)] = rollout, self._score(rollout)

    async def score(self, group: Group) -> ScoredGroup:
        """One score a rollout, in order."""
        begun = [self._begun.pop(id(rollout), None) for rollout in group.rollouts]
        pairs = zip(group.rollouts, begun, strict=True)
        return ScoredGroup(group, tuple(found[1] if found else self._score(rollout) for rollout, found in pairs))

    def _score(self, rollout: Rollout) -> Score:
        value = self._function(rollout)
        return Score(None, failure=value) if isinstance(value, ScoreFailure) else Score(value, {"fake": value})

    def close(self) -> None:
        """Notes that it was called."""
        self.closed = True
