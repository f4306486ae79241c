"""Token losses out of log-probs and streams: the composition of a method, blind to models and backends.

The loss of an optimizer step is  sum over action tokens of  weight * token_loss;  metrics are sums, divided once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from skirl.algorithms.kl import LOG_RATIO_BOUND, kl_k2, kl_k3
from skirl.algorithms.losses import ppo_clip, ppo_clip_mask
from skirl.records import Ratio, Sampling
from skirl.training.rows import Streams

__all__ = ["Objective", "PolicyObjective", "SupervisedObjective", "micro_batch_loss"]

Sums = Mapping[str, Tensor]
"""Metric name -> sum over the action tokens; the denominator is their number."""

KL_LOSS = {"k2": kl_k2, "k3": kl_k3}


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
        return -logprobs, {"sft/loss": _total(-logprobs, used), "policy/entropy": _total(entropy, used)}


@dataclass(frozen=True)
class PolicyObjective:
    """Clipped policy loss, with KL to the reference and an entropy bonus where their factors are set.

    token_loss = ppo_clip(log pi - log pi_old, A) + kl_coef * k(log pi, log pi_ref) - entropy_coef * H

    Where a batch is used for one optimizer step, pi_old is pi itself and ``old_logprobs`` is absent: the ratio is 1 and
    has the policy's gradient, at no extra pass.
    """

    sampling: Sampling
    clip_low: float
    clip_high: float
    clip_dual: float | None
    kl_coef: float = 0.0
    kl_estimator: Literal["k2", "k3"] = "k3"
    entropy_coef: float = 0.0

    def __call__(self, logprobs: Tensor, entropy: Tensor, streams: Streams) -> tuple[Tensor, Sums]:
        """Token losses and the sums of policy/*."""
        assert streams.advantages is not None
        used = streams.weights > 0
        now = logprobs.detach()
        old = now if streams.old_logprobs is None else streams.old_logprobs
        log_ratio = logprobs - old
        losses = ppo_clip(log_ratio, streams.advantages, low=self.clip_low, high=self.clip_high, dual=self.clip_dual)
        cut = ppo_clip_mask(log_ratio.detach(), streams.advantages, low=self.clip_low, high=self.clip_high)
        ratio = log_ratio.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        sums = {
            "policy/clip_fraction": _total(cut, used),
            "policy/ratio_mean": _total(ratio, used),
            "policy/entropy": _total(entropy.detach(), used),
        }
        if streams.rollout_logprobs is not None:
            gap = (now.double() - streams.rollout_logprobs.double()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            sums["policy/ratio_rollout_mean"] = _total(gap.exp(), used)
            sums["policy/kl_rollout"] = _total(kl_k3(streams.rollout_logprobs.double(), now.double()), used)
        if streams.reference_logprobs is not None:
            sums["policy/kl_reference"] = _total(kl_k3(now.double(), streams.reference_logprobs.double()), used)
            if self.kl_coef:
                losses = losses + self.kl_coef * KL_LOSS[self.kl_estimator](logprobs, streams.reference_logprobs)
        if self.entropy_coef:
            losses = losses - self.entropy_coef * entropy
        return losses, sums


def micro_batch_loss(
    objective: Objective, output: tuple[Tensor, Tensor, Tensor], streams: Streams
) -> tuple[Tensor, Sums]:
    """A micro-batch's share of the optimizer step's loss, and its metric sums.

    loss = sum over action tokens of weight * token loss + sum over sequences of weight * auxiliary loss
    """
    first, second, auxiliary = output
    losses, sums = objective(first, second, streams)
    loss = (streams.weights * losses).sum()
    if len(auxiliary):
        loss = loss + (streams.sequence_weights * auxiliary).sum()
        sums = {**sums, "policy/router_balance": (streams.sequence_weights * auxiliary.detach()).double().sum()}
    return loss, sums


def _total(values: Tensor, used: Tensor) -> Tensor:
    return torch.where(used, values.detach().double(), 0.0).sum()


def as_ratios(sums: Mapping[str, Tensor], num_actions: int) -> dict[str, Ratio]:
    """Sums of one micro-batch over its action tokens, on the host."""
    return {name: Ratio(float(value), float(num_actions)) for name, value in sums.items()}
