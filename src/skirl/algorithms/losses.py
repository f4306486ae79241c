"""Policy losses of single tokens. No weights, no reduction, no metric names: the plan and the objective own those.

log_ratio = log pi - log pi_old of each action token, with gradient, clamped to plus or minus ``LOG_RATIO_BOUND`` before
exp. At log_ratio 0 every loss has the gradient of the plain policy gradient, -A log pi: the losses of single tokens
under any weights, those of whole sequences (gspo, gmpo) under the sequence normaliser. ``<loss>_cut`` names the tokens
whose gradient a loss cuts. No function passes a gradient to advantages, old log-probs or selections.

A micro-batch holds several sequences: ``segments`` says to which of ``num_segments`` each token belongs, in any order.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from skirl.algorithms.kl import clamped, kl_k3

__all__ = [
    "at_tokens",
    "cispo",
    "cispo_cut",
    "clip_cov",
    "clip_cov_selection",
    "covariance",
    "dppo",
    "dppo_cut",
    "gmpo",
    "gmpo_cut",
    "gspo",
    "gspo_cut",
    "kl_cov",
    "kl_cov_selection",
    "ppo_clip",
    "ppo_clip_mask",
    "sapo",
    "segment_mean",
    "segment_sum",
    "topr",
]


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)


def _leaves_range(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return ((ratio > 1.0 + high) & (advantages > 0)) | ((ratio < 1.0 - low) & (advantages < 0))


def _weighted_likelihood(weights: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
    """-sg(w) A log pi; exactly 0 without advantage, though log pi be infinite."""
    return torch.where(advantages == 0, 0.0, -weights.detach() * advantages * logprobs)


# ------------------------------------------------------------------------------------------------------------------ PPO
def ppo_clip(
    log_ratio: Float[Tensor, "A"], advantages: Float[Tensor, "A"], *, low: float, high: float, dual: float | None
) -> Float[Tensor, "A"]:
    """Clipped surrogate, as a loss.

    L = -min(r A, clip(r, 1 - low, 1 + high) A);  with dual clip, where A < 0:  L = min(L, -dual A)

    Args:
        log_ratio: log pi - log pi_old of each action token, with gradient; clamped before exp.
        advantages: no gradient.
        low, high: clip range of the ratio.
        dual: bound of the loss for negative advantages, > 1; None is off.

    Source: Schulman et al., arXiv:1707.06347, eq. 7; dual clip Ye et al., arXiv:1912.09729, eq. 5; separate high
        bound Yu et al., arXiv:2503.14476, eq. 10. Oracle: tests/oracles/losses.py
    """
    surrogate = _clipped_surrogate(clamped(log_ratio).exp(), advantages, low, high)
    if dual is not None:
        bounded = torch.maximum(surrogate, dual * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    return -surrogate


def ppo_clip_mask(
    log_ratio: Float[Tensor, "A"], advantages: Float[Tensor, "A"], *, low: float, high: float
) -> Bool[Tensor, "A"]:
    """Tokens whose gradient the clip cuts: above 1 + high with A > 0, below 1 - low with A < 0."""
    return _leaves_range(clamped(log_ratio.detach()).exp(), advantages, low, high)


# ------------------------------------------------------------------------------- other losses of a single token's ratio
def cispo(
    logprobs: Float[Tensor, "A"],
    log_ratio: Float[Tensor, "A"],
    advantages: Float[Tensor, "A"],
    *,
    low: float | None,
    high: float,
) -> Float[Tensor, "A"]:
    """Log-likelihood under a clipped importance weight: no token loses its gradient.

    L = -sg(clip(r, 1 - low, 1 + high)) A log pi

    Args:
        logprobs: log pi of each action token; the gradient goes through it alone.
        log_ratio: as for ``ppo_clip``; no gradient.
        advantages: no gradient.
        low: lower bound of the weight; None has none, as in the paper's runs.
        high: upper bound of the weight.

    Source: MiniMax, arXiv:2506.13585, eq. 4 and 5. Oracle: tests/oracles/losses.py
    """
    weights = clamped(log_ratio.detach()).exp().clamp(None if low is None else 1.0 - low, 1.0 + high)
    return _weighted_likelihood(weights, advantages, logprobs)


def cispo_cut(
    logprobs: Float[Tensor, "A"],
    log_ratio: Float[Tensor, "A"],
    advantages: Float[Tensor, "A"],
    *,
    low: float | None,
    high: float,
) -> Bool[Tensor, "A"]:
    """Tokens whose weight is clipped; they keep a gradient. Arguments as for ``cispo``."""
    ratio = clamped(log_ratio.detach()).exp()
    above = ratio > 1.0 + high
    return above if low is None else above | (ratio < 1.0 - low)


def sapo(
    log_ratio: Float[Tensor, "A"], advantages: Float[Tensor, "A"], *, tau_positive: float, tau_negative: float
) -> Float[Tensor, "A"]:
    """A soft gate instead of a clip: the gradient fades as the ratio leaves 1, on both sides.

    L = -f(r) A,  f(r) = 4 / tau sigmoid(tau (r - 1)),  tau = tau_positive where A > 0, else tau_negative

    Args:
        log_ratio, advantages: as for ``ppo_clip``.
        tau_positive, tau_negative: sharpness of the gate. At r = 1 the slope of f is 1 for any tau, its value 2 / tau.

    Source: Gao et al., arXiv:2511.20347 (SAPO). Oracle: tests/oracles/losses.py
    """
    tau = torch.where(advantages > 0, tau_positive, torch.full_like(log_ratio, tau_negative))
    return -(4.0 / tau) * torch.sigmoid(tau * (clamped(log_ratio).exp() - 1.0)) * advantages


def dppo(
    log_ratio: Float[Tensor, "A"],
    old_logprobs: Float[Tensor, "A"],
    advantages: Float[Tensor, "A"],
    *,
    divergence: Literal["tv", "kl"],
    threshold: float,
) -> Float[Tensor, "A"]:
    """Ratio times advantage inside of a trust region of divergence, not of ratio.

    L = -M r A,  M = 0 where the update moves the policy further away (r > 1 with A > 0, r < 1 with A < 0) and its
    divergence from the old one is over the threshold, else 1. With p = pi_old and q = pi of the sampled token, the
    distributions count as two-outcome ones, that token or any other:

    tv: |p - q|,    kl: KL(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q))

    Args:
        log_ratio, advantages: as for ``ppo_clip``.
        old_logprobs: log pi_old; no gradient.
        divergence: which one.
        threshold: delta.

    Source: Qi et al., arXiv:2602.04879 (DPPO), eq. 11 to 14. Oracle: tests/oracles/losses.py
    """
    cut = dppo_cut(log_ratio, old_logprobs, advantages, divergence=divergence, threshold=threshold)
    return torch.where(cut, 0.0, -clamped(log_ratio).exp() * advantages)


def dppo_cut(
    log_ratio: Float[Tensor, "A"],
    old_logprobs: Float[Tensor, "A"],
    advantages: Float[Tensor, "A"],
    *,
    divergence: Literal["tv", "kl"],
    threshold: float,
) -> Bool[Tensor, "A"]:
    """Tokens with M = 0. Arguments as for ``dppo``."""
    step = clamped(log_ratio.detach()).double()  # float64: a threshold is crossed or not, and 1 - p may be small
    old = old_logprobs.detach().double()
    new = (old + step).clamp(max=0.0)
    if divergence == "tv":
        distance = (old.exp() - new.exp()).abs()
    else:
        others = -old.expm1()  # 1 - p
        from_others = torch.where(others > 0, others * (others.log() - (-new.expm1()).log()), 0.0)
        distance = old.exp() * torch.maximum(-step, old) + from_others  # old - new, finite also where p = 0
    away = ((step > 0) & (advantages > 0)) | ((step < 0) & (advantages < 0))
    return away & (distance > threshold)


# ------------------------------------------------------------------------------------------------------ whole sequences
def segment_sum(values: Float[Tensor, "A"], segments: Int64[Tensor, "A"], num_segments: int) -> Float[Tensor, "S"]:
    """Sum over each sequence's tokens, with gradient, float64. A sequence without tokens has 0."""
    return values.new_zeros(num_segments, dtype=torch.float64).index_add(0, segments, values.double())


