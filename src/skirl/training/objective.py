"""Token losses out of a model's outputs and streams: the composition of a method, blind to models and backends.

The loss of an optimizer step is  sum over action tokens of  weight * token_loss;  metrics are sums, divided once.
Values and step rewards are in value_objective.py, comparisons of responses in preference_objective.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from skirl.algorithms.kl import KL_ESTIMATORS, clamped, kl_k3
from skirl.config.algorithms import PolicyLoss, PPOClip
from skirl.records import Ratio, Sampling
from skirl.training.policy_losses import POLICY_LOSSES, PolicyTokens
from skirl.training.rows import Streams

__all__ = [
    "DistillationObjective",
    "Objective",
    "PolicyObjective",
    "Sum",
    "Sums",
    "SupervisedObjective",
    "as_ratios",
    "counted",
    "micro_batch_loss",
]


@dataclass(frozen=True)
class Sum:
    """A metric of a micro-batch: two scalars on the device, float64, divided at the very end."""

    numerator: Tensor
    denominator: Tensor


Sums = Mapping[str, Sum]
"""Metric name -> sums. A micro-batch in which nothing counts (a dummy) adds 0 to both."""


def counted(values: Tensor, used: Tensor) -> Sum:
    """Sum of the values that are used, over their number; what is unused may hold anything."""
    return Sum(torch.where(used, values.detach().double(), 0.0).sum(), used.sum().double())


class Objective(Protocol):
    """What a trainer minimises: token losses out of a model's two outputs for each action token.

    The model is a policy (log-probs, entropies), a value model (values, zeros) or a policy beside its teacher
    (log-probs, divergences). Losses of whole sequences are given to each of their tokens, with the sequence normaliser.
    """

    @property
    def sampling(self) -> Sampling:
        """The distribution that log-probs are taken under."""
        ...

    def __call__(self, first: Tensor, second: Tensor, streams: Streams, /) -> tuple[Tensor, Sums]:
        """Token losses [A] with gradient, and sums for metrics without."""
        ...


@dataclass(frozen=True)
class SupervisedObjective:
    """Negative log-likelihood of the references."""

    sampling: Sampling = field(default_factory=Sampling)

    def __call__(self, logprobs: Tensor, entropy: Tensor, streams: Streams) -> tuple[Tensor, Sums]:
        """-log p of each target token."""
        used = streams.weights > 0
        return -logprobs, {"sft/loss": counted(-logprobs, used), "policy/entropy": counted(entropy, used)}


@dataclass(frozen=True)
class DistillationObjective:
    """A teacher's distribution beside the answers' own tokens.

    token_loss = (1 - share) * -log pi + share * divergence(teacher, policy)

    Args: share: k in [0, 1]; where it is 1 the answers' tokens are left out, where it is 0 the teacher is.
    """

    share: float
    sampling: Sampling = field(default_factory=Sampling)

    def __call__(self, logprobs: Tensor, divergence: Tensor, streams: Streams) -> tuple[Tensor, Sums]:
        """The two terms, mixed."""
        used = streams.weights > 0
        if self.share in (0.0, 1.0):
            losses = divergence if self.share else -logprobs
        else:
            losses = (1.0 - self.share) * -logprobs + self.share * divergence
        return losses, {
            "kd/loss": counted(losses, used),
            "kd/divergence": counted(divergence, used),
            "kd/cross_entropy": counted(-logprobs, used),
        }


@dataclass(frozen=True)
class PolicyObjective:
    """A policy loss, with KL to the reference and an entropy bonus where their factors are set.

    token_loss = correction * policy_loss(log pi, log pi_old, A) + kl_coef * k(log pi, log pi_ref) - entropy_coef * H

    ``kl_coef`` and the corrections come with the streams; a token of correction 0 is left out of the policy loss alone.
    Where a batch is used for one optimizer step, pi_old is pi itself and ``old_logprobs`` is absent: the ratio is 1 and
    has the policy's gradient, at no extra pass.

    Args:
        loss: the policy loss with its settings.
        kl_estimator: of the KL in the loss.
    """

    sampling: Sampling
    loss: PolicyLoss = field(default_factory=PPOClip)
    kl_estimator: Literal["k2", "k3"] = "k3"
    entropy_coef: float = 0.0

    def __call__(self, logprobs: Tensor, entropy: Tensor, streams: Streams) -> tuple[Tensor, Sums]:
        """Token losses and the sums of policy/*."""
        assert streams.advantages is not None
        used = streams.weights > 0
        now = logprobs.detach()
        old = now if streams.old_logprobs is None else streams.old_logprobs
        log_ratio = logprobs - old
        segments = (streams.segments, streams.num_segments)
        tokens = PolicyTokens(logprobs, log_ratio, old, streams.advantages, *segments, streams.selected)
        losses, cut = POLICY_LOSSES[self.loss.kind](self.loss, tokens)
        sums = {"policy/ratio_mean": counted(_ratio(log_ratio), used), "policy/entropy": counted(entropy, used)}
        if cut is not None:
            sums["policy/clip_fraction"] = counted(cut, used)
        if streams.corrections is not None:
            losses = torch.where(streams.corrections > 0, streams.corrections * losses, 0.0)
        if streams.reference_logprobs is not None and streams.kl_coef:
            losses = losses + streams.kl_coef * KL_ESTIMATORS[self.kl_estimator](logprobs, streams.reference_logprobs)
        if self.entropy_coef:
            losses = losses - self.entropy_coef * entropy
        return losses, {**sums, **_gaps(now, streams, used)}


def _ratio(log_ratio: Tensor) -> Tensor:
    return clamped(log_ratio.detach()).exp()


def _gaps(now: Tensor, streams: Streams, used: Tensor) -> dict[str, Sum]:
    """How far the policy is from the engine and from the reference; float64."""
    sums: dict[str, Sum] = {}
    if streams.rollout_logprobs is not None:
        rollout = streams.rollout_logprobs.double()
        sums["policy/ratio_rollout_mean"] = counted(_ratio(now.double() - rollout), used)
        sums["policy/kl_rollout"] = counted(kl_k3(rollout, now.double()), used)
    if streams.reference_logprobs is not None:
        sums["policy/kl_reference"] = counted(kl_k3(now.double(), streams.reference_logprobs.double()), used)
    return sums


def micro_batch_loss(
    objective: Objective, output: tuple[Tensor, Tensor, Tensor], streams: Streams
) -> tuple[Tensor, Sums]:
    """A micro-batch's share of the optimizer step's loss, and its metric sums.

    loss = sum over action tokens of weight * token loss + sum over sequences of weight * auxiliary loss
    """
    first, second, auxiliary = output
    losses, sums = objective(first, second, streams)
    loss = _weighted(losses, streams.weights)
    if len(auxiliary):
        loss = loss + _weighted(auxiliary, streams.sequence_weights)
        sums = {**sums, "policy/router_balance": counted(auxiliary, streams.sequence_weights > 0)}
    return loss, sums


def _weighted(losses: Tensor, weights: Tensor) -> Tensor:
    return torch.where(weights > 0, weights * losses, 0.0).sum()


def as_ratios(sums: Sums) -> dict[str, Ratio]:
    """Sums of one micro-batch, on the host; one transfer for all of them."""
    if not sums:
        return {}
    flat = torch.stack([part for s in sums.values() for part in (s.numerator, s.denominator)]).tolist()
    return {name: Ratio(*pair) for name, pair in zip(sums, zip(flat[::2], flat[1::2], strict=True), strict=True)}
