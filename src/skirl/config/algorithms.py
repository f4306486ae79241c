"""Variants of a method's parts, each with only its own fields: advantages, policy losses, corrections, normalisers.

One class a published variant; its docstring names the paper and its defaults are the paper's. A new variant is one
class here, one function in ``algorithms/``, one entry in docs/papers.md and one oracle.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from skirl.config.base import Frozen, by_name

__all__ = [
    "AdaptiveKLConfig",
    "Advantage",
    "Correction",
    "DynamicSamplingConfig",
    "KLConfig",
    "Normalizer",
    "PolicyLoss",
    "ShapingConfig",
]

Tolerance = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


# ----------------------------------------------------------------------------------------------------------- advantages
class GAE(Frozen):
    """Generalised advantage estimates of a critic, arXiv:1506.02438; PPO's, arXiv:1707.06347."""

    kind: Literal["gae"]
    """Which advantage."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount an action token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Between one-step (0) and Monte-Carlo (1) estimates."""
    whiten: bool = True
    """Shift and scale to mean 0, variance 1 over the action tokens of the batch."""


class Reinforce(Frozen):
    """Discounted sum of the rewards from a token on, not normalised: REINFORCE."""

    kind: Literal["reinforce"]
    """Which advantage."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount an action token."""


class ReinforcePP(Frozen):
    """Sum of the rewards from a token on, whitened over the batch's action tokens: REINFORCE++, arXiv:2501.03262."""

    kind: Literal["reinforce_pp"]
    """Which advantage."""


class ReinforcePPBaseline(Frozen):
    """score - group mean, whitened over the batch's action tokens: REINFORCE++-baseline, arXiv:2501.03262."""

    kind: Literal["reinforce_pp_baseline"]
    """Which advantage."""
    tolerance: Tolerance = 1e-8
    """A group whose scores differ by no more than this, relative to their size, gets exactly 0 before whitening."""


class LeaveOneOut(Frozen):
    """score - mean of the siblings' scores: RLOO, arXiv:2402.14740."""

    kind: Literal["leave_one_out"]
    """Which advantage."""
    tolerance: Tolerance = 1e-8
    """A group whose scores differ by no more than this, relative to their size, gets exactly 0."""


class GroupNorm(Frozen):
    """(score - mean) / (std + eps) over the group: GRPO, arXiv:2402.03300."""

    kind: Literal["group_norm"] = "group_norm"
    """Which advantage."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""
    ddof: Annotated[int, Field(ge=0, le=1)] = 1
    """1 divides the variance by G - 1, 0 by G."""
    tolerance: Tolerance = 1e-8
    """A group whose scores differ by no more than this, relative to their size, gets exactly 0."""


class GroupMean(Frozen):
    """score - mean over the group, not divided: Dr. GRPO, arXiv:2503.20783."""

    kind: Literal["group_mean"]
    """Which advantage."""
    tolerance: Tolerance = 1e-8
    """A group whose scores differ by no more than this, relative to their size, gets exactly 0."""


class MaxRL(Frozen):
    """(score - mean) / mean over the group, for scores >= 0: maximum-likelihood RL, arXiv:2602.02710."""

    kind: Literal["max_rl"]
    """Which advantage."""
    tolerance: Tolerance = 1e-8
    """A group whose scores differ by no more than this, relative to their size, gets exactly 0."""


class PassAtK(Frozen):
    """Credit for what a response adds to the chance that one of k is right: pass@k training, arXiv:2508.10751."""

    kind: Literal["pass_at_k"]
    """Which advantage."""
    k: Annotated[int, Field(ge=1)] = 4
    """Responses of which one must be right; no more than rollout.group_size."""
    threshold: float = 0.5
    """A response is right when its score is at least this."""


class OptimalBaseline(Frozen):
    """score - mean weighted by response length: OPO, arXiv:2505.23585."""

    kind: Literal["opo"]
    """Which advantage."""
    tolerance: Tolerance = 1e-8
    """A group whose scores differ by no more than this, relative to their size, gets exactly 0."""


class DecoupledNorm(Frozen):
    """Each score part normalised in its group, weighted sum, then normalised over the batch: GDPO, arXiv:2601.05242."""

    kind: Literal["gdpo"]
    """Which advantage."""
    weights: dict[str, float] = {}
    """Factor of each part's normalised values; 1 where not given. The reward's own weights do not count here."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to each standard deviation."""
    ddof: Annotated[int, Field(ge=0, le=1)] = 1
    """1 divides the variance of a group by G - 1, 0 by G."""
    tolerance: Tolerance = 1e-8
    """A part whose values in a group differ by no more than this, relative to their size, gives exactly 0."""


Advantage = Annotated[
    GAE
    | Reinforce
    | ReinforcePP
    | ReinforcePPBaseline
    | LeaveOneOut
    | GroupNorm
    | GroupMean
    | MaxRL
    | PassAtK
    | OptimalBaseline
    | DecoupledNorm,
    Field(discriminator="kind"),
]