def segment_mean(values: Float[Tensor, "A"], segments: Int64[Tensor, "A"], num_segments: int) -> Float[Tensor, "S"]:
    """Mean over each sequence's tokens, with gradient, float64. A sequence without tokens has 0."""
    return segment_sum(values, segments, num_segments) / segments.bincount(minlength=num_segments).clamp(min=1)


def at_tokens(values: Float[Tensor, "S"], segments: Int64[Tensor, "A"], dtype: torch.dtype) -> Float[Tensor, "A"]:
    """Each sequence's value at each of its tokens, of the given type.

    The gradients of a sequence's tokens are added up in float64: in float32 a response of 8,000 tokens would lose two
    digits.
    """
    return values.double()[segments].to(dtype)


def _sequence_ratio(log_ratio: Tensor, segments: Tensor, num_segments: int, token_level: bool) -> Tensor:
    """s_i = exp(mean_t log r_t) at each token; in token form with the gradient of the token's own log ratio."""
    bounded = clamped(log_ratio)
    if not token_level:
        return at_tokens(segment_mean(bounded, segments, num_segments).exp(), segments, bounded.dtype)
    typical = at_tokens(segment_mean(bounded.detach(), segments, num_segments).exp(), segments, bounded.dtype)
    return typical * (bounded - bounded.detach()).exp()


