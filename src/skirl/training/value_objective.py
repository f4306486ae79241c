"""Objectives of models with a scalar head that are judged token by token: PPO's critic, process reward models."""

from dataclasses import dataclass, field

from torch import Tensor

from skirl.algorithms.preferences import step_entropy
from skirl.algorithms.values import value_cut, value_loss
from skirl.records import Sampling
from skirl.training.objective import Sums, counted
from skirl.training.rows import Streams

__all__ = ["StepRewardObjective", "ValueObjective"]


@dataclass(frozen=True)
class ValueObjective:
    """Squared error of the critic's values, held near those that the returns were made of.

    Args: clip: new values are held within this of the old ones in the loss; None does not clip.
    """

    clip: float | None
    sampling: Sampling = field(default_factory=Sampling)

    def __call__(self, values: Tensor, second: Tensor, streams: Streams) -> tuple[Tensor, Sums]:
        """Half the squared error of each action token."""
        assert streams.values is not None
        assert streams.returns is not None
        used = streams.weights > 0
        losses = value_loss(values, streams.values, streams.returns, clip=self.clip)
        cut = value_cut(values.detach(), streams.values, streams.returns, clip=self.clip)
        return losses, {
            "critic/loss": counted(losses, used),
            "critic/value_mean": counted(values, used),
            "critic/clip_fraction": counted(cut, used),
        }


@dataclass(frozen=True)
class StepRewardObjective:
    """Binary cross-entropy of a process reward model, at the tokens that end a step."""

    sampling: Sampling = field(default_factory=Sampling)

    def __call__(self, values: Tensor, second: Tensor, streams: Streams) -> tuple[Tensor, Sums]:
        """Values are logits of "this step is right"."""
        assert streams.labels is not None
        used = streams.weights > 0
        losses = step_entropy(values, streams.labels)
        right = (values.detach() > 0) == (streams.labels > 0.5)
        return losses, {"prm/loss": counted(losses, used), "prm/accuracy": counted(right, used)}
