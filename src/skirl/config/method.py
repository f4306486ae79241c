"""The algorithm as one complete record. A preset fills in every field that the user leaves out."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from skirl.config.base import Frozen, by_name

__all__ = ["PRESETS", "MethodConfig"]


class GroupNorm(Frozen):
    """(score - mean) / (std + eps) over the group: GRPO, arXiv:2402.03300."""

    kind: Literal["group_norm"] = "group_norm"
    """Which advantage."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""
    ddof: Annotated[int, Field(ge=0, le=1)] = 1
    """1 divides the variance by G - 1, 0 by G."""
    tolerance: Annotated[float, Field(ge=0)] = 1e-8
    """A group whose scores differ by no more than this, relative to their size, gets exactly 0."""


class GroupMean(Frozen):
    """score - mean over the group, not divided: Dr. GRPO, arXiv:2503.20783."""

    kind: Literal["group_mean"]
    """Which advantage."""
    tolerance: Annotated[float, Field(ge=0)] = 1e-8
    """A group whose scores differ by no more than this, relative to their size, gets exactly 0."""


class PPOClip(Frozen):
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A): PPO, arXiv:1707.06347."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    """Which policy loss."""
    low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - low."""
    high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped above at 1 + high; 0.28 is DAPO's clip-higher, arXiv:2503.14476."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Dual clip, arXiv:1912.09729: for A < 0 the loss is at most -dual A; usual 3; null is off."""


class KLConfig(Frozen):
    """Penalty for leaving the frozen reference model."""

    where: Literal["loss", "reward"] = "loss"
    """loss: added to each token's loss. reward: taken off each token's reward before the advantage."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, with d = log policy - log reference of the sampled token."""
    coef: Annotated[float, Field(gt=0)] = 0.04
    """Factor beta; 0.04 in arXiv:2402.03300."""


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
    """The constant, usually rollout.sampling.max_new_tokens."""


Advantage = Annotated[GroupNorm | GroupMean, Field(discriminator="kind")]
Normalizer = Annotated[TokenNormalizer | SequenceNormalizer | ConstantNormalizer, Field(discriminator="kind")]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {
        "advantage": {"kind": "group_norm"},
        "policy_loss": {"kind": "ppo_clip", "low": 0.2, "high": 0.2},
        "kl": {"where": "loss", "estimator": "k3", "coef": 0.04},
        "normalizer": {"kind": "sequence"},
    },
    "dr_grpo": {
        "advantage": {"kind": "group_mean"},
        "policy_loss": {"kind": "ppo_clip", "low": 0.2, "high": 0.2},
        "kl": None,
        "normalizer": {"kind": "constant", "length": 256},
    },
}


class MethodConfig(Frozen):
    """A complete method: advantage, policy loss, KL, normaliser, and how often a batch is used."""

    preset: Literal["grpo", "dr_grpo"] = "grpo"
    """The published record that fills in what is left out below."""
    advantage: Annotated[Advantage, BeforeValidator(by_name)] = GroupNorm()
    """How scores become advantages."""
    policy_loss: Annotated[PPOClip, BeforeValidator(by_name)] = PPOClip()
    """Loss of an action token."""
    kl: KLConfig | None = KLConfig()
    """Penalty against the reference; null needs no reference model."""
    normalizer: Annotated[Normalizer, BeforeValidator(by_name)] = SequenceNormalizer(kind="sequence")
    """How token losses are weighted."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Factor of an entropy bonus; entropy is reported in any case."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over each batch."""
    mini_batches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps a pass; prompts are dealt out whole."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        written = cast(Mapping[str, Any], data)
        record = PRESETS.get(written.get("preset", "grpo"), {})  # an unknown preset is reported by its own field
        return merge(record, written)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` wins; mappings of the same kind are merged key by key."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if not isinstance(below, Mapping):
            result[key] = value
            continue
        low = cast(Mapping[str, Any], below)
        if isinstance(value, str) and low.get("kind") == value:
            continue
        high = cast(Mapping[str, Any], value) if isinstance(value, Mapping) else None
        same = high is not None and high.get("kind", low.get("kind")) == low.get("kind")
        result[key] = merge(low, high) if same and high is not None else value
    return result
