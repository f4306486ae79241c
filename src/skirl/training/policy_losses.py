"""Kind of a policy loss -> its function: the one table, and what such a function may read of a micro-batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from skirl.algorithms import losses
from skirl.config.algorithms import CISPO, DPPO, GMPO, GSPO, SAPO, TOPR, ClipCov, KLCov, PPOClip

__all__ = ["POLICY_LOSSES", "PolicyTokens"]


@dataclass(frozen=True)
class PolicyTokens:
    """The action tokens of a micro-batch; [A], S sequences.

    Attributes:
        logprobs: log pi, with gradient. log_ratio: log pi - log pi_old, with gradient.
        old_logprobs: log pi_old. advantages, segments, selected: as in ``rows.Streams``.
    """

    logprobs: Tensor
    log_ratio: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    segments: Tensor
    num_segments: int
    selected: Tensor | None

    @property
    def picked(self) -> Tensor:
        """[A] bool, for losses that treat some tokens apart."""
        assert self.selected is not None, "this policy loss needs TrainingSequence.selected"
        return self.selected


Losses = tuple[Tensor, Tensor | None]
"""Token losses [A] with gradient, and [A] bool: tokens whose gradient is cut, where the loss has such a notion."""


def _ppo_clip(loss: PPOClip, t: PolicyTokens) -> Losses:
    token_losses = losses.ppo_clip(t.log_ratio, t.advantages, low=loss.low, high=loss.high, dual=loss.dual)
    return token_losses, losses.ppo_clip_mask(t.log_ratio.detach(), t.advantages, low=loss.low, high=loss.high)


def _gspo(loss: GSPO, t: PolicyTokens) -> Losses:
    where, how = (t.advantages, t.segments, t.num_segments), {"low": loss.low, "high": loss.high}
    level = loss.token_level
    token_losses = losses.gspo(t.log_ratio, *where, **how, token_level=level)
    return token_losses, losses.gspo_cut(t.log_ratio.detach(), *where, **how, token_level=level)


def _cispo(loss: CISPO, t: PolicyTokens) -> Losses:
    token_losses = losses.cispo(t.logprobs, t.log_ratio, t.advantages, low=loss.low, high=loss.high)
    cut = losses.cispo_cut(t.logprobs.detach(), t.log_ratio.detach(), t.advantages, low=loss.low, high=loss.high)
    return token_losses, cut


def _sapo(loss: SAPO, t: PolicyTokens) -> Losses:
    taus = {"tau_positive": loss.tau_positive, "tau_negative": loss.tau_negative}
    return losses.sapo(t.log_ratio, t.advantages, **taus), None


def _gmpo(loss: GMPO, t: PolicyTokens) -> Losses:
    where = (t.advantages, t.segments, t.num_segments)
    token_losses = losses.gmpo(t.log_ratio, *where, clip=loss.clip)
    return token_losses, losses.gmpo_cut(t.log_ratio.detach(), *where, clip=loss.clip)


def _topr(loss: TOPR, t: PolicyTokens) -> Losses:
    return losses.topr(t.logprobs, t.log_ratio, t.advantages, t.segments, t.num_segments, cap=loss.cap), None


def _clip_cov(loss: ClipCov, t: PolicyTokens) -> Losses:
    token_losses = losses.clip_cov(t.log_ratio, t.advantages, t.picked, low=loss.low, high=loss.high)
    cut = losses.ppo_clip_mask(t.log_ratio.detach(), t.advantages, low=loss.low, high=loss.high)
    return token_losses, cut | t.picked


def _kl_cov(loss: KLCov, t: PolicyTokens) -> Losses:
    return losses.kl_cov(t.log_ratio, t.advantages, t.picked, coef=loss.coef), None


def _dppo(loss: DPPO, t: PolicyTokens) -> Losses:
    where, how = (t.old_logprobs, t.advantages), {"divergence": loss.divergence, "threshold": loss.threshold}
    token_losses = losses.dppo(t.log_ratio, *where, **how)
    return token_losses, losses.dppo_cut(t.log_ratio.detach(), *where, **how)


POLICY_LOSSES: Mapping[str, Callable[[Any, PolicyTokens], Losses]] = {
    "ppo_clip": _ppo_clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "topr": _topr,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "dppo": _dppo,
}
"""By ``kind`` of ``config.algorithms.PolicyLoss``; a test compares the keys."""
