"""Objectives that compare whole responses: reward models from pairs, and the preference losses of a policy.

Of a pair the chosen response is segment 2k, the rejected one 2k + 1. A response's (or pair's) loss is given to each of
its tokens; under the sequence normaliser their weighted sum is the mean over responses (pairs).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from skirl.algorithms.losses import at_tokens, segment_mean, segment_sum
from skirl.algorithms.preferences import bradley_terry, dpo, ipo, kto, log_exp, orpo, simpo
from skirl.config.offline import DPOLoss, IPOLoss, KTOLoss, ORPOLoss, PreferenceLoss, RMConfig, SimPOLoss
from skirl.records import Sampling
from skirl.training.objective import Sums, counted
from skirl.training.rows import Streams

__all__ = ["PREFERENCE_LOSSES", "PreferenceObjective", "Responses", "RewardModelObjective"]

UNUSED = -1.0
"""Stands in for a response without weight, before any function sees it: finite, and a log-prob that can be."""


@dataclass(frozen=True)
class Responses:
    """The responses of a micro-batch; [S] float64. Without weight (dummies, empty responses): ``UNUSED``, not ``used``.

    Attributes:
        sums, means: log pi over a response's tokens, with gradient.
        reference_sums, reference_means: the same under the reference; zeros where the method has none.
        used: [S] bool. chosen, margins, baselines: as in ``rows.Streams``.
    """

    sums: Tensor
    means: Tensor
    reference_sums: Tensor
    reference_means: Tensor
    used: Tensor
    chosen: Tensor
    baselines: Tensor

    @property
    def pairs(self) -> Tensor:
        """[P] bool: both responses count."""
        return self.used[0::2] & self.used[1::2]


Losses = tuple[Tensor, Tensor]
"""Losses [P] of pairs or [S] of responses, with gradient; and implicit rewards [S]."""


def _pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    return values[0::2], values[1::2]


def _dpo(loss: DPOLoss, r: Responses) -> Losses:
    log_ratios = r.sums - r.reference_sums
    how = {"beta": loss.beta, "label_smoothing": loss.label_smoothing}
    return dpo(*_pairs(log_ratios), **how), loss.beta * log_ratios


def _ipo(loss: IPOLoss, r: Responses) -> Losses:
    summed = loss.reduction == "sum"
    log_ratios = r.sums - r.reference_sums if summed else r.means - r.reference_means
    return ipo(*_pairs(log_ratios), beta=loss.beta), loss.beta * log_ratios


def _kto(loss: KTOLoss, r: Responses) -> Losses:
    log_ratios = r.sums - r.reference_sums
    weights = {"desirable_weight": loss.desirable_weight, "undesirable_weight": loss.undesirable_weight}
    return kto(log_ratios, r.chosen, r.baselines, beta=loss.beta, **weights), loss.beta * log_ratios


def _simpo(loss: SimPOLoss, r: Responses) -> Losses:
    return simpo(*_pairs(r.means), beta=loss.beta, margin=loss.margin), loss.beta * r.means


def _orpo(loss: ORPOLoss, r: Responses) -> Losses:
    chosen, rejected = _pairs(r.means)
    return -chosen + loss.coef * orpo(chosen, rejected), r.means


PREFERENCE_LOSSES: Mapping[str, Callable[[Any, Responses], Losses]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "kto": _kto,
    "simpo": _simpo,
    "orpo": _orpo,
}
"""By ``kind`` of ``config.offline.PreferenceLoss``; a test compares the keys."""


@dataclass(frozen=True)
class PreferenceObjective:
    """A preference loss of the policy.

    Implicit rewards (dpo/chosen_reward, dpo/rejected_reward, dpo/margin) are beta times the log ratio to the reference
    (its mean over tokens for ipo with reduction mean), beta times the mean log-prob for simpo, the mean log-prob for
    orpo.
    """

    loss: PreferenceLoss
    sampling: Sampling = field(default_factory=Sampling)

    def __call__(self, logprobs: Tensor, entropy: Tensor, streams: Streams) -> tuple[Tensor, Sums]:
        """Each token carries the loss of its response, or pair."""
        responses = _responses(logprobs, streams, needs_reference=self.loss.kind in ("dpo", "ipo", "kto"))
        losses, rewards = PREFERENCE_LOSSES[self.loss.kind](self.loss, responses)
        used, chosen = responses.used, responses.chosen
        rewards = rewards.detach()
        sums = {
            "dpo/chosen_reward": counted(rewards, used & chosen),
            "dpo/rejected_reward": counted(rewards, used & ~chosen),
        }
        if self.loss.kind == "kto":
            sums["dpo/loss"] = counted(losses, used)
            return at_tokens(torch.where(used, losses, 0.0), streams.segments, streams.weights.dtype), sums
        pairs, margins = responses.pairs, rewards[0::2] - rewards[1::2]
        sums["dpo/loss"] = counted(losses, pairs)
        sums["dpo/accuracy"] = counted(margins > 0, pairs)
        sums["dpo/margin"] = counted(margins, pairs)
        return _given_to_pairs(losses, pairs, streams), sums


@dataclass(frozen=True)
class RewardModelObjective:
    """Loss of a reward model from pairs; each response's one action token is where its score is read.

    loss = -log sigmoid(chosen - rejected - margin) + centering * (chosen + rejected)^2
    """

    config: RMConfig
    sampling: Sampling = field(default_factory=Sampling)

    def __call__(self, values: Tensor, second: Tensor, streams: Streams) -> tuple[Tensor, Sums]:
        """Each token carries the loss of its pair. Margins are those of the chosen response."""
        assert streams.margins is not None, "a reward model needs pairs"
        used = streams.sequence_weights > 0
        scores = torch.where(used, segment_sum(values, streams.segments, streams.num_segments), 0.0)
        chosen, rejected = _pairs(scores)
        form = bradley_terry if self.config.loss == "sigmoid" else log_exp
        losses = form(chosen, rejected, streams.margins[0::2])
        if self.config.centering:
            losses = losses + self.config.centering * (chosen + rejected).square()
        pairs, gaps = used[0::2] & used[1::2], (chosen - rejected).detach()
        return _given_to_pairs(losses, pairs, streams), {
            "rm/loss": counted(losses, pairs),
            "rm/accuracy": counted(gaps > 0, pairs),
            "rm/margin": counted(gaps, pairs),
        }


def _responses(logprobs: Tensor, streams: Streams, *, needs_reference: bool) -> Responses:
    assert streams.chosen is not None, "a preference loss needs TrainingSequence.preference"
    assert streams.baselines is not None
    used, where = streams.sequence_weights > 0, (streams.segments, streams.num_segments)
    reference = streams.reference_logprobs
    assert not needs_reference or reference is not None, "this preference loss needs reference_logprobs"
    if reference is None or not needs_reference:
        reference = torch.zeros_like(logprobs)
    found = [reduce(v, *where) for v in (logprobs, reference) for reduce in (segment_sum, segment_mean)]
    sums, means, reference_sums, reference_means = (torch.where(used, v, UNUSED) for v in found)
    return Responses(
        sums, means, reference_sums, reference_means, used=used, chosen=streams.chosen, baselines=streams.baselines
    )


def _given_to_pairs(losses: Tensor, pairs: Tensor, streams: Streams) -> Tensor:
    """[A]: each token of both responses carries its pair's loss."""
    both = torch.where(pairs, losses, 0.0).repeat_interleave(2)
    return at_tokens(both, streams.segments, streams.weights.dtype)