# -------------------------------------------------------------------------------------------------------- policy losses
class PPOClip(Frozen):
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A): PPO, arXiv:1707.06347."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    """Which policy loss."""
    low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - low."""
    high: Positive = 0.2
    """The ratio is clipped above at 1 + high; 0.28 is DAPO's clip-higher, arXiv:2503.14476."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Dual clip, arXiv:1912.09729: for A < 0 the loss is at most -dual A; usual 3; null is off."""


class GSPO(Frozen):
    """PPO's clip on the geometric mean of a response's ratios: GSPO, arXiv:2507.18071."""

    kind: Literal["gspo"]
    """Which policy loss."""
    low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The sequence ratio is clipped below at 1 - low."""
    high: Positive = 4e-4
    """The sequence ratio is clipped above at 1 + high."""
    token_level: bool = False
    """GSPO-token: value of the sequence ratio, gradient of each token's own; allows advantages that vary by token."""


class CISPO(Frozen):
    """-sg(clip(ratio)) A log pi: clipped importance weights, no token loses its gradient: CISPO, arXiv:2506.13585."""

    kind: Literal["cispo"]
    """Which policy loss."""
    low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The weight is clipped below at 1 - low; null is off, as in the paper."""
    high: Positive = 4.0
    """The weight is clipped above at 1 + high; the paper tunes it and names no value."""


class SAPO(Frozen):
    """-f(ratio) A with a sigmoid gate instead of a clip: SAPO, arXiv:2511.20347."""

    kind: Literal["sapo"]
    """Which policy loss."""
    tau_positive: Positive = 1.0
    """Sharpness of the gate where A > 0."""
    tau_negative: Positive = 1.05
    """Sharpness of the gate where A <= 0."""


class GMPO(Frozen):
    """Geometric mean over a response of the ratios, each clipped in log space: GMPO, arXiv:2507.20673."""

    kind: Literal["gmpo"]
    """Which policy loss."""
    clip: Positive = 0.4
    """Log ratios are clipped at +-clip on the side that the advantage pushes to."""


class TOPR(Frozen):
    """Positive responses as in supervised learning, negative ones by truncated ratio: TOPR, arXiv:2503.14286."""

    kind: Literal["topr"]
    """Which policy loss."""
    cap: Positive = 1.0
    """Upper bound of a negative response's ratio."""


class ClipCov(Frozen):
    """PPO's clip without the gradient of a few tokens of high covariance: Clip-Cov, arXiv:2505.22617."""

    kind: Literal["clip_cov"]
    """Which policy loss."""
    low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The ratio is clipped below at 1 - low; 1, as in the authors' runs, clips nothing."""
    high: Positive = 1.0
    """The ratio is clipped above at 1 + high; wide in the authors' runs, for extreme tokens alone."""
    share: Annotated[float, Field(gt=0, lt=1)] = 2e-4
    """Share of the optimizer step's action tokens whose gradient is cut."""
    cov_low: float = 1.0
    """Tokens are drawn from those whose covariance is above this ..."""
    cov_high: float = 5.0
    """... and below this."""


class KLCov(Frozen):
    """Ratio times advantage, with a KL to the old policy on tokens of highest covariance: KL-Cov, arXiv:2505.22617."""

    kind: Literal["kl_cov"]
    """Which policy loss."""
    share: Annotated[float, Field(gt=0, lt=1)] = 2e-3
    """Share of the optimizer step's action tokens that pay; 2e-4 to 2e-3 in the paper."""
    coef: Positive = 1.0
    """Factor of the KL."""


class DPPO(Frozen):
    """Ratio times advantage, cut where the policies' divergence leaves a trust region: DPPO, arXiv:2602.04879."""

    kind: Literal["dppo"]
    """Which policy loss."""
    divergence: Literal["tv", "kl"] = "tv"
    """Of the two-outcome distributions (this token, any other): total variation, or KL(old, policy)."""
    threshold: Positive = 0.15
    """Divergence above which a token that moves further away loses its gradient."""


PolicyLoss = Annotated[
    PPOClip | GSPO | CISPO | SAPO | GMPO | TOPR | ClipCov | KLCov | DPPO, Field(discriminator="kind")
]


# ------------------------------------------------------------------------------------------------------------------- KL
class AdaptiveKLConfig(Frozen):
    """A controller that holds the KL near a target: arXiv:1909.08593, section 2.2."""

    target: Positive = 6.0
    """KL per response that the factor is steered to, nats."""
    horizon: Annotated[int, Field(ge=1)] = 10000
    """Responses over which the factor follows."""


class KLConfig(Frozen):
    """Penalty for leaving the frozen reference model."""

    where: Literal["loss", "reward"] = "loss"
    """loss: added to each token's loss. reward: taken off each token's reward before the advantage."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, with d = log policy - log reference of the sampled token."""
    coef: Positive = 0.04
    """Factor beta; 0.04 in arXiv:2402.03300. Where the controller is on, its first value."""
    adaptive: AdaptiveKLConfig | None = None
    """Move the factor towards a target KL; null keeps it."""