def gspo(
    log_ratio: Float[Tensor, "A"],
    advantages: Float[Tensor, "A"],
    segments: Int64[Tensor, "A"],
    num_segments: int,
    *,
    low: float,
    high: float,
    token_level: bool,
) -> Float[Tensor, "A"]:
    """PPO's clip on the geometric mean s_i of a sequence's ratios.

    L = -min(s A, clip(s, 1 - low, 1 + high) A), s = s_i, or in token form s = sg(s_i) pi / sg(pi)

    Args:
        log_ratio, advantages: as for ``ppo_clip``. Without ``token_level`` the advantages of a sequence are equal.
        segments, num_segments: which token belongs to which sequence.
        low, high: clip range of s.
        token_level: the token form: the same values, and with equal advantages in a sequence the same gradient.

    Returns: the sequence's loss at each of its tokens, for the sequence normaliser.
    Source: Zheng et al., arXiv:2507.18071, eq. 5, 7 and (token form) 13, 14. Oracle: tests/oracles/losses.py
    """
    return -_clipped_surrogate(_sequence_ratio(log_ratio, segments, num_segments, token_level), advantages, low, high)


def gspo_cut(
    log_ratio: Float[Tensor, "A"],
    advantages: Float[Tensor, "A"],
    segments: Int64[Tensor, "A"],
    num_segments: int,
    *,
    low: float,
    high: float,
    token_level: bool,
) -> Bool[Tensor, "A"]:
    """Tokens of the sequences whose gradient the clip cuts. Arguments as for ``gspo``."""
    ratio = _sequence_ratio(log_ratio.detach(), segments, num_segments, token_level)
    return _leaves_range(ratio, advantages, low, high)


def gmpo(
    log_ratio: Float[Tensor, "A"],
    advantages: Float[Tensor, "A"],
    segments: Int64[Tensor, "A"],
    num_segments: int,
    *,
    clip: float,
) -> Float[Tensor, "A"]:
    """Geometric mean over a sequence of its tokens' ratios, each clipped on the side that the advantage pushes to.

    L = -A exp(mean_t l_t),  l_t = min(log r_t, clip) where A > 0, max(log r_t, -clip) where A < 0

    Args:
        log_ratio, advantages: as for ``ppo_clip``; the advantages of a sequence are equal.
        segments, num_segments: which token belongs to which sequence.
        clip: bound of a token's log ratio.

    Returns: the sequence's loss at each of its tokens, for the sequence normaliser.
    Source: Zhao et al., arXiv:2507.20673 (GMPO). Oracle: tests/oracles/losses.py
    """
    bounded = clamped(log_ratio)
    one_sided = torch.where(advantages > 0, bounded.clamp(max=clip), bounded.clamp(min=-clip))
    ratio = segment_mean(one_sided, segments, num_segments).exp()
    return -at_tokens(ratio, segments, log_ratio.dtype) * advantages


def gmpo_cut(
    log_ratio: Float[Tensor, "A"],
    advantages: Float[Tensor, "A"],
    segments: Int64[Tensor, "A"],
    num_segments: int,
    *,
    clip: float,
) -> Bool[Tensor, "A"]:
    """Tokens whose own ratio is clipped, so that they have no gradient. Arguments as for ``gmpo``."""
    ratio = log_ratio.detach()
    return ((ratio > clip) & (advantages > 0)) | ((ratio < -clip) & (advantages < 0))


