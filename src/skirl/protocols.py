"""What the loop needs from its parts; each protocol has a shipped fake and one contract suite.

Records cross these borders, never tensors of a device: a part may live in another process.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from skirl.records import (
    Group,
    Plan,
    Prompt,
    Ratio,
    Request,
    RewardText,
    Role,
    Rollout,
    Sampling,
    ScoredGroup,
    ScoreFailure,
    TrainingSequence,
    UpdateReport,
)

__all__ = [
    "Collected",
    "Collector",
    "GroupSampler",
    "PromptSource",
    "Record",
    "RewardModels",
    "RolloutEngine",
    "Scorer",
    "Sink",
    "StepEnd",
    "Trainer",
    "WeightCommit",
]


@runtime_checkable
class PromptSource(Protocol):
    """Prompts in a seeded order that is part of the run's state."""

    @property
    def num_taken(self) -> int:
        """Prompts taken since the run began, those that a resumed run took before included."""
        ...

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; epochs follow one another, each in its own order."""
        ...

    def state(self) -> Mapping[str, Any]:
        """JSON-able position, saved with each checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state`` was taken; raises CheckpointError if the data changed."""
        ...


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples responses: the policy's own generate, or vLLM."""

    @property
    def batch_size(self) -> int:
        """Responses it wants in one call; the router hands over whole groups up to this number."""
        ...

    @property
    def max_in_flight(self) -> int | None:
        """Responses it wants in hand at once, over all calls that have not ended; None: one call at a time."""
        ...

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Rollout]:
        """One rollout a request, each as soon as it ends, in any order. Equal requests on equal weights give equal
        tokens. Raises RolloutError where a request cannot be served; an engine that died has replaced itself before.
        """
        ...


@runtime_checkable
class Scorer(Protocol):
    """Scores whole groups; never raises for a sample that fails, but returns its typed failure."""

    def begin(self, prompt: Prompt, rollout: Rollout, sampling: Sampling) -> None:
        """A rollout of a group that is still being sampled: its scoring may start now. ``score`` returns the result."""
        ...

    async def score(self, group: Group) -> ScoredGroup:
        """One score a rollout, in order."""
        ...

    def close(self) -> None:
        """Ends its processes."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """The policy and what trains it, over all ranks. A new backend fills in these calls."""

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks a plan must be made for."""
        ...

    def logprobs(self, plan: Plan, role: Role, sampling: Sampling | None = None) -> list[Any]:
        """Per sequence of the plan [T] float32 log-probs of its action tokens, no gradient; under the run's sampling
        distribution, or the one given.
        """
        ...

    def values(self, plan: Plan) -> list[Any]:
        """Per sequence of the plan [T] float32: the critic's value of the state before each action token."""
        ...

    def update(self, plan: Plan, consumed_prompts: int, roles: Sequence[Role] = ("policy",)) -> UpdateReport:
        """Runs the plan for each role ("policy", "critic"), side by side where they have GPUs of their own.

        The report is the policy's, with the critic's losses and norms among its metrics (critic/*); without the
        policy among the roles, losses are empty and the version stays. Raises TrainingDiverged on all ranks before a
        step that is not finite.
        """
        ...

    def evaluate(self, plan: Plan) -> Mapping[str, Ratio]:
        """The objective over a plan without a gradient: its metric sums, and "loss" as (sum of weighted losses, 1)."""
        ...

    def save(self, directory: Path) -> None:
        """Weights, optimizer and random state, by every rank, into an existing directory."""
        ...

    def load(self, directory: Path) -> None:
        """What ``save`` wrote; the next losses are the same, bit for bit."""
        ...

    def export(self, directory: Path, role: Role = "policy") -> None:
        """A Hugging Face model directory that loads in a fresh process: the policy's, or the critic's."""
        ...


@runtime_checkable
class RewardModels(Protocol):
    """The local reward models of a run, each with its own tokenizer."""

    def reward_scores(self, name: str, texts: Sequence[RewardText]) -> list[float | ScoreFailure]:
        """Raw scores in order, by the model of this name in ``reward.models``; blocks. Too long a text is a failure."""
        ...


@runtime_checkable
class WeightCommit(Protocol):
    """Brings the trainer's weights to every engine as one operation."""

    def commit(self, version: int) -> Mapping[str, Ratio]:
        """All engines hold ``version`` when this returns, or WeightSyncError; returns commit/* (and probe/*)."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Where metrics go: console, JSON lines, TensorBoard."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One step's values, already divided."""
        ...

    def close(self) -> None:
        """Flushes."""
        ...


@dataclass(frozen=True)
class Collected:
    """One step's groups.

    Attributes:
        step: number of the step, for keys.
        scored: every group, samples without a score too. kept: what is trained on: every sample has a score.
        seconds: time of sampling and scoring.
        rounds: of sampling; above 1 where groups without signal were replaced. without_signal: groups dropped for it.
        metrics: of collecting itself: waits, services.
    """

    step: int
    scored: Sequence[ScoredGroup]
    kept: Sequence[ScoredGroup]
    seconds: float
    rounds: int = 1
    without_signal: int = 0
    metrics: Mapping[str, Ratio] = field(default_factory=dict[str, Ratio])

    def key(self, sequence_id: str) -> str:
        """Ledger key of a rollout: unique in the run although prompts return every epoch."""
        return f"{self.step}/{sequence_id}"


class Collector(Protocol):
    """Prompts to scored groups, with failures settled."""

    def __call__(self, step: int, source: PromptSource, num_groups: int) -> Collected:
        """Takes prompts, samples and scores until there are so many groups to train on, or fewer where the recipe's
        rules end the step before; raises RewardError where too much failed.
        """
        ...


class Record(Protocol):
    """Keeps the rollouts of a step."""

    def __call__(self, step: int, scored: Sequence[ScoredGroup], sequences: Sequence[TrainingSequence]) -> None:
        """``sequences``: what will be trained on; empty where the step ended before."""
        ...


class StepEnd(Protocol):
    """What is due after a step and gives metrics: evaluation."""

    def __call__(self, done: int) -> Mapping[str, Ratio]:
        """``done`` steps are done; returns metrics to be logged with the step."""
        ...


class GroupSampler(Protocol):
    """Samples groups without scoring them."""

    def __call__(
        self,
        key: str,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        group_size: int,
        on_group: Callable[[Group], None],
    ) -> list[Group]:
        """One group a prompt, in order; ``key`` is part of each response's seed."""
        ...