# ---------------------------------------------------------------------------------------------------------- corrections
class TIS(Frozen):
    """Truncated importance weights, min(w, high): arXiv:2510.18855 and the practice of mixed engines."""

    kind: Literal["tis"]
    """Which correction."""
    low: Annotated[float, Field(ge=0)] = 0.0
    """Weights are raised to this."""
    high: Positive = 2.0
    """Weights are cut to this."""


class IcePop(Frozen):
    """Tokens whose weight lies outside a band are left out: IcePop, arXiv:2510.18855."""

    kind: Literal["icepop"]
    """Which correction."""
    low: Annotated[float, Field(ge=0)] = 0.5
    """Lower border."""
    high: Positive = 5.0
    """Upper border."""


class SequenceMask(Frozen):
    """Responses whose geometric mean weight lies outside a band are left out; the rest is weighted as in tis."""

    kind: Literal["sequence_mask"]
    """Which correction."""
    low: Annotated[float, Field(ge=0)] = 0.99
    """Lower border of the geometric mean."""
    high: Positive = 1.01
    """Upper border of the geometric mean."""
    cap: Positive = 2.0
    """Token weights are cut to this."""


class SequenceIS(Frozen):
    """One weight a response, the product of its tokens' weights, truncated."""

    kind: Literal["sequence_is"]
    """Which correction."""
    cap: Positive = 2.0
    """Weights are cut to this."""


Correction = Annotated[TIS | IcePop | SequenceMask | SequenceIS, Field(discriminator="kind")]


# ---------------------------------------------------------------------------------------------------------- normalisers
class TokenNormalizer(Frozen):
    """Every action token of the optimizer step weighs the same: DAPO, arXiv:2503.14476."""

    kind: Literal["token"]
    """Which normaliser."""


class SequenceNormalizer(Frozen):
    """Mean over a response's tokens, then over responses: GRPO, arXiv:2402.03300."""

    kind: Literal["sequence"]
    """Which normaliser."""


class ConstantNormalizer(Frozen):
    """1 / (responses x length), so that long responses weigh more by their length: Dr. GRPO, arXiv:2503.20783."""

    kind: Literal["constant"]
    """Which normaliser."""
    length: Annotated[int, Field(ge=1)]
    """The constant, usually rollout.sampling.max_new_tokens; 1 sums over tokens (RLOO: a response is one action)."""


Normalizer = Annotated[TokenNormalizer | SequenceNormalizer | ConstantNormalizer, Field(discriminator="kind")]


# -------------------------------------------------------------------------------------------------------------- shaping
class OverlongConfig(Frozen):
    """Soft punishment of responses that come near their budget: DAPO, arXiv:2503.14476, eq. 13."""

    buffer_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Last share of the budget in which the penalty grows from 0 to its full size; 4,096 of 20,480 in the paper."""
    penalty: Positive = 1.0
    """Full size, taken off the score of a response that uses its whole budget."""


class TruncationConfig(Frozen):
    """What a cut-off response is worth: ProRL, arXiv:2505.24864."""

    factor: Annotated[float, Field(ge=0, le=1)] | None = None
    """Its score is multiplied by this."""
    score: float | None = None
    """Its score is this, whatever it was."""


class LengthConfig(Frozen):
    """Reward for being shorter than the siblings: Kimi k1.5, arXiv:2501.12599, section 2.3.3."""

    coef: Positive = 1.0
    """Factor of the length reward: 0.5 - (length - shortest) / (longest - shortest); at most 0 for wrong responses."""
    threshold: float = 0.5
    """A response is right when its score is at least this."""


class ShapingConfig(Frozen):
    """Changes to raw scores before any baseline, in this order: clip range, truncation, overlong, length."""

    clip_range: tuple[float, float] | None = None
    """Raw scores are clipped to [low, high]."""
    truncation: TruncationConfig | None = None
    """Scores of responses that the budget cut off."""
    overlong: OverlongConfig | None = None
    """Penalty near the budget."""
    length: LengthConfig | None = None
    """Reward for short responses."""


# ----------------------------------------------------------------------------------------------------- dynamic sampling
class MeanRange(Frozen):
    """Keep groups whose mean score lies strictly inside a range: DAPO, arXiv:2503.14476, eq. 11."""

    kind: Literal["mean_range"]
    """Which rule."""
    low: float = 0.0
    """Groups with a mean of this or less are dropped."""
    high: float = 1.0
    """Groups with a mean of this or more are dropped."""


class Spread(Frozen):
    """Keep groups whose scores differ by more than a bound; for graded scores."""

    kind: Literal["spread"]
    """Which rule."""
    min_std: Annotated[float, Field(ge=0)] = 0.0
    """Groups with a standard deviation of this or less are dropped."""


Keep = Annotated[MeanRange | Spread, Field(discriminator="kind")]


class DynamicSamplingConfig(Frozen):
    """Groups without signal are replaced by those of further prompts until the step is full."""

    keep: Annotated[Keep, BeforeValidator(by_name)] = Spread(kind="spread")
    """Which groups are trained on; judged on raw scores."""
    max_rounds: Annotated[int, Field(ge=1)] = 10
    """Rounds of sampling a step; after them the step trains on what it has. Accepted groups are never lost."""