def topr(
    logprobs: Float[Tensor, "A"],
    log_ratio: Float[Tensor, "A"],
    advantages: Float[Tensor, "A"],
    segments: Int64[Tensor, "A"],
    num_segments: int,
    *,
    cap: float,
) -> Float[Tensor, "A"]:
    """Positive responses as in supervised learning, negative ones by the truncated ratio of the whole sequence.

    A >= 0: L = -A log pi;    A < 0: L = -sg(min(prod_t r_t, cap)) A log pi

    Args:
        logprobs: log pi of each action token; the gradient goes through it alone.
        log_ratio, advantages: as for ``ppo_clip``, without gradient. The sum over a sequence is clamped, too.
        segments, num_segments: which token belongs to which sequence.
        cap: upper bound of a negative sequence's ratio.

    Source: Le Roux et al., arXiv:2503.14286 (TOPR), section 3. Oracle: tests/oracles/losses.py
    """
    total = clamped(segment_sum(clamped(log_ratio.detach()), segments, num_segments))
    weights = torch.where(advantages < 0, at_tokens(total.exp().clamp(max=cap), segments, logprobs.dtype), 1.0)
    return _weighted_likelihood(weights, advantages, logprobs)


# -------------------------------------------------------------------------------------- a few tokens of high covariance
def clip_cov(
    log_ratio: Float[Tensor, "A"],
    advantages: Float[Tensor, "A"],
    selected: Bool[Tensor, "A"],
    *,
    low: float,
    high: float,
) -> Float[Tensor, "A"]:
    """``ppo_clip``, without the gradient of the selected tokens, whose value is kept.

    Args:
        log_ratio, advantages, low, high: as for ``ppo_clip``.
        selected: by ``clip_cov_selection``, over the whole optimizer step.

    Source: Cui et al., arXiv:2505.22617, eq. 10 and 11. Oracle: tests/oracles/losses.py
    """
    losses = ppo_clip(log_ratio, advantages, low=low, high=high, dual=None)
    return torch.where(selected, losses.detach(), losses)


def kl_cov(
    log_ratio: Float[Tensor, "A"], advantages: Float[Tensor, "A"], selected: Bool[Tensor, "A"], *, coef: float
) -> Float[Tensor, "A"]:
    """Ratio times advantage, with a KL to the old policy on the selected tokens.

    L = -r A, and where selected + coef KL(pi_old, pi), estimated at the sampled token as r - 1 - log r

    Args:
        log_ratio, advantages: as for ``ppo_clip``.
        selected: by ``kl_cov_selection``, over the whole optimizer step.
        coef: factor of the KL.

    Source: Cui et al., arXiv:2505.22617, eq. 12 and 13. Oracle: tests/oracles/losses.py
    """
    bounded = clamped(log_ratio)
    losses = -bounded.exp() * advantages
    return torch.where(selected, losses + coef * kl_k3(torch.zeros_like(bounded), bounded), losses)


def covariance(logprobs: Float64[Tensor, "N"], advantages: Float64[Tensor, "N"]) -> Float64[Tensor, "N"]:
    """Each token's part of the covariance of log-prob and advantage: (log pi - mean) (A - mean).

    Args: logprobs, advantages: of all action tokens of the optimizer step, over all ranks, on the host.

    Source: Cui et al., arXiv:2505.22617, eq. 9. Oracle: tests/oracles/losses.py
    """
    if not logprobs.numel():
        return torch.zeros_like(logprobs)
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def clip_cov_selection(
    cov: Float64[Tensor, "N"], *, share: float, low: float, high: float, seed: int
) -> Bool[Tensor, "N"]:
    """Tokens drawn uniformly among those with low < cov < high: floor(share N) of them, at least 1 if there is any.

    Args:
        cov: of ``covariance``.
        share: of all N tokens.
        low, high: range of the candidates, open.
        seed: of the draw.

    Source: Cui et al., arXiv:2505.22617, eq. 10. Oracle: tests/oracles/losses.py
    """
    candidates = ((cov > low) & (cov < high)).nonzero()[:, 0]
    number = min(max(1, math.floor(share * cov.numel())), candidates.numel())
    drawn = torch.randperm(candidates.numel(), generator=torch.Generator().manual_seed(seed))[:number]
    return _marked(candidates[drawn], cov)


def kl_cov_selection(cov: Float64[Tensor, "N"], *, share: float) -> Bool[Tensor, "N"]:
    """The floor(share N) tokens of highest covariance, at least 1 if there is any; of equal ones the earlier.

    Source: Cui et al., arXiv:2505.22617, eq. 12. Oracle: tests/oracles/losses.py
    """
    number = max(1, math.floor(share * cov.numel()))
    return _marked(cov.sort(descending=True, stable=True).indices[:number], cov)


def _marked(indices: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool).index_fill(0, indices, True)
